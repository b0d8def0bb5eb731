"""Rows of different lengths as one array, and arrays as tensors."""

import numpy as np
import torch


def padded(rows: list[np.ndarray], dtype, fill=0, left=False) -> np.ndarray:
    """[N, longest]"""
    width = max(map(len, rows))
    out = np.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, slice(width - len(row), width) if left else slice(len(row))] = row
    return out


def padded_rows(samples) -> dict:
    """A row [L] for each sample: prompt + completion, then padding, which causal attention does
    not see there.

    ids [N, L]; completion [N, T]; before [N, T]: where the token before each completion token
    stands in its row; first: the smallest of these places.
    """
    prompts = np.array([[len(s.prompt.ids)] for s in samples])  # [N, 1]
    texts = [np.concatenate([s.prompt.ids, s.completion_ids]) for s in samples]
    ids = padded(texts, np.int64)  # [N, L]
    completion = padded([s.completion_ids for s in samples], np.int64)  # [N, T]
    before = prompts - 1 + np.arange(completion.shape[1])  # [N, T]
    before = np.minimum(before, ids.shape[1] - 1)  # padding has to stay within the row
    return dict(ids=ids, completion=completion, before=before, first=int(before.min()))


def to_device(x, device: torch.device):
    """Arrays, also within dicts, lists and tuples, as tensors there; the copy to a GPU is not waited for."""
    if isinstance(x, dict):
        return {name: to_device(item, device) for name, item in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(to_device(item, device) for item in x)
    if not isinstance(x, np.ndarray):
        return x
    x = torch.from_numpy(np.ascontiguousarray(x))
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
