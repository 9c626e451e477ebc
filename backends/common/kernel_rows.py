"""The rows of a table that run grouped and pooled kernels.

A row flattens each group of axes into one dimension, calls the kernel, and restores the axes of the result. Torch and
JAX share the rows; each backend gives its kernels, `Kernels`, and the work that they do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from planner.backends.common.stock import ArrayOps
from planner.backends.common.stock_layout import matrix_copies
from planner.cost.device import Device
from planner.cost.figures import StepCost, Work
from planner.cost.layout import Layout, flattens, in_memory, reordered
from planner.kernels.grouping.keys import IndexArray
from planner.language.cached import cached_by_step
from planner.language.dtypes import itemsize
from planner.language.spec import Gather, Spec, Term
from planner.program.calls import PreparedRun, RangedIndices, Run, shape_in, size_in
from planner.program.forms import GroupedForm, PooledForm, grouped_form, pooled_form
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Cast, JointGradient, Op

Groups = Sequence[Sequence[str | Gather]]
# The term of an array, with the groups of axes that are one dimension each to the kernel.
View = tuple[Term, Groups]
Views = Sequence[View]
Form = GroupedForm | PooledForm
WorkOf = Callable[[Op, Any, Device], list[Work]]

# Elements of I from which a row fills tiles of its own.
_TILE_ROWS = 64
# The name of the row that contracts a whole pool, its unread rows included.
WHOLE_POOL = "whole pool, then take"
# The names of the functions of `PoolKernels`; the kernel modules put a prefix before them.
POOL_FUNCTIONS = ("scores", "query_gradient", "pool_gradient", "gradients")


@dataclasses.dataclass(frozen=True, slots=True)
class PoolKernels:
    """One way to compute pooled dots and their gradients; `planner.kernels.gathered_dot` has the contracts.

    Attributes:
        scores, query_gradient, pool_gradient, gradients: the kernels.
        work: what they do.
        guarded_scratch: as in `Implementation`, and so is the next.
        launches: how many operators a pooled dot launches at least.
        sorts: whether gradients of the pool use the sorted order that the steps of a call share. Then all kernels are
            given index arrays in range.
        marks: whether gradients are NaN where an index is bad, see `IndexArray.bad`, as scores are.
    """

    scores: Callable[..., Any]
    query_gradient: Callable[..., Any]
    pool_gradient: Callable[..., Any]
    gradients: Callable[..., Any]
    work: WorkOf
    guarded_scratch: Callable[[Op, bool], int] = lambda op, drops: 0
    launches: int = 1
    sorts: bool = False
    marks: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """A framework's kernels over flat operands; see `planner.kernels.grouped_matmul.torch_grouped` for the contracts.

    Attributes:
        ops: the framework's array functions.
        group_rows: from an index array and the number of groups to the sorted order.
        matmul: from (a, c, groups, source, target, targets) to the products of the rows.
        outer: from (a, b, groups, size, source_a, source_b) to the sums of the groups.
        gradients: from (gradient, a, c, groups) to both gradients of `matmul`.
        grouped_work: what these three do.
        pools: ways to compute pooled dots, by the name of their row.
        label: the end of the names of the grouped rows.
        kinds: kinds of device that the kernels run on; None for all.
        capabilities: compute capabilities of cards that they run on, times ten; None for all.
        any_sizes: see `planner.program.calls.PreparedRun`.
        refuses: returns why they cannot run a step, for a reason other than its form.
        launches: how many operators a grouped product launches at least; `PoolKernels` says it of pooled dots.
        chosen: from (a, c, index, source) to the products of rows that are large enough to need no sorted order; None
            if there is no such kernel.
        turns: whether `matmul` and `gradients` take matrices whose columns come before their rows, with `turned=True`.
        add: adds up products of rows that share a row of the result: from (products, dimensions, dtype) to sums in this
            dtype. Then `matmul` takes no target, and `wide=True` for products of half types in float32. None if
            `matmul` adds them up.
        keep: from (sorted order, key, function) to what the function makes. The order of a prepared index keeps the
            result.
    """

    ops: ArrayOps
    group_rows: Callable[[Any, int], Any]
    matmul: Callable[..., Any]
    outer: Callable[..., Any]
    gradients: Callable[..., Any]
    grouped_work: WorkOf
    pools: dict[str, PoolKernels]
    kinds: tuple[str, ...] | None = None
    capabilities: tuple[int, ...] | None = None
    any_sizes: bool = False
    refuses: Callable[[Op], str | None] = lambda op: None
    label: str = ""
    launches: int = 1
    chosen: Callable[..., Any] | None = None
    turns: bool = False
    add: Callable[[Any, Sequence[int], str], Any] | None = None
    keep: Callable[[Any, tuple[Any, ...], Callable[[], Any]], Any] = lambda order, key, make: make()

    def flat(self, x: Any, term: Term, groups: Groups) -> Any:
        """Permute an operand into groups of axes, and flatten each group into one dimension."""
        dims = [term.index(entry) for group in groups for entry in group]
        shape = [math.prod(x.shape[term.index(entry)] for entry in group) for group in groups]
        return self.ops.permute(x, dims).reshape(shape)

    def flats(self, inputs: Sequence[Any], views: Sequence[View | None]) -> list[Any]:
        """Flatten all inputs as the kernel sees them. No view stands for an input that is flat already."""
        if not views:
            return list(inputs)
        return [x if view is None else self.flat(x, *view) for x, view in zip(inputs, views, strict=True)]

    def unflats(self, results: Sequence[Any], views: Sequence[View | None], spec: Spec, index: Any) -> tuple[Any, ...]:
        """Give flat results the axes and the order of their terms: the inverse of `flats`."""
        if not views:
            return tuple(results)
        shaped_results = []
        for x, view in zip(results, views, strict=True):
            if view is None:
                shaped_results.append(x)
                continue
            term, groups = view
            order = [entry for group in groups for entry in group]
            shaped = x.reshape(shape_in(index, spec, tuple(order)))
            shaped_results.append(self.ops.permute(shaped, [order.index(entry) for entry in term]))
        return tuple(shaped_results)

    def row_map(self, gather: Gather, rows: Sequence[str], spec: Spec, like: Any, index: Any) -> Any:
        """Return each row's flat position over some of the row axes; None if these are all of them."""
        if tuple(rows) == gather.axes:
            return None
        sizes, dims = shape_in(index, spec, gather.axes), tuple([gather.axes.index(axis) for axis in rows])
        make = partial(self._positions, sizes, dims, like)
        return self.keep(index.orders.get(gather), ("positions", sizes, dims), make)

    def _positions(self, sizes: Sequence[int], dims: Sequence[int], like: Any) -> Any:
        """Return the flat position of each element of an array over some of its dimensions, in rising order."""
        position: Any = 0
        for dim in dims:
            shape = [1] * len(sizes)
            shape[dim] = sizes[dim]
            position = position * sizes[dim] + self.ops.iota(sizes[dim], like).reshape(shape)
        if not dims:
            position = self.ops.iota(1, like).reshape([1] * len(sizes))
        return self.ops.expand(position, sizes).reshape(-1)

    def groups(self, gather: Gather, spec: Spec, index: RangedIndices) -> Any:
        """Return the sorted order of an index array. It is made once per call."""
        order = index.orders.get(gather)
        if order is None:
            given, size = index.given.get(gather), size_in(index, spec, gather)
            if given is not None and given.sort is not None and gather not in index:
                order = given.sort(size)
            else:
                order = self.group_rows(index[gather].reshape(-1), size)
            index.orders[gather] = order
        return order


def is_chosen(form: GroupedForm) -> bool:
    """Whether each row of a grouped matmul fills tiles of its own, so that rows need no order: see `Kernels.chosen`."""
    return not form.outer and form.targets is None and form.sizes[1] >= _TILE_ROWS


def is_turned(op: Op, form: Form) -> bool:
    """Whether the matrices of a grouped product have their columns before their rows in memory."""
    if isinstance(form, PooledForm):
        return False
    spec, term = op.spec, op.spec.terms[2 if form.outer else form.matrix]
    lies, straight, turned = (
        [entry for entry in entries if entry in spec.wide]
        for entries in (term, (form.gather, *form.left, *form.right), (form.gather, *form.right, *form.left))
    )
    return lies == turned != straight


def has_turned_rows(op: Op, form: GroupedForm) -> bool:
    """Whether the columns of some rows of a grouped product may come before their own rows in memory.

    The gradient of the result may be row-major, however a plan expects it to lie.
    """
    given, _ = views_of(op, form)
    for (term, (rows, inner, last)), layout in zip(given, op.layouts or (None,) * len(given), strict=True):
        row_major, lies, straight, turned = (
            [entry for entry in entries if entry in op.spec.wide]
            for entries in (term, in_memory(term, layout), (*rows, *inner, *last), (*rows, *last, *inner))
        )
        if rows != (form.gather,) and turned in (lies, row_major) and turned != straight:
            return True
    return False


def views_of(op: Op, form: Form, turned: bool = False) -> tuple[Views, Views]:
    """Return how a kernel sees the inputs, and how it sees the results.

    Args:
        op: the step.
        form: its axes by group.
        turned: whether the kernel sees matrices with their columns before their rows, see `Kernels.turns`.
    """
    if isinstance(form, GroupedForm):
        rows: Groups = (form.rows_a, form.inner, form.left)
        others: Groups = (form.rows_b, form.inner, form.right)
        matrix: Groups = ((form.gather,), form.left, form.right)
        if turned:
            matrix = ((form.gather,), form.right, form.left)
        if form.outer:
            groups_of = (rows, others, matrix)
        else:
            groups_of = (rows, matrix, others) if form.matrix == 1 else (matrix, rows, others)
    else:
        by_place: dict[int, Groups] = {
            form.scores: (form.batch, form.queries, form.chosen),
            form.place: (form.batch, (form.gather,), form.depth),
            3 - form.place - form.scores: (form.batch, form.queries, form.depth),
        }
        groups_of = (by_place[0], by_place[1], by_place[2])
    *given, result = zip(op.spec.terms, groups_of, strict=True)
    return ([result, *given], given) if isinstance(op, JointGradient) else (given, [result])


def _without_flat(views: Views) -> list[View | None]:
    """Return views, with None for those of arrays that the kernel takes as they are; [] if it takes all as they are."""
    found: list[View | None] = []
    for term, groups in views:
        is_flat = all(len(group) == 1 for group in groups) and term == tuple(group[0] for group in groups)
        found.append(None if is_flat else (term, groups))
    return found if any(found) else []


def pool_function(op: Op, form: PooledForm) -> Literal["scores", "query_gradient", "pool_gradient", "gradients"]:
    """Return what a step of pooled dots computes, as `PoolKernels` names it."""
    return "gradients" if isinstance(op, JointGradient) else form.function


@cached_by_step
def flattened_bytes(op: Op, form: Form) -> int:
    """Return the bytes of the inputs and index arrays that are copied to be flattened for the kernels."""
    spec, size = op.spec, itemsize(op.dtype)
    given, _ = views_of(op, form)
    # Kernels take rows one by one, whatever their strides. They are priced like matrices, which may be too much.
    copied = size * sum(
        matrix_copies(term, layout, groups, spec)
        for (term, groups), layout in zip(given, op.layouts or (None,) * len(given), strict=True)
    )
    if isinstance(form, PooledForm):
        axes = form.gather.axes
        if not flattens(axes, None, (form.batch, form.queries, form.chosen), spec):
            copied += 8 * math.prod(spec.shape(axes))
    return copied


def _layouts(op: Op, form: Form) -> tuple[Layout | None, ...]:
    """Return the layouts in memory of a kernel's results."""
    layouts = []
    for term, groups in views_of(op, form)[1]:
        order = [entry for group in groups for entry in group]
        layouts.append(reordered(order, term, op.spec))
    return tuple(layouts)


def kernel_rows(kernels: Kernels, strided: bool = False) -> list[Implementation]:
    """Return the rows of a backend's table that run its kernels.

    Args:
        kernels: the kernels.
        strided: whether arrays have strides, so that results have layouts.
    """

    def row(
        name: str, find: Callable[[Op], Form | str], launches: int, work: WorkOf, run: Callable[..., Any], **fields: Any
    ) -> Implementation:
        return form_row(
            name,
            find,
            work,
            partial(run, kernels),
            _layouts if strided else None,
            lambda op: "frameworks add up no booleans" if op.dtype == "bool" else kernels.refuses(op),
            any_sizes=kernels.any_sizes,
            kinds=kernels.kinds,
            capabilities=kernels.capabilities,
            brackets=1,
            launches=launches,
            least=lambda op, device: StepCost(picoseconds=int(launches * device.launch_seconds * 1e12)),
            **fields,
        )

    def grouped(name: str, pair: bool = False, outer: bool = False) -> Implementation:
        find = partial(_find_grouped, pair, outer)

        def prepare(op: Op) -> Run:
            form = find(op)
            assert isinstance(form, GroupedForm), form
            turned = kernels.turns and is_turned(op, form)
            return partial(_run_grouped, kernels, op, form, turned, *map(_without_flat, views_of(op, form, turned)))

        def run_step(kernels: Kernels, op: Op, form: GroupedForm, inputs: Sequence[Any], index: Any) -> Any:
            return prepare(op)(inputs, index)

        made = row(name + kernels.label, find, kernels.launches, kernels.grouped_work, run_step)
        return dataclasses.replace(made, run=PreparedRun(prepare, kernels.any_sizes))

    def pooled(name: str, pool: PoolKernels) -> Implementation:
        run, scratch = partial(_run_pooled, pool), pool.guarded_scratch
        return row(name, _find_pooled, pool.launches, pool.work, run, guarded_scratch=scratch)

    return [
        grouped("grouped matmul"),
        grouped("grouped outer", outer=True),
        grouped("both grouped gradients", pair=True),
        *(pooled(name, pool) for name, pool in kernels.pools.items()),
    ]


def _find_grouped(pair: bool, outer: bool, op: Op) -> GroupedForm | str:
    """Return the form of a grouped product of the wanted kind, or why a step is none."""
    if isinstance(op, Cast) or len(op.spec.inputs) != 2 or isinstance(op, JointGradient) != pair:
        return "the step is of another kind"
    form = grouped_form(op.spec)
    if not isinstance(form, GroupedForm):
        return form
    if len(set(form.gather.axes)) < len(form.gather.axes):
        return "an axis repeats in the bracket"
    if form.outer != outer:
        return "the gathered dimension is in another term"
    return "rows are shared or summed" if pair and form.maps else form


def _run_grouped(
    kernels: Kernels,
    op: Op,
    form: GroupedForm,
    turned: bool,
    given: Sequence[View | None],
    results: Sequence[View | None],
    inputs: Sequence[Any],
    index: Any,
) -> tuple[Any, ...]:
    flats = kernels.flats(inputs, given)
    groups = partial(kernels.groups, form.gather, op.spec, index)
    options = {"turned": True} if turned else {}
    if isinstance(op, JointGradient):
        gradient, *operands = flats
        pair = kernels.gradients(gradient, operands[1 - form.matrix], operands[form.matrix], groups(), **options)
        return kernels.unflats(pair if form.matrix == 1 else pair[::-1], results, op.spec, index)
    a, c = flats if form.matrix == 1 or form.outer else flats[::-1]
    source = kernels.row_map(form.gather, form.rows_a, op.spec, a, index)
    if form.targets is not None and kernels.add is not None:
        rows = kernels.matmul(a, c, groups(), source, None, None, wide=True, **options)
        dims = [dim for dim, axis in enumerate(form.gather.axes) if axis not in form.rows_b]
        shaped = rows.reshape(*shape_in(index, op.spec, form.gather.axes), *rows.shape[1:])
        return kernels.unflats([kernels.add(shaped, dims, op.dtype)], results, op.spec, index)
    target = kernels.row_map(form.gather, form.rows_b, op.spec, a, index)
    if form.outer:
        first, second = ((c, target), (a, source)) if turned else ((a, source), (c, target))
        size = size_in(index, op.spec, form.gather)
        out = kernels.outer(first[0], second[0], groups(), size, first[1], second[1])
    elif kernels.chosen is not None and is_chosen(form) and not turned:
        out = kernels.chosen(a, c, index[form.gather].reshape(-1), source)
    else:
        targets = None if form.targets is None else math.prod(shape_in(index, op.spec, form.rows_b))
        out = kernels.matmul(a, c, groups(), source, target, targets, **options)
    return kernels.unflats([out], results, op.spec, index)


def _find_pooled(op: Op) -> PooledForm | str:
    """Return the form of a pooled dot, or why a step is none."""
    if isinstance(op, Cast) or len(op.spec.inputs) != 2:
        return "the step is of another kind"
    form = pooled_form(op.spec)
    if isinstance(op, JointGradient) and isinstance(form, PooledForm) and form.function != "scores":
        return "the step is a gradient itself"
    return form


def _run_pooled(
    pool: PoolKernels, kernels: Kernels, op: Op, form: PooledForm, inputs: Sequence[Any], index: Any
) -> tuple[Any, ...]:
    given, results = views_of(op, form)
    query_place = 3 - form.place - form.scores
    given_keys = None if pool.sorts else index.given.get(form.gather)
    keys = given_keys or IndexArray(index[form.gather], may_drop=index.may_drop)
    flat = kernels.flat(keys.values, form.gather.axes, (form.batch, form.queries, form.chosen))
    # The order knows keys by their places in the index array.
    groups = partial(kernels.groups, form.gather, op.spec, index) if pool.sorts and form.keys_in_order else None
    keys = dataclasses.replace(keys, values=flat, groups=groups)
    function = pool_function(op, form)
    # The place of each input's term. In a joint gradient the output gradient comes first, in the place of the scores.
    places = (2, 0, 1) if function == "gradients" else (0, 1)
    flats = dict(zip(places, kernels.flats(inputs, given), strict=True))
    operands = [flats[place] for place in (form.scores, query_place, form.place) if place in flats]
    if function == "scores" or pool.marks:
        index.shown = keys.bad is not None
    size = [size_in(index, op.spec, form.gather)] if function == "pool_gradient" else []
    found = getattr(pool, function)(*operands, keys, *size)
    flat_results = [found] if function != "gradients" else found if query_place == 0 else found[::-1]
    return kernels.unflats(flat_results, results, op.spec, index)
