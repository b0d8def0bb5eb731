"""The policy of grpo.py, faster: rows without padding, and the output head in tiles. Same numbers: see check.py."""

import torch
from torch import nn

from grpo import Policy
from harness import check, kernels


class FastPolicy(Policy):
    """A row holds each prompt once, and all its completions; logits [n, V] never exist. ValueError: the model's own
    log-probabilities cannot be had this way."""

    def __init__(self, model, temperature: float):
        super().__init__(model, temperature)
        self.plain_head = check.head_is_plain(model)  # logits are head(hidden)
        self.packs = True  # False: padded rows, where the texts of a row would mix
        check.settle(self)

    def rows(self, samples) -> dict:
        multiple = 8 if self.model.device.type == "cuda" else 1
        return kernels.rows_of(samples, self.packs, multiple)

    def forward(self, batch: dict):
        hidden, targets = (
            self.hidden(batch),
            batch["targets"],
        )  # [n, H] and [n]: of the n real completion tokens
        if self.plain_head:
            head = self.model.get_output_embeddings()
            logps, entropy = kernels.HeadLogps.apply(
                hidden, head.weight, head.bias, targets, self.temperature
            )  # [n]
        else:
            logits = (
                hidden.to(torch.promote_types(hidden.dtype, torch.float32)) / self.temperature
            )  # [n, V]
            logps = -nn.functional.cross_entropy(logits, targets, reduction="none")  # [n]
            entropy = torch.distributions.Categorical(logits=logits.detach()).entropy()  # [n]
        N, T = batch["shape"]
        return tuple(
            x.new_zeros(N * T).scatter(0, batch["place"], x).view(N, T) for x in (logps, entropy)
        )

    def hidden(self, batch: dict):
        """[n, H] at the position before each real completion token, which predicts it; [n, V], the model's own logits,
        where the head is not plain."""
        body = self.model.base_model if self.plain_head else self.model
        inputs = dict(
            input_ids=batch["ids"], use_cache=False
        )  # [1, S], or [N, L] padded on the right
        if (
            self.packs
        ):  # a mask of ones: without one the positions are read as another kind of packing
            inputs |= dict(
                position_ids=batch["positions"], attention_mask=torch.ones_like(batch["ids"])
            )
        with kernels.told(self.model, batch.get("blocks")):
            out = body(**inputs)
        states = out.last_hidden_state if self.plain_head else out.logits
        return states.flatten(0, 1).index_select(0, batch["read"])

    def wrapped(self, device: torch.device) -> None:
        """A tied embedding adds its rows where the head adds, no [V, H] is made. Not before DDP, which would send rows;
        not on CUDA, which adds them in any order."""
        embedding = self.model.get_input_embeddings()
        tied = self.plain_head and embedding.weight is self.model.get_output_embeddings().weight
        embedding.sparse = tied and device.type == "cpu"
