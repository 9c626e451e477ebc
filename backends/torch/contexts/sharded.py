"""Calls on DTensors: each device contracts its own parts, by the rule that JAX's partition uses.

The placements of the arrays say which entries of the spec are split, see `planner.language.split`. Arrays that disagree
are redistributed. Then each device computes one contraction of its local tensors. If the result, or a gradient, lacks
an entry that is split, the devices hold parts of a sum: it is placed as `Partial`, as torch's own operators leave it,
and is added up when something needs the whole.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.backends.torch.contexts.autocast import autocast_state
from planner.backends.torch.contexts.modes import in_functorch
from planner.backends.torch.index import TorchIndex, torch_in_range
from planner.language.cached import BACKEND_CACHES, enter
from planner.language.errors import IndexRangeError, PlannerError
from planner.language.options import MODES, Request
from planner.language.spec import Gather, Spec, Term, axis_of, unused_letters
from planner.language.split import Placement, choose_splits, dims_of_term, place_term, with_sizes
from planner.program.callbacks import callbacks
from planner.program.contraction import Contraction
from planner.program.frameworks import labelled

Shape = tuple[int, ...]
# One placement for each dimension of the mesh.
Placements = tuple[Any, ...]


class _Cut(NamedTuple):
    """A part of a dimension: the dimension, where the part begins, and its size."""

    dim: int
    start: int
    size: int


class _Moved(NamedTuple):
    """How one array comes to a device.

    Attributes:
        placements: the placements that the call needs.
        gradients: the placements of the gradient of its local tensor.
        shape: the shape of its local tensor, without the dimensions of size 1 that are broadcast.
        cuts: the dimensions of that shape along which the device's part is cut out, because an entry that is split
            repeats: each with where the part begins and its size.
    """

    placements: Placements
    gradients: Placements
    shape: Shape
    cuts: tuple[_Cut, ...]


class _Pool(NamedTuple):
    """The slice of a pool that a device holds: the letter of its local index array, its start and its size."""

    letter: str
    start: int
    size: int


class _Division(NamedTuple):
    """What one device does for the calls of one kind.

    Attributes:
        spec: the spec of the device's parts.
        unsplit: the same, but with whole pools.
        operands: how each operand comes here.
        indices: how the index array of each gather comes here.
        pools: all pools by their gathers in the caller's spec; none if no pool is split, and all parts of an index
            array are the same.
        placements: the placements of the result.
        gradients: the placements that the gradient of the result comes in.
        shape: the shape of the whole result.
        cuts: the dimensions of the result of which the device computes a part; the rest is zero.
        dtype: the dtype of the whole contraction; under autocast that of a part could differ.
    """

    spec: Spec
    unsplit: Spec
    operands: tuple[_Moved, ...]
    indices: dict[Gather, _Moved]
    pools: dict[Gather, _Pool]
    placements: Placements
    gradients: Placements
    shape: Shape
    cuts: tuple[_Cut, ...]
    dtype: str


_DIVISIONS: dict[Any, _Division] = {}
_MOST_DIVISIONS = 1024
BACKEND_CACHES.append(_DIVISIONS)


def is_distributed(x: Any) -> bool:
    """Return whether an array is a DTensor. It imports nothing."""
    if type(x) in (Tensor, torch.nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def divided(operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what runs calls of DTensors, see `Backend.divided`; None if no array is one."""
    if not any(map(is_distributed, (*operands, *indices.values()))):
        return None
    return partial(_run, operands, indices)


def _run(
    operands: Sequence[Any], indices: Mapping[str, Any], request: Request, check: Callable[[], Contraction]
) -> Any:
    _refuse_mixed(operands, indices)
    mesh, division, key = operands[0].device_mesh, None, None
    with contextlib.suppress(TypeError):  # wrong options, which `check` refuses, or sizes that are symbols
        hashable = request.hashable()
        sizes = hashable.sizes if hashable.sizes is None else tuple(hashable.sizes)
        places = tuple((x.shape, x.placements) for x in (*operands, *indices.values()))
        dtypes = hashable.dtype, tuple(x.dtype for x in operands), autocast_state(operands[0].device.type)
        asked = hashable.spec, sizes, hashable.index_mode, mesh, places, tuple(indices), dtypes
        division = _DIVISIONS.get(asked)
        key = asked
    if division is None:
        division = _divide(check(), operands, indices)
        if key is not None:
            enter(_DIVISIONS, key, division, _MOST_DIVISIONS)
    local_operands = [_to_local(x, how) for x, how in zip(operands, division.operands, strict=True)]
    local_indices = {gather: _to_local(indices[gather.array], how) for gather, how in division.indices.items()}
    try:
        result = _contract(division, request, local_operands, local_indices)
    except IndexRangeError as error:
        raise IndexRangeError(f"{error}; positions are those in the part of rank {mesh.get_rank()}") from None
    for dim, start, size in division.cuts:
        after = division.shape[dim] - start - size
        result = torch.nn.functional.pad(result, (0, 0) * (result.ndim - dim - 1) + (start, after))
    return _ToGlobal.apply(result, mesh, division.placements, division.gradients, division.shape)


def _contract(
    division: _Division, request: Request, operands: Sequence[Tensor], indices: Mapping[Gather, Tensor]
) -> Tensor:
    """Contract the parts of one device."""
    options = request._replace(sizes=None, dtype=division.dtype)._asdict()
    del options["spec"]
    contract, mode = callbacks().contract, request.index_mode
    if not division.pools:
        by_letter = {gather.array: values for gather, values in indices.items()}
        result: Tensor = contract(division.spec, *operands, **options, **by_letter)
        return result
    # Each pool is read in its own range. Rows that lie on other devices are dropped, as those that the caller drops.
    local, missed = {}, False
    for gather, pool in division.pools.items():
        values, may_miss = torch_in_range(indices[gather], gather, mode)
        missed |= may_miss
        if pool.size != gather.size:
            here = (values >= pool.start) & (values < pool.start + pool.size)
            values = torch.where(here, values - pool.start, pool.size)
        local[pool.letter] = values
    result = contract(division.spec, *operands, **{**options, "index_mode": "drop"}, **local)
    if missed and MODES[mode].unmarked:  # contracting zeros marks the results that read a bad index with NaN
        unsplit = division.unsplit
        zeros = [
            x.detach().new_zeros(()).expand(unsplit.shape(t)) for x, t in zip(operands, unsplit.inputs, strict=True)
        ]
        whole = {pool.letter: indices[gather] for gather, pool in division.pools.items()}
        marks, pools = contract(unsplit, *zeros, **options, **whole), {p.letter: p for p in division.pools.values()}
        for dim, entry in enumerate(unsplit.output):
            if isinstance(entry, Gather):  # of rows that are added into, the result has those of the pool's slice
                marks = marks.narrow(dim, pools[entry.array].start, pools[entry.array].size)
        result = result + marks
    return result


def _refuse_mixed(operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
    """Refuse plain tensors beside DTensors, DTensors on several meshes, and transforms of `torch.func`."""
    if in_functorch():
        raise PlannerError("torch.func has no rule for a contraction of DTensors: call torch.autograd.grad instead")
    arrays = labelled(operands, indices)
    first, of_first = next((label, x) for label, x in arrays if is_distributed(x))
    for label, x in arrays:
        if isinstance(x, TorchIndex):
            raise PlannerError(f"{label} was prepared by planner.group, but {first} is a DTensor: pass a DTensor of it")
        if not is_distributed(x):
            raise PlannerError(
                f"{label} is a plain tensor, but {first} is a DTensor: pass distribute_tensor(x, mesh, placements)"
            )
        if x.device_mesh != of_first.device_mesh:
            raise PlannerError(f"{label} lies on {x.device_mesh}, but {first} on {of_first.device_mesh}: move one")
    if of_first.device_mesh.get_coordinate() is None:
        raise PlannerError(
            f"this process is not on the mesh of {first}: call planner on the processes of the mesh only"
        )


def _divide(contraction: Contraction, operands: Sequence[Any], indices: Mapping[str, Any]) -> _Division:
    """Return what this device does for a call.

    Args:
        contraction: the whole contraction.
        operands: the operands.
        indices: the index arrays.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh, spec = operands[0].device_mesh, contraction.resolved.spec
    arrays = [*zip(spec.inputs, operands, strict=True)]
    arrays += [(gather.axes, indices[gather.array]) for gather in spec.gathers]
    split = choose_splits(spec, [(term, _placement(spec, term, x)) for term, x in arrays])
    # For each dimension of the mesh what it splits, or which operand's parts of a sum stay apart; or neither.
    over: dict[int, Any] = {int(name): entry for entry, names in split.items() for name in names}
    apart = {m: _operand_apart(contraction, operands, m) for m in range(mesh.ndim) if m not in over}
    is_divided = [m in over or apart[m] is not None for m in range(mesh.ndim)]

    parts = {entry: _part(spec.size(entry), names, mesh) for entry, names in split.items()}
    # One index array may read pools of several sizes, and then means other rows in each; or be cut in several ways.
    ways = {(gather.array, tuple(map(split.get, gather.axes))) for gather in spec.gathers}
    apart_each = any(gather in parts for gather in spec.gathers) or len(ways) > len(spec.arrays)
    gathers = spec.gathers if apart_each else ()
    letters = unused_letters((*spec.axes, *spec.arrays), len(gathers))
    slices = [parts.get(gather, (0, spec.size(gather))) for gather in gathers]
    pools = {gather: _Pool(letter, *cut) for gather, letter, cut in zip(gathers, letters, slices, strict=True)}
    sizes = {axis: size for entry, (_, size) in parts.items() if (axis := axis_of(entry))}
    local = with_sizes(spec, sizes, {g: Gather(pool.letter, g.axes, pool.size) for g, pool in pools.items()})

    def cuts(term: Term, placement: Placement) -> tuple[_Cut, ...]:
        """Return the dimensions that are whole although their entry is split: it repeats."""
        return tuple(_Cut(d, *parts[e]) for d, e in enumerate(term) if e in parts and not placement[d])

    def move(term: Term, x: Any) -> _Moved:
        dims, placement = dims_of_term(spec, term, x.shape), place_term(term, split, _placement(spec, term, x))
        dim_over: dict[int, Any] = {
            int(name): dim for dim, names in zip(dims, placement, strict=True) for name in names
        }
        placements: list[Any] = []
        gradients: list[Any] = []
        for m in range(mesh.ndim):
            if m in dim_over:
                placements.append(Shard(dim_over[m]))
                gradients.append(Shard(dim_over[m]))
            elif x is apart.get(m):
                placements.append(Partial())
                gradients.append(Replicate())
            else:  # each device reads the whole, and has a part of its gradient if it computes a part of the result
                placements.append(Replicate())
                gradients.append(Partial() if is_divided[m] else Replicate())
        shape = (parts[e][1] if names else spec.size(e) for e, names in zip(term, placement, strict=True))
        return _Moved(tuple(placements), tuple(gradients), tuple(shape), cuts(term, placement))

    def place_result(m: int) -> Any:
        entry = over.get(m)
        if entry in spec.output:
            return Shard(spec.output.index(entry))
        return Partial() if is_divided[m] else Replicate()

    moved = [move(term, x) for term, x in arrays]
    placements = tuple(map(place_result, range(mesh.ndim)))
    return _Division(
        spec=local,
        unsplit=with_sizes(spec, sizes, {g: Gather(pool.letter, g.axes, g.size) for g, pool in pools.items()}),
        operands=tuple(moved[: len(operands)]),
        indices=dict(zip(spec.gathers, moved[len(operands) :], strict=True)),
        pools=pools,
        placements=placements,
        gradients=tuple(Replicate() if p.is_partial() else p for p in placements),
        shape=spec.output_shape,
        cuts=cuts(spec.output, place_term(spec.output, split)),
        dtype=contraction.dtype,
    )


def _operand_apart(contraction: Contraction, operands: Sequence[Any], m: int) -> Any:
    """Return the operand whose parts of a sum over a dimension of the mesh need not be added up before the call.

    A contraction is linear in each operand. So if one operand is a sum of parts, the result is one of as many parts.
    But parts of integers are added up in their own dtype, in which the sum may be too large.
    """
    from torch.distributed.tensor import Partial

    sums = [x for x in operands if x.placements[m].is_partial()]
    if len(sums) != 1 or sums[0].placements[m] != Partial():
        return None
    (x,), result = sums, contraction.resolved.spec.output_shape
    is_linear = x.is_floating_point() or x.is_complex() or str(x.dtype) == f"torch.{contraction.dtype}"
    return x if is_linear and math.prod(result) <= x.numel() else None


def _placement(spec: Spec, term: Term, x: Any) -> Placement:
    """Return the dimensions of the mesh, by number, that each dimension of an array is split over."""
    from torch.distributed.tensor import Shard

    return tuple(
        tuple(str(m) for m, p in enumerate(x.placements) if type(p) is Shard and p.dim == dim)
        for dim in dims_of_term(spec, term, x.shape)
    )


def _part(size: int, names: Sequence[str], mesh: Any) -> tuple[int, int]:
    """Return where this device's part of a dimension begins, and its size: DTensor splits as `torch.chunk` does."""
    begin = 0
    for m in map(int, names):
        chunk = -(-size // mesh.size(m))
        start = min(chunk * mesh.get_coordinate()[m], size)
        begin, size = begin + start, min(chunk, size - start)
    return begin, size


def _to_local(x: Any, how: _Moved) -> Tensor:
    """Return the device's part of an array."""
    pairs = zip(x.placements, how.placements, strict=True)
    if x.placements != how.placements and any(old.is_shard() and old != new for old, new in pairs):
        x = x.redistribute(placements=how.placements)  # its gradient is split again
    local: Tensor = _ToLocal.apply(x, how.placements, how.gradients)
    local = local if local.shape == how.shape else local.reshape(how.shape)
    for cut in how.cuts:
        local = local.narrow(*cut)
    return local


# The two functions are each other's adjoint, so derivatives of any order are made of them. Each knows the placements of
# what it takes or gives, and of the gradient of that.


class _ToLocal(torch.autograd.Function):
    """From a DTensor to the device's local tensor, in some placements. The local gradients have placements too."""

    @staticmethod
    def forward(ctx: Any, x: Any, placements: Placements, gradients: Placements) -> Tensor:
        from torch.distributed.tensor import Replicate

        mesh = x.device_mesh
        ctx.of = mesh, gradients, placements, x.shape
        pairs = zip(x.placements, placements, strict=True)
        found = tuple(Replicate() if new.is_partial() and old != new else new for old, new in pairs)
        local = (x if x.placements == found else x.redistribute(placements=found)).to_local()
        local = local.wait() if hasattr(local, "wait") else local  # what a collective left may still be on its way
        # Of an array that shall be a sum of parts the first device has all, and the others nothing.
        if any(found[m] != wanted and mesh.get_local_rank(m) > 0 for m, wanted in enumerate(placements)):
            return torch.zeros_like(local)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _ToGlobal.apply(gradient, *ctx.of), None, None


class _ToGlobal(torch.autograd.Function):
    """From local tensors to a DTensor of a shape, in some placements. Its gradient comes in placements too."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: Any, placements: Placements, gradients: Placements, shape: Shape) -> Any:
        from torch.distributed.tensor import DTensor

        ctx.of = gradients, placements
        shape = torch.Size(shape)
        return DTensor.from_local(local.detach(), mesh, placements, shape=shape, stride=_strides(local, shape))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return _ToLocal.apply(gradient, *ctx.of), None, None, None, None


def _strides(local: Tensor, shape: Shape) -> tuple[int, ...]:
    """Return the strides of a tensor whose dimensions lie in memory in the order of those of its local tensor."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        if local.stride(d) > 0:
            strides[d] = step
            step *= max(shape[d], 1)
    return tuple(strides)
