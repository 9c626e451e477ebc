"""What surrounds a call in torch: transforms, forward mode, autocast, modes that see operators, tracers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# The innermost transform of `torch.func`, or None.
transform = torch._C._functorch.peek_interpreter_stack
_transforms = torch._C._functorch.get_interpreter_stack
_batched = torch._C._functorch.is_legacy_batchedtensor
_is_wrapped, _inside = torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.get_unwrapped
_KEY = torch._C.DispatchKey
_FUNCTORCH_KEYS = torch._C.DispatchKeySet(_KEY.FuncTorchDynamicLayerFrontMode) | torch._C.DispatchKeySet(
    _KEY.FuncTorchDynamicLayerBackMode
)
# Returns a tensor without the wrapper of a transform that has ended.
unwrap: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead
_JVP = torch._C._functorch.TransformType.Jvp
_GRAD = torch._C._functorch.TransformType.Grad
_VMAP = torch._C._functorch.TransformType.Vmap
# How many modes are active that see operators, as a `FlopCounterMode` does, or a selective checkpoint.
watched: Callable[[], int] = torch._C._len_torch_dispatch_stack
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize
_mode = torch._C._get_dispatch_mode
_PROXIES = torch._C._TorchDispatchModeKey.PROXY
# What `torch.jit.trace` has recorded so far; None outside of it.
scripts: Callable[[], Any] = torch._C._get_tracing_state
_set_tracing_state: Callable[[Any], None] = getattr(torch._C, "_set_tracing_state")  # noqa: B009 -- mypy does not know it
grad_enabled = torch.is_grad_enabled
# What `torch.are_deterministic_algorithms_enabled` calls: every call asks.
deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
autocasts = torch._C._is_any_autocast_enabled
# Whether `torch.compiler.is_compiling` also tells so while Dynamo's graph is traced. In torch 2.11 it does not.
_FLAGGED = hasattr(torch.compiler, "_compile_session_context")
# A plan says in which dtype each step is computed. Within this context autocast changes none of them.
as_planned = torch._C._DisableAutocast


# The classes of tensors that run operators in the usual way.
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def usual(*tensors: Any) -> bool:
    """Return whether all are plain tensors with values, and no transform, mode or tracer sees what runs on them.

    Nearly all calls are so. This says it in less than a microsecond; the functions below say what else there is.
    """
    for x in tensors:
        if type(x) not in _TENSORS or x.is_meta:
            return False
    return transform() is None and not watched() and scripts() is None and forward_ad._current_level < 0


def under_grads(*tensors: Any) -> list[torch.Tensor] | None:
    """Return what is inside tensors that only `torch.func.grad` wraps, if they are `usual` but for that; else None."""
    if watched() or scripts() is not None or not only_grads():
        return None
    inside = []
    for x in tensors:
        x = whole(x)
        if type(x) not in _TENSORS or x.is_meta:
            return None
        inside.append(x)
    return inside


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return what is inside of a tensor that transforms of `torch.func` wrap: under `vmap` all arrays of the batch.

    Its values can be looked at, within `below_transforms`.
    """
    while _is_wrapped(x):
        x = _inside(x)
    return x


def below_transforms() -> Any:
    """Return a context in which operators on plain tensors take no way through the transforms of `torch.func`."""
    return torch._C._ExcludeDispatchKeyGuard(_FUNCTORCH_KEYS)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Hide what runs inside from the caller's modes and hooks on saved tensors.

    Otherwise `optimize="measure"` inside of `torch.utils.checkpoint` would save more tensors in the first run, which
    measures, than when checkpointing runs the call again.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        if hooked():  # torch calls the innermost hooks only, so these hide the caller's
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


def hooked() -> bool:
    """Return whether hooks of the caller see the tensors that autograd saves."""
    hooks: Any = torch._C._autograd
    return hooks._saved_tensors_hooks_is_enabled() and hooks._top_saved_tensors_default_hooks(True) is not None


def unwrapped(*tensors: Any) -> list[Any]:
    """Return tensors, or None, without wrappers of transforms that have ended; what a Function saved may have some."""
    return [x if x is None else unwrap(x) for x in tensors]


def checkpoints() -> bool:
    """Return whether a selective checkpoint decides which results are saved, or computes the others again."""
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def in_functorch() -> bool:
    """Return whether the call is under a transform of `torch.func`."""
    return transform() is not None


def only_grads() -> bool:
    """Return whether the transforms around a call are `torch.func.grad` alone, which records as autograd does."""
    return forward_ad._current_level < 0 and all([level.key() == _GRAD for level in _transforms() or ()])


def forward_mode() -> bool:
    """Return whether tensors may carry tangents, as under `torch.func.jvp`."""
    # A compiled `torch.func.jvp` shows only in the stack of transforms.
    return forward_ad._current_level >= 0 or (in_functorch() and any(t.key() == _JVP for t in _transforms() or ()))


def carries_tangents(*tensors: Any) -> bool:
    """Return whether forward mode goes through a call of these tensors, or None: under a `jvp`, or if one is dual."""
    if in_functorch() or not forward_mode():
        return forward_mode()
    return any([x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors])


def only_stock(*tensors: Any) -> bool:
    """Return whether only torch's own operators have the derivatives that may be asked for.

    That is in forward mode, and under a transform with `torch.func.functionalize`, which knows no Functions.
    """
    if carries_tangents(*tensors):
        return True
    levels = (in_functorch() and _transforms()) or ()
    return len(levels) > 1 and any(level.key() == _FUNCTIONALIZE for level in levels)


def autograd_batches(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd batches any of these tensors, as `is_grads_batched=True` asks it to.

    It uses an old `vmap`, which does not support `out=`.
    """
    return any([x is not None and _batched(x) for x in tensors])


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


def by_batches(function: type[torch.autograd.Function], first: Sequence[Any], tensors: Sequence[Any]) -> Any:
    """Apply a Function by its rule for `vmap`, if that is the innermost transform and batches a tensor; else None.

    That is what `function.apply` does, in three times the time.

    Args:
        function: the Function.
        first: its first arguments, which are no tensors.
        tensors: the others.
    """
    innermost = transform()
    if innermost is None or innermost.key() != _VMAP:
        return None
    level, functorch = innermost.level(), torch._C._functorch
    inside = [(x, None) if x is None else functorch._unwrap_batched(x, level) for x in unwrapped(*tensors)]
    dims = [dim for _, dim in inside]
    if all(dim is None for dim in dims):
        return None
    info = VmapInfo(functorch.CVmapInterpreterPtr(innermost).batchSize(), "error")
    with temporarily_pop_interpreter_stack():
        results, out_dims = function.vmap(info, (*[None] * len(first), *dims), *first, *[x for x, _ in inside])
    pairs = zip(results, out_dims, strict=True)
    return tuple(x if dim is None else functorch._add_batch_dim(x, dim, level) for x, dim in pairs)


def _functionalizes() -> bool:
    """Return whether the innermost transform is `torch.func.functionalize`."""
    return in_functorch() and transform().key() == _FUNCTIONALIZE


def records() -> bool:
    """Return whether a tracer records operators on tensors that have values: `make_fx` or `torch.jit.trace`.

    Under `torch.func.functionalize` it is the same: an operator has no steps that would have to be made functional.
    """
    if scripts() is not None or _mode(_PROXIES) is not None:
        return True
    return _functionalizes()


def bare_operators() -> bool:
    """Return whether what is recorded must be operators with derivatives of their own, not Functions around them."""
    if scripts() is not None or torch.compiler.is_exporting():
        return True
    return _functionalizes()


@contextlib.contextmanager
def unscripted() -> Iterator[None]:
    """Hide what runs inside from `torch.jit.trace`, under which sizes are tensors."""
    state = scripts()
    if state is None:
        yield
        return
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(state)


def compiles() -> bool:
    """Return whether torch's compiler, or its export, traces what runs."""
    return torch.compiler.is_compiling() or (not _FLAGGED and TracingContext.try_get() is not None)


def is_symbol(size: Any) -> bool:
    """Return whether a size is a symbol of a compiler, or a tensor, as under `torch.jit.trace`."""
    return isinstance(size, (torch.SymInt, torch.Tensor))


def fixed(size: Any) -> Any:
    """Return a size as an argument of an operator, where `torch.jit.trace` fixes what it is, and warns."""
    return size if isinstance(size, torch.SymInt) else int(size)


def hint(size: Any) -> int:
    """Return a size as a number: for a symbol the size that the compiler traces with, without a guard.

    A symbol without such a size stands for 1,024, or for the largest size that it can have.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    from torch.fx.experimental import symbolic_shapes  # loaded by whatever made the symbol

    torch_shapes: Any = symbolic_shapes
    if hasattr(torch_shapes, "optimization_hint"):
        return int(torch_shapes.optimization_hint(size, 1024))
    return int(torch_shapes.size_hint(size, 1024))  # in torch 2.11


def differ(first: Any, second: Any) -> bool:
    """Return whether two sizes differ. If one is a symbol they do not, and the compiler checks that they are equal."""
    if type(first) is int and type(second) is int:
        return first != second
    if scripts() is not None:  # what `torch.jit.trace` records checks nothing
        return False
    torch._check(first == second, lambda: f"one axis has the sizes {first} and {second}")
    return False


def transformed() -> bool:
    """Return whether the call is under a transform of `torch.func` or in forward mode."""
    return in_functorch() or forward_mode()
