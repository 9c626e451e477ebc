"""The plan: what was chosen for one contraction, why, at what cost; immutable, callable, printable."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from planner.cost.device import Device
from planner.cost.figures import PlanCost
from planner.language.errors import PlannerError
from planner.language.options import Options
from planner.language.resolve import Resolved, cut
from planner.language.spec import Operand
from planner.program.program import Keep, Programs, Step
from planner.program.tree import Leaf, Node, Tree, kept_nodes, path_of

if TYPE_CHECKING:
    from planner.inspect.analyze import Analysis
    from planner.inspect.collectives import Collective
    from planner.inspect.verdicts import Implementation

__all__ = ["Alternative", "Loop", "Plan"]


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was considered and not taken.

    Attributes:
        plan: the plan, as runnable as the chosen one.
        origin: where it comes from.
        loses: why it was not taken, in figures.
    """

    plan: Plan
    origin: str
    loses: str

    def __str__(self) -> str:
        steps = "; ".join(str(step.op.spec) for step in self.plan.programs.forward.steps)
        return f"{self.origin}: {steps or 'no steps'} ({self.loses})"


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A contraction done slice by slice; nothing of a slice outlives it, in the backward program either.

    Attributes:
        axes: each axis that is cut and the size of its slices (the last may be shorter), the outermost first.
        body: the plan of one whole slice.
    """

    axes: tuple[tuple[str, int], ...]
    body: Plan

    def __str__(self) -> str:
        return "loop over " + ", ".join(f"{axis} by {size}" for axis, size in self.axes)


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Plan:
    """How one contraction will be done.

    Example:
        >>> import planner
        >>> p = planner.plan("ij, jk, kl -> il", (2, 30), (30, 40), (40, 5), backend="numpy")
        >>> p.path, p.cost.flops
        (((0, 1), (0, 1)), 5600)

    Attributes:
        text: the spec as it was given.
        resolved: the resolved spec and the views that fit the operands to it.
        index_shapes: shapes of the index arrays that the plan was made for, as they were given.
        operands: shapes, dtypes, strides and gradient flags that the plan was made for.
        dtype: dtype of the computation and the result.
        index_mode: what out-of-range indices do.
        backend: "torch", "jax" or "numpy".
        device: the rates by which time was predicted.
        options: what was asked for.
        tree: the chosen contraction tree; its nodes say which values are kept for the backward program.
        programs: the forward and the backward program.
        naive_cost: cost of taking the gathered operands first and contracting pairwise in the framework's way.
        proven: whether no better plan within the limits exists in the space that was searched: all trees and, with
            limits and for peak and retained bytes, all choices of what is kept; each step done as the objective has it,
            on row-major intermediates.
        origin: how the tree was found.
        loop: the loop over slices, if the plan is one; each program then is that loop, as one step.
        compiled_bytes: peak of the larger program as the framework compiled it, where a memory limit had it compiled.
        gradient_strides: how the output's gradient lies that the plan was made for; None for one that lies as the
            result does.
    """

    text: str
    resolved: Resolved
    index_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[Operand, ...]
    dtype: str
    index_mode: str
    backend: str
    device: Device
    options: Options
    tree: Tree
    programs: Programs
    naive_cost: PlanCost
    proven: bool
    origin: str
    loop: Loop | None = None
    compiled_bytes: int | None = None
    gradient_strides: tuple[int, ...] | None = None

    @property
    def cost(self) -> PlanCost:
        """Predicted cost of both programs."""
        return self.programs.cost

    @property
    def steps(self) -> tuple[Step, ...]:
        """Steps of the forward program, then those of the backward program."""
        backward = self.programs.backward
        return self.programs.forward.steps + (backward.steps if backward else ())

    @property
    def keep(self) -> Keep:
        """What the forward program leaves to the backward program: "all" that it needs, "some" or only the "inputs"."""
        backward = self.programs.backward
        if backward is not None and self.loop is not None:
            return "inputs"
        if backward is None or not any(step.recomputed for step in backward.steps):
            return "all"
        bases = {self.programs.variables[v].base for v in self.programs.kept}
        return "some" if bases - set(range(len(self.operands))) else "inputs"

    @property
    def kept_nodes(self) -> tuple[Node, ...]:
        """Nodes of the tree whose values the forward program leaves to the backward program."""
        return kept_nodes(self.tree, [operand.requires_grad for operand in self.operands])

    @property
    def path(self) -> tuple[tuple[int, ...], ...]:
        """The order of contraction in opt_einsum's form."""
        return path_of(self.tree, len(self.operands))

    def __call__(self, *operands: Any, **indices: Any) -> Any:
        """Run the plan.

        Args:
            *operands: arrays of the shapes and dtypes that the plan was made for.
            **indices: index arrays, by letter.

        Returns:
            The result, an array of the same framework on the same device.

        Raises:
            ShapeError: an operand or index array does not fit the plan.
            IndexRangeError: an index is out of range.
        """
        from planner.program.frameworks import for_dynamo, torch_compiles
        from planner.run import run_plan

        if torch_compiles():
            return for_dynamo().run_plan(self, operands, indices)
        return run_plan(self, operands, indices)

    def analyze(self, *operands: Any, rounds: int = 3, **indices: Any) -> Analysis:
        """Run the plan and measure it: each step and both programs, predicted beside measured.

        Measured are time, bytes alive and bytes retained, and in torch and JAX FLOPs and bytes moved as the framework
        counts them: in torch FLOPs of matrix products alone, in JAX those that XLA counts, a loop's body once.
        In JAX each step is compiled apart, as an eager call does, and the rows "compiled" are of the whole program
        under `jit`. On a CUDA device the allocator's own record of its peak starts anew.

        Example:
            >>> import numpy as np
            >>> import planner
            >>> a, b = np.ones((200, 300), "float32"), np.ones((300, 400), "float32")
            >>> found = planner.plan("ij, jk -> ik", a, b).analyze(a, b)
            >>> found.total("forward").predicted.live_bytes, found.total("forward").measured.live_bytes > 320_000
            (320000, True)

        Args:
            *operands: as in a call of the plan; neither they nor their gradients are changed.
            rounds: of how many runs, after one to warm up, each time is the median.
            **indices: index arrays, by letter.

        Returns:
            The figures, to be printed, or written by `to_json`.

        Raises:
            ShapeError: an operand or index array does not fit the plan.
            IndexRangeError: an index is out of range.
            PlannerError: an array has no values to measure on: it is traced, a meta tensor or a fake one.
        """
        from planner.inspect.analyze import analyze

        return analyze(self, operands, indices, rounds)

    def alternatives(self, most: int = 5) -> tuple[Alternative, ...]:
        """Return the best plans that were not taken, with why each loses."""
        from planner.search.alternatives import alternatives

        return alternatives(self, most)

    def implementations(self) -> tuple[tuple[Implementation, ...], ...]:
        """Return for each of `steps` every implementation that the backend has: its cost, or why it was refused.

        Example:
            >>> import planner
            >>> p = planner.plan("nij, q[n]jk -> nik", (9, 1, 4), (3, 4, 4), q=(9,), backend="numpy")
            >>> print(p.implementations()[0][0])
            matmul: 3.08 us, 192 B of scratch, chosen

        Returns:
            For each step the chosen one first, then the others by predicted time, then those that were refused. Of a
            plan that goes slice by slice, the steps of one slice.
        """
        from planner.inspect.verdicts import implementations

        return implementations(self)

    def collectives(self, splits: Mapping[str, int]) -> tuple[Collective, ...]:
        """Return what devices exchange where arrays are split over a mesh, as JAX does under `jit` by `NamedSharding`.

        Each device computes its part of every step; where a result lacks a split axis, the parts are added up.
        What is placed otherwise than the axes say (of two operands, one split along an axis and one along another over
        the same axis of the mesh, the smaller one; results that the caller wants placed elsewhere) XLA moves besides.

        Example:
            >>> import planner
            >>> p = planner.plan("ij, jk -> ik", (64, 512), (512, 32), backend="numpy")
            >>> p.collectives({"i": 8})
            ()
            >>> print(*p.collectives({"j": 8}))
            ij, jk -> ik: all-reduce over j of 8.19 kB

        Args:
            splits: into how many parts axes of the spec are split, by letter, each over an axis of the mesh of its own;
                the letter of an index array is the dimension that it indexes.

        Returns:
            For each step, forward and backward, the sums between devices, with their bytes on one device.

        Raises:
            PlannerError: there is no such letter, it cannot be split, or the plan is a loop.
        """
        from planner.inspect.collectives import collectives

        return collectives(self, splits)

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` gives an equal plan back.

        Functions among the options (`minimize`, `optimize`) come back as their names: the plan runs as before, but
        what would call them raises a `PlannerError`.

        Raises:
            PlannerError: a rate of the device is NaN.
        """
        from planner.program.serial import encode

        return json.dumps(encode(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that `to_json` wrote.

        Raises:
            PlannerError: the text is no such plan.
        """
        from planner.program.serial import decode

        def refuse(name: str) -> NoReturn:
            raise ValueError(f"{name} is no JSON")

        try:
            plan = decode(json.loads(text, parse_constant=refuse))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlannerError(f"this is no plan written by to_json: {error}") from None
        parts: dict[str, Any] = {
            "resolved": Resolved,
            "index_shapes": tuple,
            "operands": tuple,
            "device": Device,
            "options": Options,
            "tree": (Leaf, Node),
            "programs": Programs,
            "naive_cost": PlanCost,
            "loop": (Loop, type(None)),
        }
        if not isinstance(plan, cls):
            raise PlannerError(f"this is no plan written by to_json, but a {type(plan).__name__}")
        for name, kind in parts.items():
            if not isinstance(getattr(plan, name), kind):
                raise PlannerError(f"this is no plan written by to_json: {name!r} is damaged")
        return plan

    def __str__(self) -> str:
        from planner.inspect.text import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        cost = self.cost
        return (
            f"<Plan '{cut(self.text, 80)}' {self.backend}/{self.device.name} {len(self.steps)} steps, "
            f"{cost.flops} FLOPs, peak {cost.peak_bytes} B, retained {cost.retained_bytes} B>"
        )
