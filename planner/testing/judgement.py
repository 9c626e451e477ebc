"""What is checked, how results are compared, and the error that says that they differ.

Operands are small integers. If every number that a plan can compute is exact in the dtype, results must be equal.
Otherwise they may differ by as much as rounding can explain: some units in the last place of the sum of the absolute
values, for each term and each step (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1).
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
from planner.inspect.meter import Call
from planner.language.spec import Spec, Term, plain_axes
from planner.program.implementations import Implementation
from planner.testing.problem import FLOATS, Array, Problem
from planner.testing.reference import exact_range


class Broken(Exception):
    """A law does not hold.

    Args:
        problem: the problem that shows it.
        what: what is wrong, such as "the result differs".
        found: the result, as text.
        expected: the expected result, as text.
        script: a Python program that prints both.
    """


@contextlib.contextmanager
def raising(problem: Problem, script: Callable[[], str]) -> Iterator[None]:
    """Turn any error raised inside into `Broken`, with the script that shows it."""
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
        implementation: a function of operands, and of index arrays by keyword; None for `planner.contract`.
        kernel: a user's row for a backend's table; None to check the backend's own rows.
        paths: values of `optimize=`; None for all pairwise orders of up to four operands, and the searches.
        passes_mode: whether the implementation takes `index_mode=`.
    """

    implementation: Callable[..., Any] | None = None
    kernel: Implementation | None = None
    paths: tuple[Any, ...] | None = None
    passes_mode: bool = False

    def call(self, problem: Problem, **options: Any) -> Call:
        """Return the problem's contraction as a function; `alternative` is the number of an alternative plan to run."""
        if self.implementation is not None:
            function, keywords = self.implementation, self.keywords(problem)
            return lambda operands, indices: function(*operands, **keywords, **indices)
        fixed: dict[str, Any] = {"sizes": problem.sizes, "index_mode": problem.index_mode, **options}
        if "alternative" not in fixed:
            return lambda operands, indices: contract(problem.spec, *operands, **fixed, **indices)
        number = fixed.pop("alternative")

        def run_alternative(operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
            alternatives = plan(problem.spec, *operands, **fixed, **indices).alternatives()
            return alternatives[number].plan(*operands, **indices)

        return run_alternative

    def keywords(self, problem: Problem) -> dict[str, Any]:
        """Return the keyword arguments of an implementation, without the index arrays."""
        keywords: dict[str, Any] = {}
        if problem.sizes is not None:
            keywords["sizes"] = problem.sizes
        if self.passes_mode:
            keywords["index_mode"] = problem.index_mode
        return keywords


def allowed(dtype: str, steps: int, terms: int, size: Array) -> Array:
    """Return by how much a result may differ because of rounding.

    Each step rounds once to the dtype. Within a step, a sum is rounded once per term; for half types in float32.

    Args:
        dtype: dtype of the intermediates and of the result.
        steps: most steps that lead to the result.
        terms: most terms that are added up.
        size: the same sum, of absolute values.
    """
    unit = 1 / exact_range(dtype)
    room: Array = (2 * steps * unit + 4 * terms * min(unit, 2.0**-24)) * size
    return room


def terms_of(spec: Spec, term: Term) -> int:
    """Return how many points of a resolved spec add up to one entry of a term, at most."""
    kept = set(plain_axes(term))
    return math.prod(max(1, size) for axis, size in spec.sizes if axis not in kept)


def steps_of(spec: Spec) -> int:
    """Return how many steps a plan of a resolved spec has at most; each step is a product or takes rows."""
    return len(spec.inputs) + len(spec.gathers) + 1


def differs(found: tuple[Array, str], expected: Array, dtype: str, room: Callable[[], Array] | None) -> str:
    """Say how a result differs from the expected one; "" if it does not.

    `room` returns the allowed difference; it is None if results must be equal.
    """
    array, name = found
    if name != dtype:
        return f"has dtype {name}, not {dtype}"
    if array.shape != expected.shape:
        return f"has shape {array.shape}, not {expected.shape}"
    wanted = expected.astype(array.dtype)
    filled = np.isnan(array) & np.isnan(wanted)  # an index out of range read NaN
    if room is None or dtype not in FLOATS:
        return "" if ((array == wanted) | filled).all() else "differs"
    return "" if ((np.abs(array - expected) <= room()) | filled).all() else "differs by more than rounding"
