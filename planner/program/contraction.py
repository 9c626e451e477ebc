"""A contraction: what is computed, the shapes, strides and dtypes of its arrays, and the caller's options."""

from __future__ import annotations

import dataclasses

from planner.cost.device import Device
from planner.language.options import Options
from planner.language.resolve import Resolved
from planner.language.spec import Operand

__all__ = ["Contraction"]


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

    @property
    def requires_grad(self) -> tuple[bool, ...]:
        """Which operands need a gradient."""
        return tuple(operand.requires_grad for operand in self.operands)
