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


def wandbs_own() -> dict:
    """What wandb's own variables say, which would not count beside options. A sweep gives the id of
    a run that is there already."""
    names = dict(project="WANDB_PROJECT", name="WANDB_NAME", id="WANDB_RUN_ID")
    own = {option: os.environ[name] for option, name in names.items() if os.environ.get(name)}
    if "id" in own:
        own["resume"] = os.environ.get("WANDB_RESUME") or "allow"
    return own


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
            options |= dict(name=name, id=id) | wandbs_own()
            id = options["id"]
            self.module.init(**options)
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
