"""Networks of many operands: FLOPs of planner's plans over those of cotengra's `auto-hq`, given the same time."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import opt_einsum

from planner.bench.timing import Result, Settings
from planner.demo.ways import OURS, Framework
from planner.tune.timing import timed

SIZES = (30, 100, 300, 1000)
# How long a plan may take, in seconds, by the number of operands.
MOST_SECONDS = {100: 1.0, 1000: 30.0}

Problem = tuple[str, list[tuple[int, ...]]]


def large_networks(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Compare FLOPs with cotengra's, both counted by planner, and check how long planner takes."""
    if framework != "torch":
        return
    import planner

    for operands in SIZES:
        for name, (spec, shapes) in networks(operands).items():
            part, what = "large-networks", f"{name}, {len(shapes)} tensors"
            plan, seconds = timed(partial(planner.plan, spec, *shapes, backend="numpy", minimize="flops"))
            if operands in MOST_SECONDS:
                yield Result(
                    part, framework, f"{what}: time to plan", MOST_SECONDS[operands], seconds, "s", at_most=True
                )
            if importlib.util.find_spec("cotengra") is None:
                print("cotengra is not installed: it is not compared with", file=sys.stderr)
                continue
            path, taken = _searched(spec, shapes, seconds)
            peer = planner.plan(spec, *shapes, backend="numpy", minimize="flops", optimize=path)
            ratio = plan.cost.flops / peer.cost.flops
            medians = {"cotengra": taken, OURS: seconds}
            yield Result(part, framework, f"{what}: of cotengra's FLOPs", 1.02, ratio, at_most=True, medians=medians)


def _searched(spec: str, shapes: Sequence[tuple[int, ...]], seconds: float) -> tuple[Any, float]:
    """Return the path that cotengra finds in about so many seconds, and how long it took."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for a partitioner that PyPI lacks
        import cotengra

        begun = time.perf_counter()
        optimizer = cotengra.AutoHQOptimizer(max_time=seconds, parallel=False)
        path = cotengra.einsum_tree(spec, *shapes, optimize=optimizer).get_path()
    return path, time.perf_counter() - begun


def networks(operands: int) -> dict[str, Problem]:
    """Return the spec and the shapes of a random regular graph, a lattice and a random circuit of about this size."""
    return {
        "random 3-regular graph": _regular(operands // 2 * 2, random.Random(0)),
        "lattice": _lattice(round(operands**0.5)),
        "random circuit": _circuit(operands, random.Random(0)),
    }


def _problem(terms: Sequence[Sequence[int]]) -> Problem:
    """Return a network of axes of size 2 as a spec and shapes; its result is a number."""
    text = ",".join("".join(map(opt_einsum.get_symbol, term)) for term in terms)
    return f"{text}->", [(2,) * len(term) for term in terms]


def _regular(operands: int, rng: random.Random) -> Problem:
    """Each tensor has bonds to three others."""
    while True:
        ends = [operand for operand in range(operands) for _ in range(3)]
        rng.shuffle(ends)
        pairs = list(zip(ends[::2], ends[1::2], strict=True))
        if all(a != b for a, b in pairs):
            break
    terms: list[list[int]] = [[] for _ in range(operands)]
    for axis, pair in enumerate(pairs):
        for operand in pair:
            terms[operand].append(axis)
    return _problem(terms)


def _lattice(side: int) -> Problem:
    """A square of tensors, each with bonds to its neighbours."""
    terms: list[list[int]] = [[] for _ in range(side * side)]
    axes = itertools.count()
    for row, column in itertools.product(range(side), range(side)):
        for inside, neighbour in ((column + 1 < side, 1), (row + 1 < side, side)):
            if inside:
                axis, place = next(axes), row * side + column
                terms[place].append(axis)
                terms[place + neighbour].append(axis)
    return _problem(terms)


def _circuit(operands: int, rng: random.Random) -> Problem:
    """Gates on random neighbours of a line of qubits, from one product state to another."""
    qubits = max(6, round(0.75 * operands**0.5))
    wires, axes = list(range(qubits)), itertools.count(qubits)
    terms = [[wire] for wire in wires]
    for layer in itertools.count():
        for qubit in range(layer % 2, qubits - 1, 2):
            if len(terms) + qubits >= operands:
                return _problem([*terms, *([wire] for wire in wires)])
            if rng.random() < 0.8:
                new = [next(axes), next(axes)]
                terms.append([wires[qubit], wires[qubit + 1], *new])
                wires[qubit : qubit + 2] = new
    raise AssertionError
