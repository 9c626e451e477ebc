"""The modes that torch can be in around a call: a transform of `torch.func`, forward mode, autocast."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["as_planned", "autocasts", "forward_mode", "grad_enabled", "in_functorch", "transform", "transformed",
           "untraced", "unwrapped"]  # fmt: skip

# Arguments without the wrappers of transforms that have ended: tensors that a Function saved may have some.
unwrapped = torch._functorch.utils.unwrap_dead_wrappers
# The innermost transform of `torch.func`, or None.
transform = torch._C._functorch.peek_interpreter_stack
_transforms = torch._C._functorch.get_interpreter_stack
_JVP = torch._C._functorch.TransformType.Jvp
grad_enabled = torch.is_grad_enabled
autocasts = torch._C._is_any_autocast_enabled
# Plans say what is computed in which dtype: within this context nothing is cast.
as_planned = torch._C._DisableAutocast
# Within this context tensors are what they say: a compiler's fake tensors, and its record of what is done, are away.
untraced = torch.utils._python_dispatch._disable_current_modes


def in_functorch() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return transform() is not None


def forward_mode() -> bool:
    """Whether tensors may carry tangents."""
    # A compiled `torch.func.jvp` shows in the stack of transforms alone.
    return forward_ad._current_level >= 0 or (in_functorch() and any(t.key() == _JVP for t in _transforms() or ()))


def transformed() -> bool:
    """Whether `torch.func` or forward mode is at work."""
    return in_functorch() or forward_mode()
