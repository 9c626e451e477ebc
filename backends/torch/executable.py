"""A plan with what running it in torch needs: views of its arrays, both programs, and what they leave to autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.common import (
    RangedIndices,
    mask_operands,
    mask_term,
    operands_with_unread_rows,
    run_program,
    zero_unread_rows,
)
from planner.backends.common.loops import run_loop
from planner.backends.common.stock import evaluate
from planner.backends.torch.index import TorchIndex, in_range, part_in_range, refuse_sparse
from planner.backends.torch.modes import transformed
from planner.backends.torch.ops import OPS, cast, dataless, finite, torch_dtype
from planner.cost.layout import layout_of
from planner.kernels.grouping.keys import IndexArray
from planner.kernels.grouping.torch_grouping import accumulator
from planner.language.derive import sum_dims, summable_dims
from planner.language.errors import PlannerLimitError
from planner.language.options import SEARCHES, Options
from planner.language.spec import Spec, Term
from planner.program.callbacks import callbacks
from planner.program.implementations import Table
from planner.program.loops import body_of
from planner.program.ops import Cast
from planner.program.plan import PlanRecord
from planner.program.tree import Leaf, Tree

__all__ = ["Executable", "executable_of"]


class Executable:
    """A plan with what running it in torch needs; one for each plan, kept with the function that runs it."""

    def __init__(self, plan: PlanRecord, table: Table) -> None:
        self.plan, self.table = plan, table
        self.resolved, self.programs, self.spec = plan.resolved, plan.programs, plan.resolved.spec
        self.shapes = self.resolved.shapes
        self.reshape = [s if s != o.shape else None for s, o in zip(self.shapes, plan.operands, strict=True)]
        self.gathers = self.resolved.spec.gathers
        self.empty = 0 in (*dict(self.spec.sizes).values(), *(gather.size for gather in self.gathers))
        self.index_shapes = dict(self.resolved.index_shapes)
        self.dtype = torch_dtype(plan.dtype)
        self.is_complex = self.dtype.is_complex
        self.inexact = self.is_complex or self.dtype.is_floating_point
        self.arrays = tuple(self.index_shapes)
        self.unread_rows = operands_with_unread_rows(plan.tree, self.spec)
        # Views of operands are made anew for the backward program: one of a masked operand would keep the copy alive.
        base = [variable.base for variable in self.programs.variables]
        viewed = {base[v] for v in self.programs.kept} & set(range(len(self.shapes)))
        self.operand_views = [step for step in self.programs.forward.steps if base[step.outputs[0]] in viewed]
        self.kept = tuple(v for v in self.programs.kept if base[v] >= len(self.shapes))
        # Half types would be rounded between the sum and the product; float16 overflows there.
        self.summable_dims = () if plan.dtype in ("float16", "bfloat16") else summable_dims(self.spec)
        self.planned = lru_cache(maxsize=8)(self._planned)

    def views(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Operands without their broadcast dimensions."""
        return [x if shape is None else x.reshape(shape) for x, shape in zip(operands, self.reshape, strict=True)]

    def leaves(self, operands: Sequence[Tensor], index: RangedIndices) -> list[Tensor]:
        """Operands as the steps read them: NaN and infinities that no index reads are out of the way."""
        values = mask_operands(OPS, self.views(operands), self.spec, index)
        for number in self.unread_rows:
            x = values[number]
            if not finite(x):
                values[number] = zero_unread_rows(OPS, x, self.spec.inputs[number], self.spec, index)
        return values

    def index_views(self, indices: Mapping[str, Any]) -> dict[str, Any]:
        """Index arrays without their broadcast dimensions, as derived specs take them."""
        return {name: q.reshape(self.index_shapes[name]) for name, q in indices.items()}

    def prepare(self, indices: Mapping[str, Any]) -> RangedIndices:
        """Shape index arrays as the spec sees them; ranges are checked by the step that reads them first."""
        prepared, mode = RangedIndices(False), self.plan.index_mode
        for gather in self.gathers:
            raw, shape = indices[gather.array], self.index_shapes[gather.array]
            if isinstance(raw, TorchIndex):
                raw.check(gather, mode)
                values, dropped = raw.values, raw.may_drop
                if gather.axes and raw.values.dim() == len(gather.axes):
                    prepared.orders[gather] = raw.groups
            elif mode == "drop" or self.empty:  # what is dropped decides what runs; of nothing, no step reads an index
                values, dropped = in_range(raw, gather, mode)
            else:
                refuse_sparse(raw, gather)
                normal = partial(part_in_range, whole=raw, gather=gather, mode=mode)
                prepared.given[gather] = IndexArray(raw.reshape(shape), normal, may_drop=False)
                continue
            prepared[gather] = values.reshape(shape)
            prepared.may_drop |= dropped
        return prepared

    def forward(self, operands: Sequence[Tensor], index: RangedIndices) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the forward program: the result and the kept values."""
        values: dict[int, Any] = dict(enumerate(self.leaves(operands, index)))
        (result,) = run_program(self.table, self.programs.forward, values, index)
        result = mask_term(OPS, result, self.spec.output, self.spec, index)
        return result, tuple(values[v] for v in self.kept)

    def backward_values(
        self, gradient: Tensor, operands: Sequence[Tensor], index: RangedIndices, kept: Mapping[int, Tensor]
    ) -> dict[int, Any]:
        """What the backward program is given, by variable; `kept` need not hold the views of operands."""
        values: dict[int, Any] = {**dict(enumerate(self.leaves(operands, index))), **kept}
        for step in self.operand_views:
            results = self.table.run(step.choice.lowering, step.op, [values[v] for v in step.inputs], index)
            values.update(zip(step.outputs, results, strict=True))
        if self.is_complex:
            values = {number: value.conj() for number, value in values.items()}
        values[self.programs.output_gradient] = mask_term(OPS, gradient, self.spec.output, self.spec, index)
        return values

    def backward(
        self, gradient: Tensor, operands: Sequence[Tensor], index: RangedIndices, kept: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run the backward program: a gradient for each operand that needs one."""
        program = self.programs.backward
        assert program is not None
        values = self.backward_values(gradient, operands, index, dict(zip(self.kept, kept, strict=True)))
        run_program(self.table, program, values, index)
        gradients: list[Tensor | None] = []
        for number, variable in enumerate(self.programs.gradients):
            if variable is None:
                gradients.append(None)
                continue
            found = mask_term(OPS, values[variable], self.spec.inputs[number], self.spec, index)
            operand = operands[number]
            if found.is_complex() and not operand.is_complex():
                found = found.real
            gradients.append(found.reshape(operand.shape))
        return gradients

    def against(self, gradient: Tensor) -> tuple[Executable, Tensor]:
        """Return what to run the backward program of, for a gradient as it lies, and the gradient that it takes.

        One that repeats along some dimensions is a gradient of the sum over them, which takes less. Under a memory
        limit, one that products would copy has a program of its own. Neither needs kept values. A gradient that needs
        one itself, under a transform or in a compiled function, is taken as it lies, whatever is copied.

        Raises:
            PlannerLimitError: there is no such program within the memory limit.
        """
        if self.empty:
            return self, gradient
        strides, limit = gradient.stride(), self.plan.options.memory_limit
        repeated = tuple(d for d in self.summable_dims if strides[d] == 0 and gradient.shape[d] > 1)
        own = limit is None or self._takes(gradient, limit)
        if own and not repeated:
            return self, gradient
        plain = type(gradient) is Tensor and not (gradient.requires_grad or dataless(gradient) or transformed())
        if not plain or torch.compiler.is_compiling():
            return self, gradient
        once = gradient
        for d in reversed(repeated):
            once = once.select(d, 0)
        other = self.planned(repeated, once.stride())
        if isinstance(other, PlannerLimitError):
            if own:
                return self, gradient
            raise self._refusal(other, once.stride())
        backward, alone = other.programs.cost.backward, self.programs.cost.backward
        assert backward is not None
        assert alone is not None
        return (self, gradient) if limit is None and alone.seconds <= backward.seconds else (other, once)

    def _takes(self, gradient: Tensor, limit: int) -> bool:
        """Whether the plan's own backward program is within a limit, whatever it copies of the gradient."""
        variable = self.programs.variables[self.programs.output_gradient]
        if layout_of(gradient.shape, gradient.stride()) == variable.layout:
            return True
        return self.plan.cost.peak_bytes + variable.bytes <= limit

    def _plan(
        self, options: Options, repeated: tuple[int, ...] = (), strides: tuple[int, ...] | None = None
    ) -> PlanRecord:
        """Plan anew: without some of the output's dimensions, or for a gradient with these strides."""
        plan, spec = self.plan, sum_dims(self.spec, repeated)
        options = dataclasses.replace(
            options,
            optimize=options.optimize if options.optimize in SEARCHES else plan.path,
            minimize=options.minimize if isinstance(options.minimize, str) else "time",
        )
        resolved = dataclasses.replace(self.resolved, spec=spec)
        contraction = dataclasses.replace(
            plan.contraction, text=str(spec), resolved=resolved, options=options, gradient_strides=strides
        )
        return callbacks().make_plan(contraction)

    def _planned(self, repeated: tuple[int, ...], strides: tuple[int, ...]) -> Executable | PlannerLimitError:
        """A plan for such an output gradient that keeps nothing, or why there is none within the memory limit."""
        limit = self.plan.options.memory_limit
        left = None if limit is None else max(0, limit - self.plan.cost.retained_bytes)
        try:
            lean = dataclasses.replace(self.plan.options, memory_limit=left, retain_limit=0)
            return executable_of(self._plan(lean, repeated, strides), self.table)
        except PlannerLimitError as error:
            return error

    def _refusal(self, error: PlannerLimitError, strides: tuple[int, ...]) -> PlannerLimitError:
        """Name a limit that succeeds: within a wider one the plan may keep more, at most what it keeps without one."""
        options = self.plan.options
        free = self._plan(dataclasses.replace(options, memory_limit=None)).cost
        enough = max(free.peak_bytes, (error.memory_limit or 0) + free.retained_bytes)
        why = f"no backward program was found that takes an output gradient of strides {strides}"
        retain = options.retain_limit
        return PlannerLimitError.naming(why, (options.memory_limit, retain), (enough, retain))

    def contract(self, spec: Spec, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        """Contract by a derived spec, with this plan's options."""
        options = self.plan.options
        minimize = options.minimize if isinstance(options.minimize, str) else "time"
        result: Tensor = callbacks().contract(
            spec, *operands, minimize=minimize, index_mode=self.plan.index_mode, dtype=self.plan.dtype, **indices
        )
        return result

    def stock(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        """Run the plan's tree with differentiable stock operators."""
        index = self.prepare(indices)
        leaves = self.leaves(operands, index)

        def value(tree: Tree) -> Tensor:
            if isinstance(tree, Leaf):
                return leaves[tree.operand]
            inputs = [value(child) for child in tree.children]
            if isinstance(tree.op, Cast):
                return cast(inputs[0], tree.op.dtype)
            return evaluate(OPS, tree.op.spec, inputs, index, index.may_drop)

        return mask_term(OPS, value(self.plan.tree), self.spec.output, self.spec, index)


def executable_of(plan: PlanRecord, table: Table) -> Executable:
    """Return a plan, or a loop, with what running it needs."""
    return Executable(plan, table) if plan.loop is None else BoundLoop(plan, table)


class BoundLoop(Executable):
    """A plan that goes slice by slice: its programs call those of its body."""

    def __init__(self, plan: PlanRecord, table: Table) -> None:
        super().__init__(plan, table)
        self.body = lru_cache(maxsize=64)(lambda *sizes: Executable(body_of(plan, dict(sizes)), table))

    def prepare(self, indices: Mapping[str, Any]) -> RangedIndices:
        """Check index arrays and shape them as the spec sees them: what all slices share is checked once."""
        index = super().prepare(indices)
        for gather in self.gathers:
            index[gather]  # brings it into range
        index.given.clear()
        return index

    def _result(self, term: Term, dtype: torch.dtype, like: Tensor) -> tuple[Term, Callable[[bool], Tensor]]:
        shape = self.spec.shape(term)

        def allocate(zero: bool) -> Tensor:
            return like.new_zeros(shape, dtype=accumulator(dtype)) if zero else like.new_empty(shape, dtype=dtype)

        return term, allocate

    def forward(self, operands: Sequence[Tensor], index: RangedIndices) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the forward program of every slice."""
        assert self.plan.loop is not None
        (result,) = run_loop(
            self.plan.loop,
            self.spec,
            list(zip(self.spec.inputs, self.views(operands), strict=True)),
            index,
            lambda part, xs, here: self.body(*part.sizes.items()).forward(xs, here)[:1],
            [self._result(self.spec.output, self.dtype, operands[0])],
        )
        return result.to(self.dtype), ()

    def backward(
        self, gradient: Tensor, operands: Sequence[Tensor], index: RangedIndices, kept: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run the backward program of every slice."""
        assert self.plan.loop is not None
        spec, needs = self.spec, [v is not None for v in self.programs.gradients]
        found = run_loop(
            self.plan.loop,
            spec,
            list(zip((spec.output, *spec.inputs), (gradient, *self.views(operands)), strict=True)),
            index,
            lambda part, xs, here: self.body(*part.sizes.items()).backward(xs[0], xs[1:], here, ()),
            [
                self._result(term, x.dtype, x) if need else None
                for term, x, need in zip(spec.inputs, operands, needs, strict=True)
            ],
        )
        return [None if g is None else g.to(x.dtype).reshape(x.shape) for g, x in zip(found, operands, strict=True)]
