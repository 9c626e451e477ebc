"""The rates of one framework on one device, measured in a lab.

Most rates are measured by steps of the backend's own table, on shapes at which one rate decides the time. Rates of
memory are measured by fills and copies. Every time is the least of several, and every random array has a fixed seed.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import importlib.util
import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from planner.calibrate.labs import Lab
from planner.cost.device import CACHED_SHARE, Device
from planner.cost.products import CLASSES, SIDES
from planner.language.resolve import resolve
from planner.language.spec import Spec
from planner.program.calls import RangedIndices
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum
from planner.tune.timing import least_seconds

MEGABYTE = 2**20


def seconds_of(lab: Lab, run: Callable[[], Any], blocks: int = 4) -> float:
    """Time a call in a lab, and return the least time of it in this pass and those before."""
    return lab.least_of_passes(least_seconds(run, lab.finish, blocks))


def _step(
    lab: Lab, text: str, *shapes: tuple[int, ...], sizes: Any = None, row: str = "", **indices: Any
) -> Callable[[], Any]:
    """Return a function that runs one step in an implementation, by default the backend's stock one."""
    spec = resolve(text, *shapes, sizes=sizes, **{name: tuple(index.shape) for name, index in indices.items()})
    inputs = [lab.normal(*shape) for shape in shapes]
    return partial(_compiled(lab, spec, row), inputs, [indices[gather.array] for gather in spec.gathers])


@cache
def _compiled(lab: Lab, spec: Spec, row: str) -> Callable[..., Any]:
    """Return the function that runs a step on inputs and index arrays, compiled once for all passes."""
    op, table = Einsum(spec, "float32"), load_backend(lab.framework).table
    names = [choice.lowering for choice in table.choices(op, lab.preset)]
    kind = next(name for name in names if (name == row if row else table.rows[name].stock))
    run = table.rows[kind].prepared(op)

    def step(inputs: Any, values: Any) -> Any:
        return run(inputs, RangedIndices(False, zip(spec.gathers, values, strict=True)))

    return lab.compiled(step)


def _flop_rate(lab: Lab) -> float:
    size = _side(lab)
    return 2 * size**3 / seconds_of(lab, _step(lab, "ij,jk->ik", (size, size), (size, size)), blocks=10)


def _products(lab: Lab, launch_seconds: float) -> tuple[float, ...]:
    """Measure FLOP/s of products by shape class; on a graphics card none, where kernels have tiles of their own."""
    if lab.key.kind != "cpu":
        return ()
    shapes = [_class_shape(*each) for each in CLASSES]
    times = [seconds_of(lab, _product(lab, *shape), blocks=2) for shape in shapes]
    return tuple(
        2 * math.prod(shape) / max(seconds - launch_seconds, 0.05 * seconds)
        for shape, seconds in zip(shapes, times, strict=True)
    )


def _class_shape(batched: bool, rows: int, columns: int, terms: int) -> tuple[int, int, int, int]:
    """Return how many products of a class are timed, and of how many rows, columns and terms.

    A batch is as large as fits in a megabyte. A single product that takes less time than its launch has more of the
    sides that stand for all larger ones.
    """
    sides = [rows, columns, terms]
    if batched:
        elements = rows * terms + terms * columns + rows * columns
        return max(4, min(512, _MOST_ELEMENTS // elements)), rows, columns, terms
    large = [number for number, side in enumerate(sides) if side == SIDES[-1]]
    while large and math.prod(sides) < _LEAST_TERMS:
        for number in large:
            sides[number] *= 2
    return 1, sides[0], sides[1], sides[2]


# A batch that is timed has at most so many elements in all three arrays; a product multiplies at least so many terms.
_MOST_ELEMENTS, _LEAST_TERMS = 2**18, 2**17


def _product(lab: Lab, batch: int, rows: int, columns: int, terms: int) -> Callable[[], Any]:
    if batch > 1:
        return _step(lab, "bij,bjk->bik", (batch, rows, terms), (batch, terms, columns))
    return _step(lab, "ij,jk->ik", (rows, terms), (terms, columns))


def _side(lab: Lab) -> int:
    """Return the side of a large matrix."""
    return 64 if lab.is_tiny else 512 if lab.key.kind == "cpu" else 8192


def _half_rate(lab: Lab) -> float:
    """Measure FLOP/s in bfloat16 on a graphics card; on a processor 0, which stands for the rate of float32."""
    if lab.key.kind == "cpu":
        return 0.0
    size = _side(lab)
    x = lab.normal(size, size).bfloat16()
    return 2 * size**3 / seconds_of(lab, lambda: x @ x)


def _skinny_rate(lab: Lab) -> float:
    """Measure FLOP/s of thin products: the median over four rows, four columns, and sums of four terms."""
    size = 64 if lab.is_tiny else 1024
    shapes = [(4, size, size), (size, size, 4), (size, 4, size)]
    times = [seconds_of(lab, _step(lab, "ij,jk->ik", (m, k), (k, n))) for m, k, n in shapes]
    return statistics.median(2 * math.prod(shape) / seconds for shape, seconds in zip(shapes, times, strict=True))


def _bandwidth(lab: Lab) -> float:
    return _copied(lab, MEGABYTE if lab.is_tiny else 128 * MEGABYTE if lab.key.kind == "cpu" else 1024 * MEGABYTE)


def _copied(lab: Lab, size: int) -> float:
    """Measure bytes/s of a copy of so many bytes into memory in use: they are read, and written."""
    return 2 * size / seconds_of(lab, lab.copying(size // 4))


def _cache(lab: Lab, bandwidth: float) -> dict[str, float]:
    """Measure the bytes/s of what a cache holds, and how much it holds; and of what the outermost cache does.

    A step finds its values there if it moves no more bytes than a copy that still runs nearer to the cache's rate than
    to that of what lies beyond.
    """
    if lab.key.kind != "cpu":
        return {name: getattr(lab.preset, name) for name in _CACHES}
    sizes = [2**n for n in range(17, 27)]
    speeds = [_copied(lab, size) for size in sizes]

    def held(rate: float, beyond: float) -> int:
        near = [2 * size for size, speed in zip(sizes, speeds, strict=True) if speed >= math.sqrt(rate * beyond)]
        return max(near, default=0)

    fast = max(statistics.median(speeds[1:5]), bandwidth)
    middle = statistics.median(speeds[5:8])
    has_outer = fast > _OUTER_TIMES * middle > _OUTER_TIMES**2 * bandwidth
    inner, outer = held(fast, middle if has_outer else bandwidth), held(middle, bandwidth) if has_outer else 0
    return dict(zip(_CACHES, (inner, fast, outer, middle if outer else math.inf), strict=True))


_CACHES = ("cache_bytes", "cache_bandwidth", "outer_cache_bytes", "outer_cache_bandwidth")
# An outermost cache counts if it is so many times as fast as memory, and the inner one as it.
_OUTER_TIMES = 1.25


def _fresh(lab: Lab) -> dict[str, float]:
    """Measure what the first write to new memory costs beyond the write itself.

    Small and large allocations have a rate each, and `fresh_bytes` is the size that parts them.
    """
    if lab.key.kind != "cpu":  # the caching allocator hands out memory that was written before
        return {"fresh_bandwidth": math.inf, "reused_bandwidth": math.inf, "fresh_bytes": 0}
    sizes = [size * MEGABYTE for size in (6, 12, 20, 28, 30, 34, 36, 48, 72, 128)]
    extra = [_extra_seconds_per_byte(lab, size) for size in sizes]
    split = _best_split(extra)
    small, large = statistics.median(extra[:split]), statistics.median(extra[split:])
    if large < 2 * small:  # all sizes have the same rate
        both = 1 / statistics.median(extra)
        return {"fresh_bandwidth": both, "reused_bandwidth": both, "fresh_bytes": 0}
    # The C library's thresholds are powers of two.
    bound = next(s for s in (2**n for n in range(21, 28)) if s > sizes[split - 1])
    return {"fresh_bandwidth": 1 / large, "reused_bandwidth": 1 / small, "fresh_bytes": bound}


def _extra_seconds_per_byte(lab: Lab, size: int) -> float:
    """Measure how much longer it takes to fill new memory than old memory, in seconds per byte."""
    first, again = (seconds_of(lab, lab.filling(size // 4, anew)) for anew in (True, False))
    return max(first - again, 0.02 * again) / size


def _best_split(extra: Sequence[float]) -> int:
    """Return where to cut a list in two: the squared distances to the mean of their side are least.

    Logarithms would not do: memory that is given out again takes next to no time more, and noise would decide.
    """

    def spread(values: Sequence[float]) -> float:
        return sum((value - statistics.fmean(values)) ** 2 for value in values)

    return min(range(1, len(extra)), key=lambda at: spread(extra[:at]) + spread(extra[at:]))


def _launch_seconds(lab: Lab) -> float:
    """Measure one step on a thousand numbers. With fewer, XLA computes within the call, in two thirds of the time."""
    return seconds_of(lab, _step(lab, "ij,ij->ij", (32, 32), (32, 32)), blocks=10)


def _kernel_seconds(lab: Lab, device: Device) -> float:
    """Measure what a Triton kernel takes beyond an operator, in a step on a few numbers; 0 if there are none."""
    if lab.key.kind != "cuda" or importlib.util.find_spec("triton") is None:
        return 0.0
    run = _step(lab, "q[n]d -> nd", (4, 8), row="take, Triton", q=lab.integers(4, 100))
    return max(seconds_of(lab, run, blocks=10) - device.launch_seconds, 0.0)


def _matrix_seconds(lab: Lab) -> float:
    """Measure what each small matrix of a batch costs beyond its FLOPs, compared with one product of many columns."""
    batch, size = 16 if lab.is_tiny else 8192, 8
    run = _step(lab, "bij,bjk->bik", (batch, size, size), (batch, size, size))
    whole = _step(lab, "ij,jk->ik", (size, size), (size, batch * size))
    return max(seconds_of(lab, run) - seconds_of(lab, whole), 0.0) / batch


def _loop_seconds(lab: Lab, device: Device) -> float:
    """Measure what elementwise loops over short runs take, by the part of the prices of such steps that it makes up.

    Results fit in a cache. Of larger ones the time is mostly that of memory, and an error in it would count as loops.
    """
    if lab.key.kind != "cpu" or lab.framework == "jax":  # XLA compiles its loops
        return device.loop_seconds
    count, table = (10 if lab.is_tiny else 2048), load_backend(lab.framework).table
    ratios = []
    for text, size in (("nik,nkj->nij", 8), ("nik,nkj->nij", 3), ("ni,nj->nij", 8), ("ni,nj->nij", 3)):
        shapes = [(count, size, 1), (count, 1, size)] if "k" in text else [(count, size), (count, size)]
        op = Einsum(resolve(text, *shapes), "float32")
        free, priced = (
            table.choices(op, dataclasses.replace(device, loop_seconds=seconds))[0].cost.picoseconds / 1e12
            for seconds in (0.0, device.loop_seconds)
        )
        ratios.append(max(seconds_of(lab, _step(lab, text, *shapes)) - free, 0.0) / (priced - free))
    return device.loop_seconds * statistics.median(ratios)


def _row_seconds(lab: Lab, text: str, device: Device) -> float:
    """Measure what taking or adding a row at a random place costs beyond the rest of the step's price.

    On a processor, rows of four numbers are taken in a cache: of longer ones in memory most of the time is that of the
    bytes, and an error in it would count as rows.
    """
    takes = not text.endswith("]j")
    rows, pool, width = (32_768, 2048, 4) if takes and lab.key.kind == "cpu" else (200_000, 20_000, 16)
    if lab.is_tiny:
        rows, pool, width = 200, 20, 16
    shape, sizes = (pool if takes else rows, width), None if takes else {"q": pool}
    seconds = seconds_of(lab, _step(lab, text, shape, sizes=sizes, q=lab.integers(pool, rows)))
    op, table = Einsum(resolve(text, shape, sizes=sizes, q=(rows,)), "float32"), load_backend(lab.framework).table
    choice = next(choice for choice in table.choices(op, device) if table.rows[choice.lowering].stock)
    each = max(seconds - choice.cost.picoseconds / 1e12, 0.0) / rows
    in_cache = lab.framework == "torch" and choice.cost.bytes_moved <= device.cache_bytes
    return each / CACHED_SHARE if in_cache and not takes else each


def _sorts(lab: Lab, device: Device) -> dict[str, float]:
    """Measure a sort: what each row takes and, on a graphics card, what a sort of few rows takes with three kernels.

    One of these checks the index array, one finds where groups start, and one makes the table of tasks.
    """
    if lab.key.kind == "cpu":
        rows = lab.integers(2048, 131072)
        return {"sort_row_seconds": seconds_of(lab, lambda: lab.sort(rows)) / len(rows), "group_seconds": 0.0}
    few, many = (64, 256) if lab.is_tiny else (2**12, 2**21)
    short, long = (seconds_of(lab, partial(lab.sort, lab.integers(2048, n))) for n in (few, many))
    each = max(long - short, 0.0) / (many - few)
    kernels = 3 * (device.launch_seconds + device.kernel_seconds)
    return {"sort_row_seconds": each, "group_seconds": max(short - few * each, 0.0) + kernels}


def measure(lab: Lab, progress: Callable[[str], None] = lambda what: None) -> Device:
    """Measure the rates of one framework on one device.

    A further call with the same lab is a further pass: each time is then the least of all passes. What else runs on a
    machine may slow it down for seconds, and a rate that is what is left of one time without another depends on both.

    Args:
        lab: the framework on the device.
        progress: called with the name of each rate before it is measured.
    """
    lab.begin_pass()
    measured: dict[str, Any] = {}
    blank = Device(lab.preset.name, math.inf, math.inf, kind=lab.preset.kind)

    def device() -> Device:
        """Return a device with the rates measured so far; all other work is free on it."""
        return dataclasses.replace(blank, **measured)

    for name, run in (
        ("flop_rate", _flop_rate),
        ("half_rate", _half_rate),
        ("skinny_rate", _skinny_rate),
        ("bandwidth", _bandwidth),
        ("launch_seconds", _launch_seconds),
        ("matrix_seconds", _matrix_seconds),
    ):
        progress(name)
        measured[name] = run(lab)
        gc.collect()
    progress("products")
    measured["products"] = products = _products(lab, measured["launch_seconds"])
    if products:  # a busy machine disturbs long products more than short ones, of which the fastest counts
        large = [rate for rate, (_, *sides) in zip(products, CLASSES, strict=True) if min(sides) >= SIDES[-2]]
        measured["flop_rate"] = max(measured["flop_rate"], *large)
    gc.collect()
    progress("cache_bandwidth")
    measured |= _cache(lab, measured["bandwidth"])
    progress("fresh_bandwidth")
    measured |= _fresh(lab)
    progress("kernel_seconds")
    measured["kernel_seconds"] = _kernel_seconds(lab, device())
    progress("sort_row_seconds")
    measured |= _sorts(lab, device())
    progress("loop_seconds")
    measured["loop_seconds"] = _loop_seconds(lab, device())
    progress("take_row_seconds")
    measured["take_row_seconds"] = _row_seconds(lab, "q[n]j->nj", device())
    progress("add_row_seconds")
    measured["add_row_seconds"] = _row_seconds(lab, "nj->q[n]j", device())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"measured on {lab.key.machine} with {lab.framework} {lab.key.framework_version}, {today}"
    return dataclasses.replace(device(), name=lab.key.kind, source=source)


# The stages of a pass, and how many passes `calibrate` makes over all labs in turn.
STAGES, PASSES = 14, 3
