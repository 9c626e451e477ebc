"""Products by element: of a batch that lies innermost, added up term by term; of vectors, summed slice by slice."""

import math
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from conftest import examples  # noqa: E402
from hypothesis import assume, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import planner  # noqa: E402
from planner.backends.torch.products.elementwise import MULTIPLY_ADD, SUM_SLICES, sliced_sum  # noqa: E402
from planner.cost.device import CPU  # noqa: E402
from planner.cost.layout import layout_of  # noqa: E402
from planner.inspect.memory import torch_memory  # noqa: E402
from planner.language.spec import Operand  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402

DTYPES = ("float32", "float64", "complex64", "int64", "int32")
TABLE = load_backend("torch").table


def integers(shape, dtype="float32", strided=False):
    """A tensor of small integers; `strided` says that dimensions lie in another order, with gaps between them."""
    if not strided:
        return torch.randint(-3, 4, shape).to(getattr(torch, dtype))
    wide = torch.randint(-3, 4, [2 * n for n in reversed(shape[:-1])] + [shape[-1]]).to(getattr(torch, dtype))
    return wide[tuple(slice(None, None, 2) for _ in shape[:-1])].movedim(-1, 0).permute(*range(len(shape))[::-1])


@st.composite
def products(draw):
    """The spec of a product whose last batch axis is the last of all three terms, and the sizes of its axes."""
    shared = draw(st.lists(st.sampled_from("uvw"), unique=True, min_size=0, max_size=2))
    first, second = draw(st.sampled_from(["", "a", "ab"])), draw(st.sampled_from(["", "c", "cd"]))
    summed = draw(st.sampled_from(["k", "kl"]))
    left, right, out = (
        "".join(draw(st.permutations(axes)))
        for axes in ([*first, *summed, *shared], [*second, *summed, *shared], [*first, *second, *shared])
    )
    sizes = {axis: draw(st.integers(1, 4)) for axis in "abcdkluvw"} | {"z": draw(st.integers(2, 9))}
    sizes["k"] += 1
    return f"{left}z,{right}z->{out}z", sizes


@settings(max_examples=examples(75, 5_000))
@example(("kz,kz->z", {"k": 3, "z": 0}), "float32", (False, False))
@example(("aikz,kjz->aijz", {"a": 0, "i": 2, "j": 3, "k": 3, "z": 5}), "float32", (False, False))
@given(products(), st.sampled_from(DTYPES), st.tuples(st.booleans(), st.booleans()))
def test_terms_that_are_added_up_are_the_product(product, dtype, strided):
    """In the memory of the result alone, which is row-major."""
    spec, sizes = product
    terms = spec.split("->")[0].split(",")
    operands = [integers([sizes[e] for e in t], dtype, s) for t, s in zip(terms, strided, strict=True)]
    layouts = tuple(layout_of(x.shape, x.stride()) for x in operands)
    op = Einsum(planner.resolve(spec, *operands), dtype, layouts if any(layouts) else ())
    price = TABLE.price(MULTIPLY_ADD, op, CPU)
    assert price is not None
    assert price.cost.scratch_bytes == 0
    TABLE.run(MULTIPLY_ADD, op, operands, {})
    (found,), memory = torch_memory(lambda: TABLE.run(MULTIPLY_ADD, op, operands, {}))
    assert memory.peak_bytes <= found.numel() * found.element_size()
    assert found.is_contiguous()
    assert torch.equal(found, torch.einsum(spec, *operands))


@pytest.mark.parametrize(
    ("spec", "shapes", "strides"),
    [
        ("ikz,kjz->zij", [(2, 3, 50), (3, 4, 50)], None),  # the batch is not innermost in the result
        ("zik,kjz->ijz", [(50, 2, 3), (3, 4, 50)], None),  # nor in an operand
        ("ikz,kjz->ijz", [(2, 3, 50), (3, 4, 50)], (1, 2, 6)),  # as the operand lies in memory
        ("ikz,kjz->ijz", [(2, 3, 50), (3, 4, 50)], (300, 100, 2)),  # every second element
        ("ik,kjz->ijz", [(2, 3), (3, 4, 50)], None),  # no batch
        ("iz,jz->ijz", [(2, 50), (4, 50)], None),  # nothing is summed
        ("ikz,kjz->ijz", [(2, 65, 50), (65, 4, 50)], None),  # more terms than are worth a call each
        ("ikz,kjz->ijz", [(2, 0, 50), (0, 4, 50)], None),  # no term
    ],
)
def test_other_products_are_refused(spec, shapes, strides):
    op = Einsum(planner.resolve(spec, *shapes), "float32", (layout_of(shapes[0], strides), None) if strides else ())
    assert TABLE.rows[MULTIPLY_ADD].refusal(op, CPU)


def test_half_types_are_not_rounded_term_by_term():
    op = Einsum(planner.resolve("ikz,kjz->ijz", (2, 3, 50), (3, 4, 50)), "bfloat16", ())
    assert "rounded" in TABLE.rows[MULTIPLY_ADD].refusal(op, CPU)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("needs", [False, True])
def test_layers_of_fourier_neural_operators_add_up_terms(dtype, needs):
    """Their gradients too: of both operands the batch is innermost again."""
    spec, shapes = "bixy,ioxy->boxy", [(2, 6, 64, 64), (6, 6, 64, 64)]
    plan = planner.plan(spec, *(Operand(s, dtype, requires_grad=needs) for s in shapes), backend="torch", device=CPU)
    steps = [step for program in (plan.programs.forward, plan.programs.backward) if program for step in program.steps]
    assert [step.choice.lowering for step in steps] == [MULTIPLY_ADD] * (3 if needs else 1)
    operands = [integers(shape, dtype).requires_grad_(needs) for shape in shapes]
    found, expected = planner.contract(spec, *operands), torch.einsum(spec, *operands)
    assert torch.equal(found, expected)
    if needs:
        ways = [torch.autograd.grad(x.abs().square().sum(), operands) for x in (found, expected)]
        for ours, theirs in zip(*ways, strict=True):
            assert torch.equal(ours, theirs)


def test_small_batches_are_one_call_of_torch():
    plan = planner.plan("bixy,ioxy->boxy", (2, 8, 5, 5), (8, 8, 5, 5), backend="torch", device=CPU)
    assert [step.choice.lowering for step in plan.programs.forward.steps] == ["matmul"]


def test_members_of_a_family_are_run_by_the_functions_of_one():
    for size in (60, 64, 62):
        operands = [integers((2, 6, size, size)), integers((6, 6, size, size))]
        expected = torch.einsum("bixy,ioxy->boxy", *operands)
        assert torch.equal(planner.contract("bixy,ioxy->boxy", *operands), expected)


SPEC, SHAPES = "bixy,ioxy->boxy", [(2, 6, 64, 64), (6, 6, 64, 64)]


def dual(call, a, b):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(call(a, torch.autograd.forward_ad.make_dual(b, b + 1)))


def checkpointed(call, a, b):
    c = (a + 1).requires_grad_()
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    total = checkpoint(lambda a, b, c: (call(a, b) * c.sum()).sum(), a, b, c, use_reentrant=False, context_fn=contexts)
    return torch.autograd.grad(total, c)


def counted(call, a, b):
    with FlopCounterMode(display=False):
        return [call(a, b)]


def trained(call, a, b):
    x = a.clone().requires_grad_()
    return torch.autograd.grad(call(x, b).square().sum(), x)


CONTEXTS = {
    "forward mode": dual,
    "linearize": lambda call, a, b: [torch.func.linearize(lambda y: call(a, y), b)[1](b)],
    "jvp": lambda call, a, b: torch.func.jvp(call, (a, b), (a + 1, b)),
    "vmap": lambda call, a, b: [torch.func.vmap(call, (0, None))(torch.stack([a, a + 1]), b)],
    "grad": lambda call, a, b: [torch.func.grad(lambda x: call(x, b).square().sum())(a)],
    "a selective checkpoint": checkpointed,
    "a mode": counted,
    "autograd, not planned for": trained,
}


IN_PLACE = {MULTIPLY_ADD: (SPEC, SHAPES), SUM_SLICES: ("prqs,rs->pq", [(40, 32, 40, 32), (32, 32)])}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("way", ["contract", "einsum", "plan"])
@pytest.mark.parametrize("row", IN_PLACE)
def test_nothing_is_written_in_place_where_others_look(name, way, row):
    """A plan without gradients runs natively, also under transforms, modes and autograd."""
    spec, shapes = IN_PLACE[row]
    a, b = map(integers, shapes)
    plan = planner.plan(spec, a, b)
    assert [step.choice.lowering for step in plan.programs.forward.steps] == [row]
    call = plan if way == "plan" else partial(getattr(planner, way), spec)
    found, expected = (CONTEXTS[name](call, a, b) for call in (call, partial(torch.einsum, spec)))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("row", IN_PLACE)
def test_flops_of_products_by_element_are_counted(row):
    spec, shapes = IN_PLACE[row]
    operands = [*map(integers, shapes)]
    with FlopCounterMode(display=False) as counter:
        planner.contract(spec, *operands)
    assert counter.get_total_flops() == planner.plan(spec, *operands).cost.flops


@st.composite
def vector_products(draw):
    """The spec of a product of vectors, or of vectors and matrices, of 2^20 to 2^22 elements, and its sizes."""
    batch, free, summed = (draw(st.sampled_from(axes)) for axes in (["a", "ab", ""], ["", "c", "cd"], ["k", "kl"]))
    axes = draw(st.permutations([*batch, *free, *summed]))
    sizes = {axis: draw(st.sampled_from((2, 3, 5, 8, 16, 31, 64))) for axis in axes}
    last = draw(st.sampled_from(axes))
    sizes[last] = -(-draw(st.integers(2**20, 2**22)) // math.prod(n for axis, n in sizes.items() if axis != last))
    vector, out = ("".join(draw(st.permutations(x))) for x in ([*batch, *summed], [*batch, *free]))
    terms = draw(st.permutations(["".join(axes), vector]))
    return f"{','.join(terms)}->{out}", sizes


@settings(max_examples=examples(20, 1_000))
@example(("ai,ai->a", {"a": 4096, "i": 512}), "float32", (False, False))
@example(("ai,a->i", {"a": 3, "i": 2**20}), "float64", (True, False))
@given(vector_products(), st.sampled_from(DTYPES), st.tuples(st.booleans(), st.booleans()))
def test_slices_that_are_summed_are_the_product(product, dtype, strided):
    """In the memory of the result and of one slice."""
    spec, sizes = product
    terms = spec.split("->")[0].split(",")
    operands = [integers([sizes[e] for e in t], dtype, s and len(t) < 4) for t, s in zip(terms, strided, strict=True)]
    layouts = tuple(layout_of(x.shape, x.stride()) for x in operands)
    op = Einsum(planner.resolve(spec, *operands), dtype, layouts if any(layouts) else ())
    price = TABLE.price(SUM_SLICES, op, CPU)
    assume(price is not None)
    assert price.cost.scratch_bytes <= 2**22
    TABLE.run(SUM_SLICES, op, operands, {})
    (found,), memory = torch_memory(lambda: TABLE.run(SUM_SLICES, op, operands, {}))
    assert memory.peak_bytes <= price.cost.scratch_bytes + found.numel() * found.element_size()
    assert layout_of(found.shape, found.stride()) == (price.layouts[0] if price.layouts else None)
    assert torch.equal(found, torch.einsum(spec, *operands))


@pytest.mark.parametrize(
    ("spec", "shapes", "runs"),
    [
        ("zuw,zu->uw", [(16384, 16, 16), (16384, 16)], False),  # pieces of 128 bytes, 21 ms for 2 whole
        ("bdn,bd->dn", [(256, 1024, 16), (256, 1024)], True),  # of 8 KiB
        ("uw,zuw->zu", [(16, 16), (16384, 16, 16)], True),  # the first axis is cut: slices are whole
    ],
)
def test_slices_have_long_pieces(spec, shapes, runs):
    op = Einsum(planner.resolve(spec, *shapes), "float32")
    assert (TABLE.price(SUM_SLICES, op, CPU) is not None) == runs


def test_slices_of_nothing_are_summed_to_nothing():
    """The functions of a row run at any sizes."""
    op = Einsum(planner.resolve("prqs,rs->pq", (40, 32, 40, 32), (32, 32)), "float32")
    run = sliced_sum(op)
    for shape in ((0, 32, 7, 32), (7, 32, 0, 32), (1, 32, 7, 32), (41, 32, 7, 32)):
        a, b = integers(shape), integers((32, 32))
        assert torch.equal(run(a, b), torch.einsum("prqs,rs->pq", a, b))


@pytest.mark.parametrize(("run", "times"), [(16, 1), (32, 2), (64, 4), (128, 4)])
def test_strides_of_4_kib_take_longer_in_long_runs(run, times):
    def picoseconds(batch):
        plan = planner.plan("bnd,dbn->bnd", (batch, 16, run), (run, batch, 16), backend="torch", device="cpu")
        return TABLE.price("multiply", plan.steps[0].op, CPU).cost.picoseconds / (batch * 16 * run)

    strided = 1e12 * CPU.loop_seconds * 0.5 / 30
    assert picoseconds(64) - picoseconds(63) == pytest.approx((times - 1) * strided, abs=0.05 * strided)
