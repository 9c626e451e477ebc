"""A contraction: what is computed, the shapes, strides and dtypes of its arrays, and the caller's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from planner.cost.device import Device
from planner.language.derive import resize_spec
from planner.language.errors import PlannerError
from planner.language.options import Options
from planner.language.resolve import Resolved
from planner.language.spec import Operand, gather_of, is_symbol, stand_in
from planner.language.split import Entry, Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Contraction:
    """One contraction, as the searches see it. A plan is a contraction with its tree and its programs.

    Attributes:
        text: the spec as the caller wrote it.
        resolved: the resolved spec, and the shapes that fit the arrays to it.
        index_shapes: the shapes of the index arrays as the caller passed them, by letter.
        operands: shape, dtype, strides and gradient flag of each operand.
        dtype: the dtype of the computation and the result.
        index_mode: what an index out of range does: a name of `planner.language.options.MODES`.
        backend: "torch", "jax" or "numpy".
        device: the rates that predict times.
        options: what the caller asked for: objective, limits, search.
        gradient_strides: the strides of the output's gradient; None if they are those of the result.
        symbols: for each axis or bracket of a symbolic size: its name, the size as text, and the number that stands for
            it in the spec; see `at_numbers`. Then steps are stock ones, which need no numbers.
        mesh: if the contraction is one device's part of another, the mesh and that other; else None.
    """

    text: str
    resolved: Resolved
    index_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[Operand, ...]
    dtype: str
    index_mode: str
    backend: str
    device: Device
    options: Options
    gradient_strides: tuple[int, ...] | None = None
    symbols: tuple[tuple[str, str, int], ...] = ()
    mesh: OnMesh | None = None

    def as_planned(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return a shape with the numbers that stand for its symbolic sizes, where the contraction has these sizes."""
        numbers = {size: number for _, size, number in self.symbols}
        return tuple([numbers.get(str(n), n) if is_symbol(n) else n for n in shape])

    @property
    def hidden_sizes(self) -> dict[str, int]:
        """The sizes of the output's axes and scattered dimensions by letter, but for symbolic ones."""
        symbolic = {name for name, _, _ in self.symbols}
        return {
            gather.array if (gather := gather_of(entry)) else str(entry): self.resolved.spec.size(entry)
            for entry in self.resolved.spec.output
            if str(entry) not in symbolic
        }

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        """Which operands need a gradient."""
        return tuple(operand.requires_grad for operand in self.operands)

    @property
    def may_be_differentiated(self) -> bool:
        """Whether gradients may be asked for: JAX differentiates any plan."""
        return self.backend == "jax" or any(self.requires_grad)


@dataclasses.dataclass(frozen=True, slots=True)
class OnMesh:
    """A contraction whose arrays are split over a mesh of devices. See `planner.language.split`.

    Attributes:
        axes: the axes of the mesh: pairs of a name and a size.
        whole: the contraction of the whole arrays.
        operands: the placement of each operand, in the shape that the spec has.
        indices: the placement of each index array, by letter.
        result: the placement that the caller wants for the result; None for the one that it has.
        split: the entries of the whole spec that are split, each with its axes of the mesh.
    """

    axes: tuple[tuple[str, int], ...]
    whole: Contraction
    operands: tuple[Placement, ...]
    indices: tuple[tuple[str, Placement], ...]
    result: Placement | None
    split: tuple[tuple[Entry, tuple[str, ...]], ...]


def at_numbers(contraction: Contraction) -> Contraction:
    """Return a contraction with numbers in place of symbolic sizes; see `planner.language.spec.stand_in`.

    Raises:
        PlannerError: it has symbolic sizes and a limit in bytes.
    """
    spec = contraction.resolved.spec
    symbols = {entry: size for entry, size in spec.by_entry.items() if is_symbol(size)}
    if not symbols:
        return contraction
    if contraction.options.limited:
        entry, size = next(iter(symbols.items()))
        what = f"the dimension {entry}" if gather_of(entry) else f"axis {entry!r}"
        raise PlannerError(
            f"memory_limit= and retain_limit= are bytes, but {what} has the symbolic size {size}: leave the limits out "
            "(minimize='peak' and minimize='retained' work), or export at a size that is a number"
        )
    numbers: dict[Any, int] = {}
    for size in [symbols[gather] for gather in spec.gathers if gather in symbols]:
        number = stand_in(size)
        while number in [numbers.get(other.size, other.size) for other in spec.gathers if other.size != size]:
            number += 1  # indexed dimensions of different sizes stay different dimensions
        numbers.setdefault(size, number)
    numbers = {size: stand_in(size) for size in symbols.values()} | numbers

    def shape(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([numbers.get(n, n) for n in sizes])

    resolved = contraction.resolved
    sizes = {entry: numbers.get(size, size) for entry, size in spec.by_entry.items()}
    return dataclasses.replace(
        contraction,
        resolved=Resolved(
            resize_spec(spec, sizes),
            tuple(map(shape, resolved.shapes)),
            tuple((name, shape(own)) for name, own in resolved.index_shapes),
        ),
        index_shapes=tuple((name, shape(own)) for name, own in contraction.index_shapes),
        operands=tuple(dataclasses.replace(o, shape=shape(o.shape)) for o in contraction.operands),
        symbols=tuple((str(entry), str(size), numbers[size]) for entry, size in symbols.items()),
    )
