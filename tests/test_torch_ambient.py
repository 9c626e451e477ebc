"""A contraction behaves as torch's own operators in what surrounds it, and prepared arrays and plans live in modules.

Autocast, inference mode, deterministic algorithms, default devices and dtypes, modes, and objects that override torch's
functions; `Module.to`, `state_dict`, and `torch.load`.
"""

import copy
import gc
import io
import itertools
import random
import weakref
from functools import partial

import pytest
from conftest import examples, run_python

import planner

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

from planner.backends.torch.contexts.autocast import autocast_dtype  # noqa: E402

contract = planner.contract
autocast = partial(torch.autocast, "cpu", torch.bfloat16)
PRODUCT, GATHERED = "ij, jk -> ik", "nj, q[n]jk -> nk"
FLOATS = ("float32", "bfloat16", "float16", "float64")


def small(*shape, dtype=torch.float32, grad=True):
    """A tensor of small integers, of which products are exact in half types too."""
    values = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu").to(dtype)
    return values.requires_grad_(grad)


def indices(n, size):
    return torch.arange(n).mul(3).remainder(size)


def gathered(n=12, size=4):
    """Operands of `GATHERED`, and its index array."""
    return small(n, 6), small(size, 6, 5), indices(n, size)


def like(result):
    return torch.ones_like(result).flatten().cumsum(0).remainder(3).reshape(result.shape)


def gradients(result, operands):
    return torch.autograd.grad(result, [x for x in operands if x.requires_grad], like(result))


def equal(found, expected):
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert all(map(torch.equal, found, expected))


# -- autocast: the dtype ---------------------------------------------------------------------------

# What torch.einsum gives under autocast in bfloat16 on a CPU: an expression, dtypes of its operands, the result's.
MEASURED = [
    ("ij->j", "float32", "float32"),
    ("ij->j", "float16", "float16"),
    ("ij,jk->ik", "float32 float32", "bfloat16"),
    ("ij,jk->ik", "float32 bfloat16", "bfloat16"),
    ("ij,jk->ik", "float16 float32", "bfloat16"),
    ("ij,jk->ik", "float16 float16", "bfloat16"),
    ("ij,jk->ik", "float64 float64", "float64"),
    ("ij,jk->ik", "complex64 complex64", "complex64"),
    ("ij,jk->ik", "int64 int64", "int64"),
    ("ij,ij->ij", "float32 float32", "float32"),
    ("ij,ij->ij", "float32 bfloat16", "float32"),
    ("ij,ij->ij", "float16 bfloat16", "float32"),
    ("i,j->ij", "bfloat16 bfloat16", "bfloat16"),
    ("ij,k->k", "float32 float32", "float32"),  # private sums, then a product without any
    ("ij,j,k->ik", "float32 float32 float32", "float32"),
    ("ij,jk,kl->il", "float32 float32 float32", "bfloat16"),
]
SHAPE = {"i": 2, "j": 3, "k": 4, "l": 5}


def operands_of(spec, dtypes, device="cpu"):
    terms = spec.split("->")[0].split(",")
    shapes = [[SHAPE[letter] for letter in term] for term in terms]
    return [torch.ones(s, dtype=getattr(torch, d), device=device) for s, d in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize(("spec", "dtypes", "expected"), MEASURED)
def test_autocast_gives_the_dtype_of_einsum(spec, dtypes, expected):
    operands = operands_of(spec, dtypes.split())
    with autocast():
        assert torch.einsum(spec, *operands).dtype == getattr(torch, expected)
        assert planner.plan(spec, *operands).dtype == expected
        for _ in range(2):
            assert contract(spec, *operands).dtype == getattr(torch, expected)


@pytest.mark.parametrize("spec", ["ij->j", "ij,jk->ik", "ij,ij->ij", "i,j->ij", "ij,jk,kl->il"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_every_mix_of_dtypes(spec, half):
    """Where torch refuses to multiply two dtypes, they are promoted."""
    for dtypes in itertools.product((*FLOATS, "complex64", "int64"), repeat=spec.count(",") + 1):
        operands = operands_of(spec, dtypes)
        with torch.autocast("cpu", half):
            found = contract(spec, *operands).dtype
            try:
                expected = torch.einsum(spec, *operands).dtype
            except RuntimeError:
                expected = found
                assert len(set(dtypes)) > 1
        assert found == expected, dtypes


def test_the_rule_on_networks():
    """Operands are multiplied one after the other, in an order of opt_einsum's; the last product decides."""
    drawn, seen = random.Random(0), set()
    for _ in range(examples(200, 4000)):
        letters = "abcdef"[: drawn.randint(1, 6)]
        sizes = {letter: drawn.choice([1, 2, 2, 3]) for letter in letters}
        terms = ["".join(drawn.choices(letters, k=drawn.randint(0, 4))) for _ in range(drawn.randint(1, 5))]
        used = sorted(set("".join(terms)))
        spec = f"{','.join(terms)}->{''.join(drawn.sample(used, drawn.randint(0, len(used))))}"
        dtypes = [drawn.choice(FLOATS[:3]) for _ in terms]
        shapes = [tuple(sizes[letter] for letter in term) for term in terms]
        operands = [torch.ones(s, dtype=getattr(torch, d)) for s, d in zip(shapes, dtypes, strict=True)]
        enabled = drawn.random() < 0.6
        strategy = drawn.choice(["auto", "greedy", "optimal"]) if enabled else None
        with (
            torch.autocast("cpu", drawn.choice([torch.bfloat16, torch.float16])),
            torch.backends.opt_einsum.flags(enabled, strategy),
        ):
            try:
                expected = str(torch.einsum(spec, *operands).dtype)
            except RuntimeError:
                continue
            found = autocast_dtype(planner.resolve(spec, *shapes), dtypes, "cpu")
        assert f"torch.{found}" == expected, (spec, shapes, dtypes)
        seen.add(found)
    assert seen == {"float32", "bfloat16", "float16"}


def test_on_a_card_einsum_casts_its_operands():
    """Fake tensors need no card."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            for spec in ("ij->j", "ij,jk->ik", "i,j->ij", "ij,jk,kl->il"):
                for dtypes in itertools.product(FLOATS, repeat=spec.count(",") + 1):
                    if len(set(dtypes)) > 1 and "float64" in dtypes:
                        continue  # torch refuses these
                    operands = operands_of(spec, dtypes, "cuda")
                    found = autocast_dtype(planner.resolve(spec, *(x.shape for x in operands)), dtypes, "cuda")
                    assert torch.einsum(spec, *operands).dtype == getattr(torch, found)
        plan = planner.plan("i,j->ij", (2,), (3,), backend="torch", device="h100")
        assert plan.dtype == "bfloat16"
    finally:
        torch.set_autocast_enabled("cuda", False)


# -- autocast: values ------------------------------------------------------------------------------


def drawn_call(drawn):
    """Random operands, a spec with gathers and index arrays, and `torch.einsum` after indexing as a function."""
    letters = "abcde"[: drawn.randint(2, 5)]
    sizes = {letter: drawn.choice([1, 2, 3, 4]) for letter in letters}
    brackets, pools = {}, {}
    shapes, terms, plain = [], [], []
    for _ in range(drawn.choice([1, 2, 2, 2, 3])):
        entries = []
        for _ in range(drawn.randint(1, 3)):
            if drawn.random() < 0.3:
                name = drawn.choice("pq")
                axis = brackets.setdefault(name, drawn.choice(letters))
                entries.append((f"{name}[{axis}]", axis, pools.setdefault(name, drawn.choice([3, 5, 40])), name))
            else:
                letter = drawn.choice(letters)
                entries.append((letter, letter, sizes[letter], None))
        shapes.append([size for _, _, size, _ in entries])
        terms.append("".join(text for text, *_ in entries))
        plain.append([(axis, name) for _, axis, _, name in entries])
    used = sorted({axis for term in plain for axis, _ in term})
    output = "".join(drawn.sample(used, drawn.randint(0, len(used))))
    arrays = {n: torch.tensor(drawn.choices(range(pools[n]), k=sizes[axis])) for n, axis in brackets.items()}
    operands = []
    for shape in shapes:
        values = torch.tensor(drawn.choices(range(-2, 3), k=torch.Size(shape).numel())).reshape(shape)
        grad = drawn.random() < 0.7
        operands.append(values.to(getattr(torch, drawn.choice(("float32", *FLOATS[:3])))).requires_grad_(grad))

    def einsum(*operands):
        taken = list(operands)
        for number, term in enumerate(plain):
            for d, (_, name) in enumerate(term):
                taken[number] = taken[number] if name is None else taken[number].index_select(d, arrays[name])
        return torch.einsum(f"{','.join(''.join(axis for axis, _ in term) for term in plain)}->{output}", *taken)

    return f"{','.join(terms)}->{output}", operands, arrays, einsum


def test_random_specs_with_gathers():
    """Results, gradients and dtypes are those of einsum after indexing, in autocast and in inference mode."""
    drawn, dtypes = random.Random(0), []
    for _ in range(examples(75, 2000)):
        spec, operands, arrays, einsum = drawn_call(drawn)
        context = torch.autocast("cpu", drawn.choice([torch.bfloat16, torch.float16]))
        with context:
            try:
                expected = einsum(*operands)
            except RuntimeError:
                continue
            found = contract(spec, *operands, **arrays)
            planned = planner.plan(spec, *operands, **arrays)(*operands, **arrays)
            with torch.inference_mode():
                inferred = contract(spec, *operands, **arrays)
        equal([found, planned, inferred], [expected] * 3)
        if expected.requires_grad:
            equal(gradients(found, operands), gradients(expected, operands))
        dtypes.append(found.dtype)
    assert min(dtypes.count(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)) > 10


def test_results_meet_those_of_torch():
    """As in models: each of these torch operators refuses to mix dtypes."""
    h, w, i = small(3, 4, 8), small(8, 8), torch.tensor([1, 0, 2])
    with autocast():
        k = torch.nn.functional.linear(h, w)
        v = contract("bnd, de -> bne", h, w)
        torch.zeros_like(k).index_add_(0, i, v)
        k.lerp(v, 0.5)
        y = torch.zeros_like(k)
        y[k > 0] = v[k > 0]
        torch.zeros(3, 5, dtype=k.dtype).index_add_(0, i, contract(GATHERED, *gathered(3)[:2], q=indices(3, 4)))


def test_what_wins_over_autocast():
    a, b = small(3, 4), small(4, 5)
    with autocast():
        assert contract(PRODUCT, a, b, dtype=torch.float32).dtype == torch.float32
        assert contract(PRODUCT, a, b).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert contract(PRODUCT, a, b).dtype == torch.float32
        with torch.autocast("cpu", torch.float16):
            assert contract(PRODUCT, a, b).dtype == torch.float16
        assert contract(PRODUCT, a, b).dtype == torch.bfloat16
    assert contract(PRODUCT, a, b).dtype == torch.float32
    with autocast():  # it is for one device
        assert contract(PRODUCT, a.to("meta"), b.to("meta")).dtype == torch.float32


def test_plans_say_what_autocast_does():
    a, b = small(3, 4), small(4, 5)
    with autocast():
        plan = planner.plan(PRODUCT, a, b)
        assert planner.plan(PRODUCT, (3, 4), (4, 5), backend="torch").dtype == "bfloat16"
    assert "ij -> ij      cast" in str(plan)
    # Autocast does not change what a plan does.
    outside = planner.plan(PRODUCT, a, b)
    for context in (autocast, partial(autocast, enabled=False)):
        with context():
            assert plan(a, b).dtype == torch.bfloat16
            assert outside(a, b).dtype == torch.float32


@pytest.mark.parametrize("spec", [PRODUCT, "ij, jk -> kij"])
def test_the_backward_pass_in_autocast_or_not(spec):
    operands = small(3, 4), small(4, 5)
    with autocast():
        expected = gradients(torch.einsum(spec.replace(" ", ""), *operands), operands)
        result = contract(spec, *operands)
        inside = torch.autograd.grad(result, operands, like(result), retain_graph=True)
    equal(inside, expected)
    equal(gradients(result, operands), expected)


@pytest.mark.parametrize("size", [4, 400], ids=["cast pool", "cast rows"])
def test_derivatives_and_transforms_in_autocast(size):
    """Of a call that casts a pool, and of one that casts the rows that it takes of a pool."""
    a, c, q = small(12, 6), small(size, 6, 5), indices(12, size)

    def ours(a, c):
        return contract(GATHERED, a, c, q=q)

    def torchs(a, c):
        return torch.einsum("nj,njk->nk", a, c[q])

    def first(call):
        return torch.autograd.grad(call(a, c), (a, c), weight, create_graph=True)

    def second(call):
        return torch.autograd.grad(first(call), (a, c), [like(x) for x in (a, c)])

    weight = like(torch.ones(12, 5)).bfloat16()
    with autocast():
        casts = [step for step in planner.plan(GATHERED, a, c, q=q).steps if step.choice.lowering == "cast"]
        assert {len(step.op.spec.output) for step in casts} == {2, 3}
        assert max(step.op.spec.output_shape[0] for step in casts) == 12
        for way in (
            first,
            second,
            lambda call: torch.func.grad(lambda a, c: (call(a, c) * weight).sum(), (0, 1))(a, c),
            lambda call: torch.func.jvp(call, (a.detach(), c.detach()), (a.detach() + 1, c.detach() - 1)),
            lambda call: [torch.func.vmap(call, (None, 0))(a.detach(), torch.stack([c, -c]).detach())],
            lambda call: [torch.compile(call, backend="eager", fullgraph=True)(a, c)],
        ):
            equal(way(ours), way(torchs))


def test_sizes_that_change_share_a_plan():
    """Members of a family cast their operands too."""
    with autocast():
        for n in (20, 21, 22):
            a, c, q = gathered(n)
            equal([contract(GATHERED, a, c, q=q)], [torch.einsum("nj,njk->nk", a, c[q])])
            equal([contract("aj, j -> a", a, c[0, :, 0])], [torch.einsum("aj,j->a", a, c[0, :, 0])])


# -- autocast: what is kept ------------------------------------------------------------------------


def kept(call):
    """The result, and the bytes of the floats that autograd saves, each storage once."""
    storages = {}

    def save(x):
        if x.is_floating_point():
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        result = call()
    return result, sum(storages.values())


@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, True)])
def test_bytes_that_are_kept(grads):
    """The casts that a gradient reads, as einsum; a mixture of experts keeps less than einsum after indexing."""
    a, b = (torch.ones(shape).requires_grad_(g) for shape, g in zip([(4096, 512), (512, 512)], grads, strict=True))
    with autocast():
        plan = planner.plan(PRODUCT, a, b)
        assert kept(lambda: contract(PRODUCT, a, b))[1] == plan.cost.retained_bytes
        assert kept(lambda: plan(a, b))[1] == plan.cost.retained_bytes
        assert kept(lambda: torch.einsum("ij,jk->ik", a, b))[1] == plan.cost.retained_bytes
    x, c = (torch.ones(shape).requires_grad_(g) for shape, g in zip([(5000, 64), (8, 64, 32)], grads, strict=True))
    q = indices(5000, 8)
    with autocast():
        plan = planner.plan(GATHERED, x, c, q=q)
        assert kept(lambda: contract(GATHERED, x, c, q=q))[1] == plan.cost.retained_bytes
        assert plan.cost.retained_bytes == 2 * (c.numel() * grads[0] + x.numel() * grads[1])
        assert kept(lambda: torch.einsum("nj,njk->nk", x, c[q]))[1] >= plan.cost.retained_bytes


def test_rows_are_cast_and_not_the_pool():
    pool, w, q = torch.ones(5000, 64, requires_grad=True), torch.ones(64, 32, requires_grad=True), indices(50, 5000)
    spec = "q[n]j, jk -> nk"
    with autocast():
        plan = planner.plan(spec, pool, w, q=q)
        assert [step.choice.lowering for step in plan.programs.forward.steps] == ["take", "cast", "cast", "matmul"]
        result, saved = kept(lambda: contract(spec, pool, w, q=q))
        expected = torch.einsum("nj,jk->nk", pool[q], w)
    assert saved == plan.cost.retained_bytes == 2 * (50 * 64 + 64 * 32)
    equal(gradients(result, [pool, w]), gradients(expected, [pool, w]))


def test_sums_come_before_the_cast():
    """They are formed in float32, as torch.einsum does: bfloat16 would round each of these to 256."""
    a, b = torch.full((3, 4), 257.0), torch.ones(3, 5)
    with autocast():
        assert torch.equal(contract("ij, ik -> k", a, b), torch.einsum("ij,ik->k", a, b))


@pytest.mark.parametrize(("spec", "in_autocast"), [(GATHERED, True), (GATHERED, False), (PRODUCT, True)])
def test_an_operand_that_no_gradient_reads_is_freed(spec, in_autocast):
    """Of an activation its cast copy stays, or nothing if all other operands are constants."""
    h, c, q = gathered(6)
    arrays = {"q": q} if spec == GATHERED else {}
    c = (c if arrays else c[0]).detach().requires_grad_(in_autocast)
    h = h * 1
    freed = weakref.ref(h)
    with autocast(enabled=in_autocast):
        result = contract(spec, h, c, **arrays)
    del h
    gc.collect()
    assert freed() is None
    result.sum().backward()


# -- inference mode, settings, defaults ------------------------------------------------------------


@pytest.mark.parametrize("inferred", [*itertools.product([True, False], repeat=3)])
@pytest.mark.parametrize("trains", [(True, False), (False, True), (True, True)])
def test_tensors_of_inference_mode_beside_trainable_ones(inferred, trains):
    """Autograd saves no tensors of inference mode, so a gradient that reads one reads a copy."""
    values = small(12, 6, grad=False), small(4, 6, 5, grad=False), indices(12, 4)
    with torch.inference_mode():
        copies = [x.clone() for x in values]
    *operands, q = (own if use else x for own, x, use in zip(copies, values, inferred, strict=True))
    operands = [x if x.is_inference() else x.clone().requires_grad_(t) for x, t in zip(operands, trains, strict=True)]
    plain = [x.clone().requires_grad_(x.requires_grad) for x in operands]
    result, expected = contract(GATHERED, *operands, q=q), contract(GATHERED, *plain, q=values[2])
    equal([result], [expected])
    if expected.requires_grad:
        wanted = [[x for x in some if x.requires_grad] for some in (operands, plain)]
        firsts, others = (
            torch.autograd.grad(y, some, like(y), create_graph=True)
            for y, some in zip((result, expected), wanted, strict=True)
        )
        equal(firsts, others)
        if len(wanted[0]) == 2:
            equal(gradients(firsts[0], wanted[0][1:]), gradients(others[0], wanted[1][1:]))


SURROUNDINGS = {
    "deterministic": lambda on: torch.use_deterministic_algorithms(on),
    "default dtype": lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
    "default device": lambda on: torch.set_default_device("meta" if on else None),
    "anomaly": lambda on: torch.autograd.set_detect_anomaly(on),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("size", [4, 5, 6])  # new to the first of them, and met before
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_settings_change_no_value(name, size):
    a, c, q = gathered(40, size)
    specs = {GATHERED: {}, "nj, q[n]jk -> q[n]k": {}, "nj, q[n]jk -> k": {"index_mode": "drop"}}
    expected = {}
    for spec, options in specs.items():
        result = contract(spec, a, c, q=q, **options) if size != 4 else None
        expected[spec] = result
    SURROUNDINGS[name](True)
    try:
        for spec, options in specs.items():
            found = contract(spec, a, c, q=q, **options)
            torch.autograd.grad(found.sum(), (a, c))
            prepared = planner.group(q, size, **options)
            assert torch.equal(contract(spec, a, c, q=prepared, **options), found)
            assert (found.dtype, found.device.type) == (torch.float32, "cpu")
            assert expected[spec] is None or torch.equal(found, expected[spec])
    finally:
        SURROUNDINGS[name](False)


# -- what overrides torch's functions ----------------------------------------------------------------


class Noted(TorchFunctionMode):
    """Notes the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Box:
    """No tensor, but it stands for one in torch's functions."""

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        def opened(x):
            return x.x if isinstance(x, Box) else x

        return Box((func, func(*tree_map(opened, args), **tree_map(opened, kwargs or {}))))


class Labelled(torch.Tensor):
    """A subclass of the plainest kind."""


class Wrapped(torch.Tensor):
    """A tensor that runs operators on another, as distributed and quantized ones do."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(
            cls, x.size(), strides=x.stride(), dtype=x.dtype, requires_grad=x.requires_grad
        )

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def opened(x):
            return x.x if isinstance(x, Wrapped) else x

        result = func(*tree_map(opened, args), **tree_map(opened, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, result)


def call_forms(a, c, q):
    """Calls of every form, each with the operands that it takes."""
    return [
        (partial(contract, GATHERED, q=q), [a, c]),
        (partial(contract, PRODUCT), [a, c[0]]),
        (lambda *xs: contract(PRODUCT, list(xs), dtype=torch.float64), [a, c[0]]),
        (lambda a, c: contract(a, [0, 1], c, [1, 2], [0, 2]), [a, c[0]]),
        (lambda a, c: contract(GATHERED, a, c, q=q, index_mode="clip"), [a, c]),
    ]


def test_a_mode_sees_one_call():
    """As it sees one `torch.einsum`, on the first call and later."""
    for call, operands in call_forms(*gathered(13)):
        for _ in range(2):
            with Noted() as outer, Noted() as inner:
                found = call(*operands)
            assert outer.seen == inner.seen == [contract]
            equal([found], [call(*operands)])
    plan = planner.plan(PRODUCT, small(3, 4), small(4, 5))
    with Noted() as mode:
        plan(small(3, 4).detach(), small(4, 5).detach())
    assert [func.__name__ for func in mode.seen if not hasattr(func, "__self__")].count("run_plan") == 1


def test_objects_that_stand_for_tensors():
    a, c, q = gathered(14)
    for call, operands in call_forms(a, c, q):
        for number in range(2):
            func, found = call(*(Box(x) if i == number else x for i, x in enumerate(operands))).x
            assert func is contract
            equal([found], [call(*operands)])
    equal([contract(GATHERED, a, c, q=Box(q)).x[1]], [contract(GATHERED, a, c, q=q)])


def test_subclasses_of_tensors():
    a, c, q = gathered(15)
    for call, operands in call_forms(a, c, q):
        expected = [call(*operands), *gradients(call(*operands), operands)]
        for kind in (Labelled, Wrapped):
            own = [kind(x.detach()).requires_grad_() for x in operands]
            found = [y := call(*own), *torch.autograd.grad(y, own, torch.ones_like(y) * like(call(*operands).detach()))]
            assert type(found[0]) is kind
            equal([x.x if kind is Wrapped else x.as_subclass(torch.Tensor) for x in found], expected)


@pytest.mark.parametrize(
    ("spec", "shapes", "rows", "sizes"),
    [
        ("q[n]j -> j", [(4, 3)], 0, None),
        ("nj -> q[n]j", [(0, 3)], 0, {"q": 3}),
        ("q[n]j -> nj", [(4, 0)], 2, None),
        ("nj, q[n]jk -> nk", [(0, 3), (4, 3, 2)], 0, None),
    ],
)
def test_no_rows_have_gradients_and_tangents(spec, shapes, rows, sizes):
    """Where torch's own operators run a call: on other kinds of tensors, and in forward mode."""
    operands, q = [small(*shape) for shape in shapes], torch.zeros(rows, dtype=torch.int64)
    own = [Wrapped(x.detach()).requires_grad_() for x in operands]
    found = torch.autograd.grad(contract(spec, *own, q=q, sizes=sizes).sum(), own)
    assert all((g.x == 0).all() for g in found)
    with forward_ad.dual_level():
        for number in range(len(operands)):
            given = [x.detach() for x in operands]
            given[number] = forward_ad.make_dual(given[number], torch.ones_like(given[number]))
            result, tangent = forward_ad.unpack_dual(contract(spec, *given, q=q, sizes=sizes))
            assert torch.equal(tangent, torch.zeros_like(result))


class Gathers(torch.nn.Module):
    """A module that calls planner on its arguments."""

    def forward(self, a, c, q):
        return contract(GATHERED, a, c, q=q, minimize="flops").relu()


def test_fx_records_a_call():
    traced = torch.fx.symbolic_trace(Gathers())
    call = next(node for node in traced.graph.nodes if node.target is contract)
    assert call.args[0] == GATHERED
    assert call.kwargs["minimize"] == "flops"
    equal([traced(*gathered())], [Gathers()(*gathered())])


# -- modules -----------------------------------------------------------------------------------------


class Graph(torch.nn.Module):
    """A layer over the edges of a graph."""

    def __init__(self, q, size, mode="raise"):
        super().__init__()
        self.weight = torch.nn.Parameter(small(size, 6, 5, grad=False))
        self.q = planner.group(q, size, index_mode=mode)
        self.mode = mode

    def forward(self, a):
        return contract(GATHERED, a, self.weight, q=self.q, index_mode=self.mode)


def stored(x, **options):
    """What `torch.load` reads of what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


def test_prepared_indices_move_with_their_module():
    module, a = Graph(indices(12, 4), 4), small(12, 6)
    expected = module(a)
    groups = module.q.groups
    moved = copy.deepcopy(module).to("meta")
    assert {x.device.type for x in (moved.q, moved.q.groups.order, moved.q.groups.offsets)} == {"meta"}
    assert moved(a.to("meta")).shape == expected.shape
    with pytest.raises(planner.PlannerError, match="'q' is on meta, but operand 0 on cpu"):
        contract(GATHERED, a, module.weight, q=moved.q)
    half = module.half()
    assert half.q.groups is groups  # index arrays are not cast
    equal([half(a.half())], [expected.half()])
    assert "q): TorchIndex((12,), size=4, index_mode='raise')" in str(module)


@pytest.mark.parametrize("mode", planner.language.options.INDEX_MODES)
def test_stacked_modules_with_prepared_indices(mode):
    """`torch.func.stack_module_state` makes one array of the index arrays of all modules."""
    bad = [7, -9] if mode != "raise" else [1, 2]
    modules, a = [Graph(torch.tensor([n, 3, 1, *bad, n]), 4, mode) for n in range(3)], small(6, 6, grad=False)
    parameters, buffers = torch.func.stack_module_state(modules)

    def call(parameters, buffers, a):
        return torch.func.functional_call(modules[0], (parameters, buffers), (a,)).nan_to_num()

    def gradients(parameters, buffers, a):
        return torch.func.grad(lambda ps: call(ps, buffers, a).square().sum())(parameters)["weight"]

    expected = torch.stack([module(a).nan_to_num() for module in modules])
    equal([torch.func.vmap(call, (0, 0, None))(parameters, buffers, a)], [expected])
    firsts = [torch.autograd.grad(module(a).nan_to_num().square().sum(), module.weight)[0] for module in modules]
    equal([torch.func.vmap(gradients, (0, 0, None))(parameters, buffers, a)], [torch.stack(firsts)])
    assert torch.equal(modules[0](a).nan_to_num(), expected[0])  # nothing of the stack is left behind


@pytest.mark.parametrize("mode", planner.language.options.INDEX_MODES)
def test_prepared_indices_are_in_the_state(mode):
    bad = [7, -9] if mode != "raise" else [1, 2]
    q, other = torch.tensor([0, 3, 1, 1, *bad]), torch.tensor([3, 2, 1, 0, 0, 0])
    first, second, a = Graph(q, 4, mode), Graph(other, 4, mode), small(6, 6)
    before = second(a)
    state = stored(first.state_dict(), weights_only=True)
    second.load_state_dict(state)
    equal([second(a).nan_to_num()], [first(a).nan_to_num()])
    assert not torch.equal(before.nan_to_num(), second(a).nan_to_num())
    assert second.q.may_drop == first.q.may_drop == (mode in ("drop", "nan"))
    third = Graph(other, 4, mode)
    third.load_state_dict(state, assign=True)
    equal([third(a).nan_to_num()], [first(a).nan_to_num()])


@pytest.mark.parametrize("mode", planner.language.options.INDEX_MODES)
def test_copies_of_prepared_indices(mode):
    q = torch.tensor([[0, 3], [1, 1], [2, 0]]) + (5 if mode != "raise" else 0)
    index, a, c = planner.group(q, 4, index_mode=mode), small(3, 2, 6), small(4, 6, 5)
    call = partial(contract, "nmj, q[nm]jk -> nmk", a, c, index_mode=mode)
    for own in (copy.deepcopy(index), copy.copy(index), stored(index, weights_only=False), stored([index])[0]):
        assert torch.equal(own.values, index.values)
        assert (own.size, own.mode, own.may_drop) == (index.size, index.mode, index.may_drop)
        equal([call(q=own).nan_to_num()], [call(q=q).nan_to_num()])


def test_a_module_with_a_prepared_index_compiles():
    module, a = Graph(indices(12, 4), 4), small(12, 6)
    equal([torch.compile(module, backend="eager", fullgraph=True)(a)], [module(a)])
    torch.compiler.reset()


def test_plans_are_stored():
    a, c, q = gathered()
    plan = planner.plan(GATHERED, a, c, q=q, minimize="peak")
    for own in (stored(plan), stored({"plan": plan})["plan"], stored(plan, weights_only=False), copy.deepcopy(plan)):
        assert own == plan
        equal([own(a, c, q=q)], [plan(a, c, q=q)])


def test_another_process_loads_plans_and_indices(tmp_path):
    a, c, q = gathered()
    torch.save([planner.plan(GATHERED, a, c, q=q), planner.group(q, 4)], tmp_path / "stored")
    program = f"""
import torch, planner
plan, index = torch.load({str(tmp_path / "stored")!r})
assert plan(torch.ones(12, 6), torch.ones(4, 6, 5), q=index).shape == (12, 5)
"""
    run_python(program)


def test_calls_of_plans_check_devices():
    a, c, q = gathered()
    plan = planner.plan(GATHERED, a, c, q=q)
    for operands, index in (((a.to("meta"), c), q), ((a, c.to("meta")), q), ((a.to("meta"), c.to("meta")), q)):
        with pytest.raises(planner.PlannerError, match="is on .*, but operand 0 on .*: move one of them"):
            plan(*operands, q=index)
    assert plan(a.to("meta"), c.to("meta"), q=q.to("meta")).is_meta


WRONG_CALLS = {
    "dtype": lambda a, c, q: ((a.double(), c), {"q": q}),
    "shape": lambda a, c, q: ((a[:3], c), {"q": q}),
    "count": lambda a, c, q: ((a,), {"q": q}),
    "no operand": lambda a, c, q: ((), {"q": q}),
    "device": lambda a, c, q: ((a, c.to("meta")), {"q": q}),
    "framework": lambda a, c, q: ((a.detach().numpy(), c), {"q": q}),
    "array": lambda a, c, q: ((a.tolist(), c), {"q": q}),
    "sparse": lambda a, c, q: ((a.to_sparse(), c), {"q": q}),
    "no index": lambda a, c, q: ((a, c), {}),
    "name": lambda a, c, q: ((a, c), {"r": q}),
    "two names": lambda a, c, q: ((a, c), {"q": q, "r": q}),
    "index dtype": lambda a, c, q: ((a, c), {"q": q.float()}),
    "index shape": lambda a, c, q: ((a, c), {"q": q[:5]}),
    "index framework": lambda a, c, q: ((a, c), {"q": q.numpy()}),
    "sparse index": lambda a, c, q: ((a, c), {"q": q.to_sparse()}),
    "prepared for another size": lambda a, c, q: ((a, c), {"q": planner.group(q, 9)}),
    "prepared in another mode": lambda a, c, q: ((a, c), {"q": planner.group(q, 4, "drop")}),
    "value": lambda a, c, q: ((a, c), {"q": q + 9}),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_of_a_plan_are_refused_after_good_ones(name):
    """A plan remembers which arrays were checked."""
    a, c, q = gathered()
    operands, index = WRONG_CALLS[name](a, c, q)
    messages = []
    for good in 0, 2:
        plan = planner.plan(GATHERED, a, c, q=q)
        for _ in range(good):
            plan(a, c, q=q)
            plan(a, c, q=planner.group(q, 4))
        with pytest.raises(planner.PlannerError) as caught:
            plan(*operands, **index)
        messages.append((type(caught.value), str(caught.value)))
        planner.caches().clear()
    assert messages[0] == messages[1]


def test_calls_of_plans_see_strides():
    """Operands of other strides are taken, but a memory limit holds for those that the plan was made for."""
    spec, a, b = "ijk, jlk -> il", small(6, 3, 4), small(3, 5, 4)
    turned = a.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    plan, limited = planner.plan(spec, a, b), planner.plan(spec, a, b, memory_limit="1 MB")
    equal([plan(turned, b)], [plan(a, b)])
    _, saved = kept(lambda: plan(turned, b))
    assert saved == 4 * (a.numel() + b.numel())  # the operands themselves, and no copies
    equal([limited(a, b)], [plan(a, b)])
    with pytest.raises(planner.PlannerError, match=r"operand 0 has strides .*memory limit.*make a new plan"):
        limited(turned, b)


def test_a_mode_for_index_arrays_sees_warm_calls():
    class Index(torch.Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen += func is planner.contract
            return super().__torch_function__(func, types, args, kwargs or {})

    q = torch.tensor([0, 2, 1]).as_subclass(Index)
    for _ in range(3):
        planner.contract("nj, q[n]j -> n", torch.ones(3, 2), torch.ones(4, 2), q=q)
    assert Index.seen == 3


def test_tensors_without_values_may_be_on_a_card_whether_there_is_one_or_not():
    with FakeTensorMode():
        a, c = torch.empty(300, 2, 64, device="cuda"), torch.empty(8, 64, 48, device="cuda")
        result = planner.contract("nij, q[n]jk -> nik", a, c, q=torch.zeros(300, dtype=torch.long, device="cuda"))
        assert (result.shape, result.device.type) == ((300, 2, 48), "cuda")
        assert planner.einsum("nij->jin", a).stride() == torch.einsum("nij->jin", a).stride()


@pytest.mark.parametrize("needs", [False, True])
def test_gathers_under_vmap_run_as_the_calls_that_they_are_without_it(needs, monkeypatch):
    """Values are those of a loop; a Function, which takes a millisecond under `torch.func`, is not applied."""

    def refuse(*_):
        raise AssertionError("a Function was applied")

    x, c = torch.arange(24.0).reshape(3, 4, 2) % 5, torch.arange(60.0).reshape(5, 2, 6) % 3
    q = torch.tensor([[0, 4, 1, 1], [2, 2, 0, 3], [4, 0, 0, 1]])
    torch.vmap(lambda x, q: contract(GATHERED, x, c, q=q))(x, q)  # plans
    monkeypatch.setattr(torch.autograd.Function, "apply", refuse)

    def call(x, c, q):
        return contract(GATHERED, x, c, q=q)

    def of_sum(x, c, q):
        return torch.func.grad(lambda x, c: (call(x, c, q) ** 2).sum(), argnums=(0, 1))(x, c)

    run = of_sum if needs else lambda *arguments: [call(*arguments)]
    found = torch.vmap(run, (0, None, 0))(x, c, q)
    loop = [run(x[n], c, q[n]) for n in range(3)]
    for results, expected in zip(found, zip(*loop, strict=True), strict=True):
        assert torch.equal(results, torch.stack(expected))


def test_the_range_of_index_arrays_under_vmap_is_checked():
    x, c, q = torch.ones(3, 4, 2), torch.ones(5, 2, 6), torch.tensor([[0, 4, 1, 1], [2, 2, 0, 3], [4, 0, 5, 1]])
    with pytest.raises(planner.IndexRangeError):
        torch.vmap(lambda x, q: contract(GATHERED, x, c, q=q))(x, q)
    dropped = torch.vmap(lambda x, q: contract(GATHERED, x, c, q=q, index_mode="drop"))(x, q)
    assert torch.equal(dropped[2, 2], torch.zeros(6))
    assert torch.equal(torch.vmap(lambda x, q: contract(GATHERED, x, c, q=q))(x, q - 1)[2, 2], torch.full((6,), 2.0))


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (1, 0)])
def test_functions_under_vmap_are_not_applied_by_torch(dims, monkeypatch):
    a, b = torch.arange(36.0).reshape(3, 3, 4), torch.arange(60.0).reshape(3, 4, 5)
    shapes = [x if dim is not None else x[0] for x, dim in zip((a, b), dims, strict=True)]
    expected = torch.vmap(torch.matmul, dims)(*shapes)
    monkeypatch.setattr(torch.autograd.Function, "apply", lambda *_: 1 / 0)
    limited = partial(contract, PRODUCT, memory_limit="1 MB")
    assert torch.equal(torch.vmap(limited, dims)(*shapes), expected)


def test_a_plan_is_called_under_jit_trace():
    a, c, q = torch.ones(3, 2), torch.ones(4, 2, 5), torch.tensor([0, 2, 1])
    plan = planner.plan("nj, q[n]jk -> nk", a, c, q=q)
    traced = torch.jit.trace(lambda a, c, q: plan(a, c, q=q), (a, c, q))
    assert torch.equal(traced(a + 1, c, q), plan(a + 1, c, q=q))


@pytest.mark.parametrize(
    ("spec", "shapes", "arrays"),
    [
        ("bc,abc->c", [(2, 2), (2, 2, 2)], {}),
        ("dba,cq[d]a->ac", [(7, 20, 17), (9, 20, 17)], {"q": torch.randint(0, 20, (7,))}),
    ],
)
def test_sums_before_a_product_have_gradients_in_autocast(spec, shapes, arrays):
    """Such a sum and the product are one call of einsum where no gradient is asked for."""
    operands = [torch.ones(shape, requires_grad=True) for shape in shapes]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = contract(spec, *operands, **arrays)
    if arrays:
        expected = torch.einsum("dba,cda->ac", operands[0], operands[1][:, arrays["q"]])
    else:
        expected = torch.einsum(spec, *operands)
    assert found.dtype == torch.bfloat16
    gradients = (torch.autograd.grad(out.float().sum(), operands) for out in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)
