"""Check JAX's kernels on a card against loops over groups, then time them. `planner.bench.card` is the command.

Times are medians over measurements of several runs. The second-level cache is overwritten before each run, and the time
that this takes is subtracted. The bandwidth of a copy and the rate of a large product are measured in the same process.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from planner.bench.card import (
    CardComparison,
    Item,
    Program,
    Step,
    check_items,
    comparison_items,
    law_items,
    main,
    rate_items,
)
from planner.language.cached import cached_property

# Sizes of N, I, J, K and the number of groups.
_TINY = ((50, 2, 5, 7, 4),)
_SIZES = (
    (130, 1, 20, 33, 3),
    (20_000, 1, 64, 64, 300),
    (5_000, 3, 65, 17, 7),
    (9_000, 1, 200, 300, 2),
    (70_000, 1, 8, 8, 6_600),
    (50, 256, 128, 192, 9),
    (4_000, 1, 128, 128, 10),
    (0, 1, 4, 4, 3),
    (3_000, 1, 2048, 512, 3),
)

# Of these, the sizes for kernels that the library does not choose by itself.
_FEW = _SIZES[1:3]

# Runs per measurement, and measurements.
_RUNS, _TIMES = 20, 11


class _Way:
    """A function with its arguments, compiled when it is first needed."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    @cached_property
    def compiled(self) -> Any:
        """The program of XLA."""
        import jax

        return jax.jit(self.function).lower(*self.arguments).compile()

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)


class JaxCard:
    """JAX on its first GPU, or on a CPU for `--smoke`; the methods are described in `planner.bench.card.Card`."""

    def __init__(self, smoke: bool) -> None:
        import jax

        self.smoke, self.jax, self.random = smoke, jax, np.random.default_rng(0)
        card = next((device for device in jax.devices() if device.platform == "gpu"), None)
        self.device = card and card.device_kind
        self.flush = jax.jit(lambda x: x + 1)
        self.large = jax.numpy.zeros(1024 if smoke else 1 << 27, "int8")

    def integers(self, *shape: int, dtype: str = "float32") -> Any:
        """Return random integers in [-2, 2] of a dtype, on the device."""
        return self.jax.numpy.asarray(self.random.integers(-2, 3, shape), dtype)

    def alive(self) -> bool:
        """Whether this process can still use the card."""
        try:
            return float(self.jax.numpy.ones(3).sum()) == 3
        except Exception:  # after any error the process cannot go on
            return False

    def seconds(self, program: Program) -> float:
        """Return the median seconds of many runs."""
        program()
        runs, times = (1, 3) if self.smoke else (_RUNS, _TIMES)

        def several(what: list[Program]) -> float:
            self.jax.block_until_ready([each() for each in what])
            begun = time.perf_counter()
            for _ in range(runs):
                last = [each() for each in what]
            self.jax.block_until_ready(last)
            return time.perf_counter() - begun

        flush = partial(self.flush, self.large)
        differences = [several([flush, program]) - several([flush]) for _ in range(times)]
        return max(0.0, statistics.median(differences) / runs)

    def extra_bytes(self, program: Program) -> int | None:
        """Return the bytes that XLA allocates for a run beside its arguments; None if it does not say."""
        memory = program.compiled.memory_analysis() if isinstance(program, _Way) else None
        return None if memory is None else int(memory.temp_size_in_bytes + memory.output_size_in_bytes)

    def figures(self, program: Program) -> Mapping[str, Any]:
        """Return the time of a program, and the memory that it takes."""
        return {"seconds": self.seconds(program), "extra_bytes": self.extra_bytes(program)}

    def kernels(self) -> dict[str, Any]:
        """Return the kernels of grouped products by name: stock XLA's, JAX's `ragged_dot`, and Mosaic's where they run.

        Mosaic's run in both orders of programs; see `planner.kernels.grouped_matmul.pallas_gpu.GRID`.
        """
        from planner.backends.jax.evaluation import hopper
        from planner.kernels.grouped_matmul import jax_grouped

        kernels: dict[str, Any] = {"stock": jax_grouped.CARD, "taken, ragged_dot": _Ragged(jax_grouped.ragged_matmul)}
        if self.smoke or hopper():
            from planner.kernels.grouped_matmul import pallas_gpu

            if self.smoke:
                from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

                pallas_gpu.INTERPRET = InterpretGPUParams()
            kernels["kernel"] = pallas_gpu.KERNELS
            kernels["kernel, tile after tile"] = _in_order(pallas_gpu, ("column", "row", "tile"))
        return kernels

    def steps(self) -> Iterator[Step]:
        """Yield the steps: checks, rates, what `ragged_dot` is compiled to, and whole calls."""
        yield Step("checks", 150, lambda: check_items(self.checks()))
        yield Step("specs", 60, lambda: law_items("jax", self.smoke))
        yield Step("prices", 40, lambda: rate_items(self.rates()))
        yield Step("ragged_dot", 50, self.ragged)
        yield Step("calls", 240, lambda: comparison_items(self.comparisons(), self.figures))

    def ragged(self) -> Iterator[Item]:
        """Yield for each dtype what XLA makes of `ragged_dot`: cuDNN's kernel, or products with all matrices."""
        for dtype in ("float32",) if self.smoke else ("float32", "bfloat16", "float16"):
            for what in ("forward", "gradient of the matrices"):
                yield Item({"what": f"ragged_dot {dtype}, {what}"}, partial(self.ragged_program, dtype, what))

    def ragged_program(self, dtype: str, what: str) -> Mapping[str, Any]:
        """Return the calls of XLA's program, how large its temporaries are, and its time."""
        jax, (t, width, e) = self.jax, (64, 16, 2) if self.smoke else (32_768, 1024, 32)
        a, c = self.integers(t, width, dtype=dtype), self.integers(e, width, width, dtype=dtype)
        counts = jax.numpy.full((e,), t // e, "int32")

        def product(c: Any, a: Any, counts: Any) -> Any:
            return jax.lax.ragged_dot(a, c, counts)

        def gradient(c: Any, a: Any, counts: Any) -> Any:
            return jax.grad(lambda c: product(c, a, counts).astype("float32").sum())(c)

        way = _Way(product if what == "forward" else gradient, c, a, counts)
        text = way.compiled.as_text()
        calls = sorted(set(re.findall(r'custom_call_target="([^"]+)"', text)))
        memory = way.compiled.memory_analysis()
        dense = bool(re.search(rf"\[{e},{t},{width}\]", text))
        return {
            "calls": calls,
            "dense": dense,
            "temp_bytes": int(memory.temp_size_in_bytes),
            "seconds": self.seconds(way),
        }

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield a name and a check for each kernel, dtype and size. Checks use small integers and compare exactly."""
        for dtype in ("bfloat16",) if self.smoke else ("bfloat16", "float16", "float32"):
            for sizes in _TINY if self.smoke else _TINY + _SIZES:
                for name in self.kernels():
                    if name in ("stock", "kernel") or sizes in _TINY + _FEW:
                        yield f"{name} {dtype} {sizes}", partial(self.grouped, name, dtype, *sizes)
                # Plans of small problems may round twice, where an intermediate is of 16 bits.
                if not self.smoke and (dtype == "float32" or sizes[0] >= 4_000):
                    yield f"contract {dtype} {sizes}", partial(self.contracted, dtype, *sizes)
        yield "repeated", partial(self.repeated, 3 if self.smoke else 100)

    def problem(self, dtype: str, n: int, i: int, j: int, k: int, g: int) -> tuple[Any, ...]:
        """Return rows, matrices, a gradient, and an index that drops some rows."""
        arrays = (self.integers(*x, dtype=dtype) for x in ((n, i, j), (g, j, k), (n, i, k)))
        return *arrays, self.random.integers(0, g + 1, n)

    def grouped(self, name: str, dtype: str, n: int, i: int, j: int, k: int, g: int) -> str:
        """Compare the kernels of a name with loops over groups."""
        from planner.kernels.grouping.jax_grouping import group_rows

        kernels = self.kernels()[name]
        a, c, gradient, q = self.problem(dtype, n, i, j, k, g)

        def whole(a: Any, c: Any, gradient: Any, q: Any) -> Any:
            index = group_rows(q, g)
            product = kernels.grouped_matmul(a, c, index)
            if isinstance(kernels, _Ragged):
                return (product,)
            gradients = kernels.grouped_gradients(gradient, a, c, index)
            return product, *gradients, kernels.grouped_outer(a, gradient, index, g)

        found, wanted = self.jax.jit(whole)(a, c, gradient, q), _looped(a, c, gradient, q)
        return _difference(found, (*wanted, wanted[2])[: len(found)])

    def contracted(self, dtype: str, n: int, i: int, j: int, k: int, g: int) -> str:
        """Compare a contraction and its gradients with loops over groups."""
        import planner

        a, c, gradient, q = self.problem(dtype, n, i, j, k, g)

        def whole(a: Any, c: Any, gradient: Any, q: Any) -> Any:
            result, pullback = self.jax.vjp(
                lambda a, c: planner.contract("nij, q[n]jk -> nik", a, c, q=q, index_mode="drop"), a, c
            )
            return (result, *pullback(gradient))

        return _difference(self.jax.jit(whole)(a, c, gradient, q), _looped(a, c, gradient, q))

    def repeated(self, times: int) -> str:
        """Say whether equal calls differ in bits; "" if not."""
        jax = self.jax
        n, g = (60, 3) if self.smoke else (131_072, 50)
        a, c, w = (jax.random.normal(jax.random.key(0), x, "bfloat16") for x in ((n, 1, 64), (g, 64, 64), (n, 1, 64)))
        q = jax.numpy.asarray(self.random.integers(0, g, n))
        program = _Way(_gradients, a, c, q, w)
        first = program()
        for _ in range(times):
            if not all(bool((x == y).all()) for x, y in zip(program(), first, strict=True)):
                return "equal calls differ"
        return ""

    def rates(self) -> Iterator[tuple[str, Callable[[], float]]]:
        """Yield bytes a second of a copy, and FLOP/s of a large product in each dtype."""
        yield "copy, bytes/s", self.copy_rate
        for dtype in ("float32",) if self.smoke else ("float32", "bfloat16", "float16"):
            yield f"{dtype}, FLOP/s", partial(self.product_rate, dtype)

    def copy_rate(self) -> float:
        """Measure bytes a second that a copy reads and writes."""
        x = self.jax.numpy.zeros(1024 if self.smoke else 1 << 28)
        return float(2 * x.nbytes / max(1e-9, self.seconds(_Way(lambda x: x + 1, x))))

    def product_rate(self, dtype: str) -> float:
        """Measure FLOP/s of a large product."""
        side = 64 if self.smoke else 8192
        m = self.integers(side, side, dtype=dtype)
        return 2 * side**3 / max(1e-9, self.seconds(_Way(self.jax.numpy.matmul, m, m)))

    def comparisons(self) -> Iterator[tuple[str, Callable[[], Iterator[CardComparison]]]]:
        """Yield families of comparisons, whose first way is the library's."""
        for dtype in ("float32",) if self.smoke else ("float32", "bfloat16"):
            yield f"seed-gathered-matmul {dtype}", partial(self.seed_matmul, dtype)
        yield "experts", self.experts

    def seed_matmul(self, dtype: str) -> Iterator[CardComparison]:
        """Compare ways to multiply each row by the matrix that its index names."""
        from planner.kernels.grouping.jax_grouping import group_rows

        jax, jnp, small = self.jax, self.jax.numpy, self.smoke
        n, j, g = (60, 16, 3) if small else (131_072, 64, 2048)
        a, c, w = (self.integers(*x, dtype=dtype) for x in ((n, 1, j), (g, j, j), (n, 1, j)))
        q = jnp.asarray(self.random.integers(0, g, n))
        size = a.dtype.itemsize * (2 * n * j + g * j * j)

        def naive(a: Any, c: Any, q: Any) -> Any:
            return jnp.einsum("nij,njk->nik", a, c[q])

        ways = {"planner": _Way(_contracted, a, c, q), "einsum(a, c[q])": _Way(naive, a, c, q)}
        for name, kernels in () if small else self.kernels().items():
            ways[name] = _Way(
                lambda a, c, q, kernels=kernels, g=g: kernels.grouped_matmul(a, c, group_rows(q, g)), a, c, q
            )
        yield CardComparison(f"seed-gathered-matmul {dtype}, forward", ways, size)

        def naive_gradients(a: Any, c: Any, q: Any, w: Any, naive: Any = naive) -> Any:
            result, pullback = jax.vjp(lambda a, c: naive(a, c, q), a, c)
            return (result, *pullback(w))

        ways = {"planner": _Way(_gradients, a, c, q, w), "einsum(a, c[q])": _Way(naive_gradients, a, c, q, w)}
        yield CardComparison(f"seed-gathered-matmul {dtype}, with gradients", ways, 2.65 * size)

    def experts(self) -> Iterator[CardComparison]:
        """Compare ways to run a layer of experts."""
        from planner.kernels.grouping.jax_grouping import group_rows

        jax, jnp, small = self.jax, self.jax.numpy, self.smoke
        t, width, e = (64, 16, 2) if small else (32_768, 2048, 32)
        dtype = "float32" if small else "bfloat16"
        a, c, w = (self.integers(*x, dtype=dtype) for x in ((t, 1, width), (e, width, width), (t, 1, width)))
        q = jnp.asarray(np.sort(self.random.integers(0, e, t)))
        counts = jnp.bincount(q, length=e)
        ways = {
            "planner": _Way(_contracted, a, c, q),
            "ragged_dot": _Way(lambda a, c, counts: jax.lax.ragged_dot(a[:, 0], c, counts), a, c, counts),
        }
        for name, kernels in () if small else self.kernels().items():
            ways[name] = _Way(lambda a, c, q, kernels=kernels: kernels.grouped_matmul(a, c, group_rows(q, e)), a, c, q)
        yield CardComparison(f"experts {dtype}, forward, {2 * t * width * width / 1e9:.0f} GFLOP", ways, 0.0)
        yield CardComparison(f"experts {dtype}, with gradients", {"planner": _Way(_gradients, a, c, q, w)}, 0.0)


class _Ragged(NamedTuple):
    """JAX's `ragged_dot` in the place of kernels; it has no gradients of its own."""

    grouped_matmul: Callable[..., Any]


def _in_order(module: Any, order: tuple[str, ...]) -> Any:
    """Return a module's kernels with another order of programs. It matters while they are traced."""

    def ordered(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            before, module.GRID = module.GRID, order
            try:
                return function(*arguments, **options)
            finally:
                module.GRID = before

        return run

    kernels = module.KERNELS
    return kernels._replace(product=ordered(kernels.product), outer=ordered(kernels.outer))


def _contracted(a: Any, c: Any, q: Any) -> Any:
    import planner

    return planner.contract("nij, q[n]jk -> nik", a, c, q=q)


def _gradients(a: Any, c: Any, q: Any, w: Any) -> Any:
    """Return the result and both gradients."""
    import jax

    result, pullback = jax.vjp(lambda a, c: _contracted(a, c, q), a, c)
    return (result, *pullback(w))


def _looped(a: Any, c: Any, gradient: Any, q: Any) -> tuple[Any, Any, Any]:
    """Return the product and both gradients, computed group by group in float64."""
    a, c, gradient = (np.asarray(x, "float64") for x in (a, c, gradient))
    out, to_a, to_c = np.zeros(gradient.shape), np.zeros(a.shape), np.zeros(c.shape)
    for group in np.unique(q[q < len(c)]):
        rows = np.flatnonzero(q == group)
        out[rows], to_a[rows] = a[rows] @ c[group], gradient[rows] @ c[group].T
        to_c[group] = np.einsum("nij,nik->jk", a[rows], gradient[rows], optimize=True)
    return out, to_a, to_c


def _difference(found: Any, expected: Any) -> str:
    """Say how many entries differ from the exact numbers rounded to the dtype; "" if none does."""
    wrong = sum(
        int((np.asarray(x, "float64") != y.astype(x.dtype).astype("float64")).sum())
        for x, y in zip(found, expected, strict=True)
    )
    return "" if not wrong else f"{wrong} entries differ"


CARD = JaxCard

if __name__ == "__main__":
    sys.exit(main(["--part", "jax", *sys.argv[1:]]))
