"""`planner.einsum` gives what the einsum of the framework gives: values, dtype, kind of result, views."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings

import numpy as np
import opt_einsum
import pytest

import planner
from planner.dropin import torch_rules

RNG = random.Random(7)


@pytest.fixture(autouse=True)
def same_examples(request):
    """Each test draws the same examples, whatever ran before it."""
    RNG.seed(request.node.name)


def random_specs(count, most_terms=3, sizes_from=(1, 2, 3, 4)):
    """Einsum strings over few letters, and a shape for each term."""
    for _ in range(count):
        letters = RNG.sample("abcdefXY", RNG.randint(3, 5))
        sizes = {letter: RNG.choice(sizes_from) for letter in letters}
        terms = ["".join(RNG.sample(letters, RNG.randint(1, 3))) for _ in range(RNG.randint(1, most_terms))]
        present = sorted(set("".join(terms)))
        output = "->" + "".join(RNG.sample(present, RNG.randint(0, len(present)))) if RNG.random() < 0.7 else ""
        yield ",".join(terms) + output, [tuple(sizes[letter] for letter in term) for term in terms]


def integers(shape, dtype):
    return np.array([RNG.randint(-3, 3) for _ in range(int(np.prod(shape)))], "int64").reshape(shape).astype(dtype)


SPECS = list(random_specs(60))


def dotted(spec):
    """The spec with an ellipsis somewhere in one or more of its terms."""
    inputs, arrow, output = spec.partition("->")
    terms = inputs.split(",")
    for number in {RNG.randrange(len(terms)) for _ in terms}:
        at = RNG.randint(0, len(terms[number]))
        terms[number] = f"{terms[number][:at]}...{terms[number][at:]}"
    return ",".join(terms) + arrow + output


# -- torch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int8", "int64", "uint8", "bool"])
def test_torch(torch, dtype):
    refused = 0
    for spec, shapes in SPECS:
        operands = [torch.from_numpy(integers(shape, dtype)) for shape in shapes]
        try:
            expected = torch.einsum(spec, *operands)
        except (RuntimeError, NotImplementedError):  # products of booleans, sums of some integers
            refused += 1
            continue
        got = planner.einsum(spec, *operands)
        assert got.dtype == expected.dtype, spec
        assert torch.equal(got, expected), spec
        assert got.is_contiguous() or not expected.is_contiguous(), spec
    assert refused < len(SPECS) / 2


@pytest.mark.parametrize("profiled", [False, True])
def test_torch_repeats_calls_alike(torch, profiled):
    """The first call plans, later ones run what it found: of operands in any order, with axes of size 1, bit by bit."""
    for spec, shapes in random_specs(150, 2, (1, 2, 3, 5)):
        if len(shapes) < 2:
            continue
        operands = [strided(torch, shape, RNG.choice(("row-major", "permuted"))).detach() for shape in shapes]
        expected = torch.einsum(spec, *operands)
        first, again = (planner.einsum(spec, *operands) for _ in range(2))
        with torch.autograd.profiler.profile() if profiled else contextlib.nullcontext():
            last = planner.einsum(spec, *operands)
        torch.testing.assert_close(first, expected)
        assert first.is_contiguous() or not expected.is_contiguous(), spec
        assert last.is_contiguous() or not first.is_contiguous(), spec
        assert again.stride() == first.stride(), spec
        assert torch.equal(again, first), spec


def test_torch_call_forms(torch):
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(3, 4)
    calls = [
        ("ij,jk", a, b), ("ij,jk->ik", [a, b]), ("ij,jk->ki", (a, b)), ("i...,...k->...ki", a, b), ("...j->...", a),
        (a, [0, 1], b, [1, 2]), (a, [0, 1], b, [1, 2], [2, 0]), (a, [..., 1], [1]), (a, (30, 5)), (" i j -> j i", a),
        ("...ij->ij", a[None]), ("ii->i", b[:, :3]), ("ii", [b[:, :3]]), ("bc,Ab", b, a),
    ]  # fmt: skip
    for call in calls:
        expected = torch.einsum(*call)
        assert torch.equal(planner.einsum(*call), expected), call
    with pytest.raises(planner.PlannerTypeError, match="'out' is not an option"):
        planner.einsum("ij,jk", a, b, out=a)
    with pytest.raises(planner.PlannerError, match="numpy array"):
        planner.einsum("ij,jk", a, b.numpy())


@pytest.mark.parametrize("kinds", [("bool", "bool"), ("float32", "int32"), ("int32", "int64")])
def test_torch_multiplies_booleans_and_two_dtypes_in_any_order_of_axes(torch, kinds):
    """`torch.einsum` refuses these, so it is not called for a result in another order either."""
    a, b = (torch.ones(2, 3, 3, dtype=getattr(torch, kind)) for kind in kinds)
    for spec in ("bij,bjk->bik", "bij,bjk->kbi"):
        for _ in range(2):
            result = planner.einsum(spec, a, b)
            assert result.dtype == torch.promote_types(a.dtype, b.dtype)
            assert bool((result == (1 if result.dtype == torch.bool else 3)).all())


@pytest.mark.parametrize("trains", [False, True])
def test_torch_takes_what_its_own_einsum_refuses(torch, trains):
    """Diagonals to write on, and letters beyond ASCII."""
    specs = [
        ("ij,jk->iki", [(2, 3), (3, 2)]), ("ij,ij->iji", [(2, 3), (2, 3)]), ("a,ab,b->aba", [(2,), (2, 3), (3,)]),
        ("ij->iji", [(2, 3)]), ("éj,jk->ké", [(2, 3), (3, 4)]), ("é,é->é", [(2,), (2,)]),
    ]  # fmt: skip
    for spec, shapes in specs:
        for kinds in (("float32", "float32"), ("float64", "float32")):
            operands = [
                torch.from_numpy(integers(s, kinds[n == 0])).requires_grad_(trains) for n, s in enumerate(shapes)
            ]
            expected = planner.contract(spec, *operands)
            for _ in ("cold", "warm"):
                assert torch.equal(planner.einsum(spec, *operands), expected), spec


def test_torch_views_are_views(torch):
    a = torch.zeros(3, 3)
    planner.einsum("ij->ji", a)[0, 1] = 1.0
    planner.einsum("ii->i", a).fill_(2.0)
    assert torch.equal(a, torch.tensor([[2.0, 0, 0], [1, 2, 0], [0, 0, 2]]))


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_torch_sums_no_axis_of_an_empty_ellipsis(torch, dtype):
    for spec, shapes in random_specs(150, 2, (2, 3, 4)):
        spec, operands = dotted(spec), [torch.from_numpy(integers(shape, dtype)) for shape in shapes]
        try:
            expected = torch.einsum(spec, *operands)
        except RuntimeError:  # it multiplies no integers of two widths
            continue
        got = planner.einsum(spec, *operands)
        assert got.dtype == expected.dtype, spec
        assert torch.equal(got, expected), spec
        assert got._is_view() or not expected._is_view() or len(shapes) > 1, spec
        assert got.is_contiguous() or not expected.is_contiguous(), spec


def strided(torch, shape, kind):
    """A tensor that a computation left: row-major, permuted, or a permuted part of a larger array."""
    order = RNG.sample(range(len(shape)), len(shape)) if kind != "row-major" else list(range(len(shape)))
    whole = [shape[d] for d in order]
    x = torch.randn([2, *whole] if kind == "part" else whole)
    x.requires_grad_(RNG.random() < 0.8)
    x = 1.0 * x
    return (x[0] if kind == "part" else x).permute([order.index(d) for d in range(len(shape))])


def with_diagonals_and_ones(problem):
    """The spec with one axis of a term written once more, and some dimensions of operands of size 1."""
    spec, shapes = problem
    inputs, arrow, output = spec.partition("->")
    terms, number = inputs.split(","), RNG.randrange(len(shapes))
    at, to = RNG.randrange(len(terms[number])), RNG.randint(0, len(terms[number]))
    shapes = [tuple(1 if RNG.random() < 0.1 else n for n in shape) for shape in shapes]
    terms[number] = terms[number][:to] + terms[number][at] + terms[number][to:]
    shapes[number] = (*shapes[number][:to], shapes[number][at], *shapes[number][to:])
    return ",".join(terms) + arrow + output, shapes


def kept_bytes(torch, call, operands):
    """The bytes that a call keeps alive for its backward pass, those of its operands counted."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call(*operands)
    kept.pop(result.untyped_storage().data_ptr(), None)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(("most_terms", "kinds"), [(2, ("row-major", "permuted", "part")), (3, ("row-major",))])
def test_torch_keeps_no_more_for_gradients(torch, most_terms, kinds):
    """What a plan keeps of operands counts too: here nobody else holds them."""
    kept = 0
    specs = list(random_specs(150, most_terms, (2, 3, 4, 8)))
    if most_terms == 2:
        specs += map(with_diagonals_and_ones, random_specs(150, 2, (2, 3, 4, 8)))
    for spec, shapes in specs:
        if len(shapes) < 2 or "->" in spec and len(set(spec.split("->")[1])) < len(spec.split("->")[1]):
            continue
        operands = [strided(torch, shape, RNG.choice(kinds)) for shape in shapes]
        ours = max(kept_bytes(torch, functools.partial(planner.einsum, spec), operands) for _ in ("cold", "warm"))
        theirs = kept_bytes(torch, functools.partial(torch.einsum, spec), operands)
        assert ours <= theirs, (spec, shapes, [x.stride() for x in operands], [x.requires_grad for x in operands])
        kept += theirs
    assert kept > 2_000


@pytest.mark.parametrize(
    ("spec", "shapes", "dtypes"),
    [
        ("abc, abd -> adc", [(6, 1, 8), (6, 1, 5)], ["bfloat16", "float32"]),  # torch multiplies by element
        ("d, acb, bc -> adc", [(16,), (8, 24, 8), (8, 24)], ["float32"] * 3),  # so is the last step of these
        ("a, bca, c -> a", [(8,), (8, 8, 8), (8,)], ["float32"] * 3),
        ("a, cb, b, bd -> dac", [(24,), (8, 8), (8,), (8, 8)], ["float32"] * 4),
    ],
)
def test_torch_decides_under_autocast_which_steps_are_in_the_half_type(torch, spec, shapes, dtypes):
    """Operands have fractions that bfloat16 rounds. What is kept is no more, and results and gradients are the same."""
    generator = torch.Generator().manual_seed(0)
    operands = [
        torch.randint(1, 999, shape, generator=generator).div(256).to(getattr(torch, dtype)).requires_grad_()
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    with torch.autocast("cpu", torch.bfloat16):
        results = [einsum(spec, *operands) for einsum in (planner.einsum, torch.einsum)]
        kept = [
            kept_bytes(torch, functools.partial(einsum, spec), operands) for einsum in (planner.einsum, torch.einsum)
        ]
    assert kept[0] <= kept[1]
    assert results[0].dtype == results[1].dtype
    assert torch.equal(*results)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), operands) for x in results), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=0)


def test_torch_says_which_parts_it_copies(torch):
    """`_copied_order` predicts what `torch.einsum` keeps of an operand: a copy, or the operand."""
    from planner.dropin.torch_rules import _copied_order

    copied = 0
    for _ in range(300):
        axes = RNG.sample("abcde", RNG.randint(3, 5))
        terms = ["".join(RNG.sample(axes, RNG.randint(1, len(axes)))) for _ in range(2)]
        both = sorted(set(terms[0]) | set(terms[1]))
        output = "".join(RNG.sample(both, RNG.randint(0, len(both))))
        if not set(terms[0]) & set(terms[1]) - set(output):
            continue
        sizes = {axis: RNG.choice([1, 2, 3, 4]) for axis in both}
        spec = f"{terms[0]},{terms[1]}->{output}"
        xs = [strided(torch, [sizes[axis] for axis in term], "part").detach() for term in terms]
        for number in range(2):
            x, other = xs[number], xs[1 - number].clone().requires_grad_()
            says = _copied_order(spec, tuple(x.shape), tuple(other.shape), x.stride(), number)
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(lambda y, kept=kept: kept.append(y) or y, lambda y: y):
                torch.einsum(spec, *([x, other] if number == 0 else [other, x]))
            pinned = any(y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for y in kept)
            whole = any(y.numel() == x.numel() for y in kept)
            assert not (says and pinned), (spec, sizes)
            assert says or pinned or not whole, (spec, sizes)
            copied += says is not None
    assert copied > 20


def test_a_part_of_an_array_is_not_taken_for_a_whole_one(torch):
    """Calls with equal shapes and strides share what einsum remembers, but a kept part keeps its whole array."""
    spec, other = "bhid,bhjd->bhij", torch.ones(2, 8, 32, 64).requires_grad_()
    part = torch.ones(2, 64, 16, 64)[:, :, 8:].transpose(1, 2)
    whole = torch.empty_strided(part.shape, part.stride()).fill_(1.0)
    planner.caches().clear()
    for _ in ("cold", "warm"):
        planner.einsum(spec, whole, other)
    assert torch_rules._ALIKE
    ours, theirs = (
        kept_bytes(torch, functools.partial(f, spec), (part, other)) for f in (planner.einsum, torch.einsum)
    )
    assert ours <= theirs
    planner.caches().clear()
    assert not torch_rules._ALIKE


def test_the_only_operand_with_a_gradient_is_not_kept(torch):
    """The gradient in an operand reads the others alone. Further derivatives are zero or read these too."""
    a, b = torch.randn(4, 6, 8).transpose(0, 1), torch.randn(4, 8, 5)

    def call(x, y):
        return planner.contract("hid,hdj->hij", x, y, minimize="retained")

    for left, right in ((True, False), (False, True)):
        x, y = 1.0 * a.clone().requires_grad_(left), 1.0 * b.clone().requires_grad_(right)
        x, y = x.transpose(0, 1), y
        kept = kept_bytes(torch, lambda *xs: planner.einsum("hid,hdj->ihj", *xs), (x, y))
        assert kept == 4 * (y if left else x).numel()
        wanted = x if left else y
        (gradient,) = torch.autograd.grad(call(x, y).square().sum(), wanted, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), wanted)
        (expected,) = torch.autograd.grad((x @ y).square().sum(), wanted, create_graph=True)
        (expected_second,) = torch.autograd.grad(expected.sum(), wanted)
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(second, expected_second)


# -- NumPy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128", "int8", "uint16", "bool"])
@pytest.mark.parametrize("optimize", [False, True, "greedy"])
def test_numpy(dtype, optimize):
    for spec, shapes in SPECS:
        operands = [integers(shape, dtype) for shape in shapes]
        expected, got = (
            np.einsum(spec, *operands, optimize=optimize),
            planner.einsum(spec, *operands, optimize=optimize),
        )
        assert type(got) is type(expected) or optimize, spec  # with a path NumPy's results may have no dimensions
        assert got.dtype == expected.dtype, spec
        assert np.array_equal(got, expected), spec


def test_numpy_call_forms():
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12).reshape(3, 4)
    calls = [
        ("ij,jk", a, b), ("i,i", [1, 2, 3], (4, 5, 6)), (",", 2, 3.5), ("ij->j", [[1, 2], [3, 4]]), ("i->", [1, 2]),
        (a, [0, 1], b, [1, 2], [2, 0]), (a, [..., 1], [..., 1]), ("i...,...k", a, b), ("ij->j", [b[0], b[1]]),
        ("ij,jk", a.tolist(), b), (",ij", np.float32(2), b),
    ]  # fmt: skip
    for call in calls:
        expected, got = np.einsum(*call), planner.einsum(*call)
        assert (type(got), got.dtype) == (type(expected), expected.dtype), call
        assert np.array_equal(got, expected), call
    for optimize in (["einsum_path", (0, 1)], ("greedy", 1000), ("optimal",), None):
        assert np.array_equal(planner.einsum("ij,jk", a, b, optimize=optimize), a @ b)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "f4"},
        {"dtype": "f4", "casting": "same_kind", "order": "C"},
        {"dtype": "c16", "order": "C"},
        {"dtype": int, "casting": "unsafe", "order": "A"},
        {"dtype": np.float64, "order": "F"},
        {"order": "C"},
        {"order": "A"},
        {"casting": "no", "order": "C"},
    ],
)
def test_numpy_dtype_casting_and_order(options):
    a, b = np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(12.0).reshape(3, 4))
    for spec, operands in (
        ("ij,jk->ik", (a, b)),
        ("ij->ji", (a,)),
        ("ij->i", (a,)),
        ("ij,jk->ik", (np.asfortranarray(a), b)),
    ):
        try:
            expected = np.einsum(spec, *operands, **options)
        except TypeError:
            with pytest.raises(TypeError, match="casting"):
                planner.einsum(spec, *operands, **options)
            continue
        got = planner.einsum(spec, *operands, **options)
        assert (got.dtype, got.flags.c_contiguous) == (expected.dtype, expected.flags.c_contiguous)
        assert np.array_equal(got, expected)


def test_contract_returns_an_array_whatever_step_comes_last():
    """NumPy's own products and takes return scalars if nothing has dimensions, and so does `einsum`, as NumPy's own."""
    a, one = np.ones(3), np.array(2.0)
    for spec, operands in (("i,j->", (a, a)), (",", (one, one)), (",,", (one,) * 3), ("i,i->", (a, a)), ("i->", (a,))):
        for _ in ("cold", "warm"):
            assert type(planner.contract(spec, *operands)) is np.ndarray, spec
            assert type(planner.einsum(spec, *operands)) is np.float64, spec
    assert type(planner.contract("q[] ->", a, q=np.array(1))) is np.ndarray


def test_numpy_out():
    a = np.arange(6.0).reshape(2, 3)
    for dtype, casting in (("f8", "safe"), ("c16", "safe"), ("f4", "same_kind"), ("f4", "safe"), ("i8", "unsafe")):
        expected, out = np.zeros((2, 2), dtype), np.zeros((2, 2), dtype)
        try:
            np.einsum("ij,kj", a, a, out=expected, casting=casting)
        except TypeError:
            with pytest.raises(TypeError, match="casting"):
                planner.einsum("ij,kj", a, a, out=out, casting=casting)
            continue
        assert planner.einsum("ij,kj", a, a, out=out, casting=casting) is out
        assert np.array_equal(out, expected)
    with pytest.raises(planner.PlannerError, match="out= has shape"):
        planner.einsum("ij,kj", a, a, out=np.zeros((2, 3)))


def test_numpy_views_are_views():
    a = np.zeros((3, 3))
    planner.einsum("ij->ji", a)[0, 1] = 1.0
    planner.einsum("ii->i", a)[:] = 2.0
    assert np.array_equal(a, [[2, 0, 0], [1, 2, 0], [0, 0, 2]])
    a.flags.writeable = False
    assert not planner.einsum("ii->i", a).flags.writeable
    for spec, shapes in random_specs(150, 1, (0, 1, 2, 3)):
        spec, x = dotted(spec), integers(shapes[0], "float32")
        for options in ({}, {"dtype": "f8"}):
            expected, got = np.einsum(spec, x, **options), planner.einsum(spec, x, **options)
            assert got.dtype == expected.dtype, spec
            assert np.array_equal(got, expected), spec
            assert np.shares_memory(got, x) == np.shares_memory(expected, x), spec
            assert got.ndim == 0 or got.flags.writeable == expected.flags.writeable, spec


# -- JAX ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_jax(jax, dtype):
    import jax.numpy as jnp

    problems = [(spec, [jnp.asarray(integers(shape, "f4"), dtype) for shape in shapes]) for spec, shapes in SPECS[:20]]

    def run(einsum):
        return [einsum(spec, *operands) for spec, operands in problems]

    for got, expected in zip(jax.jit(lambda: run(planner.einsum))(), jax.jit(lambda: run(jnp.einsum))(), strict=True):
        assert got.dtype == expected.dtype
        assert jnp.array_equal(got, expected)


class Variable:
    """What `flax.nnx.Param` is to `jnp.einsum`."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


class Parameter(Variable):
    """One that has all attributes of its array, as that of flax."""

    def __getattr__(self, name):
        return getattr(self.__dict__["value"], name)


@pytest.mark.parametrize("kind", [Variable, Parameter])
@pytest.mark.parametrize("wrapped", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("host", [False, True], ids=["jax", "numpy"])
def test_objects_with_an_array_are_that_array(jax, kind, wrapped, host):
    """By every call, the first and later ones; what they have may be an array of NumPy."""
    jnp, spec = jax.numpy, "nj, q[n]jk -> nk"
    arrays = [jnp.array(x) for x in (np.arange(6.0).reshape(3, 2), np.arange(24.0).reshape(3, 2, 4), [2, 0, 2])]
    expected = planner.contract(spec, *arrays[:2], q=arrays[2])
    x, c, q = (kind(np.asarray(x) if host else x) if i in wrapped else x for i, x in enumerate(arrays))
    plan = planner.plan(spec, x, c, q=q)
    calls = [
        lambda: planner.contract(spec, x, c, q=q),
        lambda: planner.contract(spec, [x, c], q=q),
        lambda: planner.einsum(spec, x, c, q=q),
        lambda: plan(x, c, q=q),
        lambda: planner.contract(spec, x, c, q=planner.group(q, 3)),
        jax.jit(lambda: planner.contract(spec, x, c, q=q)),
    ]
    for call in calls * 2:
        assert jnp.array_equal(call(), expected)
    product = planner.contract(x, [0, 1], arrays[1][0], [1, 2], [0, 2])
    assert jnp.array_equal(product, arrays[0] @ arrays[1][0])
    gradient = jax.grad(lambda x: planner.contract(spec, kind(x), c, q=q).sum())(arrays[0])
    assert jnp.array_equal(gradient, arrays[1].sum(2)[arrays[2]])


def test_objects_without_an_array_are_refused(jax):
    x, c, q = jax.numpy.ones((3, 2)), jax.numpy.ones((3, 2, 4)), jax.numpy.array([2, 0, 2])
    spec, bad = "nj, q[n]jk -> nk", Variable("text")
    plan = planner.plan(spec, x, c, q=q)
    for call, message in (
        (lambda: planner.contract(spec, x, bad, q=q), "operand 1 is a Variable, not an array"),
        (lambda: planner.contract(spec, x, c, q=bad), "index array 'q' is a Variable, not an array"),
        (lambda: planner.contract(spec, x, c, q=Variable(x)), "index array 'q' has dtype float32"),
        (lambda: plan(bad, c, q=q), "operand 0 is a Variable, not an array"),
        (lambda: planner.plan(spec, x, bad, q=q), "operand 1 is a Variable"),
        (lambda: planner.group(bad, 3), "not a Variable"),
    ):
        with pytest.raises(planner.PlannerError, match=message):
            call()


def test_a_plan_takes_index_arrays_of_numpy_again(jax):
    """They became arrays of JAX in the first call only."""
    x, c, q = jax.numpy.ones((3, 2)), jax.numpy.arange(8.0).reshape(4, 2), np.array([0, 2**32 + 1, 1])
    plan = planner.plan("nj, q[n]j -> n", x, c, q=q % 4, index_mode="drop")
    for _ in range(3):
        assert plan(x, c, q=q).tolist() == [1, 0, 5]


def test_types_of_arrays_are_planned(jax):
    """What `jax.typeof` returns plans as the array does, weak types too."""
    jnp, typeof = jax.numpy, jax.typeof
    arrays, q = [jnp.ones((3, 2)), jnp.ones((3, 2, 4))], jnp.array([2, 0, 2])
    plan = planner.plan("nj, q[n]jk -> nk", *map(typeof, arrays), q=typeof(q))
    assert plan == planner.plan("nj, q[n]jk -> nk", *arrays, q=q)
    weak, half = jax.lax.full_like(2.0, 2.0), jnp.ones(3, "bfloat16")
    assert typeof(weak).weak_type
    for described in (typeof(weak), jax.ShapeDtypeStruct((), "float32", weak_type=True)):
        assert planner.plan(", n -> n", described, typeof(half)).dtype == "bfloat16"
        assert planner.plan(", n -> n", described, planner.Operand((3,), "bfloat16")).dtype == "bfloat16"
    assert planner.plan(", n -> n", typeof(jnp.zeros((), "float32")), typeof(half)).dtype == "float32"
    with pytest.raises(planner.PlannerTypeError, match="operand 0 is a ShapedArray, not an array"):
        planner.contract("nj, q[n]jk -> nk", *map(typeof, arrays), q=q)


def test_jax_call_forms(jax):
    import jax.numpy as jnp

    x, y = jnp.arange(6.0).reshape(2, 3), np.arange(12.0, dtype="f4").reshape(3, 4)
    half = x.astype("bfloat16")
    calls = [
        (("ij,jk", x, y), {}),
        ((x, [0, 1], y, [1, 2]), {}),
        (("ij,jk", Variable(x), y), {}),
        ((",ij->i", 2.0, x), {}),
        ((",ij->i", 2, x.astype(int)), {}),
        (("ij,jk", x, y), {"optimize": True, "precision": jax.lax.Precision.HIGHEST}),
        (("ij,jk", x, y), {"optimize": False, "_dot_general": jax.lax.dot_general}),
        (("ij,jk", x, y), {"precision": ("highest", "highest"), "out_sharding": None}),
        (("ij,jk", half, y.astype("bfloat16")), {"preferred_element_type": "float32"}),
        (("ij,jk", x, y), {"preferred_element_type": jnp.bfloat16}),
        (("ij,jk", x.astype("int8"), y.astype("int8")), {"preferred_element_type": jnp.int32}),
        (("ij->ji", x), {"preferred_element_type": jnp.bfloat16}),
        (("ij,jk", x, y), {"optimize": [(0, 1)], "out": None}),
    ]
    for arguments, options in calls:
        expected = jnp.einsum(*arguments, **options)
        under_jit = jax.jit(lambda arguments=arguments, options=options: planner.einsum(*arguments, **options))
        for got in (planner.einsum(*arguments, **options), under_jit()):
            assert got.dtype == expected.dtype, (arguments, options)
            assert jnp.array_equal(got, expected), (arguments, options)
    with pytest.raises(planner.PlannerError, match="out= is not an option"):
        planner.einsum("ij,jk", x, y, out=x)


def test_jax_products_that_no_plan_knows(jax):
    """Hooks, algorithms, two precisions and the smallest dtypes run on JAX's own products, along our path."""
    import jax.numpy as jnp

    x, y, z = (jnp.asarray(integers(shape, "f4")) for shape in ((2, 3), (3, 4), (4, 5)))
    small = [v.astype("float8_e4m3fn") for v in (x, y, z)]
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    split = jax.sharding.NamedSharding(mesh, jax.P("x", None))
    hooked = []

    def hook(*arguments, **options):
        hooked.append(options)
        return -jax.lax.dot_general(*arguments, **options)

    calls = [
        (("ij,jk", x, y), {"precision": ("highest", "default")}),
        (("ij,jk,kl", x, y, z), {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32}),
        (("ij,jk", x, y), {"_dot_general": hook}),
        (("ij,jk,kl", x, y, z), {"_dot_general": hook, "optimize": False, "preferred_element_type": "float32"}),
        (("ij,jk", *small[:2]), {}),
        (("ij,jk,kl", *small), {"preferred_element_type": jnp.float32}),
        (("ij,jk", x.astype("int4"), y.astype("int4")), {}),
        (("ij->i", small[0]), {}),
    ]
    for arguments, options in calls:
        expected = jnp.einsum(*arguments, **options)
        under_jit = jax.jit(functools.partial(planner.einsum, arguments[0], **options))
        for got in (planner.einsum(*arguments, **options), under_jit(*arguments[1:])):
            assert got.dtype == expected.dtype, (arguments, options)
            assert jnp.array_equal(got, expected), (arguments, options)
    assert hooked
    for spec, arrays in (("ij,jk", (x, y)), ("ij,jk,kl", (x, y, z))):
        for wanted in (split, split.spec):
            with jax.set_mesh(mesh):
                got = planner.einsum(spec, *arrays, out_sharding=wanted)
                expected = jnp.einsum(spec, *arrays, out_sharding=wanted)
            assert jax.typeof(got) == jax.typeof(expected)
            assert jnp.array_equal(got, expected)
    with pytest.raises(
        planner.PlannerError, match="only jnp.einsum multiplies with _dot_general=, and it takes no dtype="
    ):
        planner.einsum("ij,jk", x, y, dtype="float32", _dot_general=hook)


def test_jax_products_of_rows_that_no_plan_knows(jax):
    """With index arrays the same options do what `jnp.einsum` does after `c[q]` and before `.at[t].add`."""
    import jax.numpy as jnp

    x, c = jnp.asarray(integers((8, 3), "f4")), jnp.asarray(integers((5, 3, 4), "f4"))
    q, t = jnp.asarray([0, 4, -1, 2, 2, 3, 1, 0]), jnp.asarray([0, 1, 2, 0, 1, 2, 0, 5])
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    given = [
        ({"precision": ("highest", "default")}, "float32", "float32"),
        ({"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32}, "float32", "float32"),
        ({"_dot_general": lambda *arrays, **options: -jax.lax.dot_general(*arrays, **options)}, "float32", "float32"),
        ({"preferred_element_type": "float32"}, "float8_e4m3fn", "float8_e4m3fn"),
        ({"preferred_element_type": "float32"}, "bfloat16", "float8_e5m2"),
        ({}, "float8_e4m3fn", "float8_e4m3fn"),
        ({}, "int4", "int4"),
    ]
    # The spec, its keywords, and the same by jnp.
    forms = [
        ("nj, q[n]jk -> nk", {"q": q}, lambda x, c, **o: jnp.einsum("nj, njk -> nk", x, c[q], **o)),
        ("...j, q[...]jk -> ...jk", {"q": q}, lambda x, c, **o: jnp.einsum("nj, njk -> njk", x, c[q], **o)),
        (
            "nj, q[n]jk -> t[n]k",
            {"q": q, "t": t, "sizes": (6, 4)},
            lambda x, c, **o: (r := jnp.einsum("nj, njk -> nk", x, c[q], **o), jnp.zeros((6, 4), r.dtype).at[t].add(r))[
                1
            ],
        ),
    ]
    for options, left, right in given:
        for spec, indices, peer in forms:
            arrays = x.astype(left), c.astype(right)
            mine = functools.partial(planner.einsum, spec, **indices, **options)
            expected = peer(*arrays, **options)
            for got in (mine(*arrays), *([] if left == "int4" else [jax.jit(mine)(*arrays)])):
                assert got.dtype == expected.dtype, (spec, options)
                assert jnp.array_equal(got, expected), (spec, options)
    arrays = x.astype("float8_e5m2"), c.astype("float8_e5m2")
    spec, indices, peer = forms[0]
    for got, wanted in zip(
        jax.grad(lambda *xs: planner.einsum(spec, *xs, **indices).sum().astype("float32"), (0, 1))(*arrays),
        jax.grad(lambda *xs: peer(*xs).sum().astype("float32"), (0, 1))(*arrays),
        strict=True,
    ):
        assert got.dtype == wanted.dtype
        assert jnp.array_equal(got, wanted)
    # Where a call says how its result is split.
    for spec, indices, peer in forms:
        with jax.set_mesh(mesh):
            got = planner.einsum(spec, x, c, out_sharding=jax.P("x"), **indices)
        assert jax.typeof(got).sharding.spec[0] == "x"
        assert jnp.array_equal(got, peer(x, c))


def test_jax_products_of_rows_that_no_plan_knows_deal_with_bad_indices(jax):
    import jax.numpy as jnp

    x, c, q = jnp.ones((2, 3)), jnp.ones((5, 3, 4), "float8_e4m3fn"), jnp.asarray([1, 7])
    mine = functools.partial(planner.einsum, "nj, q[n]jk -> nk", preferred_element_type="float32")
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[1\] is 7"):
        mine(x, c, q=q)
    with pytest.raises(planner.PlannerError, match="has no NaN to mark"):
        jax.jit(lambda q: mine(x.astype("int4"), c.astype("int4"), q=q))(q)
    assert jnp.isnan(jax.jit(mine)(x, c, q=q)).tolist() == [[False] * 4, [True] * 4]
    for mode, wanted in (("drop", 0), ("clip", 3)):
        for call in (mine, jax.jit(functools.partial(mine, index_mode=mode), static_argnames="index_mode")):
            assert call(x, c, q=q, index_mode=mode).tolist() == [[3] * 4, [wanted] * 4]
    assert jnp.array_equal(mine(x, c, q=planner.group(q % 5, 5)), mine(x, c, q=q % 5))
    with pytest.raises(planner.PlannerTypeError, match="did you mean 'index_mode'"):
        mine(x, c, q=q, index_mod="drop")


PREFERRED = [
    ("ij,jk->ik", ("bfloat16", "bfloat16"), "float32"),
    ("bij,kjb->bki", ("float16", "float16"), "float32"),
    ("ij,jk->ik", ("bfloat16", "float32"), "float32"),
    ("i,j->ij", ("int8", "bfloat16"), "float32"),
    ("ij,ij->ij", ("bool", "float32"), None),
    ("iij,jkk->ik", ("bfloat16", "bfloat16"), "float32"),
    ("ijz,j->i", ("bfloat16", "bfloat16"), "float32"),
    ("ij,jk->ik", ("float32", "complex64"), None),
    ("ij,jk,kl->il", ("bfloat16",) * 3, "float32"),
    ("ij->i", ("bfloat16",), "float32"),
    ("ij->ij", ("bfloat16",), "float32"),
    ("ij,jk->ik", ("int8", "int8"), "int32"),
]


@pytest.mark.parametrize(("spec", "dtypes", "wanted"), PREFERRED, ids=str)
def test_jax_steps_read_narrow_operands_as_they_are(jax, spec, dtypes, wanted):
    """Sums are formed in the wider dtype, and gradients keep the operands, not casts of them, as in `jnp.einsum`."""
    import jax.numpy as jnp

    operands = [
        jnp.asarray(integers((3,) * len(t), "f4"), d)
        for t, d in zip(spec[: spec.index("-")].split(","), dtypes, strict=True)
    ]
    floats = [n for n, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def ours(*xs):
        return planner.einsum(spec, *xs, preferred_element_type=wanted)

    def asked(*xs):
        return planner.contract(spec, *xs, dtype=wanted)

    def theirs(*xs):
        return jnp.einsum(spec, *xs, preferred_element_type=wanted)

    factors = integers(theirs(*operands).shape, "f4")

    def gradients(einsum):
        return jax.grad(lambda *xs: (einsum(*xs) * factors).sum().real.astype("float32"), floats)(*operands)

    def kept(einsum):
        given = {id(x) for x in operands}
        leaves = {id(x): x for x in jax.tree.leaves(jax.vjp(einsum, *operands)[1]) if hasattr(x, "nbytes")}
        return sum(x.nbytes for key, x in leaves.items() if key not in given)

    for einsum in (ours, asked):
        assert einsum(*operands).dtype == theirs(*operands).dtype
        assert jnp.array_equal(einsum(*operands), theirs(*operands))
        if floats:
            for got, expected in zip(gradients(einsum), gradients(theirs), strict=True):
                assert got.dtype == expected.dtype
                assert jnp.array_equal(got, expected)
            assert kept(einsum) <= kept(theirs)
            wants = [planner.Operand(x.shape, x.dtype.name, None, n in floats) for n, x in enumerate(operands)]
            assert kept(einsum) == planner.plan(spec, *wants, dtype=wanted, backend="jax").cost.retained_bytes


def test_jax_paths_are_those_of_jax_unless_ours_win(jax):
    """Under `vmap` a plan does not see which operands are mapped: another path than theirs kept 8 times as much."""
    import jax.numpy as jnp

    def kept(einsum):
        mapped = jax.vmap(functools.partial(einsum, "uvw,ijk,ui,vj->wk"), (None, None, 0, 0))
        leaves = {id(x): x for x in jax.tree.leaves(jax.vjp(mapped, *operands)[1]) if hasattr(x, "nbytes")}
        return sum(x.nbytes for key, x in leaves.items() if key not in {id(x) for x in operands})

    shapes = (4, 1, 16), (5, 5, 1), (64, 4, 5), (64, 1, 5)
    operands = [jnp.asarray(integers(shape, "f4")) for shape in shapes]
    assert kept(planner.einsum) <= kept(jnp.einsum)
    # Here the path of the fewest FLOPs takes more time.
    spec, shapes = "bc,dbc,ced->b", ((64, 64), (16, 64, 64), (64, 4, 16))
    operands = [jnp.asarray(integers(shape, "f4")) for shape in shapes]
    path, _ = opt_einsum.contract_path(spec, *shapes, shapes=True)
    programs = [
        str(jax.make_jaxpr(functools.partial(call, spec))(*operands))
        for call in (planner.einsum, planner.contract, functools.partial(planner.contract, optimize=path))
    ]
    assert programs[0] == programs[1] != programs[2]


def test_numpy_arrays_beside_jax_arrays(jax):
    """They become JAX arrays, as in `jax.numpy`: constants in a jitted function often are NumPy arrays."""
    import jax.numpy as jnp

    a, b, q = integers((2, 3), "f4"), integers((3, 4), "f4"), np.array([1, 0, -1])
    x = jnp.asarray(a)
    for arguments in (("ij,jk->ik", x, b), ("jk,ij->ik", b, x), (x, [0, 1], b, [1, 2]), ("ij,jk->ik", [x, b])):
        assert np.array_equal(planner.contract(*arguments), a @ b)
    assert np.array_equal(jax.jit(lambda x: planner.contract("q[n]j->nj", x, q=q))(x), a[q])
    assert np.array_equal(jax.jit(lambda q: planner.contract("q[n]j->nj", a, q=q))(jnp.asarray(q)), a[q])
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[1\]"):
        planner.contract("q[n]j->nj", x, q=np.array([0, 2**32]))  # 0, if it were cut to 32 bits
    plan = planner.plan("ij,jk->ik", jax.ShapeDtypeStruct((2, 3), "float32"), b)
    assert plan.backend == "jax"
    assert np.array_equal(plan(x, b), a @ b)
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[0\] is 9"):
        jax.jit(lambda x: planner.contract("q[n]j->nj", x, q=np.array([9])))(x)
    with pytest.raises(planner.PlannerError, match="operand 0 is of numpy"):
        planner.contract("ij,ij->ij", a.astype(">f4"), x)
    with pytest.raises(planner.PlannerError, match="operand 1 is a numpy array"):
        planner.contract("i,i->i", jnp.ones(2), np.array([b"", b"a"]))
    with pytest.raises(planner.PlannerError, match="torch array"):
        planner.contract("ij,jk->ik", x, pytest.importorskip("torch").ones(3, 4))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_integers_beside_half_types(jax, half):
    """JAX refuses to sum integers in a narrower type. So they are converted first."""
    import jax.numpy as jnp

    a, b, c = (jnp.asarray(integers(shape, "i4")) for shape in ((2, 3), (3, 4), (4, 2)))
    exact = np.asarray(a) @ np.asarray(b)
    for got in (planner.contract("ij,jk->ik", a, b, dtype=half), planner.contract("ij,jk->ik", a, b.astype(half))):
        assert got.dtype == half
        assert np.array_equal(got, exact)
    got = planner.contract("ij,jk,kl->il", a, b, c.astype(half))
    assert got.dtype == half
    assert np.array_equal(got, (exact @ np.asarray(c)).astype(half))


def test_weak_scalars_under_strict_promotion(jax):
    with jax.numpy_dtype_promotion("strict"):
        for x in (jax.numpy.ones(3), jax.numpy.ones(3, "bfloat16")):
            got = planner.einsum("i,->i", x, 2)
            assert got.dtype == x.dtype
            assert np.array_equal(got, 2 * np.ones(3))


@pytest.mark.parametrize("spec", ["i,i->i", "i,i,i->", "i,j->ij"])
@pytest.mark.parametrize("wanted", ["float32", "complex64", "int32"])
def test_a_preferred_type_promotes_under_strict_promotion(jax, spec, wanted):
    kinds = ("bfloat16", "float32", "int8")[: spec.count(",") + 1]
    operands = [jax.numpy.asarray([1, 2, 3], kind) for kind in kinds]
    with jax.numpy_dtype_promotion("strict"):
        for einsum in (jax.numpy.einsum, planner.einsum):
            with pytest.raises(jax.dtypes.TypePromotionError):
                einsum(spec, *operands)
        got, expected = (
            einsum(spec, *operands, preferred_element_type=wanted) for einsum in (planner.einsum, jax.numpy.einsum)
        )
    assert (got.dtype, got.weak_type) == (expected.dtype, expected.weak_type)
    assert (got == expected).all()


def test_steps_read_only_what_products_of_jax_take(jax):
    """To JAX complex64 is narrower than int64, and so its products refuse these operands for it."""
    jnp = jax.numpy
    with jax.enable_x64(True):
        for wide in ("int64", "uint64"):
            operands = [jnp.asarray([1, 2, 3], kind) for kind in ("int16", "complex64", wide)]
            for spec in ("i,i,i->i", "i,j,k->ijk"):
                got = planner.contract(spec, *operands)
                assert got.dtype == "complex64"
                assert (got == jnp.einsum(spec, *operands)).all()
            got = planner.contract("i,i->", operands[0], operands[2], dtype="complex64")
            assert got.dtype == "complex64"
            assert got == 14


def test_a_preferred_type_that_is_narrower_is_refused_as_by_jax(jax):
    a = jax.numpy.ones((2, 2), "complex64")
    for einsum in (jax.numpy.einsum, planner.einsum):
        with pytest.raises(TypeError, match="narrower"):
            einsum("ij,jk->ik", a, a, preferred_element_type="bfloat16")


def test_einsum_of_many_operands_at_symbolic_sizes(jax):
    (n,) = jax.export.symbolic_shape("n")
    shapes = ((n, 3), (3, 4), (4, 2))
    program = jax.export.export(jax.jit(lambda *xs: planner.einsum("ij,jk,kl->il", *xs)))(
        *[jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    )
    for rows in (2, 5):
        arrays = [integers(shape, "f4") for shape in ((rows, 3), *shapes[1:])]
        assert np.array_equal(program.call(*arrays), arrays[0] @ arrays[1] @ arrays[2])


def test_keys_are_no_operands(jax):
    keys = jax.random.split(jax.random.key(0), (3, 4))
    with pytest.raises(planner.PlannerError, match="operand 1 holds PRNG keys"):
        planner.einsum("ij,jk", np.ones((2, 3), "f4"), keys)
    with pytest.raises(planner.PlannerError, match="index array 'q' has dtype key"):
        planner.einsum("ij,q[j]k->ik", jax.numpy.ones((2, 3)), jax.numpy.ones((3, 4)), q=keys[:, 0])


def test_plans_of_jax_stand_ins(jax):
    """`jax.ShapeDtypeStruct`s are planned as the arrays that they stand for, whatever their sharding."""
    struct, mesh = jax.ShapeDtypeStruct, jax.make_mesh((1,), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.P("x"))
    spec, shapes, dtypes = "nj,q[n]jk->nk", ((6, 3), (5, 3, 2)), ("bfloat16", "float32")
    described = [struct(shape, dtype, sharding=split) for shape, dtype in zip(shapes, dtypes, strict=True)]
    stand_ins = [planner.Operand(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    expected = planner.plan(spec, *stand_ins, q=(6,), backend="jax")
    assert planner.plan(spec, *described, q=struct((6,), "int32", sharding=split)) == expected
    assert planner.plan(spec, described, q=(6,)) == expected
    with pytest.raises(planner.PlannerError, match="index array 'q' has dtype float32"):
        planner.plan(spec, *described, q=struct((6,), "float32"))
    with pytest.raises(planner.PlannerError, match="operand 0 is a ShapeDtypeStruct"):
        planner.contract(spec, *described, q=jax.numpy.zeros(6, int))


# -- everywhere --------------------------------------------------------------------------------------------------------


def test_gathers_and_options_pass():
    a, c, q = np.ones((4, 1, 2)), np.arange(6.0).reshape(3, 2, 1), np.array([2, 0, 0, 1])
    got = planner.einsum("nij, q[n]jk -> nik", a, c, q=q, memory_limit="1 MB")
    assert np.array_equal(got, planner.contract("nij, q[n]jk -> nik", a, c, q=q))


def test_sizes_of_lists_go_by_label():
    a, sizes = np.ones((2, 3)), {7: 4}
    assert planner.einsum(a, [0, 1], [0, 7], sizes=sizes).shape == (2, 4)
    assert planner.contract_expression((2, 3), [0, 1], [0, 7], sizes=sizes)(a).shape == (2, 4)
    with pytest.raises(planner.ShapeError, match="sizes= names 3"):
        planner.einsum(a, [0, 1], [0, 7], sizes={3: 4})


def test_what_is_no_call():
    with pytest.raises(planner.PlannerTypeError, match="no spec"):
        planner.einsum()
    with pytest.raises(planner.PlannerError, match="no operands"):
        planner.einsum("ij->ji")
    with pytest.raises(planner.PlannerError, match="casting='odd'"):
        planner.einsum("ij->ji", np.ones((2, 2)), casting="odd")
    with pytest.raises(planner.PlannerTypeError, match="out= is a list"):
        planner.einsum("ij->ji", np.ones((2, 2)), out=[])
    with pytest.raises(planner.PlannerTypeError, match="order='Q'"):
        planner.einsum("ij->ji", np.ones((2, 2)), order="Q")


def test_every_symbol_of_opt_einsum_is_a_label():
    """Its symbols run on from 'a' through all of Unicode; cotengra makes networks of them."""
    count = 250
    symbols = [opt_einsum.get_symbol(i) for i in range(count)]
    assert {"×", "÷"} <= set(symbols)
    chain = ",".join(f"{a}{b}" for a, b in zip(symbols, symbols[1:], strict=False))
    matrix = np.array([[0, 1], [1, 0]])
    got = planner.einsum(f"{chain}->{symbols[0]}{symbols[-1]}", *[matrix] * (count - 1), optimize="greedy")
    assert np.array_equal(got, matrix)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path, info = planner.contract_path("×a,÷a->÷×", (2, 3), (4, 3), shapes=True)
    assert info.eq == "×a,÷a->÷×"


# -- paths -------------------------------------------------------------------------------------------------------------


def test_contract_path_has_the_fields_of_opt_einsum():
    for spec, shapes in [*SPECS[:20], ("...ij,jk,kl", [(2, 3, 4), (4, 5), (5, 2)])]:
        arrays = [np.ones(shape) for shape in shapes]
        path, info = planner.contract_path(spec, *arrays)
        again, theirs = opt_einsum.contract_path(spec, *arrays, optimize=path)
        assert path == again == info.path
        assert {k: v for k, v in vars(info).items() if k not in ("contraction_list", "eq")}.keys() <= vars(
            theirs
        ).keys()
        for field in ("input_subscripts", "output_subscript", "size_dict", "opt_cost", "naive_cost", "speedup",
                      "scale_list", "size_list", "largest_intermediate", "shapes", "indices"):  # fmt: skip
            assert getattr(info, field) == getattr(theirs, field), (spec, field)
        assert str(info) == str(theirs)
        assert np.array_equal(opt_einsum.contract(spec, *arrays, optimize=path), np.einsum(spec, *arrays))
    assert planner.contract_path("ij,jk,kl", *[np.ones((2, 2))] * 3, optimize=False)[0] == [(0, 1, 2)]
    with pytest.raises(planner.PlannerError, match="no gathers"):
        planner.contract_path("q[n]j->nj", (3, 2), q=(5,), shapes=True)
    for spec in ("i->ii", "i->ij"):
        with pytest.raises(planner.PlannerError, match="call planner.plan"):
            planner.contract_path(spec, (3,), sizes={"j": 2} if "j" in spec else None, shapes=True)


# -- expressions -------------------------------------------------------------------------------------------------------


def test_expressions_without_constants():
    for spec, shapes in SPECS[:20]:
        expression = planner.contract_expression(spec, *shapes)
        arrays = [integers(shape, "f8") for shape in shapes]
        for _ in range(2):
            assert np.array_equal(expression(*arrays), np.einsum(spec, *arrays))
    doubled = planner.contract_expression("ij,jk->ik", (2, 3), (3, 4))
    assert doubled(np.ones((5, 7)), np.ones((7, 2))).shape == (5, 2)
    assert repr(doubled) == "<ContractExpression('ij,jk->ik')>"
    with pytest.raises(planner.ShapeError, match="takes exactly 2 array arguments but received 1"):
        doubled(np.ones((2, 3)))
    out = np.zeros((2, 4))
    assert doubled(np.ones((2, 3)), np.ones((3, 4)), out=out) is out
    assert (out == 3).all()


def test_constant_parts_are_folded_once():
    """For every set of constants, the operands that are left are the variables and the largest constant subtrees."""
    a, b, c, d = (integers(shape, "f8") for shape in [(2, 30), (30, 40), (40, 5), (5, 3)])
    operands, shapes = [a, b, c, d], [x.shape for x in (a, b, c, d)]
    expected = a @ b @ c @ d
    for bits in range(16):
        constants = [n for n in range(4) if bits >> n & 1]
        given = [operands[n] if n in constants else shapes[n] for n in range(4)]
        for optimize in ("auto", [(0, 1), (0, 2), (0, 1)], [(2, 3), (0, 1), (0, 1)]):
            expression = planner.contract_expression("ab,bc,cd,de->ae", *given, constants=constants, optimize=optimize)
            variables = [x for n, x in enumerate(operands) if n not in constants]
            assert np.array_equal(expression(*variables), expected), (constants, optimize)
    first = planner.contract_expression("ab,bc,cd->ad", a, b, (40, 5), constants=[0, 1])
    assert first.remaining == "ac, cd -> ad"
    every = planner.contract_expression("ab,bc->ac", a, b, constants=[0, -1])
    assert every.remaining == "ac -> ac"
    assert np.array_equal(every(), a @ b)
    private = planner.contract_expression("abx,bc->ac", np.stack([a, a], 2), (30, 40), constants=[0])
    assert private.remaining == "ab, bc -> ac"
    before = first(c)
    a[:] = 0
    assert before.any()
    assert np.array_equal(first(c), before)


def test_constants_go_to_the_framework_of_the_call(torch, jax):
    import jax.numpy as jnp

    a, b, c = integers((2, 3), "f4"), integers((3, 4), "f4"), integers((4, 5), "f4")
    makers = {"numpy": np.asarray, "torch": torch.as_tensor, "jax": jnp.asarray}
    for source, kept in makers.items():
        expression = planner.contract_expression("ab,bc,cd->ad", kept(a), kept(b), (4, 5), constants=[0, 1])
        for target, made in makers.items():
            for _ in range(2):
                got = expression(made(c))
                assert type(got) is type(made(c)), (source, target)
                assert np.array_equal(got, a @ b @ c)
            for backend in ("torch", "jax"):
                there_and_back = expression(c, backend=backend)
                assert isinstance(there_and_back, np.ndarray)
                assert np.array_equal(there_and_back, a @ b @ c)
    # What is folded inside of a trace must not be a tracer that outlives it.
    expression = planner.contract_expression("ab,bc,cd->ad", a, jnp.asarray(b), (4, 5), constants=[0, 1])
    assert np.array_equal(jax.jit(expression)(c), a @ b @ c)
    assert np.array_equal(jax.jit(lambda x: 1 * expression(x))(c), a @ b @ c)
    assert np.array_equal(jax.grad(lambda x: expression(x).sum())(c), (a @ b).sum(0)[:, None] + 0 * c)


def test_constants_that_need_gradients_get_them(torch):
    a, b, c = (torch.from_numpy(integers(shape, "f4")) for shape in [(2, 3), (3, 4), (4, 5)])
    a.requires_grad_()
    expression = planner.contract_expression("ab,bc,cd->ad", a, b, (4, 5), constants=[0, 1])
    for _ in range(2):
        (gradient,) = torch.autograd.grad(expression(c).sum(), a)
        assert torch.equal(gradient, (b @ c).sum(1).expand(2, 3))


def test_expressions_with_gathers():
    a, c, q = integers((4, 2), "f8"), integers((3, 2), "f8"), np.array([2, 0, 0, 1])
    expression = planner.contract_expression("nj, q[n]j, j -> n", (4, 2), c, np.ones(2), constants=[1, 2], q=(4,))
    assert np.array_equal(expression(a, q=q), (a * c[q]).sum(1))


@pytest.mark.parametrize(
    ("spec", "shapes", "options", "kind", "message"),
    [
        ("ij->ji", [(2, 3)], {"constants": [2]}, planner.PlannerError, "names operand 2"),
        ("ij->ji", [(2, 3)], {"constants": [0.5]}, planner.PlannerError, "positions of operands, .* not .0.5"),
        ("ij->ji", [(2, 3)], {"constants": "ij"}, planner.PlannerError, "positions of operands, .* not 'ij'"),
        ("ij->ji", [(2, 3)], {"constants": 0}, planner.PlannerError, "positions of operands, .* not 0"),
        ("ij,jk->ik", [(2, 3, 4)], {}, planner.ShapeError, "2 input terms, but 1 operands"),
        ("ij->ij", [(2, 3), (2, 3)], {}, planner.ShapeError, "1 input terms, but 2 operands"),
        ("q[n]j->nj", [(2, 3)], {}, planner.SpecError, "'q' is missing"),
    ],
)  # fmt: skip
def test_wrong_expressions_name_the_culprit(spec, shapes, options, kind, message):
    with pytest.raises(kind, match=message):
        planner.contract_expression(spec, *shapes, **options)


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("bca->cb", [(3, 4, 5)]),
        ("bca->cb", [(3, 4, 1)]),
        ("bbda->ba", [(3, 3, 17, 3)]),
        ("cabd,->dc", [(2, 2, 3, 17), ()]),
        ("aeb,dc->bec", [(3, 5, 3), (2, 5)]),
        ("bac,bade->aeb", [(5, 5, 3), (5, 5, 17, 3)]),
        ("dec,ae->acd", [(3, 4, 5), (6, 4)]),
        ("zdc,zbac->zabd", [(2, 3, 3), (2, 2, 4, 3)]),
        (",cbe,a,cbde->bcd", [(), (2, 3, 5), (5,), (2, 3, 1, 5)]),
    ],
)
def test_results_can_be_viewed_as_those_of_torch(spec, shapes, grads, torch):
    operands = [torch.from_numpy(integers(shape, "f4")).requires_grad_(grads) for shape in shapes]
    expected = torch.einsum(spec, *operands)
    for _ in range(2):
        found = planner.einsum(spec, *operands)
        assert torch.equal(found.view(-1), expected.view(-1))
    assert planner.einsum("ab->ba", torch.ones(2, 3)).stride() == (1, 3)  # a view stays one


@pytest.mark.parametrize("spec", ["ab->ba", "aa->a", "ab"])
def test_views_of_arrays_that_are_views_of_other_memory(spec, torch):
    """NumPy does not mark them as writable anew, even if they are."""
    x = torch.zeros(3, 3)
    view = planner.einsum(spec, x.numpy())
    assert np.shares_memory(view, x.numpy())
    with planner.patch("numpy") as report:
        assert np.array_equal(np.einsum(spec, x.numpy()), view)
    assert report.routed == 1


def test_what_takes_no_result_is_named(torch):
    expression, x = planner.contract_expression("ij->ji", (2, 3)), np.ones((2, 3))
    for given, out in ((x, np.zeros((2, 3, 2))), (x, 5), (torch.as_tensor(x), torch.zeros(2))):
        with pytest.raises(planner.PlannerError, match=r"out= is no array of the result's shape \(3, 2\)"):
            expression(given, out=out)
    with pytest.raises(planner.PlannerTypeError, match="dtype='foo'"):
        planner.einsum("ij->i", x, dtype="foo")


def test_a_constant_may_be_named_twice():
    a, b = integers((2, 3), "f8"), integers((3, 4), "f8")
    expression = planner.contract_expression("ij,jk->ik", a, (3, 4), constants=[0, 0, -2])
    assert expression.constants == (0,)
    assert np.array_equal(expression(b), a @ b)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64"])
def test_constants_of_whole_numbers_are_folded_in_no_dtype_of_their_own(dtype):
    """A product of booleans tells whether there is a term, and one of int8 wraps around; floats do neither."""
    a, b, x = np.full((2, 2), 100, dtype), np.full((2, 2), 100, dtype), np.ones((2, 2))
    if dtype == "int64":
        a, b = a << 32, b << 32
    expression = planner.contract_expression("ij,jk,kl->il", a, b, (2, 2), constants=[0, 1])
    assert np.array_equal(expression(x), planner.contract("ij,jk,kl->il", a, b, x))
    assert expression(b).dtype == dtype
    folded = planner.contract_expression("ij,jk,kl->il", a, b, (2, 2), constants=[0, 1], dtype="float64")
    assert folded.remaining == "ik, kl -> il"
    assert np.array_equal(folded(x), expression(x))


def test_fx_records_a_call(torch):
    traced = torch.fx.symbolic_trace(lambda x, y: planner.einsum("ij,jk->ki", x, y))
    x, y = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(3, 4)
    assert torch.equal(traced(x, y), (x @ y).T)


def test_constants_outlive_the_context_of_the_first_call(torch):
    expression = planner.contract_expression("ij,jk->ik", (2, 3), np.ones((3, 4), "f4"), constants=[1])
    x = torch.ones(2, 3, requires_grad=True)
    with torch.inference_mode():
        expression(torch.ones(2, 3))
    module = torch.nn.Module()
    module.forward = lambda x: expression(x)
    torch.export.export(module, (torch.ones(2, 3),), strict=False)
    result = expression(x)
    assert type(result) is torch.Tensor
    result.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 4.0))


def test_einsum_compiles_after_it_met_fake_tensors():
    """Dynamo guards dictionaries that it reads, and refuses keys such as the class of fake tensors."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        planner.einsum("ij,jk->ik", torch.ones(2, 3), torch.ones(3, 4))
    made = torch.compile(lambda a, b: planner.einsum("ij,jk->ik", a, b), fullgraph=True, backend="eager")
    assert torch.equal(made(torch.ones(2, 3), torch.ones(3, 4)), torch.full((2, 4), 3.0))
