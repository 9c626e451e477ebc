"""The conjugates that gradients of complex products copy, and which way of running a plan copies less of them.

Autograd multiplies a gradient by the conjugate of the other operand, and copies that conjugate. A Function of planner's
own conjugates the output's gradient instead, and the gradients that come of it. So a plan that would copy much runs as
a Function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.language.dtypes import itemsize
from planner.language.spec import term_axes
from planner.program.contraction import Contraction
from planner.program.ops import Einsum
from planner.program.program import Programs, Step, Variable

# Autograd may copy so many bytes more than the output's gradient has, because a Function takes time beside its steps. A
# call that copies 0.5 MiB took 217 us by autograd and 258 as a Function, one that copies 5 MiB 1,981 and 807 (one core
# of an AMD EPYC, torch 2.13, 2026-11-29).
_MOST_CONJUGATED = 2**20


def conjugates_much(programs: Programs) -> bool:
    """Whether autograd would copy much more than a Function."""
    if programs.backward is None:
        return False
    return _copies_much(programs.backward.steps, programs.variables, programs.output_gradient)


def conjugated_bytes(
    contraction: Contraction, back: Sequence[Step], variables: Sequence[Variable], output_gradient: int
) -> int:
    """Return the bytes of conjugates that are in memory at once, at most; see `Backend.conjugated_bytes`."""
    gradient = variables[output_gradient]
    if not gradient.dtype.startswith("complex"):
        return 0
    # Under a memory limit plans with gradients run as Functions.
    if contraction.options.memory_limit is not None or _copies_much(back, variables, output_gradient):
        return gradient.bytes
    return max(gradient.bytes, _factor_bytes(back, variables, output_gradient))


def _copies_much(back: Sequence[Step], variables: Sequence[Variable], output_gradient: int) -> bool:
    """Whether the largest conjugate of a backward program has many more bytes than the output's gradient."""
    factor = _factor_bytes(back, variables, output_gradient)
    return factor > variables[output_gradient].bytes + _MOST_CONJUGATED


def _factor_bytes(back: Sequence[Step], variables: Sequence[Variable], output_gradient: int) -> int:
    """Return the bytes of the largest complex value by which steps of a backward program multiply a gradient."""
    factors = [0]
    for step in back:
        if isinstance(step.op, Einsum):
            for term, v in zip(step.op.spec.inputs, step.inputs, strict=True):
                # Variables of the backward program come after the output's gradient.
                if v < output_gradient and variables[v].dtype.startswith("complex"):
                    elements = math.prod(step.op.spec.by_axis[axis] for axis in term_axes(term))
                    factors.append(elements * itemsize(variables[v].dtype))
    return max(factors)
