"""What compilers and tracers of torch record runs on other sizes too, with the values and gradients of eager calls."""

import dataclasses
import io
import shutil
import warnings

import numpy as np
import pytest
from conftest import examples
from engines import Torch
from hypothesis import example, given, settings
from laws import directional, exact_problems

import planner
from planner.testing import Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402
from torch.export import Dim  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

GATHER = "nij, q[n]jk -> nik"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def forgotten():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# -- random specs ----------------------------------------------------------------------------------------


def doubled(problem):
    """The problem with every size but 1 doubled; sizes that only the call gives stay. None if that is no problem."""
    spec, shown = problem.resolved(), set()
    for term in spec.inputs:
        shown |= {entry if isinstance(entry, str) else entry.array for entry in term}
    shown |= {axis for gather in spec.gathers for axis in gather.axes}
    if isinstance(problem.sizes, tuple) or shown & set(problem.sizes or ()):
        return None
    shapes = tuple(tuple(n if n == 1 else 2 * n for n in shape) for shape in problem.shapes)
    indices = {name: np.tile(q, [1 if n == 1 else 2 for n in q.shape]) for name, q in problem.indices.items()}
    larger = dataclasses.replace(problem, shapes=shapes, indices=indices)
    return larger if larger.is_exact(2) else None


class Call:
    """A problem as a function of tensors, operands first, and the arguments of it."""

    def __init__(self, problem):
        self.problem, self.names = problem, [*problem.indices]

    def __call__(self, *arrays):
        operands, arrays = arrays[: len(self.problem.shapes)], arrays[len(self.problem.shapes) :]
        given = dict(zip(self.names, arrays, strict=True))
        problem = self.problem
        return planner.contract(problem.spec, *operands, sizes=problem.sizes, index_mode=problem.index_mode, **given)

    @staticmethod
    def arguments(problem):
        return [*Torch().operands(problem), *(torch.from_numpy(q) for q in problem.indices.values())]


def agrees(function, problem, gradients=True):
    """The function gives what the oracle gives, and so do its gradients."""
    arguments, wanted = Call.arguments(problem), problem.expected()
    result = function(*arguments)
    assert result.shape == wanted.shape
    assert np.array_equal(result.detach().numpy(), wanted)
    leaves = [arguments[number] for number in problem.wanted]
    if gradients and leaves:
        found = torch.autograd.grad(result, leaves, torch.from_numpy(problem.output_gradient()))
        expected = problem.expected_gradients()
        for number, x in zip(problem.wanted, found, strict=True):
            assert np.array_equal(x.numpy(), expected[number])


def under_compile(problem, larger):
    made = torch.compile(Call(problem), fullgraph=True, backend="aot_eager", dynamic=False)
    agrees(made, problem)
    with torch.no_grad():
        agrees(made, problem, gradients=False)


def under_dynamic_compile(problem, larger):
    made = torch.compile(Call(problem), fullgraph=True, backend="aot_eager", dynamic=True)
    for each in filter(None, (problem, larger)):
        agrees(made, each)


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *arrays):
        return self.call(*arrays)


def under_export(problem, larger):
    arguments = Call.arguments(problem)
    sizes = tuple(tuple(Dim.AUTO for _ in x.shape) for x in arguments)
    for strict in (False, True):
        exported = torch.export.export(Module(Call(problem)), tuple(arguments), dynamic_shapes=(sizes,), strict=strict)
        for each in filter(None, (problem, larger)):
            agrees(exported.module(), each)


def under_trace(problem, larger):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda *xs: Call(problem)(*xs), tuple(Call.arguments(problem)))
    for each in filter(None, (problem, larger)):
        agrees(traced, each)


def under_make_fx(problem, larger):
    for mode in ("real", "fake", "symbolic"):
        made = make_fx(Call(problem), tracing_mode=mode)(*(x.detach() for x in Call.arguments(problem)))
        for each in (problem, larger if mode == "symbolic" else None):
            if each is not None:
                agrees(made, each, gradients=False)


def under_functionalize(problem, larger):
    agrees(torch.func.functionalize(Call(problem)), problem)


def under_vmap(problem, larger):
    arguments, wanted = [x.detach() for x in Call.arguments(problem)], problem.expected()
    stacked = torch.stack([arguments[0], 2 * arguments[0]])
    rest = arguments[1:]
    result = torch.func.vmap(Call(problem), (0, *(None for _ in rest)))(stacked, *rest)
    assert np.array_equal(result.numpy(), np.stack([wanted, 2 * wanted]))


def tangents(problem):
    return dataclasses.replace(problem, seed=problem.seed + 1).operands()


def under_jvp(problem, larger, linearize=False):
    arguments, call = [x.detach() for x in Call.arguments(problem)], Call(problem)
    operands, indices = arguments[: len(problem.shapes)], arguments[len(problem.shapes) :]
    along = tangents(problem)
    if linearize:
        result, linear = torch.func.linearize(lambda *xs: call(*xs, *indices), *operands)
        tangent = linear(*map(torch.from_numpy, along))
    else:
        result, tangent = torch.func.jvp(
            lambda *xs: call(*xs, *indices), tuple(operands), tuple(map(torch.from_numpy, along))
        )
    assert np.array_equal(result.numpy(), problem.expected())
    assert np.array_equal(tangent.numpy(), directional(problem, problem.operands(), along))


def under_linearize(problem, larger):
    under_jvp(problem, larger, linearize=True)


TRACERS = {
    "compile": (under_compile, 4),
    "dynamic compile": (under_dynamic_compile, 4),
    "export": (under_export, 3),
    "jit.trace": (under_trace, 5),
    "make_fx": (under_make_fx, 4),
    "functionalize": (under_functionalize, 10),
    "vmap": (under_vmap, 10),
    "jvp": (under_jvp, 10),
    "linearize": (under_linearize, 8),
}


@pytest.mark.parametrize("name", TRACERS)
def test_random_specs(name):
    function, count = TRACERS[name]

    @settings(max_examples=examples(count, 200))
    @example(Problem("q[ab] a -> q[aa]", ((2, 2),), indices={"q": np.zeros((2, 2), np.int64)}))
    @given(exact_problems(slack=4, max_size=3, gathers=True))
    def law(problem):
        torch.compiler.reset()
        function(problem, doubled(problem))

    law()


# -- graphs that are compiled once for many sizes --------------------------------------------------------


def integers(*shape, high=None):
    generator = torch.Generator().manual_seed(sum(shape) + (high or 0))
    if high is not None:
        return torch.randint(0, high, shape, generator=generator)
    return torch.randint(-3, 4, shape, generator=generator).float()


def leaves(*arrays):
    return [x.clone().requires_grad_() if x.is_floating_point() else x for x in arrays]


def is_dense(x):
    """Whether elements lie next to each other, in some order of the dimensions."""
    return x.permute(sorted(range(x.dim()), key=lambda d: -x.stride(d))).is_contiguous()


def equal(function, other, arrays, strides=True):
    """Two functions give the same values and gradients, and the same strides; or one lies densely in another order."""
    results = []
    for each in (function, other):
        xs = leaves(*arrays)
        result = each(*xs)
        gout = torch.arange(result.numel()).reshape(result.shape).remainder(5).float()
        inputs = [x for x in xs if x.requires_grad]
        results.append((result, *torch.autograd.grad(result, inputs, gout)))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
    ours, theirs = results[0][0], results[1][0]
    assert ours.stride() == theirs.stride() or (not strides and is_dense(ours))


# A function of arrays, and from a batch size to the arrays; those with the batch size in front come first.
CALLS = {
    "layer": (lambda x, w: planner.contract("nd, de -> ne", x, w), lambda n: (integers(n, 3), integers(3, 5))),
    "broadcast": (
        lambda x, y: planner.contract("nij, nij -> nj", x, y), lambda n: (integers(n, 1, 3), integers(1, 4, 3)),
    ),
    "repeated": (
        lambda x: planner.contract("nd -> ndk", x, sizes={"k": x.shape[0]}), lambda n: (integers(n, 3),),
    ),
    "gather": (
        lambda x, q, c: planner.contract(GATHER, x, c, q=q),
        lambda n: (integers(n, 2, 3), integers(n, high=7), integers(7, 3, 5)),
    ),
    "dropped": (
        lambda x, q, c: planner.contract(GATHER, x, c, q=q, index_mode="drop"),
        lambda n: (integers(n, 2, 3), integers(n, high=9) - 1, integers(7, 3, 5)),
    ),
    "message passing": (
        lambda s, r, t, h, w: planner.contract("s[e]d, r[e]dk -> t[e]k", h, w, s=s, r=r, t=t, sizes={"t": 6}),
        lambda n: (*(integers(n, high=m) for m in (10, 3, 6)), integers(10, 4), integers(3, 4, 4)),
    ),
    "scatter": (
        lambda x, q: planner.contract("nij -> q[n]ij", x, q=q, sizes={"q": x.shape[0]}),
        lambda n: (integers(n, 2, 3), integers(n, high=7)),
    ),
}  # fmt: skip
BATCHES = (13, 14, 15, 16, 17, 18, 19, 20, 31, 32, 33, 64, 65, 100, 128, 200, 257, 300, 512, 1000)


@pytest.mark.parametrize(
    ("name", "how", "graphs"),
    [
        ("layer", None, 2), ("broadcast", True, 1), ("repeated", True, 1), ("gather", None, 2), ("gather", True, 1),
        ("gather", "marked", 1), ("dropped", True, 1), ("message passing", True, 1), ("scatter", None, 2),
    ],
)  # fmt: skip
def test_one_graph_serves_all_batch_sizes(name, how, graphs):
    call, arrays_of = CALLS[name]
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(call, fullgraph=True, backend=counter, dynamic=True if how is True else None)

    def marked(*arrays):
        for x in arrays:
            if x.shape[0] == n and how == "marked":
                torch._dynamo.mark_dynamic(x, 0)
        return made(*arrays)

    for n in BATCHES:  # a graph's results lie as those of the size that it was planned for
        equal(marked, call, arrays_of(n), strides=False)
    assert counter.frame_count == graphs


def test_one_graph_serves_all_prepared_indices_of_a_shape():
    """Whether rows are in order and how long the longest group is differs from index to index: no graph holds it."""
    counter = CompileCounterWithBackend("eager")
    generator = torch.Generator().manual_seed(0)
    x, c = (torch.randint(-3, 4, shape, generator=generator).double() for shape in ((40, 2, 3), (5, 3, 4)))

    def function(x, c, q):
        return planner.contract(GATHER, x, c, q=q)

    made = torch.compile(function, fullgraph=True, backend=counter)
    raw = [torch.randint(0, 5, (40,), generator=generator), torch.arange(40) // 8, torch.zeros(40, dtype=torch.long)]
    prepared = [planner.group(q, 5) for q in raw]
    assert {(q.in_order, q.longest) for q in prepared} >= {(True, 8), (True, 40)}
    for q in prepared:
        assert (made(x, c, q) == function(x, c, q)).all()
    assert counter.frame_count == 1


@pytest.mark.parametrize("transform", ["vmap of grad", "jvp", "second derivative", "vmap over indices"])
def test_transforms_in_one_graph(transform):
    def contract(x, q, c):
        return planner.contract(GATHER, x, c, q=q)

    def loss(x, q, c):
        return contract(x, q, c).square().sum()

    def function(x, q, c):
        if transform == "vmap of grad":
            return torch.func.vmap(lambda x: torch.func.grad(loss)(x, q, c))(torch.stack([x, 2 * x]))
        if transform == "jvp":
            return torch.func.jvp(lambda x, c: contract(x, q, c), (x, c), (x + 1, c + 1))[1]
        if transform == "second derivative":
            return torch.func.grad(lambda x: torch.func.grad(loss)(x, q, c).square().sum())(x)
        return torch.func.vmap(lambda q: contract(x, q, c))(torch.stack([q, q]))

    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for n in (13, 20, 33):
        arrays = integers(n, 2, 3), integers(n, high=7), integers(7, 3, 5)
        assert torch.equal(made(*arrays), function(*arrays))
    assert counter.frame_count == 1


def test_sizes_that_depend_on_values():
    """Symbols without a size are planned as 1,024, and may be 0 when the graph runs."""

    def function(x, c):
        chosen = torch.nonzero(x[:, 0, 0] > 0)[:, 0]
        return planner.contract(GATHER, x[chosen], c, q=chosen % 4)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        made = torch.compile(function, fullgraph=True, backend="aot_eager")
        for x in (integers(20, 2, 3), torch.zeros(20, 2, 3)):
            assert torch.equal(made(x, integers(4, 3, 5)), function(x, integers(4, 3, 5)))


def test_a_limit_holds_for_the_sizes_of_each_graph():
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(
        lambda *xs: planner.contract("ij,jk,ki->i", *xs, memory_limit="24 kB"), fullgraph=True, backend=counter,
        dynamic=True,
    )  # fmt: skip
    for n in (30, 40):
        arrays = [integers(n, n) for _ in range(3)]
        assert torch.equal(made(*arrays), planner.contract("ij,jk,ki->i", *arrays))
    assert counter.frame_count == 2


def saved_bytes(function, arrays):
    """The bytes that are saved for the backward pass, but for the operands and index arrays themselves."""
    own, saved = {x.untyped_storage().data_ptr() for x in arrays}, {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function(*arrays)
    assert result.requires_grad
    return sum(size for pointer, size in saved.items() if pointer not in own)


def test_a_compiled_small_gather_is_recorded_as_operators_of_torch():
    """Also where it multiplies rows of a pool that no index names: these are masked, and the pool is kept as it is."""
    recorded = []

    def record(module, _):
        recorded.extend(node.target for node in module.graph.nodes)
        return make_boxed_func(module.forward)

    def call(a, c, q):
        return planner.contract("ij, q[n]j -> in", a, c, q=q)

    made = torch.compile(
        call,
        fullgraph=True,
        backend=aot_autograd(fw_compiler=record, bw_compiler=record),
    )
    a, c, q = leaves(integers(20, 8), integers(3, 8), torch.tensor([2, 0, 2, 2, 0, 0, 2] * 60))
    with torch.no_grad():
        c[1] = torch.nan
    result, expected = made(a, c, q), torch.einsum("ij,nj->in", a, c[q])
    assert torch.equal(result, expected)
    found, wanted = (torch.autograd.grad(y.square().sum(), (a, c)) for y in (result, expected))
    assert all(map(torch.equal, found, wanted))
    assert {torch.ops.aten.mm.default, torch.ops.aten.bmm.default} & set(recorded)
    assert not {torch.ops.planner.forward.default, torch.ops.planner.backward.default} & set(recorded)
    # An index array in range at most besides.
    assert saved_bytes(made, [a, c, q]) <= saved_bytes(call, [a, c, q]) + q.nbytes


def test_a_compiled_call_keeps_what_an_eager_call_keeps():
    def call(x, q, c, w):
        return planner.contract("nij, q[n]jk, kl -> nil", x, c, w, q=q)

    made = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (8000, 9600, 32_000):  # with 4,000 rows autograd runs the plan, and keeps a product
        arrays = leaves(integers(n, 8, 3), integers(n, high=7), integers(7, 3, 9), integers(9, 4))
        kept = saved_bytes(made, arrays)
        # A compiled call may keep an index array in range in place of the given one.
        assert 0 <= kept - saved_bytes(call, arrays) <= arrays[1].nbytes
        assert 0 < kept < n * 3 * 9 * 4  # less than the gathered c[q]

    def chain(*xs):
        return planner.contract("ab, bc, cd -> ad", *xs, minimize="retained")

    made = torch.compile(chain, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (40, 500):
        arrays = leaves(integers(n, 7), integers(7, 9), integers(9, 5))
        assert saved_bytes(made, arrays) == saved_bytes(chain, arrays) == 0


def test_other_sizes_run_the_planned_implementations():
    """An operator that was recorded at one size runs the same tree at another, in one class of sizes or not."""
    a, c = integers(13, 2, 3), integers(7, 3, 5)
    plan = planner.plan(GATHER, a, c, q=integers(13, high=7), minimize="peak", backend="torch")
    for n in (1, 5, 13, 600):
        x, q = integers(n, 2, 3), integers(n, high=7)
        (result,) = torch.ops.planner.forward(plan.to_json(), '[["q", null]]', [q], [x, c])
        assert torch.equal(result, planner.contract(GATHER, x, c, q=q))
    assert torch.ops.planner.forward(plan.to_json(), '[["q", null]]', [q[:0]], [x[:0], c])[0].shape == (0, 2, 5)
    with pytest.raises(planner.IndexRangeError, match="'q'"):
        torch.ops.planner.forward(plan.to_json(), '[["q", null]]', [q[:0] + 7, q + 7][1:], [x, c])
    with pytest.raises(planner.ShapeError, match="do not fit 'nij, q"):
        torch.ops.planner.forward(plan.to_json(), '[["q", null]]', [q[:5]], [x, c])


# -- exported graphs, and those of older tracers ---------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = torch.nn.Parameter(integers(7, 3, 5))

    def forward(self, x, q):
        return planner.contract(GATHER, x.relu(), self.pool, q=q)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_an_exported_gather_is_in_its_autocast_region(strict, inside):
    class Layer(torch.nn.Module):
        def forward(self, x, c, q):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                y = planner.contract(GATHER, x, c, q=q)
            return y, planner.contract(GATHER, x, c, q=q)

    arrays = integers(13, 2, 3), integers(7, 3, 5), integers(13, high=7)
    exported = torch.export.export(Layer(), arrays, strict=strict).module()
    for got, expected in zip(exported(*arrays), Layer()(*arrays), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_gather_has_other_sizes_and_a_backward(strict):
    module, n = Layer(), Dim("n")
    arrays = integers(6, 2, 3), integers(6, high=7)
    exported = torch.export.export(module, arrays, dynamic_shapes=({0: n}, {0: n}), strict=strict)
    assert torch.ops.planner.forward.default in [node.target for node in exported.graph.nodes]
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    for loaded in (exported.module(), torch.export.load(stored).module(), exported.run_decompositions().module()):
        for size in (6, 40):
            arrays = integers(size, 2, 3), integers(size, high=7)
            equal(loaded, module, arrays)
            pools = [m.pool for m in (loaded, module)]
            gradients = [
                torch.autograd.grad(m(*arrays).square().sum(), p, create_graph=True)[0]
                for m, p in zip((loaded, module), pools, strict=True)
            ]
            assert torch.equal(*gradients)
            seconds = [torch.autograd.grad(g.square().sum(), p)[0] for g, p in zip(gradients, pools, strict=True)]
            assert torch.equal(*seconds)


def test_an_exported_graph_is_compiled_again():
    """The gradient of x, which none required when the graph was exported, is a contraction of its own."""
    module, n = Layer(), Dim("n")
    arrays = integers(6, 2, 3), integers(6, high=7)
    exported = torch.export.export(module, arrays, dynamic_shapes=({0: n}, {0: n})).module()
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(exported, fullgraph=True, backend=counter, dynamic=True)
    for size in (13, 20, 33):
        equal(made, module, (integers(size, 2, 3), integers(size, high=7)))
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")
@pytest.mark.skipif(examples(0, 1) == 0, reason="AOTInductor compiles C++ for 8 s: nightly")
def test_aot_inductor_at_other_sizes(tmp_path):
    module, n = Layer(), Dim("n", min=2, max=1024)
    exported = torch.export.export(module, (integers(6, 2, 3), integers(6, high=7)), dynamic_shapes=({0: n}, {0: n}))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "module.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for size in (6, 40):
        arrays = integers(size, 2, 3), integers(size, high=7)
        assert torch.equal(run(*arrays), module(*arrays))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [name for name in CALLS if name != "scatter"])
def test_jit_trace_at_another_batch_size(name):
    call, arrays_of = CALLS[name]
    traced = torch.jit.trace(call, tuple(leaves(*arrays_of(6))))
    stored = io.BytesIO()
    torch.jit.save(traced, stored)
    stored.seek(0)
    for function in (traced, torch.jit.load(stored)):
        for n in (6, 40):
            equal(function, call, arrays_of(n))


def test_jit_trace_warns_where_it_fixes_a_size():
    call, arrays_of = CALLS["scatter"]
    with pytest.warns(torch.jit.TracerWarning, match="Python integer"):
        torch.jit.trace(call, arrays_of(7))


def test_jit_script_says_what_to_do_instead():
    def contracts(a: torch.Tensor, b: torch.Tensor):
        return planner.contract("ij, jk -> ik", a, b)

    def multiplies(a: torch.Tensor, b: torch.Tensor):
        return planner.einsum("ij, jk -> ik", a, b)

    for function in (contracts, multiplies):
        with pytest.raises(torch.jit.frontend.NotSupportedError, match=r"use torch\.jit\.trace or torch\.export"):
            torch.jit.script(function)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_plans_run_under_make_fx(mode):
    a, c, q = torch.arange(6.0).reshape(3, 2), torch.arange(40.0).reshape(4, 2, 5), torch.tensor([0, 2, 1])
    plan = planner.plan("nj, q[n]jk -> nk", a, c, q=q)
    recorded = make_fx(lambda a, c, q: plan(a, c, q=q), tracing_mode=mode)(a, c, q)
    assert torch.equal(recorded(a + 1, c, 3 - q), plan(a + 1, c, q=3 - q))


def test_an_expression_with_constants_is_compiled_whole():
    a, b, c = (torch.arange(float(m * n)).reshape(m, n) for m, n in ((3, 4), (4, 5), (5, 6)))
    expression = planner.contract_expression("ij,jk,kl->il", (3, 4), b, c, constants=[1, 2])
    compiled = torch.compile(lambda a: expression(a), fullgraph=True, backend="aot_eager")
    for _ in "cold", "warm":
        assert torch.equal(compiled(a), a @ b @ c)


@pytest.mark.parametrize("options", [{}, {"minimize": "peak"}])
def test_transforms_that_trace(options):
    """`make_fx` in all modes, `functionalize` and `linearize`, with gradients by `torch.func`."""

    def contract(x, q, c):
        return planner.contract(GATHER, x, c, q=q, **options)

    def gradients(x, q, c):
        return torch.func.grad(lambda x, c: contract(x, q, c).square().sum(), argnums=(0, 1))(x, c)

    small, large = ((integers(n, 2, 3), integers(n, high=7), integers(7, 3, 5)) for n in (6, 40))
    functional = torch.func.functionalize
    for mode in ("real", "fake", "symbolic"):
        for function in (gradients, functional(gradients)):
            if mode == "symbolic" and function is not gradients and torch.__version__.startswith("2.11."):
                # There torch asserts falsely in such gradients of its own `index_select` too.
                for call in (gradients, lambda x, q, c: torch.func.grad(lambda c: c.index_select(0, q).sum())(c)):
                    with pytest.raises(RuntimeError, match="Expected IntList but got GenericList"):
                        make_fx(functional(call), tracing_mode=mode)(*small)
                continue
            made = make_fx(function, tracing_mode=mode)(*small)
            for arrays in (small, large) if mode == "symbolic" else (small,):
                assert all(map(torch.equal, made(*arrays), gradients(*arrays)))
    equal(functional(contract), contract, small)
    assert all(map(torch.equal, functional(gradients)(*small), gradients(*small)))
    x, q, c = small
    batch = torch.stack([x, 2 * x])
    stacked = contract(batch.flatten(0, 1), q.repeat(2), c).unflatten(0, (2, 6))
    assert torch.equal(functional(lambda xs: torch.func.vmap(lambda x: contract(x, q, c))(xs))(batch), stacked)
    assert torch.equal(torch.func.vmap(functional(lambda x: contract(x, q, c)))(batch), stacked)
    result, linear = torch.func.linearize(lambda x, c: contract(x, q, c), x, c)
    assert torch.equal(result, contract(*small))
    assert torch.equal(linear(x, 0 * c), result)
    assert torch.equal(linear(x, c), 2 * result)


@pytest.mark.parametrize("mode", ["raise", "drop"])
def test_jit_trace_without_gradients_at_another_batch_size(mode):
    """The trace holds the operator, whatever the index array was, and looks at dropped rows when it runs."""

    def call(a, c, q):
        return planner.contract("nij, q[n]jk -> nik", a, c, q=q, index_mode=mode)

    a, c = torch.arange(24.0).reshape(4, 3, 2), torch.arange(30.0).reshape(3, 2, 5)
    traced = torch.jit.trace(call, (a, c, torch.tensor([0, 2, 1, 1])))
    assert "planner::forward" in str(traced.graph)
    b, q = torch.arange(36.0).reshape(6, 3, 2), torch.tensor([2, 0, 0, 1, 2, 2])
    assert torch.equal(traced(b, c, q), call(b, c, q))
    if mode == "drop":
        b[0] = torch.nan
        q[0] = 9
        assert torch.equal(traced(b, c, q), call(b, c, q))


def test_gradients_of_real_operands_beside_complex_ones():
    def call(a, c, q):
        return planner.contract("nj, q[n]jk -> nk", a, c, q=q)

    q = torch.tensor([0, 2, 1, 1])
    c = torch.complex(torch.arange(24.0).reshape(3, 2, 4), torch.ones(3, 2, 4))
    found = []
    for function in call, torch.compile(call, backend="aot_eager", fullgraph=True):
        a = torch.arange(8.0).reshape(4, 2).requires_grad_()
        result = function(a, c, q)
        (result.real + 2 * result.imag).sum().backward()
        found.append(a.grad)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert torch.equal(*found)
