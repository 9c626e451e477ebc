"""Tensors as they are given: which can be contracted, and what can be seen of their values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from planner.backends.torch.modes import in_functorch
from planner.kernels.gathered_dot import torch_pooled

__all__ = ["captured", "dataless", "finite", "not_dense", "occurs"]


def not_dense(x: Tensor) -> str | None:
    """Why a tensor cannot be contracted and what to do about it, or None if it is dense."""
    if x.is_nested:
        return "is a nested tensor, whose rows have no one shape: pad it, as torch.nested.to_padded_tensor(x, 0.0) does"
    if x.is_quantized:
        return "is a quantized tensor, and contractions take dense ones: pass it as .dequantize()"
    if x.layout != torch.strided:
        return f"is a tensor of layout {x.layout}, and contractions take dense ones: pass it as .to_dense()"
    return None


def dataless(x: Tensor) -> bool:
    """Whether a tensor has a shape and a dtype but no values to look at."""
    if type(x) in (Tensor, torch.nn.Parameter) and not in_functorch():  # in a fifth of the time
        return x.is_meta
    return x.is_meta or is_fake(x)


def captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured: values cannot be looked at, and will be others when it is run."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def occurs(x: Tensor) -> bool:
    """Whether something is true, or may be: what cannot be looked at may hold anything."""
    return captured(x) or bool(x.any())


def finite(x: Tensor) -> bool:
    """Whether all numbers are finite, or there are none to see; a sum that overflows costs a needless look."""
    return dataless(x) or (not captured(x) and torch_pooled.finite(x.detach()))
