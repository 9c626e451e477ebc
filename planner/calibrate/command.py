"""``python -m planner calibrate``: measure this machine's rates and store them, or check predictions.

Rates are measured by running steps of the backend's own table, on shapes at which one rate decides; what moves bytes
only is measured by fills and copies. Every figure is a median, and every random array has a fixed seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from planner.calibrate.predictions import Rows, check, check_text
from planner.cost import rates
from planner.cost.device import Device
from planner.language.errors import PlannerError
from planner.language.resolve import resolve
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum
from planner.progress import Progress
from planner.workloads import WORKLOADS

__all__ = ["main", "measure"]

Framework = Literal["torch", "numpy"]
MEGABYTE = 2**20


class Lab(Protocol):
    """What measuring needs of a framework, on one device."""

    framework: Framework
    key: rates.Key
    preset: Device

    def normal(self, *shape: int) -> Any:
        """Return random float32 numbers."""
        ...

    def integers(self, high: int, *shape: int) -> Any:
        """Return random int64 numbers below a bound."""
        ...

    def empty(self, count: int) -> Any:
        """Allocate float32 numbers."""
        ...

    def fill(self, x: Any) -> None:
        """Write all of an array."""
        ...

    def copy(self, x: Any, out: Any) -> None:
        """Copy into an array in use."""
        ...

    def sort(self, x: Any) -> Any:
        """Return the stable order of small indices, as kernels over groups sort them."""
        ...

    def finish(self) -> None:
        """Wait until the device has done all that was asked."""
        ...


class NumpyLab:
    """NumPy on this machine's processor."""

    framework: Framework = "numpy"

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.key = rates.Key(rates.cpu_name(), "numpy", np.__version__, "cpu")
        self.preset = Device.preset("cpu")

    def normal(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def integers(self, high: int, *shape: int) -> Any:
        return self.rng.integers(0, high, shape)

    def empty(self, count: int) -> Any:
        return np.empty(count, np.float32)

    def fill(self, x: Any) -> None:
        x.fill(1)

    def copy(self, x: Any, out: Any) -> None:
        np.copyto(out, x)

    def sort(self, x: Any) -> Any:
        return np.argsort(x.astype(np.int16), kind="stable")

    def finish(self) -> None:
        """Nothing runs on after a call."""


class TorchLab:
    """Torch on this machine's processor, or on its first graphics card."""

    framework: Framework = "torch"

    def __init__(self, kind: str = "cpu") -> None:
        import torch

        from planner.cost.device import gpu_preset

        self.torch, self.where = torch, torch.device(kind)
        product = torch.cuda.get_device_name(0) if kind == "cuda" else ""
        self.key = rates.Key(product or rates.cpu_name(torch.get_num_threads()), "torch", str(torch.__version__), kind)
        self.preset = gpu_preset(product) if product else Device.preset("cpu")
        self.rng = np.random.default_rng(0)

    def normal(self, *shape: int) -> Any:
        return self.torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32)).to(self.where)

    def integers(self, high: int, *shape: int) -> Any:
        return self.torch.from_numpy(self.rng.integers(0, high, shape)).to(self.where)

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


def labs() -> Iterator[Lab]:
    """Make a lab for each framework and device that can be measured here."""
    if importlib.util.find_spec("torch") is not None:
        made = TorchLab()
        yield made
        if made.torch.cuda.is_available():
            yield TorchLab("cuda")
    yield NumpyLab()


def median_seconds(lab: Lab, run: Callable[[], Any], times: int = 7, most_seconds: float = 1.5) -> float:
    """Time a call after one warm-up: the median of some runs, of fewer (at least two) when the time is up."""
    run()
    lab.finish()
    found: list[float] = []
    while len(found) < times and (len(found) < 2 or sum(found) < most_seconds):
        start = time.perf_counter()
        result = run()
        lab.finish()
        found.append(time.perf_counter() - start)
        del result
    return statistics.median(found)


# -- rates ---------------------------------------------------------------------------------------------


def _step(lab: Lab, text: str, *shapes: tuple[int, ...], sizes: Any = None, **indices: Any) -> Callable[[], Any]:
    """Return the call of one step, in the backend's stock way."""
    spec = resolve(text, *shapes, sizes=sizes, **{name: tuple(index.shape) for name, index in indices.items()})
    op, table = Einsum(spec, "float32"), load_backend(lab.framework).table
    kind = next(c.lowering for c in table.choices(op, lab.preset) if table.rows[c.lowering].stock)
    inputs = [lab.normal(*shape) for shape in shapes]
    index = Rows({gather: indices[gather.array] for gather in spec.gathers})
    return lambda: table.run(kind, op, inputs, index)


def _flop_rate(lab: Lab) -> float:
    size = 1024 if lab.key.kind == "cpu" else 8192
    return 2 * size**3 / median_seconds(lab, _step(lab, "ij,jk->ik", (size, size), (size, size)))


def _half_rate(lab: Lab) -> float:
    """Of bfloat16 on a graphics card; 0 stands for the rate of float32."""
    if lab.key.kind == "cpu":
        return 0.0
    x = lab.normal(8192, 8192).bfloat16()
    return 2 * 8192**3 / median_seconds(lab, lambda: x @ x)


def _skinny_rate(lab: Lab) -> float:
    """The median over products with four rows, four columns, and sums of four terms."""
    shapes = [(4, 1024, 1024), (1024, 1024, 4), (1024, 4, 1024)]
    times = [median_seconds(lab, _step(lab, "ij,jk->ik", (m, k), (k, n))) for m, k, n in shapes]
    return statistics.median(2 * math.prod(shape) / seconds for shape, seconds in zip(shapes, times, strict=True))


def _bandwidth(lab: Lab) -> float:
    size = 128 * MEGABYTE if lab.key.kind == "cpu" else 1024 * MEGABYTE
    x, out = lab.empty(size // 4), lab.empty(size // 4)
    lab.fill(x)
    return 2 * size / median_seconds(lab, lambda: lab.copy(x, out))


def _fill_new(lab: Lab, count: int) -> None:
    lab.fill(lab.empty(count))


def _fresh(lab: Lab) -> dict[str, float]:
    """First writes to new allocations, beyond what writing costs: small ones, large ones, and where they part."""
    if lab.key.kind != "cpu":  # the caching allocator hands out memory that is in use
        return {"fresh_bandwidth": math.inf, "reused_bandwidth": math.inf, "fresh_bytes": 0}
    sizes = [size * MEGABYTE for size in (6, 12, 20, 28, 30, 34, 36, 48, 72, 128)]
    extra = []
    for size in sizes:
        old = lab.empty(size // 4)
        lab.fill(old)
        first = median_seconds(lab, partial(_fill_new, lab, size // 4))
        again = median_seconds(lab, partial(lab.fill, old))
        extra.append(max(first - again, 0.02 * again) / size)
    # The split that parts the sizes best: the least sum of squared distances of logarithms to either side's mean.
    logs = [math.log(seconds) for seconds in extra]

    def spread(values: Sequence[float]) -> float:
        return sum((value - statistics.fmean(values)) ** 2 for value in values)

    split = min(range(1, len(sizes)), key=lambda at: spread(logs[:at]) + spread(logs[at:]))
    small, large = (statistics.median(part) for part in (extra[:split], extra[split:]))
    if large < 2 * small:  # one regime
        both = 1 / statistics.median(extra)
        return {"fresh_bandwidth": both, "reused_bandwidth": both, "fresh_bytes": 0}
    # The C library's own thresholds are powers of two.
    bound = next(s for s in (2**n for n in range(21, 28)) if s > sizes[split - 1])
    return {"fresh_bandwidth": 1 / large, "reused_bandwidth": 1 / small, "fresh_bytes": bound}


def _launch_seconds(lab: Lab) -> float:
    """One step on a few numbers; many are timed together, as a graphics card's launches overlap."""
    run = _step(lab, "ij,ij->ij", (2, 2), (2, 2))

    def many() -> None:
        for _ in range(1000):
            run()

    return median_seconds(lab, many) / 1000


def _matrix_seconds(lab: Lab) -> float:
    """Small matrices of a batch, beyond their FLOPs at the rate of one such product over many columns."""
    batch, size = 8192, 8
    run = _step(lab, "bij,bjk->bik", (batch, size, size), (batch, size, size))
    whole = _step(lab, "ij,jk->ik", (size, size), (size, batch * size))
    return max(median_seconds(lab, run) - median_seconds(lab, whole), 0.0) / batch


def _row_seconds(lab: Lab, text: str, device: Device) -> float:
    """Rows of 16 numbers at random places, beyond the bytes that they move."""
    rows, pool, width = 200_000, 20_000, 16
    q = lab.integers(pool, rows)
    takes = not text.endswith("]j")
    run = _step(lab, text, (pool if takes else rows, width), sizes=None if takes else {"q": pool}, q=q)
    moved, result = 4 * width * (rows + pool) + 8 * rows, 4 * width * (rows if takes else pool)
    return max(median_seconds(lab, run) - device.seconds(0, moved, result, 1), 0.0) / rows


def _sort_row_seconds(lab: Lab) -> float:
    rows = lab.integers(2048, 131072)
    return median_seconds(lab, lambda: lab.sort(rows)) / len(rows)


def measure(lab: Lab, progress: Callable[[str], None] = lambda what: None) -> Device:
    """Measure the rates of one framework on one device.

    Args:
        lab: the framework on the device.
        progress: told what is measured next.
    """
    found: dict[str, Any] = {}

    def device() -> Device:
        """What is known so far; what is not yet counts as free."""
        # The cache is the preset's: what it spares shows in loops over slices, not in one step that runs alone.
        blank = Device(
            lab.preset.name, math.inf, math.inf, kind=lab.preset.kind, cache_bytes=lab.preset.cache_bytes,
            cache_bandwidth=lab.preset.cache_bandwidth,
        )  # fmt: skip
        return dataclasses.replace(blank, **found)

    for name, run in (
        ("flop_rate", _flop_rate),
        ("half_rate", _half_rate),
        ("skinny_rate", _skinny_rate),
        ("bandwidth", _bandwidth),
        ("launch_seconds", _launch_seconds),
        ("matrix_seconds", _matrix_seconds),
        ("sort_row_seconds", _sort_row_seconds),
    ):
        progress(name)
        found[name] = run(lab)
        gc.collect()
    progress("fresh_bandwidth")
    found |= _fresh(lab)
    progress("take_row_seconds")
    found["take_row_seconds"] = _row_seconds(lab, "q[n]j->nj", device())
    progress("add_row_seconds")
    found["add_row_seconds"] = _row_seconds(lab, "nj->q[n]j", device())
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"measured on {lab.key.machine} with {lab.framework} {lab.key.framework_version}, {today}"
    return dataclasses.replace(device(), name=lab.key.kind, source=source)


STAGES = 10


# -- the command -----------------------------------------------------------------------------------------


def rates_text(device: Device, preset: Device) -> str:
    """Write a table of what was measured beside the preset."""
    lines = [device.source, f"  {'':18} {'preset':>12} {'measured':>12}"]
    for name in rates.rate_fields():
        lines.append(f"  {name:18} {getattr(preset, name):12.4g} {getattr(device, name):12.4g}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m planner calibrate", description="Measure this machine's rates and store them for plans to use."
    )
    parser.add_argument("--dry-run", action="store_true", help="measure and print, store nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check",
        nargs="*",
        metavar="WORKLOAD",
        help="measure no rates: time the steps of the named workloads (all by default) against their predictions",
    )
    options = parser.parse_args(argv)
    try:
        return _check(options) if options.check is not None else _calibrate(options)
    except KeyboardInterrupt:
        print("interrupted: what was stored before is unchanged", file=sys.stderr)
        return 130
    except (PlannerError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _check(options: argparse.Namespace) -> int:
    progress = Progress(2 * len(options.check or WORKLOADS))
    try:
        times = check(options.check, progress)
    finally:
        progress.clear()
    print(json.dumps([dataclasses.asdict(t) for t in times], indent=1) if options.json else check_text(times))
    return 0


def _report(progress: Progress, lab: Lab, what: str) -> None:
    progress(f"{lab.framework} {lab.key.kind} {what}")


def _calibrate(options: argparse.Namespace) -> int:
    made = list(labs())
    progress = Progress(STAGES * len(made))
    measured = []
    try:
        for lab in made:
            measured.append(measure(lab, partial(_report, progress, lab)))
    finally:
        progress.clear()
    # Stored together at the end, so that an interrupted run changes nothing.
    paths = [None if options.dry_run else rates.write(d, lab.key) for lab, d in zip(made, measured, strict=True)]
    if options.json:
        rows = zip(made, measured, paths, strict=True)
        print(
            json.dumps(
                [
                    {
                        "key": dataclasses.asdict(lab.key),
                        "path": None if path is None else str(path),
                        "preset": _finite(lab.preset),
                        "measured": _finite(device),
                    }
                    for lab, device, path in rows
                ],
                indent=1,
            )
        )
        return 0
    for lab, device, path in zip(made, measured, paths, strict=True):
        print(rates_text(device, lab.preset))
        print(f"  stored in {path}\n" if path else "  not stored\n")
    return 0


def _finite(device: Device) -> dict[str, Any]:
    """A device as JSON has it: infinite rates as null."""
    return {name: None if value == math.inf else value for name, value in dataclasses.asdict(device).items()}
