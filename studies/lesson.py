"""The figures of learn.ipynb. The lesson computes the numbers with the functions of grpo.py and
passes them in. (The timeline of the four policies is a sketch, figures/four_policies.svg.)

PYTHONPATH=. python studies/lesson.py makes README's picture of a step.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap

import grpo
from tools.view import COLORS

BLUE, ORANGE = COLORS[:2]
GREY = "#777777"
PALE = "#ececec"
# as on the page of `view.py --html`: blue is likelier, orange is less likely
SIGNED = LinearSegmentedColormap.from_list("signed", [ORANGE, "white", BLUE])
SHORT_NAMES = {"<think>": "<t>", "</think>": "</t>", "<eos>": "end", " ": "_"}
BOX = 0.235  # inches: the height of a token's box


def set_style() -> None:
    plt.rc("axes", titlesize=10)
    plt.rc("axes.spines", right=False, top=False)
    plt.rc("figure", dpi=100)
    plt.rc("figure.constrained_layout", use=True)
    plt.rc("font", size=9)
    plt.rc("legend", fontsize=8, frameon=False)


def digits(values) -> str:
    """(+0.8659, -0.8659). A tiny negative number is never rounded to "-0.0000"."""
    rounded = [round(float(value), 4) + 0.0 for value in values]
    return "(" + ", ".join(f"{value:+.4f}" for value in rounded) + ")"


def draw_estimates(clouds: dict, exact, offsets, spreads: dict) -> None:
    """Section 3. Left: estimates of a gradient. Right: their spread against the reward offset.

    clouds: name -> estimates [n, 3]. exact: the gradient [3]. spreads: name -> one for each offset.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.1))
    rng = np.random.default_rng(0)
    for color, name in zip((ORANGE, BLUE), clouds, strict=True):
        cloud = np.asarray(clouds[name])
        cloud = cloud + rng.normal(0, 0.05, cloud.shape)  # or equal estimates would hide each other
        style = dict(color=color, label=name)
        left.plot(cloud[:, 0], cloud[:, 2], "o", markersize=3, alpha=0.5, mew=0, **style)
        right.plot(offsets, spreads[name], "o-", markersize=4, **style)
    left.plot(exact[0], exact[2], "+", color="black", markersize=11, mew=1.0, label="exact")
    left.set_title(f"{len(cloud)} estimates of the gradient, rewards + 10 (jittered)")
    left.set_xlabel("gradient by the logit of answer 1, which is wrong")
    left.set_ylabel("by that of answer 3, which is right")
    right.set_title("Spread (standard deviation) of one estimate")
    right.set_xlabel("added to every reward")
    right.set_ylim(bottom=0)
    left.legend()
    right.legend()
    plt.show()


def draw_tokens(samples: list, tokenizer, panels: dict, limit: float, labels: list = ()) -> None:
    """Sections 4, 5, 8. A panel for each {title: values of every token}, a row for each sample.

    values: one list for each sample; NaN is a gray box. limit: the value with the deepest colour.
    """
    tokens = [tokenizer.convert_ids_to_tokens(s.completion_ids.tolist()) for s in samples]
    width = max(len(texts) for texts in tokens)
    if not labels:
        labels = [f"{i}:  A {s.advantages[0]:+.2f}" for i, s in enumerate(samples, 1)]
    height = len(panels) * (BOX * len(tokens) + 0.4)
    figure, axes = plt.subplots(len(panels), 1, figsize=(10, height), squeeze=False)
    for axis, (title, values) in zip(axes[:, 0], panels.items(), strict=True):
        image = np.zeros((len(tokens), width))  # 0: white
        for row, (texts, of_row) in enumerate(zip(tokens, values, strict=True)):
            image[row, : len(texts)] = of_row
            for column, (text, value) in enumerate(zip(texts, of_row, strict=True)):
                ink = "black" if abs(value) <= 0.6 * limit else "white"
                style = dict(ha="center", va="center", fontsize=8, color=ink)
                axis.text(column, row, SHORT_NAMES.get(text, text), **style)
        axis.set_facecolor(GREY)
        shown = axis.imshow(image, SIGNED, vmin=-limit, vmax=limit, aspect="auto")
        is_beyond = np.nanmax(np.abs(image)) > limit  # then the ends of the scale are arrows
        extend = "both" if is_beyond else "neither"
        figure.colorbar(shown, ax=axis, pad=0.01, fraction=0.03, extend=extend)
        axis.set_title(title, loc="left")
        axis.set_yticks(range(len(tokens)), labels)
        axis.set_xticks(np.arange(width) + 0.5, [""] * width)
        axis.tick_params(length=0)
        axis.grid(axis="x", color="white")
        axis.hlines(np.arange(len(tokens)) - 0.5, -0.5, width - 0.5, color="white", lw=2)
        axis.spines[:].set_visible(False)
    plt.show()


def draw_surrogate(ratios, curves: dict) -> None:
    """Section 5. curves: advantage -> (values of the surrogate, slopes w.r.t. log-probability)."""
    _, axes = plt.subplots(1, len(curves), figsize=(10, 3.1), sharex=True)
    for axis, (advantage, (values, slopes)) in zip(axes, curves.items(), strict=True):
        flat = ratios[slopes == 0]
        axis.axvspan(flat.min(), flat.max(), color=PALE, label="no gradient")
        style = dict(color=GREY, lw=1, label="ratio * A, not clipped")
        axis.plot(ratios, advantage * ratios, "--", **style)
        axis.plot(ratios, values, color=BLUE, lw=2.5, label="clipped")
        axis.plot(1, advantage, "o", color="black", label="first optimizer step: ratio 1")
        axis.set_xlabel("ratio: policy now / policy before the update")
        axis.set_title(f"A = {advantage:+.0f}")
        axis.legend()
    axes[0].set_ylabel("larger is better")
    plt.show()


def draw_curves(steps: list) -> None:
    """Section 9. steps: for each step a dict with a value for each of these panels."""
    panels = {
        "reward": "reward: share of right answers",
        "length": "length of a completion, tokens",
        "no_signal": "share of groups without a signal",
        "loss": "loss: no measure of learning",
        "grad_norm": "norm of the gradient",
        "kl_k1": "KL to the reference, nats a token",
    }
    numbers = range(1, len(steps) + 1)
    _, axes = plt.subplots(2, 3, figsize=(10, 4.2), sharex=True)
    for axis, (name, title) in zip(axes.flat, panels.items(), strict=True):
        values = [step[name] for step in steps]
        axis.plot(numbers, values, "o-", markersize=3, color=BLUE, label="k1")
        axis.set_title(title)
        axis.set_xticks(range(2, len(steps) + 1, 2))
        axis.grid(alpha=0.3)
        if name != "loss":
            axis.set_ylim(bottom=0)
    axis.plot(numbers, [step["kl"] for step in steps], "--", color=ORANGE, label="k3")
    axis.legend()
    for axis in axes[1]:
        axis.set_xlabel("step")
    plt.show()


def draw_step() -> None:
    """README: one group of the first step of the bundled task: rewards, advantages, tokens."""
    import common  # sets a style for the studies; this picture has the lesson's

    set_style()
    plt.rcParams["axes.grid"] = False
    policy, samples = common.rollout(num_prompts=32)
    tokenizer = grpo.load_tokenizer(policy.model.name_or_path, grpo.Config())
    group = samples[27 * 8 : 28 * 8]
    prompt = group[0].prompt
    title = f"prompt  {prompt.text}    right answer  {prompt.row['answer']}"
    labels = [f"reward {s.reward:.0f}    advantage {s.advantages[0]:+.2f}" for s in group]
    draw_tokens(group, tokenizer, {title: [s.advantages for s in group]}, 1.7, labels)
    plt.gcf().axes[1].set_ylabel("likelier" + " " * 18 + "less likely", rotation=270, labelpad=12)
    plt.savefig("sample_data/step.png", dpi=180)  # sharp on screens of two pixels a point


if __name__ == "__main__":
    draw_step()
