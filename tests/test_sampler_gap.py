"""How far the sampler is from the trainer, and when that stops a run."""

import pytest
import torch

from grpo import Config
from harness.flags import TrainingError
from harness.sampler_gap import sampler_metrics, sampler_stats

TIS = "sampling/importance_sampling_ratio/mean"


def metrics_of(log_ratio, cfg, mask=None):
    """Those of tokens with these log(p_trainer / p_sampler)."""
    if mask is None:
        mask = torch.ones_like(log_ratio, dtype=torch.bool)
    stats = sampler_stats(log_ratio, torch.zeros_like(log_ratio), mask, cfg)
    sums = {name: value.item() for name, value in stats.items()}
    return sampler_metrics(sums | {"tokens": int(mask.sum())}, cfg)


def test_what_is_measured_of_the_gap():
    log_ratio = torch.randn(7, 143, generator=torch.Generator().manual_seed(0)).double() * 0.3
    cfg = Config(max_sampler_gap=1e9, tis_cap=1.5)
    metrics = metrics_of(log_ratio, cfg)
    weight = log_ratio.exp().clamp(max=1.5)
    assert metrics["sampler_gap"] == pytest.approx(log_ratio.abs().mean().item())
    assert metrics["sampler_gap_max"] == pytest.approx(log_ratio.abs().max().item())
    assert metrics[TIS] == pytest.approx(weight.mean().item())
    ess = weight.sum() ** 2 / (log_ratio.numel() * weight.square().sum())
    assert metrics["tis_ess"] == pytest.approx(ess.item())
    assert set(metrics_of(log_ratio, Config(max_sampler_gap=1e9, tis_cap=0))) == {
        "sampler_gap",
        "sampler_gap_max",
    }


def test_tokens_outside_the_loss_are_no_gap():
    log_ratio = torch.tensor([[1e-6, -torch.inf, torch.nan]])
    mask = torch.tensor([[True, False, False]])
    metrics = metrics_of(log_ratio, Config(dtype="float32"), mask)
    assert metrics["sampler_gap"] == metrics["sampler_gap_max"] == pytest.approx(1e-6)
    assert metrics[TIS] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dtype, fine, off", [("float32", 5e-5, 2e-4), ("bfloat16", 0.05, 0.2)])
def test_a_gap_that_is_not_rounding_stops_the_run(dtype, fine, off):
    metrics_of(torch.tensor([[fine]]), Config(dtype=dtype))
    for gap in (off, torch.nan):
        with pytest.raises(TrainingError, match="^the sampler's log-probabilities are off by"):
            metrics_of(torch.tensor([[gap]]), Config(dtype=dtype))
    metrics_of(torch.tensor([[off]]), Config(dtype=dtype, max_sampler_gap=1.0))
