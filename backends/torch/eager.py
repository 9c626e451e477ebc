"""Plans as a few native torch calls, for plans without casts, guards that act, and copies.

Each step becomes a small function over views. Autograd then keeps exactly what the plan says, because `mm`, `bmm` and
`mul` save the operands that they are given, and takes and segment sums by one index array save that array. Under
autograd a plan does not run as native calls in these cases:

- a step would copy an operand into another layout: autograd would keep the copy. Some plans do: see `kept_copies`;
- the result of a step would have other strides than the plan says, but for a product by element that comes last;
- the plan transposes a product or its gradient, writes slices or terms of it in place, or has long batched vectors;
- an operand is repeated along an axis in a product, and the plan sums its gradient otherwise, or earlier, than torch;
- a take or a segment sum needs a new index array, or the plan computes its gradient in another way than torch does.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from planner.backends.common.stock import count_views, evaluation
from planner.backends.common.stock_layout import stock_layout
from planner.backends.common.stock_rows import stock_kind
from planner.backends.torch.conjugates import conjugates_much
from planner.backends.torch.indexed_rows import INDEXED, MOST_PUT, Reads, indexed_calls
from planner.backends.torch.ops import OPS, matrix_product
from planner.backends.torch.products import copied, einsum, elementwise, transposed
from planner.backends.torch.products.batches import has_long_dots, is_intel
from planner.backends.torch.products.elementwise import BY_ELEMENT, MULTIPLY_SUM, native_by_element
from planner.backends.torch.products.few_columns import runs_few
from planner.backends.torch.products.few_rows import lies_as_columns
from planner.backends.torch.strides import (
    STRIDE_OPS,
    TRANSFORMED_STRIDE_OPS,
    Strided,
    StrideOps,
    copies_of,
    standins_of,
)
from planner.cost.layout import layout_of
from planner.language.derive import transpose
from planner.language.dtypes import itemsize
from planner.language.spec import Spec, indexed_dims, term_gathers
from planner.program.contraction import Contraction
from planner.program.forms import known_product, product_form, product_of_rows
from planner.program.ops import Cast, Einsum, Guard, Op, joint_elements
from planner.program.program import Programs, Step
from planner.program.tree import Leaf, Node, Tree, nodes_of

# A function from operands to the result. If the plan has index arrays, its argument ends with these, in range.
Run = Callable[..., Tensor]
# Takes a step and the function that runs it, and returns another such function.
Around = Callable[[Op, Callable[..., Tensor]], Callable[..., Tensor]]

NATIVE = ("matmul", einsum.EINSUM, "multiply", "view", "sum", "broadcast", "diagonal", "multiply, sum", *BY_ELEMENT,
          *transposed.REORDERED, "take, multiply, add", *INDEXED)  # fmt: skip
# The rows that autograd itself may run, and the rows of the gradients that it computes.
AUTOGRAD: Mapping[str, Sequence[str]] = {
    "matmul": ("matmul", "multiply"),
    "multiply": (MULTIPLY_SUM, "multiply"),
    MULTIPLY_SUM: (MULTIPLY_SUM, "multiply"),
    "view": ("view",),
    "sum": ("broadcast",),
    "broadcast": ("sum",),
    **{row: (gradient,) for row, gradient in INDEXED.items()},
}
# Longer plans with index arrays run as a Function: for an expanded gradient it computes the sum first, see
# `Executable.against`. Others do so unless they keep copies of operands: see `planner.search.refine`.
MOST_NATIVE_SECONDS = 2.5e-3
# Plans with index arrays of so many seconds are not one operator under a compiler, which fuses their steps. Under
# `torch.func.grad` they may keep more than the plan says.
MOST_SMALL_SECONDS = 2e-4
# Batched vectors of more multiplications run as a Function, see `has_vectors`.
MOST_VECTORS = 2**20
# A plan with index arrays that was made for autograd may keep a copy of so many bytes that einsum would not make.
MOST_EXTRA_COPY = 2**14
# What a Function takes beside its steps, 35 us on an AMD EPYC and 75 on an Intel Xeon (torch 2.13, 2026-11-28), and for
# each index array: they are brought into range and looked at.
FUNCTION_SECONDS, GUARDED_SECONDS = 75e-6, 30e-6
# A function calls those of the steps before it, so there must not be too many for Python's stack.
MOST_STEPS = 200
# Steps made of several native calls, for which autograd would keep more than the step's operands: positions of the
# diagonal, or a sum inside of the step.
COMPOSED = ("diagonal", "multiply, sum", "take, multiply, add")


def compile_native(
    tree: Tree,
    operands: Sequence[Strided],
    backward: Sequence[Step] | None,
    transformed: bool = False,
    around: Around | None = None,
    index: Mapping[Any, Any] = MappingProxyType({}),
    kept: list[int] | None = None,
    rows: Mapping[Spec, str] = MappingProxyType({}),
    wraps: bool = False,
    reads: Reads | None = None,
    tries: bool = False,
    unkept: Collection[int] = (),
    on_cpu: bool = True,
    records: bool = False,
) -> Run | None:
    """Return a function from operands to the result, or None if the tree needs more than native calls.

    This runs no operator of torch. It tries the calls on stand-ins.

    Args:
        tree: the plan's tree.
        operands: stand-ins with the strides of the operands; they take gradients where operands do.
        backward: the steps of the plan's backward program; None if no gradient is asked for. Then steps may copy, since
            nothing is kept.
        transformed: whether the calls will run under a transform of `torch.func` or in forward mode.
        around: changes how a step runs; None to run each as it is.
        index: holds the sizes of the calls, if they are not the tree's, see `RangedIndices.sizes`.
        kept: where the bytes of each copy are entered that autograd keeps; None if it must keep none.
        rows: the implementation of each step of the forward program, by the step's spec.
        wraps: whether negative indices count from the end.
        reads: where it enters what it finds out about index arrays.
        tries: whether the function will not be called: then it need not be made whole.
        unkept: the numbers of operands that autograd must not keep, because they are copies that no gradient reads.
        on_cpu: whether the calls run on a CPU.
        records: whether the plan was made for autograd, and so allows for what that allocates beside its steps.
    """
    nodes = list(nodes_of(tree))
    if len(nodes) > MOST_STEPS:
        return None
    chosen = None if backward is None else {step.op.spec: step.choice.lowering for step in backward}
    table = TRANSFORMED_STRIDE_OPS if transformed else STRIDE_OPS
    indexed = any(node.op.spec.gathers for node in nodes)
    rest = (reads or Reads(), tries, unkept, on_cpu, records)
    compiler = _Compiler(operands, chosen, table, around, index, indexed, kept, rows, wraps, *rest)
    compiled = compiler.compile(tree)
    return None if compiled is None else compiled[0]


def kept_copies(
    contraction: Contraction, tree: Tree, forward: Sequence[Step], backward: Sequence[Step], records: bool | None
) -> int | None:
    """Return the bytes of copies that a plan keeps if it runs as native calls; see `Backend.kept_copies`.

    A Function of planner's own would keep the operands in their place, but takes longer.
    """
    options, on_cpu = contraction.options, contraction.device.kind == "cpu" and contraction.mesh is None
    free = on_cpu and not options.limited and options.objective == "time"
    copied = any(step.choice.cost.copied_bytes for step in forward)
    if not (copied and free) or records is False or contraction.dtype not in ("float32", "float64"):
        return None
    if any(step.recomputed for step in backward) or any(step.choice.lowering not in NATIVE for step in forward):
        return None
    seconds = sum(step.choice.cost.picoseconds for step in (*forward, *backward)) / 1e12
    gathers, forms = contraction.resolved.spec.gathers, [product_form(step.op.spec) for step in forward]
    if records and any(form is not None and form.sizes[0] > 1 and form.sizes[1:3] == (1, 1) for form in forms):
        return None  # `bmm` computes gradients of dot products slowly
    if seconds > MOST_NATIVE_SECONDS and (gathers or records is None):
        return None
    kept: list[int] = []
    rows = {step.op.spec: step.choice.lowering for step in forward}
    standins = standins_of(contraction)
    compiled = compile_native(tree, standins, backward, kept=kept, rows=rows, tries=True, records=bool(records))
    return None if compiled is None else sum(kept)


def call_seconds(contraction: Contraction, tree: Tree, programs: Programs) -> float | None:
    """Return what a Function takes beside the steps of a plan, 0 for native calls, None for long plans."""
    assert programs.backward is not None
    forward, backward = programs.forward.steps, programs.backward.steps
    seconds, spec = programs.cost.seconds, contraction.resolved.spec
    if contraction.device.kind != "cpu" or contraction.mesh is not None or seconds > MOST_NATIVE_SECONDS:
        return None
    computing = [step.choice.lowering for step in forward if not isinstance(step.op, Guard)]
    if isinstance(tree, Leaf) or all(row in ("view", "broadcast") for row in computing):
        return 0.0
    if any(step.choice.cost.copied_bytes for step in forward) or conjugates_much(programs):
        native = programs.copies is not None
    else:
        rows = {step.op.spec: step.choice.lowering for step in forward}
        native = all(row in NATIVE for row in computing) and bool(
            compile_native(
                tree, standins_of(contraction), backward, rows=rows, tries=True, records=programs.by_autograd
            )
        )
    return 0.0 if native else FUNCTION_SECONDS + GUARDED_SECONDS * len(spec.gathers)


def _no_run(*inputs: Tensor) -> Tensor:
    raise AssertionError("a step of a function that was only tried")


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """Makes native calls of trees. The fields are arguments of `compile_native`, but for these.

    Attributes:
        chosen: the implementation of each step of the backward program, by the step's spec; None if there is none.
        stride_ops: what runs steps on stand-ins.
        indexed: whether the calls are given index arrays.
    """

    operands: Sequence[Strided]
    chosen: Mapping[Spec, str] | None
    stride_ops: StrideOps
    around: Around | None
    index: Mapping[Any, Any]
    indexed: bool
    kept: list[int] | None
    rows: Mapping[Spec, str]
    wraps: bool
    reads: Reads
    tries: bool
    unkept: Collection[int]
    on_cpu: bool
    records: bool

    def compile(self, tree: Tree, root: bool = True) -> tuple[Run, Strided] | None:
        """Return the function that computes a part of the tree, and the stand-in of its result; None if not native."""
        copies = self.chosen is None
        if isinstance(tree, Leaf):
            return operator.itemgetter(tree.operand), self.operands[tree.operand]
        kind = stock_kind(tree.op)
        if isinstance(tree.op, Cast) or kind not in NATIVE or (kind in COMPOSED and not copies):
            return None
        children = [self.compile(child, False) for child in tree.children]
        if any(child is None for child in children):
            return None
        parts = [child for child in children if child is not None]
        standins = [standin for _, standin in parts]
        if not self._differentiates_alike(tree, standins):
            return None
        free = isinstance(tree.children[0], Leaf) and tree.children[0].operand not in self.unkept
        if (made := self._step(tree.op, standins, free, root)) is None:
            return None
        run, result = made
        if result.copied and not copies:
            kept = None if self.kept is None or kind != "matmul" else self._kept_copies(tree, standins, root)
            if self.kept is None or kept is None:
                return None
            self.kept.extend(kept)
            result = result._replace(copied=False)
        _, layout = stock_layout(tree.op.with_layouts(layout_of(x.shape, x.strides) for x in standins))
        if (
            self.rows.get(tree.op.spec) not in (*BY_ELEMENT, *transposed.REORDERED, einsum.EINSUM)
            and not (root and (kind == "multiply" or not copies))
            and not (layout is not None and layout.unknown)
            and layout != layout_of(result.shape, result.strides)
        ):
            return None
        if root and copies and self.on_cpu and self.around is None and len(self.operands) == 2:
            ends = kind == "matmul" and transposed.last_product(tree.op, standins, self.operands) is not None
            pair = einsum.summed_pair(tree, self.rows, standins, None if ends else result.strides)
            if pair is not None:
                return (lambda xs, _=None: pair(*xs)), result
        step = run if self.around is None else self.around(tree.op, run)
        if len(parts) == 1:
            (inner, _) = parts[0]
            if kind in INDEXED:
                return (lambda xs, _=None: step(inner(xs), xs[-1])), result
            return (lambda xs, _=None: step(inner(xs))), result
        (left, _), (right, _) = parts
        if tree.op.spec.gathers:
            if tree.order == (1, 0):
                return (lambda xs, _=None: (lambda second: step(left(xs), second, xs[-1]))(right(xs))), result
            return (lambda xs, _=None: step(left(xs), right(xs), xs[-1])), result
        if all(isinstance(child, Leaf) for child in tree.children):
            i, j = (child.operand for child in tree.children if isinstance(child, Leaf))
            if not self.indexed and len(self.operands) == 2 and (i, j) == (0, 1):
                return (lambda xs, _=None: step(*xs)), result
            return (lambda xs, _=None: step(xs[i], xs[j])), result
        if tree.order == (1, 0):
            return (lambda xs, _=None: (lambda second: step(left(xs), second))(right(xs))), result
        return (lambda xs, _=None: step(left(xs), right(xs))), result

    def _differentiates_alike(self, node: Node, standins: Sequence[Strided]) -> bool:
        """Return whether the plan computes the gradients of a step as torch does.

        That of a repeated operand must be a whole product, then its sum; that of a take must be a segment sum. Autograd
        multiplies for both operands before it sums for the first, which only its own plans allow for. Rows that were
        taken must have a gradient that can be added up as it lies.
        """
        op, kind = node.op, stock_kind(node.op)
        if self.chosen is None or kind not in ("matmul", "multiply", *INDEXED):
            return True
        trained = [number for number, x in enumerate(standins) if x.requires_grad]
        gradients = [transpose(op.spec, number) for number in trained]
        rows = [self.chosen.get(gradient) for gradient in gradients]
        if MULTIPLY_SUM in rows[:-1] and not self.records:
            return False
        if self.rows.get(op.spec) == MULTIPLY_SUM:
            forms = map(product_form, gradients)
            return rows == [MULTIPLY_SUM if form is not None and form.contracted else "multiply" for form in forms]
        if kind == "matmul":
            takes = [
                isinstance(child, Node) and any(map(term_gathers, child.op.spec.inputs)) for child in node.children
            ]
            turned = any(takes[number] and einsum.turns_gradient(op, number) for number in trained)
            return transposed.TRANSPOSED not in rows and not turned
        wanted = INDEXED.get(kind, MULTIPLY_SUM)
        for number, row in zip(trained, rows, strict=True):
            repeats = any(op.spec.size(e) != 1 for e in op.spec.output if e not in op.spec.inputs[number])
            if row != wanted and (kind in INDEXED or repeats):
                return False
        return True

    def _step(
        self, op: Op, standins: Sequence[Strided], free: bool, root: bool
    ) -> tuple[Callable[..., Tensor], Strided] | None:
        """Return the function that runs a step, and the stand-in of its result; None if autograd would keep more.

        The function takes the inputs. That of an indexed step takes the index arrays after them. `free` says
        whether autograd may keep the first input, an operand.
        """
        spec, kind = op.spec, stock_kind(op)
        if kind in INDEXED:
            return self._indexed(op, standins[0], free)
        if spec.gathers:  # without gradients
            # Takes along one dimension refuse each index out of range; sums by segments write elsewhere in the memory.
            self.reads.checked &= all(len(indexed_dims(term)) < 2 for term in spec.inputs)
            self.reads.checked &= not indexed_dims(spec.output)
            arrays = {gather: Strided.new(spec.shape(gather.axes)) for gather in spec.gathers}
            result = evaluation(self.stride_ops, spec)(standins, arrays, False)
            if (made := self._take_then_multiply(op, standins, root)) is not None and made[1] == result:
                return made
            run = evaluation(copied.native_ops(op, standins, root) if self.on_cpu else OPS, spec)
            return (lambda a, b, index: run((a, b), index, False)), result
        if (row := self.rows.get(spec)) in BY_ELEMENT:
            if self.chosen is not None and row != MULTIPLY_SUM:
                return None  # autograd cannot record writes in place
            return native_by_element(row, op, standins)
        if row in transposed.REORDERED and not (root and kind == "multiply"):  # torch's own order is as good
            return None if self.chosen is not None else transposed.native_reordered(op, standins, self.stride_ops)
        result = evaluation(self.stride_ops, spec)(standins, {}, False)
        recorded = self.chosen is not None
        if kind == "matmul" and op.dtype != "bool":  # torch multiplies no bool matrices
            form = known_product(spec)
            if recorded and einsum.has_vectors(form, MOST_VECTORS):
                return None
            if row == einsum.EINSUM:
                if recorded:  # autograd would keep what it copies
                    return None
                call, strides = einsum.lean_call(op)
                return call, result._replace(strides=strides)
            if recorded and root and (ended := einsum.last_call(op, standins)) is not None:
                return ended[0], result._replace(strides=ended[1], copied=True)
            if self.tries:
                return _no_run, result
            last = transposed.last_product(op, standins, self.operands, recorded) if root and self.on_cpu else None
            if last is not None:
                return last, result
            planned = op.with_layouts(layout_of(x.shape, x.strides) for x in standins)
            on_intel = is_intel() and (
                has_long_dots(form) or lies_as_columns(form, spec, planned.layouts or (None, None))
            )
            cut = not recorded and (on_intel or runs_few(form, by_chunks=False))
            plain, slow = matrix_product(form, spec), recorded and einsum.has_slow_gradients(op, standins)
            calls = (None if slow else plain) or (None if cut else copied.one_call(op, standins, recorded)) or plain
            if calls is None and not result.copied:  # then looks at strides can be left out
                calls = OPS.product_of_views(form, spec, recorded)
            return calls or OPS.product(form, spec), result
        if kind == "multiply":
            if root and self.on_cpu and (outer := transposed.outer_product(op, standins)) is not None:
                return outer
            form = known_product(spec)
            follows = evaluation(TRANSFORMED_STRIDE_OPS, spec)(standins, {}, False)
            by_einsum = not recorded and len(spec.axes) <= einsum.MOST_LETTERS
            if 1 in spec.by_axis.values():  # an axis of size 1 may lie otherwise than in what `torch.einsum` returns
                if root and by_einsum:
                    return einsum.einsum_call(form, spec, spec.output, False), follows
            elif root or follows.strides == result.strides:
                if by_einsum and count_views(form, spec) >= 4:
                    return einsum.einsum_call(form, spec, spec.output, False), follows
                return elementwise.broadcast_product(spec), follows
            return OPS.product(form, spec), result
        run, index = evaluation(OPS, spec), self.index
        return (lambda *inputs: run(inputs, index, False)), result

    def _take_then_multiply(
        self, op: Op, standins: Sequence[Strided], root: bool
    ) -> tuple[Callable[..., Tensor], Strided] | None:
        """Return the calls of a product that takes rows first; None if it adds up rows."""
        inner = Einsum(product_of_rows(op.spec), op.dtype)
        form = product_form(inner.spec)
        if form is None or inner.spec.gathers or indexed_dims(op.spec.output):
            return None
        takes: list[tuple[Callable[..., Tensor], Strided]] = []
        for x, term, whole in zip(standins, op.spec.inputs, inner.spec.inputs, strict=True):
            take = Einsum(Spec((term,), whole, op.spec.sizes), op.dtype)
            made = ((lambda x, index: x), x) if term == whole else self._indexed(take, x, True)
            if made is None:
                return None
            takes.append(made)
        (first, a), (second, b) = takes
        if (product := self._step(inner, (a, b), True, root)) is None:
            return None
        multiply, result = product
        return (lambda a, b, index: multiply(first(a, index), second(b, index))), result

    def _indexed(self, op: Op, x: Strided, free: bool) -> tuple[Callable[..., Tensor], Strided] | None:
        """Return the calls of a step that reads or writes through index arrays, and the stand-in of its result.

        Return None if autograd would keep more than the index arrays.
        """
        spec, recorded = op.spec, self.chosen is not None
        arrays = {gather: Strided.new(spec.shape(gather.axes)) for gather in spec.gathers}
        result = evaluation(self.stride_ops, spec)([x], arrays, False)
        calls = indexed_calls(op)
        lies_alike = calls is not None and calls.result(x).strides == result.strides
        several = any(len(indexed_dims(term)) > 1 for term in spec.terms)
        # `x[q, r]` takes negative indices to count from the end, and a flat index may be that of another row.
        self.reads.checked &= not several or (lies_alike and self.wraps)
        if calls is None or not lies_alike:
            run = evaluation(OPS, spec)
            return None if recorded else ((lambda x, index: run((x,), index, False)), result)
        if recorded:
            if several and not calls.keeps:  # by `index_put`
                rows = max(math.prod(q.shape) for q in arrays.values())
                most = MOST_PUT * max(1, rows) // max(1, joint_elements(spec))
                self.reads.most = most if self.reads.most is None else min(self.reads.most, most)
            return None if calls.keeps and not free else (calls.run, result)
        return calls.flat_if_many(checks=True), result

    def _kept_copies(self, node: Node, standins: Sequence[Strided], root: bool) -> list[int] | None:
        """Return the bytes of each operand of a product that autograd keeps as it is copied for another shape.

        The copy of a computed value is kept in place of the value, which takes as many bytes. Return None if a view is
        copied, in place of which the plan says that its base is kept, or if copies for unit strides would be kept.
        """
        planned = node.op.with_layouts(layout_of(x.shape, x.strides) for x in standins)
        form, kept, out = einsum.recorded_form(planned, root), [], node.op.spec.output
        turned = form.matrices[2] != known_product(node.op.spec).matrices[2]
        by_einsum = turned or einsum.one_call(node.op, standins, True) is not None
        parts = zip(node.children, standins, standins[::-1], node.op.spec.inputs, form.matrices[:2], strict=True)
        for child, x, other, term, groups in parts:
            reshaped, strided = copies_of(x, term, groups)
            size = math.prod(x.shape) * itemsize(node.op.dtype)
            if isinstance(child, Node) and stock_kind(child.op) not in ("view", "broadcast", "diagonal"):
                continue
            if (reshaped and not isinstance(child, Leaf)) or (strided and not by_einsum):
                return None
            # The order in which einsum views axes as one.
            ordered = [sorted(group, key=out.index) if {*group} <= {*out} else [*group] for group in groups]
            alike = ordered == [*map(list, groups)] or copies_of(x, term, ordered)[0]
            is_small = self.records and self.indexed and size <= MOST_EXTRA_COPY
            if reshaped and other.requires_grad and not (alike or is_small):
                return None
            if reshaped and other.requires_grad:
                kept.append(size)
        return kept
