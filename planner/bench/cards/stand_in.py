"""A stand-in for a card: what would be launched on it is compiled and recorded, and nothing runs.

Example:
    with stand_in("cuda", 90, 227 << 10) as launches:
        plan(*operands, **indices)  # of torch on the CPU, planned with device="h200"
    launches[0].kernel.shared

Triton asks its driver for the target, and starts kernels by it. So a driver of our own sees the very calls: with their
strides, alignments and tables. Tensors stay on the CPU, but say that they are on a card. Results hold anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from planner.kernels.segment_sum import triton_sum
from planner.kernels.tiled_product import triton_arithmetic, triton_axes


@dataclasses.dataclass(slots=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        name: the kernel's name.
        constants: its constants by name, tile sizes among them.
        warps, stages: what it was compiled with.
        shared: bytes of shared memory of a program.
        digest: a digest of all that it was compiled from.
        files: the paths of its files, by their names: assembly and binary.
    """

    name: str
    constants: dict[str, Any]
    warps: int
    stages: int
    shared: int
    digest: str = ""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A kernel that would have been started, on a grid of this many programs along three axes."""

    kernel: Kernel
    grid: tuple[int, int, int]


class _Driver:
    """What Triton asks of a driver, and of its `utils`."""

    def __init__(self, target: GPUTarget, shared: int) -> None:
        self.target, self.shared, self.utils = target, shared, self
        self.launches: list[Launch] = []
        self.loaded: list[Kernel] = []  # the handle of a kernel is its place, counted from 1

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared, "multiprocessor_count": 132, "warpSize": self.target.warp_size}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return what starts a kernel. Triton calls this before `load_binary`."""
        names = source.fn.arg_names
        constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}
        self.loaded.append(Kernel(metadata.name, constants, metadata.num_warps, metadata.num_stages, metadata.shared))
        return self.launch

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        """Return handles of the module and the kernel, its registers and spills, and the most threads of a program."""
        return len(self.loaded), len(self.loaded), 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def after_load(self, module: int, function: int, name: str, files: Mapping[str, str], digest: str) -> None:
        """Take over what only Triton's hook tells."""
        self.loaded[function - 1].files, self.loaded[function - 1].digest = dict(files), digest

    def launch(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        """Record a launch. Index arrays become zeros: what kernels did not write may be out of range."""
        for array in arguments:
            if isinstance(array, torch.Tensor) and not array.is_floating_point():
                array.zero_()
        self.launches.append(Launch(self.loaded[function - 1], (x, y, z)))


@contextlib.contextmanager
def stand_in(kind: str, arch: int | str, shared: int, warp: int = 32, name: str = "") -> Iterator[list[Launch]]:
    """Let Triton compile for a card, and record what it would launch. A process stands in for one card only.

    Args:
        kind: "cuda", or "hip" for AMD.
        arch: the compute capability, times ten; or the name of AMD's architecture.
        shared: the most bytes of shared memory of a program.
        warp: threads of a warp.
        name: the card's name; kernels of float32 depend on it, see `triton_tiles.float32_precision`.

    Yields:
        The list that launches are appended to.
    """
    card = _Driver(GPUTarget(kind, arch, warp), shared)
    before = driver._active
    driver.set_active(card)
    try:
        with (
            mock.patch.object(torch.Tensor, "is_cuda", property(lambda x: True), create=True),
            mock.patch.object(torch.Tensor, "is_cpu", property(lambda x: False), create=True),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
            mock.patch.object(triton_arithmetic, "card_name", return_value=name),
            mock.patch.dict(triton_sum.REGISTERS, clear=kind == "hip"),
            mock.patch.dict(triton_axes._ALL_REGISTERS, clear=kind == "hip"),
            mock.patch.object(knobs.runtime, "kernel_load_end_hook", card.after_load),
        ):
            yield card.launches
    finally:
        driver._active = before
