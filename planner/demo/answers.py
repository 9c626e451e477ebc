"""The answers to the authors' questions, in words that turn with the figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from planner.demo.cases import POOLED, THREE_SLICES
from planner.demo.report import Comparison, bytes_text, ratio_text, seconds_text

Found = Mapping[str, Comparison]
"""The comparisons of a framework, by the names of their cases."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A question that an author asked, and what the figures of a framework say to it."""

    seed: str
    question: str
    framework: str
    text: str


def answers(comparisons: Sequence[Comparison]) -> list[Answer]:
    """Answer each author's questions, by what was measured."""
    frameworks = list(dict.fromkeys(found.case.framework for found in comparisons))
    made = []
    for seed, question, answer in _QUESTIONS:
        for framework in frameworks:
            found = {c.case.name: c for c in comparisons if c.case.framework == framework}
            made += [Answer(seed, question, framework, text) for text in answer(found)]
    return made


def _speed(theirs: float, ours: float) -> str:
    """Return planner's speed against another's, in words that turn with the figures."""
    ratio = theirs / ours
    if 0.9 <= ratio <= 1.1:
        return "as fast as"
    return f"{ratio_text(ratio)} faster than" if ratio > 1 else f"{ratio_text(1 / ratio)} slower than"


def _fast_and_small(found: Found) -> Iterator[str]:
    case = found.get("seed-gathered-matmul")
    if case is None:
        return
    ours = case.ours
    label, fastest = case.least("gradient_seconds")
    small, smallest = case.least("gradient_peak_bytes")
    verdict = {
        (True, True): "Yes, both at once",
        (True, False): "Fast, but not the smallest",
        (False, True): "Small, but not the fastest",
        (False, False): "No",
    }[ours.gradient_seconds < fastest, ours.gradient_peak_bytes < smallest]
    its_peak = case.theirs[label].gradient_peak_bytes
    text = (
        f"{verdict}. With gradients planner takes {seconds_text(ours.gradient_seconds)} and "
        f"{bytes_text(ours.gradient_peak_bytes)}. The fastest other way, {label}, takes {seconds_text(fastest)} and "
        f"{bytes_text(its_peak)}"
    )
    if small != label:
        about = "about " if case.theirs[small].extrapolated else ""
        small_seconds = seconds_text(case.theirs[small].gradient_seconds)
        text += f"; the smallest, {small}, {about}{small_seconds} and {bytes_text(smallest)}"
    forward_label, forward = case.least("seconds")
    if forward < ours.seconds:
        text += (
            f". Forward alone, {forward_label} is faster: {seconds_text(forward)}, planner {seconds_text(ours.seconds)}"
        )
    yield f"{text}."


def _kept_copy(found: Found) -> Iterator[str]:
    both, only = found.get("seed-gathered-matmul"), found.get("seed-gathered-matmul, only c")
    if both is None or only is None:
        return
    label = "matmul(a, c[q])"
    kept, dropped = both.theirs[label].retained_bytes, only.theirs[label].retained_bytes
    if kept > 10 * dropped:
        reason = "c[q] is a new array, and only the gradient of A reads it."
    else:
        reason = "Here the copy is kept, or released, alike in both."
    ours = " and ".join(dict.fromkeys(bytes_text(case.ours.retained_bytes) for case in (both, only)))
    yield (
        f"{reason} {label} keeps {bytes_text(kept)} if A and C take gradients, and {bytes_text(dropped)} if only C "
        f"does. planner builds no c[q]: it keeps {ours}."
    )


def _best_option(found: Found) -> Iterator[str]:
    layouts = {name: case for name, case in found.items() if "(x @ y).sum(0)" in case.theirs}
    if not layouts:
        return
    name = THREE_SLICES if THREE_SLICES in layouts else next(iter(layouts))
    case = layouts[name]
    einsum, two_step = case.theirs["einsum"], case.theirs["(x @ y).sum(0)"]
    if einsum.retained_bytes > two_step.retained_bytes:
        einsum_text = (
            f"Not einsum: it keeps a copy of {bytes_text(einsum.retained_bytes)}, where the two-step sum keeps "
            f"{bytes_text(two_step.retained_bytes)}"
        )
    else:
        einsum_text = f"einsum keeps {bytes_text(einsum.retained_bytes)} here, no more than the two-step sum"
    yield (
        f"{einsum_text}. planner keeps {bytes_text(case.ours.retained_bytes)}; with gradients it is "
        f"{_speed(einsum.gradient_seconds, case.ours.gradient_seconds)} einsum and "
        f"{_speed(two_step.gradient_seconds, case.ours.gradient_seconds)} the two-step sum."
    )
    keeps_more = [c.case.title for c in layouts.values() if c.ours.retained_bytes > c.least("retained_bytes")[1]]
    slower = [c.case.title for c in layouts.values() if c.gain() < 0.9]
    if keeps_more:
        yield f"planner keeps more than the best way here: {'; '.join(keeps_more)}."
    if slower:
        yield f"planner is slower than the fastest way here: {'; '.join(slower)}."


def _plain_speed(found: Found) -> Iterator[str]:
    case = found.get("seed-outer-and-matmul/large")
    if case is None:
        return
    ours, matmul, einsum = case.ours, case.theirs["m1 @ m2"], case.theirs["einsum"]
    images = case.case.workload.sizes["i"]
    yield (
        f"For {images:,} images, m1 @ m2 takes {seconds_text(matmul.seconds)}, einsum {seconds_text(einsum.seconds)} "
        f"and planner {seconds_text(ours.seconds)}. With gradients planner is "
        f"{_speed(matmul.gradient_seconds, ours.gradient_seconds)} m1 @ m2."
    )


def _separate_keys(found: Found) -> Iterator[str]:
    separate, shared = found.get("seed-separate-keys"), found.get("seed-shared-keys")
    if separate is None or shared is None:
        return
    ratio = separate.theirs["einsum"].seconds / shared.theirs["einsum"].seconds
    keys = [4 * math.prod(case.case.workload.shapes[1]) for case in (separate, shared)]
    sizes = f"{bytes_text(keys[0])} instead of {bytes_text(keys[1])}"
    if ratio > 1.5:
        yield f"There are more keys to read: {sizes}. einsum takes {ratio_text(ratio)} the time."
    else:
        yield f"Here they are not: einsum takes {ratio_text(ratio)} the time, though there are more keys: {sizes}."


def _around_separate_keys(found: Found) -> Iterator[str]:
    pooled = [found[name] for name in POOLED if name in found]
    if not pooled:
        return
    gains = [case.gain() for case in pooled]
    slowest = min(gains + [case.gain("seconds") for case in pooled])
    verdict = "Yes, if the keys come from a pool" if slowest >= 0.9 and gains[-1] > 1.5 else "Not always"
    keys = [str(case.case.workload.sizes["k"]) for case in pooled]
    most = pooled[-1]
    label, peak = most.least("gradient_peak_bytes")
    yield (
        f"{verdict}. planner does not copy them for each query. With gradients it is "
        f'{_listed([ratio_text(gain) for gain in gains])} as fast as "{label}" at k = {_listed(keys)}. '
        f"At k = {keys[-1]} it takes {bytes_text(most.ours.gradient_peak_bytes)}, the other {bytes_text(peak)}."
    )


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


_QUESTIONS: tuple[tuple[str, str, Callable[[Found], Iterator[str]]], ...] = (
    ("000", "Is there a way that is both fast and small?", _fast_and_small),
    ("000", "Why is the copy kept when A takes a gradient, and released when not?", _kept_copy),
    ("001", "Is the most efficient option selected?", _best_option),
    ("002", "What about speed?", _plain_speed),
    ("003", "Why are separate keys slower, at the same number of operations?", _separate_keys),
    ("003", "Is there a way around it?", _around_separate_keys),
)
