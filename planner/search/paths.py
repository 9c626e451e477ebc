"""Paths from outside: opt_einsum's names and optimizers, explicit paths, and the splits that a path allows."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import opt_einsum

from planner.language.errors import PlannerError
from planner.language.options import is_name
from planner.language.spec import term_axes
from planner.search.exact.network import Network, bits
from planner.search.exact.steps import Splits, all_splits

Path = tuple[tuple[int, ...], ...]


# The names of opt_einsum's path algorithms. Names that users registered with opt_einsum work too.
PATH_NAMES = (
    "auto-hq",
    "branch-1",
    "branch-2",
    "branch-all",
    "dp",
    "dynamic-programming",
    "eager",
    "greedy",
    "opportunistic",
    "random-greedy",
    "random-greedy-128",
)


def is_path_name(name: str) -> bool:
    """Whether opt_einsum has a path algorithm of that name."""
    try:
        opt_einsum.paths.get_path_fn(name)
    except KeyError:
        return False
    return True


def external_path(network: Network, optimize: Any) -> Path:
    """Ask opt_einsum, or an optimizer with its interface, for a path over the operands.

    The optimizer sees each operand as if its gathers were taken: with row axes in place of pool axes.

    Args:
        network: the network to contract.
        optimize: an opt_einsum name or a callable `(inputs, output, size_dict, memory_limit) -> path`.

    Returns:
        The path in opt_einsum's form.
    """
    terms = [frozenset(term_axes(term)) for term in network.spec.inputs]
    if len(terms) == 1:
        return ((0,),)  # opt_einsum's random searches fail here
    output = set(term_axes(network.spec.output))
    # Axes that only brackets or only the output have are in no operand.
    sizes = {axis: max(1, size) for axis, size in network.sizes.items()}
    output &= set().union(*terms)
    if not is_name(optimize):
        try:
            path = optimize(list(terms), frozenset(output), sizes, None)
        except Exception as error:
            raise PlannerError(
                f"optimize= raised {type(error).__name__}: {error}; it is called as opt_einsum calls a PathOptimizer, "
                "with the sets of the operands' axes, that of the result, the sizes, and None, and returns a path"
            ) from error
        return check_path(path, len(terms))
    # opt_einsum breaks ties by the order in which Python iterates over sets. For strings that order differs between
    # processes. For numbers that are inserted in order it is always the same.
    numbers = {axis: number for number, axis in enumerate(sizes)}
    *inputs, kept = (frozenset(sorted(numbers[axis] for axis in axes)) for axes in (*terms, output))
    numbered = {numbers[axis]: size for axis, size in sizes.items()}
    return check_path(opt_einsum.paths.get_path_fn(optimize)(inputs, kept, numbered, None), len(terms))


def explicit_path(path: Any) -> Path:
    """Read an explicit path: tuples of positions.

    Raises:
        PlannerError: it is not a path.
    """
    try:
        return tuple(tuple(operator.index(i) for i in step) for step in path)
    except TypeError:
        raise PlannerError(
            f"optimize={path!r:.80} is not a path: leave it out, or give 'auto', 'optimal', a name of opt_einsum's, "
            "or a list of tuples of operand positions, such as [(0, 1), (0, 1)]"
        ) from None


def check_path(path: Any, operands: int) -> Path:
    """Return an explicit path, after checking that it contracts this number of operands to one.

    Raises:
        PlannerError: it does not.
    """
    steps = explicit_path(path)
    left = operands
    for number, step in enumerate(steps):
        if not step or len(set(step)) < len(step) or not all(0 <= i < left for i in step):
            raise PlannerError(
                f"step {number} of optimize= is {step}, but there are {left} operands left: "
                f"give distinct positions below {left}"
            )
        left -= len(step) - 1
    if left != 1:
        raise PlannerError(f"the path of optimize= leaves {left} operands uncontracted: add steps until one is left")
    return steps


def find_joined_sets(path: Path, operands: int) -> frozenset[int]:
    """Return the sets of operands that the steps of a path join, as bit sets.

    A path refines another one if it joins all sets that the other joins.
    """
    groups, joined = [1 << i for i in range(operands)], set()
    for step in path:
        whole = sum(groups[i] for i in step)
        for i in sorted(step, reverse=True):
            del groups[i]
        groups.append(whole)
        if len(step) > 1:
            joined.add(whole)
    return frozenset(joined)


def splits_of(path: Path, operands: int) -> Splits:
    """Return the splits that a path allows. A step over more than two operands allows every order among them."""
    groups = [1 << i for i in range(operands)]
    parts: dict[int, tuple[int, ...]] = {}
    for step in path:
        members = tuple(groups[i] for i in step)
        for i in sorted(step, reverse=True):
            del groups[i]
        whole = sum(members)
        if len(members) > 1:
            parts[whole] = members
        groups.append(whole)

    def within(mask: int) -> Iterable[tuple[int, int]]:
        members = parts.get(mask)
        if members is None:  # part of a step over several operands
            whole = min((w for w in parts if w & mask == mask), key=int.bit_count)
            members = tuple(m for m in parts[whole] if m & mask)
        for parts_of_step in all_splits((1 << len(members)) - 1):
            left, right = (sum(members[i] for i in bits(part)) for part in parts_of_step)
            # In the order of the exact search: the part with the lowest operand comes first.
            yield (left, right) if left & -left < right & -right else (right, left)

    return within


def left_to_right(operands: int) -> Sequence[tuple[int, ...]]:
    """Return the path that contracts the operands in the order in which they are written."""
    if operands == 1:
        return ((0,),)
    return ((0, 1), *((0, left - 1) for left in range(operands - 1, 1, -1)))
