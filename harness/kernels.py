"""What makes the policy fast: the chunked head with its own backward, and rows without padding with their attention."""

import contextlib
import functools

import numpy as np
import torch
from torch import nn

HEAD_CHUNK = dict(cpu=2**26, cuda=2**27)  # logits alive at once in the output head, in elements: 0.25 and 0.5 GB


class HeadLogps(torch.autograd.Function):
    """hidden [n, H], head weight [V, H] and bias [V] or None, targets [n] -> logps [n], entropy [n] (no gradient).

    Logits [n, V] never exist: a chunk of them is there at a time (HEAD_CHUNK), and all but the last again in backward,
    where the gradient of a log-probability by its logits, onehot(target) - softmax, is written over it. Half the time
    of log_softmax under torch.utils.checkpoint.
    """

    @staticmethod
    def logits(hidden, weight, bias, temperature):
        logits = nn.functional.linear(hidden, weight, bias)  # [c, V]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if temperature == 1 else logits.div_(temperature)

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        kind = hidden.device.type
        # Asked here: backward runs after the autocast block, where the answer on CUDA would be float16.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.weight_dtype, ctx.temperature = weight.dtype, temperature
        hidden, weight, bias = (None if x is None else x.to(dtype) for x in (hidden, weight, bias))
        ctx.size, parts = max(1, HEAD_CHUNK.get(kind, 2**26) // weight.shape[0]), []
        with torch.autocast(kind, enabled=False):  # what follows the product is in float32
            for part, y in zip(hidden.split(ctx.size), targets.split(ctx.size), strict=True):
                logits = HeadLogps.logits(part, weight, bias, temperature)
                top = logits.amax(-1, keepdim=True)
                exps = logits.sub_(top).exp()
                total = exps.sum(-1)  # [c]
                logps = logits.gather(-1, y[:, None])[:, 0] - total.log()
                entropy = total.log() - torch.linalg.vecdot(exps, logits) / total  # / total: exps to probabilities
                parts.append((logps, entropy, total.log() + top[:, 0]))
        ctx.kept = exps.div_(total[:, None])  # the last chunk's softmax: backward begins there
        logps, entropy, norms = (torch.cat(part) for part in zip(*parts, strict=True))  # [n] each
        ctx.save_for_backward(hidden, weight, bias, targets, norms)
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        grad_weight, grad_bias = None, None if bias is None else torch.zeros_like(bias, dtype=ctx.weight_dtype)
        grads = grad_logps / ctx.temperature  # logits are divided by it
        chunks = zip(*(x.split(ctx.size)[::-1] for x in (hidden, targets, norms, grads)), strict=True)
        grad_hidden, softmax, ctx.kept = [], ctx.kept, None
        with torch.autocast(hidden.device.type, enabled=False):
            for part, y, norm, grad in chunks:
                if softmax is None:
                    softmax = HeadLogps.logits(part, weight, bias, ctx.temperature).sub_(norm[:, None]).exp_()
                grad_logits = softmax.mul_(-grad[:, None]).scatter_add_(-1, y[:, None], grad[:, None]).to(hidden.dtype)
                grad_hidden.append(grad_logits @ weight)
                if ctx.needs_input_grad[1]:  # else frozen
                    product = (grad_logits.T @ part).to(ctx.weight_dtype)  # [V, H]
                    grad_weight = product if grad_weight is None else grad_weight.add_(product)
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                softmax = None
        return torch.cat(grad_hidden[::-1]), grad_weight, grad_bias, None, None


@torch.no_grad()
def head_is_plain(model) -> bool:
    """Some architectures scale or soft-cap after the head: there the model's own logits are to be used."""
    ids = torch.arange(1, 9, device=next(model.parameters()).device)[None]
    head, body = model.get_output_embeddings(), model.base_model
    if not isinstance(head, torch.nn.Linear) or body is model:
        return False
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state
    return torch.allclose(head(hidden), model(input_ids=ids, use_cache=False).logits, atol=1e-5)


def padded(rows: list[np.ndarray], dtype, fill=0, left=False) -> np.ndarray:
    """[N, longest]"""
    width = max(map(len, rows))
    out = np.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, slice(width - len(row), width) if left else slice(len(row))] = row
    return out


def pack_row(input_ids, prompt_lengths, groups, mask):
    """input_ids [N, L], right-padded, prompt_lengths [N], groups [N] of rows with the same prompt, mask [N, T] of the
    completions -> the row [1, S], its positions in the texts [1, S], what attention needs (see packed_attention), and
    where in the row stands the token before each completion token [n]."""
    (N, T), device = mask.shape, input_ids.device
    lengths, order = mask.sum(1).sort(descending=True, stable=True)  # [N]: completions lie by length in the row
    input_ids, prompt_lengths, groups = input_ids[order], prompt_lengths[order], groups[order]
    names, which = groups.unique(return_inverse=True)  # [P], [N]: the row of its prompt
    first = (groups == names[:, None]).int().argmax(-1)  # [P]: a sample that has it
    L = int(prompt_lengths.max())
    column = torch.arange(L, device=device)[None]  # [1, L]
    real = column < prompt_lengths[first, None]  # [P, L]
    place = real.flatten().cumsum(0).view_as(real) - 1  # [P, L]: where in the row
    ids, at = input_ids[first, :L][real], column.expand_as(real)[real]
    blocks = [(place, place, real.flatten().nonzero()[:, 0], column, column)]
    read = place[which].gather(1, prompt_lengths[:, None] - 1)  # [N, 1]: the last token of each prompt
    if T > 1:
        rest = mask[order, 1:]  # [N, T-1]: nothing follows the last token, so it is not in the row
        follows = prompt_lengths[:, None] + torch.arange(T - 1, device=device)  # [N, T-1]
        after = rest.flatten().cumsum(0).view_as(rest) - 1 + len(ids)  # [N, T-1]
        ids = torch.cat([ids, input_ids.gather(1, follows.clamp(max=input_ids.shape[1] - 1))[rest]])
        at, read = torch.cat([at, follows[rest]]), torch.cat([read, after], 1)
        k_at = torch.where(torch.cat([real[which], rest], 1), torch.cat([column.expand(N, -1), follows], 1), 2**30)
        q_at = torch.where(rest, follows, prompt_lengths[:, None] - 1)  # padding sees what its prompt saw
        k_from = torch.cat([place[which], after], 1)
        # attention pads: in two blocks of like lengths, if that saves a fifth of it
        cuts = torch.arange(N, device=device)
        area, cut = map(int, (cuts * T + (N - cuts) * lengths).min(0))  # of the rows before the cut and those after it
        for start, end in ((0, cut), (cut, N)) if 5 * area < 4 * N * T else ((0, N),):
            if t := int(lengths[start]) - 1:  # else nothing follows the prompts
                rows, keys = slice(start, end), slice(L + t)
                used = rest[rows, :t].flatten().nonzero()[:, 0]
                blocks.append((after[rows, :t], k_from[rows, keys], used, q_at[rows, :t], k_at[rows, keys]))
    return ids[None], at[None], blocks, read[order.argsort()][mask]


@contextlib.contextmanager
def packed(blocks):
    """Within it the model's attention takes its row for these blocks of texts."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionMaskInterface.register("packed", functools.partial(packed_masks, blocks))
    try:
        yield
    finally:
        AttentionMaskInterface.register("packed", sdpa_mask)


def packed_masks(blocks, mask_function, **_):
    """Stands in for the mask builder of transformers, which every layer gets its mask from. The model's own rule of
    who sees whom (causal, a sliding window, chunks) is asked by position in the text, not by place in the row."""
    masks = [mask_function(0, 0, q_at[:, :, None], k_at[:, None]) for *_, q_at, k_at in blocks]  # [N or 1, T, K]
    plain = [m.shape[0] == 1 and torch.equal(m, m.new_ones(m.shape).tril()) for m in masks]  # the fast causal kernel
    masks = [None if causal else m[:, None] for m, causal in zip(masks, plain, strict=True)]
    return [(*block[:3], mask) for block, mask in zip(blocks, masks, strict=True)]


def attention_by_products(module, query, key, value, mask, scaling=None, **_):
    """Attention of short texts on a CPU, where the fused kernel's backward takes 5 times as long in bfloat16."""
    (N, heads, T, D), (few, K) = query.shape, key.shape[1:3]
    mask = query.new_ones(T, K, dtype=torch.bool).tril() if mask is None else mask[:, None]
    bias = torch.where(mask, 0.0, -torch.inf).to(value.dtype)  # [T, K] or [N, 1, 1, T, K]
    query = (query * (scaling or D**-0.5)).to(value.dtype).reshape(N, few, -1, D)  # heads that have one key: as rows
    scores = (query @ key.to(value.dtype).transpose(2, 3)).view(N, few, -1, T, K) + bias
    out = scores.softmax(-1).view(N, few, -1, K) @ value
    return out.view(N, heads, T, -1).transpose(1, 2), None


@torch.compiler.disable  # many shapes: compiled, it would be compiled again and again
def packed_attention(module, query, key, value, attention_mask, **options):
    """Attention in a row [1, heads, S, D] of many texts: each block's rows are taken out of it, and put back."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, list):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    parts = []
    for q_from, k_from, real, mask in attention_mask:
        q, k, v = (
            x[0].transpose(0, 1).index_select(0, source.flatten()).unflatten(0, source.shape).transpose(1, 2)
            for x, source in ((query, q_from), (key, k_from), (value, k_from))
        )  # [N, heads, T or K, D]
        short = k.shape[2] <= (1024 if v.dtype == torch.bfloat16 else 256)  # its square is kept for backward
        attend = attention_by_products if short and v.device.type == "cpu" else sdpa_attention_forward
        out = attend(module, q, k, v, mask, **options)[0]  # [N, T, heads, D]
        parts.append(out.flatten(0, 1).index_select(0, real))
    return torch.cat(parts)[None], None


@torch.no_grad()
def packs_exactly(model, hidden) -> bool:
    """Whether texts that lie in one row ignore each other: not so where more than attention looks back. hidden: what
    a Policy computes. Leaves the model with an attention that can do it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    config, device = model.config.get_text_config(), next(model.parameters()).device
    if config._attn_implementation not in ("sdpa", "packed"):
        return False
    AttentionInterface.register("packed", packed_attention)
    AttentionMaskInterface.register("packed", sdpa_mask)
    # two prompts, two completions each; every token differs
    prompts, completions = torch.tensor([[5, 5, 3, 3], [2, 4, 3, 2]], device=device)
    ids = torch.arange(1, 37, device=device).reshape(4, 9) % config.vocab_size
    ids[1, :5], ids[3, :3] = ids[0, :5], ids[2, :3]
    mask = torch.arange(4, device=device) < completions[:, None]
    try:
        config._attn_implementation = "packed"
        rows, one = hidden(ids, prompts, mask), hidden(ids, prompts, mask, prompts)
        # rounding in float32 makes 1e-6 to 1e-4 of it, one wrong key 0.04 to 0.9
        exact = ((rows - one).norm(dim=-1) <= 1e-2 * rows.norm(dim=-1)).all().item()
    except Exception:
        exact = False
    config._attn_implementation = "packed" if exact else "sdpa"
    return exact
