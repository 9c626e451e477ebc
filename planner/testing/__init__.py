"""The testing kit: an oracle, random problems, and what calls really allocate.

`reference` needs numpy alone. `problems` and `specs` need hypothesis, which is imported when
one of them is first asked for. `planner.testing.measure` imports each framework when it measures it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Bound at once, not on demand: importing the module of the same name would set the attribute first.
from planner.testing.reference import exact_bound, magnitude, reference, reference_gradients

if TYPE_CHECKING:
    from planner.testing.strategies import Problem, index_arrays, problems, specs

__all__ = [
    "Problem",
    "exact_bound",
    "index_arrays",
    "magnitude",
    "problems",
    "reference",
    "reference_gradients",
    "specs",
]


def __getattr__(name: str) -> Any:
    if name in ("Problem", "index_arrays", "problems", "specs"):
        from planner.testing import strategies

        return getattr(strategies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
