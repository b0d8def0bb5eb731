"""The notes of a run on its own metrics: each on planted metrics, and none on healthy ones."""

import re

import numpy as np
import pytest

from harness.advice import Advice
from tests.common import HERE, lines, read, small_run

pytest_plugins = "tests.common"

CUT, LENGTH, SILENT = "completions/clipped_ratio", "completions/mean_length", "frac_reward_zero_std"
HEALTHY = {
    "reward": 0.4,
    "rewards/answer/mean": 0.4,
    "rewards/answer/std": 0.5,
    "reward_std": 0.5,
    SILENT: 0.2,
    CUT: 0.02,
    LENGTH: 100.0,
    "entropy": 0.5,
    "kl_k1": 0.02,
    "grad_norm": 0.5,
}


def steps(n=20, **series):
    """n lines of a healthy run. series: a number for a metric, or its values (the last stays)."""
    values = {name: np.atleast_1d(value).tolist() for name, value in series.items()}
    values = {name: value + value[-1:] * (n - len(value)) for name, value in values.items()}
    return [
        HEALTHY | dict(step=i + 1) | {name: value[i] for name, value in values.items()}
        for i in range(n)
    ]


def evals(*accuracies, every=5, stderr=0.02):
    return [
        dict(step=every * i, eval_accuracy=x, eval_stderr=stderr) for i, x in enumerate(accuracies)
    ]


def notes(*histories):
    """The notes of a run with these lines, in the order of their steps."""
    advice = Advice([])
    history = sorted((line for lines in histories for line in lines), key=lambda line: line["step"])
    return [note for line in history for note in advice.see(line)]


def rewards(value, std=0.3):
    return {"reward": value, "rewards/answer/mean": value, "reward_std": std}


PLANTED = {  # name: a history with the fault, what the note says, near misses
    "no signal, all right": (
        steps(**{SILENT: [0.8] * 3 + [0.95]}, **rewards(0.97)),
        "95% of the groups have had no signal for 5 steps; the mean reward is 0.97: take harder",
        [
            steps(**{SILENT: [0.95, 0.95, 0.95, 0.95, 0.8] * 4}, **rewards(0.97)),
            steps(**{SILENT: 0.85}),
        ],
    ),
    "no signal, all wrong": (
        steps(**{SILENT: 0.95}, **rewards(0.01)),
        "no signal for 5 steps; the mean reward is 0.01: take",
        [steps(n=4, **{SILENT: 0.95}, **rewards(0.01))],
    ),
    "no signal, mixed": (
        steps(**{SILENT: 0.95}, **rewards(0.5)),
        "no signal for 5 steps; the mean reward is 0.5: take",
        [steps(**{SILENT: 0.7}, **rewards(0.5))],
    ),
    "cut off": (
        steps(**{CUT: [0.65, 0.6, 0.55, 0.6, 0.62]}),
        "60% are cut off; raise --max_completion_length, or add overlong",
        [steps(**{CUT: [0.65, 0.62, 0.6, 0.55, 0.36, 0.18, 0.1]})],  # it learns to be short
    ),
    "episodes are cut off": (
        steps(**{CUT: 0.6, "turns/mean": 3.0}),
        "60% are cut off; raise --max_completion_length, --max_turns or --max_turn_length (",
        [steps(**{CUT: 0.4, "turns/mean": 3.0})],
    ),
    "one turn": (
        steps(**{"turns/mean": 1.0}),
        "Episodes end with the first turn: all of them, for 5 steps; read them with view.py --step",
        [
            steps(**{"turns/mean": [1.0, 1.0, 1.0, 1.0, 1.01]}),
            steps(n=4, **{"turns/mean": 1.0}),
            steps(),  # without an environment
        ],
    ),
    "KL": (
        steps(kl_k1=np.linspace(0, 2, 20)),
        "The KL grows without end: it is",
        [
            steps(
                n=40, kl_k1=1.2 * (1 - 0.8 ** np.arange(40.0)), **rewards(np.linspace(0.2, 0.9, 40))
            ),  # levels off
            steps(kl_k1=[0.1, 3.0] * 10),  # outliers
            steps(kl_k1=np.linspace(2, 1, 20)),  # distillation: it falls towards a teacher
        ],
    ),
    "one value": (
        steps(**{SILENT: 1.0}, **rewards(0.25, 0.0)),
        "The reward has one value only: it is 0.25 for every sample",
        [
            steps(**rewards([0.25, 0.25, 0.25, 0.25, 0.26], [0.0, 0.0, 0.0, 0.0, 0.1])),
            steps(**rewards([0.0, 1.0] * 10, 0.0)),  # one prompt a step
        ],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_wrong_is_noted_once(name):
    history, text, near = PLANTED[name]
    noted = [note for note in notes(history) if text in note]
    assert len(noted) == 1
    assert "\n" not in noted[0] and "nan" not in noted[0]
    for history in near:
        assert not [note for note in notes(history) if text in note]


def test_a_planted_run_has_no_other_note():
    """But that a reward of one value gives no group a signal."""
    for name, (history, _, _) in PLANTED.items():
        assert len(notes(history)) == 1 + (name == "one value"), name


def test_no_numbers_and_old_names():
    assert notes([dict(step=i, loss=None, kl_k3=1.0) for i in range(30)]) == []
    assert notes(steps(grad_norm=None), steps(n=9, kl_k1=None)) == []


def test_each_note_names_a_paragraph_of_the_reference():
    section = (
        read(f"{HERE}/REFERENCE.md").partition("\n## Troubleshooting\n")[2].partition("\n## ")[0]
    )
    for history, _, _ in PLANTED.values():
        for note in notes(history):
            heading = re.match(r"note: (.+?): .+ \(REFERENCE.md, Troubleshooting\)$", note)[1]
            assert f"- **{heading}" in section


# Measured, every second step: the default run (seed 0), and the first steps of README's real model.
# After these its figure has a reward near 0.8 and lengths near 8.7; in steps 21 to 50 81 % of its
# groups had no signal.
DEFAULT = {
    "reward": [0.25, 0.45, 0.71, 0.73, 0.86, 0.89, 0.91, 0.93, 0.94, 0.95, 0.94],
    "reward_std": [0.44, 0.5, 0.45, 0.45, 0.34, 0.31, 0.28, 0.26, 0.24, 0.22, 0.24],
    SILENT: [0.16, 0.16, 0.13, 0.25, 0.22, 0.53, 0.56, 0.66, 0.72, 0.56, 0.63],
    LENGTH: [8.7, 12, 20.6, 22.8, 23.6, 25.4, 26.2, 26.7, 26.6, 26.8, 26.7],
    CUT: [0, 0, 0, 0, 0.004, 0, 0.004, 0],
    "entropy": [0.107, 0.071, 0.051, 0.039, 0.027, 0.023, 0.021, 0.017, 0.017, 0.017, 0.016],
    "kl_k1": [0, 0.017, 0.046, 0.074, 0.068, 0.072, 0.065, 0.067, 0.068, 0.065, 0.068],
    "grad_norm": [0.47, 0.44, 0.26, 0.19, 0.22, 0.21, 0.14, 0.14, 0.17, 0.17, 0.21],
}
SUMS = {
    "reward": [0.22, 0.3, 0.39, 0.54, 0.72, 0.6, 0.7, 0.64, 0.86, *[0.8, 0.95] * 10],
    "reward_std": [0.31, 0.37, 0.4, 0.43, 0.38, 0.39, 0.38, 0.36, 0.28],
    SILENT: [0.06, 0, 0.06, 0.25, 0.38, 0.56, 0.5, 0.5, 0.75, 0.81, 0.88, 0.94, 0.81],
    LENGTH: [13.8, 12.5, 9.8, 9.4, 9.0, 9.1, 8.9, 9.1, 9.4, 8.7, 8.4],
    CUT: [0.65, 0.41, 0.18, 0.09, 0.03, 0.05, 0.05, 0.07, 0.09, 0.02],
    "entropy": [1.9, 1.55, 0.95, 0.45, 0.2, 0.18, 0.28, 0.35, 0.28, 0.1, 0.05],
    "kl_k1": None,
    "grad_norm": [1.5, 1.56, 1.92, 2.37, 1.83, 1.88, 4.28, 3.61, 2.05, 4.0, 2.0, 4.0],
}


# Measured: the bundled model with beta 1, advantages 0 and a trained reference as its teacher, by
# learning rate.
DISTILLATION = {
    3e-4: {
        "reward": [0.234, 0.266, 0.344, 0.516, 0.688, 0.719, 0.578, 0.766, 0.688, 0.75, 0.766],
        "kl_k1": [1.281, 0.735, 0.607, 0.335, 0.132, 0.071, 0.097, 0.035, 0.054, 0.046, 0.06],
        "grad_norm": [3.43, 2.17, 4.39, 2.2, 2.04, 1.02, 1.45, 0.94, 1.12, 0.8, 1.01],
    },
    3e-5: {
        "reward": [0.234, 0.234, 0.266, 0.297, 0.5, 0.438, 0.266, 0.344, 0.328, 0.375, 0.438],
        "kl_k1": [1.281, 0.866, 0.886, 0.737, 0.934, 0.513, 0.793, 0.851, 0.552, 0.865, 0.278],
        "grad_norm": [3.43, 2.3, 3.74, 2.54, 3.27, 2.53, 2.39, 2.77, 2.42, 2.5, 1.66],
    },
}  # fmt: skip


def test_healthy_runs_have_no_note():
    default = {name: np.repeat(value, 2)[:20] for name, value in DEFAULT.items()}
    default["rewards/answer/mean"] = default["reward"]
    accuracies = evals(0.16, 0.986, 0.99, 0.992, 0.996)
    assert notes(steps(**default), accuracies) == []
    sums = {name: value if value is None else np.repeat(value, 2) for name, value in SUMS.items()}
    sums["rewards/answer/mean"] = sums["reward"]
    accuracies = [0.411, 0.714, 0.79, 0.77, 0.82, 0.8, 0.875, 0.93, 0.88]
    accuracies = evals(*accuracies, every=10, stderr=0.05)
    assert notes(steps(n=80, **sums), accuracies) == []


@pytest.mark.parametrize("rate", DISTILLATION)
def test_a_healthy_distillation_has_no_note(rate):
    """The reference is a teacher: the KL and its gradient are large from the first step on."""
    assert notes(steps(n=11, **DISTILLATION[rate])) == []


def test_a_run_prints_a_note_and_a_resume_does_not_repeat_it(tmp_path, capsys):
    """overlong is 0 for each of these completions."""
    options = dict(max_completion_length=60, num_minibatches=1, num_prompts=1, max_steps=5)
    small_run(tmp_path / "out", **options)
    printed = capsys.readouterr().out.splitlines()
    noted = [line for line in printed if line.startswith("note: ")]
    assert [note.split(":")[1] for note in noted] == [
        " The reward has one value only",
        " `frac_reward_zero_std` is near 1",
    ]
    assert printed[printed.index(noted[0]) - 1].startswith("step 5/5 ")
    small_run(tmp_path / "out", **options | dict(max_steps=7), resume="latest")
    assert "step 7/7" in (resumed := capsys.readouterr().out) and "note: " not in resumed
    assert len(lines(tmp_path / "out" / "metrics.jsonl")) == 7
