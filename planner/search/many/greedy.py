"""Paths for networks of many operands: greedy trees, random ones too, improved part by part.

The greedy trees come from cotengrust where it is installed, which makes hundreds of them in the time in which
opt_einsum makes one. All random numbers have fixed seeds, and searches end after a fixed amount of work, so that a
network gets the same path in each process. With a deadline a search ends by the clock.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import opt_einsum

from planner.language.spec import term_axes
from planner.progress import Progress
from planner.search.exact.network import Network
from planner.search.many.reconfigure import MOST_CUT, Estimate, OrderTree, axes_of_values

# How many random greedy trees are improved, how many of the best are improved further, and in how many rounds.
STARTS, FINALISTS, ROUNDS = 8, 3, 6
# Beyond this number of operands times rounds there are fewer rounds, but two at least.
MOST_ROUNDS = 3_000
# How many values a part reads fewer than it may: in the first sweeps, and in the sweeps over parts that are drawn.
FIRST_LESS, DRAWN_LESS = 2, 1
MOST_SWEEPS = 20
# The share of the cost that a first sweep must win to be repeated; as a logarithm, what a round must win.
LITTLE, TOO_LITTLE = 0.02, 1e-3
# Of so many greedy trees cotengrust returns the best, divided by the number of operands; see `_greedy_steps`.
TREES, MOST_TREES = 30_000, 64
# If the values of opt_einsum's greedy tree have so many axes that the sum of the squares of their numbers is more than
# this, cotengrust is not asked. It remembers the axes of each product that it considers. They took 0.1 GB for a random
# graph of 1,000 operands, 1.1 GB for 3,000 and 14 GB for 5,000; the sums are 1.4, 23 and 114 million.
MOST_AXES = 5_000_000
# Axes of more operands than this are no reason to multiply two of them: greedy algorithms would try all pairs.
MOST_NEIGHBOURS = 64

Steps = list[tuple[int, int]]


class Improved(NamedTuple):
    """The paths that a search found, the best by the estimate first, and whether Ctrl-C ended the search."""

    paths: list[tuple[tuple[int, ...], ...]]
    interrupted: bool


class NumberedNetwork(NamedTuple):
    """A network with numbers for axes, its gathers taken: with row axes in place of pool axes."""

    inputs: list[list[int]]
    output: list[int]
    sizes: list[int]


def number_axes(network: Network) -> NumberedNetwork:
    """Return a network with numbers for its axes."""
    axes = [term_axes(term) for term in network.spec.inputs]
    numbers: dict[str, int] = {}
    for term in axes:
        for axis in term:
            numbers.setdefault(axis, len(numbers))
    output = [numbers[axis] for axis in term_axes(network.spec.output) if axis in numbers]
    # Empty arrays cost nothing in any order.
    sizes = [max(1, network.sizes[axis]) for axis in numbers]
    return NumberedNetwork([[numbers[axis] for axis in term] for term in axes], output, sizes)


def improved_path(
    network: Network,
    requires: Sequence[bool],
    estimate: Estimate,
    given: Sequence[tuple[tuple[int, ...], ...]],
    ends: float | None = None,
    most: int = MOST_CUT,
) -> Improved:
    """Return the best path that greedy searches and the search over parts of trees find, and the others.

    Args:
        network: what to contract.
        requires: for each operand, whether its gradient is needed.
        estimate: what steps cost.
        given: paths to begin with, in opt_einsum's form.
        ends: when to stop, by `time.monotonic`; None to go on until the work is done.
        most: how many values a part of a tree reads at most.

    Raises:
        KeyboardInterrupt: Ctrl-C came before any path was found.
    """
    numbered = number_axes(network)
    logs = [math.log2(size) for size in numbered.sizes]
    found: list[OrderTree] = []
    best: list[tuple[float, tuple[tuple[int, ...], ...]]] = []

    def in_time() -> bool:
        return ends is None or time.monotonic() < ends

    def record(tree: OrderTree) -> None:
        if not best or tree.cost < best[0][0]:
            best[:] = [(tree.cost, tree.path())]

    rounds = max(2, min(ROUNDS, MOST_ROUNDS // len(numbered.inputs)))
    bar = Progress(len(given) + STARTS + FINALISTS * rounds)
    try:
        for steps in _starts(numbered, given):
            tree = OrderTree(numbered.inputs, numbered.output, logs, requires, estimate, steps)
            found.append(tree)
            record(tree)
            bar(f"{len(numbered.inputs)} operands: tree {len(found)}")
            for _ in range(MOST_SWEEPS):
                if tree.sweep(most - FIRST_LESS, None, in_time) < LITTLE:
                    break
            record(tree)
            if not in_time():
                break
        found.sort(key=lambda tree: tree.cost)
        for number, tree in enumerate(found[:FINALISTS]):
            rng = random.Random(number)
            for _ in range(rounds):
                bar(f"{len(numbered.inputs)} operands: parts of tree {number + 1}")
                if not in_time():
                    break
                before = tree.cost
                for less, draws in ((DRAWN_LESS, rng), (DRAWN_LESS, rng), (0, None)):
                    tree.sweep(most - less, draws, in_time)
                record(tree)
                if tree.cost > before - TOO_LITTLE:
                    break
    except KeyboardInterrupt:
        if not best:
            raise
        return Improved([best[0][1]], True)
    finally:
        bar.close()
    paths = [best[0][1], *(tree.path() for tree in sorted(found, key=lambda tree: tree.cost))]
    return Improved(list(dict.fromkeys(paths)), False)


def _starts(network: NumberedNetwork, given: Sequence[tuple[tuple[int, ...], ...]]) -> Iterator[Steps]:
    """Yield the trees to begin with, as the steps of an `OrderTree`."""
    operands = len(network.inputs)
    for path in given:
        if all(len(step) <= 2 for step in path):
            yield steps_of(path, operands)
    axes = [axes_of_values(network.inputs, network.output, steps_of(path, operands)) for path in given[:1]]
    wide = sum([len(term) ** 2 for terms in axes for term in terms]) > MOST_AXES
    search = _plain_greedy_steps if wide else _greedy_steps
    for seed in range(STARTS):
        yield search(network, seed)


def steps_of(path: Sequence[Sequence[int]], operands: int, by_number: bool = False) -> Steps:
    """Return the steps of a path over the operands. Steps on one value are left out.

    Args:
        path: the path, in opt_einsum's form.
        operands: how many operands there are.
        by_number: whether the path has numbers of values, as those of an `OrderTree`, in place of positions.
    """
    left = list(range(operands))
    steps: Steps = []
    for step in path:
        values = [left[i] for i in step]
        if not by_number:
            for i in sorted(step, reverse=True):
                del left[i]
        if len(values) == 1:
            left += values
        else:
            left.append(operands + len(steps))
            steps.append((values[0], values[1]))
    return steps


def _greedy_steps(network: NumberedNetwork, seed: int) -> Steps:
    """Return a random greedy tree; the best of many where cotengrust is installed."""
    operands = len(network.inputs)
    try:
        import cotengrust
    except ImportError:
        return _plain_greedy_steps(network, seed)
    letters = [opt_einsum.get_symbol(axis) for axis in range(len(network.sizes))]
    search: Any = cotengrust.optimize_random_greedy_track_flops  # its type stub lacks `max_neighbors`
    try:
        path, _ = search(
            [[letters[axis] for axis in term] for term in _shared_axes(network)],
            [letters[axis] for axis in network.output],
            dict(zip(letters, map(float, network.sizes), strict=True)),
            ntrials=max(1, min(MOST_TREES, TREES // operands)),
            seed=seed,
            max_neighbors=MOST_NEIGHBOURS,
            use_ssa=True,
        )
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what Rust raises: no Exception, and in no module
            raise
        return _plain_greedy_steps(network, seed)
    read = [value for step in path for value in step]
    if len({*read}) < len(read):
        return _plain_greedy_steps(network, seed)
    return steps_of(path, operands, by_number=True)


def _shared_axes(network: NumberedNetwork) -> list[list[int]]:
    """Return the axes of each operand that another operand or the output has too, each once.

    Greedy algorithms sum the others first, which does not change the order of products. cotengrust (0.2.1) makes each
    such sum a step with a number of its own. It numbers the values of less than 128 operands in one byte, which 86
    operands with such sums can exceed: numbers then repeat, or it panics.
    """
    uses = Counter(axis for term in [*network.inputs, network.output] for axis in set(term))
    return [[axis for axis in dict.fromkeys(term) if uses[axis] > 1] for term in network.inputs]


def _plain_greedy_steps(network: NumberedNetwork, seed: int) -> Steps:
    """Return a random greedy tree that opt_einsum makes."""
    return steps_of(random_greedy(network, random.Random(seed)), len(network.inputs), by_number=True)


def random_greedy(network: NumberedNetwork, rng: random.Random) -> list[tuple[int, ...]]:
    """Return opt_einsum's greedy path, in which each step is drawn from the few best, those that cost less more often.

    opt_einsum's own random search draws from Python's global random numbers, which belong to the caller.
    """
    uses = Counter(axis for term in network.inputs for axis in set(term))
    shared = {axis for axis, count in uses.items() if count > MOST_NEIGHBOURS}
    temperature = 10 ** rng.uniform(-2, 0)

    def cost(new: int, first: int, second: int, *_: object) -> float:
        grown = new - first - second
        size = math.log2(abs(grown) + 1)
        # Gumbel noise: the least of such costs is that of a step with a probability that falls with its cost.
        return (size if grown > 0 else -size) + temperature * math.log(-math.log(rng.uniform(1e-9, 1 - 1e-9)))

    inputs = [frozenset(sorted(term)) for term in network.inputs]
    output = frozenset(sorted({*network.output, *shared}))
    path: list[tuple[int, ...]] = opt_einsum.paths.ssa_greedy_optimize(
        inputs, output, dict(enumerate(network.sizes)), cost_fn=cost
    )
    return path
