"""What the stock evaluation copies if arrays have strides, and the layout in memory of its result.

It goes through a step as `stock` does, with layouts instead of arrays. A take through several dimensions, and a segment
sum, view these dimensions as one. A product views each group of axes as one dimension, and needs a stride of 1 along
one of the two matrix dimensions. Where there is no such view, a copy is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.backends.common.stock import is_swapped
from planner.cost.layout import Layout, flattens, neighbours, permuted, reordered, scattered, without_gaps
from planner.language.cached import cached_by_step
from planner.language.spec import Gather, Spec, Term, indexed_dims, plain_axes, term_axes, term_gathers
from planner.program.forms import ProductForm, inner_product, known_product, product_form
from planner.program.ops import Cast, Op


@cached_by_step
def stock_layout(op: Op) -> tuple[int, Layout | None]:
    """Return how many elements are copied only to change their shape, and the layout of the result."""
    spec = op.spec
    layouts = op.layouts or (None,) * len(spec.inputs)
    if isinstance(op, Cast):
        keeps_order = layouts[0] is None or not layouts[0].repeated
        return 0, without_gaps(layouts[0]) if keeps_order else scattered(spec.output_shape)
    if (form := product_form(spec)) is not None:  # nothing is taken, nor summed alone
        copied = sum(product_copies(form, spec, layouts)) if form.contracted else 0
        return copied, _product_layout(form, spec)
    copied, read = 0, []
    for number, layout in enumerate(layouts):
        elements, axes, layout = _read(number, layout, spec)
        copied += elements
        read.append((axes, layout))
    if len(read) == 1:
        ((axes, layout),) = read
        elements, layout = _written(axes, layout, spec)
        return copied + elements, layout
    (first, _), (second, _) = read
    inner = inner_product(spec, (first, second))
    axes = term_axes(inner.output)
    form = known_product(inner)
    if form.contracted:
        copied += sum(product_copies(form, inner, tuple(layout for _, layout in read)))
    layout = _product_layout(form, inner)
    if axes == spec.output:
        return copied, layout
    elements, layout = _written(axes, layout, spec)
    return copied + elements, layout


def _product_layout(form: ProductForm, spec: Spec) -> Layout | None:
    """Return how the result of a product lies in memory."""
    if not form.contracted:
        return None
    free = (*form.right, *form.left) if is_swapped(form, spec) else (*form.left, *form.right)
    order = (*form.batch, *free)
    return None if order == spec.output else reordered(order, spec.output, spec)


@cached_by_step
def product_copies(form: ProductForm, spec: Spec, layouts: tuple[Layout | None, ...]) -> tuple[int, int]:
    """Return how many elements of each of its operands a product of matrices copies."""
    of_a, of_b, _ = form.matrices
    (a, b), (layout_a, layout_b) = spec.inputs, layouts
    return matrix_copies(a, layout_a, of_a, spec), matrix_copies(b, layout_b, of_b, spec)


def scattered_vectors(form: ProductForm, spec: Spec, layouts: Sequence[Layout | None]) -> list[int]:
    """Return the number of elements of each operand that is a batch of vectors with a stride other than 1, else 0."""
    elements, (_, m, n, k) = [0, 0], form.sizes
    for number, (side, free) in enumerate(((m, form.left), (n, form.right))):
        if (side == 1) != (k == 1):
            close = neighbours(spec.inputs[number], layouts[number], spec)
            if close not in free and close not in form.contracted:
                elements[number] = spec.elements[number]
    return elements


def matrix_copies(term: Term, layout: Layout | None, groups: Sequence[Sequence[str | Gather]], spec: Spec) -> int:
    """Return how many elements of an operand are copied to make it a batch of matrices.

    Nothing is copied if each group can be viewed as one dimension, rows or columns are contiguous, and no two rows
    share elements. Vectors in a batch are copied one at a time.
    """
    wide, (batch, *matrix) = spec.wide, groups
    repeated = {term[d] for d in layout.repeated} if layout is not None else ()
    close = neighbours(term, layout, spec)
    kept, whole = False, True  # whether the matrix has elements that are no neighbours, and all its groups have some
    if flattens(term, layout, groups, spec) and not (repeated and any([e in repeated for g in matrix for e in g])):
        for group in matrix:
            if close in group:
                return 0
            has_any = any([e in wide for e in group])
            kept, whole = kept or has_any, whole and has_any
        if not kept:
            return 0
    elements = math.prod(spec.shape(term))
    return elements if whole or not elements else elements // math.prod(map(spec.size, batch))


def _read(number: int, layout: Layout | None, spec: Spec) -> tuple[int, tuple[str, ...], Layout | None]:
    """Return how many elements are copied to read an input, its axes in the product, and their layout."""
    term = spec.inputs[number]
    plain = plain_axes(term)
    repeated = [e for e in dict.fromkeys(plain) if plain.count(e) > 1]
    # A diagonal becomes the last dimension.
    entries = (*(e for e in term if e not in repeated), *repeated)
    if repeated:
        layout = scattered(spec.shape(entries))
    gathers = term_gathers(entries)
    copied, axes = 0, term_axes(entries)
    if gathers:
        rows = term_axes(gathers)
        indexed = tuple(entries[d] for d in indexed_dims(entries))
        if len(set(entries)) < len(entries):  # one gather in two dimensions
            copied = math.prod(spec.shape(entries)) if len(indexed) > 1 else 0
        elif len(indexed) > 1 and not flattens(entries, layout, [indexed], spec):
            copied = math.prod(spec.shape(entries))
        axes = (*rows, *(str(e) for e in entries if e not in indexed))
        layout = None
    others = {axis for place, other in enumerate(spec.terms) if place != number for axis in term_axes(other)}
    left = tuple(axis for axis in axes if axis in others)
    return copied, left, layout if left == axes else None


def _written(axes: tuple[str, ...], layout: Layout | None, spec: Spec) -> tuple[int, Layout | None]:
    """Return how many elements are copied to write a value with these axes into the result, and the result's layout."""
    term = spec.output
    plain = plain_axes(term)
    rows_all = term_axes(term_gathers(term))
    missing = tuple(axis for axis in dict.fromkeys((*rows_all, *plain)) if axis not in axes)
    repeated = {e for e in plain if plain.count(e) > 1}
    indexed = indexed_dims(term)
    rest = [d for d in range(len(term)) if d not in indexed]
    wide = any(spec.size(axis) != 1 for axis in missing)
    if not indexed:
        if wide:
            return 0, scattered(spec.output_shape)
        # The missing axes have size 1 here, and do not appear in a layout.
        return 0, permuted(layout, [axes.index(str(e)) if e in axes else -1 for e in term], spec.output_shape)
    rows = tuple(dict.fromkeys([*rows_all, *(e for e in plain if e in repeated)]))
    copied = 0
    if len(rows) != 1 and (wide or not flattens(axes, layout, [rows], spec)):
        copied = math.prod(spec.shape((*rows, *(str(term[d]) for d in rest))))
    back = [(*indexed, *rest).index(d) for d in range(len(term))]
    return copied, permuted(None, back, spec.output_shape)
