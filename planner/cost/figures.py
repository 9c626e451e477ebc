"""What a step does and what it costs. All counts are exact: Python integers, and picoseconds for time."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

# What a step takes if no float holds its FLOPs. A sum over thousands of such steps is still in the range of floats.
MOST_PICOSECONDS = 10**300


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


class Work(NamedTuple):
    """What an implementation does to run a step, or a part of the step; `Device.price` turns it into a `StepCost`.

    Parts run one after the other. Within a part, computing overlaps with moving bytes.

    Attributes:
        flops: FLOPs.
        rate: FLOP/s at which they are computed, such as a `Device.product_rate`. By default they take no time besides
            moving the bytes.
        moved: bytes that are read and written.
        copied: those of the written bytes that only give an operand another layout or dtype.
        scratch: bytes that are allocated besides the result.
        fresh: bytes of each new array, whose first write takes longer.
        launches: operators of the framework, and kernels.
        kernels: those of them that are Triton kernels.
        matrices: matrices of a batched product.
        taken, added: rows that are taken, and rows that are added in a segment sum.
        sorted: rows of an index array that are sorted into groups.
        seconds: measured seconds, in place of those that moving takes. Computing takes no less than at `rate`.
    """

    flops: int = 0
    rate: float = math.inf
    moved: int = 0
    copied: int = 0
    scratch: int = 0
    fresh: tuple[int, ...] = ()
    launches: float = 0
    kernels: int = 0
    matrices: int = 0
    taken: int = 0
    added: float = 0
    sorted: int = 0
    seconds: float | None = None

    @classmethod
    def of_copies(cls, size: int, scratch: int = 0) -> Work:
        """Return the work of copying so many bytes, with that much more scratch."""
        return cls(moved=2 * size, copied=size, scratch=size + scratch, fresh=(size,))


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one program, or of both.

    Example:
        >>> import planner
        >>> cost = planner.plan("ij, jk -> ik", (30, 40), (40, 50), backend="numpy").cost.forward
        >>> cost.flops, cost.bytes_moved, cost.peak_bytes
        (120000, 18800, 6000)

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
    """The totals of a plan. The peak is the larger program's. `backward` is None if no operand needs a gradient.

    Example:
        >>> import planner
        >>> cost = planner.plan("ij, jk -> ik", (30, 40), (40, 50), backend="numpy").cost
        >>> cost.flops == cost.forward.flops, cost.backward
        (True, None)

    `bound` is what no plan without a loop over slices costs less than, as the objective measures it; None if that is
    not known. See docs/limits.md.
    """

    forward: Cost
    backward: Cost | None
    bound: float | None = None

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
