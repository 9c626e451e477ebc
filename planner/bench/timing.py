"""Time programs in turn, and compare the result with a target."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from planner.demo.runs import RUNS, Run, differences
from planner.demo.ways import Framework, Way
from planner.tune.timing import block_seconds, timed
from planner.workloads import Skew, Workload

Pass = Literal["f", "g"]
PASSES: tuple[tuple[Pass, str], ...] = (("f", "forward"), ("g", "forward and gradients"))
Scale = Literal["overhead", "cache", "memory"]
SCALES: tuple[Scale, ...] = get_args(Scale)
# A program pays for the memory that the one before it gave back: without a pause, equal code differs by 1.7x in
# torch and by up to 3x in JAX (on 2 cores).
PAUSE_SECONDS = {"torch": 0.05, "jax": 0.6}

# A run counts if the hypervisor took at most this share of the cores' time. It is repeated until one counts, at most
# this often.
_TRIES = 6
_STOLEN_SHARE = 0.02
# Shorter programs run several times without a pause: after a pause, cores that a program waits for wake up late.
_SHORT_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        rounds: most runs of each program.
        budget_seconds: time for one comparison, after which no further round begins (three are always run).
        pause_seconds: the pause before each run. Without it, a program pays for memory that the previous one freed.
        calls: calls in a block when a single call's overhead is measured.
        scales: the scales of the corpus.
        sample: how many rows of the corpus, at least; 0 for all.
        strings: the seed of random strings that take the place of the corpus; None for its rows.
        compiled: whether `torch.compile` and products by hand are timed on the corpus too.
        passes: how many times all rows of the corpus, or all named workloads, are timed; the least times count.
        row_seconds: time for one comparison of the corpus, after which no further round begins.
        runs: number of runs that were timed; of those repeated because the hypervisor took a core away; and of those
            that count although it took one away in every repetition.
    """

    rounds: int = 11
    budget_seconds: float = 30.0
    pause_seconds: Mapping[str, float] = dataclasses.field(default_factory=PAUSE_SECONDS.copy)
    calls: int = 2000
    scales: tuple[Scale, ...] = SCALES
    sample: int = 0
    strings: int | None = None
    compiled: bool = False
    passes: int = 1
    row_seconds: float = 0.3
    runs: Counter[str] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A target and what was measured.

    Attributes:
        part: name in `PARTS`.
        framework: the framework that ran.
        what: the comparison in words.
        target: the number to reach.
        measured: the number reached.
        unit: "x" for a ratio of medians, "MB" for bytes, "s" for seconds.
        at_most: whether the target is an upper bound.
        medians: median seconds (or bytes) of each program, by label.
        rounds: number of runs per median.
    """

    part: str
    framework: Framework
    what: str
    target: float
    measured: float
    unit: Literal["x", "MB", "s"] = "x"
    at_most: bool = False
    medians: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rounds: int = 1

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.measured <= self.target if self.at_most else self.measured >= self.target


def stolen_seconds() -> float:
    """Return for how long a hypervisor has kept this machine's cores from running; 0 if the system does not say.

    Linux counts this in ``/proc/stat``, in ticks of the clock (usually 10 ms).
    """
    try:
        ticks = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]
    except (OSError, IndexError):
        return 0.0
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def seconds_in_peace(measure: Callable[[], float], pause: float, settings: Settings) -> float:
    """Measure after a pause, and again if the hypervisor gave this machine's cores to other machines meanwhile.

    A program that waits for its slowest core loses more than that share of time, so medians would depend on other
    machines. After some tries, the run that lost least counts.

    Args:
        measure: runs a program and returns its seconds.
        pause: seconds to wait before each run.
        settings: the settings whose `runs` are counted up.
    """
    cores, least = os.cpu_count() or 1, (float("inf"), 0.0)
    settings.runs["timed"] += 1
    for attempt in range(_TRIES):
        settings.runs["repeated"] += attempt == 1
        time.sleep(pause)
        stolen, begun = stolen_seconds(), time.perf_counter()
        seconds = measure()
        share = (stolen_seconds() - stolen) / (cores * (time.perf_counter() - begun))
        if share <= _STOLEN_SHARE:
            return seconds
        least = min(least, (share, seconds))
    settings.runs["disturbed"] += 1
    return least[1]


def _seconds(program: Callable[[], Any]) -> float:
    return timed(program)[1]


def time_in_turn(
    programs: Mapping[str, Callable[[], Any]], framework: Framework, settings: Settings
) -> dict[str, list[float]]:
    """Time programs in turn, round after round, with a pause before each run; they must have run before.

    If one of them takes less than 20 ms, every program is averaged over as many runs as take 20 ms (1,000 at most),
    without pauses between them and after one run that does not count.
    """
    short = min(map(_seconds, programs.values())) < _SHORT_SECONDS
    measure = partial(block_seconds, least_seconds=_SHORT_SECONDS) if short else _seconds
    times: dict[str, list[float]] = {label: [] for label in programs}
    begun = time.perf_counter()
    for done in range(settings.rounds):
        if done >= 3 and time.perf_counter() - begun > settings.budget_seconds:
            break
        for label, program in programs.items():
            pause = settings.pause_seconds[framework]
            times[label].append(seconds_in_peace(partial(measure, program), pause, settings))
    return times


def medians_of(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each program."""
    return {label: statistics.median(seconds) for label, seconds in times.items()}


def prepare_runs(
    framework: Framework, workload: Workload, ways: Sequence[Way], skew: Skew = "uniform"
) -> dict[str, Run]:
    """Prepare all ways, check that their values and gradients are equal, and run each once."""
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


def time_runs(runs: Mapping[Any, Run], which: Pass, framework: Framework, settings: Settings) -> dict[str, list[float]]:
    """Time all runs, forward alone or with gradients."""
    programs = {label: run.forward if which == "f" else run.both for label, run in runs.items()}
    return time_in_turn(programs, framework, settings)


def equal(found: Any, expected: Any, what: str) -> None:
    """Raise an error if two results differ; on small integers every sum is exact."""
    arrays = [np.asarray(x.detach() if hasattr(x, "detach") else x) for x in (found, expected)]
    if differences(arrays[:1], arrays[1:]):
        raise AssertionError(f"{what}: the values differ")


def block_of(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    """Return a program that makes that many calls."""

    def block() -> None:
        for _ in range(calls):
            call()

    return block
