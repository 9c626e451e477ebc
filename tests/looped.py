"""Plans with loops of a test's choice."""

import dataclasses

from planner.language.errors import PlannerError
from planner.search.parts import whole_part
from planner.search.slicing import _loop_around, _price_tree
from planner.search.space import SearchSpace


def make_loop(plan, axes, around=None):
    """Return a plan with the same tree that goes slice by slice, whatever it costs.

    Args:
        plan: a plan; if its tree has a loop, that one runs in each slice.
        axes: the size of a slice for each axis that is cut, the outermost first.
        around: the part of the tree to cut; all of it by default.

    Raises:
        PlannerError: there can be no loop around that part.
    """
    space, key = SearchSpace(plan.contraction), plan.options.objective
    part = around or whole_part(plan.contraction, plan.tree)
    looped = _price_tree(space, _loop_around(space, part, tuple(axes.items()), key), space.lowerer(key))
    if looped is None:
        raise PlannerError("values lie in another order than the loop expects")
    return dataclasses.replace(plan, tree=looped.tree, programs=looped.programs, proven=False, origin="sliced")
