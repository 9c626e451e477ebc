"""The modes that torch can be in around a call: a transform of `torch.func`, forward mode, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["as_planned", "autocasts", "autograd_batches", "forward_mode", "grad_enabled", "in_functorch", "over_batch",
           "transform", "transformed", "unwatched", "unwrapped"]  # fmt: skip

# Arguments without the wrappers of transforms that have ended: tensors that a Function saved may have some.
unwrapped = torch._functorch.utils.unwrap_dead_wrappers
# The innermost transform of `torch.func`, or None.
transform = torch._C._functorch.peek_interpreter_stack
_transforms = torch._C._functorch.get_interpreter_stack
_batched = torch._C._functorch.is_legacy_batchedtensor
_JVP = torch._C._functorch.TransformType.Jvp
grad_enabled = torch.is_grad_enabled
autocasts = torch._C._is_any_autocast_enabled
# Plans say what is computed in which dtype: within this context nothing is cast.
as_planned = torch._C._DisableAutocast


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Run what is timed so that the caller's modes and hooks on saved tensors do not see it.

    Otherwise `optimize="measure"` inside of `torch.utils.checkpoint` would save more tensors the first time than when
    the call is computed again.
    """
    hooks: Any = torch._C._autograd
    hooked = hooks._saved_tensors_hooks_is_enabled() and hooks._top_saved_tensors_default_hooks(True) is not None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        if hooked:  # only the innermost hooks are called
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


def in_functorch() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return transform() is not None


def forward_mode() -> bool:
    """Whether tensors may carry tangents."""
    # A compiled `torch.func.jvp` shows in the stack of transforms alone.
    return forward_ad._current_level >= 0 or (in_functorch() and any(t.key() == _JVP for t in _transforms() or ()))


def autograd_batches(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd batches any of these, as `is_grads_batched` asks: by a `vmap` that knows no `out=`."""
    return any(x is not None and _batched(x) for x in tensors)


def over_batch(backward: Callable[..., Sequence[Any]], gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Call a backward function on gradients that autograd batches, by `torch.func.vmap` in the place of its own."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched = {
        n: torch._remove_batch_dim(x, level, 0, 0) for n, x in enumerate(gradients) if x is not None and _batched(x)
    }
    shown: list[bool] = []

    def one(*own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(batched, own, strict=True))
        found = backward(*(given.get(n, x) for n, x in enumerate(gradients)))
        shown[:] = [x is not None for x in found]
        return tuple(x for x in found if x is not None)

    results = iter(torch.func.vmap(one)(*batched.values()))
    return tuple(torch._add_batch_dim(next(results), 0, level) if show else None for show in shown)


def transformed() -> bool:
    """Whether `torch.func` or forward mode is at work."""
    return in_functorch() or forward_mode()
