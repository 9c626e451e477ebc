"""Rates of a machine: what turns FLOPs and bytes into predicted seconds."""

from __future__ import annotations

import dataclasses

__all__ = ["CPU", "GPU", "Device"]


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """Rates of one machine.

    Example:
        >>> import planner
        >>> planner.Device("mine", flop_rate=1e12, bandwidth=1e11).seconds(flops=2e12)
        2.0

    Attributes:
        name: shown in the printed plan.
        flop_rate: FLOP/s of a large float32 matrix product.
        bandwidth: bytes/s of reading and writing memory that is in use already.
        fresh_bandwidth: bytes/s of first writes to an allocation of `fresh_bytes` or more (page faults on a CPU).
        reused_bandwidth: bytes/s of first writes to a smaller one, which the allocator serves from memory in use.
        fresh_bytes: size from which the allocator asks the system for new pages.
        cache_bytes: a step that moves no more than this finds its values in the cache, new ones too.
        cache_bandwidth: bytes/s there.
        launch_seconds: overhead of one operator.
        matrix_seconds: overhead of each matrix of a batched product.
        take_row_seconds: overhead of each row of a take.
        add_row_seconds: overhead of each row of a segment sum; rows of one element cost as in a take.
        skinny_rate: FLOP/s where a product has fewer than 8 rows, columns or terms of its sums.
        kind: "cpu" or "cuda": which implementations can run.
        source: where the figures come from.
    """

    name: str
    flop_rate: float
    bandwidth: float
    fresh_bandwidth: float = float("inf")
    reused_bandwidth: float = float("inf")
    fresh_bytes: int = 0
    cache_bytes: int = 0
    cache_bandwidth: float = float("inf")
    launch_seconds: float = 0.0
    matrix_seconds: float = 0.0
    take_row_seconds: float = 0.0
    add_row_seconds: float = 0.0
    skinny_rate: float = float("inf")
    kind: str = "cpu"
    source: str = "given"

    def seconds(self, flops: float = 0, moved: float = 0, fresh: int = 0, launches: float = 0) -> float:
        """Roofline: the larger of computing and moving, then one new allocation and launches."""
        return (
            max(flops / self.flop_rate, self.moving_seconds(moved))
            + self.fresh_seconds(fresh)
            + launches * self.launch_seconds
        )

    def moving_seconds(self, moved: float) -> float:
        """Time to read and write so many bytes in one step."""
        return moved / (self.cache_bandwidth if moved <= self.cache_bytes else self.bandwidth)

    def fresh_seconds(self, size: int) -> float:
        """Time that first writes to one new allocation cost beyond writing it."""
        if size <= self.cache_bytes:
            return 0.0
        return size / (self.fresh_bandwidth if size >= self.fresh_bytes else self.reused_bandwidth)


CPU = Device(
    "cpu",
    flop_rate=1.1e11,
    bandwidth=1.2e10,
    fresh_bandwidth=3.2e9,
    reused_bandwidth=1.5e10,
    fresh_bytes=2**25,  # glibc maps anew from 32 MiB on, whatever was freed before
    cache_bytes=2**21,
    cache_bandwidth=5e10,
    launch_seconds=3e-6,
    matrix_seconds=1.0e-7,
    take_row_seconds=5e-9,
    add_row_seconds=4e-8,
    skinny_rate=1.2e10,
    source="measured on a 2-core cloud CPU (AMD EPYC 7003), 2026-11-21",
)

GPU = Device(
    "gpu",
    flop_rate=5.0e13,
    bandwidth=4.3e12,
    launch_seconds=5e-6,
    kind="cuda",
    source="an H200's measured bandwidth; its float32 rate as published",
)
