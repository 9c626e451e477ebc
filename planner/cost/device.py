"""The rates of a machine. They turn FLOPs and bytes into predicted seconds."""

from __future__ import annotations

import dataclasses

from planner.cost.figures import MOST_PICOSECONDS, StepCost, Work
from planner.language.dtypes import HALF_TYPES
from planner.language.errors import PlannerError

__all__ = ["A100", "CPU", "GPU", "H100", "H200", "PRESETS", "TPU_V5E", "Device", "gpu_preset"]


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """Rates of one machine.

    Example:
        >>> import planner
        >>> planner.Device("mine", flop_rate=1e12, bandwidth=1e11).seconds(flops=2e12)
        2.0
        >>> planner.Device.preset("h100").kind
        'cuda'

    Attributes:
        name: shown in the printed plan.
        flop_rate: FLOP/s of a large float32 matrix product.
        half_rate: FLOP/s of a large product of float16 or bfloat16 in torch; 0 if it equals `flop_rate`.
        bandwidth: bytes/s of reading and writing memory that the process already uses.
        fresh_bandwidth: bytes/s of first writes to an allocation of `fresh_bytes` or more (page faults on a CPU).
        reused_bandwidth: bytes/s of first writes to a smaller allocation. The allocator serves it from memory in use.
        fresh_bytes: the size from which the allocator asks the system for new pages.
        cache_bytes: a step that moves at most so many bytes finds its values in the cache, new values too.
        cache_bandwidth: bytes/s of reading and writing the cache.
        launch_seconds: overhead of one operator.
        matrix_seconds: overhead of each matrix of a batched product.
        take_row_seconds: overhead of each row of a take.
        add_row_seconds: overhead of each row of a segment sum. Rows of one element cost as much as in a take.
        skinny_rate: FLOP/s of a product with up to 4 rows, columns or terms of its sums. Beyond that the rate grows
            with the least of the three, up to `flop_rate`.
        sort_row_seconds: time to sort one row of an index array into groups.
        link_bandwidth: bytes/s that a device sends to others of a mesh, along one axis of the mesh.
        link_seconds: time from the begin of an exchange between devices until bytes flow.
        kind: "cpu", "cuda" or "tpu". It decides which implementations can run.
        capability: the compute capability of an NVIDIA card, times ten; 0 if it is not known.
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
    sort_row_seconds: float = 0.0
    half_rate: float = 0.0
    link_bandwidth: float = float("inf")
    link_seconds: float = 0.0
    kind: str = "cpu"
    capability: int = 0
    source: str = "given"

    @staticmethod
    def preset(name: str) -> Device:
        """Return the preset with this name: "cpu", "a100", "h100", "h200" or "tpu v5e".

        Raises:
            PlannerError: there is no preset of that name.
        """
        preset = PRESETS.get(" ".join(name.lower().replace("_", " ").replace("-", " ").split()))
        if preset is None:
            known = ", ".join(PRESETS)
            raise PlannerError(f"device {name!r:.80} is not a preset: take one of {known}, or give a planner.Device")
        return preset

    def price(self, *parts: Work) -> StepCost:
        """Return the cost of a step that consists of these parts, one after the other."""
        return StepCost(
            sum([part.flops for part in parts]),
            sum([part.moved for part in parts]),
            sum([part.copied for part in parts]),
            sum([part.scratch for part in parts]),
            min(MOST_PICOSECONDS, round(sum(map(self.work_seconds, parts)) * 1e12)),
        )

    def work_seconds(self, work: Work) -> float:
        """Return the seconds that some work takes."""
        moving = self.moving_seconds(work.moved) if work.seconds is None else work.seconds
        return (
            max(work.flops / work.rate, moving)
            + sum(map(self.fresh_seconds, work.fresh))
            + work.launches * self.launch_seconds
            + work.matrices * self.matrix_seconds
            + work.taken * self.take_row_seconds
            + work.added * self.add_row_seconds
            + work.sorted * self.sort_row_seconds
        )

    def seconds(self, flops: float = 0, moved: float = 0, fresh: int = 0, launches: float = 0) -> float:
        """Return the seconds of a step: the longer of computing and moving, plus an allocation and launches."""
        return (
            max(flops / self.flop_rate, self.moving_seconds(moved))
            + self.fresh_seconds(fresh)
            + launches * self.launch_seconds
        )

    def moving_seconds(self, moved: float) -> float:
        """Return the seconds that one step takes to read and write so many bytes."""
        return moved / (self.cache_bandwidth if moved <= self.cache_bytes else self.bandwidth)

    def exchange_seconds(self, kind: str, size: int, parts: int) -> float:
        """Return the seconds of an exchange between devices that leaves so many bytes on each of them.

        In a ring of devices each passes all but its own part on; to add parts up it does so twice.

        Args:
            kind: "all-reduce", or "all-gather" or "all-to-all".
            size: the bytes of the result on each device.
            parts: how many devices take part.
        """
        sent = size * (parts - 1) / parts * (2 if kind == "all-reduce" else 1)
        return self.link_seconds + sent / self.link_bandwidth

    def product_rate(self, rows: int, columns: int, terms: int, dtype: str = "float32") -> float:
        """Return the FLOP/s of a matrix product.

        The rate grows no faster than a side of the product, so a larger product never takes less time.
        """
        most = self.half_rate if self.half_rate and dtype in HALF_TYPES else self.flop_rate
        return min(most, self.skinny_rate * max(1.0, min(rows, columns, terms) / 4))

    def fresh_seconds(self, size: int) -> float:
        """Return the seconds that the first writes to a new allocation take beyond the writes themselves."""
        if size <= self.cache_bytes:
            return 0.0
        return size / (self.fresh_bandwidth if size >= self.fresh_bytes else self.reused_bandwidth)


CPU = Device(
    "cpu",
    flop_rate=1.1e11,
    bandwidth=1.2e10,
    fresh_bandwidth=3.2e9,
    reused_bandwidth=1.5e10,
    fresh_bytes=2**25,  # from 32 MiB on glibc always maps new pages
    cache_bytes=2**21,
    cache_bandwidth=5e10,
    launch_seconds=3e-6,
    matrix_seconds=1.0e-7,
    take_row_seconds=5e-9,
    add_row_seconds=4e-8,
    skinny_rate=1.2e10,
    sort_row_seconds=4e-9,
    # Eight simulated devices on two busy cores of an Intel Xeon, JAX 0.10.2, 2026-11-25: `psum` of 4 MiB on each took
    # 2.0 ms, of 16 MiB 7.7 ms, of 4 bytes 0.18 ms, of which 0.05 ms are the call.
    link_bandwidth=3.7e9,
    link_seconds=1.3e-4,
    source="measured on a 2-core cloud CPU (AMD EPYC 7003), 2026-11-21",
)

# The rates of graphics cards are from their data sheets: dense float32 products without TF32. Real products are slower.
# `python -m planner calibrate` measures by how much. Links are NVLink, half of the figure for both directions: 600 GB/s
# for an A100, 900 GB/s for an H100 and an H200. The seconds of links are estimated.
A100 = Device(
    "a100",
    flop_rate=1.95e13,
    bandwidth=2.039e12,
    launch_seconds=5e-6,
    half_rate=3.12e14,
    link_bandwidth=3e11,
    link_seconds=1e-5,
    kind="cuda",
    capability=80,
    source="published: NVIDIA A100 80GB SXM data sheet, FP32 19.5 TFLOP/s, BF16 312, 2,039 GB/s; launches estimated",
)

H100 = Device(
    "h100",
    flop_rate=6.7e13,
    bandwidth=3.35e12,
    launch_seconds=5e-6,
    half_rate=9.89e14,
    link_bandwidth=4.5e11,
    link_seconds=1e-5,
    kind="cuda",
    capability=90,
    source="published: NVIDIA H100 SXM data sheet, FP32 67 TFLOP/s, BF16 989, 3.35 TB/s; launches estimated",
)

H200 = Device(
    "h200",
    flop_rate=6.7e13,
    bandwidth=4.8e12,
    launch_seconds=5e-6,
    half_rate=9.89e14,
    link_bandwidth=4.5e11,
    link_seconds=1e-5,
    kind="cuda",
    capability=90,
    source="published: NVIDIA H200 SXM data sheet, FP32 67 TFLOP/s, BF16 989, 4.8 TB/s; launches estimated",
)

# JAX's default precision rounds float32 operands to bfloat16 on a TPU, and the bfloat16 rate is the one published. Of
# the 1,600 Gbps between chips, half are along each axis of the torus.
TPU_V5E = Device(
    "tpu v5e",
    flop_rate=1.97e14,
    bandwidth=8.19e11,
    launch_seconds=5e-6,
    link_bandwidth=1e11,
    link_seconds=1e-6,
    kind="tpu",
    source="published: Google Cloud TPU v5e, 197 TFLOP/s in bfloat16, 819 GB/s a chip; launches estimated",
)

GPU = Device(
    "gpu",
    flop_rate=5.0e13,
    bandwidth=4.3e12,
    launch_seconds=5e-6,
    half_rate=7.9e14,
    link_bandwidth=4.5e11,
    link_seconds=1e-5,
    kind="cuda",
    source="an H200's measured bandwidth and bfloat16 rate; a float32 rate below the published one",
)

PRESETS = {device.name: device for device in (CPU, A100, H100, H200, TPU_V5E)}
"""Presets by the name that `Device.preset` takes."""


def gpu_preset(product: str) -> Device:
    """Return the preset of a graphics card by its product name, such as "NVIDIA H200", or `GPU` if it has none."""
    words = product.lower().replace("-", " ").split()
    return next((device for device in (A100, H100, H200) if device.name in words), GPU)
