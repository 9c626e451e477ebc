"""`python -m planner.bench`: the library against its peers, each target line with what was measured.

Every comparison runs its programs in one process, interleaved, with a pause before each run, and takes
medians. All programs of a comparison must first return equal values and gradients. A whole run writes its
table and figures to a folder (docs/benchmarks by default); `--only` prints and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from planner.demo.rows import differences
from planner.demo.runs import PAUSE_SECONDS, RUNS, JaxRun, Run, TorchRun
from planner.demo.ways import OURS, Framework, Way, direct, einsum_of, gather_then_einsum, gathered_keys, our_way
from planner.workloads import WORKLOADS, Skew, Workload

__all__ = ["PARTS", "Result", "Settings", "main"]

Mode = Literal["f", "g"]
_MODES: tuple[tuple[Mode, str], ...] = (("f", "forward"), ("g", "forward and gradients"))


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        rounds: runs of each program, at most.
        budget_seconds: time for one comparison, after which no further round begins (three are always run).
        pause_seconds: the pause before each run: a program pays for the memory that the one before gave back.
        calls: calls in a block when a single call's overhead is measured.
    """

    rounds: int = 11
    budget_seconds: float = 30.0
    pause_seconds: Mapping[str, float] = dataclasses.field(default_factory=PAUSE_SECONDS.copy)
    calls: int = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One target line.

    Attributes:
        part: name in `PARTS`.
        framework: where it ran.
        what: the comparison in words.
        target: the number to reach.
        measured: the number reached.
        unit: "x" for a ratio of medians, "MB" for bytes.
        at_most: whether the target is an upper bound.
        medians: median seconds (or bytes) of each program, by label.
        rounds: runs behind each median.
    """

    part: str
    framework: Framework
    what: str
    target: float
    measured: float
    unit: Literal["x", "MB"] = "x"
    at_most: bool = False
    medians: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rounds: int = 1

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.measured <= self.target if self.at_most else self.measured >= self.target


def interleaved(
    programs: Mapping[str, Callable[[], Any]], framework: Framework, settings: Settings
) -> dict[str, list[float]]:
    """Time programs in turn, round after round, with a pause before each run; they must be warm."""
    times: dict[str, list[float]] = {label: [] for label in programs}
    begun = time.perf_counter()
    for done in range(settings.rounds):
        if done >= 3 and time.perf_counter() - begun > settings.budget_seconds:
            break
        for label, program in programs.items():
            time.sleep(settings.pause_seconds[framework])
            start = time.perf_counter()
            result = program()
            times[label].append(time.perf_counter() - start)
            del result
    return times


def _medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {label: statistics.median(seconds) for label, seconds in times.items()}


def _runs(framework: Framework, workload: Workload, ways: Sequence[Way], skew: Skew = "uniform") -> dict[str, Run]:
    """Prepare all ways, see that their values and gradients are equal, and warm them."""
    runs: dict[str, Run] = {}
    expected = None
    for way in ways:
        run = RUNS[framework](way, workload, workload.takes_gradient, skew)
        results = run.results()
        expected = expected or results
        wrong = differences(results, expected)
        if wrong:
            raise AssertionError(f"{workload.name}, {framework}: {way.label} differs in {wrong}")
        del results
        run.forward()
        runs[way.label] = run
    return runs


def _timed(runs: Mapping[Any, Run], mode: Mode, framework: Framework, settings: Settings) -> dict[str, list[float]]:
    programs = {label: run.forward if mode == "f" else run.both for label, run in runs.items()}
    return interleaved(programs, framework, settings)


# --- the parts ----------------------------------------------------------------------------------


def gathered_matmul(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Seed 000: `matmul(a, c[q])`, eager and compiled; memory; groups of very unequal size."""
    part, workload = "seed-gathered-matmul", WORKLOADS["seed-gathered-matmul"]
    targets: dict[str, dict[Mode, float]]
    if framework == "torch":
        import torch

        compiled = torch.compile(lambda a, c, q: torch.matmul(a, c[q]))
        ways = [Way("matmul(a, c[q])", direct), Way("torch.compile", lambda xp, a, c, q: compiled(a, c, q))]
        targets = {"matmul(a, c[q])": {"f": 20, "g": 30}, "torch.compile": {"f": 1.8, "g": 18}}
    else:
        ways = [Way("einsum(a, c[q])", lambda xp, a, c, q: xp.einsum("nij,njk->nik", a, c[q]))]
        targets = {"einsum(a, c[q])": {"f": 10, "g": 8}}
    runs = _runs(framework, workload, [*ways, our_way(workload)])
    for mode, words in _MODES:
        times = _timed(runs, mode, framework, settings)
        medians = _medians(times)
        for peer, target in targets.items():
            ratio = medians[peer] / medians[OURS]
            what = f"{words}: times faster than {peer}"
            yield Result(part, framework, what, target[mode], ratio, medians=medians, rounds=len(times[OURS]))
    yield from _gathered_matmul_memory(part, framework, runs[OURS])
    del runs
    yield from _skew(part, framework, workload, settings)


def _gathered_matmul_memory(part: str, framework: Framework, ours: Run) -> Iterator[Result]:
    if isinstance(ours, TorchRun):
        forward, _, retained = ours.memory()
        limits = (("newly allocated in the forward", 42.0, forward), ("retained", 1.2, retained))
    else:
        assert isinstance(ours, JaxRun)
        temporary = ours.temporary_bytes()
        limits = (
            ("temporaries, forward", 10.0, temporary[0]),
            ("temporaries, with gradients", 50.0, temporary[1]),
        )
    for what, limit, count in limits:
        yield Result(part, framework, what, limit, count / 1e6, "MB", at_most=True, medians={OURS: count})


def _skew(part: str, framework: Framework, workload: Workload, settings: Settings) -> Iterator[Result]:
    skews: tuple[Skew, ...] = ("uniform", "half", "zipf", "one")
    words: dict[Skew, str] = {"half": "half of the rows in one group", "zipf": "Zipf", "one": "all in one"}
    runs = {skew: _runs(framework, workload, [our_way(workload)], skew)[OURS] for skew in skews}
    for mode, mode_words in _MODES:
        times = _timed(runs, mode, framework, settings)
        medians = _medians(times)
        for skew, about in words.items():
            ratio = medians[skew] / medians["uniform"]
            target = 1.5 if framework == "torch" else 2.0
            what = f"{mode_words}, {about}: times the balanced time"
            yield Result(part, framework, what, target, ratio, at_most=True, medians=medians, rounds=len(times[skew]))


def _gather_then_matmul(xp: Any, queries: Any, keys: Any, i: Any) -> Any:
    taken = gathered_keys(xp, keys, i)
    return xp.matmul(taken, queries[..., None])[..., 0]


def _gather_then_sum(xp: Any, queries: Any, keys: Any, i: Any) -> Any:
    return (gathered_keys(xp, keys, i) * queries[..., None, :]).sum(-1)


def _scores_then_take(xp: Any, queries: Any, keys: Any, i: Any) -> Any:
    scores = xp.einsum("bhqd,bhmd->bhqm", queries, keys)
    return scores.gather(-1, i) if xp.__name__ == "torch" else xp.take_along_axis(scores, i, axis=-1)


_GATHERED_KEYS_TARGETS: dict[int, dict[Framework, dict[Mode, float]]] = {
    100: {"torch": {"f": 5, "g": 8}, "jax": {"f": 5, "g": 4}},
    1000: {"torch": {"f": 30, "g": 60}, "jax": {"f": 25, "g": 8}},
}
# At small k the target is what is fastest there, whichever it is; a tenth is left to noise.
_AS_FAST = 0.9


def gathered_keys_part(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Seed 003 with keys from a pool: against gather-then-einsum, at small k against every way."""
    part = "seed-gathered-keys"
    for k in (10, 30, 100, 1000):
        workload = WORKLOADS[part].resized(k=k)
        ways = [Way("gather, einsum", gather_then_einsum)]
        if k < 100:
            ways += [
                Way("gather, matmul", _gather_then_matmul),
                Way("gather, multiply, sum", _gather_then_sum),
                Way("all scores, take", _scores_then_take),
            ]
        runs = _runs(framework, workload, [*ways, our_way(workload)])
        for mode, words in _MODES:
            times = _timed(runs, mode, framework, settings)
            medians = _medians(times)
            peers = {label: seconds for label, seconds in medians.items() if label != OURS}
            fastest = min(peers, key=lambda label: peers[label])
            target = _GATHERED_KEYS_TARGETS[k][framework][mode] if k >= 100 else _AS_FAST
            against = fastest if k >= 100 else f"the fastest way, {fastest}"
            what = f"k = {k}, {words}: times faster than {against}"
            ratio = peers[fastest] / medians[OURS]
            yield Result(part, framework, what, target, ratio, medians=medians, rounds=len(times[OURS]))


def three_way_batch(framework: Framework, settings: Settings) -> Iterator[Result]:
    """opt_einsum #254: the (b, k) weight belongs on the small operand first."""
    if framework != "torch":
        return
    part = "three-way-batch"
    workload = WORKLOADS[part]
    peer = Way("torch.einsum", einsum_of(workload.spec))
    runs = _runs(framework, workload, [peer, our_way(workload)])
    times = _timed(runs, "f", framework, settings)
    medians = _medians(times)
    ratio = medians["torch.einsum"] / medians[OURS]
    what = "forward: times faster than torch.einsum"
    yield Result(part, framework, what, 5, ratio, medians=medians, rounds=len(times[OURS]))


def warm_call(framework: Framework, settings: Settings) -> Iterator[Result]:
    """A call on small matrices is overhead alone: the plan must be found in a few microseconds."""
    if framework != "torch":
        return
    import torch

    import planner

    small = WORKLOADS["seed-outer-and-matmul"]
    chain = "ab,bc,cd,de->ae"
    matrices = tuple(torch.randn(8, 8) for _ in range(4))
    lines: tuple[tuple[str, str, tuple[Any, ...], float], ...] = (
        ("5 x 784 by 784 x 10: of a torch.einsum call", small.spec, small.operands("torch"), 0.7),
        (
            "5 x 784 by 784 x 10, operands that take gradients: of a torch.einsum call",
            small.spec,
            small.operands("torch", requires_grad=True),
            0.85,
        ),
        ("a chain of four 8 x 8: of a torch.einsum call", chain, matrices, 0.15),
    )
    for what, spec, operands, target in lines:
        programs = {
            "torch.einsum": _block(functools.partial(torch.einsum, spec, *operands), settings.calls),
            OURS: _block(functools.partial(planner.contract, spec, *operands), settings.calls),
        }
        for program in programs.values():
            program()
        times = interleaved(programs, framework, settings)
        medians = {label: seconds / settings.calls for label, seconds in _medians(times).items()}
        ratio = medians[OURS] / medians["torch.einsum"]
        yield Result(
            "warm-call",
            framework,
            what,
            target,
            ratio,
            at_most=True,
            medians=medians,
            rounds=len(times[OURS]),
        )


def _block(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(calls):
            call()

    return block


PARTS: dict[str, Callable[[Framework, Settings], Iterator[Result]]] = {
    "seed-gathered-matmul": gathered_matmul,
    "seed-gathered-keys": gathered_keys_part,
    "three-way-batch": three_way_batch,
    "warm-call": warm_call,
}


# --- the report ---------------------------------------------------------------------------------


def _git(*arguments: str) -> str:
    root = pathlib.Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def circumstances(settings: Settings) -> dict[str, Any]:
    """Return what the figures depend on beside the code."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": (_git("rev-parse", "--short", "HEAD") or "unknown")
        + (" with changes" if _git("status", "--porcelain", "--untracked-files=no") else ""),
        "machine": "cpu",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "jax", "numpy", "opt_einsum")},
        "pause_seconds": dict(settings.pause_seconds),
        "rounds": settings.rounds,
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "unset"),
    }
    if "torch" in sys.modules:
        import torch

        opt_einsum: Any = torch.backends.opt_einsum
        found["torch_threads"] = torch.get_num_threads()
        found["opt_einsum_in_torch_einsum"] = bool(opt_einsum.is_available() and opt_einsum.enabled)
    return found


def _number(value: float, unit: str) -> str:
    return f"{value:.3g}{unit}" if unit == "x" else f"{value:.3g} {unit}"


def _cells(result: Result) -> tuple[str, ...]:
    bound = "<=" if result.at_most else ">="
    return (
        result.part,
        result.framework,
        result.what,
        f"{bound} {_number(result.target, result.unit)}",
        _number(result.measured, result.unit),
        "yes" if result.met else "NO",
        _absolute(result),
    )


def _absolute(result: Result) -> str:
    if result.unit != "x":
        return ""

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"

    return ", ".join(f"{label} {milliseconds(seconds)}" for label, seconds in result.medians.items())


_HEADINGS = ("workload", "in", "what", "target", "measured", "met", "medians")


def markdown(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """Write the results as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    rule = ("---",) * len(_HEADINGS)
    rows = [_HEADINGS, rule, *(_cells(result) for result in results)]
    pauses = ", ".join(f"{1e3 * s:.0f} ms ({name})" for name, s in about["pause_seconds"].items())
    active = "active" if about.get("opt_einsum_in_torch_einsum") else "not active"
    return "\n".join(
        [
            "# Benchmarks on a CPU",
            "",
            "Written by `make bench`; the figures behind it are in the JSON file beside this page.",
            "",
            f"- {about['date']}, commit {about['commit']}",
            f"- {about['processor']}, {about['cores']} cores, {about.get('torch_threads')} torch threads",
            f"- Python {about['python']}, {versions}",
            f"- medians of up to {about['rounds']} interleaved runs, a pause before each: {pauses}",
            f"- opt_einsum {active} in `torch.einsum`; THP_MEM_ALLOC_ENABLE {about['THP_MEM_ALLOC_ENABLE']}",
            "",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
        ]
    )


def _as_json(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    rows = [{**dataclasses.asdict(result), "met": result.met} for result in results]
    return json.dumps({"circumstances": about, "results": rows}, indent=2) + "\n"


def _refusal(frameworks: Sequence[Framework]) -> str:
    """Say what would make the figures mean something else, "" if nothing would."""
    if os.environ.get("THP_MEM_ALLOC_ENABLE"):
        return "THP_MEM_ALLOC_ENABLE is set: it makes allocation cheaper for some programs only; unset it"
    if "torch" in frameworks:
        import torch

        opt_einsum: Any = torch.backends.opt_einsum
        if not (opt_einsum.is_available() and opt_einsum.enabled):
            return "torch.einsum does not use opt_einsum here, so it is not the peer that users have"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write it after a whole run; 1 if `--strict` and a target is missed."""
    parser = argparse.ArgumentParser("python -m planner.bench", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--only", choices=PARTS, help="one part; nothing is written")
    parser.add_argument("--framework", choices=("torch", "jax"), help="one framework; nothing is written")
    parser.add_argument("--rounds", type=int, default=Settings().rounds, help="runs of each program, at most")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/benchmarks"), metavar="FOLDER")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args(argv)
    asked: tuple[Framework, ...] = (options.framework,) if options.framework else ("torch", "jax")
    frameworks = [framework for framework in asked if importlib.util.find_spec(framework)]
    for missing in set(asked) - set(frameworks):
        print(f"{missing} is not installed: its targets are left out", file=sys.stderr)
    # The targets are a CPU's, and a GPU would make JAX alone run elsewhere.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    refusal = _refusal(frameworks)
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    settings = Settings(rounds=options.rounds)
    results: list[Result] = []
    for name, part in PARTS.items():
        if options.only not in (None, name):
            continue
        for framework in frameworks:
            for result in part(framework, settings):
                results.append(result)
                print("  ".join(_cells(result)), flush=True)
    missed = sum(not result.met for result in results)
    print(f"{len(results) - missed} of {len(results)} targets met")
    if not options.only and len(frameworks) == 2:
        about = circumstances(settings)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{about['machine']}.json").write_text(_as_json(results, about))
        (options.out / f"{about['machine']}.md").write_text(markdown(results, about))
    return 1 if options.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
