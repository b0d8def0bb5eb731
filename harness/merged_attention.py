"""Attention in a packed row without masks, and without copies of a prompt's keys and values.

A completion's token attends to two sets of keys: to its group's prompt, and to its completion so
far. A fused call attends to one set, and returns its output and the log-sum-exp (lse) of its
scores. Both sets together have

    lse = log(exp(lse_1) + exp(lse_2)),   output = sum of exp(lse_i - lse) output_i

as in Flash-Decoding. In backward each call gets lse and output of both sets together: it computes
its probabilities again, as exp(score - lse), and these are then those of the whole softmax.

S = tokens of the row, D = size of a head. calls: see calls_of in packing.py.
"""

import torch


class MergedAttention(torch.autograd.Function):
    """query [S, heads, D], key and value [S, key heads, D] -> [S, heads, D]."""

    @staticmethod
    def forward(ctx, query, key, value, calls: list[dict], scale: float):
        S, heads, _ = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros_like(query)
        lse = query.new_full((heads, S), -torch.inf, dtype=wide)  # of the keys so far
        for call in calls:
            queries, keys = call["queries"], call["keys"]
            # [n, heads, D], [heads, n]
            part, part_lse = attend(query[queries], key[keys], value[keys], call, scale)
            both = torch.logaddexp(lse[:, queries], part_lse)  # [heads, n]
            share = (part_lse - both).exp().T[:, :, None]  # [n, heads, 1]
            out[queries] = out[queries].lerp(part, share.to(out.dtype))
            lse[:, queries] = both
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.calls = calls
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        grad_query = torch.zeros_like(query)
        grad_key = torch.zeros_like(key)
        grad_value = torch.zeros_like(value)
        for call in ctx.calls:
            queries, keys = call["queries"], call["keys"]
            part = gradients(
                grad_out[queries],
                query[queries],
                key[keys],
                value[keys],
                out[queries],
                lse[:, queries].contiguous(),
                call,
                ctx.scale,
            )
            grad_query[queries] += part[0]
            grad_key[keys] += part[1]
            grad_value[keys] += part[2]
        return grad_query, grad_key, grad_value, None, None


def attend(query, key, value, call: dict, scale: float) -> tuple:
    """One kernel: query [n, heads, D], key and value [k, key heads, D] -> the output [n, heads, D],
    and the log-sum-exp [heads, n]."""
    if query.is_cuda:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *call["offsets"], 0.0, call["causal"], False, scale=scale
        )
        return out, lse
    inputs = [heads_first(x) for x in (query, key, value)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *inputs, 0.0, call["causal"], scale=scale
    )
    return heads_last(out), lse[0]


def gradients(grad_out, query, key, value, out, lse, call: dict, scale: float) -> list:
    """One kernel: the gradients by query, key and value. out and lse: over all sets of keys."""
    inputs = [grad_out.contiguous(), query, key, value, out]
    if query.is_cuda:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        options = [0.0, call["causal"], no_dropout, no_dropout]  # their generator's state, unread
        return torch.ops.aten._flash_attention_backward(
            *inputs, lse, *call["offsets"], *options, scale=scale
        )
    inputs = [heads_first(x) for x in inputs]
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs, lse[None], 0.0, call["causal"], scale=scale
    )
    return [heads_last(x) for x in parts]


def heads_first(x):
    """[n, heads, D] -> [1, heads, n, D], as the CPU's kernel takes a text."""
    return x.transpose(0, 1)[None]


def heads_last(x):
    """[1, heads, n, D] -> [n, heads, D]"""
    return x[0].transpose(0, 1)
