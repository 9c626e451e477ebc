"""Times cold plans, and says how far from the best possible they may be: `python -m planner.bench.planning`.

The networks are drawn with a fixed seed. Each plan is made once, so that nothing of it is known before.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import planner
from planner.language.spec import Operand, unused_letters

# A spec, the shapes of operands, and those of index arrays.
Problem = tuple[str, list[tuple[int, ...]], dict[str, Any]]
KINDS = ("chain", "dense", "gathers", "patterns")
# Products of two operands that read rows, as programs have them: experts, messages, keys, scores.
PATTERNS = ("nij, q[n]jk -> nik", "nj, q[n]jk -> nk", "q[n]c, nc -> nc", "q[n]c, nc -> n", "q[n]c, cd -> nd",
            "bid, q[bk]d -> bik")  # fmt: skip


def chain(operands: int, draw: random.Random) -> Problem:
    """Return a chain of matrices."""
    axes = unused_letters((), operands + 1)
    sizes = [draw.choice((3, 5, 8, 16, 33, 64, 100)) for _ in axes]
    terms = [axes[i] + axes[i + 1] for i in range(operands)]
    return f"{','.join(terms)}->{axes[0]}{axes[-1]}", [(sizes[i], sizes[i + 1]) for i in range(operands)], {}


def dense(operands: int, draw: random.Random) -> Problem:
    """Return a connected network in which an operand shares axes with three others on average; two axes are kept."""
    pairs = [(draw.randrange(i), i) for i in range(1, operands)]
    while len(pairs) < operands * 3 // 2:
        first, second = sorted(draw.sample(range(operands), 2))
        pairs.append((first, second))
    axes = unused_letters((), len(pairs) + 2)
    sizes = {axis: draw.choice((2, 3, 4, 5, 8, 9)) for axis in axes}
    terms: list[list[str]] = [[] for _ in range(operands)]
    for axis, pair in zip(axes, pairs, strict=False):
        for operand in pair:
            terms[operand].append(axis)
    kept = axes[len(pairs) :]
    for axis, operand in zip(kept, draw.sample(range(operands), 2), strict=True):
        terms[operand].append(axis)
    for term in terms:
        draw.shuffle(term)
    spec = f"{','.join(map(''.join, terms))}->{''.join(kept)}"
    return spec, [tuple(sizes[axis] for axis in term) for term in terms], {}


def gathers(operands: int, draw: random.Random) -> Problem:
    """Return a dense network of which one operand is read through an index array."""
    spec, shapes, _ = dense(operands, draw)
    inputs, output = spec.split("->")
    terms = inputs.split(",")
    index, rows = unused_letters(spec, 2)
    operand, count = draw.randrange(operands), draw.choice((4, 30, 200))
    terms[operand] = f"{index}[{rows}]{terms[operand]}"
    shapes[operand] = (draw.choice((3, 20, 50)), *shapes[operand])
    return f"{','.join(terms)}->{output}{rows}", shapes, {index: (count,)}


def patterns(operands: int, draw: random.Random) -> Problem:
    """Return one of `PATTERNS`; each axis has sizes of its own kind."""
    if operands != 2:
        raise SystemExit("the kind 'patterns' has two operands: pass --operands 2")
    spec = draw.choice(PATTERNS)
    sizes = {axis: draw.choice((16, 32, 64, 128)) for axis in "jkcd"}
    sizes |= {"n": draw.randint(17, 4_000), "b": draw.randint(2, 16), "i": draw.choice((4, 8, 16, 32))}
    rows, shapes, indices = draw.randint(17, 500), [], {}
    for term in spec.split("->")[0].split(","):
        array, bracket, axes = term.strip().rpartition("]")
        shapes.append((*[rows] * len(bracket), *(sizes[axis] for axis in axes)))
        if bracket:
            indices["q"] = tuple(sizes[axis] for axis in array[2:])
    return spec, shapes, indices


MAKERS: dict[str, Callable[[int, random.Random], Problem]] = {
    "chain": chain,
    "dense": dense,
    "gathers": gathers,
    "patterns": patterns,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each number of operands: times of cold plans, and gaps."""
    parser = argparse.ArgumentParser(prog="python -m planner.bench.planning", description=__doc__)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--operands", type=int, nargs="+", default=[2, 4, 6, 8, 10, 12, 14])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["chain", "dense"])
    parser.add_argument("--optimize", default="auto")
    parser.add_argument("--minimize", default="time")
    parser.add_argument("--each", type=int, default=20, help="how many networks of each kind")
    options = parser.parse_args(arguments)
    planner.plan("ab,bc->ac", (2, 3), (3, 4), backend=options.backend)  # loads the backend
    planner.caches().disk(False)  # a second run would find what the first one remembered
    # Else one plan in some twenty pays for a search through all objects that the imports made, 80 ms with torch.
    gc.freeze()
    print("operands  gradients  median ms   95% ms   max ms  median gap  95% gap  proven")
    for operands in options.operands:
        for needs in (False, True):
            times, gaps, proven = [], [], 0
            for kind in options.kinds:
                for number in range(options.each):
                    draw = random.Random(f"{kind} {operands} {number} {needs}")
                    spec, shapes, indices = MAKERS[kind](operands, draw)
                    stand_ins = [Operand(shape, requires_grad=needs) for shape in shapes]
                    start = time.perf_counter()
                    plan = planner.plan(
                        spec,
                        *stand_ins,
                        backend=options.backend,
                        optimize=options.optimize,
                        minimize=options.minimize,
                        **indices,
                    )
                    times.append(1e3 * (time.perf_counter() - start))
                    gaps.append(plan.gap or 0.0)
                    proven += plan.proven
            times.sort()
            gaps.sort()
            late = len(times) * 95 // 100
            print(
                f"{operands:8}  {'yes' if needs else 'no':9}  {statistics.median(times):9.2f}  {times[late]:7.2f}"
                f"  {times[-1]:7.2f}  {statistics.median(gaps):10.1%}  {gaps[late]:7.1%}  {proven:3} of {len(times)}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
