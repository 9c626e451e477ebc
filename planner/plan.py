"""`Plan`, the plan that users hold. It adds methods to a `PlanRecord`: run, print, measure, compare, store."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

from planner.inspect.analysis import Analysis
from planner.inspect.analyze import analyze
from planner.inspect.text import plan_text
from planner.inspect.verdicts import ImplementationVerdict, verdicts
from planner.language.resolve import shorten
from planner.program.plan import Loop, PlanRecord, find_loop
from planner.program.serial import plan_from_json, plan_to_json
from planner.run import for_dynamo, run_plan
from planner.search.alternatives import Alternative, alternatives
from planner.search.devices.collectives import Collective, collectives
from planner.slices import Slices


@dataclasses.dataclass(frozen=True, slots=True)
class Plan(PlanRecord):
    """How one contraction will be done: call it, print it, inspect it.

    Example:
        >>> import planner
        >>> p = planner.plan("ij, jk, kl -> il", (2, 30), (30, 40), (40, 5), backend="numpy")
        >>> p.path, p.cost.flops
        (((0, 1), (0, 1)), 5600)

    Attributes:
        text: the spec as the caller wrote it.
        resolved: the resolved spec and the views that fit the operands to it.
        index_shapes: shapes of the index arrays that the plan was made for, as the caller passed them.
        operands: shapes, dtypes, strides and gradient flags that the plan was made for.
        dtype: dtype of the computation and the result.
        index_mode: what happens to an index out of range.
        backend: "torch", "jax" or "numpy".
        device: the rates that predicted the times.
        options: the caller's options.
        tree: the chosen contraction tree; its nodes say which values are kept for the backward program.
        programs: the forward and the backward program.
        naive_cost: cost of taking the gathered operands first and contracting pairwise in the framework's way.
        proven: whether no better plan within the limits exists in the space that was searched. That is all trees and,
            with limits or for peak and retained bytes, all choices of what is kept. Each step uses the implementation
            that the objective prefers, on row-major intermediates.
        origin: how the tree was found.
        loop: the first loop over slices in the tree, with its `axes` and the plan of a slice, its `body`. None if there
            is no loop. A loop is one step of each program.
        compiled_bytes: the larger peak of the two compiled programs; None if there was no memory limit to check.
        gradient_strides: the strides of the output's gradient that the plan was made for; None for those of the result.
        mesh: the mesh that the plan was made for, and the contraction of the whole arrays; else None. All other
            attributes are about one device, which contracts its parts of the arrays.
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
        torch = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_dynamo_compiling():  # `torch_compiles`, without its call
            return for_dynamo().run_plan(self, operands, indices)
        return run_plan(self, operands, indices)

    def analyze(self, *operands: Any, rounds: int = 3, **indices: Any) -> Analysis:
        """Run the plan and measure it: each step and both programs, measured figures beside predicted ones.

        The measured figures are time, bytes alive and bytes retained. In torch and JAX they include FLOPs and bytes
        moved, as the framework counts them. torch counts the FLOPs of matrix products only. XLA counts a loop's body
        once. In JAX each step is compiled on its own, as in an eager call; the rows "compiled" show the whole program
        under `jit`. On a CUDA device the call resets the allocator's own record of its peak.

        Example:
            >>> import numpy as np
            >>> import planner
            >>> a, b = np.ones((200, 300), "float32"), np.ones((300, 400), "float32")
            >>> analysis = planner.plan("ij, jk -> ik", a, b).analyze(a, b)
            >>> total = analysis.total("forward")
            >>> total.predicted.live_bytes, total.measured.live_bytes > 320_000
            (320000, True)

        Args:
            *operands: as in a call of the plan. The call changes neither them nor their gradients.
            rounds: each time is the median of so many runs, after one run to warm up.
            **indices: index arrays, by letter.

        Returns:
            The figures. Print them, or write them with `to_json`.

        Raises:
            ShapeError: an operand or index array does not fit the plan.
            IndexRangeError: an index is out of range.
            PlannerError: an array has no values to measure on: it is a tracer, a meta tensor or a fake tensor.
        """
        return analyze(self, operands, indices, rounds)

    def slices(self, *operands: Any, **indices: Any) -> Slices:
        """Return the slices of the plan's loop as independent pieces, for any executor to run.

        Each piece is a function and its arguments, `piece.function` and `piece.arguments`, which can be pickled, or is
        called as it is. It holds the plan of its slice, and of the arrays what the slice reads. `combine` takes what
        the pieces return, in their order, and returns what a call of the plan returns.

        Example:
            >>> import operator
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> import numpy as np
            >>> import planner
            >>> a, b = np.ones((1000, 8, 64)), np.ones((1000, 64, 8))
            >>> p = planner.plan("nij, njk, nkl -> il", a, b, a, memory_limit="300 kB")
            >>> print(p.loop)
            loop over n by 500
            >>> pieces = p.slices(a, b, a)
            >>> len(pieces)
            2
            >>> with ThreadPoolExecutor() as pool:
            ...     result = pieces.combine(pool.map(operator.call, pieces))
            >>> np.array_equal(result, p(a, b, a))
            True

        `docs/slices.md` has the code for process pools, Dask, Ray and mpi4py. Of a loop within a loop the pieces are
        those of the outer one. A plan without a loop is one piece, and so is a loop around some of the steps of a plan
        whose index mode drops indices. Around others, the steps before the loop run in this call, and those after it in
        `combine`.

        Args:
            *operands: as in a call of the plan.
            **indices: index arrays, by letter.

        Returns:
            The pieces, to iterate over. Pieces of operands are views: they must not change before the pieces are run.

        Raises:
            ShapeError: an operand or index array does not fit the plan.
            IndexRangeError: an index is out of range.
            PlannerError: an operand needs a gradient, because slices compute values only; or an array has no values.
        """
        return Slices(self, operands, indices)

    @property
    def naive(self) -> Plan:
        """The plan that this one replaces: take the gathered operands first, then contract in the framework's own way.

        Print it to see its steps, what they copy because of strides, and what the framework's autograd keeps.

        Example:
            >>> import planner
            >>> x = planner.Operand((8, 1024, 256), strides=(524288, 256, 1), requires_grad=True)
            >>> y = planner.Operand((8, 256, 64), requires_grad=True)
            >>> p = planner.plan("ijk, ikl -> jl", x, y, backend="torch")
            >>> p.naive.cost.retained_bytes, p.cost.retained_bytes  # torch.einsum copies x, and keeps the copy
            (8388608, 0)
        """
        return self.of(super(Plan, self).naive)

    def to_html(self, path: str | os.PathLike[str] | None = None, analysis: Analysis | None = None) -> str | None:
        """Return a page about the plan: its tree, its memory over time, the time of each step, and every step.

        The page needs no other file and no network.

        Example:
            >>> import planner
            >>> p = planner.plan("ij, jk -> ik", (2, 3), (3, 4), backend="numpy")
            >>> "<svg" in p.to_html()
            True

        Args:
            path: the file to write the page to; None to return the page.
            analysis: what `analyze` of this plan returned, to show measured figures beside the predicted ones.

        Raises:
            PlannerError: the file cannot be written, or the analysis is that of another plan.
        """
        from planner.pages.pages import page_of_plan

        return page_of_plan(self, path, analysis)

    def _repr_html_(self) -> str:
        from planner.pages.pages import part_of_page

        return part_of_page(self)

    def to_mermaid(self) -> str:
        """Return the contraction tree as a flowchart for Mermaid, which documents on many sites may hold.

        Example:
            >>> import planner
            >>> print(planner.plan("ij, jk -> ik", (2, 3), (3, 4), backend="numpy").to_mermaid())
            flowchart LR
              o0["0: ij<br>2 x 3, 24 B"]
              o1["1: jk<br>3 x 4, 48 B"]
              s0("ij, jk -> ik<br>matmul")
              r["ik<br>2 x 4, 32 B"]
              o0 -->|"24 B"| s0
              o1 -->|"48 B"| s0
              s0 -->|"32 B"| r
        """
        from planner.pages.graphs import mermaid_of

        return mermaid_of(self)

    def to_dot(self) -> str:
        r"""Return the contraction tree as a graph in the language of Graphviz.

        Example:
            >>> import planner
            >>> print(planner.plan("i -> ", (3,), backend="numpy").to_dot())
            digraph plan {
              rankdir=LR;
              node [shape=box];
              "o0" [label="0: i\n3, 12 B"];
              "s0" [label="i -> \nsum", style=rounded];
              "r" [label="()\none number, 4 B"];
              "o0" -> "s0" [label="12 B"];
              "s0" -> "r" [label="4 B"];
            }
        """
        from planner.pages.graphs import dot_of

        return dot_of(self)

    def plot(self, path: str | os.PathLike[str] | None = None, analysis: Analysis | None = None) -> Any:
        """Draw the pictures of the plan's page with matplotlib: the tree, memory over time, and the time of each step.

        Args:
            path: the file to save the drawing to; None to save none. Its ending sets the format.
            analysis: as in `to_html`.

        Returns:
            The matplotlib figure.

        Raises:
            PlannerError: matplotlib is not installed, the file cannot be written, or the analysis is of another plan.
        """
        from planner.pages.plots import plot_plan

        return plot_plan(self, path, analysis)

    def alternatives(self, most: int = 5) -> tuple[Alternative[Plan], ...]:
        """Return the best plans that were not chosen, and why each loses.

        Args:
            most: how many plans to return at most.

        Raises:
            PlannerError: `most` is not a number of plans.
        """
        return alternatives(self, most)

    def implementations(self) -> tuple[tuple[ImplementationVerdict, ...], ...]:
        """Return, for each step, every implementation that the backend has: its cost, or why it was refused.

        Example:
            >>> import planner
            >>> p = planner.plan("nij, q[n]jk -> nik", (9, 1, 4), (3, 4, 4), q=(9,), backend="numpy")
            >>> print(p.implementations()[0][0])
            matmul: 3.08 us, 192 B of scratch, chosen

        Returns:
            For each step, the chosen implementation first, then the others by predicted time, then the refused ones. In
            place of a loop over slices stand the steps of one slice.
        """
        return verdicts(self)

    def collectives(self, splits: Mapping[str, int] | None = None) -> tuple[Collective, ...]:
        """Return what devices exchange if arrays are split over a mesh: by `NamedSharding` in JAX, DTensors in torch.

        Each device computes its part. If a result lacks a split axis, the devices add up their parts. Under JAX's `jit`
        that holds for each step; XLA moves more if arrays are not placed as the axes say, and if the caller wants
        results placed elsewhere. In torch each device contracts its parts of all operands, so the result and the
        gradients are added up, when something needs them whole. In both, if two arrays are split along different axes
        over the same axis of the mesh, the smaller one moves.

        Example:
            >>> import planner
            >>> p = planner.plan("ij, jk -> ik", (64, 512), (512, 32), backend="numpy")
            >>> p.collectives({"i": 8})
            ()
            >>> print(*p.collectives({"j": 8}))
            ij, jk -> ik: all-reduce over j of 8.19 kB

        Args:
            splits: for each axis that is split, by letter, the number of parts. Each is split over an axis of the mesh
                of its own. The letter of an index array stands for the dimension that it indexes. A plan that was made
                for a mesh needs none.

        Returns:
            What devices exchange, forward and backward, with the bytes on one device.

        Raises:
            PlannerError: a letter is unknown or cannot be split, or the plan is a loop, unless the backend is torch.
        """
        return collectives(self, splits)

    def to_json(self) -> str:
        """Return the plan as JSON. `from_json` returns an equal plan, but for functions among the options.

        Example:
            >>> import planner
            >>> p = planner.plan("ij, jk -> ik", (3, 4), (4, 5), backend="numpy")
            >>> planner.Plan.from_json(p.to_json()) == p
            True

        JSON holds only the names of functions among the options (`minimize`, `optimize`). The plan that is read back
        runs as before, but any method that would call such a function raises a `PlannerError`.
        """
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that `to_json` wrote.

        A text that was changed is believed where its parts still fit together.

        Raises:
            PlannerError: the text is not such a plan: a part is missing, is of another type, or does not fit the rest.
        """
        return cls.of(plan_from_json(text))

    def __reduce__(self) -> Any:
        options = self.options
        if callable(options.minimize) or callable(options.optimize):  # JSON holds names of functions only
            return object.__reduce__(self)
        return load_plan, (self.to_json(),)

    @classmethod
    def of(cls, record: PlanRecord) -> Plan:
        """Return a record as a `Plan`."""
        return cls(**{name: getattr(record, name) for name in _FIELDS})

    @property
    def loop(self) -> Loop | None:
        """The first loop over slices in the tree, with plans of its slices; None if there is none."""
        loop = find_loop(self.tree)
        return loop and dataclasses.replace(loop, bodies=tuple(map(self.of, loop.bodies)))

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        cost = self.cost
        return (
            f"<Plan '{shorten(self.text, 80)}' {self.backend}/{self.device.name} {len(self.steps)} steps, "
            f"{cost.flops} FLOPs, peak {cost.peak_bytes} B, retained {cost.retained_bytes} B>"
        )


_FIELDS = tuple(field.name for field in dataclasses.fields(PlanRecord))


def load_plan(text: str) -> Plan:
    """Return the plan of a pickle."""
    return Plan.from_json(text)
