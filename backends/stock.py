"""Any step, from a framework's ordinary array functions: take, multiply, sum, add at.

This is what every backend falls back on, and the NumPy backend's only way. It builds gathered operands; the special
rows of a table exist to avoid that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from planner.lower import ProductForm, product_form
from planner.spec import Gather, Spec, Term, term_axes

__all__ = ["ArrayOps", "View", "evaluate", "matmul_product", "put_term", "take_term"]


class ArrayOps(Protocol):
    """The array functions that the stock evaluation is written in."""

    def permute(self, x: Any, dims: Sequence[int]) -> Any:
        """Reorder dimensions; a view."""

    def diagonal(self, x: Any, first: int, second: int) -> Any:
        """Diagonal of two dimensions, moved to the end; a view where the framework has views."""

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        """Broadcast to a shape."""

    def sum(self, x: Any, dims: Sequence[int]) -> Any:
        """Sum over dimensions, in the dtype of x, half types accumulated in float32."""

    def product(self, form: ProductForm, a: Any, b: Any, spec: Spec) -> Any:
        """A binary step without gathers; `matmul_product` does it from `permute` and a batched product."""

    def iota(self, size: int, like: Any) -> Any:
        """0, 1, ..., size - 1 as indices on the device of `like`."""

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        """x[index] over the leading dimensions; the index arrays broadcast with each other."""

    def add_at(self, shape: Sequence[int], index: Sequence[Any], values: Any) -> Any:
        """Zeros of a shape with `values` added at leading indices, duplicates added up in order."""

    def select(self, mask: Any, x: Any, otherwise: float) -> Any:
        """X where the mask holds, else a constant."""

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        """Zeros of the dtype and device of `like`."""


def _broadcast_shape(letters: Sequence[str], rows: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    return [sizes[axis] if axis in letters else 1 for axis in rows]


def _indices(
    ops: ArrayOps, term: Term, dims: Sequence[int], rows: tuple[str, ...], spec: Spec,
    index: Mapping[Gather, Any], like: Any, guarded: bool,
) -> tuple[list[Any], Any]:  # fmt: skip
    """Index arrays of some dimensions of a term, shaped over the row axes, and where all of them are in range."""
    sizes = dict(spec.sizes)
    arrays, valid = [], None
    for dim in dims:
        entry = term[dim]
        if isinstance(entry, Gather):
            own = tuple(dict.fromkeys(entry.axes))
            q = index[entry]
            letters = list(entry.axes)
            while len(letters) > len(set(letters)):  # a repeated axis in a bracket: the diagonal
                axis = next(a for a in letters if letters.count(a) > 1)
                i, j = [d for d, a in enumerate(letters) if a == axis][:2]
                q = ops.diagonal(q, i, j)
                letters = [a for d, a in enumerate(letters) if d not in (i, j)] + [axis]
            order = [letters.index(axis) for axis in rows if axis in own]
            q = ops.permute(q, order).reshape(_broadcast_shape(own, rows, sizes))
            if guarded:  # a value equal to the size means: no row
                here = q < entry.size
                q = ops.select(here, q, 0)
                valid = here if valid is None else valid & here
        else:
            q = ops.iota(sizes[entry], like).reshape(_broadcast_shape((entry,), rows, sizes))
        arrays.append(q)
    return arrays, valid


def take_term(
    ops: ArrayOps, x: Any, term: Term, spec: Spec, index: Mapping[Gather, Any], guarded: bool
) -> tuple[Any, tuple[str, ...]]:
    """Read an operand through its term: gathers taken, diagonals of repeated axes; returns distinct axes."""
    entries = list(term)
    plain = [e for e in entries if isinstance(e, str)]
    while len(plain) > len(set(plain)):
        axis = next(e for e in plain if plain.count(e) > 1)
        i, j = [d for d, e in enumerate(entries) if e == axis][:2]
        x = ops.diagonal(x, i, j)
        entries = [e for d, e in enumerate(entries) if d not in (i, j)] + [axis]
        plain = [e for e in entries if isinstance(e, str)]
    gathers = [e for e in entries if isinstance(e, Gather)]
    if not gathers:
        return x, tuple(plain)
    rows = term_axes(tuple(gathers))
    indexed = [d for d, e in enumerate(entries) if isinstance(e, Gather) or e in rows]
    rest = [d for d in range(len(entries)) if d not in indexed]
    x = ops.permute(x, [*indexed, *rest])
    sizes = dict(spec.sizes)
    axes = (*rows, *(str(entries[d]) for d in rest))
    if math.prod(x.shape) == 0 or any(sizes[axis] == 0 for axis in axes):
        return ops.zeros([sizes[axis] for axis in axes], x), axes
    arrays, valid = _indices(ops, tuple(entries), indexed, rows, spec, index, x, guarded)
    x = ops.take(x, arrays)
    if guarded:
        x = ops.select(valid.reshape([*valid.shape, *[1] * len(rest)]), x, 0)
    return x, axes


def put_term(
    ops: ArrayOps, x: Any, axes: tuple[str, ...], term: Term, spec: Spec, index: Mapping[Gather, Any], guarded: bool
) -> Any:
    """Write a value with distinct axes into a result: scatters add, repeated axes go on the diagonal."""
    sizes = dict(spec.sizes)
    rows_all = term_axes(tuple(e for e in term if isinstance(e, Gather)))
    plain = [e for e in term if isinstance(e, str)]
    wanted = tuple(dict.fromkeys([*rows_all, *plain]))
    if missing := [axis for axis in wanted if axis not in axes]:
        x = ops.expand(x, [*(sizes[a] for a in missing), *x.shape])
        axes = (*missing, *axes)
    repeated = {e for e in plain if plain.count(e) > 1}
    indexed = [d for d, e in enumerate(term) if isinstance(e, Gather) or e in repeated or e in rows_all]
    if not indexed:
        return ops.permute(x, [axes.index(str(e)) for e in term])
    rest = [d for d in range(len(term)) if d not in indexed]
    rows = tuple(dict.fromkeys([*rows_all, *(e for e in plain if e in repeated)]))
    x = ops.permute(x, [axes.index(a) for a in (*rows, *(str(term[d]) for d in rest))])
    shape = spec.shape(tuple(term[d] for d in (*indexed, *rest)))
    if math.prod(x.shape) == 0 or math.prod(shape) == 0:
        out = ops.zeros(shape, x)
    else:
        arrays, valid = _indices(ops, term, indexed, rows, spec, index, x, guarded)
        if guarded and valid is not None:
            x = ops.select(valid.reshape([*valid.shape, *[1] * len(rest)]), x, 0)
        out = ops.add_at(shape, arrays, x)
    back = [0] * len(term)
    for position, dim in enumerate((*indexed, *rest)):
        back[dim] = position
    return ops.permute(out, back)


class View(NamedTuple):
    """A view of an array: its dimensions reordered, then in another shape; None leaves them as they are."""

    dims: tuple[int, ...] | None
    shape: tuple[int, ...] | None

    @staticmethod
    def of(order: Sequence[int], before: Sequence[int], after: Sequence[int]) -> View:
        """The view of an array of shape `before` that has shape `after`; what changes nothing is left out."""
        dims, permuted = tuple(order), tuple(before[dim] for dim in order)
        same = all(a == b for a, b in enumerate(dims))
        return View(None if same else dims, None if permuted == tuple(after) else tuple(after))

    def take(self, permute: Callable[[Any, Sequence[int]], Any], x: Any) -> Any:
        """View an array so; it is copied where its strides need that."""
        if self.dims is not None:
            x = permute(x, self.dims)
        return x if self.shape is None else x.reshape(self.shape)


class _Layout(NamedTuple):
    """How two arrays are viewed for a product, and its result for the output."""

    multiplied: bool
    swapped: bool
    views: tuple[View, View]
    result: View


@lru_cache(maxsize=16384)
def _layout(form: ProductForm, spec: Spec) -> _Layout:
    sizes = dict(spec.sizes)
    a, b, out = (tuple(str(e) for e in term) for term in spec.terms)

    def view(term: tuple[str, ...], order: Sequence[str], shape: Sequence[int]) -> View:
        return View.of([term.index(e) for e in order], [sizes[e] for e in term], shape)

    if not form.contracted:
        # The order of the output, with size 1 for the axes that an operand lacks and none for summed ones of size 1.
        first, second = (
            view(t, [*(e for e in out if e in t), *(e for e in t if e not in out)],
                 [sizes[e] if e in t else 1 for e in out])
            for t in (a, b)
        )  # fmt: skip
        return _Layout(True, False, (first, second), View(None, None))
    left, right = form.left, form.right
    swapped = out != (*form.batch, *left, *right) and out == (*form.batch, *right, *left)
    if swapped:
        a, left, b, right = b, right, a, left
    batch, m, n, k = (math.prod(sizes[axis] for axis in g) for g in (form.batch, left, right, form.contracted))
    order = (*form.batch, *left, *right)
    shape = tuple(sizes[axis] for axis in order)
    back = tuple(map(order.index, out))
    return _Layout(
        False, swapped,
        (view(a, (*form.batch, *left, *form.contracted), (batch, m, k)),
         view(b, (*form.batch, *form.contracted, *right), (batch, k, n))),
        # Here the shape comes first.
        View(None if back == tuple(range(len(back))) else back, None if shape == (batch, m, n) else shape),
    )  # fmt: skip


def matmul_product(
    matmul: Callable[[Any, Any], Any], multiply: Callable[[Any, Any], Any],
    permute: Callable[[Any, Sequence[int]], Any], form: ProductForm, a: Any, b: Any, spec: Spec,
) -> Any:  # fmt: skip
    """Multiply two arrays as one batched matrix product, or element by element where nothing is summed.

    The result is row-major where the output has the batch first and one operand's axes before the other's.

    Args:
        matmul: [batch, m, k] times [batch, k, n], half types accumulated in float32.
        multiply: product of arrays of as many dimensions that broadcast, row-major.
        permute: reorders dimensions.
        form: the groups of axes.
        a: the first operand.
        b: the second operand.
        spec: the step's spec.
    """
    multiplied, swapped, (first, second), result = _layout(form, spec)
    if swapped:
        a, b = b, a
    a, b = first.take(permute, a), second.take(permute, b)
    if multiplied:
        return multiply(a, b)
    out = matmul(a, b)
    if result.shape is not None:
        out = out.reshape(result.shape)
    return out if result.dims is None else permute(out, result.dims)


class _Plain(NamedTuple):
    """A step without gathers, diagonals and broadcasts: sums of what is private, a product, a permutation."""

    sums: tuple[tuple[int, ...], ...]
    form: ProductForm | None
    inner: Spec | None
    back: tuple[int, ...]


@lru_cache(maxsize=16384)
def _plain(spec: Spec) -> _Plain | None:
    if spec.gathers or any(len(set(term)) < len(term) for term in spec.terms):
        return None
    terms = [term_axes(term) for term in spec.inputs]
    if not set(spec.output) <= set().union(*terms):
        return None
    sums, kept = [], []
    for number, axes in enumerate(terms):
        others = set(term_axes(spec.output)).union(*terms[:number], *terms[number + 1 :])
        sums.append(tuple(dim for dim, axis in enumerate(axes) if axis not in others))
        kept.append(tuple(axis for axis in axes if axis in others))
    if len(kept) == 1:
        return _Plain(tuple(sums), None, None, tuple(map(kept[0].index, term_axes(spec.output))))
    # In the order of the output: nothing is permuted afterwards.
    inner = Spec((kept[0], kept[1]), spec.output, spec.sizes)
    return _Plain(tuple(sums), product_form(inner), inner, ())


def evaluate(
    ops: ArrayOps, spec: Spec, inputs: Sequence[Any], index: Mapping[Gather, Any], guarded: bool = True
) -> Any:
    """Compute any unary or binary spec: take, sum what is private, multiply, put."""
    plain = _plain(spec)
    if plain is None:
        return _evaluate(ops, spec, inputs, index, guarded)
    inputs = [ops.sum(x, dims) if dims else x for x, dims in zip(inputs, plain.sums, strict=True)]
    if plain.inner is None or plain.form is None:
        return ops.permute(inputs[0], plain.back)
    return ops.product(plain.form, inputs[0], inputs[1], plain.inner)


def _evaluate(ops: ArrayOps, spec: Spec, inputs: Sequence[Any], index: Mapping[Gather, Any], guarded: bool) -> Any:
    needed = set(term_axes(spec.output))
    values = []
    for term, x in zip(spec.inputs, inputs, strict=True):
        values.append(take_term(ops, x, term, spec, index, guarded))
    axes_of = [set(axes) for _, axes in values]
    for i, (x, axes) in enumerate(values):
        others = needed.union(*(axes_of[:i] + axes_of[i + 1 :]))
        if private := [d for d, axis in enumerate(axes) if axis not in others]:
            kept = tuple(axis for axis in axes if axis in others)
            values[i] = (ops.sum(x, private), kept)
    if len(values) == 1:
        x, axes = values[0]
    else:
        (a, axes_a), (b, axes_b) = values
        # In the order of the output as far as that has them: then nothing is permuted afterwards.
        order = (*(e for e in spec.output if isinstance(e, str)), *axes_a, *axes_b)
        axes = tuple(axis for axis in dict.fromkeys(order) if axis in needed and axis in {*axes_a, *axes_b})
        inner = Spec((axes_a, axes_b), axes, spec.sizes)
        form = product_form(inner)
        assert form is not None
        x = ops.product(form, a, b, inner)
    return put_term(ops, x, axes, spec.output, spec, index, guarded)
