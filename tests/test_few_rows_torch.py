"""Few rows that lie as columns, by others that do too: values, gradients, strides and memory are those of torch."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from conftest import examples  # noqa: E402
from engines import saved_tensor_bytes  # noqa: E402

import planner  # noqa: E402
from planner.backends.torch import eager  # noqa: E402
from planner.backends.torch.products import batches, few_columns, few_rows  # noqa: E402
from planner.backends.torch.products.few_columns import multiply_few  # noqa: E402
from planner.cost.device import CPU  # noqa: E402
from planner.cost.layout import layout_of  # noqa: E402
from planner.inspect.memory import torch_memory  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402


@pytest.fixture(autouse=True)
def on_intel(monkeypatch):
    """All processors compute the same."""
    for module in (batches, eager, few_rows):
        monkeypatch.setattr(module, "is_intel", lambda: True)
    monkeypatch.setattr(few_columns, "_linear", lambda: None)
    planner.caches().clear()
    yield
    planner.caches().clear()


def integers(*shape, dtype=torch.float32, grad=False):
    return torch.randint(-2, 3, shape).to(dtype).requires_grad_(grad)


def as_columns(*shape, dtype=torch.float32):
    return integers(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT


SIZES = st.tuples(
    st.sampled_from(((), (), (0,), (1,), (5,), (300,))),
    st.integers(1, 9),
    st.sampled_from((0, 1, 2, 5, 64, 1300)),
    st.sampled_from((1, 15, 16, 40, 1000)),
)


@settings(max_examples=examples(60, 2_000))
@example(((300,), 7, 5, 16), (True, True), torch.float32, (False, False))  # some matrices at a time
@example(((), 7, 1300, 40), (True, True), torch.float32, (False, False))  # the transposed product is copied
@example(((), 7, 5, 1000), (True, True), torch.float32, (True, True))
@given(
    SIZES, st.tuples(st.booleans(), st.booleans()), st.sampled_from((torch.float32, torch.float64, torch.int64)),
    st.tuples(st.booleans(), st.booleans()),
)  # fmt: skip
def test_products_are_those_of_torch(sizes, turned, dtype, grads):
    """And so are their strides, gradients, and what autograd keeps."""
    lead, rows, terms, columns = sizes
    given = [
        (as_columns if turn else integers)(*lead, *shape, dtype=dtype)
        for turn, shape in zip(turned, ((rows, terms), (terms, columns)), strict=True)
    ]
    if dtype != torch.int64:
        given = [x.requires_grad_(grad) for x, grad in zip(given, grads, strict=True)]
    plain = torch.bmm if lead else torch.mm
    found, expected = multiply_few(*given), plain(*given)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    wanted = [x for x in given if x.requires_grad]
    if wanted:
        assert saved_tensor_bytes(lambda: multiply_few(*given)) == saved_tensor_bytes(lambda: plain(*given))
        weights = integers(*expected.shape, dtype=dtype)
        for x, y in zip(*(torch.autograd.grad(out, wanted, weights) for out in (found, expected)), strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()


def strides_of_first_factors(monkeypatch, call):
    """The strides of the first factors that torch multiplies in a call."""
    seen = []
    for name in ("mm", "bmm"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda a, b, plain=plain, **out: seen.append(a.stride()) or plain(a, b, **out))
    planner.caches().clear()
    call()
    return seen


@pytest.mark.parametrize(
    ("spec", "shapes", "strides"),
    [
        ("ki,nk->in", [(5, 7), (640, 5)], [(5, 1)]),
        ("bki,bnk->bin", [(3, 5, 7), (3, 64, 5)], [(35, 5, 1)]),
        ("ki,jnk->ijn", [(5, 7), (16, 16, 5)], [(5, 1)]),
        ("ki,nk->in", [(5, 8), (640, 5)], [(1, 8)]),  # MKL is fast from 8 rows on
        ("ki,kn->in", [(5, 7), (5, 640)], [(1, 7)]),  # the second is row-major
    ],
)
def test_contractions_copy_few_rows_that_lie_as_columns(monkeypatch, spec, shapes, strides):
    operands = [integers(*shape) for shape in shapes]
    seen = strides_of_first_factors(monkeypatch, lambda: planner.contract(spec, *operands))
    assert seen == strides
    assert torch.equal(planner.contract(spec, *operands), torch.einsum(spec, *operands))


@st.composite
def products_of_few_rows(draw):
    """The terms of a product in any order of axes, and its sizes: 2 to 8 rows, and many columns."""
    batch, summed = draw(st.sampled_from(["", "b"])), draw(st.sampled_from(["k", "kl"]))
    first, second, out = (
        "".join(draw(st.permutations(axes))) for axes in (batch + "i" + summed, batch + "n" + summed, batch + "in")
    )
    sizes = {"b": st.sampled_from((2, 16, 64)), "i": st.integers(2, 8), "n": st.sampled_from((16, 64, 200, 1000)),
             "k": st.sampled_from((2, 5, 40, 600)), "l": st.integers(1, 4)}  # fmt: skip
    return first, second, out, {axis: draw(size) for axis, size in sizes.items()}


@settings(max_examples=examples(60, 3_000))
@example(("kci", "cnk", "in", {"k": 512, "c": 2, "i": 7, "n": 64}), "peak")  # a batched product, then its sum
@example(("kib", "nkb", "bin", {"k": 64, "i": 7, "b": 16, "n": 32}), "time")  # a copy lies as columns
@example(("dbea", "bcea", "cdba", {"d": 16, "b": 5, "e": 60, "a": 20, "c": 3}), "time")
@given(products_of_few_rows(), st.sampled_from(["time", "peak"]))
def test_plans_take_no_more_memory_than_they_say(product, minimize):
    """However operands lie."""
    first, second, out, sizes = product
    operands = [integers(*(sizes[axis] for axis in term)) for term in (first, second)]
    spec = f"{first},{second}->{out}"
    plan = planner.plan(spec, *operands, minimize=minimize)
    found, memory = torch_memory(lambda: plan(*operands))
    assert torch.equal(found, torch.einsum(spec, *operands))
    assert memory.peak_bytes <= plan.cost.forward.peak_bytes


@pytest.mark.parametrize(
    ("spec", "shapes", "dynamic"),
    [
        ("ki,nk->in", [(5, 7), (640, 5)], "kin"),
        ("hnjd,nkdj->nhk", [(40, 16, 64, 8), (16, 6, 8, 64)], "k"),
    ],
)
def test_exports_leave_sizes_open(spec, shapes, dynamic):
    """No size is compared with what is fast here."""

    class Model(torch.nn.Module):
        def forward(self, a, b):
            return planner.contract(spec, a, b)

    dims = {axis: torch.export.Dim(axis, min=2, max=4000) for axis in dynamic}
    places = tuple(
        {d: dims[axis] for d, axis in enumerate(term) if axis in dims} for term in spec.split("->")[0].split(",")
    )
    operands = [integers(*shape) for shape in shapes]
    exported = torch.export.export(Model(), tuple(operands), dynamic_shapes=(places[0], places[1])).module()
    smaller = {axis: 3 for axis in dynamic}
    others = [
        integers(*(smaller.get(axis, n) for axis, n in zip(term, shape, strict=True)))
        for term, shape in zip(spec.split("->")[0].split(","), shapes, strict=True)
    ]
    for arrays in (operands, others):
        assert torch.equal(exported(*arrays), torch.einsum(spec, *arrays))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("ki,nk->in", [(5, 7), (8192, 5)]),
        ("ki,nk->in", [(1024, 7), (200, 1024)]),
        ("ki,nk->in", [(4000, 7), (200, 4000)]),
        ("bki,bnk->bin", [(300, 5, 7), (300, 16, 5)]),
        ("ki,nk->in", [(1300, 7), (2000, 1300)]),  # too much to copy
        ("dc,bad->bca", [(640, 7), (4, 64, 640)]),  # torch transposes in blocks
    ],
)
def test_plans_take_the_memory_that_they_say(spec, shapes, grad):
    operands = [integers(*shape, grad=grad) for shape in shapes]
    plan = planner.plan(spec, *operands)
    found, memory = torch_memory(lambda: plan(*operands))
    assert torch.equal(found, torch.einsum(spec, *operands))
    assert memory.peak_bytes <= plan.cost.forward.peak_bytes
    assert memory.retained_bytes <= plan.cost.retained_bytes + found.numel() * found.element_size()


def test_slices_of_few_rows_that_lie_as_columns_are_copied(monkeypatch):
    """As in `ijk, ui, uj -> uk`: three slices took 1.5 ms each for 0.03 on an Intel Xeon."""
    operands = [integers(3, 5, 7), integers(3, 512, 5).permute(1, 0, 2)]
    added, plain = [], torch.Tensor.addmm_
    monkeypatch.setattr(
        torch.Tensor, "addmm_", lambda out, a, b: added.append((a.stride(), b.stride())) or plain(out, a, b)
    )
    op = Einsum(planner.resolve("ijk,uij->ku", *operands), "float32")
    op = op.with_layouts(layout_of(x.shape, x.stride()) for x in operands)
    (found,) = load_backend("torch").table.run("matmul by slices", op, operands, {})
    assert torch.equal(found, torch.einsum("ijk,uij->ku", *operands))
    assert added == [((5, 1), (1, 5))] * 3


def test_slices_of_few_rows_that_are_parts_of_the_result_are_copied(monkeypatch):
    operands = [integers(5, 2, 7), integers(640, 5)]
    op, table = Einsum(planner.resolve("kai,nk->ian", *operands), "float32"), load_backend("torch").table
    multiplied, plain = [], torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out: multiplied.append((a.stride(), b.stride())) or plain(a, b, out=out)
    )
    found, memory = torch_memory(lambda: table.run("matmul by slices", op, operands, {})[0])
    assert torch.equal(found, torch.einsum("kai,nk->ian", *operands))
    assert multiplied == [((5, 1), (1, 5))] * 2
    scratch = table.price("matmul by slices", op, CPU).cost.scratch_bytes
    assert 0 < memory.peak_bytes - found.numel() * found.element_size() <= scratch
