"""Specs from specs: the gradient, the batching and the slices of a contraction are contractions again.

Read each index array q as a one-hot factor: E[n, m] is 1 where q[n] = m, else 0. Then a resolved spec is the
multilinear map

    y[out] = sum over all axes not in `out` of  prod_i x_i[term_i] * prod E.

It is linear in each x_i. Its transpose in x_i is the same sum with x_i's term as the output. The factors E do not
distinguish inputs from outputs. So a gather in an input becomes a scatter in the output, and the other way round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import SupportsIndex

from planner.language.errors import ShapeError, SpecError
from planner.language.spec import Gather, Spec, Term, is_axis, is_symbol, replace_gathers, term_axes, unused_letters


def _check_resolved(spec: object, what: str) -> None:
    """Raise an error unless the spec is resolved: all its sizes are known."""
    if isinstance(spec, Spec):
        sizes = spec.by_axis
        if all(axis in sizes for axis in spec.axes) and all(gather.size is not None for gather in spec.gathers):
            return
    raise SpecError(f"{what} takes a resolved spec, not {str(spec)!r:.80}: pass planner.resolve(spec, *shapes)")


def _is_integer(x: object) -> bool:
    return isinstance(x, SupportsIndex) and not isinstance(x, bool)


def transpose(spec: Spec, operand: int) -> Spec:
    """Return the spec of an operand's gradient. In its inputs, the output's gradient takes the operand's place.

    Example:
        >>> import planner
        >>> spec = planner.resolve("nij, q[n]jk -> nik", (5, 1, 2), (3, 2, 4), q=(5,))
        >>> print(planner.transpose(spec, 0))
        nik, q[n]jk -> nij
        >>> print(planner.transpose(spec, 1))
        nij, nik -> q[n]jk

    Args:
        spec: a resolved spec.
        operand: number of the operand.

    Returns:
        The transposed spec. Transposing it again in the same operand gives `spec` back. It never conjugates.

    Raises:
        ShapeError: there is no such operand.
        SpecError: the spec is not resolved.
    """
    _check_resolved(spec, "transpose")
    if not _is_integer(operand):
        raise ShapeError(f"the operand is given by its number, not by {operand!r}")
    if not -len(spec.inputs) <= operand < len(spec.inputs):
        raise ShapeError(f"'{spec}' has {len(spec.inputs)} operands, so there is no operand {operand}")
    return swap_with_output(spec, operand % len(spec.inputs))


def swap_with_output(spec: Spec, operand: int) -> Spec:
    """Return the spec in which an operand's term and the output's term have changed places: `transpose`, unchecked."""
    inputs = (*spec.inputs[:operand], spec.output, *spec.inputs[operand + 1 :])
    swapped = Spec(inputs, spec.inputs[operand], spec.sizes)
    vars(swapped).update(by_axis=spec.by_axis, wide=spec.wide)  # both have the same, so that it is found once
    return swapped


def batched(
    spec: Spec,
    size: int,
    operands: Collection[int] | None = None,
    arrays: Collection[str] = (),
    letter: str | None = None,
) -> Spec:
    """Return the spec with one more leading axis, as `vmap` computes it.

    Example:
        >>> import planner
        >>> spec = planner.resolve("ij, jk -> ik", (2, 3), (3, 4))
        >>> print(planner.batched(spec, 5, operands=[1]))
        ij, ajk -> aik

    Args:
        spec: a resolved spec.
        size: size of the new axis.
        operands: numbers of the operands that have the new axis as their first; None for all.
        arrays: index arrays that have the new axis as their first.
        letter: name of the new axis, a character; the first unused letter by default.

    Returns:
        The batched spec. The new axis is the first of its output.

    Raises:
        ShapeError: there is no such operand or index array, the letter cannot name an axis or is in use, or the size
            is not a non-negative integer.
        SpecError: the spec is not resolved.
    """
    _check_resolved(spec, "batched")
    if not is_symbol(size) and (not _is_integer(size) or size < 0):
        raise ShapeError(f"the size of the new axis must be a non-negative integer, but is {size!r}")
    chosen = set(range(len(spec.inputs)) if operands is None else operands)
    used = {axis for axis, _ in spec.sizes} | set(spec.arrays)
    axis = letter or unused_letters(used, 1)[0]
    if not (isinstance(axis, str) and is_axis(axis)):
        raise ShapeError(f"the new axis must be one character that can name an axis, not {letter!r}")
    if axis in used:
        raise ShapeError(f"{axis!r} is in use in '{spec}'")
    if not chosen <= set(range(len(spec.inputs))):
        raise ShapeError(f"'{spec}' has {len(spec.inputs)} operands, so there is no operand {max(chosen)}")
    if missing := set(arrays) - set(spec.arrays):
        raise ShapeError(f"'{spec}' has no index array {min(missing)!r}")

    def batch_brackets(term: Term) -> Term:
        return tuple(
            dataclasses.replace(e, axes=(axis, *e.axes)) if isinstance(e, Gather) and e.array in arrays else e
            for e in term
        )

    inputs = []
    for number, term in enumerate(spec.inputs):
        leading = (axis,) if number in chosen else ()
        inputs.append((*leading, *batch_brackets(term)))
    sizes = tuple(sorted((*spec.sizes, (axis, size))))
    return Spec(tuple(inputs), (axis, *batch_brackets(spec.output)), sizes)


def summable_dims(spec: Spec) -> tuple[int, ...]:
    """Return the dimensions of the output that `sum_dims` may sum over: axes that some input has, also in brackets.

    Any other axis would be in no term of the summed spec, so the sum over it would be lost.
    """
    input_axes = {axis for term in spec.inputs for axis in term_axes(term)}
    return tuple(d for d, entry in enumerate(spec.output) if isinstance(entry, str) and entry in input_axes)


def sum_dims(spec: Spec, dims: Collection[int]) -> Spec:
    """Return the spec whose output is summed over some of its dimensions.

    If an output gradient repeats along these dimensions, both specs have the same gradients: then one slice of it is
    the output gradient of the sum.

    Args:
        spec: a resolved spec.
        dims: some of the `summable_dims`.
    """
    return dataclasses.replace(spec, output=tuple(e for d, e in enumerate(spec.output) if d not in dims))


def resize_spec(spec: Spec, sizes: Mapping[str | Gather, int]) -> Spec:
    """Return a spec with other sizes of all axes and gathered dimensions.

    Args:
        spec: a resolved spec.
        sizes: the new size of each axis and of each gather of the spec.
    """

    def resize(gather: Gather) -> Gather:
        return dataclasses.replace(gather, size=sizes[gather])

    *inputs, output = [replace_gathers(term, resize) for term in spec.terms] if spec.gathers else spec.terms
    return Spec(tuple(inputs), output, tuple([(axis, sizes[axis]) for axis, _ in spec.sizes]))


def slice_spec(spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """Return the spec of one slice: some axes shorter, all else the same.

    Cut along an axis that is summed, a contraction is the sum of its slices. Cut along an axis of the result, it is
    their concatenation. Cutting an axis in brackets slices the index array, not the dimension that it indexes.

    Args:
        spec: a resolved spec.
        sizes: for each axis that is cut, its size in the slice.
    """
    return dataclasses.replace(spec, sizes=tuple((axis, sizes.get(axis, size)) for axis, size in spec.sizes))
