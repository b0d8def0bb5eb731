"""Shows the metrics and samples of a run.

python tools/view.py                 # the newest run here: a summary, and its curves.png
python tools/view.py out             # the run in the directory out
python tools/view.py out --step 40   # the samples of step 40 by group; without 40: the last step
python tools/view.py out --html      # out/page.html: curves, steps, groups, samples, tokens
"""

import base64
import contextlib
import glob
import json
import math
import os
import re
import shutil
import signal
import sys
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from itertools import cycle, zip_longest
from pathlib import Path
from statistics import fmean

import numpy as np

PANELS = [  # title, unit, names in metrics.jsonl as patterns, the most important one first
    ("Reward", "mean of the samples", "reward|rewards/.*/mean"),
    ("Eval accuracy", "share right, ± 1 standard error", "eval_accuracy|eval_pass@.*"),
    ("Length", "tokens a completion", "completions/mean_length|eval_length"),
    ("No signal", "share of groups, all advantages 0", "frac_reward_zero_std"),
    ("Gradient norm", "before clipping", "grad_norm"),
    ("KL to the reference", "nats a token", "kl|kl_k1"),
    ("Entropy", "nats a token", "entropy"),
    ("Loss", "its value says nothing about learning", "loss"),
]
OWN_PANEL = "logged/|turns/|tools/"  # metrics with these prefixes have a panel each
PAGE_BYTES = 40e6  # of samples: browsers cannot open pages of several hundred megabytes
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito's
STYLE = {
    "text.usetex": False,  # a matplotlibrc may ask for LaTeX where there is none
    "text.parse_math": False,  # a $ in the name of a reward is a $
    "font.size": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
}


# -- the logs of a run


def read_log(out_dir, name: str) -> list[dict]:
    """The lines of a log, but not an incomplete one, which a killed run may leave. Raises
    ValueError if there are none."""
    path = Path(out_dir, name)
    lines = []
    for text in path.read_text("utf-8", "replace").split("\n"):
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    if not lines:
        raise ValueError(f"{path} has no lines yet")
    return lines


def about(out_dir) -> str:
    """The run's model, reward, seed and start."""
    config = Path(out_dir, "config.json")
    if not config.exists():
        return ""
    flags = dict(first_day="") | json.loads(config.read_text())
    return "model {model}, reward {reward}, seed {seed}, {first_day:.16}".format(**flags)


def is_number(value) -> bool:
    """Not null, not NaN, and not so large that matplotlib overflows."""
    return isinstance(value, int | float) and abs(value) < 1e100


def shown(value, sign: str = "") -> str:
    if not is_number(value):
        return "-"
    return f"{value + 0.0:{sign}.3g}"  # + 0.0: no "-0"


def visible(text) -> str:
    """Escapes control, right-to-left and other invisible characters: completions are untrusted."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


# -- curves


def make_panels(lines) -> list[dict]:
    """The panels that the picture and the page show."""
    logged = sorted({name for line in lines for name in line})
    rewards = [name for name in logged if re.fullmatch("rewards/.*/mean", name)]
    if len(rewards) == 1:  # it equals the reward
        logged.remove(rewards[0])
    own = [(name, "", re.escape(name)) for name in logged if re.match(OWN_PANEL, name)]
    panels = []
    for title, unit, pattern in PANELS + own:
        names = [name for name in logged if re.fullmatch(pattern, name)]
        curves = [make_curve(lines, name) for name in names]
        curves = [curve for curve in curves if curve["steps"]]
        low, high = range_of(curves)
        if curves:  # with --beta 0 there is no KL
            panels.append(dict(title=title, unit=unit, low=low, high=high, curves=curves))
    return panels


def make_curve(lines, name: str) -> dict:
    points = points_of(lines, name)
    values = list(points.values())
    errors = None
    if name == "eval_accuracy":
        stderr = points_of(lines, "eval_stderr")
        errors = [stderr.get(step, 0.0) for step in points]
    return dict(name=name, steps=[*points], values=values, smooth=smooth(values), errors=errors)


def points_of(lines, name: str) -> dict[int, float]:
    """{step: value of a metric}. If two lines have the same step, the later one counts."""
    return {line["step"]: float(line[name]) for line in lines if is_number(line.get(name))}


def smooth(values: list) -> list:
    """The mean of about 5 % of the run around each value, at most 101 values."""
    half = min(len(values) // 40, 50)
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def range_of(curves) -> tuple[float, float]:
    """The range of a panel: 0 and all values, without spikes that would flatten the others."""
    values = [value for curve in curves for value in curve["values"] if value != 0]
    if not values:
        return 0.0, 1.0
    limit = 3 * np.quantile(np.abs(values), 0.95)
    inside = np.clip([0.0, *values], -limit, limit)
    return inside.min(), inside.max()


def draw(out_dir) -> str:
    """Draws the curves of a run, and returns the path of the picture."""
    # Figure instead of pyplot, which opens windows and keeps state in the trainer.
    import matplotlib
    from matplotlib.figure import Figure

    panels = make_panels(read_log(out_dir, "metrics.jsonl"))
    path = os.path.join(out_dir, "curves.png")
    rows = max(1, math.ceil(len(panels) / 4))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(18, 4.5 * rows), dpi=100, layout="constrained")
        for number, panel in enumerate(panels, 1):
            draw_panel(figure.add_subplot(rows, 4, number), **panel)
        figure.suptitle(f"{visible(out_dir)}: {visible(about(out_dir))}")
        figure.supxlabel("step; dots: every step, line: mean over 5 % of the run")
        figure.savefig(path)
    return path


def draw_panel(ax, title: str, unit: str, low: float, high: float, curves: list) -> None:
    for curve, color in zip(curves, cycle(COLORS)):
        steps = curve["steps"]
        look = dict(color=color, fmt="o", ms=3, alpha=0.4, capsize=4)
        ax.errorbar(steps, curve["values"], curve["errors"], **look)
        ax.plot(steps, curve["smooth"], color=color, lw=2.5, label=visible(curve["name"]))
    ax.legend(fontsize=10)
    ax.set(title=visible(title), ylabel=unit, ylim=(1.05 * low, 1.05 * high))
    ax.locator_params("x", integer=True)


def print_summary(out_dir) -> None:
    """Prints the first and last value of each curve, smoothed as in the picture."""
    lines = read_log(out_dir, "metrics.jsonl")
    print(f"{visible(out_dir)}, step {lines[-1]['step']}")
    for panel in make_panels(lines):
        for curve in panel["curves"]:
            values = curve["smooth"]
            print(f"{visible(curve['name']):25s} {shown(values[0])} -> {shown(values[-1])}")


# -- a step: its groups, their samples


def read_steps(out_dir) -> dict[int, list[bytes]]:
    """The lines of each step as bytes. Parsed, a long run takes tens of gigabytes."""
    steps = {}
    with open(f"{out_dir}/completions.jsonl", "rb") as file:
        for line in file:
            step = re.match(rb'{"step": (\d+),.*}\n', line)
            if step:  # not an incomplete line of a killed run
                steps.setdefault(int(step[1]), []).append(line)
    return steps


def make_groups(lines) -> list[dict]:
    """The groups of a step. The group with the most signal comes first."""
    groups = {}
    for sample in map(json.loads, lines):
        groups.setdefault(sample["group"], []).append(sample)
    made = map(make_group, groups.values())
    return sorted(made, key=lambda group: -group["signal"])


def make_group(samples) -> dict:
    """Samples by reward, the highest first; equal samples are shown once, with their count."""
    entries = {}
    for sample in sorted(samples, key=lambda s: s.get("reward", -math.inf), reverse=True):
        entry = dict(facts=facts_of(sample), count=0)
        entry["extra"] = [f"{name}: {text}" for name, text in sample.get("extra", {}).items()]
        entry |= turns_of(sample)
        key = str(entry)
        entry["tokens"] = sample.get("tokens")  # None if they were not logged
        entries.setdefault(key, entry)["count"] += 1

    first = samples[0]
    mean = fmean(sample.get("advantage_abs", abs(sample["advantage"])) for sample in samples)
    return dict(
        title=f"group {first['group']}: {len(samples)} samples, mean |advantage| {shown(mean)}",
        signal=mean,
        prompt=first["prompt"],
        row=json.dumps(first.get("row"), indent=1, ensure_ascii=False),
        samples=list(entries.values()),
    )


def facts_of(sample) -> str:
    """The line above a sample."""
    facts = [f"reward {shown(sample.get('reward'))}"]
    facts += [f"{name} {shown(value)}" for name, value in sample["rewards"].items()]
    facts += [f"{k} {shown(sample[k], '+')}" for k in sample if k.startswith("advantage")]
    facts.append(f"{sample['length']} tokens")
    if sample["finish_reason"] == "length":
        facts.append("cut off")
    if sample.get("failure"):
        facts.append(f"failed: {sample['failure']}")
    return ", ".join(facts)


def turns_of(sample) -> dict:
    """pieces: the completion, or the turns and replies of an episode, each with its writer.
    replied: the indices of the pieces that the environment wrote."""
    if "turns" not in sample:
        return dict(pieces=[sample["completion"]], replied=[])
    pieces = []
    replied = []
    for turn, reply in zip_longest(sample["turns"], sample["replies"], fillvalue=[]):
        pieces.append(f"     policy: {turn}")
        if isinstance(reply, str):
            reply = [dict(name="environment", content=reply)]
        for message in reply:
            replied.append(len(pieces))
            pieces.append(f"{message['name']:>11}: {message['content']}")
    return dict(pieces=pieces, replied=replied)


def print_step(lines, step: int) -> None:
    print(f"step {step}, {len(lines)} samples, groups with the most signal first")
    for group in make_groups(lines):
        print(f"\n== {group['title']}\n{shorten(group['prompt'])}")
        for sample in group["samples"]:
            print("\n" + shorten(f"{sample['count']} x {sample['facts']}"))
            for text in sample["pieces"] + sample["extra"]:
                print(shorten(text))


def shorten(text: str) -> str:
    """Shortens a text to three lines. It cuts the middle, as the answer is at the end."""
    text = visible(text)
    room = 3 * shutil.get_terminal_size().columns
    if len(text) <= room:
        return text
    return f"{text[: room // 2]} ... {text[-room // 2 :]}"


def write_page(out_dir, steps: dict, step: int) -> str:
    """Writes page.html, which opens at `step` and loads nothing from outside. Returns its path."""
    numbers = sorted(steps)
    size = os.path.getsize(f"{out_dir}/completions.jsonl")
    kept = {*numbers[:: math.ceil(size / PAGE_BYTES)], step, numbers[-1]}
    groups = {number: make_groups(steps[number]) for number in sorted(kept)}
    data = dict(name=str(out_dir), about=about(out_dir), n_steps=len(steps), step=step)
    data |= dict(groups=groups, panels=make_panels(read_log(out_dir, "metrics.jsonl")))
    # In this encoding no completion can be read as HTML.
    packed = base64.b64encode(zlib.compress(json.dumps(data).encode())).decode()
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    path = os.path.join(out_dir, "page.html")
    Path(path).write_text(page.replace("DATA", packed), encoding="utf-8")
    return path


# -- the command line


def show(args) -> None:
    out_dir = args.out_dir
    if out_dir is None:
        logs = glob.glob("out*/metrics.jsonl")
        out_dir = os.path.dirname(max(logs, key=os.path.getmtime, default=""))
    if args.step is None and not args.html:
        print_summary(out_dir)
        print(draw(out_dir))
        return
    steps = read_steps(out_dir)
    step = max(steps, default=0) if args.step in (None, -1) else args.step
    if step not in steps:
        raise ValueError(f"no samples of step {step}; there are samples of {len(steps)} others")
    if args.html:
        print(write_page(out_dir, steps, step))
    else:
        print_step(steps[step], step)


def main(argv=None) -> None:
    """Prints an error as one line, with exit code 2."""
    options = dict(usage=SUPPRESS, formatter_class=RawDescriptionHelpFormatter)
    parser = ArgumentParser(description=__doc__, **options)
    parser.add_argument("out_dir", nargs="?")
    parser.add_argument("--step", type=int, nargs="?", const=-1)
    parser.add_argument("--html", action="store_true")
    args = parser.parse_args(argv)
    try:
        show(args)
    except Exception as error:  # no such run, a full disk, no matplotlib, its errors
        parser.error(visible(error))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal that is not UTF-8
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is not an error
    main()
