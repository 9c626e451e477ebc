"""Resolve a parsed spec by the shapes of its arrays: no ellipsis, no size-1 broadcasting, every size known."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.language.errors import SearchLimitError, ShapeError, SpecError
from planner.language.parse import parse
from planner.language.spec import ELLIPSIS, Gather, Spec, Term, is_symbol, unused_letters

Shape = tuple[int, ...]
_MAX_ELEMENTS = 2**62
# Searches for more operands would take minutes and more, so calls with more are refused.
MOST_OPERANDS = 5_000


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A resolved spec and the views that fit the caller's arrays to it.

    Attributes:
        spec: the resolved spec.
        shapes: shape of each operand as the spec sees it: without the dimensions of size 1 that are broadcast.
        index_shapes: the same for each index array.
    """

    spec: Spec
    shapes: tuple[Shape, ...]
    index_shapes: tuple[tuple[str, Shape], ...]

    @classmethod
    def of(cls, spec: Spec) -> Resolved:
        """Return a resolved spec for arrays that have the shapes it says."""
        index_shapes = {gather.array: spec.shape(gather.axes) for gather in spec.gathers}
        return cls(spec, tuple(map(spec.shape, spec.inputs)), tuple(index_shapes.items()))


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
        sizes: sizes of output axes that no input has, and of output dimensions that are added into through an index
            array, by the array's letter; or the whole output shape as a tuple.
        **indices: index arrays or their shapes, by letter.

    Returns:
        The resolved spec.

    Raises:
        PlannerTypeError: the spec is neither.
        SpecError: the spec is malformed, or an index array is missing or not in the spec.
        ShapeError: shapes contradict the spec or each other.
    """
    shapes = tuple(shape_of(operand, f"operand {number}") for number, operand in enumerate(operands))
    index_shapes = {name: shape_of(index, f"index array {name!r}") for name, index in indices.items()}
    return resolve_shapes(spec, shapes, index_shapes, sizes).spec


def shape_of(array: Any, what: str = "an operand") -> Shape:
    """Return the shape of an array, a stand-in or a shape itself.

    Raises:
        ShapeError: it has no shape, or an entry of its shape is not a size.
    """
    shape = array if isinstance(array, (tuple, list)) else getattr(array, "shape", None)
    if shape is None:
        raise ShapeError(f"{what} is neither an array nor a shape: {array!r:.80}")
    try:
        sizes = tuple(n if is_symbol(n) else operator.index(n) for n in shape)
    except TypeError:
        raise ShapeError(f"{what} has the shape {shape!r:.80}: sizes are integers") from None
    if any(n < 0 for n in sizes if not is_symbol(n)):
        raise ShapeError(f"{what} has the shape {shape!r:.80}: sizes are not negative")
    return sizes


def resolve_shapes(
    spec: str | Spec,
    shapes: Sequence[Shape],
    index_shapes: Mapping[str, Shape],
    sizes: Mapping[str, int] | Sequence[int] | None = None,
) -> Resolved:
    """Resolve a spec by shapes alone, and return how the arrays must be reshaped to fit it.

    Args:
        spec: a spec string or a parsed spec.
        shapes: the shape of each operand.
        index_shapes: the shape of each index array, by letter.
        sizes: as in `resolve`.

    Raises:
        SpecError: the spec is malformed, or an index array is missing or not in the spec.
        ShapeError: shapes contradict the spec or each other.
        SearchLimitError: there are more operands, or more elements, than one call can have.
    """
    parsed = spec if isinstance(spec, Spec) else parse(spec)
    _check_counts(parsed, shapes, index_shapes, spec if isinstance(spec, str) else str(spec))
    if len(shapes) > MOST_OPERANDS:
        raise SearchLimitError(
            f"{len(shapes)} operands are more than the {MOST_OPERANDS} that one call takes: contract some first"
        )
    if parsed.sizes or any(gather.size is not None for gather in parsed.gathers):
        return _already_resolved(parsed, shapes, index_shapes, sizes)
    parsed = expand_ellipses(parsed, shapes, index_shapes)
    axis_sizes = _axis_sizes(parsed, shapes, index_shapes)
    letter_sizes, output_shape = _given_sizes(parsed, sizes)
    kept_dims = _kept_index_dims(parsed, index_shapes, axis_sizes)

    terms = [
        _resolve_input(term, shape, axis_sizes, kept_dims) for term, shape in zip(parsed.inputs, shapes, strict=True)
    ]
    inputs = tuple(terms)
    output = _resolve_output(parsed.output, inputs, axis_sizes, kept_dims, letter_sizes, output_shape)
    _check_given_sizes(parsed, inputs, output, axis_sizes, letter_sizes)
    resolved = Spec(inputs, output, tuple(sorted(axis_sizes.items())))
    _check_addressable(resolved)
    index_views = tuple((name, tuple(index_shapes[name][d] for d in kept_dims[name])) for name in resolved.arrays)
    return Resolved(resolved, tuple(map(resolved.shape, inputs)), index_views)


def _kept_index_dims(
    spec: Spec, index_shapes: Mapping[str, Shape], axis_sizes: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of each index array that are not broadcast.

    One view of an index array serves all of its brackets. So a dimension of size 1 goes if any axis on it is larger.
    """
    kept: dict[str, tuple[int, ...]] = {}
    for name, shape in index_shapes.items():
        brackets = [gather.axes for gather in spec.gathers if gather.array == name]
        dims = []
        for d, size in enumerate(shape):
            is_broadcast = size == 1 and any(axis_sizes[axes[d]] != 1 for axes in brackets)
            if not is_broadcast:
                dims.append(d)
        kept[name] = tuple(dims)
    return kept


def _resolve_gather(gather: Gather, size: int, kept_dims: Mapping[str, tuple[int, ...]]) -> Gather:
    """Return a gather with the axes of its array's kept dimensions, and the size of the dimension that it indexes."""
    return Gather(gather.array, tuple(gather.axes[d] for d in kept_dims[gather.array]), size)


def _resolve_input(
    term: Term, shape: Shape, axis_sizes: Mapping[str, int], kept_dims: Mapping[str, tuple[int, ...]]
) -> Term:
    """Return an input's term without the dimensions of size 1 that are broadcast."""
    entries: list[str | Gather] = []
    for entry, size in zip(term, shape, strict=True):
        if isinstance(entry, Gather):
            entries.append(_resolve_gather(entry, size, kept_dims))
        elif size == axis_sizes[entry]:
            entries.append(entry)
    return tuple(entries)


def _resolve_output(
    term: Term,
    inputs: Sequence[Term],
    axis_sizes: dict[str, int],
    kept_dims: Mapping[str, tuple[int, ...]],
    letter_sizes: Mapping[str, int],
    output_shape: Shape | None,
) -> Term:
    """Return the output's term with the size of each gather; enter the sizes of axes that no input has.

    Args:
        term: the output's term.
        inputs: the resolved terms of the inputs.
        axis_sizes: the size of each axis. Those that only `sizes=` gives are added.
        kept_dims: the dimensions of each index array that are not broadcast.
        letter_sizes: the sizes that `sizes=` gives by letter.
        output_shape: the whole output shape, if `sizes=` gives it.
    """
    read_sizes: dict[str, int | None] = {}
    for input_term in inputs:
        for entry in input_term:
            if isinstance(entry, Gather):
                read_sizes.setdefault(entry.array, entry.size)
    output: list[str | Gather] = []
    for position, entry in enumerate(term):
        asked = output_shape[position] if output_shape is not None else None
        if isinstance(entry, Gather):
            sources = (asked, letter_sizes.get(entry.array), read_sizes.get(entry.array))
            size = next((source for source in sources if source is not None), None)
            if size is None:
                raise ShapeError(
                    f"the size of the output's dimension {entry} is not known: pass sizes={{{entry.array!r}: N}}"
                )
            output.append(_resolve_gather(entry, size, kept_dims))
            continue
        if asked is None:
            asked = letter_sizes.get(entry)
        if entry not in axis_sizes:
            if asked is None:
                raise ShapeError(
                    f"no input has the output's axis {entry!r}, so its size is not known: pass sizes={{{entry!r}: N}}"
                    + (f", or mend a typo: the inputs have {shorten(', '.join(axis_sizes))}" if axis_sizes else "")
                )
            axis_sizes[entry] = asked
        elif asked is not None and asked != axis_sizes[entry]:
            raise ShapeError(f"sizes= says {asked} for axis {entry!r}, but the inputs say {axis_sizes[entry]}")
        output.append(entry)
    return tuple(output)


def _check_given_sizes(
    spec: Spec,
    inputs: Sequence[Term],
    output: Term,
    axis_sizes: Mapping[str, int],
    letter_sizes: Mapping[str, int],
) -> None:
    """Refuse sizes that the inputs contradict, and letters that are not in the spec."""
    written = {entry.array for entry in output if isinstance(entry, Gather)}
    for letter, size in letter_sizes.items():
        if letter in axis_sizes and axis_sizes[letter] != size:
            raise ShapeError(f"sizes= says {size} for axis {letter!r}, but the inputs say {axis_sizes[letter]}")
        if letter not in axis_sizes and letter not in spec.arrays:
            raise ShapeError(
                f"sizes= names {letter!r}, which is neither an axis nor an index array of '{shorten(str(spec))}'"
            )
        read = {
            entry.size or 0 for term in inputs for entry in term if isinstance(entry, Gather) and entry.array == letter
        }
        if read and size not in read and letter not in written:
            said = " and ".join(map(str, sorted(read)))
            raise ShapeError(f"sizes= says {size} for the dimension that {letter!r} indexes, but the inputs say {said}")


def _already_resolved(
    spec: Spec,
    shapes: Sequence[Shape],
    index_shapes: Mapping[str, Shape],
    asked: Mapping[str, int] | Sequence[int] | None,
) -> Resolved:
    """Check that arrays fit a spec that is resolved already."""
    _check_addressable(spec)
    letter_sizes, output_shape = _given_sizes(spec, asked)
    known: dict[str, int | None] = dict(spec.sizes)
    # As in a spec that is not resolved, the letter of an index array stands for the dimension that is added into, or
    # else for the one that is read.
    for gather in (*spec.gathers, *(e for e in spec.output if isinstance(e, Gather))):
        known[gather.array] = gather.size
    for letter, size in letter_sizes.items():
        if known.get(letter) != size:
            raise ShapeError(f"sizes= says {size} for {letter!r}, but '{shorten(str(spec))}' is resolved with {known}")
    if output_shape is not None and output_shape != spec.output_shape:
        raise ShapeError(
            f"sizes= says {output_shape}, but the result of '{shorten(str(spec))}' is resolved as {spec.output_shape}"
        )
    for number, (term, shape) in enumerate(zip(spec.inputs, shapes, strict=True)):
        if tuple(shape) != spec.shape(term):
            raise ShapeError(
                f"operand {number} has shape {tuple(shape)}, but '{shorten(str(spec))}' needs {spec.shape(term)}"
            )
    for gather in spec.gathers:
        wanted = spec.shape(gather.axes)
        if tuple(index_shapes[gather.array]) != wanted:
            raise ShapeError(f"index array {gather.array!r} has shape {index_shapes[gather.array]}, not {wanted}")
    return Resolved(spec, tuple(shapes), tuple((name, tuple(index_shapes[name])) for name in spec.arrays))


def _check_counts(spec: Spec, shapes: Sequence[Shape], index_shapes: Mapping[str, Shape], text: str) -> None:
    """Refuse operands that are too many or too few, and index arrays that are missing or not in the spec.

    `text` is the spec as the caller wrote it.
    """
    arrays = spec.arrays
    if len(spec.inputs) != len(shapes):
        missing, hint = [name for name in arrays if name not in index_shapes], ""
        if len(shapes) > len(spec.inputs) and missing:
            hint = f"; index arrays are keywords: {', '.join(f'{name}=...' for name in missing)}"
        elif len(shapes) > len(spec.inputs) and any(" " in term.strip() for term in text.partition("->")[0].split(",")):
            hint = "; separate terms by commas"
        raise ShapeError(
            f"'{shorten(text)}' has {len(spec.inputs)} input terms, but {len(shapes)} operands were given{hint}"
        )
    for name in arrays:
        if name not in index_shapes:
            raise SpecError(f"the index array {name!r} is missing: pass it as the keyword {name}=...")
    for name in index_shapes:
        if name not in arrays:
            called = re.search(rf"{re.escape(name)}\(([^()\[\],]*)\)", text)
            raise SpecError(
                f"unknown option or index array {name!r}: '{shorten(str(spec))}' "
                + (f"has the index arrays {', '.join(arrays)}" if arrays else "has no index arrays")
                + (f"; did you mean {name}[{called[1]}]?" if called else "")
            )


def shorten(text: str, most: int = 200) -> str:
    """Shorten a text for a message: specs may have 10^5 characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def replace_labels(sizes: Any, letters: Mapping[Any, str]) -> Any:
    """Return `sizes=` of a call in sublist form with letters in place of labels."""
    if not isinstance(sizes, Mapping):
        return sizes
    for label in sizes:
        if label not in letters:
            labels = shorten(str(list(letters)))
            raise ShapeError(f"sizes= names {label!r}, which is not a label of the lists: {labels}")
    return {letters[label]: size for label, size in sizes.items()}


def expand_ellipses(spec: Spec, shapes: Sequence[Shape], index_shapes: Mapping[str, Shape]) -> Spec:
    """Give each ellipsis its axes: aligned at the right, the same letters in every term and bracket."""

    def dots_in(entries: Sequence[Any], dims: int, what: str) -> int:
        """Return how many dimensions the ellipsis of a term or bracket stands for."""
        written = len(entries) - (ELLIPSIS in entries)
        if dims < written or (dims > written and ELLIPSIS not in entries):
            text = shorten("".join(map(str, entries)), 100) or "''"
            raise ShapeError(f"{what} has {dims} dimensions, but its axes are {text}")
        return dims - written

    term_dots = [
        dots_in(term, len(shape), f"operand {number}")
        for number, (term, shape) in enumerate(zip(spec.inputs, shapes, strict=True))
    ]
    bracket_dots = {
        gather: dots_in(gather.axes, len(index_shapes[gather.array]), f"index array {gather.array!r}")
        for gather in spec.gathers
    }
    longest = max((*term_dots, *bracket_dots.values()), default=0)

    used = set(spec.axes)
    used.update(spec.arrays)
    letters = unused_letters(used, longest)

    def expand(entries: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        if ELLIPSIS not in entries:
            return entries
        at = entries.index(ELLIPSIS)
        return (*entries[:at], *letters[longest - count :], *entries[at + 1 :])

    def expand_term(term: Term, count: int) -> Term:
        expanded: list[str | Gather] = []
        for entry in term:
            if isinstance(entry, Gather):
                expanded.append(Gather(entry.array, expand(entry.axes, bracket_dots[entry])))
            else:
                expanded.append(entry)
        return expand(tuple(expanded), count)

    inputs = tuple(expand_term(term, count) for term, count in zip(spec.inputs, term_dots, strict=True))
    return Spec(inputs, expand_term(spec.output, longest))


def _axis_sizes(spec: Spec, shapes: Sequence[Shape], index_shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the size of each axis: the one that its dimensions agree on, apart from those of size 1."""
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}

    def read_sizes(entries: Sequence[Any], shape: Shape, what: str) -> None:
        within: dict[str, int] = {}
        for axis, size in zip(entries, shape, strict=True):
            if isinstance(axis, Gather):
                continue
            if within.setdefault(axis, size) != size:
                raise ShapeError(
                    f"axis {axis!r} repeats within {what} with sizes {within[axis]} and {size}: "
                    "repeated axes of one term must be equal"
                )
            known = sizes.get(axis, 1)
            if known == 1:
                sizes[axis], source[axis] = size, what
            elif size not in (1, known):
                raise ShapeError(f"axis {axis!r} has size {known} in {source[axis]} but {size} in {what}")

    for number, (term, shape) in enumerate(zip(spec.inputs, shapes, strict=True)):
        read_sizes(term, shape, f"operand {number}")
    for gather in spec.gathers:
        read_sizes(gather.axes, index_shapes[gather.array], f"index array {gather.array!r}")
    return sizes


def _given_sizes(spec: Spec, sizes: Mapping[str, int] | Sequence[int] | None) -> tuple[dict[str, int], Shape | None]:
    """Return the sizes that `sizes=` gives by letter, and the whole output shape if it gives that."""
    if sizes is None:
        return {}, None

    def check(size: Any, what: str) -> int:
        if is_symbol(size):
            return size  # type: ignore[no-any-return]
        try:
            number = -1 if isinstance(size, bool) else operator.index(size)
        except TypeError:  # also that of a traced number
            number = -1
        if number < 0:
            raise ShapeError(f"sizes=: {what} must be a non-negative integer, not {size!r}")
        return number

    if isinstance(sizes, Mapping):
        return {str(name): check(size, repr(name)) for name, size in sizes.items()}, None
    text: object = sizes
    if isinstance(text, str) or not isinstance(sizes, Sequence):
        raise ShapeError(f"sizes= takes a mapping of letters or the output's shape, not {type(sizes).__name__}")
    shape = tuple(check(size, f"entry {number}") for number, size in enumerate(sizes))
    if len(shape) != len(spec.output):
        raise ShapeError(
            f"sizes= has {len(shape)} entries, but the output '{shorten(''.join(map(str, spec.output)))}' "
            f"has {len(spec.output)} dimensions"
        )
    return {}, shape


def _check_addressable(spec: Spec) -> None:
    """Refuse results and operands that no address space can hold, before anything multiplies such sizes."""
    for number, term in enumerate(spec.terms):
        elements = 1
        for size in spec.shape(term):
            elements *= 1 if is_symbol(size) else size
            if elements > _MAX_ELEMENTS:
                what = "the result" if number == len(spec.inputs) else f"operand {number}"
                raise SearchLimitError(f"{what} would have more than 2^62 elements; the sizes must be wrong")
