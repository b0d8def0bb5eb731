"""Rows of different lengths as one array, and arrays as tensors."""

import numpy as np
import torch


def padded(rows: list[np.ndarray], dtype, fill=0, left: bool = False) -> np.ndarray:
    """[N, length of the longest row]; left: the padding stands on the left."""
    width = max(len(row) for row in rows)
    out = np.full((len(rows), width), fill, dtype=dtype)
    for line, row in zip(out, rows, strict=True):
        if left:
            line[width - len(row) :] = row
        else:
            line[: len(row)] = row
    return out


def padded_rows(samples) -> dict:
    """A row for each sample: prompt, completion, and padding on the right.

    Causal attention does not see the padding. ids [N, L]; completion [N, T]; before [N, T]:
    index in the row of the token before each completion token; first: the smallest of these.
    """
    texts = []
    completions = []
    last_of_prompt = []
    for s in samples:
        texts.append(np.concatenate([s.prompt.ids, s.completion_ids]))
        completions.append(s.completion_ids)
        last_of_prompt.append([len(s.prompt.ids) - 1])

    ids = padded(texts, np.int64)
    completion = padded(completions, np.int64)
    T = completion.shape[1]
    L = ids.shape[1]
    before = np.array(last_of_prompt) + np.arange(T)
    before = np.minimum(before, L - 1)  # keep padding's indices inside the row
    return dict(
        ids=ids,
        completion=completion,
        before=before,
        first=int(before.min()),
    )


def to_device(x, device: torch.device):
    """Arrays as tensors on the device, also inside dicts and lists; all else stays as it is.

    A copy to a GPU is asynchronous: nothing waits for it.
    """
    if isinstance(x, dict):
        return {name: to_device(item, device) for name, item in x.items()}
    if isinstance(x, list):
        return [to_device(item, device) for item in x]
    if not isinstance(x, np.ndarray):
        return x
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
