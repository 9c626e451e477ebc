"""The implementations of a step, and of its gradients, that a search under a memory limit chooses from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from planner.program.build import GradientStep, Lowerer, Names
from planner.program.ops import Op, PricedImplementation

# An implementation of a step, those of its gradients, and their rows as far as they are not the best.
Choice = tuple[PricedImplementation, Sequence[GradientStep], Names]


class Implementations:
    """Lists the implementations of steps, each with less scratch than all that are better by the objective.

    Args:
        lower: chooses the best implementation of each step by the objective.
        with_lean: whether to list others than the best.
    """

    def __init__(self, lower: Lowerer, with_lean: bool) -> None:
        self.lower = lower
        # A framework that differentiates rows itself decides on the rows of their gradients.
        self.with_lean = with_lean and not lower.plain

    def __call__(self, op: Op, needs: Sequence[bool]) -> Iterator[Choice]:
        """Yield the implementations of a step, each with the steps of its gradients.

        Args:
            op: the step.
            needs: for each value that it reads, whether its gradient is needed.
        """
        wanted = tuple(needs)

        def forward(lower: Lowerer) -> Sequence[GradientStep]:
            return [GradientStep(op, lower(op), ())]

        def backward(lower: Lowerer) -> Sequence[GradientStep]:
            return lower.gradients(op, wanted) if any(wanted) else ()

        gradients = list(self._ever_leaner(backward))
        for (own,), names in self._ever_leaner(forward):
            for steps, more in gradients:
                yield own.choice, steps, names + more

    def _ever_leaner(
        self, choose: Callable[[Lowerer], Sequence[GradientStep]]
    ) -> Iterator[tuple[Sequence[GradientStep], Names]]:
        """Yield the best choice for some steps, then the best with less scratch, and so on; with the rows to name."""
        steps = choose(self.lower)
        yield steps, ()
        while self.with_lean and (scratch := _scratch(steps)):
            steps = choose(self._below(scratch))
            if _scratch(steps) >= scratch:
                return
            yield steps, tuple((step.op.with_layouts(()), step.choice.lowering) for step in steps)

    def _below(self, scratch: int) -> Lowerer:
        """Return what chooses the best implementations with less scratch."""
        key = self.lower.key
        return Lowerer(
            self.lower.choices, lambda cost: (int(cost.scratch_bytes >= scratch), *key(cost)), self.lower.fixed
        )


def _scratch(steps: Sequence[GradientStep]) -> int:
    return max((step.choice.cost.scratch_bytes for step in steps), default=0)
