"""Which plans run as torch's own calls, with torch's own derivatives, and what these keep."""

import math
import re
import types

import numpy as np
import pytest
from conftest import examples
from engines import saved_tensor_bytes
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import planner
from planner import api
from planner.inspect.memory import torch_backward_memory, torch_memory
from planner.search import refine
from planner.testing.reference import reference, reference_gradients

torch = pytest.importorskip("torch")

from planner.backends.torch.eager import AUTOGRAD  # noqa: E402
from planner.backends.torch.indexed_rows import IndexedRun  # noqa: E402
from planner.backends.torch.products import einsum  # noqa: E402


def integers(*shape, grad=False):
    return torch.randint(-2, 3, shape).float().requires_grad_(grad)


def gradients(result, operands):
    return torch.autograd.grad((result * result.detach()).sum(), operands)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("c,a->ca", [(512,), (32,)]),  # a matrix times a vector would take less time
        ("cba,ac,ba->cba", [(64, 16, 16), (16, 64), (16, 16)]),  # `cba,ac,ba->acb` cannot be run by autograd
        ("ba,ca->cab", [(32, 32), (32, 32)]),
    ],
)
def test_a_plan_that_autograd_runs_has_the_rows_that_autograd_computes(spec, shapes):
    operands = [integers(*shape, grad=True) for shape in shapes]
    plan = planner.plan(spec, *operands, device="cpu")
    assert plan.programs.by_autograd
    rows = {row for step in plan.programs.forward.steps for row in AUTOGRAD[step.choice.lowering]}
    assert {step.choice.lowering for step in plan.programs.backward.steps} <= rows
    if len(operands) == 2:
        assert type(plan(*operands).grad_fn).__name__ == "MulBackward0"


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("BTKGH,BSKH->BTKGS", [(2, 4, 3, 2, 5), (2, 6, 3, 5)]),  # both operands are copied
        ("uw,zu->zuw", [(8, 6), (5, 8)]),  # both are repeated
        ("bhl,h->bhl", [(2, 3, 4), (3,)]),
        ("bixy,ioxy->boxy", [(2, 3, 4, 5), (3, 6, 4, 5)]),  # matrices without unit strides
        ("i,j->ij", [(64,), (16,)]),  # a matrix times a vector would be a faster gradient, but not by a Function
        ("bn,f->bnf", [(4, 32), (16,)]),
        ("zui,zv->zvi", [(32, 16, 3), (32, 16)]),
        ("hnij,rjnhd->rinhd", [(4, 2, 16, 16), (4, 16, 2, 4, 16)]),  # batch axes in another order than the result's
    ],
)
def test_small_products_have_the_derivatives_of_torch(spec, shapes):
    operands = [integers(*shape, grad=True) for shape in shapes]
    found, expected = planner.contract(spec, *operands), torch.einsum(spec, *operands)
    assert "Contract" not in found.grad_fn.name()
    assert torch.equal(found, expected)
    for ours, theirs in zip(gradients(found, operands), gradients(expected, operands), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("spec", "shapes", "needs"),
    [
        ("ik,kj->ikj", [(30, 50), (50, 60)], (True, True)),
        ("a,b->ab", [(64,), (64,)], (True, True)),
        ("a,b,c->abc", [(16,), (16,), (16,)], (True, True, True)),
        ("bda,a,b->dba", [(16, 64, 64), (64,), (16,)], (True, True, True)),  # one of two gradients is a sum
        ("ba,ac->acb", [(16, 64), (64, 100)], (True, False)),
        ("ba,ac->acb", [(16, 64), (64, 100)], (False, True)),
    ],
)
def test_products_by_element_that_autograd_runs_hold_what_the_plan_says(spec, shapes, needs):
    """Autograd multiplies for both gradients before it sums for one."""
    operands = [integers(*shape, grad=grad) for shape, grad in zip(shapes, needs, strict=True)]
    plan = planner.plan(spec, *operands)
    result = planner.contract(spec, *operands)
    of = [x for x in operands if x.requires_grad]
    _, measured = torch_backward_memory(lambda: planner.contract(spec, *operands), of, result.detach())
    assert measured.peak_bytes == plan.cost.backward.peak_bytes


def kept(call):
    """The bytes of tensors that autograd saves, other than operands and results."""
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    operands = [integers(2, 4, 3, 2, 5, grad=True), integers(2, 6, 3, 5, grad=True)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call(*operands)
    del result
    return sum(count for pointer, count in saved.items() if pointer not in {x.data_ptr() for x in operands})


def test_copies_are_kept_as_the_plan_says_and_as_einsum_keeps_them():
    spec = "BTKGH,BSKH->BTKGS"
    operands = [planner.Operand(shape, requires_grad=True) for shape in [(2, 4, 3, 2, 5), (2, 6, 3, 5)]]
    plan = planner.plan(spec, *operands, backend="torch", device="cpu")
    assert plan.cost.retained_bytes == 4 * (2 * 4 * 3 * 2 * 5 + 2 * 6 * 3 * 5)
    assert kept(lambda *xs: planner.contract(spec, *xs)) == plan.cost.retained_bytes
    assert kept(lambda *xs: torch.einsum(spec, *xs)) == plan.cost.retained_bytes


@pytest.mark.parametrize(
    "options", [{"memory_limit": "1 MiB"}, {"retain_limit": 0}, {"minimize": "retained"}], ids=lambda x: next(iter(x))
)
def test_no_copy_is_kept_under_limits_and_for_other_objectives(options):
    operands = [planner.Operand(shape, requires_grad=True) for shape in [(2, 4, 3, 2, 5), (2, 6, 3, 5)]]
    plan = planner.plan("BTKGH,BSKH->BTKGS", *operands, backend="torch", device="cpu", **options)
    assert plan.cost.retained_bytes == 0


def test_autograd_may_keep_rows_in_place_of_a_slower_plan(monkeypatch):
    """Einsum retains the rows that it takes. A Function that retains nothing took 1.4 times as long."""
    operands = [planner.Operand(shape, requires_grad=True) for shape in [(16, 4, 16, 8), (128, 8, 4, 16)]]

    def retained():
        planner.caches().clear()
        made = planner.plan("bhts, p[bt]shd -> bhd", *operands, p=(16, 16), backend="torch", device="cpu")
        assert made.programs.by_autograd == (made.cost.retained_bytes > 0)
        return made.cost.retained_bytes

    assert retained() == 4 * 16 * 16 * 8 * 4 * 16
    monkeypatch.setattr("planner.search.refine._MOST_TAKEN", 2**18)
    assert retained() == 0


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [("bink,nbjk->injb", [(4, 64, 32, 4), (32, 4, 16, 4)]), ("jkd,ik->idj", [(16, 32, 64), (128, 32)])],
)
def test_axes_of_an_operand_that_is_copied_go_in_the_order_that_spares_other_copies(spec, shapes):
    """The second operand is none, and neither is the gradient of `idj`, if it is row-major."""
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    plan = planner.plan(spec, *operands, backend="torch", device="cpu")
    assert plan.steps[0].choice.cost.copied_bytes == 4 * np.prod(shapes[0])
    a, b = (integers(*shape) for shape in shapes)
    found, expected = planner.contract(spec, a, b), torch.einsum(spec, a, b)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_axes_of_a_copied_operand_go_in_the_order_of_the_result_only_if_that_is_larger():
    """The members of a family are called one after the other."""
    for b, result_is_larger in [(2, False), (64, True), (2, False)]:
        x, w = integers(2, 128, 16, 32), integers(2, b, 16)
        found = planner.contract("jdkm,jbk->jmdb", x, w)
        assert torch.equal(found, torch.einsum("jdkm,jbk->jmdb", x, w))
        m, d = found.stride()[1:3]
        assert (m > d) == result_is_larger


@pytest.mark.parametrize(
    ("spec", "shapes", "count"),
    [
        ("idj, q[i]hmj -> midh", [(64, 16, 8), (4, 16, 2, 8)], 64),  # what is taken is not copied
        ("imd, q[d]km -> ik", [(32, 32, 64), (4, 16, 32)], 64),  # a copy is kept in the place of what is taken
        ("jkhn, q[n]k -> njh", [(64, 16, 32, 4), (8, 16)], 4),  # the same products, of rows that are taken before
        ("inbk, q[b]mk -> inm", [(16, 16, 4, 128), (4, 8, 128)], 4),
    ],
)
def test_small_plans_with_index_arrays_run_as_einsums_own_calls(spec, shapes, count):
    a, b = (integers(*shape, grad=True) for shape in shapes)
    index = torch.randint(0, shapes[1][0], (count,))
    found = planner.contract(spec, a, b, q=index)
    assert "Contract" not in found.grad_fn.name()
    expected = torch.einsum(re.sub(r"q\[(.)\]", r"\1", spec), a, b[index])
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients(found, [a, b]), gradients(expected, [a, b])))


@pytest.mark.parametrize("index", ["int64", "int32", "negative", "strided"])
def test_small_plans_with_index_arrays_may_keep_copies_of_operands(index):
    """Einsum retains this copy too. Calls whose indices torch does not read as they are keep none."""
    x, table = integers(16, 32, 64, grad=True), integers(2, 32, grad=True)
    rows = torch.randint(-2 if index == "negative" else 0, 2, (256,))[::2]
    rows = rows if index == "strided" else rows.contiguous().to(torch.int32 if index == "int32" else torch.int64)
    plan = planner.plan("jkd, q[i]k -> idj", x, table, q=rows)
    assert plan.cost.retained_bytes == 4 * (16 * 32 * 64 + 128 * 32)
    planner.contract("jkd, q[i]k -> idj", x, table, q=rows)
    result, memory = torch_memory(lambda: planner.contract("jkd, q[i]k -> idj", x, table, q=rows))
    assert memory.retained_bytes == (plan.cost.retained_bytes if index == "int64" else 4 * 128 * 32)
    taken = table[rows.long()]
    expected = torch.einsum("jkd,ik->idj", x, taken)
    assert torch.equal(result, expected)
    for found, wanted in zip(gradients(result, [x, table]), gradients(expected, [x, table]), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("spec", "shapes", "copied", "copying"),
    [
        ("vu,zui->zvi", [(16, 32), (8192, 32, 5)], 8192 * 32 * 5, 1),  # to copy twice took 1.3 to 1.6 times as long
        ("pbthd,hnpd->bthpn", [(2, 64, 256, 4, 16), (4, 32, 2, 16)], 2 * 64 * 256 * 4 * 16 + 4 * 32 * 2 * 16, 3),
    ],
)
def test_a_long_plan_keeps_the_copies_that_both_programs_read(spec, shapes, copied, copying):
    """Einsum does so too."""
    plan = planner.plan(
        spec, *[planner.Operand(shape, requires_grad=True) for shape in shapes], backend="torch", device="cpu"
    )
    assert plan.programs.by_autograd
    assert plan.cost.seconds > 2.5e-3
    assert plan.cost.retained_bytes == 4 * copied == plan.naive_cost.retained_bytes
    assert plan.cost.peak_bytes <= plan.naive_cost.peak_bytes
    assert sum(step.choice.cost.copied_bytes > 0 for step in plan.steps) == copying
    operands = [integers(*shape, grad=True) for shape in shapes]
    assert saved_tensor_bytes(lambda: planner.contract(spec, *operands), operands) == plan.cost.retained_bytes
    found, expected = planner.contract(spec, *operands), torch.einsum(spec, *operands)
    assert torch.equal(found, expected)
    for ours, theirs in zip(gradients(found, operands), gradients(expected, operands), strict=True):
        assert torch.equal(ours, theirs)
    assert planner.plan(spec, *operands, retain_limit=0).cost.retained_bytes == 0  # copies twice


@st.composite
def long_products(draw):
    """Two operands with axes in any order and in any strides, of 2^20 elements together or more."""
    groups = ["", "z"], ["a", "ab", ""], ["c", "cd"], ["k", "kl"]
    batch, left, right, summed = (draw(st.sampled_from(some)) for some in groups)
    first, second, out = (
        draw(st.permutations([*axes])) for axes in (batch + left + summed, batch + right + summed, batch + left + right)
    )
    sizes = {axis: draw(st.sampled_from((2, 3, 5, 8, 16))) for axis in batch + left + right + summed}
    longest = draw(st.sampled_from([*left, *summed, *batch] or [*right]))
    sizes[longest] *= 2**20 // math.prod(sizes[axis] for axis in first if axis in sizes) + 1
    lie = [draw(st.permutations(range(len(term)))) for term in (first, second)]
    spec = f"{''.join(first)},{''.join(second)}->{''.join(out)}"
    return spec, [[sizes[axis] for axis in term] for term in (first, second)], lie


@settings(max_examples=examples(15, 200))
@example(("zakl,zckl->zca", [[2, 131074, 2, 2], [2, 2, 2, 2]], [[0, 1, 3, 2], [0, 1, 3, 2]]))  # a member of a family
@given(long_products())
def test_long_plans_retain_no_more_than_einsum_and_what_they_say(product):
    spec, shapes, lie = product
    assume(sum(map(math.prod, shapes)) <= 2**23)
    operands = []
    for shape, order in zip(shapes, lie, strict=True):
        x = integers(*[shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
        operands.append(x.requires_grad_())
    found, expected = planner.contract(spec, *operands), torch.einsum(spec, *operands)
    assume(expected.numel() <= 2**23)
    assert torch.equal(found, expected)
    plan = planner.plan(spec, *operands)
    kept = [
        saved_tensor_bytes(lambda run=run: run(spec, *operands), operands) for run in (planner.contract, torch.einsum)
    ]
    assert kept[0] == plan.cost.retained_bytes
    assert not plan.programs.by_autograd or kept[0] <= kept[1] + 2**16  # a plan is not compared for less
    gradient = integers(*expected.shape)
    for ours, theirs in zip(*(torch.autograd.grad(x, operands, gradient) for x in (found, expected)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def equations(monkeypatch):
    """The equations that native calls pass to torch's einsum from now on."""
    from planner.backends.torch.products import einsum as products

    called = []

    class Operators:
        def einsum(self, equation, operands):
            called.append(equation)
            return torch.einsum(equation, *operands)

    monkeypatch.setattr(products, "_OPERATORS", Operators())
    planner.caches().clear()
    return called


def test_products_without_gradients_that_need_views_are_one_call(equations):
    operands = integers(2, 4, 3, 2, 5), integers(2, 6, 3, 5)
    found = planner.contract("BTKGH,BSKH->BTKGS", *operands)
    assert len(equations) == 1
    assert torch.equal(found, torch.einsum("BTKGH,BSKH->BTKGS", *operands))
    planner.contract("ij,jk->ik", integers(3, 4), integers(4, 5))
    assert len(equations) == 1, "`mm` needs no view"


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("acb,ade->dceb", [(16, 4, 8), (16, 8, 4)]),
        ("bnhv,dhv->bdn", [(2, 32, 4, 8), (32, 4, 8)]),
        ("ibnd,jnd->ijbn", [(16, 2, 4, 16), (16, 4, 16)]),
        ("nhw,ixh->nixw", [(4, 8, 8), (16, 8, 8)]),
        ("lbnd,vbnl->vbnd", [(4, 2, 16, 32), (4, 2, 16, 4)]),  # einsum swaps the operands
        ("ebnd,ebnfc->efbcd", [(4, 2, 16, 16), (4, 2, 16, 2, 8)]),
    ],
)
def test_products_with_mixed_axes_lie_as_those_of_einsum_in_one_call(spec, shapes, equations):
    operands = [integers(*shape) for shape in shapes]
    found, expected = planner.contract(spec, *operands), torch.einsum(spec, *operands)
    assert len(equations) == 1
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize(
    ("spec", "shapes", "order"),
    [
        ("bqhgd,bkhd->bhgqk", [(2, 3, 2, 4, 5), (2, 6, 2, 5)], "bhgqk"),  # an operand that is copied
        ("hbqgd,bkhd->bhgkq", [(2, 3, 5, 4, 6), (3, 7, 2, 6)], "hbqgk"),
        ("ijxyz,iojxz->jioxy", [(2, 3, 4, 5, 6), (2, 7, 3, 4, 6)], "ijxoy"),  # a batch in another order
        ("ijyxz,ijoz->jioyx", [(2, 3, 4, 5, 6), (2, 3, 7, 6)], "ijoyx"),  # another, with the second operand first
    ],
)
def test_products_whose_groups_change_order_are_one_call_and_a_view(spec, shapes, order, equations):
    operands = [integers(*shape) for shape in shapes]
    found = planner.contract(spec, *operands)
    assert len(equations) == 1
    assert torch.equal(found, torch.einsum(spec, *operands))
    out = spec.split("->")[1]
    assert found.permute([out.index(axis) for axis in order]).is_contiguous()


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("bi,ai->ab", [(64, 9), (96, 9)]),
        ("ai,ib->ab", [(96, 9), (9, 64)]),
        ("ia,ib->ab", [(64, 8192), (64, 256)]),  # autograd of `mm` would compute a gradient that lies as columns
        ("ib,ia->ab", [(64, 256), (64, 8192)]),
    ],
)
def test_slow_gradients_are_those_of_einsum(spec, shapes):
    """Of the two gradients of `mm` both may have few columns, of `bmm` one."""
    operands = [integers(*shape, grad=True) for shape in shapes]
    found, expected = planner.contract(spec, *operands), torch.einsum(spec, *operands)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    with torch.profiler.profile() as recorded:
        ours = gradients(found, operands)
    assert sum(event.name == "aten::bmm" for event in recorded.events()) == 2
    for mine, theirs in zip(ours, gradients(expected, operands), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("spec", "shapes", "grad", "first"),
    [
        ("bhnd,bd->bhn", [(8, 4, 32, 16), (8, 16)], False, [8, 1, 16]),
        ("bhnd,bd->bhn", [(8, 4, 32, 16), (8, 16)], True, [8, 1, 16]),
        ("bnd,nd->bn", [(64, 32, 16), (32, 16)], False, [32, 1, 16]),
        # The output's gradient would lie such that a product with it takes much longer.
        ("bnd,nd->bn", [(64, 32, 16), (32, 16)], True, [32, 64, 16]),
    ],
)
def test_vectors_of_a_batch_are_multiplied_as_rows(spec, shapes, grad, first):
    operands = [integers(*shape, grad=grad) for shape in shapes]
    planner.contract(spec, *operands)
    with torch.profiler.profile(record_shapes=True) as recorded:
        found = planner.contract(spec, *operands)
    assert [event.input_shapes[0] for event in recorded.events() if event.name == "aten::bmm"] == [first]
    assert torch.equal(found, torch.einsum(spec, *operands))


def test_summed_axes_that_lie_in_two_orders_copy_the_smaller_operand():
    shapes = (7, 16, 16), (512, 16, 7)
    for spec, sizes in (("mbi,zbm->zi", shapes), ("zbm,mbi->zi", shapes[::-1])):
        plan = planner.plan(spec, *sizes, backend="torch", device="cpu")
        assert plan.cost.copied_bytes == 4 * 7 * 16 * 16


def test_rows_are_taken_in_the_order_of_the_product():
    operands = [planner.Operand(shape, requires_grad=True) for shape in [(32, 8), (27, 8, 8)]]
    plan = planner.plan("x[nk]c, kco -> no", *operands, x=(16, 27), backend="torch", device="cpu")
    assert plan.cost.copied_bytes == 0


@given(data=st.data())
def test_views_by_the_shortest_calls_are_those_of_permute_and_reshape(data):
    from planner.backends.common import stock
    from planner.backends.torch.ops import OPS, viewing

    shape = data.draw(st.lists(st.integers(1, 3), max_size=5))
    order = data.draw(st.permutations(range(len(shape))))
    lengths, left = [], len(shape)
    while left and len(lengths) < 8:
        lengths.append(data.draw(st.integers(0, left)))
        left -= lengths[-1]
    lengths += [1] * left
    x = torch.arange(float(np.prod(shape))).reshape(shape)
    joined = viewing(order, lengths)(x)
    expected = stock.viewing(OPS.permute, order, lengths)(x)
    assert torch.equal(joined, expected)
    assert joined.data_ptr() == x.data_ptr() or expected.data_ptr() != x.data_ptr(), "a needless copy"


@pytest.mark.parametrize(
    ("spec", "shapes", "index"),
    [
        ("bhij,hij->bhij", [(2, 3, 4, 7), (3, 4, 7)], {}),
        ("uw,zui->zuiw", [(3, 7), (2, 3, 4)], {}),
        ("bhij, t[ij]h -> bhij", [(2, 3, 4, 7), (5, 3)], {"t": (4, 7)}),
    ],
)
def test_products_that_torch_lays_out_in_rows_are_one_product(spec, shapes, index, monkeypatch):
    from planner.backends.torch import ops

    called, multiply = [], ops.multiply
    monkeypatch.setattr(ops, "multiply", lambda a, b: called.append(a.shape) or multiply(a, b))
    planner.caches().clear()
    operands = [integers(*shape) for shape in shapes]
    arrays = {name: torch.randint(0, 5, shape) for name, shape in index.items()}
    found = planner.contract(spec, *operands, **arrays)
    assert not called, "a look at strides that are known"
    taken = [operands[0], operands[1][arrays["t"]]] if arrays else operands
    assert torch.equal(found, torch.einsum(spec.replace("t[ij]h", "ijh"), *taken))
    assert found.is_contiguous()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("spec", "shapes"),
    [("blhp,hrp->blrhp", [(2, 5, 3, 7), (3, 4, 7)]), ("ab,dcb->cadb", [(3, 4), (5, 6, 4)])],
)
def test_products_by_element_lie_as_torch_lays_them_out(spec, shapes, grad):
    operands = [integers(*shape, grad=grad) for shape in shapes]
    found, expected = planner.contract(spec, *operands), torch.einsum(spec, *operands)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert not found.is_contiguous()
    if grad:
        assert "Contract" not in found.grad_fn.name(), "a Function of planner's own takes twice as long"
        pairs = zip(gradients(found, operands), gradients(expected, operands), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


# Specs, shapes of operands, `sizes=`, and shapes of index arrays with the size of what they index.
GATHERS = {
    "rows of two operands": ("s[e]c, d[e]c -> e", [(9, 5), (8, 5)], None, {"s": ((6,), 9), "d": ((6,), 8)}),
    "pairs of axes": ("f[nk]d, g[nj]d -> nkj", [(4, 3), (5, 3)], None, {"f": ((6, 2), 4), "g": ((6, 3), 5)}),
    "a take along a batch": ("b s[bn] c, cd -> bnd", [(2, 7, 3), (3, 4)], None, {"s": ((2, 5), 7)}),
    "a sum along a batch": ("bnc, bn -> b d[bn] c", [(2, 5, 3), (2, 5)], {"d": 4}, {"d": ((2, 5), 4)}),
    "sums of products": ("bqhd, b i[bqk] hd -> bqhk", [(2, 3, 2, 4), (2, 5, 2, 4)], None, {"i": ((2, 3, 2), 5)}),
    "a matrix for each edge": (
        "s[e]i, r[e]io -> d[e]o",
        [(32, 16), (4, 16, 16)],
        {"d": 32},
        {"s": ((64,), 32), "r": ((64,), 4), "d": ((64,), 32)},
    ),
    "copies of taken rows": (
        "bhlqd, bh i[lr] kd -> bhlqkr",
        [(2, 2, 4, 8, 16), (2, 2, 8, 8, 16)],
        None,
        {"i": ((4, 3), 8)},
    ),
    "a take, added up": ("s[e]c -> d[e]c", [(4, 3)], {"d": 5}, {"s": ((6,), 4), "d": ((6,), 5)}),
}


def gather_case(name):
    spec, shapes, sizes, arrays = GATHERS[name]
    indices = {letter: torch.randint(0, size, shape) for letter, (shape, size) in arrays.items()}
    return spec, [integers(*shape, grad=True) for shape in shapes], {"sizes": sizes} if sizes else {}, indices


@pytest.mark.parametrize("name", GATHERS)
def test_gathers_through_several_dimensions_have_the_derivatives_of_torch(name):
    spec, operands, sizes, indices = gather_case(name)
    found = planner.contract(spec, *operands, **indices, **sizes)
    expected = planner.contract(spec, *operands, **indices, **sizes, memory_limit="1 GB")
    assert "Contract" not in found.grad_fn.name()
    assert "Contract" in expected.grad_fn.name()
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients(found, operands), gradients(expected, operands)))


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("name", GATHERS)
def test_operators_that_read_an_index_array_check_it(name, needs):
    """Negative entries count from the end; others are refused with their place."""
    spec, operands, sizes, indices = gather_case(name)
    operands = [x.requires_grad_(needs) for x in (y.detach() for y in operands)]
    expected = planner.contract(spec, *operands, **indices, **sizes)
    for letter, (_, size) in GATHERS[name][3].items():
        below = indices | {letter: indices[letter] - size}
        assert torch.equal(planner.contract(spec, *operands, **below, **sizes), expected)
        last = tuple(n - 1 for n in indices[letter].shape)
        for bad in (size, -size - 1, 2**62):
            wrong = indices | {letter: indices[letter].clone()}
            wrong[letter][last] = bad
            place = ", ".join(map(str, last))
            with pytest.raises(planner.IndexRangeError, match=rf"'{letter}'\[{place}\] is {bad},"):
                planner.contract(spec, *operands, **wrong, **sizes)


@pytest.mark.parametrize("name", GATHERS)
def test_stand_ins_of_rows_lie_as_the_rows_do(name):
    from planner.backends.torch.indexed_rows import indexed_calls
    from planner.backends.torch.strides import Strided

    spec, operands, sizes, indices = gather_case(name)
    plan, seen = planner.plan(spec, *operands, **indices, **sizes, memory_limit="1 GB"), 0
    for step in plan.programs.forward.steps + plan.programs.backward.steps:
        calls = indexed_calls(step.op) if len(step.op.spec.inputs) == 1 else None
        if calls is None:
            continue
        index = {gather: indices[gather.array] for gather in step.op.spec.gathers}
        shape = step.op.input_shapes[0]
        for x in (torch.zeros(shape), torch.zeros(shape[::-1]).permute(*reversed(range(len(shape))))):
            made, result = calls.run(x, index), calls.result(Strided(x.shape, x.stride()))
            assert made.shape == result.shape
            assert all(n == 1 or a == b for n, a, b in zip(made.shape, made.stride(), result.strides, strict=True))
            seen += 1
    assert seen


def test_gradients_of_many_pairs_are_added_up_in_order():
    """Torch's `index_put` adds up 32,768 floats or more on several cores, in any order."""
    for count, is_native in ((100, True), (40_000, False)):
        x, rows = integers(8, 8, grad=True), torch.randint(0, 8, (count,))
        found = planner.contract("s[e] d[e] -> e", x, s=rows, d=rows)
        assert ("Contract" not in found.grad_fn.name()) == is_native


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    ("spec", "shapes", "index_shapes", "sizes"),
    [
        ("s[d]r[bd] -> bd", ((3, 4),), {"s": (2,), "r": (3, 2)}, None),  # a bracket with its axes in another order
        ("s[d]r[bd] -> db", ((3, 4),), {"s": (2,), "r": (3, 2)}, None),
        ("s[c]a, s[c]ac -> ac", ((33, 17), (33, 17, 1)), {"s": (1,)}, None),  # elements, by narrow index arrays
        ("q[ac], q[ac], q[ac] ->", ((33,), (33,), (33,)), {"q": (6000, 33)}, None),  # a loop in the place of a family's
        ("ba -> z", ((2, 2),), {}, {"z": 600}),  # a sum that is repeated, in members of a family
        ("abc -> az", ((3, 2, 2),), {}, {"z": 17}),
        ("dcr[], r[]cd, dc -> r[]d", ((33, 3, 5), (5, 1, 33), (33, 1)), {"r": ()}, None),  # broadcast dimensions
        ("aq[]q[]c, q[]a -> aq[]", ((1, 1, 1, 3), (1, 600)), {"q": ()}, None),
    ],
)
def test_members_of_families_have_their_own_sizes_and_strides(spec, shapes, index_shapes, sizes, dtype, grad):
    random = np.random.default_rng(0)
    operands = [random.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
    tensors = [torch.from_numpy(x).requires_grad_(grad) for x in operands]
    indices = {name: random.integers(0, 3 if shape else 1, shape).astype(dtype) for name, shape in index_shapes.items()}
    result = planner.contract(spec, *tensors, sizes=sizes, **{name: torch.from_numpy(q) for name, q in indices.items()})
    expected = reference(spec, *operands, sizes=sizes, **indices)
    assert np.array_equal(result.detach(), expected)
    if grad:
        gradients = torch.autograd.grad(result.sum(), tensors)
        wanted = reference_gradients(spec, np.ones_like(expected), *operands, sizes=sizes, **indices)
        assert all(np.array_equal(x, y) for x, y in zip(gradients, wanted, strict=True))


def test_counters_see_members_with_broadcast_dimensions():
    from torch.utils.flop_counter import FlopCounterMode

    a, b = integers(16, 1, grad=True), integers(16, 33)
    with FlopCounterMode(display=False):
        result = planner.contract("jb, jb -> bj", a, b)
        (found,) = torch.autograd.grad(result, a, torch.ones(33, 16))
    assert torch.equal(result, (a * b).T)
    assert torch.equal(found, b.sum(1, keepdim=True))


def test_an_axis_of_the_output_alone_under_autocast():
    a, b, c = integers(1, 33, 17), integers(33, 1), torch.tensor(2.0)
    with torch.autocast("cpu", torch.bfloat16):
        result = planner.contract("abc, ba, -> bz", a, b, c, sizes={"z": 3})
    expected = (2 * a[0].sum(1, keepdim=True) * b).expand(33, 3)
    assert torch.equal(result, expected.to(result.dtype))  # small integers


@pytest.mark.parametrize(
    ("spec", "shapes"), [("nij, q[n]jk -> nik", [(6, 2, 3), (5, 3, 2)]), ("q[n]j, nj -> n", [(7, 3), (6, 3)])]
)
def test_negative_indices_are_read_by_native_calls(spec, shapes, monkeypatch):
    planner.caches().clear()
    operands = [integers(*shape) for shape in shapes]
    rows = max(shape[0] for shape in shapes if shape[0] != 6)
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[4\]"):
        planner.contract(spec, *operands, q=torch.tensor([0, -1, 2, 1, -rows - 1, 0]))
    (run,) = [run for run in api._RUNNERS.values() if isinstance(run, IndexedRun)]
    assert not run.negative  # a call that is refused says nothing of the others
    monkeypatch.setattr(IndexedRun, "_otherwise", None)
    for index in ([0, -1, 2, -rows, 1, -2], [0, 1, 2, 3, 4, 0], [-1] * 6):
        expected = reference(spec, *operands, q=torch.tensor(index) % rows)
        assert np.array_equal(planner.contract(spec, *operands, q=torch.tensor(index)), expected)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_negative_indices_of_any_type_take_the_bytes_of_one_copy_and_stay(dtype, strided):
    operands, whole = (integers(33, 33), integers(33)), torch.tensor([0] * 65 + [-1], dtype=dtype)
    q, before = whole[1::2] if strided else whole[33:], whole.clone()
    plan = planner.plan("q[i]k, k -> i", *operands, q=q)
    plan(*operands, q=q)
    measured = torch_memory(lambda: plan(*operands, q=q))[1]
    assert measured.peak_bytes <= plan.cost.peak_bytes + 32  # the least and the greatest index, and numbers
    assert torch.equal(whole, before)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [("ai,bi->ab", [(576, 9), (256, 9)]), ("nixw,jyw->nijxy", [(8, 16, 8, 8), (16, 8, 8)])],
)
def test_a_small_product_is_einsums_own_unless_another_plan_is_clearly_faster(spec, shapes, monkeypatch):
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    own = planner.plan(spec, *operands, backend="torch", device="cpu")
    monkeypatch.setattr(refine, "_WORTH_A_FUNCTION", 1.0)
    planner.caches().clear()
    other = planner.plan(spec, *operands, backend="torch", device="cpu")
    assert "by autograd" in own.origin
    assert "by autograd" not in other.origin
    least = refine.call_seconds(other.contraction, other)
    assert least <= refine.call_seconds(own.contraction, own) <= 1.2 * least
    planner.caches().clear()  # of plans made with another bar


@pytest.mark.parametrize("optimize", ["auto", "optimal"])
@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("a,ai->ai", [(300,), (300, 300)]),
        ("i,ai->ai", [(300,), (300, 300)]),
        ("ai,a->ai", [(300, 300), (300,)]),
        ("a,aij->aij", [(64,), (64, 30, 30)]),
        ("ik,kj->ikj", [(5, 784), (784, 10)]),
        ("kb,akb->ab", [(16, 300), (16, 16, 300)]),
    ],
)
def test_peaks_of_summed_gradients_are_those_of_who_computes_them(spec, shapes, optimize):
    """Autograd multiplies for both operands before it sums for the first."""
    operands = [integers(*shape, grad=True) for shape in shapes]
    plan = planner.plan(spec, *operands, optimize=optimize)
    result = plan(*operands)
    weights = torch.ones_like(result)
    torch.autograd.grad(result, operands, weights, retain_graph=True)
    _, memory = torch_memory(lambda: torch.autograd.grad(result, operands, weights, retain_graph=True))
    assert memory.peak_bytes <= plan.cost.backward.peak_bytes <= 1.1 * memory.peak_bytes


@pytest.mark.parametrize(
    ("spec", "shapes", "rows", "by_einsum"),
    [
        ("bhid, r[ij]d -> bhij", [(2, 4, 8, 16), (31, 16)], (8, 8), True),
        ("bhd, p[bt]shd -> bhts", [(4, 4, 8), (32, 16, 4, 8)], (4, 8), True),  # the rows are copied
        ("bhd, p[bt]shd -> bhts", [(4, 4, 64), (32, 8, 4, 64)], (4, 16), False),  # the rows are copied in their order
        ("tki, e[tk]io -> tko", [(6, 2, 4), (5, 4, 3)], (6, 2), True),
        ("bnhj, q[h]bj -> nb", [(4, 64, 16, 8), (3, 4, 8)], (16,), True),  # einsum copies 32,768 elements
    ],
)
def test_small_products_of_rows_are_a_take_and_one_call_of_einsum(spec, shapes, rows, by_einsum):
    operands = [integers(*shape) for shape in shapes]
    index = {re.search(r"(\w)\[", spec)[1]: torch.randint(0, shapes[1][0], rows)}
    planner.contract(spec, *operands, **index)
    with torch.profiler.profile() as recorded:
        found = planner.contract(spec, *operands, **index)
    names = [event.name for event in recorded.events()]
    assert ("aten::einsum" in names) == by_einsum
    assert names.count("aten::index_select") + names.count("aten::index") == 1
    np.testing.assert_array_equal(found, reference(spec, *operands, **index))
    plan = planner.plan(spec, *operands, **index)
    _, measured = torch_memory(lambda: plan(*operands, **index))
    assert measured.peak_bytes <= plan.cost.peak_bytes


@pytest.mark.parametrize(
    ("spec", "shapes", "calls"),
    [
        ("bhnd,bhmd->bhn", [(2, 3, 4, 5), (2, 3, 6, 5)], 1),
        ("zui,zvi->zv", [(4, 2, 3), (4, 5, 3)], 1),
        ("iuk,kj->ij", [(4, 3, 5), (5, 2)], 1),
        ("kj,iuk->ij", [(5, 2), (4, 3, 5)], 0),  # einsum's result would lie otherwise
        ("iuk,kj->ij", [(4, 3, 1), (1, 2)], 0),  # an axis of size 1
        ("ik,kj->ij", [(4, 5), (5, 2)], 0),  # no sum
    ],
)
def test_a_product_of_sums_is_one_call_of_einsum(spec, shapes, calls, monkeypatch):
    operands, plain, equations = [integers(*shape) for shape in shapes], einsum._OPERATORS.einsum, []

    def recorded(equation, given):
        equations.append(equation)
        return plain(equation, given)

    monkeypatch.setattr(einsum, "_OPERATORS", types.SimpleNamespace(einsum=recorded))
    planner.caches().clear()
    found = planner.contract(spec, *operands)
    planner.caches().clear()
    assert [len(equation) for equation in equations].count(len(spec)) == calls
    assert torch.equal(found, torch.einsum(spec, *operands))
    assert found.is_contiguous()
