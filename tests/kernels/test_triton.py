"""The Triton kernel under its interpreter: exact on small integers, whatever lies beside its operands is left alone."""

import collections
import dataclasses
import itertools
import json
import math
import pathlib
import sys
from functools import partial
from unittest import mock

import numpy as np
import pytest
from conftest import examples, run
from grouped_laws import choices_of, steps_agree
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

import planner  # noqa: E402
from planner.backends.torch import ops as torch_ops  # noqa: E402
from planner.backends.torch.executable import Executable  # noqa: E402
from planner.cost.device import H200  # noqa: E402
from planner.inspect.memory import torch_memory  # noqa: E402
from planner.kernels.gathered_dot import torch_pooled, triton_pooled  # noqa: E402
from planner.kernels.grouped_matmul import torch_grouped, triton_grouped, triton_pair  # noqa: E402
from planner.kernels.grouped_matmul.triton_grouped import plain_product, rows_product, terms_product  # noqa: E402
from planner.kernels.grouped_matmul.triton_pair import both_gradients  # noqa: E402
from planner.kernels.grouping import triton_grouping  # noqa: E402
from planner.kernels.grouping.keys import IndexArray  # noqa: E402
from planner.kernels.grouping.torch_grouping import group_rows  # noqa: E402
from planner.kernels.segment_sum import triton_sum  # noqa: E402
from planner.kernels.tiled_product import triton_arithmetic, triton_tiles  # noqa: E402
from planner.kernels.tiled_product.triton_arithmetic import precision  # noqa: E402
from planner.kernels.tiled_product.triton_axes import Axis, Grouping, Matrices  # noqa: E402
from planner.kernels.tiled_product.triton_product import pieces_of  # noqa: E402
from planner.kernels.tiled_product.triton_tiles import PAIR_TERMS, TILINGS, Tiles, covers_pair, tiles_of  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402

DTYPES = "float16", "float32", "float64"
LAID = (*DTYPES, "float16, far apart")
BAND = 7
SIZES = st.sampled_from([0, 1, 2, 3, 15, 16, 17, 33])
small_tiles = st.builds(
    Tiles, m=st.sampled_from([16, 32]), n=st.just(16), k=st.sampled_from([16, 32]), chunk=st.integers(1, 3)
)


class Laid:
    """An operand anywhere in memory: axes in any order, with gaps, through tables, expanded, or far apart.

    Around it there is NaN. Axes that lie far apart reach beyond 2^31 elements, most of which nothing touches.
    """

    def __init__(self, values, random, dtype, writes=False, absent=(), dropped=slice(0), tables=True):
        """Lay values out.

        Args:
            values: what it holds; changed where it is expanded.
            random: a NumPy generator.
            dtype: a name, from `LAID`.
            writes: whether it is a result: no two positions are one.
            absent: positions along the first axis that are not rows: its table names -1 there.
            dropped: rows that may hold anything: NaN, where no other row shares their memory.
            tables: whether positions may be looked up.
        """
        dtype, _, self.far = dtype.partition(", ")
        places, self.strides, self.axes, step = [()] * values.ndim, [0] * values.ndim, [()] * values.ndim, 1
        order = random.permutation(values.ndim)
        for axis in order:
            size = extent = values.shape[axis]
            named = tables and size and (random.random() < 0.3 or (axis == 0 and len(absent)))
            place = np.arange(size)
            if named:
                extent *= int(random.integers(1, 3))
                place = random.permutation(extent)[:size]
            elif size > 1 and not writes and random.random() < 0.2:
                values[...], extent = values.take([0], axis), 1
            gap = int(random.integers(1, 3))
            if self.far and axis == order[-1] and extent > 1:
                gap = 2**31 // (step * (extent - 1)) + 1
            stride = self.strides[axis] = step * gap * (extent > 1)
            places[axis] = place * stride
            if axis == 0:
                place[list(absent)] = -1
            self.axes[axis] = Axis(stride, spaced(place) if named else None)
            step *= max(1, extent) * gap
        at = BAND + sum(np.ix_(*places))
        self.memory = torch.empty(at.max(initial=0) + 1 + BAND, dtype=getattr(torch, dtype))
        if not self.far:
            self.memory.fill_(torch.nan)
        self.at = torch.from_numpy(at)
        self.memory[self.at] = torch.from_numpy(values * (np.nan if writes else 1)).to(self.memory.dtype)
        self.memory[np.setdiff1d(at[dropped], np.delete(at, dropped, 0))] = torch.nan

    @property
    def tensor(self):
        return self.memory.as_strided(self.at.shape, self.strides, BAND)

    @property
    def matrices(self):
        return Matrices(self.memory[BAND:], *self.axes)

    def holds(self, expected):
        """Whether the result, and nothing else, was written."""
        equal = torch.equal(self.memory[self.at], torch.from_numpy(expected).to(self.memory.dtype))
        self.memory[self.at] = torch.nan
        return equal and bool(self.far or self.memory.isnan().all())


def spaced(table):
    """A table; what lies between its entries leads far away."""
    return torch.full((2 * len(table),), 1 << 40)[::2].copy_(torch.from_numpy(table))


def full_of_nan(x, *shape, dtype=None, **place):
    """In place of `Tensor.new_empty`: what a kernel does not write stays NaN."""
    shape = shape[0] if isinstance(shape[0], tuple) else shape
    return x.new_full(shape, torch.nan if (dtype or x.dtype).is_floating_point else 0, dtype=dtype, **place)


def integers(random, *shape):
    return random.integers(-2, 3, shape).astype(float)


def grouping(random, rows, groups):
    """Group of each row, their order, and where groups begin in it; in order already as often as not."""
    group = (
        random.integers(0, groups + 1, rows) if random.random() < 0.7 else np.full(rows, random.integers(groups + 1))
    )
    sorts = random.random() < 0.5
    group = group if sorts else np.sort(group)
    order = torch.from_numpy(np.argsort(group, kind="stable")) if sorts else None
    starts = torch.from_numpy(np.searchsorted(np.sort(group), np.arange(groups + 2)))
    return group, order, starts


@pytest.mark.parametrize("mode", ["plain", "rows", "terms", "pair"])
@settings(max_examples=examples(30, 1000))
@given(
    seed=st.integers(0, 2**30), dtype=st.sampled_from(LAID), tiles=small_tiles,
    sizes=st.tuples(SIZES, st.integers(0, 3), SIZES, SIZES), groups=st.integers(1, 5), some_absent=st.booleans(),
    how=st.sampled_from(["ieee", "bf16x6", "float64"]),
)  # fmt: skip
def test_products(mode, seed, dtype, tiles, sizes, groups, some_absent, how):
    """A batch of products, rows times the matrix of their group, products summed over the rows of each group.

    And both gradients of the second, in one walk. A batch may name its matrices, or none.
    """
    how = how if dtype == "float32" else "ieee"
    random = np.random.default_rng(seed)
    rows, i, m, n = sizes
    if mode in ("terms", "pair") and random.random() < 0.3:
        rows *= 4  # more than one piece
    if mode == "pair":
        m, n = max(1, m), max(1, n)
        tiles = Tiles(64 if n > 32 else 32, 64 if m > 32 else 32, tiles.k, tiles.chunk)
    group, order, starts = grouping(random, rows, groups)
    absent = np.flatnonzero(random.random(rows) < 0.2) if some_absent else ()
    dropped, lay = group == groups, partial(Laid, random=random, dtype=dtype)
    if mode == "plain":
        x, z = integers(random, groups, rows, n), integers(random, groups, n, m)
        named = random.integers(0, groups + 1, groups) if some_absent else np.arange(groups)
        c = lay(z, tables=False)
        matrices = np.concatenate([z, np.zeros((1, n, m))])[named]
        if some_absent:
            c.axes[0] = Axis(c.strides[0], spaced(named))
        product, operands = plain_product, [lay(x, dropped=named == groups), c]
        arguments = (groups, rows, m, n), groups if some_absent else None
        expected = [x @ matrices]
    else:
        x, y, z = integers(random, rows, i, n), integers(random, rows, i, m), integers(random, groups, n, m)
        a, b, c = lay(x, absent=absent, dropped=dropped), lay(y, dropped=dropped), lay(z)
        x[list(absent)] = y[list(absent)] = 0
        matrices, summed = np.concatenate([z, np.zeros((1, n, m))])[group], np.zeros((groups + 1, n, m))
        np.add.at(summed, group, x.swapaxes(1, 2) @ y)
        product, operands, arguments, expected = {
            "rows": (rows_product, [a, c], ((rows, i, m, n), Grouping(order, starts, groups), 1), [x @ matrices]),
            "terms": (terms_product, [a, b], ((rows, i, n, m), Grouping(order, starts[:-1], groups)), [summed[:-1]]),
            "pair": (
                both_gradients, [b, a, c],
                ((rows, i, n, m), Grouping(order, starts, groups), tiles, "ieee" if how == "bf16x6" else how),
                [y @ matrices.swapaxes(1, 2), summed[:-1]],
            ),
        }[mode]  # fmt: skip
    results = [lay(np.zeros(one.shape), writes=True) for one in expected]
    with mock.patch.multiple(triton_grouped, tiles_of=lambda *_: tiles, precision=lambda *_: how):
        product(*(x.matrices for x in (*operands, *results)), *arguments)
    assert all(result.holds(one) for result, one in zip(results, expected, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@settings(max_examples=examples(20, 600))
@given(
    seed=st.integers(0, 2**30), dtype=st.sampled_from(LAID), tiles=small_tiles, number=st.integers(0, 3),
    sizes=st.tuples(st.integers(1, 5), SIZES, SIZES, SIZES), how=st.sampled_from(["ieee", "bf16x6", "float64"]),
    wide=st.booleans(),
)  # fmt: skip
def test_rows_that_are_taken_times_a_matrix_of_many(seed, dtype, tiles, number, sizes, how, wide):
    """`a[source[n, i]] @ c[index[n]]`, of which both may name nothing. What nothing names is NaN."""
    how = how if dtype == "float32" else "ieee"
    random, (rows, i, j, k), groups = np.random.default_rng(seed), sizes, 3
    x, z = integers(random, rows, j), integers(random, groups, j, k)
    index, source = random.integers(0, groups + 1, number), random.integers(-1, rows, (number, i))
    if random.random() < 0.3:
        z[random.integers(groups)] = np.inf  # a dropped row is zero whatever it would meet
    unread = ~np.isin(np.arange(rows), source[index < groups]), ~np.isin(np.arange(groups), index)
    a, c = (Laid(one, random, dtype, dropped=none, tables=False) for one, none in zip((x, z), unread, strict=True))
    with (
        mock.patch.multiple(triton_grouped, tiles_of=lambda *_: tiles, precision=lambda *_: how),
        mock.patch.object(torch.Tensor, "new_empty", full_of_nan),
    ):
        found = triton_grouped.chosen_rows(a.tensor, c.tensor, spaced(index), i, spaced(source.ravel()), wide)
    numbers = np.concatenate([np.isfinite(z).all((1, 2)), [True]])[index][:, None] | (source < 0)
    z[~np.isfinite(z)] = 0
    expected = np.concatenate([x, np.zeros((1, j))])[source] @ np.concatenate([z, np.zeros((1, j, k))])[index]
    assert found.shape == expected.shape
    assert found.dtype == (torch.float32 if wide and dtype.startswith("float16") else a.memory.dtype)
    assert np.array_equal(found.double().numpy()[numbers], expected[numbers])


MULTIPLIED = (
    ("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32"), ("float64", "ieee"), ("float32", "bf16x6"),
    ("float32", "float64"),
)  # fmt: skip


# The interpreter is slow: three of these by default.
@pytest.mark.parametrize(
    ("dtype", "how", "tiling"),
    [(*kind, tiling) for kind in MULTIPLIED for tiling in ("", *TILINGS)][: examples(13, None) : examples(6, 1)],
)
def test_products_in_the_tiles_that_calls_take(monkeypatch, dtype, how, tiling):
    """Sizes beyond a tile and within one, rows of two elements, an empty group, a long one, and rows that are dropped.

    What kernels do not write stays NaN.
    """
    random, torch_dtype = np.random.default_rng(0), getattr(torch, dtype)
    q = random.permutation(np.repeat([0, 2, 3], [70, 9, 6]))  # of three groups
    groups = group_rows(torch.from_numpy(q), 3)
    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    monkeypatch.setattr(triton_grouped, "precision", lambda *_: how)
    for j, k in ((132, 140), (64, 60)):
        arrays = integers(random, 85, 2, j), integers(random, 3, j, k), integers(random, 85, 2, k)
        a, c, gradient = (torch.from_numpy(x).to(torch_dtype) for x in arrays)
        found = [
            triton_grouped.grouped_matmul(a, c, groups, tiling=tiling),
            *triton_grouped.grouped_gradients(gradient, a, c, groups, tiling=tiling),
            triton_grouped.grouped_outer(a, gradient, groups, tiling=tiling),
        ]
        matrices, sums = np.concatenate([arrays[1], np.zeros((1, j, k))])[q], np.zeros((4, j, k))
        np.add.at(sums, q, arrays[0].swapaxes(1, 2) @ arrays[2])
        expected = [arrays[0] @ matrices, arrays[2] @ matrices.swapaxes(1, 2), sums[:3], sums[:3]]
        out = a.new_empty((2, 85, k))
        triton_grouped.batched_matmul(a, c[0], out, [[[], [1, 0], [2]], [[], [0], [1]], [[], [0, 1], [2]]], tiling)
        for x, y in zip([*found, out], [*expected, (arrays[0] @ arrays[1][0]).swapaxes(0, 1)], strict=True):
            assert torch.equal(x, torch.from_numpy(y).to(torch_dtype))


def test_terms_beyond_2_to_the_31_are_counted_in_64_bits(monkeypatch):
    """Two rows of 2^30 elements, of which no row is dropped: the sum of the first terms is no NaN."""
    rows, inner, starts = 2, 2**30, torch.tensor([0, 2], dtype=torch.int32)
    few = triton_grouping.Tasks(torch.tensor([[0], [0], [16], [-1]]), torch.zeros(2, dtype=torch.int32), 1, 0)
    monkeypatch.setattr(Grouping, "tasks", lambda *_, **__: few)
    x, out = torch.ones(1, 1, 1).expand(rows, inner, 1), torch.zeros(1, 1, 1)
    for kept, expected in ((2, 16.0), (1, math.nan)):
        starts[1] = kept
        terms_product(*map(Matrices.of, (x, x, out)), (rows, inner, 1, 1), Grouping(None, starts, 1), 2)
        assert repr(out.item()) == repr(expected)


@triton.jit
def _count_tiles(out, size, BLOCK: tl.constexpr):  # noqa: N803
    tl.store(out, pieces_of(size, BLOCK))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 2**31 - 65, 2**31 - 64, 2**31 - 1, 2**31, 2**33 + 1])
def test_tiles_of_the_largest_axes_are_counted(size):
    out = torch.zeros(1, dtype=torch.int64)
    _count_tiles[(1,)](out, size, 64)
    assert out.item() == -(-size // 64)


def test_a_table_of_matrices_has_no_entry_for_dropped_rows():
    """What lies behind its last entry is far away."""
    random = np.random.default_rng(0)
    x, z = torch.from_numpy(integers(random, 6, 1, 3)), torch.from_numpy(integers(random, 2, 3, 4))
    group = torch.tensor([0, 2, 1, 2, 1, 0])
    groups, out = group_rows(group, 2), torch.full((6, 1, 4), torch.nan, dtype=torch.float64)
    table = torch.tensor([1, 0, 1 << 60])[:2]
    read, load = [], interpreter.InterpreterBuilder.create_masked_load

    def watched(self, pointers, mask, *rest):
        read.append(pointers.data[mask.data])
        return load(self, pointers, mask, *rest)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", watched):
        c = Matrices.of(z)._replace(outer=Axis(z.stride(0), table))
        rows_product(Matrices.of(x), c, Matrices.of(out), (6, 1, 4, 3), Grouping.of(groups), 1)
    assert table.data_ptr() + 16 not in np.concatenate([x.ravel() for x in read])
    assert torch.equal(out, x @ torch.cat([z.flip(0), torch.zeros(1, 3, 4)])[group])


def test_a_lazy_sign_is_no_sign_in_memory():
    """The imaginary part of a conjugate is a view of what has the other sign."""
    z = torch.complex(torch.ones(6, 1, 4), torch.arange(24.0).reshape(6, 1, 4))
    a, c, groups = z.conj().imag, torch.ones(2, 4, 3), group_rows(torch.tensor([0, 1, 0, 1, 1, 0]), 2)
    assert a.is_neg()
    assert torch.equal(triton_grouped.grouped_matmul(a, c, groups), torch_grouped.grouped_matmul(a, c, groups))
    index = group_rows(torch.tensor([0, 1, 0, 1, 1, 0]), 2)
    for lazy in (a[:, 0], a[:, 0, :1].expand(6, 3), a[:, 0].t().contiguous().t()):
        expected = torch.zeros(2, lazy.shape[1]).index_add_(0, torch.tensor([0, 1, 0, 1, 1, 0]), lazy.resolve_neg())
        assert torch.equal(triton_sum.grouped_sum(lazy, index), expected)
    query, pool, keys = a[:, 0][None], torch.ones(1, 3, 4), IndexArray(torch.tensor([[[0], [1], [2], [0], [1], [2]]]))
    assert torch.equal(triton_pooled.scores(query, pool, keys), torch_pooled.gathered_scores(query, pool, keys))


@pytest.fixture
def tf32():
    """Products of float32 may be rounded; before and after they may not."""
    assert precision(torch.ones(1), 64) == "ieee"
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_the_precision_is_what_torch_is_set_to(tf32):
    assert precision(torch.ones(1), 64) == "tf32"


@pytest.mark.parametrize(
    ("asked", "environment", "card", "terms", "dtype", "expected"),
    [
        ("none", "", (90, True, "NVIDIA H20"), 256, torch.float32, "bf16x6"),
        ("none", "", (90, True, "NVIDIA H20"), 255, torch.float32, "ieee"),
        ("none", "", (90, True, "NVIDIA H200"), 16, torch.float32, "float64"),
        ("none", "", (90, True, "NVIDIA H100 80GB HBM3"), 256, torch.float32, "float64"),
        ("none", "", (90, True, "NVIDIA H200"), 256, torch.bfloat16, "ieee"),
        ("none", "", (89, True, "NVIDIA L40S"), 256, torch.float32, "ieee"),
        ("none", "ieee", (90, True, "NVIDIA H200"), 256, torch.float32, "ieee"),
        ("ieee", "", (90, True, "NVIDIA H200"), 256, torch.float32, "float64"),
        ("none", "ieee", (80, True, "NVIDIA A100"), 256, torch.float32, "ieee"),
        ("ieee", "", (80, True, "NVIDIA A100"), 256, torch.float32, "ieee"),
        ("tf32", "", (90, True, "NVIDIA H200"), 256, torch.float32, "tf32"),
        ("tf32", "", (0, False, ""), 256, torch.float32, "ieee"),
    ],
)
def test_tensor_cores_can_be_refused(monkeypatch, asked, environment, card, terms, dtype, expected):
    """By the environment, products by parts by torch's own setting too; cards without tf32 are not asked for it."""
    monkeypatch.setattr(triton_tiles, "_multiplies_float64", lambda: True)
    monkeypatch.setattr(triton_arithmetic, "_IEEE", environment == "ieee")
    monkeypatch.setattr(triton_arithmetic, "_tensor_cores", lambda device: card)
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, asked
    try:
        assert precision(torch.ones(1, dtype=dtype), terms) == expected
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("version", "grouped", "expected"),
    [("3.6.0", True, "float64"), ("3.7.1", True, "float64"), ("3.6.0", False, "bf16x6"), ("3.8.0", True, "bf16x6"),
     ("3.10.0", True, "bf16x6"), ("", True, "bf16x6")],
)  # fmt: skip
def test_grouped_products_are_in_float64_with_versions_that_were_timed(monkeypatch, version, grouped, expected):
    monkeypatch.setattr(triton_tiles, "triton_version", lambda: version)
    monkeypatch.setattr(triton_tiles, "_multiplies_float64", triton_tiles._multiplies_float64.__wrapped__)
    assert triton_tiles.float32_precision(256, 90, "h200", grouped) == expected


def test_large_rows_need_no_order():
    """Each program reads its row's entry of the index: nothing is sorted, also where rows share a factor."""
    random, spec = np.random.default_rng(0), "bij, q[bs]jk -> bsik"
    a, c = (torch.from_numpy(integers(random, *shape)).float() for shape in ((2, 70, 5), (4, 5, 6)))
    q = torch.tensor([[1, 4, 3], [3, 0, 4]])  # 4 drops a row
    a[0] = torch.nan
    plan, table = planner.plan(spec, a, c, q=q, index_mode="drop"), load_backend("torch").table
    index = Executable(plan, table).prepare({"q": q})
    with mock.patch.object(torch, "sort", side_effect=AssertionError("rows are sorted")):
        (found,) = table.run("grouped matmul, Triton", Einsum(plan.resolved.spec, "float32"), [a, c], index)
    matrices = torch.cat([c, torch.zeros(1, 5, 6)])[q]
    expected = torch.einsum("bij,bsjk->bsik", a.nan_to_num(0.0), matrices)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0, 1], torch.zeros(70, 6))
    assert found[0, 0].isnan().all()


def test_what_is_dropped_is_zero_whatever_it_would_meet():
    query, pool = torch.full((1, 2, 3), torch.nan), torch.ones(1, 4, 3)
    keys = IndexArray(torch.tensor([[[4, 4], [4, 1]]]), may_drop=True)
    found = triton_pooled.scores(query, pool, keys)
    assert found.nan_to_num(9).tolist() == [[[0, 0], [0, 9]]]


@pytest.mark.parametrize(
    ("spec", "shapes", "size", "indices"),
    [
        ("nij, q[n]jk -> nik", ((60, 2, 5), (7, 5, 6)), 7, {"q": (60,)}),
        ("bhqd, b h i[bhqk] d -> bhqk", ((1, 1, 16, 32), (1, 1, 60, 32)), 60, {"i": (1, 1, 16, 3)}),
        ("bhqd, b h i[bhqk] d -> bhqk", ((2, 3, 6, 8), (2, 3, 9, 8)), 9, {"i": (2, 3, 6, 5)}),
        ("bqhd, bh i[qkbh] d -> hbqk", ((2, 6, 3, 8), (2, 3, 9, 8)), 9, {"i": (6, 5, 2, 3)}),
        ("ti, q[t]ir, q[t]ro -> to", ((50, 8), (5, 8, 3), (5, 3, 8)), 5, {"q": (50,)}),
        ("bij, q[b]jk -> ik", ((30, 2, 5), (7, 5, 6)), 7, {"q": (30,)}),
        ("nij, q[n]jk -> nik", ((150, 1, 70), (3, 70, 70)), 3, {"q": (150,)}),
        ("nij, q[n]jk -> nik", ((5, 65, 9), (3, 9, 17)), 3, {"q": (5,)}),
    ],
)
def test_each_row_of_the_table_computes_its_step(spec, shapes, size, indices):
    """Each step by each Triton row that supports it, in a plan for an H200, on this machine's tensors."""
    random = np.random.default_rng(0)
    operands = [torch.from_numpy(integers(random, *shape)).float() for shape in shapes]
    arrays = {name: torch.from_numpy(random.integers(0, size, shape)) for name, shape in indices.items()}
    stand_ins = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    # Launches would decide for problems that are small enough to be interpreted.
    device = dataclasses.replace(H200, launch_seconds=0.0)
    plan = planner.plan(spec, *stand_ins, backend="torch", device=device, **arrays)
    gradient = torch.from_numpy(integers(random, *plan.resolved.spec.output_shape)).float()
    used = steps_agree(plan, operands, arrays, gradient, "Triton")
    assert used
    assert shapes[0][-1] < 70 or any(name.endswith(TILINGS) for name in used)


@pytest.mark.parametrize(
    ("spec", "shapes", "groups", "dtype"),
    [
        ("nij, q[n]jk -> nik", ((1023, 1, 64), (2, 64, 64)), 2, "float32"),
        ("nij, q[n]jk -> nik", ((20, 1, 8), (3000, 8, 8)), 3000, "float16"),
        ("nij, q[n]jk -> nik", ((9000, 1, 64), (4, 64, 64)), 4, "float32"),
        ("nij, q[n]jk -> nik", ((500, 1, 64), (500, 64, 64)), 500, "bfloat16"),
        ("nij, q[n]jk -> nik", ((2100, 1, 72), (3, 72, 80)), 3, "bfloat16"),
        ("nij, nik -> q[n]jk", ((200, 1, 128), (200, 1, 128)), 4, "float16"),
        ("nij, nik -> q[n]jk", ((90_000, 1, 16), (90_000, 1, 16)), 4, "float32"),
        ("nij, q[n]jk -> ik", ((300, 2, 8), (5, 8, 8)), 5, "float16"),
        ("nij, q[n]jk -> nik", ((30_000, 1, 64), (2, 64, 64)), 2, "float32"),
        ("bsd, b q[bsk] d -> bsk", ((2, 30, 16), (2, 40, 16)), 40, "float32"),
        ("nj -> q[n]j", ((90_000, 3),), 7, "float16"),
        ("kbde, embd -> mbk", ((5, 4, 6, 3), (3, 7, 4, 6)), 0, "float32"),
    ],
)
@pytest.mark.parametrize("how", ["ieee", "float64"])
def test_scratch_on_a_card_is_bounded(monkeypatch, spec, shapes, groups, dtype, how):
    """What each row allocates beside its results; the kernels themselves, which allocate nothing else, are left out.

    So is torch's grouped product: it runs on the CPU here, where oneDNN's product of bfloat16 matrices takes scratch of
    its own on some processors and none on others (871,692 bytes for 742,540 with avx512_bf16). No card has that.
    """
    for module, name in (
        (triton_grouped, "product_kernel"), (triton_pair, "pair_kernel"), (triton_sum, "sum_kernel"),
        (triton_sum, "add_parts_kernel"), (triton_pooled, "dots_kernel"), (triton_grouping, "tasks_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, collections.defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", _result_of_grouped_mm)
    monkeypatch.setattr(triton_grouped, "precision", lambda *_: how if dtype == "float32" else "ieee")
    random, table = np.random.default_rng(0), load_backend("torch").table
    operands = [torch.from_numpy(integers(random, *shape)).to(getattr(torch, dtype)) for shape in shapes]
    indices = {}
    if groups:
        letters = spec[spec.index("[") + 1 : spec.index("]")]
        shape = shapes[0][:1] if letters == "n" else (2, 30, 4)
        indices = {"q": torch.from_numpy(random.integers(0, groups, shape))}
    plan = planner.plan(spec, *operands, sizes={"q": groups} if groups else None, **indices)
    resolved, ran = plan.resolved.spec, 0
    ops = [Einsum(resolved, dtype), *(Einsum(planner.transpose(resolved, n), dtype) for n in range(len(shapes)))]
    ops += [Einsum(resolved, dtype).joint_gradient()] * (len(shapes) == 2)
    for op in ops:
        inputs = [torch.from_numpy(integers(random, *x)).to(getattr(torch, dtype)) for x in op.input_shapes]
        for choice in choices_of(table, op, H200):
            if table.rows[choice.lowering].kinds is not None:
                index = Executable(plan, table).prepare(indices)
                results, memory = torch_memory(partial(table.run, choice.lowering, op, inputs, index))
                made = sum(x.nbytes for x in results)
                assert memory.peak_bytes <= made + choice.cost.scratch_bytes, choice.lowering
                ran += 1
    assert ran


def _result_of_grouped_mm(a, b, *, offs):
    """Memory for the result of torch's grouped product: of rows and matrices, or of two matrices that share rows."""
    shape = (len(a), b.shape[2]) if b.dim() == 3 else (len(offs), len(a), b.shape[1])
    return a.new_empty(shape)


def test_equal_problems_have_equal_tiles():
    assert tiles_of("rows", 64, 64, 64, 4) == tiles_of("rows", 64, 64, 64, 4)
    for mode, itemsize, size, tiling in itertools.product(
        ("rows", "terms", "plain", "pair"), (2, 4, 8), (1, 16, 17, 64, 100, 5000), ("", *TILINGS)
    ):
        how = "float64" if itemsize == 4 and mode == "pair" else "ieee"
        if mode == "pair" and not covers_pair(size, size, itemsize, how):
            continue
        tiles = tiles_of(mode, size, size, size, itemsize, how, tiling=tiling)
        assert min(tiles.m, tiles.n, tiles.k) >= 16
        assert all(x & (x - 1) == 0 for x in (tiles.m, tiles.n, tiles.k))
        # The stages of both operands fit the shared memory of an A100.
        assert tiles.stages * itemsize * tiles.k * (tiles.m + tiles.n) <= 160 << 10
        assert mode != "pair" or (min(tiles.m, tiles.n) >= size and tiles.k * tiles.chunk == PAIR_TERMS)
        default = tiles_of(mode, size, size, size, itemsize, how)
        assert mode != "terms" or tiles.k * tiles.chunk == default.k * default.chunk  # as much memory for pieces


@pytest.mark.parametrize(("capability", "columns"), [(0, 64), (86, 64), (90, 64), (100, 64), (120, 32), (121, 32)])
def test_rows_of_float64_have_small_tiles_where_float64_is_slow(monkeypatch, capability, columns):
    """On consumer Blackwell, where larger ones spill registers. All else has equal tiles on all cards."""
    monkeypatch.setattr(triton_arithmetic, "_tensor_cores", lambda device: (capability, True, ""))
    taken, launch = [], triton_grouped.launch
    monkeypatch.setattr(
        triton_grouped, "launch", lambda *given, **named: taken.append(named) or launch(*given, **named)
    )
    groups = group_rows(torch.tensor([0] * 30), 1)
    a, c = (torch.ones(shape, dtype=torch.float64) for shape in ((30, 1, 64), (1, 64, 64)))
    rows, _ = triton_grouped.grouped_gradients(triton_grouped.grouped_matmul(a, c, groups), a, c, groups)
    assert torch.equal(rows, torch.full_like(a, 64.0**2))
    assert [(x["MODE"], x["BLOCK_M"], x["BLOCK_N"]) for x in taken] == [
        ("rows", 32, columns), ("rows", 32, columns), ("terms", 32, 64)
    ]  # fmt: skip
    for mode, itemsize in itertools.product(("rows", "terms", "plain"), (2, 4, 8)):
        if (mode, itemsize) != ("rows", 8):
            product = mode, 64, 64, 64, itemsize
            assert tiles_of(*product, capability=capability) == tiles_of(*product)


# Kilobytes of shared memory that a program may have, by card.
SHARED = {
    "cuda:80": 163, "cuda:86": 99, "cuda:89": 99, "cuda:90": 227, "cuda:100": 227, "cuda:120": 99,
    "hip:gfx90a": 64, "hip:gfx942": 64,
}  # fmt: skip


def test_calls_compile_for_cards():
    """With no registers in memory, within the card's shared memory, and on the units that were meant; all nightly."""
    cards = list(SHARED) if examples(0, 1) else ["cuda:80", "cuda:90", "hip:gfx90a"]
    script = pathlib.Path(__file__).with_name("compile_products.py")
    found = run(
        sys.executable, "-W", "ignore", script, *([] if examples(0, 1) else ["few"]), *cards, TRITON_INTERPRET="0"
    )
    kernels = [json.loads(line) for line in found.splitlines()]
    assert {x["card"] for x in kernels} == set(cards)
    for x in kernels:
        # Larger tiles than the default are for cards with as much room as an H100 has.
        if x["tiling"] not in ("large tiles", "four stages"):
            assert x["shared"] <= SHARED[x["card"]] << 10, x
            # On sm_100 and sm_120 the assembler keeps up to 24 bytes of a few kernels in memory, to run more programs.
            assert x["spilled"] <= examples(0, 32), x
        assert ("bf16x6" in x["precision"]) <= (x["card"] in ("cuda:80", "cuda:90", "cuda:100")), x
        assert (x["precision"] == "tf32") <= (x["card"] != "hip:gfx90a"), x
        assert x["units"] or x["precision"] == "ieee", x
    seed = [x for x in kernels if (x["card"], x["mode"], x["tiles"]) == ("cuda:90", "rows", [32, 64, 32])]
    assert seed
    # Two programs at once share 65,536 registers.
    assert all(2 * 32 * x["warps"] * x["registers"] <= 65536 for x in seed)


@settings(max_examples=examples(20, 400))
@given(
    seed=st.integers(0, 2**30), dtype=st.sampled_from(LAID),
    sizes=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=6, max_size=6), long=st.integers(0, 11),
)  # fmt: skip
def test_products_whose_axes_lie_apart(seed, dtype, sizes, long):
    """Two axes in each group, in any order, with gaps and repeated: nothing is viewed as a matrix; one may be long."""
    random = np.random.default_rng(seed)
    sizes = [17 if number == long else size for number, size in enumerate(sizes)]
    batch, left, right, summed = "bc", "mn", "uv", "kl"
    size = dict(zip("bcmnuvkl", [*sizes, 2, 3], strict=True))

    terms = [batch + left + summed, batch + summed + right, batch + left + right]
    shuffled = ["".join(random.permutation(list(term))) for term in terms]
    x, y, z = (integers(random, *(size[e] for e in term)) for term in shuffled)
    lay = partial(Laid, random=random, dtype=dtype, tables=False)
    a, b, out = lay(x), lay(y), lay(z, writes=True)
    groups = [(batch, left, summed), (batch, summed, right), (batch, left, right)]
    dims = [[[term.index(e) for e in group] for group in of] for term, of in zip(shuffled, groups, strict=True)]
    triton_grouped.batched_matmul(a.tensor, b.tensor, out.tensor, dims)
    assert out.holds(np.einsum(f"{shuffled[0]},{shuffled[1]}->{shuffled[2]}", x, y))


@settings(max_examples=examples(20, 600))
@given(
    seed=st.integers(0, 2**30), dtype=st.sampled_from(LAID), rows=st.sampled_from([0, 1, 5, 70, 300]),
    groups=st.integers(0, 5), columns=st.tuples(*[st.sampled_from([0, 1, 17])] * 2), tile=st.sampled_from([512, 2048]),
)  # fmt: skip
def test_rows_are_summed_by_group(seed, dtype, rows, groups, columns, tile):
    """Groups of many windows too; what is beside the operand and the result is left alone."""
    random = np.random.default_rng(seed)
    of = random.integers(0, groups + 1, rows) if random.random() < 0.7 else np.full(rows, 0)
    x, lay = integers(random, rows, *columns), partial(Laid, random=random, dtype=dtype, tables=False)
    given, made = lay(x, dropped=of == groups), lay(np.zeros((groups, *columns[::-1])), writes=True)
    index = group_rows(torch.from_numpy(of), groups)
    with mock.patch.multiple(triton_sum, _TILE=tile, WINDOW=32):
        triton_sum.sum_rows(
            triton_sum.Rows.of(given.tensor, [0], [1, 2]), triton_sum.Rows.of(made.tensor, [0], [2, 1]),
            math.prod(columns), index,
        )  # fmt: skip
    expected = np.zeros((groups + 1, *columns))
    np.add.at(expected, of, x)
    assert made.holds(expected[:-1].swapaxes(1, 2))


def test_sums_are_not_rounded_where_products_may_be(tf32):
    """Rows are added in float32, whatever precision is set for products."""
    x = torch.tensor([[1.0], [2.0**-20], [-1.0]])
    found = triton_sum.grouped_sum(x, group_rows(torch.zeros(3, dtype=torch.int64), 1))
    assert found.item() == 2.0**-20


class NoLooks(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses what waits for the device: to look at a value, and what has a size that depends on values."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if any(name in str(function) for name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique")):
            raise RuntimeError(f"{function} waits for the device")
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("mode", ["raise", "drop", "clip"])
@pytest.mark.parametrize(
    ("spec", "shapes", "shape"),
    [
        ("nij, q[n]jk -> nik", ((30, 2, 5), (7, 5, 6)), (30,)),
        ("nd, q[n]d -> n", ((30, 5), (7, 5)), (30,)),
        ("nj, njk -> q[n]k", ((30, 5), (30, 5, 6)), (30,)),
    ],
)
def test_nothing_is_looked_at_while_a_graph_is_captured(monkeypatch, spec, shapes, shape, mode, prepared):
    """A plan for a card, both programs, with indices out of range where the mode takes them."""
    random = np.random.default_rng(0)
    operands = [torch.from_numpy(integers(random, *x)).float().requires_grad_() for x in shapes]
    q = torch.from_numpy(random.integers(-7, 7, shape) if mode == "raise" else random.integers(-3, 12, shape))
    options = {"index_mode": mode, "sizes": {"q": 7} if "q" not in spec.split("->")[0] else None}
    index = planner.group(q, 7, index_mode=mode) if prepared else q
    expected = planner.contract(spec, *operands, q=q, **options)
    gradient = torch.from_numpy(integers(random, *expected.shape)).float()
    wanted = torch.autograd.grad(expected, operands, gradient)
    stand_ins = [planner.Operand(x, requires_grad=True) for x in shapes]
    plan = planner.plan(spec, *stand_ins, q=shape, backend="torch", device="H200", minimize="peak", **options)
    assert "grouped matmul, Triton" in str(plan) or spec != "nij, q[n]jk -> nik"
    monkeypatch.setattr(torch_ops, "captured", lambda x: True)
    with NoLooks():
        result = plan(*operands, q=index)
        found = torch.autograd.grad(result, operands, gradient)
    assert torch.equal(result, expected)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_a_bad_index_of_a_captured_graph_is_refused_by_the_device(monkeypatch):
    a, c = torch.ones(3, 1, 2), torch.ones(4, 2, 5)
    monkeypatch.setattr(torch_ops, "captured", lambda x: True)
    with pytest.raises(RuntimeError, match=r"'q' has values outside of \[-4, 4\)"):
        planner.contract("nij, q[n]jk -> nik", a, c, q=torch.tensor([0, 4, 1]))
