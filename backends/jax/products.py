"""Products as XLA is handed them, and what it copies of them and of sums into another order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from planner.backends.common.stock import Product
from planner.language.spec import Gather, Spec, Term, term_axes
from planner.program.forms import inner_product, product_form

__all__ = ["Reordered", "as_matrices", "rearranged", "reordered", "wide"]

# Where more than these many elements stay neighbours, a copy into another order takes so many times less than one by
# one.
_TOGETHER = 64


class _Groups(NamedTuple):
    """The axes of a product, those of size 1 left out, in the orders in which the least is copied."""

    batch: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]
    contracted: tuple[str, ...]

    def of(self, place: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The two groups that an operand, or the result (2), has besides the batch."""
        return ((self.left, self.contracted), (self.contracted, self.right), (self.left, self.right))[place]


@lru_cache(maxsize=16384)
def _groups(spec: Spec) -> tuple[_Groups, tuple[int, ...]]:
    """The groups of axes of a product, and which terms XLA then copies (2 is the result).

    A term is copied unless it has the batch first, and then both of its groups, in either order; and a result where a
    dimension of size 1 is not in front.
    """
    form, sizes, terms = product_form(spec), dict(spec.sizes), [_wide_axes(term, spec) for term in spec.terms]
    assert form is not None

    def orders(group: tuple[str, ...], places: tuple[int, ...]) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(tuple(e for e in terms[place] if e in group) for place in places))

    def copied(groups: _Groups) -> tuple[int, ...]:
        found = []
        for place, term in enumerate(terms):
            first, second = groups.of(place)
            narrow = [spec.size(e) == 1 for e in spec.terms[place]]
            inside = place == 2 and narrow != sorted(narrow, reverse=True)
            whole = ((*groups.batch, *first, *second), (*groups.batch, *second, *first))
            if inside or term not in whole:
                found.append(place)
        return tuple(found)

    choices = itertools.product(
        orders(form.batch, (2, 0, 1)), orders(form.left, (2, 0)), orders(form.right, (2, 1)),
        orders(form.contracted, (0, 1)),
    )  # fmt: skip
    pairs = [(groups, copied(groups)) for groups in itertools.starmap(_Groups, choices)]
    return min(pairs, key=lambda pair: sum(math.prod(sizes[e] for e in terms[place]) for place in pair[1]))


def _wide_axes(term: Term, spec: Spec) -> tuple[str, ...]:
    return tuple(str(e) for e in term if spec.size(e) != 1)


@lru_cache(maxsize=16384)
def as_matrices(spec: Spec) -> Product:
    """What multiplies two operands as matrices, in one batch: XLA copies products of more dimensions."""
    (groups, _), sizes = _groups(spec), dict(spec.sizes)
    *terms, out = (_wide_axes(term, spec) for term in spec.terms)

    def shaped(place: int) -> tuple[Callable[[Any], Any], list[tuple[str, ...]]]:
        """What views an operand with a dimension for each of its groups, and these."""
        first, second = groups.of(place)
        order = [groups.batch, first, second]
        if terms[place] == (*groups.batch, *second, *first):
            order = [groups.batch, second, first]
        order = [group for group in order if group]
        whole = [sizes[e] for e in terms[place]]
        dims = [terms[place].index(e) for group in order for e in group]
        shape = [math.prod(sizes[e] for e in group) for group in order]
        return lambda x: jnp.transpose(x.reshape(whole), dims).reshape(shape), order

    (first, groups_a), (second, groups_b) = shaped(0), shaped(1)

    def both(group: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dimension of a group in either factor."""
        x, y = ((order.index(group),) if group else () for order in factors)
        return x, y

    # The result has the first factor's own axes before the second's.
    swapped = out == (*groups.batch, *groups.right, *groups.left)
    factors = (groups_b, groups_a) if swapped else (groups_a, groups_b)
    numbers = (both(groups.contracted), both(groups.batch))
    own = (groups.right, groups.left) if swapped else (groups.left, groups.right)
    made = (*groups.batch, *own[0], *own[1])
    back, whole, shape = [made.index(e) for e in out], [sizes[e] for e in made], spec.output_shape

    def product(a: Any, b: Any) -> Any:
        x, y = (second(b), first(a)) if swapped else (first(a), second(b))
        found = lax.dot_general(x, y, numbers, preferred_element_type=wide(a.dtype)).astype(a.dtype)
        return jnp.transpose(found.reshape(whole), back).reshape(shape)

    return product


def wide(dtype: Any) -> Any:
    """Return the dtype that sums are formed in: float32 for the half types."""
    return jnp.float32 if jnp.dtype(dtype).name in ("float16", "bfloat16") else dtype


class Reordered(NamedTuple):
    """What XLA copies for a product, in elements.

    Attributes:
        elements: of operands and result.
        apart: how many of them by ones or few.
        reused: how many are copied into the result's memory, which is written last.
    """

    elements: int
    apart: float
    reused: int


@lru_cache(maxsize=16384)
def reordered(spec: Spec) -> Reordered:
    """Return what XLA copies for a product.

    It copies where a batch is not in front, or rows and columns are no two groups, and a result that has dimensions of
    size 1 behind others, which it multiplies without them.
    """
    (groups, places), sizes = _groups(spec), dict(spec.sizes)
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
    return Reordered(sum(copied.values()), apart, reused)


@lru_cache(maxsize=16384)
def rearranged(spec: Spec) -> int:
    """Return how many elements XLA copies for a sum, a segment sum, a diagonal or a product of what is taken."""
    given = _of_product(spec) if len(spec.inputs) == 2 else _of_operand(spec)
    out = spec.output
    rows = {*term_axes(tuple(e for e in out if isinstance(e, Gather))), *(e for e in out if out.count(e) > 1)}
    indexed = tuple(e for e in out if isinstance(e, Gather) or e in rows)
    if indexed:  # put by rows, each a slice of what remains
        first = (*indexed, *(e for e in out if e not in indexed))
        copied = not _same_order(first, out, spec)
    else:
        term = spec.inputs[0]
        summed = len(spec.inputs) == 1 and not set(term) <= set(out) and all(isinstance(e, str) for e in term)
        copied = summed and not _same_order(
            tuple(e for e in term if e in out), tuple(e for e in out if e in term), spec
        )
    return given + copied * math.prod(spec.output_shape)


def _of_operand(spec: Spec) -> int:
    """What is copied of the only operand: its diagonals before they are summed, or rows that are to be added."""
    (term,), out = spec.inputs, spec.output
    if any(isinstance(e, Gather) for e in term):
        return 0
    if len(set(term)) < len(term):
        return 0 if set(term) <= set(out) else math.prod(spec.shape(tuple(dict.fromkeys(term))))
    gathers = tuple(e for e in out if isinstance(e, Gather))
    if not gathers:
        return 0
    wanted = dict.fromkeys((*term_axes(gathers), *(e for e in out if isinstance(e, str))))
    if any(e not in term and spec.size(e) != 1 for e in wanted):  # repeated along an axis that it lacks
        return math.prod(spec.shape(tuple(wanted)))
    order = tuple(e for e in wanted if e in term)
    return 0 if _same_order(tuple(e for e in term if e in order), order, spec) else math.prod(spec.shape(term))


def _of_product(spec: Spec) -> int:
    """What is copied for the product of values of which some were taken, or are added up by rows afterwards."""
    if not any(isinstance(e, Gather) for term in spec.terms for e in term):
        return 0
    inner = _inner(spec)
    form = product_form(inner)
    if form is None or not form.contracted:
        return 0
    # What is taken is made in the order that serves; so is what is added up.
    plain = [all(isinstance(e, str) for e in term) for term in spec.terms]
    copied = {p: math.prod(inner.shape(inner.terms[p])) for p in _groups(inner)[1] if plain[p]}
    result = copied.get(2, 0)
    return sum(copied.values()) - max((n for place, n in copied.items() if place != 2 and n <= result), default=0)


def fused_takes(spec: Spec) -> int:
    """Return how many of the elements that a product of taken values takes are never in memory.

    XLA takes, and sums what is private, in one loop; a product without a sum is part of it too.
    """
    fused = 0
    inner = _inner(spec)
    form = product_form(inner)
    for term, kept in zip(spec.inputs, inner.inputs, strict=True):
        if any(isinstance(e, Gather) for e in term):
            taken, left = (math.prod(spec.shape(axes)) for axes in (term_axes(term), kept))
            whole = left == taken and form is not None and not form.contracted
            fused += taken if whole else taken - left
    return fused


def _inner(spec: Spec) -> Spec:
    """The product of what two inputs are once they are taken and what is private is summed."""
    kept = []
    for number, term in enumerate(spec.inputs):
        others = {axis for place, other in enumerate(spec.terms) if place != number for axis in term_axes(other)}
        kept.append(tuple(axis for axis in term_axes(term) if axis in others))
    return inner_product(spec, kept)


def _same_order(one: Term, other: Term, spec: Spec) -> bool:
    return [e for e in one if spec.size(e) != 1] == [e for e in other if spec.size(e) != 1]


def _together(order: Sequence[str], other: Sequence[str], sizes: Mapping[str, int]) -> int:
    """How many elements stay neighbours when axes change their order: those of the last axes that both share."""
    together = 1
    for axis, same in zip(reversed(order), reversed(other), strict=True):
        if axis != same:
            break
        together *= sizes[axis]
    return together
