"""Dashboards: a run's metrics in TensorBoard, wandb or trackio, under TRL's names."""

import importlib
import importlib.util
import os

from harness.curves import is_number
from harness.flags import need

PACKAGES = {  # of each --report_to
    "none": [],
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb", "pandas"],
    "trackio": ["trackio", "pandas"],
}
TABLE_COLUMNS = ("step", "prompt", "completion", "advantage")


def check_installed(cfg) -> None:
    """Raises ConfigError if --report_to needs a package that is not there."""
    packages = PACKAGES[cfg.report_to]
    installed = all(is_installed(package) for package in packages)
    need(installed, cfg, "report_to", f"not installed; pip install {' '.join(packages)}")


def is_installed(package: str) -> bool:
    """A folder with that name is no package: wandb makes one in the working directory."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class Dashboard:
    """--report_to none, and what the others share."""

    def __init__(self, cfg, first):
        """first: the step that the run begins or resumes after."""

    def send(self, metrics, rows):
        """Sends the metrics of a step or an eval, and rows of completions.jsonl."""

    def finish(self):
        """Waits until everything has been sent."""


class TensorBoard(Dashboard):
    """Scalars only: TensorBoard has no tables."""

    def __init__(self, cfg, first):
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        # purge_step: a resumed run makes later steps again; without it they would be shown twice
        self.writer = tensorboard.SummaryWriter(cfg.out_dir, purge_step=first + 1, flush_secs=10)

    def send(self, metrics, rows):
        for name, value in scalars(metrics).items():
            self.writer.add_scalar(name, value, metrics["step"])

    def finish(self):
        self.writer.close()


class TableDashboard(Dashboard):
    """wandb and trackio, which have the same interface: scalars, and samples as a table."""

    def __init__(self, cfg, first):
        os.environ.setdefault("WANDB_DIR", cfg.out_dir)
        self.package = importlib.import_module(cfg.report_to)
        self.pandas = importlib.import_module("pandas")
        name = os.path.basename(cfg.out_dir)
        resume = "never"
        if cfg.resume == "latest":
            resume = "allow"
        self.run = self.package.init(project="grpo", name=name, config=vars(cfg), resume=resume)

    def send(self, metrics, rows):
        values = scalars(metrics)
        if rows:
            frame = self.pandas.DataFrame([table_row(row) for row in rows])
            values["completions"] = self.package.Table(dataframe=frame)
        self.run.log(values, step=metrics["step"])

    def finish(self):
        self.run.finish()


def scalars(metrics: dict) -> dict:
    """The metrics that are numbers, as train/NAME, or eval/NAME for those of an eval."""
    values = {}
    for name, value in metrics.items():
        if not is_number(value):
            continue
        if name.startswith("eval_"):
            values["eval/" + name.removeprefix("eval_")] = value
        else:
            values["train/" + name] = value
    return values


def table_row(row: dict) -> dict:
    """A row of completions.jsonl as a flat one: a column for each reward and each logged value."""
    columns = {name: row[name] for name in TABLE_COLUMNS}
    return columns | row["parts"] | row.get("logged", {})


DASHBOARDS = {  # by --report_to
    "none": Dashboard,
    "tensorboard": TensorBoard,
    "wandb": TableDashboard,
    "trackio": TableDashboard,
}
