"""What is checked, how results are compared, and what is raised when they differ.

Operands are small integers: wherever every number that a plan can meet is exact in the dtype, results must be
equal; elsewhere they may differ by as much as rounding can explain, n units in the last place of the sum of the
absolute values, with n the number of terms (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002,
section 3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.api import contract
from planner.testing.engines import Call
from planner.testing.problem import FLOATS, Array, Problem

if TYPE_CHECKING:
    from planner.backends.protocol import Lowering

__all__ = ["Broken", "Subject", "absolute", "allowed", "differs", "points"]


class Broken(Exception):  # noqa: N818 - it is no error of ours, but what was found
    """A law does not hold.

    Attributes:
        problem: the problem that shows it.
        what: what is wrong, such as "the result differs".
        found: what came out, as text.
        expected: what should have.
        script: a Python program that shows both.
    """

    def __init__(self, problem: Problem, what: str, found: str, expected: str, script: str) -> None:
        self.problem, self.what, self.found, self.expected, self.script = problem, what, found, expected, script
        super().__init__(what)


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """What is checked.

    Attributes:
        implementation: a function of operands, and index arrays by keyword; None for `planner.contract`.
        kernel: a row for a backend's table, beside the backend's own; None for those.
        paths: what `optimize=` is to take; None for all pairwise orders of up to four operands, and the searches.
        passes_mode: whether the implementation takes `index_mode=`.
    """

    implementation: Callable[..., Any] | None = None
    kernel: Lowering | None = None
    paths: tuple[Any, ...] | None = None
    passes_mode: bool = False

    def call(self, problem: Problem, **options: Any) -> Call:
        """The problem's contraction."""
        arguments = problem.arguments()
        fixed: dict[str, Any] = {name: arguments[name] for name in ("sizes", "index_mode")}
        if self.implementation is None:
            return lambda operands, indices: contract(problem.spec, *operands, **fixed, **options, **indices)
        own: dict[str, Any] = {"sizes": problem.sizes} if problem.sizes is not None else {}
        own |= {"index_mode": problem.index_mode} if self.passes_mode else {}
        return lambda operands, indices: self.implementation(*operands, **own, **indices)  # type: ignore[misc]


def allowed(dtype: str, points: int, size: Array) -> Array:
    """By how much a sum may differ that rounding in a dtype explains; `size` is that of the absolute values."""
    digits = {"float16": 11, "bfloat16": 8, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53}
    room: Array = 4 * points * 2.0 ** -digits[dtype] * size
    return room


def points(problem: Problem) -> int:
    """Terms of the longest sum that a plan can make, factors counted."""
    sizes = dict(problem.resolved().sizes)
    return int(np.prod([max(1, n) for n in sizes.values()], dtype=object)) + len(problem.shapes)


def differs(found: tuple[Array, str], expected: Array, dtype: str, room: Callable[[], Array] | None) -> str:
    """In what a result differs from what is expected; "" if it does not. `room` is None where it must be equal."""
    array, name = found
    if name != dtype:
        return f"has dtype {name}, not {dtype}"
    if array.shape != expected.shape:
        return f"has shape {array.shape}, not {expected.shape}"
    wanted = expected.astype(array.dtype)
    if room is None or dtype not in FLOATS:
        return "" if (array == wanted).all() else "differs"
    return "" if (np.abs(array - expected) <= room()).all() else "differs by more than rounding"


def absolute(x: Array) -> Array:
    """Absolute values; of a complex number, the sum of those of its parts."""
    size: Array = np.abs(x.real) + np.abs(x.imag)
    return size
