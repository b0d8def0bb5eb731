"""
Look at what a run left in its out_dir. Pictures need matplotlib, tables rich.

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
import signal
import sys
import zlib

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
MEASURES = {  # of a token, in the page: the kind of its scale, what it is
    "push": ("signed", "weight in the gradient, in units of an advantage: blue is made likelier, red less likely"),
    "probability": ("inverse", "before the update"),
    "entropy": ("level", "nats, of the distribution that the token was drawn from"),
    "KL to the reference": ("signed", "nats, log p - log p of the reference"),
    "gap to the sampler": ("signed", "nats, log p - log p of the sampler"),
}
MOST_BYTES = 9_850_000  # of the steps in a page; of a longer run it shows some, evenly spread
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


def read_metrics(out_dir):
    """The rows of a run's metrics; there must be one that a panel shows."""
    path = os.path.join(out_dir, "metrics.jsonl")
    rows = read_jsonl(path)
    if not any(series(rows, key) for *_, curves in PANELS for key, _, _ in curves):
        raise ValueError(f"{path} has no metrics of this version: is the run of another one, or at its first step?")
    return rows


def run_names(out_dirs):
    """Their paths, from the directory that they share."""
    parent = os.path.commonpath([os.path.dirname(os.path.abspath(d)) for d in out_dirs])
    return [visible(os.path.relpath(d, parent))[-40:] for d in out_dirs]


def visible(text):
    """Completions are hostile: what would move the cursor, turn the text or not encode is shown as its escape."""
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

    runs = [read_metrics(d) for d in out_dirs]
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(16, 9), dpi=100, layout="constrained")
        for ax, (title, ylabel, curves) in zip(fig.subplots(2, 3, sharex=True).flat, PANELS, strict=True):
            ax.set(title=title, xlabel="step", ylabel=ylabel)
            draw_panel(ax, curves, runs)
            if len(curves) > 1:  # beside the title, where no curve can be
                keys = [Line2D([], [], ls=s.strip("o"), marker=s[: "o" in s], lw=2, c="#444444") for *_, s in curves]
                ax.legend(keys, [label for _, label, _ in curves], loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2)
        keys = [Line2D([], [], color=COLORS[i % len(COLORS)], lw=4) for i in range(len(runs))]
        fig.legend(keys, run_names(out_dirs), loc="outside upper center", ncols=min(len(runs), 3), fontsize=16)
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


def read_steps(out_dir):
    """{step: its rows}"""
    path, steps = os.path.join(out_dir, "completions.jsonl"), {}
    for row in read_jsonl(path):
        if {"group", "prompt", "completion", "reward"} <= set(row):
            steps.setdefault(row["step"], []).append(row)
    if not steps:
        raise ValueError(f"{path} has no row with group, prompt, completion and reward: too early, or another version?")
    return steps


def choose(step, logs):
    """The step that the user named, -1 for the last one, and of each run its rows."""
    steps = sorted(set().union(*logs))
    step = steps[-1] if step == -1 else step
    if step not in steps:
        raise ValueError(f"no completions of step {step}; logged steps: {steps[0]} to {steps[-1]}")
    return step, [log.get(step, []) for log in logs]


def cards(runs):
    """The groups of a step, those with the most signal first. Of runs that share their prompts (by the seed) a card
    holds the group of each. runs: of each the rows of the step."""
    found = {}
    for i, rows in enumerate(runs):
        for row in rows:
            data_row = json.dumps(row.get("row"), indent=1, ensure_ascii=False)
            card = dict(group=str(row["group"]), prompt=str(row["prompt"]), row=data_row, runs={})
            card = found.setdefault((card["group"], card["prompt"]), card)
            card["runs"].setdefault(i, []).append(row)
    for card in found.values():
        card["runs"] = [group_of(i, rows) for i, rows in card["runs"].items()]
    return sorted(found.values(), key=lambda card: -max(group["signal"] for group in card["runs"]))


def group_of(run, rows):
    """A group of a run, its samples by reward; equal ones stand there once, with their count."""
    samples = {}
    for row in rows:
        sample = {key: row[key] if is_number(row.get(key)) else None for key in ("reward", "advantage", "length")}
        parts = row["parts"].items() if isinstance(row.get("parts"), dict) else []
        parts = [(name, value if is_number(value) else None) for name, value in parts]
        first = parts[0][1] if parts else sample["reward"]  # right: by the first reward function, as in pass@k
        verdicts = [] if first is None else ["right" if first > 0.5 else "wrong"]
        verdicts += ["cut off" if row.get("finish_reason") == "length" else "ended"]
        sample |= dict(completion=str(row["completion"]), parts=parts, verdicts=verdicts)
        sample = samples.setdefault(str(sample), sample | dict(count=0, tokens=None))
        sample["count"] += 1
        sample["tokens"] = sample["tokens"] or measures(row.get("tokens"))
    samples = sorted(samples.values(), key=lambda s: math.inf if s["reward"] is None else -s["reward"])
    sizes = [abs(s["advantage"] or 0) for s in samples for _ in range(s["count"])]
    right = sum(s["count"] for s in samples if "right" in s["verdicts"])
    return dict(run=run, n=len(rows), right=right, signal=sum(sizes) / len(rows), most=max(sizes), samples=samples)


def measures(tokens):
    """{measure: a value for each token}, and the tokens' text. The log holds thousandths. Null: not logged."""
    text = tokens.get("text") if isinstance(tokens, dict) else None
    if not isinstance(text, list) or not text:
        return None

    def logged(name):
        values = tokens.get(name)
        whole = isinstance(values, list) and len(values) == len(text)
        return [value / 1000 if is_number(value) else math.nan for value in values] if whole else [math.nan] * len(text)

    found = dict(push=logged("push"), probability=[math.exp(min(logp, 0)) for logp in logged("logp")])
    found |= {"entropy": logged("entropy"), "KL to the reference": logged("kl"), "gap to the sampler": logged("gap")}
    found = {name: [None if math.isnan(v) else float(f"{v:.2g}") for v in values] for name, values in found.items()}
    return found | dict(text=[str(piece) for piece in text])


def print_step(cards, names):
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

    def number(value, spec=".4g"):
        return "-" if value is None else format(value + 0.0, spec)

    for card in cards:
        console.print("", Text(text(f"group {card['group']}: {card['prompt']}"), "bold"), sep="\n")
        for group in card["runs"]:
            name = f"{names[group['run']]}: " * (len(names) > 1)
            print(f"{text(name)}{group['right']} of {group['n']} right, mean |advantage| {group['signal']:.3g}\n")
            table = Table("times", "completion", "reward", "advantage", "length", box=box.SIMPLE_HEAD, show_edge=False)
            for s in group["samples"]:
                rewards = [number(s["reward"]), *(f"{text(name)} {number(value)}" for name, value in s["parts"])]
                length = number(s["length"], "g") + "\ncut off" * ("cut off" in s["verdicts"])
                columns = [str(s["count"]), text(s["completion"]), "\n".join(rewards)]
                columns += [number(s["advantage"], "+.3f"), length]
                table.add_row(*(Text(column, overflow="fold") for column in columns))
            console.print(table)


def panel_data(runs, title, unit, keys):
    """What the page draws of a panel of PANELS: its curves, and their range."""
    curves, drawn = [], [0.0]
    for i, rows in enumerate(runs):
        for key, label, line in keys:
            points = series(rows, key)
            values, error = list(points.values()), series(rows, "eval_stderr") if key == "eval_accuracy" else {}
            drawn += values
            curve = dict(run=i, label=label, steps=list(points), values=values, smooth=smooth(values))
            curve |= dict(style={"--": "dashed", "o:": "dotted"}.get(line, "solid"), dots="o" in line)
            curves += [curve | dict(errors=[abs(error.get(step, 0)) for step in points])] if points else []
    size = sorted(abs(value) for value in drawn if value) or [0]
    median = size[len(size) // 2]  # one spike must not flatten the rest
    log_above = median if size[-1] > 30 * median else 0
    return dict(title=title, unit=unit, curves=curves, low=min(drawn), high=max(drawn), log_above=log_above)


def pack(cards):
    """A step as the page reads it: base64 of compressed JSON, with the end of each measure's scale. That is the 99 %
    quantile of its absolute values, so that one outlier does not fade the others."""
    samples = [sample for card in cards for run in card["runs"] for sample in run["samples"] if sample["tokens"]]
    for sample in samples:
        text = sample["tokens"]["text"]  # of how many of them the completion is made: that EOS has a text, too
        made_of = {"".join(text[:n]): n for n in (len(text) - 1, len(text))}
        sample["completion"] = made_of.get(sample["completion"], sample["completion"])
    ends = {}
    for name in MEASURES:
        values = sorted(abs(value) for s in samples for value in s["tokens"][name] if value is not None)
        ends[name] = 1 if name == "probability" else values[len(values) * 99 // 100] if values else None
    text = json.dumps(dict(cards=cards, ends=ends), separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode())).decode()


def write_page(out_dirs, step, path):
    """One file that loads nothing."""
    runs = [read_metrics(d) for d in out_dirs]
    logs = [read_steps(d) for d in out_dirs]
    step, _ = choose(step, logs)
    packed = {n: pack(cards([log.get(n, []) for log in logs])) for n in sorted(set().union(*logs))}
    steps, share = list(packed), sum(map(len, packed.values())) / MOST_BYTES
    if share > 1:
        steps = sorted({step, *(steps[-1 - int(i * share)] for i in range(int(len(steps) / share)))})
    logged = {row["step"] for rows in runs for row in rows}
    data = dict(panels=[panel_data(runs, *panel) for panel in PANELS], measures=MEASURES, step=step, steps=steps)
    data |= dict(logged=sorted(logged.union(steps)), packed={n: packed[n] for n in steps})
    colors = ["currentColor" if color == "#000000" else color for color in COLORS]  # black is not seen in dark mode
    data["runs"] = [dict(name=n, color=colors[i % len(colors)]) for i, n in enumerate(run_names(out_dirs))]
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "harness", "page.html"), encoding="utf-8") as f:
        page = f.read().replace('"DATA"', json.dumps(data).replace("<", "\\u003c"))  # no text can end the script
    with open(path + ".new", "w", encoding="utf-8") as f:
        f.write(page)
    os.replace(path + ".new", path)  # who loads it while it is made again sees a whole one
    print(path if share <= 1 else f"{path} (of {len(packed)} steps {len(steps)}: all would be too large)")


def fail(message):
    print(visible(f"view.py: {message}"), file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dirs", nargs="*", metavar="out_dir", help="default: the newest run here")
    parser.add_argument("--out", help="the picture's file; default: curves.png, in out_dir if it is only one")
    parser.add_argument("--step", type=int, nargs="?", const=-1, help="print this step, or open the page there")
    parser.add_argument("--html", help="write the page to this file")
    parser.error = fail  # one line, without the usage
    args = parser.parse_args(argv)
    here = sorted(glob.glob("out/metrics.jsonl") + glob.glob("out.*/metrics.jsonl"), key=os.path.getmtime)
    out_dirs = args.out_dirs or [os.path.dirname(log) for log in here[-1:]] or fail("no run here (out, out.1, ...)")
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
            print_step(cards(rows), run_names(out_dirs))
    except (OSError, ValueError) as e:  # a file that is not there or not writable, an unknown picture format
        fail(str(e))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main()
