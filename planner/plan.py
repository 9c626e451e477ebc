"""`Plan`, which users hold: a plan's data with what one can do with it: run, print, measure, compare, store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from planner.inspect.analysis import Analysis
from planner.inspect.analyze import analyze
from planner.inspect.collectives import Collective, collectives
from planner.inspect.text import plan_text
from planner.inspect.verdicts import Verdict, verdicts
from planner.language.resolve import shorten
from planner.program.plan import PlanRecord
from planner.program.serial import plan_from_json, plan_to_json
from planner.run import run_plan
from planner.search.alternatives import Alternative, alternatives

__all__ = ["Plan"]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan(PlanRecord):
    """How one contraction will be done: call it, print it, inspect it.

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
        from planner.run import for_dynamo, torch_compiles

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
        return analyze(self, operands, indices, rounds)

    def alternatives(self, most: int = 5) -> tuple[Alternative[Plan], ...]:
        """Return the best plans that were not taken, with why each loses."""
        return alternatives(self, most)

    def implementations(self) -> tuple[tuple[Verdict, ...], ...]:
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
        return verdicts(self)

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
        return collectives(self, splits)

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` gives an equal plan back.

        Functions among the options (`minimize`, `optimize`) come back as their names: the plan runs as before, but
        what would call them raises a `PlannerError`.

        Raises:
            PlannerError: a rate of the device is NaN.
        """
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that `to_json` wrote.

        Raises:
            PlannerError: the text is no such plan.
        """
        return cls.of(plan_from_json(text))

    @classmethod
    def of(cls, record: PlanRecord) -> Plan:
        """Return the plan that holds a record's data; a loop's body becomes such a plan too."""
        data = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        if record.loop is not None:
            data["loop"] = dataclasses.replace(record.loop, body=cls.of(record.loop.body))
        return cls(**data)

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        cost = self.cost
        return (
            f"<Plan '{shorten(self.text, 80)}' {self.backend}/{self.device.name} {len(self.steps)} steps, "
            f"{cost.flops} FLOPs, peak {cost.peak_bytes} B, retained {cost.retained_bytes} B>"
        )
