"""Products of two operands by torch's own einsum and `bmm`: what they copy, and when they take long."""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.stock import SMALL_MATRIX, Product, is_swapped
from planner.backends.common.stock_layout import matrix_copies, product_copies, scattered_vectors
from planner.backends.torch.products.batches import has_few_neighbours
from planner.backends.torch.strides import STRIDE_OPS, Strided, copies_of
from planner.cost.device import Device
from planner.cost.figures import StepCost, Work
from planner.cost.layout import flattens, layout_of, neighbours
from planner.language.dtypes import HALF_TYPES, itemsize
from planner.language.spec import Spec, Term, term_gathers
from planner.program.calls import PreparedRun, Run
from planner.program.forms import ProductForm, known_product, product_form
from planner.program.implementations import Implementation
from planner.program.ops import Einsum, Op, joint_elements
from planner.program.tree import Leaf, Node, Tree

_OPERATORS: Any = torch._C._VariableFunctions
_LETTERS = string.ascii_uppercase + string.ascii_lowercase  # those of torch's einsum, in its order
MOST_LETTERS = len(_LETTERS)
# Torch multiplies scattered matrices as they lie up to so many multiplications: 13 us for 19 at 4,608 of them, 38 for
# 17 at 32,768. Vectors take longer, 55 us for 11 at 65,536 (one core of an AMD EPYC, torch 2.13, 2026-11-28).
_MOST_SCATTERED, _MOST_SCATTERED_VECTORS = 2**14, 2**12
EINSUM = "einsum"
# Each matrix of a batch that torch copies one at a time takes so long besides: 3 to 7 us, with matrices of 8 x 8 to
# 50 x 40 (one core of an AMD EPYC 7003, torch 2.13, 2026-11-30). Smaller products than `SMALL_MATRIX` copy nothing.
_MATRIX_SECONDS = 5e-6
# Matrices of at least so many rows and columns, and at most so many terms. With 16 to 128 columns autograd of `mm` was
# as fast or faster (8,192 and 16,384 rows, 64 to 256 terms).
_LONG_ROWS, _MOST_TERMS, _LEAST_COLUMNS = 2**13, 512, 256
# A gradient of fewer multiplications is added up sooner than a Function is called, however it lies.
_MOST_TURNED = 2**15


def copied_form(op: Op) -> ProductForm | None:
    """Return the form of a product if torch would copy one of its operands in their present layouts, else None."""
    if not isinstance(op, Einsum):
        return None
    form = product_form(op.spec)
    if form is None or not form.contracted or not any(product_copies(form, op.spec, op.layouts or (None, None))):
        return None
    return form


def einsum_copies(op: Op) -> tuple[int, ...]:
    """Return, for each input, the bytes of the copy of it that `torch.bmm` is given, and that autograd then saves."""
    return tuple(whole for whole, _ in _einsum_copies(op)) or (0,) * len(op.spec.inputs)


def _einsum_copies(op: Op) -> list[tuple[int, int]]:
    """Return, for each input of a product, the bytes of two copies: for `torch.bmm`, and within it at any moment.

    The first makes the input a batch of matrices. Matrices without a stride of 1 are copied one at a time. Torch views
    axes of the result as one in its order, and summed ones in that of their letters.
    """
    form = product_form(op.spec) if isinstance(op, Einsum) else None
    if form is None or not form.contracted:
        return []
    form = _einsum_form(form, op.spec)
    layouts, size = op.layouts or (None, None), itemsize(op.dtype)
    if not any(product_copies(form, op.spec, layouts)):
        return [(0, 0), (0, 0)]
    copies = []
    for term, layout, groups in zip(op.spec.inputs, layouts, form.matrices[:2], strict=True):
        if not matrix_copies(term, layout, groups, op.spec):
            copies.append((0, 0))
        elif not flattens(term, layout, groups, op.spec):
            copies.append((size * math.prod(op.spec.shape(term)), 0))
        else:
            copies.append((0, size * math.prod(op.spec.size(e) for group in groups[1:] for e in group)))
    return copies


def _einsum_form(form: ProductForm, spec: Spec) -> ProductForm:
    """Return a product with the axes of each group in torch's order: the result's, and summed ones by their letters."""
    batch, left, right = (tuple(sorted(group, key=spec.output.index)) for group in form.matrices[2])
    return dataclasses.replace(form, batch=batch, left=left, right=right, contracted=tuple(sorted(form.contracted)))


def recorded_form(op: Op, last: bool = False) -> ProductForm:
    """Return a product in the form in which autograd records it.

    If the axes of an operand can be viewed as matrices, but without a stride of 1, `bmm` copies these one at a time,
    and again for the gradient of the other operand. In torch's order of summed axes einsum may have to copy the operand
    as a whole, and autograd keeps that copy. Then this is einsum's form: 16 products of 64 x 16 by 64 x 128 take 290 us
    for 530 with gradients (`bdmj,mbij->jdi`, one core of an AMD EPYC 9005, torch 2.13, 2026-11-30). It also is where
    einsum copies less, as it may of operands that are not row-major.

    Args:
        op: the step.
        last: whether no step reads the result, which then may lie otherwise: see `last_call`.
    """
    spec, layouts = op.spec, op.layouts or (None, None)
    form = known_product(spec)
    is_short = len(spec.axes) <= MOST_LETTERS and 1 not in spec.by_axis.values()
    own = _einsum_form(form, spec)
    if not (form.contracted and is_short) or (own.matrices[2] != form.matrices[2] and not last):
        return form
    operands = list(zip(spec.inputs, layouts, form.matrices[:2], own.matrices[:2], strict=True))
    viewed = [flattens(term, layout, groups, spec) for term, layout, groups, _ in operands]
    viewed_then = [flattens(term, layout, groups, spec) for term, layout, _, groups in operands]
    if viewed == viewed_then:
        return form
    copied, copied_then = (
        sum(n for n, v in zip(spec.elements[:2], each, strict=True) if not v) for each in (viewed, viewed_then)
    )
    apart = [matrix_copies(term, layout, groups, spec) > 0 for term, layout, groups, _ in operands]
    copies_once = any(a and v and not then for a, v, then in zip(apart, viewed, viewed_then, strict=True))
    return own if copies_once or copied_then < copied else form


def einsum_cost(op: Op, cost: StepCost, device: Device) -> StepCost:
    """Return what torch's own functions take for a step whose stock implementation takes `cost`.

    On a CPU they copy less: `torch.bmm` copies matrices one at a time, and the gradient of rows that were read is added
    up as it lies.
    """
    if device.kind != "cpu":
        return cost
    if len(op.spec.inputs) == 1 and term_gathers(op.spec.output):
        moved, copied, scratch = cost.bytes_moved, cost.copied_bytes, cost.scratch_bytes
        return cost._replace(bytes_moved=moved - 2 * copied, copied_bytes=0, scratch_bytes=scratch - copied)
    if len(op.spec.inputs) == 2 and (copies := _einsum_copies(op)):
        return cost._replace(scratch_bytes=cost.scratch_bytes - cost.copied_bytes + sum(map(sum, copies)))
    return cost


def einsum_row(product: Implementation) -> Implementation:
    """Return the row that multiplies by torch's own einsum where that needs less memory than the stock row `product`.

    Einsum copies matrices without a stride of 1 one at a time. The stock row copies the operand as a whole, which is
    faster. So plans take this row where memory counts.
    """

    def supports(op: Op) -> str | None:
        if (reason := product.supports(op)) is not None:
            return reason
        spec, layouts, form = op.spec, op.layouts or (None, None), known_product(op.spec)
        if op.dtype == "bool" or len(spec.axes) > MOST_LETTERS:
            return "einsum takes no bool, and at most 52 axes"
        if 1 in spec.by_axis.values():
            return "einsum has rules of its own for axes of size 1"
        copied = sum(map(max, product_copies(form, spec, layouts), scattered_vectors(form, spec, layouts)))
        return None if _einsum_scratch(op) < copied * itemsize(op.dtype) else "einsum copies as much"

    def cost(op: Op, device: Device) -> StepCost:
        found, (batch, m, n, k) = product.cost(op, device), known_product(op.spec).sizes
        one_at_a_time = any(each for _, each in _einsum_copies(op)) and m * n * k >= SMALL_MATRIX
        seconds = batch * _MATRIX_SECONDS if one_at_a_time else 0.0
        copied = found.copied_bytes if _einsum_scratch(op) else 0
        lean = einsum_cost(op, found, device)
        return lean._replace(picoseconds=found.picoseconds + math.ceil(1e12 * seconds), copied_bytes=copied)

    def prepare(op: Op) -> Run:
        call, _ = lean_call(op)
        return lambda inputs, index: (call(*inputs),)

    return dataclasses.replace(
        product,
        name=EINSUM,
        supports=supports,
        cost=cost,
        run=PreparedRun(prepare),
        layouts=lambda op: (layout_of(op.spec.output_shape, lean_call(op)[1]),),
        stock=False,
        kinds=("cpu",),
        inexact=(),
        slower_than=product.name,
        values_only=True,
    )


def _einsum_scratch(op: Op) -> int:
    """Return the bytes of the copies that torch's einsum has at the same time."""
    return sum(map(sum, _einsum_copies(op)))


def lean_call(op: Op) -> tuple[Product, tuple[int, ...]]:
    """Return torch's own einsum of a product, and the strides of its result.

    Einsum is asked for a result with the axes of the first factor before those of the second: for another order it may
    multiply them the other way round. The factors change places where the output begins with axes of the second.
    """
    form, swapped, output = _form_of_call(op.spec)
    return _permuted_call(form, op.spec, output, swapped), _result_strides(form, op.spec, swapped)


def _form_of_call(spec: Spec) -> tuple[ProductForm, bool, Term]:
    """Return the form of a product in `lean_call`, whether the second operand is the first factor, and the output."""
    form = _einsum_form(known_product(spec), spec)
    swapped = is_swapped(form, spec)
    free = (*form.right, *form.left) if swapped else (*form.left, *form.right)
    return form, swapped, (*form.batch, *free)


def has_vectors(form: ProductForm, more_than: int = 0) -> bool:
    """Whether a product multiplies a batch of matrices by vectors, in more than so many multiplications in all.

    For the gradients of vectors autograd multiplies matrices by columns. That takes 86 us where rows take 9, for 16
    matrices of 512 x 16 (one core of an AMD EPYC, torch 2.13, 2026-11-27). Small matrices do not count: torch
    multiplies them in a loop, however they lie.
    """
    batch, m, n, k = form.sizes
    return batch > 1 and 1 in (m, n) and m * n * k >= SMALL_MATRIX and batch * m * n * k > more_than


def turns_gradient(op: Op, number: int) -> bool:
    """Whether autograd computes the gradient of an operand in another order than the operand has.

    It does so for a large batch of matrices that is multiplied by vectors, if the vectors come first and the summed
    axis of the matrices is innermost. To add up rows of such a gradient by index takes 191 us for 14, with 64 rows of
    4 x 32 x 16 (one core of an AMD EPYC 9005, torch 2.13, 2026-11-30).

    Args:
        op: the step.
        number: the number of the operand. It counts as row-major, as rows that were taken are.
    """
    form = product_form(op.spec)
    if form is None or not has_vectors(form, _MOST_TURNED):
        return False
    own, others = form.sizes[1 + number], form.sizes[2 - number]
    return others == 1 < own and neighbours(op.spec.inputs[number], None, op.spec) in form.contracted


def with_doubt(parts: list[Work], device: Device, part: float) -> list[Work]:
    """Return what a row does, and a part of its time more.

    It is only chosen if it is predicted to be clearly faster than `torch.einsum`'s own way: of 991 products of public
    models, 29 took more than 1.15 times as long as that in the row that was chosen, and 18 so (one core of an AMD EPYC
    with AVX-512, torch 2.13, 2026-11-30).
    """
    return [*parts, Work(seconds=part * sum(map(device.work_seconds, parts)))]


def has_slow_gradients(op: Op, standins: Sequence[Strided]) -> bool:
    """Return whether autograd takes longer for some gradient of `mm`, or of a batch, than for einsum's.

    Gradients with few columns take longer than those with few rows: those of short sums of two matrices (44 us for 56
    to 275, by their strides, with 576 x 256 by 256 x 9, one core of an AMD EPYC, torch 2.13, 2026-11-27), and those of
    batched vectors. Of a long first matrix that lies as columns autograd of `mm` computes a gradient that lies so too:
    51 ms for 37, with 32,768 x 64 by 64 x 512 (one core of an AMD EPYC 7003, torch 2.13, 2026-12-01).
    """
    form = known_product(op.spec)
    batch, m, n, k = form.sizes
    if has_vectors(form) or (batch == 1 and k <= 16 and 2 * k <= min(m, n) and m * n * k > 2**15):
        return True
    first = int(is_swapped(form, op.spec))
    rows, lies, long, columns = (form.left, form.right)[first], standins[first], *((m, n), (n, m))[first]
    is_long = long >= _LONG_ROWS and k <= _MOST_TERMS and columns >= _LEAST_COLUMNS
    if batch > 1 or not (is_long and lies.requires_grad):
        return False
    return neighbours(op.spec.inputs[first], layout_of(lies.shape, lies.strides), op.spec) in rows


def einsum_call(form: ProductForm, spec: Spec, output: Term, swapped: bool) -> Product:
    """Return torch's own einsum of a product, which multiplies matrices in the order of its operands.

    Args:
        form: the groups of axes; summed ones are viewed as one in its order.
        spec: the spec.
        output: the order of the axes of the result.
        swapped: whether the second operand comes first.
    """
    # The order of summed axes in memory is that of their letters.
    letters = dict(zip(dict.fromkeys((*form.contracted, *spec.axes)), _LETTERS, strict=False))
    first, second, out = ("".join(letters[str(axis)] for axis in term) for term in (*spec.inputs, output))
    einsum = _OPERATORS.einsum  # `torch.einsum` without its look for overrides and for a path
    equation = f"{second},{first}->{out}" if swapped else f"{first},{second}->{out}"
    return (lambda a, b: einsum(equation, (b, a))) if swapped else (lambda a, b: einsum(equation, (a, b)))


def one_call(op: Op, standins: Sequence[Strided], recorded: bool) -> Callable[..., Tensor] | None:
    """Return torch's own einsum of a product, in one call, if it makes the same copies and strides; else None.

    It takes less time than three calls that make views, but autograd records more of it. There it is of use if
    matrices lack unit strides, because it does not keep the copies that `bmm` makes of them; or for short sums and
    batched vectors, because one of two gradients of `mm` at least, and of `bmm` one, is a product with few columns.
    It multiplies [batch, left, contracted] by [batch, contracted, right]; the axes of a group have the order of the
    output, or of their letters. So the letters are chosen, and the operands swapped, as the stock evaluation orders
    axes. Vectors come first: 64 x 128 x 16 by 64 x 16 takes 191 us for 458 with gradients (AMD EPYC, 2026-11-29),
    if the output begins with the batch: else they take 3.4 times einsum's time (Xeon). Without gradients groups of
    another order than the output's are permuted.
    """
    spec, form = op.spec, known_product(op.spec)
    operands = zip(standins, spec.inputs, form.matrices[:2], strict=True)
    scattered = any(copies_of(*operand)[1] for operand in operands)
    few_calls = count_matrix_views(form, spec) < 3
    # Few multiplications take less time than copies for unit strides.
    most = _MOST_SCATTERED_VECTORS if 1 in form.sizes[1:3] else _MOST_SCATTERED
    alike = has_slow_gradients(op, standins) if recorded else joint_elements(spec) <= most
    own = recorded_form(op.with_layouts(layout_of(x.shape, x.strides) for x in standins)) if recorded else form
    is_long = len(spec.axes) > MOST_LETTERS
    if own != form:
        form = own
    elif is_long or (scattered != recorded and not alike) or (few_calls and not recorded):
        return None
    swapped, output = _is_swapped(form, spec, standins, recorded), spec.output
    if any(sorted(group, key=output.index) != list(group) for group in form.matrices[2]):
        if recorded:
            return None
        output = (*form.batch, *form.right, *form.left) if swapped else (*form.batch, *form.left, *form.right)
    free = tuple(axis for axis in output if axis not in form.batch)
    if not swapped and free != (*form.left, *form.right) and 1 in spec.by_axis.values():
        return None  # einsum has rules of its own for axes of size 1
    return _permuted_call(form, spec, output, swapped)


def _permuted_call(form: ProductForm, spec: Spec, output: Term, swapped: bool) -> Product:
    """Return the call of `einsum_call`, whose result is permuted from `output` to the spec's order of axes."""
    call = einsum_call(form, spec, output, swapped)
    if output == spec.output:
        return call
    dims = tuple(output.index(axis) for axis in spec.output)
    return lambda a, b: call(a, b).permute(dims)


def _is_swapped(form: ProductForm, spec: Spec, standins: Sequence[Strided], recorded: bool) -> bool:
    """Return whether torch's einsum is given the second operand first."""
    leads = {*spec.output[: len(form.batch)]} == {*form.batch}
    few = has_few_neighbours(form, spec, [layout_of(x.shape, x.strides) for x in standins])
    # As rows, `bmm` would copy vectors without a stride of 1 one at a time.
    cloned = recorded and copies_of(standins[1], spec.inputs[1], form.matrices[1])[1]
    return is_swapped(form, spec, vectors_first=(leads or not recorded) and not (few or cloned))


def last_call(op: Op, standins: Sequence[Strided]) -> tuple[Callable[..., Tensor], tuple[int, ...]] | None:
    """Return torch's own einsum of a plan's last product, and the strides of its result, if these are not the plan's.

    It is of use where autograd records a product in einsum's form, see `recorded_form`. Else None.
    """
    spec, form = op.spec, recorded_form(op.with_layouts(layout_of(x.shape, x.strides) for x in standins), last=True)
    if form.matrices[2] == known_product(spec).matrices[2]:
        return None
    swapped = _is_swapped(form, spec, standins, recorded=True)
    return einsum_call(form, spec, spec.output, swapped), _result_strides(form, spec, swapped)


def _result_strides(form: ProductForm, spec: Spec, swapped: bool) -> tuple[int, ...]:
    """Return the strides of the result of torch's einsum, whose second operand comes first if `swapped`."""
    order = (*form.batch, *form.right, *form.left) if swapped else (*form.batch, *form.left, *form.right)
    return STRIDE_OPS.permute(Strided.new(spec.shape(order)), [order.index(str(e)) for e in spec.output]).strides


def summed_pair(
    node: Node, rows: Mapping[Spec, str], standins: Sequence[Strided], strides: Sequence[int] | None
) -> Product | None:
    """Return one call of torch's einsum for sums of two operands and their product; None if that is no such step.

    Einsum computes these sums too. There is no call if its result would lie otherwise, or if it would copy operands
    that the plan does not copy in this way.

    Args:
        node: the product, which reads the sums.
        rows: the implementations of the steps.
        standins: stand-ins of the factors.
        strides: how the result must lie; None if it may lie as einsum's does.
    """
    spec, sizes, terms, leaves = node.op.spec, dict(node.op.spec.sizes), list[Term](), list[Tree]()
    for child, term in zip(node.children, spec.inputs, strict=True):
        summed = isinstance(child, Node) and rows.get(child.op.spec) == "sum"
        if isinstance(child, Node) and summed:
            sizes |= child.op.spec.by_axis
            (leaf,), (term,) = child.children, child.op.spec.inputs
        leaves.append(leaf if summed else child)
        terms.append(term)
    planned = node.op.with_layouts(layout_of(x.shape, x.strides) for x in standins)
    is_lean = rows.get(spec) == EINSUM
    plain = rows.get(spec) in ("matmul", EINSUM) and node.op.dtype != "bool" and len(sizes) <= MOST_LETTERS
    if not plain or leaves != [Leaf(0), Leaf(1)] or terms == [*spec.inputs] or 1 in sizes.values():
        return None
    form, swapped, output = _form_of_call(spec)
    if not is_lean:
        swapped, output = False, spec.output
    strides_of_call = _result_strides(form, spec, swapped)
    if strides not in (None, strides_of_call) or (_einsum_scratch(planned) and not is_lean):
        return None
    whole = Spec((terms[0], terms[1]), spec.output, tuple(sorted(sizes.items())))
    return _permuted_call(form, whole, output, swapped)


def count_matrix_views(form: ProductForm, spec: Spec) -> int:
    """Return how many calls the stock evaluation of a product makes for views, other than the product itself."""
    count = 0
    for term, groups in zip((*spec.inputs, spec.output), form.matrices, strict=True):
        count += tuple(axis for group in groups for axis in group) != term
        count += any(len(group) != 1 for group in (groups if form.batch else groups[1:]))
    return count


def least_of_product(op: Op, device: Device, launches: float) -> StepCost:
    """Return the least cost of a product in so many launches, each at no higher rate than the product as a whole."""
    form = product_form(op.spec)
    if form is None:
        return StepCost()
    batch, m, n, k = form.sizes
    most = float(device.most_product_rate(min(m, n, k), op.dtype))
    seconds = 2 * batch * m * n * k / most if form.contracted else 0.0
    return StepCost(picoseconds=int(1e12 * (seconds + launches * device.launch_seconds)))


def refuses_partial_sums(op: Op) -> str | None:
    """Return why partial results in the op's dtype cannot be added up: they would be rounded."""
    return f"{op.dtype} would be rounded before it is summed" if op.dtype in (*HALF_TYPES, "bool") else None
