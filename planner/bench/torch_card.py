"""Check the Triton kernels on a card against the CPU kernels, then time them. `planner.bench.card` is the command.

Times are medians of `triton.testing.do_bench`, which flushes the second-level cache before each run. The bandwidth of a
copy and the rate of a large product are measured in the same process.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from planner.bench.card import CardComparison, Program, main

__all__ = ["CARD", "TorchCard"]

# Sizes of N, I, J, K and the number of groups.
_TINY = ((50, 2, 5, 7, 4), (130, 1, 20, 33, 3))
_SIZES = (
    (20_000, 1, 64, 64, 300),
    (5_000, 3, 65, 17, 7),
    (9_000, 1, 200, 300, 2),
    (70_000, 1, 8, 8, 66_000),
)


class TorchCard:
    """Torch on its GPU, or on a CPU for `--smoke`; the methods are described in `planner.bench.card.Card`."""

    def __init__(self, smoke: bool) -> None:
        if smoke:
            os.environ["TRITON_INTERPRET"] = "1"
        import torch

        self.smoke, self.place = smoke, "cpu" if smoke else "cuda"
        self.device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self.torch: Any = torch

    def integers(self, *shape: int, dtype: str = "float32", least: int = -2, most: int = 3) -> Any:
        """Return random integers in [least, most) of a dtype, on the device."""
        values = self.torch.randint(least, most, shape, device=self.place)
        return values.to(getattr(self.torch, dtype))

    def alive(self) -> bool:
        """Whether this process can still use the card."""
        try:
            return int(self.torch.ones(3, device=self.place).sum()) == 3
        except Exception:  # after any error the process cannot go on
            return False

    def seconds(self, program: Program) -> float:
        """Return the median seconds of many runs."""
        if not self.smoke:
            import triton.testing

            return 1e-3 * float(triton.testing.do_bench(program, warmup=50, rep=200, return_mode="median"))
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            program()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def extra_bytes(self, program: Program) -> int | None:
        """Return the most bytes that a run allocates; None on a CPU."""
        if self.smoke:
            return None
        program()
        self.torch.cuda.synchronize()
        before = self.torch.cuda.memory_allocated()
        self.torch.cuda.reset_peak_memory_stats()
        result = program()
        extra = self.torch.cuda.max_memory_allocated() - before
        del result
        return int(extra)

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield each kernel and dtype with a check of it: small integers, exactly as on the CPU."""
        for dtype in ("float32", "float64") if self.smoke else ("float16", "bfloat16", "float32", "float64"):
            for sizes in _TINY if self.smoke else _TINY + _SIZES:
                for name in ("grouped_matmul", "grouped_outer", "grouped_gradients"):
                    yield f"{name} {dtype} {sizes}", partial(self.grouped, name, dtype, *sizes)
                _, _, j, k, g = sizes
                if dtype == "bfloat16" and not (j % 8 or k % 8) and g < 1024:
                    yield f"torch's grouped_mm {sizes}", partial(self.grouped, "grouped_mm", dtype, *sizes)
            yield f"scores {dtype}", partial(self.scores, dtype)
            yield f"gradients {dtype}", partial(self.pooled_gradients, dtype)
            yield f"sums of rows {dtype}", partial(self.sums, dtype)
            yield f"products of axes that lie apart {dtype}", partial(self.batched, dtype)
        yield "repeated", partial(self.repeated, 3 if self.smoke else 100)

    def grouped(self, name: str, dtype: str, n: int, i: int, j: int, k: int, g: int) -> str:
        """Compare a grouped product with the CPU's."""
        from planner.kernels.grouped_matmul import torch_grouped, torch_grouped_mm, triton_grouped
        from planner.kernels.grouping.torch_grouping import group_rows

        a, c = self.integers(n, i, j, dtype=dtype), self.integers(g, k, j, dtype=dtype).transpose(1, 2)
        gradient, q = self.integers(n, i, k, dtype=dtype), self.torch.randint(0, g + 1, (n,))
        arguments = {
            "grouped_matmul": (a, c),
            "grouped_outer": (a, gradient),
            "grouped_gradients": (gradient, a, c),
            "grouped_mm": (gradient, a, c),
        }[name]
        module, function = (torch_grouped_mm, "grouped_gradients") if name == "grouped_mm" else (triton_grouped, name)
        found = getattr(module, function)(*arguments, group_rows(q.to(self.place), g))
        expected = getattr(torch_grouped, function)(*(x.cpu() for x in arguments), group_rows(q, g))
        return _difference(self.torch, found, expected)

    def pooled(self, dtype: str) -> tuple[Any, ...]:
        """Return queries, a pool, weights and an index into the pool."""
        b, queries, k, m, d = (2, 4, 5, 9, 20) if self.smoke else (4, 500, 30, 800, 32)
        index = self.torch.randint(0, m + 1, (b, queries, k))
        return *(self.integers(*x, dtype=dtype) for x in ((b, queries, d), (b, m, d), (b, queries, k))), index

    def scores(self, dtype: str) -> str:
        """Compare scores of queries against rows of a pool with the CPU's."""
        from planner.kernels.gathered_dot import torch_pooled, triton_pooled
        from planner.kernels.grouping.keys import IndexArray

        query, pool, _, index = self.pooled(dtype)
        found = triton_pooled.scores(query, pool, IndexArray(index.to(self.place)))
        return _difference(self.torch, found, torch_pooled.gathered_scores(query.cpu(), pool.cpu(), IndexArray(index)))

    def pooled_gradients(self, dtype: str) -> str:
        """Compare the gradients of such scores with the CPU's."""
        from planner.kernels.gathered_dot import torch_pooled, triton_pooled
        from planner.kernels.grouping.keys import IndexArray

        query, pool, weights, index = self.pooled(dtype)
        found = triton_pooled.gradients(weights, query, pool, IndexArray(index.to(self.place)))
        expected = torch_pooled.gathered_gradients(weights.cpu(), query.cpu(), pool.cpu(), IndexArray(index))
        return _difference(self.torch, found, expected)

    def sums(self, dtype: str) -> str:
        """Compare sums of rows in unusual strides with exact ones."""
        from planner.kernels.grouping.torch_grouping import group_rows
        from planner.kernels.segment_sum import triton_sum

        torch, (k, m, d, g) = self.torch, (5, 9, 20, 4) if self.smoke else (30, 800, 32, 500)
        x, q = self.integers(k, m, d, dtype=dtype), torch.randint(0, g + 1, (m,))
        out = torch.empty((d, g, k), dtype=x.dtype, device=x.device)
        source, target = triton_sum.Rows.of(x, [1], [0, 2]), triton_sum.Rows.of(out, [1], [2, 0])
        triton_sum.sum_rows(source, target, k * d, group_rows(q.to(self.place), g))
        wanted = torch.zeros(g + 1, k, d, dtype=torch.float64).index_add_(0, q, x.cpu().double().transpose(0, 1))
        return _difference(torch, out, wanted[:-1].permute(2, 0, 1).to(x.dtype))

    def batched(self, dtype: str) -> str:
        """Compare a product of arrays whose axes cannot be joined to one stride with an exact one."""
        from planner.kernels.grouped_matmul import triton_grouped

        torch, (k, m, b, d) = self.torch, (5, 9, 2, 20) if self.smoke else (30, 800, 4, 32)
        left, right = self.integers(k, b, d, 3, dtype=dtype), self.integers(3, m, b, d, dtype=dtype)
        out = torch.empty((m, b, k), dtype=left.dtype, device=left.device)
        triton_grouped.batched_matmul(left, right, out, [[[1], [0], [2, 3]], [[2], [3, 0], [1]], [[1], [2], [0]]])
        wanted = torch.einsum("kbde,embd->mbk", left.cpu().double(), right.cpu().double()).to(left.dtype)
        return _difference(torch, out, wanted)

    def repeated(self, times: int) -> str:
        """Say whether equal calls differ in bits, or a captured graph from the call; "" if neither."""
        import planner
        from planner.kernels.grouped_matmul import triton_grouped
        from planner.kernels.grouping.torch_grouping import group_rows

        torch = self.torch
        n, g = (200, 5) if self.smoke else (131_072, 50)
        a, c = torch.randn(n, 1, 64, device=self.place), torch.randn(g, 64, 64, device=self.place)
        q = torch.randint(0, g, (n,), device=self.place)
        groups = group_rows(q, g)
        gradient = torch.randn(n, 1, 64, device=self.place)

        def run() -> tuple[Any, ...]:
            with torch.no_grad():
                whole = planner.contract("nij, q[n]jk -> nik", a, c, q=q)
            gradients = triton_grouped.grouped_gradients(gradient, a, c, groups)
            return (whole, triton_grouped.grouped_matmul(a, c, groups), *gradients)

        first = run()
        for _ in range(times):
            if not all(torch.equal(x, y) for x, y in zip(run(), first, strict=True)):
                return "equal calls differ"
        if not self.smoke:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run()
            graph.replay()
            torch.cuda.synchronize()
            if not all(torch.equal(x, y) for x, y in zip(captured, first, strict=True)):
                return "a captured graph differs"
        return ""

    def comparisons(self) -> Iterator[tuple[str, Callable[[], Iterator[CardComparison]]]]:
        """Yield families of comparisons, whose first way is the library's."""
        for dtype in ("float32",) if self.smoke else ("float32", "bfloat16"):
            yield f"seed-gathered-matmul {dtype}", partial(self.seed_matmul, dtype)
        yield "experts", self.experts
        yield "seed-gathered-keys", self.seed_keys

    def seed_matmul(self, dtype: str) -> Iterator[CardComparison]:
        """Compare ways to multiply each row by the matrix that its index names."""
        import planner
        from planner.kernels.grouped_matmul import triton_grouped
        from planner.kernels.grouping.torch_grouping import group_rows
        from planner.kernels.tiled_product import triton_tiles

        torch, small = self.torch, self.smoke
        n, j, g = (300, 16, 5) if small else (131_072, 64, 2048)
        a, c = (x.requires_grad_() for x in (self.integers(n, 1, j, dtype=dtype), self.integers(g, j, j, dtype=dtype)))
        q = torch.randint(0, g, (n,), device=self.place)
        prepared, gradient = planner.group(q, g), torch.ones(n, 1, j, device=self.place, dtype=a.dtype)
        size = a.element_size() * (2 * n * j + g * j * j)

        def ours(a: Any = a, c: Any = c, q: Any = prepared) -> Any:
            return planner.contract("nij, q[n]jk -> nik", a, c, q=q)

        def loose(a: Any = a, c: Any = c, q: Any = q) -> Any:
            return planner.contract("nij, q[n]jk -> nik", a, c, q=q)

        def naive(a: Any = a, c: Any = c, q: Any = q) -> Any:
            return torch.matmul(a, c[q])

        ways: dict[str, Program] = {"planner, prepared": ours, "planner": loose, "matmul(a, c[q])": naive}
        if not small:
            ways["planner, compiled"] = torch.compile(ours, fullgraph=True)
            ways["compiled"] = torch.compile(naive)
        yield CardComparison(f"seed-gathered-matmul {dtype}, forward", _without_gradients(torch, ways), size)
        both = {label: _with_gradients(torch, way, (a, c), gradient) for label, way in ways.items()}
        yield CardComparison(f"seed-gathered-matmul {dtype}, with gradients", both, 2.65 * size)
        order, values = group_rows(q, g), (gradient, a.detach(), c.detach())
        alone: dict[str, Program] = {
            f"kernel, {tiling or 'default tiles'}": partial(
                triton_grouped.grouped_gradients, *values, order, tiling=tiling
            )
            for tiling in ("", *triton_tiles.TILINGS)
        }

        def apart(g: Any = gradient, a: Any = values[1], c: Any = values[2], order: Any = order) -> Any:
            rows = triton_grouped.grouped_matmul(g, c.transpose(1, 2), order)
            return rows, triton_grouped.grouped_outer(a, g, order)

        alone["two products"] = apart
        yield CardComparison(f"seed-gathered-matmul {dtype}, both gradients", alone, 1.65 * size)

    def experts(self) -> Iterator[CardComparison]:
        """Compare ways to run a layer of experts."""
        import planner
        from planner.kernels.grouped_matmul import triton_grouped
        from planner.kernels.grouping.torch_grouping import group_rows
        from planner.kernels.tiled_product import triton_tiles

        torch, small = self.torch, self.smoke
        t, width, e = (64, 16, 2) if small else (32_768, 2048, 32)
        dtype = "float32" if small else "bfloat16"
        a, c = self.integers(t, 1, width, dtype=dtype), self.integers(e, width, width, dtype=dtype)
        q = torch.randint(0, e, (t,), device=self.place).sort().values
        prepared = planner.group(q, e)
        ways = {"planner, prepared": lambda: planner.contract("tij, q[t]jk -> tik", a, c, q=prepared)}
        if hasattr(torch.nn.functional, "grouped_mm") and not small:
            ends = torch.bincount(q, minlength=e).cumsum(0).int()
            ways["grouped_mm"] = lambda: torch.nn.functional.grouped_mm(a[:, 0], c, offs=ends)
        # The kernels themselves, whatever the plan takes, in each tiling.
        for tiling in ("", *triton_tiles.TILINGS):
            ways[f"kernel, {tiling or 'default tiles'}"] = partial(
                triton_grouped.grouped_matmul, a, c, group_rows(q, e), tiling=tiling
            )
        yield CardComparison(f"experts {dtype}, forward, {2 * t * width * width / 1e9:.0f} GFLOP", ways, 0.0)

    def seed_keys(self) -> Iterator[CardComparison]:
        """Compare ways to score queries against the keys that are chosen for them."""
        import planner

        torch, small = self.torch, self.smoke
        b, heads, queries, pool, depth, k = (1, 1, 6, 20, 8, 4) if small else (8, 8, 1000, 1000, 32, 100)
        query, keys = (self.integers(b, heads, m, depth).requires_grad_() for m in (queries, pool))
        x = torch.randint(0, pool, (b, heads, queries, k), device=self.place)
        prepared = planner.group(x, pool)

        def scored(index: Any) -> Any:
            return planner.contract("bhqd, b h i[bhqk] d -> bhqk", query, keys, i=index)

        def gathered() -> Any:
            rows = torch.arange(b * heads, device=self.place).view(b, heads, 1, 1)
            return torch.einsum("bhqd,bhqkd->bhqk", query, keys.reshape(b * heads, pool, depth)[rows, x])

        ways = {
            "planner, prepared": lambda: scored(prepared),
            "planner": lambda: scored(x),
            "gather, then einsum": gathered,
        }
        yield CardComparison(f"seed-gathered-keys k = {k}, forward", _without_gradients(torch, ways), 0.0)
        gradient = torch.ones(x.shape, device=self.place)
        both = {label: _with_gradients(torch, way, (query, keys), gradient) for label, way in ways.items()}
        yield CardComparison(f"seed-gathered-keys k = {k}, with gradients", both, 0.0)

    def rates(self) -> Iterator[tuple[str, Callable[[], float]]]:
        """Yield bytes a second of a copy, and FLOP/s of a large product in each dtype."""
        yield "copy, bytes/s", self.copy_rate
        for dtype in ("float32",) if self.smoke else ("float32", "bfloat16", "float16"):
            yield f"{dtype}, FLOP/s", partial(self.product_rate, dtype)

    def copy_rate(self) -> float:
        """Measure bytes a second that a copy reads and writes."""
        x = self.torch.zeros(1024 if self.smoke else 1 << 28, device=self.place)
        y = self.torch.empty_like(x)
        return float(2 * x.nbytes / self.seconds(lambda: y.copy_(x)))

    def product_rate(self, dtype: str) -> float:
        """Measure FLOP/s of a large product."""
        side = 64 if self.smoke else 8192
        m = self.torch.randn(side, side, device=self.place).to(getattr(self.torch, dtype))
        return 2 * side**3 / self.seconds(partial(self.torch.matmul, m, m))


def _difference(torch: Any, found: Any, expected: Any) -> str:
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, expected)), strict=True)
    wrong = [int((x.cpu() != y).sum()) for x, y in pairs]
    return "" if not any(wrong) else f"{wrong} entries differ"


def _without_gradients(torch: Any, ways: Mapping[str, Program]) -> dict[str, Program]:
    def run(way: Program) -> Any:
        with torch.no_grad():
            return way()

    return {label: partial(run, way) for label, way in ways.items()}


def _with_gradients(torch: Any, way: Program, leaves: Any, gradient: Any) -> Program:
    return lambda: torch.autograd.grad(way(), leaves, gradient)


CARD = TorchCard

if __name__ == "__main__":
    sys.exit(main(["--part", "torch", *sys.argv[1:]]))
