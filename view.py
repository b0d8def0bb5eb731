"""
Look at what a run left in its out_dir. Pictures need matplotlib.

python view.py                                  # curves of the newest run here (out, out.1, ...): curves.png in it
python view.py out_a out_b --out picture.png    # several runs in one picture
python view.py out --step 40                    # the completions of step 40 by group (no number: the last step)
python view.py out --html run.html              # a page to look at curves, steps, groups and tokens; several runs, too
"""

import argparse
import base64
import glob
import json
import math
import os
import shutil
import signal
import sys
import zlib
from pathlib import Path

COLORS = [
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#808080",
]  # Okabe and Ito, and grey
PANELS = [  # title, y label, then (key, label, style) for each curve
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
STYLE = {
    "font.size": 15,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
STYLE |= {
    "axes.titlelocation": "left",
    "axes.titlesize": 18,
    "axes.titleweight": "bold",
    "text.parse_math": False,
}
STYLE |= {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.w_pad": 0.12,
}
STYLE |= {
    "legend.borderpad": 0,
    "legend.handlelength": 1.6,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 0.9,
}
NOTE = "faint: every step;  bold: mean over 5 % of the run;  A: advantage;  A = 0: groups of equal rewards"
MEASURES = {  # of a token, by the names of completions.jsonl: what the page says of it
    "push": "weight in the gradient, in units of an advantage: blue is made likelier, red less likely",
    "logp": "log-probability before the update, in nats: the deeper red, the less likely",
    "entropy": "of the distribution that the token was drawn from, in nats",
    "kl": "log p - log p of the reference, in nats",
    "gap": "log p - log p of the sampler, in nats",
}
MOST_BYTES = 9_850_000  # of the steps in a page; of a longer run it shows some, evenly spread


def read_jsonl(path):
    """The rows of a log. A line that is not whole (the run was killed while it wrote) is skipped."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if (
                isinstance(row, dict)
                and isinstance(row.get("step"), int)
                and 0 <= row["step"] < 2**53
            ):
                rows.append(
                    row
                )  # beyond 2**53 a float, and so an axis, cannot tell two steps apart
    return rows


def is_number(value):
    """Not NaN, not infinite, and of a size whose sums matplotlib can hold."""
    return isinstance(value, (int, float)) and (value == 0 or 1e-100 < abs(value) < 1e100)


def series(rows, key):
    """{step: value} of one key, without the steps that do not have it. Of two lines of a step the later one holds."""
    found = [(row["step"], row.get(key)) for row in rows]
    return dict(sorted({step: float(value) for step, value in found if is_number(value)}.items()))


def smooth(values):
    """Centred mean over about 5 % of the run; at the ends, over what there is of the window."""
    half = len(values) // 40
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


def curve(run, rows, key, label, style):
    """A curve of a panel. Evals are few: they are drawn as dots, and not smoothed."""
    points, errors = series(rows, key), series(rows, "eval_stderr")
    values, dots = list(points.values()), key.startswith("eval_") or len(points) == 1
    errors = [abs(errors.get(step, 0)) for step in points] if key == "eval_accuracy" else []
    found = dict(
        run=run,
        color=COLORS[run % len(COLORS)],
        label=label,
        style=style,
        dots=dots,
        steps=list(points),
    )
    return found | dict(values=values, smooth=values if dots else smooth(values), errors=errors)


def read_panels(out_dirs):
    """What the picture and the page draw: of each panel its curves, and the range of their values with 0."""
    paths, panels = [os.path.join(out_dir, "metrics.jsonl") for out_dir in out_dirs], []
    runs = [read_jsonl(path) for path in paths]
    for title, unit, keys in PANELS:
        curves = [curve(i, rows, *key) for i, rows in enumerate(runs) for key in keys]
        curves = [c for c in curves if c["steps"]]
        values = [0.0, *(value for c in curves for value in c["values"])]
        sizes = sorted(abs(value) for value in values if value) or [0]
        most = (
            3 * sizes[len(sizes) * 19 // 20]
        )  # one spike must not flatten the rest: it leaves the panel
        unit += f",\nspikes to {sizes[-1]:.3g}" if sizes[-1] > most else ""
        low, high = max(min(values), -most), min(max(values), most)
        panels.append(dict(title=title, unit=unit, low=low, high=high, curves=curves))
    for run, path in enumerate(paths):
        if all(c["run"] != run for panel in panels for c in panel["curves"]):
            raise ValueError(
                f"{path} has no metrics of this version: is the run of another one, or at its first step?"
            )
    return panels


def run_names(out_dirs):
    """Their paths, from the directory that they share."""
    parent = os.path.commonpath([os.path.dirname(os.path.abspath(d)) for d in out_dirs])
    return [visible(os.path.relpath(d, parent))[-40:] for d in out_dirs]


def visible(text):
    """Completions are hostile: what would move the cursor, turn the text or not encode is shown as its escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def draw(out_dirs, path):
    """One picture of six panels, a colour for each run."""
    # Figure and not pyplot: no backend to choose, no window, no state left behind in the trainer
    import matplotlib
    from matplotlib.figure import Figure

    panels, names = read_panels(out_dirs), run_names(out_dirs)
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(16, 9), dpi=100, layout="constrained")
        for ax, panel in zip(fig.subplots(2, 3, sharex=True).flat, panels, strict=True):
            draw_panel(ax, **panel)
        keys = [ax.plot([], [], color=COLORS[i % len(COLORS)], lw=4)[0] for i in range(len(names))]
        fig.legend(keys, names, loc="outside upper center", ncols=min(len(names), 3), fontsize=16)
        fig.supxlabel(NOTE, fontsize=14, color="#666666")
        fig.savefig(path)


def draw_panel(ax, title, unit, low, high, curves):
    for c in curves:
        if not c["dots"]:
            ax.plot(c["steps"], c["values"], color=c["color"], lw=1, alpha=0.3)
        line = dict(ls=c["style"], lw=2.5, marker="o" if c["dots"] else "")
        ax.errorbar(
            c["steps"],
            c["smooth"],
            c["errors"] or None,
            color=c["color"],
            capsize=4,
            elinewidth=1.5,
            **line,
        )
    styles = {c["label"]: c["style"] for c in curves}
    if len(styles) > 1:  # beside the title, where no curve can be
        keys = [ax.plot([], [], ls=style, color="#444444", lw=2)[0] for style in styles.values()]
        ax.legend(keys, styles, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2)
    ax.locator_params("x", nbins=6, integer=True)
    ax.tick_params(labelbottom=True)
    ax.set(title=title, xlabel="step", ylabel=unit if curves else "not logged")
    ax.set_ylim(1.05 * low, 1.05 * high + (low == high))


def read_steps(out_dir):
    """{step: its rows}"""
    path, steps = os.path.join(out_dir, "completions.jsonl"), {}
    columns = (
        "group",
        "prompt",
        "completion",
        "reward",
        "parts",
        "advantage",
        "length",
        "finish_reason",
    )
    for row in read_jsonl(path):
        if row.keys() >= set(columns):
            steps.setdefault(row["step"], []).append(row)
    if not steps:
        raise ValueError(
            f"{path} has no row with {', '.join(columns)}: too early, or another version?"
        )
    return steps


def choose(step, logs):
    """The step that the user named, -1 for the last one, and of each run its rows."""
    steps = sorted(set().union(*logs))
    step = steps[-1] if step == -1 else step
    if step not in steps:
        raise ValueError(f"no completions of step {step}; logged steps: {steps[0]} to {steps[-1]}")
    return step, [log.get(step, []) for log in logs]


def cards(runs, names):
    """The groups of a step, those with the most signal first. Of runs that share their prompts (by the seed) a card
    holds the group of each. runs: of each the rows of the step."""
    found = {}
    for run, rows in enumerate(runs):
        for row in rows:
            card = found.setdefault(
                (row["group"], row["prompt"]), dict(row=row.get("row"), runs={})
            )
            card["runs"].setdefault(run, []).append(row)
    for (group, prompt), card in found.items():
        data_row = json.dumps(card["row"], indent=1, ensure_ascii=False)
        groups = [
            group_of(rows, f"{names[run]}: " * (len(names) > 1))
            for run, rows in card["runs"].items()
        ]
        card |= dict(title=f"group {group}", prompt=prompt, row=data_row, runs=groups)
    return sorted(found.values(), key=lambda card: -max(group["signal"] for group in card["runs"]))


def group_of(rows, name):
    """A group of a run, its samples by reward; equal ones stand there once, with their count."""
    samples = {}
    for row in rows:
        first = next(
            iter(row["parts"].values()), row["reward"]
        )  # right: by the first reward function, as in pass@k
        verdicts = [] if first is None else ["right" if first > 0.5 else "wrong"]
        verdicts += ["cut off" if row["finish_reason"] == "length" else "ended"]
        facts = [f"reward {number(row['reward'])}", *verdicts]
        facts += [f"{part} {number(value)}" for part, value in row["parts"].items()]
        facts += [f"advantage {number(row['advantage'], '+')}", f"{row['length']} tokens"]
        sample = dict(
            facts=", ".join(facts),
            verdicts=verdicts,
            reward=row["reward"],
            advantage=row["advantage"],
        )
        sample |= dict(count=0, pieces=[row["completion"]], measures={})
        sample = samples.setdefault((row["completion"], sample["facts"]), sample)
        sample["count"] += 1
        if row.get("tokens"):
            sample |= dict(pieces=row["tokens"]["text"], measures=measures(row["tokens"]))
    samples = sorted(
        samples.values(), key=lambda s: math.inf if s["reward"] is None else -s["reward"]
    )
    for sample in samples:
        sample["facts"] = f"{sample['count']} × " * (sample["count"] > 1) + sample["facts"]
    right = sum(s["count"] for s in samples if "right" in s["verdicts"])
    signal = sum(abs(row["advantage"] or 0) for row in rows) / len(rows)
    title = f"{name}{right} of {len(rows)} right, mean |advantage| {number(signal)}"
    return dict(title=title, signal=signal, samples=samples)


def number(value, sign=""):
    return "-" if value is None else f"{value + 0.0:{sign}.3g}"


def measures(tokens):
    """{measure: a value for each token}. The log holds thousandths."""
    found = {name: tokens[name] for name in MEASURES if name in tokens}
    return {
        name: [value and float(f"{value / 1000:.2g}") for value in found[name]] for name in found
    }


def print_step(cards):
    """Of a long text the middle goes: the answer stands at the end."""
    room = 3 * shutil.get_terminal_size().columns  # characters of a text

    def text(value):
        shown = visible(value)
        return shown if len(shown) <= room else f"{shown[: room // 2]} ... {shown[-room // 2 :]}"

    for card in cards:
        print("\n==", text(f"{card['title']}: {card['prompt']}"))
        for group in card["runs"]:
            print(text(group["title"]))
            for sample in group["samples"]:
                print("\n" + text(sample["facts"]), text("".join(sample["pieces"])), sep="\n")


def write_page(out_dirs, step, path):
    """One file that loads nothing."""
    panels, names, logs = (
        read_panels(out_dirs),
        run_names(out_dirs),
        [read_steps(d) for d in out_dirs],
    )
    step, _ = choose(step, logs)
    packed = {}
    for n in sorted(set().union(*logs)):
        text = json.dumps(cards([log.get(n, []) for log in logs], names), separators=(",", ":"))
        packed[n] = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    steps, share = list(packed), sum(map(len, packed.values())) / MOST_BYTES
    if share > 1:
        steps = sorted(
            {step, *(steps[-1 - int(i * share)] for i in range(int(len(steps) / share)))}
        )
    logged = sorted(
        {*steps, *(step for panel in panels for c in panel["curves"] for step in c["steps"])}
    )
    data = dict(panels=panels, measures=MEASURES, step=step, steps=steps, logged=logged)
    data |= dict(
        packed={n: packed[n] for n in steps},
        runs=list(zip(names, COLORS * len(names), strict=False)),
    )
    page = (Path(__file__).resolve().parent / "harness" / "page.html").read_text(encoding="utf-8")
    page = page.replace(
        '"DATA"', json.dumps(data).replace("<", "\\u003c")
    )  # no text can end the script
    Path(path).write_text(page, encoding="utf-8")
    print(
        path
        if share <= 1
        else f"{path} (of {len(packed)} steps {len(steps)}: all would be too large)"
    )


def fail(message):
    print(visible(f"view.py: {message}"), file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out_dirs", nargs="*", metavar="out_dir", help="default: the newest run here"
    )
    parser.add_argument(
        "--out", help="the picture's file; default: curves.png, in out_dir if it is only one"
    )
    parser.add_argument(
        "--step", type=int, nargs="?", const=-1, help="print this step, or open the page there"
    )
    parser.add_argument("--html", help="write the page to this file")
    parser.error = fail  # one line, without the usage
    args = parser.parse_args(argv)
    here = sorted(
        glob.glob("out/metrics.jsonl") + glob.glob("out.*/metrics.jsonl"), key=os.path.getmtime
    )
    out_dirs = (
        args.out_dirs
        or [os.path.dirname(log) for log in here[-1:]]
        or fail("no run here (out, out.1, ...)")
    )
    try:
        if args.out and (args.html or args.step is not None):
            fail("--out is the picture's file: not with --step or --html")
        if args.html:
            write_page(out_dirs, -1 if args.step is None else args.step, args.html)
        elif args.step is None:
            path = args.out or os.path.join(out_dirs[0] if len(out_dirs) == 1 else "", "curves.png")
            draw(out_dirs, path)
            print(path)
        else:
            step, rows = choose(args.step, [read_steps(d) for d in out_dirs])
            print(f"step {step}, {sum(map(len, rows))} samples, groups with the most signal first")
            print_step(cards(rows, run_names(out_dirs)))
    except (
        OSError,
        ValueError,
    ) as e:  # a file that is not there or not writable, an unknown picture format
        fail(str(e))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main()
