"""What a backend must provide, as laws, and the rows of its table of implementations.

The tests check these laws for every backend:

- ``run`` of every row that supports an op equals the stock evaluation of its spec, bitwise on small integers.
- A row's ``cost`` counts its scratch: a run allocates at most its results and ``scratch_bytes``.
- A row changes no input and keeps no input alive. A retained value is freed with the result's graph.
- The values of prepared index arrays lie in [0, size]. The value `size` means "no row": it reads zero and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from planner.cost.device import Device
from planner.cost.figures import MOST_PICOSECONDS, StepCost, Work
from planner.cost.floor import Launches
from planner.cost.layout import Layout
from planner.cost.objective import StepKey, step_key
from planner.language.cached import cached_by_step
from planner.language.dtypes import is_inexact
from planner.language.errors import refusal_of
from planner.language.spec import Gather, Operand, Spec
from planner.program.calls import Indices, Member, PreparedRun, Run, Stepwise
from planner.program.contraction import Contraction
from planner.program.ops import Guard, Op, PricedImplementation
from planner.program.plan import Loop, PlanRecord
from planner.program.program import CompiledPeak, Programs, Step
from planner.program.tree import Tree

# The names of the rows that run guards and loops. No other row is asked whether it supports one.
MASK, LOOP = "mask", "loop"

# From operands and index arrays to the result.
RunPlan = Callable[[Sequence[Any], Mapping[str, Any]], Any]
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

    def refusal(self, op: Op, device: Device) -> str | None:
        """Return why the row cannot run an op on a device, or None if it can."""
        for kind, name in ((Guard, MASK), (Loop, LOOP)):
            if isinstance(op, kind):
                return None if self.name == name else f"the step is a {kind.__name__.lower()}"
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
        PreparedRun(lambda op: partial(run, op, form_of(op)), any_sizes),
        bounded=True,
        layouts=None if layouts is None else lambda op: layouts(op, form_of(op)),
        **fields,
    )


# The former name: users may have written rows of their own with it.
Lowering = Implementation


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
        self._given, self._choices = tuple(self.rows.values()), cached_by_step(self._price_rows)
        self._asked: dict[tuple[bool, int, str, bool, Names], list[Implementation]] = {}

    @property
    def has_changed(self) -> bool:
        """Whether rows were added, replaced or removed after the table was made."""
        return tuple(self.rows.values()) != self._given

    def choices(self, op: Op, device: Device, key: StepKey | None = None, among: Names = None) -> Choices:
        """Return the implementations of an op and their costs, without variants; `among` names all that are asked.

        There may be none for a joint gradient. Then each gradient is a step of its own. With a key, rows are left out
        whose least cost already is no better than the cost of another.
        """
        if isinstance(op, Loop):  # the search prices thousands, and keeps few
            self.priced += 1
            return (_price(self.rows[LOOP], op, device),)
        return self._choices(op, device, key, among)

    def _price_rows(self, op: Op, device: Device, key: StepKey | None, among: Names) -> Choices:
        """Return the rows that can run an op, and their costs."""
        self.priced += 1
        plain, special, best = not op.gathers, isinstance(op, Guard | Loop), tuple[int, ...]()
        rows = self._rows_for(plain, len(op.input_terms), device.kind, key is step_key("time"), among)
        leasts = {row.name: key(row.least(op, device)) for row in rows if row.least} if key and not plain else {}
        rows = sorted(rows, key=lambda row: leasts.get(row.name, ())) if leasts else rows  # stock rows take long: last
        choices: list[PricedImplementation] = []
        for row in rows:
            if key and choices and row.least and (leasts.get(row.name) or key(row.least(op, device))) >= best:
                continue
            if (row.refusal(op, device) if row.capabilities or row.inexact or special else row.supports(op)) is None:
                choices.append(_price(row, op, device))
                best = min([key(choice.cost) for choice in choices]) if key else ()
        if len(choices) > 1 and not plain:  # of equally good ones the first of the table is taken
            choices.sort(key=lambda choice: list(self.rows).index(choice.lowering))
        return tuple(choices)

    def _rows_for(self, plain: bool, inputs: int, kind: str, for_time: bool, among: Names) -> list[Implementation]:
        """Return the rows to ask about ops: without gathers or with some, on a kind of device, for the least time."""
        if self.has_changed:
            self._asked.clear()
        if (rows := self._asked.get(asked := (plain, inputs, kind, for_time, among))) is None:
            rows = self._asked[asked] = [
                row
                for row in self.rows.values()  # most end here; `refusal` would also make the text of the reason
                if not (row.variant_of or (row.brackets and plain) or (row.kinds is not None and kind not in row.kinds))
                and row.inputs in (None, inputs)
                and (among is None or row.name in among)
                and not (for_time and row.slower_than in self.rows)
            ]
        return rows

    def price(self, lowering: str, op: Op, device: Device) -> PricedImplementation | None:
        """Return one implementation of an op, by its name, and its cost; None if it cannot run the op."""
        row = self.rows.get(lowering)
        return None if row is None or row.refusal(op, device) is not None else _price(row, op, device)

    def runs_any_sizes(self, steps: Iterable[Step]) -> bool:
        """Whether all steps run in their implementations at any sizes; see `PreparedRun`."""
        runs = (self.rows[step.choice.lowering].run for step in steps)
        return all(isinstance(run, PreparedRun) and run.any_sizes for run in runs)

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


class Backend(Protocol):
    """What `planner` asks of a framework. Backends inherit this class, so that type checkers compare them with it.

    Attributes:
        name: name of the framework, as in `planner.program.frameworks`.
        table: the backend's implementations.
        ops: the array functions that `planner.backends.common.stock.ArrayOps` lists.
        compiles: whether the framework may fuse or reorder steps, so that peaks can differ from the plan's.
        strided: whether arrays have strides. Then views are free, and plans depend on layouts.
        compiled_peak: returns the bytes that a compiler takes for a program, from the steps, the variables, those that
            the caller owns, those that outlive it, the output's gradient or None, and the index mode.
        conjugates: whether backward programs run on the conjugate of a complex output gradient.
        einsum_cost: returns what a stock step costs on a device by the framework's own functions, which may copy less.
        einsum_copies: for each input of a stock step, the bytes of its copy that autograd keeps behind an einsum.
        kept_copies: returns the bytes of copies that a plan keeps in place of operands, because autograd saves them and
            takes less time; None if a plan must copy nothing. It takes the contraction, its tree, the steps of both
            programs, and whether the plan's family keeps copies, if known.
        autograd_rows: for each row that autograd may run, the rows of the gradients that it computes.
        call_seconds: returns what a call takes beside its steps, 0 if autograd runs these; None for long plans.
    """

    name: str
    table: Table
    ops: Any
    compiles: bool = False
    strided: bool = False
    compiled_peak: CompiledPeak | None = None
    conjugates: bool = False
    einsum_cost: Callable[[Op, StepCost, Device], StepCost] | None = None  # None if they take as much
    einsum_copies: Callable[[Op], Sequence[int]] | None = None  # None if autograd keeps no copies
    kept_copies: Callable[[Contraction, Tree, Sequence[Step], Sequence[Step], bool | None], int | None] | None = None
    autograd_rows: Mapping[str, Sequence[str]] | None = None
    call_seconds: Callable[[Contraction, Tree, Programs], float | None] | None = None

    def operand(self, array: Any) -> Operand:
        """Describe an array."""

    def fuses_cast(self, source: str, dtype: str) -> bool:
        """Return whether steps without index arrays read operands of a dtype as they are, and compute in another."""
        return False

    def numbers(self, sizes: Any) -> Any:
        """Return a shape, or `sizes=` of a call, in numbers: for a tracer's symbols the sizes that it traces with."""
        return sizes

    def signature(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> Hashable:
        """Return everything about some arrays that a plan depends on, in microseconds, because every call asks for it.

        Law: calls of equal signatures and options may run the same plan.

        Raises:
            AttributeError: one of them is not an array.
        """
        key: list[Any] = [fact for x in operands for fact in (type(x), x.shape, x.dtype)]
        for name, q in indices.items():
            key += (name, type(q), q.shape, q.dtype)
        return tuple(key)

    def result_dtype(self, dtypes: Sequence[str], operands: Sequence[Any], spec: Spec, device: Device) -> str:
        """Return the dtype of a contraction whose caller asks for none. Operands may be stand-ins or shapes."""
        ...

    def device(self, operands: Sequence[Any]) -> Device:
        """Return the rates of the device that the operands are on."""
        ...

    def check_index(self, name: str, index: Any) -> None:
        """Refuse an index array whose dtype is not an integer type.

        Raises:
            PlannerError: the dtype is not an integer type. The message names the array.
        """

    def check_devices(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse arrays on different devices, because nothing is moved silently. Stand-ins are on no device.

        Raises:
            PlannerError: two arrays are on different devices. The message names them.
        """

    def group(self, q: Any, size: int, index_mode: str) -> Any:
        """Prepare an index array for many calls.

        Law: a call with the prepared array gives the same result as a call with `q`. Under "raise" this function
        refuses every array that such a call would refuse.

        Raises:
            IndexRangeError: an index is out of range under ``index_mode="raise"``. Traced values cannot be checked.
        """
        ...

    def in_range(self, q: Any, gather: Gather, index_mode: str) -> tuple[Any, bool]:
        """Return an index array with values in [0, size], and whether the value `size`, "no row", can occur.

        Where values cannot be seen, an entry that should be refused becomes `size`.

        Raises:
            IndexRangeError: as `group`.
            PlannerError: `q` was prepared for another size or mode.
        """
        ...

    def bind(self, plan: PlanRecord) -> RunPlan:
        """Return the function that runs a plan on operands and index arrays."""
        ...

    def bind_family(self, plan: PlanRecord) -> Callable[[Member], RunPlan] | None:
        """Return what makes the function that runs the plan of a member, in microseconds.

        None if each member must be bound by itself. Law: the function does what `bind` makes of the member's own plan.

        Args:
            plan: the plan of a family's representative, whose steps all run at any sizes.
        """
        return None

    def bind_symbols(
        self, plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any], sizes: Any
    ) -> tuple[Any, ...] | None:
        """Return what to give to `planner.run.bind_plan` for a call at symbols for sizes; None if they are numbers."""
        return None

    def family_signature(
        self, operands: Sequence[Any], indices: Mapping[str, Any]
    ) -> tuple[Hashable, list[tuple[int, ...]]] | None:
        """Return all that a family depends on but the sizes, and the shapes of arrays; None if they are bound alone."""
        return None

    def divided(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return what runs calls of arrays that lie on several devices; None if these do not, or the framework does."""
        return None

    def routing(self, route: Callable[..., Any], every: bool = False) -> AbstractContextManager[object]:
        """Return a context in which `route` gets calls of einsum, or of `every` function: it, arguments, keywords."""

    def compiled_bytes(self, plan: PlanRecord) -> int | None:
        """Compile both programs of a plan and return the larger peak, kept values counted; None if nothing tells it."""
        return None

    def refuse_dataless(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse arrays that hold no values: tracers, arrays inside of transforms, and the framework's own stand-ins.

        Raises:
            PlannerError: an array holds no values, so it cannot be measured.
        """
        ...

    def stepwise(
        self,
        plan: PlanRecord,
        operands: Sequence[Any],
        indices: Mapping[str, Any],
        gradient: Any = None,
        kept: Mapping[int, Any] | None = None,
    ) -> Stepwise:
        """Return a plan's backward program, or without an output gradient its forward program, to be run step by step.

        Law: if all values are finite, running its steps in order computes what `bind` computes.

        Args:
            plan: the plan.
            operands: the arrays that the plan is called with.
            indices: the index arrays that the plan is called with.
            gradient: the output's gradient; None for the forward program.
            kept: for the backward program, the kept values by the number of their variable.
        """

    def trial(self, plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return a function that runs a plan on arrays and waits for the end; None if the arrays hold no values.

        The run includes the gradients if the plan has any. It does not change the arrays.
        """
        ...

    def unwatched(self) -> AbstractContextManager[object]:
        """Return a context for measuring. Tools that watch the operators around a call do not see what runs in it."""
        return nullcontext()

    def to_numpy(self, array: Any, dtype: str) -> Any:
        """Return an array's values, cast to a dtype, as a NumPy array: without a copy if they lie in the host's memory.

        Values of a dtype that NumPy lacks are returned as their bits. Only `from_numpy` can read those.
        """
        ...

    def from_numpy(self, values: Any, dtype: str, device: str) -> Any:
        """Return the array of a dtype that `to_numpy` turned into `values`; `device` is the name of its device.

        Raises:
            PlannerError: the framework would take another dtype.
        """
        ...

    def pins_tiles(self) -> bool:
        """Whether the tiles of a kernel depend on the problem alone, and never on measurements."""
        return False

    def environment(self, operands: Sequence[Any]) -> dict[str, str]:
        """Return what the speed depends on besides the plan: versions, hardware and settings."""
