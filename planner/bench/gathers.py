"""Seeds 000 and 003: products of rows that an index names, compared with programs that build those rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.bench.timing import PASSES, Pass, Result, Settings, medians_of, prepare_runs, time_runs
from planner.demo.runs import JaxRun, Run, TorchRun
from planner.demo.ways import OURS, Framework, Way, contraction, direct, gather_then_einsum, gathered_keys, our_way
from planner.workloads import WORKLOADS, Skew, Workload


def gathered_matmul(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Seed 000: `matmul(a, c[q])`, eager and compiled; memory; groups of very unequal size."""
    part, workload = "seed-gathered-matmul", WORKLOADS["seed-gathered-matmul"]
    targets: dict[str, dict[Pass, float]]
    if framework == "torch":
        import torch

        compiled = torch.compile(lambda a, c, q: torch.matmul(a, c[q]))
        ways = [Way("matmul(a, c[q])", direct), Way("torch.compile", lambda xp, a, c, q: compiled(a, c, q))]
        targets = {"matmul(a, c[q])": {"f": 20, "g": 30}, "torch.compile": {"f": 1.8, "g": 18}}
    else:
        ways = [Way("einsum(a, c[q])", lambda xp, a, c, q: xp.einsum("nij,njk->nik", a, c[q]))]
        targets = {"einsum(a, c[q])": {"f": 10, "g": 8}}
    runs = prepare_runs(framework, workload, [*ways, our_way(workload)])
    for which, words in PASSES:
        times = time_runs(runs, which, framework, settings)
        medians = medians_of(times)
        for peer, target in targets.items():
            ratio = medians[peer] / medians[OURS]
            what = f"{words}: times faster than {peer}"
            yield Result(part, framework, what, target[which], ratio, medians=medians, rounds=len(times[OURS]))
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
    runs = {skew: prepare_runs(framework, workload, [our_way(workload)], skew)[OURS] for skew in skews}
    for which, pass_words in PASSES:
        times = time_runs(runs, which, framework, settings)
        medians = medians_of(times)
        for skew, about in words.items():
            ratio = medians[skew] / medians["uniform"]
            target = 1.5 if framework == "torch" else 2.0
            what = f"{pass_words}, {about}: times the balanced time"
            yield Result(part, framework, what, target, ratio, at_most=True, medians=medians, rounds=len(times[skew]))


def _gather_then_matmul(xp: Any, queries: Any, keys: Any, i: Any) -> Any:
    rows = gathered_keys(xp, keys, i)
    return xp.matmul(rows, queries[..., None])[..., 0]


def _gather_then_sum(xp: Any, queries: Any, keys: Any, i: Any) -> Any:
    return (gathered_keys(xp, keys, i) * queries[..., None, :]).sum(-1)


def _scores_then_take(xp: Any, queries: Any, keys: Any, i: Any) -> Any:
    scores = xp.einsum("bhqd,bhmd->bhqm", queries, keys)
    return scores.gather(-1, i) if xp.__name__ == "torch" else xp.take_along_axis(scores, i, axis=-1)


_GATHERED_KEYS_TARGETS: dict[int, dict[Framework, dict[Pass, float]]] = {
    100: {"torch": {"f": 5, "g": 8}, "jax": {"f": 5, "g": 4}},
    1000: {"torch": {"f": 30, "g": 60}, "jax": {"f": 25, "g": 8}},
}
# At small k the target is to be as fast as the fastest peer, whichever that is; a tenth is left to noise.
_AS_FAST = 0.9


def gathered_keys_part(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Seed 003 with keys from a pool: compared with gather-then-einsum, and at small k with every other way."""
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
        runs = prepare_runs(framework, workload, [*ways, our_way(workload)])
        for which, words in PASSES:
            times = time_runs(runs, which, framework, settings)
            medians = medians_of(times)
            peers = {label: seconds for label, seconds in medians.items() if label != OURS}
            fastest = min(peers, key=lambda label: peers[label])
            target = _GATHERED_KEYS_TARGETS[k][framework][which] if k >= 100 else _AS_FAST
            against = fastest if k >= 100 else f"the fastest way, {fastest}"
            what = f"k = {k}, {words}: times faster than {against}"
            ratio = peers[fastest] / medians[OURS]
            yield Result(part, framework, what, target, ratio, medians=medians, rounds=len(times[OURS]))


def limited_matmul(framework: Framework, settings: Settings) -> Iterator[Result]:
    """Seed 000 under memory limits: time, and each program's peak. The two gradients alone take 67 MB."""
    if framework != "torch":
        return
    part, workload = "seed-gathered-matmul-limited", WORKLOADS["seed-gathered-matmul"]
    limits = {f"{megabytes} MB": megabytes * 10**6 for megabytes in (100, 80, 72)}
    ways = [our_way(workload)]
    ways += [Way(label, contraction(workload.spec, memory_limit=limit)) for label, limit in limits.items()]
    runs = prepare_runs(framework, workload, ways)
    for which, words in PASSES:
        times = time_runs(runs, which, framework, settings)
        medians = medians_of(times)
        for label in limits:
            what = f"{words}, limit {label}: of the unlimited time"
            ratio = medians[label] / medians[OURS]
            yield Result(part, framework, what, 1.3, ratio, at_most=True, medians=medians, rounds=len(times[label]))
    for label, limit in limits.items():
        run = runs[label]
        assert isinstance(run, TorchRun)
        peaks = {"forward": run.memory()[0], "backward": run.backward_peak_bytes()}
        for program, count in peaks.items():
            what = f"{program}, limit {label}: newly allocated"
            yield Result(part, framework, what, limit / 1e6, count / 1e6, "MB", at_most=True, medians={label: count})
