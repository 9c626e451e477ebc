"""Products that torch computes as their transpose, and what is copied and held for them."""

import pytest
from engines import saved_tensor_bytes
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.cost.device import CPU
from planner.cost.layout import layout_of
from planner.inspect.memory import torch_memory
from planner.language.spec import Spec
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum

torch = pytest.importorskip("torch")
if not torch.backends.mkl.is_available():  # what is slow elsewhere has not been measured
    pytest.skip("products are only transposed for MKL", allow_module_level=True)

from planner.backends.torch.eager import compile_native  # noqa: E402
from planner.backends.torch.products import few_columns, transposed  # noqa: E402
from planner.backends.torch.products.transposed import TRANSPOSED  # noqa: E402
from planner.backends.torch.strides import standins_of  # noqa: E402


def integers(*shape, grad=False):
    return torch.randint(-2, 3, shape).float().requires_grad_(grad)


@pytest.fixture(autouse=True)
def by_torch_alone(monkeypatch):
    """On all processors: AMD's have products with few columns of their own, see `test_few_columns_torch.py`."""
    monkeypatch.setattr(few_columns, "_linear", lambda: None)


def stored(x, order):
    """The same values, with dimensions in another order in memory."""
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def plan_of(spec, *operands):
    return planner.plan(spec, *operands, backend="torch", device="cpu")


def rows_of(plan):
    return [step.choice.lowering for step in plan.steps]


# The rows lie as columns in memory.
FEW_COLUMNS = [
    ("zkb,zkn->zbn", (8, 16, 512), (8, 16, 3)),  # in a batch
    ("zkn,zkb->zbn", (8, 16, 3), (8, 16, 512)),  # the other operand first
    ("zkb,zkn->znb", (8, 16, 512), (8, 16, 3)),  # the result's columns first, as they are computed
    ("ijk,ijzv->zvk", (3, 3, 5), (3, 3, 512, 8)),  # `torch.einsum` multiplies the other way
    ("kb,kn->bn", (64, 512), (64, 8)),
    ("kb,kn->bn", (64, 2048), (64, 15)),
    ("kb,kn->bn", (128, 256), (128, 8)),  # of a family whose largest member has more elements
]


def shapes_of_products(call):
    """The shapes of the matrices that torch multiplies in a call, and what the call returns."""
    with torch.profiler.profile(record_shapes=True) as recorded:
        found = call()
    return [e.input_shapes[:2] for e in recorded.events() if e.name in ("aten::bmm", "aten::mm")], found


@pytest.mark.parametrize(("spec", "a", "b"), FEW_COLUMNS)
def test_few_columns_are_multiplied_as_few_rows(spec, a, b):
    operands = [integers(*a), integers(*b)]
    planner.contract(spec, *operands)
    products, found = shapes_of_products(lambda: planner.contract(spec, *operands))
    ((rows, _), (_, columns)) = (shape[-2:] for shape in products[0])
    assert len(products) == 1
    assert rows <= 15 < columns
    assert torch.equal(found, torch.einsum(spec, *operands))


@pytest.mark.parametrize(("rows", "transposed"), [(512, False), (8192, True)])
def test_only_long_products_with_gradients_are_transposed(rows, transposed):
    """By a Function. Autograd would transpose the gradients, too."""
    operands = [integers(256, rows, grad=True), integers(256, 8, grad=True)]
    products, found = shapes_of_products(lambda: planner.contract("kb,kn->bn", *operands))
    assert [shape[-2] for shape in products[0]] == ([8, 256] if transposed else [rows, 256])
    assert torch.equal(found, torch.einsum("kb,kn->bn", *operands))


def test_gradients_of_few_columns_are_products_of_few_rows():
    x, w = integers(4096, 256, grad=True), integers(256, 8, grad=True)
    result = planner.contract("bk,kn->bn", x, w)
    gradient = integers(4096, 8)
    products, found = shapes_of_products(lambda: torch.autograd.grad(result, (x, w), gradient))
    assert min(right[-1] for _, right in products) >= 64
    expected = torch.autograd.grad(torch.einsum("bk,kn->bn", x, w), (x, w), gradient)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("spec", "a", "b"),
    [
        ("bk,kn->bn", (512, 64), (64, 8)),  # rows that lie as rows, which an Intel Xeon multiplies faster so
        ("bk,nk->bn", (512, 64), (8, 64)),
        ("bkz,zkn->zbn", (512, 64, 8), (8, 64, 4)),  # rows that are copied first
        ("kb,kn->bn", (64, 512), (64, 32)),  # not so few columns
        ("kb,kn->bn", (1024, 16), (1024, 8)),  # few rows, too
        ("kb,kn->bn", (64, 255), (64, 8)),  # a small product
        ("zbk,zkn->zbn", (8, 4, 4), (8, 4, 2)),  # small matrices, which torch multiplies itself
        ("zbk,zk->zb", (8, 64, 16), (8, 16)),  # vectors
    ],
)
def test_other_products_are_not_transposed(spec, a, b):
    plan = plan_of(spec, a, b)
    assert TRANSPOSED not in rows_of(plan)
    # Not even where measured rates call few rows faster than few columns.
    assert load_backend("torch").table.price(TRANSPOSED, plan.steps[0].op, CPU) is None


@pytest.mark.parametrize(
    ("spec", "shapes", "indices", "lies", "with_gradients"),
    [
        ("kb,kn->bn", ((3, 64), (3, 4096)), {}, (1, 64), (4096, 1)),
        ("bn,q[d]jn->jdb", ((64, 2), (2, 64, 2)), {"q": torch.arange(64) % 2}, (4096, 64, 1), (4096, 64, 1)),
    ],
)
def test_few_terms_of_many_columns_go_the_other_way(spec, shapes, indices, lies, with_gradients):
    """Without gradients only: those of the result come row-major. So does a result much larger than an operand."""
    operands = [integers(*shape) for shape in shapes]
    found = planner.contract(spec, *operands, **indices)
    assert found.stride() == lies
    trained = planner.contract(spec, *[x.requires_grad_() for x in operands], **indices)
    assert trained.stride() == with_gradients
    assert torch.equal(found, trained)
    small = [integers(3, 64), integers(3, 1024)]
    assert planner.contract("kb,kn->bn", *small).is_contiguous()


def test_a_plan_for_a_card_stays_row_major():
    plan = planner.plan("kb,kn->bn", (3, 64), (3, 4096), backend="torch", device="h200")
    run = compile_native(plan.tree, standins_of(plan.contraction), None, on_cpu=False)
    assert run((integers(3, 64), integers(3, 4096))).is_contiguous()


def test_prices_do_not_fall_as_rows_grow():
    table = load_backend("torch").table
    for columns in (2, 5, 8, 13, 15):
        for spec in ("kb,kn->bn", "kb,nk->bn", "bk,kn->bn"):
            prices = []
            for rows in (64, 100, 128, 129, 200, 256, 500, 1024, 2048):
                sizes = (("b", rows), ("k", 64), ("n", columns))
                inputs, output = spec.split("->")
                op = Einsum(Spec(tuple(map(tuple, inputs.split(","))), tuple(output), sizes), "float32")
                prices.append(table.price("matmul", op, CPU).cost.picoseconds)
            assert prices == sorted(prices)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.complex64])
def test_other_dtypes_are_priced_as_they_were(dtype):
    """They have no transposed product."""
    a, b = (torch.ones(*shape, dtype=dtype) for shape in ((8, 16, 512), (8, 16, 3)))
    seconds = [planner.plan(spec, a, b).cost.seconds for spec in ("zkb,zkn->zbn", "zkb,zkn->znb")]
    assert seconds[0] <= 1.2 * seconds[1]


@st.composite
def products(draw, straight=False):
    """A product with few columns, and the orders in which its operands lie in memory: half row-major if `straight`."""
    batch, left = draw(st.sampled_from(["", "z", "zy"])), draw(st.sampled_from(["a", "ab"]))
    right, summed = draw(st.sampled_from(["n", "nm"])), draw(st.sampled_from(["k", "kl"]))
    sizes = {"z": 2, "y": 3, "a": draw(st.integers(64, 128)), "b": 2, "m": 2, "l": 3}
    sizes |= {"n": draw(st.integers(2, 7)), "k": draw(st.integers(20, 60))}
    terms = ["".join(draw(st.permutations(batch + free + summed))) for free in (left, right)]
    out = "".join(draw(st.permutations(batch + left + right)))
    permuted = [st.permutations(range(len(term))) for term in terms]
    orders = [
        draw(st.just(range(len(x))) | order if straight else order) for x, order in zip(terms, permuted, strict=True)
    ]
    return f"{','.join(terms)}->{out}", [tuple(sizes[e] for e in term) for term in terms], orders


def test_the_row_computes_what_the_stock_evaluation_does_and_lies_as_it_says():
    table, ran = load_backend("torch").table, []

    def agree(case, double):
        spec, shapes, orders = case
        operands = [stored(integers(*shape), list(order)) for shape, order in zip(shapes, orders, strict=True)]
        operands = [x.double() if double else x for x in operands]
        plan = plan_of(spec, *operands)
        (step,) = plan.steps
        priced = table.price(TRANSPOSED, step.op, plan.device)
        ran.append(priced is not None)
        if priced is not None:
            (found,) = table.run(TRANSPOSED, step.op, operands, {})
            assert torch.equal(found, torch.einsum(spec, *operands))
            assert layout_of(found.shape, found.stride()) == (priced.layouts or (None,))[0]

    given(products(straight=True), st.booleans())(agree)()
    agree(("za,zn->an", [(2, 2**14), (2, 2)], [(1, 0), (0, 1)]), True)
    assert sum(ran) >= len(ran) / 20


def test_plans_hold_and_retain_what_they_say():
    rows = []

    def agree(case, grads):
        spec, shapes, orders = case
        operands = [
            stored(integers(*shape), list(order)).requires_grad_(grad)
            for shape, order, grad in zip(shapes, orders, grads, strict=True)
        ]
        plan = plan_of(spec, *operands)
        rows.append(TRANSPOSED in rows_of(plan))
        planner.contract(spec, *operands)
        result, measured = torch_memory(lambda: planner.contract(spec, *operands))
        assert torch.equal(result, torch.einsum(spec, *operands))
        assert measured.peak_bytes <= plan.programs.forward.peak_bytes
        if any(grads):
            assert saved_tensor_bytes(lambda: planner.contract(spec, *operands), operands) == plan.cost.retained_bytes
            trained, gradient = [x for x in operands if x.requires_grad], integers(*result.shape)
            found = torch.autograd.grad(result, trained, gradient)
            expected = torch.autograd.grad(torch.einsum(spec, *operands), trained, gradient)
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    given(products(), st.tuples(st.booleans(), st.booleans()))(agree)()
    assert sum(rows) >= len(rows) / 25


def test_members_of_a_family_are_transposed_as_their_own_sizes_ask():
    """Of 33 to 128 rows the largest member is transposed, and some have too few rows for it."""
    for rows in (128, 100, 40, 33, 17):
        a, b = integers(4, 200, rows), integers(4, 200, 9)
        found = planner.contract("zkb,zkn->zbn", a, b)
        assert torch.equal(found, torch.einsum("zkb,zkn->zbn", a, b))
        plan = plan_of("zkb,zkn->zbn", a, b)
        assert (rows_of(plan) == [TRANSPOSED]) == (found.stride()[-1] != 1) == (rows >= 36)


@pytest.mark.parametrize(("columns", "runs"), [(3, True), (4, True), (15, True), (16, False), (1, False)])
def test_a_traced_product_runs_at_sizes_that_are_transposed_too(columns, runs):
    """Its result would lie otherwise at others."""
    table = load_backend("torch").table
    plan = plan_of("zkb,zkn->zbn", integers(8, 64, 512), integers(8, 64, 3))
    assert rows_of(plan) == [TRANSPOSED]
    assert table.runs_sizes(plan.steps, {"z": 8, "b": 512, "k": 64, "n": columns}) == runs


@pytest.mark.parametrize(
    ("spec", "a", "b"),
    [
        ("ijk,jik->ki", (40, 30, 50), (30, 40, 50)),
        ("xyca,yax->xyc", (32, 8, 8, 16), (8, 16, 32)),
        ("xyca,xay->xyc", (32, 8, 8, 16), (32, 16, 8)),
        ("zcab,baz->zc", (32, 8, 8, 16), (16, 8, 32)),
    ],
)
def test_vectors_that_are_made_flat_are_copied_once(spec, a, b):
    operands = [integers(*a), integers(*b)]
    table = load_backend("torch").table
    (step,) = plan_of(spec, *operands).steps
    priced = table.price("matmul", step.op, CPU)
    (found,), measured = torch_memory(lambda: table.run("matmul", step.op, operands, {}))
    assert measured.peak_bytes == found.nbytes + priced.cost.scratch_bytes


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


@pytest.mark.parametrize("amd", [True, False])
@pytest.mark.parametrize(
    ("spec", "a", "b", "turns"),
    [
        ("ijk,zuij->zk", (3, 3, 5), (1024, 2, 3, 3), True),
        ("ijk,zuvij->zvk", (3, 3, 5), (64, 2, 8, 3, 3), True),
        ("kn,zuk->zn", (8, 8), (512, 2, 8), True),
        ("kn,zuk->zn", (7, 8), (512, 2, 7), False),  # too few elements
        ("kn,zuk->zn", (8, 10), (2048, 2, 8), False),  # too many columns
        ("kn,zuk->zn", (65, 4), (2048, 2, 65), False),  # too many terms
        ("bkn,bzuk->bzn", (2, 16, 9), (2, 2048, 2, 16), True),  # a batch
        ("kn,kuz->zn", (8, 8), (8, 2, 2048), True),  # the rows lie as columns
        ("kn,zk->zn", (8, 8), (2048, 8), False),  # einsum's result is row-major
    ],
)
def test_rows_that_lie_as_rows_are_multiplied_as_columns_on_amd_alone(spec, a, b, turns, amd, monkeypatch):
    monkeypatch.setattr(transposed, "is_amd", lambda: amd)
    planner.caches().clear()
    operands = [integers(*a), integers(*b)]
    (shapes,), _ = shapes_of_products(lambda: planner.contract(spec, *operands))
    assert (shapes[0][-2] < shapes[1][-1]) == (turns and (amd or "kuz" in spec))
    assert torch.equal(planner.contract(spec, *operands), torch.einsum(spec, *operands))
    planner.caches().clear()


@pytest.mark.parametrize("amd", [True, False])
@pytest.mark.parametrize(
    ("spec", "a", "b", "turns"),
    [
        ("ijk,zuvij->zvk", (3, 3, 5), (512, 2, 8, 3, 3), True),
        ("kn,zuk->zn", (8, 8), (4096, 2, 8), True),
        ("kn,zuk->zn", (8, 8), (512, 2, 8), False),  # too few elements
        ("kn,zuk->zn", (16, 8), (4096, 2, 16), False),  # too many terms
        ("hafc,fcj->aj", (2, 4096, 2, 4), (2, 4, 4), False),  # einsum multiplies them as they are
    ],
)
def test_autograd_records_such_products_as_columns_where_einsum_does(spec, a, b, turns, amd, monkeypatch):
    monkeypatch.setattr(transposed, "is_amd", lambda: amd)
    planner.caches().clear()
    operands = [integers(*a, grad=True), integers(*b, grad=True)]
    planner.contract(spec, *operands)
    (shapes,), found = shapes_of_products(lambda: planner.contract(spec, *operands))
    assert (shapes[0][-2] < shapes[1][-1]) == (amd and turns)
    expected = torch.einsum(spec, *operands)
    assert found.stride() == (expected if amd and turns else expected.contiguous()).stride()
    cotangent = integers(*expected.shape)
    ours, theirs = (torch.autograd.grad(x, operands, cotangent) for x in (found, expected))
    assert torch.equal(found, expected)
    assert all(map(torch.equal, ours, theirs))
    planner.caches().clear()


@pytest.mark.parametrize(
    ("spec", "x", "pool", "multiplied"),
    [
        ("nhd, c[n]hsd -> nhs", (64, 4, 16), (32, 4, 32, 16), False),
        ("nhd, c[n]hds -> nhs", (64, 4, 32), (32, 4, 32, 16), True),  # its gradient lies as the rows do
        ("nhd, c[n]hsd -> nhs", (16, 4, 16), (32, 4, 32, 16), True),  # too few elements
    ],
)
def test_autograd_multiplies_no_rows_of_which_it_would_add_up_a_transposed_gradient(spec, x, pool, multiplied):
    operands, rows = [integers(*x, grad=True), integers(*pool, grad=True)], torch.arange(x[0]) % 32
    plan = planner.plan(spec, *operands, c=rows)
    assert ("matmul" in [step.choice.lowering for step in plan.steps]) == multiplied
    found, expected = plan(*operands, c=rows), torch.einsum(spec.replace("c[n]", "n"), operands[0], operands[1][rows])
    cotangent = integers(*expected.shape)
    ours, theirs = (torch.autograd.grad(x, operands, cotangent) for x in (found, expected))
    assert torch.equal(found, expected)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("amd", [False, True])
def test_results_of_chains_lie_the_same_on_all_processors(amd, monkeypatch):
    """And with gradients as without: programs may view them."""
    monkeypatch.setattr(transposed, "is_amd", lambda: amd)
    planner.caches().clear()
    operands = [integers(4, 4096, 3), integers(3, 16), integers(16, 5)]
    for call in (planner.contract, planner.einsum):
        assert call("bzi,ik,kn->bzn", *operands).is_contiguous()
    planner.caches().clear()


@pytest.mark.parametrize(
    ("spec", "a", "b", "rows"),
    [
        ("bmk,bk->bm", (64, 128, 16), (64, 16), True),
        ("bkm,bk->bm", (8, 64, 64), (8, 64), True),
        ("bkm,kb->bm", (16, 128, 16), (128, 16), False),  # as rows, `bmm` would copy them one at a time
    ],
)
def test_vectors_of_a_batch_are_rows_where_autograd_records_the_product(spec, a, b, rows):
    operands = [integers(*a, grad=True), integers(*b, grad=True)]
    planner.contract(spec, *operands)
    (shapes,), found = shapes_of_products(lambda: planner.contract(spec, *operands))
    assert (shapes[0][1] == 1) == rows
    expected = torch.einsum(spec, *operands)
    cotangent = integers(*expected.shape)
    ours, theirs = (torch.autograd.grad(x, operands, cotangent) for x in (found, expected))
    assert torch.equal(found, expected)
    assert all(map(torch.equal, ours, theirs))


OUTER_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


@st.composite
def outer_products(draw):
    """An outer product whose output has the axes of both operands by turns, and the orders in which operands lie."""
    terms = [draw(st.sampled_from(["a", "ab", "abc"])), draw(st.sampled_from(["x", "xy"]))]
    out, short = "".join(draw(st.permutations("".join(terms)))), st.integers(1, 5)
    sizes = {axis: draw(st.sampled_from([1, 16, 40]) if axis in "ax" else short) for axis in out}
    orders = [draw(st.just(range(len(x))) | st.permutations(range(len(x)))) for x in terms]
    return f"{','.join(terms)}->{out}", [tuple(sizes[e] for e in term) for term in terms], orders


def test_outer_products_lie_so_that_runs_are_long_but_not_those_of_einsum():
    turned = []

    def agree(case, dtypes, kind):
        spec, shapes, orders = case
        operands = [stored(integers(*shape), list(order)) for shape, order in zip(shapes, orders, strict=True)]
        operands = [x.to(dtype) for x, dtype in zip(operands, dtypes, strict=True)]
        if all(dtype.is_floating_point for dtype in dtypes):
            operands = list(map(kind, operands))
        expected = torch.einsum(spec, *operands)
        for _ in range(2):  # cold and warm
            found, own = planner.contract(spec, *operands), planner.einsum(spec, *operands)
            assert torch.equal(found, expected)
            assert torch.equal(own, expected)
            assert own.stride() == expected.stride()
        turned.append(found.stride() != expected.stride())

    one, two = st.sampled_from(OUTER_DTYPES), st.tuples(*[st.sampled_from(OUTER_DTYPES)] * 2)
    kinds = st.sampled_from([torch.Tensor.detach, torch.Tensor.requires_grad_, torch.nn.Parameter])
    given(outer_products(), one.map(lambda dtype: (dtype, dtype)) | two, kinds)(agree)()
    assert sum(turned) >= len(turned) / 10


def test_the_last_step_of_a_chain_is_an_outer_product_with_long_runs():
    operands = [integers(3, 3, 5), integers(8, 8), integers(128, 4, 3)]
    result = planner.contract("ijk,uw,zvj->zuiwk", *operands)
    assert torch.equal(result, torch.einsum("ijk,uw,zvj->zuiwk", *operands))
    assert not result.is_contiguous()
