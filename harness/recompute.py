"""Gradient checkpointing: layers that compute their activations again in backward."""

import contextlib
import functools

import torch


@contextlib.contextmanager
def recomputing(model, around=contextlib.nullcontext):
    """Inside, layers with gradient checkpointing recompute in backward; each does so within `around()`.

    They look at layer.training. Only they are put in training mode, and only inside: everything else that looks at it
    would draw random numbers, such as dropout.
    """
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    checkpoint = layers[0]._gradient_checkpointing_func if layers else None

    def contexts():
        return contextlib.nullcontext(), around()  # of forward and of its repetition in backward

    for layer in layers:
        layer.training = torch.is_grad_enabled()
        layer._gradient_checkpointing_func = functools.partial(checkpoint, context_fn=contexts)
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
            layer._gradient_checkpointing_func = checkpoint
