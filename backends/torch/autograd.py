"""Plans under autograd: a Function runs the forward program, and saves the operands and the kept values.

Its backward pass is a second Function, which runs the backward program. The derivative of that one is a sum of
contractions by transposed specs, so derivatives of any order work. Under `vmap` both become contractions by a batched
spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.backends.torch.checks import CallIndices
from planner.backends.torch.contexts.modes import (
    as_planned,
    autocasts,
    autograd_batches,
    bare_operators,
    by_batches,
    carries_tangents,
    hint,
    in_functorch,
    over_batch,
    transformed,
    unwrap,
    unwrapped,
    usual,
    watched,
)
from planner.backends.torch.contexts.traced import (
    backward_operator,
    contract_gradient,
    executable_for,
    forward_operator,
    join_indices,
    operator_arguments,
    run_backward,
    run_forward,
    separate_gradients,
)
from planner.backends.torch.executable import Executable
from planner.backends.torch.index import TorchIndex
from planner.backends.torch.ops import as_output, is_recorded, torch_dtype
from planner.language.derive import batched, transpose
from planner.language.spec import Spec


def record(executable: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
    """Run a plan's forward program so that autograd records it and can run the backward program."""
    if not usual(operands[0]) and bare_operators():
        return _record_operator(executable, operands, indices)
    return _apply(_Contract, executable, *_arguments(executable, operands, indices))[0]


def record_usual(executable: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
    """Do the same for a call that is `usual`."""
    prepared, *tensors = _arguments(executable, operands, indices)
    return _apply_usual(executable, prepared, *map(unwrap, tensors))[0]


def _arguments(executable: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a Function after the executable: prepared index arrays, operands, other index arrays."""
    if not indices:
        return (indices, *operands)
    prepared = CallIndices()
    prepared.found, loose = [], []
    for name in executable.arrays:
        q = indices[name]
        if isinstance(q, TorchIndex):
            prepared[name] = q
        else:
            loose.append(q)
    return (prepared, *operands, *loose)


def _record_operator(executable: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
    """Call the operator of the forward program, which has derivatives of its own."""
    plan, names, arrays, sizes = operator_arguments(executable, indices)
    result: Tensor = forward_operator(plan, names, arrays, list(operands), sizes)[0]
    return result


def _apply(
    function: type[torch.autograd.Function], executable: Executable, prepared: Mapping[str, Any], *tensors: Tensor
) -> Any:
    """Apply a Function.

    Outside of transforms this skips `torch.autograd.Function.apply`, which binds the arguments to their names: that
    takes longer than a small product.
    """
    if in_functorch():
        results = by_batches(function, (executable, prepared), tensors)
        return function.apply(executable, prepared, *tensors) if results is None else results
    plain: Any = super(torch.autograd.Function, function)
    return plain.apply(executable, prepared, *unwrapped(*tensors))


def _split(
    executable: Executable, prepared: Mapping[str, Any], arrays: Sequence[Any]
) -> tuple[Sequence[Any], Mapping[str, Any], tuple[Tensor, ...]]:
    """Return the operands and the index arrays that `record` passed as arguments of a Function, and what follows.

    In a backward pass, None stands for an operand that no gradient reads.
    """
    count = len(executable.plan.operands)
    if len(prepared) == len(executable.arrays):
        return arrays[:count], prepared, tuple(arrays[count:])
    rest = iter(arrays[count:])
    indices = CallIndices((n, prepared[n] if n in prepared else next(rest)) for n in executable.arrays)
    indices.found = getattr(prepared, "found", [])
    return arrays[:count], indices, tuple(rest)


def _save(ctx: Any, executable: Executable, prepared: Mapping[str, Any], tensors: Any, kept: Sequence[Tensor]) -> None:
    """Save the operands that a backward pass may read, the other index arrays and the kept values."""
    ctx.executable, ctx.prepared, ctx.shapes = executable, prepared, None
    ctx.set_materialize_grads(False)
    if kept:
        ctx.mark_non_differentiable(*kept)
    if any(map(Tensor.is_inference, tensors)):  # autograd saves no tensors of inference mode, so it saves copies
        tensors = [x.clone() if x.is_inference() else x for x in tensors]
    if not (executable.reads_all or is_recorded(tensors[0])):  # tracers decide themselves what they keep
        count = len(executable.reads)
        ctx.shapes = [x.shape for x in tensors[:count]]
        read = [x if is_read else None for x, is_read in zip(tensors, executable.reads, strict=False)]
        tensors = (*read, *tensors[count:])
    ctx.save_for_backward(*tensors, *kept)


class _Contract(torch.autograd.Function):
    """The forward program. Its arguments are the executable, prepared index arrays, operands, other index arrays."""

    @staticmethod
    def forward(executable: Executable, prepared: Mapping[str, Any], *arrays: Tensor) -> Any:
        result, kept = run_forward(executable, *_split(executable, prepared, arrays)[:2])
        return (as_output(result, arrays), *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        executable, prepared, *arrays = inputs
        _save(ctx, executable, prepared, arrays, output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> Any:
        if gradient is None:
            loose = len(ctx.executable.arrays) - len(ctx.prepared)
            return (None,) * (2 + len(ctx.executable.plan.operands) + loose)
        saved = ctx.saved_tensors  # outside of the transform: a checkpoint may compute them again
        if autograd_batches(gradient):
            return over_batch(partial(_Contract._pull_back, ctx, saved), (gradient,))
        return _Contract._pull_back(ctx, saved, gradient)

    @staticmethod
    def _pull_back(ctx: Any, saved: Sequence[Any], gradient: Tensor) -> Any:
        """Return what `backward` returns, from the saved tensors."""
        count, is_usual = len(ctx.executable.plan.operands), usual(gradient)
        blank = (None,) * (len(ctx.executable.arrays) - len(ctx.prepared))
        if not (is_usual or in_functorch()) and carries_tangents(gradient, *saved[:count]):
            return (None, None, *_dual_gradients(ctx, gradient, saved), *blank)
        with as_planned():
            executable, gradient = ctx.executable.against(gradient)
            if executable is not ctx.executable:
                saved = saved[: count + len(blank)]  # without kept values
            if ctx.shapes is not None and not is_usual and (watched() or is_recorded(gradient)):
                # Operators take tensors only.
                blanks = [gradient.new_zeros(()).expand(shape) for shape in ctx.shapes]
                read = [y if x is None else x for x, y in zip(saved, blanks, strict=False)]
                saved = (*read, *saved[count:])
            # Applying a Function takes longer than a small product, and is needed only if gradients may be
            # differentiated.
            if torch.is_grad_enabled() or (not is_usual and transformed()):
                given = iter(_apply(_Gradient, executable, ctx.prepared, gradient, *saved))
                of_operands = [next(given) if v is not None else None for v in executable.programs.gradients]
            else:
                gradient, *saved = unwrapped(gradient, *saved)
                operands, indices, kept = _split(executable, ctx.prepared, saved)
                of_operands = run_backward(executable, gradient, operands, indices, kept)
        return _of_arguments(ctx, of_operands)

    @staticmethod
    def vmap(info: Any, in_dims: Any, executable: Executable, prepared: Mapping[str, Any], *arrays: Tensor) -> Any:
        operands, indices, _ = _split(executable, prepared, arrays)
        spec = executable.spec
        result = _batched_contract(info.batch_size, executable, spec, operands, indices, in_dims[2:])
        # The batched call keeps its own values, so these are placeholders.
        shape = (0,)
        kept = tuple(result.new_zeros(shape) for _ in executable.kept)
        return (result, *kept), (0, *(None for _ in kept))


class _ContractUsual(torch.autograd.Function):
    """The same for calls that are `usual`, in a fifth less time: it looks less at what surrounds the call."""

    @staticmethod
    def forward(ctx: Any, executable: Executable, prepared: Mapping[str, Any], *arrays: Tensor) -> Any:
        operands, indices, _ = _split(executable, prepared, arrays)
        result, kept = executable.forward(operands, executable.prepare(indices))
        _save(ctx, executable, prepared, arrays, kept)
        return (as_output(result, arrays), *kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> Any:
        plain = gradient is not None and usual(gradient) and not (torch.is_grad_enabled() or autocasts())
        if gradient is None or not plain or autograd_batches(gradient):
            return _Contract.backward(ctx, gradient)
        saved, own = ctx.saved_tensors, ctx.executable
        executable, gradient = own.against(gradient)
        operands, indices, kept = _split(executable, ctx.prepared, saved)
        kept = kept if executable is own else ()
        of_operands = executable.backward(gradient, operands, executable.prepare(indices), kept)
        return _of_arguments(ctx, of_operands)


def _of_arguments(ctx: Any, of_operands: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return what `backward` returns: the gradients of operands in their shapes, and None for the other arguments."""
    if ctx.shapes is not None:
        of_operands = [g if g is None else g.reshape(s) for g, s in zip(of_operands, ctx.shapes, strict=True)]
    return (None, None, *of_operands, *(None,) * (len(ctx.executable.arrays) - len(ctx.prepared)))


def _dual_gradients(ctx: Any, gradient: Tensor, saved: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients in forward mode, for which Functions have no rule: each is a contraction of its own."""
    operands, indices, _ = _split(ctx.executable, ctx.prepared, saved)
    blank, shapes = gradient.new_zeros(()), ctx.shapes or [x.shape for x in operands]
    arrays = [blank.expand(s) if x is None else x for x, s in zip(operands, shapes, strict=True)]
    parts = separate_gradients(ctx.executable, gradient, arrays, indices)
    dtypes = [torch_dtype(operand.dtype) for operand in ctx.executable.plan.operands]
    return [g if g is None else _in_dtype(g, d).reshape(s) for g, d, s in zip(parts, dtypes, shapes, strict=True)]


# What `Function.apply` calls once it has found that no transform of `torch.func` is active, as in a usual call.
_apply_usual: Any = getattr(super(torch.autograd.Function, _ContractUsual), "apply")  # noqa: B009


class _Gradient(torch.autograd.Function):
    """The backward program.

    Its arguments are the executable, prepared index arrays, the output gradient, operands, other index arrays and the
    kept values.
    """

    @staticmethod
    def forward(executable: Executable, prepared: Mapping[str, Any], gradient: Tensor, *saved: Tensor) -> Any:
        operands, indices, kept = _split(executable, prepared, saved)
        gradients = run_backward(executable, gradient, operands, indices, kept)
        return tuple(as_output(g, (gradient, *saved)) for g in gradients if g is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        executable, prepared, gradient, *saved = inputs
        count = len(executable.plan.operands) + len(executable.arrays) - len(prepared)
        ctx.executable, ctx.prepared = executable, prepared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gradient, *saved[:count])
        ctx.kept = len(saved) - count

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        if autograd_batches(*tangents):
            return over_batch(partial(_Gradient._pull_back, ctx, saved), tangents)
        return _Gradient._pull_back(ctx, saved, *tangents)

    @staticmethod
    def _pull_back(ctx: Any, saved: Sequence[Any], *tangents: Tensor | None) -> Any:
        """Return what `backward` returns, from the saved tensors."""
        executable, prepared = ctx.executable, ctx.prepared
        gradient, *arrays = saved
        operands, indices, _ = _split(executable, prepared, arrays)
        blank = (None,) * (len(executable.arrays) - len(prepared) + ctx.kept)
        needs = ctx.needs_input_grad[2 : 3 + len(operands)]
        return (None, None, *_differentiate(executable, tangents, gradient, operands, indices, needs), *blank)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, executable: Executable, prepared: Mapping[str, Any], gradient: Tensor, *saved: Tensor
    ) -> Any:
        (operands, indices, _), dims = _split(executable, prepared, saved), in_dims[3:]
        results = []
        for number, variable in enumerate(executable.programs.gradients):
            if variable is None:
                continue
            operand, spec = operands[number], transpose(executable.spec, number)
            swapped: list[Any] = [x if x is None else x.conj() for x in operands]
            swapped_dims = list(dims)
            swapped[number], swapped_dims[number] = gradient, in_dims[2]
            result = _batched_contract(info.batch_size, executable, spec, swapped, indices, swapped_dims)
            dtype = torch_dtype(executable.plan.operands[number].dtype)
            shape = list(executable.spec.shape(executable.spec.inputs[number]) if operand is None else operand.shape)
            if dims[number] is not None:
                del shape[dims[number]]
            results.append(_in_dtype(result, dtype).reshape([info.batch_size, *shape]))
        return tuple(results), (0,) * len(results)


def _differentiate(
    executable: Executable,
    tangents: Sequence[Tensor | None],
    gradient: Tensor,
    operands: Sequence[Any],
    indices: Mapping[str, Any],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return the derivatives of a backward program in the output gradient and in each operand.

    Args:
        executable: the plan.
        tangents: the gradients of the results of the backward program.
        gradient: the output gradient.
        operands: the operands; None for one that no gradient reads.
        indices: the index arrays.
        needs: which derivatives are needed.
    """
    spec: Spec = executable.spec
    views, indices = executable.views(operands), executable.index_views(indices)
    needs_gradient, *needs = needs
    wanted = [number for number, v in enumerate(executable.programs.gradients) if v is not None]
    to_gradient: Tensor | None = None
    to_operands: list[Tensor | None] = [None] * len(views)
    for tangent, number in zip(tangents, wanted, strict=True):
        if tangent is None:
            continue
        # The gradient of operand `number` is linear in the output gradient and in each other operand, conjugated.
        # So the derivative in one of them, its slot, is again a transposed contraction.
        inner = transpose(spec, number)
        factors: list[Any] = [x if x is None else x.conj() for x in views]
        factors[number] = gradient  # None can only be in its place
        along = tangent.reshape(executable.shape(spec, spec.inputs[number]))
        for slot in range(len(views)):
            if not (needs_gradient if slot == number else needs[slot]):
                continue
            others = [x.conj() for x in factors]
            others[slot] = along
            part = executable.contract(transpose(inner, slot), others, indices)
            if slot == number:
                to_gradient = part if to_gradient is None else to_gradient + part
                continue
            part = _in_dtype(part.conj(), views[slot].dtype).reshape(operands[slot].shape)
            total = to_operands[slot]
            to_operands[slot] = part if total is None else total + part
    if to_gradient is not None:
        to_gradient = _in_dtype(to_gradient, gradient.dtype)
    return [to_gradient, *to_operands]


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a gradient to the dtype of its operand; a real operand takes the real part."""
    return (x.real if x.is_complex() and not dtype.is_complex else x).to(dtype)


def _batched_contract(
    size: int,
    executable: Executable,
    spec: Spec,
    operands: Sequence[Tensor],
    indices: Mapping[str, Any],
    in_dims: Any,
) -> Tensor:
    """Contract by the batched spec, where some operands and index arrays have a batch dimension.

    `in_dims` has the batch dimension of each operand, then of each index array that is not prepared; None without one.
    """
    count = len(operands)
    batched_operands = [i for i in range(count) if in_dims[i] is not None]
    values = []
    for number, (x, dim) in enumerate(zip(operands, in_dims[:count], strict=True)):
        shape = executable.shape(spec, spec.inputs[number])
        values.append(x.reshape(shape) if dim is None else x.movedim(dim, 0).reshape((size, *shape)))
    arrays, moved = [], {}
    loose = iter(in_dims[count:])
    for name in executable.arrays:
        raw = indices[name]
        dim = None if isinstance(raw, TorchIndex) else next(loose, None)
        shape = executable.index_shapes[name]
        if dim is None:
            moved[name] = raw.reshape(shape)
        else:
            arrays.append(name)
            moved[name] = raw.movedim(dim, 0).reshape((size, *shape))
    return executable.contract(batched(spec, hint(size), batched_operands, arrays), values, moved)


# -- the operators' own derivatives ----------------------------------------------------------------------


def _save_for_forward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.plan, ctx.names, arrays, operands, ctx.sizes = inputs
    _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.counts = len(arrays), len(operands)
    ctx.save_for_backward(*arrays, *operands, *kept)


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.plan, ctx.names, arrays, gradient, operands, kept, ctx.sizes = inputs
    ctx.set_materialize_grads(False)
    ctx.counts = len(arrays), len(operands), len(kept)
    ctx.save_for_backward(*arrays, *operands, gradient)


def _of_forward(ctx: Any, outputs: Sequence[Tensor | None]) -> Any:
    """Return the gradients of `planner::forward`. Those that its plan does not have are contractions of their own."""
    arrays, operands, kept = _parts(ctx)
    gradient, needs = outputs[0], ctx.needs_input_grad[3]
    gradients: list[Tensor | None] = [None] * len(operands)
    if gradient is not None:
        indices = join_indices(ctx.names, arrays)
        executable = executable_for(ctx.plan, operands, indices, ctx.sizes)
        planned = executable.programs.gradients
        if any(v is not None for v in planned):
            found = iter(backward_operator(ctx.plan, ctx.names, arrays, gradient, operands, kept, ctx.sizes))
            gradients = [None if v is None else next(found) for v in planned]
        for number, x in enumerate(operands):
            if gradients[number] is None and needs[number]:
                part = contract_gradient(executable, number, gradient, operands, indices)
                gradients[number] = _in_dtype(part, x.dtype).reshape(x.shape)
    return (None, None, [None] * len(arrays), gradients, *_of_sizes(ctx))


def _of_backward(ctx: Any, tangents: Sequence[Tensor | None]) -> Any:
    """Return the gradients of `planner::backward`."""
    arrays, operands, (gradient,) = _parts(ctx)
    indices = join_indices(ctx.names, arrays)
    executable = executable_for(ctx.plan, operands, indices, ctx.sizes)
    needs = [ctx.needs_input_grad[3], *ctx.needs_input_grad[4]]
    to_gradient, *to_operands = _differentiate(executable, tangents, gradient, operands, indices, needs)
    return (None, None, [None] * len(arrays), to_gradient, to_operands, [None] * ctx.counts[2], *_of_sizes(ctx))


def _of_sizes(ctx: Any) -> tuple[None, ...]:
    """Return the gradient of the last argument. Torch leaves out an argument that has its default, None."""
    return () if ctx.sizes is None else (None,)


def _parts(ctx: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    first, second = ctx.counts[0], sum(ctx.counts[:2])
    saved = list(ctx.saved_tensors)
    return saved[:first], saved[first:second], saved[second:]


torch.library.register_autograd("planner::forward", _of_forward, setup_context=_save_for_forward)
torch.library.register_autograd("planner::backward", _of_backward, setup_context=_save_for_backward)
