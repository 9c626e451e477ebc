"""Copies of operands of products in torch: which order they have, and how many are made."""

import math
from functools import partial
from random import Random

import pytest

torch = pytest.importorskip("torch")

from conftest import examples  # noqa: E402
from hypothesis import assume, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import planner  # noqa: E402
from planner.backends.torch import eager, ops  # noqa: E402
from planner.backends.torch.products import batches, copied, einsum  # noqa: E402
from planner.backends.torch.products.copied import COPY_FIRST, ONE_COPY, copying_ops  # noqa: E402
from planner.backends.torch.products.einsum import EINSUM  # noqa: E402
from planner.backends.torch.products.elementwise import SUM_SLICES  # noqa: E402
from planner.backends.torch.products.transposed import FOLLOWING  # noqa: E402
from planner.cost.device import CPU  # noqa: E402
from planner.cost.layout import layout_of  # noqa: E402
from planner.inspect.memory import torch_memory  # noqa: E402
from planner.program.calls import RangedIndices  # noqa: E402
from planner.program.forms import product_form  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.loops import plan_of_tree  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402
from planner.program.tree import keep_nothing  # noqa: E402
from planner.search.naive import SLACK_BYTES  # noqa: E402

TABLE = load_backend("torch").table


def integers(*shape, dtype=torch.float32):
    return torch.randint(-3, 4, shape).to(dtype)


@st.composite
def products(draw):
    """The spec of a product of matrices with groups of axes in any order, shapes, and the order in which each lies."""
    groups = (["", "b", "uv"], ["i", "ij"], ["l", "lm"], ["k", "kn"])
    batch, left, right, summed = (draw(st.sampled_from(some)) for some in groups)
    first, second, out = (
        "".join(draw(st.permutations(axes)))
        for axes in (batch + left + summed, batch + right + summed, batch + left + right)
    )
    sizes = {axis: draw(st.integers(1, 4)) for axis in "buvijlmkn"}
    lies = [draw(st.permutations(range(len(term)))) for term in (first, second, out)]
    return first, second, out, sizes, lies


def permuted_products():
    """The same, of axes of 2 to 16 elements, at least two of which are summed or in a batch."""
    sizes = st.fixed_dictionaries({axis: st.sampled_from((2, 3, 4, 8, 16)) for axis in "buvijlmkn"})
    found = st.tuples(products(), sizes).map(lambda drawn: (*drawn[0][:3], drawn[1], drawn[0][4]))
    return found.filter(lambda drawn: math.prod(drawn[3][axis] for axis in {*drawn[0], *drawn[1]}) <= 2**18)


def lying(term, sizes, order, dtype):
    """A tensor of a term whose dimensions lie in an order."""
    back = [order.index(d) for d in range(len(term))]
    return integers(*(sizes[term[d]] for d in order), dtype=dtype).permute(back)


@settings(max_examples=examples(75, 5_000))
@given(products(), st.sampled_from([torch.float32, torch.complex64, torch.int64]))
def test_products_and_both_gradients_are_those_of_einsum_however_arrays_lie(product, dtype):
    """The memory of the copies is what the rows say, and results lie as they say."""
    first, second, out, sizes, lies = product
    arrays = [lying(term, sizes, order, dtype) for term, order in zip((first, second, out), lies, strict=True)]
    layouts = [layout_of(x.shape, x.stride()) for x in arrays]
    spec = planner.resolve(f"{first},{second}->{out}", *arrays[:2])
    op = Einsum(spec, str(dtype).removeprefix("torch."), tuple(layouts[:2]) if any(layouts[:2]) else ())
    joint = op.joint_gradient(layouts[2])
    a, b, g = arrays
    wanted = {
        "matmul": (op, [a, b], [torch.einsum(f"{first},{second}->{out}", a, b)]),
        EINSUM: (op, [a, b], [torch.einsum(f"{first},{second}->{out}", a, b)]),
        ONE_COPY: (
            joint,
            [g, a, b],
            [torch.einsum(f"{out},{second}->{first}", g, b), torch.einsum(f"{first},{out}->{second}", a, g)],
        ),
    }
    for name, (step, inputs, expected) in wanted.items():
        price = TABLE.price(name, step, CPU)
        if price is None:
            continue
        TABLE.run(name, step, inputs, {})
        found, memory = torch_memory(lambda name=name, step=step, inputs=inputs: TABLE.run(name, step, inputs, {}))
        assert all(map(torch.equal, found, expected))
        assert memory.peak_bytes <= sum(x.numel() * x.element_size() for x in found) + price.cost.scratch_bytes
        said = price.layouts or (None,) * len(found)
        assert all(layout_of(x.shape, x.stride()) == layout for x, layout in zip(found, said, strict=True))


@settings(max_examples=examples(30, 2_000))
@given(permuted_products())
def test_plans_for_the_least_peak_need_no_more_than_einsum(product):
    """However two operands lie: einsum itself is an implementation."""
    first, second, out, sizes, lies = product
    a, b = (lying(term, sizes, lie, torch.float32) for term, lie in zip((first, second), lies[:2], strict=True))
    spec = f"{first},{second}->{out}"
    plan = planner.plan(spec, a, b, minimize="peak")
    programs = {"ours": partial(plan, a, b), "einsum": partial(torch.einsum, spec, a, b)}
    peaks, results = {}, []
    for name, call in programs.items():
        call()
        result, memory = torch_memory(call)
        peaks[name] = memory.peak_bytes
        results.append(result)
    assert torch.equal(*results)
    assert peaks["ours"] <= peaks["einsum"]
    if [step.choice.lowering for step in plan.steps] == [EINSUM]:  # the same factor comes first
        assert results[0].stride() == results[1].stride()


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("ac,cba->ab", [(100, 20), (20, 100, 100)]),
        ("cab,a,bca->c", [(20, 50, 50), (50,), (50, 20, 50)]),
        ("c,cab,ac,ac,bca->c", [(50,), (50, 100, 100), (100, 50), (100, 50), (100, 50, 100)]),
    ],
)
def test_a_plan_may_need_as_little_as_einsum(spec, shapes):
    """Plans of the stock rows alone took 17 to 100 times as much, for the least peak, under limits and by default."""
    operands = [integers(*shape) for shape in shapes]
    expected, memory = torch_memory(partial(torch.einsum, spec, *operands))
    limit = planner.plan(spec, *operands).naive_cost.peak_bytes
    for options in ({"minimize": "peak"}, {"memory_limit": limit}, {"optimize": "optimal"}):
        plan = planner.plan(spec, *operands, **options)
        assert "minimize" not in options or EINSUM in [step.choice.lowering for step in plan.steps]
        plan(*operands)
        found, measured = torch_memory(partial(plan, *operands))
        assert torch.equal(found, expected)
        most = SLACK_BYTES if "optimize" in options else 0
        assert measured.peak_bytes <= plan.cost.peak_bytes <= max(1.05 * memory.peak_bytes, most)


def test_sums_and_the_product_for_the_least_peak_are_one_call(monkeypatch):
    """Torch's einsum sums first as well."""
    spec, operands = "cdeb, bc -> db", (integers(100, 7, 3, 7), integers(7, 100))
    plan = planner.plan(spec, *operands, minimize="peak")
    assert [step.choice.lowering for step in plan.steps] == ["sum", EINSUM]
    calls, summed_pair = [], einsum.summed_pair
    monkeypatch.setattr(einsum, "summed_pair", lambda *given: calls.append(summed_pair(*given)) or calls[-1])
    plan(*operands)
    found, memory = torch_memory(partial(plan, *operands))
    assert calls[-1] is not None
    assert torch.equal(found, torch.einsum(spec, *operands))
    assert memory.peak_bytes <= plan.cost.peak_bytes


def test_plans_that_need_more_than_einsum_take_less_time_by_memory():
    """By default, of two and three operands without gradients. Of the first einsum copies many small matrices."""
    draw, above, lean = Random(5), 0, 0
    problems = [("vlbn,lbnd->vbnd", [(4, 4, 8, 64), (4, 8, 64, 32)])]
    for _ in range(40):
        sizes = {axis: draw.choice((2, 7, 20, 50)) for axis in "abcde"[: draw.randint(3, 5)]}
        terms = ["".join(draw.sample([*sizes], draw.randint(1, 3))) for _ in range(draw.choice((2, 2, 3)))]
        used = sorted({*"".join(terms)})
        spec = f"{','.join(terms)}->{''.join(draw.sample(used, min(len(used), draw.randint(0, 2))))}"
        problems.append((spec, [tuple(sizes[axis] for axis in term) for term in terms]))
    for spec, shapes in problems:
        operands = [integers(*shape) for shape in shapes]
        plan = planner.plan(spec, *operands, optimize="optimal")  # searched for itself, not as a family's member
        most = max(plan.naive_cost.peak_bytes, SLACK_BYTES)
        lean += "as lean as einsum" in plan.origin
        if plan.cost.peak_bytes > most:
            limited = planner.plan(spec, *operands, optimize="optimal", memory_limit=most).cost
            assert plan.cost.seconds * plan.cost.peak_bytes <= limited.seconds * limited.peak_bytes
            above += 1
        plan(*operands)
        found, measured = torch_memory(partial(plan, *operands))
        assert torch.equal(found, torch.einsum(spec, *operands))
        assert measured.peak_bytes <= max(plan.cost.peak_bytes, most)
    assert lean
    assert above


@pytest.mark.parametrize(
    ("spec", "shapes", "number", "copy"),
    [
        ("bhid,bhij->jhd", [(4, 3, 8, 5), (4, 3, 8, 6)], 1, [3, 4, 8, 6]),  # rows b, i of the second operand stay rows
        ("bijh,bimhd->bjmhd", [(2, 8, 5, 3), (2, 8, 4, 3, 7)], 0, [2, 3, 8, 5]),  # beside a batch that is innermost
        ("hbid,hbij->jhd", [(3, 4, 8, 5), (3, 4, 8, 6)], 0, None),  # no copy
        ("ik,kj->ij", [(3, 4), (4, 5)], 0, None),
        ("nijk,hkin->jinh", [(3, 4, 8, 5), (7, 5, 4, 3)], 1, [3, 4, 7, 5]),  # beside a batch that can be viewed as one
    ],
)
def test_copies_have_the_order_of_memory(spec, shapes, number, copy):
    op, copied = copies_of_product(spec, shapes, math.prod(shapes[number]))
    assert (copying_ops(op) is not ops.OPS) == (copy is not None)
    assert copied == ([] if copy is None else [copy])


@pytest.mark.parametrize(
    ("spec", "shapes", "by_einsum"),
    [
        ("hnjd,nkdj->nhk", [(4, 16, 64, 32), (16, 2, 32, 64)], False),
        ("kc,ikac->ia", [(32, 16), (16, 32, 16, 16)], False),
        ("hnjd,nkdj->nhk", [(4, 16, 16, 32), (16, 2, 32, 16)], True),  # few elements
        ("hnjd,nkdj->nhk", [(4, 16, 8, 32), (16, 32, 32, 8)], True),  # a short run
    ],
)
def test_large_operands_are_copied_in_their_order_in_place_of_einsum(spec, shapes, by_einsum):
    operands = [integers(*shape) for shape in shapes]
    planner.contract(spec, *operands)
    with torch.profiler.profile() as recorded:
        found = planner.contract(spec, *operands)
    assert ("aten::einsum" in [event.name for event in recorded.events()]) == by_einsum
    assert torch.equal(found, torch.einsum(spec, *operands))


@settings(max_examples=examples(30, 2_000))
@given(permuted_products())
def test_copies_in_an_operands_order_and_einsums_give_the_same_result(product):
    """Strides too: the calls are shared by the sizes of a family."""
    first, second, out, sizes, lies = product
    operands = [lying(term, sizes, lie, torch.float32) for term, lie in zip((first, second), lies[:2], strict=True)]
    results = []
    for least in (0, 2**60):
        planner.caches().clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copied, "_LEAST_COPIED", least)
            patch.setattr(copied, "_LEAST_RUN", 1)
            results.append(planner.contract(f"{first},{second}->{out}", *operands))
    assert torch.equal(*results)
    assert results[0].stride() == results[1].stride()


def test_copies_read_in_the_shortest_strides():
    """The rows k and j begin with the innermost axis in memory, and end with the outermost."""
    op, copied = copies_of_product("jnk,nh->kjh", [(64, 32, 16), (32, 64)], 64 * 32 * 16)
    assert copying_ops(op) is ops.OPS
    assert copied == [[16, 64, 32]]


def copies_of_product(spec, shapes, size, row="matmul", **arrays):
    """The product of two operands, and the shapes of the copies of so many elements that it makes."""
    operands = [integers(*shape) for shape in shapes]
    op = Einsum(planner.resolve(spec, *operands, **arrays), "float32")
    index = RangedIndices(False, {gather: arrays[gather.array] for gather in op.gathers})
    expected = planner.testing.reference(spec, *operands, **arrays)
    with torch.profiler.profile(record_shapes=True) as recorded:
        (found,) = TABLE.run(row, op, operands, index)
    assert torch.equal(found, torch.as_tensor(expected))
    copied = [event.input_shapes[0] for event in recorded.events() if event.name == "aten::copy_"]
    return op, [shape for shape in copied if math.prod(shape) == size]


def test_copies_of_rows_that_were_taken_have_their_order_too():
    """To copy 4 million floats `bthsd` as `bhdts` took 10.9 ms, as `bhtsd` 2.4, on one core of an AMD EPYC."""
    keys = torch.arange(32).view(2, 16)
    shapes = [(2, 3, 16), (33, 32, 3, 16)]
    _, copied = copies_of_product("bhd, p[bt]shd -> bhts", shapes, 32 * 32 * 3 * 16, "take, multiply, add", p=keys)
    assert copied == [[2, 3, 16, 32, 16]]
    operands = [integers(*shape) for shape in shapes]
    with torch.profiler.profile(record_shapes=True) as recorded:
        planner.contract("bhd, p[bt]shd -> bhts", *operands, p=keys)  # native calls
    assert [2, 3, 16, 16, 32] not in [
        event.input_shapes[0] for event in recorded.events() if event.name == "aten::copy_"
    ]


def test_small_matrices_are_copied_as_rows_for_their_vectors():
    """Of 65,536 matrices 15 x 4 the product takes 8.3 ms with the copy, and 11.8 as columns."""
    for spec, *shapes in (("cuji,cj->cui", (64, 3, 4, 5), (64, 4)), ("cj,cuji->cui", (64, 4), (64, 3, 4, 5))):
        _, copied = copies_of_product(spec, shapes, 64 * 3 * 4 * 5)
        assert copied == [[64, 3, 5, 4]]
    op = Einsum(planner.resolve("cuji,cj->cui", (65_536, 3, 4, 5), (65_536, 4)), "float32")
    rows, slices = (TABLE.price(name, op, CPU).cost.picoseconds for name in ("matmul", SUM_SLICES))
    assert rows < slices  # 8.3 and 12.7 ms on an AMD EPYC with AVX-512, torch 2.13, 2026-11-30


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("kab,kdc->acbd", {"k": 32, "a": 32, "b": 32, "d": 64, "c": 16}),
        ("kax,cbxk->axbc", {"k": 32, "a": 128, "x": 4, "b": 16, "c": 32}),
    ],
)
def test_gradients_of_repeated_output_gradients_are_planned(spec, sizes):
    """At the smallest sizes of their family no step computes both gradients, so the family is not settled."""
    first, second, out = spec.replace("->", ",").split(",")
    a, b = (integers(*(sizes[axis] for axis in term)).requires_grad_() for term in (first, second))
    shape = [sizes[axis] for axis in out]
    for repeated in range(len(shape)):
        gradient = integers(*(1 if d == repeated else n for d, n in enumerate(shape))).expand(shape)
        ways = [torch.autograd.grad(way(spec, a, b), (a, b), gradient) for way in (planner.contract, torch.einsum)]
        assert all(map(torch.equal, *ways))


@pytest.mark.parametrize("lies", ["row-major", "as the result", "otherwise"])
def test_an_output_gradient_is_copied_once(lies):
    """The plan expects one that lies as the result does. A row-major one would be copied by both gradients."""
    a, b = integers(32, 4, 256, 16).requires_grad_(), integers(128, 4, 16).requires_grad_()
    found = planner.contract("bhid,jhd->bhij", a, b)
    expected = torch.einsum("bhid,jhd->bhij", a, b)
    gradient = integers(*found.shape)
    if lies == "as the result":
        gradient = torch.empty_like(found).copy_(gradient)
    elif lies == "otherwise":
        gradient = gradient.mT.contiguous().mT
    assert not found.is_contiguous()
    with torch.profiler.profile(record_shapes=True) as recorded:
        ours = torch.autograd.grad(found, (a, b), gradient)
    large = [e for e in recorded.events() if e.name == "aten::copy_" and math.prod(e.input_shapes[0]) == found.numel()]
    least, most = {"row-major": (1, 1), "as the result": (0, 0), "otherwise": (0, 2)}[lies]
    assert least <= len(large) <= most
    assert all(map(torch.equal, ours, torch.autograd.grad(expected, (a, b), gradient)))


def test_an_output_gradient_is_copied_once_for_transposed_products_too():
    spec, shapes = "ijk,uwj->uiwk", [(3, 5, 7), (256, 128, 5)]
    a, b = (integers(*shape).requires_grad_() for shape in shapes)
    found, expected = planner.contract(spec, a, b), torch.einsum(spec, a, b)
    gradient = integers(*found.shape)
    with torch.profiler.profile(record_shapes=True) as recorded:
        ours = torch.autograd.grad(found, (a, b), gradient)
    large = [e for e in recorded.events() if e.name == "aten::copy_" and math.prod(e.input_shapes[0]) == found.numel()]
    assert len(large) <= 1
    assert all(map(torch.equal, ours, torch.autograd.grad(expected, (a, b), gradient)))


def test_a_product_follows_no_operand_if_the_next_step_would_copy_it():
    """The search takes results to be row-major, so plans are built with row-major results too."""
    operands = [planner.Operand(shape) for shape in [(16384, 16), (16, 16, 16), (16384, 16)]]
    plan = planner.plan("bi,kij,bj->bk", *operands, backend="torch", device="cpu")
    assert [step.choice.lowering for step in plan.steps] == ["multiply", "matmul"]
    assert plan.cost.copied_bytes == 0


@pytest.mark.parametrize(
    ("spec", "sizes", "lines"),
    [
        ("bdn,dn->bd", {"b": 256, "d": 1024, "n": 16}, True),  # runs of a line, 64 KiB apart
        ("mf,zimf->zmi", {"z": 16384, "i": 8, "m": 5, "f": 4}, False),  # runs are 80 bytes apart
        ("bdn,dn->bd", {"b": 256, "d": 1024, "n": 32}, False),  # runs of two lines
        ("bdn,dn->bd", {"b": 16, "d": 1024, "n": 16}, False),  # the cache holds the array
    ],
)
def test_lines_of_scattered_matrices_take_time(spec, sizes, lines):
    terms = spec.split("->")[0].split(",")
    op = Einsum(planner.resolve(spec, *[[sizes[axis] for axis in term] for term in terms]), "float32")
    seconds = batches.vector_seconds(product_form(op.spec), op, CPU)
    assert seconds == pytest.approx(max(op.spec.elements[:2]) / 16 * 12e-9 * lines)


def test_an_output_gradient_that_a_product_would_read_with_a_stride_is_copied_first():
    """The gradient of `iuv` repeats it along `u`."""
    a, b = integers(1024, 5).requires_grad_(), integers(5, 1024, 1024).requires_grad_()
    found, expected = planner.contract("ui,iuv->vi", a, b), torch.einsum("ui,iuv->vi", a, b)
    gradient = integers(*found.shape)
    with torch.profiler.profile(record_shapes=True) as recorded:
        ours = torch.autograd.grad(found, (a, b), gradient)
    copies = [math.prod(e.input_shapes[0]) for e in recorded.events() if e.name == "aten::copy_"]
    assert copies == [gradient.numel()]
    assert all(map(torch.equal, ours, torch.autograd.grad(expected, (a, b), gradient)))


@pytest.mark.parametrize("intel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize(
    ("spec", "shapes", "cut"),
    [
        ("bk,bk->b", [(600, 512), (600, 512)], True),
        ("bk,bk->b", [(6, 500), (6, 500)], False),  # not in parts of 128
        ("bk,bk->b", [(6, 256), (6, 256)], False),  # short
        ("bjk,bj->bk", [(6, 200, 3), (6, 200)], False),  # few neighbours
        ("bkj,bj->bk", [(6, 200, 3), (6, 3)], False),
        ("bjk,bj->bk", [(6, 32, 20), (6, 32)], False),
    ],
)
def test_batches_of_vectors_are_multiplied_as_the_processor_does_fastest(monkeypatch, intel, dtype, spec, shapes, cut):
    monkeypatch.setattr(batches, "is_intel", lambda: intel)
    monkeypatch.setattr(eager, "is_intel", lambda: intel)
    planner.caches().clear()
    for grad in (False, dtype.is_floating_point):
        operands = [integers(*shape, dtype=dtype).requires_grad_(grad) for shape in shapes]
        op = Einsum(planner.resolve(spec, *operands), str(dtype).removeprefix("torch."))
        with torch.profiler.profile(record_shapes=True) as recorded, torch.no_grad():
            (found,) = TABLE.run("matmul", op, operands, {})
        expected = torch.einsum(spec, *operands)
        assert torch.equal(found, expected)
        shapes_of = [event.input_shapes[0] for event in recorded.events() if event.name == "aten::bmm"]
        assert (shapes_of == [[2400, 1, 128]]) == (cut and intel and dtype.is_floating_point)
        second = spec != "bk,bk->b" and min(shapes[0][1:]) <= 8 and intel and dtype.is_floating_point
        assert (shapes_of[0][1] != 1) == second
        with torch.profiler.profile(record_shapes=True) as recorded:
            result = planner.contract(spec, *operands)
        assert torch.equal(result, expected)
        if not grad:
            called = [event.input_shapes[0] for event in recorded.events() if event.name == "aten::bmm"]
            assert ([2400, 1, 128] in called) == (cut and intel and dtype.is_floating_point)
        if grad:
            ways = [torch.autograd.grad((x * x).sum(), operands) for x in (result, expected)]
            assert all(map(torch.equal, *ways))
    planner.caches().clear()


@pytest.mark.parametrize(
    ("row", "spec", "shapes", "indices"),
    [
        ("matmul", "bk,bk->b", [(600, 512), (600, 512)], {}),
        ("batched matmul, then sum", "bhl,bhl->h", [(64, 16, 1024), (64, 16, 1024)], {}),
        ("take, multiply, add", "nk, q[n]k -> n", [(600, 512), (40, 512)], {"q": (600,)}),
    ],
)
def test_the_parts_of_dot_products_are_counted(monkeypatch, row, spec, shapes, indices):
    monkeypatch.setattr(batches, "is_intel", lambda: True)
    operands, arrays = (
        [integers(*shape) for shape in shapes],
        {n: torch.zeros(s, dtype=int) for n, s in indices.items()},
    )
    resolved = planner.resolve(spec, *operands, **arrays)
    op, index = Einsum(resolved, "float32"), RangedIndices(False)
    index.update({gather: arrays[gather.array] for gather in resolved.gathers})
    price = TABLE.price(row, op, CPU)
    TABLE.run(row, op, operands, index)
    (found,), memory = torch_memory(lambda: TABLE.run(row, op, operands, index))
    assert memory.peak_bytes <= 4 * found.numel() + price.cost.scratch_bytes


@st.composite
def products_by_element(draw):
    """The spec of a product by element, the sizes of its axes, and the order in which each operand lies.

    In the first operand the last axis of the output is not innermost in memory.
    """
    out = draw(st.permutations("abcd"[: draw(st.integers(3, 4))]))
    others = draw(st.lists(st.sampled_from(out[:-1]), unique=True, min_size=1, max_size=len(out) - 2))
    first = draw(st.permutations([*others, out[-1]]))
    second = [axis for axis in draw(st.permutations(out)) if axis not in first or draw(st.booleans())]
    sizes = {axis: draw(st.sampled_from((2, 5, 8, 9))) for axis in out} | {draw(st.sampled_from(out)): 1}
    terms = ["".join(term) for term in (first, second, out)]
    inner = draw(st.sampled_from(others))
    lies = draw(st.permutations([d for d, axis in enumerate(first) if axis != inner])) + [first.index(inner)]
    return *terms, sizes, [lies, draw(st.permutations(range(len(second))))]


@settings(max_examples=examples(30, 2_000))
@example(("ui", "vi", "iuv", {"u": 4, "v": 5, "i": 2}, [(0, 1), (0, 1)]), COPY_FIRST, torch.float32)
@given(
    products_by_element(),
    st.sampled_from([COPY_FIRST, FOLLOWING]),
    st.sampled_from([torch.float32, torch.complex64, torch.int64, torch.bool]),
)
def test_operands_that_are_copied_or_followed_give_the_product(product, row, dtype):
    """In the memory of copies and of the result, which lies as the row says."""
    first, second, out, sizes, lies = product
    a, b = (lying(term, sizes, order, dtype) for term, order in zip((first, second), lies, strict=True))
    layouts = tuple(layout_of(x.shape, x.stride()) for x in (a, b))
    spec = planner.resolve(f"{first},{second}->{out}", a, b)
    op = Einsum(spec, str(dtype).removeprefix("torch."), layouts if any(layouts) else ())
    price = TABLE.price(row, op, CPU)
    assume(price is not None)
    TABLE.run(row, op, (a, b), {})
    (found,), memory = torch_memory(lambda: TABLE.run(row, op, (a, b), {}))
    assert memory.peak_bytes <= price.cost.scratch_bytes + found.numel() * found.element_size()
    assert layout_of(found.shape, found.stride()) == (price.layouts[0] if price.layouts else None)
    operands = (a.long(), b.long()) if dtype == torch.bool else (a, b)
    assert torch.equal(found, torch.einsum(f"{first},{second}->{out}", *operands).to(dtype))


OUTER, OUTER_SHAPES = "u,ijk,zvj->zuivk", [(8,), (3, 3, 5), (512, 8, 3)]


def test_a_transposed_value_is_followed_where_no_gradient_is_asked_for():
    operands = [integers(*shape) for shape in OUTER_SHAPES]
    plan = planner.plan(OUTER, *operands)
    assert plan.steps[-1].choice.lowering == FOLLOWING
    for call in (planner.contract, planner.einsum, partial(planner.contract, memory_limit="1 GB")):
        assert torch.equal(call(OUTER, *operands), torch.einsum(OUTER, *operands))
    assert not planner.contract(OUTER, *operands).is_contiguous()


def test_a_transposed_value_is_copied_before_a_product_that_repeats_it():
    """The gradient of the result, as a rule, is row-major: with gradients no order is followed."""
    u, x, y = (integers(*shape).requires_grad_() for shape in OUTER_SHAPES)
    plan = planner.plan(OUTER, u, x, y)
    assert COPY_FIRST in [step.choice.lowering for step in plan.steps]
    assert any(f"{FOLLOWING}: refused, plans with gradients" in str(v) for step in plan.implementations() for v in step)
    found, expected = (call(OUTER, u, x, y) for call in (planner.contract, torch.einsum))
    assert torch.equal(found, expected)
    weights = integers(*found.shape)
    ours, theirs = (torch.autograd.grad((result * weights).sum(), (u, x, y)) for result in (found, expected))
    assert all(map(torch.equal, ours, theirs))


def test_no_plan_with_gradients_follows_an_operand():
    """Nor does one that computes its values again, or whose sizes are others."""
    operands = [planner.Operand(shape, requires_grad=True) for shape in OUTER_SHAPES]
    plan = planner.plan(OUTER, *operands, backend="torch")
    again = plan_of_tree(plan, plan.contraction, keep_nothing(plan.tree), {}, "")
    assert FOLLOWING not in [step.choice.lowering for step in again.steps]
    for size in (450, 500):
        u, x, y = (integers(*shape).requires_grad_() for shape in ((8,), (3, 3, 5), (size, 8, 3)))
        found, expected = (call(OUTER, u, x, y) for call in (planner.contract, torch.einsum))
        assert found.is_contiguous()
        assert torch.equal(found, expected)


def test_no_plan_with_index_arrays_follows_an_operand():
    """Sums by segments take longer then."""
    plan = planner.plan("ex, ec -> d[e]xc", (2048, 3), (2048, 16), d=(2048,), sizes={"d": 2048}, backend="torch")
    assert [step.choice.lowering for step in plan.steps] == ["multiply", "segment sum"]


@pytest.mark.parametrize(
    ("spec", "shapes", "nanoseconds"),
    [
        ("ai,ai->a", [(4096, 512)] * 2, 1.35 * 2**21),  # terms of long dot products, less what reading takes
        ("ai,ai->a", [(4096, 256)] * 2, 0),
        ("bdn,dn->bd", [(256, 1024, 16), (1024, 16)], 12 * 2**18),  # runs of 16 floats of matrices that lie apart
        ("bdn,bd->dn", [(256, 1024, 16), (256, 1024)], 12 * 2**18),
        ("dbn,dn->bd", [(1024, 256, 16), (1024, 16)], 0),  # each matrix lies in one piece
        ("bdn,dn->bd", [(256, 256, 64), (256, 64)], 0),
        ("bdn,dn->bd", [(16, 1024, 16), (1024, 16)], 0),  # in the cache
        ("bn,dn->bd", [(256, 16), (1024, 16)], 0),
    ],
)
def test_what_mkl_takes_long_for_is_priced(spec, shapes, nanoseconds):
    op = Einsum(planner.resolve(spec, *shapes), "float32")
    moving = CPU.moving_seconds(op.bytes_touched()) * (op.spec.output == ("a",))
    expected = max(0, nanoseconds * 1e-9 - moving) if nanoseconds else 0
    assert batches.vector_seconds(product_form(op.spec), op, CPU) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("bdmj,mbij->jdi", ((16, 16, 4, 16), (4, 16, 128, 16))),  # einsum copies the second as a whole
        ("bdmj,mbij->jdi", ((1, 16, 4, 16), (4, 1, 128, 16))),  # an axis of size 1
        ("hdm,mnjd->hjdn", ((2, 16, 16), (16, 32, 4, 16))),  # the result lies as einsum's
        ("jinh,hkin->nijk", ((8, 16, 8, 16), (16, 16, 16, 8))),
        ("nkbi,imkn->nkmb", ((32, 8, 16, 16), (16, 8, 8, 32))),
        ("jdm,jim->jdi", ((8, 16, 32), (8, 64, 32))),  # no copies
    ],
)
def test_autograd_keeps_the_copies_of_einsum_and_no_step_makes_them_again(spec, shapes):
    operands = [integers(*shape).requires_grad_() for shape in shapes]
    plan = planner.plan(spec, *operands)
    plan(*operands)
    found, held = torch_memory(lambda: plan(*operands))
    expected, kept = torch_memory(lambda: torch.einsum(spec, *operands))
    assert found.stride() == expected.stride()
    assert plan.cost.retained_bytes == held.retained_bytes == kept.retained_bytes == plan.naive_cost.retained_bytes
    cotangent = integers(*expected.shape)
    ours, theirs = (torch.autograd.grad(x, operands, cotangent) for x in (found, expected))
    assert torch.equal(found, expected)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("shape", "pool", "rows", "by_autograd"),
    [
        ((4, 2, 2, 16), (4, 4, 128, 2), 2, True),  # the copy has 1,024 bytes
        ((3, 16, 64, 3), (8, 3, 8, 64), 16, False),  # it would have 36,864
    ],
)
def test_an_extra_copy_that_autograd_keeps_is_small(shape, pool, rows, by_autograd):
    """Einsum copies the rows that are taken instead, of which a copy takes the place."""
    spec, index = "nbhd,q[b]nih->nbdi", torch.arange(rows) % pool[0]
    operands = [integers(*shape).requires_grad_(), integers(*pool).requires_grad_()]
    plan = planner.plan(spec, *operands, q=index)
    plan(*operands, q=index)
    found, held = torch_memory(lambda: plan(*operands, q=index))
    assert plan.cost.retained_bytes == held.retained_bytes
    assert plan.programs.by_autograd == by_autograd
    assert held.retained_bytes <= 4 * rows * math.prod(pool[1:]) + 16_384
    assert torch.equal(found, torch.einsum("nbhd,bnih->nbdi", operands[0], operands[1][index]))


@settings(max_examples=examples(30, 2_000))
@example(("ca", "abd", "dcb", {"a": 10, "b": 16, "c": 2, "d": 16}, [(0, 1), (0, 2, 1), (0, 1, 2)]))
@example(
    (
        "efbc",
        "fdac",
        "bdae",
        dict(zip("abcdef", (4, 16, 16, 7, 7, 16), strict=True)),
        [(3, 0, 1, 2)] + [(0, 1, 2, 3)] * 2,
    )
)
@example(("ba", "bca", "c", {"a": 16, "b": 4, "c": 16}, [(0, 1), (2, 0, 1), (0,)]))
@given(permuted_products())
def test_products_keep_no_more_than_einsum_however_operands_lie(product):
    """No axis has size 1."""
    first, second, out, sizes, lies = product
    operands = [lying(term, sizes, order, torch.float32) for term, order in ((first, lies[0]), (second, lies[1]))]
    operands = [x.requires_grad_() for x in operands]
    spec = f"{first},{second}->{out}"
    planner.einsum(spec, *operands)
    found, held = torch_memory(lambda: planner.einsum(spec, *operands))
    expected, kept = torch_memory(lambda: torch.einsum(spec, *operands))
    assert torch.equal(found, expected)
    assert held.retained_bytes <= kept.retained_bytes
    plan = planner.plan(spec, *operands)
    assert plan.cost.retained_bytes == torch_memory(lambda: plan(*operands))[1].retained_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_einsum_is_no_row_of_plans_with_gradients_or_of_axes_of_size_1(dtype):
    spec, a, b = "ac, cba -> ab", integers(100, 20, dtype=dtype), integers(20, 100, 100, dtype=dtype)
    assert planner.plan(spec, a, b, minimize="peak").steps[0].choice.lowering == EINSUM
    single = planner.plan("aec, cba -> aeb", a[:, None], b, minimize="peak")
    assert EINSUM not in [step.choice.lowering for step in single.steps]
    if dtype.is_floating_point:
        trained = planner.plan(spec, a.requires_grad_(), b, minimize="peak")
        assert EINSUM not in [step.choice.lowering for step in trained.steps]


def test_einsum_is_priced_by_the_matrices_that_it_copies():
    """100 matrices of 100 x 20; torch multiplies matrices of 4 x 4 as they lie."""
    for sizes, microseconds in (({"a": 100, "b": 100, "c": 20}, 500), ({"a": 100, "b": 4, "c": 4}, 0)):
        shapes = [tuple(sizes[axis] for axis in term) for term in ("ac", "cba")]
        op = Einsum(planner.resolve("ac, cba -> ab", *shapes), "float32")
        einsum, stock = (TABLE.price(name, op, CPU).cost for name in (EINSUM, "matmul"))
        assert einsum.picoseconds - stock.picoseconds == 10**6 * microseconds
        assert einsum.scratch_bytes < stock.scratch_bytes
