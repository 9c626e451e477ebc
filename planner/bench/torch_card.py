"""The Triton kernels on a card: ``python -m planner.bench.torch_card`` holds them to the CPU's, then times them.

Times are medians of `triton.testing.do_bench`, the second-level cache flushed before each run, beside the bandwidth of
a copy and the rate of a large product of the same session. Written to `docs/benchmarks/<device>.json` and `.md`.

    --smoke     tiny sizes on a CPU, under Triton's interpreter: that the command works; nothing is written
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from planner.bench.card import Program, run

__all__ = ["TorchCard"]


class TorchCard:
    """Where and how to measure."""

    def __init__(self, smoke: bool) -> None:
        if smoke:
            os.environ["TRITON_INTERPRET"] = "1"
        import torch

        self.smoke, self.place = smoke, "cpu" if smoke else "cuda"
        self.device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self.torch: Any = torch

    def integers(self, *shape: int, dtype: str = "float32", least: int = -2, most: int = 3) -> Any:
        """Integers of [least, most) in a dtype, where the kernels run."""
        made = self.torch.randint(least, most, shape, device=self.place)
        return made.to(getattr(self.torch, dtype))

    def seconds(self, program: Program) -> float:
        """The median of many runs."""
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
        """What a run allocates at most; None on a CPU."""
        if self.smoke:
            return None
        program()
        self.torch.cuda.synchronize()
        before = self.torch.cuda.memory_allocated()
        self.torch.cuda.reset_peak_memory_stats()
        kept = program()
        found = self.torch.cuda.max_memory_allocated() - before
        del kept
        return int(found)

    def correctness(self) -> Iterator[tuple[str, str]]:
        """Yield each kernel and dtype, and what is wrong with it, "" if nothing: small integers, as on the CPU."""
        from planner.kernels.gathered_dot import torch_pooled, triton_pooled
        from planner.kernels.grouped_matmul import torch_grouped, torch_grouped_mm, triton_grouped
        from planner.kernels.grouping.keys import IndexArray
        from planner.kernels.grouping.torch_grouping import group_rows
        from planner.kernels.segment_sum import triton_sum

        torch, small = self.torch, self.smoke
        dtypes = ("float32", "float64") if small else ("float16", "bfloat16", "float32", "float64")
        sizes = [(50, 2, 5, 7, 4), (130, 1, 20, 33, 3)]
        sizes += (
            []
            if small
            else [(20_000, 1, 64, 64, 300), (5_000, 3, 65, 17, 7), (9_000, 1, 200, 300, 2), (70_000, 1, 8, 8, 66_000)]
        )
        for dtype in dtypes:
            for n, i, j, k, g in sizes:
                values = self.integers(n, i, j, dtype=dtype), self.integers(g, k, j, dtype=dtype).transpose(1, 2)
                gradient, q = self.integers(n, i, k, dtype=dtype), torch.randint(0, g + 1, (n,))
                there, here = group_rows(q.to(self.place), g), group_rows(q, g)
                for name, arguments in (
                    ("grouped_matmul", values), ("grouped_outer", (values[0], gradient)),
                    ("grouped_gradients", (gradient, *values)),
                ):  # fmt: skip
                    found = getattr(triton_grouped, name)(*arguments, there)
                    expected = getattr(torch_grouped, name)(*(x.cpu() for x in arguments), here)
                    yield f"{name} {dtype} {(n, i, j, k, g)}", _difference(torch, found, expected)
                if dtype == "bfloat16" and not (j % 8 or k % 8) and g < 1024:
                    found = torch_grouped_mm.grouped_gradients(gradient, *values, there)
                    yield f"torch's grouped_mm {(n, i, j, k, g)}", _difference(torch, found, expected)
            b, q_, k, m, d = (2, 4, 5, 9, 20) if small else (4, 500, 30, 800, 32)
            query, pool = self.integers(b, q_, d, dtype=dtype), self.integers(b, m, d, dtype=dtype)
            weights, x = self.integers(b, q_, k, dtype=dtype), torch.randint(0, m + 1, (b, q_, k))
            keys, host = IndexArray(x.to(self.place)), IndexArray(x)
            found = triton_pooled.scores(query, pool, keys)
            yield (
                f"scores {dtype}",
                _difference(torch, found, torch_pooled.gathered_scores(query.cpu(), pool.cpu(), host)),
            )
            found = triton_pooled.gradients(weights, query, pool, keys)
            expected = torch_pooled.gathered_gradients(weights.cpu(), query.cpu(), pool.cpu(), host)
            yield f"gradients {dtype}", _difference(torch, found, expected)
            x, q = self.integers(k, m, d, dtype=dtype), torch.randint(0, q_ + 1, (m,))
            out = torch.empty((d, q_, k), dtype=x.dtype, device=x.device)
            groups = group_rows(q.to(self.place), q_)
            triton_sum.sum_rows(triton_sum.Rows.of(x, [1], [0, 2]), triton_sum.Rows.of(out, [1], [2, 0]), k * d, groups)
            wanted = torch.zeros(q_ + 1, k, d, dtype=torch.float64).index_add_(0, q, x.cpu().double().transpose(0, 1))
            yield f"sums of rows {dtype}", _difference(torch, out, wanted[:-1].permute(2, 0, 1).to(x.dtype))
            left, right = self.integers(k, b, d, 3, dtype=dtype), self.integers(3, m, b, d, dtype=dtype)
            out = torch.empty((m, b, k), dtype=x.dtype, device=x.device)
            triton_grouped.batched_matmul(left, right, out, [[[1], [0], [2, 3]], [[2], [3, 0], [1]], [[1], [2], [0]]])
            wanted = torch.einsum("kbde,embd->mbk", left.cpu().double(), right.cpu().double()).to(x.dtype)
            yield f"products of axes that lie apart {dtype}", _difference(torch, out, wanted)

    def repeated(self, times: int) -> str:
        """Whether equal calls give equal bits, and whether a captured graph does what the call does; "" if so."""
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

    def comparisons(self) -> Iterator[tuple[str, Mapping[str, Program], float]]:
        """Yield what is compared: its name, programs of which the first is ours, and the bytes that it must move."""
        import planner
        from planner.kernels.grouped_matmul import triton_grouped
        from planner.kernels.grouping.torch_grouping import group_rows
        from planner.kernels.tiled_product import triton_tiles

        torch, small = self.torch, self.smoke
        n, j, g = (300, 16, 5) if small else (131_072, 64, 2048)
        for dtype in ("float32",) if small else ("float32", "bfloat16"):
            a, c = (
                x.requires_grad_() for x in (self.integers(n, 1, j, dtype=dtype), self.integers(g, j, j, dtype=dtype))
            )
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
            yield f"seed-gathered-matmul {dtype}, forward", _without_gradients(torch, ways), size
            both = {label: _with_gradients(torch, way, (a, c), gradient) for label, way in ways.items()}
            yield f"seed-gathered-matmul {dtype}, with gradients", both, 2.65 * size
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
            yield f"seed-gathered-matmul {dtype}, both gradients", alone, 1.65 * size
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
        yield f"experts {dtype}, forward, {2 * t * width * width / 1e9:.0f} GFLOP", ways, 0.0
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
        yield f"seed-gathered-keys k = {k}, forward", _without_gradients(torch, ways), 0.0
        gradient = torch.ones(x.shape, device=self.place)
        both = {label: _with_gradients(torch, way, (query, keys), gradient) for label, way in ways.items()}
        yield f"seed-gathered-keys k = {k}, with gradients", both, 0.0

    def rates(self) -> dict[str, float]:
        """Bytes a second of a copy, and FLOP/s of a large product in each dtype."""
        torch, side = self.torch, 64 if self.smoke else 8192
        x = torch.zeros(1024 if self.smoke else 1 << 28, device=self.place)
        y = torch.empty_like(x)
        found = {"copy, bytes/s": 2 * x.nbytes / self.seconds(lambda: y.copy_(x))}
        for dtype in ("float32",) if self.smoke else ("float32", "bfloat16", "float16"):
            m = torch.randn(side, side, device=self.place).to(getattr(torch, dtype))
            found[f"{dtype}, FLOP/s"] = 2 * side**3 / self.seconds(partial(torch.matmul, m, m))
        return found


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


if __name__ == "__main__":
    sys.exit(run(TorchCard, "torch", __doc__))
