"""
Look at what a run left in its out_dir. Pictures need matplotlib, tables rich.

python view.py out                              # curves of a run: writes out/curves.png
python view.py out_a out_b --out picture.png    # several runs in one picture
python view.py out --step 40                    # the completions of step 40 (no number: the last step)
python view.py out --step 40 --html page.html   # the same with the full text, in one web page
"""

import argparse
import base64
import html
import io
import json
import math
import os
import signal
import sys

# -----------------------------------------------------------------------------
# reading


def read_jsonl(path):
    """The rows of a log. A line that is not whole (the run was killed while it wrote) is skipped."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int) and 0 <= row["step"] < 2**53:
                rows.append(row)  # beyond 2**53 a float, and so an axis, cannot tell two steps apart
    return rows


def is_number(value):
    """Not NaN, not infinite, and no integer that is too large for a float."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def series(rows, key):
    """{step: value} of one key, by step, without the steps that do not have it. Of two lines of a step the later one
    holds. Beyond 1e100 matplotlib's own sums overflow: what is larger is drawn there, what is tiny as 0."""
    points = {row["step"]: max(-1e100, min(1e100, float(row[key]))) for row in rows if is_number(row.get(key))}
    return {step: value if abs(value) > 1e-100 else 0.0 for step, value in sorted(points.items())}


def run_name(out_dir, out_dirs):
    """The directory's base name, with as much of the path in front as it takes to tell it from the others."""
    path, *others = [os.path.abspath(d).split(os.sep) for d in [out_dir, *out_dirs]]
    n = next((n for n in range(1, len(path)) if sum(o[-n:] == path[-n:] for o in others) == 1), 1)
    name = visible("/".join(path[-n:]))
    return name if len(name) <= 40 else name[:12] + "…" + name[-27:]


# -----------------------------------------------------------------------------
# curves

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito
PANELS = [  # title, y label, then (key, label, format) for each curve; "o" is for what only eval steps have
    ("Reward", "mean of the samples", [("reward", "", "-")]),
    ("Eval accuracy", "fraction correct ± 1 s.e.", [("eval_accuracy", "", "o-")]),
    ("Length", "tokens a completion", [("completion_length", "train", "-"), ("eval_length", "eval", "o:")]),
    ("KL to reference", "nats per token", [("kl_k1", "k1", "-"), ("kl_k3", "k3", "--")]),
    ("Gradient norm", "L2, before clipping", [("grad_norm", "", "-")]),
    ("Signal", "mean |A|, share of groups", [("advantage_abs", "|A|", "-"), ("frac_zero_std", "A = 0", "--")]),
]
NOTE = "faint: every step;  bold: mean over 5 % of the run;  A: advantage;  A = 0: groups of equal rewards"


def smooth(values):
    """Centred mean over about 5 % of the run; at the ends, over what there is of the window."""
    half = len(values) // 40
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


def draw(out_dirs, path):
    """One picture of six panels, a colour for each run. path may also be a binary file, to write a PNG to."""
    # Figure and not pyplot: no backend to choose, no window, no state left behind in the trainer
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    runs = [read_jsonl(os.path.join(d, "metrics.jsonl")) for d in out_dirs]
    colors = [COLORS[i % len(COLORS)] for i in range(len(runs))]
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 15, "text.parse_math": False}):
        fig = Figure(figsize=(16, 9), dpi=100, layout="constrained")
        fig.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
        for ax, (title, ylabel, curves) in zip(fig.subplots(2, 3, sharex=True).flat, PANELS, strict=True):
            drawn = []  # every value in the panel
            for rows, color in zip(runs, colors, strict=True):
                for key, _, line in curves:
                    points = series(rows, key)
                    x, y = list(points), list(points.values())
                    drawn += y
                    if key == "eval_accuracy":
                        stderr = series(rows, "eval_stderr")
                        ax.errorbar(x, y, [abs(stderr.get(step, 0)) for step in x], color=color, capsize=4)
                    if line == "-":
                        ax.plot(x, y, color=color, lw=1, alpha=0.3 if len(runs) < 4 else 0.15)
                    if "o" in line:
                        ax.plot(x, y, line, color=color, lw=2, ms=7)
                    else:
                        ax.plot(x, smooth(y), line, color=color, lw=2.5, marker="o" if len(x) == 1 else None)

            size = sorted(abs(y) for y in drawn if y)
            median = size[len(size) // 2] if size else 0
            least = 0  # of a tick's label
            ax.locator_params(nbins=6)
            ax.xaxis.get_major_locator().set_params(integer=True)
            if not drawn:
                text = "not logged" + "\n(beta 0: no reference model)" * ("KL" in title)
                ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="#666666")
                ax.set_yticks([])
            elif title == "Eval accuracy" and 0 <= min(drawn) <= max(drawn) <= 1:
                ax.set_ylim(-0.02, 1.02)
            elif size and size[-1] > 30 * median:  # one spike must not flatten the rest
                least, linear = median, max(1, math.log10(size[-1] / median) / 4)  # decades: labels keep apart
                ax.set_yscale("symlog", linthresh=median, linscale=linear)
                ax.yaxis.get_major_locator().set_params(numticks=6)
                ylabel += f"\nlog above {median:.1g}"
            elif 0 <= min(drawn) <= max(drawn) / 2 or 0 <= min(drawn) == max(drawn):
                ax.set_ylim(bottom=0)
            ax.yaxis.set_major_formatter(lambda y, _, least=least: f"{y:g}" if y == 0 or abs(y) >= least else "")
            ax.set_title(title, fontsize=18, fontweight="bold", loc="left")
            ax.set(xlabel="step", ylabel=ylabel)
            ax.tick_params(labelbottom=True)
            ax.grid(color="#e6e6e6")
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
            if len(curves) > 1:  # beside the title, where no curve can be
                keys = [Line2D([], [], ls=s.strip("o"), marker=s[: "o" in s], lw=2, c="#444444") for *_, s in curves]
                labels = [label for _, label, _ in curves]
                place = dict(loc="lower right", bbox_to_anchor=(1, 0.99), borderpad=0, frameon=False)
                ax.legend(keys, labels, ncols=2, handlelength=1.7, handletextpad=0.5, columnspacing=1, **place)

        names = [run_name(d, out_dirs) for d in out_dirs]
        columns = min(len(runs), max(1, 110 // (max(map(len, names)) + 8)))
        keys = [Line2D([], [], color=color, lw=4) for color in colors]
        fig.legend(keys, names, loc="outside upper center", ncols=columns, fontsize=16, frameon=False)
        fig.supxlabel(NOTE, fontsize=14, color="#666666")
        file_format = os.path.splitext(path)[1][1:] if isinstance(path, str) else ""
        fig.savefig(path, dpi=100, format=file_format or "png")


# -----------------------------------------------------------------------------
# completions as a table in the terminal

COLUMNS = ["group", "prompt", "completion", "reward", "parts", "advantage", "length"]


def select(rows, step):
    """The samples of a step, highest advantage first; step -1 is the last one that was logged."""
    known = sorted({row["step"] for row in rows})
    step = known[-1] if step == -1 and known else step
    if step not in known:
        fail(f"no completions of step {step}; logged steps: {f'{known[0]} to {known[-1]}' if known else 'none'}")
    rows = [row for row in rows if row["step"] == step]
    return step, sorted(rows, key=lambda r: -r["advantage"] if is_number(r.get("advantage")) else math.inf)


def cells(row):
    """What stands in the columns: for each a list of strings, one below the other."""

    def number(value, spec):
        return format(value + 0.0, spec) if is_number(value) else "-" if value is None else str(value)

    parts = row.get("parts") if isinstance(row.get("parts"), dict) else {}
    return {
        "group": [str(row.get("group", "-"))],
        "prompt": [str(row.get("prompt", ""))],
        "completion": [str(row.get("completion", ""))],
        "reward": [number(row.get("reward"), ".4g")],
        "parts": [f"{name} {number(value, '.4g')}" for name, value in parts.items()],
        "advantage": [number(row.get("advantage"), "+.3f")],
        "length": [number(row.get("length"), "g")] + ["cut off"] * (row.get("finish_reason") == "length"),
    }


def visible(text, keep=""):
    """Completions are hostile data: what would move the cursor, turn the direction of the text or not encode
    (newlines, escapes, marks without width, lone surrogates) is shown as its escape."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def print_table(rows):
    """As wide as the terminal, 80 columns where there is none. Of a long text the middle goes: the answer stands at
    the end."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # takes [red] and :smile: as they stand

    console = Console()
    room = 3 * console.width  # characters of a text

    def text(lines):
        lines = [visible(line).encode(console.encoding, "backslashreplace").decode(console.encoding) for line in lines]
        return Text("\n".join(s if len(s) <= room else f"{s[: room // 2]} ... {s[-room // 2 :]}" for s in lines))

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), leading=1)
    for name in COLUMNS:
        if name != "parts":  # they stand below the reward, which leaves more room for the texts
            style = {} if name in ("prompt", "completion") else dict(max_width=20, justify="right")
            table.add_column(name, overflow="fold", **style)
    for row in rows:
        columns = cells(row)
        columns["reward"] += columns.pop("parts")
        table.add_row(*map(text, columns.values()))
    console.print(table)


# -----------------------------------------------------------------------------
# completions as a page

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2em }}
h1, h2 {{ font-size: 1.3em }}
img {{ width: 100%; max-width: 1200px }}
table {{ border-collapse: collapse; width: 100%; margin-bottom: 3em }}
th, td {{ padding: .5em .7em; vertical-align: top; text-align: left; border-bottom: 1px solid #ddd }}
th {{ position: sticky; top: 0; background: #f2f2f2; cursor: pointer; white-space: nowrap }}
th[data-sorted]::after {{ content: " " attr(data-sorted) }}
.prompt {{ width: 30% }} .completion {{ width: 50% }}
.group, .reward, .advantage, .length {{ text-align: right }}
td {{ white-space: pre; font-variant-numeric: tabular-nums }}
div {{ font: 13px/1.45 monospace; white-space: pre-wrap; overflow-wrap: anywhere }}
div {{ max-height: 24em; overflow: auto }}
details {{ color: #666; font-size: 13px }}
</style></head><body>
<h1>{title}</h1>
<p>{count} samples, highest advantage first. Click on a heading to sort by it.</p>
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
<h2>Curves of the run</h2>
<img alt="Curves of the run" src="data:image/png;base64,{picture}">
<script>
for (const th of document.querySelectorAll("th")) th.onclick = () => {{
  const sign = th.dataset.sorted === "▼" ? 1 : -1, body = document.querySelector("tbody");
  const text = tr => tr.cells[th.cellIndex].textContent;
  const compare = (a, b) => parseFloat(a) - parseFloat(b) || a.localeCompare(b);
  document.querySelectorAll("th").forEach(other => delete other.dataset.sorted);
  th.dataset.sorted = sign > 0 ? "▲" : "▼";
  body.append(...[...body.rows].sort((a, b) => sign * compare(text(a), text(b))));
}};
</script></body></html>
"""


def page(out_dir, step, rows):
    """The table with the full texts, and the curves, in one page that loads nothing from anywhere."""

    def escape(text):
        return html.escape(visible(text, keep="\n\t"))

    advantages = [r["advantage"] if is_number(r.get("advantage")) else 0 for r in rows]
    largest = max(map(abs, advantages)) or 1
    body = []
    for row, advantage in zip(rows, advantages, strict=True):
        body.append("<tr>")
        for name, lines in cells(row).items():
            text, style = "\n".join(map(escape, lines)), ""
            if name in ("prompt", "completion"):
                text = f"<div>{text}</div>"
            if name == "prompt" and row.get("row"):
                data = escape(json.dumps(row["row"], ensure_ascii=False, indent=1))
                text += f"<details><summary>row</summary><div>{data}</div></details>"
            if name == "advantage":
                color = "0,114,178" if advantage > 0 else "213,94,0"
                style = f' style="background: rgba({color},{0.6 * abs(advantage) / largest:.3f})"'
            body.append(f'<td class="{name}"{style}>{text}</td>')
        body.append("</tr>\n")
    sorted_by = {"advantage": ' data-sorted="▼"'}
    head = "".join(f'<th class="{name}"{sorted_by.get(name, "")}>{name}</th>' for name in COLUMNS)
    picture = io.BytesIO()
    draw([out_dir], picture)
    return PAGE.format(
        title=escape(f"{run_name(out_dir, [out_dir])}, step {step}"),
        count=len(rows),
        head=head,
        body="".join(body),
        picture=base64.b64encode(picture.getvalue()).decode(),
    )


# -----------------------------------------------------------------------------
# command line


def fail(message):
    print(visible(f"view.py: {message}"), file=sys.stderr)
    sys.exit(2)


def main(argv=None):
    as_it_stands = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_stands)
    parser.add_argument("out_dirs", nargs="+", metavar="out_dir")
    parser.add_argument("--out", help="the picture's file; default: curves.png, in out_dir if it is only one")
    parser.add_argument("--step", type=int, nargs="?", const=-1, help="show the completions of this step")
    parser.add_argument("--html", help="write the completions to this page")
    parser.error = fail  # one line, without the usage
    args = parser.parse_args(argv)
    for d in args.out_dirs:
        if not os.path.isdir(d):
            fail(f"no such directory: {d}")
    try:
        if args.step is None and args.html is None:
            path = args.out or os.path.join(args.out_dirs[0] if len(args.out_dirs) == 1 else "", "curves.png")
            draw(args.out_dirs, path)
            print(path)
            return
        if len(args.out_dirs) > 1 or args.out:
            fail("--step and --html show one run, and take no --out")
        step = -1 if args.step is None else args.step
        step, rows = select(read_jsonl(os.path.join(args.out_dirs[0], "completions.jsonl")), step)
        if args.html:
            text = page(args.out_dirs[0], step, rows)
            with open(args.html, "w", encoding="utf-8") as f:
                f.write(text)
            print(args.html)
        else:
            print(f"step {step}, {len(rows)} samples, highest advantage first\n")
            print_table(rows)
    except (OSError, ValueError) as e:  # a file that is not there or not writable, an unknown picture format
        fail(str(e))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main()
