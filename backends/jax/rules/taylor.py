"""Taylor mode (`jax.experimental.jet`). A step is linear in each operand, so its series is a product of series.

The coefficient of order k of f(a, b) is the sum of f(a_i, b_j) over all i + j = k, where a_i and b_j are the
coefficients of the operands. The same holds for one operand, and for more than two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.experimental.jet import jet_rules
from jax.interpreters import ad

from planner.backends.jax.evaluation import Mode, input_count
from planner.backends.jax.guards import Guards
from planner.backends.jax.step import SINGLE_GRADIENT_INPUTS, TANGENT_STEPS, bind_step, gradient_op, step_p, tangent_p
from planner.program.ops import JointGradient, Op

# The coefficients of a value by order, the value itself first.
Series = Sequence[Any]


def _orders(count: int, total: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a sum of so many orders."""
    if count == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in _orders(count - 1, total - first))


def _product(function: Callable[[Sequence[Any]], Any], operands: Sequence[Series]) -> list[Any]:
    """Return the series of a function that is linear in each operand."""
    series = []
    for order in range(len(operands[0])):
        total = None
        for orders in _orders(len(operands), order):
            part = function([terms[k] for terms, k in zip(operands, orders, strict=True)])
            total = part if total is None else ad.add_jaxvals(total, part)
        series.append(total)
    return series


def _step_series(
    operands: Sequence[Series], indices: Sequence[Any], op: Op, mode: Mode, view: Any, guards: Guards
) -> list[Any]:
    """Return the series of a step with one result."""
    return _product(lambda inputs: bind_step(op, (*inputs, *indices), mode, (view,), guards)[0], operands)


def _step_jet(
    primals: Sequence[Any], series: Sequence[Series], *, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any
) -> tuple[list[Any], list[Series]]:
    count = input_count(op)
    operands = [(x, *terms) for x, terms in zip(primals[:count], series[:count], strict=True)]
    indices = primals[count:]
    if isinstance(op, JointGradient):
        # Each gradient is a step of its own, linear in the output gradient and in the other operand.
        results = [
            _step_series([operands[place] for place in places], indices, gradient_op(op, child), mode, views[child],
                         guards.transposed(child))
            for child, places in enumerate(SINGLE_GRADIENT_INPUTS)
        ]  # fmt: skip
    else:
        results = [_step_series(operands, indices, op, mode, views[0], guards)]
    return [first for first, *_ in results], [rest for _, *rest in results]


def _tangent_jet(
    primals: Sequence[Any], series: Sequence[Series], *, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any
) -> tuple[Any, Series]:
    operands, indices = [(x, *terms) for x, terms in zip(primals[:4], series[:4], strict=True)], primals[4:]
    left, right = (
        _step_series([operands[place] for place in places], indices, op, mode, views[0], guards)
        for places in TANGENT_STEPS
    )
    first, *rest = map(ad.add_jaxvals, left, right)
    return first, rest


_rules: dict[Any, Any] = jet_rules
_rules[step_p] = _step_jet
_rules[tangent_p] = _tangent_jet
