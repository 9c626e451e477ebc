"""`shard`: the placements of a contraction's arrays on a mesh of devices for which the devices exchange the least."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from planner.api import plan as make_plan
from planner.inspect.text import table_lines
from planner.language.dtypes import itemsize
from planner.language.errors import PlannerLimitError
from planner.language.resolve import shorten
from planner.language.spec import Spec, Term
from planner.language.split import (
    Entry,
    Placement,
    letter_of,
    part_shape,
    place_index,
    place_term,
    splittable,
    view_placement,
)
from planner.language.units import bytes_text, parse_bytes
from planner.plan import Plan
from planner.program.frameworks import framework_of
from planner.search.devices.collectives import Collective

# How many splits over some axes of the mesh are continued over the next axis.
_MOST_CONTINUED = 64
_INDEX_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class MeshSplit:
    """One way to split a contraction over a mesh.

    Attributes:
        letters: for each axis of the mesh, the letter of the axis or index array of the spec that it splits; None if it
            splits nothing.
        exchanged_bytes: bytes that each device adds up with others, see `Plan.collectives`.
        device_bytes: bytes of the operands, their gradients, the index arrays and the result on one device.
    """

    letters: tuple[str | None, ...]
    exchanged_bytes: int
    device_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """Where the arrays of a contraction should lie on a mesh. Print it to see what else was considered.

    Example:
        >>> import planner
        >>> found = planner.shard("bd, dh -> bh", (4096, 512), (512, 512), mesh={"x": 8}, backend="numpy")
        >>> found.operands, found.result, found.split.exchanged_bytes
        (((('x',), ()), ((), ())), (('x',), ()), 0)

    The placement of an array is what its framework takes: in torch a tuple with a `Shard`, `Replicate` or `Partial` for
    each dimension of the mesh; in JAX a `PartitionSpec`; else, for each dimension of the array, the names of the axes
    of the mesh that it is split over.

    Attributes:
        plan: the plan of the whole contraction on one device.
        mesh: sizes of the mesh by the name of its axis.
        operands: the placement of each operand.
        indices: the placement of each index array, by letter.
        result: the placement of the result. In torch it is `Partial` where the result is a sum that is still to be
            made.
        split: how the contraction is split.
        collectives: what the devices add up.
        others: the other ways to split that were considered, best first.
    """

    plan: Plan
    mesh: Mapping[str, int]
    operands: tuple[Any, ...]
    indices: Mapping[str, Any]
    result: Any
    split: MeshSplit
    collectives: tuple[Collective, ...]
    others: tuple[MeshSplit, ...]

    def __str__(self) -> str:
        rows = [["split", "exchanged", "on a device"]]
        for split in (self.split, *self.others[:5]):
            rows.append([self._text(split), bytes_text(split.exchanged_bytes), bytes_text(split.device_bytes)])
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        left = len(self.others) - 5
        more = [f"and {left} more"] if left > 0 else []
        sums = [f"  {collective}" for collective in self.collectives] or ["  nothing"]
        head = f"{shorten(self.plan.text)} on {mesh}: {self._text(self.split)}"
        return "\n".join([head, "exchanged:", *sums, *table_lines(rows, (0,)), *more])

    def __repr__(self) -> str:
        return f"<Sharding '{shorten(self.plan.text, 80)}' {self._text(self.split)}>"

    def _text(self, split: MeshSplit) -> str:
        pairs = zip(split.letters, self.mesh, strict=True)
        return ", ".join(f"{letter} over {name}" for letter, name in pairs if letter) or "nothing"


def shard(
    spec: Any,
    *operands: Any,
    mesh: Any,
    sizes: Mapping[str, int] | Sequence[int] | None = None,
    dtype: Any = None,
    memory_limit: int | str | None = None,
    backend: str | None = None,
    **indices: Any,
) -> Sharding:
    """Propose how to place the arrays of a contraction on a mesh of devices.

    Each axis of the mesh splits an axis of the spec, or the dimension that an index array reads. Of all such splits
    this function takes the one for which the devices exchange the fewest bytes, forward and, for operands that require
    gradients, backward; of equal ones the one with the fewest bytes on a device. It needs no devices.

    Example:
        >>> import planner
        >>> a, c = planner.Operand((4096, 1, 64), requires_grad=True), planner.Operand((16, 64, 64))
        >>> found = planner.shard("nij, q[n]jk -> nik", a, c, q=(4096,), mesh={"x": 8}, backend="numpy")
        >>> found.operands, found.indices["q"]
        (((('x',), (), ()), ((), (), ())), (('x',),))
        >>> print(found)
        nij, q[n]jk -> nik on x=8: n over x
        ...

    Args:
        spec: as in `contract`.
        *operands: arrays, `Operand` stand-ins or shapes, as in `plan`.
        mesh: a `DeviceMesh` of torch, a `Mesh` of JAX, a mapping of names to sizes, or a tuple of sizes, whose axes are
            named "0", "1" and so on.
        sizes: as in `contract`.
        dtype: as in `contract`.
        memory_limit: most bytes that the operands, their gradients, the index arrays and the result may take on one
            device.
        backend: "torch", "jax" or "numpy". By default it is the framework of the arrays or the mesh, or else as in
            `plan`.
        **indices: index arrays or their shapes, by letter.

    Returns:
        The proposal. In torch place an array by ``distribute_tensor(x, mesh, placement)``, in JAX by
        ``jax.device_put(x, NamedSharding(mesh, placement))``.

    Raises:
        SpecError: as `plan`.
        ShapeError: as `plan`.
        PlannerLimitError: no split is within the memory limit. The message names the least limit that succeeds.
        PlannerError: the mesh is none, or the plan is a loop, unless the backend is torch.
    """
    from planner.language.mesh import read_mesh

    axes, limit = read_mesh(mesh), parse_bytes(memory_limit, "memory_limit")
    if backend is None and all(framework_of(x) is None for x in (*operands, *indices.values())):
        root = type(mesh).__module__.split(".")[0]
        backend = root if root in ("torch", "jax") else None
    plan = make_plan(spec, *operands, sizes=sizes, dtype=dtype, backend=backend, **indices)
    splits = _find_splits(plan, axes)
    fitting = [split for split in splits if limit is None or split.device_bytes <= limit]
    if not fitting:
        least = min(split.device_bytes for split in splits)
        raise PlannerLimitError(
            f"no split is within memory_limit={limit}; memory_limit={least} succeeds", memory_limit=least
        )
    best = fitting[0]
    over: dict[str, tuple[str, ...]] = {}
    for name, letter in zip(axes, best.letters, strict=True):
        if letter is not None:
            over[letter] = (*over.get(letter, ()), name)
    summed = [name for names in over.values() for name in names]
    resolved = plan.resolved.spec
    split = {entry: over[letter_of(entry)] for entry in _entries(resolved) if letter_of(entry) in over}
    seen_shapes = dict(plan.resolved.index_shapes)

    def place(placement: Placement, seen: Sequence[int], shape: Sequence[int], summed: Sequence[str] = ()) -> Any:
        return _placement(plan.backend, view_placement(placement, seen, shape), tuple(axes), summed)

    of_operands = [place_term(term, split) for term in resolved.inputs]
    pairs = zip(of_operands, plan.resolved.shapes, plan.operands, strict=True)

    return Sharding(
        plan=plan,
        mesh=axes,
        operands=tuple(place(placement, seen, x.shape) for placement, seen, x in pairs),
        indices={q: place(place_index(resolved, q, split), seen_shapes[q], shape) for q, shape in plan.index_shapes},
        result=place(place_term(resolved.output, split), resolved.output_shape, resolved.output_shape, summed),
        split=best,
        collectives=plan.collectives(_parts(axes, best.letters)),
        others=tuple(split for split in splits if split is not best),
    )


def _find_splits(plan: Plan, axes: Mapping[str, int]) -> list[MeshSplit]:
    """Return ways to split a contraction over all axes of a mesh, best first.

    The axes of the mesh are taken one after the other. An axis splits something wherever it can: otherwise its devices
    would repeat one another's work, and exchange nothing.
    """
    sizes = _sizes_of_letters(plan.resolved.spec)
    # By the parts of each letter: the sums, and the bytes on a device.
    priced: dict[tuple[tuple[str, int], ...], tuple[tuple[Collective, ...], int]] = {}

    def price(letters: tuple[str | None, ...]) -> MeshSplit:
        parts = _parts(axes, letters)
        key = tuple(sorted(parts.items()))
        if key not in priced:
            priced[key] = plan.collectives(parts), _device_bytes(plan, parts)
        collectives, device_bytes = priced[key]
        # torch adds up over one axis of the mesh after the other.
        rounds = {letter: letters.count(letter) if plan.backend == "torch" else 1 for letter in parts}
        exchanged_bytes = sum(c.bytes * max(rounds[letter] for letter in c.over) for c in collectives)
        return MeshSplit(letters, exchanged_bytes, device_bytes)

    splits = [price(())]
    for size in axes.values():
        longer = []
        for split in splits:
            parts = _parts(axes, split.letters)
            letters: list[str | None] = [
                x for x, longest in sizes.items() if size > 1 and size * parts.get(x, 1) <= longest
            ]
            longer += [price((*split.letters, letter)) for letter in letters or [None]]
        longer.sort(key=lambda split: (split.exchanged_bytes, split.device_bytes))
        splits = longer[:_MOST_CONTINUED]
    return splits


def _sizes_of_letters(spec: Spec) -> dict[str, int]:
    """Return the letters of the arrays that can be split, each with the size of what it stands for."""
    named: dict[str, list[Entry]] = {}
    for entry in _entries(spec):
        named.setdefault(letter_of(entry), []).append(entry)
    allowed = set(splittable(spec))
    given = {letter_of(entry) for term in (*spec.inputs, *(g.axes for g in spec.gathers)) for entry in term}
    return {
        letter: min(map(spec.size, entries))
        for letter, entries in named.items()
        if letter in given and len(entries) == 1 and allowed.issuperset(entries)
    }


def _entries(spec: Spec) -> tuple[Entry, ...]:
    return *spec.axes, *spec.gathers


def _parts(axes: Mapping[str, int], letters: Sequence[str | None]) -> dict[str, int]:
    """Return the number of parts of each letter that is split."""
    parts: dict[str, int] = {}
    for letter, size in zip(letters, axes.values(), strict=False):
        if letter is not None:
            parts[letter] = parts.get(letter, 1) * size
    return parts


def _device_bytes(plan: Plan, parts: Mapping[str, int]) -> int:
    """Return the bytes of all arrays and gradients on the device that holds the most."""
    spec = plan.resolved.spec
    split = {entry: (letter_of(entry),) for entry in _entries(spec) if letter_of(entry) in parts}

    def elements(term: Term, placement: Placement) -> int:
        return math.prod(part_shape(spec.shape(term), placement, parts))

    held = elements(spec.output, place_term(spec.output, split)) * itemsize(plan.dtype)
    for term, operand in zip(spec.inputs, plan.operands, strict=True):
        held += elements(term, place_term(term, split)) * itemsize(operand.dtype) * (1 + operand.requires_grad)
    for name, axes in {gather.array: gather.axes for gather in spec.gathers}.items():
        held += elements(axes, place_index(spec, name, split)) * _INDEX_BYTES
    return held


def _placement(backend: str, names: Sequence[tuple[str, ...]], mesh: Sequence[str], summed: Sequence[str]) -> Any:
    """Return the placement of an array.

    Args:
        backend: the name of the framework.
        names: for each dimension of the array, the axes of the mesh that it is split over.
        mesh: all axes of the mesh.
        summed: the axes over which the array is a sum, unless they split it.
    """
    if backend == "jax":
        from jax.sharding import PartitionSpec

        dims = [of_dim[0] if len(of_dim) == 1 else of_dim or None for of_dim in names]
        return PartitionSpec(*dims)  # type: ignore[no-untyped-call]
    if backend == "torch":
        from torch.distributed.tensor import Partial, Replicate, Shard

        whole = {name: Partial() if name in summed else Replicate() for name in mesh}
        dim_of = {name: dim for dim, of_dim in enumerate(names) for name in of_dim}
        return tuple(Shard(dim_of[name]) if name in dim_of else whole[name] for name in mesh)
    return tuple(names)
