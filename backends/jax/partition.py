"""A step compiled for several devices: each device computes its part, and only sums are sent between devices.

A step is lowered to sorts and loops, which XLA cannot partition: it would gather all operands on each device. So the
step is one custom call that is partitioned by its spec, see `planner.language.split`. Shardy is told which dimensions
go together, and each device runs the same step on shorter operands.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from planner.backends.common.masks import zero_dropped
from planner.backends.jax.guards import compares_rows, poison, read_mask, run_guard
from planner.backends.jax.index import bring_into_range, traced_in_range
from planner.backends.jax.ops import OPS
from planner.backends.jax.rules.names import name_call
from planner.language.options import MODES
from planner.language.spec import Gather, Spec, Term
from planner.language.split import (
    Entry,
    Placement,
    Split,
    axes_to_add_over,
    choose_splits,
    local_gathers,
    local_spec,
    place_term,
    splittable,
)
from planner.program.calls import RangedIndices
from planner.program.guards import dropped_brackets
from planner.program.ops import Guard, Op

# From an op, its inputs, index arrays and an index mode to its results. Equal ones have the same text in any process.
Run = Callable[[Op, Sequence[Any], Mapping[Gather, Any], str], tuple[Any, ...]]
Indices = Mapping[Gather, Any]


def devices_wanted(arguments: Sequence[Any]) -> Any:
    """Return a parameter that makes JAX name the devices when it lowers a primitive.

    JAX names them only for programs that hold a partitioned call, and looks for such calls in the parameters of
    primitives. This is a jaxpr with one. It is None if the types of the arguments name a mesh without devices, an
    `AbstractMesh` of the user: then JAX has none to name, and refuses such a call.
    """
    shardings = [jax.typeof(x).sharding for x in arguments if isinstance(x, jax.core.Tracer)]
    return None if any(map(lacks_devices, shardings)) else _partitioned_call()


def lacks_devices(sharding: Any) -> bool:
    """Whether a sharding names a mesh without devices."""
    return not sharding.mesh.empty and getattr(sharding.mesh, "abstract_device", sharding.mesh) is None


@lru_cache(maxsize=1)
def _partitioned_call() -> Any:
    call = custom_partitioning(lambda x: x)
    call.def_partition(None, sharding_rule=SdyShardingRule((ArrayMapping(),), (ArrayMapping(),)))
    return jax.make_jaxpr(call)(0)


def devices_of(context: Any) -> str:
    """Return for which devices a primitive is lowered: "one", "several" of a mesh, or several "unknown" ones.

    Inside of `shard_map` over all axes of a mesh, each program runs on one device. For an exported program the answer
    is "unknown", because a partitioned call names functions of this process, which another process does not have.
    """
    module = context.module_context
    axes = module.axis_context
    if hasattr(axes, "manual_axes"):
        return "one" if axes.manual_axes == frozenset(axes.mesh.axis_names) else "unknown"
    if getattr(axes, "num_devices", 1) == 1:
        return "one"
    known = axes.device_assignment and axes.abstract_mesh is not None and not module.lowering_parameters.for_export
    return "several" if known else "unknown"


def run_on_devices(run: Run, op: Op, inputs: Sequence[Any], given: Indices, index_mode: str) -> tuple[Any, ...]:
    """Run an op as a call that XLA partitions by the op's spec.

    Args:
        run: runs an op on one device.
        op: the op.
        inputs: operands as the spec has them.
        given: index arrays as the spec has them.
        index_mode: the index mode.
    """
    step = _StepParts(run, op, index_mode)
    return _call(_Call(op.spec, op.input_terms, op.output_terms, tuple(given), step), inputs, given)


def guard_on_devices(x: Any, guard: Guard, given: Indices, index_mode: str) -> Any:
    """Run a guard. If there are many indices, those rows that none names are found in a call that XLA partitions."""
    term = guard.rows
    alone = guard if term is None or compares_rows(term, guard.spec) else dataclasses.replace(guard, rows=None)
    (x,) = run_guard(alone, [x], bring_into_range(given, index_mode))
    if term is None or alone is guard:
        return x
    spec = dataclasses.replace(guard.spec, inputs=(term,), output=term)
    reading = {gather: given[gather] for gather in spec.gathers}
    rows = _ReadParts(term, x.dtype.name, index_mode)
    (result,) = _call(_Call(spec, (term,), (term,), tuple(reading), rows), [x], reading)
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class _StepParts:
    """Computes one device's part of a step, and adds up the parts of all devices."""

    run: Run
    op: Op
    index_mode: str

    @property
    def dtype(self) -> str:
        """Return the dtype of the results."""
        return self.op.dtype

    def __call__(self, part: _Part, inputs: Sequence[Any], given: Indices) -> tuple[Any, ...]:
        """Return the device's part of the results, from its slices."""
        pairs = zip(self._compute(part, inputs, given), self.op.output_terms, strict=True)
        return tuple(_add_over(x, axes_to_add_over(term, part.split)) for x, term in pairs)

    def _compute(self, part: _Part, inputs: Sequence[Any], given: Indices) -> tuple[Any, ...]:
        local_op = dataclasses.replace(self.op, spec=part.local)
        local_indices, mode = part.indices(given, self.index_mode)
        if local_indices.keys() == given.keys() and mode == self.index_mode:
            return self.run(local_op, inputs, local_indices, mode)
        # Rows of other devices are dropped here, and zero times infinity is NaN: so what they would meet is zeroed.
        index = RangedIndices(True, local_indices)
        spec = local_op.spec

        def zeroed(arrays: Sequence[Any], terms: Sequence[Term]) -> list[Any]:
            pairs = zip(arrays, terms, strict=True)
            return [zero_dropped(OPS, x, term, dropped_brackets(term, spec), spec, index) for x, term in pairs]

        results = self.run(local_op, zeroed(inputs, local_op.input_terms), local_indices, mode)
        results = tuple(zeroed(results, local_op.output_terms))
        if self.index_mode == "raise":
            pairs = zip(results, local_op.output_terms, strict=True)
            results = tuple(poison(x, term, spec, given) for x, term in pairs)
        return results


@dataclasses.dataclass(frozen=True, slots=True)
class _ReadParts:
    """Zeroes the rows of one device's part of an array that no index names on any device."""

    term: Term
    dtype: str
    index_mode: str

    def __call__(self, part: _Part, inputs: Sequence[Any], given: Indices) -> tuple[Any, ...]:
        (x,) = inputs
        local, mode = part.indices(given, self.index_mode)
        index = bring_into_range(local, mode)
        marks = index.given if mode == self.index_mode else bring_into_range(given, self.index_mode).given
        mask = read_mask(x, part.local.output, part.local, index, marks)
        return (OPS.select(_add_over(mask, axes_to_add_over(self.term, part.split)), x, 0),)


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A function of operands and index arrays that XLA partitions by a spec.

    Attributes:
        spec: the spec; the dimensions of all arrays are entries of it.
        operands: the terms of the operands.
        outputs: the terms of the results.
        gathers: the index arrays.
        compute: computes one device's part of the results, from its slices.
        wide: whether 64-bit types are enabled.
    """

    spec: Spec
    operands: tuple[Term, ...]
    outputs: tuple[Term, ...]
    gathers: tuple[Gather, ...]
    compute: _StepParts | _ReadParts
    wide: bool = dataclasses.field(default_factory=lambda: bool(jax.config.jax_enable_x64))  # type: ignore[attr-defined]

    @property
    def terms(self) -> list[Term]:
        """Return the terms of the arguments: operands, then index arrays."""
        return [*self.operands, *(gather.axes for gather in self.gathers)]

    def split(self, mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> dict[Entry, tuple[str, ...]]:
        """Return over which axes of the mesh each entry is split. Operands decide first, then results."""
        pairs = zip(self.terms, arguments, strict=True)
        split = choose_splits(self.spec, [(term, _find_placement(x, mesh)) for term, x in pairs])
        pairs = zip(self.outputs, results, strict=bool(results))
        return choose_splits(self.spec, [(term, _find_placement(x, mesh)) for term, x in pairs], split)

    def partition(self, mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        """Return the program of one device, and how arguments and results are split, as JAX asks for."""
        split, count = self.split(mesh, arguments, results), len(self.operands)
        part = _Part(self.spec, split, {entry: math.prod(mesh.shape[name] for name in split[entry]) for entry in split})
        before, after = (
            [place_term(term, split, _find_placement(x, mesh)) for term, x in zip(of, arrays, strict=True)]
            for of, arrays in ((self.terms, arguments), (self.outputs, results))
        )

        def local(*arguments: Any) -> tuple[Any, ...]:
            # XLA calls this on a thread of its own, which does not have the JAX configuration of the caller. JAX may
            # set the mesh there; but this is the program of one device.
            with jax.disable_jit(False), jax.enable_x64(self.wide), jax.sharding.use_abstract_mesh(_NO_MESH):
                cut = [part.cut(*x) for x in zip(arguments, self.terms, before, strict=True)]
                found = self.compute(part, cut[:count], dict(zip(self.gathers, cut[count:], strict=True)))
                return tuple(part.embed(*x) for x in zip(found, self.outputs, after, strict=True))

        _lower_without_locations(local)
        return mesh, local, _shardings(mesh, after), _shardings(mesh, before)

    def infer(self, mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        """Return how results are split if nothing says so but the arguments."""
        split = self.split(mesh, arguments, ())
        return _shardings(mesh, [place_term(term, split) for term in self.outputs])

    def rule(self) -> SdyShardingRule:
        """Return the rule that tells Shardy which dimensions of arguments and results go together."""
        return _rule(self.spec, self.terms, self.outputs)


def _shardings(mesh: Any, placements: Sequence[Placement]) -> tuple[Any, ...]:
    return tuple(NamedSharding(mesh, PartitionSpec(*(names or None for names in dims))) for dims in placements)


_NO_MESH = jax.sharding.AbstractMesh((), ())

call_p = Primitive("planner_partitioned_call")
call_p.multiple_results = True


def _call(call: _Call, inputs: Sequence[Any], given: Indices) -> tuple[Any, ...]:
    return tuple(call_p.bind(*inputs, *given.values(), call=call))


@call_p.def_abstract_eval
def _call_abstract(*_: Any, call: _Call) -> list[Any]:
    return [jax.core.ShapedArray(call.spec.shape(term), jnp.dtype(call.compute.dtype)) for term in call.outputs]


@partial(mlir.register_lowering, call_p)
def _call_lowering(context: Any, *values: Any, call: _Call) -> Any:
    @custom_partitioning
    def stand_in(*_: Any) -> tuple[Any, ...]:
        return tuple(jnp.zeros(x.shape, x.dtype) for x in context.avals_out)

    # JAX cannot decode shardings in which two dimensions share an axis of the mesh, and a reshape may leave such ones.
    stand_in.def_partition(call.partition, call.infer, decode_shardings=False, sharding_rule=call.rule())
    results = mlir.lower_fun(stand_in, multiple_results=True)(context, *values)
    name_call(results[0].owner, repr(call), context.module_context)
    return results


def _lower_without_locations(function: Callable[..., Any]) -> None:
    """Keep source locations out of lowered programs for as long as JAX holds a function.

    XLA mistakes the locations of a partitioned call for other locations of the program around it, and its pass over
    them may then never end (seen in jaxlib 0.10.2; which programs are hit depends on the callers).
    """
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    if before != 0:
        jax.config.update(name, 0)
        weakref.finalize(function, jax.config.update, name, before)


def _find_placement(x: Any, mesh: Any) -> Placement:
    """Return how XLA has placed an array on a mesh: for each dimension, the axes that it is split over.

    A dimension that is split over a part of an axis counts as not split.
    """
    devices = list(mesh.devices.flat)
    # With as many elements as devices along each dimension, any number of parts divides evenly.
    slices = x.sharding.devices_indices_map((len(devices),) * len(x.shape))
    sizes = dict(mesh.shape)
    steps = dict(zip(sizes, np.indices(mesh.devices.shape).reshape(len(sizes), -1), strict=True))
    candidates = [names for k in range(len(sizes) + 1) for names in itertools.permutations(sizes, k)]

    def axes_of(starts: np.ndarray[Any, Any]) -> tuple[str, ...]:
        """Return the axes over which a dimension is split, from where each device's slice of it starts."""
        parts = len(set(starts.tolist()))
        for names in candidates:
            if math.prod(sizes[name] for name in names) == parts and all(sizes[name] > 1 for name in names):
                place = functools.reduce(lambda at, name: at * sizes[name] + steps[name], names, 0 * starts)
                if np.array_equal(place * (len(devices) // parts), starts):
                    return names
        return ()

    dims = range(len(x.shape))
    return tuple(axes_of(np.array([slices[device][dim].start or 0 for device in devices])) for dim in dims)


def placement(x: Any) -> Placement:
    """Return the axes of the mesh over which each dimension of an array, or of its type, is split by its sharding."""
    entries = [*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec))]
    return tuple(e if isinstance(e, tuple) else () if e is None else (e,) for e in entries)


def _rule(spec: Spec, operands: Sequence[Term], results: Sequence[Term]) -> SdyShardingRule:
    """Return the rule that tells Shardy which dimensions of operands and results go together."""
    factors = {entry: f"f{number}" for number, entry in enumerate(splittable(spec))}
    whole: list[str] = []
    numbers = itertools.count()

    def name(entry: Entry, before: Term) -> str:
        if entry not in factors:
            whole.append(f"w{next(numbers)}")
            return whole[-1]
        return f"r{next(numbers)}" if entry in before else factors[entry]

    def mapping(term: Term) -> ArrayMapping:
        return ArrayMapping(*(name(entry, term[:dim]) for dim, entry in enumerate(term)))

    sides = tuple(tuple(map(mapping, terms)) for terms in (operands, results))
    before, after = ({entry for term in terms for entry in term} for terms in (operands, results))
    reduced = tuple(factors[e] for e in factors if e in before and e not in after)
    return SdyShardingRule(*sides, reduction_factors=reduced, need_replication_factors=tuple(whole))


def _add_over(x: Any, names: tuple[str, ...]) -> Any:
    """Return the sum of the parts of all devices; of booleans, whether any is true."""
    if not names:
        return x
    return lax.pmax(x, names) if x.dtype == jnp.bool_ else lax.psum(x, names)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One device's part of a call.

    Attributes:
        spec: the spec of the whole call.
        split: for each entry that is split, the axes of the mesh that it is split over.
        parts: for each of these entries, the number of parts.
    """

    spec: Spec
    split: Split
    parts: Mapping[Entry, int]

    @property
    def local(self) -> Spec:
        """Return the spec of the device's slices."""
        return local_spec(self.spec, self.parts)

    def cut(self, x: Any, term: Term, placement: Placement) -> Any:
        """Return the device's part of an array that is split along some dimensions.

        Where a split entry repeats, the part is cut out of the other dimensions. The padding is zeroed, which could
        hold anything: sizes that do not divide evenly are padded.
        """
        for dim, entry in self._whole_dims(term, placement):
            start, size = self._start(entry)
            padding = [(0, 0)] * x.ndim
            padding[dim] = (0, size * self.parts[entry] - x.shape[dim])
            x = lax.dynamic_slice_in_dim(jnp.pad(x, padding), start, size, dim)
        for dim, entry in enumerate(term):
            if self._uneven(entry):
                x = OPS.select(self._data_mask(entry, dim, x.ndim), x, 0)
        return x

    def embed(self, x: Any, term: Term, placement: Placement) -> Any:
        """Return a result that is split along some dimensions, from the device's part: the inverse of `cut`."""
        for dim, entry in self._whole_dims(term, placement):
            start, size = self._start(entry)
            shape = [*x.shape]
            shape[dim] = size * self.parts[entry]
            x = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, start, dim)
            x = lax.slice_in_dim(x, 0, self.spec.size(entry), axis=dim)
        return x

    def _whole_dims(self, term: Term, placement: Placement) -> list[tuple[int, Entry]]:
        """Return the dimensions that are whole on each device although their entry is split."""
        return [(d, entry) for d, entry in enumerate(term) if entry in self.split and not placement[d]]

    def indices(self, given: Indices, index_mode: str) -> tuple[dict[Gather, Any], str]:
        """Return the index arrays for the device's slices of the pools, and the mode to read them in.

        Indices of rows on other devices become the size of the slice, which means "no row", and so do indices in the
        padding.
        """
        if not any(gather in self.parts or any(map(self._uneven, gather.axes)) for gather in given):
            return dict(given), index_mode
        local_indices, local = {}, local_gathers(self.spec, self.parts)
        for gather, values in given.items():
            start, size = self._start(gather)
            whole = traced_in_range(values, gather, MODES[index_mode])
            is_local = (whole >= start) & (whole < start + size) & (whole < gather.size)
            for dim, axis in enumerate(gather.axes):
                if self._uneven(axis):
                    is_local &= self._data_mask(axis, dim, whole.ndim)
            local_indices[local[gather]] = jnp.where(is_local, whole - start, size)
        return local_indices, "drop"

    def _uneven(self, entry: Entry) -> bool:
        return self.spec.size(entry) % self.parts.get(entry, 1) != 0

    def _start(self, entry: Entry) -> tuple[Any, int]:
        """Return where the device's slice of an entry begins, and the size of the slice with its padding."""
        size = -(-self.spec.size(entry) // self.parts.get(entry, 1))
        return (lax.axis_index(self.split[entry]) * size if entry in self.split else 0), size

    def _data_mask(self, entry: Entry, dim: int, ndim: int) -> Any:
        """Return a mask along a dimension of an array: true where a slice holds data, false where it is padding."""
        start, size = self._start(entry)
        holds_data = jnp.arange(size) < self.spec.size(entry) - start
        return jnp.expand_dims(holds_data, [d for d in range(ndim) if d != dim])
