"""What a plan costs. All counts are exact: Python integers, and picoseconds for time."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

__all__ = ["Cost", "PlanCost", "StepCost"]


class StepCost(NamedTuple):
    """The cost of one step in one implementation. `scratch_bytes` does not count the result."""

    flops: int = 0
    bytes_moved: int = 0
    copied_bytes: int = 0
    scratch_bytes: int = 0
    picoseconds: int = 0

    def __add__(self, other: StepCost) -> StepCost:  # type: ignore[override]
        """Return the cost of both steps, one after the other: the sums, and the larger scratch."""
        return StepCost(
            self.flops + other.flops,
            self.bytes_moved + other.bytes_moved,
            self.copied_bytes + other.copied_bytes,
            max(self.scratch_bytes, other.scratch_bytes),
            self.picoseconds + other.picoseconds,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one program, or of both.

    Attributes:
        flops: FLOPs. A multiply-add counts as 2, an add in a segment sum as 1, a take as 0.
        bytes_moved: bytes that all steps read and write.
        copied_bytes: bytes that are written only to give an operand another layout or dtype.
        peak_bytes: most bytes newly allocated at any moment.
        retained_bytes: bytes that stay alive for the backward program while only the result is held.
        seconds: predicted time.
    """

    flops: int
    bytes_moved: int
    copied_bytes: int
    peak_bytes: int
    retained_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class PlanCost(Cost):
    """The totals of a plan. The peak is the larger program's. `backward` is None if no operand needs a gradient."""

    forward: Cost
    backward: Cost | None

    @classmethod
    def of(cls, forward: Cost, backward: Cost | None) -> PlanCost:
        """Return the cost of a plan from the costs of its programs."""
        both = (forward,) if backward is None else (forward, backward)
        return cls(
            flops=sum(c.flops for c in both),
            bytes_moved=sum(c.bytes_moved for c in both),
            copied_bytes=sum(c.copied_bytes for c in both),
            peak_bytes=max(c.peak_bytes for c in both),
            retained_bytes=forward.retained_bytes,
            seconds=math.fsum(c.seconds for c in both),
            forward=forward,
            backward=backward,
        )
