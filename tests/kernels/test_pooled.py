"""Every implementation of scores against chosen rows of a pool, whatever its framework, is held to the oracle.

Operands are small integers, so every result is exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import examples
from grouped_laws import ARRAYS, each, kernel_module, torch_array, torch_scratch, values, xla_temporaries
from hypothesis import example, given, settings
from hypothesis import strategies as st

import planner
from planner.kernels.grouping.keys import IndexArray
from planner.language.errors import IndexRangeError
from planner.testing.reference import reference, reference_gradients

SPEC = "bqd, b i[bqk] d -> bqk"
# The functions, and what they take before the index: the query, the pool, the scores' gradient.
FUNCTIONS = {
    "scores": ("query", "pool"), "query_gradient": ("g", "pool"), "pool_gradient": ("g", "query"),
    "gradients": ("g", "query", "pool"),
}  # fmt: skip
JAX_SHAPES = [  # a handful, since each compiles
    (2, 5, 4, 3, 6), (1, 1, 1, 1, 1), (0, 2, 3, 2, 2), (2, 0, 3, 2, 2), (2, 3, 0, 2, 2), (2, 3, 4, 0, 2),
    (2, 3, 4, 2, 0),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Way:
    """One implementation: a module's functions of one prefix, and what they are tried on."""

    name: str
    needs: tuple[str, ...]
    module: str
    prefix: str
    sizes: st.SearchStrategy[tuple[int, ...]]
    dtypes: tuple[str, ...]
    examples: tuple[int, int]
    layouts: tuple[str, ...] = ("plain",)

    def function(self, name: str, size: int, **options: Any) -> Any:
        """One of the functions; its last array is the index, and options say how that is read."""
        if self.needs[0] == "jax":
            return _jitted(self, name, size, frozenset(options.items()))
        return self.plain(name, size, **options)

    def plain(self, name: str, size: int, **options: Any) -> Any:
        """The same, not compiled."""
        found = getattr(kernel_module(f"gathered_dot.{self.module}"), self.prefix + name)
        sizes = [size] if name == "pool_gradient" else []
        return lambda *arrays: found(*arrays[:-1], IndexArray(arrays[-1], **options), *sizes)

    @property
    def make(self) -> Any:
        """What makes an array of the framework."""
        return ARRAYS[self.needs[0]]


@functools.cache
def _jitted(way: Way, name: str, size: int, options: frozenset[Any]) -> Any:
    import jax_fast

    return jax_fast.jit(way.plain(name, size, **dict(options)))


FREE = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 20), st.integers(0, 5), st.integers(0, 12))
TORCH = ("float32", "float64", "bfloat16", "float16", "int64", "complex64")
LAYOUTS = ("plain", "columns", "transposed", "sliced", "padded", "expanded")
JAX = ("float32", "bfloat16", "int32", "complex64")
FOR_TRITON = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 9), st.integers(0, 40), st.integers(0, 20))
TRITON = ("float32", "float64", "float16", "bfloat16")
WAYS = (
    Way("torch, pooled", ("torch",), "torch_pooled", "pooled_", FREE, TORCH, (200, 2000), LAYOUTS),
    Way("torch, gathered", ("torch",), "torch_pooled", "gathered_", FREE, TORCH, (200, 2000), LAYOUTS),
    Way("Triton", ("torch", "triton"), "triton_pooled", "", FOR_TRITON, TRITON, (40, 400), LAYOUTS),
    Way("JAX, pooled", ("jax",), "jax_pooled", "pooled_", st.sampled_from(JAX_SHAPES), JAX, (25, 200)),
    Way("JAX, gathered", ("jax",), "jax_pooled", "gathered_", st.sampled_from(JAX_SHAPES), JAX, (25, 200)),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of batch, queries, pool, features and chosen rows; and how the index is given."""

    batch: int
    queries: int
    pool: int
    depth: int
    chosen: int
    dtype: str = "float32"
    index_dtype: str = "int32"
    layout: str = "plain"
    index: str = "in range"  # or "dropped" too, "repeated", or as "given", from -pool on
    small: bool = True  # buffers so small that torch's kernels cut their work
    seed: int = 0

    def arrays(self) -> list[np.ndarray]:
        """Query, pool, the scores' gradient, and the index."""
        random, b, q, k, m = np.random.default_rng(self.seed), self.batch, self.queries, self.chosen, self.pool
        operands = [
            random.integers(-2, 3, x).astype(float) for x in ((b, q, self.depth), (b, m, self.depth), (b, q, k))
        ]
        if self.dtype.startswith("complex"):
            operands = [x + 1j * random.integers(-2, 3, x.shape) for x in operands]
        low = -m if self.index == "given" and self.index_dtype[0] != "u" else 0
        chosen = random.integers(low, max(m, low + 1) + (self.index == "dropped"), (b, q, k))
        chosen = np.full_like(chosen, m // 2) if self.index == "repeated" else chosen
        if not m:
            chosen[:] = 0  # which means no row
        arrays = [*operands, chosen]
        return [np.repeat(x[:1], len(x), 0) if self.layout == "expanded" else x for x in arrays]


def problems(way: Way, given: tuple[str, ...]) -> st.SearchStrategy[Problem]:
    how = {
        "dtype": st.sampled_from(way.dtypes), "index_dtype": st.sampled_from(["int64", "int32", "uint8"]),
        "layout": st.sampled_from(way.layouts), "index": st.sampled_from(given), "small": st.booleans(),
        "seed": st.integers(0, 2**30),
    }  # fmt: skip
    if way.needs[0] == "jax":
        how["index_dtype"] = st.just("int32")
    return st.builds(lambda size, **how: Problem(*size, **how), way.sizes, **how)


def wrapped(size, part):
    """Values of an index counted from 0; refused where they are out of range, if they can be looked at."""
    if hasattr(part, "detach"):
        part = part.long()
        if ((part < -size) | (part >= size)).any():
            raise IndexRangeError("refused")
        return part.where(part >= 0, part + size)
    import jax.numpy as jnp

    return jnp.where(part < 0, part + size, part)


# One object a size: what is compiled is looked up by it.
normal = functools.cache(lambda size: functools.partial(wrapped, size))


def calls(way, problem, arrays, **options):
    """Each function with its arguments; rows that no key names are NaN, and so are in JAX gradients of such keys."""
    query, pool, g, index = arrays
    unread, dropped = pool, g
    if "float" in problem.dtype and problem.index == "dropped" and problem.layout != "expanded":
        named = [np.isin(np.arange(problem.pool), chosen) for chosen in index]
        unread = np.where(np.reshape(named, (*pool.shape[:2], 1)), pool, np.nan)
        if way.needs[0] == "jax":
            dropped = np.where(index < problem.pool, g, np.nan)
    given = (query, unread), (g, pool), (dropped, query), (g, query, pool)
    for name, operands in zip(FUNCTIONS, given, strict=True):
        placed = [way.make(x, problem.dtype, problem.layout) for x in operands]
        placed.append(way.make(index, problem.index_dtype, problem.layout))
        yield name, functools.partial(way.function(name, problem.pool, **options), *placed)


def small_buffers(way, problem):
    """A context in which torch's buffers are small, if a problem asks for it."""
    if way.needs[0] == "jax" or not problem.small:
        return contextlib.nullcontext()
    if way.name == "Triton":  # rows that windows hold, and tiles that do not hold a query's keys or its depth
        buffers = contextlib.ExitStack()
        for module, sizes in ("segment_sum.triton_sum", {"WINDOW": 8}), ("gathered_dot.triton_pooled", {"_DEPTH": 16}):
            buffers.enter_context(mock.patch.multiple(kernel_module(module), _TILE=256, **sizes))
        return buffers
    return mock.patch.multiple(kernel_module("gathered_dot.torch_pooled"), DENSE_BYTES=2000, FETCHED_BYTES=600)


@each(WAYS, "way")
def test_kernels_equal_a_loop_over_keys(way):
    @settings(max_examples=examples(*way.examples))
    @example(Problem(2, 5, 7, 3, 4, index="dropped"))
    @given(problems(way, ("in range", "dropped", "repeated", "given")))
    def law(problem):
        query, pool, g, index = arrays = problem.arrays()
        as_given = problem.index == "given" and problem.pool > 0
        options = {"normal": normal(problem.pool), "may_drop": False} if as_given else {}
        read = {"i": index, "index_mode": "raise" if as_given else "drop"}
        gradients = reference_gradients(SPEC, g, query, pool, **read)
        expected = [reference(SPEC, query, pool, **read)], gradients[:1], gradients[1:], gradients
        for (name, call), wanted in zip(calls(way, problem, arrays, **options), expected, strict=True):
            with small_buffers(way, problem):
                found = call()
            for x, y in zip(found if isinstance(found, tuple) else (found,), wanted, strict=True):
                assert str(x.dtype).removeprefix("torch.") == problem.dtype
                assert x.shape == y.shape
                assert np.array_equal(values(x), values(way.make(y, problem.dtype))), name

    law()


@each(WAYS[:2], "way")
def test_an_index_out_of_range_is_refused_by_the_kernel(way):
    @settings(max_examples=examples(25, 500))
    @given(problems(way, ("given",)), st.data())
    def law(problem, data):
        *operands, index = problem.arrays()
        if not index.size:
            return
        low, m = 0 if problem.index_dtype == "uint8" else -problem.pool, problem.pool
        # Where all entries of the batch share memory, it is the first one's.
        some = index[: 1 if problem.layout == "expanded" else None]
        place = data.draw(st.integers(0, some.size - 1))
        some.flat[place] = data.draw(st.sampled_from([m, m + 1, m + 40, *([-m - 1] if low else [])]))
        for _, call in calls(way, problem, [*operands, index], normal=normal(m), may_drop=False):
            with small_buffers(way, problem), pytest.raises(IndexRangeError, match="refused"):
                call()

    law()


@each(WAYS[3:], "way")
@pytest.mark.parametrize("pool_size", [0, 2])
def test_bad_indices_show_as_nan(way, pool_size):
    import jax.numpy as jnp

    query, pool, index = jnp.ones((1, 1, 3)), jnp.ones((1, pool_size, 3)), jnp.array([[[0, -7]]])
    scores = way.function("scores", pool_size, normal=jnp.abs, may_drop=False, bad=lambda i: (i < 0) | (i >= pool_size))
    np.testing.assert_array_equal(scores(query, pool, index), [[[3.0 if pool_size else np.nan, np.nan]]])


def test_the_gradient_of_a_query_is_nan_if_there_are_no_rows():
    import jax.numpy as jnp

    way = next(way for way in WAYS if way.prefix == "gathered_" and way.needs[0] == "jax")
    gradient = way.function("query_gradient", 0, normal=jnp.abs, may_drop=False, bad=lambda i: i >= 0)
    assert jnp.isnan(gradient(jnp.ones((1, 2, 1)), jnp.ones((1, 0, 3)), jnp.zeros((1, 2, 1), jnp.int32))).all()


@pytest.mark.parametrize("batch", [1, 2])
def test_gathered_gradients_of_bad_keys_are_nan(batch):
    """The gradient of a query that has one, and that of the pool of the same batch entry; nothing else is."""
    import jax.numpy as jnp

    way = next(way for way in WAYS if way.prefix == "gathered_" and way.needs[0] == "jax")
    query, pool, g = jnp.ones((batch, 2, 3)), jnp.ones((batch, 4, 3)), jnp.ones((batch, 2, 2))
    index = jnp.zeros((batch, 2, 2), jnp.int32).at[0, 1, 0].set(7)
    given = {"query": query, "pool": pool, "g": g}
    marks = {"normal": lambda i: i % 4, "may_drop": False, "bad": lambda i: i >= 4}

    def found(name):
        results = way.function(name, 4, **marks)(*(given[operand] for operand in FUNCTIONS[name]), index)
        return results if name == "gradients" else (results,)

    for to_query, to_pool in (found("gradients"), (*found("query_gradient"), *found("pool_gradient"))):
        bad_queries, bad_pools = jnp.isnan(to_query).all(-1), jnp.isnan(to_pool).all((-1, -2))
        assert bad_queries.tolist() == [[False, True], [False, False]][:batch]
        assert bad_pools.tolist() == [True, False][:batch]
        assert (jnp.isnan(to_query).any(-1) == bad_queries).all()
        assert (jnp.isnan(to_pool).any((-1, -2)) == bad_pools).all()


# -- scratch ---------------------------------------------------------------------------------------------


def bound(way, name, *sizes):
    """What a function is foretold to allocate beside its results."""
    module = kernel_module(f"gathered_dot.{way.module}")
    named = [] if way.name == "torch, pooled" else [name]
    return getattr(module, f"{way.prefix}scratch_bytes")(*named, sizes[:5], *sizes[5:])


def test_scratch_of_many_blocks_is_no_walk_over_them(monkeypatch, torch):
    monkeypatch.delattr("planner.kernels.gathered_dot.torch_pooled._blocks")
    for way in WAYS[:2]:
        assert bound(way, "gradients", 10**12, 10**9, 10**6, 16, 3, torch.float32) < 10**9


@each(WAYS[:2], "way")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("b", "q", "m", "keys", "index_dtype", "layout"),
    [
        (4, 300, 500, 10, "int64", "plain"),
        (4, 300, 500, 100, "int32", "plain"),
        (4, 300, 500, 100, "int64", "columns"),
        (4, 300, 500, 30, "int64", "padded"),
        (1, 4180, 1000, 20, "int64", "plain"),  # just over the queries of a block
        (2, 200, 20_000, 3, "int64", "plain"),  # few rows of a large pool
        (2, 20_000, 50, 1, "int64", "plain"),  # sums larger than what they are made of
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_scratch_in_torch_stays_within_its_bound(way, dtype, b, q, m, keys, index_dtype, layout, given):
    shapes = {"query": (b, q, 16), "pool": (b, m, 16), "g": (b, q, keys)}
    made = {x: torch_array(np.ones(shape), dtype, layout) for x, shape in shapes.items()}
    index = torch_array(np.random.default_rng(0).integers(0, m + (not given), (b, q, keys)), index_dtype)
    options = {"normal": lambda part: part, "may_drop": False} if given else {}
    for name, operands in FUNCTIONS.items():
        foretold = bound(way, name, b, q, m, 16, keys, made["query"].dtype, index.itemsize)
        call = way.function(name, m, **options)
        assert torch_scratch(call, *(made[x] for x in operands), index) <= foretold, name


def temporaries(way, name, sizes, dtype, hurries=True):
    """Bytes of those of a compiled function."""
    import jax

    batch, queries, pool_size, size_d, keys = sizes
    shapes = {"query": (batch, queries, size_d), "pool": (batch, pool_size, size_d), "g": (batch, queries, keys)}
    operands = [jax.ShapeDtypeStruct(shapes[x], dtype) for x in FUNCTIONS[name]]
    index = jax.ShapeDtypeStruct(shapes["g"], "int32")
    return xla_temporaries(way.plain(name, pool_size), *operands, index, hurries=hurries)


@each(WAYS[3:], "way")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_temporaries_in_jax_are_what_is_foretold(way, dtype):
    """No more, and in float32 half of it at least: a plan's peak is off by that."""
    for sizes in ((4, 100, 120, 16, 30), (1, 64, 40, 32, 8), (8, 16, 64, 64, 64), (2, 256, 100, 32, 200)):
        for name in FUNCTIONS:
            used, foretold = temporaries(way, name, sizes, dtype), bound(way, name, *sizes, dtype)
            assert used <= foretold, (name, sizes)
            assert dtype != "float32" or sizes[0] == 1 or used >= foretold / 2, (name, sizes, used, foretold)


@each(WAYS[4:], "way")
def test_one_key_of_one_query_is_taken_and_multiplied_at_once(way):
    sizes = 40, 1, 60, 500, 1
    used = temporaries(way, "query_gradient", sizes, "float32", hurries=False)
    assert used <= bound(way, "query_gradient", *sizes, "float32") <= 2**11


def test_scores_are_no_copy_of_what_a_loop_wrote(jax):
    """With a batch axis of size 1 between others, as one head of attention makes it."""
    scores, shapes = WAYS[3].plain("scores", 60), (((4, 100, 8), "float32"), ((4, 60, 8), "float32"))
    given = [jax.ShapeDtypeStruct(*x) for x in (*shapes, ((4, 100, 200), "int32"))]
    used = xla_temporaries(lambda *arrays: scores(*arrays).reshape(4, 1, 100, 200), *given, hurries=False)
    assert used < 4 * 4 * 100 * 200


def test_scores_are_the_same_where_modes_look(torch):
    """Modes cannot look into sparse matrices, of which `sampled_addmm` makes scores."""
    from torch.utils.flop_counter import FlopCounterMode

    kernels = kernel_module("gathered_dot.torch_pooled")
    generator = torch.Generator().manual_seed(0)
    query, pool = (torch.randint(-3, 4, (2, n, 16), generator=generator).float() for n in (40, 30))
    index = torch.randint(0, 30, (2, 40, 10), generator=generator)
    alone = kernels.gathered_scores(query, pool, IndexArray(index))
    with FlopCounterMode(display=False) as counter:
        watched = kernels.gathered_scores(query, pool, IndexArray(index))
    assert torch.equal(alone, watched)
    assert counter.get_total_flops() == 2 * 2 * 40 * 10 * 16
    plan = planner.plan("bqd, b i[bqk] d -> bqk", (64, 1000, 32), (64, 1000, 32), i=(64, 1000, 10), backend="torch")
    assert [step.choice.lowering for step in plan.steps] == ["take in chunks"]
    operands = [torch.ones(64, 1000, 32)] * 2
    analysis = plan.analyze(*operands, i=torch.zeros(64, 1000, 10, dtype=torch.int64), rounds=1)
    assert "measured" in str(analysis)
