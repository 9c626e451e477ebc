"""Lower bounds on what torch's views take in a product, from the axes of its terms alone.

`matmul` takes matrices, or a batch of them. So a group of several axes, or of none, takes a view to be one dimension,
and so do groups that lie in another order. Small products take most of their time for this. Axes are the bits of
integers, in the network's order, which is that of all values but operands. Integers may be arrays of many.
"""

from __future__ import annotations

from typing import Any

from planner.cost.floor import Launches

__all__ = ["view_launches"]

Bits = Any  # an integer, or an array of integers


def view_launches(launches: Launches, terms: tuple[Bits, ...], own: tuple[Bits, ...], wide: int, xp: Any) -> Any:
    """Return how many operators more than one a product launches at least, as to their time.

    Args:
        launches: what the framework's operators take.
        terms: the axes of the two operands and of the result.
        own: for each of them, whether its order of axes may be another than the network's.
        wide: the axes whose size is not 1.
        xp: what the terms are, see `planner.cost.floor`.
    """
    a, b, out = terms
    batch, left, right, summed = a & b & out, a & ~b, b & ~a, a & b & ~out
    # An elementwise product: an operand that lacks axes of the result is viewed.
    lacks = 1 * (a != out) + (b != out)
    multiplied = launches.view * lacks + launches.scattered * (lacks > 0)
    # Each group of axes is one dimension.
    one_left, one_right, one_summed = _is_one(left), _is_one(right), _is_one(summed)
    matrices = one_left & one_right & one_summed
    stacked = (batch & (batch - 1) != 0) & (matrices == 0)
    reshapes = 1 * (one_left & one_summed & (stacked == 0) == 0)
    reshapes = reshapes + (one_right & one_summed & (stacked == 0) == 0) + (one_left & one_right & (stacked == 0) == 0)
    # They lie in this order, or in that of the product with its operands swapped.
    plain = ((batch, left, summed), (batch, summed, right), (batch, left, right))
    swapped = ((batch, summed, left), (batch, right, summed), (batch, right, left))
    moved = [sum((free | _in_order(*groups)) == 0 for free, groups in zip(own, order)) for order in (plain, swapped)]
    # Two matrices take no views, however they lie.
    product = launches.view * (reshapes + xp.minimum(*moved)) * ((batch != 0) | (matrices == 0))
    # What would be copied may be multiplied in a batch and summed, or slice by slice.
    several = (one_left & one_right == 0) + 1 * (one_left == 0) + (one_right == 0)
    batched = 1 + launches.view * (1 + several)
    product = xp.minimum(product, xp.where(one_summed, product, batched))
    turns = xp.where((a | b) & ~wide == 0, 2 * launches.slice, launches.slice) - 1
    product = xp.minimum(product, xp.where(batch == 0, turns, product))
    # Vectors may be multiplied element by element, and summed.
    every = a | b
    lacks = 1 * (a != every) + (b != every)
    by_element = 1 + launches.view * lacks + launches.scattered * (lacks > 0)
    vectors = (left & wide == 0) | (right & wide == 0)
    product = xp.minimum(product, xp.where(vectors, by_element, product))
    return xp.where(summed & wide == 0, multiplied, product)


def _is_one(axes: Bits) -> Any:
    """Whether a set has one axis."""
    return (axes != 0) & (axes & (axes - 1) == 0)


def _in_order(first: Bits, second: Bits, third: Bits) -> Any:
    """Whether the axes of each group come before those of the next."""
    return ((second == 0) | (first < (second & -second))) & ((third == 0) | (first | second < (third & -third)))
