"""
Look at what a run left in its out_dir. Pictures need matplotlib, tables rich.

python view.py                                  # curves of the newest run here (out, out.1, ...): curves.png in it
python view.py out_a out_b --out picture.png    # several runs in one picture
python view.py out --step 40                    # the completions of step 40 (no number: the last step)
"""

import argparse
import glob
import json
import math
import os
import signal
import sys

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito
PANELS = [  # title, y label, then (key, label, format) for each curve; "o" is for what only evals have
    ("Reward", "mean of the samples", [("reward", "", "-")]),
    ("Eval accuracy", "fraction correct ± 1 s.e.", [("eval_accuracy", "", "o-")]),
    ("Length", "tokens a completion", [("completions/mean_length", "train", "-"), ("eval_length", "eval", "o:")]),
    ("KL to reference", "nats per token", [("kl_k1", "k1", "-"), ("kl", "k3", "--")]),
    ("Gradient norm", "L2, before clipping", [("grad_norm", "", "-")]),
    ("Signal", "mean |A|, share of groups", [("advantage_abs", "|A|", "-"), ("frac_reward_zero_std", "A = 0", "--")]),
]
STYLE = {"font.size": 15, "axes.grid": True, "grid.color": "#e6e6e6", "axes.axisbelow": True, "legend.frameon": False}
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": 18, "axes.titleweight": "bold", "text.parse_math": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.w_pad": 0.12}
STYLE |= {"legend.borderpad": 0, "legend.handlelength": 1.6, "legend.handletextpad": 0.4, "legend.columnspacing": 0.9}
NOTE = "faint: every step;  bold: mean over 5 % of the run;  A: advantage;  A = 0: groups of equal rewards"
OLD_NAMES = {"completions/mean_length": "completion_length", "kl": "kl_k3", "frac_reward_zero_std": "frac_zero_std"}


def read_jsonl(path):
    """The rows of a log. A line that is not whole (the run was killed while it wrote) is skipped."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int) and 0 <= row["step"] < 2**53:
                rows.append(row)  # beyond 2**53 a float, and so an axis, cannot tell two steps apart
    return rows


def is_number(value):
    """Not NaN, not infinite, and of a size whose sums matplotlib can hold."""
    return isinstance(value, (int, float)) and (value == 0 or 1e-100 < abs(value) < 1e100)


def series(rows, key):
    """{step: value} of one key, without the steps that do not have it. Of two lines of a step the later one holds."""
    found = [(row["step"], row.get(key, row.get(OLD_NAMES.get(key)))) for row in rows]
    return dict(sorted({step: float(value) for step, value in found if is_number(value)}.items()))


def visible(text):
    """Completions are hostile data: what would move the cursor, turn the direction of the text or not encode
    (newlines, escapes, marks without width, lone surrogates) is shown as its escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def smooth(values):
    """Centred mean over about 5 % of the run; at the ends, over what there is of the window."""
    half = len(values) // 40
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


def draw(out_dirs, path):
    """One picture of six panels, a colour for each run."""
    # Figure and not pyplot: no backend to choose, no window, no state left behind in the trainer
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    runs = [read_jsonl(os.path.join(d, "metrics.jsonl")) for d in out_dirs]
    if not all(runs):
        raise ValueError(f"no whole line in {out_dirs[runs.index([])]}/metrics.jsonl")
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(16, 9), dpi=100, layout="constrained")
        for ax, (title, ylabel, curves) in zip(fig.subplots(2, 3, sharex=True).flat, PANELS, strict=True):
            ax.set(title=title, xlabel="step", ylabel=ylabel)
            draw_panel(ax, curves, runs)
            if len(curves) > 1:  # beside the title, where no curve can be
                keys = [Line2D([], [], ls=s.strip("o"), marker=s[: "o" in s], lw=2, c="#444444") for *_, s in curves]
                ax.legend(keys, [label for _, label, _ in curves], loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2)
        parent = os.path.commonpath([os.path.dirname(os.path.abspath(d)) for d in out_dirs])
        names = [visible(os.path.relpath(d, parent))[-40:] for d in out_dirs]
        keys = [Line2D([], [], color=COLORS[i % len(COLORS)], lw=4) for i in range(len(runs))]
        fig.legend(keys, names, loc="outside upper center", ncols=min(len(runs), 3), fontsize=16)
        fig.supxlabel(NOTE, fontsize=14, color="#666666")
        fig.savefig(path)


def draw_panel(ax, curves, runs):
    drawn = []  # every value in the panel
    for i, rows in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        for key, _, line in curves:
            points = series(rows, key)
            x, y = list(points), list(points.values())
            drawn += y
            if key == "eval_accuracy":
                error = series(rows, "eval_stderr")
                ax.errorbar(x, y, [abs(error.get(step, 0)) for step in x], color=color, capsize=4)
            if line == "-":
                ax.plot(x, y, color=color, lw=1, alpha=0.3 if len(runs) < 4 else 0.15)
            marker = "o" if "o" in line or len(x) == 1 else ""
            ax.plot(x, y if "o" in line else smooth(y), line.strip("o"), color=color, lw=2.5, marker=marker)
    size = sorted(abs(y) for y in drawn if y)
    ax.locator_params(nbins=6)
    ax.xaxis.get_major_locator().set_params(integer=True)
    if not drawn:
        ax.text(0.5, 0.5, "not logged", transform=ax.transAxes, ha="center", va="center", color="#666666")
        ax.set_yticks([])
    elif curves[0][0] == "eval_accuracy" and 0 <= min(drawn) <= max(drawn) <= 1:
        ax.set_ylim(-0.02, 1.02)
    elif size and size[-1] > 30 * size[len(size) // 2]:  # one spike must not flatten the rest
        median = size[len(size) // 2]
        ax.set_yscale("symlog", linthresh=median, linscale=max(1, math.log10(size[-1] / median) / 4))
        ax.yaxis.get_major_locator().set_params(numticks=6)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}" if y == 0 or abs(y) >= median else "")
        ax.set_ylabel(f"{ax.get_ylabel()}\nlog above {median:.1g}")
    elif 0 <= min(drawn) <= max(drawn) / 2 or 0 <= min(drawn) == max(drawn):
        ax.set_ylim(bottom=0)
    ax.tick_params(labelbottom=True)


def step_rows(out_dir, step):
    """The samples of a step, highest advantage first; step -1 is the last one that was logged."""
    path = os.path.join(out_dir, "completions.jsonl")
    rows = [row for row in read_jsonl(path) if {"group", "prompt", "completion", "reward"} <= set(row)]
    steps = sorted({row["step"] for row in rows})
    step = steps[-1] if step == -1 and steps else step
    if step not in steps:
        raise ValueError(f"no step {step} in {path}; logged steps: {f'{steps[0]} to {steps[-1]}' if steps else 'none'}")
    rows = [row for row in rows if row["step"] == step]
    return sorted(rows, key=lambda row: -row["advantage"] if is_number(row.get("advantage")) else math.inf)


def print_table(rows):
    """As wide as the terminal, 80 columns where there is none. Of a long text the middle goes: the answer stands at
    the end. Below the reward stand its parts, which leaves more room for the texts."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # takes [red] and :smile: as they stand

    console = Console()
    room = 3 * console.width  # characters of a text

    def text(value):
        shown = visible(str(value)).encode(console.encoding, "backslashreplace").decode(console.encoding)
        return shown if len(shown) <= room else f"{shown[: room // 2]} ... {shown[-room // 2 :]}"

    def number(value, spec="g"):
        return format(value + 0.0, spec) if is_number(value) else "-" if value is None else text(value)

    names = ("group", "prompt", "completion", "reward", "advantage", "length")
    table = Table(*names, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), leading=1)
    for row in rows:
        parts = row["parts"].items() if isinstance(row.get("parts"), dict) else []
        rewards = [number(row["reward"], ".4g"), *(f"{text(name)} {number(value, '.4g')}" for name, value in parts)]
        length = number(row.get("length")) + "\ncut off" * (row.get("finish_reason") == "length")
        columns = [text(row[name]) for name in ("group", "prompt", "completion")]
        columns += ["\n".join(rewards), number(row.get("advantage"), "+.3f"), length]
        table.add_row(*(Text(column, overflow="fold") for column in columns))
    console.print(table)


def fail(message):
    print(visible(f"view.py: {message}"), file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dirs", nargs="*", metavar="out_dir", help="default: the newest run here")
    parser.add_argument("--out", help="the picture's file; default: curves.png, in out_dir if it is only one")
    parser.add_argument("--step", type=int, nargs="?", const=-1, help="print the completions of this step")
    parser.error = fail  # one line, without the usage
    args = parser.parse_args(argv)
    here = sorted(glob.glob("out/metrics.jsonl") + glob.glob("out.*/metrics.jsonl"), key=os.path.getmtime)
    out_dirs = args.out_dirs or [os.path.dirname(log) for log in here[-1:]] or fail("no run here (out, out.1, ...)")
    try:
        if args.step is None:
            path = args.out or os.path.join(out_dirs[0] if len(out_dirs) == 1 else "", "curves.png")
            draw(out_dirs, path)
            return print(path)
        if len(out_dirs) > 1 or args.out:
            fail("--step prints one run, and takes no --out")
        rows = step_rows(out_dirs[0], args.step)
        print(f"step {rows[0]['step']}, {len(rows)} samples, highest advantage first\n")
        print_table(rows)
    except (OSError, ValueError) as e:  # a file that is not there or not writable, an unknown picture format
        fail(str(e))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main()
