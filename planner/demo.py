"""`python -m planner demo`: the four documents the library came from, run again beside it.

Each seed's author compared ways to write one contraction and asked why they differ. The demo runs those
ways and `planner.contract` on the same arrays in torch and JAX, forward and with gradients; measures time,
peak and retained bytes of each; checks that all values and gradients are equal; and answers each question in
a sentence built from the figures just measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import math
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TextIO

import numpy as np

from planner.workloads import WORKLOADS, Skew, Workload

__all__ = [
    "OURS",
    "RUNS",
    "Case",
    "Figures",
    "JaxRun",
    "Row",
    "Run",
    "TorchRun",
    "Way",
    "answers",
    "cases",
    "contraction",
    "differences",
    "direct",
    "gather_then_einsum",
    "gathered_keys",
    "main",
    "run_case",
    "table",
]

Framework = Literal["torch", "jax"]
OURS = "planner.contract"

# A program pays for the memory that the one before it gave back: without a pause equal code differs by 1.7x
# in torch, by up to 3x in JAX (on 2 cores). So there is one before each program, a short one between runs.
_PAUSE_SECONDS = {"torch": 0.05, "jax": 0.6}
_BETWEEN_SECONDS = 0.05
# A run this long is not repeated.
_LONG_SECONDS = 2.0
_TIMING_SECONDS = 0.4
_BLOCK_SECONDS = 0.005
_MOST_RUNS, _MOST_QUICK_RUNS = 5, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to write a contraction.

    Attributes:
        label: what the table calls it.
        call: takes the framework's namespace (torch or jax.numpy), the operands, and index arrays by letter.
        part: the axis and size of the part of the workload that it runs on where the whole would take
            minutes; its figures are extrapolated, and marked so.
    """

    label: str
    call: Callable[..., Any]
    part: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One contraction in one framework, and the ways to write it, the author's plainest first.

    Attributes:
        seed: number of the document it is from.
        name: what the table calls it.
        framework: where it runs.
        workload: its arrays.
        ways: what is compared; the first gives the values that all must have.
        gradients: per operand, whether it takes a gradient.
    """

    seed: str
    name: str
    framework: Framework
    workload: Workload
    ways: tuple[Way, ...]
    gradients: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one way; with gradients means forward and backward together.

    Attributes:
        seconds: forward alone, when no gradient is asked for.
        peak_bytes: most bytes newly allocated in it, the result counted.
        gradient_seconds: forward and backward.
        gradient_peak_bytes: most bytes newly allocated in both.
        retained_bytes: what stays alive between forward and backward, the result not counted.
        extrapolated: whether only a part was run.
    """

    seconds: float
    peak_bytes: float
    gradient_seconds: float
    gradient_peak_bytes: float
    retained_bytes: float
    extrapolated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: which way, what it took, and what differed ("" when nothing did)."""

    case: Case
    way: Way
    figures: Figures
    differs: str


# --- what the authors wrote ---------------------------------------------------------------------


def contraction(spec: str, **options: Any) -> Callable[..., Any]:
    """Return `planner.contract` of a spec as a way's call."""

    def call(xp: Any, *operands: Any, **indices: Any) -> Any:
        import planner

        return planner.contract(spec, *operands, **options, **indices)

    return call


def _einsum(spec: str) -> Callable[..., Any]:
    return lambda xp, *operands: xp.einsum(spec, *operands)


def _opt_einsum(spec: str) -> Callable[..., Any]:
    import opt_einsum

    return lambda xp, *operands: opt_einsum.contract(spec, *operands)


def direct(xp: Any, a: Any, c: Any, q: Any) -> Any:
    """Seed 000, as its author first wrote it."""
    return xp.matmul(a, c[q])


def _strategy1(xp: Any, a: Any, c: Any, q: Any) -> Any:
    taken = c[q]
    return xp.concatenate([xp.matmul(a[i : i + 1], taken[i]) for i in range(a.shape[0])])


def _strategy2(xp: Any, a: Any, c: Any, q: Any) -> Any:
    return xp.concatenate([xp.matmul(a[i : i + 1], c[q[i]]) for i in range(a.shape[0])])


def _strategy3(xp: Any, a: Any, c: Any, q: Any) -> Any:
    batches = [slice(start, start + 256) for start in range(0, a.shape[0], 256)]
    return xp.concatenate([xp.matmul(a[batch], c[q[batch]]) for batch in batches])


def _flattened_gemm(xp: Any, x: Any, y: Any) -> Any:
    i, j, k = x.shape
    return xp.swapaxes(x, 0, 1).reshape(j, i * k) @ y.reshape(i * k, -1)


def _two_step_sum(xp: Any, x: Any, y: Any) -> Any:
    return (x @ y).sum(0)


def _permute_flatten_matmul(xp: Any, x: Any, y: Any) -> Any:
    i, j, k, l = x.shape  # noqa: E741 (the author's letters)
    m, _, p = y.shape
    x = xp.moveaxis(x, 0, 3).reshape(j * k * l, i)
    y = xp.swapaxes(y, 0, 1).reshape(i, m * p)
    return (x @ y).reshape(j, k, l, m, p)


def _three_slices(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same product of three overlapping slices of one array, as the author's model had it."""

    def summed(xp: Any, x: Any, y: Any) -> Any:
        i = y.shape[0]
        first, middle, last = (call(xp, x[s : s + i], y) for s in (0, i // 2, i))
        return first + middle + last

    return summed


def _separate_matmul(xp: Any, queries: Any, keys: Any) -> Any:
    return xp.matmul(queries[..., None, :], xp.swapaxes(keys, -2, -1))[..., 0, :]


def _shared_matmul(xp: Any, queries: Any, keys: Any) -> Any:
    return xp.matmul(queries, xp.swapaxes(keys, -2, -1))


def gather_then_einsum(xp: Any, queries: Any, keys: Any, i: Any) -> Any:
    """Seed 003 with keys from a pool: build each query's keys, then the author's einsum."""
    return xp.einsum("bhqd,bhqkd->bhqk", queries, gathered_keys(xp, keys, i))


def gathered_keys(xp: Any, keys: Any, i: Any) -> Any:
    """Build ``keys[b, h, i[b, h, q, k]]``."""
    b, h = keys.shape[:2]
    device = {"device": keys.device} if xp.__name__ == "torch" else {}
    batch = xp.arange(b, **device)[:, None, None, None]
    head = xp.arange(h, **device)[:, None, None]
    return keys[batch, head, i]


# --- the cases ----------------------------------------------------------------------------------

_QUICK = {
    "seed-gathered-matmul": {"n": 8192, "q": 256},
    "seed-sliced-einsum": {"j": 256, "k": 128, "l": 64},
    "seed-two-by-matrices": {},
    "seed-layout": {"i": 16, "j": 8, "k": 8, "l": 16},
    "seed-outer-and-matmul": {"i": 1000},
    "seed-separate-keys": {"q": 200, "k": 50},
    "seed-gathered-keys": {"q": 200, "i": 200, "k": 50},
    "seed-gathered-keys/k1000": {"q": 200, "i": 200, "k": 200},
    "seed-shared-keys": {"q": 200, "k": 50},
    "seed-shared-keys/all": {"q": 200, "k": 200},
}


# At its full 50,000 rows the outer product and its gradients fill 12 GB.
_LEAN = {"seed-outer-and-matmul/outer-large": {"i": 10000}}


def _sized(name: str, quick: bool) -> Workload:
    workload = WORKLOADS[name].cpu().resized(**_LEAN.get(name, {}))
    if not quick:
        return workload
    wanted = _QUICK.get(name, _QUICK[name.split("/")[0]])
    now = dict(workload.sizes + workload.pools)
    return workload.resized(**{letter: min(size, now[letter]) for letter, size in wanted.items()})


def cases(framework: Framework, quick: bool = False) -> Iterator[Case]:
    """Yield every contraction of the four seeds, with the ways to write it."""

    def case(seed: str, name: str, *ways: Way, title: str = "", gradients: tuple[bool, ...] = ()) -> Case:
        workload = _sized(name, quick)
        ours = Way(OURS, contraction(workload.spec, **workload.options))
        wanted = gradients or workload.takes_gradient
        return Case(seed, title or name, framework, workload, (*ways, ours), wanted)

    gathered = "seed-gathered-matmul"
    rows = _sized(gathered, quick).output_shape[0]
    # The author's loops: torch runs them step by step, XLA unrolls them and compiles for minutes beyond a few
    # dozen.
    steps = min(rows, 256 if framework == "torch" else 32)
    batches = rows if framework == "torch" else min(rows, 2048)
    plain = Way("matmul(a, c[q])", direct)
    yield case(
        "000",
        gathered,
        plain,
        Way("strategy 1: loop", _strategy1, ("n", steps)),
        Way("strategy 2: loop", _strategy2, ("n", steps)),
        Way("strategy 3: by 256", _strategy3, ("n", batches)),
    )
    yield case("000", gathered, plain, title=f"{gathered}, only c", gradients=(False, True))

    spec = WORKLOADS["seed-sliced-einsum"].spec
    products = (
        Way("einsum", _einsum(spec)),
        Way("(x @ y).sum(0)", _two_step_sum),
        Way("flattened GEMM", _flattened_gemm),
    )
    for variant in ("", "/strided", "/k-major"):
        yield case("001", f"seed-sliced-einsum{variant}", *products)
    three = (Way(way.label, _three_slices(way.call)) for way in (*products, Way(OURS, contraction(spec))))
    yield Case("001", _THREE_SLICES, framework, _three_slices_workload(quick), tuple(three), (True, True))
    yield case("001", "seed-two-by-matrices", *products)
    layout = "seed-layout"
    by_hand = Way("permute and flatten", _permute_flatten_matmul)
    yield case("001", layout, Way("einsum", _einsum(WORKLOADS[layout].spec)), by_hand)

    for variant in ("", "/large", "/outer", "/outer-large"):
        name = f"seed-outer-and-matmul{variant}"
        einsum = Way("einsum", _einsum(WORKLOADS[name].spec))
        matmul = () if "outer" in variant else (Way("m1 @ m2", lambda xp, x, y: x @ y),)
        yield case("002", name, einsum, *matmul)

    for name, product in (
        ("seed-separate-keys", _separate_matmul),
        ("seed-shared-keys", _shared_matmul),
        ("seed-shared-keys/all", _shared_matmul),
    ):
        spec = WORKLOADS[name].spec
        peer = Way("opt_einsum.contract", _opt_einsum(spec))
        yield case("003", name, Way("einsum", _einsum(spec)), Way("matmul", product), peer)
    for name in _POOLED:
        yield case("003", name, Way("gather, einsum", gather_then_einsum))


_THREE_SLICES = "seed-sliced-einsum, three slices"
_POOLED = (
    "seed-gathered-keys/k10",
    "seed-gathered-keys/k30",
    "seed-gathered-keys",
    "seed-gathered-keys/k1000",
)


def _three_slices_workload(quick: bool) -> Workload:
    """The whole of X, from which three slices are cut inside the calls."""
    one = _sized("seed-sliced-einsum", quick)
    sizes = (*one.sizes, ("x", 2 * dict(one.sizes)["i"]))
    return dataclasses.replace(one, spec="xjk, ikl -> jl", sizes=sizes, cpu_sizes=(), views=())


# --- running ------------------------------------------------------------------------------------


def run_case(case: Case, tick: Callable[[str], None] = lambda label: None, *, quick: bool = False) -> list[Row]:
    """Run every way of a case: check its values and gradients against the first way's, and measure it."""
    rows = []
    expected: dict[Workload, list[np.ndarray[Any, Any]]] = {}
    for way in case.ways:
        tick(f"{case.name}, {case.framework}: {way.label}")
        whole, part = case.workload, case.workload
        if way.part and way.part[1] < dict(whole.sizes)[way.part[0]]:
            part = whole.resized(**dict([way.part]))
        differs, figures = _run_way(case, way, part, expected, quick)
        if part is not whole and not differs:
            axis, size = way.part or ("", 0)
            differs, half = _run_way(case, way, part.resized(**{axis: size // 2}), expected, quick)
            if not differs:
                figures = _extrapolated(figures, half, dict(whole.sizes)[axis] / size)
        rows.append(Row(case, way, figures, differs))
    return rows


def _run_way(
    case: Case,
    way: Way,
    workload: Workload,
    expected: dict[Workload, list[np.ndarray[Any, Any]]],
    quick: bool,
) -> tuple[str, Figures]:
    """Run one way on a workload: what differs from the first way's results, and if nothing, the figures."""
    runner = RUNS[case.framework]
    if workload not in expected and way is not case.ways[0]:
        expected[workload] = runner(case.ways[0], workload, case.gradients).results()
    run = runner(way, workload, case.gradients)
    results = run.results()
    differs = differences(results, expected.setdefault(workload, results))
    del results
    figures = Figures(math.nan, math.nan, math.nan, math.nan, math.nan) if differs else run.figures(quick)
    del run
    gc.collect()
    return differs, figures


def _extrapolated(part: Figures, half: Figures, times: float) -> Figures:
    """Return the figures of a whole, `times` the part, from those of the part and of half of the part.

    Time grows in proportion: it is all in the loop. Bytes have a constant share too, such as the gradient of
    an operand that every row reads, so they go up by what the second half of the part added.
    """

    def bytes_of(quantity: str) -> float:
        second_half = getattr(part, quantity) - getattr(half, quantity)
        return float(getattr(part, quantity) + 2 * second_half * (times - 1))

    return Figures(
        part.seconds * times,
        bytes_of("peak_bytes"),
        part.gradient_seconds * times,
        bytes_of("gradient_peak_bytes"),
        bytes_of("retained_bytes"),
        extrapolated=True,
    )


def differences(results: Sequence[np.ndarray[Any, Any]], expected: Sequence[np.ndarray[Any, Any]]) -> str:
    """Say what differs: integer-valued operands make every sum exact, so the comparison is `==`."""
    names = ("the value", *(f"gradient {number}" for number in range(len(expected) - 1)))
    wrong = [
        name
        for name, result, wanted in zip(names, results, expected, strict=True)
        if result.dtype != wanted.dtype or not np.array_equal(result, wanted)
    ]
    return ", ".join(wrong)


def _median_seconds(run: Callable[[], Any], framework: Framework, quick: bool) -> float:
    """Time a program; a short one in blocks, so that waking threads after a pause is not what is timed."""
    time.sleep(0 if quick else _PAUSE_SECONDS[framework])
    first = _block_seconds(run, 1)
    if first > _TIMING_SECONDS:
        return first
    calls = max(1, min(100, int(_BLOCK_SECONDS / _block_seconds(run, 1))))
    times: list[float] = []
    while not times or (len(times) < (_MOST_QUICK_RUNS if quick else _MOST_RUNS) and sum(times) < _TIMING_SECONDS):
        time.sleep(0 if quick else _BETWEEN_SECONDS)
        times.append(_block_seconds(run, calls))
    return statistics.median(times) / calls


def _block_seconds(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


class Run:
    """One way to write a contraction, on fresh arrays: what can be timed and measured of it.

    Args:
        way: what runs.
        workload: its arrays, of small integers.
        gradients: per operand, whether it takes a gradient.
        skew: how often the index arrays name each row.
    """

    framework: Framework
    checked_seconds = 0.0

    def forward(self) -> Any:
        """Run forward, no gradient asked for, to the end."""
        raise NotImplementedError

    def both(self) -> tuple[Any, ...]:
        """Run forward and backward, to the end: the value and the gradients."""
        raise NotImplementedError

    def memory(self) -> tuple[int, int, int]:
        """Measure peak bytes of `forward`, peak bytes of `both`, and retained bytes between the two."""
        raise NotImplementedError

    def results(self) -> list[np.ndarray[Any, Any]]:
        """Return the value and the gradients as NumPy arrays."""
        start = time.perf_counter()
        results = self.both()
        self.checked_seconds = time.perf_counter() - start
        return [np.asarray(x) for x in results]

    def figures(self, quick: bool) -> Figures:
        """Time and measure, after `results`."""
        # In JAX the first run compiles; in torch one that took long is not run again for its time.
        gradient_seconds = self.checked_seconds
        if self.framework == "jax" or gradient_seconds < _LONG_SECONDS:
            gradient_seconds = _median_seconds(self.both, self.framework, quick)
        self.forward()  # warm: a plan is found, and XLA compiles, once
        seconds = _median_seconds(self.forward, self.framework, quick)
        peak_bytes, gradient_peak_bytes, retained_bytes = self.memory()
        return Figures(seconds, peak_bytes, gradient_seconds, gradient_peak_bytes, retained_bytes)


class TorchRun(Run):
    """One way in torch, eager."""

    framework = "torch"

    def __init__(self, way: Way, workload: Workload, gradients: tuple[bool, ...], skew: Skew = "uniform") -> None:
        import torch

        self.way, self.torch = way, torch
        self.plain = workload.operands("torch")
        self.indices = workload.indices("torch", skew=skew)
        self.cotangent = workload.cotangent("torch")
        masked = dataclasses.replace(workload, gradients=gradients)
        self.operands = masked.operands("torch", requires_grad=True)
        self.wanted = [x for x, wanted in zip(self.operands, gradients, strict=True) if wanted]

    def forward(self) -> Any:
        """Run forward, no gradient asked for."""
        return self.way.call(self.torch, *self.plain, **self.indices)

    def forward_kept(self) -> Any:
        """Run forward, and keep what the backward will need."""
        return self.way.call(self.torch, *self.operands, **self.indices)

    def both(self) -> tuple[Any, ...]:
        """Run forward and backward: the value and the gradients."""
        result = self.forward_kept()
        return (result.detach(), *self.torch.autograd.grad(result, self.wanted, self.cotangent))

    def memory(self) -> tuple[int, int, int]:
        """Count torch's own allocations."""
        from planner.testing.measure import torch_memory

        _, forward = torch_memory(self.forward)
        _, kept = torch_memory(self.forward_kept)
        _, both = torch_memory(self.both)
        return forward.peak_bytes, both.peak_bytes, kept.retained_bytes


class JaxRun(Run):
    """One way in JAX, jitted."""

    framework = "jax"

    def __init__(self, way: Way, workload: Workload, gradients: tuple[bool, ...], skew: Skew = "uniform") -> None:
        import jax
        import jax.numpy as jnp

        operands = workload.operands("jax")
        wanted = tuple(x for x, takes in zip(operands, gradients, strict=True) if takes)
        fixed = {number: x for number, x in enumerate(operands) if not gradients[number]}

        def forward(wanted: tuple[Any, ...], fixed: dict[int, Any], indices: dict[str, Any]) -> Any:
            rest = iter(wanted)
            whole = (fixed[number] if number in fixed else next(rest) for number in range(len(operands)))
            return way.call(jnp, *whole, **indices)

        def both(
            wanted: tuple[Any, ...], fixed: dict[int, Any], indices: dict[str, Any], cotangent: Any
        ) -> tuple[Any, ...]:
            result, pullback = jax.vjp(lambda *w: forward(w, fixed, indices), *wanted)
            return (result, *pullback(cotangent))

        self.ready: Callable[[Any], Any] = jax.block_until_ready
        self.arguments = (wanted, fixed, workload.indices("jax", skew=skew))
        self.cotangent = workload.cotangent("jax")
        self.traced_forward, self.traced_both = forward, both
        self.jitted_forward, self.jitted_both = jax.jit(forward), jax.jit(both)

    def forward(self) -> Any:
        """Run forward, no gradient asked for, to the end."""
        return self.ready(self.jitted_forward(*self.arguments))

    def both(self) -> tuple[Any, ...]:
        """Run forward and backward, to the end: the value and the gradients."""
        results: tuple[Any, ...] = self.ready(self.jitted_both(*self.arguments, self.cotangent))
        return results

    def temporary_bytes(self) -> tuple[int, int]:
        """Ask XLA for the temporaries of `forward` and of `both`: results are not counted."""
        from planner.testing.measure import jax_temp_bytes

        return (
            jax_temp_bytes(self.traced_forward, *self.arguments),
            jax_temp_bytes(self.traced_both, *self.arguments, self.cotangent),
        )

    def memory(self) -> tuple[int, int, int]:
        """Ask XLA for temporaries, the results added; and outside jit, count what the pullback holds."""
        from planner.testing.measure import jax_retained

        wanted, fixed, indices = self.arguments
        forward, both = self.temporary_bytes()
        retained = jax_retained(lambda *w: self.traced_forward(w, fixed, indices), *wanted, held=(fixed, indices))
        result_bytes = int(self.cotangent.nbytes)
        gradient_bytes = sum(int(x.nbytes) for x in wanted)
        return forward + result_bytes, both + result_bytes + gradient_bytes, retained


RUNS: dict[Framework, type[TorchRun] | type[JaxRun]] = {"torch": TorchRun, "jax": JaxRun}


# --- the table and the answers ------------------------------------------------------------------


def _bytes(count: float) -> str:
    if math.isnan(count):
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _seconds(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


_HEADINGS = ("", "forward", "peak", "with gradients", "peak", "retained", "values")


def _cells(row: Row) -> tuple[str, ...]:
    figures, about = row.figures, "~" if row.figures.extrapolated else ""
    measured = (
        _seconds(figures.seconds),
        _bytes(figures.peak_bytes),
        _seconds(figures.gradient_seconds),
        _bytes(figures.gradient_peak_bytes),
        _bytes(figures.retained_bytes),
    )
    verdict = f"DIFFERS: {row.differs}" if row.differs else "equal"
    return (f"  {row.way.label}", *(about + cell for cell in measured), verdict)


def table(rows: Sequence[Row]) -> str:
    """Lay out all rows, grouped by contraction and framework."""
    lines: list[tuple[str, ...]] = []
    previous: Case | None = None
    for row in rows:
        if row.case is not previous:
            shapes = " and ".join("x".join(map(str, shape)) for shape in row.case.workload.shapes)
            lines.append((f"{row.case.name}   {row.case.workload.spec}   {shapes}   {row.case.framework}",))
        previous = row.case
        lines.append(_cells(row))
    full = [line for line in (_HEADINGS, *lines) if len(line) > 1]
    widths = [max(len(line[column]) for line in full) for column in range(len(_HEADINGS))]

    def laid_out(line: tuple[str, ...]) -> str:
        if len(line) == 1:
            return f"\n{line[0]}"
        cells = (cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True))
        return "  ".join((line[0].ljust(widths[0]), *cells, line[-1]))

    text = "\n".join(laid_out(line) for line in (_HEADINGS, *lines))
    if any(row.figures.extrapolated for row in rows):
        text += "\n\n~ run on a part of the rows, and extrapolated"
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """The figures of one case, ours apart, and the sizes that were run."""

    sizes: dict[str, int]
    ours: Figures
    theirs: dict[str, Figures]

    def best(self, quantity: str) -> tuple[str, float]:
        """The author's way with the least of a quantity, and how much that is."""
        label = min(self.theirs, key=lambda way: getattr(self.theirs[way], quantity))
        return label, getattr(self.theirs[label], quantity)


def _seen(rows: Sequence[Row], framework: str) -> dict[str, _Seen]:
    found: dict[str, _Seen] = {}
    for name in dict.fromkeys(row.case.name for row in rows if row.case.framework == framework):
        of_case = [r for r in rows if r.case.name == name and r.case.framework == framework]
        if any(row.differs for row in of_case):
            continue
        ours = next(row.figures for row in of_case if row.way.label == OURS)
        theirs = {row.way.label: row.figures for row in of_case if row.way.label != OURS}
        found[name] = _Seen(dict(of_case[0].case.workload.sizes), ours, theirs)
    return found


def _speed(theirs: float, ours: float) -> str:
    """Ours against theirs, in words that turn with the figures."""
    ratio = theirs / ours
    if 0.9 <= ratio <= 1.1:
        return "as fast as"
    return f"{ratio:.2g}x faster than" if ratio > 1 else f"{1 / ratio:.2g}x slower than"


def answers(rows: Sequence[Row]) -> list[str]:
    """Answer each seed's question, per framework, by what the figures say."""
    found = []
    for framework in dict.fromkeys(row.case.framework for row in rows):
        seen = _seen(rows, framework)
        for answer in (_answer_000, _answer_001, _answer_002, _answer_003):
            found += [f"{line[0]} ({framework}): {line[1]}" for line in answer(seen)]
    return found


_Answers = Iterator[tuple[str, str]]


def _answer_000(seen: dict[str, _Seen]) -> _Answers:
    """Why does it take that much memory, and is there a way both fast and small?"""
    both, only = seen.get("seed-gathered-matmul"), seen.get("seed-gathered-matmul, only c")
    if both is None or only is None:
        return
    ours = both.ours
    label, fastest = both.best("gradient_seconds")
    forward_label, forward_fastest = both.best("seconds")
    small, smallest = both.best("gradient_peak_bytes")
    verdict = {
        (True, True): "Yes, both at once",
        (True, False): "Fast, but not the smallest",
        (False, True): "Small, but not the fastest",
        (False, False): "No",
    }[ours.gradient_seconds < fastest and ours.seconds < forward_fastest, ours.gradient_peak_bytes < smallest]
    yield (
        "000, can it be fast and take little memory?",
        f"{verdict}. With gradients contract is {_speed(fastest, ours.gradient_seconds)} the fastest of the "
        f"author's ways ({label}), forward {_speed(forward_fastest, ours.seconds)} {forward_label}. "
        f"It peaks at {_bytes(ours.gradient_peak_bytes)}, the smallest of the others ({small}) at "
        f"{_bytes(smallest)}, and retains {_bytes(ours.retained_bytes)}.",
    )
    label = "matmul(a, c[q])"
    kept, dropped = both.theirs[label].retained_bytes, only.theirs[label].retained_bytes
    if kept > 10 * dropped:
        reason = "c[q] is a new tensor that only a's gradient reads; c's gradient reads a."
    else:
        reason = "here the copy is kept, or dropped, alike in both."
    yield (
        "000, why is the copy kept when A takes a gradient, and released when not?",
        f"{label} retains {_bytes(kept)} when a and c take gradients and {_bytes(dropped)} when only c "
        f"does: {reason} contract retains {_bytes(ours.retained_bytes)} and "
        f"{_bytes(only.ours.retained_bytes)}.",
    )


def _answer_001(seen: dict[str, _Seen]) -> _Answers:
    """Does it consider the options that einsum does not, and select the most efficient?"""
    layouts = {name: case for name, case in seen.items() if "(x @ y).sum(0)" in case.theirs}
    if not layouts:
        return
    keeps_more, slower = (
        [name for name, c in layouts.items() if getattr(c.ours, quantity) > slack * c.best(quantity)[1]]
        for quantity, slack in (("retained_bytes", 1.0), ("gradient_seconds", 1.1))
    )
    verdict = "Not everywhere" if keeps_more or slower else "Yes"
    least = f"more than the best way on {', '.join(keeps_more)}" if keeps_more else "no more than any other way"
    pace = f"slower than the fastest on {', '.join(slower)}" if slower else "as fast as the fastest everywhere"
    name = _THREE_SLICES if _THREE_SLICES in layouts else next(iter(layouts))
    ours, einsum, two_step = (
        layouts[name].ours,
        *(layouts[name].theirs[w] for w in ("einsum", "(x @ y).sum(0)")),
    )
    yield (
        "001, does it select the most efficient option where einsum does not?",
        f"{verdict}. contract retains {least}, and is {pace} (within 10%, with gradients). On {name}, einsum "
        f"retains {_bytes(einsum.retained_bytes)}, the two-step sum {_bytes(two_step.retained_bytes)}, "
        f"contract {_bytes(ours.retained_bytes)}; contract is "
        f"{_speed(einsum.gradient_seconds, ours.gradient_seconds)} einsum and "
        f"{_speed(two_step.gradient_seconds, ours.gradient_seconds)} the two-step sum.",
    )


def _answer_002(seen: dict[str, _Seen]) -> _Answers:
    """What about speed?"""
    case = seen.get("seed-outer-and-matmul/large")
    if case is None:
        return
    ours, matmul, einsum = case.ours, case.theirs["m1 @ m2"], case.theirs["einsum"]
    yield (
        "002, what about the speed of einsum against matmul?",
        f"ik,kj->ij takes {_seconds(ours.seconds)} as contract, {_seconds(matmul.seconds)} as m1 @ m2 and "
        f"{_seconds(einsum.seconds)} as einsum: contract is {_speed(matmul.seconds, ours.seconds)} the "
        f"product forward, and {_speed(matmul.gradient_seconds, ours.gradient_seconds)} it with gradients.",
    )


def _answer_003(seen: dict[str, _Seen]) -> _Answers:
    """Why are separate keys so much slower at the same FLOPs, and is there a way around it?"""
    separate, shared = seen.get("seed-separate-keys"), seen.get("seed-shared-keys")
    if separate and shared:
        ratio = separate.theirs["einsum"].seconds / shared.theirs["einsum"].seconds
        keys = [4 * math.prod(WORKLOADS[name].shapes[1]) for name in ("seed-separate-keys", "seed-shared-keys")]
        times = f"{keys[0] // keys[1]}x the bytes at full size"
        reason = (
            f"the FLOPs are the same, the keys to read are not: {_bytes(keys[0])} against {_bytes(keys[1])}, {times}."
            if ratio > 1.5
            else f"although there are more keys to read, {times}."
        )
        yield (
            "003, why do separate keys take longer at the same FLOPs?",
            f"einsum takes {ratio:.2g}x the time with separate keys; {reason}",
        )
    pooled = [(seen[name].sizes["k"], seen[name]) for name in _POOLED if name in seen]
    if not pooled:
        return
    forward, both = (
        [case.best(quantity)[1] / getattr(case.ours, quantity) for _, case in pooled]
        for quantity in ("seconds", "gradient_seconds")
    )
    verdict = "Yes" if min(forward + both) >= 0.9 and forward[-1] > 1.5 and both[-1] > 1.5 else "Not always"
    last = pooled[-1][1]
    yield (
        "003, is there a way around it?",
        f"{verdict}. Where the keys are taken from a pool, contract is, against gathering and then einsum, "
        f"{', '.join(f'{gain:.2g}x' for gain in forward)} as fast at k = "
        f"{', '.join(str(k) for k, _ in pooled)}, and "
        f"{', '.join(f'{gain:.2g}x' for gain in both)} with gradients; at the largest k it peaks at "
        f"{_bytes(last.ours.gradient_peak_bytes)} against {_bytes(last.best('gradient_peak_bytes')[1])}.",
    )


# --- the command --------------------------------------------------------------------------------


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.total, self.done, self.stream = total, 0, stream
        self.shown = stream.isatty()

    def tick(self, label: str) -> None:
        """Show what begins now."""
        if self.shown:
            filled = 24 * self.done // max(self.total, 1)
            bar = "#" * filled + "." * (24 - filled)
            self.stream.write(f"\r\033[K[{bar}] {self.done}/{self.total}  {label}"[:110])
            self.stream.flush()
        self.done += 1

    def clear(self) -> None:
        """Take the bar away."""
        if self.shown:
            self.stream.write("\r\033[K")
            self.stream.flush()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").split("\n\n")[1]
    parser = argparse.ArgumentParser("python -m planner demo", description=about)
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute at most; the times say little")
    parser.add_argument("--framework", choices=("torch", "jax"), help="one framework instead of both")
    parser.add_argument("--only", default="", metavar="NAME", help="only the cases whose name begins so")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 when all values and gradients are equal, 1 when any differs."""
    options = _arguments(argv)
    asked: tuple[Framework, ...] = (options.framework,) if options.framework else ("torch", "jax")
    installed = [framework for framework in asked if importlib.util.find_spec(framework)]
    for missing in set(asked) - set(installed):
        print(f"{missing} is not installed: pip install 'contraction-planner[{missing}]'", file=sys.stderr)
    chosen = [
        case
        for framework in installed
        for case in cases(framework, options.quick)
        if case.name.startswith(options.only)
    ]
    if not chosen:
        print("nothing to run", file=sys.stderr)
        return 2
    progress = _Progress(sum(len(case.ways) for case in chosen), sys.stderr)
    rows = [row for case in chosen for row in run_case(case, progress.tick, quick=options.quick)]
    progress.clear()
    print(table(rows))
    print()
    for answer in answers(rows):
        print(textwrap.fill(answer, 110), end="\n\n")
    wrong = [row for row in rows if row.differs]
    for row in wrong:
        print(f"{row.case.name}, {row.case.framework}, {row.way.label}: {row.differs} differs")
    print("All values and gradients are equal." if not wrong else f"{len(wrong)} of {len(rows)} ways differ.")
    return 1 if wrong else 0
