"""Products in the form that XLA multiplies fastest, and how many elements XLA copies for products and sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from planner.backends.common.stock import Product
from planner.kernels.grouping.jax_grouping import accumulator
from planner.language.cached import cached_by_step
from planner.language.spec import Spec, Term, indexed_dims, plain_axes, term_axes, term_gathers
from planner.program.forms import inner_product, product_form

__all__ = ["ProductCopies", "as_matrices", "count_copied", "count_reordered"]

# If more elements than this stay neighbours in a copy into another order, the copy of one element takes less time than
# a copy one by one, by their number divided by this.
_TOGETHER = 64


class _Groups(NamedTuple):
    """The axes of a product by group, without those of size 1, in the orders for which XLA copies least."""

    batch: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]
    contracted: tuple[str, ...]

    def of(self, place: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the two groups, besides the batch, of an operand (place 0 or 1) or of the result (place 2)."""
        return ((self.left, self.contracted), (self.contracted, self.right), (self.left, self.right))[place]


@cached_by_step
def _groups(spec: Spec) -> tuple[_Groups, tuple[int, ...]]:
    """Return the groups of axes of a product, and the places of the terms that XLA then copies (2 is the result).

    XLA copies a term unless it has the batch first and then both of its groups, in either order. It also copies a
    result that has a dimension of size 1 behind a larger one.
    """
    form, sizes, terms = product_form(spec), spec.by_axis, [_wide_axes(term, spec) for term in spec.terms]
    assert form is not None

    def orders(group: tuple[str, ...], places: tuple[int, ...]) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(tuple(e for e in terms[place] if e in group) for place in places))

    def copied_places(groups: _Groups) -> tuple[int, ...]:
        places = []
        for place, term in enumerate(terms):
            first, second = groups.of(place)
            narrow = [spec.size(e) == 1 for e in spec.terms[place]]
            inside = place == 2 and narrow != sorted(narrow, reverse=True)
            whole = ((*groups.batch, *first, *second), (*groups.batch, *second, *first))
            if inside or term not in whole:
                places.append(place)
        return tuple(places)

    def copied_elements(pair: tuple[_Groups, tuple[int, ...]]) -> int:
        return sum(math.prod(sizes[e] for e in terms[place]) for place in pair[1])

    choices = itertools.product(
        orders(form.batch, (2, 0, 1)),
        orders(form.left, (2, 0)),
        orders(form.right, (2, 1)),
        orders(form.contracted, (0, 1)),
    )
    return min(((groups, copied_places(groups)) for groups in itertools.starmap(_Groups, choices)), key=copied_elements)


def _wide_axes(term: Term, spec: Spec) -> tuple[str, ...]:
    return tuple(str(e) for e in term if spec.size(e) != 1)


@cached_by_step
def as_matrices(spec: Spec) -> Product:
    """Return the function that multiplies two operands as batches of matrices.

    XLA would copy the operands of products of more dimensions.
    """
    (groups, _), sizes = _groups(spec), spec.by_axis
    *terms, out = (_wide_axes(term, spec) for term in spec.terms)

    def make_view(place: int) -> tuple[Callable[[Any], Any], list[tuple[str, ...]]]:
        """Return the function that views an operand with one dimension for each of its groups, and the groups."""
        first, second = groups.of(place)
        order = [groups.batch, first, second]
        if terms[place] == (*groups.batch, *second, *first):
            order = [groups.batch, second, first]
        order = [group for group in order if group]
        whole = [sizes[e] for e in terms[place]]
        dims = [terms[place].index(e) for group in order for e in group]
        shape = [math.prod(sizes[e] for e in group) for group in order]
        return lambda x: jnp.transpose(x.reshape(whole), dims).reshape(shape), order

    (first, groups_a), (second, groups_b) = make_view(0), make_view(1)

    def both(group: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the dimension of a group in each factor."""
        x, y = ((order.index(group),) if group else () for order in factors)
        return x, y

    # `dot_general` returns the axes of the first factor before those of the second.
    swapped = out == (*groups.batch, *groups.right, *groups.left)
    factors = (groups_b, groups_a) if swapped else (groups_a, groups_b)
    numbers = (both(groups.contracted), both(groups.batch))
    rows, columns = (groups.right, groups.left) if swapped else (groups.left, groups.right)
    product_axes = (*groups.batch, *rows, *columns)
    back = [product_axes.index(e) for e in out]
    whole, shape = [sizes[e] for e in product_axes], spec.output_shape

    def product(a: Any, b: Any) -> Any:
        x, y = (second(b), first(a)) if swapped else (first(a), second(b))
        result = lax.dot_general(x, y, numbers, preferred_element_type=accumulator(a.dtype)).astype(a.dtype)
        return jnp.transpose(result.reshape(whole), back).reshape(shape)

    return product


class ProductCopies(NamedTuple):
    """What XLA copies for a product, in elements.

    Attributes:
        elements: copied elements of operands and result.
        apart: how many of them are copied one by one or few at a time, which is slow.
        reused: how many are copied into the memory of the result, which is written last.
    """

    elements: int
    apart: float
    reused: int


@cached_by_step
def count_reordered(spec: Spec) -> ProductCopies:
    """Return what XLA copies for a product.

    XLA copies an operand or a result whose batch axes are not in front, or whose row or column axes are not side by
    side. It also copies a result that has a dimension of size 1 behind a larger one, because it multiplies without
    dimensions of size 1.
    """
    (groups, places), sizes = _groups(spec), spec.by_axis
    copied, apart = {}, 0.0
    for place in places:
        first, second = groups.of(place)
        order = _wide_axes(spec.terms[place], spec)
        orders = ((*groups.batch, *first, *second), (*groups.batch, *second, *first))
        copied[place] = math.prod(spec.shape(spec.terms[place]))
        if order not in orders:
            apart += copied[place] * min(1.0, _TOGETHER / max(1, *(_together(order, other, sizes) for other in orders)))
    if not groups.batch and not (groups.left and groups.right):
        for place in range(3):  # a vector of several dimensions is copied
            alone = not all(groups.of(place)) and (groups.left or groups.right)
            if alone and len(_wide_axes(spec.terms[place], spec)) > 1:
                copied.setdefault(place, math.prod(spec.shape(spec.terms[place])))
    result = copied.get(2, 0)
    reused = max((n for place, n in copied.items() if place != 2 and n <= result), default=0)
    return ProductCopies(sum(copied.values()), apart, reused)


@cached_by_step
def count_copied(spec: Spec) -> int:
    """Return how many elements XLA copies for a sum, a segment sum, a diagonal or a product of what is taken."""
    before = _of_product(spec) if len(spec.inputs) == 2 else _of_operand(spec)
    out = spec.output
    indexed = tuple(out[d] for d in indexed_dims(out))
    if indexed:  # written row by row, each a slice of the remaining axes
        first = (*indexed, *(e for e in out if e not in indexed))
        copied = not _same_order(first, out, spec)
    else:
        term = spec.inputs[0]
        summed = len(spec.inputs) == 1 and not set(term) <= set(out) and not term_gathers(term)
        copied = summed and not _same_order(
            tuple(e for e in term if e in out), tuple(e for e in out if e in term), spec
        )
    return before + copied * math.prod(spec.output_shape)


def _of_operand(spec: Spec) -> int:
    """Return how many elements are copied of a single operand: diagonals that are summed, or rows that are added up."""
    (term,), out = spec.inputs, spec.output
    if term_gathers(term):
        return 0
    if len(set(term)) < len(term):
        return 0 if set(term) <= set(out) else math.prod(spec.shape(tuple(dict.fromkeys(term))))
    gathers = term_gathers(out)
    if not gathers:
        return 0
    wanted = dict.fromkeys((*term_axes(gathers), *plain_axes(out)))
    if any(e not in term and spec.size(e) != 1 for e in wanted):  # repeated along an axis that it lacks
        return math.prod(spec.shape(tuple(wanted)))
    order = tuple(e for e in wanted if e in term)
    return 0 if _same_order(tuple(e for e in term if e in order), order, spec) else math.prod(spec.shape(term))


def _of_product(spec: Spec) -> int:
    """Return how many elements are copied for a product with a take before it or a segment sum after it."""
    if not spec.gathers:
        return 0
    inner = _inner(spec)
    form = product_form(inner)
    if form is None or not form.contracted:
        return 0
    # A take writes its result in the order that the product needs, and a product in the order of the segment sum.
    plain = [not term_gathers(term) for term in spec.terms]
    copied = {p: math.prod(inner.shape(inner.terms[p])) for p in _groups(inner)[1] if plain[p]}
    result = copied.get(2, 0)
    return sum(copied.values()) - max((n for place, n in copied.items() if place != 2 and n <= result), default=0)


def fused_takes(spec: Spec) -> int:
    """Return how many of the elements that a product takes are never in memory.

    XLA takes elements and sums axes that only one operand has in one loop. A product without a sum joins that loop.
    """
    fused = 0
    inner = _inner(spec)
    form = product_form(inner)
    for term, kept in zip(spec.inputs, inner.inputs, strict=True):
        if term_gathers(term):
            taken, left = (math.prod(spec.shape(axes)) for axes in (term_axes(term), kept))
            whole = left == taken and form is not None and not form.contracted
            fused += taken if whole else taken - left
    return fused


def _inner(spec: Spec) -> Spec:
    """Return the spec of the product that is left after takes, and after sums over axes that only one input has."""
    kept = []
    for number, term in enumerate(spec.inputs):
        others = {axis for place, other in enumerate(spec.terms) if place != number for axis in term_axes(other)}
        kept.append(tuple(axis for axis in term_axes(term) if axis in others))
    return inner_product(spec, kept)


def _same_order(one: Term, other: Term, spec: Spec) -> bool:
    return [e for e in one if spec.size(e) != 1] == [e for e in other if spec.size(e) != 1]


def _together(order: Sequence[str], other: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return how many elements stay neighbours when axes are reordered: those of the last axes that agree."""
    together = 1
    for axis, same in zip(reversed(order), reversed(other), strict=True):
        if axis != same:
            break
        together *= sizes[axis]
    return together
