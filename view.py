"""
Look at the logs in a run's out_dir. Pictures need matplotlib.

python view.py                                  # curves of the newest run here (out, out.1, ...)
python view.py out_a out_b --out picture.png    # curves of several runs in one picture
python view.py out --step 40                    # print the completions of step 40 by group
python view.py out --step                       # ... of the last step
python view.py out --html run.html              # a page: curves, steps, groups, tokens
python view.py --source annotated.html          # no run: grpo.py beside its explanation
"""

import argparse
import base64
import glob
import json
import math
import operator
import os
import shutil
import signal
import sys
import zlib
from itertools import zip_longest
from pathlib import Path

from harness.annotated import write_annotated
from harness.curves import draw, read_jsonl, read_panels, visible

MEASURES = {  # per token: name in completions.jsonl -> explanation on the page
    "push": "weight in the gradient, in units of advantage: blue likelier, orange less likely",
    "logp": "log-probability before the update, in nats: the deeper red, the less likely",
    "entropy": "of the distribution that the token was drawn from, in nats",
    "kl": "log p - log p of the reference, in nats",
    "gap": "log p - log p of the sampler, in nats",
}


# -- a step: its groups, their samples


def read_steps(out_dir):
    """{step: its rows in completions.jsonl}"""
    path = os.path.join(out_dir, "completions.jsonl")
    steps = {}
    for row in read_jsonl(path):
        steps.setdefault(row["step"], []).append(row)
    if not steps:
        raise ValueError(f"{path} has no completions yet")
    return steps


def choose_step(wanted, steps):
    """The step that the user wants, if the run has logged it. -1 or None: the last one."""
    logged = sorted(steps)
    if wanted in (-1, None):
        return logged[-1]
    if wanted not in steps:
        last = f"{logged[0]} to {logged[-1]}"
        raise ValueError(f"no completions of step {wanted}; logged steps: {last}")
    return wanted


def make_cards(rows, by_token=True):
    """The groups of a step, those with the most signal first. by_token: a sample with notes on its
    tokens is in one piece per token."""
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    cards = [make_card(group, by_token) for group in groups.values()]
    return sorted(cards, key=operator.itemgetter("signal"), reverse=True)


def make_card(rows, by_token=True):
    """A group: its samples by reward. Equal samples are shown once, with their count."""
    samples = {}
    right = 0
    for row in sorted(rows, key=reward_order):
        verdicts = verdicts_of(row)
        if "right" in verdicts:
            right += 1
        facts = facts_of(row, verdicts)
        advantage = round(row["advantage"], 3)
        parts = parts_of(row)
        sample = dict(facts=facts, verdicts=verdicts, advantage=advantage, count=0)
        sample = samples.setdefault((row["completion"], str(parts), facts), sample)
        sample["count"] += 1
        tokens = parts
        if by_token:
            tokens = row.get("tokens", parts)
        sample["pieces"] = tokens["text"]
        sampled = tokens.get("sampled", [])
        sample["replied"] = [i for i, drawn in enumerate(sampled) if not drawn]
        sample["measures"] = measures(tokens)

    for sample in samples.values():
        if sample["count"] > 1:
            sample["facts"] = f"{sample['count']} × {sample['facts']}"
    signal = sum(abs(row["advantage"]) for row in rows) / len(rows)
    first = rows[0]
    return dict(
        title=f"group {first['group']}",
        prompt=first["prompt"],
        row=json.dumps(first.get("row"), indent=1, ensure_ascii=False),
        summary=f"{right} of {len(rows)} right, mean |advantage| {number(signal)}",
        signal=signal,
        samples=list(samples.values()),
    )


def parts_of(row):
    """The texts of a sample, in the form of notes on tokens: one for each turn and each reply of an
    episode, with the name of its writer; without an environment the completion."""
    if "turns" not in row:
        return dict(text=[row["completion"]])
    messages = []
    for turn, reply in zip_longest(row["turns"], row["replies"], fillvalue=[]):
        messages.append(dict(role="assistant", name="policy", content=turn))
        if isinstance(reply, str):
            reply = [dict(role="user", name="environment", content=reply)]
        messages += reply
    texts = [f"{m['name']:>11}: {m['content']}" for m in messages]
    return dict(text=texts, sampled=[m["role"] == "assistant" for m in messages])


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
    if "failure" in row:
        facts.append(f"environment failed: {row['failure']}")
    return ", ".join(facts)


def number(value, sign=""):
    if value is None:
        return "-"
    return f"{value + 0.0:{sign}.3g}"  # + 0.0: no "-0"


def measures(tokens):
    """{measure: a value for each token}. The log holds thousandths, a page two digits."""
    chosen = {}
    for name in MEASURES:
        if name in tokens:
            chosen[name] = [float(f"{value / 1000:.2g}") for value in tokens[name]]
    return chosen


# -- in the terminal


def print_cards(cards):
    room = 3 * shutil.get_terminal_size().columns  # characters of a text
    for card in cards:
        print("\n==", shorten(f"{card['title']}: {card['prompt']}", room))
        print(card["summary"])
        for sample in card["samples"]:
            print("\n" + shorten(sample["facts"], room))
            for text in sample["pieces"]:
                print(shorten(text, room))


def shorten(text, room):
    """Cuts the middle of long texts: the answer stands at the end."""
    text = visible(text)
    if len(text) <= room:
        return text
    return f"{text[: room // 2]} ... {text[-room // 2 :]}"


# -- the page


def write_page(out_dir, steps, step, path):
    """Writes a self-contained page, which opens at `step`."""
    panels = read_panels([out_dir])
    logged = set(steps)
    for panel in panels:
        for curve in panel["curves"]:
            logged.update(curve["steps"])

    data = dict(
        name=out_dir,
        step=step,
        steps=sorted(steps),
        logged=sorted(logged),
        packed={step: pack(make_cards(rows)) for step, rows in steps.items()},
        panels=panels,
        measures=MEASURES,
    )
    text = json.dumps(data).replace("<", "\\u003c")  # so that no text can end the script
    template = Path(__file__).resolve().parent / "harness" / "page.html"
    page = template.read_text(encoding="utf-8").replace('"DATA"', text)
    Path(path).write_text(page, encoding="utf-8")


def pack(cards):
    """As compressed text, which the page unpacks when the step is looked at."""
    text = json.dumps(cards, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


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
    add("--out", help="the picture's file; default: curves.png, in out_dir if there is one")
    add("--step", type=int, nargs="?", const=-1, help="print this step, or open the page there")
    add("--html", help="write the page to this file")
    add("--source", help="write grpo.py beside its explanation to this file")
    parser.error = fail  # one line, without the usage
    args = parser.parse_args(argv)
    wants_step = args.html or args.step is not None
    if args.source is not None:
        if wants_step or args.out or args.out_dirs:
            fail("--source takes no run and no other flag")
        if not args.source.endswith(".html"):
            fail(f"--source: {args.source} does not end in .html")
        return args
    if wants_step and (args.out or len(args.out_dirs) > 1):
        fail("--step and --html take one run and no --out, which is the picture's file")
    if not args.out_dirs:
        logs = glob.glob("out/metrics.jsonl") + glob.glob("out.*/metrics.jsonl")
        if not logs:
            fail("no run here (out, out.1, ...)")
        args.out_dirs = [os.path.dirname(max(logs, key=os.path.getmtime))]
    log = "completions.jsonl" if wants_step else "metrics.jsonl"
    for out_dir in args.out_dirs:
        if not os.path.exists(os.path.join(out_dir, log)):
            fail(f"{out_dir} has no {log}: is it the directory of a run?")
    if args.out is None:
        args.out = "curves.png"
        if len(args.out_dirs) == 1:
            args.out = os.path.join(args.out_dirs[0], "curves.png")
    return args


def show(args):
    """Writes a page or the picture, or prints a step."""
    if args.source:
        write_annotated(args.source)
        print(args.source)
        return
    if args.step is None and not args.html:
        draw(args.out_dirs, args.out)
        print(args.out)
        return
    [out_dir] = args.out_dirs
    steps = read_steps(out_dir)
    step = choose_step(args.step, steps)
    if args.html:
        write_page(out_dir, steps, step, args.html)
        print(args.html)
    else:
        print(f"step {step}, {len(steps[step])} samples, groups with the most signal first")
        print_cards(make_cards(steps[step], by_token=False))


def main(argv=None):
    args = parse_args(argv)
    try:
        show(args)
    except Exception as error:  # no such run, a log of another version, or a matplotlib error
        fail(error)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main()
