"""In which order XLA multiplies the axes of a product, and which products JAX does not derive."""

from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from planner.backends.jax.compiled.arrangement import arranged, free_axes, wide_axes
from planner.backends.jax.products import has_slow_gradients
from planner.language.cached import cached_by_step
from planner.language.derive import swap_with_output
from planner.language.spec import Spec
from planner.program.forms import known_product
from planner.program.ops import Einsum
from planner.program.program import Step


class DotOrders(NamedTuple):
    """In which order XLA multiplies the axes of a product, those of size 1 left out.

    Attributes:
        result: the axes of the result.
        factors: the axes of each factor; None if XLA multiplies it as it lies in memory.
        elementwise: whether neither factor has rows or columns of its own.
        multiplied: the axes as the product has them, before they are permuted to the result.
    """

    result: tuple[str, ...]
    factors: tuple[tuple[str, ...] | None, tuple[str, ...] | None]
    elementwise: bool
    multiplied: tuple[str, ...]


@cached_by_step
def dot_orders(spec: Spec, gradient: int | None, memory: tuple[tuple[str, ...], ...]) -> DotOrders:
    """Return the orders of a product.

    JAX derives a product in an arrangement of its own. It permutes the gradient to the order in which the product was
    computed, and multiplies it as the first factor.

    Args:
        spec: the product.
        gradient: the input that is the gradient, if JAX derives the product; else None.
        memory: the axes of each factor as they lie in memory, or are computed.
    """
    terms = [wide_axes(term, spec) for term in spec.inputs]
    derived = spec if gradient is None else swap_with_output(spec, gradient)
    form, (first, second, batch, contracted, _) = known_product(derived), arranged(derived)
    free = [wide_axes(group, spec) for group in free_axes(derived)]
    batch, contracted, out = wide_axes(batch, spec), wide_axes(contracted, spec), wide_axes(spec.output, spec)
    if gradient is not None:
        if form.contracted or len((*free[0], *free[1])) != 1:  # else XLA drops the permutation
            terms[gradient] = (*batch, *free[first], *free[second])
        first, second = gradient, 1 - gradient
        free = [tuple(axis for axis in term if axis in out and axis not in batch) for term in terms]
        contracted = tuple(axis for axis in terms[first] if axis not in out)
    rows, columns = free[first], free[second]
    if not rows and not columns:
        alike = terms[0] == terms[1] and memory[0] == memory[1]
        wanted = None if alike else (*batch, *contracted)
        # It is a loop over both, in their order.
        result = batch if not alike else tuple(axis for axis in memory[0] if axis in batch)
        if not contracted and terms[0] == terms[1]:
            result = terms[0]
        return DotOrders(result, (wanted, wanted), True, batch)
    factors: list[tuple[str, ...] | None] = [None, None]
    for place, one, other in ((first, rows, contracted), (second, contracted, columns)):
        single, turned = len(one) <= 1 and len(other) <= 1, (*batch, *other, *one)
        if not (single and memory[place] == turned):
            permuted = single and place == gradient and terms[place] == turned
            factors[place] = turned if permuted else (*batch, *one, *other)
    multiplied = result = (*batch, *rows, *columns)
    # XLA turns a product of matrices round whose result is turned, and permutes a product by element.
    if contracted and len(rows) <= 1 and len(columns) <= 1 and out == (*batch, *columns, *rows):
        result = out
    if not contracted and len((*rows, *columns)) == 1:
        # One factor has all axes. It stays in its order if only its own axis has to move, unless the other factor comes
        # first and has to be permuted too.
        whole, part = (first, second) if rows else (second, first)
        in_order = tuple(axis for axis in memory[whole] if axis in batch) == batch
        if in_order and (whole == first or terms[part] == batch):
            result = memory[whole]
    return DotOrders(result, (factors[0], factors[1]), False, multiplied)


def gradients_of_own_steps(backward: Iterable[Step], gradients: Container[int | None]) -> Iterator[int]:
    """Yield the gradients of products that are steps of ours because JAX would derive their gradients slowly.

    Args:
        backward: the steps of a backward program.
        gradients: the variables that are gradients.
    """
    operands: dict[tuple[int, Einsum], list[int]] = collections.defaultdict(list)
    for step in backward:
        places = [place for place, number in enumerate(step.inputs) if number in gradients]
        if isinstance(step.op, Einsum) and len(places) == 1:
            (place,) = places
            product = Einsum(swap_with_output(step.op.spec, place), step.op.dtype)
            operands[step.inputs[place], product].append(place)
    for (gradient, product), places in operands.items():
        if has_slow_gradients(product, tuple(places)):
            yield gradient
