"""What a step computes: an op in a named implementation, on arrays as the caller gave them.

Operands and index arrays are reshaped and brought into range in here, so that what a backward pass holds is the
caller's own array wherever possible.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from planner.backends.common.common import RangedIndices
from planner.backends.jax.index import index_shape, is_bad, normalised
from planner.backends.jax.partition import partitioned, partitioned_rows
from planner.backends.jax.poison import poisoned
from planner.backends.jax.reads import Reads, unread, unread_pool, zero_unread_rows
from planner.backends.jax.rows import make_table
from planner.cost.device import CPU
from planner.cost.objective import step_key
from planner.kernels.grouping.keys import IndexArray
from planner.language.spec import Gather, Spec
from planner.program.build import Lowerer
from planner.program.implementations import Table
from planner.program.ops import Cast, Op, PricedImplementation

__all__ = ["LOWER", "PLATFORMS", "TABLE", "Mode", "Shape", "cast", "compiled_cast", "evaluate", "hopper",
           "input_count"]  # fmt: skip

Shape = tuple[int, ...]
# The index mode, in which index arrays are read, and the precision of products.
Mode = tuple[str, str | None]

TABLE = make_table()
# Platforms on which rows of the table run kernels of their own, and the module of these; the rows and their names are
# the same everywhere.
PLATFORMS = {"tpu": "grouped_matmul.pallas_tpu", "cuda": "grouped_matmul.pallas_gpu"}


@lru_cache(maxsize=len(PLATFORMS))
def platform_table(platform: str) -> Table:
    """Return the table for a platform: its kernels are imported when the first program is lowered for it."""
    if platform == "cuda" and not hopper():
        return TABLE
    return make_table(importlib.import_module(f"planner.kernels.{PLATFORMS[platform]}").KERNELS)


def hopper() -> bool:
    """Whether what is compiled here for CUDA runs on cards of capability 9.0, the only ones with these instructions.

    Where no card is visible a program is exported, and must run on any.
    """
    try:
        cards = jax.devices("cuda")
    except RuntimeError:
        return False
    # Mosaic for GPUs imports absl, which JAX does not install.
    return all(card.compute_capability == "9.0" for card in cards) and importlib.util.find_spec("absl") is not None


def input_count(op: Op) -> int:
    """Number of array inputs of an op, index arrays not counted."""
    return 1 if isinstance(op, Cast) else len(op.spec.inputs) + op.first_operand


def _choices(op: Op) -> Sequence[PricedImplementation]:
    """Implementations of a derived step, by the rates of a CPU; elsewhere those that run anywhere."""
    choices = TABLE.choices(op, CPU)
    if jax.default_backend() == "cpu":
        return choices
    return [choice for choice in choices if TABLE.rows[choice.lowering].kinds is None]


# Chooses implementations of the steps that no plan holds.
LOWER = Lowerer(_choices, step_key("time"))


def _given(spec: Spec, raw: Mapping[str, Any]) -> dict[Gather, Any]:
    """Index arrays as a spec has them."""
    return {gather: raw[gather.array].reshape(index_shape(spec, gather.array)) for gather in spec.gathers}


def _index_arrays(given: Mapping[Gather, Any], index_mode: str, poisons: bool) -> RangedIndices:
    """Index arrays in range; `poisons` says that results will be NaN wherever a bad one acts."""
    index = RangedIndices(index_mode in ("raise", "drop") and not poisons)
    for gather, values in given.items():
        normal = partial(normalised, gather=gather, mode="wrapped" if poisons else index_mode)
        index[gather] = normal(values)
        index.given[gather] = IndexArray(
            values, normal, index.may_drop, partial(is_bad, gather=gather) if poisons else None
        )
    return index


def evaluate(
    *arguments: Any,
    op: Op,
    lowering: str,
    mode: Mode,
    views: tuple[Shape, ...],
    reads: Reads,
    platform: str = "",
    several: bool = False,
    **_: Any,
) -> list[Any]:
    """Compute a step: what a primitive lowers to, on a platform of `PLATFORMS` or any other, on one device or many."""
    count, (index_mode, precision) = input_count(op), mode
    inputs = [x.reshape(shape) for x, shape in zip(arguments[:count], op.input_shapes, strict=True)]
    raw = dict(zip(reads.arrays, arguments[count:], strict=True))
    rows = partitioned_rows if several else zero_unread_rows
    for place, spec, term in unread(op, reads):
        inputs[place] = rows(inputs[place], spec, term, _given(spec, raw), index_mode)
    given = _given(op.spec, raw)
    run = partial(_run, lowering=lowering, precision=precision, platform=platform)
    results = partitioned(run, op, inputs, given, index_mode) if several else run(op, inputs, given, index_mode)
    return [x.reshape(view) for x, view in zip(results, views, strict=True)]


def _run(
    op: Op, inputs: Sequence[Any], given: Mapping[Gather, Any], index_mode: str, lowering: str, precision: str | None,
    platform: str,
) -> tuple[Any, ...]:  # fmt: skip
    """Run an op on arrays as its spec has them; where the implementation is for longer ones only, the fastest other."""
    if TABLE.rows[lowering].supports(op) is not None:
        lowering = LOWER(op).lowering
    # A bad index that cannot be refused puts NaN wherever it had a say, so until then it may read any row of its own.
    poisons = index_mode == "raise" and jnp.issubdtype(op.dtype, jnp.inexact) and all(g.size for g in op.spec.gathers)
    index = _index_arrays(given, index_mode, poisons)
    inputs, pool = list(inputs), unread_pool(op, lowering)
    if pool is not None:
        inputs[pool] = zero_unread_rows(inputs[pool], op.spec, op.input_terms[pool], given, index_mode)
    # Settled when the step was bound: a program may be lowered in another context than it was traced in.
    with jax.default_matmul_precision(precision):
        results = (platform_table(platform) if platform else TABLE).run(lowering, op, inputs, index)
    if index_mode == "raise" and not index.shown:
        results = tuple(poisoned(x, term, op.spec, given) for x, term in zip(results, op.output_terms, strict=True))
    return results


def cast(x: Any, dtype: str) -> Any:
    """Compute a cast; of a complex array the real part where the dtype is real."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(jnp.dtype(dtype), jnp.complexfloating):
        x = x.real
    return lax.convert_element_type(x, jnp.dtype(dtype))


@lru_cache(maxsize=64)
def compiled_cast(dtype: str) -> Callable[..., list[Any]]:
    """Return a cast, jitted, with its result in a list as a step has them."""

    def as_step(x: Any) -> list[Any]:
        return [cast(x, dtype)]

    return jax.jit(as_step)
