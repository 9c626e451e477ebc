"""A contraction: what is computed, the shapes, strides and dtypes of its arrays, and the caller's options."""

from __future__ import annotations

import dataclasses

from planner.cost.device import Device
from planner.language.options import Options
from planner.language.resolve import Resolved
from planner.language.spec import Operand
from planner.language.split import Entry, Placement

__all__ = ["Contraction", "OnMesh"]


@dataclasses.dataclass(frozen=True, slots=True)
class Contraction:
    """One contraction, as the searches see it. A plan is a contraction with its tree and its programs.

    Attributes:
        text: the spec as the caller wrote it.
        resolved: the resolved spec, and the shapes that fit the arrays to it.
        index_shapes: the shapes of the index arrays as the caller passed them, by letter.
        operands: shape, dtype, strides and gradient flag of each operand.
        dtype: the dtype of the computation and the result.
        index_mode: what an index out of range does: "raise", "drop" or "clip".
        backend: "torch", "jax" or "numpy".
        device: the rates that predict times.
        options: what the caller asked for: objective, limits, search.
        gradient_strides: the strides of the output's gradient; None if they are those of the result.
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
    mesh: OnMesh | None = None

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        """Which operands need a gradient."""
        return tuple(operand.requires_grad for operand in self.operands)


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
