"""The testing kit for users and for the library's own tests: an oracle, random problems, and a check of whole specs.

The names in `__all__` are public and stay; `reference.py` must share no code with what it judges, and Hypothesis is
imported only when a strategy or `check` is first used.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

# Imported at once, not on demand: importing the module `reference` would set the attribute of the same name first.
from planner.testing.problem import DTYPES, Problem
from planner.testing.reference import exact_bound, magnitude, reference, reference_gradients

if TYPE_CHECKING:
    from planner.testing.checking import Failure, Report, Verdict, check
    from planner.testing.steps import run_step
    from planner.testing.strategies import FEATURES, indices, operands, problems, problems_of, specs

__all__ = [
    "DTYPES",
    "FEATURES",
    "Failure",
    "Problem",
    "Report",
    "Verdict",
    "check",
    "exact_bound",
    "indices",
    "magnitude",
    "operands",
    "problems",
    "problems_of",
    "reference",
    "reference_gradients",
    "run_step",
    "specs",
]


def __getattr__(name: str) -> Any:
    if name in __all__ and importlib.util.find_spec("hypothesis") is None:
        raise ModuleNotFoundError(f"{name} needs hypothesis: pip install 'contraction-planner[testing]'")
    if name in __all__:
        from planner.testing import checking, steps, strategies

        module = checking if name in checking.__all__ else steps if name in steps.__all__ else strategies
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _hypothesis_setup_hook() -> None:
    """Register the package's types with Hypothesis, which calls this function when it is imported."""
    import planner.testing.strategies  # noqa: F401
