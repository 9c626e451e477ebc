"""Products that torch computes as their transpose, and what is copied and held for them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import planner
from planner.cost.layout import layout_of
from planner.inspect.memory import torch_memory
from planner.program.frameworks import load_backend

torch = pytest.importorskip("torch")
if not torch.backends.mkl.is_available():  # what is slow elsewhere has not been measured
    pytest.skip("products are only transposed for MKL", allow_module_level=True)

from planner.backends.torch.transposed import TRANSPOSED  # noqa: E402


def integers(*shape, grad=False):
    return torch.randint(-2, 3, shape).float().requires_grad_(grad)


def stored(x, order):
    """The same values, with dimensions in another order in memory."""
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def plan_of(spec, *operands):
    return planner.plan(spec, *operands, backend="torch", device="cpu")


def rows_of(plan):
    return [step.choice.lowering for step in plan.steps]


FEW_COLUMNS = [
    ("zbk,zkn->zbn", (8, 512, 16), (8, 16, 3)),  # in a batch
    ("zkn,zbk->zbn", (8, 16, 3), (8, 512, 16)),  # the other operand first
    ("zbk,zkn->znb", (4, 64, 16), (4, 16, 3)),  # the result's columns first, as they are computed
    ("ijk,zvij->zvk", (3, 3, 5), (512, 8, 3, 3)),  # `torch.einsum` multiplies the other way
    ("zvij,ijk->zvk", (512, 8, 3, 3), (3, 3, 5)),  # of few multiplications
    ("kb,kn->bn", (64, 512), (64, 8)),  # the rows of the first operand lie as columns
]


@pytest.mark.parametrize(("spec", "a", "b"), FEW_COLUMNS)
@pytest.mark.parametrize("grad", [False, True])
def test_few_columns_are_multiplied_as_few_rows(spec, a, b, grad):
    operands = [integers(*a, grad=grad), integers(*b, grad=grad)]
    planner.contract(spec, *operands)
    with torch.profiler.profile(record_shapes=True) as recorded:
        found = planner.contract(spec, *operands)
    products = [e.input_shapes[:2] for e in recorded.events() if e.name in ("aten::bmm", "aten::mm")]
    ((rows, _), (_, columns)) = (shape[-2:] for shape in products[0])
    assert len(products) == 1
    assert rows <= 8 < columns
    assert torch.equal(found, torch.einsum(spec, *operands))


def test_gradients_of_few_columns_are_products_of_few_rows():
    x, w = integers(512, 64, grad=True), integers(64, 8, grad=True)
    result = planner.contract("bk,kn->bn", x, w)
    gradient = integers(512, 8)
    with torch.profiler.profile(record_shapes=True) as recorded:
        found = torch.autograd.grad(result, (x, w), gradient)
    products = [e.input_shapes[:2] for e in recorded.events() if e.name in ("aten::bmm", "aten::mm")]
    assert min(right[-1] for _, right in products) >= 64
    expected = torch.autograd.grad(torch.einsum("bk,kn->bn", x, w), (x, w), gradient)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("spec", "a", "b"),
    [
        ("bk,nk->bn", (512, 64), (8, 64)),  # both lie as MKL wants them
        ("bk,kn->bn", (512, 64), (64, 32)),  # not so few columns
        ("bk,kn->bn", (8, 64), (64, 4)),  # few rows, too
        ("zbk,zkn->zbn", (8, 4, 4), (8, 4, 2)),  # small matrices, which torch multiplies itself
        ("zbk,zk->zb", (8, 64, 16), (8, 16)),  # vectors
    ],
)
def test_other_products_are_not_transposed(spec, a, b):
    assert TRANSPOSED not in rows_of(plan_of(spec, a, b))


@pytest.mark.parametrize(
    ("spec", "shapes", "indices", "lies"),
    [
        ("kb,kn->bn", ((3, 64), (3, 4096)), {}, (1, 64)),
        ("bn,q[d]jn->jdb", ((32, 2), (2, 64, 2)), {"q": torch.arange(64) % 2}, (2048, 32, 1)),
    ],
)
def test_few_terms_of_many_columns_go_the_other_way(spec, shapes, indices, lies):
    """Without gradients, which come row-major."""
    operands = [integers(*shape) for shape in shapes]
    found = planner.contract(spec, *operands, **indices)
    assert found.stride() == lies
    trained = planner.contract(spec, *[x.requires_grad_() for x in operands], **indices)
    assert trained.is_contiguous()
    assert torch.equal(found, trained)
    small = [integers(3, 64), integers(3, 64)]
    assert planner.contract("kb,kn->bn", *small).is_contiguous()


@st.composite
def products(draw):
    """A product with few columns, and the orders in which its operands lie in memory."""
    batch, left = draw(st.sampled_from(["", "z", "zy"])), draw(st.sampled_from(["a", "ab"]))
    right, summed = draw(st.sampled_from(["n", "nm"])), draw(st.sampled_from(["k", "kl"]))
    sizes = {"z": 2, "y": 3, "a": 16, "b": 2, "m": 2, "l": 3}
    sizes |= {"n": draw(st.integers(2, 3)), "k": draw(st.integers(1, 20))}
    terms = ["".join(draw(st.permutations(batch + free + summed))) for free in (left, right)]
    out = "".join(draw(st.permutations(batch + left + right)))
    orders = [draw(st.permutations(range(len(term)))) for term in terms]
    return f"{','.join(terms)}->{out}", [tuple(sizes[e] for e in term) for term in terms], orders


@given(products(), st.booleans())
@example(("za,zn->an", [(2, 16), (2, 2)], [(1, 0), (0, 1)]), True)
def test_the_row_computes_what_the_stock_evaluation_does_and_lies_as_it_says(case, double):
    spec, shapes, orders = case
    operands = [stored(integers(*shape), list(order)) for shape, order in zip(shapes, orders, strict=True)]
    operands = [x.double() if double else x for x in operands]
    plan = plan_of(spec, *operands)
    (step,) = plan.steps
    table = load_backend("torch").table
    priced = table.price(TRANSPOSED, step.op, plan.device)
    if priced is None:
        return
    (found,) = table.run(TRANSPOSED, step.op, operands, {})
    assert torch.equal(found, torch.einsum(spec, *operands))
    assert layout_of(found.shape, found.stride()) == (priced.layouts or (None,))[0]


@given(products(), st.tuples(st.booleans(), st.booleans()))
def test_plans_hold_and_retain_what_they_say(case, grads):
    spec, shapes, orders = case
    operands = [
        stored(integers(*shape), list(order)).requires_grad_(grad)
        for shape, order, grad in zip(shapes, orders, grads, strict=True)
    ]
    plan = plan_of(spec, *operands)
    planner.contract(spec, *operands)
    result, measured = torch_memory(lambda: planner.contract(spec, *operands))
    assert torch.equal(result, torch.einsum(spec, *operands))
    if "by autograd" not in plan.origin:  # torch's own calls copy in another order
        assert measured.peak_bytes <= plan.cost.peak_bytes
    if any(grads):
        gradient = integers(*result.shape)
        found = torch.autograd.grad(result, [x for x in operands if x.requires_grad], gradient)
        expected = torch.autograd.grad(
            torch.einsum(spec, *operands), [x for x in operands if x.requires_grad], gradient
        )
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_members_of_a_family_are_transposed_as_their_own_sizes_ask():
    """Of 33 to 128 rows the largest member is transposed, and some have too few rows for it."""
    for rows in (128, 100, 40, 33, 17):
        a, b = integers(4, rows, 20), integers(4, 20, 9)
        found = planner.contract("zbk,zkn->zbn", a, b)
        assert torch.equal(found, torch.einsum("zbk,zkn->zbn", a, b))
        plan = plan_of("zbk,zkn->zbn", a, b)
        assert (rows_of(plan) == [TRANSPOSED]) == (found.stride()[-1] != 1) == (rows >= 36)


def test_vectors_without_unit_strides_are_copied_at_once():
    a, b = integers(32, 64, 16), integers(16, 32)
    plan = plan_of("hak,kh->ha", a, b)
    planner.contract("hak,kh->ha", a, b)
    with torch.profiler.profile() as recorded:
        planner.contract("hak,kh->ha", a, b)
    assert sum(event.name == "aten::copy_" for event in recorded.events()) == 1
    found, measured = torch_memory(lambda: planner.contract("hak,kh->ha", a, b))
    assert measured.peak_bytes == plan.cost.peak_bytes == found.nbytes + b.nbytes
    assert torch.equal(found, torch.einsum("hak,kh->ha", a, b))
