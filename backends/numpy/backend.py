"""The NumPy backend: it runs each step in its simplest form, and computes no gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from planner.backends.common.elementwise import runs_of
from planner.backends.common.indices import PreparedIndex, check_index_dtype, numpy_in_range
from planner.backends.common.masks import guard_run, widen_operands
from planner.backends.common.routing import Routing
from planner.backends.common.run import prepare_program
from planner.backends.common.stock import Product, matmul_product, viewing
from planner.backends.common.stock_layout import stock_layout
from planner.backends.common.stock_rows import stock_kind, stock_rows, stock_work
from planner.cost.device import CPU, Device
from planner.cost.figures import Work
from planner.cost.rates import load_rates
from planner.language.dtypes import accumulator, itemsize
from planner.language.errors import PlannerError, PlannerTypeError
from planner.language.options import MODES
from planner.language.spec import Gather, Operand, Spec, term_axes
from planner.program.callbacks import callbacks
from planner.program.calls import Member, RangedIndices, Stepwise
from planner.program.forms import ProductForm
from planner.program.frameworks import Backend
from planner.program.implementations import Table
from planner.program.ops import Op
from planner.program.plan import PlanRecord
from planner.program.program import Step


class NumpyOps:
    """`ArrayOps` in NumPy."""

    skips = False

    def permute(self, x: Any, dims: Sequence[int]) -> Any:
        return x.transpose(tuple(dims))

    def diagonal(self, x: Any, first: int, second: int) -> Any:
        return np.diagonal(x, axis1=first, axis2=second)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return np.broadcast_to(x, tuple(shape))

    def sum(self, x: Any, dims: Sequence[int]) -> Any:
        return np.asarray(x.sum(axis=tuple(dims), dtype=accumulator(x.dtype.name))).astype(x.dtype, copy=False)

    def matmul(self, a: Any, b: Any) -> Any:
        wide = accumulator(a.dtype.name)
        return np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False)).astype(a.dtype, copy=False)

    def product(self, form: ProductForm, spec: Spec) -> Product:
        return matmul_product(self.matmul, partial(np.multiply, order="C"), partial(viewing, self.permute), form, spec)

    def iota(self, size: int, like: Any) -> Any:
        return np.arange(size)

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        return x[tuple(index)]

    def add_at(self, shape: Sequence[int], index: Sequence[Any], values: Any) -> Any:
        out = np.zeros(shape, accumulator(values.dtype.name))
        np.add.at(out, tuple(index), values.astype(out.dtype, copy=False))
        return out.astype(values.dtype, copy=False)

    def select(self, mask: Any, x: Any, otherwise: float) -> Any:
        return np.where(mask, x, np.asarray(otherwise, x.dtype))

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        return np.zeros(shape, like.dtype)

    empty_sum = zeros


OPS = NumpyOps()
_ROUTING = Routing("numpy", lambda: getattr(np.einsum, "_implementation", None))


def _finite(x: Any) -> bool:
    return bool(np.isfinite(x).all())


def _cast(x: Any, dtype: str) -> Any:
    return x.astype(_dtype(dtype), copy=False)


def _dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name. NumPy knows bfloat16 only where a package has added it."""
    try:
        return np.dtype(name)
    except TypeError:
        raise PlannerTypeError(f"NumPy has no {name} until ml_dtypes is imported: import it, or take float32") from None


def _empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    return np.empty(shape, dtype)


# What NumPy's elementwise loops take besides moving memory, in parts of `Device.loop_seconds`: for each run of
# neighbours, for each element, and for each sum of neighbours: 16, 0.3 and 25 ns where it is 30; 2 cores of an Intel
# Xeon at 2.8 GHz, NumPy 2.4, 2026-11-22.
_RUN_LOOPS, _ELEMENT_LOOPS, _SUM_LOOPS = 16 / 30, 0.3 / 30, 25 / 30


def _work(op: Op, device: Device) -> list[Work]:
    """Return what a step does: elementwise products and sums go through one run after another, on one core."""
    parts, kind, spec = stock_work(op, device), stock_kind(op), op.spec
    if kind == "broadcast":  # a view
        return [Work(launches=1)]
    if kind == "take, multiply, add":
        return [*parts, Work.of_copies(stock_layout(op)[0] * itemsize(op.dtype))]
    if kind not in ("multiply", "sum"):
        return parts
    order, terms = (spec.output, spec.inputs) if kind == "multiply" else (spec.inputs[0], [spec.output])
    runs, in_a_term = runs_of(term_axes(order), terms, spec)
    rows, elements = math.prod(runs[:-1]), math.prod(runs)
    loops = rows * (_RUN_LOOPS if in_a_term else _SUM_LOOPS) + elements * _ELEMENT_LOOPS * in_a_term
    return [*parts, Work(seconds=loops * device.loop_seconds)]


class NumpyBackend(Backend):
    """Runs plans on NumPy arrays."""

    name = "numpy"

    def __init__(self) -> None:
        self.ops = OPS
        self.table = Table(stock_rows(OPS, _cast, guard_run(OPS, _finite), work=_work, empty=_empty))

    def operand(self, array: Any) -> Operand:
        """Describe a NumPy array."""
        return Operand(array.shape, array.dtype.name)

    def result_dtype(self, dtypes: Sequence[str], operands: Sequence[Any], spec: Spec, device: Device) -> str:
        """Promote dtypes as NumPy does."""
        return dtypes[0] if len(set(dtypes)) == 1 else str(np.result_type(*map(_dtype, dtypes)))

    def device(self, operands: Sequence[Any]) -> Device:
        """Return the rates of the machine."""
        return load_rates(CPU, "numpy", np.__version__)

    def check_index(self, name: str, index: Any) -> None:
        """Refuse an index array that is not of integers."""
        check_index_dtype(name, index.dtype.name)

    def check_devices(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Accept all arrays: NumPy has one device."""

    def group(self, q: Any, size: int, index_mode: str) -> PreparedIndex:
        """Check an index array."""
        values, may_drop = self.in_range(q, Gather("q", (), size), index_mode)
        return PreparedIndex(values.copy(), size, index_mode, may_drop)

    def in_range(self, q: Any, gather: Gather, index_mode: str) -> tuple[Any, bool]:
        """Bring an index array into range."""
        if isinstance(q, PreparedIndex):
            return q.read(gather, index_mode)
        return numpy_in_range(np.asarray(q), gather, MODES[index_mode])

    def trial(self, plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return a function that runs a plan."""
        run = self.bind(plan)

        def once() -> None:
            run(operands, indices)

        return once

    def routing(self, route: Callable[..., Any], every: bool = False) -> AbstractContextManager[object]:
        """Replace the code of `np.einsum`."""
        return _ROUTING(route)

    def to_numpy(self, array: Any, dtype: str) -> Any:
        """Return the array itself, cast."""
        return _cast(np.asarray(array), dtype)

    def from_numpy(self, values: Any, dtype: str, device: str) -> Any:
        """Return the array itself, cast."""
        return _cast(np.asarray(values), dtype)

    def environment(self, operands: Sequence[Any]) -> dict[str, str]:
        """Name the version."""
        return {"numpy": np.__version__}

    def bind(self, plan: PlanRecord) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        """Return the function that runs a plan."""
        if plan.programs.backward is not None:
            raise PlannerError(
                "the NumPy backend does not compute gradients; plan without requires_grad, or use torch or jax"
            )
        resolved, steps = plan.resolved, prepare_program(self.table, plan.programs.forward)

        def run(operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
            index, values = _views(plan, operands, indices)
            if wide := widen_operands(OPS, values, resolved.spec, index, _finite):
                arrays = {gather.array: index[gather] for gather in index}
                return callbacks().contract(wide[0], *wide[1], index_mode="drop", dtype=plan.dtype, **arrays)
            return np.asarray(steps(dict(enumerate(values)), index)[0])  # NumPy's products may be scalars

        return run

    def bind_family(
        self, plan: PlanRecord
    ) -> Callable[[Member], Callable[[Sequence[Any], Mapping[str, Any]], Any]] | None:
        """Return what makes the function that runs the plan of a member."""
        if plan.programs.backward is not None:
            return None
        gathers, mode = plan.resolved.spec.gathers, plan.index_mode
        steps = prepare_program(self.table, plan.programs.forward)

        def run(member: Member, operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
            index = RangedIndices(False)
            index.sizes = member.sizes
            for gather in gathers:
                own = Gather(gather.array, gather.axes, member.sizes[gather])
                ranged, _ = self.in_range(indices[gather.array], own, mode)
                index[gather] = ranged.reshape(member.index_shapes[gather.array])
            pairs = zip(operands, member.shapes, strict=True)
            values = {n: x if s is None else x.reshape(s) for n, (x, s) in enumerate(pairs)}
            return np.asarray(steps(values, index)[0])

        return lambda member: partial(run, member)

    def family_signature(
        self, operands: Sequence[Any], indices: Mapping[str, Any]
    ) -> tuple[Hashable, list[tuple[int, ...]]] | None:
        """Return dtypes, and the shapes of operands and index arrays."""
        arrays = (*operands, *indices.values())
        if not all(type(x) is np.ndarray for x in arrays):
            return None
        return (tuple(indices), *[x.dtype for x in arrays]), [x.shape for x in arrays]

    def refuse_dataless(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Accept all arrays: those of NumPy have values."""

    def stepwise(
        self,
        plan: PlanRecord,
        operands: Sequence[Any],
        indices: Mapping[str, Any],
        gradient: Any = None,
        kept: Mapping[int, Any] | None = None,
    ) -> Stepwise:
        """Return the forward program with its inputs."""
        assert gradient is None, "numpy computes no gradients"
        index, views = _views(plan, operands, indices)

        def bind(step: Step, inputs: Sequence[Any]) -> partial[Any]:
            return partial(self.table.rows[step.choice.lowering].prepared(step.op), inputs, index)

        return Stepwise(dict(enumerate(views)), bind, index.orders)


def _views(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> tuple[RangedIndices, list[Any]]:
    """Return index arrays in range, and operands without their broadcast dimensions."""
    resolved = plan.resolved
    shapes = dict(resolved.index_shapes)
    index = RangedIndices(False)
    for gather in resolved.spec.gathers:
        values, may_drop = backend.in_range(indices[gather.array], gather, plan.index_mode)
        index[gather] = values.reshape(shapes[gather.array])
        index.may_drop |= may_drop
    return index, [np.asarray(x).reshape(s) for x, s in zip(operands, resolved.shapes, strict=True)]


backend = NumpyBackend()
