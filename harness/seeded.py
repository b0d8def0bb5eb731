"""Sampling with Hugging Face's generate, each sample from a random stream of its own."""

import numpy as np
import torch


class SeededSampling:
    """Inverse-CDF sampling with one random number per (sample, token): a sample does not depend on its neighbours.

    Plugs into generate as a logits processor: picks the token, notes its log-probability, leaves no other choice.
    """

    def __init__(
        self, streams: list[tuple], temperature: float, max_length: int, device: torch.device
    ):
        self.where = "cpu" if device.type == "mps" else device  # in float64, which MPS lacks
        uniforms = np.stack([np.random.default_rng(s).random(max_length) for s in streams])
        self.uniforms = torch.from_numpy(uniforms).to(self.where)  # [N, T]
        self.temperature, self.logps = temperature, []

    def __call__(self, input_ids, logits):
        logps = (logits.float() / (self.temperature or 1.0)).log_softmax(-1)  # [N, V]
        if self.temperature == 0:
            token = logits.argmax(-1, keepdim=True)  # [N, 1]
        else:
            cumulative = logps.to(self.where).double().exp_().cumsum(-1)  # [N, V]
            point = self.uniforms[:, len(self.logps), None] * cumulative[:, -1:]
            token = torch.searchsorted(cumulative, point, right=True).clamp(
                max=logits.shape[-1] - 1
            )
            token = token.to(logits.device)
        self.logps.append(logps.gather(-1, token).squeeze(-1))
        return torch.full_like(logits, -torch.inf).scatter(-1, token, 0.0)
