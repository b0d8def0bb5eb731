"""Curves: reads the logs of runs and draws their metrics. Needs neither torch nor numpy."""

import json
import os

COLORS = [  # Okabe and Ito's, and grey: distinct for the colour-blind
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
        "Length (dotted: eval)",
        "tokens a completion",
        [("completions/mean_length", "train", "solid"), ("eval_length", "eval", "dotted")],
    ),
    (
        "KL to reference (dashed: k3)",
        "nats per token",
        [("kl_k1", "k1", "solid"), ("kl", "k3", "dashed")],
    ),
    ("Gradient norm", "L2, before clipping", [("grad_norm", "", "solid")]),
    (
        "Signal (dashed: A = 0)",
        "mean |A|, share",
        [("advantage_abs", "|A|", "solid"), ("frac_reward_zero_std", "A = 0", "dashed")],
    ),
]
SMOOTHED = "faint: every step;  bold: mean over 5 % of the run, at most 101 steps"
SIGNAL = "A: advantage;  A = 0: groups of equal rewards"
STYLE = {
    "font.size": 15,
    "text.usetex": False,  # a matplotlibrc may ask for it without LaTeX
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
    "figure.constrained_layout.w_pad": 0.12,
}


# -- logs


def read_jsonl(path):
    """The rows of a log. Skips incomplete lines: the run may have been killed."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def is_number(value):
    """Neither NaN nor infinite, and of a size whose sums matplotlib can hold."""
    return isinstance(value, (int, float)) and abs(value) < 1e100


def visible(text):
    """Escapes control, right-to-left and unencodable characters: completions are untrusted."""
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


def smooth(values):
    """The mean of about 5 % of the run, at most 101 values, around each value; less at the ends."""
    half = min(len(values) // 40, 50)
    means = []
    for i in range(len(values)):
        window = values[max(0, i - half) : i + half + 1]
        means.append(sum(window) / len(window))
    return means


def read_panels(out_dirs):
    """The panels of the picture and of the page. Raises ValueError if a run has no metrics."""
    logs = []
    for out_dir in out_dirs:
        path = os.path.join(out_dir, "metrics.jsonl")
        logs.append(read_jsonl(path))
        if not logs[-1]:
            raise ValueError(f"{path} has no metrics yet")
    return [make_panel(title, unit, metrics, logs) for title, unit, metrics in PANELS]


def make_panel(title, unit, metrics, logs):
    """A panel with a curve for each run and metric, and the range of values that it shows."""
    curves = []
    for run, rows in enumerate(logs):
        for name, label, style in metrics:
            curve = make_curve(rows, name)
            if curve["steps"]:
                color = COLORS[run % len(COLORS)]
                curves.append(dict(color=color, label=label, style=style, **curve))

    values = [0.0]  # which every panel shows
    for curve in curves:
        values += curve["values"]
    sizes = sorted(abs(value) for value in values if value != 0)
    if not sizes:
        sizes = [0.0]
    limit = 3 * sizes[len(sizes) * 19 // 20]  # cut spikes off: they would flatten the rest
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


# -- the picture


def draw(out_dirs, path):
    """Draws one picture of six panels, with a colour for each run. May raise any exception."""
    # Figure and not pyplot: no backend to choose, no window, no state left behind in the trainer
    import matplotlib
    from matplotlib.figure import Figure

    panels = read_panels(out_dirs)
    names = [visible(out_dir)[-40:] for out_dir in out_dirs]
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
        figure.supxlabel(explanation(panels), fontsize=14, color="#666666")
        figure.savefig(path)


def explanation(panels):
    """What stands below the picture. A short run is not smoothed and has no faint lines."""
    for panel in panels:
        for curve in panel["curves"]:
            if curve["smooth"] != curve["values"]:
                return f"{SMOOTHED};  {SIGNAL}"
    return SIGNAL


def draw_panel(ax, title, unit, low, high, curves):
    for c in curves:
        line = dict(color=c["color"], ls=c["style"], lw=2.5)
        if c["dots"]:
            line["marker"] = "o"
        else:
            ax.plot(c["steps"], c["values"], color=c["color"], lw=1, alpha=0.3)
        if c["errors"]:
            line.update(yerr=c["errors"], capsize=4, elinewidth=1.5)
        ax.errorbar(c["steps"], c["smooth"], **line)
    if not curves:
        unit = "not logged"
    ax.set(title=title, xlabel="step", ylabel=unit)
    ax.locator_params("x", nbins=6, integer=True)
    ax.tick_params(labelbottom=True)
    top = 1.05 * high
    if high - low < 1e-9:  # an axis needs a height
        top = 1
    ax.set_ylim(1.05 * low, top)
