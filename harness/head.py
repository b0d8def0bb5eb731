"""The output head in tiles of the vocabulary: log-probabilities without the logits of all words.

n = real completion tokens, V = vocabulary, H = hidden units, w = words of a tile.
"""

import torch
from torch import nn

# Logits per tile: all n rows times w columns. On CUDA 8,192 rows get 16,384 columns: at
# V 151,936 and H 1,536 a micro-batch then moves 2.8 GB of the weight's gradient; tiles of whole
# rows moved 45 GB. On a CPU a tile should fit in the cache.
HEAD_TILE = dict(cpu=2**22, cuda=2**27)
HEAD_KEPT = 2**26  # logits that forward keeps, so that backward need not compute them again


class HeadLogps(torch.autograd.Function):
    """hidden [n, H], weight [V, H], bias [V] or None, targets [n], temperature -> logps, entropy.

    Both are [n]; the entropy has no gradient. Few tiles of logits exist at once. Backward
    computes most tiles again and overwrites each with its gradient, onehot(target) - softmax. The
    gradient of the weight is added to weight.grad in place, so nothing else of its size is made;
    hooks on the weight do not see it.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        """For logits z, Z = sum exp(z): log p = z - log Z, and so the entropy, - sum p log p, is
        log Z - sum p z.

        Each tile gives three sums, relative to its largest logit, so that no exp overflows (an
        online log-sum-exp): top = max z, total = sum exp(z - top), moment = sum exp(z - top) z.
        Over the tiles Z = sum exp(top) total, and sum p z = sum exp(top - log Z) moment.
        """
        device = hidden.device.type
        dtype = hidden.dtype
        if torch.is_autocast_enabled(device):
            # Asked here: backward runs outside autocast, where CUDA would answer float16.
            dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
        if bias is not None:
            bias = bias.to(dtype)

        n = len(hidden)
        ctx.weight = weight
        ctx.temperature = temperature
        tokens = max(1, n)  # none, if all were written by an environment
        ctx.width = max(1, HEAD_TILE.get(device, 2**22) // tokens)
        ctx.kept = {}  # logits by their first column

        tops, totals, moments = [], [], []  # [n] for each tile
        target_logits = []
        with torch.autocast(device, enabled=False):  # all but the product is in float32
            for columns, _, logits in HeadLogps.tiles(ctx, hidden, weight, bias):
                place, inside = HeadLogps.targets_in(columns, targets)
                target_logits.append(logits.gather(-1, place).where(inside, 0)[:, 0])
                top = logits.amax(-1)
                exps = logits.sub(top[:, None]).exp_()  # [n, w]
                tops.append(top)
                totals.append(exps.sum(-1))
                moments.append(torch.linalg.vecdot(exps, logits))
                if n * columns.stop <= HEAD_KEPT or columns.start == 0:
                    ctx.kept[columns.start] = logits

        tops = torch.stack(tops)  # [tiles, n]
        log_z = (tops + torch.stack(totals).log()).logsumexp(0)  # [n]
        entropy = log_z - ((tops - log_z).exp() * torch.stack(moments)).sum(0)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z)
        ctx.mark_non_differentiable(entropy)
        return torch.stack(target_logits).sum(0) - log_z, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        hidden, weight, bias, targets, log_z = ctx.saved_tensors
        grads = (grad_logps / ctx.temperature)[:, None]  # [n, 1]
        grad_hidden = torch.zeros_like(hidden, dtype=grads.dtype)

        grad_weight, in_place = None, False
        if ctx.needs_input_grad[1]:  # else the weight is frozen
            in_place = adds_to_grad(ctx.weight)
            if not in_place:
                grad_weight = torch.zeros_like(weight)
            else:
                if ctx.weight.grad is None:
                    ctx.weight.grad = torch.zeros_like(weight)
                grad_weight = ctx.weight.grad
        grad_bias = None
        if bias is not None:
            grad_bias = torch.empty_like(bias, dtype=grads.dtype)

        with torch.autocast(hidden.device.type, enabled=False):
            for columns, tile_weight, logits in HeadLogps.tiles(ctx, hidden, weight, bias):
                place, inside = HeadLogps.targets_in(columns, targets)
                softmax = logits.sub_(log_z[:, None]).exp_()
                grad_logits = softmax.mul_(-grads)
                grad_logits.scatter_add_(-1, place, grads.where(inside, 0))
                grad_logits = grad_logits.to(hidden.dtype)

                grad_hidden += grad_logits @ tile_weight
                if grad_weight is not None:
                    grad_weight[columns] += grad_logits.T @ hidden
                if grad_bias is not None:
                    grad_bias[columns] = grad_logits.sum(0)

        if in_place:
            grad_weight = None  # autograd would add it once more
        return grad_hidden, grad_weight, grad_bias, None, None

    @staticmethod
    def tiles(ctx, hidden, weight, bias):
        """For each tile: its columns of the vocabulary, their weight [w, H], the logits [n, w]."""
        for start in range(0, len(weight), ctx.width):
            columns = slice(start, start + ctx.width)
            tile_weight = weight[columns].to(hidden.dtype)
            logits = ctx.kept.pop(start, None)
            if logits is None:
                tile_bias = None if bias is None else bias[columns]
                logits = nn.functional.linear(hidden, tile_weight, tile_bias)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                if ctx.temperature != 1:
                    logits.div_(ctx.temperature)
            yield columns, tile_weight, logits

    @staticmethod
    def targets_in(columns: slice, targets):
        """The column of each target in the tile, and whether it is in the tile at all: [n, 1] each.

        A target outside gets some column of the tile, since gather needs one; the caller drops it.
        """
        place = targets[:, None] - columns.start
        inside = (place >= 0) & (place < columns.stop - columns.start)
        return place.where(inside, 0), inside


def adds_to_grad(weight) -> bool:
    """Whether the backward under way adds to weight.grad, as loss.backward() does.

    torch.autograd.grad does not: it returns gradients. PyTorch tells the two apart in a private
    function only: will the engine execute the node that adds to weight.grad? Under
    torch.autograd.grad that function raises.
    """
    if not weight.is_leaf:
        return False
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False
