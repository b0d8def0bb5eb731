"""Sends metrics to wandb or trackio under TRL's names: train/reward, eval/accuracy.

A new run is a new run there, too. A resume continues that run, whose id is in dashboard.json of the
run's directory. In wandb a run that crashed is shown as crashed.
"""

import importlib
import json
import os
import shutil
import uuid
from pathlib import Path


def wandbs_own() -> dict:
    """Options from wandb's environment variables, which ours would override. A sweep sets the id of
    an existing run."""
    names = dict(project="WANDB_PROJECT", name="WANDB_NAME", id="WANDB_RUN_ID")
    own = {option: os.environ[name] for option, name in names.items() if os.environ.get(name)}
    if "id" in own:
        own["resume"] = os.environ.get("WANDB_RESUME") or "allow"
    return own


class Dashboard:
    """kind: "wandb" or "trackio". config: the settings to show."""

    def __init__(self, kind: str, out_dir: str, config: dict):
        try:
            self.open(kind, out_dir, config)
        except (Exception, SystemExit):  # such as wandb without a key
            if os.listdir(out_dir) == [".lock"]:  # the run does not start
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
        if self.counts_steps:  # trackio finds a run by its name, so the name has the id
            self.module.init(name=f"{name}-{id}", **options)
        else:
            options |= dict(name=name, id=id) | wandbs_own()
            id = options["id"]
            self.module.init(**options)
            # wandb drops metrics with a step below its own count of wandb.log calls, which a reward
            # function may make, too. So we pass no step, and the x-axis is a metric.
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
        """error_type: the type of the error that ended the run, or None. If this fails, as without
        a network, the run does not fail."""
        crashed = error_type is not None and not self.counts_steps
        options = dict(exit_code=1) if crashed else {}
        try:
            self.module.finish(**options)
        except Exception as error:
            print(f"the dashboard does not know that the run has ended: {error!r}")
