"""JAX: plans as functions of its arrays, under `grad`, `jvp`, `vmap` and `jit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from planner.backends.common.common import check_index_dtype, clip_error, steps_with_unread_rows
from planner.backends.jax.evaluation import TABLE, compiled_cast, hopper
from planner.backends.jax.index import JaxIndex, checked_arrays, index_shape
from planner.backends.jax.loop import as_one, plan_run
from planner.backends.jax.reads import Reads
from planner.backends.jax.step import compiled, gradient_op
from planner.backends.jax.typed import result_sharding
from planner.cost.device import CPU, TPU_V5E, Device, gpu_preset
from planner.language.errors import PlannerError
from planner.language.spec import Operand
from planner.program.implementations import Backend, Stepwise
from planner.program.ops import Cast
from planner.program.plan import PlanRecord
from planner.program.program import Step

__all__ = ["JaxBackend", "backend"]

# What JAX takes in place of 64-bit types, silently, unless they are enabled.
NARROW = {"float64": "float32", "complex128": "complex64", "int64": "int32", "uint64": "uint32"}


def _wide_types() -> bool:
    """Whether JAX's 64-bit types are on, here and now: there is a context manager for it."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


class JaxBackend(Backend):
    """Runs plans on JAX arrays."""

    name = "jax"
    compiles = True

    def __init__(self) -> None:
        self.table = TABLE

    def operand(self, array: Any) -> Operand:
        """Describe an array; under differentiation outside of jit it is known that it needs a gradient."""
        traced = type(array).__name__ in ("JVPTracer", "LinearizeTracer")
        return Operand(tuple(array.shape), jnp.dtype(array.dtype).name, None, traced)

    def signature(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> Hashable:
        """Return all of some arrays that a plan depends on: here also what decides promotion."""
        weak = tuple(x.weak_type for x in operands)
        return (super().signature(operands, indices), weak, _wide_types())

    def result_dtype(self, dtypes: Sequence[str], operands: Sequence[Any]) -> str:
        """Promote as JAX does: an array made from a Python number gives way to any other of its kind."""
        pairs = zip(dtypes, operands, strict=True)
        return jnp.result_type(*(x if hasattr(x, "weak_type") else jnp.dtype(dtype) for dtype, x in pairs)).name

    def device(self, operands: Sequence[Any]) -> Device:
        """Rates of the machine that JAX runs on; of a card's capabilities the one that our kernels need."""
        platform = jax.default_backend()
        if platform in ("cpu", "tpu"):
            return CPU if platform == "cpu" else TPU_V5E
        return dataclasses.replace(gpu_preset(jax.devices()[0].device_kind), capability=90 if hopper() else 0)

    def check_index(self, name: str, index: Any) -> None:
        """Refuse an index array that is not of integers."""
        check_index_dtype(name, jnp.dtype(index.dtype).name)

    def check_devices(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """JAX refuses mixed devices itself, with the names of both."""

    def group(self, q: Any, size: int, index_mode: str) -> JaxIndex:
        """Check an index array and bring it into range."""
        return JaxIndex.of(q, size, index_mode)

    def trial(self, plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return a function that runs a plan, compiled, with its gradients, and waits for them.

        Eager differentiation shows the arrays that it differentiates at; other tracing shows none.
        """
        seen = tuple(_primal(x) for x in operands)
        arrays = dict(indices)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((seen, arrays))):
            return None
        run = self.bind(plan)
        needs = [number for number, variable in enumerate(plan.programs.gradients) if variable is not None]

        def whole(values: tuple[Any, ...], arrays: dict[str, Any]) -> Any:
            def of(*wanted: Any) -> Any:
                given = dict(zip(needs, wanted, strict=True))
                return run([given.get(number, x) for number, x in enumerate(values)], arrays)

            if not needs:
                return of()
            result, pullback = jax.vjp(of, *(values[number] for number in needs))
            return result, pullback(jnp.ones_like(result))

        # Where a traced index array would be refused, the plan runs step by step.
        if arrays and plan.index_mode == "raise" and not jnp.issubdtype(jnp.dtype(plan.dtype), jnp.inexact):

            def call(values: tuple[Any, ...], arrays: dict[str, Any]) -> Any:
                with jax.ensure_compile_time_eval():
                    return whole(values, arrays)
        else:
            # Compiled by the first run; traced in `ensure_compile_time_eval` a loop of chain-ijkl took 16 s, not 0.5.
            compiled = cache(lambda: jax.jit(whole).lower(seen, arrays).compile())

            def call(values: tuple[Any, ...], arrays: dict[str, Any]) -> Any:
                return compiled()(values, arrays)

        def once() -> None:
            # Not what the caller runs: it is timed as it runs without debugging.
            with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
                jax.block_until_ready(call(seen, arrays))

        return once

    def environment(self, operands: Sequence[Any]) -> dict[str, str]:
        """Name the version and the device."""
        device = jax.devices()[0]
        return {"jax": jax.__version__, "device": f"{device.platform} {device.device_kind}"}

    def bind(self, plan: PlanRecord) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        """Return the function that runs a plan."""
        spec, arrays = plan.resolved.spec, plan.resolved.spec.arrays
        if plan.dtype in NARROW and not _wide_types():
            raise PlannerError(
                f"dtype {plan.dtype} is off in jax, which would compute in {NARROW[plan.dtype]}: "
                "call jax.config.update('jax_enable_x64', True) at the start of the program, or set JAX_ENABLE_X64=1; "
                f"or pass dtype={NARROW[plan.dtype]!r}"
            )
        if plan.index_mode == "clip":
            for gather in spec.gathers:
                if gather.size == 0 and 0 not in index_shape(spec, gather.array):
                    raise clip_error(gather)

        steps, config = plan_run(plan), jax.config
        alone = as_one(steps) if plan.loop is None else steps

        def run(operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
            values, mode = checked_arrays(plan, indices)
            given = tuple(values[name] for name in arrays)
            # JAX looks for NaN in all that is computed by itself or kept for gradients, and those values may hold rows
            # that no index names. Of one function that keeps nothing it sees the result and the gradients alone.
            debugging = config.jax_debug_nans or config.jax_debug_infs  # type: ignore[attr-defined]
            whole = alone if debugging else steps
            result = result_sharding(plan, operands, given)
            if result is None:
                return whole(tuple(operands), given, mode)
            # In between shardings are left to XLA: the steps tell it how they are partitioned.
            typed = jax.sharding.auto_axes(lambda xs, qs: whole(xs, qs, mode), out_sharding=result)
            return typed(tuple(operands), given)

        return run

    def compiled_bytes(self, plan: PlanRecord) -> int | None:
        """Compile both programs for stand-ins, and ask XLA; None where the plan is for another kind of device."""
        if plan.device.kind != self.device(()).kind or (plan.dtype in NARROW and not _wide_types()):
            return None
        run = plan_run(plan)
        integers = jnp.int64 if _wide_types() else jnp.int32
        shapes = dict(plan.index_shapes)
        arrays = tuple(jax.ShapeDtypeStruct(shapes[name], integers) for name in plan.resolved.spec.arrays)
        operands = [
            jax.ShapeDtypeStruct(o.shape, jax.dtypes.canonicalize_dtype(o.dtype)) for o in plan.operands
        ]  # fmt: skip
        # Traced integers have no NaN to mark a bad index with, so under "raise" only values that were seen are taken.
        marks = plan.index_mode != "raise" or jnp.issubdtype(jnp.dtype(plan.dtype), jnp.inexact)
        mode = plan.index_mode if marks else "checked"
        needs = [number for number, variable in enumerate(plan.programs.gradients) if variable is not None]
        if not needs:
            return _peak_bytes(lambda xs, qs: run(xs, qs, mode), operands, arrays)

        def both(xs: tuple[Any, ...], qs: tuple[Any, ...]) -> Any:
            def of(*wanted: Any) -> Any:
                given = dict(zip(needs, wanted, strict=True))
                return run(tuple(given.get(number, x) for number, x in enumerate(xs)), qs, mode)

            return jax.vjp(of, *(xs[number] for number in needs))

        def forward(xs: tuple[Any, ...], qs: tuple[Any, ...]) -> Any:
            """The result, and what is kept for the backward program beside operands and index arrays."""
            result, back = both(xs, qs)
            free = {id(x) for x in (*xs, *qs)}
            return result, [x for x in jax.tree.leaves(back) if id(x) not in free]

        result, kept = jax.eval_shape(forward, operands, arrays)
        _, back = jax.eval_shape(both, operands, arrays)
        retained = sum(x.size * x.dtype.itemsize for x in kept)
        peaks = (
            _peak_bytes(forward, operands, arrays),
            _peak_bytes(lambda back, gradient: back(gradient), back, result),
        )
        return None if peaks[0] is None or peaks[1] is None else max(peaks[0], peaks[1] + retained)

    def refuse_dataless(self, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        """Refuse traced arrays, and those on several devices."""
        arrays = [(f"operand {number}", x) for number, x in enumerate(operands)]
        arrays += [(f"index array {n!r}", getattr(q, "values", q)) for n, q in indices.items()]
        for label, x in arrays:
            if isinstance(x, jax.core.Tracer):
                raise PlannerError(f"{label} is traced, so nothing can be measured: call it outside of jit and grad")
            if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
                raise PlannerError(f"{label} is on several devices: measure on one device, with jax.device_put")

    def stepwise(
        self,
        plan: PlanRecord,
        operands: Sequence[Any],
        indices: Mapping[str, Any],
        gradient: Any = None,
        kept: Mapping[int, Any] | None = None,
    ) -> Stepwise:
        """Return the forward program with what it is given, or the backward program: each step jitted apart."""
        spec = plan.resolved.spec
        arrays, mode = checked_arrays(plan, indices)
        precision = plan.options.precision or jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        values = {**dict(enumerate(operands)), **(kept or {})}
        if gradient is not None:
            values[plan.programs.output_gradient] = gradient
        reads = {}
        for node, unread_rows in steps_with_unread_rows(plan.tree, spec):
            known = reads[node.op] = Reads.of(node.op, unread_rows)
            if gradient is not None and len(node.children) == 2:
                reads[node.op.joint_gradient()] = known
            for child in range(len(node.children)) if gradient is not None else ():
                reads[gradient_op(node.op, child)] = known.without(child)

        def bind(step: Step, inputs: Sequence[Any]) -> partial[Any]:
            op = step.op
            if isinstance(op, Cast):
                return partial(compiled_cast(op.dtype), *inputs)
            own = reads.get(op) or Reads.of(op, (None,) * len(op.spec.inputs))
            function = compiled(
                op=op, lowering=step.choice.lowering, mode=(mode, precision), views=op.output_shapes, reads=own,
            )  # fmt: skip
            return partial(function, *inputs, *(arrays[name] for name in own.arrays))

        return Stepwise(values, bind, {})


def _peak_bytes(function: Callable[..., Any], *stand_ins: Any) -> int | None:
    """What a compiled function allocates at most, its results counted; None where the platform does not say."""
    memory = jax.jit(function).lower(*stand_ins).compile().memory_analysis()
    return None if memory is None else int(memory.temp_size_in_bytes + memory.output_size_in_bytes)


def _primal(x: Any) -> Any:
    """The array at which a tracer of eager differentiation stands; any other array, and tracer, is itself."""
    while type(x).__name__ in ("JVPTracer", "LinearizeTracer"):
        x = x.primal
    return x


backend = JaxBackend()
