"""The ways to write a contraction: what the seeds' authors wrote, and `planner.contract`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from planner.workloads import Workload

Framework = Literal["torch", "jax"]
OURS = "planner.contract"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The part of a workload that a slow way runs on.

    Attributes:
        axis: the axis that is made shorter.
        size: its size in the part.
        backward_in_proportion: whether the backward pass of the whole takes as many times longer as the axis is;
            if not, the table shows no backward figures.
    """

    axis: str
    size: int
    backward_in_proportion: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to write a contraction.

    Attributes:
        label: what the table calls it.
        call: takes the framework's namespace (torch or jax.numpy), the operands, and index arrays by letter.
        part: the part of the workload that it runs on where the whole would take minutes. The figures of the whole
            are extrapolated from it, and marked so.
    """

    label: str
    call: Callable[..., Any]
    part: Part | None = None


def contraction(spec: str, **options: Any) -> Callable[..., Any]:
    """Return `planner.contract` of a spec as a way's call."""

    def call(xp: Any, *operands: Any, **indices: Any) -> Any:
        import planner

        return planner.contract(spec, *operands, **options, **indices)

    return call


def our_way(workload: Workload) -> Way:
    """Return `planner.contract` of a workload."""
    return Way(OURS, contraction(workload.spec, **workload.options))


def einsum_of(spec: str) -> Callable[..., Any]:
    """Return the framework's einsum of a spec as a way's call."""
    return lambda xp, *operands: xp.einsum(spec, *operands)


def opt_einsum_of(spec: str) -> Callable[..., Any]:
    """Return `opt_einsum.contract` of a spec as a way's call."""
    import opt_einsum

    return lambda xp, *operands: opt_einsum.contract(spec, *operands)


def direct(xp: Any, a: Any, c: Any, q: Any) -> Any:
    """Seed 000, as its author first wrote it."""
    return xp.matmul(a, c[q])


def strategy1(xp: Any, a: Any, c: Any, q: Any) -> Any:
    """Seed 000: take all matrices, then multiply row by row."""
    taken = c[q]
    return xp.concatenate([xp.matmul(a[i : i + 1], taken[i]) for i in range(a.shape[0])])


def strategy2(xp: Any, a: Any, c: Any, q: Any) -> Any:
    """Seed 000: take a matrix and multiply, row by row."""
    return xp.concatenate([xp.matmul(a[i : i + 1], c[q[i]]) for i in range(a.shape[0])])


def strategy3(xp: Any, a: Any, c: Any, q: Any) -> Any:
    """Seed 000: take and multiply, 256 rows at a time."""
    batches = [slice(start, start + 256) for start in range(0, a.shape[0], 256)]
    return xp.concatenate([xp.matmul(a[batch], c[q[batch]]) for batch in batches])


def flattened_gemm(xp: Any, x: Any, y: Any) -> Any:
    """Seed 001: both summed axes flattened into one, then one matrix product."""
    i, j, k = x.shape
    return xp.swapaxes(x, 0, 1).reshape(j, i * k) @ y.reshape(i * k, -1)


def two_step_sum(xp: Any, x: Any, y: Any) -> Any:
    """Seed 001: multiply, then sum."""
    return (x @ y).sum(0)


def permute_flatten_matmul(xp: Any, x: Any, y: Any) -> Any:
    """Seed 001, the layout: permute and flatten by hand, then one matrix product."""
    i, j, k, l = x.shape  # noqa: E741 (the author's letters)
    m, _, p = y.shape
    x = xp.moveaxis(x, 0, 3).reshape(j * k * l, i)
    y = xp.swapaxes(y, 0, 1).reshape(i, m * p)
    return (x @ y).reshape(j, k, l, m, p)


def three_slices(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same product of three overlapping slices of one array, as the author's model had it."""

    def summed(xp: Any, x: Any, y: Any) -> Any:
        i = y.shape[0]
        first, middle, last = (call(xp, x[s : s + i], y) for s in (0, i // 2, i))
        return first + middle + last

    return summed


def separate_matmul(xp: Any, queries: Any, keys: Any) -> Any:
    """Seed 003, keys of its own for each query: a product of a row and a matrix each."""
    return xp.matmul(queries[..., None, :], xp.swapaxes(keys, -2, -1))[..., 0, :]


def shared_matmul(xp: Any, queries: Any, keys: Any) -> Any:
    """Seed 003, the same keys for all queries: one product for each batch and head."""
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
