"""Dashboards: a run's metrics in TensorBoard, wandb or trackio, under TRL's names."""

import importlib
import importlib.util
import os

from harness.curves import is_number
from harness.flags import need


def check_installed(cfg):
    """Raises ConfigError if the package of --report_to is not there."""
    package = cfg.report_to
    if package != "none":
        installed = importlib.util.find_spec(package) is not None
        need(installed, cfg, "report_to", f"not installed; pip install {package}")


class NoDashboard:
    """--report_to none. The others have the same methods."""

    def __init__(self, cfg, first):
        """first: the last step before this start; 0: none."""

    def send(self, step, values):
        """Sends the metrics of a step or an eval."""

    def finish(self):
        """Waits until everything has been sent."""


class TensorBoard:
    def __init__(self, cfg, first):
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        # purge_step: a resumed run makes later steps again; without it they would be shown twice
        self.writer = tensorboard.SummaryWriter(cfg.out_dir, purge_step=first + 1, flush_secs=10)

    def send(self, step, values):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self):
        self.writer.close()


class WandbOrTrackio:
    """These two packages have the same interface."""

    def __init__(self, cfg, first):
        os.environ.setdefault("WANDB_DIR", cfg.out_dir)
        package = importlib.import_module(cfg.report_to)
        name = os.path.basename(cfg.out_dir)
        resume = "never"
        if cfg.resume == "latest":
            resume = "allow"
        self.run = package.init(project="grpo", name=name, config=vars(cfg), resume=resume)

    def send(self, step, values):
        self.run.log(values, step=step)

    def finish(self):
        self.run.finish()


def scalars(metrics):
    """The metrics that are numbers, as train/NAME, or eval/NAME for those of an eval."""
    values = {}
    for name, value in metrics.items():
        if is_number(value):
            name = f"train/{name}".replace("train/eval_", "eval/")
            values[name] = value
    return values


DASHBOARDS = {  # by --report_to
    "none": NoDashboard,
    "tensorboard": TensorBoard,
    "wandb": WandbOrTrackio,
    "trackio": WandbOrTrackio,
}
