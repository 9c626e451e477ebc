"""Labs: what measuring needs of a framework, on one device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from planner.cost import rates
from planner.cost.device import Device, gpu_preset
from planner.program.frameworks import load_backend

__all__ = ["Lab", "make_labs"]

Framework = Literal["torch", "numpy"]


class Lab:
    """A framework on one device. This class is NumPy on this machine's processor; `TorchLab` overrides what differs.

    Attributes:
        framework: the framework's name.
        key: names the file in which the rates are stored.
        preset: the device as the library knows it without a measurement.
        is_tiny: whether to take tiny arrays, in tests.
    """

    framework: Framework = "numpy"
    is_tiny = False

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.key = rates.Key(rates.cpu_name(), "numpy", np.__version__, "cpu")
        self.preset = Device.preset("cpu")

    def normal(self, *shape: int) -> Any:
        """Return random float32 numbers."""
        return self.rng.standard_normal(shape, dtype=np.float32)

    def integers(self, high: int, *shape: int) -> Any:
        """Return random int64 numbers below a bound."""
        return self.rng.integers(0, high, shape)

    def empty(self, count: int) -> Any:
        """Allocate an array of float32, uninitialised."""
        return np.empty(count, np.float32)

    def fill(self, x: Any) -> None:
        """Write every element of an array."""
        x.fill(1)

    def copy(self, x: Any, out: Any) -> None:
        """Copy an array into another one, whose memory is in use already."""
        np.copyto(out, x)

    def sort(self, x: Any) -> Any:
        """Return the stable order of small indices, sorted as the grouped kernels do it."""
        return np.argsort(x.astype(np.int16), kind="stable")

    def group(self, x: Any, size: int) -> Any:
        """Check an index array and sort it by group, as a call does whose index array is not prepared."""
        return load_backend(self.framework).group(x, size, "raise")

    def finish(self) -> None:
        """Wait until the device has finished all calls."""


class TorchLab(Lab):
    """Torch on this machine's processor, or on its first graphics card."""

    framework: Framework = "torch"

    def __init__(self, kind: str = "cpu") -> None:
        import torch

        super().__init__()
        self.torch, self.where = torch, torch.device(kind)
        product = torch.cuda.get_device_name(0) if kind == "cuda" else ""
        self.key = rates.Key(product or rates.cpu_name(torch.get_num_threads()), "torch", str(torch.__version__), kind)
        if product:
            self.preset = gpu_preset(product)

    def normal(self, *shape: int) -> Any:
        return self.torch.from_numpy(super().normal(*shape)).to(self.where)

    def integers(self, high: int, *shape: int) -> Any:
        return self.torch.from_numpy(super().integers(high, *shape)).to(self.where)

    def empty(self, count: int) -> Any:
        return self.torch.empty(count, device=self.where)

    def fill(self, x: Any) -> None:
        x.fill_(1)

    def copy(self, x: Any, out: Any) -> None:
        out.copy_(x)

    def sort(self, x: Any) -> Any:
        return self.torch.sort(x.to(self.torch.int16), stable=True).indices

    def finish(self) -> None:
        if self.where.type == "cuda":
            self.torch.cuda.synchronize()


def make_labs() -> Iterator[Lab]:
    """Make a lab for each framework and device that can be measured on this machine."""
    if importlib.util.find_spec("torch") is not None:
        torch_lab = TorchLab()
        yield torch_lab
        if torch_lab.torch.cuda.is_available():
            yield TorchLab("cuda")
    yield Lab()
