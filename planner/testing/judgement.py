"""What is checked, how results are compared, and what is raised when they differ.

Operands are small integers: wherever every number that a plan can meet is exact in the dtype, results must be
equal; elsewhere they may differ by as much as rounding can explain: some units in the last place of the sum of the
absolute values for each term and each step (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002,
section 3.1).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis.errors import HypothesisException

from planner.api import contract, plan
from planner.language.spec import Spec, Term
from planner.program.implementations import Implementation
from planner.testing.engines import Call
from planner.testing.problem import FLOATS, Array, Problem

__all__ = ["Broken", "Subject", "absolute", "allowed", "differs", "raising", "steps_of", "terms_of"]


class Broken(Exception):
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


@contextlib.contextmanager
def raising(problem: Problem, script: Callable[[], str]) -> Iterator[None]:
    """What is raised inside breaks the law, with the script that shows it."""
    try:
        yield
    except (Broken, HypothesisException):
        raise
    except (Exception, SystemExit) as error:
        raise Broken(problem, "an error was raised", f"{type(error).__name__}: {error}", "", script()) from error


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
    kernel: Implementation | None = None
    paths: tuple[Any, ...] | None = None
    passes_mode: bool = False

    def call(self, problem: Problem, **options: Any) -> Call:
        """The problem's contraction; `alternative` is the number of a plan that was not taken."""
        if self.implementation is not None:
            function, own = self.implementation, self.passed(problem)
            return lambda operands, indices: function(*operands, **own, **indices)
        fixed: dict[str, Any] = {"sizes": problem.sizes, "index_mode": problem.index_mode, **options}
        if "alternative" not in fixed:
            return lambda operands, indices: contract(problem.spec, *operands, **fixed, **indices)
        number = fixed.pop("alternative")

        def other(operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
            made = plan(problem.spec, *operands, **fixed, **indices).alternatives()
            return made[number].plan(*operands, **indices)

        return other

    def passed(self, problem: Problem) -> dict[str, Any]:
        """Keyword arguments of an implementation, besides index arrays."""
        own: dict[str, Any] = {"sizes": problem.sizes} if problem.sizes is not None else {}
        return own | ({"index_mode": problem.index_mode} if self.passes_mode else {})


_DIGITS = {"float16": 11, "bfloat16": 8, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53}


def allowed(dtype: str, steps: int, terms: int, size: Array) -> Array:
    """By how much a result may differ that rounding explains.

    Each step rounds once to the dtype; within a step sums are rounded as often as they have terms, for half types in
    float32.

    Args:
        dtype: of intermediates and of the result.
        steps: how many steps may lead to it.
        terms: how many terms are added up to it at most.
        size: the same sum of absolute values.
    """
    inside = max(_DIGITS[dtype], 24)
    room: Array = (2 * steps * 2.0 ** -_DIGITS[dtype] + 4 * terms * 2.0**-inside) * size
    return room


def terms_of(spec: Spec, term: Term) -> int:
    """How many points of a resolved spec add up to one entry of a term, at most."""
    kept = {entry for entry in term if isinstance(entry, str)}
    return math.prod(max(1, size) for axis, size in spec.sizes if axis not in kept)


def steps_of(spec: Spec) -> int:
    """How many steps a plan of a resolved spec has at most: a product or a take each."""
    return len(spec.inputs) + len(spec.gathers) + 1


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
