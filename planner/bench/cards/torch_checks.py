"""Checks of the Triton kernels on a card: small integers, exactly as the CPU's kernels compute them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

# Sizes of N, I, J, K and the number of groups.
_TINY = ((50, 2, 5, 7, 4), (130, 1, 20, 33, 3))
_SIZES = (
    (20_000, 1, 64, 64, 300),
    (5_000, 3, 65, 17, 7),
    (9_000, 1, 200, 300, 2),
    (70_000, 1, 8, 8, 66_000),
)


class TorchChecks:
    """Torch on its GPU, or on a CPU for `--smoke`.

    Attributes:
        device: the card's name; None if there is no card.
        place: the name of torch's device.
    """

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

    def poison(self) -> None:
        """Fill memory that torch hands out next with NaN: results that a kernel leaves unwritten are then seen."""
        for size in (1 << 12, 1 << 20, 1 << (21 if self.smoke else 27)):
            self.torch.full((size,), float("nan"), device=self.place)

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
            yield f"takes {dtype}", partial(self.takes, dtype)
            for inner in (3, 70):
                yield f"rows that are taken, {inner} a matrix, {dtype}", partial(self.taken, dtype, inner)
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
        self.poison()
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

    def takes(self, dtype: str) -> str:
        """Compare rows that are taken or dropped with torch's: of some widths, and through two index arrays."""
        from planner.kernels.take import Read, triton_take

        torch, (n, m) = self.torch, (50, 9) if self.smoke else (200_000, 3_000)
        q, r = torch.randint(0, m + 1, (n,)), torch.randint(0, 4, (n,))
        one, two = ((0,), ((0,), ())), ((1,), ((0,), ()))
        found, expected = [], []
        for width in (1, 5, 64) if self.smoke else (1, 5, 64, 300):
            x = self.integers(m, 4, width, dtype=dtype)
            rows = torch.nn.functional.pad(x.cpu(), (0, 0, 0, 0, 0, 1))[q]
            self.poison()
            index = q.to(self.place).int(), r.to(self.place)
            found.append(triton_take.take(x, Read(((), (2,)), (one, two)), index, (n, width), True))
            by_rows = Read(((), (1,), (2,)), ((one[0], ((0,), (), ())),))
            found.append(triton_take.take(x, by_rows, index[:1], (n, 4, width), True))
            by_width = Read(((2,), (1,), ()), ((one[0], ((), (), (0,))),))
            found.append(triton_take.take(x, by_width, index[:1], (width, 4, n), True))
            expected += [rows[torch.arange(n), r], rows, rows.permute(2, 1, 0)]
        return _difference(torch, tuple(found), tuple(expected))

    def taken(self, dtype: str, inner: int) -> str:
        """Compare products of rows that are taken and dropped, each with the matrix of its block, with exact ones."""
        from planner.kernels.grouped_matmul import triton_grouped

        torch, (n, rows, j, k, g) = self.torch, (4, 9, 20, 33, 3) if self.smoke else (900, 5_000, 64, 80, 27)
        a, c = self.integers(rows, j, dtype=dtype), self.integers(g, j, k, dtype=dtype)
        index, source = torch.randint(0, g + 1, (n,)), torch.randint(-1, rows, (n, inner))
        self.poison()
        given = index.to(self.place), inner, source.reshape(-1).to(self.place)
        found = triton_grouped.chosen_rows(a, c, *given, wide=True)
        left, right = (torch.nn.functional.pad(x.cpu().double(), [*[0, 0] * (x.ndim - 1), 0, 1]) for x in (a, c))
        return _difference(torch, found, (left[source] @ right[index]).to(found.dtype))

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


def _difference(torch: Any, found: Any, expected: Any) -> str:
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, expected)), strict=True)
    wrong = [int((x.cpu() != y).sum()) for x, y in pairs]
    return "" if not any(wrong) else f"{wrong} entries differ"
