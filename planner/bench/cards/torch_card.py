"""Check the Triton kernels on a card against the CPU kernels, then time them. `planner.bench.card` is the command.

Times are medians of `triton.testing.do_bench`, which flushes the second-level cache before each run. The bandwidth of a
copy and the rate of a large product are measured in the same process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from planner.bench.card import (
    CardComparison,
    Item,
    Program,
    Step,
    check_items,
    comparison_items,
    law_items,
    main,
    rate_items,
)
from planner.bench.cards.torch_checks import TorchChecks
from planner.cost.device import H200


class TorchCard(TorchChecks):
    """Torch on its GPU, or on a CPU for `--smoke`; the methods are described in `planner.bench.card.Card`."""

    def alive(self) -> bool:
        """Whether this process can still use the card."""
        try:
            return int(self.torch.ones(3, device=self.place).sum()) == 3
        except Exception:  # after any error the process cannot go on
            return False

    def seconds(self, program: Program) -> float:
        """Return the median seconds of many runs."""
        if not self.smoke:
            import triton.testing

            return 1e-3 * float(triton.testing.do_bench(program, warmup=50, rep=200, return_mode="median"))
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            program()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def extra_bytes(self, program: Program) -> int | None:
        """Return the most bytes that a run allocates; None on a CPU."""
        if self.smoke:
            return None
        program()
        self.torch.cuda.synchronize()
        before = self.torch.cuda.memory_allocated()
        self.torch.cuda.reset_peak_memory_stats()
        result = program()
        extra = self.torch.cuda.max_memory_allocated() - before
        del result
        return int(extra)

    def figures(self, program: Program) -> Mapping[str, Any]:
        """Return the time of a program, that of the card alone, and the memory that it takes."""
        found = {"seconds": self.seconds(program), "extra_bytes": self.extra_bytes(program)}
        return found if self.smoke else {**found, "device_seconds": self.device_seconds(program)}

    def comparisons(self) -> Iterator[tuple[str, Callable[[], Iterator[CardComparison]]]]:
        """Yield families of comparisons, whose first way is the library's."""
        for dtype in ("float32",) if self.smoke else ("float32", "bfloat16"):
            yield f"seed-gathered-matmul {dtype}", partial(self.seed_matmul, dtype)
        yield "experts", self.experts
        yield "seed-gathered-keys", self.seed_keys

    def seed_matmul(self, dtype: str) -> Iterator[CardComparison]:
        """Compare ways to multiply each row by the matrix that its index names."""
        import planner
        from planner.kernels.grouped_matmul import triton_grouped
        from planner.kernels.grouping.torch_grouping import group_rows
        from planner.kernels.tiled_product import triton_tiles

        torch, small = self.torch, self.smoke
        n, j, g = (300, 16, 5) if small else (131_072, 64, 2048)
        a, c = (x.requires_grad_() for x in (self.integers(n, 1, j, dtype=dtype), self.integers(g, j, j, dtype=dtype)))
        q = torch.randint(0, g, (n,), device=self.place)
        prepared, gradient = planner.group(q, g), torch.ones(n, 1, j, device=self.place, dtype=a.dtype)
        size = a.element_size() * (2 * n * j + g * j * j)

        def ours(a: Any = a, c: Any = c, q: Any = prepared) -> Any:
            return planner.contract("nij, q[n]jk -> nik", a, c, q=q)

        def loose(a: Any = a, c: Any = c, q: Any = q) -> Any:
            return planner.contract("nij, q[n]jk -> nik", a, c, q=q)

        def naive(a: Any = a, c: Any = c, q: Any = q) -> Any:
            return torch.matmul(a, c[q])

        ways: dict[str, Program] = {"planner, prepared": ours, "planner": loose, "matmul(a, c[q])": naive}
        if not small:
            ways["planner, compiled"] = torch.compile(ours, fullgraph=True)
            ways["compiled"] = torch.compile(naive)
        yield CardComparison(f"seed-gathered-matmul {dtype}, forward", _without_gradients(torch, ways), size)
        both = {label: _with_gradients(torch, way, (a, c), gradient) for label, way in ways.items()}
        yield CardComparison(f"seed-gathered-matmul {dtype}, with gradients", both, 2.65 * size)
        order, values = group_rows(q, g), (gradient, a.detach(), c.detach())
        alone: dict[str, Program] = {
            f"kernel, {tiling or 'default tiles'}": partial(
                triton_grouped.grouped_gradients, *values, order, tiling=tiling
            )
            for tiling in ("", *triton_tiles.TILINGS)
        }

        def apart(g: Any = gradient, a: Any = values[1], c: Any = values[2], order: Any = order) -> Any:
            rows = triton_grouped.grouped_matmul(g, c.transpose(1, 2), order)
            return rows, triton_grouped.grouped_outer(a, g, order)

        alone["two products"] = apart
        yield CardComparison(f"seed-gathered-matmul {dtype}, both gradients", alone, 1.65 * size)

    def experts(self) -> Iterator[CardComparison]:
        """Compare ways to run a layer of experts."""
        import planner
        from planner.kernels.grouped_matmul import triton_grouped
        from planner.kernels.grouping.torch_grouping import group_rows
        from planner.kernels.tiled_product import triton_tiles

        torch, small = self.torch, self.smoke
        t, width, e = (64, 16, 2) if small else (32_768, 2048, 32)
        dtype = "float32" if small else "bfloat16"
        a, c = self.integers(t, 1, width, dtype=dtype), self.integers(e, width, width, dtype=dtype)
        q = torch.randint(0, e, (t,), device=self.place).sort().values
        prepared = planner.group(q, e)
        ways = {"planner, prepared": lambda: planner.contract("tij, q[t]jk -> tik", a, c, q=prepared)}
        if hasattr(torch.nn.functional, "grouped_mm") and not small:
            ends = torch.bincount(q, minlength=e).cumsum(0).int()
            ways["grouped_mm"] = lambda: torch.nn.functional.grouped_mm(a[:, 0], c, offs=ends)
        # The kernels themselves, whatever the plan takes, in each tiling.
        for tiling in ("", *triton_tiles.TILINGS):
            ways[f"kernel, {tiling or 'default tiles'}"] = partial(
                triton_grouped.grouped_matmul, a, c, group_rows(q, e), tiling=tiling
            )
        yield CardComparison(f"experts {dtype}, forward, {2 * t * width * width / 1e9:.0f} GFLOP", ways, 0.0)

    def seed_keys(self) -> Iterator[CardComparison]:
        """Compare ways to score queries against the keys that are chosen for them."""
        import planner

        torch, small = self.torch, self.smoke
        b, heads, queries, pool, depth, k = (1, 1, 6, 20, 8, 4) if small else (8, 8, 1000, 1000, 32, 100)
        query, keys = (self.integers(b, heads, m, depth).requires_grad_() for m in (queries, pool))
        x = torch.randint(0, pool, (b, heads, queries, k), device=self.place)
        prepared = planner.group(x, pool)

        def scored(index: Any) -> Any:
            return planner.contract("bhqd, b h i[bhqk] d -> bhqk", query, keys, i=index)

        def gathered() -> Any:
            rows = torch.arange(b * heads, device=self.place).view(b, heads, 1, 1)
            return torch.einsum("bhqd,bhqkd->bhqk", query, keys.reshape(b * heads, pool, depth)[rows, x])

        ways = {
            "planner, prepared": lambda: scored(prepared),
            "planner": lambda: scored(x),
            "gather, then einsum": gathered,
        }
        yield CardComparison(f"seed-gathered-keys k = {k}, forward", _without_gradients(torch, ways), 0.0)
        gradient = torch.ones(x.shape, device=self.place)
        both = {label: _with_gradients(torch, way, (query, keys), gradient) for label, way in ways.items()}
        yield CardComparison(f"seed-gathered-keys k = {k}, with gradients", both, 0.0)

    def steps(self) -> Iterator[Step]:
        """Yield the steps: compiling, checks, random specs, compute-sanitizer, prices, tiles, and whole calls."""
        yield Step("compile", 40, self.compile)
        yield Step("checks", 80, lambda: check_items(self.checks()))
        yield Step("specs", 60, lambda: law_items("torch", self.smoke))
        yield Step("sanitizer", 50, self.sanitize)
        yield Step("prices", 50, self.prices)
        yield Step("tiles", 180, self.tiles)
        yield Step("calls", 80, self.calls)

    @property
    def capability(self) -> str:
        """The compute capability, times ten."""
        return "90" if self.smoke else "{}{}".format(*self.torch.cuda.get_device_capability())

    def compile(self) -> Iterator[Item]:
        """Yield an item that compiles the kernels of the sweep in many processes, into the cache that is used later."""
        shares = 1 if self.smoke else max(1, min(14, len(os.sched_getaffinity(0)) - 1))
        commands = [
            [sys.executable, "-m", "planner.bench.cards.sweep", "--arch", self.capability, "--share", f"{n}/{shares}"]
            for n in range(shares)
        ]

        def run() -> Mapping[str, Any]:
            ends, environment = time.monotonic() + 40, {**os.environ, "TRITON_INTERPRET": "0"}
            smoke, kernels = ["--smoke"] * self.smoke, []
            children = [
                subprocess.Popen([*command, *smoke], env=environment, stdout=subprocess.PIPE, text=True)
                for command in commands
            ]
            for child in children:
                try:
                    out, _ = child.communicate(timeout=max(1.0, ends - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.kill()
                    out, _ = child.communicate()
                kernels += [json.loads(line) for line in out.splitlines() if line[:1] == "{" and line[-1:] == "}"]
            return {"kernels": kernels}

        yield Item({"what": f"kernels of the sweep, in {shares} processes"}, run)

    def sanitize(self) -> Iterator[Item]:
        """Yield an item for each tool of compute-sanitizer, which runs tiny products."""
        for tool in ("memcheck",) if self.smoke else ("memcheck", "racecheck"):
            yield Item({"what": tool}, partial(self.sanitized, tool))

    def sanitized(self, tool: str) -> Mapping[str, Any]:
        """Return what a tool of compute-sanitizer says; without it the products run alone."""
        command = [sys.executable, "-m", "planner.bench.cards.sweep", "--tiny", *["--smoke"] * self.smoke]
        found = shutil.which("compute-sanitizer")
        prefix = [found, "--tool", tool, "--error-exitcode", "9"] if found else []
        done = subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=60)
        said = (done.stdout + done.stderr)[-500:] if done.returncode else ""
        return {"difference": said, "tool": found or "compute-sanitizer is not installed"}

    def prices(self) -> Iterator[Item]:
        """Yield the rates of large copies and products, what small things take, and all rates of the cost model."""
        yield from rate_items(self.rates())
        torch = self.torch
        for size in (200,) if self.smoke else (2**12, 2**17, 2**22):
            q = torch.randint(0, 100, (size,), device=self.place)
            x, out = torch.ones(size, 16, device=self.place), torch.zeros(100, 16, device=self.place)
            programs: dict[str, Program] = {
                "sort of int16": partial(torch.sort, q.short(), stable=True),
                "take": partial(x.index_select, 0, q),
                "add": partial(out.index_add_, 0, q, x),
                "wait": q[0].item,
            }
            for what, program in programs.items():
                yield Item({"what": f"{what}, {size} rows"}, partial(self.priced, program))
        yield Item({"what": "rates of the cost model"}, self.calibrated)

    def priced(self, program: Program) -> Mapping[str, Any]:
        """Return the time of a program on the card, and that of the host until it returns."""
        begun, runs = time.perf_counter(), 2 if self.smoke else 100
        for _ in range(runs):
            program()
        host = (time.perf_counter() - begun) / runs
        return {"seconds": self.seconds(program), "host_seconds": host}

    def calibrated(self) -> Mapping[str, Any]:
        """Return the card's rates, as `python -m planner calibrate` measures them."""
        from planner.calibrate.labs import TorchLab
        from planner.calibrate.measurements import measure
        from planner.cost.rates import rate_fields

        lab = TorchLab(self.place)
        if self.smoke:
            lab.is_tiny, lab.preset = True, H200
            lab.key = dataclasses.replace(lab.key, kind="cuda")
        found = measure(lab)
        known = {name: getattr(found, name) for name in rate_fields()}
        rates = {name: rate for name, rate in known.items() if isinstance(rate, float | int) and math.isfinite(rate)}
        return {"device": {"name": lab.preset.name, "source": found.source, **rates}}

    def tiles(self) -> Iterator[Item]:
        """Yield each product of the sweep in each precision and tiles."""
        from planner.bench.cards import sweep

        made: dict[str, Any] = {}
        names, changes = (list(sweep.TINY), sweep.CHANGES[:2]) if self.smoke else (list(sweep.PROBLEMS), sweep.CHANGES)
        for name, precision, change in sweep.cases(names, changes, self.capability):
            about = {"product": name, "precision": precision, "change": change}
            what = f"{name}, {precision}, {' '.join(f'{key} {value}' for key, value in change.items()) or 'default'}"
            yield Item({"what": what, **about}, partial(self.tiled, made, name, precision, change))

    def tiled(self, made: dict[str, Any], name: str, precision: str, change: Mapping[str, int]) -> Mapping[str, Any]:
        """Return the time of a product in some tiles, and its error beside products in float64."""
        from planner.bench.cards import sweep

        if name not in made:  # the arrays of one product at a time
            made.clear()
            made[name] = product = sweep.product_of(name, self.place)
            made["exact"] = product.exact()
        product = made[name]
        with sweep.with_tiles(change, precision) as seen:
            self.poison()
            try:
                found = product.run()
            except Exception as error:
                if type(error).__name__ not in ("OutOfResources", "CompilationError") or not change:
                    raise
                return {**seen, "refused": str(error)[:200]}
            if not seen:
                return {"left_out": "the tiles are the default's"}
            seconds = self.device_seconds(product.run)
        errors = [
            float(((x.double() - exact).abs() / sums.clamp_min(1e-30)).max())
            for x, (exact, sums) in zip(found, made["exact"], strict=True)
        ]
        most = 2e-2 if found[0].element_size() == 2 else 2e-3 if precision == "tf32" else 1e-5
        right = all(error <= most for error in errors)  # NaN is not
        wrong = "" if right else f"relative errors are {', '.join(f'{error:.2g}' for error in errors)}"
        return {**seen, "seconds": seconds, "relative_error": max(errors) if right else None, "difference": wrong}

    def device_seconds(self, program: Program) -> float:
        """Return the median seconds that the card computes; the second-level cache is overwritten before each run.

        The card waits before, so that the host has started all kernels when the first one begins.
        """
        torch = self.torch
        if self.smoke:
            return float(self.seconds(program))
        program()
        flush = torch.empty(1 << 28, dtype=torch.int8, device=self.place)
        times = []
        for _ in range(11):
            flush.zero_()
            torch.cuda._sleep(2_000_000)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            program()
            end.record()
            end.synchronize()
            times.append(1e-3 * begin.elapsed_time(end))
        return float(statistics.median(times))

    def calls(self) -> Iterator[Item]:
        """Yield whole calls beside other programs, the kernels of a call, and all rows of some workloads."""
        yield from comparison_items(self.comparisons(), self.figures)
        yield Item({"what": "kernels of a prepared call"}, self.kernel_list)
        names = ("seed-gathered-matmul", "seed-gathered-keys", "experts", "lora", "gathered-heads", "message-passing")
        for name in names[:1] if self.smoke else names:
            yield Item({"what": f"rows of {name}"}, partial(self.rows, name))

    def kernel_list(self) -> Mapping[str, Any]:
        """Return the names of the kernels, or on a CPU of the operators, that a prepared call runs."""
        import planner

        torch, n, g = self.torch, 300 if self.smoke else 131_072, 5 if self.smoke else 2048
        a, c = self.integers(n, 1, 64), self.integers(g, 64, 64)
        q = planner.group(torch.randint(0, g, (n,), device=self.place), g)
        planner.contract("nij, q[n]jk -> nik", a, c, q=q)
        with torch.profiler.profile() as profile:
            planner.contract("nij, q[n]jk -> nik", a, c, q=q)
        names = [event.name for event in profile.events() if self.smoke or "cuda" in str(event.device_type).lower()]
        return {"kernels": names}

    def rows(self, name: str) -> Mapping[str, Any]:
        """Return for each step of a workload's plan the predicted and the measured seconds of each row that runs it."""
        import planner
        from planner.backends.torch.executable import Executable
        from planner.program.frameworks import load_backend
        from planner.workloads import WORKLOADS

        workload = WORKLOADS[name].resized(n=90, q=3, j=8, k=8) if self.smoke else WORKLOADS[name]
        operands = [x.to(self.place).requires_grad_() for x in workload.operands("torch")]
        indices = {letter: q.to(self.place) for letter, q in workload.indices("torch").items()}
        device = "h200" if self.smoke else None
        plan = planner.plan(workload.spec, *operands, device=device, **workload.options, **indices)
        table, steps = load_backend("torch").table, []
        for step in plan.steps:
            index, times = Executable(plan, table).prepare(indices), []
            inputs = [self.torch.ones(shape, device=self.place) for shape in step.op.input_shapes]
            for choice in table.choices(step.op, plan.device):
                if table.rows[choice.lowering].variant_of:
                    continue
                try:
                    run = partial(table.run, choice.lowering, step.op, inputs, index)
                    seconds: Any = self.seconds(run)
                except Exception as error:  # too large, perhaps
                    seconds = f"{type(error).__name__}: {str(error)[:100]}"
                times.append([choice.lowering, 1e-12 * choice.cost.picoseconds, seconds])
            steps.append({"step": str(step.op.spec), "chosen": step.choice.lowering, "rows": times})
        return {"steps": steps}

    def rates(self) -> Iterator[tuple[str, Callable[[], float]]]:
        """Yield bytes a second of a copy, and FLOP/s of a large product in each dtype."""
        yield "copy, bytes/s", self.copy_rate
        for dtype in ("float32",) if self.smoke else ("float32", "bfloat16", "float16"):
            yield f"{dtype}, FLOP/s", partial(self.product_rate, dtype)

    def copy_rate(self) -> float:
        """Measure bytes a second that a copy reads and writes."""
        x = self.torch.zeros(1024 if self.smoke else 1 << 28, device=self.place)
        y = self.torch.empty_like(x)
        return float(2 * x.nbytes / self.seconds(lambda: y.copy_(x)))

    def product_rate(self, dtype: str) -> float:
        """Measure FLOP/s of a large product."""
        side = 64 if self.smoke else 8192
        m = self.torch.randn(side, side, device=self.place).to(getattr(self.torch, dtype))
        return 2 * side**3 / self.seconds(partial(self.torch.matmul, m, m))


def _without_gradients(torch: Any, ways: Mapping[str, Program]) -> dict[str, Program]:
    def run(way: Program) -> Any:
        with torch.no_grad():
            return way()

    return {label: partial(run, way) for label, way in ways.items()}


def _with_gradients(torch: Any, way: Program, leaves: Any, gradient: Any) -> Program:
    return lambda: torch.autograd.grad(way(), leaves, gradient)


CARD = TorchCard

if __name__ == "__main__":
    sys.exit(main(["--part", "torch", *sys.argv[1:]]))
