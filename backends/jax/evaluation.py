"""What a step of a plan computes: an op in a named implementation, on arrays as the caller gave them.

Operands and index arrays are reshaped and brought into range inside of the step. So a backward pass holds the caller's
arrays, and not copies of them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from planner.backends.common.stock import evaluation
from planner.backends.common.stock_rows import stock_kind
from planner.backends.jax.guards import Guards, is_left_out, poison, run_guard, unread_pool, zero_unread_rows
from planner.backends.jax.index import bring_into_range
from planner.backends.jax.ops import OPS, marking
from planner.backends.jax.partition import guard_on_devices, run_on_devices
from planner.backends.jax.products import as_dot, has_slow_gradients
from planner.backends.jax.rows import FASTER, PLAIN, make_table
from planner.cost.device import CPU_OF_XLA, Device
from planner.cost.figures import StepCost
from planner.cost.objective import step_key
from planner.kernels.grouped_matmul import jax_grouped
from planner.language.derive import swap_with_output
from planner.language.dtypes import is_inexact
from planner.language.spec import Gather, is_symbol, term_gathers
from planner.program.build import Lowerer
from planner.program.implementations import MASK, Table
from planner.program.ops import Cast, Einsum, Guard, Op, PricedImplementation
from planner.program.plan import PlanRecord

Shape = tuple[int, ...]

# The types that JAX silently uses in place of 64-bit types, unless these are enabled.
NARROW = {"float64": "float32", "complex128": "complex64", "int64": "int32", "uint64": "uint32"}


def wide_types() -> bool:
    """Return whether JAX's 64-bit types are enabled in the current context."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


class Mode(NamedTuple):
    """What a step shares with every step that JAX derives from it.

    Attributes:
        index_mode: the index mode, or "checked" if all indices are known to be in range.
        precision: the precision of products.
        lower: chooses the implementations of derived steps. It is None in a step that is compiled by itself, from which
            nothing is derived: so plans share their compiled steps.
    """

    index_mode: str
    precision: str | None
    lower: Lowerer | None = None


TABLE = make_table()
# The table with the tiles of graphics cards.
CARD_TABLE = make_table(jax_grouped.CARD)
# The table of one of several devices of a CPU.
PART_TABLE = make_table(jax_grouped.PART)
# Platforms whose table is another one, and the module of their Pallas kernels in `planner.kernels`. The table has the
# same rows on every platform.
PLATFORMS = {"tpu": "grouped_matmul.pallas_tpu", "cuda": "grouped_matmul.pallas_gpu", "rocm": ""}


def platform_table(platform: str, pallas: bool, several: bool = False) -> Table:
    """Return the table for a platform.

    Args:
        platform: a key of `PLATFORMS`, or "" for another platform.
        pallas: whether the program may hold Pallas kernels.
        several: whether it is for one of several devices.
    """
    module = PLATFORMS.get(platform)
    if module and pallas and (platform != "cuda" or hopper()):
        return _pallas_table(module)
    return CARD_TABLE if platform in ("cuda", "rocm") else PART_TABLE if several and not TABLE.has_changed else TABLE


@lru_cache(maxsize=len(PLATFORMS))
def _pallas_table(module: str) -> Table:
    """Return the table with the kernels of a module, imported when the first program is lowered for its platform."""
    return make_table(importlib.import_module(f"planner.kernels.{module}").KERNELS)


def hopper() -> bool:
    """Return whether programs compiled for CUDA run on cards of capability 9.0 only, which our kernels need.

    If no card is visible, the program is exported and must run on any card.
    """
    try:
        cards = jax.devices("cuda")
    except RuntimeError:
        return False
    # Mosaic for GPUs imports absl, which JAX does not install.
    return all(card.compute_capability == "9.0" for card in cards) and importlib.util.find_spec("absl") is not None


def input_count(op: Op) -> int:
    """Return the number of inputs of an op, index arrays not counted."""
    return 1 if isinstance(op, Cast) else len(op.spec.inputs) + op.first_operand


def lowerer_of(plan: PlanRecord) -> Lowerer:
    """Return what chooses the implementations of a plan's steps, and of the steps that JAX derives from them.

    A step that the plan has runs as the plan says. Any other step is chosen by the plan's objective, for its device:
    steps of second derivatives, steps under `vmap`, and gradients of a plan that was made without them. At symbolic
    sizes steps are stock ones, which need no numbers.
    """
    if plan.symbols:
        return _STOCK
    return _Lowerer(plan.device, plan.options.objective, {step.op: step.choice for step in reversed(plan.steps)})


def _stock_choices(op: Op) -> list[PricedImplementation]:
    name = MASK if isinstance(op, Guard) else stock_kind(op)
    return [PricedImplementation(name, StepCost())] if name in TABLE.rows else []


_STOCK = Lowerer(_stock_choices, step_key("time"))


class _Lowerer(Lowerer):
    """Chooses implementations for a device by an objective, which together are its `target`."""

    def __init__(self, device: Device, objective: str, fixed: Mapping[Op, PricedImplementation]) -> None:
        super().__init__(self._choices_of, step_key(objective), fixed, TABLE.plain)
        self.target = device, objective

    def _choices_of(self, op: Op) -> Sequence[PricedImplementation]:
        # `vmap` can add an axis of a symbolic size to a step whose own sizes are numbers.
        sizes = (*op.spec.by_axis.values(), *(gather.size for gather in op.spec.gathers))
        return _stock_choices(op) if any(map(is_symbol, sizes)) else TABLE.choices(op, self.target[0])


def plain_row(op: Op, lower: Lowerer, own: bool = True) -> str | None:
    """Return the row by which a step runs as JAX's own operations, with its gradients by JAX's own rules, or None.

    Its gradients must be such operations too: that of a diagonal, for example, is none. Where a step is one, its
    gradients run as the stock rows of their kinds, see `Lowerer.plain`, unless the plan says otherwise. So they need no
    prices.

    Args:
        op: the step.
        lower: chooses the implementations.
        own: whether a product may be a step of ours because it takes less time then, or its gradients do. A plan that
            has no gradient of it counts as one with all: what `jit` or `checkpoint` traces is not told of gradients.
    """
    row = lower(op).lowering
    if not own:
        row = split_row(op, row) or row
    if not isinstance(op, Einsum) or not _xla_splits(op, row):
        return None
    gradients = [Einsum(swap_with_output(op.spec, child), op.dtype) for child in range(len(op.spec.inputs))]
    planned = {child: lower.fixed[each] for child, each in enumerate(gradients) if own and each in lower.fixed}
    rows = [*map(stock_kind, gradients), *(choice.lowering for choice in planned.values())]
    if not {*rows} <= {*PLAIN}:
        return None
    on_cpu = isinstance(lower, _Lowerer) and lower.target[0].kind == "cpu"
    operands = tuple(planned) or tuple(range(len(gradients)))
    return None if own and on_cpu and has_slow_gradients(op, operands) else row


def has_own_steps(plan: PlanRecord) -> bool:
    """Return whether a plan has steps of ours that could run as JAX's own operations, see `plain_row`."""
    lower, steps = lowerer_of(plan), plan.programs.forward.steps
    return any(plain_row(step.op, lower) != plain_row(step.op, lower, own=False) for step in steps)


def split_row(op: Op, lowering: str) -> str | None:
    """Return the row of JAX's own operation that does what a row does, and that XLA splits over any mesh; or None."""
    row = "matmul" if lowering in FASTER else lowering
    return row if _xla_splits(op, row) else None


def _xla_splits(op: Op, lowering: str) -> bool:
    """Return whether a step is an operation of JAX that XLA splits over devices as its spec says."""
    if not isinstance(op, Einsum) or op.arrays or lowering not in PLAIN:
        return False
    # XLA adds up wrong parts of a product that sums three axes or more and leaves none, if both operands are split over
    # two axes of a mesh in unlike ways; `jnp.einsum("abc,acb->", ...)` is as wrong (jaxlib 0.10.2).
    if len(op.spec.inputs) == 2 and not op.spec.output and len(op.spec.axes) > 2:
        return False
    return all(len(set(term)) == len(term) for term in (*op.spec.inputs, op.spec.output))


def run_plain(op: Op, inputs: Sequence[Any], lowering: str, precision: Any) -> Any:
    """Run a plain step on arrays as the caller gave them: JAX keeps them for gradients, and would keep copies too."""
    with jax.named_scope(lowering):
        if len(inputs) == 2:
            return as_dot(op.spec)(*inputs, precision=precision, dtype=jnp.dtype(op.dtype))
        (x,), (shape,) = inputs, op.input_shapes
        x = x if x.dtype == op.dtype else cast(x, op.dtype)
        return evaluation(OPS, op.spec)([_shaped(x, shape)], {}, False)


def _given(op: Op, raw: Mapping[str, Any]) -> dict[Gather, Any]:
    """Return the index arrays that an op reads, by gather, shaped as the op's spec has them."""
    return {gather: _shaped(raw[gather.array], op.spec.shape(gather.axes)) for gather in op.gathers}


def _shaped(x: Any, shape: Shape) -> Any:
    return x if x.shape == shape else x.reshape(shape)


def evaluate(
    *arguments: Any,
    op: Op,
    lowering: str,
    mode: Mode,
    views: tuple[Shape, ...],
    guards: Guards,
    platform: str = "",
    pallas: bool = True,
    several: bool = False,
    **_: Any,
) -> list[Any]:
    """Compute a step. This is the function that the primitive lowers to.

    Args:
        arguments: the op's inputs, then the index arrays of `guards`.
        op: the op.
        lowering: the name of the implementation.
        mode: index mode and precision.
        views: the shapes of the results.
        guards: the guards of the inputs and results.
        platform: a key of `PLATFORMS`, or "" for another platform.
        pallas: whether the program may hold Pallas kernels.
        several: whether the step runs on several devices.
    """
    count, index_mode = input_count(op), mode.index_mode
    inputs = [_shaped(x, shape) for x, shape in zip(arguments[:count], op.input_shapes, strict=True)]
    inputs = [cast(x, op.dtype) for x in inputs]  # see `Cast.fused`
    raw = dict(zip(guards.arrays, arguments[count:], strict=True))

    def guarded(x: Any, guard: Guard | None) -> Any:
        if guard is None or guard.only_gradients:
            return x
        given = _given(guard, raw)
        if several:
            return guard_on_devices(x, guard, given, index_mode)
        return run_guard(guard, [x], bring_into_range(given, index_mode))[0]

    before, after = guards.of_op(op)
    if not several:
        before = tuple(each if each is None or not is_left_out(each, op, lowering) else None for each in before)
    inputs = [guarded(x, each) for x, each in zip(inputs, before, strict=True)]
    if isinstance(op, Guard):
        results: Sequence[Any] = [guarded(inputs[0], dataclasses.replace(op, only_gradients=False))]
    else:
        target = mode.lower.target if isinstance(mode.lower, _Lowerer) else (CPU_OF_XLA, "time")
        own = id(TABLE.rows[lowering]) if TABLE.has_changed else 0
        parted = several and not _xla_splits(op, lowering)
        run = _Run(lowering, mode.precision, target, platform, pallas, parted, own)
        given = _given(op, raw)
        results = run_on_devices(run, op, inputs, given, index_mode) if parted else run(op, inputs, given, index_mode)
    pairs = zip(results, after, views, strict=True)
    return [_shaped(guarded(x, each), view) for x, each, view in pairs]


# Stock implementations that take rows or add them up.
_INDEXING = ("take", "take, multiply, add", "take, segment sum", "segment sum")


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """Runs an op on arrays as its spec has them.

    On one of several devices arrays are shorter. If the implementation does not support that, the objective chooses
    another. Equal records run the same, also in another process: their text is a part of a name, see `partition`.

    Attributes:
        lowering: the name of the implementation.
        precision: the precision of products.
        target: the device and the objective that choose another implementation.
        platform: a key of `PLATFORMS`, or "" for another platform.
        pallas: whether the program may hold Pallas kernels.
        several: whether arrays are those of one of several devices.
        own: the address of the implementation if the table is not as the library made it, else 0.
    """

    lowering: str
    precision: str | None
    target: tuple[Device, str]
    platform: str
    pallas: bool
    several: bool
    own: int

    def __call__(self, op: Op, inputs: Sequence[Any], given: Mapping[Gather, Any], index_mode: str) -> tuple[Any, ...]:
        """Run an op; `given` are the index arrays as the caller gave them."""
        lowering = self.lowering
        if TABLE.rows[lowering].supports(op) is not None:
            lowering = _Lowerer(*self.target, {})(op).lowering
        inexact = is_inexact(op.dtype)
        empty = 0 in op.spec.by_axis.values() or any(gather.size == 0 for gather in op.gathers)
        if index_mode == "raise" and inexact and lowering in _INDEXING and not empty:
            return self._run_marked(op, inputs, given)
        index = bring_into_range(given, index_mode, inexact)
        inputs, pool = list(inputs), unread_pool(op, lowering)
        if pool is not None:
            inputs[pool] = zero_unread_rows(inputs[pool], op.input_terms[pool], op.spec, index)
        # The precision was fixed when the step was bound: a program may be lowered in another context than that.
        # Profilers and XLA's own texts show the implementation's name.
        with jax.default_matmul_precision(self.precision), jax.named_scope(lowering):
            results = platform_table(self.platform, self.pallas, self.several).run(lowering, op, inputs, index)
        if index_mode == "raise" and not index.shown:
            pairs = zip(results, op.output_terms, strict=True)
            results = tuple(poison(x, term, op.spec, given) for x, term in pairs)
        return results

    def _run_marked(self, op: Op, inputs: Sequence[Any], given: Mapping[Gather, Any]) -> tuple[Any, ...]:
        """Run a stock step that marks results of bad indices as it takes rows and adds them up."""
        output = op.spec.output
        added = {gather: given[gather] for gather in term_gathers(output)}
        # A bad index among sums for each entry of a batch belongs to the sums of that entry.
        apart = any(axis in output for gather in added for axis in gather.axes)
        with jax.default_matmul_precision(self.precision), jax.named_scope(self.lowering):
            # A step with two takes multiplies their rows in one loop, which marks them as fast as they are.
            appends = not (self.platform or self.several) and len(op.spec.inputs) == 1
            number = 1 + zlib.crc32(str(op.spec).encode()) % 2**16 if appends else 0
            run = evaluation(marking(not apart, number), op.spec)
            result = run(inputs, bring_into_range(given, "checked"), False)
        return (poison(result, output, op.spec, added) if apart else result,)


def cast(x: Any, dtype: str) -> Any:
    """Compute a cast. A complex array that is cast to a real dtype gives its real part."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(jnp.dtype(dtype), jnp.complexfloating):
        x = x.real
    # JAX would narrow an array of a 64-bit type to itself where these are not enabled.
    return x if x.dtype == dtype and not x.weak_type else lax.convert_element_type(x, jnp.dtype(dtype))


@lru_cache(maxsize=64)
def compile_cast(dtype: str) -> Callable[..., list[Any]]:
    """Return a jitted cast whose result is in a list, as the results of a step are."""

    def as_step(x: Any) -> list[Any]:
        return [cast(x, dtype)]

    return jax.jit(as_step)
