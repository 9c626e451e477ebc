"""From a parsed spec and shapes to a resolved one: no ellipsis, no size-1 broadcasting, every size known."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from planner.language.errors import SearchLimitError, ShapeError, SpecError
from planner.language.parse import parse
from planner.language.spec import ELLIPSIS, Gather, Spec, Term, unused_letters

__all__ = ["Resolved", "resolve", "resolve_shapes"]

Shape = tuple[int, ...]
_MAX_ELEMENTS = 2**62
# Trees may be as deep as they have operands, and Python's functions may not call each other much deeper.
MOST_OPERANDS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A resolved spec and the views that fit the caller's arrays to it.

    Attributes:
        spec: the resolved spec.
        shapes: shape of each operand as the spec sees it: broadcast dimensions of size 1 are gone.
        index_shapes: the same for each index array.
    """

    spec: Spec
    shapes: tuple[Shape, ...]
    index_shapes: tuple[tuple[str, Shape], ...]


def resolve(
    spec: str | Spec, *operands: Any, sizes: Mapping[str, int] | Sequence[int] | None = None, **indices: Any
) -> Spec:
    """Fill in all that a spec leaves open: ellipses, broadcasting and sizes.

    Example:
        >>> import planner
        >>> print(planner.resolve("...j, jk", (2, 3, 4), (4, 5)))
        abj, jk -> abk

    Args:
        spec: a spec string or a parsed spec.
        *operands: arrays, `Operand` stand-ins or shapes, one for each input term.
        sizes: sizes of output axes that no input has, and of scattered output dimensions by the letter of
            their index array; or the whole output shape as a tuple.
        **indices: index arrays or their shapes, by letter.

    Returns:
        The resolved spec.

    Raises:
        SpecError: the spec is malformed, or an index array is missing or not in the spec.
        ShapeError: shapes contradict the spec or each other.
    """
    shapes = tuple(shape_of(operand, f"operand {number}") for number, operand in enumerate(operands))
    index_shapes = {name: shape_of(index, f"index array {name!r}") for name, index in indices.items()}
    return resolve_shapes(spec, shapes, index_shapes, sizes).spec


def shape_of(array: Any, what: str = "an operand") -> Shape:
    """Return the shape of an array, a stand-in or a shape itself.

    Raises:
        ShapeError: it has none, or one with an entry that is no size.
    """
    shape = array if isinstance(array, (tuple, list)) else getattr(array, "shape", None)
    if shape is None:
        raise ShapeError(f"{what} is neither an array nor a shape: {array!r:.80}")
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise ShapeError(f"{what} has the shape {shape!r:.80}: sizes are integers") from None
    if any(n < 0 for n in sizes):
        raise ShapeError(f"{what} has the shape {shape!r:.80}: sizes are not negative")
    return sizes


def resolve_shapes(
    spec: str | Spec,
    shapes: Sequence[Shape],
    index_shapes: Mapping[str, Shape],
    sizes: Mapping[str, int] | Sequence[int] | None = None,
) -> Resolved:
    """As `resolve`, on shapes alone, and telling how the arrays must be reshaped."""
    parsed = spec if isinstance(spec, Spec) else parse(spec)
    _check_counts(parsed, shapes, index_shapes)
    if len(shapes) > MOST_OPERANDS:
        raise SearchLimitError(
            f"{len(shapes)} operands are more than the {MOST_OPERANDS} that one call takes: contract some first"
        )
    if parsed.sizes or any(gather.size is not None for gather in parsed.gathers):
        return _already_resolved(parsed, shapes, index_shapes, sizes)
    parsed = _expand_ellipses(parsed, shapes, index_shapes)
    axis_sizes = _axis_sizes(parsed, shapes, index_shapes)
    named, output_shape = _given_sizes(parsed, sizes)

    inputs, input_shapes = [], []
    # One view of an index array serves all its brackets, so a dimension of size 1 goes if any axis on it is larger.
    kept_dims = {
        name: tuple(
            d
            for d, n in enumerate(shape)
            if n != 1 or all(axis_sizes[g.axes[d]] == 1 for g in parsed.gathers if g.array == name)
        )
        for name, shape in index_shapes.items()
    }

    def squeezed(gather: Gather, size: int) -> Gather:
        return Gather(gather.array, tuple(gather.axes[d] for d in kept_dims[gather.array]), size)

    gathered: dict[str, int] = {}
    for term, shape in zip(parsed.inputs, shapes, strict=True):
        entries: list[str | Gather] = []
        kept: list[int] = []
        for entry, size in zip(term, shape, strict=True):
            if isinstance(entry, Gather):
                gathered.setdefault(entry.array, size)
                entries.append(squeezed(entry, size))
            elif size == axis_sizes[entry]:
                entries.append(entry)
            else:
                continue
            kept.append(size)
        inputs.append(tuple(entries))
        input_shapes.append(tuple(kept))

    output: list[str | Gather] = []
    for position, entry in enumerate(parsed.output):
        given = output_shape[position] if output_shape is not None else None
        if isinstance(entry, Gather):
            known = [s for s in (given, named.get(entry.array), gathered.get(entry.array)) if s is not None]
            if not known:
                raise ShapeError(
                    f"the size of the output's dimension {entry} is not known: pass sizes={{{entry.array!r}: N}}"
                )
            output.append(squeezed(entry, known[0]))
            continue
        wanted = given if given is not None else named.get(entry)
        if entry not in axis_sizes:
            if wanted is None:
                raise ShapeError(
                    f"no input has the output's axis {entry!r}, so its size is not known: pass sizes={{{entry!r}: N}}"
                )
            axis_sizes[entry] = wanted
        elif wanted is not None and wanted != axis_sizes[entry]:
            raise ShapeError(f"sizes= says {wanted} for axis {entry!r}, but the inputs say {axis_sizes[entry]}")
        output.append(entry)
    written = {entry.array for entry in output if isinstance(entry, Gather)}
    for letter, size in named.items():
        if letter in axis_sizes and axis_sizes[letter] != size:
            raise ShapeError(f"sizes= says {size} for axis {letter!r}, but the inputs say {axis_sizes[letter]}")
        if letter not in axis_sizes and letter not in index_shapes:
            raise ShapeError(f"sizes= names {letter!r}, which is no axis or index array of '{shorten(str(parsed))}'")
        read = sorted({g.size or 0 for term in inputs for g in term if isinstance(g, Gather) and g.array == letter})
        if read and size not in read and letter not in written:
            said = " and ".join(map(str, read))
            raise ShapeError(f"sizes= says {size} for the dimension that {letter!r} indexes, but the inputs say {said}")

    resolved = Spec(tuple(inputs), tuple(output), tuple(sorted(axis_sizes.items())))
    _check_addressable(resolved)
    index_views = tuple((name, tuple(index_shapes[name][d] for d in kept_dims[name])) for name in resolved.arrays)
    return Resolved(resolved, tuple(input_shapes), index_views)


def _already_resolved(
    spec: Spec, shapes: Sequence[Shape], index_shapes: Mapping[str, Shape],
    asked: Mapping[str, int] | Sequence[int] | None,
) -> Resolved:  # fmt: skip
    _check_addressable(spec)
    sizes = dict(spec.sizes)
    letters, output = _given_sizes(spec, asked)
    known: dict[str, int | None] = dict(spec.sizes)
    # By its index array, as in a spec that is not resolved: the scattered dimension, else the one that is read.
    for gather in (*spec.gathers, *(e for e in spec.output if isinstance(e, Gather))):
        known[gather.array] = gather.size
    for letter, size in letters.items():
        if known.get(letter) != size:
            raise ShapeError(f"sizes= says {size} for {letter!r}, but '{shorten(str(spec))}' is resolved with {known}")
    if output is not None and output != spec.output_shape:
        raise ShapeError(
            f"sizes= says {output}, but the result of '{shorten(str(spec))}' is resolved as {spec.output_shape}"
        )
    for number, (term, shape) in enumerate(zip(spec.inputs, shapes, strict=True)):
        if tuple(shape) != spec.shape(term):
            raise ShapeError(
                f"operand {number} has shape {tuple(shape)}, but '{shorten(str(spec))}' needs {spec.shape(term)}"
            )
    for gather in spec.gathers:
        wanted = tuple(sizes[axis] for axis in gather.axes)
        if tuple(index_shapes[gather.array]) != wanted:
            raise ShapeError(f"index array {gather.array!r} has shape {index_shapes[gather.array]}, not {wanted}")
    return Resolved(spec, tuple(shapes), tuple((name, tuple(index_shapes[name])) for name in spec.arrays))


def _check_counts(spec: Spec, shapes: Sequence[Shape], index_shapes: Mapping[str, Shape]) -> None:
    if len(spec.inputs) != len(shapes):
        raise ShapeError(
            f"'{shorten(str(spec))}' has {len(spec.inputs)} input terms, but {len(shapes)} operands were given"
        )
    arrays = spec.arrays
    for name in arrays:
        if name not in index_shapes:
            raise SpecError(f"the index array {name!r} is missing: pass it as the keyword {name}=...")
    for name in index_shapes:
        if name not in arrays:
            raise SpecError(
                f"unknown option or index array {name!r}: '{shorten(str(spec))}' "
                + (f"has the index arrays {', '.join(arrays)}" if arrays else "has no index arrays")
            )


def shorten(text: str, most: int = 200) -> str:
    """Cut a text for a message: specs may have 10^5 characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def _expand_ellipses(spec: Spec, shapes: Sequence[Shape], index_shapes: Mapping[str, Shape]) -> Spec:
    """Give each ellipsis its axes: aligned at the right, the same letters in every term and bracket."""

    def span(entries: Sequence[Any], dims: int, what: str) -> int:
        written = len(entries) - (ELLIPSIS in entries)
        if dims < written or (dims > written and ELLIPSIS not in entries):
            text = shorten("".join(map(str, entries)), 100) or "''"
            raise ShapeError(f"{what} has {dims} dimensions, but its axes are {text}")
        return dims - written

    longest = 0
    for number, (term, shape) in enumerate(zip(spec.inputs, shapes, strict=True)):
        longest = max(longest, span(term, len(shape), f"operand {number}"))
    for gather in spec.gathers:
        dims = len(index_shapes[gather.array])
        longest = max(longest, span(gather.axes, dims, f"index array {gather.array!r}"))

    used = {axis for term in spec.terms for e in term for axis in (e.axes if isinstance(e, Gather) else e)}
    used.update(spec.arrays)
    dots = unused_letters(used, longest)

    def expand(entries: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        if ELLIPSIS not in entries:
            return entries
        at = entries.index(ELLIPSIS)
        return (*entries[:at], *dots[longest - count :], *entries[at + 1 :])

    def expand_term(term: Term, count: int) -> Term:
        return expand(
            tuple(
                Gather(
                    e.array,
                    expand(e.axes, len(index_shapes[e.array]) - len(e.axes) + (ELLIPSIS in e.axes)),
                )
                if isinstance(e, Gather)
                else e
                for e in term
            ),
            count,
        )

    inputs = tuple(
        expand_term(term, len(shape) - len(term) + (ELLIPSIS in term))
        for term, shape in zip(spec.inputs, shapes, strict=True)
    )
    return Spec(inputs, expand_term(spec.output, longest))


def _axis_sizes(spec: Spec, shapes: Sequence[Shape], index_shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Size of each axis: what its dimensions agree on, those of size 1 set aside."""
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}

    def meet(entries: Sequence[Any], shape: Shape, what: str) -> None:
        here: dict[str, int] = {}
        for axis, size in zip(entries, shape, strict=True):
            if isinstance(axis, Gather):
                continue
            if here.setdefault(axis, size) != size:
                raise ShapeError(
                    f"axis {axis!r} repeats within {what} with sizes {here[axis]} and {size}: "
                    "repeated axes of one term must be equal"
                )
            known = sizes.get(axis, 1)
            if known == 1:
                sizes[axis], source[axis] = size, what
            elif size not in (1, known):
                raise ShapeError(f"axis {axis!r} has size {known} in {source[axis]} but {size} in {what}")

    for number, (term, shape) in enumerate(zip(spec.inputs, shapes, strict=True)):
        meet(term, shape, f"operand {number}")
    for gather in spec.gathers:
        meet(gather.axes, index_shapes[gather.array], f"index array {gather.array!r}")
    return sizes


def _given_sizes(spec: Spec, sizes: Mapping[str, int] | Sequence[int] | None) -> tuple[dict[str, int], Shape | None]:
    """Split `sizes=` into sizes by letter and a whole output shape."""
    if sizes is None:
        return {}, None

    def checked(size: Any, what: str) -> int:
        if isinstance(size, bool) or not hasattr(size, "__index__") or size.__index__() < 0:
            raise ShapeError(f"sizes=: {what} must be a non-negative integer, not {size!r}")
        return int(size.__index__())

    if isinstance(sizes, Mapping):
        return {str(name): checked(size, repr(name)) for name, size in sizes.items()}, None
    text: object = sizes
    if isinstance(text, str) or not isinstance(sizes, Sequence):
        raise ShapeError(f"sizes= takes a mapping of letters or the output's shape, not {type(sizes).__name__}")
    shape = tuple(checked(size, f"entry {number}") for number, size in enumerate(sizes))
    if len(shape) != len(spec.output):
        raise ShapeError(
            f"sizes= has {len(shape)} entries, but the output '{shorten(''.join(map(str, spec.output)))}' "
            f"has {len(spec.output)} dimensions"
        )
    return {}, shape


def _check_addressable(spec: Spec) -> None:
    """Refuse results and operands beyond any address space before anything multiplies such sizes."""
    for number, term in enumerate(spec.terms):
        elements = 1
        for size in spec.shape(term):
            elements *= size
            if elements > _MAX_ELEMENTS:
                what = "the result" if number == len(spec.inputs) else f"operand {number}"
                raise SearchLimitError(f"{what} would have more than 2^62 elements; the sizes must be wrong")
