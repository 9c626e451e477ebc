"""Plans under autograd: a Function runs the forward program and saves the operands and the kept values.

Its backward is a Function too, which runs the backward program, and whose own derivative is made of transposed specs,
so that any order works. Under `vmap` both are contractions by a batched spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.backends.torch.executable import Executable
from planner.backends.torch.index import TorchIndex
from planner.backends.torch.modes import as_planned, autograd_batches, in_functorch, over_batch, transformed, unwrapped
from planner.backends.torch.traced import run_backward, run_forward
from planner.language.derive import batched, transpose
from planner.language.spec import Spec

__all__ = ["recorded"]


def recorded(bound: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
    """Run a plan's forward program, recorded by autograd, which will run the backward program."""
    prepared = {n: q for n, q in indices.items() if isinstance(q, TorchIndex)}
    loose = (indices[n] for n in bound.arrays if n not in prepared)
    return _apply(_Contract, bound, prepared, *operands, *loose)[0]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply a Function; without a transform past what takes longer than a small product: the names of its arguments."""
    if in_functorch():
        return function.apply(*arguments)
    plain: Any = super(torch.autograd.Function, function)
    return plain.apply(*unwrapped(arguments))


def _split(
    bound: Executable, prepared: Mapping[str, Any], arrays: Sequence[Tensor]
) -> tuple[Sequence[Tensor], dict[str, Any]]:
    """Operands and index arrays of the arguments that `recorded` made of them."""
    count = len(bound.plan.operands)
    loose = iter(arrays[count:])
    return arrays[:count], {n: prepared[n] if n in prepared else next(loose) for n in bound.arrays}


def _owned(result: Tensor, arrays: Sequence[Tensor]) -> Tensor:
    """A Function's result as no view of what it allocated: torch refuses in-place operations on such views.

    A view of one of its arguments stays one, so that they are refused: a write would reach the argument unseen.
    """
    base = result._base
    if base is None or any(base is x or base is x._base for x in arrays):
        return result
    return result.detach()


class _Contract(torch.autograd.Function):
    """The forward program; arguments are the bound plan, then operands, then index arrays."""

    @staticmethod
    def forward(bound: Executable, prepared: Mapping[str, Any], *arrays: Tensor) -> Any:
        operands, indices = _split(bound, prepared, arrays)
        result, kept = run_forward(bound, operands, indices)
        if any(result is x for x in arrays):
            result = result.view_as(result)
        return (_owned(result, arrays), *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        bound, prepared, *arrays = inputs
        _, *kept = output
        ctx.bound, ctx.prepared = bound, prepared
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*arrays, *kept)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> Any:
        count = len(ctx.bound.plan.operands)
        blank = (None,) * (len(ctx.bound.arrays) - len(ctx.prepared))
        if gradient is None:
            return (None, None, *(None,) * count, *blank)
        if autograd_batches(gradient):
            return over_batch(partial(_Contract.backward, ctx), (gradient,))
        saved = ctx.saved_tensors
        arrays = saved[: count + len(blank)]
        kept = saved[count + len(blank) :]
        with as_planned():
            bound, gradient = ctx.bound.against(gradient)
            kept = kept if bound is ctx.bound else ()
            arguments = bound, ctx.prepared, gradient, *arrays, *kept
            # A Function takes longer than a small product: it is needed where something may be derived from gradients.
            if torch.is_grad_enabled() or transformed():
                gradients = _apply(_Gradient, *arguments)
            else:
                gradients = _Gradient.forward(*unwrapped(arguments))
        found = iter(gradients)
        return (
            None, None,
            *(next(found) if v is not None else None for v in ctx.bound.programs.gradients),
            *blank,
        )  # fmt: skip

    @staticmethod
    def vmap(info: Any, in_dims: Any, bound: Executable, prepared: Mapping[str, Any], *arrays: Tensor) -> Any:
        result = _batched_call(info, in_dims[2:], bound, prepared, arrays)
        # Kept values are the batched call's own business.
        shape = (0,)
        kept = tuple(result.new_zeros(shape) for _ in bound.kept)
        return (result, *kept), (0, *(None for _ in kept))


class _Gradient(torch.autograd.Function):
    """The backward program; arguments are the output gradient, operands, index arrays and kept values."""

    @staticmethod
    def forward(bound: Executable, prepared: Mapping[str, Any], gradient: Tensor, *saved: Tensor) -> Any:
        count = len(bound.plan.operands)
        arrays = len(bound.arrays) - len(prepared)
        operands, indices = _split(bound, prepared, saved[: count + arrays])
        kept = saved[count + arrays :]
        found = run_backward(bound, gradient, operands, indices, kept)
        return tuple(_owned(g, (gradient, *saved)) for g in found if g is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        bound, prepared, gradient, *saved = inputs
        count = len(bound.plan.operands) + len(bound.arrays) - len(prepared)
        ctx.bound, ctx.prepared = bound, prepared
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gradient, *saved[:count])
        ctx.kept = len(saved) - count

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        if autograd_batches(*tangents):
            return over_batch(partial(_Gradient.backward, ctx), tangents)
        bound, prepared = ctx.bound, ctx.prepared
        gradient, *arrays = ctx.saved_tensors
        operands, indices = _split(bound, prepared, arrays)
        blank = (None,) * (len(bound.arrays) - len(prepared) + ctx.kept)
        spec: Spec = bound.resolved.spec
        views, indices = bound.views(operands), bound.index_views(indices)
        count = len(views)
        needs_gradient, *needs = ctx.needs_input_grad[2 : 3 + count]
        wanted = [number for number, v in enumerate(bound.programs.gradients) if v is not None]
        to_gradient: Tensor | None = None
        to_operands: list[Tensor | None] = [None] * count
        for tangent, number in zip(tangents, wanted, strict=True):
            if tangent is None:
                continue
            # The gradient of operand i is multilinear in the output gradient and the other conjugated operands.
            inner = transpose(spec, number)
            factors = [x.conj() if x.is_complex() else x for x in views]
            factors[number] = gradient
            along = tangent.reshape(views[number].shape)
            for slot in range(count):
                if not (needs_gradient if slot == number else needs[slot]):
                    continue
                others = [x.conj() if x.is_complex() else x for x in factors]
                others[slot] = along
                part = bound.contract(transpose(inner, slot), others, indices)
                if slot == number:
                    to_gradient = part if to_gradient is None else to_gradient + part
                    continue
                part = _like(part.conj() if part.is_complex() else part, views[slot])
                part = part.reshape(operands[slot].shape)
                known = to_operands[slot]
                to_operands[slot] = part if known is None else known + part
        if to_gradient is not None:
            to_gradient = _like(to_gradient, gradient)
        return (None, None, to_gradient, *to_operands, *blank)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, bound: Executable, prepared: Mapping[str, Any], gradient: Tensor, *saved: Tensor
    ) -> Any:
        count = len(bound.plan.operands) + len(bound.arrays) - len(prepared)
        arrays, dims = saved[:count], in_dims[3 : 3 + count]
        operands, indices = _split(bound, prepared, arrays)
        results = []
        for number, variable in enumerate(bound.programs.gradients):
            if variable is None:
                continue
            swapped = list(operands)
            swapped[number] = gradient
            swapped_dims = list(dims)
            swapped_dims[number] = in_dims[2]
            conjugated = [x.conj() if i != number and x.is_complex() else x for i, x in enumerate(swapped)]
            found = _batched_contract(
                info.batch_size, bound, transpose(bound.resolved.spec, number), conjugated, indices, swapped_dims
            )
            operand = operands[number]
            found = _like(found, operand)
            shape = list(operand.shape)
            if dims[number] is not None:
                del shape[dims[number]]
            results.append(found.reshape([info.batch_size, *shape]))
        return tuple(results), (0,) * len(results)


def _like(x: Tensor, operand: Tensor) -> Tensor:
    """A gradient in the dtype of its operand: the real part for a real one."""
    if x.is_complex() and not operand.is_complex():
        x = x.real
    return x.to(operand.dtype)


def _batched_call(info: Any, in_dims: Any, bound: Executable, prepared: Mapping[str, Any], arrays: Any) -> Tensor:
    operands, indices = _split(bound, prepared, arrays)
    return _batched_contract(info.batch_size, bound, bound.resolved.spec, operands, indices, in_dims)


def _batched_contract(
    size: int, bound: Executable, spec: Spec, operands: Sequence[Tensor], indices: Mapping[str, Any], in_dims: Any,
) -> Tensor:  # fmt: skip
    """Contract operands of which some carry a batch dimension, by the batched spec."""
    count = len(operands)
    batched_operands = [i for i in range(count) if in_dims[i] is not None]
    values = []
    for number, (x, dim) in enumerate(zip(operands, in_dims[:count], strict=True)):
        shape = spec.shape(spec.inputs[number])
        values.append(x.reshape(shape) if dim is None else x.movedim(dim, 0).reshape((size, *shape)))
    arrays, moved = [], {}
    loose = iter(in_dims[count:])
    for name in bound.arrays:
        raw = indices[name]
        dim = None if isinstance(raw, TorchIndex) else next(loose, None)
        shape = bound.index_shapes[name]
        if dim is None:
            moved[name] = raw.reshape(shape)
        else:
            arrays.append(name)
            moved[name] = raw.movedim(dim, 0).reshape((size, *shape))
    return bound.contract(batched(spec, size, batched_operands, arrays), values, moved)
