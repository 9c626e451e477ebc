"""The answers to the authors' questions, in words that turn with the figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from planner.demo.cases import POOLED, THREE_SLICES
from planner.demo.figures import Figures, bytes_text, seconds_text
from planner.demo.rows import Row
from planner.demo.ways import OURS
from planner.workloads import WORKLOADS

__all__ = ["answers"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """The figures of one case, ours apart, and the sizes that were run."""

    sizes: dict[str, int]
    ours: Figures
    theirs: dict[str, Figures]

    def best(self, quantity: str) -> tuple[str, float]:
        """The author's way with the least of a quantity, and how much that is."""
        label = min(self.theirs, key=lambda way: getattr(self.theirs[way], quantity))
        return label, getattr(self.theirs[label], quantity)


def _seen(rows: Sequence[Row], framework: str) -> dict[str, _Seen]:
    found: dict[str, _Seen] = {}
    for name in dict.fromkeys(row.case.name for row in rows if row.case.framework == framework):
        of_case = [r for r in rows if r.case.name == name and r.case.framework == framework]
        if any(row.differs for row in of_case):
            continue
        ours = next(row.figures for row in of_case if row.way.label == OURS)
        theirs = {row.way.label: row.figures for row in of_case if row.way.label != OURS}
        found[name] = _Seen(dict(of_case[0].case.workload.sizes), ours, theirs)
    return found


def _speed(theirs: float, ours: float) -> str:
    """Ours against theirs, in words that turn with the figures."""
    ratio = theirs / ours
    if 0.9 <= ratio <= 1.1:
        return "as fast as"
    return f"{ratio:.2g}x faster than" if ratio > 1 else f"{1 / ratio:.2g}x slower than"


def answers(rows: Sequence[Row]) -> list[str]:
    """Answer each seed's question, per framework, by what the figures say."""
    found = []
    for framework in dict.fromkeys(row.case.framework for row in rows):
        seen = _seen(rows, framework)
        for answer in (_answer_000, _answer_001, _answer_002, _answer_003):
            found += [f"{line[0]} ({framework}): {line[1]}" for line in answer(seen)]
    return found


_Answers = Iterator[tuple[str, str]]


def _answer_000(seen: dict[str, _Seen]) -> _Answers:
    """Why does it take that much memory, and is there a way both fast and small?"""
    both, only = seen.get("seed-gathered-matmul"), seen.get("seed-gathered-matmul, only c")
    if both is None or only is None:
        return
    ours = both.ours
    label, fastest = both.best("gradient_seconds")
    forward_label, forward_fastest = both.best("seconds")
    small, smallest = both.best("gradient_peak_bytes")
    verdict = {
        (True, True): "Yes, both at once",
        (True, False): "Fast, but not the smallest",
        (False, True): "Small, but not the fastest",
        (False, False): "No",
    }[ours.gradient_seconds < fastest and ours.seconds < forward_fastest, ours.gradient_peak_bytes < smallest]
    yield (
        "000, can it be fast and take little memory?",
        f"{verdict}. With gradients contract is {_speed(fastest, ours.gradient_seconds)} the fastest of the "
        f"author's ways ({label}), forward {_speed(forward_fastest, ours.seconds)} {forward_label}. "
        f"It peaks at {bytes_text(ours.gradient_peak_bytes)}, the smallest of the others ({small}) at "
        f"{bytes_text(smallest)}, and retains {bytes_text(ours.retained_bytes)}.",
    )
    label = "matmul(a, c[q])"
    kept, dropped = both.theirs[label].retained_bytes, only.theirs[label].retained_bytes
    if kept > 10 * dropped:
        reason = "c[q] is a new tensor that only a's gradient reads; c's gradient reads a."
    else:
        reason = "here the copy is kept, or dropped, alike in both."
    yield (
        "000, why is the copy kept when A takes a gradient, and released when not?",
        f"{label} retains {bytes_text(kept)} when a and c take gradients and {bytes_text(dropped)} when only c "
        f"does: {reason} contract retains {bytes_text(ours.retained_bytes)} and "
        f"{bytes_text(only.ours.retained_bytes)}.",
    )


def _answer_001(seen: dict[str, _Seen]) -> _Answers:
    """Does it consider the options that einsum does not, and select the most efficient?"""
    layouts = {name: case for name, case in seen.items() if "(x @ y).sum(0)" in case.theirs}
    if not layouts:
        return
    keeps_more, slower = (
        [name for name, c in layouts.items() if getattr(c.ours, quantity) > slack * c.best(quantity)[1]]
        for quantity, slack in (("retained_bytes", 1.0), ("gradient_seconds", 1.1))
    )
    verdict = "Not everywhere" if keeps_more or slower else "Yes"
    least = f"more than the best way on {', '.join(keeps_more)}" if keeps_more else "no more than any other way"
    pace = f"slower than the fastest on {', '.join(slower)}" if slower else "as fast as the fastest everywhere"
    name = THREE_SLICES if THREE_SLICES in layouts else next(iter(layouts))
    ours, einsum, two_step = (
        layouts[name].ours,
        *(layouts[name].theirs[w] for w in ("einsum", "(x @ y).sum(0)")),
    )
    yield (
        "001, does it select the most efficient option where einsum does not?",
        f"{verdict}. contract retains {least}, and is {pace} (within 10%, with gradients). On {name}, einsum "
        f"retains {bytes_text(einsum.retained_bytes)}, the two-step sum {bytes_text(two_step.retained_bytes)}, "
        f"contract {bytes_text(ours.retained_bytes)}; contract is "
        f"{_speed(einsum.gradient_seconds, ours.gradient_seconds)} einsum and "
        f"{_speed(two_step.gradient_seconds, ours.gradient_seconds)} the two-step sum.",
    )


def _answer_002(seen: dict[str, _Seen]) -> _Answers:
    """What about speed?"""
    case = seen.get("seed-outer-and-matmul/large")
    if case is None:
        return
    ours, matmul, einsum = case.ours, case.theirs["m1 @ m2"], case.theirs["einsum"]
    yield (
        "002, what about the speed of einsum against matmul?",
        f"ik,kj->ij takes {seconds_text(ours.seconds)} as contract, {seconds_text(matmul.seconds)} as m1 @ m2 and "
        f"{seconds_text(einsum.seconds)} as einsum: contract is {_speed(matmul.seconds, ours.seconds)} the "
        f"product forward, and {_speed(matmul.gradient_seconds, ours.gradient_seconds)} it with gradients.",
    )


def _answer_003(seen: dict[str, _Seen]) -> _Answers:
    """Why are separate keys so much slower at the same FLOPs, and is there a way around it?"""
    separate, shared = seen.get("seed-separate-keys"), seen.get("seed-shared-keys")
    if separate and shared:
        ratio = separate.theirs["einsum"].seconds / shared.theirs["einsum"].seconds
        keys = [4 * math.prod(WORKLOADS[name].shapes[1]) for name in ("seed-separate-keys", "seed-shared-keys")]
        times = f"{keys[0] // keys[1]}x the bytes at full size"
        reason = (
            f"the FLOPs are the same, the keys to read are not: "
            f"{bytes_text(keys[0])} against {bytes_text(keys[1])}, {times}."
            if ratio > 1.5
            else f"although there are more keys to read, {times}."
        )
        yield (
            "003, why do separate keys take longer at the same FLOPs?",
            f"einsum takes {ratio:.2g}x the time with separate keys; {reason}",
        )
    pooled = [(seen[name].sizes["k"], seen[name]) for name in POOLED if name in seen]
    if not pooled:
        return
    forward, both = (
        [case.best(quantity)[1] / getattr(case.ours, quantity) for _, case in pooled]
        for quantity in ("seconds", "gradient_seconds")
    )
    verdict = "Yes" if min(forward + both) >= 0.9 and forward[-1] > 1.5 and both[-1] > 1.5 else "Not always"
    last = pooled[-1][1]
    yield (
        "003, is there a way around it?",
        f"{verdict}. Where the keys are taken from a pool, contract is, against gathering and then einsum, "
        f"{', '.join(f'{gain:.2g}x' for gain in forward)} as fast at k = "
        f"{', '.join(str(k) for k, _ in pooled)}, and "
        f"{', '.join(f'{gain:.2g}x' for gain in both)} with gradients; at the largest k it peaks at "
        f"{bytes_text(last.ours.gradient_peak_bytes)} against {bytes_text(last.best('gradient_peak_bytes')[1])}.",
    )
