"""`python -m planner compare`: one contraction here and now, beside what a user would write without planner."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.bench.corpus import Row as Contraction
from planner.bench.corpus import gather_then_einsum
from planner.demo.cases import Case
from planner.demo.report import HEADINGS, Comparison, case_table, gain_line, line
from planner.demo.runs import RUNS, Row, measure_case
from planner.demo.ways import OURS, Framework, Way, our_way
from planner.language.errors import PlannerError
from planner.language.resolve import resolve, shorten
from planner.language.spec import Spec, plain_axes, term_axes
from planner.language.units import bytes_text, seconds_text
from planner.pages.plots import load_pyplot, save_figure
from planner.pages.tables import page_of_tables


class _OptEinsum:
    """A framework's namespace with opt_einsum's einsum."""

    def __init__(self, xp: Any) -> None:
        self.xp, self.__name__ = xp, xp.__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.xp, name)

    def einsum(self, equation: str, *operands: Any) -> Any:
        """Contract by opt_einsum."""
        import opt_einsum

        return opt_einsum.contract(equation, *operands)


def ways_of(contraction: Contraction, framework: Framework) -> tuple[Way, ...]:
    """Return the ways to write a contraction: einsum after indexing, compiled, by opt_einsum's path, and planner."""
    einsum = gather_then_einsum(contraction)
    label = "gather, einsum" if contraction.index_shapes else "einsum"
    ways = [Way(label, einsum), Way("opt_einsum", lambda xp, *xs, **qs: einsum(_OptEinsum(xp), *xs, **qs))]
    if framework == "torch":  # what runs in JAX is jitted anyway
        ways.insert(1, Way("torch.compile", _compiled(einsum)))
    return (*ways, our_way(contraction))


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    compiled = torch.compile(lambda *operands, **arrays: call(torch, *operands, **arrays), dynamic=False)
    return lambda xp, *operands, **arrays: compiled(*operands, **arrays)


def _pools(spec: Spec) -> dict[str, int]:
    """Return the size of the dimension that each index array reads or adds into.

    Raises:
        PlannerError: the other ways cannot be written for the spec.
    """
    known = {axis for term in spec.inputs for axis in term_axes(term)}
    for axis in plain_axes(spec.output):
        if axis not in known or spec.output.count(axis) > 1:
            raise PlannerError(f"compare takes no output axis that einsum cannot write: {axis!r} repeats the result")
    pools: dict[str, int] = {}
    for gather in spec.gathers:
        name, size = gather.array, gather.size or 0
        if pools.setdefault(name, size) != size:
            raise PlannerError(f"compare takes no index array of two sizes: {name!r} indexes {pools[name]} and {size}")
        if size == 0 and 0 not in spec.shape(gather.axes):
            raise PlannerError(f"no index array {name!r} fits a dimension of size 0, so there is nothing to run")
    return pools


def compare_ways(
    spec: str,
    shapes: Sequence[tuple[int, ...]],
    indices: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    framework: Framework,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """Run all ways of a contraction on random arrays, forward and with all gradients; say a line for each.

    All ways must return the same values and gradients.

    Args:
        spec: the spec.
        shapes: shapes of the operands.
        indices: shapes of the index arrays, by letter.
        sizes: sizes that no operand has.
        framework: "torch" or "jax".
        say: is given each line.

    Raises:
        PlannerError: einsum has no such contraction, or no index is in range.
    """
    resolved = resolve(spec, *shapes, sizes=dict(sizes) or None, **indices)
    pools = _pools(resolved)
    axes = {axis: size for axis, size in resolved.sizes if isinstance(size, int)}
    contraction = Contraction("compare", str(resolved), "", axes, pools)
    if contraction.shapes != tuple(shapes):
        raise PlannerError("compare takes no axis of size 1 that is broadcast: write its size, or leave the axis out")
    case = Case(
        "",
        "compare",
        shorten(spec, 80),
        framework,
        contraction,
        ways_of(contraction, framework),
        contraction.takes_gradient,
    )
    say(
        f"{case.title}        {framework}, {', '.join('x'.join(map(str, s)) or 'a number' for s in contraction.shapes)}"
    )
    say(HEADINGS)
    for way in case.ways:  # compiling does not count
        run = RUNS[framework](way, contraction, contraction.takes_gradient)
        run.forward()
        run.both()
    rows = measure_case(case)
    for row in rows:
        say(line(row))
    found = Comparison.of(rows)
    if found is not None:
        say(gain_line(found))
    return rows


def page_of_ways(rows: Sequence[Row], path: str | os.PathLike[str] | None = None) -> str | None:
    """Return a page with the table of all ways, or write it to a file if a path is given.

    Raises:
        PlannerError: the file cannot be written.
    """
    wrong = sum(bool(row.differs) for row in rows)
    lead = f"{wrong} of {len(rows)} ways differ." if wrong else "All values and gradients are equal."
    return page_of_tables("Compared here and now", f"{len(rows)} ways. {lead}", [case_table(rows)], path)


def draw(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Draw times and peaks, forward and with gradients, on logarithmic axes.

    Raises:
        PlannerError: matplotlib is not installed, or the file cannot be written.
    """
    pyplot = load_pyplot()
    figure, (times, peaks) = pyplot.subplots(1, 2, figsize=(9, 1 + 0.6 * len(rows)), layout="constrained", sharey=True)
    quantities = (
        (times, "time", ("seconds", "gradient_seconds"), lambda value: seconds_text(value)),
        (peaks, "peak", ("peak_bytes", "gradient_peak_bytes"), lambda value: bytes_text(round(value))),
    )
    for axis, title, fields, text in quantities:
        for offset, (field, what) in enumerate(zip(fields, ("forward", "with gradients"), strict=True)):
            values = [getattr(row.figures, field) for row in rows]
            places = [number + 0.4 * offset for number in range(len(rows))]
            colours = ["#1f3b57" if row.way.label == OURS else "#b8c0c8" for row in rows]
            known = [0.0 if math.isnan(value) else value for value in values]
            axis.barh(places, known, 0.36, color=colours, edgecolor="black", linewidth=0.5, hatch=("", "//")[offset],
                      label=what)  # fmt: skip
        axis.set_xscale("log")
        axis.set_title(title, fontsize=10)
        axis.xaxis.set_major_formatter(lambda value, _, text=text: text(value) if value > 0 else "0")
    times.set_yticks([number + 0.2 for number in range(len(rows))], [row.way.label for row in rows], fontsize=8)
    times.invert_yaxis()
    peaks.legend(fontsize=8)
    figure.suptitle(rows[0].case.title, fontsize=10, parse_math=False)
    save_figure(figure, path)
