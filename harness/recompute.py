"""Gradient checkpointing: layers that compute their activations again in backward."""

import contextlib
import functools

import torch


@contextlib.contextmanager
def recomputing(model, around=contextlib.nullcontext):
    """Inside, layers with gradient checkpointing will be computed again in backward.

    transformers does so only if layer.training is True. Nothing else may be put in training mode:
    dropout would draw random numbers. around: a context for each layer's second computation.
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
