"""The modes that torch can be in around a call: a transform of `torch.func`, forward mode, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = ["as_planned", "autocasts", "autograd_batches", "checkpoints", "deterministic", "forward_mode",
           "grad_enabled", "in_functorch", "over_batch", "transform", "transformed", "unwatched", "unwrapped",
           "watched"]  # fmt: skip

# The innermost transform of `torch.func`, or None.
transform = torch._C._functorch.peek_interpreter_stack
_transforms = torch._C._functorch.get_interpreter_stack
_batched = torch._C._functorch.is_legacy_batchedtensor
_JVP = torch._C._functorch.TransformType.Jvp
# How many modes are active that see operators, as a `FlopCounterMode` does, or a selective checkpoint.
watched: Callable[[], int] = torch._C._len_torch_dispatch_stack
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
grad_enabled = torch.is_grad_enabled
# What `torch.are_deterministic_algorithms_enabled` calls: every call asks.
deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
autocasts = torch._C._is_any_autocast_enabled
# A plan says in which dtype each step is computed. Within this context autocast changes none of them.
as_planned = torch._C._DisableAutocast


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Hide what runs inside from the caller's modes and hooks on saved tensors.

    Otherwise `optimize="measure"` inside of `torch.utils.checkpoint` would save more tensors in the first run, which
    measures, than when checkpointing runs the call again.
    """
    hooks: Any = torch._C._autograd
    hooked = hooks._saved_tensors_hooks_is_enabled() and hooks._top_saved_tensors_default_hooks(True) is not None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        if hooked:  # torch calls the innermost hooks only, so these hide the caller's
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


def unwrapped(*tensors: Any) -> list[Any]:
    """Return tensors, or None, without wrappers of transforms that have ended; what a Function saved may have some."""
    unwrap = torch._C._functorch.unwrap_if_dead
    return [x if x is None else unwrap(x) for x in tensors]


def checkpoints() -> bool:
    """Return whether a selective checkpoint decides which results are saved, or computes the others again."""
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def in_functorch() -> bool:
    """Return whether the call is under a transform of `torch.func`."""
    return transform() is not None


def forward_mode() -> bool:
    """Return whether tensors may carry tangents, as under `torch.func.jvp`."""
    # A compiled `torch.func.jvp` shows only in the stack of transforms.
    return forward_ad._current_level >= 0 or (in_functorch() and any(t.key() == _JVP for t in _transforms() or ()))


def autograd_batches(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd batches any of these tensors, as `is_grads_batched=True` asks it to.

    It uses an old `vmap`, which does not support `out=`.
    """
    return any(x is not None and _batched(x) for x in tensors)


def over_batch(backward: Callable[..., Sequence[Any]], gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Call a backward function on gradients that autograd batches, using `torch.func.vmap` instead of the old one."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched = {
        n: torch._remove_batch_dim(x, level, 0, 0) for n, x in enumerate(gradients) if x is not None and _batched(x)
    }
    has_result: list[bool] = []

    def run_one(*entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_number = dict(zip(batched, entries, strict=True))
        outputs = backward(*(by_number.get(n, x) for n, x in enumerate(gradients)))
        has_result[:] = [x is not None for x in outputs]
        return tuple(x for x in outputs if x is not None)

    results = iter(torch.func.vmap(run_one)(*batched.values()))
    return tuple(torch._add_batch_dim(next(results), 0, level) if has else None for has in has_result)


def transformed() -> bool:
    """Return whether the call is under a transform of `torch.func` or in forward mode."""
    return in_functorch() or forward_mode()
