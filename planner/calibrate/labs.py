"""Labs: what measuring needs of a framework, on one device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np

from planner.cost import rates
from planner.cost.device import Device, gpu_preset

Framework = Literal["torch", "numpy", "jax"]


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
        self._times: list[float] = []
        self._timed = 0

    def begin_pass(self) -> None:
        """Begin to measure everything, in the same order as in the passes before."""
        self._timed = 0

    def least_of_passes(self, seconds: float) -> float:
        """Return the least seconds of a measurement, of which one pass after another found some."""
        if self._timed == len(self._times):
            self._times.append(seconds)
        self._times[self._timed] = least = min(seconds, self._times[self._timed])
        self._timed += 1
        return least

    def normal(self, *shape: int) -> Any:
        """Return random float32 numbers."""
        return self.rng.standard_normal(shape, dtype=np.float32)

    def integers(self, high: int, *shape: int) -> Any:
        """Return random int64 numbers below a bound."""
        return self.rng.integers(0, high, shape)

    def filling(self, count: int, anew: bool) -> Callable[[], Any]:
        """Return a function that writes an array of float32: in memory that it allocates anew, or in memory in use."""
        old = np.ones(count, np.float32)
        return (lambda: np.empty(count, np.float32).fill(1)) if anew else partial(old.fill, 1)

    def copying(self, count: int) -> Callable[[], Any]:
        """Return a function that copies an array of float32 into another one, whose memory is in use already."""
        return partial(np.copyto, np.ones(count, np.float32), np.ones(count, np.float32))

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs a step, compiled if the framework compiles steps."""
        return step

    def sort(self, x: Any) -> Any:
        """Return the stable order of small indices, sorted as the grouped kernels do it."""
        return np.argsort(x.astype(np.int16), kind="stable")

    def finish(self, result: Any) -> None:
        """Wait until the device has finished all calls, of which this is the last one's result."""


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

    def filling(self, count: int, anew: bool) -> Callable[[], Any]:
        old = self.torch.ones(count, device=self.where)
        return (lambda: self.torch.empty(count, device=self.where).fill_(1)) if anew else partial(old.fill_, 1)

    def copying(self, count: int) -> Callable[[], Any]:
        x, out = self.torch.ones(2, count, device=self.where)
        return partial(out.copy_, x)

    def sort(self, x: Any) -> Any:
        return self.torch.sort(x.to(self.torch.int16), stable=True).indices

    def finish(self, result: Any) -> None:
        if self.where.type == "cuda":
            self.torch.cuda.synchronize()


class JaxLab(Lab):
    """JAX on this machine's processor. Steps are jitted, and a program writes into memory in use that is donated."""

    framework: Framework = "jax"

    def __init__(self) -> None:
        import jax

        super().__init__()
        self.jax, self.where = jax, jax.local_devices(backend="cpu")[0]
        self.key = rates.Key(rates.cpu_name(), "jax", str(jax.__version__), "cpu")

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return self.jax.jit(step)

    def normal(self, *shape: int) -> Any:
        return self.jax.device_put(super().normal(*shape), self.where)

    def integers(self, high: int, *shape: int) -> Any:
        return self.jax.device_put(super().integers(high, *shape), self.where)

    def filling(self, count: int, anew: bool) -> Callable[[], Any]:
        ones = self.jax.numpy.ones
        if anew:
            return partial(self.jax.jit(lambda x: self.jax.numpy.full(count, x)), ones(()))
        return self._writing(lambda old, x: self.jax.numpy.full_like(old, x), ones(count), ones(()))

    def copying(self, count: int) -> Callable[[], Any]:
        return self._writing(lambda old, x: x + 1, *self.jax.numpy.ones((2, count)))

    def _writing(self, function: Callable[..., Any], old: Any, x: Any) -> Callable[[], Any]:
        """Return a function that writes a function of x into the memory of an old array, whose shape its result has."""
        run, held = self.jax.jit(function, donate_argnums=0, keep_unused=True), [old]

        def write() -> Any:
            held[0] = run(held[0], x)
            return held[0]

        return write

    def sort(self, x: Any) -> Any:
        return self.jax.numpy.argsort(x, stable=True)

    def finish(self, result: Any) -> None:
        self.jax.block_until_ready(result)  # type: ignore[no-untyped-call]


def make_labs() -> Iterator[Lab]:
    """Make a lab for each framework and device that can be measured on this machine."""
    if importlib.util.find_spec("torch") is not None:
        torch_lab = TorchLab()
        yield torch_lab
        if torch_lab.torch.cuda.is_available():
            yield TorchLab("cuda")
    yield Lab()
    if importlib.util.find_spec("jax") is not None:
        yield JaxLab()
