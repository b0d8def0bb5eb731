"""
Look at the logs in a run's out_dir. Pictures need matplotlib.

python view.py                                  # curves of the newest run here (out, out.1, ...)
python view.py out_a out_b --out picture.png    # several runs in one picture
python view.py out --step 40                    # print the completions of step 40 by group
python view.py out --step                       # ... of the last step
python view.py out --html run.html              # a page: curves, steps, groups, tokens
"""

import argparse
import base64
import glob
import itertools
import json
import math
import os
import shutil
import signal
import sys
import zlib
from pathlib import Path

from harness.curves import COLORS, draw, read_jsonl, read_panels, run_names, visible

MEASURES = {  # of a token, by the names in completions.jsonl: how the page explains them
    "push": "weight in the gradient, as an advantage: blue is made likelier, red less likely",
    "logp": "log-probability before the update, in nats: the deeper red, the less likely",
    "entropy": "of the distribution that the token was drawn from, in nats",
    "kl": "log p - log p of the reference, in nats",
    "gap": "log p - log p of the sampler, in nats",
}
COLUMNS = "group prompt completion reward parts advantage length finish_reason".split()
MAX_PAGE_BYTES = 9_850_000  # of the steps in a page; of a longer run it shows some, evenly spread


# -- a step: its groups, their samples


def read_steps(out_dir):
    """{step: its rows in completions.jsonl}"""
    path = os.path.join(out_dir, "completions.jsonl")
    steps = {}
    for row in read_jsonl(path):
        if row.keys() >= set(COLUMNS):
            steps.setdefault(row["step"], []).append(row)
    if not steps:
        why = "too early, or another version?"
        raise ValueError(f"{path} has no row with {', '.join(COLUMNS)}: {why}")
    return steps


def choose_step(wanted, logs):
    """The step that the user wants, if a run has logged it. -1 or None: the last one."""
    steps = sorted(set().union(*logs))
    if wanted in (-1, None):
        return steps[-1]
    if wanted not in steps:
        logged = f"{steps[0]} to {steps[-1]}"
        raise ValueError(f"no completions of step {wanted}; logged steps: {logged}")
    return wanted


def make_cards(step, logs, names):
    """The groups of a step, those with the most signal first. Runs that share their prompts (by the
    seed) share a card: it holds the group of each."""
    cards = {}
    for log, name in zip(logs, names, strict=True):
        groups = {}
        for row in log.get(step, []):
            groups.setdefault((row["group"], row["prompt"]), []).append(row)
        for (index, prompt), rows in groups.items():
            group = make_group(rows)
            if len(logs) > 1:
                group["title"] = f"{name}: {group['title']}"
            data_row = json.dumps(rows[0].get("row"), indent=1, ensure_ascii=False)
            card = dict(title=f"group {index}", prompt=prompt, row=data_row, runs=[])
            cards.setdefault((index, prompt), card)["runs"].append(group)
    return sorted(cards.values(), key=card_signal, reverse=True)


def card_signal(card):
    return max(group["signal"] for group in card["runs"])


def make_group(rows):
    """A group of one run: its samples by reward. Equal samples are shown once, with their count."""
    samples = {}
    for row in sorted(rows, key=reward_order):
        verdicts = verdicts_of(row)
        facts = facts_of(row, verdicts)
        sample = dict(facts=facts, verdicts=verdicts, advantage=row["advantage"])
        sample |= dict(count=0, pieces=[row["completion"]], measures={})
        sample = samples.setdefault((row["completion"], facts), sample)
        sample["count"] += 1
        if row.get("tokens"):
            sample["pieces"] = row["tokens"]["text"]
            sample["measures"] = measures(row["tokens"])

    right = 0
    for sample in samples.values():
        count = sample["count"]
        if "right" in sample["verdicts"]:
            right += count
        if count > 1:
            sample["facts"] = f"{count} × {sample['facts']}"
    signal = sum(abs(row["advantage"] or 0) for row in rows) / len(rows)
    title = f"{right} of {len(rows)} right, mean |advantage| {number(signal)}"
    return dict(title=title, signal=signal, samples=list(samples.values()))


def reward_order(row):
    """The highest reward first; a sample whose reward failed comes last."""
    if row["reward"] is None:
        return math.inf
    return -row["reward"]


def verdicts_of(row):
    """Right or wrong by the first reward function, as in pass@k, and whether it was cut off."""
    score = [*row["parts"].values(), row["reward"]][0]
    end = "ended"
    if row["finish_reason"] == "length":
        end = "cut off"
    if score is None:
        return [end]
    if score > 0.5:
        return ["right", end]
    return ["wrong", end]


def facts_of(row, verdicts):
    """The line above a completion."""
    facts = [f"reward {number(row['reward'])}", *verdicts]
    facts += [f"{name} {number(value)}" for name, value in row["parts"].items()]
    facts += [f"advantage {number(row['advantage'], '+')}", f"{row['length']} tokens"]
    return ", ".join(facts)


def number(value, sign=""):
    if value is None:
        return "-"
    return f"{value + 0.0:{sign}.3g}"  # + 0.0: no "-0"


def measures(tokens):
    """{measure: a value for each token, None if it was not logged}. The log holds thousandths."""
    chosen = {}
    for name in MEASURES:
        if name in tokens:
            chosen[name] = [from_thousandths(value) for value in tokens[name]]
    return chosen


def from_thousandths(value):
    """Two digits, which keep the page small."""
    if value is None:
        return None
    return float(f"{value / 1000:.2g}")


# -- in the terminal


def print_cards(cards):
    room = 3 * shutil.get_terminal_size().columns  # characters of a text
    for card in cards:
        print("\n==", shorten(f"{card['title']}: {card['prompt']}", room))
        for group in card["runs"]:
            print(shorten(group["title"], room))
            for sample in group["samples"]:
                print("\n" + shorten(sample["facts"], room))
                print(shorten("".join(sample["pieces"]), room))


def shorten(text, room):
    """Cuts the middle of long texts: the answer stands at the end."""
    text = visible(text)
    if len(text) <= room:
        return text
    return f"{text[: room // 2]} ... {text[-room // 2 :]}"


# -- the page


def write_page(out_dirs, step, path):
    """Writes the page to one file that loads nothing. It opens at `step`."""
    panels = read_panels(out_dirs)
    names = run_names(out_dirs)
    logs = [read_steps(out_dir) for out_dir in out_dirs]
    step = choose_step(step, logs)
    packed = {n: pack(make_cards(n, logs, names)) for n in sorted(set().union(*logs))}
    steps = thin_out(packed, step)
    logged = set(steps)
    for panel in panels:
        for curve in panel["curves"]:
            logged.update(curve["steps"])

    data = dict(
        step=step,
        steps=steps,
        logged=sorted(logged),
        packed={n: packed[n] for n in steps},
        panels=panels,
        measures=MEASURES,
        runs=list(zip(names, itertools.cycle(COLORS), strict=False)),
    )
    text = json.dumps(data).replace("<", "\\u003c")  # so that no text can end the script
    template = Path(__file__).resolve().parent / "harness" / "page.html"
    page = template.read_text(encoding="utf-8").replace('"DATA"', text)
    Path(path).write_text(page, encoding="utf-8")
    if len(steps) < len(packed):
        path += f" (of {len(packed)} steps {len(steps)}: all would be too large)"
    print(path)


def pack(cards):
    """As compressed text, which the page unpacks when the step is looked at."""
    text = json.dumps(cards, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def thin_out(packed, step):
    """The steps that a page has room for, evenly spread: the last one and `step` are among them."""
    steps = list(packed)
    excess = sum(len(text) for text in packed.values()) / MAX_PAGE_BYTES
    if excess <= 1:
        return steps
    chosen = {step}
    for i in range(int(len(steps) / excess)):
        chosen.add(steps[-1 - int(i * excess)])
    return sorted(chosen)


# -- the command line


def fail(message):
    print(visible(f"view.py: {message}"), file=sys.stderr)
    sys.exit(2)


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out_dirs", nargs="*", metavar="out_dir", help="default: the newest run here")
    add("--out", help="the picture's file; default: curves.png, in out_dir if it is only one")
    add("--step", type=int, nargs="?", const=-1, help="print this step, or open the page there")
    add("--html", help="write the page to this file")
    parser.error = fail  # one line, without the usage
    args = parser.parse_args(argv)
    if args.out and (args.html or args.step is not None):
        fail("--out is the picture's file: not with --step or --html")
    if not args.out_dirs:
        logs = glob.glob("out/metrics.jsonl") + glob.glob("out.*/metrics.jsonl")
        if not logs:
            fail("no run here (out, out.1, ...)")
        args.out_dirs = [os.path.dirname(max(logs, key=os.path.getmtime))]
    if args.out is None:
        args.out = "curves.png"
        if len(args.out_dirs) == 1:
            args.out = os.path.join(args.out_dirs[0], "curves.png")
    return args


def show(args):
    """Writes the page or the picture, or prints a step."""
    if args.html:
        write_page(args.out_dirs, args.step, args.html)
    elif args.step is not None:
        logs = [read_steps(out_dir) for out_dir in args.out_dirs]
        step = choose_step(args.step, logs)
        count = sum(len(log.get(step, [])) for log in logs)
        print(f"step {step}, {count} samples, groups with the most signal first")
        print_cards(make_cards(step, logs, run_names(args.out_dirs)))
    else:
        draw(args.out_dirs, args.out)
        print(args.out)


def main(argv=None):
    args = parse_args(argv)
    try:
        show(args)
    except Exception as error:  # no such run, nothing of this version in it; what matplotlib raises
        fail(error)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main()
