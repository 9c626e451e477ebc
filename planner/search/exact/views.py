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


def view_launches(
    launches: Launches, terms: tuple[Bits, ...], in_order: tuple[Bits, ...], wide: int, xp: Any, copies: bool
) -> Any:
    """Return how many operators more than one a product launches at least, as to their time.

    Args:
        launches: what the framework's operators take.
        terms: the axes of the two operands and of the result.
        in_order: for each of them, whether its axes are known to be in the network's order.
        wide: the axes whose size is not 1.
        xp: what the terms are, see `planner.cost.floor`.
        copies: whether to look for operands that are copied too, which takes longer.
    """
    a, b, out = terms
    shared, kept = a & b, a ^ b
    batch, summed, left, right = shared & out, shared & ~out, a & kept, b & kept
    # Each group of axes is one dimension.
    one_left, one_right, one_summed = _is_one(left), _is_one(right), _is_one(summed)
    some, outer = batch != 0, one_left & one_right
    matrices = outer & one_summed
    flat = (batch & (batch - 1) == 0) | matrices  # a batch of one axis, or one that is not made flat
    viewed = 3 - 1 * (one_left & one_summed & flat) - (one_right & one_summed & flat) - (outer & flat)
    # They lie in this order, or in that of the product with its operands swapped. The bits from the first one of a
    # group on, which no bit of the group before may be among:
    from_left, from_right, from_summed = left | -left, right | -right, summed | -summed
    of_a, of_b = batch & (from_left | from_summed), batch & (from_right | from_summed)
    of_out = batch & (from_left | from_right)
    plain = (of_a | left & from_summed, of_b | summed & from_right, of_out | left & from_right)
    swapped = (of_a | summed & from_left, of_b | right & from_summed, of_out | right & from_left)
    moved = [
        sum((bits != 0) & known for bits, known in zip(order, in_order, strict=True)) for order in (plain, swapped)
    ]
    # Two matrices take no views, however they lie.
    product = launches.view * ((viewed + xp.minimum(*moved)) * (some | (matrices == 0)))
    if copies:
        copied = in_order[0] & _is_copied(a & wide, batch & wide, left & wide, summed & wide)
        product = product + 1 * copied + (in_order[1] & _is_copied(b & wide, batch & wide, summed & wide, right & wide))
    # What would be copied may be multiplied in a batch and summed, or slice by slice.
    batched = 1 + launches.view * (4 - 1 * one_left - one_right - outer)
    turns = xp.where(a & ~wide | b & ~wide == 0, 2 * launches.slice, launches.slice) - 1
    product = xp.minimum(product, xp.where(one_summed, product, batched))
    product = xp.minimum(product, xp.where(some, product, turns))
    # Vectors may be multiplied element by element, and summed.
    lacks = 1 * (right != 0) + (left != 0)
    by_element = 1 + launches.view * lacks + launches.scattered * (kept != 0)
    product = xp.where((left & wide == 0) | (right & wide == 0), xp.minimum(product, by_element), product)
    # An elementwise product: an operand that lacks axes of the result is viewed.
    lacks = 1 * (a != out) + (b != out)
    multiplied = launches.view * lacks + launches.scattered * (lacks > 0)
    return xp.where(summed & wide == 0, multiplied, product)


def _is_copied(axes: Bits, batch: Bits, *matrix: Bits) -> Any:
    """Whether an operand in the network's order is copied to be a batch of matrices.

    It is if axes of a group are not neighbours, or if the innermost axis is one of the batch.
    """
    copied = (matrix[0] | matrix[1] != 0) & (axes & ~batch < batch)
    for group in (batch, *matrix):
        others = axes & (group | -group) & ~group
        copied = copied | (group & (others | -others) != 0)
    return copied


def _is_one(axes: Bits) -> Any:
    """Whether a set has one axis."""
    return (axes != 0) & (axes & (axes - 1) == 0)
