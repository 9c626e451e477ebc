"""Rates of a machine: what turns FLOPs and bytes into predicted seconds."""

from __future__ import annotations

import dataclasses

__all__ = ["CPU", "DEVICES", "Device"]


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
        bandwidth: bytes/s, reading and writing memory that is in use already.
        fresh_bandwidth: bytes/s of first writes to newly allocated memory (page faults on a CPU).
        launch_seconds: overhead of one operator.
        matrix_seconds: overhead of each matrix of a batched product.
        row_seconds: overhead of each row of a take or a segment sum.
        skinny_rate: FLOP/s where a product has fewer than 8 rows, columns or terms of its sums.
        source: where the figures come from.
    """

    name: str
    flop_rate: float
    bandwidth: float
    fresh_bandwidth: float = float("inf")
    launch_seconds: float = 0.0
    matrix_seconds: float = 0.0
    row_seconds: float = 0.0
    skinny_rate: float = float("inf")
    source: str = "given"

    def seconds(self, flops: float = 0, moved: float = 0, fresh: float = 0, launches: float = 0) -> float:
        """Roofline: the larger of computing and moving, then page faults and launches."""
        return (
            max(flops / self.flop_rate, moved / self.bandwidth)
            + fresh / self.fresh_bandwidth
            + launches * self.launch_seconds
        )


CPU = Device(
    "cpu",
    flop_rate=1.1e11,
    bandwidth=2.0e10,
    fresh_bandwidth=3.2e9,
    launch_seconds=3e-6,
    matrix_seconds=1.0e-7,
    row_seconds=4e-9,
    skinny_rate=1.2e10,
    source="measured on a 2-core cloud CPU, 2026-11",
)

DEVICES = {device.name: device for device in (CPU,)}
