"""PyTorch: plans under autograd, in forward mode, in `torch.func`, to any order of derivative.

What is kept is the plan's decision. Where native operators keep just that, the plan runs as native calls (see
`torch_native`). Elsewhere one `autograd.Function` runs the forward program and saves the operands and the kept
values; its backward is a Function too, whose own derivative is made of transposed specs, so that any order works.
In forward mode the plan is run with out-of-place stock operators, which torch differentiates itself; so are tensors
without data. Autocast changes no dtype: under it native calls, which torch would cast, give way to the Function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from planner.backends.common import (
    Prepared,
    PreparedIndex,
    check_index_dtype,
    clip_error,
    exposed,
    mask_operands,
    mask_term,
    only_read_rows,
    range_error,
    run_program,
    widened,
)
from planner.backends.loops import run_loop
from planner.backends.protocol import Backend, Stepwise
from planner.backends.stock import evaluate
from planner.backends.torch_native import NATIVE, compile_native, standin
from planner.backends.torch_rows import OPS, cast, make_table, torch_dtype
from planner.derive import batched, transpose
from planner.device import CPU, GPU, Device, gpu_preset
from planner.errors import PlannerError
from planner.kernels import torch_grouping
from planner.kernels.torch_grouped import accumulator
from planner.loops import body_of
from planner.program import Leaf, Step, Tree
from planner.rates import cpu_name, stored
from planner.spec import Gather, Operand, Spec, Term

if TYPE_CHECKING:
    from planner.plan import Plan

__all__ = ["TorchBackend", "backend"]


class TorchIndex(PreparedIndex):
    """A prepared index with its rows sorted by group."""

    prepared_framework = "torch"

    def __init__(self, values: Tensor, size: int, mode: str, guarded: bool) -> None:
        super().__init__(values, size, mode)
        self.guarded = guarded
        self.groups = torch_grouping.group_rows(values.reshape(-1), size)

    def reshape(self, shape: Sequence[int]) -> TorchIndex:
        """The same rows in another shape."""
        if tuple(shape) == tuple(self.shape):
            return self
        view = copy.copy(self)
        view.values = self.values.reshape(tuple(shape))
        return view


def _checked(raw: Tensor, gather: Gather, mode: str) -> tuple[Tensor, bool]:
    """Bring an index array into [0, size]; also whether `size`, which means no row, occurs."""
    size = gather.size
    assert size is not None
    if raw.layout != torch.strided:
        raise PlannerError(f"index array {gather.array!r} {_not_dense(raw)}")
    if raw.numel() == 0 or _dataless(raw):
        return raw.long(), False
    # A uint64 has no comparisons of its own: values from 2^63 on become negative, far out of any range.
    wide = raw if raw.dtype in (torch.int64, torch.int32) else raw.long()
    if raw.dtype == torch.uint64:
        wide = torch.where(wide < 0, torch.iinfo(torch.int64).max, wide)
    if mode == "clip":
        if size == 0:
            raise clip_error(gather)
        return wide.clamp(0, size - 1), False
    low, high = (int(v) for v in torch.aminmax(wide))
    if mode == "raise":
        if low < -size or high >= size:
            bad = (wide < -size) if low < -size else (wide >= size)
            position = tuple(int(i) for i in bad.nonzero()[0])
            raise range_error(gather, position, int(raw[position].item()))
        return (torch.where(wide < 0, wide + size, wide) if low < 0 else wide), False
    if low < 0 or high >= size:
        return torch.where((wide >= 0) & (wide < size), wide, size), True
    return wide, False


def _not_dense(x: Tensor) -> str | None:
    """Why a tensor cannot be contracted and what to do about it, or None if it is dense."""
    if x.is_nested:
        return "is a nested tensor, whose rows have no one shape: pad it, as torch.nested.to_padded_tensor(x, 0.0) does"
    if x.is_quantized:
        return "is a quantized tensor, and contractions take dense ones: pass it as .dequantize()"
    if x.layout != torch.strided:
        return f"is a tensor of layout {x.layout}, and contractions take dense ones: pass it as .to_dense()"
    return None


def _dataless(x: Tensor) -> bool:
    """Whether a tensor has a shape and a dtype but no values to look at."""
    return x.is_meta or isinstance(x, FakeTensor)


class _Bound:
    """A plan with what running it in torch needs; one for each plan, kept with its runner."""

    def __init__(self, plan: Plan, backend: TorchBackend) -> None:
        self.plan, self.table = plan, backend.table
        self.resolved, self.programs, self.spec = plan.resolved, plan.programs, plan.resolved.spec
        self.shapes = self.resolved.shapes
        self.reshape = [s if s != o.shape else None for s, o in zip(self.shapes, plan.operands, strict=True)]
        self.gathers = self.resolved.spec.gathers
        self.index_shapes = dict(self.resolved.index_shapes)
        self.dtype = torch_dtype(plan.dtype)
        self.is_complex = self.dtype.is_complex
        self.inexact = self.is_complex or self.dtype.is_floating_point
        self.arrays = tuple(self.index_shapes)
        self.exposed = exposed(plan.tree, self.spec, plan.steps)

    def views(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Operands without their broadcast dimensions."""
        return [x if shape is None else x.reshape(shape) for x, shape in zip(operands, self.reshape, strict=True)]

    def leaves(self, operands: Sequence[Tensor], index: Prepared) -> list[Tensor]:
        """Operands as the steps read them: NaN and infinities that no index reads are out of the way."""
        values = mask_operands(OPS, self.views(operands), self.spec, index)
        for number in self.exposed:
            x = values[number]
            if (x.is_floating_point() or x.is_complex()) and not _finite(x):
                values[number] = only_read_rows(OPS, x, self.spec.inputs[number], self.spec, index)
        return values

    def index_views(self, indices: Mapping[str, Any]) -> dict[str, Any]:
        """Index arrays without their broadcast dimensions, as derived specs take them."""
        return {name: q.reshape(self.index_shapes[name]) for name, q in indices.items()}

    def prepare(self, indices: Mapping[str, Any]) -> Prepared:
        """Check index arrays and shape them as the spec sees them."""
        prepared = Prepared(False)
        for gather in self.gathers:
            raw = indices[gather.array]
            if isinstance(raw, TorchIndex):
                raw.check(gather, self.plan.index_mode)
                values, dropped = raw.values, raw.guarded
                if gather.axes and raw.values.dim() == len(gather.axes):
                    prepared.orders[gather] = raw.groups
            else:
                values, dropped = _checked(raw, gather, self.plan.index_mode)
            prepared[gather] = values.reshape(self.index_shapes[gather.array])
            prepared.guarded |= dropped
        return prepared

    def forward(self, operands: Sequence[Tensor], index: Prepared) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the forward program: the result and the kept values."""
        values: dict[int, Any] = dict(enumerate(self.leaves(operands, index)))
        (result,) = run_program(self.table, self.programs.forward, values, index)
        result = mask_term(OPS, result, self.spec.output, self.spec, index)
        return result, tuple(values[v] for v in self.programs.kept)

    def backward_values(
        self, gradient: Tensor, operands: Sequence[Tensor], index: Prepared, kept: Mapping[int, Tensor]
    ) -> dict[int, Any]:
        """What the backward program is given, by variable."""
        values: dict[int, Any] = {**dict(enumerate(self.leaves(operands, index))), **kept}
        if self.is_complex:
            values = {number: value.conj() for number, value in values.items()}
        values[self.programs.output_gradient] = mask_term(OPS, gradient, self.spec.output, self.spec, index)
        return values

    def backward(
        self, gradient: Tensor, operands: Sequence[Tensor], index: Prepared, kept: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run the backward program: a gradient for each operand that needs one."""
        program = self.programs.backward
        assert program is not None
        values = self.backward_values(gradient, operands, index, dict(zip(self.programs.kept, kept, strict=True)))
        run_program(self.table, program, values, index)
        gradients: list[Tensor | None] = []
        for number, variable in enumerate(self.programs.gradients):
            if variable is None:
                gradients.append(None)
                continue
            found = mask_term(OPS, values[variable], self.spec.inputs[number], self.spec, index)
            operand = operands[number]
            if found.is_complex() and not operand.is_complex():
                found = found.real
            gradients.append(found.reshape(operand.shape))
        return gradients

    def contract(self, spec: Spec, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        """Contract by a derived spec, with this plan's options."""
        from planner.api import contract

        options = self.plan.options
        minimize = options.minimize if isinstance(options.minimize, str) else "time"
        result: Tensor = contract(
            spec, *operands, minimize=minimize, index_mode=self.plan.index_mode, dtype=self.plan.dtype, **indices
        )
        return result

    def stock(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        """Run the plan's tree with differentiable stock operators."""
        index = self.prepare(indices)
        leaves = self.leaves(operands, index)

        def value(tree: Tree) -> Tensor:
            if isinstance(tree, Leaf):
                return leaves[tree.operand]
            inputs = [value(child) for child in tree.children]
            if tree.op.source_dtype is not None:
                return cast(inputs[0], tree.op.dtype)
            return evaluate(OPS, tree.op.spec, inputs, index, index.guarded)

        return mask_term(OPS, value(self.plan.tree), self.spec.output, self.spec, index)


class _BoundLoop(_Bound):
    """A plan that goes slice by slice: its programs call those of its body."""

    def __init__(self, plan: Plan, backend: TorchBackend) -> None:
        super().__init__(plan, backend)
        self.body = lru_cache(maxsize=64)(lambda *sizes: _Bound(body_of(plan, dict(sizes)), backend))

    def _result(self, term: Term, dtype: torch.dtype, like: Tensor) -> tuple[Term, Callable[[bool], Tensor]]:
        shape = self.spec.shape(term)

        def allocate(zero: bool) -> Tensor:
            return like.new_zeros(shape, dtype=accumulator(dtype)) if zero else like.new_empty(shape, dtype=dtype)

        return term, allocate

    def forward(self, operands: Sequence[Tensor], index: Prepared) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the forward program of every slice."""
        assert self.plan.loop is not None
        (result,) = run_loop(
            self.plan.loop,
            self.spec,
            list(zip(self.spec.inputs, self.views(operands), strict=True)),
            index,
            lambda part, xs, here: self.body(*part.sizes.items()).forward(xs, here)[:1],
            [self._result(self.spec.output, self.dtype, operands[0])],
        )
        return result.to(self.dtype), ()

    def backward(
        self, gradient: Tensor, operands: Sequence[Tensor], index: Prepared, kept: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run the backward program of every slice."""
        assert self.plan.loop is not None
        spec, needs = self.spec, [v is not None for v in self.programs.gradients]
        found = run_loop(
            self.plan.loop,
            spec,
            list(zip((spec.output, *spec.inputs), (gradient, *self.views(operands)), strict=True)),
            index,
            lambda part, xs, here: self.body(*part.sizes.items()).backward(xs[0], xs[1:], here, ()),
            [
                self._result(term, x.dtype, x) if need else None
                for term, x, need in zip(spec.inputs, operands, needs, strict=True)
            ],
        )
        return [None if g is None else g.to(x.dtype).reshape(x.shape) for g, x in zip(found, operands, strict=True)]


def _finite(x: Tensor) -> bool:
    """Whether a sum is finite; one that overflows only costs a needless look at the rows."""
    return _dataless(x) or bool(x.detach().abs().sum().isfinite())


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
    def forward(bound: _Bound, prepared: Mapping[str, Any], *arrays: Tensor) -> Any:
        operands, indices = _split(bound, prepared, arrays)
        result, kept = bound.forward(operands, bound.prepare(indices))
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
        saved = ctx.saved_tensors
        arrays = saved[: count + len(blank)]
        kept = saved[count + len(blank) :]
        with _as_planned():
            gradients = _Gradient.apply(ctx.bound, ctx.prepared, gradient, *arrays, *kept)
        found = iter(gradients)
        return (
            None, None,
            *(next(found) if v is not None else None for v in ctx.bound.programs.gradients),
            *blank,
        )  # fmt: skip

    @staticmethod
    def vmap(info: Any, in_dims: Any, bound: _Bound, prepared: Mapping[str, Any], *arrays: Tensor) -> Any:
        result = _batched_call(info, in_dims[2:], bound, prepared, arrays)
        # Kept values are the batched call's own business.
        shape = (0,)
        kept = tuple(result.new_zeros(shape) for _ in bound.programs.kept)
        return (result, *kept), (0, *(None for _ in kept))


class _Gradient(torch.autograd.Function):
    """The backward program; arguments are the output gradient, operands, index arrays and kept values."""

    @staticmethod
    def forward(bound: _Bound, prepared: Mapping[str, Any], gradient: Tensor, *saved: Tensor) -> Any:
        count = len(bound.plan.operands)
        arrays = len(bound.arrays) - len(prepared)
        operands, indices = _split(bound, prepared, saved[: count + arrays])
        kept = saved[count + arrays :]
        found = bound.backward(gradient, operands, bound.prepare(indices), kept)
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
        info: Any, in_dims: Any, bound: _Bound, prepared: Mapping[str, Any], gradient: Tensor, *saved: Tensor
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


def _split(
    bound: _Bound, prepared: Mapping[str, Any], arrays: Sequence[Tensor]
) -> tuple[Sequence[Tensor], dict[str, Any]]:
    count = len(bound.plan.operands)
    loose = iter(arrays[count:])
    return arrays[:count], {n: prepared[n] if n in prepared else next(loose) for n in bound.arrays}


def _batched_call(info: Any, in_dims: Any, bound: _Bound, prepared: Mapping[str, Any], arrays: Any) -> Tensor:
    operands, indices = _split(bound, prepared, arrays)
    return _batched_contract(info.batch_size, bound, bound.resolved.spec, operands, indices, in_dims)


def _batched_contract(
    size: int, bound: _Bound, spec: Spec, operands: Sequence[Tensor], indices: Mapping[str, Any], in_dims: Any,
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


class TorchBackend(Backend):
    """Runs plans on torch tensors."""

    name = "torch"

    def __init__(self) -> None:
        self.table = make_table()

    def operand(self, array: Tensor) -> Operand:
        """Describe a tensor; under `torch.func` every float may need a gradient at some level."""
        if (reason := _not_dense(array)) is not None:
            raise PlannerError(reason)
        needs = torch.is_grad_enabled() and array.requires_grad
        if _in_functorch():
            needs = array.dtype.is_floating_point or array.dtype.is_complex
        return Operand(tuple(array.shape), str(array.dtype).removeprefix("torch."), tuple(array.stride()), needs)

    def signature(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Any:
        """All that a plan depends on, cheaply; an AttributeError says that something is no tensor."""
        key: list[Any] = [_grad_enabled(), _peek() is None, _autocasts()]
        try:
            for x in operands:
                key.append((x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad))
            if indices:
                for name, q in indices.items():
                    key.append((name, type(q), q.shape, q.dtype, q.device))
        except RuntimeError:  # some layouts have no shape or strides
            _refuse(operands, indices)
            raise
        return tuple(key)

    def result_dtype(self, dtypes: Sequence[str], operands: Sequence[Any]) -> str:
        """Promote as torch does tensors of the same category."""
        result = torch_dtype(dtypes[0])
        for name in dtypes[1:]:
            result = torch.promote_types(result, torch_dtype(name))
        return str(result).removeprefix("torch.")

    def device(self, operands: Sequence[Any]) -> Device:
        """Rates of the machine that the operands are on."""
        first = next((x.device for x in operands if isinstance(x, Tensor)), None)
        if first is None or first.type == "cpu":
            return stored(CPU, "torch", str(torch.__version__), cpu_name(torch.get_num_threads()))
        if first.type != "cuda":
            return GPU
        product = torch.cuda.get_device_name(first)
        return stored(gpu_preset(product), "torch", str(torch.__version__), product)

    def check_index(self, name: str, index: Any) -> None:
        """Refuse an index array that is not of integers, or not dense."""
        if isinstance(index, Tensor) and (reason := _not_dense(index)) is not None:
            raise PlannerError(f"index array {name!r} {reason}")
        check_index_dtype(name, str(index.dtype).removeprefix("torch."))

    def check_devices(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse arrays on different devices: nothing is moved in silence."""
        devices = [(f"operand {i}", x.device) for i, x in enumerate(operands) if isinstance(x, Tensor)]
        devices += [(f"index array {n!r}", q.device) for n, q in indices.items() if hasattr(q, "device")]
        for label, device in devices[1:]:
            if device != devices[0][1]:
                raise PlannerError(f"{label} is on {device}, but {devices[0][0]} on {devices[0][1]}: move one of them")

    def group(self, q: Tensor, size: int, index_mode: str) -> TorchIndex:
        """Check and sort an index array."""
        if _dataless(q):
            raise PlannerError(f"an index array on the {q.device.type} device or a fake one has no values to group")
        values, guarded = _checked(q, Gather("q", (), size), index_mode)
        # A copy: the sorted order must not outlive the values that it was made from.
        return TorchIndex(values.clone(), size, index_mode, guarded)

    def trial(self, plan: Plan, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return a function that runs a plan with its gradients, which go nowhere, and waits for the device."""
        values = [q for q in indices.values() if isinstance(q, Tensor)]
        if _in_functorch() or forward_ad._current_level >= 0 or any(map(_dataless, (*operands, *values))):
            return None
        on_gpu = any(x.is_cuda for x in operands)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return None
        needs = [variable is not None for variable in plan.programs.gradients]
        leaves = [x.detach().requires_grad_(need) for x, need in zip(operands, needs, strict=True)]
        wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
        run, ones = self.bind(plan), None

        def once() -> None:
            nonlocal ones
            result = run(leaves, indices)
            if wanted:
                ones = torch.ones_like(result) if ones is None else ones
                torch.autograd.grad(result, wanted, ones)
            if on_gpu:
                torch.cuda.synchronize(leaves[0].device)

        return once

    def environment(self, operands: Sequence[Any]) -> dict[str, str]:
        """Name the version, the device, and the settings that decide how products run."""
        device = next((x.device for x in operands if isinstance(x, Tensor)), torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        precision = torch.get_float32_matmul_precision()
        threads = str(torch.get_num_threads())
        return {"torch": torch.__version__, "device": name, "threads": threads, "precision": precision}

    def bind(self, plan: Plan) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        """Return the function that runs a plan."""
        bound = _Bound(plan, self) if plan.loop is None else _BoundLoop(plan, self)
        requires = plan.programs.backward is not None

        def run(operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
            if _dataless(operands[0]):
                return bound.stock(operands, indices)
            if plan.index_mode == "drop" and not _in_functorch():
                wide = widened(
                    OPS, bound.views(operands), bound.spec, bound.prepare(indices), lambda x: bool(x.isfinite().all())
                )
                if wide is not None:
                    return bound.contract(*wide, bound.index_views(indices))
            if forward_ad._current_level >= 0:
                return bound.stock(operands, indices)
            if bound.inexact and torch.is_grad_enabled():
                for number, (x, gradient) in enumerate(zip(operands, plan.programs.gradients, strict=True)):
                    if x.requires_grad and gradient is None:
                        raise PlannerError(
                            f"the plan was made without the gradient of operand {number}, which requires one: "
                            "plan with such operands, with Operand(..., requires_grad=True), "
                            "or call it under torch.no_grad()"
                        )
            if not requires:
                return bound.forward(operands, bound.prepare(indices))[0]
            prepared = {n: q for n, q in indices.items() if isinstance(q, TorchIndex)}
            loose = (indices[n] for n in bound.arrays if n not in prepared)
            return _Contract.apply(bound, prepared, *operands, *loose)[0]

        def shielded(operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
            with _as_planned():
                return run(operands, indices)

        steps = plan.programs.forward.steps
        if _autocasts() and not all(step.choice.lowering in ("view", "broadcast") for step in steps):
            return shielded
        if plan.loop is None and not bound.gathers and (not requires or plan.keep == "all" or not _has_kept(plan)):
            metas = [
                standin(o.shape, o.strides, torch_dtype(o.dtype)).reshape(shape)
                for o, shape in zip(plan.operands, bound.shapes, strict=True)
            ]
            stock = all(step.choice.lowering in NATIVE for step in steps)
            native = compile_native(plan.tree, metas, copies=not requires) if stock else None
            if isinstance(plan.tree, Leaf):
                return lambda operands, indices: bound.views(operands)[0].view_as(bound.views(operands)[0])
            if native is not None:
                if any(shape is not None for shape in bound.reshape):
                    return lambda operands, indices: native(bound.views(operands))
                return native
        return run

    def refuse_dataless(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> None:
        """Refuse tensors of the meta device, fake ones, and calls under a transform or a compiler."""
        if _in_functorch() or forward_ad._current_level >= 0 or torch.compiler.is_compiling():
            raise PlannerError("inside of a transform or a compiled function nothing can be measured: call it outside")
        arrays = [(f"operand {number}", x) for number, x in enumerate(operands)]
        arrays += [(f"index array {n!r}", getattr(q, "values", q)) for n, q in indices.items()]
        for label, x in arrays:
            if isinstance(x, Tensor) and _dataless(x):
                raise PlannerError(f"{label} is a meta or fake tensor, on which nothing can be measured: give values")

    def stepwise(
        self,
        plan: Plan,
        operands: Sequence[Tensor],
        indices: Mapping[str, Any],
        gradient: Tensor | None = None,
        kept: Mapping[int, Any] | None = None,
    ) -> Stepwise:
        """Return the forward program with what it is given, or the backward program."""
        bound = _Bound(plan, self)
        with torch.no_grad(), _as_planned():
            index = bound.prepare(indices)
            if gradient is None:
                values: dict[int, Any] = dict(enumerate(bound.leaves(operands, index)))
            else:
                values = bound.backward_values(gradient, operands, index, kept or {})

        def run(step: Step, inputs: Sequence[Tensor]) -> Any:
            with torch.no_grad(), _as_planned():
                return self.table.run(step.choice.lowering, step.op, inputs, index)

        return Stepwise(values, lambda step, inputs: partial(run, step, inputs), index.orders)


def _refuse(operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
    """Name the array that is not dense, if one is."""
    labels = [*(f"operand {i}" for i in range(len(operands))), *(f"index array {name!r}" for name in indices)]
    for label, x in zip(labels, (*operands, *indices.values()), strict=True):
        if isinstance(x, Tensor) and (reason := _not_dense(x)) is not None:
            raise PlannerError(f"{label} {reason}") from None


def _has_kept(plan: Plan) -> bool:
    """Whether keeping everything would keep anything."""
    return sum(len(step.inputs) > 0 for step in plan.programs.forward.steps) > 1


_peek = torch._C._functorch.peek_interpreter_stack
_grad_enabled = torch.is_grad_enabled
_autocasts = torch._C._is_any_autocast_enabled
# Plans say what is computed in which dtype.
_as_planned = torch._C._DisableAutocast


def _in_functorch() -> bool:
    return _peek() is not None


backend = TorchBackend()
