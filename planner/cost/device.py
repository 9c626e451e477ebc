"""The rates of a machine. They turn FLOPs and bytes into predicted seconds."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import pathlib
from collections.abc import Collection
from typing import Any

import numpy as np

from planner.cost.figures import MOST_PICOSECONDS, StepCost, Work
from planner.cost.products import CLASSES, class_rate, most_rate
from planner.language.dtypes import HALF_TYPES
from planner.language.errors import PlannerError

# At this share of the rate of half types Triton kernels multiply float32 in parts of bfloat16: six products for one,
# each at 0.47 of the rate of torch's products (on an H200 34.4 GFLOP take 556 us).
# `planner.kernels.tiled_product.triton_arithmetic` has the parts.
PARTS_SHARE = 0.47 / 6
# A row that torch adds up in a cache takes this share of what one takes in memory: 13 to 21 ns of 32 to 84 (rows of 8
# to 32 floats, one core of an Intel Xeon with AVX-512, torch 2.13, 2026-12-01).
CACHED_SHARE = 0.4


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
        outer_cache_bytes, outer_cache_bandwidth: the same of a larger cache that memory is behind; 0 bytes if there is
            none that is faster than memory.
        launch_seconds: overhead of one operator: the host's time, or the latency of the launch if that is longer.
        kernel_seconds: what a Triton kernel's launch takes beyond that of an operator.
        matrix_seconds: overhead of each matrix of a batched product; on a card that of torch's operators, as in the
            next two.
        take_row_seconds: overhead of each row of a take.
        add_row_seconds: overhead of each row of a segment sum. Rows of one element cost as much as in a take. Torch's
            sums in a cache take `CACHED_SHARE` of it; on a card it is the overhead of 16 elements.
        loop_seconds: what torch's and NumPy's elementwise loops take to begin with two runs of neighbours. What they
            take for single elements and sums of short runs is in proportion.
        skinny_rate: FLOP/s of a product with up to 4 rows, columns or terms of its sums. Beyond that the rate grows
            with the least of the three, up to `flop_rate`.
        products: FLOP/s of products by shape class, for each entry of `planner.cost.products.CLASSES`. They take the
            place of `skinny_rate`, and of `matrix_seconds` for plain products. Empty if they were not measured.
        sort_row_seconds: time to sort one row of an index array into groups.
        group_seconds: time to sort an index array into groups beyond that of its rows: launches and the range check.
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
    outer_cache_bytes: int = 0
    outer_cache_bandwidth: float = float("inf")
    launch_seconds: float = 0.0
    matrix_seconds: float = 0.0
    take_row_seconds: float = 0.0
    add_row_seconds: float = 0.0
    skinny_rate: float = float("inf")
    sort_row_seconds: float = 0.0
    group_seconds: float = 0.0
    kernel_seconds: float = 0.0
    half_rate: float = 0.0
    link_bandwidth: float = float("inf")
    link_seconds: float = 0.0
    loop_seconds: float = 3e-8
    products: tuple[float, ...] = dataclasses.field(default=(), hash=False, repr=False)
    kind: str = "cpu"
    capability: int = 0
    source: str = "given"

    def __post_init__(self) -> None:
        for field in ("name", "source"):
            if not isinstance(getattr(self, field), str):
                raise PlannerError(f"the device {self.name!r:.80} has {field}={getattr(self, field)!r:.80}: give text")
        if not isinstance(self.products, tuple) or len(self.products) not in (0, len(CLASSES)):
            raise PlannerError(f"the products of device {self.name!r:.80} are not {len(CLASSES)} rates in a tuple")
        rates = tuple([self._number("products", rate) for rate in self.products])
        object.__setattr__(self, "products", rates)
        for field in _NUMBERS:
            object.__setattr__(self, field, self._number(field, getattr(self, field)))
        if self.kind not in _KINDS:
            raise PlannerError(f"the device {self.name!r:.80} has kind={self.kind!r:.80}: take one of {_KINDS}")

    def _number(self, field: str, value: Any) -> Any:
        """Return the value of a field as a number of Python: JSON has none of NumPy's.

        Raises:
            PlannerError: it is no such number.
        """
        if isinstance(value, np.generic):
            value = value.item()
        if wanted := _refusal(field, value):
            raise PlannerError(f"the device {self.name!r:.80} has {field}={value!r:.80}: give {wanted}")
        return int(value) if field in _WHOLE else value

    @staticmethod
    def preset(name: str) -> Device:
        """Return the preset with this name.

        There are "cpu", "a100", "l40s", "h100", "h200", "b200", "mi300x" and "tpu v5e".

        Raises:
            PlannerError: there is no preset of that name.
        """
        preset = PRESETS.get(" ".join(str(name).lower().replace("_", " ").replace("-", " ").split()))
        if preset is None:
            known = ", ".join(PRESETS)
            raise PlannerError(f"device {name!r:.80} is not a preset: take one of {known}, or give a planner.Device")
        return preset

    def price(self, *parts: Work) -> StepCost:
        """Return the cost of a step that consists of these parts, one after the other."""
        seconds, (flops, moved, copied, scratch) = sum(map(self.work_seconds, parts)), (0, 0, 0, 0)
        for part in parts:
            flops, moved = flops + part.flops, moved + part.moved
            copied, scratch = copied + part.copied, scratch + part.scratch
        return StepCost(flops, moved, copied, scratch, min(MOST_PICOSECONDS, round(seconds * 1e12)))

    def work_seconds(self, work: Work) -> float:
        """Return the seconds that some work takes."""
        flops, rate, moved, _, _, fresh, launches, kernels, matrices, taken, added, rows, measured = work
        moving = self.moving_seconds(moved) if measured is None else measured
        seconds = max(flops / rate, moving) + sum(map(self.fresh_seconds, fresh)) + launches * self.launch_seconds
        if matrices or taken or added or kernels:
            seconds += matrices * self.matrix_seconds
            seconds += taken * self.take_row_seconds
            seconds += added * self.add_row_seconds
            seconds += kernels * self.kernel_seconds
        return seconds + (rows * self.sort_row_seconds + self.group_seconds) if rows else seconds

    def prepared(self) -> Device:
        """Return the rates for a call whose index arrays were sorted before it, by `planner.group`."""
        return dataclasses.replace(self, sort_row_seconds=0.0, group_seconds=0.0)

    def for_call(self, indices: Collection[Any]) -> Device:
        """Return the rates for a call with these index arrays: on a card, sorting costs nothing if all are prepared."""
        are_prepared = len(indices) > 0 and all(hasattr(index, "prepared_framework") for index in indices)
        return self.prepared() if self.kind == "cuda" and are_prepared else self

    def seconds(self, flops: float = 0, moved: float = 0, fresh: int = 0, launches: float = 0) -> float:
        """Return the seconds of a step: the longer of computing and moving, plus an allocation and launches."""
        return (
            max(flops / self.flop_rate, self.moving_seconds(moved))
            + self.fresh_seconds(fresh)
            + launches * self.launch_seconds
        )

    def moving_seconds(self, moved: float) -> float:
        """Return the seconds that one step takes to read and write so many bytes."""
        if moved <= self.cache_bytes:
            return moved / self.cache_bandwidth
        return moved / (self.outer_cache_bandwidth if moved <= self.outer_cache_bytes else self.bandwidth)

    def packing_seconds(self, moved: float) -> float:
        """Return the seconds that a product of matrices takes to read and write so many bytes.

        Libraries pack operands before they multiply. Of an outer cache they are slower than copies: products of 1,000
        steps of the corpus are predicted best with the geometric mean of its rate and the memory's, and some read 16 MB
        there at 8 to 11 GB/s, where copies moved 25 (one core of an Intel Xeon with AVX-512, torch 2.13, 2026-12-01).

        Example:
            >>> import planner
            >>> device = planner.Device("mine", 1e12, 1e9, outer_cache_bytes=10**7, outer_cache_bandwidth=4e9)
            >>> device.packing_seconds(10**6)
            0.0005
        """
        seconds = self.moving_seconds(moved)
        if self.cache_bytes < moved <= self.outer_cache_bytes:
            return max(seconds, moved / math.sqrt(self.outer_cache_bandwidth * self.bandwidth))
        return seconds

    @property
    def fastest_bandwidth(self) -> float:
        """Bytes/s that no step exceeds."""
        cached = self.cache_bandwidth if self.cache_bytes else 0.0
        return max(self.bandwidth, cached, self.outer_cache_bandwidth if self.outer_cache_bytes else 0.0)

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

    def product_rate(self, rows: int, columns: int, terms: int, dtype: str = "float32", batch: int = 1) -> float:
        """Return the FLOP/s of a matrix product, or of a batch of products.

        Without measured classes the rate grows no faster than a side of the product, so a larger product never takes
        less time.
        """
        most = self.most_rate(dtype)
        if self.products:
            return min(most, class_rate(self.products, batch > 1, rows, columns, terms))
        return min(most, self.skinny_rate * max(1.0, min(rows, columns, terms) / 4))

    def most_product_rate(self, least: Any, dtype: str = "float32") -> Any:
        """Return a rate that no product exceeds whose least side is `least` or less; of an array, an array of rates."""
        least_of, most_of = (np.minimum, np.maximum) if isinstance(least, np.ndarray) else (min, max)
        found = most_rate(self.products, least) if self.products else self.skinny_rate * most_of(1.0, least / 4)
        return least_of(self.fastest_rate(dtype), found)

    def most_rate(self, dtype: str) -> float:
        """Return the FLOP/s of a large product."""
        return self.half_rate if self.half_rate and dtype in HALF_TYPES else self.flop_rate

    def fastest_rate(self, dtype: str) -> float:
        """Return a rate that no product exceeds. Some kernels multiply float32 in parts of bfloat16, or in float64.

        >>> import planner
        >>> a100 = planner.Device.preset("a100")
        >>> [f"{rate:.3g}" for rate in (a100.most_rate("float32"), a100.fastest_rate("float32"))]
        ['1.95e+13', '2.44e+13']
        """
        by_parts = self.half_rate * PARTS_SHARE if self.capability and dtype == "float32" else 0.0
        return max(self.most_rate(dtype), by_parts)

    def matrices(self, batch: int) -> int:
        """Return how many matrices of a batched product each take `matrix_seconds`: none if classes were measured."""
        return batch if batch > 1 and not self.products else 0

    def fresh_seconds(self, size: int) -> float:
        """Return the seconds that the first writes to a new allocation take beyond the writes themselves."""
        if size <= self.warm_bytes:
            return 0.0
        return size / (self.fresh_bandwidth if size >= self.fresh_bytes else self.reused_bandwidth)

    @property
    def warm_bytes(self) -> int:
        """The size of an allocation up to which its first writes take no longer: it is memory in use, in the cache."""
        return min(self.cache_bytes, self.fresh_bytes - 1) if self.fresh_bytes else self.cache_bytes


_KINDS = ("cpu", "cuda", "tpu")
_NUMBERS = tuple(f.name for f in dataclasses.fields(Device) if f.name not in ("name", "products", "kind", "source"))
_WHOLE = ("fresh_bytes", "cache_bytes", "outer_cache_bytes", "capability")


def _refusal(name: str, value: Any) -> str | None:
    """Return what the number in a field should be, a rate, a time or a whole number; None if the value can be it."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:
        number = math.nan
    if name.endswith("seconds"):
        return None if 0 <= number < math.inf else "a number of seconds, which is not negative"
    if name in _WHOLE:
        return None if 0 <= number < math.inf and number % 1 == 0 else "a whole number, which is not negative"
    if name == "half_rate" and number == 0:
        return None
    return None if number > 0 else "a rate above 0"


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
    # On an Intel Xeon with AVX-512, torch 2.13, 2026-12-01. Two machines with an EPYC 7003 took 10 and 30 ns, and a
    # Xeon at 2.8 GHz 30: docs/cost-model.md says why it is not the longest.
    loop_seconds=1.8e-8,
    # Eight simulated devices on two busy cores of an Intel Xeon, JAX 0.10.2, 2026-11-25: `psum` of 4 MiB on each took
    # 2.0 ms, of 16 MiB 7.7 ms, of 4 bytes 0.18 ms, of which 0.05 ms are the call.
    link_bandwidth=3.7e9,
    link_seconds=1.3e-4,
    source="measured on an AMD EPYC 7003, 2 cores, 2026-11-21, and short loops on an Intel Xeon, 2026-12-01",
)

# XLA takes a row in 0.4 to 0.8 ns and adds one up in 0.6 to 1.6 ns, besides what the bytes take; the times above are
# torch's (4,096 rows of up to 64 numbers, one core of an AMD EPYC with AVX-512, JAX 0.10.2, 2026-11-30).
CPU_OF_XLA = dataclasses.replace(CPU, take_row_seconds=6e-10, add_row_seconds=1.25e-9)


def _card(
    name: str, flop_rate: float, half_rate: float, bandwidth: float, link: float, capability: int, source: str
) -> Device:
    """Return a graphics card of published rates. All that nobody publishes is an estimate, in seconds or in bytes.

    A row that is sorted moves 60 bytes: two passes over 16-bit keys and 64-bit row numbers, each read twice and written
    once (Adinets and Merrill, "Onesweep", 2022, section 2: 3n accesses a pass; it sorts at 92% of an A100's bandwidth).
    Torch takes rows of up to 4,096 bytes one by one: 131,072 took 83 us, and 4,194,304 took 2,520 (H200, torch 2.11,
    2026-11-27); it added rows of 16 numbers in 0.16 ns each beyond their bytes. Other cards are assumed to be alike.
    """
    published = Device(
        name,
        flop_rate=flop_rate,
        half_rate=half_rate,
        bandwidth=bandwidth,
        launch_seconds=5e-6,
        kernel_seconds=5e-6,
        sort_row_seconds=60 / bandwidth,
        group_seconds=4e-5,
        take_row_seconds=6e-10,
        add_row_seconds=1.6e-10,
        link_bandwidth=link,
        link_seconds=1e-5,
        kind="cuda",
        capability=capability,
        source=f"published: {source}; launches, sorts and single rows estimated",
    )
    return dataclasses.replace(published, **_measured().get(name, {}))


@functools.cache
def _measured() -> dict[str, dict[str, Any]]:
    """Return the fields of cards that were measured and adopted: `python -m planner.bench.card --adopt` writes them."""
    path = pathlib.Path(__file__).with_name("cards.json")
    return json.loads(path.read_text()) if path.exists() else {}


# Rates are dense, of float32 without TF32 and of bfloat16. Real products are slower: `python -m planner calibrate`
# measures by how much. Links are half of the figure for both directions: NVLink's 600, 900 and 1,800 GB/s for an A100,
# an H100 or H200, and a B200; an L40S has PCIe 4.0 x16 of 64 GB/s; a link of AMD's Infinity Fabric has 128 GB/s.
A100 = _card("a100", 1.95e13, 3.12e14, 2.039e12, 3e11, 80,
             "NVIDIA A100 80GB SXM data sheet, FP32 19.5 TFLOP/s, BF16 312, 2,039 GB/s")  # fmt: skip
L40S = _card("l40s", 9.16e13, 3.6205e14, 8.64e11, 3.2e10, 89,
             "NVIDIA L40S data sheet, FP32 91.6 TFLOP/s, BF16 362.05, 864 GB/s")  # fmt: skip
H100 = _card("h100", 6.7e13, 9.89e14, 3.35e12, 4.5e11, 90,
             "NVIDIA H100 SXM data sheet, FP32 67 TFLOP/s, BF16 989, 3.35 TB/s")  # fmt: skip
H200 = _card("h200", 6.7e13, 9.89e14, 4.8e12, 4.5e11, 90,
             "NVIDIA H200 SXM data sheet, FP32 67 TFLOP/s, BF16 989, 4.8 TB/s")  # fmt: skip
B200 = _card("b200", 7.5e13, 2.25e15, 8e12, 9e11, 100,
             "NVIDIA HGX B200 data sheet, of each GPU: FP32 75 TFLOP/s, BF16 2,250, 8 TB/s")  # fmt: skip
MI300X = _card("mi300x", 1.634e14, 1.3074e15, 5.3e12, 6.4e10, 0,
               "AMD Instinct MI300X data sheet, FP32 163.4 TFLOP/s, BF16 1,307.4, 5.3 TB/s")  # fmt: skip

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

GPU = dataclasses.replace(
    H200,
    name="gpu",
    flop_rate=5.0e13,
    bandwidth=4.3e12,
    half_rate=7.9e14,
    capability=0,
    source="an H200's measured bandwidth and bfloat16 rate; a float32 rate below the published one; rows estimated",
)

_CARDS = (A100, L40S, H100, H200, B200, MI300X)
PRESETS = {device.name: device for device in (CPU, *_CARDS, TPU_V5E)}
"""Presets by the name that `Device.preset` takes."""


def gpu_preset(product: str) -> Device:
    """Return the preset of a graphics card by its product name, such as "NVIDIA H200", or `GPU` if it has none."""
    words = product.lower().replace("-", " ").split()
    return next((device for device in _CARDS if device.name in words), GPU)
