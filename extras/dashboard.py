"""A run's metrics on wandb or trackio, under TRL's names: train/reward, eval/accuracy.

A new run is a new one there, and a resumed run goes on in its own: the file dashboard.json of the
run's directory has the id. A run that crashed is shown as crashed.
"""

import importlib
import json
import os
import shutil
import uuid
from pathlib import Path


class Dashboard:
    """kind: "wandb" or "trackio". config: what to show as the run's settings."""

    def __init__(self, kind: str, out_dir: str, config: dict):
        try:
            self.open(kind, out_dir, config)
        except (Exception, SystemExit):  # wandb without a key
            if os.listdir(out_dir) == [".lock"]:  # of a run that does not begin
                shutil.rmtree(out_dir)
            raise

    def open(self, kind: str, out_dir: str, config: dict) -> None:
        self.module = importlib.import_module(kind)
        self.counts_steps = not hasattr(self.module, "define_metric")
        file = Path(out_dir, "dashboard.json")
        known = json.loads(file.read_text()) if file.exists() else {}
        id = known.get(kind, uuid.uuid4().hex[:8])
        name = os.path.basename(out_dir)
        options = dict(project="grpo", config=config, resume="allow" if kind in known else "never")
        if self.counts_steps:  # trackio finds a run by its name, so that has the id
            self.module.init(name=f"{name}-{id}", **options)
        else:
            self.module.init(name=name, id=id, **options)
            # wandb drops what comes with a step below its own, which counts each wandb.log, those
            # of a reward function, too. So its x-axis is a metric, and nothing comes with a step.
            for names in ("train/*", "eval/*"):
                self.module.define_metric(names, step_metric="train/step")
        file.write_text(json.dumps(known | {kind: id}))

    def log(self, metrics: dict) -> None:
        named = {f"train/{k}".replace("train/eval_", "eval/"): v for k, v in metrics.items()}
        if self.counts_steps:
            self.module.log(named, step=metrics["step"])
        else:
            self.module.log(named)

    def close(self, error_type, *_) -> None:
        """With the type of the error that ends the run, or None. Without a network it fails, as log
        does, and the run has ended all the same."""
        crashed = error_type is not None and not self.counts_steps
        options = dict(exit_code=1) if crashed else {}
        try:
            self.module.finish(**options)
        except Exception as error:
            print(f"the dashboard does not know that the run has ended: {error!r}")
