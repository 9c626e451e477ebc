"""A plan as text: a summary that compares it with the naive plan, then a row for each step of both programs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.cost.figures import Cost
from planner.cost.layout import layout_of
from planner.language.dtypes import itemsize
from planner.language.resolve import shorten
from planner.language.spec import plain_axes, term_gathers
from planner.language.split import letter_of
from planner.language.units import bytes_text, count_text, seconds_text
from planner.program.plan import NAIVE, Loop, PlanRecord
from planner.program.program import Program, Step
from planner.search.devices.collectives import foretell

MOST_ROWS = 40
# The column that says what a step copies. It is left out where no step does.
_COPIES = 5
# A greater gap says nothing.
_MOST_GAP = 1e100
# The most characters of the spec, and of the equation of a step.
MOST_TEXT, MOST_EQUATION = 400, 120


def table_lines(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return rows of cells as lines in columns. Columns in `left` align left. A row of one cell is a line by itself."""
    tabular = [row for row in rows if len(row) > 1]
    widths = []
    for column in range(max(map(len, rows))):
        widths.append(max((len(row[column]) for row in tabular if len(row) > column), default=0))
    lines = []
    for row in rows:
        if len(row) == 1:
            lines.append(row[0])
            continue
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _describe_compiled(plan: PlanRecord) -> str:
    """Return what the compiler said about a plan under a memory limit, if its framework compiles plans."""
    if plan.options.memory_limit is None or plan.backend != "jax":
        return ""
    if plan.compiled_bytes is None:
        return "; limit unverified"
    return f"; compiled {bytes_text(plan.compiled_bytes)}, inside another jit unverified"


def gap_text(plan: PlanRecord) -> str:
    """Return how far a plan may be from the best possible one, as text."""
    gap = plan.gap
    proven = "proven the best" if plan.proven else "not proven the best"
    if plan.proven and plan.options.minimize == "peak":
        proven += " among plans without loops"
    if gap is None or gap > _MOST_GAP or (plan.proven and not gap):
        return proven
    if not gap:
        return "as good as the best without loops"
    most = f"{math.ceil(100 * gap)}% from" if gap < 1 else f"{math.ceil(10 * gap + 10) / 10:g} times"
    return f"{'proven the best without loops, ' * plan.proven}at most {most} the best possible"


def found_text(plan: PlanRecord) -> str:
    """Return how a plan was found, and how far it may be from the best possible one."""
    return f"{_origin_text(plan)}, {gap_text(plan)}"


def _origin_text(plan: PlanRecord) -> str:
    how, *family = plan.origin.split(", for the family of ")
    for search, trees in (("exact, ", "all trees"), ("exact in part, ", "some of all trees")):
        if how.startswith(search):
            how = f"{trees} searched for {how.removeprefix(search)}"
    return ", of the family of ".join([how, *family])


def plan_text(plan: PlanRecord) -> str:
    """Return the text that `print(plan)` shows."""
    wanted = [str(n) for n, operand in enumerate(plan.operands) if operand.requires_grad]
    gradients = f"gradients of operands {', '.join(wanted)}" if wanted else "no gradients"
    head = f"{shorten(plan.text, MOST_TEXT)}        {plan.backend} · {plan.device.name} · {plan.dtype} · {gradients}"
    exchanges = _Exchanges(plan)
    summary = [["", "FLOPs", "moves", "peak", "retained", "time"]]
    is_naive = plan.origin == NAIVE
    summary.append(["naive", *_figures(plan.naive_cost), seconds_text(plan.naive_cost.seconds), naive_text(plan)])
    if not is_naive:
        keep = f"; {kept_text(plan)}" if wanted else ""
        said = f"{found_text(plan)}{keep}{_describe_compiled(plan)}"
        summary.append(["this plan", *_figures(plan.cost), seconds_text(plan.cost.seconds), said])
    notes = [*_symbol_lines(plan), *_summed_lines(plan), *(_stride_lines(plan) if is_naive else ())]
    lines = [head, *notes, *exchanges.lines(), *table_lines(summary, (0, 6))]
    titles = ["#", "step", "lowered to", "FLOPs", "moves", "copies", "live", "time"]
    rows: list[Sequence[str]] = [[*titles, *exchanges.titles, "keeps"]]
    backward = plan.programs.backward
    rows += _rows(plan, plan.programs.forward, 0, exchanges)
    if backward is not None:
        rows.append(
            [f"  backward, needs {bytes_text(plan.cost.backward.peak_bytes)} at most" if plan.cost.backward else ""]
        )
        rows += _rows(plan, backward, len(plan.programs.forward.steps), exchanges)
    rows += _slice_rows(plan)
    if len(rows) > MOST_ROWS:
        cut = len(rows) - MOST_ROWS
        rows = [*rows[: MOST_ROWS // 2], [f"  ... {cut} more rows, see plan.steps"], *rows[-MOST_ROWS // 2 :]]
    copies = any(len(row) > 1 and row[_COPIES] for row in rows[1:])
    if not copies:
        rows = [[*row[:_COPIES], *row[_COPIES + 1 :]] for row in rows]
    if not plan.programs.forward.steps:
        rows = [["  no steps: the result is the operand"]]
    return "\n".join(
        [
            *lines,
            *table_lines(rows, [0, 1, 2, *range(7 + copies, 10 + copies)]),
            f"  times by the rates of {plan.device.name}: {plan.device.source}",
        ]
    )


def _symbol_lines(plan: PlanRecord) -> list[str]:
    """Return a line about the symbolic sizes of a plan, if it has any."""
    stand_ins = {size: number for _, size, number in plan.symbols}
    if not stand_ins:
        return []
    return [f"  planned at {', '.join(f'{n} = {k:,}' for n, k in stand_ins.items())}; symbolic sizes run stock steps"]


def _summed_lines(plan: PlanRecord) -> list[str]:
    """Return a line about each axis that stands in one bracket and nowhere else: it may be a typo."""
    entries = [entry for term in plan.resolved.spec.terms for entry in term]
    gathers = {*term_gathers(tuple(entries))}
    places = [axis for gather in gathers for axis in set(gather.axes)] + [*plain_axes(entries)]
    written = term_gathers(plan.resolved.spec.output)
    lonely = sorted({axis for gather in gathers - {*written} for axis in gather.axes if places.count(axis) == 1})
    return [f"  {axis} stands in one bracket only: the rows that it reads are summed" for axis in lonely]


def comparison_text(plans: Sequence[PlanRecord]) -> str:
    """Return plans as a table: a row of figures for each, and how it was found."""
    first = plans[0]
    rows = [["#", "time", "FLOPs", "peak", "retained", "how"]]
    for number, plan in enumerate(plans):
        cost = plan.cost
        figures = [seconds_text(cost.seconds), count_text(cost.flops)]
        figures += [bytes_text(cost.peak_bytes), bytes_text(cost.retained_bytes)]
        rows.append([str(number), *figures, how_text(plan, first)])
    return "\n".join([f"{first.text}        {_place(first)}", *table_lines(rows, (0, 5))])


def how_text(plan: PlanRecord, first: PlanRecord) -> str:
    """Return how a plan was found, and in what its contraction differs from that of a first plan."""
    parts = [_origin_text(plan)]
    if any(operand.requires_grad for operand in plan.operands):
        parts.append("recomputes nothing" if plan.keep == "all" else f"keeps {plan.keep}")
    parts += [_place(plan)] * (_place(plan) != _place(first)) + [shorten(plan.text, 80)] * (plan.text != first.text)
    return "; ".join(parts)


def _place(plan: PlanRecord) -> str:
    return f"{plan.backend} · {plan.device.name} · {plan.dtype}"


def _stride_lines(plan: PlanRecord) -> list[str]:
    """Return a line about each operand that is not row-major, because such operands are copied."""
    lines = []
    for number, (operand, term) in enumerate(zip(plan.operands, plan.resolved.spec.inputs, strict=True)):
        if layout_of(operand.shape, operand.strides) is not None:
            strides = ", ".join(map(str, operand.strides or ()))
            lines.append(f"  operand {number}, {''.join(map(str, term))}, is not row-major: its strides are {strides}")
    return lines


def kept_text(plan: PlanRecord) -> str:
    """Return what the forward program keeps for the backward program, as text."""
    if plan.keep != "some":
        copies = ", keeps copies of operands" if plan.programs.copies else ""
        return f"recomputes nothing{copies}" if plan.keep == "all" else "keeps only the inputs"
    kept = len(plan.programs.kept)
    again = sum(step.recomputed for step in plan.programs.backward.steps) if plan.programs.backward else 0
    computed = f"{again} step{'s' * (again > 1)}" if again else "those of slices"
    return f"keeps {kept} intermediate{'s' * (kept > 1)}, computes {computed} again"


def naive_text(plan: PlanRecord) -> str:
    """Return what the naive plan of a contraction does, as text."""
    spec = plan.resolved.spec
    takes = any(map(term_gathers, spec.inputs))
    adds = bool(term_gathers(spec.output))
    parts = ["take the gathered operands"] * takes + ["contract pairwise"] * (len(spec.inputs) > 1)
    *parts, last = [*parts, *["add into the result"] * adds] or ["the framework's own way"]
    return f"{', '.join(parts)}, then {last}" if parts else last


def _figures(cost: Cost) -> list[str]:
    sizes = (cost.bytes_moved, cost.peak_bytes, cost.retained_bytes)
    return [count_text(cost.flops), *map(bytes_text, sizes)]


class _Exchanges:
    """What a plan on a mesh says besides: the placements of results, and what devices exchange. Else it is empty.

    Attributes:
        titles: the titles of its columns.
    """

    def __init__(self, plan: PlanRecord) -> None:
        self.plan, self.titles = plan, [] if plan.mesh is None else ["split", "exchanges"]
        self.all, self.places = foretell(plan) if plan.mesh is not None else ((), {})

    def lines(self) -> list[str]:
        """Return the lines about the whole mesh."""
        mesh = self.plan.mesh
        if mesh is None:
            return []
        axes = " x ".join(f"{name}={size}" for name, size in mesh.axes)
        count = math.prod(size for _, size in mesh.axes)
        seconds = math.fsum(each.seconds for each in self.all)
        size = bytes_text(sum(each.bytes for each in self.all))
        said = f"exchanges {size} in {seconds_text(seconds)}" if self.all else "exchanges nothing"
        return [f"  all figures are those of one of {count} devices, {axes}; it {said}"]

    def cells(self, step: Step) -> list[str]:
        """Return the cells of a step: over what its results are split, and what devices exchange for it."""
        if not self.titles:
            return []
        results = []
        for term, variable in zip(step.op.output_terms, step.outputs, strict=True):
            pairs = zip(term, self.places.get(variable, ()), strict=False)
            results.append(", ".join(f"{letter_of(entry)} over {' '.join(names)}" for entry, names in pairs if names))
        own = [each for each in self.all if each.step.outputs == step.outputs]
        said = [f"{e.kind} over {', '.join(e.over)}, {bytes_text(e.bytes)}, {seconds_text(e.seconds)}" for e in own]
        return ["; ".join(filter(None, results)), "; ".join(said)]


def _rows(plan: PlanRecord, program: Program, first: int, exchanges: _Exchanges | None = None) -> list[list[str]]:
    rows = []
    for number, step in enumerate(program.steps, first):
        cost = step.choice.cost
        figures = [count_text(cost.flops), bytes_text(cost.bytes_moved)]
        figures.append(bytes_text(cost.copied_bytes) if cost.copied_bytes else "")
        figures += [bytes_text(step.live_bytes), seconds_text(cost.picoseconds / 1e12)]
        text = shorten(equation(step), MOST_EQUATION)
        cells = exchanges.cells(step) if exchanges else []
        rows.append([str(number), text, lowered_to(step), *figures, *cells, keeps_text(plan, step)])
    return rows


def _slice_rows(plan: PlanRecord, where: str = "") -> list[Sequence[str]]:
    """Return the steps of a whole slice of each loop, and of the loops within.

    `where` says which slice the plan is of; it is empty for a plan that is of none.
    """
    rows: list[Sequence[str]] = []
    for number, step in enumerate(plan.programs.forward.steps):
        if isinstance(step.op, Loop):
            body = step.op.body
            of = ("" if len(plan.programs.forward.steps) == 1 else f" of step {number}") + where
            rows += [[f"  in each whole slice{of}, forward"], *_rows(body, body.programs.forward, 0)]
            if body.programs.backward is not None:
                first = len(body.programs.forward.steps)
                rows += [[f"  in each whole slice{of}, backward"], *_rows(body, body.programs.backward, first)]
            rows += _slice_rows(body, f" in a slice{of}")
    return rows


def lowered_to(step: Step) -> str:
    """Return what a step runs as: its implementation, or which slices a loop takes."""
    return str(step.op) if isinstance(step.op, Loop) else step.choice.lowering


def equation(step: Step) -> str:
    """Return the equation of a step. A joint gradient, and that of a loop, may have several results."""
    spec = step.op.spec
    if not step.op.first_operand:
        return str(spec)
    terms = ["".join(map(str, term)) for term in (spec.output, *spec.inputs)]
    outputs = ["".join(map(str, term)) for term in step.op.output_terms]
    return f"{', '.join(terms)} -> {'; '.join(outputs)}"


def keeps_text(plan: PlanRecord, step: Step) -> str:
    """Return, as text, the inputs of a step that stay alive because a gradient step reads them."""
    variables = plan.programs.variables
    parts = ["computed again"] * step.recomputed
    for position, number in enumerate(step.inputs):
        if number in step.keeps:
            base = variables[variables[number].base]
            term = step.op.spec.inputs[position]
            text = "".join(map(letter_of, term))
            free = variables[number].base < len(plan.operands)
            size = 0 if free else base.bytes or itemsize(plan.dtype)
            parts.append(f"{text}, {bytes_text(size)}")
    return "; ".join(parts)
