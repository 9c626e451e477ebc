"""The oracle: what an indirect einsum means, point by point, in higher precision.

It shares no code with what it judges: it has its own small parser, and it imports numpy but nothing from `planner`.
Every character of a spec that names a dimension is an axis, and the axes together span the *joint space*. At each point
of this space every term names one position, and the meaning is

    output[position of the output] += product over the inputs of input[position of the input]

A gather names a position through its index array, so the oracle *selects* rows: rows that no index names never matter,
even if they are NaN. Under ``index_mode="drop"``, a point with an index out of range is left out, whatever its factors
are. Under "nan" an input reads NaN there, but in a gradient the point is left out, and so it is if the output's index
is out of range. A gradient is the same sum over the same points, with the roles of one input and the output exchanged.

Example:
    >>> import numpy as np
    >>> a, c = np.ones((2, 1, 3)), np.arange(12.0).reshape(4, 3, 1)
    >>> reference("nij, q[n]jk -> nik", a, c, q=np.array([3, 0])).ravel()
    array([30.,  3.])
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Axis: TypeAlias = Hashable  # a character, a label of the sublist form, or ("...", places from the right)
Sizes: TypeAlias = Mapping[Any, int] | Sequence[int] | None

SMALL_POINTS = 1 << 16  # the joint space is enumerated up to this size; beyond it, pairs of factors are joined
BLOCK_POINTS = 1 << 22  # most points enumerated at once, 32 MB of float64
MAX_ENUMERATED_AXES = 60  # numpy arrays have at most 64 dims


@dataclass(frozen=True, slots=True)
class _Gather:
    array: str
    axes: tuple[Axis, ...]


_Term: TypeAlias = tuple[Any, ...]  # axes and gathers; also `...` until it is expanded


def reference(
    spec: Any,
    *operands: Any,
    sizes: Sizes = None,
    index_mode: str = "raise",
    dtype: Any = None,
    **indices: Any,
) -> Array:
    """Contract by the definition of `spec`; the result stays in the higher precision.

    Floats are computed in float64, complex numbers in complex128, integers in int64. int64 wraps around as narrower
    integers do, so a cast back gives the same result as their own arithmetic.

    >>> reference("nj, q[n]j -> n", [[1, 2], [3, 4]], [[1, 0], [0, 5]], q=[1, 1])
    array([10, 20])

    Args:
        spec: a spec string, or the first operand of the sublist form ``a, [0, 1], b, [1, 2], [0, 2]``.
        operands: anything that `numpy.asarray` takes.
        sizes: sizes of output axes that appear in no input, by letter, and of scattered output dimensions, by the
            letter of the index array; or the whole output shape.
        index_mode: "raise", "drop", "clip" or "nan"; or "wrap and drop", in which plans under "nan" run until results
            are marked: "drop" with negative indices counted from the end.
        dtype: dtype that operands are cast to first.
        indices: the index arrays, by letter.

    Raises:
        ValueError: the spec, the shapes or the sizes do not fit together.
        IndexError: an index is out of range under "raise", or clips into a dimension of size 0.
    """
    problem, arrays = _resolve(spec, operands, sizes=sizes, index_mode=index_mode, dtype=dtype, **indices)
    sources = list(zip(problem.inputs, arrays, strict=True))
    problem = replace(problem, fills=index_mode == "nan")
    return _accumulate(problem, sources, problem.output, problem.output_shape)


def reference_gradients(spec: Any, gout: Any, *operands: Any, **arguments: Any) -> list[Array]:
    """Transpose the contraction onto `gout`: the gradient of every operand, never conjugated.

    >>> reference_gradients("i, i ->", 1, [1, -2], [3, 4])
    [array([3, 4]), array([ 1, -2])]

    Args:
        spec: as in `reference`.
        gout: the output's gradient, in the output's shape.
        operands: as in `reference`.
        arguments: the keyword arguments of `reference`.

    Returns:
        One array per operand, in its shape and in the higher precision.
    """
    problem, arrays = _resolve(spec, operands, **arguments)
    gout = _widen(np.asarray(gout), None)
    if gout.shape != problem.output_shape:
        raise ValueError(f"gout has shape {gout.shape}, the output {problem.output_shape}")
    sources = list(zip(problem.inputs, arrays, strict=True))
    return [
        _accumulate(
            problem,
            [*sources[:i], *sources[i + 1 :], (problem.output, gout)],
            problem.inputs[i],
            arrays[i].shape,
        )
        for i in range(len(arrays))
    ]


def second_derivatives(
    spec: Any, gout: Any, operands: Sequence[Any], vectors: Mapping[int, Any], **arguments: Any
) -> list[Array]:
    """Return the gradients of every operand's gradient, for the cotangents `vectors` of some operands' gradients.

    A gradient is linear in each other operand. So these are sums of gradients with one operand replaced by its vector.
    """
    total = [np.zeros(np.shape(x), np.result_type(x, gout)) for x in operands]
    for number, vector in vectors.items():
        changed = [*operands[:number], vector, *operands[number + 1 :]]
        for other, part in enumerate(reference_gradients(spec, gout, *changed, **arguments)):
            if other != number:
                total[other] = total[other] + part
    return total


def magnitude(spec: Any, *operands: Any, **arguments: Any) -> Array:
    """Contract the absolute values; for a complex number, the sum of the absolute values of its parts.

    The arguments are those of `reference`.

    No partial sum of the contraction itself is larger. For intermediates see `exact_bound`.

    >>> magnitude("i, i ->", [1, -2], [3, 4])
    array(11.)
    """
    problem, arrays = _resolve(spec, operands, **arguments)
    sources = [(t, absolute(x)) for t, x in zip(problem.inputs, arrays, strict=True)]
    return _accumulate(problem, sources, problem.output, problem.output_shape)


def exact_bound(spec: Any, *operands: Any, gout: Any = None, **arguments: Any) -> float:
    """Return a bound on every number that any plan for the contraction can compute, forward and, with gout, backward.

    The bound is the product of the operands' largest absolute values times the number of points of the joint space: any
    intermediate multiplies some of the operands and sums over some of the axes. If the operands are integers and the
    bound is at most ``exact_range(dtype)``, every plan is exact and the comparison needs no tolerance. The other
    arguments are those of `reference`.

    >>> exact_bound("i, i ->", [1, -2], [3, 4])
    16.0
    """
    problem, arrays = _resolve(spec, operands, **arguments)
    if gout is not None:
        arrays = [*arrays, _widen(np.asarray(gout), None)]
    points = math.prod(max(1, extent) for extent in problem.extents.values())
    return float(points * math.prod(max(1.0, absolute(x).max(initial=0)) for x in arrays))


def exact_range(dtype: Any) -> int:
    """Return the largest n such that `dtype` holds every integer from -n to n.

    >>> exact_range("float32") == 2**24, exact_range("bfloat16") == 2**8
    (True, True)
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    bits = {"float16": 11, "bfloat16": 8, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53}
    return 1 << bits[name] if name in bits else int(np.iinfo(name).max)


def output_shape(spec: Any, *operands: Any, **arguments: Any) -> tuple[int, ...]:
    """Return the shape of the result without computing it; the arguments are those of `reference`."""
    return _resolve(spec, operands, **arguments)[0].output_shape


# --- the sum over the joint space ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Problem:
    """A spec whose ellipses are expanded, with every size known."""

    inputs: tuple[_Term, ...]
    output: _Term
    output_shape: tuple[int, ...]
    extents: dict[Axis, int]  # of the joint space
    indices: dict[str, Array]  # int64
    index_mode: str
    fills: bool = False  # whether an index out of range reads NaN


def _accumulate(
    problem: _Problem,
    sources: list[tuple[_Term, Array]],
    target: _Term,
    shape: tuple[int, ...],
) -> Array:
    """Add the product of the sources into the target at every point of the joint space."""
    result = np.zeros(shape, np.result_type(*(array for _, array in sources)))
    points = math.prod(problem.extents.values())
    crowded = points > SMALL_POINTS and all(np.isfinite(array).all() for _, array in sources)
    if crowded or len(problem.extents) > MAX_ENUMERATED_AXES:
        _add_pairwise(problem, sources, target, result)
    else:
        for block in _blocks({axis: range(n) for axis, n in problem.extents.items()}):
            _add_block(problem, sources, target, result, block)
    return result


def _blocks(ranges: dict[Axis, range]) -> Iterator[dict[Axis, range]]:
    if math.prod(map(len, ranges.values())) <= BLOCK_POINTS:
        yield ranges
        return
    axis, longest = max(ranges.items(), key=lambda item: len(item[1]))
    middle = len(longest) // 2
    yield from _blocks({**ranges, axis: longest[:middle]})
    yield from _blocks({**ranges, axis: longest[middle:]})


def _add_block(
    problem: _Problem,
    sources: list[tuple[_Term, Array]],
    target: _Term,
    result: Array,
    block: dict[Axis, range],
) -> None:
    """Add by the definition: every array gets one dimension for each axis of the joint space."""
    product = np.ones((1,) * len(block), result.dtype)
    positions, valid = _positions(problem, target, result.shape, block)
    with np.errstate(all="ignore"):
        for term, array in sources:
            value, inside = _read(problem, term, array, block)
            product = product * value
            valid = valid & inside
        product = np.where(valid, product, result.dtype.type(0))
        product = np.broadcast_to(product, [len(r) for r in block.values()])
        kept = _axes(problem, target, result.shape)
        summed = tuple(i for i, axis in enumerate(block) if axis not in kept)
        _add_at(result, positions, product.sum(summed, keepdims=True))


def _add_pairwise(problem: _Problem, sources: list[tuple[_Term, Array]], target: _Term, result: Array) -> None:
    """Add for many points and finite numbers: join the two factors with the smallest product, again and again."""
    factors: list[tuple[tuple[Axis, ...], Array]] = []
    for term, array in sources:
        axes = _axes(problem, term, array.shape)
        value, inside = _read(problem, term, array, {a: range(problem.extents[a]) for a in axes})
        factors.append((axes, np.where(inside, value, value.dtype.type(0)).astype(result.dtype)))

    kept = _axes(problem, target, result.shape)
    carried = {axis for axes, _ in factors for axis in axes}
    repeats = math.prod(n for a, n in problem.extents.items() if a not in carried and a not in kept)
    factors.append(((), np.asarray(repeats, result.dtype)))
    while len(factors) > 1:
        _, i, j = min(
            (math.prod(problem.extents[a] for a in _joined(factors, i, j, kept)), i, j)
            for j in range(len(factors))
            for i in range(j)
        )
        axes = _joined(factors, i, j, kept)
        local = {a: k for k, a in enumerate(dict.fromkeys((*factors[i][0], *factors[j][0])))}
        (left, x), (right, y) = factors[i], factors[j]
        product = np.einsum(
            x, [local[a] for a in left], y, [local[a] for a in right], [local[a] for a in axes], optimize=True
        )
        factors = [f for k, f in enumerate(factors) if k not in (i, j)] + [(axes, np.asarray(product))]

    axes, product = factors[0]
    order = [axes.index(a) for a in kept if a in axes]
    product = product.transpose(order).reshape([problem.extents[a] if a in axes else 1 for a in kept])
    positions, inside = _positions(problem, target, result.shape, {a: range(problem.extents[a]) for a in kept})
    product = np.where(inside, product, result.dtype.type(0))
    _add_at(result, positions, np.broadcast_to(product, [problem.extents[a] for a in kept]))


def _joined(factors: list[tuple[tuple[Axis, ...], Array]], i: int, j: int, kept: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the axes of the product of factors i and j: those that the target or another factor still needs."""
    needed = set(kept).union(*(f[0] for k, f in enumerate(factors) if k not in (i, j)))
    return tuple(a for a in dict.fromkeys((*factors[i][0], *factors[j][0])) if a in needed)


def _axes(problem: _Problem, term: _Term, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """Return the axes of the joint space along which the term's position moves, without broadcast axes of size 1."""
    found: dict[Axis, None] = {}
    for item, n in zip(term, shape, strict=True):
        dims = [(item, n)]
        if isinstance(item, _Gather):
            dims = list(zip(item.axes, problem.indices[item.array].shape, strict=True))
        found.update({axis: None for axis, dim in dims if dim == problem.extents[axis]})
    return tuple(found)


def _read(
    problem: _Problem, term: _Term, array: Array, ranges: dict[Axis, range]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return the operand's value at each point, and whether all of its indices are in range there."""
    positions, inside = _positions(problem, term, array.shape, ranges)
    if not term:
        return array.reshape((1,) * len(ranges)), inside
    if array.size == 0:  # no point is inside, or there are no points
        value = np.zeros(np.broadcast_shapes(*(p.shape for p in positions)), array.dtype)
    else:
        value = np.asarray(array[positions])
    if problem.fills and not inside.all():
        return np.where(inside, value, np.nan), np.ones_like(inside)
    return value, inside


def _add_at(result: Array, positions: tuple[Array, ...], values: Array) -> None:
    if result.ndim == 0:
        result += values.sum()
    elif result.size:
        np.add.at(result, positions, values)


def _positions(
    problem: _Problem, term: _Term, shape: tuple[int, ...], ranges: dict[Axis, range]
) -> tuple[tuple[Array, ...], npt.NDArray[np.bool_]]:
    """Return each point's position in an array of this shape, one index array per dimension, and if it is inside."""
    order = {axis: i for i, axis in enumerate(ranges)}

    def coordinate(axis: Axis, n: int) -> Array:
        dims = [1] * len(order)
        if n != problem.extents[axis]:  # a dimension of size 1, which is broadcast
            return np.zeros(dims, np.int64)
        dims[order[axis]] = -1
        return np.arange(ranges[axis].start, ranges[axis].stop).reshape(dims)

    positions: list[Array] = []
    inside = np.ones((1,) * len(order), np.bool_)
    for item, n in zip(term, shape, strict=True):
        if not isinstance(item, _Gather):
            positions.append(coordinate(item, n))
            continue
        array = problem.indices[item.array]
        where = tuple(map(coordinate, item.axes, array.shape))
        index = np.asarray(array[where]) if where else array.reshape((1,) * len(order))
        if problem.index_mode in ("raise", "nan", "wrap and drop"):
            index = np.where(index < 0, index + n, index)
        if problem.index_mode in ("drop", "nan", "wrap and drop"):
            inside = inside & (index >= 0) & (index < n)
        positions.append(np.clip(index, 0, max(n - 1, 0)))
    return tuple(positions), inside


# --- from the call to a problem -----------------------------------------------------------------


def _resolve(
    spec: Any,
    operands: tuple[Any, ...],
    sizes: Sizes = None,
    index_mode: str = "raise",
    dtype: Any = None,
    **indices: Any,
) -> tuple[_Problem, list[Array]]:
    if index_mode not in ("raise", "drop", "clip", "nan", "wrap and drop"):
        raise ValueError(f"index_mode is {index_mode!r}, not 'raise', 'drop', 'clip' or 'nan'")
    if isinstance(spec, str):
        inputs, output = _parse(spec)
    else:
        inputs, output, operands = _from_sublists((spec, *operands))
    arrays = [_widen(np.asarray(x), dtype) for x in operands]
    if len(arrays) != len(inputs):
        raise ValueError(f"{len(inputs)} terms but {len(arrays)} operands in {spec!r}")
    index_arrays = {name: _as_index(name, q) for name, q in indices.items()}
    if output is None:
        output = _implicit_output(inputs)
    _check_names([*inputs, output], index_arrays)

    ranks = {name: q.ndim for name, q in index_arrays.items()}
    inputs = tuple(_expand(t, x.ndim, ranks) for t, x in zip(inputs, arrays, strict=True))
    brackets = [_expand_gather(g, ranks) for t in (*inputs, output) for g in t if isinstance(g, _Gather)]
    ellipsis_dims = 0
    for entries in (*inputs, *(bracket.axes for bracket in brackets)):
        for axis in entries:
            if isinstance(axis, tuple):
                ellipsis_dims = max(ellipsis_dims, axis[1] + 1)
    rank = ellipsis_dims - 1 if ... in output else 0
    output = _expand(output, len(output) + rank, ranks)

    extents = _extents(inputs, output, [x.shape for x in arrays], sizes, index_arrays)
    if isinstance(sizes, Mapping) or sizes is None:
        shape = tuple(_output_dim(item, inputs, arrays, sizes or {}, extents) for item in output)
    else:
        shape = tuple(int(n) for n in sizes)
    problem = _Problem(inputs, output, shape, extents, index_arrays, index_mode)
    for term, dims in [*zip(inputs, (x.shape for x in arrays), strict=True), (output, shape)]:
        _check_indices(problem, term, dims)
    return problem, arrays


def _extents(
    inputs: tuple[_Term, ...],
    output: _Term,
    shapes: list[tuple[int, ...]],
    sizes: Sizes,
    index_arrays: Mapping[str, Array],
) -> dict[Axis, int]:
    """Return the size of every axis: dimensions of size 1 are broadcast to larger ones, all others must agree."""
    groups: list[list[tuple[Axis, int]]] = []  # within one group nothing broadcasts
    for term, shape in zip(inputs, shapes, strict=True):
        groups.append([(a, n) for a, n in zip(term, shape, strict=True) if not isinstance(a, _Gather)])
    for gather in (g for term in (*inputs, output) for g in term if isinstance(g, _Gather)):
        groups.append(list(zip(gather.axes, index_arrays[gather.array].shape, strict=True)))
    if isinstance(sizes, Mapping):
        axes = {a for term in (*inputs, output) for a in term} | {a for g in groups for a, _ in g}
        if unknown := set(sizes) - axes - set(index_arrays):
            raise ValueError(f"sizes names {sorted(map(str, unknown))}, which the spec does not")
        required = [(a, int(n)) for a, n in sizes.items() if a not in index_arrays]
    elif sizes is not None:
        if len(sizes) != len(output):
            raise ValueError(f"sizes has {len(sizes)} dims, the output {len(output)}")
        pairs = zip(output, sizes, strict=True)
        required = [(a, int(n)) for a, n in pairs if not isinstance(a, _Gather)]
    else:
        required = []
    groups.append(required)

    found: dict[Axis, set[int]] = {}
    for group in groups:
        within: dict[Axis, int] = {}
        for axis, n in group:
            if within.setdefault(axis, n) != n:
                raise ValueError(f"axis {axis!r} has sizes {within[axis]} and {n} in one term")
            found.setdefault(axis, set()).add(n)
    extents = {}
    for axis, dims in found.items():
        larger = dims - {1} or {1}
        if len(larger) > 1:
            raise ValueError(f"axis {axis!r} has sizes {sorted(larger)}")
        extents[axis] = larger.pop()
    for axis, n in required:
        if extents[axis] != n:
            raise ValueError(f"sizes= gives {n} for axis {axis!r}, but the arrays give {extents[axis]}")
    for axis in output:
        if not isinstance(axis, _Gather) and axis not in extents:
            raise ValueError(f"no input has output axis {axis!r}: give its size in sizes")
    return extents


def _output_dim(
    item: Any,
    inputs: tuple[_Term, ...],
    arrays: list[Array],
    sizes: Mapping[Any, int],
    extents: dict[Axis, int],
) -> int:
    if not isinstance(item, _Gather):
        return extents[item]
    if item.array in sizes:
        return int(sizes[item.array])
    gathered = {
        n
        for term, x in zip(inputs, arrays, strict=True)
        for other, n in zip(term, x.shape, strict=True)
        if isinstance(other, _Gather) and other.array == item.array
    }
    if len(gathered) != 1:
        raise ValueError(f"the size of the output dim that {item.array!r} scatters into is not known")
    return int(gathered.pop())


def _check_indices(problem: _Problem, term: _Term, shape: tuple[int, ...]) -> None:
    for item, n in zip(term, shape, strict=True):
        if not isinstance(item, _Gather):
            continue
        q = problem.indices[item.array]
        if problem.index_mode == "raise" and ((q < -n) | (q >= n)).any():
            raise IndexError(f"an index in {item.array!r} is out of range for size {n}")
        if problem.index_mode == "clip" and n == 0 and q.size:
            raise IndexError(f"{item.array!r} cannot be clipped into a dim of size 0")


def _check_names(terms: list[_Term], index_arrays: Mapping[str, Array]) -> None:
    used = {item.array for term in terms for item in term if isinstance(item, _Gather)}
    if used != set(index_arrays):
        raise ValueError(f"the spec uses index arrays {sorted(used)}, given are {sorted(index_arrays)}")
    axes = {item for term in terms for item in term if not isinstance(item, _Gather)}
    axes |= {a for term in terms for g in term if isinstance(g, _Gather) for a in g.axes}
    if both := used & axes:
        raise ValueError(f"{sorted(both)} are both axes and index arrays")


def _as_index(name: str, q: Any) -> Array:
    array = np.asarray(q)
    if array.dtype.kind not in "iu":
        raise TypeError(f"index array {name!r} has dtype {array.dtype}, not an integer one")
    if array.dtype == np.uint64:  # a value that int64 cannot hold must stay out of range
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)


def _widen(array: Array, dtype: Any) -> Array:
    if dtype is not None:
        array = array.astype(dtype)
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    if array.dtype.kind == "c":
        return array.astype(np.result_type(array.dtype, np.complex128))
    if array.dtype.kind == "f":
        return array.astype(np.result_type(array.dtype, np.float64))
    return array.astype(np.float64)  # bfloat16 and other dtypes that numpy does not know


def absolute(array: Array) -> npt.NDArray[np.float64]:
    """Return the absolute values; for a complex number, the sum of the absolute values of its parts."""
    parts: npt.NDArray[np.float64] = np.abs(array.real).astype(np.float64)
    if array.dtype.kind == "c":
        parts = parts + np.abs(array.imag)
    return parts


# --- the language -------------------------------------------------------------------------------

_AXIS = r"[^ \t\n\r\f\v0-9,\->.\[\]\ud800-\udfff]"
_ITEM = re.compile(rf"(?P<array>{_AXIS})\[(?P<bracket>[^\[\]]*)\]|(?P<axis>\.\.\.|{_AXIS})")


@lru_cache(maxsize=4096)
def _parse(spec: str) -> tuple[tuple[_Term, ...], _Term | None]:
    text = re.sub(r"[ \t\n\r\f\v]+", "", spec)
    left, arrow, right = text.partition("->")
    inputs = tuple(_parse_term(term) for term in left.split(","))
    return inputs, (_parse_term(right) if arrow else None)


def _parse_term(text: str, brackets: bool = True) -> _Term:
    items: list[Any] = []
    place = 0
    while place < len(text):
        match = _ITEM.match(text, place)
        if match is None or (match["array"] and not brackets):
            raise ValueError(f"cannot read {text[place:]!r} in term {text!r}")
        if match["array"]:
            if not re.fullmatch(r"[^\W\d_]", match["array"]) or not unicodedata.is_normalized("NFKC", match["array"]):
                raise ValueError(
                    f"{match['array']!r} is not a letter, or NFKC changes it: it cannot name an index array"
                )
            items.append(_Gather(match["array"], _parse_term(match["bracket"], brackets=False)))
        else:
            items.append(... if match["axis"] == "..." else match["axis"])
        place = match.end()
    if items.count(...) > 1:
        raise ValueError(f"two ellipses in {text!r}")
    return tuple(items)


def _from_sublists(
    arguments: tuple[Any, ...],
) -> tuple[tuple[_Term, ...], _Term | None, tuple[Any, ...]]:
    pairs = len(arguments) // 2
    inputs = tuple(tuple(labels) for labels in arguments[1 : 2 * pairs : 2])
    output = tuple(arguments[-1]) if len(arguments) % 2 else None
    return inputs, output, arguments[: 2 * pairs : 2]


def _implicit_output(inputs: tuple[_Term, ...]) -> _Term:
    items = [item for term in inputs for item in term]
    if any(isinstance(item, _Gather) for item in items):
        raise ValueError("a spec with a gather needs its output written")
    once = [item for item, count in Counter(items).items() if count == 1 and item is not ...]
    return (*([...] if ... in items else []), *sorted(once))


def _expand(term: _Term, ndim: int, ranks: Mapping[str, int]) -> _Term:
    """Replace the ellipsis by axes ("...", k), with k counted from the right, so that they align as in numpy."""
    rank = ndim - len(term) + (... in term)
    if rank < 0 or (rank and ... not in term):
        raise ValueError(f"a term of {len(term)} dims does not fit {ndim} dims")
    items: list[Any] = []
    for item in term:
        if item is ...:
            items.extend(("...", k) for k in reversed(range(rank)))
        else:
            items.append(_expand_gather(item, ranks) if isinstance(item, _Gather) else item)
    return tuple(items)


def _expand_gather(gather: _Gather, ranks: Mapping[str, int]) -> _Gather:
    if any(isinstance(axis, tuple) for axis in gather.axes):
        return gather
    return _Gather(gather.array, _expand(gather.axes, ranks[gather.array], {}))
