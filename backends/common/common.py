"""What all backends share: checked index arrays, rows that no index reads, and the loop that runs a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.backends.common.stock import ArrayOps, diagonals, evaluate
from planner.kernels.grouping.keys import IndexArray
from planner.language.derive import batched
from planner.language.errors import IndexRangeError, PlannerError
from planner.language.spec import Gather, Spec, Term, term_axes
from planner.program.implementations import Table
from planner.program.ops import Cast
from planner.program.program import Program
from planner.program.tree import Leaf, Node, Tree

__all__ = ["RangedIndices", "check_index_dtype", "prepare_numpy", "range_error", "run_program", "widen_operands"]


# The row that contracts a whole pool, read or not.
WHOLE_POOL = "whole pool, then take"


class RangedIndices(dict[Gather, Any]):
    """Index arrays by gather, with values in [0, size]; `size` stands for "no row".

    What is in `given` alone is brought into range when a step first asks for it.

    Attributes:
        may_drop: whether that value can occur.
        orders: sorted orders, shared by the steps of one call.
        given: for kernels that read an index piece by piece and need no copy of it in range, nor a look at all of it
            before; empty where ranges were checked beforehand.
        shown: whether the kernel that ran showed the bad indices that could not be refused, see `IndexArray.bad`.
    """

    def __init__(self, may_drop: bool) -> None:
        super().__init__()
        self.may_drop = may_drop
        self.orders: dict[Any, Any] = {}
        self.given: dict[Gather, IndexArray] = {}
        self.shown = False

    def __missing__(self, gather: Gather) -> Any:
        given = self.given[gather]
        values = self[gather] = given.part(given.values)
        return values


class PreparedIndex:
    """An index array that `planner.group` checked, for use in many calls.

    Attributes:
        values: the index array with values in [0, size].
        size: size of the dimension that it indexes.
        mode: the index mode that it was checked under.
    """

    prepared_framework = "numpy"

    def __init__(self, values: Any, size: int, mode: str) -> None:
        self.values, self.size, self.mode = values, size, mode

    @property
    def shape(self) -> Any:
        """Shape of the index array."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the prepared values."""
        return self.values.dtype

    @property
    def device(self) -> Any:
        """Device of the prepared values."""
        return self.values.device

    def check(self, gather: Gather, mode: str) -> None:
        """Refuse to serve for another size or mode than it was prepared for."""
        if self.size != gather.size or self.mode != mode:
            raise PlannerError(
                f"index array {gather.array!r} was prepared by group for size {self.size} and index_mode "
                f"{self.mode!r}, but {gather} has size {gather.size} and the call index_mode {mode!r}"
            )


def _term_mask(ops: ArrayOps, valid: Any, gather: Gather, term: Term, spec: Spec) -> Any:
    """Shape a mask over a bracket's axes so that it broadcasts over a term that has all of them."""
    diagonal, axes = diagonals(ops, gather.axes)
    sizes = dict(spec.sizes)
    valid = ops.permute(diagonal(valid), [axes.index(str(e)) for e in term if e in axes])
    return valid.reshape([sizes[str(e)] if e in axes else 1 for e in term])


def mask_term(ops: ArrayOps, x: Any, term: Term, spec: Spec, index: RangedIndices) -> Any:
    """Zero the entries of an operand or a result that only dropped indices would meet, whatever they hold.

    The one-hot row of a dropped index is zero, but zero times NaN is not: where a term has all axes of a bracket,
    entries whose index is dropped are set to zero by selection.
    """
    if not index.may_drop:
        return x
    plain = [e for e in term if isinstance(e, str)]
    for gather, values in index.items():
        if gather.axes and gather not in term and set(gather.axes) <= set(plain) and len(plain) == len(set(plain)):
            x = ops.select(_term_mask(ops, values < gather.size, gather, term, spec), x, 0)
    return x


def mask_operands(ops: ArrayOps, operands: Sequence[Any], spec: Spec, index: RangedIndices) -> list[Any]:
    """Apply `mask_term` to every operand."""
    return [mask_term(ops, x, term, spec, index) for x, term in zip(operands, spec.inputs, strict=True)]


def operands_with_unread_rows(tree: Tree, spec: Spec) -> tuple[int, ...]:
    """Operands of which steps multiply rows that no index names, since they are contracted before the take.

    Such a row's product is never taken, but the backward program multiplies the row by zero, and 0 times NaN is NaN.
    """
    found: set[int] = set()

    def visit(node: Tree) -> None:
        if isinstance(node, Node):
            for child, term in zip(node.children, node.op.spec.inputs, strict=True):
                if isinstance(child, Leaf):
                    untaken = set(spec.inputs[child.operand]) - set(term)
                    found.update([child.operand] * any(isinstance(e, Gather) for e in untaken))
                visit(child)

    visit(tree)
    return tuple(sorted(found))


@dataclasses.dataclass(frozen=True, slots=True)
class UnreadRows:
    """An operand that a step multiplies before the plan takes its rows, so that rows are read which no index names.

    Attributes:
        spec: a spec with the operand's whole term, brackets included, as its only input.
        at_once: whether the next step takes the rows of this step's result, so that what an unread row holds is
            seen in gradients only.
    """

    spec: Spec
    at_once: bool

    def batched(self, size: int, operand: bool, arrays: Sequence[str]) -> UnreadRows:
        """Return it with a leading axis on the operand, if asked, and on some index arrays."""
        own = [name for name in arrays if name in self.spec.arrays]
        return dataclasses.replace(self, spec=batched(self.spec, size, [0] * operand, own))


def steps_with_unread_rows(tree: Tree, spec: Spec) -> list[tuple[Node, tuple[UnreadRows | None, ...]]]:
    """Return the steps of a tree that are no casts, and which of their inputs are unread_rows, seen through casts."""
    found: list[tuple[Node, tuple[UnreadRows | None, ...]]] = []

    def exposed_child(node: Node, child: Tree, term: Term, after: Term | None) -> UnreadRows | None:
        if isinstance(child, Node) and isinstance(child.op, Cast):
            (child,) = child.children
        if not isinstance(child, Leaf):
            return None
        whole = spec.inputs[child.operand]
        rows = tuple(
            str(e) for e, entry in zip(term, whole, strict=True) if isinstance(entry, Gather) and isinstance(e, str)
        )
        if not rows:
            return None
        out = node.op.spec.output
        taken = {e for e, entry in zip(out, after or (), strict=after is not None) if isinstance(entry, Gather)}
        return UnreadRows(Spec((whole,), (), spec.sizes), taken.issuperset(rows))

    def visit(node: Tree, after: Term | None) -> None:
        if isinstance(node, Node):
            terms = node.op.spec.inputs
            if not isinstance(node.op, Cast):
                inputs = zip(node.children, terms, strict=True)
                found.append((node, tuple(exposed_child(node, child, term, after) for child, term in inputs)))
            for child, term in zip(node.children, terms, strict=True):
                visit(child, term)

    visit(tree, None)
    return found


def find_read_rows(ops: ArrayOps, x: Any, term: Term, spec: Spec, index: RangedIndices) -> Any:
    """Where some index names a row of a gathered operand: the gradient of a take of ones counts the readers."""
    rows = term_axes(tuple(e for e in term if isinstance(e, Gather) or term.count(e) > 1))
    addressed = tuple(e for e in term if isinstance(e, Gather) or e in rows)
    sizes = dict(spec.sizes)
    ones = ops.zeros([sizes[axis] for axis in rows], x) + 1
    readers = evaluate(ops, Spec((rows,), addressed, spec.sizes), [ones], index, index.may_drop)
    shape = [spec.size(e) if e in addressed else 1 for e in term]
    return (readers != 0).reshape(shape)


def zero_unread_rows(ops: ArrayOps, x: Any, term: Term, spec: Spec, index: RangedIndices) -> Any:
    """Zero the rows of a gathered operand that no index names."""
    return ops.select(find_read_rows(ops, x, term, spec, index), x, 0)


def widen_operands(
    ops: ArrayOps, operands: Sequence[Any], spec: Spec, index: RangedIndices, finite: Callable[[Any], bool],
    occurs: Callable[[Any], bool] = np.any,
) -> tuple[Spec, list[Any]] | None:  # fmt: skip
    """Rewrite a contraction in which dropped indices meet infinities or NaN that `mask_term` cannot reach.

    An operand without some of a bracket's axes stands for terms that are dropped and terms that are not. Given those
    axes, it can be masked like any other. Returns None where nothing has to be rewritten.

    Args:
        ops: the framework's array functions.
        operands: arrays as the spec sees them.
        spec: the resolved spec.
        index: prepared index arrays.
        finite: whether an array holds finite numbers only.
        occurs: whether an array holds something that is true.
    """
    sizes = dict(spec.sizes)
    terms, values = list(spec.inputs), list(operands)
    for gather, rows in index.items():
        if not occurs(rows == gather.size):
            continue
        for number, term in enumerate(terms):
            missing = tuple(axis for axis in dict.fromkeys(gather.axes) if axis not in term)
            if gather not in term and missing and not finite(values[number]):
                values[number] = ops.expand(values[number], [*(sizes[axis] for axis in missing), *values[number].shape])
                terms[number] = (*missing, *term)
    if tuple(terms) == spec.inputs:
        return None
    wide = dataclasses.replace(spec, inputs=tuple(terms))
    return wide, mask_operands(ops, values, wide, index)


def check_index_dtype(name: str, dtype: str) -> None:
    """Refuse index arrays that are not of an integer dtype."""
    if not dtype.startswith(("int", "uint")):
        raise PlannerError(
            f"index array {name!r} has dtype {dtype}: it must be an integer array; cast it, or for a mask use where()"
        )


def range_error(gather: Gather, position: tuple[int, ...], value: int) -> IndexRangeError:
    """Return the error for a bad index under ``index_mode="raise"``."""
    place = f"[{', '.join(map(str, position))}]" if position else ""
    dimension = str(gather) if gather.axes or not position else "that it indexes"
    return IndexRangeError(
        f"index array {gather.array!r}{place} is {value}, outside of [-{gather.size}, {gather.size}), the range of "
        f"the dimension {dimension}; to ignore such entries pass index_mode='drop', to clamp them index_mode='clip'"
    )


def clip_error(gather: Gather) -> IndexRangeError:
    """Return the error for clipping into a dimension of size 0."""
    return IndexRangeError(f"index array {gather.array!r} cannot be clipped: the dimension {gather} has size 0")


def prepare_numpy(raw: np.ndarray[Any, Any], gather: Gather, mode: str) -> np.ndarray[Any, Any]:
    """Bring a concrete index array into [0, size], or [0, size) unless the mode is "drop"."""
    check_index_dtype(gather.array, raw.dtype.name)
    size = gather.size
    assert size is not None
    if raw.size == 0:
        return raw.astype(np.int64)
    low, high = int(raw.min()), int(raw.max())
    if mode == "raise":
        if low < -size or high >= size:
            bad = (raw < -size) if low < -size else (raw >= size)
            position = tuple(int(i) for i in np.argwhere(bad)[0]) if raw.ndim else ()
            raise range_error(gather, position, int(raw[position]))
        wide = raw.astype(np.int64)
        return np.where(wide < 0, wide + size, wide) if low < 0 else wide
    if mode == "clip":
        if size == 0:
            raise clip_error(gather)
        # Clamp before narrowing: a uint64 may exceed int64.
        return np.clip(raw, 0, min(size - 1, np.iinfo(raw.dtype).max)).astype(np.int64)
    if low < 0 or high >= size:
        fits = (raw >= 0) & (raw < size)
        return np.where(fits, raw, 0).astype(np.int64) + np.where(fits, 0, size)
    return raw.astype(np.int64)


def run_program(table: Table, program: Program, values: dict[int, Any], index: RangedIndices) -> tuple[Any, ...]:
    """Run a program's steps over a dictionary of variables; each is dropped after its last use.

    Args:
        table: implementations.
        program: what to run.
        values: the given variables; it is emptied of what dies, and holds what was kept at the end.
        index: prepared index arrays.

    Returns:
        The program's results.
    """
    for step in program.steps:
        results = table.run(step.choice.lowering, step.op, [values[v] for v in step.inputs], index)
        values.update(zip(step.outputs, results, strict=True))
        del results
        for variable in step.releases:
            values.pop(variable, None)
    return tuple(values[v] for v in program.results)
