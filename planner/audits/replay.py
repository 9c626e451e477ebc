"""What a program called between its arrays and a product, so that it can run again on other arrays."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from planner.audits.expression import Array


class Slot(NamedTuple):
    """The place of an array that the program had; its number is the `identity` of an `Array`."""

    identity: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A call that computed an array. Among its arguments are the steps that computed them, and slots."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Today:
    """What a program calls at a site.

    Attributes:
        step: the last call.
        extras: arrays that are no operands of the contraction, such as the one that rows are added into.
        context: what the calls run within, such as autocast.
        gradients: the strides of the result's gradients in the program, which it adds while it runs.
    """

    step: Step
    extras: tuple[Array, ...] = ()
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    gradients: list[tuple[int, ...]] = dataclasses.field(default_factory=list)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments of a call, nested in tuples, lists and dicts, with a function applied to each."""
    if type(value) in (tuple, list):
        return type(value)(map_leaves(change, each) for each in value)
    if type(value) is dict:
        return {name: map_leaves(change, each) for name, each in value.items()}
    return change(value)


def slots_of(step: Step) -> Iterator[int]:
    """Yield the identities of the arrays that a step and those before it take, once for each use."""
    for leaf in _leaves(step):
        if isinstance(leaf, Step):
            yield from slots_of(leaf)
        elif isinstance(leaf, Slot):
            yield leaf.identity


def replay(step: Step, values: Mapping[int, Any]) -> Any:
    """Run a step, and those before it, on arrays by identity. What is used once is freed as soon as it was used."""
    uses = collections.Counter(_steps(step))
    kept: dict[Step, Any] = {}

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return values[leaf.identity]
        return run(leaf) if isinstance(leaf, Step) else leaf

    def run(each: Step) -> Any:
        if each in kept:
            return kept[each]
        result = each.function(*map_leaves(value_of, each.args), **map_leaves(value_of, dict(each.kwargs)))
        if uses[each] > 1:
            kept[each] = result
        return result

    return run(step)


def _steps(step: Step) -> Iterator[Step]:
    """Yield the steps that lead to a step, once for each use, and it."""
    yield step
    for leaf in _leaves(step):
        if isinstance(leaf, Step):
            yield from _steps(leaf)


def _leaves(step: Step) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, (step.args, dict(step.kwargs)))
    return found
