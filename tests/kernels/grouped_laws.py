"""Rows times the matrices of their groups: problems, a loop over the rows, and a table of the kernels held to it.

Operands are small integers, so every result is exact. What a kernel has no business to read is NaN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st

SKEWS = ("even", "sorted", "half in one", "all in one", "steep", "all dropped", "one row each")
LAYOUTS = ("plain", "columns", "transposed", "sliced", "expanded")
# Rows are added up into so many targets; one more is not a target.
TARGETS = 5


@dataclasses.dataclass(frozen=True)
class Problem:
    """How many rows, factors and groups there are, the sizes of a product, and how rows are spread over groups.

    Where factors are not as many as rows, maps say which left and which right factor a row has.
    """

    rows: int
    factors: int
    groups: int
    i: int
    j: int
    k: int
    dtype: str
    skew: str = "even"
    layout: str = "plain"
    bad: float = 0.0  # what the factors of one row hold instead of numbers
    small: bool = True  # buffers so small that every kind of piece occurs, where a kernel cuts its work
    seed: int = 0

    def index(self) -> np.ndarray:
        """The group of each row; the number of groups drops a row."""
        random, n, g = np.random.default_rng(self.seed), self.rows, self.groups
        even = random.integers(0, g + 1, n)
        return {
            "even": even,
            "sorted": np.sort(even),
            "half in one": np.where(random.random(n) < 0.5, g // 2, even),
            "all in one": np.full(n, g // 2),
            "steep": (random.random(n) ** 6 * (g + 1)).astype(int),
            "all dropped": np.full(n, g),
            "one row each": np.arange(n) % (g + 1),
        }[self.skew]

    def arrays(self) -> tuple[list[np.ndarray], list[Any]]:
        """Left factors, matrices, gradients and right factors; groups, both maps (or None each), and targets."""
        random, q, n = np.random.default_rng(self.seed), self.index(), self.rows
        shapes = (self.factors, self.i, self.j), (self.groups, self.j, self.k), (n, self.i, self.k)
        operands = [random.integers(-2, 3, x).astype(float) for x in (*shapes, (self.factors, self.i, self.k))]
        if self.dtype.startswith("complex"):
            operands = [x + 1j * random.integers(-2, 3, x.shape) for x in operands]
        maps = [None if self.factors == n else random.integers(0, self.factors, n) for _ in range(2)]
        kept = np.flatnonzero(q < self.groups)
        left, right = (kept if m is None else m[kept] for m in maps)
        for x, places in zip(operands, (left, q, kept, right), strict=True):
            if self.layout == "expanded":
                x[:] = x[:1]
            elif "float" in self.dtype:
                x[~np.isin(np.arange(len(x)), places)] = np.nan
                if self.bad and len(kept) and places is not q:
                    x[places[0]] = self.bad
        return operands, [q, *maps, random.integers(0, TARGETS + 1, n)]


def problems(sizes: st.SearchStrategy[Any], layouts: tuple[str, ...] = ("plain",)) -> st.SearchStrategy[Problem]:
    """Problems of these sizes and dtypes, in any of these layouts."""
    how = {
        "skew": st.sampled_from(SKEWS), "layout": st.sampled_from(layouts), "small": st.booleans(),
        "bad": st.sampled_from([0.0, np.nan, np.inf]), "seed": st.integers(0, 2**30),
    }  # fmt: skip
    return st.builds(lambda size, **how: Problem(*size, **how), sizes, **how)


def by_a_loop(operands: list[np.ndarray], index: list[Any]) -> dict[str, np.ndarray]:
    """What the kernels compute, row by row."""
    (a, c, g, b), (q, source, other, target) = operands, index
    of_rows, of_matrices = np.zeros((len(q), *a.shape[1:]), a.dtype), np.zeros_like(c)
    found = {
        "product": np.zeros_like(g),
        "sum": np.zeros((TARGETS, *g.shape[1:]), g.dtype),
        "outer": of_matrices.copy(),
    }
    for row in np.flatnonzero(q < len(c)):
        x, y = a[row if source is None else source[row]], b[row if other is None else other[row]]
        found["product"][row] = np.einsum("ij,jk->ik", x, c[q[row]])
        found["outer"][q[row]] += np.einsum("ij,ik->jk", x, y)
        if target[row] < TARGETS:
            found["sum"][target[row]] += found["product"][row]
        of_rows[row] = np.einsum("ik,jk->ij", g[row], c[q[row]])
        of_matrices[q[row]] += np.einsum("ij,ik->jk", x, g[row])
    return {**found, "rows' gradient": of_rows, "matrices' gradient": of_matrices}


# -- frameworks ------------------------------------------------------------------------------------------


def torch_array(x: Any, dtype: str = "int64", layout: str = "plain") -> Any:
    """An array as torch has it, laid out in memory in some way."""
    import torch

    x = torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype))
    if layout == "sliced":
        return x.new_zeros([2 * n for n in x.shape])[::2, ::2, 1::2].copy_(x)
    if layout == "padded":
        return x.new_zeros(*x.shape[:2], x.shape[2] + 3)[..., : x.shape[2]].copy_(x)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    order = {"columns": (0, 2, 1), "transposed": (2, 1, 0)}.get(layout)
    return x.permute(order).contiguous().permute(order) if order else x


def jax_array(x: Any, dtype: str = "int32", layout: str = "plain") -> Any:
    """An array as JAX has it."""
    import jax.numpy as jnp

    return jnp.asarray(x).astype(dtype)


ARRAYS = {"torch": torch_array, "jax": jax_array}


def values(x: Any) -> np.ndarray:
    """The numbers of a framework's array, in NumPy."""
    if hasattr(x, "detach"):
        x = x.numpy() if x.is_complex() else x.double().numpy()
    return np.asarray(x, complex if x.dtype.kind == "c" else float)


def torch_scratch(run: Callable[..., Any], *arrays: Any) -> int:
    """The most bytes that a call holds at a time beside its results."""
    from planner.inspect.memory import torch_memory

    results, memory = torch_memory(lambda: run(*arrays))
    return memory.peak_bytes - sum(x.nbytes for x in (results if isinstance(results, tuple) else (results,)))


def xla_temporaries(run: Callable[..., Any], *stand_ins: Any, hurries: bool = True) -> int:
    """The bytes that XLA's program of a call holds beside its operands and results; as users compile it, if asked."""
    import jax
    from jax_fast import AS_USERS, SIZES_ALONE

    program = jax.jit(run).lower(*stand_ins).compile(SIZES_ALONE if hurries else AS_USERS)
    return program.memory_analysis().temp_size_in_bytes


# -- the table -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernels:
    """A module's `grouped_matmul`, `grouped_outer` and `grouped_gradients`.

    Attributes:
        name: of what runs them.
        needs: the packages without which they are skipped, the framework first.
        problems: what they are tried on.
        examples: how many of these in CI and nightly.
        open: gives the three functions for a problem, as a context that sets what a test may set.
        half: a half type that they take.
        maps: whether rows may share factors, and be added up into targets.
    """

    name: str
    needs: tuple[str, ...]
    problems: st.SearchStrategy[Problem]
    examples: tuple[int, int]
    open: Callable[[Problem], contextlib.AbstractContextManager[Any]]
    half: str = "bfloat16"
    maps: bool = True

    def results(self, problem: Problem, operands: list[np.ndarray], index: list[Any], jit: Any) -> list[Any]:
        """All that the kernels compute."""
        if self.needs[0] == "jax":
            given = [jax_array(x, problem.dtype) for x in operands], [x if x is None else jax_array(x) for x in index]
            return _compiled(self, problem.groups, problem.layout == "columns", jit)(*given)
        from planner.kernels.grouping.torch_grouping import group_rows

        tensors = [torch_array(x, problem.dtype, problem.layout) for x in operands]
        q, *rest = (x if x is None else torch_array(x) for x in index)
        with self.open(problem) as kernels:
            return self.all_of(kernels, tensors, group_rows(q, problem.groups), rest)

    def all_of(
        self, kernels: Any, operands: Any, groups: Any, maps: Any, *size: int, turned: bool = False
    ) -> list[Any]:
        """Call each of the functions. Matrices that are turned have their columns before their rows."""
        (a, c, g, b), (source, other, target) = operands, maps
        both = [m for m in (source, other) if m is not None]
        c, how = (c.swapaxes(1, 2), {"turned": True}) if turned else (c, {})
        of_rows, of_matrices = kernels.grouped_gradients(g, a, c, groups, *both[:1], **how)
        return [
            kernels.grouped_matmul(a, c, groups, *both[:1], **how),
            *([kernels.grouped_matmul(a, c, groups, source, target, TARGETS, **how)] if self.maps else []),
            kernels.grouped_outer(a, b, groups, *size, *both),
            of_rows,
            of_matrices.swapaxes(1, 2) if turned else of_matrices,
        ]


def each(rows: Sequence[Any], argument: str = "kernels") -> Any:
    """Parametrize a test by the rows of a table; those whose packages are not installed are skipped."""
    cases = []
    for row in rows:
        absent = [name for name in row.needs if importlib.util.find_spec(name) is None]
        skips = pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} is not installed")
        cases.append(pytest.param(row, id=row.name, marks=skips))
    return pytest.mark.parametrize(argument, cases)


@functools.cache
def _compiled(kernels: Kernels, groups: int, turned: bool, jit: Any) -> Any:
    import jax_fast

    from planner.kernels.grouping.jax_grouping import group_rows

    def run(operands: Any, index: Any) -> Any:
        with kernels.open(None) as functions:
            ordered = group_rows(index[0], groups)
            return kernels.all_of(functions, operands, ordered, index[1:], groups, turned=turned)

    return (jit or jax_fast.jit)(run)


def hold(kernels: Kernels, problem: Problem, arrays: Any = None, jit: Any = None) -> None:
    """Hold all functions to the loop over rows, wherever that meets nothing but numbers.

    Args:
        kernels: a row of the table.
        problem: what to compute, or its dtype and number of groups if `arrays` are given.
        arrays: operands and index arrays, as `Problem.arrays` gives them.
        jit: what compiles JAX's programs; `jax_fast.jit` if None.
    """
    operands, index = arrays or problem.arrays()
    with np.errstate(invalid="ignore"):
        expected = by_a_loop(operands, index)
    if not kernels.maps:
        del expected["sum"]
    make = ARRAYS[kernels.needs[0]]
    for found, (name, wanted) in zip(kernels.results(problem, operands, index, jit), expected.items(), strict=True):
        assert str(found.dtype).removeprefix("torch.") == problem.dtype
        assert found.shape == wanted.shape
        known = np.isfinite(wanted)
        rounded = values(make(np.where(known, wanted, 0), problem.dtype))
        assert np.array_equal(values(found)[known], rounded[known]), name


def choices_of(table: Any, op: Any, device: Any) -> Iterator[Any]:
    """Each implementation of an op on a device with its cost, and each of its variants in other tiles."""
    for choice in table.choices(op, device):
        yield from (choice, *table.variants(choice.lowering, op, device))


def steps_agree(plan: Any, operands: Any, indices: Any, gradient: Any, part: str) -> list[str]:
    """Hold each step of a plan for a card, in each implementation whose name has a part, to the oracle; the names."""
    from planner.program.frameworks import load_backend
    from planner.testing.steps import run_step

    table, ran = load_backend("torch").table, []
    for number, step in enumerate(plan.steps):
        for choice in choices_of(table, step.op, plan.device):
            if part in choice.lowering:
                assert table.offers(choice, step.op, plan.device)
                found, expected = run_step(plan, operands, indices, number, choice.lowering, gradient=gradient)
                assert all(map(np.array_equal, found, expected)), choice.lowering
                ran.append(choice.lowering)
    return ran


def kernel_module(name: str) -> Any:
    """A module of the kernels, imported where it is needed."""
    return importlib.import_module(f"planner.kernels.{name}")


@contextlib.contextmanager
def _torch(problem: Problem) -> Iterator[Any]:
    module = kernel_module("grouped_matmul.torch_grouped")
    small = {"BUFFER_BYTES": 400, "FEWEST_ROWS": 6, "MATRIX_BYTES": 300} if problem.small else {}
    with mock.patch.dict(vars(module), small):
        yield module


@contextlib.contextmanager
def _triton(problem: Problem) -> Iterator[Any]:
    module, tilings = (
        kernel_module("grouped_matmul.triton_grouped"),
        ("", *kernel_module("tiled_product.triton_tiles").TILINGS),
    )
    how = {"tiling": tilings[problem.seed % len(tilings)]}
    names = "grouped_matmul", "grouped_outer", "grouped_gradients"
    yield types.SimpleNamespace(**{name: functools.partial(getattr(module, name), **how) for name in names})


@contextlib.contextmanager
def pallas(problem: Problem | None, platform: str = "tpu", how: Any = True) -> Iterator[Any]:
    """Interpreted, for a TPU with small blocks; or on a simulated card."""
    module = kernel_module(f"grouped_matmul.pallas_{platform}")
    with mock.patch.dict(vars(module), {"INTERPRET": how} | ({"_SIDE": 128} if platform == "tpu" else {})):
        yield module.KERNELS


@contextlib.contextmanager
def _card(problem: Problem | None) -> Iterator[Any]:
    """In so many steps that most problems take several."""
    module = kernel_module("grouped_matmul.jax_grouped")
    with mock.patch.dict(vars(module), {"CARD_STEP_BYTES": 2000, "CARD_STEP_PART": 50}):
        yield module.CARD


def _sizes(groups: Any, i: Any, j: Any, k: Any, dtypes: tuple[str, ...], shared: bool = True) -> st.SearchStrategy[Any]:
    """Sizes of up to 90 rows, which may share factors."""
    free = st.integers(not shared, 90), st.integers(1, 20), groups, i, j, k, st.sampled_from(dtypes)
    equal = st.booleans() if shared else st.just(True)
    return st.builds(lambda size, equal: (size[0], size[0] if equal else size[1], *size[2:]), st.tuples(*free), equal)


# Rows, factors, groups, I, J, K and dtype. A handful, since each compiles.
JAX_SHAPES = [
    (60, 60, 7, 1, 3, 4),
    (300, 40, 2, 2, 5, 3),  # more than one step of tiles
    (9, 20, 30, 3, 2, 1),  # more groups than rows
    (1, 1, 1, 1, 1, 1), (0, 3, 2, 1, 2, 2), (5, 5, 0, 1, 2, 2), (5, 5, 3, 0, 2, 2), (5, 5, 3, 1, 0, 2),
    (5, 5, 3, 2, 2, 0),
]  # fmt: skip
# One of each, none, sizes that no tile divides, matrices of several blocks, rows that are tiles, more groups than rows.
TPU_SHAPES = [
    (1, 1, 1, 1, 1, 1, "float32"), (0, 0, 3, 1, 4, 4, "float32"), (50, 50, 3, 1, 5, 7, "bfloat16"),
    (90, 90, 6, 2, 16, 33, "float32"), (40, 30, 9, 3, 8, 8, "bfloat16"), (130, 130, 2, 1, 300, 200, "float32"),
    (20, 9, 4, 1, 140, 130, "bfloat16"), (9, 9, 3, 32, 16, 24, "float32"), (9, 9, 3, 64, 20, 130, "bfloat16"),
    (6, 6, 2, 1, 0, 3, "float32"), (5, 5, 40, 1, 8, 8, "float32"),
]  # fmt: skip
GPU_SHAPES = [
    (2, 2, 2, 256, 20, 64, "float16"), (50, 50, 3, 1, 5, 7, "bfloat16"), (20, 9, 4, 3, 16, 70, "float16"),
    (150, 40, 1, 1, 130, 20, "bfloat16"), (0, 0, 3, 1, 4, 4, "float16"), (6, 6, 2, 1, 0, 3, "bfloat16"),
    (1, 1, 1, 1, 1, 1, "bfloat16"),
]  # fmt: skip
JAX_PROBLEMS = st.builds(
    lambda size, dtype: (*size, dtype), st.sampled_from(JAX_SHAPES),
    st.sampled_from(["float32", "bfloat16", "float16", "int32", "complex64"]),
)  # fmt: skip
# In JAX the matrices of "columns" are turned.
JAX_LAYOUTS = ("plain", "columns")
FEW = st.sampled_from([0, 1, 7, 16, 40, 64, 65])
KERNELS = (
    Kernels(
        "torch", ("torch",), examples=(80, 1000), open=_torch, problems=problems(_sizes(
            st.integers(0, 40), st.integers(0, 3), st.integers(0, 5), st.integers(0, 5),
            ("float32", "float64", "bfloat16", "float16", "int64", "int32", "complex64"),
        ), LAYOUTS),
    ),
    Kernels(
        "torch, grouped_mm", ("torch",), examples=(40, 600), maps=False, problems=problems(_sizes(
            st.integers(1, 9), st.integers(1, 3), st.sampled_from([8, 16, 40]), st.sampled_from([8, 24]),
            ("bfloat16",), shared=False,
        ), ("plain", "columns")),
        open=lambda problem: contextlib.nullcontext(kernel_module("grouped_matmul.torch_grouped_mm")),
    ),
    Kernels(
        "Triton", ("torch", "triton"), examples=(15, 200), open=_triton, half="float16",
        problems=problems(_sizes(st.integers(1, 6), st.integers(0, 3), FEW, FEW, ("float32", "float64")), LAYOUTS),
    ),
    Kernels(
        "JAX", ("jax",), examples=(25, 200),
        open=lambda problem: contextlib.nullcontext(kernel_module("grouped_matmul.jax_grouped")),
        problems=problems(JAX_PROBLEMS, JAX_LAYOUTS),
    ),
    Kernels("JAX, cards", ("jax",), problems(JAX_PROBLEMS, JAX_LAYOUTS), (20, 200), open=_card),
    Kernels(
        "JAX, part of a mesh", ("jax",), problems(JAX_PROBLEMS, JAX_LAYOUTS), (10, 200),
        open=lambda problem: contextlib.nullcontext(kernel_module("grouped_matmul.jax_grouped").PART),
    ),
    Kernels("Pallas, TPU", ("jax",), problems(st.sampled_from(TPU_SHAPES), JAX_LAYOUTS), (200, 2000), open=pallas),
)  # fmt: skip
