"""The grouped CPU kernels against a loop over the rows; small integers, so every result is exact."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from planner.kernels.grouped_matmul import torch_grouped  # noqa: E402
from planner.kernels.grouped_matmul.torch_grouped import grouped_gradients, grouped_matmul, grouped_outer  # noqa: E402
from planner.kernels.grouping import torch_grouping  # noqa: E402
from planner.kernels.grouping.torch_grouping import Groups, group_rows, pieces  # noqa: E402

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "complex64")
INDEX_DTYPES = ("int8", "uint8", "int16", "int32", "int64")
SKEWS = ("even", "half in one", "all in one", "steep", "all dropped", "one row each")


@dataclass(frozen=True)
class Case:
    """Rows N, left factors Na, groups G, the matrices' I, J, K, and how rows are spread over groups."""

    rows: int
    factors: int
    groups: int
    i: int
    j: int
    k: int
    skew: str
    layout: str
    seed: int
    small: bool = True  # Buffers so small that every kind of piece occurs.

    def index(self) -> np.ndarray:
        random, n, g = np.random.default_rng(self.seed), self.rows, self.groups
        if self.skew == "all dropped" or not g:
            return np.full(n, g)
        if self.skew == "one row each":
            return np.arange(n) % (g + 1)
        if self.skew == "all in one":
            return np.full(n, random.integers(g + 1))
        if self.skew == "steep":
            return (random.random(n) ** 6 * (g + 1)).astype(np.int64)
        even = random.integers(0, g + 1, n)
        return even if self.skew == "even" else np.where(random.random(n) < 0.5, random.integers(g), even)


cases = st.builds(
    Case,
    rows=st.integers(0, 90),
    factors=st.integers(1, 20),
    groups=st.integers(0, 40),
    i=st.integers(0, 3),
    j=st.integers(0, 5),
    k=st.integers(0, 5),
    skew=st.sampled_from(SKEWS),
    layout=st.sampled_from(["plain", "transposed", "sliced", "expanded"]),
    seed=st.integers(0, 2**20),
    small=st.booleans(),
)


def integers(shape, case, dtype, salt):
    """Integers in [-2, 2] of that shape, laid out in memory as the case says."""
    random = np.random.default_rng((case.seed, salt))
    made = {
        "plain": shape,
        "transposed": shape[::-1],
        "sliced": tuple(2 * size for size in shape),
        "expanded": (min(1, shape[0]), *shape[1:]),
    }[case.layout]
    x = random.integers(-2, 3, made).astype(np.float64)
    if dtype == "complex64":
        x = x + 1j * random.integers(-2, 3, made)
    x = torch.from_numpy(np.asarray(x)).to(getattr(torch, dtype))
    if case.layout == "transposed":
        return x.permute(2, 1, 0)
    if case.layout == "sliced":
        return x[tuple(slice(size) for size in shape)].flip(0) if 0 in shape else x[::2, ::2, 1::2]
    return x.expand(shape)


def exact(x):
    """As float64 or complex128, where the small integers of these tests are exact."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def same(result, expected, dtype):
    assert result.dtype == getattr(torch, dtype)
    assert result.shape == expected.shape
    assert torch.equal(exact(result), exact(expected.to(result.dtype)))


def grouped(case, index_dtype="int64") -> Groups:
    index = torch.from_numpy(case.index())
    wanted = getattr(torch, index_dtype)
    return group_rows(index.to(wanted) if case.groups <= torch.iinfo(wanted).max else index, case.groups)


def product(a, c, index):
    """`a[r] @ c[index[r]]`; zero where the index is the number of groups."""
    zero = torch.zeros(1, *c.shape[1:], dtype=exact(c).dtype)
    return exact(a) @ torch.cat([exact(c), zero])[index]


def outer(a, b, index, groups):
    """The sum of `a[r].T @ b[r]` over the rows of each group."""
    out = torch.zeros(groups + 1, a.shape[2], b.shape[2], dtype=exact(a).dtype)
    for row, group in enumerate(index.tolist()):
        out[group] += exact(a)[row].T @ exact(b)[row]
    return out[:groups]


def resized(monkeypatch, case):
    monkeypatch.setattr(torch_grouped, "BUFFER_BYTES", 400 if case.small else 1 << 20)
    monkeypatch.setattr(torch_grouped, "FEWEST_ROWS", 6 if case.small else 512)
    monkeypatch.setattr(torch_grouped, "MATRIX_BYTES", 300 if case.small else 1 << 19)


@example(Case(90, 7, 40, 1, 3, 4, "steep", "plain", 1), "float32", "int16", True)
@example(Case(90, 90, 9, 2, 3, 4, "half in one", "transposed", 1), "bfloat16", "uint8", False)
@given(cases, st.sampled_from(DTYPES), st.sampled_from(INDEX_DTYPES), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_kernel_is_its_loop(case, dtype, index_dtype, sourced):
    random, targets = np.random.default_rng(case.seed + 1), 5
    groups, index = grouped(case, index_dtype), torch.from_numpy(case.index())
    count = case.factors if sourced else case.rows
    source = torch.from_numpy(random.integers(0, count, case.rows)) if sourced else None
    target = torch.from_numpy(random.integers(0, targets + 1, case.rows))
    a = integers((count, case.i, case.j), case, dtype, 0)
    c = integers((case.groups, case.j, case.k), case, dtype, 1)
    g = integers((case.rows, case.i, case.k), case, dtype, 2)
    each = a if source is None else a[source]
    expected = product(each, c, index)
    added = torch.zeros(targets + 1, case.i, case.k, dtype=expected.dtype).index_add_(0, target, expected)
    with pytest.MonkeyPatch.context() as patch:
        resized(patch, case)
        same(grouped_matmul(a, c, groups, source), expected, dtype)
        same(grouped_matmul(a, c, groups, source, target, targets), added[:targets], dtype)
        same(grouped_outer(a, g, groups, source), outer(each, g, index, case.groups), dtype)
        grad_rows, grad_c = grouped_gradients(g, a, c, groups, source)
        same(grad_rows, product(g, c.mH, index), dtype)
        same(grad_c, outer(each.conj(), g, index, case.groups), dtype)


def test_gradients_are_those_of_autograd():
    case = Case(60, 60, 7, 2, 3, 4, "even", "plain", 5)
    a, c, g = (integers(s, case, "complex64", n) for n, s in enumerate(((60, 2, 3), (8, 3, 4), (60, 2, 4))))
    index = torch.from_numpy(case.index())
    a.requires_grad_()
    c.requires_grad_()
    (a @ c[index]).backward(g)
    with torch.no_grad():
        grad_rows, grad_c = grouped_gradients(g, a, c, group_rows(index, 8))
    same(grad_rows, a.grad, "complex64")
    same(grad_c, c.grad, "complex64")


def test_result_in_another_dtype():
    a, c = torch.full((300, 1, 4), 3.0, dtype=torch.bfloat16), torch.ones(2, 4, 2, dtype=torch.bfloat16)
    groups, target = group_rows(torch.arange(300) % 2, 2), torch.zeros(300, dtype=torch.int64)
    # 257 * 12 is no bfloat16, so the sum must not pass through one.
    out = grouped_matmul(a[:257], c, group_rows(torch.arange(257) % 2, 2), None, target[:257], 1, torch.float32)
    assert out.tolist() == [[[3084.0, 3084.0]]]
    assert grouped_matmul(a, c, groups, out_dtype=torch.float64).dtype == torch.float64


@given(cases, st.sampled_from(INDEX_DTYPES))
@settings(max_examples=100, deadline=None)
def test_order_is_stable_and_offsets_count(case, index_dtype):
    index = case.index()
    groups = grouped(case, index_dtype)
    assert groups.order.tolist() == sorted(range(case.rows), key=lambda row: index[row])
    assert groups.offsets.tolist() == [int((index < group).sum()) for group in range(case.groups + 1)]
    assert groups.ends.tolist() == groups.offsets.tolist()


@pytest.mark.parametrize("size", [2**15 - 1, 2**15, 2**15 + 1])
def test_a_dropped_row_comes_last_where_its_key_is_the_widest(size):
    """IndexArray are narrowed: the number of groups itself, which drops a row, must fit too."""
    index = torch.tensor([size, 0, size - 1, size, 1])
    groups = group_rows(index, size)
    assert groups.order.tolist() == [1, 4, 2, 0, 3]
    assert groups.ends[[0, 1, 2, size - 1, size]].tolist() == [0, 1, 2, 2, 3]


@given(cases)
@settings(max_examples=100, deadline=None)
def test_pieces_hold_every_row_once_within_the_limits(case):
    with pytest.MonkeyPatch.context() as patch:
        resized(patch, case)
        cut = torch_grouped.cutting(case.i, case.j, case.k, case.rows, torch.float32)
        groups, index = grouped(case), case.index()
        rows, seen = [], [0] * case.groups
        for piece in pieces(groups, cut):
            assert len(piece.padded) == piece.count * piece.pad <= cut.rows
            rows += piece.rows.tolist()
            kept = piece.padded if piece.kept is None else piece.padded[piece.kept]
            assert kept.tolist() == piece.rows.tolist()
            blank = piece.blank()
            assert len(kept) + (0 if blank is None else len(blank)) == len(piece.padded)
            names = range(case.groups)[piece.groups] if isinstance(piece.groups, slice) else piece.groups.tolist()
            assert len(names) == piece.count
            for name in names if piece.first else ():
                seen[name] += 1
        assert sorted(rows) == np.flatnonzero(index < case.groups).tolist()
        assert min(seen, default=1) >= 1


@pytest.mark.parametrize("skew", ["even", "half in one", "all in one", "steep"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_of_the_seed(skew, dtype):
    case = Case(9000, 9000, 150, 1, 64, 64, skew, "plain", 3, small=False)
    a, c, g = (integers(shape, case, dtype, 0) for shape in ((9000, 1, 64), (150, 64, 64), (9000, 1, 64)))
    groups, q = grouped(case), torch.from_numpy(case.index())
    wide = torch.cat([c, torch.zeros(1, 64, 64, dtype=c.dtype)]).float()
    outer = torch.zeros(151, 64, 64)
    expected, grad = torch.empty(9000, 1, 64), torch.empty(9000, 1, 64)
    for group in range(151):
        rows = (q == group).nonzero().view(-1)
        expected[rows] = a[rows].float() @ wide[group]
        grad[rows] = g[rows].float() @ wide[group].T
        outer[group] = a[rows, 0].float().T @ g[rows, 0].float()
    same(grouped_matmul(a, c, groups), expected, dtype)
    grad_rows, grad_c = grouped_gradients(g, a, c, groups)
    same(grad_rows, grad, dtype)
    same(grad_c, outer[:150], dtype)
    again = grouped_gradients(g, a, c, groups)
    assert torch.equal(again[0], grad_rows)
    assert torch.equal(again[1], grad_c)


def test_nothing_leaks_from_other_groups():
    # Padding reads rows of the next group; what they hold must reach no other group, not even as 0 * nan.
    q = torch.tensor([0, 1, 1, 1, 2, 2, 3])
    a, g = torch.ones(7, 1, 3), torch.ones(7, 1, 2)
    a[4:6], g[4:6] = torch.nan, torch.inf
    _, grad_c = grouped_gradients(g, a, torch.ones(4, 3, 2), group_rows(q, 4))
    assert grad_c.isfinite().all(2).all(1).tolist() == [True, True, False, True]


def allocated(run):
    """The result of `run`, and the most bytes it held at a time beside its results, by torch's own profiler."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    results = result if isinstance(result, tuple) else (result,)
    return int(held.max()) - sum(x.nbytes for x in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skew", ["even", "steep"])
@pytest.mark.parametrize(("rows", "size", "j", "k"), [(20000, 300, 64, 64), (3000, 8, 128, 256)])
def test_scratch_stays_within_its_bound(dtype, skew, rows, size, j, k):
    case = Case(rows, rows, size, 1, j, k, skew, "plain", 0, small=False)
    a, c, g = (torch.ones(shape, dtype=dtype) for shape in ((rows, 1, j), (size, j, k), (rows, 1, k)))
    groups = grouped(case)
    shapes = (rows, 1, size, j, k, dtype)
    for run, bound in (
        (lambda: grouped_matmul(a, c, groups), torch_grouped.matmul_scratch_bytes(*shapes)),
        (lambda: grouped_outer(a, g, groups), torch_grouped.outer_scratch_bytes(*shapes)),
        (lambda: grouped_gradients(g, a, c, groups), torch_grouped.gradients_scratch_bytes(*shapes)),
    ):
        assert 0.7 * bound < allocated(run) <= bound


@pytest.mark.parametrize("index_dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "size"), [(30000, 2000), (50000, 40000), (200, 30)])
def test_sorting_stays_within_its_bound(rows, size, index_dtype):
    index = torch.arange(rows).remainder(min(size, 2**15 - 1)).to(index_dtype)

    def sort():
        groups = group_rows(index, size)
        return groups.order, groups.offsets

    kept = 8 * (rows + size + 1)
    bound = torch_grouping.group_bytes(rows, size, index.itemsize)
    assert 0.6 * (bound - 1024) <= allocated(sort) + kept <= bound
