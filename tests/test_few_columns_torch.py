"""Products with few columns in other calls than torch's: values, gradients, strides and memory are those of torch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from conftest import examples  # noqa: E402
from engines import saved_tensor_bytes  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import planner  # noqa: E402
from planner.backends.torch.products import few_columns  # noqa: E402
from planner.backends.torch.products.few_columns import few_scratch, multiply_few  # noqa: E402
from planner.cost.device import CPU  # noqa: E402
from planner.inspect.memory import torch_memory  # noqa: E402
from planner.program.forms import known_product  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402


@pytest.fixture(autouse=True)
def on_amd(monkeypatch):
    """All processors compute the same. Where torch has no oneDNN, torch's own product stands in for it."""
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, weight, *_: torch.mm(x, weight.t()))
    calls = []

    def counted(*args):
        calls.append(args[0].shape)
        return linear(*args)

    monkeypatch.setattr(few_columns, "_linear", lambda: counted)
    planner.caches().clear()
    yield calls
    planner.caches().clear()


def integers(*shape, grad=False):
    return torch.randint(-2, 3, shape).float().requires_grad_(grad)


@st.composite
def matrices(draw):
    """Sizes of a product with 1 to 17 columns, with about as many elements as the calls ask for."""
    columns, terms = draw(st.integers(1, 17)), draw(st.sampled_from((1, 2, 5, 16, 36, 64, 256, 257, 512, 513)))
    lead = draw(st.sampled_from(((), (), (0,), (1,), (2,), (16,), (500,))))
    rows = draw(st.sampled_from((2**14, 2**16))) // terms + draw(st.sampled_from((-1, 0, 1, 500)))
    if lead and draw(st.booleans()):
        rows //= max(1, lead[0])
    return lead, max(1, min(rows, 99) if lead == (500,) else rows), columns, terms


@settings(max_examples=examples(30, 1_000))
@given(matrices(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_products_are_those_of_torch(sizes, turned, second_turned, grad_a, grad_b):
    """And so are their strides, gradients, and what autograd keeps."""
    lead, rows, columns, terms = sizes
    a = integers(*lead, terms, rows).mT if turned else integers(*lead, rows, terms)
    b = integers(*lead, columns, terms).mT if second_turned else integers(*lead, terms, columns)
    a, b = a.requires_grad_(grad_a), b.requires_grad_(grad_b)
    multiply = torch.bmm if lead else torch.mm
    found, expected = multiply_few(a, b), multiply(a, b)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert found.requires_grad == expected.requires_grad
    if trained := [x for x in (a, b) if x.requires_grad]:
        kept = [saved_tensor_bytes(lambda run=run: run(a, b), []) for run in (multiply_few, multiply)]
        assert kept[0] == kept[1]
        gradient = integers(*expected.shape)
        pairs = (torch.autograd.grad(x, trained, gradient) for x in (found, expected))
        for ours, theirs in zip(*pairs, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride() or 1 in ours.shape


@settings(max_examples=examples(20, 500))
@given(matrices(), st.booleans(), st.booleans())
def test_they_take_the_memory_that_the_price_says(sizes, turned, second_turned):
    lead, rows, columns, terms = sizes
    a = integers(*lead, terms, rows).mT if turned else integers(*lead, rows, terms)
    b = integers(*lead, columns, terms).mT if second_turned else integers(*lead, terms, columns)
    op = Einsum(planner.resolve("zij,zjk->zik" if lead else "ij,jk->ik", a, b), "float32")
    found, measured = torch_memory(lambda: multiply_few(a, b))
    assert measured.peak_bytes <= found.nbytes + few_scratch(known_product(op.spec), "float32", op.spec)
    if price := load_backend("torch").table.price("matmul", op, CPU):  # of sizes of 1 some are products by element
        assert price.cost.scratch_bytes >= few_scratch(known_product(op.spec), "float32", op.spec)


SHAPES = [((4096, 16), (16, 5)), ((8, 512, 300), (8, 300, 9)), ((2048, 64), (64, 8))]


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_one_dnn_multiplies(a, b, on_amd):
    assert torch.equal(multiply_few(x := integers(*a), y := integers(*b)), torch.matmul(x, y))
    assert on_amd


def test_batches_are_multiplied_as_their_transposes_some_at_a_time(monkeypatch):
    multiplied, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda x, y: multiplied.append((*x.shape, y.shape[2])) or bmm(x, y))
    a, b = integers(200, 512, 36), integers(200, 36, 9)
    assert torch.equal(multiply_few(a, b), bmm(a, b))
    assert multiplied == [(56, 9, 36, 512)] * 3 + [(32, 9, 36, 512)]  # 2^18 elements of the result at most


@pytest.mark.parametrize(
    ("spec", "shapes", "rows"),
    [
        ("nij, q[n]jk -> nik", [(1_000, 64, 36), (4, 36, 8)], 1_000),  # taken, then multiplied
        ("zij, zjk -> zik", [(1, 65_536, 16), (1, 16, 5)], 0),
        ("nj, jk, k -> n", [(9_000, 9), (9, 8), (8,)], 0),
    ],
)
def test_plans_take_the_memory_that_they_say(spec, shapes, rows):
    operands = [integers(*shape) for shape in shapes]
    arrays = {"q": torch.arange(rows) % 4} if rows else {}
    planner.contract(spec, *operands, **arrays)
    _, measured = torch_memory(lambda: planner.contract(spec, *operands, **arrays))
    assert measured.peak_bytes <= planner.plan(spec, *operands, **arrays).cost.peak_bytes


@pytest.mark.parametrize(("a", "b"), [*SHAPES, ((200, 512, 36), (200, 36, 9))])
def test_of_what_others_watch_torch_multiplies(a, b, on_amd):
    a, b = integers(*a), integers(*b)
    with FlopCounterMode(display=False) as counter:
        multiply_few(a, b)
    assert counter.get_total_flops() == 2 * a.numel() * b.shape[-1]
    with torch.backends.mkldnn.flags(enabled=False):
        multiply_few(a, b)
    torch.func.vmap(multiply_few)(a[None], b[None])
    multiply_few(a.double(), b.double())
    assert not on_amd


def test_gradients_have_gradients():
    a, b = integers(4096, 16, grad=True), integers(16, 5, grad=True)

    def second(multiply):
        first = torch.autograd.grad((multiply(a, b) ** 2).sum(), (a, b), create_graph=True)
        return torch.autograd.grad(sum(x.sum() for x in first), (a, b))

    for ours, theirs in zip(second(multiply_few), second(torch.mm), strict=True):
        assert theirs.abs().max() < 2**24
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("ij,jk,kl->il", [(8192, 16), (16, 16), (16, 5)]),
        ("zij,jk->zik", [(64, 256, 16), (16, 5)]),
        ("cbk,cb,ckn->cbn", [(4, 1024, 300), (4, 1024), (4, 300, 7)]),
    ],
)
def test_plans_use_them(spec, shapes, grads, on_amd):
    operands = [integers(*shape, grad=grads) for shape in shapes]
    found, expected = planner.contract(spec, *operands), torch.einsum(spec, *operands)
    assert on_amd
    assert torch.equal(found, expected)
    if grads:
        gradient = integers(*found.shape)
        pairs = (torch.autograd.grad(x, operands, gradient) for x in (found, expected))
        for ours, theirs in zip(*pairs, strict=True):
            assert torch.equal(ours, theirs)
