"""What a backend must provide, as laws, and the rows of its table of implementations.

Laws, held by the tests for every backend:

- ``run`` of every row that supports an op equals the stock evaluation of its spec, bitwise on small integers.
- A row's ``cost`` counts its scratch: running it allocates at most its results and ``scratch_bytes``.
- A row changes no input and keeps none alive; a retained value dies with the result's graph.
- Values of prepared index arrays lie in [0, size]; `size` itself means "no row": it reads zero and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from planner.cost.device import Device
from planner.cost.figures import StepCost
from planner.cost.layout import Layout
from planner.language.spec import Gather, Operand
from planner.program.ops import Op, PricedImplementation
from planner.program.plan import PlanRecord
from planner.program.program import Step

__all__ = ["Backend", "Implementation", "Lowering", "RangedIndices", "Stepwise", "Table"]

Indices = Mapping[Gather, Any]


class RangedIndices(dict[Gather, Any]):
    """The index arrays of a call by gather, with values in [0, size]; the value `size` means "no row".

    An array that is in `given` only is brought into range when a step first asks for it.

    Attributes:
        may_drop: True if the value `size` can occur.
        orders: sorted orders of the index arrays, shared by the steps of one call.
        given: index arrays as the caller gave them, each a `planner.kernels.grouping.keys.IndexArray`, for kernels that
            read an index piece by piece. Such a kernel needs no copy of the whole index in range, and no look at all of
            it before. Empty where ranges were checked beforehand.
        shown: True if the kernel that ran wrote NaN for the bad indices that could not be refused, see
            `IndexArray.bad`.
    """

    def __init__(self, may_drop: bool, values: Mapping[Gather, Any] | Iterable[tuple[Gather, Any]] = ()) -> None:
        super().__init__(values)
        self.may_drop = may_drop
        self.orders: dict[Any, Any] = {}
        self.given: dict[Gather, Any] = {}
        self.shown = False

    def __missing__(self, gather: Gather) -> Any:
        given = self.given[gather]
        values = self[gather] = given.part(given.values)
        return values


@dataclass(frozen=True, slots=True)
class Implementation:
    """One row: an implementation of some ops.

    Attributes:
        name: as the printed plan shows it.
        supports: returns None if it can run the op, else the reason why not.
        cost: predicted cost on a device, scratch included.
        run: computes the results from the inputs and the prepared index arrays.
        is_view: whether the result shares its input's storage.
        stock: whether it is the framework's own way, what a user would write: the naive plan is made of these.
        kinds: kinds of device that it runs on; None for all.
        capabilities: compute capabilities of cards, times ten, that it runs on; None for all.
        layouts: how the results lie in memory, where arrays have strides; None where they are row-major.
        variant_of: the row that this one is in another tiling of the same cost, which `optimize="measure"` times; ""
            where it is none.
    """

    name: str
    supports: Callable[[Op], str | None]
    cost: Callable[[Op, Device], StepCost]
    run: Callable[[Op, Sequence[Any], Indices], tuple[Any, ...]]
    is_view: bool = False
    stock: bool = False
    kinds: tuple[str, ...] | None = None
    capabilities: tuple[int, ...] | None = None
    layouts: Callable[[Op], tuple[Layout | None, ...]] | None = None
    variant_of: str = ""

    def refusal(self, op: Op, device: Device) -> str | None:
        """Return why it cannot run an op on a device, None if it can."""
        if self.kinds is not None and device.kind not in self.kinds:
            return f"it runs on {' and '.join(self.kinds)}"
        if self.capabilities is not None and device.capability not in self.capabilities:
            return f"it runs on compute capability {' and '.join(f'{x / 10:.1f}' for x in self.capabilities)}"
        return self.supports(op)


# The name that rows of users' own were written with.
Lowering = Implementation


class Table:
    """Rows of one backend on one device; a new kernel, or a user's own, is one more row."""

    def __init__(self, rows: Sequence[Implementation]) -> None:
        self.rows = {row.name: row for row in rows}
        self._choices: dict[tuple[Op, Device], tuple[PricedImplementation, ...]] = {}

    def choices(self, op: Op, device: Device) -> tuple[PricedImplementation, ...]:
        """Return the implementations of an op with their costs, variants aside; none for a pair means: one by one."""
        known = self._choices.get((op, device))
        if known is None:
            known = tuple(
                _choice(row, op, device)
                for row in self.rows.values()
                if not row.variant_of and row.refusal(op, device) is None
            )
            if len(self._choices) > 100_000:
                self._choices.clear()
            self._choices[op, device] = known
        return known

    def variants(self, lowering: str, op: Op, device: Device) -> tuple[PricedImplementation, ...]:
        """Return the variants of a row that run an op otherwise than it does."""
        return tuple(
            _choice(row, op, device)
            for row in self.rows.values()
            if row.variant_of == lowering and row.refusal(op, device) is None
        )

    def offers(self, choice: PricedImplementation, op: Op, device: Device) -> bool:
        """Whether an op can be run so at that cost."""
        row = self.rows.get(choice.lowering)
        return row is not None and row.refusal(op, device) is None and choice == _choice(row, op, device)

    def verdicts(self, op: Op, device: Device, chosen: str = "") -> dict[str, StepCost | str]:
        """Return for each row what it would cost, or why it cannot run an op.

        Stock rows that cannot are left out, and variants that are not chosen.
        """
        found: dict[str, StepCost | str] = {}
        for row in self.rows.values():
            if row.variant_of and row.name != chosen:
                continue
            refusal = row.refusal(op, device)
            if refusal is None:
                found[row.name] = row.cost(op, device)
            elif not row.stock:
                found[row.name] = refusal
        return found

    def run(self, lowering: str, op: Op, inputs: Sequence[Any], indices: Indices) -> tuple[Any, ...]:
        """Run an op in the named implementation."""
        return self.rows[lowering].run(op, inputs, indices)


def _choice(row: Implementation, op: Op, device: Device) -> PricedImplementation:
    return PricedImplementation(row.name, row.cost(op, device), row.is_view, _laid(row, op))


def _laid(row: Implementation, op: Op) -> tuple[Layout | None, ...]:
    found = row.layouts(op) if row.layouts is not None else ()
    return found if any(found) else ()


@dataclass(frozen=True, slots=True)
class Stepwise:
    """A program of a plan, ready to be run one step at a time.

    Attributes:
        values: what the program is given, by variable.
        bind: from a step and its inputs to a function without arguments that runs it, in JAX a jitted function with
            its arguments. Autograd does not see it.
        orders: sorted orders of index arrays, which the steps of one call share: a step that is to run again as it
            ran at first must find what it found at first.
    """

    values: dict[int, Any]
    bind: Callable[[Step, Sequence[Any]], partial[Any]]
    orders: dict[Any, Any]


class Backend(Protocol):
    """What `planner` asks of a framework; a backend inherits it, so that type checkers hold it to all of it.

    Attributes:
        name: of the framework, as `planner.program.frameworks` knows it.
        table: its implementations.
        compiles: whether calls may run programs that the framework made of a plan's steps as it liked.
        strided: whether arrays have strides, so that views are free and layouts part of a plan.
    """

    name: str
    table: Table
    compiles: bool = False
    strided: bool = False

    def operand(self, array: Any) -> Operand:
        """Describe an array."""
        ...

    def signature(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> Hashable:
        """Return all of some arrays that a plan depends on, in microseconds: every call asks for it.

        Law: calls of equal signatures and options may run the same plan.

        Raises:
            AttributeError: something is no array.
        """
        key: list[Any] = []
        for x in operands:
            key += (type(x), x.shape, x.dtype)
        for name, q in indices.items():
            key += (name, type(q), q.shape, q.dtype)
        return tuple(key)

    def result_dtype(self, dtypes: Sequence[str], operands: Sequence[Any]) -> str:
        """Promote the operands' dtypes by the framework's rules; operands may be stand-ins or shapes."""
        ...

    def device(self, operands: Sequence[Any]) -> Device:
        """Return the rates of the machine that the operands are on."""
        ...

    def check_index(self, name: str, index: Any) -> None:
        """Refuse an index array that is not of integers.

        Raises:
            PlannerError: it is not; the message names it.
        """
        ...

    def check_devices(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse arrays on different devices: nothing is moved in silence. Stand-ins are on none.

        Raises:
            PlannerError: they are; the message names two of them.
        """
        ...

    def group(self, q: Any, size: int, index_mode: str) -> Any:
        """Prepare an index array for many calls.

        Law: a call with it equals the call with `q`, and under "raise" it refuses what that call would refuse.

        Raises:
            IndexRangeError: an index is out of range under ``index_mode="raise"``, where values can be seen.
        """
        ...

    def bind(self, plan: PlanRecord) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        """Return the function that runs a plan on operands and index arrays."""
        ...

    def compiled_bytes(self, plan: PlanRecord) -> int | None:
        """Compile both programs of a plan, and return the peak of the larger; None where nothing can be said of it.

        The backward program's counts what is retained. Nothing is compiled where `compiles` is false.
        """
        return None

    def refuse_dataless(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse arrays without values of their own: traced ones, those of transforms, stand-ins of the framework.

        Raises:
            PlannerError: one is such; nothing can be measured on it.
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
        """Return a plan's forward program with what it is given, or, from an output gradient, the backward program.

        Law: running its steps in order computes what `bind` computes, of finite values.

        Args:
            plan: the plan.
            operands: what the plan is called with.
            indices: what the plan is called with.
            gradient: the output's gradient; None for the forward program.
            kept: for the backward program, the kept values by variable.
        """
        ...

    def trial(self, plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return a function that runs a plan on arrays, with its gradients if it has any, and waits for the end.

        None where the arrays hold no values to run on, as under tracing. It changes nothing of the arrays.
        """
        ...

    def unwatched(self) -> AbstractContextManager[object]:
        """Return a context for measuring: what runs in it is hidden from all that watches operators around a call."""
        return nullcontext()

    def pins_tiles(self) -> bool:
        """Whether the tiles of a kernel are those of the problem alone, whatever is measured."""
        return False

    def environment(self, operands: Sequence[Any]) -> dict[str, str]:
        """Return what besides the plan decides how fast it runs: versions, hardware, settings."""
        ...
