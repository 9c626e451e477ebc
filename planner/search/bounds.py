"""A lower bound on the score of the best plan, so that every plan knows its gap."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.cost.objective import plan_key
from planner.language.dtypes import itemsize
from planner.language.spec import plain_axes, term_gathers
from planner.search.space import Candidate, SearchSpace

__all__ = ["least_by_sizes", "lower_bound"]


def lower_bound(space: SearchSpace, best: Candidate, candidates: Sequence[Candidate]) -> float | None:
    """Return what no plan of a contraction costs less than, as the objective measures it.

    As "proven" does, it holds for plans whose intermediates are row-major, and that go through no loop over slices.

    Args:
        space: the contraction.
        best: the chosen plan.
        candidates: what the searches found.

    Returns:
        Seconds, FLOPs or bytes; None if the objective is a function.
    """
    objective = space.options.minimize
    if callable(objective):
        return None
    figure: float = plan_key(objective)(best.cost)[0]
    if best.proven:
        return figure
    bound = least_by_sizes(space, objective)
    for candidate in candidates:
        if candidate.found is not None:
            bound = max(bound, candidate.found.bound * (1e-12 if objective == "time" else 1))
    return min(figure, bound)


def least_by_sizes(space: SearchSpace, objective: str) -> float:
    """Return a bound that the sizes of operands and result give: each operand is read, and the result is written."""
    spec = space.resolved.spec
    if len(spec.inputs) < 2 or not space.bounded:
        return 0
    sizes = spec.by_axis
    read = [set(plain_axes(term)) for term in spec.inputs if not term_gathers(term)]
    elements = sum(math.prod(sizes[axis] for axis in axes) for axes in read)
    size = min(itemsize(space.dtype), *(itemsize(operand.dtype) for operand in space.operands))
    if objective == "flops":
        # A product multiplies each element of either operand; a sum adds it.
        return -(-elements // 2)
    if objective == "bytes":
        return elements * size
    if objective == "time":
        device = space.device
        moving = elements * size / max(device.bandwidth, device.cache_bandwidth)
        return moving * (1 - 1e-9) + (len(spec.inputs) - 1) * device.launch_seconds
    if objective == "peak":
        known = set().union(*map(set, map(plain_axes, spec.inputs)))
        written = set(plain_axes(spec.output)) & known
        return itemsize(space.dtype) * math.prod(sizes[axis] for axis in written)
    return 0
