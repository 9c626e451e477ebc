"""A step compiled for several devices: each computes its part, and only sums go between them.

XLA knows nothing of what a step is lowered to (sorts and loops), and would gather all of its operands. So the step is
one call that is partitioned by its spec, see `split`: Shardy is told which dimensions go together, and what
a device runs is the step of shorter operands.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from planner.backends.common.common import RangedIndices, mask_term
from planner.backends.jax.index import normalised
from planner.backends.jax.poison import poisoned
from planner.backends.jax.reads import read_mask, zero_unread_rows
from planner.backends.jax.rows import OPS
from planner.language.spec import Gather, Spec, Term
from planner.language.split import (
    Entry,
    Placement,
    Split,
    axes_to_add_over,
    choose_splits,
    local_gather,
    local_spec,
    local_term,
    splittable,
)
from planner.program.ops import Op

__all__ = ["devices_of", "devices_wanted", "partitioned", "partitioned_rows", "placement"]

# From an op, its inputs, index arrays and an index mode to its results.
Run = Callable[[Op, Sequence[Any], Mapping[Gather, Any], str], tuple[Any, ...]]
Indices = Mapping[Gather, Any]


@lru_cache(maxsize=1)
def devices_wanted() -> Any:
    """Return a parameter by which JAX sees that a primitive is lowered for devices that it must name.

    It names them to programs that hold a partitioned call, and looks for those in parameters: here is one.
    """
    call = custom_partitioning(lambda x: x)
    call.def_partition(None, sharding_rule=SdyShardingRule((ArrayMapping(),), (ArrayMapping(),)))
    return jax.make_jaxpr(call)(0)


def devices_of(context: Any) -> str:
    """Return for which devices a primitive is lowered: "one", "several" of a mesh, or several that are "unknown".

    Inside of `shard_map` over all axes of a mesh each program is one device's. Exported programs hold no partitioned
    calls, which name functions of this process.
    """
    module = context.module_context
    axes = module.axis_context
    if hasattr(axes, "manual_axes"):
        return "one" if axes.manual_axes == frozenset(axes.mesh.axis_names) else "unknown"
    if getattr(axes, "num_devices", 1) == 1:
        return "one"
    known = axes.device_assignment and axes.abstract_mesh is not None and not module.lowering_parameters.for_export
    return "several" if known else "unknown"


def partitioned(run: Run, op: Op, inputs: Sequence[Any], given: Indices, index_mode: str) -> tuple[Any, ...]:
    """Run an op as a call that XLA partitions by its spec.

    Args:
        run: runs an op, here or on one device.
        op: the step.
        inputs: operands as its spec has them.
        given: index arrays as its spec has them.
        index_mode: how they are read.
    """

    def of_device(part: _Part, inputs: Sequence[Any], given: Indices) -> tuple[Any, ...]:
        own = dataclasses.replace(op, spec=part.local)
        here, mode = part.indices(given, index_mode)
        if here.keys() == given.keys() and mode == index_mode:
            return run(own, inputs, here, mode)
        # What other devices' rows meet is zero here, whatever it holds: zero times infinity is NaN.
        index = RangedIndices(True)
        index.update(here)
        inputs = [mask_term(OPS, x, term, own.spec, index) for x, term in zip(inputs, own.input_terms, strict=True)]
        results = run(own, inputs, here, mode)
        found = []
        for x, term in zip(results, own.output_terms, strict=True):
            dropped = mask_term(OPS, x, term, own.spec, index)
            found.append(poisoned(dropped, term, own.spec, given) if index_mode == "raise" else dropped)
        return tuple(found)

    def added(part: _Part, inputs: Sequence[Any], given: Indices) -> tuple[Any, ...]:
        found = of_device(part, inputs, given)
        return tuple(
            _added(x, axes_to_add_over(term, part.split)) for x, term in zip(found, op.output_terms, strict=True)
        )

    return _call(
        op.spec, op.input_terms, op.output_terms, inputs, given, lambda xs, qs: run(op, xs, qs, index_mode), added
    )


def partitioned_rows(x: Any, spec: Spec, term: Term, given: Indices, index_mode: str) -> Any:
    """Zero the rows that no index names, as `zero_unread_rows` does, in a call that XLA partitions."""

    def of_device(part: _Part, inputs: Sequence[Any], given: Indices) -> tuple[Any, ...]:
        (x,), own = inputs, local_term(term, part.parts)
        mask = read_mask(x, part.local, own, *part.indices(given, index_mode))
        return (OPS.select(_added(mask, axes_to_add_over(term, part.split)), x, 0),)

    def whole(inputs: Sequence[Any], given: Indices) -> tuple[Any, ...]:
        return (zero_unread_rows(inputs[0], spec, term, given, index_mode),)

    (result,) = _call(dataclasses.replace(spec, output=term), [term], [term], [x], given, whole, of_device)
    return result


def _call(
    spec: Spec,
    operands: Sequence[Term],
    outputs: Sequence[Term],
    inputs: Sequence[Any],
    given: Indices,
    whole: Callable[[Sequence[Any], Indices], tuple[Any, ...]],
    of_device: Callable[[_Part, Sequence[Any], Indices], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Call a function of operands and index arrays whose dimensions are entries of a spec.

    Args:
        spec: whose entries they are.
        operands: their terms.
        outputs: terms of the results.
        inputs: the operands.
        given: the index arrays.
        whole: the function.
        of_device: what one device computes, of its slices.
    """
    brackets = {gather.array: gather.axes for gather in given}
    arrays = {gather.array: values for gather, values in given.items()}
    terms, count = [*operands, *brackets.values()], len(operands)

    def told(arguments: Sequence[Any]) -> tuple[Sequence[Any], dict[Gather, Any]]:
        values = dict(zip(brackets, arguments[count:], strict=True))
        return arguments[:count], {gather: values[gather.array] for gather in given}

    @custom_partitioning
    def call(*arguments: Any) -> tuple[Any, ...]:
        return whole(*told(arguments))

    def split_of(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> dict[Entry, tuple[str, ...]]:
        """What operands are split over, and what results are besides."""
        split = choose_splits(spec, [(term, _placed(x, mesh)) for term, x in zip(terms, arguments, strict=True)])
        return choose_splits(
            spec, [(term, _placed(x, mesh)) for term, x in zip(outputs, results, strict=bool(results))], split
        )

    def shardings(mesh: Any, split: Split, terms: Sequence[Term]) -> tuple[Any, ...]:
        return tuple(NamedSharding(mesh, PartitionSpec(*(split.get(entry) for entry in term))) for term in terms)

    def partition(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        split = split_of(mesh, arguments, results)
        part = _Part(spec, split, {entry: math.prod(mesh.shape[name] for name in split[entry]) for entry in split})

        def local(*arguments: Any) -> tuple[Any, ...]:
            # XLA asks for the parts on a thread of its own, where nothing is known of the context of the call.
            with jax.disable_jit(False):
                inputs, given = told([part.filled(x, term) for x, term in zip(arguments, terms, strict=True)])
                return of_device(part, inputs, given)

        _lowered_without_locations(local)
        return mesh, local, shardings(mesh, split, outputs), shardings(mesh, split, terms)

    def infer(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        return shardings(mesh, split_of(mesh, arguments, ()), outputs)

    # JAX cannot decode dimensions that share an axis of the mesh, as a reshape may leave them.
    call.def_partition(partition, infer, decode_shardings=False, sharding_rule=_rule(spec, terms, outputs))
    results: tuple[Any, ...] = call(*inputs, *(arrays[name] for name in brackets))
    return results


def _lowered_without_locations(function: Callable[..., Any]) -> None:
    """Keep places in the source out of what is lowered while JAX holds a function.

    XLA takes those of a partitioned call for others of the program that holds it, and its pass over them may then never
    end (seen in jaxlib 0.10.2; which programs it hits depends on the callers).
    """
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    if before != 0:
        jax.config.update(name, 0)
        weakref.finalize(function, jax.config.update, name, before)


def _placed(x: Any, mesh: Any) -> Placement:
    """How XLA has placed an array on a mesh: for each dimension the axes, none where it is split over a part of one."""
    devices = list(mesh.devices.flat)
    # Of as many elements as devices any number of parts is even.
    slices = x.sharding.devices_indices_map((len(devices),) * len(x.shape))
    sizes = dict(mesh.shape)
    steps = dict(zip(sizes, np.indices(mesh.devices.shape).reshape(len(sizes), -1), strict=True))
    found: list[tuple[str, ...]] = []
    for dim in range(len(x.shape)):
        starts = np.array([slices[device][dim].start or 0 for device in devices])
        parts = len(set(starts.tolist()))
        for names in itertools.chain.from_iterable(itertools.permutations(sizes, k) for k in range(len(sizes) + 1)):
            if math.prod(sizes[name] for name in names) == parts and all(sizes[name] > 1 for name in names):
                place = functools.reduce(lambda at, name: at * sizes[name] + steps[name], names, 0 * starts)
                if np.array_equal(place * (len(devices) // parts), starts):
                    found.append(names)
                    break
        else:
            found.append(())
    return tuple(found)


def placement(x: Any) -> Placement:
    """Return how an array, or its type, is placed by its sharding: names, a name or none for each dimension."""
    entries = [*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec))]
    return tuple(e if isinstance(e, tuple) else () if e is None else (e,) for e in entries)


def _rule(spec: Spec, operands: Sequence[Term], results: Sequence[Term]) -> SdyShardingRule:
    """Which dimensions of operands and results go together."""
    factors = {entry: f"f{number}" for number, entry in enumerate(splittable(spec))}
    whole: list[str] = []

    def name(entry: Entry) -> str:
        if entry not in factors:
            whole.append(f"w{len(whole)}")
        return factors.get(entry) or whole[-1]

    def mapping(term: Term) -> ArrayMapping:
        return ArrayMapping(*(name(entry) for entry in term))

    sides = tuple(tuple(map(mapping, terms)) for terms in (operands, results))
    before, after = ({entry for term in terms for entry in term} for terms in (operands, results))
    reduced = tuple(factors[e] for e in factors if e in before and e not in after)
    return SdyShardingRule(*sides, reduction_factors=reduced, need_replication_factors=tuple(whole))


def _added(x: Any, names: tuple[str, ...]) -> Any:
    """The sum of all devices' parts; of booleans, whether any is true."""
    if not names:
        return x
    return lax.pmax(x, names) if x.dtype == jnp.bool_ else lax.psum(x, names)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What one device has of a call.

    Attributes:
        spec: the call's.
        split: axes of the mesh by entry.
        parts: into how many parts each of these is split.
    """

    spec: Spec
    split: Split
    parts: Mapping[Entry, int]

    @property
    def local(self) -> Spec:
        """The spec of the device's slices."""
        return local_spec(self.spec, self.parts)

    def filled(self, x: Any, term: Term) -> Any:
        """A slice with zeros where it is filled up, which could be anything."""
        for dim, entry in enumerate(term):
            if self._uneven(entry):
                x = OPS.select(self._occupied(entry, dim, x.ndim), x, 0)
        return x

    def indices(self, given: Indices, index_mode: str) -> tuple[dict[Gather, Any], str]:
        """Index arrays for the device's slices of the pools, and the mode in which they are to be read.

        Rows of other slices have the slice's size and are dropped, and so are those that fill a slice up.
        """
        if not any(gather in self.parts or any(map(self._uneven, gather.axes)) for gather in given):
            return dict(given), index_mode
        found = {}
        for gather, values in given.items():
            start, size = self._start(gather)
            whole = normalised(values, gather, index_mode)
            here = (whole >= start) & (whole < start + size) & (whole < gather.size)
            for dim, axis in enumerate(gather.axes):
                if self._uneven(axis):
                    here &= self._occupied(axis, dim, whole.ndim)
            found[local_gather(gather, self.parts)] = jnp.where(here, whole - start, size)
        return found, "drop"

    def _uneven(self, entry: Entry) -> bool:
        return self.spec.size(entry) % self.parts.get(entry, 1) != 0

    def _start(self, entry: Entry) -> tuple[Any, int]:
        """Where the device's slice of an entry begins, and its size with what fills it up."""
        size = -(-self.spec.size(entry) // self.parts.get(entry, 1))
        return (lax.axis_index(self.split[entry]) * size if entry in self.split else 0), size

    def _occupied(self, entry: Entry, dim: int, ndim: int) -> Any:
        """Which places of a slice hold something, along a dimension of an array."""
        start, size = self._start(entry)
        there = jnp.arange(size) < self.spec.size(entry) - start
        return jnp.expand_dims(there, [d for d in range(ndim) if d != dim])
