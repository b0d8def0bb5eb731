"""Prints the progress of a run, and ends a run that cannot learn."""

import contextlib
import math
import time
from collections import Counter

import numpy as np
import torch
from tqdm import tqdm

import grpo
from extras import digests, preflight, ranks
from extras.errors import TrainingError


def show_begin(run) -> None:
    cfg = run.cfg
    about = f"{run.policy.model.num_parameters() / 1e6:.2f} M parameters, {cfg.dtype}"
    about += f", {grpo.WORLD_SIZE} x {run.device}, {type(run.sampler).__name__}"
    ranks.say(f"{cfg.model}: {about}")
    both = preflight.check_both_data(run.train_prompts, run.eval_prompts)
    for told in filter(None, [both, preflight.check_used(cfg)]):
        ranks.say(told)
    ranks.say(f"{len(run.train_prompts)} prompts, out_dir {run.files.path}")
    ranks.say(f"begins at step {run.step} of {cfg.max_steps}, first prompt:")
    prompt = preflight.first_prompt(run)
    prompt = getattr(run.sampler, "first_prompt", prompt)  # with an environment's text
    ranks.say(repr(run.tokenizer.decode(prompt.ids)))
    if run.step == 0 and run.eval_prompts:  # it may take minutes
        of = f"eval_accuracy is the mean of {run.reward_functions[0].name}"
        ranks.say(f"step 0: eval of {len(run.eval_prompts)} prompts: {of}")


def show(plain, run, metrics: dict, samples: list, *args, **kwargs) -> None:
    """Prints more about a step. Raises TrainingError if no step can teach anything."""
    try:
        plain(run, metrics, samples, *args, **kwargs)
    except (OSError, RuntimeError) as error:
        is_pipe = isinstance(error, OSError) and error.filename is None  # a closed pipe
        if not is_pipe and "reentrant" not in str(error):  # reentrant: a signal in a print
            raise
    if samples:
        show_more(run, metrics, samples)


def show_more(run, metrics: dict, samples: list) -> None:
    names = {"turns/mean": "turns"}
    if len(run.reward_functions) > 1:
        names |= {f"rewards/{r.name}/mean": r.name for r in run.reward_functions}
    more = [f"{name} {metrics[key]:.3g}" for key, name in names.items() if key in metrics]
    if more:
        ranks.say(" ".join(more))
    if is_not_finite(metrics):
        ranks.say("OPTIMIZER STEP SKIPPED (the gradient is not finite)")
    elif metrics.get("optimizer_steps") == 0:
        why = ""
        if metrics.get("frac_reward_zero_std") == 1:
            why = " (all advantages are 0, as in groups of equal rewards)"
        ranks.say(f"NO OPTIMIZER STEP{why}")
    show_failures(samples, run.step == 1)
    steps = [m for m in run.files.history if "reward" in m]
    said = preflight.check_cut_off(samples, [m["reward"] for m in steps])
    if said:
        ranks.say(said)
    if run.step in (1, run.cfg.max_steps):
        show_sample(samples[0])
    if run.step == 1:
        if run.device.type == "cuda":
            ranks.say(f"GPU: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB at the peak")
        if all(s.failure or math.isnan(s.reward) for s in samples):
            raise TrainingError("no sample of the first step has a reward: see the lines above")
    if len(steps) >= 5 and all(map(is_not_finite, steps[-5:])):
        raise TrainingError("in 5 steps in a row a gradient was not finite; lower --learning_rate")


def is_not_finite(metrics: dict) -> bool:
    """Was a gradient nan or inf? The log lacks grad_norm then. (Your code may skip finite ones.)"""
    norm = metrics.get("grad_norm", math.nan)
    return metrics.get("skipped_steps", 0) > 0 and not math.isfinite(norm)


def samples_of_eval(plain, run, k: int, temperature: float, *args, **kwargs) -> list:
    """Also checks the sampler's log-probabilities, and prints failures."""
    generate, total = run.sampler.generate, len(run.eval_prompts[grpo.RANK :: grpo.WORLD_SIZE]) * k
    with tqdm(total=total, desc="eval", delay=10, disable=not ranks.is_first()) as bar:

        def generate_and_count(prompts, *args, **kwargs):
            completions = generate(prompts, *args, **kwargs)
            bar.update(len(prompts))
            return completions

        run.sampler.generate = generate_and_count
        try:
            samples = plain(run, k, temperature, *args, **kwargs)
        finally:
            run.sampler.generate = generate
    known = not digests.changed("samples_of_eval", "rollout")  # else the temperature is unknown
    if known and run.sampler is getattr(run, "first_sampler", run.sampler):
        some = samples[:: 1 + len(samples) // 32]
        preflight.check_samples_agree(run.policy, some, temperature, run.cfg)
    show_failures(samples, run.step == 0)
    return samples


def sample_metrics(plain, samples: list, *args, **kwargs) -> dict:
    return details(samples) | plain(samples, *args, **kwargs)


def details(samples: list) -> dict:
    lengths = [int(s.sampled.sum()) for s in samples]
    sizes = [np.abs(s.advantages_in_loss) for s in samples]  # some are empty
    metrics = {
        "advantage_abs": float(np.mean([x.sum() / max(1, len(x)) for x in sizes])),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "failed_rewards": sum(bool(s.failure) for s in samples),
    }
    said = [s.info.get("metrics", {}) for s in samples]
    for name in set().union(*said):
        values = np.array([one.get(name, math.nan) for one in said])
        metrics[f"logged/{name}"] = float(np.nanmean(values))
    if "episode" in samples[0].info:
        from extras import agents

        metrics |= agents.metrics(samples)
    return metrics


def show_failures(samples: list, is_first: bool) -> None:
    """Prints failures, and how often functions returned None, perhaps from a forgotten `return`: in
    the first step for all functions, later only if a sample has no reward at all."""
    failures = Counter(s.failure for s in samples if s.failure)
    for failure, n in failures.most_common(3):
        ranks.say(f"in {n} of {len(samples)} samples: {failure}")
    for name in samples[0].rewards:
        n = sum(math.isnan(s.rewards[name]) for s in samples)
        if n and (is_first or any(math.isnan(s.reward) for s in samples)):
            ranks.say(
                f"{name} returned None for {n} of {len(samples)} samples, and is left out there"
            )


def show_sample(s) -> None:
    ranks.say(f"to the prompt {s.prompt.text!r}")
    if "episode" in s.info:
        episode = s.info["episode"]
        for turn, reply in zip(episode.turns, episode.replies, strict=False):
            ranks.say(f"the policy writes {turn!r}, and gets {reply!r}")
    ranks.say(f"the policy answers {s.text!r}, and the reward is {s.reward:.3g}")


def show_end(run, started: float) -> None:
    run.files.close()
    with contextlib.suppress(Exception):  # a failed picture must not fail the run
        from tools import view

        if ranks.is_first():
            ranks.say(f"curves: {view.draw(str(run.files.path))}")
    accuracies = [m["eval_accuracy"] for m in run.files.history if "eval_accuracy" in m]
    best = run.files.path_of(run.files.best_step())
    if len(accuracies) > 1:
        ranks.say(f"accuracy_before: {accuracies[0]:.3f}\naccuracy_after: {accuracies[-1]:.3f}")
        if best.exists():  # not if the first eval is the best
            ranks.say(f"best checkpoint: {best}")
    ranks.say(f"steps: {run.step}\nseconds: {time.perf_counter() - started:.1f}")
    ranks.say(f"out_dir: {run.files.path}")
    ranks.say(f"its samples: python tools/view.py {run.files.path} --html")
    if run.step < run.cfg.max_steps:
        ranks.say(f"stopped before its end; to continue: --resume --out_dir {run.files.path}")
