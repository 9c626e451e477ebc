"""A plan made ready to run in torch: it shapes operands and index arrays and runs both programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from planner.backends.common.run import RunProgram, prepare_program
from planner.backends.torch.checks import poisoned, prepare_indices, raise_pending
from planner.backends.torch.contexts.modes import compiles, hint, records, transformed
from planner.backends.torch.contexts.ranges import Range, named_program, profiler
from planner.backends.torch.ops import conjugate, torch_dtype
from planner.backends.torch.products.copied import gradient_copy
from planner.backends.torch.products.transposed import calls_torch
from planner.backends.torch.stock import run_stock
from planner.cost.layout import Layout, layout_of, strides_of
from planner.language.cached import cached_property, enter
from planner.language.derive import resize_spec, sum_dims, summable_dims
from planner.language.dtypes import HALF_TYPES
from planner.language.errors import PlannerLimitError
from planner.language.options import MODES, SEARCHES, Options
from planner.language.spec import Gather, Spec, Term, gather_of
from planner.program.callbacks import callbacks
from planner.program.calls import Member, RangedIndices
from planner.program.guards import add_guards, masks
from planner.program.implementations import Table
from planner.program.loops import plan_of_tree
from planner.program.plan import PlanRecord, without_loops
from planner.program.serial import plan_to_json
from planner.program.tree import Tree, keep_nothing, nodes_of, read_by_gradients

# Of so many operands at most is a smaller contraction planned for a repeated gradient. Of more, that can take long.
MOST_PLANNED_AGAIN = 14


class Executable:
    """A plan made ready to run in torch, kept with the function that runs the plan.

    All members of a family share the functions of one, see `resized`.
    """

    def __init__(self, plan: PlanRecord, table: Table) -> None:
        self.plan, self.table = plan, table
        self.sizes: Mapping[str | Gather, int] | None = None  # those of a member of a family
        self.symbolic = False  # whether these are symbols of a compiler
        # The shape of the result, with -1 for a size that arrays show and `sizes=` does not give; () if they show all.
        self.given: Sequence[int] = ()
        self.programs, shapes = plan.programs, plan.resolved.shapes
        self.reshape: Sequence[tuple[int, ...] | None] = [
            s if s != o.shape else None for s, o in zip(shapes, plan.operands, strict=True)
        ]
        self.fits = all(shape is None for shape in self.reshape)
        # Programs know gathers by the sizes that they were made for.
        self.gathers = {gather: gather for gather in self.spec.gathers}
        self.empty = 0 in (*self.spec.by_axis.values(), *(gather.size for gather in self.gathers))
        self.index_shapes: Mapping[str, tuple[int, ...]] = dict(plan.resolved.index_shapes)
        self.dtype = torch_dtype(plan.dtype)
        self.is_complex = self.dtype.is_complex
        self.inexact = self.is_complex or self.dtype.is_floating_point
        self.arrays = tuple(self.index_shapes)
        # What no array shows the size of.
        shown = {e for term in (*self.spec.inputs, *(gather.axes for gather in self.gathers)) for e in term}
        self.hidden = {*self.spec.output} - shown
        self.drops = MODES[plan.index_mode].bad == "drop"
        # The backward program makes views of operands again, because a Function returns no views of its arguments.
        base = [variable.base for variable in self.programs.variables]
        needed, views = {v for v in self.programs.kept if base[v] < len(shapes)}, []
        for step in reversed(self.programs.forward.steps):
            if needed & set(step.outputs):
                needed.update(step.inputs)
                views.append(step)
        self.operand_views = views[::-1]
        self.kept = tuple(v for v in self.programs.kept if base[v] >= len(shapes))
        # Operands for which the plan has no gradient, though they could need one.
        self.underived = tuple(n for n, v in enumerate(self.programs.gradients) if v is None and self.inexact)
        # Which operands a backward pass may read. The gradient of one reads all others, or values made of them. A loop
        # reads its inputs in any case; there may be one for gradients of other strides if memory is limited.
        backward = self.programs.backward
        read = {v for step in (*(backward.steps if backward else ()), *self.operand_views) for v in step.inputs}
        limited = plan.options.memory_limit is not None
        by_others = enumerate(read_by_gradients(plan.requires_grad))
        self.reads = tuple(by_other or limited or number in read for number, by_other in by_others)
        self.reads_all = all(self.reads)
        # A gradient in a half type would be rounded between its sum and the product, and float16 could overflow.
        self.summable_dims = () if plan.dtype in HALF_TYPES else summable_dims(self.spec)
        self.executable_for = lru_cache(maxsize=8)(self._executable_for)
        self.suited: dict[tuple[int, ...], tuple[Executable, tuple[int, ...]]] = {}  # see `against`
        self.family_for = lru_cache(maxsize=8)(self._family_for)

    @cached_property
    def _shared(self) -> dict[str, Any]:
        """The attributes that it shares with executables of other sizes. What is made of the plan is made once."""
        trained = ("run_backward", "lay_gradient") * bool(self.programs.backward)
        for name in ("run_forward", *trained, "only_stock", "reads_unread"):
            getattr(self, name)
        # Of a copy, since another thread may enter an attribute meanwhile.
        return {n: value for n, value in self.__dict__.copy().items() if n not in ("spec", "_no_indices")}

    def resized(self, member: Member) -> Executable:
        """Return this executable for other sizes than the plan's, such as those of a member of its family."""
        own = object.__new__(Executable)
        own.__dict__.update(self._shared)
        own.suited, (own.sizes, own.reshape, own.index_shapes) = {}, member
        own.fits = all([shape is None for shape in own.reshape])
        own.gathers = {g: Gather(g.array, g.axes, member.sizes[g]) for g in self.gathers}
        if self.hidden:
            own.given = [member.sizes[e] if e in self.hidden else -1 for e in self.plan.resolved.spec.output]
        return own

    def with_symbols(self, member: Member, given: Sequence[int]) -> Executable:
        """Return this executable for sizes that are symbols of a compiler.

        Args:
            member: the sizes.
            given: the result's shape, with -1 for a size that arrays show and `sizes=` does not give.
        """
        own = self.resized(member)
        own.symbolic, own.given = True, given
        return own

    @cached_property
    def spec(self) -> Spec:
        """The resolved spec. If sizes are symbols, it has those that the compiler traces with."""
        spec = self.plan.resolved.spec
        if self.sizes is None:
            return spec
        return resize_spec(spec, {e: hint(n) for e, n in self.sizes.items()} if self.symbolic else self.sizes)

    def shape(self, spec: Spec, term: Term) -> tuple[int, ...]:
        """Return the shape of an array with a term of this executable's spec, or of one derived from it."""
        return tuple(map(self._symbol, term)) if self.symbolic else spec.shape(term)

    def _symbol(self, entry: str | Gather) -> int:
        """Return the symbol of an axis or a gathered dimension. A derived spec may have a batch axis in its gathers."""
        assert self.sizes is not None
        if (gather := gather_of(entry)) is None:
            return self.sizes[entry]
        sizes = [own.size for own in self.gathers.values() if own.array == gather.array]
        return next(size for size in sizes if size is not None and hint(size) == gather.size)

    @cached_property
    def only_views(self) -> bool:
        """Whether the result is a view of an operand."""
        return all(step.choice.lowering in ("view", "broadcast") for step in self.programs.forward.steps)

    @cached_property
    def only_stock(self) -> bool:
        """Whether the forward program calls torch's own operators only, and in no loop."""
        return self.plan.loop is None and calls_torch(self.table, self.programs.forward.computing)

    @cached_property
    def text(self) -> str:
        """The plan as JSON."""
        return plan_to_json(self.plan)

    @cached_property
    def guarded_tree(self) -> Tree:
        """The tree with its guards, without loops, which torch can differentiate."""
        return add_guards(without_loops(self.plan.tree), self.plan.resolved.spec, self.plan.index_mode, gradients=True)

    @cached_property
    def reads_unread(self) -> bool:
        """Whether steps, or gradients by torch, compute with rows that no index names, where NaN must not count."""
        return self.unread_in_gradients if self.programs.backward else any(map(masks, self.programs.forward.steps))

    @cached_property
    def unread_in_gradients(self) -> bool:
        """Whether gradients by torch would do so, the plan's or those that it was not made for."""
        return any(map(masks, nodes_of(self.guarded_tree)))

    @cached_property
    def run_forward(self) -> RunProgram:
        """The function that runs the forward program."""
        return prepare_program(self.table, self.programs.forward)

    @cached_property
    def run_backward(self) -> RunProgram:
        """The function that runs the backward program."""
        assert self.programs.backward is not None
        return prepare_program(self.table, self.programs.backward)

    @cached_property
    def lay_gradient(self) -> Callable[[Tensor], Tensor] | None:
        """What copies a row-major output gradient once, for all steps that would each copy it."""
        return gradient_copy(self.programs)

    @cached_property
    def show_forward(self) -> RunProgram:
        """The function that runs the forward program for a profiler to see."""
        return named_program(self.table, self.programs.forward, f"planner {self.plan.text}")

    @cached_property
    def show_backward(self) -> RunProgram:
        """The function that runs the backward program for a profiler to see."""
        assert self.programs.backward is not None
        return named_program(self.table, self.programs.backward, f"planner backward {self.plan.text}")

    def views(self, operands: Sequence[Tensor], member: Member | None = None) -> list[Tensor]:
        """Return the operands (of a member) without their broadcast dimensions; None for those that are None."""
        if self.fits and member is None:
            return list(operands)
        pairs = zip(operands, self.reshape if member is None else member.shapes, strict=True)
        return [x if shape is None or x is None else x.reshape(shape) for x, shape in pairs]

    def planned_views(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Return the operands with as many dimensions as the plan's. A family's may have no broadcast ones."""
        given = zip(operands, self.views(operands), self.plan.operands, strict=True)
        return [x if x is None or x.dim() == len(planned.shape) else view for x, view, planned in given]

    def index_views(self, indices: Mapping[str, Any]) -> dict[str, Any]:
        """Return the index arrays without their broadcast dimensions, as derived specs take them."""
        return {name: q.reshape(self.index_shapes[name]) for name, q in indices.items()}

    @cached_property
    def _no_indices(self) -> RangedIndices:
        """What `prepare` returns if there are no index arrays. Steps then add nothing to it."""
        prepared = RangedIndices(False)
        prepared.sizes = self.sizes
        return prepared

    def prepare(self, indices: Mapping[str, Any]) -> RangedIndices:
        """Shape index arrays as the spec has them. The step that reads an index array first checks its range."""
        if not self.gathers:
            return self._no_indices
        return prepare_indices(
            indices,
            self.gathers,
            self.index_shapes,
            self.plan.index_mode,
            self.sizes,
            here=self.empty or self.drops,
            shows=self.inexact,
            keeps=self.plan.options.retain_limit is None,
        )

    def forward(self, operands: Sequence[Tensor], index: RangedIndices) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the forward program, and return the result and the kept values."""
        values: dict[int, Any] = dict(enumerate(operands if self.fits else self.views(operands)))
        run = self.show_forward if profiler._is_profiler_enabled else self.run_forward
        (result,) = run(values, index)
        return poisoned(result, index), tuple([values[v] for v in self.kept])

    def backward_values(
        self, gradient: Tensor, operands: Sequence[Tensor], index: RangedIndices, kept: Mapping[int, Tensor]
    ) -> dict[int, Any]:
        """Return the inputs of the backward program by variable; `kept` need not hold the views of operands."""
        values: dict[int, Any] = dict(enumerate(operands if self.fits else self.views(operands)))
        values |= kept
        for step in self.operand_views:
            results = self.table.run(step.choice.lowering, step.op, [values[v] for v in step.inputs], index)
            values.update(zip(step.outputs, results, strict=True))
        values[self.programs.output_gradient] = gradient
        return values

    def backward(
        self, gradient: Tensor, operands: Sequence[Tensor], index: RangedIndices, kept: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Run the backward program, and return a gradient for each operand that needs one, None for the others.

        The gradient in operand b of a * b is g * conj(a) = conj(conj(g) * a). So the program runs on the conjugate of
        the output gradient, which needs the memory of one array, and its results are conjugated in place.
        """
        raise_pending()
        if self.is_complex:
            gradient = gradient.conj()
            gradient = gradient.resolve_conj() if gradient.is_conj() else gradient.clone()  # a copy in either case
        elif self.lay_gradient is not None:
            gradient = self.lay_gradient(gradient)
        values = self.backward_values(gradient, operands, index, dict(zip(self.kept, kept, strict=True)))
        run = self.show_backward if profiler._is_profiler_enabled else self.run_backward
        run(values, index)
        gradients: list[Tensor | None] = [None if v is None else values[v] for v in self.programs.gradients]
        if index.poison is not None:
            gradients = [x if x is None else poisoned(x, index) for x in gradients]
        if self.fits and not self.is_complex:
            return gradients
        for number, (x, operand) in enumerate(zip(gradients, operands, strict=True)):
            if x is not None and x.is_complex():
                x = conjugate(x) if self.plan.operands[number].dtype.startswith("complex") else x.real
            gradients[number] = x if x is None or operand is None else x.reshape(operand.shape)
        return gradients

    def against(self, gradient: Tensor) -> tuple[Executable, Tensor]:
        """Return the executable whose backward pass suits this gradient's strides, and the gradient to give it.

        Usually that is this executable. There are two exceptions, which use no kept values:

        - A gradient that repeats along some dimensions (stride 0), as `sum().backward()` makes it, is the gradient of
          the sum over them. The contraction with that sum is smaller.
        - Under a memory limit, a product may have to copy a gradient with unusual strides. Then a backward program is
          planned for these strides.

        A gradient that requires a gradient itself, is transformed, or is in a compiled function, goes to this
        executable in any case.

        Raises:
            PlannerLimitError: no backward program for these strides fits the memory limit.
        """
        strides, limit = gradient.stride(), self.plan.options.memory_limit
        if limit is None and 0 not in strides:  # as a rule
            return self, gradient
        plain = type(gradient) is Tensor or is_fake(gradient)
        plain = plain and not (gradient.requires_grad or records() or transformed())
        if not plain or self.empty or compiles():
            return self, gradient
        if (suited := self.suited.get(strides)) is None:
            enter(self.suited, strides, suited := self._suited(gradient), 8)
        executable, dims = suited
        for d in dims:
            gradient = gradient.select(d, 0)
        return executable, gradient

    def _suited(self, gradient: Tensor) -> tuple[Executable, tuple[int, ...]]:
        """Return the executable whose backward pass suits a gradient, and the dimensions to select a slice of."""
        limit = self.plan.options.memory_limit
        dims = self.summable_dims if len(self.reshape) <= MOST_PLANNED_AGAIN else ()
        repeated = tuple(d for d in dims if gradient.stride(d) == 0 and gradient.shape[d] > 1)
        fits = limit is None or self._fits(gradient, limit)
        own: tuple[Executable, tuple[int, ...]] = (self, ())
        if fits and not repeated:
            return own
        left = [d for d in range(gradient.dim()) if d not in repeated]
        shape, strides = (tuple(x[d] for d in left) for x in (gradient.shape, gradient.stride()))
        if self.sizes is not None:
            shared = self.family_for(repeated, layout_of(shape, strides))
            if shared is None or not self._has_read(shared):
                return own
            return shared.resized(Member(self.sizes, self.reshape, self.index_shapes)), repeated[::-1]
        other = self.executable_for(repeated, strides)
        if isinstance(other, PlannerLimitError) and not fits:
            raise self._refusal(other, gradient.stride())
        if isinstance(other, PlannerLimitError) or not self._has_read(other):
            return own
        return own if limit is None and self._back_seconds <= other._back_seconds else (other, repeated[::-1])

    @property
    def _back_seconds(self) -> float:
        """What the backward program is predicted to take."""
        cost = self.programs.cost.backward
        assert cost is not None
        return cost.seconds

    def _has_read(self, other: Executable) -> bool:
        """Return whether the forward pass of this executable saves all operands that another may read."""
        return all(mine or not theirs for mine, theirs in zip(self.reads, other.reads, strict=True))

    def _fits(self, gradient: Tensor, limit: int) -> bool:
        """Return whether the plan's backward program stays within a limit, even if it copies the gradient."""
        variable = self.programs.variables[self.programs.output_gradient]
        if layout_of(gradient.shape, gradient.stride()) == variable.layout:
            return True
        return self.plan.cost.peak_bytes + variable.bytes <= limit

    def _plan(
        self, options: Options, repeated: tuple[int, ...] = (), strides: tuple[int, ...] | None = None
    ) -> PlanRecord:
        """Plan again, with some dimensions of the output summed, or for an output gradient of these strides."""
        plan, spec = self.plan, sum_dims(self.spec, repeated)
        options = dataclasses.replace(
            options,
            optimize=options.optimize if options.optimize in SEARCHES else plan.path,
            minimize=options.objective,
        )
        resolved = dataclasses.replace(plan.resolved, spec=spec)
        contraction = dataclasses.replace(
            plan.contraction, text=str(spec), resolved=resolved, options=options, gradient_strides=strides
        )
        return callbacks().make_plan(contraction)

    def _executable_for(self, repeated: tuple[int, ...], strides: tuple[int, ...]) -> Executable | PlannerLimitError:
        """Return an executable that keeps nothing, for a gradient of these strides; or the error that none fits."""
        options = self.plan.options
        if options.memory_limit is None:  # to search for what keeps nothing takes ten times as long
            plan = self._plan(dataclasses.replace(options, retain_limit=None), repeated, strides)
            lean = plan_of_tree(plan, plan.contraction, keep_nothing(plan.tree), {}, f"{plan.origin}, keeping nothing")
            return Executable(lean, self.table)
        left = max(0, options.memory_limit - self.plan.cost.retained_bytes)
        try:
            limited = dataclasses.replace(options, memory_limit=left, retain_limit=0)
            return Executable(self._plan(limited, repeated, strides), self.table)
        except PlannerLimitError as error:
            return error

    def _family_for(self, repeated: tuple[int, ...], layout: Layout | None) -> Executable | None:
        """Return what all members of a family use in place of this for an output gradient of a layout; None if this."""
        shape = sum_dims(self.plan.resolved.spec, repeated).output_shape
        strides = strides_of(layout, shape)
        other = None if strides is None else self._executable_for(repeated, strides)
        if not isinstance(other, Executable) or not self.table.runs_any_sizes(other.programs.steps):
            return None
        return other if other._back_seconds < self._back_seconds else None

    def _refusal(self, error: PlannerLimitError, strides: tuple[int, ...]) -> PlannerLimitError:
        """Return the error that names a memory limit under which the call succeeds."""
        options = self.plan.options
        # Under a wider limit the plan may keep more, but never more than it keeps without a limit.
        free = self._plan(dataclasses.replace(options, memory_limit=None)).cost
        enough = max(free.peak_bytes, (error.memory_limit or 0) + free.retained_bytes)
        why = f"no backward program was found that takes an output gradient of strides {strides}"
        retain = options.retain_limit
        return PlannerLimitError.naming(why, (options.memory_limit, retain), (enough, retain))

    def contract(
        self,
        spec: Spec,
        operands: Sequence[Tensor],
        indices: Mapping[str, Any],
        limits: Mapping[str, int | None] = MappingProxyType({}),
    ) -> Tensor:
        """Contract by a derived spec, with this plan's options but limits."""
        plan, mode = self.plan, MODES[self.plan.index_mode].unmarked or self.plan.index_mode
        sizes = self._output_symbols(spec, operands, indices) if self.symbolic and self.sizes is not None else None
        result: Tensor = callbacks().contract(
            spec,
            *operands,
            sizes=sizes,
            minimize=plan.options.objective,
            index_mode=mode,
            dtype=plan.dtype,
            **limits,
            **indices,
        )
        return result

    def _output_symbols(self, spec: Spec, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of the result of a derived spec in symbols."""
        axes: dict[Any, int] = {axis: self._symbol(axis) for axis in self.spec.by_axis}
        for term, x in zip(spec.inputs, operands, strict=True):
            axes.update(zip(term, x.shape, strict=True))
        for gather in spec.gathers:
            axes.update(zip(gather.axes, indices[gather.array].shape, strict=True))
        return tuple(axes[e] if gather_of(e) is None else self._symbol(e) for e in spec.output)

    def stock(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        """Run the plan's tree with torch's own operators, which torch can differentiate."""
        if profiler._is_profiler_enabled:
            with Range(f"planner {self.plan.text}"):
                return self._stock(operands, indices)
        return self._stock(operands, indices)

    def _stock(self, operands: Sequence[Tensor], indices: Mapping[str, Any]) -> Tensor:
        index = self.prepare(indices)
        result = run_stock(self.guarded_tree, self.views(operands), index)
        return result if index.poison is None else result * index.poison[0]
