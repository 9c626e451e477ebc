"""The corpus: einsum strings, and gathers followed by an einsum, from public model code, timed at three scales.

`corpus.csv` has a row for each. Its columns:

- `spec`: the contraction as `planner.contract` takes it; ellipses are written out. Rows with brackets say in one
  string what the code computes by an index and a product, or by a product and a scatter-add.
- `sizes`: the size of each axis at the scale "overhead", and of the dimension that each index array reads.
- `grow`: the letters that grow at larger scales: batches, tokens, edges. The others are fixed by the model.
- `stored`: for operands whose memory order differs from their axes, the axes of all operands as they are stored.
- `source`: the file. A path without a repository is in the Python package that its first folder names.

Example:
    >>> from planner.bench.corpus import corpus
    >>> rows = corpus("overhead")
    >>> row = next(row for row in rows if row.spec == "sec,sm->ecm")
    >>> row.shapes, row.source
    (((32, 4, 8), (32, 32)), 'deepspeedai/DeepSpeed deepspeed/moe/sharded_moe.py')
    >>> next(row for row in corpus("cache") if row.spec == "sec,sm->ecm").shapes
    ((256, 4, 64), (256, 32))
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import math
import pathlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import opt_einsum

from planner.bench.timing import PASSES, Pass, Result, Scale, Settings
from planner.demo.runs import RUNS
from planner.demo.ways import OURS, Framework, Way, our_way
from planner.language.parse import parse
from planner.language.spec import Gather, Spec, Term, term_axes
from planner.workloads import WORKLOADS, View, Workload

# All arrays of a row, what einsum makes on its path counted, take at most so many bytes, and its path so many FLOPs.
_BYTES = {"cache": 2**20, "memory": 2**25}
_FLOPS = {"cache": 2**25, "memory": 2**29}


@dataclasses.dataclass(frozen=True, slots=True)
class Row(Workload):
    """A row of the corpus at one scale; a workload with float32 operands that all take gradients.

    Attributes:
        field: where such models are used, such as "vision".
        grow: the letters whose sizes grow with the scale.
    """

    field: str = ""
    grow: str = ""


@cache
def corpus(scale: Scale) -> tuple[Row, ...]:
    """Return all rows at a scale.

    At "overhead" a framework's own einsum takes a few microseconds. At "cache" and "memory" the letters that grow are
    doubled in turn while all arrays fit in 1 MiB, or 32 MiB, and the FLOPs in 2^25, or 2^29.
    """
    with (pathlib.Path(__file__).parent / "corpus.csv").open(newline="") as file:
        return tuple(_grown(_row(columns), scale) for columns in csv.DictReader(file))


def _row(columns: dict[str, str]) -> Row:
    sizes = {letter: int(size) for letter, size in re.findall(r"([A-Za-z])(\d+)", columns["sizes"])}
    pools = {gather.array: sizes.pop(gather.array) for gather in parse(columns["spec"]).gathers}
    terms = columns["spec"].split("->")[0].split(",")
    stored = columns["stored"].split(",") if columns["stored"] else terms
    views = tuple(
        None
        if order == term
        else View((1,) * len(term), (0,) * len(term), (1,) * len(term), tuple(map(term.index, order)))
        for term, order in zip(terms, stored, strict=True)
    )
    name = f"{columns['spec']} stored as {columns['stored']}" if columns["stored"] else columns["spec"]
    return Row(
        name, columns["spec"], columns["source"], sizes, pools, field=columns["field"], grow=columns["grow"],
        views=views if any(views) else (),
    )  # fmt: skip


def _view(term: str, stored: str) -> View:
    """Return the view of an array whose memory holds the axes of a term in another order."""
    ones = (1,) * len(term)
    return View(ones, (0,) * len(term), ones, tuple(map(term.index, stored)))


def _grown(row: Row, scale: Scale) -> Row:
    if scale == "overhead":
        return row
    letters = list(row.grow)
    while letters:
        letter = letters.pop(0)
        doubled = row.resized(**{letter: 2 * {**row.sizes, **row.pools}[letter]})
        size, flops = _figures(doubled)
        if size <= _BYTES[scale] and flops <= _FLOPS[scale]:
            row = doubled
            letters.append(letter)
    return row


def random_rows(scale: Scale, count: int, seed: int) -> tuple[Row, ...]:
    """Return random products of two operands: up to two axes of each kind, and terms in any order.

    Three in ten read their second operand through an index array. At "overhead" axes may have size 1.
    """
    draw, rows = Random(seed), dict[str, Row]()
    small = scale == "overhead"
    lengths = (1, 2, 3, 4, 8, 8, 16, 16, 32) if small else (2, 4, 8, 16, 16, 32, 32, 64, 64, 128)
    flops, elements = (2**16, range(2**12 + 1)) if small else (_FLOPS[scale], range(2**13, _BYTES[scale] // 8 + 1))
    while len(rows) < count:
        counts = [draw.choice(numbers) for numbers in ((0, 0, 1, 1, 2), *[(0, 1, 1, 1, 2)] * 3)]
        axes = draw.sample("bhnmkdij", sum(counts))
        batch, left, right, summed = (axes[sum(counts[:n]) : sum(counts[: n + 1])] for n in range(4))
        sizes = {axis: draw.choice(lengths) for axis in axes}
        terms = [[*batch, *left, *summed], [*batch, *right, *summed], [*batch, *left, *right]]
        largest = max(math.prod(sizes[axis] for axis in term) for term in terms)
        if not (terms[0] and terms[1] and largest in elements and 2 * math.prod(sizes.values()) <= flops):
            continue
        first, second, out = ("".join(draw.sample(term, len(term)) if draw.random() < 0.5 else term) for term in terms)
        gathers = draw.random() < 0.3
        spec = f"{first},{f'q[{second[0]}]' if gathers else second[0]}{second[1:]}->{out}"
        rows[spec] = Row(spec, spec, "drawn at random", sizes, {"q": draw.choice((2, 4, 8))} if gathers else {})
    return tuple(rows.values())


def _expanded(term: Term) -> tuple[str, ...]:
    """Return the axes of a term after its gathers, each once."""
    return tuple(dict.fromkeys(term_axes(term)))


def _plain(spec: Spec) -> tuple[str, ...]:
    return tuple("".join(_expanded(term)) for term in spec.terms)


def _figures(row: Workload) -> tuple[int, float]:
    """Return the bytes of all arrays, gathered and intermediate ones counted, and the FLOPs of einsum's path."""
    *terms, out = _plain(row.parsed)
    shapes = [tuple(row.sizes[axis] for axis in term) for term in (*terms, out)]
    arrays = [*shapes, *(shape for term, shape in zip(row.parsed.inputs, row.shapes, strict=True) if _gathers(term))]
    elements = sum(map(math.prod, arrays)) + math.prod(row.output_shape) * bool(_gathers(row.parsed.output))
    _, path = opt_einsum.contract_path(f"{','.join(terms)}->{out}", *shapes[:-1], shapes=True)
    return 4 * (elements + int(path.largest_intermediate) * (len(terms) > 2)), float(path.opt_cost)


def _gathers(term: Term) -> list[Gather]:
    return [axis for axis in term if isinstance(axis, Gather)]


def gather_then_einsum(row: Workload) -> Callable[..., Any]:
    """Return what a user writes without planner: index the operands, call the framework's einsum, add up the rows.

    The function takes torch or `jax.numpy`, the operands, and the index arrays by letter.
    """
    spec = row.parsed
    *terms, out = _plain(spec)
    equation = f"{','.join(terms)}->{out}"
    if not spec.gathers:
        return lambda xp, *operands: xp.einsum(equation, *operands)
    axes = [_expanded(term) for term in spec.terms]  # here, since torch's compiler warns of cached functions
    output = spec.output if _gathers(spec.output) else None
    shape = row.output_shape

    def call(xp: Any, *operands: Any, **arrays: Any) -> Any:
        taken = [
            x[_index(xp, term, its_axes, row, arrays)] if _gathers(term) else x
            for x, term, its_axes in zip(operands, spec.inputs, axes[:-1], strict=True)
        ]
        result = xp.einsum(equation, *taken)
        if output is None:
            return result
        index = _index(xp, output, axes[-1], row, arrays)
        if xp.__name__ == "torch":
            return _add_rows(result, index, shape)
        return xp.zeros(shape, result.dtype).at[index].add(result)

    return call


def _index(xp: Any, term: Term, axes: tuple[str, ...], row: Workload, arrays: dict[str, Any]) -> tuple[Any, ...]:
    """Return the index that takes, or adds to, the rows of a term: slices where its other axes are untouched.

    `axes` are those of the term after its gathers.
    """
    gathers = _gathers(term)
    simple = len(gathers) == 1 and not set(gathers[0].axes) & {axis for axis in term if isinstance(axis, str)}
    if simple:
        return tuple(slice(None) if isinstance(axis, str) else arrays[axis.array] for axis in term)
    return tuple(_spread(xp, axis, axes, row, arrays) for axis in term)


def _spread(xp: Any, axis: str | Gather, axes: Sequence[str], row: Workload, arrays: dict[str, Any]) -> Any:
    """Return the index of one dimension, with a dimension for each axis of the term."""
    if isinstance(axis, str):
        return xp.arange(row.sizes[axis]).reshape([-1 if e == axis else 1 for e in axes])
    array, present = arrays[axis.array], [e for e in axes if e in axis.axes]
    if list(axis.axes) != present:
        raise ValueError(f"{row.spec}: the axes of {axis.array} are in another order than the term's")
    return array.reshape([row.sizes[e] if e in axis.axes else 1 for e in axes])


def _add_rows(values: Any, index: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """Add rows to zeros in torch: by `index_add`, as users do, if only one dimension is indexed."""
    zeros = values.new_zeros(shape)
    dims = [dim for dim, part in enumerate(index) if not isinstance(part, slice)]
    if len(dims) > 1:
        return zeros.index_put(index, values, accumulate=True)
    dim, rows = dims[0], index[dims[0]]
    return zeros.index_add(dim, rows.flatten(), values.flatten(dim, dim + rows.ndim - 1))


def by_hand(row: Workload) -> Callable[..., Any] | None:
    """Return two operands' product as `matmul` with views, or as an elementwise product; None for other rows."""
    spec = row.parsed
    *terms, out = _plain(spec)
    if len(terms) != 2 or any(axis not in out and axis not in other for axis, other in _others(terms)):
        return None
    if any(map(_gathers, spec.terms)):
        return None
    first, second = terms
    batch = [axis for axis in out if axis in first and axis in second]
    left = [axis for axis in out if axis in first and axis not in second]
    right = [axis for axis in out if axis in second and axis not in first]
    summed = [axis for axis in first if axis in second and axis not in out]
    sizes = row.sizes
    back = [[*batch, *left, *right].index(axis) for axis in out]

    def call(xp: Any, a: Any, b: Any) -> Any:
        transpose = xp.permute if xp.__name__ == "torch" else xp.transpose
        a = transpose(a, [first.index(axis) for axis in (*batch, *left, *summed)])
        b = transpose(b, [second.index(axis) for axis in (*batch, *summed, *right)])
        if not summed:
            ones = [1 for _ in right]
            product = a.reshape([*a.shape, *ones]) * b.reshape(
                [*b.shape[: len(batch)], *[1 for _ in left], *b.shape[len(batch) :]]
            )
            return transpose(product, back)
        a = a.reshape([*[sizes[e] for e in batch], _count(sizes, left), _count(sizes, summed)])
        b = b.reshape([*[sizes[e] for e in batch], _count(sizes, summed), _count(sizes, right)])
        return transpose((a @ b).reshape([sizes[e] for e in (*batch, *left, *right)]), back)

    return call


def _others(terms: Sequence[str]) -> Iterator[tuple[str, str]]:
    for term, other in (terms, terms[::-1]):
        yield from ((axis, other) for axis in term)


def _count(sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    return math.prod(sizes[axis] for axis in axes)


# -- the comparison -----------------------------------------------------------------------------------------

EINSUM, AGAIN = "einsum", "einsum again"
_BARS: dict[Framework, dict[str, float]] = {
    "torch": {"median": 0.95, "99%": 1.05, "worst": 1.15},
    "jax": {"median": 1.0, "99%": 1.1, "worst": 1.2},
}


def compare_corpus(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Time every row at each scale, forward and with gradients; print the worst twenty; yield the distribution."""
    for scale in settings.scales:
        yield from _compare("corpus", sampled_rows(scale, settings), scale, framework, settings)


# The arrays of a named workload that is timed take at most so many bytes, gathered and intermediate ones counted.
_MOST_BYTES = 2**30


def compare_workloads(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Time the named workloads at their CPU sizes as `compare_corpus` times rows; print the large ones, left out."""
    rows = [workload.cpu() for workload in WORKLOADS.values()]
    sizes = {row.name: _figures(row)[0] for row in rows}
    for name, size in sizes.items():
        if size > _MOST_BYTES:
            print(f"  left out: {name}, whose arrays take {size:,} bytes")
    kept = [row for row in rows if sizes[row.name] <= _MOST_BYTES]
    yield from _compare("workloads", kept, "CPU sizes", framework, settings)


def _compare(
    part: str, rows: Sequence[Workload], what: str, framework: Framework, settings: Settings
) -> Iterator[Result]:
    """Time rows in several passes through all of them, and yield how the least times are distributed."""
    runs = [{row.name: time_row(row, framework, settings) for row in rows} for _ in range(settings.passes)]
    for which, named in PASSES:
        times = {
            name: {label: min(run[name][which][label] for run in runs) for label in first[which]}
            for name, first in runs[0].items()
        }
        yield from _distribution(part, times, f"{what}, {named}", framework)


def sampled_rows(scale: Scale, settings: Settings) -> tuple[Row, ...]:
    """Return the rows of a scale that the settings ask for: all, a sample of them, or random strings."""
    if settings.strings is not None:
        return random_rows(scale, settings.sample or 150, settings.strings)
    rows = corpus(scale)
    return rows[:: max(1, len(rows) // settings.sample)] if settings.sample else rows


def corpus_bytes(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Measure the memory of every row; print rows that need more than einsum; yield how many do, beyond 64 KiB.

    The bytes are those allocated at once without gradients and with them, and those retained for gradients.
    """
    for scale in settings.scales:
        more: Counter[str] = Counter()
        for row in sampled_rows(scale, settings):
            einsum = RUNS[framework](Way(EINSUM, gather_then_einsum(row)), row, row.takes_gradient)
            ours = einsum.use(our_way(row))
            if framework == "torch":
                ours.once()  # makes the plan, and fills caches
            figures = list(zip(_KINDS, einsum.memory(), ours.memory(), strict=True))
            large = {kind for kind, theirs, needed in figures if needed > max(theirs, _SMALL_BYTES)}
            more.update(large)
            if any(needed > theirs for _, theirs, needed in figures):
                columns = "  ".join(f"{kind} {theirs:,} {needed:,}" for kind, theirs, needed in figures)
                print(f"  {'!' if large else ' '} {row.name}  bytes of einsum and planner: {columns}", flush=True)
        for kind in _KINDS:
            yield Result(
                "corpus-bytes", framework, f"{scale}: rows that need more, {kind}", 0, more[kind], at_most=True
            )


_KINDS = ("forward", "with gradients", "retained")
_SMALL_BYTES = 2**16


def _distribution(
    part: str, times: Mapping[str, Mapping[str, float]], what: str, framework: Framework
) -> Iterator[Result]:
    """Print how programs compare with einsum, and the rows where planner loses most."""
    for label in dict.fromkeys(label for each in times.values() for label in each if label != EINSUM):
        ratios = np.array([each[label] / each[EINSUM] for each in times.values() if label in each])
        points = {"median": 50, "95%": 95, "99%": 99, "worst": 100}
        reached = {point: float(np.percentile(ratios, at)) for point, at in points.items()}
        print(f"{what}, {label} by einsum: " + ", ".join(f"{point} {ratio:.3f}" for point, ratio in reached.items()))
        if label == OURS:
            ours = reached
    worst = sorted(times, key=lambda name: times[name][EINSUM] / times[name][OURS])
    for name in worst[:20]:
        each = times[name]
        columns = "  ".join(f"{label} {1e6 * seconds:.1f}" for label, seconds in each.items())
        print(f"  {each[OURS] / each[EINSUM]:.2f}  {name}  us: {columns}")
    for point, bar in _BARS[framework].items():
        yield Result(part, framework, f"{what}: {point} of the times, by einsum's", bar, ours[point], at_most=True)


def time_row(row: Workload, framework: Framework, settings: Settings) -> dict[Pass, dict[str, float]]:
    """Return the least seconds of einsum, of einsum again, and of planner, in turn; and with `compiled` of others."""
    einsum = gather_then_einsum(row)
    ways = [Way(EINSUM, einsum), Way(AGAIN, einsum), our_way(row)]
    if settings.compiled:
        if framework == "torch":
            ways.append(Way("torch.compile", _compiled(einsum)))
        if hand := by_hand(row):
            ways.append(Way("by hand", hand))
    first = RUNS[framework](ways[0], row, row.takes_gradient)
    runs = {way.label: first.use(way) for way in ways}
    expected = first.results()
    for label, run in runs.items():
        for found, wanted in zip(run.results(), expected, strict=True):
            if not np.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(np.abs(wanted).max(initial=1))):
                raise AssertionError(f"{row.name}: {label} differs")
    del expected, found, wanted
    return {
        which: _least({label: run.forward if which == "f" else run.both for label, run in runs.items()}, settings)
        for which, _ in PASSES
    }


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    torch._dynamo.reset()
    compiled = torch.compile(lambda *operands, **arrays: call(torch, *operands, **arrays), dynamic=False)
    return lambda xp, *operands, **arrays: compiled(*operands, **arrays)


def _least(programs: Mapping[str, Callable[[], Any]], settings: Settings) -> dict[str, float]:
    """Time blocks of calls of each program in turn; return the least seconds of a call."""
    calls = {}
    for label, program in programs.items():
        program()
        calls[label] = max(1, min(1000, int(_BLOCK_SECONDS / _block(program, 1))))
    least = dict.fromkeys(programs, math.inf)
    gc.collect()
    begun, done = time.perf_counter(), 0
    labels = list(programs)
    while done < 5 or (done < 20 and time.perf_counter() - begun < settings.row_seconds):
        for label in labels:
            least[label] = min(least[label], _block(programs[label], calls[label]))
        labels.append(labels.pop(0))
        done += 1
    return least


_BLOCK_SECONDS = 1e-3


def _block(program: Callable[[], Any], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        result = program()
    seconds = (time.perf_counter() - begun) / calls
    del result
    return seconds
