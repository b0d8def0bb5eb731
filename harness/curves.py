"""Curves: reads the logs of runs and draws their metrics. Needs neither torch nor numpy."""

import itertools
import json
import os

COLORS = [  # of Okabe and Ito, and grey: the colour-blind can tell them apart
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#808080",
]
PANELS = [  # title, unit, and of each curve: name in metrics.jsonl, label, line style
    ("Reward", "mean of the samples", [("reward", "", "solid")]),
    ("Eval accuracy", "fraction correct ± 1 s.e.", [("eval_accuracy", "", "solid")]),
    (
        "Length",
        "tokens a completion",
        [("completions/mean_length", "train", "solid"), ("eval_length", "eval", "dotted")],
    ),
    ("KL to reference", "nats per token", [("kl_k1", "k1", "solid"), ("kl", "k3", "dashed")]),
    ("Gradient norm", "L2, before clipping", [("grad_norm", "", "solid")]),
    (
        "Signal",
        "mean |A|, share",
        [("advantage_abs", "|A|", "solid"), ("frac_reward_zero_std", "A = 0", "dashed")],
    ),
]
NOTE = (
    "faint: every step;  bold: mean over 5 % of the run;  "
    "A: advantage;  A = 0: groups of equal rewards"
)
STYLE = {
    "font.size": 15,
    "text.usetex": False,  # a matplotlibrc may ask for it where there is no LaTeX
    "text.parse_math": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 18,
    "axes.titleweight": "bold",
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.handlelength": 1.6,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 0.9,
    "figure.constrained_layout.w_pad": 0.12,
}


# -- logs


def read_jsonl(path):
    """The rows of a log. Skips lines that are not whole: the run may have been killed in one."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and is_step(row.get("step")):
                rows.append(row)
    return rows


def is_step(value):
    """From 2**53 on a float, and so an axis, cannot tell two steps apart."""
    return isinstance(value, int) and 0 <= value < 2**53


def is_number(value):
    """Neither NaN nor infinite, and of a size whose sums matplotlib can hold."""
    if not isinstance(value, (int, float)):
        return False
    return value == 0 or 1e-100 < abs(value) < 1e100


def visible(text):
    """Escapes what would move the cursor, turn the text or not encode: completions are hostile."""
    shown = ""
    for character in text:
        if character.isprintable():
            shown += character
        else:
            shown += ascii(character)[1:-1]
    return shown


# -- from the logs to panels


def series(rows, name):
    """{step: value} of one metric, by step. If a step has two lines, the later one counts."""
    values = {row["step"]: float(row[name]) for row in rows if is_number(row.get(name))}
    return dict(sorted(values.items()))


UNIT = 2**400  # every value that is_number() lets through is a whole number of 1 / UNIT


def smooth(values):
    """The mean of about 5 % of the run around each value, less where the run begins and ends.

    One pass, with sums of whole numbers: they are exact, while a float sum would lose small values
    for good after one spike.
    """
    half = len(values) // 40
    sums = list(itertools.accumulate((int(value * UNIT) for value in values), initial=0))
    means = []
    for i in range(len(values)):
        start = max(0, i - half)
        end = min(len(values), i + half + 1)
        means.append((sums[end] - sums[start]) / ((end - start) * UNIT))
    return means


def read_panels(out_dirs):
    """The panels of the picture and of the page. Raises ValueError if a run has no metrics."""
    paths = [os.path.join(out_dir, "metrics.jsonl") for out_dir in out_dirs]
    logs = [read_jsonl(path) for path in paths]
    panels = [make_panel(title, unit, metrics, logs) for title, unit, metrics in PANELS]
    drawn = {curve["run"] for panel in panels for curve in panel["curves"]}
    for run, path in enumerate(paths):
        if run not in drawn:
            why = "is the run of another one, or at its first step?"
            raise ValueError(f"{path} has no metrics of this version: {why}")
    return panels


def make_panel(title, unit, metrics, logs):
    """A panel with a curve for each run and metric, and the range of values that it shows."""
    curves = []
    for run, rows in enumerate(logs):
        for name, label, style in metrics:
            curve = make_curve(rows, name)
            if curve["steps"]:
                color = COLORS[run % len(COLORS)]
                curves.append(dict(run=run, color=color, label=label, style=style, **curve))

    values = [0.0]  # which every panel shows
    for curve in curves:
        values += curve["values"]
    sizes = sorted(abs(value) for value in values if value != 0)
    if not sizes:
        sizes = [0.0]
    limit = 3 * sizes[len(sizes) * 19 // 20]  # a spike leaves the panel, or it flattens the rest
    if sizes[-1] > limit:
        unit = f"{unit},\nspikes to {sizes[-1]:.3g}"
    low = max(min(values), -limit)
    high = min(max(values), limit)
    return dict(title=title, unit=unit, low=low, high=high, curves=curves)


def make_curve(rows, name):
    """The points of a curve. Evals are few: they are dots, and not smoothed."""
    points = series(rows, name)
    values = list(points.values())
    curve = dict(steps=list(points), values=values, smooth=values, dots=True, errors=[])
    if len(points) > 1 and not name.startswith("eval_"):
        curve |= dict(smooth=smooth(values), dots=False)
    if name == "eval_accuracy":
        stderr = series(rows, "eval_stderr")
        curve["errors"] = [abs(stderr.get(step, 0)) for step in points]
    return curve


def run_names(out_dirs):
    """The directories as seen from the one that they share."""
    parent = os.path.commonpath([os.path.dirname(os.path.abspath(d)) for d in out_dirs])
    return [visible(os.path.relpath(d, parent))[-40:] for d in out_dirs]


# -- the picture


def draw(out_dirs, path):
    """Draws one picture of six panels, with a colour for each run. May raise any exception."""
    # Figure and not pyplot: no backend to choose, no window, no state left behind in the trainer
    import matplotlib
    from matplotlib.figure import Figure

    panels = read_panels(out_dirs)
    names = run_names(out_dirs)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(16, 9), dpi=100, layout="constrained")
        axes = figure.subplots(2, 3, sharex=True)
        for ax, panel in zip(axes.flat, panels, strict=True):
            draw_panel(ax, **panel)
        lines = []
        for run in range(len(names)):
            lines += ax.plot([], [], color=COLORS[run % len(COLORS)], lw=4)
        columns = min(len(names), 3)
        figure.legend(lines, names, loc="outside upper center", ncols=columns, fontsize=16)
        figure.supxlabel(NOTE, fontsize=14, color="#666666")
        figure.savefig(path)


def draw_panel(ax, title, unit, low, high, curves):
    styles = {}
    for c in curves:
        styles[c["label"]] = c["style"]
        line = dict(color=c["color"], ls=c["style"], lw=2.5)
        if c["dots"]:
            line["marker"] = "o"
        else:
            ax.plot(c["steps"], c["values"], color=c["color"], lw=1, alpha=0.3)
        if c["errors"]:
            line |= dict(yerr=c["errors"], capsize=4, elinewidth=1.5)
        ax.errorbar(c["steps"], c["smooth"], **line)

    if len(styles) > 1:  # beside the title, where no curve can be
        lines = []
        for style in styles.values():
            lines += ax.plot([], [], ls=style, color="#444444", lw=2)
        ax.legend(lines, styles, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2)
    if not curves:
        unit = "not logged"
    ax.set(title=title, xlabel="step", ylabel=unit)
    ax.locator_params("x", nbins=6, integer=True)
    ax.tick_params(labelbottom=True)
    top = 1.05 * high
    if low == high:  # an axis needs a height
        top += 1
    ax.set_ylim(1.05 * low, top)
