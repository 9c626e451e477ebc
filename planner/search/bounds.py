"""A lower bound on the score of the best plan, so that every plan knows its gap."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from planner.cost.objective import plan_key
from planner.language.dtypes import itemsize
from planner.language.spec import plain_axes, term_axes, term_gathers
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.guards import index_bytes
from planner.search.exact.network import Value
from planner.search.exact.sizes import has_tables
from planner.search.space import AUTO, PATH_STOP, Candidate, SearchSpace

# All trees are looked at for up to so many operands.
MOST_OPERANDS = 12


def lower_bound(space: SearchSpace, best: Candidate, candidates: Sequence[Candidate]) -> float | None:
    """Return what no plan of a contraction costs less than, as the objective measures it.

    As "proven" does, it holds for plans whose intermediates are row-major. It holds for loops over slices too if the
    chosen plan has one, or if FLOPs or the peak are minimised.

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
    if best.loop is not None and objective in ("time", "bytes"):
        return min(figure, max(bound, least_of_loops(space, objective)))
    for candidate in candidates:
        if candidate.found is not None:
            bound = max(bound, candidate.found.bound * (1e-12 if objective == "time" else 1))
    return min(figure, bound)


def least_of_loops(space: SearchSpace, objective: str) -> float:
    """Return a bound on time or bytes that holds for loops over slices too; 0 where not all trees can be looked at.

    The slices of a step read and write what the step does, or more. They may all find their values in the cache, and
    write to no new memory. A slice of one row may be multiplied element by element: it reads each joint element then.
    """
    bounds, network, steps = space.step_bounds(objective), space.network, space.steps
    if not (bounds.hold and has_tables(network) and space.may_be_exact(objective, AUTO)):
        return 0
    operands = range(len(space.operands))
    if not 1 < len(operands) <= MOST_OPERANDS:
        return 0
    from planner.search.exact.vectors import VectorListing

    device, size = space.device, itemsize(space.dtype)
    fastest = device.fastest_bandwidth
    skinny = device.most_product_rate(1) if device.products else device.skinny_rate
    rates = (device.flop_rate, device.half_rate, skinny)
    flop_rate, half_rate, skinny_rate = (max(rate, 2 * fastest / size) if rate else 0 for rate in rates)
    device = dataclasses.replace(
        device, flop_rate=flop_rate, half_rate=half_rate, skinny_rate=skinny_rate, bandwidth=fastest,
        cache_bandwidth=fastest, outer_cache_bytes=0, fresh_bandwidth=math.inf, reused_bandwidth=math.inf,
        matrix_seconds=0.0, products=(),
    )  # fmt: skip
    # A slice may have fewer axes, and take no views. A kernel may run it that runs no whole step.
    bounds = dataclasses.replace(bounds, device=device, more=None, launches=(1.0, 1.0))
    reads, limit = {1 << operand: 0 for operand in operands}, None
    if network.gathers:
        taken = [(operand, status) for operand in operands for status, _ in steps.first_takes(operand)]
        taken += [(operand, status) for operand in operands for status, _, _ in steps.casts_last(operand)]
        reads |= {network.number(Value(1 << operand, status)): 0 for operand, status in taken}
        greedy, _ = space.search(objective, PATH_STOP, space.path("greedy"))
        assert greedy is not None
        limit = greedy.score[0][0]
    listing = VectorListing(network, reads, bounds, limit=limit)
    return listing.least * (1e-12 if objective == "time" else 1)


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
        moving = elements * size / device.fastest_bandwidth
        return moving * (1 - 1e-9) + (len(spec.inputs) - 1) * device.launch_seconds
    if objective == "peak":
        known = set().union(*map(set, map(plain_axes, spec.inputs)))
        written = set(plain_axes(spec.output)) & known
        return itemsize(space.dtype) * math.prod(sizes[axis] for axis in written)
    return 0


def least_of_naive(contraction: Contraction) -> int:
    """Return bytes that the naive plan needs at least: those retained with gradients, the peak without.

    It takes whole operands first. A product reads them, and they are kept if the other factor needs a gradient.
    """
    spec, size = contraction.resolved.spec, itemsize(contraction.dtype)
    if len(spec.inputs) < 2 or 0 in spec.by_axis.values() or load_backend(contraction.backend).compiles:
        return 0
    axes, requires, taken = [set(plain_axes(term)) for term in spec.terms], contraction.requires_grad, [0]
    for number, (term, operand) in enumerate(zip(spec.inputs, contraction.operands, strict=True)):
        is_kept = all([*requires[:number], *requires[number + 1 :]])
        if term_gathers(term) and operand.dtype == contraction.dtype and (is_kept or not any(requires)):
            others = set[str]().union(*axes[:number], *axes[number + 1 :])
            taken.append(math.prod([spec.by_axis[axis] for axis in others.intersection(term_axes(term))]))
    if any(requires):
        return sum(taken) * size
    result = math.prod([spec.by_axis[axis] for axis in axes[-1] & set[str]().union(*axes[:-1])])
    held = sum(taken) + result if len(spec.inputs) == 2 else max(*taken, result)
    return held * size + index_bytes(spec)
