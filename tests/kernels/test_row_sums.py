"""Sums and dots of rows in Triton, under its interpreter: their kernels, and the rows of torch's table that run them.

Operands are small integers, so every result is exact. What the kernels have no business to read is NaN, and so is what
results held before.
"""

import collections
import dataclasses
import json
import pathlib
import sys
from functools import partial
from unittest import mock

import numpy as np
import pytest
from conftest import examples, run
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import planner  # noqa: E402
from planner.backends.torch.executable import Executable  # noqa: E402
from planner.cost.device import H200  # noqa: E402
from planner.cost.layout import layout_of  # noqa: E402
from planner.inspect.memory import torch_memory  # noqa: E402
from planner.kernels.gathered_dot import triton_pooled  # noqa: E402
from planner.kernels.grouped_matmul import triton_grouped  # noqa: E402
from planner.kernels.grouping.torch_grouping import group_rows  # noqa: E402
from planner.kernels.segment_sum import triton_sum  # noqa: E402
from planner.language.parse import parse  # noqa: E402
from planner.language.spec import Gather, Spec, replace_gathers  # noqa: E402
from planner.program.calls import RangedIndices  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402
from planner.testing.reference import reference  # noqa: E402

DTYPES = ("float16", "bfloat16", "float32", "float64")
SKEWS = ("even", "one group", "none", "sorted")


def poisoned(random, *shape, dtype="float32", gaps=True):
    """An array of NaN with room around and between its elements, its dimensions in any order in memory."""
    order = random.permutation(len(shape))
    step = int(random.integers(1, 3)) if gaps else 1
    memory = torch.full([step * shape[d] + 1 for d in order], torch.nan, dtype=getattr(torch, dtype))
    return memory[tuple(slice(0, step * shape[d], step) for d in order)].permute(*np.argsort(order).tolist())


def laid(random, values, dtype="float32"):
    """An array of these values that lies in NaN."""
    return poisoned(random, *values.shape, dtype=dtype).copy_(torch.from_numpy(values))


def integers(random, *shape):
    return random.integers(-2, 3, shape).astype(float)


def named_rows(random, size, rows):
    """Rows of a table with `size` rows: `size` stands for none; now and then one is out of range."""
    table = random.integers(0, size + 1, rows)
    if rows and random.random() < 0.3:
        table[random.integers(rows)] = random.choice([-1, size + 1, -(2**40), 2**40])
    return table


def rows_of(values, table):
    """The rows that a table names."""
    size = len(values)
    with_none = np.concatenate([values, np.zeros((1, values.shape[1])), np.full((1, values.shape[1]), np.nan)])
    return with_none[np.where((table < 0) | (table > size), size + 1, table)]


def groups_of(random, rows, groups, skew):
    """The group of each row; the number of groups drops a row."""
    of = random.integers(0, groups + 1, rows)
    return {"even": of, "one group": np.full(rows, groups // 2), "none": np.full(rows, groups), "sorted": np.sort(of)}[
        skew
    ]


@settings(max_examples=examples(30, 1000))
@given(
    seed=st.integers(0, 2**30), dtype=st.sampled_from(DTYPES), rows=st.sampled_from([0, 1, 7, 64, 150]),
    groups=st.integers(0, 5), columns=st.sampled_from([0, 1, 5, 17]), skew=st.sampled_from(SKEWS),
    tables=st.tuples(st.booleans(), st.booleans()), factor=st.sampled_from(["none", "rows", "weights"]),
    tile=st.sampled_from([64, 1024]), knows=st.booleans(),
)  # fmt: skip
@example(38760, "float32", 64, 1, 1, "even", (True, True), "rows", 64, False)  # no row of x, and a wrong one of y
def test_sums_of_products_of_rows(seed, dtype, rows, groups, columns, skew, tables, factor, tile, knows):
    """Groups of many windows, empty ones and dropped rows; factors through tables that name no row, or a wrong one.

    The host may know the longest group.
    """
    random = np.random.default_rng(seed)
    of, expected = groups_of(random, rows, groups, skew), np.zeros((groups + 1, columns))
    product, given = np.ones((rows, columns)), []
    for gathered, width in zip(tables, (columns, {"weights": 1}.get(factor, columns)), strict=True):
        size = int(random.integers(0, 6)) if gathered else rows
        values = integers(random, size, width)
        table = named_rows(random, size, rows) if gathered else np.arange(rows)
        if given and factor == "none":
            break
        product *= rows_of(values, table)
        unread = ~np.isin(np.arange(size), table[of < groups])
        x = laid(random, np.where(unread[:, None], np.nan, values), dtype).expand(size, columns)
        given.append(triton_sum.Rows.of(x, [0], [1], torch.from_numpy(table) if gathered else None))
    np.add.at(expected, of, product)
    out = poisoned(random, groups, columns, dtype=dtype)
    into = triton_sum.Rows.of(out, [0], [1])
    longest = max(np.bincount(of, minlength=groups)[:groups], default=0) if knows else None
    by_group = dataclasses.replace(group_rows(torch.from_numpy(of), groups), longest=longest)
    with mock.patch.multiple(triton_sum, _TILE=tile, WINDOW=16):
        triton_sum.sum_rows(given[0], into, columns, by_group, *given[1:])
    assert np.array_equal(out.double().numpy(), expected[:-1], equal_nan=True)
    out.zero_()
    assert out._base.isnan().sum() == out._base.numel() - out.numel()


@settings(max_examples=examples(20, 600))
@given(
    seed=st.integers(0, 2**30), dtype=st.sampled_from(DTYPES), rows=st.integers(0, 9), columns=st.integers(0, 20),
    tile=st.sampled_from([64, 512, 8192]),
)  # fmt: skip
def test_dots_of_rows(seed, dtype, rows, columns, tile):
    random = np.random.default_rng(seed)
    operands, tables, expected = [], [], np.ones((rows, columns))
    for _ in range(2):
        size = int(random.integers(0, 6))
        values, table = integers(random, size, columns), named_rows(random, size, rows)
        expected *= rows_of(values, table)
        tables.append((table, size))
        values[~np.isin(np.arange(size), table)] = np.nan
        operands.append(triton_sum.Rows.of(laid(random, values, dtype), [0], [1], torch.from_numpy(table)))
    out = torch.full((rows,), torch.nan, dtype=getattr(torch, dtype))
    with mock.patch.object(triton_pooled, "_TILE", tile):
        triton_pooled.dot_rows(*operands, out, (1, rows, 1, columns))
    wrong = np.any([(table < 0) | (table > size) for table, size in tables], axis=0)
    assert np.array_equal(out.double().numpy(), np.where(wrong, np.nan, expected.sum(1)), equal_nan=True)


def test_equal_sums_have_equal_bits():
    """Whatever lies behind it in memory, a sum of normal values is formed in one order."""
    random = np.random.default_rng(0)
    x, of = torch.from_numpy(random.standard_normal((5000, 3))).float(), torch.from_numpy(random.integers(0, 4, 5000))
    first = triton_sum.grouped_sum(x, group_rows(of, 4))
    again = triton_sum.grouped_sum(laid(random, x.numpy().astype(float)), group_rows(of, 4))
    assert torch.equal(first, again)


SPECS = (  # each with the sizes of its axes and of what its index arrays name
    ("s[e]c, e -> d[e]c", {"e": 50, "c": 5}, {"s": 7, "d": 4}),
    ("ec, d[e] -> d[e]c", {"e": 30, "c": 3}, {"d": 4}),
    ("s[e]hc, eh -> d[e]hc", {"e": 30, "h": 2, "c": 3}, {"s": 7, "d": 4}),
    ("s[ef], fe -> d[ef]", {"e": 6, "f": 5}, {"s": 7, "d": 4}),
    ("cs[e]b, t[e]b -> bd[e]c", {"e": 30, "b": 2, "c": 3}, {"s": 7, "t": 3, "d": 4}),
    ("s[e]c, t[e]c -> e", {"e": 30, "c": 5}, {"s": 7, "t": 3}),
    ("bs[ef]c, ct[ef]b -> fe", {"e": 6, "f": 5, "b": 2, "c": 3}, {"s": 7, "t": 3}),
    ("s[e]c -> d[e]c", {"e": 30, "c": 5}, {"s": 7, "d": 4}),
    ("cef -> d[ef]c", {"e": 6, "f": 5, "c": 3}, {"d": 4}),
    ("s[e]c, e -> d[e]c", {"e": 0, "c": 5}, {"s": 7, "d": 4}),
    ("s[e]c, e -> d[e]c", {"e": 5, "c": 0}, {"s": 7, "d": 4}),
    ("x[n]j, w[n]jk -> nk", {"n": 40, "j": 5, "k": 6}, {"x": 7, "w": 4}),
    ("x[pi]c, w[p]cm -> pim", {"p": 9, "i": 4, "c": 5, "m": 6}, {"x": 7, "w": 4}),
    ("x[pi]c, w[p]cm -> pim", {"p": 5, "i": 70, "c": 5, "m": 6}, {"x": 7, "w": 4}),
    ("w[qp]cmd, dx[qpi]c -> ipmq", {"p": 2, "q": 3, "i": 64, "c": 5, "m": 6, "d": 2}, {"x": 7, "w": 4}),
    ("w[p]cmd, dx[pi]c -> ipm", {"p": 9, "i": 4, "c": 5, "m": 6, "d": 2}, {"x": 7, "w": 4}),
    ("x[pi]c, y[pi]m -> w[p]cm", {"p": 9, "i": 4, "c": 5, "m": 6}, {"x": 7, "y": 8, "w": 4}),
    ("cx[pi], ipm -> mw[p]c", {"p": 9, "i": 4, "c": 5, "m": 6}, {"x": 7, "w": 4}),
    ("x[n]j, w[n]jk -> d[n]k", {"n": 40, "j": 5, "k": 6}, {"x": 7, "w": 4, "d": 8}),
    ("x[pi]c, w[p]cm -> d[pi]m", {"p": 9, "i": 4, "c": 5, "m": 6}, {"x": 7, "w": 4, "d": 8}),
    ("x[pi]c, w[p]cm -> x[pi]m", {"p": 3, "i": 70, "c": 5, "m": 6}, {"x": 7, "w": 4}),
    ("qcip, lw[pq]cm -> md[pqi]l", {"p": 2, "q": 2, "i": 64, "c": 5, "m": 6, "l": 2}, {"w": 4, "d": 8}),
    ("w[p]cmh, pc -> hd[p]m", {"p": 9, "c": 5, "m": 6, "h": 2}, {"w": 4, "d": 8}),
    ("x[n]j, w[n]jk -> d[n]k", {"n": 0, "j": 5, "k": 6}, {"x": 7, "w": 4, "d": 8}),
    ("pc, y[p]m -> w[p]cm", {"p": 9, "c": 5, "m": 6}, {"y": 8, "w": 4}),
    ("x[n]j, w[n]jk -> nk", {"n": 0, "j": 5, "k": 6}, {"x": 7, "w": 4}),
)
PREPARED = "gathered dot, Triton", "segment sum, Triton", "dots of rows, Triton"
INDEXED = (
    "segment sum, Triton", "dots of rows, Triton", "taken rows times matrices, Triton",
    "rows times matrices, added up, Triton",
)  # fmt: skip


def resolved(spec, axes, pools):
    """A spec with the sizes of its axes and of what its index arrays name."""
    sizes, parsed = Spec((), (), tuple(axes.items())), parse(spec)
    named = [replace_gathers(term, lambda g: Gather("", (), pools[g.array])) for term in parsed.inputs]
    indices = {g.array: sizes.shape(g.axes) for g in parsed.gathers}
    return planner.resolve(spec, *map(sizes.shape, named), sizes=pools, **indices)


@pytest.mark.parametrize(("spec", "axes", "pools"), SPECS, ids=[f"{s} {tuple(a.values())}" for s, a, _ in SPECS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_table_compute_steps_of_rows(spec, axes, pools, dtype):
    """On operands in any strides, with dropped rows; and what they allocate is what they say."""
    random, table = np.random.default_rng(0), load_backend("torch").table
    parsed = resolved(spec, axes, pools)
    indices = {g.array: random.integers(0, g.size + 1, parsed.shape(g.axes)) for g in parsed.gathers}
    values = [integers(random, *parsed.shape(term)) for term in parsed.inputs]
    operands = [laid(random, x, dtype) for x in values]
    layouts = [layout_of(x.shape, x.stride()) for x in operands]
    op = Einsum(parsed, dtype).with_layouts(layouts)
    expected = reference(spec, *values, sizes=pools, index_mode="drop", **indices)
    ran = 0
    for choice in table.choices(op, H200):
        if choice.lowering in INDEXED:
            ran += 1
            if dtype == "bfloat16" and "matrices" in choice.lowering:
                continue  # the interpreter multiplies the bits of its matrices
            index = RangedIndices(True, {g: torch.from_numpy(indices[g.array]) for g in parsed.gathers})
            with mock.patch.object(triton_sum, "WINDOW", 16):
                (found,) = table.run(choice.lowering, op, operands, index)
            assert np.array_equal(found.double().numpy(), expected)
            assert layout_of(found.shape, found.stride()) == (choice.layouts[0] if choice.layouts else None)
    assert ran == 1 + (spec == "pc, y[p]m -> w[p]cm")


@pytest.mark.parametrize(("spec", "axes", "pools"), SPECS, ids=[f"{s} {tuple(a.values())}" for s, a, _ in SPECS])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scratch_of_steps_of_rows_is_bounded(monkeypatch, spec, axes, pools, dtype):
    """What is allocated beside the result, many rows long; the kernels, which allocate nothing else, are left out."""
    for module, name in (
        (triton_sum, "sum_kernel"), (triton_sum, "add_parts_kernel"), (triton_pooled, "dots_kernel"),
        (triton_grouped, "product_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, collections.defaultdict(lambda: lambda *_, **__: None))
    random, table = np.random.default_rng(0), load_backend("torch").table
    parsed = resolved(spec, {e: n * 30 if e in "enpif" else n for e, n in axes.items()}, pools)
    indices = {g.array: torch.from_numpy(random.integers(0, g.size, parsed.shape(g.axes))) for g in parsed.gathers}
    operands = [laid(random, integers(random, *parsed.shape(term)), dtype) for term in parsed.inputs]
    op = Einsum(parsed, dtype).with_layouts([layout_of(x.shape, x.stride()) for x in operands])
    plan = planner.plan(spec, *(x.contiguous() for x in operands), sizes=pools, **indices)
    for choice in table.choices(op, H200):
        if choice.lowering in INDEXED:
            index = Executable(plan, table).prepare(indices)
            (result,), memory = torch_memory(partial(table.run, choice.lowering, op, operands, index))
            assert memory.peak_bytes <= result.nbytes + choice.cost.scratch_bytes, choice.lowering


@pytest.mark.parametrize(
    ("spec", "axes", "pools", "launches"),
    [
        ("s[e]c, e -> d[e]c", {"e": 2000, "c": 5}, {"s": 7, "d": 4}, 2),
        ("ec -> d[e]c", {"e": 2000, "c": 5}, {"d": 4}, 2),
        ("ec -> d[e]c", {"e": 500, "c": 5}, {"d": 4}, 1),
        ("s[e]c, d[e]c -> e", {"e": 2000, "c": 5}, {"s": 7, "d": 4}, 1),
        ("bqd, b i[bqk] d -> bqk", {"b": 2, "q": 30, "k": 20, "d": 4}, {"i": 9}, 1),
        ("bqk, b i[bqk] d -> bqd", {"b": 2, "q": 30, "k": 20, "d": 4}, {"i": 9}, 1),
        ("bqk, b i[bqk] d -> bqd", {"b": 1, "q": 2, "k": 1100, "d": 4}, {"i": 9}, 2),
        ("bqk, bqd -> b i[bqk] d", {"b": 2, "q": 30, "k": 20, "d": 4}, {"i": 9}, 2),
    ],
)
def test_with_prepared_indices_only_kernels_are_launched(monkeypatch, spec, axes, pools, launches):
    started = []
    for module, name in ((triton_sum, "sum_kernel"), (triton_pooled, "dots_kernel")):
        stand_in = collections.defaultdict(lambda: lambda *_, **__: started.append(1))
        monkeypatch.setattr(module, name, stand_in)
    parsed, table = resolved(spec, axes, pools), load_backend("torch").table
    index = RangedIndices(False, {g: torch.zeros(parsed.shape(g.axes), dtype=torch.int64) for g in parsed.gathers})
    index.orders.update({g: group_rows(index[g].reshape(-1), g.size) for g in parsed.gathers})
    operands = [torch.zeros(parsed.shape(term)) for term in parsed.inputs]
    with Launches() as others:
        table.run(next(n for n in PREPARED if table.rows[n].supports(Einsum(parsed, "float32")) is None),
                  Einsum(parsed, "float32"), operands, index)  # fmt: skip
    assert (len(started), others.names) == (launches, [])


@pytest.mark.parametrize(("longest", "launches"), [(None, 2), (1024, 2), (1023, 1), (0, 1)])
def test_sums_of_groups_that_are_known_to_be_short_are_one_launch(monkeypatch, longest, launches):
    started = []
    monkeypatch.setattr(triton_sum, "launch", lambda *_, **__: started.append(1))
    groups = dataclasses.replace(group_rows(torch.arange(5000) % 70, 70), longest=longest)
    triton_sum.grouped_sum(torch.zeros(5000, 3), groups)
    assert len(started) == launches


class Launches(TorchDispatchMode):
    """Notes the operators of torch that would launch a kernel on a card."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        if not (function.is_view or "empty" in str(function) or "_reshape_alias" in str(function)):
            self.names.append(str(function))
        return result


ALL_CARDS = ["cuda:80", "cuda:86", "cuda:89", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx90a"]


@pytest.mark.parametrize("cards", [["few", "cuda:90"], ALL_CARDS][: examples(1, 2)], ids=" ".join)
def test_the_kernels_compile_for_cards(cards):
    """As calls launch them: no registers are spilled, and rows are read by 16 bytes where they lie so."""
    script = pathlib.Path(__file__).with_name("compile_row_sums.py")
    lines = run(sys.executable, "-W", "ignore", str(script), *cards, TRITON_INTERPRET="0").splitlines()
    kernels = [json.loads(line) for line in lines]
    assert {x["kernel"] for x in kernels} == {"sum_kernel", "dots_kernel"}
    for x in kernels:
        assert x["target"].startswith("hip") or not x["spilled"], x
        assert x["shared"] <= 4096, x
    for kernel in ("sum_kernel", "dots_kernel"):
        assert max(x["widest"] for x in kernels if x["kernel"] == kernel) == 16
