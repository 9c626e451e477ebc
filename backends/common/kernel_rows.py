"""The rows of a table that run grouped and pooled kernels.

A row flattens each group of axes into one dimension, calls the kernel, and restores the axes of the result. Torch and
JAX share the rows; each backend gives its kernels, `Kernels`, and their costs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from planner.backends.common.stock import ArrayOps
from planner.backends.common.stock_layout import matrix_copies
from planner.cost.device import Device
from planner.cost.figures import StepCost
from planner.cost.layout import Layout, flattens, reordered
from planner.kernels.grouping.keys import IndexArray
from planner.language.dtypes import itemsize
from planner.language.spec import Gather, Spec, Term
from planner.program.forms import GroupedForm, PooledForm, grouped_form, pooled_form
from planner.program.implementations import Implementation, RangedIndices
from planner.program.ops import Cast, JointGradient, Op

__all__ = ["POOL_FUNCTIONS", "WHOLE_POOL", "CostOf", "Kernels", "PoolKernels", "Refusal", "flattened_bytes",
           "group_sizes", "kernel_rows", "views_of"]  # fmt: skip

Groups = Sequence[Sequence[str | Gather]]
# Terms of arrays, each with the groups of axes that are one dimension each to the kernel.
Views = Sequence[tuple[Term, Groups]]
CostOf = Callable[[Op, Device], StepCost]
Refusal = Callable[[Op], str | None]


# The name of the row that contracts a whole pool, its unread rows included.
WHOLE_POOL = "whole pool, then take"
# The names of the functions of `PoolKernels`; the kernel modules put a prefix before them.
POOL_FUNCTIONS = ("scores", "query_gradient", "pool_gradient", "gradients")


def as_given(x: Any) -> Any:
    """Return x."""
    return x


def takes_all(op: Op) -> str | None:
    """Refuse no step."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolKernels:
    """One way to compute pooled dots and their gradients; `planner.kernels.gathered_dot` has the contracts."""

    scores: Callable[..., Any]
    query_gradient: Callable[..., Any]
    pool_gradient: Callable[..., Any]
    gradients: Callable[..., Any]
    cost: CostOf


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """A framework's kernels over flat operands; see `planner.kernels.grouped_matmul.torch_grouped` for the contracts.

    Attributes:
        ops: the framework's array functions.
        group_rows: from an index array and the number of groups to the sorted order.
        matmul: from (a, c, groups, source, target, targets) to the products of the rows.
        outer: from (a, b, groups, size, source_a, source_b) to the sums of the groups.
        gradients: from (gradient, a, c, groups) to both gradients of `matmul`.
        grouped_cost: the cost of these three.
        pools: ways to compute pooled dots, by the name of their row.
        label: the end of the names of the grouped rows.
        kinds: kinds of device that the kernels run on; None for all.
        capabilities: compute capabilities of cards that they run on, times ten; None for all.
        refuses: returns why they cannot run a step, for a reason other than its form.
        hand_over: a function that is applied to operands before gradient kernels; in torch it conjugates them.
    """

    ops: ArrayOps
    group_rows: Callable[[Any, int], Any]
    matmul: Callable[..., Any]
    outer: Callable[..., Any]
    gradients: Callable[..., Any]
    grouped_cost: CostOf
    pools: dict[str, PoolKernels]
    hand_over: Callable[[Any], Any] = as_given
    kinds: tuple[str, ...] | None = None
    capabilities: tuple[int, ...] | None = None
    refuses: Refusal = takes_all
    label: str = ""

    def flat(self, x: Any, term: Term, groups: Groups) -> Any:
        """Permute an operand into groups of axes, and flatten each group into one dimension."""
        dims = [term.index(entry) for group in groups for entry in group]
        shape = [math.prod(x.shape[term.index(entry)] for entry in group) for group in groups]
        return self.ops.permute(x, dims).reshape(shape)

    def flats(self, inputs: Sequence[Any], views: Views) -> list[Any]:
        """Flatten all inputs as the kernel sees them."""
        return [self.flat(x, term, groups) for x, (term, groups) in zip(inputs, views, strict=True)]

    def unflats(self, results: Sequence[Any], views: Views, spec: Spec) -> tuple[Any, ...]:
        """Give flat results the axes and the order of their terms: the inverse of `flats`."""
        shaped_results = []
        for x, (term, groups) in zip(results, views, strict=True):
            order = [entry for group in groups for entry in group]
            shaped = x.reshape(spec.shape(tuple(order)))
            shaped_results.append(self.ops.permute(shaped, [order.index(entry) for entry in term]))
        return tuple(shaped_results)

    def row_map(self, gather: Gather, rows: Sequence[str], spec: Spec, like: Any) -> Any:
        """Return each row's flat position over some of the row axes; None if these are all of them."""
        if tuple(rows) == gather.axes:
            return None
        sizes = dict(spec.sizes)
        position: Any = 0
        for dim, axis in enumerate(gather.axes):
            if axis in rows:
                shape = [1] * len(gather.axes)
                shape[dim] = sizes[axis]
                position = position * sizes[axis] + self.ops.iota(sizes[axis], like).reshape(shape)
        if not rows:
            position = self.ops.iota(1, like).reshape([1] * len(gather.axes))
        return self.ops.expand(position, [sizes[axis] for axis in gather.axes]).reshape(-1)

    def groups(self, gather: Gather, index: RangedIndices) -> Any:
        """Return the sorted order of an index array. It is made once per call."""
        order = index.orders.get(gather)
        if order is None:
            order = index.orders[gather] = self.group_rows(index[gather].reshape(-1), gather.size or 0)
        return order


def group_sizes(spec: Spec, *groups: Sequence[str]) -> tuple[int, ...]:
    """Return the size of each group of axes."""
    sizes = dict(spec.sizes)
    return tuple(math.prod(sizes[axis] for axis in group) for group in groups)


def views_of(op: Op, form: GroupedForm | PooledForm) -> tuple[Views, Views]:
    """Return how a kernel sees the inputs, and how it sees the results."""
    if isinstance(form, GroupedForm):
        rows: Groups = (form.rows_a, form.inner, form.left)
        matrix: Groups = ((form.gather,), form.left, form.right)
        if form.outer:
            others: tuple[Groups, Groups] = (rows, (form.rows_b, form.inner, form.right))
            out = matrix
        else:
            others = (rows, matrix) if form.matrix == 1 else (matrix, rows)
            out = (form.rows_out, form.inner, form.right)
        groups_of = (*others, out)
    else:
        by_place: dict[int, Groups] = {
            form.scores: (form.batch, form.queries, form.chosen),
            form.place: (form.batch, (form.gather,), form.depth),
            3 - form.place - form.scores: (form.batch, form.queries, form.depth),
        }
        groups_of = (by_place[0], by_place[1], by_place[2])
    *given, result = zip(op.spec.terms, groups_of, strict=True)
    return ([result, *given], given) if isinstance(op, JointGradient) else (given, [result])


def flattened_bytes(op: Op, form: GroupedForm | PooledForm) -> int:
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


def _layouts(find: Callable[[Spec], GroupedForm | PooledForm | str], op: Op) -> tuple[Layout | None, ...]:
    """Return the layouts in memory of a kernel's results."""
    form = find(op.spec)
    assert isinstance(form, (GroupedForm, PooledForm))
    _, results = views_of(op, form)
    layouts = []
    for term, groups in results:
        order = [entry for group in groups for entry in group]
        layouts.append(reordered(order, term, op.spec))
    return tuple(layouts)


def kernel_rows(kernels: Kernels, strided: bool = False) -> list[Implementation]:
    """Return the rows of a backend's table that run its kernels.

    Args:
        kernels: the kernels.
        strided: whether arrays have strides, so that results have layouts.
    """
    grouped, pooled = (partial(_layouts, find) if strided else None for find in (grouped_form, pooled_form))

    def row(name: str, refuses: Refusal, cost: CostOf, run: Any, layouts: Any = grouped) -> Implementation:
        return Implementation(
            name,
            lambda op: refuses(op) or kernels.refuses(op),
            cost,
            partial(run, kernels),
            kinds=kernels.kinds,
            capabilities=kernels.capabilities,
            layouts=layouts,
        )

    cost, label = kernels.grouped_cost, kernels.label
    rows = [
        row("grouped matmul" + label, partial(_not_grouped, False, False), cost, _run_matmul),
        row("grouped outer" + label, partial(_not_grouped, False, True), cost, _run_outer),
        row("both grouped gradients" + label, partial(_not_grouped, True, False), cost, _run_pair),
    ]
    for name, pool in kernels.pools.items():
        rows.append(row(name, _not_pooled, pool.cost, partial(_run_pooled, pool), pooled))
    return rows


def _not_grouped(pair: bool, outer: bool, op: Op) -> str | None:
    """Return why a step is not a grouped product of the wanted kind, or None if it is one."""
    if isinstance(op, Cast) or len(op.spec.inputs) != 2 or isinstance(op, JointGradient) != pair:
        return "the step is of another kind"
    form = grouped_form(op.spec)
    if not isinstance(form, GroupedForm):
        return form
    if len(set(form.gather.axes)) < len(form.gather.axes):
        return "an axis repeats in the bracket"
    if form.outer != outer:
        return "the gathered dimension is in another term"
    if pair and (form.rows_out != form.gather.axes or form.rows_a != form.gather.axes):
        return "rows are shared or summed"
    return None


def _run_matmul(kernels: Kernels, op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    spec, form = op.spec, grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    given, results = views_of(op, form)
    flats = kernels.flats(inputs, given)
    a, c = flats[1 - form.matrix], flats[form.matrix]
    source = kernels.row_map(form.gather, form.rows_a, spec, a)
    target = kernels.row_map(form.gather, form.rows_out, spec, a)
    targets = None if target is None else group_sizes(spec, form.rows_out)[0]
    out = kernels.matmul(a, c, kernels.groups(form.gather, index), source, target, targets)
    return kernels.unflats([out], results, spec)


def _run_outer(kernels: Kernels, op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    spec, form = op.spec, grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    given, results = views_of(op, form)
    a, b = kernels.flats(inputs, given)
    sources = (kernels.row_map(form.gather, rows, spec, a) for rows in (form.rows_a, form.rows_b))
    out = kernels.outer(a, b, kernels.groups(form.gather, index), form.gather.size, *sources)
    return kernels.unflats([out], results, spec)


def _run_pair(kernels: Kernels, op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    given, results = views_of(op, form)
    gradient, *operands = kernels.flats([inputs[0], *map(kernels.hand_over, inputs[1:])], given)
    a, c = operands[1 - form.matrix], operands[form.matrix]
    gradients = kernels.gradients(gradient, a, c, kernels.groups(form.gather, index))
    return kernels.unflats(gradients if form.matrix == 1 else gradients[::-1], results, op.spec)


def _not_pooled(op: Op) -> str | None:
    """Return why a step is not a pooled dot, or None if it is one."""
    if isinstance(op, Cast) or len(op.spec.inputs) != 2:
        return "the step is of another kind"
    form = pooled_form(op.spec)
    if not isinstance(form, PooledForm):
        return form
    if isinstance(op, JointGradient) and (form.place == 2 or form.scores != 2):
        return "the step is a gradient itself"
    return None


def _run_pooled(pool: PoolKernels, kernels: Kernels, op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    spec, form = op.spec, pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    given, results = views_of(op, form)
    query_place = 3 - form.place - form.scores
    keys = index.given.get(form.gather) or IndexArray(index[form.gather], may_drop=index.may_drop)
    flat = kernels.flat(keys.values, form.gather.axes, (form.batch, form.queries, form.chosen))
    keys = dataclasses.replace(keys, values=flat)
    # The place of each input's term. In a joint gradient the output gradient comes first, in the place of the scores.
    places = (2, 0, 1) if isinstance(op, JointGradient) else (0, 1)
    differentiates = isinstance(op, JointGradient) or form.scores != 2
    handed = [
        kernels.hand_over(x) if differentiates and place != form.scores else x
        for place, x in zip(places, inputs, strict=True)
    ]
    flats = dict(zip(places, kernels.flats(handed, given), strict=True))
    flat_results: Sequence[Any]
    if isinstance(op, JointGradient):
        flat_results = pool.gradients(flats[form.scores], flats[query_place], flats[form.place], keys)
        flat_results = flat_results if query_place == 0 else flat_results[::-1]
    elif form.scores == 2:
        index.shown = keys.bad is not None
        flat_results = [pool.scores(flats[query_place], flats[form.place], keys)]
    elif form.place == 2:
        flat_results = [pool.pool_gradient(flats[form.scores], flats[query_place], keys, form.gather.size)]
    else:
        flat_results = [pool.query_gradient(flats[form.scores], flats[form.place], keys)]
    return kernels.unflats(flat_results, results, spec)
