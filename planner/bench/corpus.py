"""The corpus: einsum strings, and gathers followed by an einsum, from public model code, at three scales.

`corpus.csv` has a row for each. Its columns:

- `spec`: the contraction as `planner.contract` takes it; ellipses are written out. Rows with brackets say in one
  string what the code computes by an index and a product, or by a product and a scatter-add.
- `sizes`: the size of each axis at the scale "overhead", and of the dimension that each index array reads.
- `grow`: the letters that grow at larger scales: batches, tokens, edges. The others are fixed by the model.
- `stored`: for operands whose memory order differs from their axes, the axes of all operands as they are stored.
- `source`: the file. A path without a repository is in the Python package that its first folder names.

Example:
    >>> from planner.bench.corpus import corpus
    >>> rows = corpus("overhead")
    >>> row = next(row for row in rows if row.spec == "sec,sm->ecm")
    >>> row.shapes, row.source
    (((32, 4, 8), (32, 32)), 'deepspeedai/DeepSpeed deepspeed/moe/sharded_moe.py')
    >>> next(row for row in corpus("cache") if row.spec == "sec,sm->ecm").shapes
    ((256, 4, 64), (256, 32))
"""

from __future__ import annotations

import csv
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, get_args

import opt_einsum

from planner.language.parse import parse
from planner.language.spec import Gather, Spec, Term, term_axes
from planner.workloads import View, Workload

__all__ = ["SCALES", "Row", "Scale", "corpus", "gather_then_einsum"]

Scale = Literal["overhead", "cache", "memory"]
SCALES: tuple[Scale, ...] = get_args(Scale)
# All arrays of a row, what einsum makes on its path counted, take at most so many bytes, and its path so many FLOPs.
_BYTES = {"cache": 2**20, "memory": 2**25}
_FLOPS = {"cache": 2**25, "memory": 2**29}


@dataclasses.dataclass(frozen=True, slots=True)
class Row(Workload):
    """A row of the corpus at one scale; a workload with float32 operands that all take gradients.

    Attributes:
        field: where such models are used, such as "vision".
        grow: the letters whose sizes grow with the scale.
    """

    field: str = ""
    grow: str = ""


@cache
def corpus(scale: Scale) -> tuple[Row, ...]:
    """Return all rows at a scale.

    At "overhead" a framework's own einsum takes a few microseconds. At "cache" and "memory" the letters that grow are
    doubled in turn while all arrays fit in 1 MiB, or 32 MiB, and the FLOPs in 2^25, or 2^29.
    """
    with (pathlib.Path(__file__).parent / "corpus.csv").open(newline="") as file:
        return tuple(_grown(_row(columns), scale) for columns in csv.DictReader(file))


def _row(columns: dict[str, str]) -> Row:
    sizes = {letter: int(size) for letter, size in re.findall(r"([A-Za-z])(\d+)", columns["sizes"])}
    pools = {gather.array: sizes.pop(gather.array) for gather in parse(columns["spec"]).gathers}
    terms = columns["spec"].split("->")[0].split(",")
    stored = columns["stored"].split(",") if columns["stored"] else terms
    views = tuple(
        None
        if order == term
        else View((1,) * len(term), (0,) * len(term), (1,) * len(term), tuple(map(term.index, order)))
        for term, order in zip(terms, stored, strict=True)
    )
    name = f"{columns['spec']} stored as {columns['stored']}" if columns["stored"] else columns["spec"]
    return Row(
        name, columns["spec"], columns["source"], sizes, pools, field=columns["field"], grow=columns["grow"],
        views=views if any(views) else (),
    )  # fmt: skip


def _view(term: str, stored: str) -> View:
    """Return the view of an array whose memory holds the axes of a term in another order."""
    ones = (1,) * len(term)
    return View(ones, (0,) * len(term), ones, tuple(map(term.index, stored)))


def _grown(row: Row, scale: Scale) -> Row:
    if scale == "overhead":
        return row
    letters = list(row.grow)
    while letters:
        letter = letters.pop(0)
        doubled = row.resized(**{letter: 2 * {**row.sizes, **row.pools}[letter]})
        size, flops = _figures(doubled)
        if size <= _BYTES[scale] and flops <= _FLOPS[scale]:
            row = doubled
            letters.append(letter)
    return row


def _expanded(term: Term) -> tuple[str, ...]:
    """Return the axes of a term after its gathers, each once."""
    return tuple(dict.fromkeys(term_axes(term)))


def _plain(spec: Spec) -> tuple[str, ...]:
    return tuple("".join(_expanded(term)) for term in spec.terms)


def _figures(row: Row) -> tuple[int, float]:
    """Return the bytes of all arrays, gathered and intermediate ones counted, and the FLOPs of einsum's path."""
    *terms, out = _plain(row.parsed)
    shapes = [tuple(row.sizes[axis] for axis in term) for term in (*terms, out)]
    arrays = [*shapes, *(shape for term, shape in zip(row.parsed.inputs, row.shapes, strict=True) if _gathers(term))]
    elements = sum(map(math.prod, arrays)) + math.prod(row.output_shape) * bool(_gathers(row.parsed.output))
    _, path = opt_einsum.contract_path(f"{','.join(terms)}->{out}", *shapes[:-1], shapes=True)
    return 4 * (elements + int(path.largest_intermediate) * (len(terms) > 2)), float(path.opt_cost)


def _gathers(term: Term) -> list[Gather]:
    return [axis for axis in term if isinstance(axis, Gather)]


def gather_then_einsum(row: Row) -> Callable[..., Any]:
    """Return what a user writes without planner: index the operands, call the framework's einsum, add up the rows.

    The function takes torch or `jax.numpy`, the operands, and the index arrays by letter.
    """
    spec = row.parsed
    *terms, out = _plain(spec)
    equation = f"{','.join(terms)}->{out}"
    if not spec.gathers:
        return lambda xp, *operands: xp.einsum(equation, *operands)
    output = spec.output if _gathers(spec.output) else None
    shape = row.output_shape

    def call(xp: Any, *operands: Any, **arrays: Any) -> Any:
        taken = [
            x[_index(xp, term, row, arrays)] if _gathers(term) else x
            for x, term in zip(operands, spec.inputs, strict=True)
        ]
        result = xp.einsum(equation, *taken)
        if output is None:
            return result
        index = _index(xp, output, row, arrays)
        if xp.__name__ == "torch":
            return _add_rows(result, index, shape)
        return xp.zeros(shape, result.dtype).at[index].add(result)

    return call


def _index(xp: Any, term: Term, row: Row, arrays: dict[str, Any]) -> tuple[Any, ...]:
    """Return the index that takes, or adds to, the rows of a term: slices where its other axes are untouched."""
    axes = _expanded(term)
    gathers = _gathers(term)
    simple = len(gathers) == 1 and not set(gathers[0].axes) & {axis for axis in term if isinstance(axis, str)}
    if simple:
        return tuple(slice(None) if isinstance(axis, str) else arrays[axis.array] for axis in term)
    return tuple(_spread(xp, axis, axes, row, arrays) for axis in term)


def _spread(xp: Any, axis: str | Gather, axes: Sequence[str], row: Row, arrays: dict[str, Any]) -> Any:
    """Return the index of one dimension, with a dimension for each axis of the term."""
    if isinstance(axis, str):
        return xp.arange(row.sizes[axis]).reshape([-1 if e == axis else 1 for e in axes])
    array, present = arrays[axis.array], [e for e in axes if e in axis.axes]
    if list(axis.axes) != present:
        raise ValueError(f"{row.spec}: the axes of {axis.array} are in another order than the term's")
    return array.reshape([row.sizes[e] if e in axis.axes else 1 for e in axes])


def _add_rows(values: Any, index: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """Add rows to zeros in torch: by `index_add`, as users do, if only one dimension is indexed."""
    zeros = values.new_zeros(shape)
    dims = [dim for dim, part in enumerate(index) if not isinstance(part, slice)]
    if len(dims) > 1:
        return zeros.index_put(index, values, accumulate=True)
    dim, rows = dims[0], index[dims[0]]
    return zeros.index_add(dim, rows.flatten(), values.flatten(dim, dim + rows.ndim - 1))
