"""Steps that read or write rows through index arrays, as torch's own calls.

The calls of a take and of a segment sum need no index array but the caller's, so autograd keeps no other. They are
`index_select` and `index_add` for one bracket, `x[q, r]` and `index_put` for several, and `gather` and `scatter_add` if
a bracket shares axes with its term, as in `b q[bn] c`. Through many indices at once, one flat index is faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.backends.common import stock
from planner.backends.common.stock_rows import stock_kind
from planner.backends.torch.checks import can_wait
from planner.backends.torch.contexts.modes import (
    bare_operators,
    below_transforms,
    carries_tangents,
    compiles,
    hooked,
    transformed,
    under_grads,
    usual,
    watched,
    whole,
)
from planner.backends.torch.executable import Executable
from planner.backends.torch.index import TorchIndex, counted_from_start
from planner.backends.torch.ops import OPS, are_derived, captured, dispatches, is_finite, is_recorded, unseen, viewing
from planner.backends.torch.strides import STRIDE_OPS, Strided
from planner.language.cached import cached_by_step
from planner.language.options import MODES
from planner.language.spec import Gather, Spec, Term, indexed_dims, plain_axes, term_axes, term_gathers
from planner.program.calls import Member, RangedIndices, shape_in, size_in
from planner.program.ops import Op

# Steps that read or write through index arrays, and what torch computes the gradient of one by.
INDEXED = {"take": "segment sum", "segment sum": "take", "take, segment sum": "take, segment sum"}
# Dtypes that torch adds up by index in that dtype.
_ADDED = ("float32", "float64", "complex64", "complex128")
# Up to so many indices torch goes faster through several dimensions by several index arrays than by one flat index: 64
# pairs took 2.1 us for 3.9, 1,000 took 4.4 for 4.9, and 10,000 took 25 for 13 (AMD EPYC, torch 2.13, 2026-11-25).
_FEW = 1_024
# `index_put` adds up so many floats on several cores, in any order.
MOST_PUT = 1 << 15
_NOTHING: Any = contextlib.nullcontext()


class IndexedCalls(NamedTuple):
    """A take, a segment sum, or one after the other, as torch's own calls.

    Attributes:
        spec: the step's spec.
        run: computes the step, from the input and the index arrays in range.
        result: returns the stand-in of the result, from that of the input.
        keeps: whether autograd keeps the input.
    """

    spec: Spec
    run: Callable[[Tensor, Mapping[Any, Tensor]], Tensor]
    result: Callable[[Strided], Strided]
    keeps: bool

    def lies_as_stock(self, op: Op) -> bool:
        """Whether the result of an op lies in memory as that of the stock evaluation does."""
        spec, (term,) = self.spec, self.spec.inputs
        follows = len(term_gathers(term)) > 1 and op.layouts and op.layouts[0]  # `x[q, r]` follows the strides of `x`
        x, arrays = Strided.new(spec.shape(term)), {g: Strided.new(spec.shape(g.axes)) for g in spec.gathers}
        return not follows and self.result(x).strides == stock.evaluation(STRIDE_OPS, spec)([x], arrays, False).strides

    def flat_if_many(self, checks: bool = False) -> Callable[[Tensor, Mapping[Any, Tensor]], Tensor]:
        """Return the function that computes the step, by one flat index if that is faster.

        Args:
            checks: whether it refuses an index out of range with an `IndexError`, as the calls do.
        """
        direct, spec = self.run, self.spec
        if all(len(indexed_dims(term)) < 2 for term in spec.terms):
            return direct
        gathers, flat = spec.gathers, stock.evaluation(OPS, spec)

        def run(x: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
            seen = x.is_cpu and not is_recorded(x)  # what a compiler records has index arrays in range
            if seen and x.numel() < MOST_PUT and all([index[gather].numel() <= _FEW for gather in gathers]):
                return direct(x, index)
            for gather in gathers if checks and seen else ():
                low, high = torch.aminmax(index[gather])
                if int(low) < 0 or int(high) >= size_in(index, spec, gather):
                    raise IndexError
            result: Tensor = flat((x,), index, False)
            return result

        return run


@cached_by_step
def indexed_calls(op: Op) -> IndexedCalls | None:
    """Return a step as torch's own calls; None if it is no such step, takes a diagonal, or sums or repeats besides."""
    spec = op.spec
    if stock_kind(op) not in INDEXED or op.dtype not in _ADDED:
        return None
    (term,), out = spec.inputs, spec.output
    reads, writes = (_rows_of(each, spec) for each in (term, out))
    if reads is None or writes is None or sorted(reads.axes) != sorted(writes.axes):
        return None
    order = [reads.axes.index(e) for e in writes.axes]
    arrange = viewing(order, (1,) * len(order))
    take, add = reads.take, writes.add

    def result(x: Strided) -> Strided:
        taken = STRIDE_OPS.permute(reads.taken(x), order)
        return writes.added(taken)

    def run(x: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        taken: Tensor = arrange(x if take is None else take(x, index))
        return taken if add is None else add(taken, index)

    return IndexedCalls(spec, run, result, reads.keeps)


class _Rows(NamedTuple):
    """How torch reads and writes through the brackets of a term, without an index array of its own.

    Attributes:
        axes: the axes of what is taken, and of what is added up.
        take: takes rows of a tensor, by the index arrays; None without brackets.
        add: adds values into zeros, by the index arrays; None without brackets.
        taken: the stand-in of what is taken of a stand-in.
        added: the stand-in of what a stand-in is added into.
        keeps: whether autograd keeps the tensor that rows are taken of.
    """

    axes: tuple[str, ...]
    take: Callable[[Tensor, Mapping[Any, Tensor]], Tensor] | None
    add: Callable[[Tensor, Mapping[Any, Tensor]], Tensor] | None
    taken: Callable[[Strided], Strided]
    added: Callable[[Strided], Strided]
    keeps: bool = False


def _rows_of(term: Term, spec: Spec) -> _Rows | None:
    """Return how torch reads and writes through the brackets of a term; None if a diagonal is taken."""
    gathers, plain = term_gathers(term), plain_axes(term)
    if any(len({*axes}) < len(axes) for axes in (plain, *(gather.axes for gather in gathers))):
        return None
    if not gathers:
        return _Rows(plain, None, None, lambda x: x, lambda x: x)
    if {*plain} & {*term_axes(gathers)}:
        return _elements_of(term, spec) if len(gathers) == 1 else None
    return _slices_of(term, spec)


def _slices_of(term: Term, spec: Spec) -> _Rows:
    """Return how torch reads and writes rows, such as those of `s[e]c`, or of `s[e]d[e]`."""
    gathers = term_gathers(term)
    (first, *others), rows, rank = gathers, term_axes(gathers), len(gathers[0].axes)
    dims = [d for d, e in enumerate(term) if e in gathers]
    order = [*dims, *(d for d in range(len(term)) if d not in dims)]
    arranged: Term = tuple(term[d] for d in order)
    back = [order.index(d) for d in range(len(term))]
    moves, shape = order != back or order != sorted(order), spec.shape(rows)
    orders = [([g.axes.index(e) for e in rows if e in g.axes], [int(e in g.axes) for e in rows]) for g in gathers]
    views, standin_views = ([viewing(*o) for o in orders], [stock.viewing(STRIDE_OPS.permute, *o) for o in orders])

    def indices(index: Mapping[Any, Tensor]) -> tuple[Tensor, ...]:
        return tuple([view(index[gather]) for view, gather in zip(views, gathers, strict=True)])

    def take(x: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        if moves:
            x = x.permute(order)
        if others and rows:
            return x[indices(index)]
        if others:  # by single numbers torch would return a view
            return x[tuple([q.reshape(1) for q in indices(index)])].squeeze(0)
        q = index[first]
        if rank == 1:
            return x.index_select(0, q)
        return x.index_select(0, q.reshape(-1)).reshape((*q.shape, *x.shape[1:]))

    def add(values: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        sizes = shape_in(index, spec, arranged)
        if others:
            out = values.new_zeros(sizes)
            put = out.index_put if transformed() or watched() else out.index_put_
            out = put(indices(index), values, accumulate=True)
        else:
            out = OPS.add_at(sizes, [index[first]], values)
        return out.permute(back) if moves else out

    def taken(x: Strided) -> Strided:
        x = STRIDE_OPS.permute(x, order)
        if not others:
            return STRIDE_OPS.take(x, [Strided.new(shape)])
        arrays = [Strided.new(spec.shape(gather.axes)) for gather in gathers]
        return STRIDE_OPS.take_by(x, [view(array) for view, array in zip(standin_views, arrays, strict=True)])

    def added(x: Strided) -> Strided:
        return STRIDE_OPS.permute(_written(x, spec.shape(arranged)), back)

    return _Rows((*rows, *plain_axes(term)), take, add, taken, added)


def _written(x: Strided, shape: tuple[int, ...]) -> Strided:
    return Strided.new(shape, x.requires_grad, x.copied)


def _elements_of(term: Term, spec: Spec) -> _Rows:
    """Return how torch reads and writes elements, such as those of `n k q[n]`, or of `b s[bn] c`.

    The index array is viewed as large as what is taken.
    """
    (gather,) = term_gathers(term)
    dim = term.index(gather)
    own = [axis for axis in gather.axes if axis not in term]
    order = [
        gather.axes.index(str(e)) for each in term for e in ([each] if each != gather else own) if e in gather.axes
    ]
    view = viewing(order, [len(own) if e == gather else int(e in gather.axes) for e in term])
    axes = tuple(str(e) for each in term for e in ([each] if each != gather else own))
    places = [gather.axes.index(e) for e in own]

    def take(x: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        q, shape = index[gather], list(x.shape)
        wide = view(q).long()
        shape[dim] = wide.shape[dim]
        x = x.gather(dim, wide.expand(shape))
        if len(own) == 1:
            return x
        shape[dim : dim + 1] = [q.shape[d] for d in places]
        return x.reshape(shape)

    def add(values: Tensor, index: Mapping[Any, Tensor]) -> Tensor:
        wide = view(index[gather]).long()
        if len(own) != 1:
            shape = list(values.shape)
            shape[dim : dim + len(own)] = [wide.shape[dim]]
            values = values.reshape(shape)
        out = values.new_zeros(shape_in(index, spec, term))
        add = out.scatter_add if transformed() or watched() else out.scatter_add_
        return add(dim, wide.expand(values.shape), values)

    return _Rows(
        axes, take, add, lambda x: _written(x, spec.shape(axes)), lambda x: _written(x, spec.shape(term)), keeps=True
    )


# -- calls of plans that are such calls --------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Reads:
    """What native calls ask of index arrays.

    Attributes:
        checked: whether the calls themselves refuse each index out of range.
        most: the most indices of an array, or None. Of more, torch adds up gradients on several cores, in any order.
    """

    checked: bool = True
    most: int | None = None


class NativeRun(NamedTuple):
    """A plan as native calls.

    Attributes:
        run: takes the operands without their broadcast dimensions, and after them the index arrays.
        reads: what the calls ask of index arrays.
    """

    run: Callable[..., Tensor]
    reads: Reads


class _Index(dict[Gather, Tensor]):
    """The index arrays of native calls, and `RangedIndices.sizes`."""

    __slots__ = ("sizes",)
    sizes: Mapping[str | Gather, int] | None


class IndexedRun:
    """Runs native calls if the index arrays do as they are, and no guard would act; else it runs the plan as usual.

    Args:
        native: the native calls.
        executable: the plan, ready to run.
        otherwise: runs the plan as usual; None to return None in its place.
        member: the sizes of the calls, if not the plan's. Their executable is made when the plan first runs as usual.
    """

    __slots__ = ("given", "made_for", "most", "native", "negative", "otherwise", "records", "sizes", "trusts", "wraps")

    def __init__(
        self,
        native: NativeRun,
        executable: Executable,
        otherwise: Callable[[Executable, Sequence[Tensor], Mapping[str, Any]], Tensor] | None,
        member: Member | None = None,
    ) -> None:
        self.otherwise = otherwise
        self.native, self.trusts, self.most = native.run, native.reads.checked, native.reads.most
        self.made_for = executable, member  # replaced at once: another thread may read it meanwhile
        self.records = executable.programs.backward is not None
        self.wraps = MODES[executable.plan.index_mode].wraps
        self.negative = False  # whether a call had negative indices: then others may have some too
        owner = executable if member is None else member
        self.sizes, shapes = owner.sizes, executable.reshape if member is None else member.shapes
        # The index arrays and their shapes, if calls only look at how these lie.
        self.given: list[tuple[Gather, tuple[int, ...], Any]] | None = None
        sizes: Any = self.sizes or {gather: own.size for gather, own in executable.gathers.items()}
        known = [(each, owner.index_shapes[each.array], sizes[each]) for each in executable.gathers]
        plain = self.trusts and self.most is None and not executable.reads_unread
        if plain and all(shape is None for shape in shapes) and all(type(size) is int for *_, size in known):
            self.given = known

    def __call__(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Any:
        (executable, member), negative = self.made_for, self.negative
        reads = executable.reads_unread or (executable.unread_in_gradients and are_derived(operands))
        given = None if reads else self.given
        if given is not None and usual(*operands) and (found := self._found(given, indices, negative)) is not None:
            with contextlib.suppress(IndexError, RuntimeError):  # an index out of range, or a negative one
                return self.native([*operands, found])
            with contextlib.suppress(IndexError, RuntimeError):
                if self.wraps and not negative and (found := self._found(given, indices, True)) is not None:
                    result = self.native([*operands, found])
                    self.negative = True
                    return result
            return self._otherwise(operands, indices)
        index: _Index | RangedIndices | None = None
        if self.most is not None and any([math.prod(indices[name].shape) > self.most for name in executable.arrays]):
            return self._otherwise(operands, indices)
        if (inside := operands if usual(*operands) else under_grads(*operands)) is not None:
            # Hooks would see what autograd saves before an index is refused.
            trusts = self.trusts and not (self.records and hooked())
            looks = inside is not operands and (reads or not trusts)
            with below_transforms() if looks else _NOTHING:
                index = _as_read(executable, member, inside, indices, reads, trusts)
            if index is not None and trusts:
                try:
                    return self.native([*executable.views(operands, member), index])
                except (IndexError, RuntimeError):  # an index out of range, or a negative one
                    index = None
        elif _as_usual(operands):
            index = _as_read(executable, member, operands, indices, reads)
        elif compiles() and not (transformed() or bare_operators()):
            index = None if reads or executable.drops else self._own().prepare(indices)
        if index is None:
            return self._otherwise(operands, indices)
        return self.native([*executable.views(operands, member), index])

    def _otherwise(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Any:
        return None if self.otherwise is None else self.otherwise(self._own(), operands, indices)

    def _found(
        self, given: Sequence[tuple[Gather, tuple[int, ...], Any]], indices: Mapping[str, Any], negative: bool
    ) -> _Index | None:
        """Return the index arrays as `_as_they_are` does, if all are on a CPU and nothing has to be looked up in them.

        Few indices may be of another type, in other strides, or `negative`, but not where autograd keeps them.
        """
        if self.records and (negative or hooked()):
            return None
        index = _Index()
        index.sizes = self.sizes
        for gather, shape, size in given:
            q = indices[gather.array]
            if not (type(q) is Tensor and q.is_cpu and q.layout is torch.strided and q.numel()):
                return None
            raw = q
            if not (q.dtype is torch.int64 and q.is_contiguous()):
                if self.records or q.numel() > _FEW or q.dtype is torch.uint64:  # above 2^63 they would become negative
                    return None
                q = q.long().contiguous()  # `to` with a memory format may return a strided array as it is
            if negative and (q := counted_from_start(q, size, owned=q is not raw)) is None:
                return None
            index[gather] = q if q.shape == shape else q.reshape(shape)
        return index

    def _own(self) -> Executable:
        """Return the executable for the sizes of the calls."""
        executable, member = self.made_for
        if member is not None:
            executable = executable.resized(member)
            self.made_for = executable, None
        return executable


def _as_read(
    executable: Executable,
    member: Member | None,
    operands: Sequence[Tensor],
    indices: Mapping[str, Any],
    reads: bool,
    trusts: bool = False,
) -> _Index | None:
    """Return the index arrays for native calls on operands with values; None if these had to copy or mask something."""
    index = _as_they_are(executable, member, operands, indices, trusts)
    return None if index is None or (reads and any(unseen(x) or not is_finite(x) for x in operands)) else index


def _as_usual(operands: Sequence[Tensor]) -> bool:
    """Return whether native calls may run though something surrounds the call.

    Modes see native calls. A checkpoint may first run one without a mode, and must save the same tensors in a mode.
    """
    return not (is_recorded(operands[0]) or carries_tangents(*operands) or any(map(dispatches, operands)))


def _as_they_are(
    executable: Executable,
    member: Member | None,
    operands: Sequence[Tensor],
    indices: Mapping[str, Any],
    trusts: bool,
) -> _Index | None:
    """Return the index arrays if they are in range as they are and autograd may save them, else None.

    Then all are row-major, of int64, and without negative entries. If it `trusts` arrays on a CPU, the operators that
    read them find out whether they are in range.
    """
    index, records = _Index(), torch.is_grad_enabled()
    index.sizes = sizes = executable.sizes if member is None else member.sizes
    shapes = executable.index_shapes if member is None else member.index_shapes
    for gather, own in executable.gathers.items():
        raw, shape = indices[gather.array], shapes[gather.array]
        if isinstance(raw, TorchIndex):
            size = own.size if sizes is None else sizes[gather]
            raw, may_drop = raw.read(dataclasses.replace(own, size=size), executable.plan.index_mode)
            if may_drop:
                return None
        else:
            inside = whole(raw)  # under `vmap` the arrays of all calls
            odd = type(raw) is not Tensor or raw.dtype is not torch.int64 or not raw.is_contiguous()
            if odd or not inside.numel() or captured(inside) or can_wait(raw):  # a look would wait for the device
                return None
            if not (trusts and raw.is_cpu):
                with below_transforms() if inside is not raw else _NOTHING:
                    low, high = torch.aminmax(inside)
                if int(low) < 0 or int(high) >= ((own.size if sizes is None else sizes[gather]) or 0):
                    return None
        index[gather] = raw if raw.shape == shape else raw.reshape(shape)
    return None if records and any(map(Tensor.is_inference, (*operands, *index.values()))) else index
