"""The rows of a backend's table of implementations, as laws, and the table.

The tests check these laws for every backend:

- ``run`` of every row that supports an op equals the stock evaluation of its spec, bitwise on small integers.
- A row's ``cost`` counts its scratch: a run allocates at most its results and ``scratch_bytes``.
- A row changes no input and keeps no input alive. A retained value is freed with the result's graph.
- The values of prepared index arrays lie in [0, size]. The value `size` means "no row": it reads zero and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from planner.cost.device import Device
from planner.cost.figures import MOST_PICOSECONDS, StepCost, Work
from planner.cost.floor import Launches
from planner.cost.layout import Layout
from planner.cost.objective import StepKey, step_key
from planner.language.cached import cached_by_step
from planner.language.derive import resize_spec
from planner.language.dtypes import is_inexact
from planner.language.errors import PlannerError, refusal_of
from planner.language.spec import Gather
from planner.program.calls import Indices, PreparedRun, Run
from planner.program.contraction import Contraction
from planner.program.ops import Guard, JointGradient, Op, PricedImplementation
from planner.program.plan import Loop
from planner.program.program import Step

# The names of the rows that run guards and loops. No other row is asked whether it supports one.
MASK, LOOP = "mask", "loop"

Choices = tuple[PricedImplementation, ...]
Names = frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Implementation:
    """One row of a table: an implementation of some ops.

    Attributes:
        name: the name that printed plans show.
        supports: returns None if the row can run an op, else the reason why it cannot.
        cost: predicts the cost of an op on a device, scratch included.
        run: computes the results from the inputs and the prepared index arrays; a `PreparedRun` does so in two parts.
        is_view: whether the result shares its input's storage.
        stock: whether this is the framework's own operator, as a user would call it. The naive plan uses only these.
        kinds: the kinds of device that it runs on; None for all.
        capabilities: the compute capabilities of graphics cards that it runs on, times ten; None for all.
        inexact: the kinds of device on which it computes in no integers or booleans.
        layouts: returns how the results lie in memory, if arrays have strides; None if all are row-major.
        variant_of: the row of which this is another tiling at the same cost, for `optimize="measure"` to time; or "".
        bounded: whether its cost is never below `planner.cost.floor`; else the search prices all steps.
        brackets: 0, or the most brackets of its steps if all have some. Then it launches `launches` operators or more.
        inputs: how many inputs the ops have that it may run; None for any number. Then it is not asked about others.
        fused: it runs products with a side of at most so many elements as elementwise products that are added up.
        guarded_scratch: returns how many bytes of scratch more an op can need for the sake of guards: because operands
            hold NaN or infinity, or, if its second argument is true, because indices are dropped.
        least: returns a cost that the row is not below in any figure, quicker than `supports` and `cost`.
        slower_than: a row that runs whatever this one runs, in less time; or "".
        values_only: whether plans with gradients or index arrays leave it out. Its result lies in an order that costs
            little as long as the gradient of the result, which the caller computes, lies in the same; and rows that
            read or add up rows do not price how their inputs lie.
    """

    name: str
    supports: Callable[[Op], str | None]
    cost: Callable[[Op, Device], StepCost]
    run: Callable[[Op, Sequence[Any], Indices], tuple[Any, ...]]
    is_view: bool = False
    stock: bool = False
    kinds: tuple[str, ...] | None = None
    capabilities: tuple[int, ...] | None = None
    inexact: tuple[str, ...] = ()
    layouts: Callable[[Op], tuple[Layout | None, ...]] | None = None
    variant_of: str = ""
    bounded: bool = False
    brackets: int = 0
    launches: int = 1
    inputs: int | None = None
    fused: int = 1
    guarded_scratch: Callable[[Op, bool], int] = lambda op, drops: 0
    least: Callable[[Op, Device], StepCost] | None = None
    slower_than: str = ""
    values_only: bool = False

    def refusal(self, op: Op, device: Device) -> str | None:
        """Return why the row cannot run an op on a device, or None if it can."""
        if isinstance(op, (Guard, Loop)):
            only = MASK if isinstance(op, Guard) else LOOP
            return None if self.name == only else f"the step is a {type(op).__name__.lower()}"
        if self.kinds is not None and device.kind not in self.kinds:
            return f"it runs on {' and '.join(self.kinds)}"
        if self.capabilities is not None and device.capability not in self.capabilities:
            return f"it runs on compute capability {' and '.join(f'{x / 10:.1f}' for x in self.capabilities)}"
        if device.kind in self.inexact and not is_inexact(op.dtype):
            return f"it does not multiply {op.dtype} on {device.kind}"
        return self.supports(op)

    def prepared(self, op: Op) -> Run:
        """Return the function that runs an op, from the inputs and the index arrays."""
        return self.run.prepare(op) if isinstance(self.run, PreparedRun) else partial(self.run, op)


def form_row(
    name: str,
    find: Callable[[Op], Any],
    work: Callable[[Op, Any, Device], list[Work]],
    run: Callable[[Op, Any, Sequence[Any], Any], tuple[Any, ...]],
    layouts: Callable[[Op, Any], tuple[Layout | None, ...]] | None = None,
    refuses: Callable[[Op], str | None] = lambda op: None,
    any_sizes: bool = False,
    alike: Callable[[Op], Any] | None = None,
    **fields: Any,
) -> Implementation:
    """Return a row for steps of one form.

    Args:
        name: the row's name.
        find: returns the form of a step, or the reason why the step has none.
        work: returns what running a step takes, part by part.
        run: as in `Implementation`, but it takes the form after the op.
        layouts: the same.
        refuses: returns why the row cannot run a step of the form, or None.
        any_sizes: see `PreparedRun`.
        alike: the same.
        fields: other fields of the row.
    """

    def form_of(op: Op) -> Any:
        form = find(op)
        assert refusal_of(form) is None, form
        return form

    return Implementation(
        name,
        lambda op: refusal_of(find(op)) or refuses(op),
        lambda op, device: device.price(*work(op, form_of(op), device)),
        PreparedRun(lambda op: partial(run, op, form_of(op)), any_sizes, alike),
        bounded=True,
        layouts=None if layouts is None else lambda op: layouts(op, form_of(op)),
        **fields,
    )


# The former name: users may have written rows of their own with it.
Lowering = Implementation


class _Prices:
    """Prices each implementation of an op on a device once.

    Attributes:
        op, device: the op, and the device.
        choices: what `Table.choices` returned, by its other arguments.
    """

    def __init__(self, op: Op, device: Device) -> None:
        self.op, self.device = op, device
        self.choices: dict[tuple[StepKey | None, Names], Choices] = {}
        self._rows: dict[str, tuple[Implementation, PricedImplementation | None]] = {}

    def price(self, row: Implementation) -> PricedImplementation | None:
        """Return a row and its cost; None if it cannot run the op. Another row may have taken the place of a name."""
        known = self._rows.get(row.name)
        if known is None or known[0] is not row:
            price = _price(row, self.op, self.device) if row.refusal(self.op, self.device) is None else None
            known = self._rows[row.name] = row, price
        return known[1]


class Table:
    """The implementations that one backend has. A new kernel, or one of a user's own, is one more row.

    Attributes:
        rows: the implementations by name.
        plain: for each row that the framework differentiates itself, the rows of the gradients of its steps: such rows.
        more: what all rows launch at least on a CPU besides one operator; None if nothing is known of it.
        priced: how many ops `choices` has priced.
    """

    def __init__(self, rows: Sequence[Implementation], plain: Sequence[str] = (), more: Launches | None = None) -> None:
        self.rows, self.more, self.priced = {row.name: row for row in rows}, more, 0
        self.plain: Mapping[str, Sequence[str]] = dict.fromkeys(plain, plain)
        self._given, self._prices = tuple(self.rows.values()), cached_by_step(_Prices)
        self._asked: dict[tuple[bool, int, str, bool, Names], list[Implementation]] = {}

    @property
    def has_changed(self) -> bool:
        """Whether rows were added, replaced or removed after the table was made."""
        return tuple(self.rows.values()) != self._given

    def names_for(self, contraction: Contraction) -> Names:
        """Return the names of the rows that plans of a contraction may have, or None for all; see `values_only`."""
        if not (any(contraction.requires_grad) or contraction.resolved.spec.gathers):
            return None
        names = frozenset([row.name for row in self.rows.values() if not row.values_only])
        return names if len(names) < len(self.rows) else None

    def choices(self, op: Op, device: Device, key: StepKey | None = None, among: Names = None) -> Choices:
        """Return the implementations of an op and their costs, without variants; `among` names all that are asked.

        There may be none for a joint gradient. Then each gradient is a step of its own. With a key, rows are left out
        whose least cost already is no better than the cost of another.
        """
        if isinstance(op, Loop):  # the search prices thousands, and keeps few
            self.priced += 1
            return (_price(self.rows[LOOP], op, device),)
        prices = self._prices(op, device)
        if self.has_changed:
            return self._price_rows(prices, key, among)
        if (choices := prices.choices.get((key, among))) is None:
            choices = prices.choices[key, among] = self._price_rows(prices, key, among)
        return choices

    def _price_rows(self, prices: _Prices, key: StepKey | None, among: Names) -> Choices:
        """Return the rows that can run an op, and their costs."""
        self.priced += 1
        op, device = prices.op, prices.device
        plain, best = not op.gathers, tuple[int, ...]()
        rows = self._rows_for(plain, len(op.input_terms), device.kind, key is step_key("time"), among)
        leasts = {row.name: key(row.least(op, device)) for row in rows if row.least} if key and not plain else {}
        rows = sorted(rows, key=lambda row: leasts.get(row.name, ())) if leasts else rows  # stock rows take long: last
        choices: list[PricedImplementation] = []
        for row in rows:
            if key and choices and row.least and (leasts.get(row.name) or key(row.least(op, device))) >= best:
                continue
            if (choice := prices.price(row)) is not None:
                choices.append(choice)
                best = min([key(choice.cost) for choice in choices]) if key else ()
        if not choices and among is None and self.has_changed and not isinstance(op, JointGradient):
            removed = ", ".join(sorted({row.name for row in self._given} - {*self.rows})) or "none"
            raise PlannerError(
                f"no row of the table runs the step {op.spec} of {op.dtype} on {device.name}: put one back, or add one "
                f"to the table's `rows` (removed: {removed:.200})"
            )
        if len(choices) > 1 and not plain:  # of equally good ones the first of the table is taken
            choices.sort(key=lambda choice: list(self.rows).index(choice.lowering))
        return tuple(choices)

    def _rows_for(self, plain: bool, inputs: int, kind: str, for_time: bool, among: Names) -> list[Implementation]:
        """Return the rows to ask about ops: without gathers or with some, on a kind of device, for the least time."""
        asked, changed = (plain, inputs, kind, for_time, among), self.has_changed
        rows = None if changed else self._asked.get(asked)
        if rows is None:
            rows = [
                row
                for row in self.rows.values()  # most end here; `refusal` would also make the text of the reason
                if not (row.variant_of or (row.brackets and plain) or (row.kinds is not None and kind not in row.kinds))
                and row.inputs in (None, inputs)
                and (among is None or row.name in among)
                and not (for_time and row.slower_than in self.rows)
            ]
            if not changed:
                self._asked[asked] = rows
        return rows

    def price(self, lowering: str, op: Op, device: Device) -> PricedImplementation | None:
        """Return one implementation of an op, by its name, and its cost; None if it cannot run the op."""
        row = self.rows.get(lowering)
        return None if row is None else self._prices(op, device).price(row)

    def runs_any_sizes(self, steps: Iterable[Step]) -> bool:
        """Whether all steps run in their implementations at any sizes; see `PreparedRun`. Results may lie otherwise."""
        runs = (self.rows[step.choice.lowering].run for step in steps)
        return all(isinstance(run, PreparedRun) and run.any_sizes for run in runs)

    def runs_sizes(self, steps: Iterable[Step], sizes: Mapping[str | Gather, int]) -> bool:
        """Whether all steps run in their implementations at these sizes, of all axes and gathers of their specs."""
        alike = self.alike(steps)
        return alike is not None and all(
            asked(replace(op, spec=resize_spec(op.spec, sizes))) == asked(op) for op, asked in alike
        )

    def alike(self, steps: Iterable[Step]) -> list[tuple[Op, Callable[[Op], Any]]] | None:
        """Return the ops that run, or lie, as they do at some other sizes only, with functions `PreparedRun.alike`.

        None if a step runs at its own sizes only.
        """
        found = []
        for step in steps:
            run = self.rows[step.choice.lowering].run
            if not isinstance(run, PreparedRun) or not (run.any_sizes or run.alike):
                return None
            if run.alike is not None:
                found.append((step.op, run.alike))
        return found

    def variants(self, lowering: str, op: Op, device: Device) -> tuple[PricedImplementation, ...]:
        """Return the variants of a row that can run an op, and their costs."""
        rows = [row for row in self.rows.values() if row.variant_of == lowering and row.refusal(op, device) is None]
        return tuple(_price(row, op, device) for row in rows)

    def offers(self, choice: PricedImplementation, op: Op, device: Device) -> bool:
        """Whether the table has this implementation for an op, at this cost."""
        return choice == self.price(choice.lowering, op, device)

    def run(self, lowering: str, op: Op, inputs: Sequence[Any], indices: Indices) -> tuple[Any, ...]:
        """Run an op with the implementation of that name."""
        return self.rows[lowering].prepared(op)(inputs, indices)


def _price(row: Implementation, op: Op, device: Device) -> PricedImplementation:
    layouts = row.layouts(op) if row.layouts is not None else ()
    try:
        cost = row.cost(op, device)
    except OverflowError:  # no float holds its FLOPs, or its bytes
        cost = StepCost(op.flops(), op.bytes_touched(), picoseconds=MOST_PICOSECONDS)
    return PricedImplementation(row.name, cost, row.is_view, layouts if any(layouts) else ())
