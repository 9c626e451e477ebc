"""Takes in Triton, under its interpreter: the kernel, and the row of torch's table that runs it.

What the kernel has no business to read is NaN, and so is what results held before.
"""

import collections
import json
import pathlib
import sys
from unittest import mock

import numpy as np
import pytest
from conftest import examples, run
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from test_row_sums import ALL_CARDS, Launches, resolved  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402

import planner  # noqa: E402
from planner.backends.torch.backend import TorchBackend  # noqa: E402
from planner.cost.device import H200  # noqa: E402
from planner.cost.layout import layout_of  # noqa: E402
from planner.kernels.grouping.triton_grouping import Check  # noqa: E402
from planner.kernels.take import Read, triton_take  # noqa: E402
from planner.program.calls import RangedIndices  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402
from planner.testing.reference import reference  # noqa: E402

TAKE = "take, Triton"
DTYPES = (
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool", "int8", "uint8", "int16", "int32",
    "int64",
)  # fmt: skip
INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def poison_of(dtype):
    """A number that no test's values hold."""
    return torch.nan if dtype.is_floating_point or dtype.is_complex else 1 if dtype == torch.bool else 77


def laid(random, values, dtype):
    """A tensor of these values, its dimensions in any order in memory, with poison around and between its elements."""
    order, shape = random.permutation(values.ndim), values.shape
    step, start = int(random.integers(1, 3)), int(random.integers(0, 2))
    dtype = getattr(torch, dtype)
    memory = torch.full([start + step * shape[d] + 1 for d in order], poison_of(dtype), dtype=dtype)
    x = memory[tuple(slice(start, start + step * shape[d], step) for d in order)]
    x = x.permute(*np.argsort(order).tolist()) if values.ndim else x
    return x.copy_(torch.from_numpy(values))


def poisoned_empty(x, shape, new_empty=torch.Tensor.new_empty, **named):
    return new_empty(x, shape, **named).fill_(poison_of(x.dtype))


def taken_rows(x, q, drops, index_dtype=torch.int64):
    """The rows `q` of a matrix by the kernel, whose result holds poison before."""
    read = Read(((), (1,)), (((0,), ((0,), ())),))
    index = torch.from_numpy(q).to(index_dtype)
    with mock.patch.object(torch.Tensor, "new_empty", poisoned_empty):
        return triton_take.take(x, read, [index], (len(q), x.shape[1]), drops)


@settings(max_examples=examples(30, 1000))
@given(
    seed=st.integers(0, 2**30), dtype=st.sampled_from(DTYPES), index_dtype=st.sampled_from(INDEX_DTYPES),
    rows=st.sampled_from([0, 1, 7, 100]), size=st.integers(1, 9), drops=st.booleans(),
    width=st.sampled_from([0, 1, 2, 3, 5, 8, 16, 17, 64, 100, 2048, 2049, 5000]),
)  # fmt: skip
def test_rows_of_any_width_and_dtype(seed, dtype, index_dtype, rows, size, drops, width):
    random = np.random.default_rng(seed)
    q = random.integers(0, size + drops, rows)
    values = random.integers(0, 2 if dtype == "bool" else 50, (size, width))
    values[~np.isin(np.arange(size), q)] = 0
    x = laid(random, values, dtype)
    expected = np.concatenate([values, np.zeros((1, width), values.dtype)])[q]
    found = taken_rows(x, q, drops, index_dtype)
    assert (found.dtype, found.is_contiguous()) == (x.dtype, True)
    assert torch.equal(found, torch.from_numpy(expected).to(x.dtype))


@settings(max_examples=examples(20, 600))
@given(
    seed=st.integers(0, 2**30), dtype=st.sampled_from(DTYPES[:4]), index_dtype=st.sampled_from(INDEX_DTYPES),
    shape=st.sampled_from([(1, 1), (30, 1), (5, 7), (3, 700)]), width=st.sampled_from([1, 3, 16, 33]),
    order=st.sampled_from([(0, 1, 2), (2, 0, 1), (0, 2, 1), (1, 0, 2)]), bad=st.booleans(),
)  # fmt: skip
def test_indices_that_are_not_in_range_yet(seed, dtype, index_dtype, shape, width, order, bad):
    """Negative ones count from the end. Rows of wrong ones are NaN, one of which is told, and no other is touched."""
    random, size = np.random.default_rng(seed), 9
    q = torch.from_numpy(random.integers(0 if index_dtype == torch.uint8 else -size, size, shape)).to(index_dtype)
    flat, wrong = q.view(-1), []
    if bad:
        wrong = random.integers(0, q.numel(), 2)
        flat[wrong] = torch.tensor([9, 100], dtype=index_dtype)
    values = random.integers(0, 50, (size, width))
    read = Read(tuple({2: (1,)}.get(d, ()) for d in order), (((0,), tuple({2: ()}.get(d, (d,)) for d in order)),))
    check = Check(torch.zeros(1, dtype=torch.int64), torch.ones(1), 5)
    sizes = *shape, width
    with mock.patch.object(torch.Tensor, "new_empty", poisoned_empty):
        found = triton_take.take(laid(random, values, dtype), read, [q], [sizes[d] for d in order], False, check)
    expected = values[np.where(np.isin(np.arange(q.numel()), wrong).reshape(shape), 0, q.long().numpy())].astype(float)
    expected.reshape(q.numel(), width)[wrong] = np.nan
    assert torch.equal(found.double().nan_to_num(-1), torch.from_numpy(expected).permute(order).nan_to_num(-1))
    assert check.poison.isnan().all() == bad
    assert (int(check.word) - 1) in [(5 << 40) + int(place) for place in wrong] if bad else int(check.word) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_bits_are_copied(dtype):
    """Those of NaN too, and zeros keep their sign; a conjugate is taken as what it stands for."""
    random = np.random.default_rng(0)
    bits = torch.from_numpy(random.integers(-128, 128, (6, 4 * torch.empty((), dtype=dtype).element_size())))
    x, q = bits.to(torch.int8).view(dtype), random.integers(0, 6, 20)
    kind = torch.int8
    assert torch.equal(taken_rows(x, q, False).view(kind), x[torch.from_numpy(q)].contiguous().view(kind))
    if dtype.is_complex:
        found, expected = taken_rows(x.conj(), q, False), x[torch.from_numpy(q)].conj().resolve_conj()
        assert torch.equal(found.view(kind), expected.view(kind))


SPECS = (  # each with the sizes of its axes and of what its index arrays name
    ("s[e]c -> ec", {"e": 50, "c": 5}, {"s": 7}),
    ("s[e]c -> ce", {"e": 50, "c": 5}, {"s": 7}),
    ("cs[e] -> ce", {"e": 50, "c": 5}, {"s": 7}),
    ("s[e] -> e", {"e": 5000}, {"s": 7}),
    ("s[ef] -> fe", {"e": 20, "f": 9}, {"s": 7}),
    ("b s[bn] c -> bnc", {"b": 3, "n": 20, "c": 5}, {"s": 7}),
    ("b s[bn] -> nb", {"b": 3, "n": 20}, {"s": 7}),
    ("hs[ef]cd -> dehfc", {"e": 4, "f": 3, "c": 2, "d": 5, "h": 3}, {"s": 7}),
    ("s[e]ct[e] -> ec", {"e": 50, "c": 5}, {"s": 7, "t": 4}),
    ("s[e]t[ef]cu[f] -> fec", {"e": 10, "f": 6, "c": 5}, {"s": 7, "t": 4, "u": 3}),
    ("s[e]t[f] -> ef", {"e": 10, "f": 6}, {"s": 7, "t": 4}),
    ("s[e]s[e]c -> ec", {"e": 10, "c": 6}, {"s": 7}),
    ("s[ee]c -> ec", {"e": 6, "c": 6}, {"s": 7}),
    ("ccs[e] -> ec", {"e": 6, "c": 4}, {"s": 7}),
    ("s[e]c -> ecx", {"e": 6, "c": 4, "x": 3}, {"s": 7}),
    ("s[]c -> c", {"c": 40}, {"s": 7}),
    ("s[] -> ", {}, {"s": 7}),
    ("s[e]c -> ec", {"e": 0, "c": 5}, {"s": 7}),
    ("s[e]c -> ec", {"e": 5, "c": 0}, {"s": 7}),
    ("s[e]c -> ec", {"e": 5, "c": 3}, {"s": 0}),
)


@pytest.mark.parametrize(("spec", "axes", "pools"), SPECS, ids=[f"{s} {tuple(a.values())}" for s, a, _ in SPECS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64", "int64"])
@pytest.mark.parametrize("seed", range(3))
def test_the_row_computes_takes(spec, axes, pools, dtype, seed):
    """On a tensor and index arrays in any strides, with dropped rows; it allocates nothing but its result."""
    random, table = np.random.default_rng(seed), load_backend("torch").table
    sizes = {e: n for e, n in axes.items() if e not in spec.split("->")[0]}
    parsed = resolved(spec, axes, {**pools, **sizes})
    indices = {g.array: random.integers(0, g.size + 1, parsed.shape(g.axes)) for g in parsed.gathers}
    (term,) = parsed.inputs
    values = random.integers(-2, 3, parsed.shape(term))
    x = laid(random, values, dtype)
    op = Einsum(parsed, dtype).with_layouts([layout_of(x.shape, x.stride())])
    prices = {choice.lowering: choice.cost.picoseconds for choice in table.choices(op, H200)}
    assert prices[TAKE] == min(prices.values())
    index = RangedIndices(True, {g: laid(random, indices[g.array], "int64") for g in parsed.gathers})
    with mock.patch.object(torch.Tensor, "new_empty", poisoned_empty):
        (found,) = table.run(TAKE, op, [x], index)
    expected = reference(spec, values, sizes={**pools, **sizes}, index_mode="drop", **indices)
    assert found.is_contiguous()
    assert torch.equal(found, torch.from_numpy(np.asarray(expected)).to(found.dtype))


@pytest.mark.parametrize("spec", ["s[e]c -> ec", "s[e]ct[e] -> ec", "b s[be] c -> bec"])
def test_a_take_is_one_launch(monkeypatch, spec):
    started = []
    stand_in = collections.defaultdict(lambda: lambda *_, **__: started.append(1))
    monkeypatch.setattr(triton_take, "take_kernel", stand_in)
    pools = {letter: 7 for letter in "st" if letter in spec}
    parsed, table = resolved(spec, {"e": 50, "c": 5, "b": 2}, pools), load_backend("torch").table
    index = RangedIndices(False, {g: torch.zeros(parsed.shape(g.axes), dtype=torch.int64) for g in parsed.gathers})
    x = torch.zeros(parsed.shape(parsed.inputs[0]))
    with Launches() as others:
        table.run(TAKE, Einsum(parsed, "float32"), [x], index)
    assert (len(started), others.names) == (1, [])


def test_positions_beyond_32_bits():
    """Of a tensor that reaches so far, by its strides."""
    memory = torch.empty(2**31 + 2**17, dtype=torch.int8)  # pages that nothing touches take no memory
    x = memory.as_strided((3, 2), (2**30 + 2**15, 1))
    x.copy_(torch.arange(6).reshape(3, 2))
    q = np.array([2, 0, 2, 1])
    assert taken_rows(x, q, False).tolist() == [[4, 5], [0, 1], [4, 5], [2, 3]]


@pytest.mark.parametrize("cards", [["few", "cuda:90"], ALL_CARDS][: examples(1, 2)], ids=" ".join)
def test_the_kernel_compiles_for_cards(cards):
    """As calls launch it: no registers are spilled, and rows are read by 16 bytes where they lie so."""
    script = pathlib.Path(__file__).with_name("compile_takes.py")
    lines = run(sys.executable, "-W", "ignore", str(script), *cards, TRITON_INTERPRET="0").splitlines()
    kernels = [json.loads(line) for line in lines]
    assert kernels
    for x in kernels:
        assert x["target"].startswith("hip") or not x["spilled"], x
    widest = collections.defaultdict(int)
    for x in kernels:
        widest[x["target"], x["dtype"]] = max(x["widest"], widest[x["target"], x["dtype"]])
    assert all(found == 16 for (target, _), found in widest.items() if target.startswith("cuda"))


@pytest.mark.parametrize("spec", ["q[n]d -> nd", "q[n]d -> dn"])
def test_a_compiler_records_takes_as_torchs_own_operators(spec):
    """So that it fuses them with the steps around; values are those of the kernel."""
    x, q, targets = torch.arange(21.0).reshape(7, 3).requires_grad_(), torch.tensor([3, -1, 0, 6]), []

    def look(graph, _):
        targets.append({node.target for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    with mock.patch.object(TorchBackend, "device", return_value=H200):
        assert TAKE in str(planner.plan(spec, x, q=q))
        backend = aot_autograd(fw_compiler=look)
        made = torch.compile(lambda x: planner.contract(spec, x, q=q), fullgraph=True, backend=backend)
        found = made(x)
        assert torch.equal(found, planner.contract(spec, x, q=q))
        torch.autograd.grad(found, x, torch.ones_like(found))
    torch.compiler.reset()
    assert torch.ops.aten.index_select.default in targets[0]
    assert not any("planner.forward" in str(target) for target in targets[0])
