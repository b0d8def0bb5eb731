"""The output head in tiles of the vocabulary: log-probabilities without logits.

n = real completion tokens, V = vocabulary, H = hidden units.
"""

import contextlib

import torch
from torch import nn

# Logits of a tile, which has all rows and some columns of the vocabulary. On CUDA 8,192 rows make 16,384 columns: at V
# 151,936, H 1,536 a micro-batch then moves 2.8 GB of the weight's gradient; as many in rows of all columns moved 45 GB.
HEAD_TILE = dict(cpu=2**22, cuda=2**27)
HEAD_KEPT = 2**26  # logits of the first tiles that backward need not compute again


class HeadLogps(torch.autograd.Function):
    """hidden [n, H], head weight [V, H] and bias [V] or None, targets [n] -> logps [n], entropy [n] (no gradient).

    Logits [n, V] never exist: a tile of them is there at a time, and most again in backward, where the gradient of a
    log-probability by its logits, onehot(target) - softmax, is written over it. The weight's is added to its .grad, in
    place: nothing else of that size is made, and hooks on the weight do not see it.
    """

    @staticmethod
    def tiles(ctx, hidden, weight, bias, targets):
        """For each: its columns, weight [w, H], logits [n, w], the targets' places in it [n, 1] and which are there."""
        for start in range(0, len(weight), ctx.width):
            tile = slice(start, start + ctx.width)
            part, logits = weight[tile].to(hidden.dtype), ctx.kept.pop(start, None)
            if logits is None:
                logits = nn.functional.linear(hidden, part, None if bias is None else bias[tile])
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                logits = logits if ctx.temperature == 1 else logits.div_(ctx.temperature)
            place = (targets[:, None] - start).clamp(0, len(part) - 1)
            yield tile, part, logits, place, place + start == targets[:, None]

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        n, kind, parts = len(hidden), hidden.device.type, []
        # Asked here: backward runs after the autocast block, where the answer on CUDA would be float16.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        hidden, bias = (None if x is None else x.to(dtype) for x in (hidden, bias))
        ctx.weight, ctx.temperature, ctx.width, ctx.kept = (
            weight,
            temperature,
            HEAD_TILE.get(kind, 2**22) // n or 1,
            {},
        )
        with torch.autocast(kind, enabled=False):  # what follows the product is in float32
            for tile, _, logits, place, inside in HeadLogps.tiles(
                ctx, hidden, weight, bias, targets
            ):
                top = logits.amax(-1)
                exps = logits.sub(top[:, None]).exp_()
                target = logits.gather(-1, place).where(inside, 0)[:, 0]
                parts.append(
                    (target, top, exps.sum(-1), torch.linalg.vecdot(exps, logits))
                )  # [n] each
                if n * tile.stop <= HEAD_KEPT or tile.start == 0:
                    ctx.kept[tile.start] = logits
        target, tops, totals, moments = (
            torch.stack(part) for part in zip(*parts, strict=True)
        )  # [tiles, n] each
        norm = (tops + totals.log()).logsumexp(0)
        entropy = norm - ((tops - norm).exp() * moments).sum(0)
        ctx.save_for_backward(hidden, weight, bias, targets, norm)
        ctx.mark_non_differentiable(entropy)
        return target.sum(0) - norm, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        hidden, weight, bias, targets, norm = ctx.saved_tensors
        grads = (grad_logps / ctx.temperature)[:, None]  # [n, 1]: logits are divided by it
        grad_hidden, grad_weight = torch.zeros_like(hidden, dtype=grads.dtype), None
        grad_bias = None if bias is None else torch.empty_like(bias, dtype=grads.dtype)
        learns, adds = ctx.needs_input_grad[1], False  # else frozen
        if learns and ctx.weight.is_leaf:
            with contextlib.suppress(
                RuntimeError
            ):  # of torch.autograd.grad, to which it is returned
                adds = torch._C._will_engine_execute_node(
                    torch.autograd.graph.get_gradient_edge(ctx.weight).node
                )
        if adds and ctx.weight.grad is None:
            ctx.weight.grad = torch.zeros_like(weight)
        if learns:
            grad_weight = ctx.weight.grad if adds else torch.zeros_like(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for tile, part, logits, place, inside in HeadLogps.tiles(
                ctx, hidden, weight, bias, targets
            ):
                softmax = logits.sub_(norm[:, None]).exp_()
                grad_logits = (
                    softmax.mul_(-grads)
                    .scatter_add_(-1, place, grads.where(inside, 0))
                    .to(hidden.dtype)
                )
                grad_hidden += grad_logits @ part
                if grad_weight is not None:
                    grad_weight[tile] += grad_logits.T @ hidden
                if bias is not None:
                    grad_bias[tile] = grad_logits.sum(0)
        return grad_hidden, None if adds else grad_weight, grad_bias, None, None
