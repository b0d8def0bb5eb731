"""The policy of grpo.py, faster: rows without padding, and the output head in tiles.

Same log-probs: check.py compares it with the plain policy before a run.
"""

import functools

import torch
from torch import nn

from harness.attention import attention_of_row, register_attention
from harness.head import HeadLogps
from harness.packing import packed_layout, padded_layout
from harness.recompute import recomputing


class FastPolicy(nn.Module):
    """The same as `plain`, with less work: logits [n, V] never exist.

    packs: one row for a micro-batch, with each prompt once; else padded rows, which some models
    need because the texts of a row would mix. attention: how it is computed in a packed row:
    "merged", "masks", or "auto", the faster one of the two.
    """

    def __init__(self, plain, packs: bool = True):
        super().__init__()
        register_attention()
        self.plain = plain
        self.packs = packs
        self.attention = "auto"
        self.plain_head = head_is_plain(plain.model)  # logits are head(hidden)

    @property
    def model(self):
        return self.plain.model

    @property
    def temperature(self) -> float:
        return self.plain.temperature

    def rows(self, samples) -> dict:
        """The layout of a micro-batch: see packed_layout in packing.py."""
        if not self.packs:
            return padded_layout(samples)
        if self.model.device.type == "cuda":  # its kernels need multiples, and take many texts
            return packed_layout(samples, multiple=8, one_by_one=False)
        return packed_layout(samples)

    def forward(self, batch: dict):
        """logps [N, T], entropy [N, T] without a gradient; both 0 on padding."""
        hidden = self.hidden(batch)
        targets = batch["targets"]  # [n]: the real completion tokens
        if self.plain_head:
            head = self.model.get_output_embeddings()
            logps, entropy = HeadLogps.apply(
                hidden, head.weight, head.bias, targets, self.temperature
            )  # [n]
        else:
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            logits = hidden.to(dtype) / self.temperature  # [n, V]
            logps = -nn.functional.cross_entropy(logits, targets, reduction="none")  # [n]
            entropy = torch.distributions.Categorical(logits=logits.detach()).entropy()  # [n]
        return unflatten(logps, batch), unflatten(entropy, batch)

    def hidden(self, batch: dict):
        """[n, H] at the token before each completion token, which predicts it.

        [n, V], the model's own logits, if the head is not plain.
        """
        body = self.model.base_model if self.plain_head else self.model
        if self.packs:
            # all ones: without a mask transformers infers its own packing from positions
            mask = torch.ones_like(batch["ids"])
            attention = functools.partial(attention_of_row, self.model, batch, self.attention)
            with attention(), recomputing(self.model, attention):
                out = body(
                    input_ids=batch["ids"],
                    position_ids=batch["positions"],
                    attention_mask=mask,
                    use_cache=False,
                )
        else:
            with recomputing(self.model):
                out = body(input_ids=batch["ids"], use_cache=False)
        states = out.last_hidden_state if self.plain_head else out.logits
        return states.flatten(0, 1).index_select(0, batch["read"])

    def after_ddp(self, device: torch.device) -> None:
        """Called once DDP has wrapped the policy. Makes the gradient of a tied embedding sparse.

        Autograd then adds its rows to the head's gradient, and no second [V, H] is made. Not before
        DDP, which would send the rows; not on CUDA, where the order of the sum varies.
        """
        embedding = self.model.get_input_embeddings()
        tied = self.plain_head and embedding.weight is self.model.get_output_embeddings().weight
        embedding.sparse = tied and device.type == "cpu"


def unflatten(values, batch: dict):
    """[n] -> [N, T]"""
    N, T = batch["shape"]
    return values.new_zeros(N * T).scatter(0, batch["place"], values).view(N, T)


@torch.no_grad()
def head_is_plain(model) -> bool:
    """Whether the logits are head(hidden): some architectures scale or cap them after the head."""
    head, body = model.get_output_embeddings(), model.base_model
    if not isinstance(head, nn.Linear) or body is model:
        return False
    ids = torch.arange(1, 9, device=model.device)[None]
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.allclose(head(hidden), logits, atol=1e-5)
