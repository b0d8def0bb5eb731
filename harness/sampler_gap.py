"""How far the sampler is from the trainer. Both have the same weights, but other kernels: a gap of
rounding is normal, and any other gap means that the samples are not the policy's."""

import math

import torch

from harness.flags import TrainingError


@torch.no_grad()
def sampler_stats(old_logps, sampler_logps, mask, cfg) -> dict:
    """How far the sampler is from the trainer: sums and maxima over the tokens in the loss."""
    log_ratio = torch.where(mask, old_logps - sampler_logps, 0)
    weight = log_ratio.exp().clamp(max=cfg.tis_cap or math.inf) * mask
    return {
        "gap": log_ratio.abs().sum(),
        "gap_max": log_ratio.abs().amax(),
        "weight": weight.sum(),
        "weight_max": weight.amax(),
        "weight_squared": weight.square().sum(),
    }


def sampler_metrics(sums: dict, cfg) -> dict:
    """Metrics of the gap between sampler and trainer. Stops the run if the sampler's weights,
    prompt or distribution cannot be those of the policy."""
    gap = sums["gap"] / sums["tokens"]  # mean |log p_trainer - log p_sampler|
    limit = cfg.max_sampler_gap
    if limit == 0:
        limit = 0.1 if cfg.dtype == "bfloat16" else 1e-4
    if gap > limit or math.isnan(gap):
        raise TrainingError(
            f"the sampler's log-probabilities are off by {gap:.2g} on average (at most "
            f"{sums['gap_max']:.2g}; --max_sampler_gap {limit:g}). Likely causes: weights not "
            "pushed or a cache not reset after a push, log-probabilities before the temperature, "
            "top-p or top-k in the sampler, another prompt or chat template than the one that "
            "was scored, another dtype"
        )
    metrics = {"sampler_gap": gap, "sampler_gap_max": sums["gap_max"]}
    if cfg.tis_cap > 0:
        name = "sampling/importance_sampling_ratio"
        metrics[f"{name}/mean"] = sums["weight"] / sums["tokens"]
        metrics[f"{name}/max"] = sums["weight_max"]
        # effective sample size / all
        metrics["tis_ess"] = sums["weight"] ** 2 / (sums["tokens"] * sums["weight_squared"])
    return metrics
