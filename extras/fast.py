"""A faster head for large vocabularies. grpo.py takes it if this file is there and the numbers are
those of the model's own head.

It makes the logits of some tokens at a time (tiles), and keeps or makes them again for backward.

Shapes: n sampled tokens, H hidden units, V tokens in the vocabulary, v tokens of a tile.
"""

import ctypes

import torch
from torch import nn

TILE = dict(cpu=2**22, cuda=2**28)  # logits; on a CPU they should fit in the cache
KEPT = dict(cpu=2**26, cuda=2**30)  # logits that forward keeps, so that backward need not make them


class HeadLogps(torch.autograd.Function):
    """hidden [n, H], weight [V, H], targets [n], temperature -> logps [n], entropy [n].

    With the logits z, their probabilities p, and log Z = log sum exp z over the vocabulary:
    log p(target) = z(target) - log Z, and the entropy is log Z - sum p z. Forward needs one tile of
    z at a time; backward overwrites it with its gradient, 1 - p at the target and -p elsewhere."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature: float):
        device = hidden.device.type
        # Backward runs outside of autocast, so the dtype of its products, too, is decided here.
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        ctx.temperature = temperature
        ctx.kept = {}  # first token of a tile -> its logits
        log_zs = []
        means = []
        of_targets = 0
        with torch.autocast(device, enabled=False):
            for tokens, z in tiles(ctx, hidden, weight):
                log_zs.append(z.logsumexp(-1))  # [n]
                means.append((z.softmax(-1) * z).sum(-1))  # [n]
                column, inside = columns_of(targets, tokens)  # [n, 1]
                of_targets += z.gather(-1, column).where(inside, 0)
                if tokens.stop * len(hidden) <= KEPT[device]:
                    ctx.kept[tokens.start] = z
        log_zs = torch.stack(log_zs)  # [tiles, n]
        log_z = log_zs.logsumexp(0)  # [n]
        p = log_zs.softmax(0)  # [tiles, n], the probability that the token is in the tile
        entropy = log_z - (p * torch.stack(means)).sum(0)  # [n]
        ctx.save_for_backward(hidden, weight, targets, log_z)
        ctx.mark_non_differentiable(entropy)
        return of_targets[:, 0] - log_z, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        hidden, weight, targets, log_z = ctx.saved_tensors
        grad = grad_logps[:, None] / ctx.temperature  # [n, 1]
        grad_hidden = torch.zeros_like(hidden, dtype=log_z.dtype)  # [n, H]
        grad_weight = None
        if ctx.needs_input_grad[1]:  # not with adapters
            grad_weight = torch.zeros_like(weight)  # [V, H]
        for tokens, z in tiles(ctx, hidden, weight):
            grad_z = z.sub_(log_z[:, None]).exp_().mul_(-grad)  # in the memory of z
            column, inside = columns_of(targets, tokens)  # [n, 1]
            grad_z.scatter_add_(-1, column, grad.where(inside, 0))
            grad_z = grad_z.to(hidden.dtype)
            grad_hidden += grad_z @ weight[tokens].to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[tokens] = grad_z.T @ hidden
        return grad_hidden, grad_weight, None, None


def tiles(ctx, hidden, weight):
    """The tokens of each tile, and their logits [n, v], at least in float32."""
    width = 64 * (1 + TILE[hidden.device.type] // (64 * (1 + len(hidden))))  # rows stay aligned
    wide = torch.promote_types(hidden.dtype, torch.float32)
    for start in range(0, len(weight), width):
        tokens = slice(start, start + width)
        z = ctx.kept.pop(start, None)
        if z is None:
            tile_weight = weight[tokens].to(hidden.dtype)  # [v, H]
            z = (hidden @ tile_weight.T).to(wide) / ctx.temperature
        yield tokens, z


def columns_of(targets, tokens: slice):
    """The column of each target in the tile, and whether the tile has it: [n, 1] each."""
    column = targets[:, None] - tokens.start
    inside = (column >= 0) & (column < tokens.stop - tokens.start)
    return column.where(inside, 0), inside


class FastPolicy(nn.Module):
    """The plain policy with this head. hidden_of: grpo.py's, a batch -> hidden [n, H]."""

    def __init__(self, plain, hidden_of):
        super().__init__()
        self.model = plain.model
        self.temperature = plain.temperature
        self.one_row = plain.one_row
        self.hidden_of = hidden_of
        keep_freed_memory(self.model.device)

    def forward(self, batch: dict):
        head = self.model.get_output_embeddings()
        if head.bias is not None:
            raise ValueError("the head has a bias")
        hidden = self.hidden_of(self.model, batch)  # [n, H]
        return HeadLogps.apply(hidden, head.weight, batch["targets"], self.temperature)


def keep_freed_memory(device: torch.device) -> None:
    """glibc would return the memory of large tensors to the kernel, which clears it before it gives
    it out again: 10 % of an update of 135 M parameters, and more of a smaller model's."""
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large tensor
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: keep what is freed
