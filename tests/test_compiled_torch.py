"""`torch.compile(fullgraph=True)`: calls are recorded whole, and what runs later on is what the plan says."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from conftest import examples, run_python
from engines import Torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import MODES, exact_problems, oracle

import planner
from planner.search.space import SearchSpace
from planner.testing import Problem
from planner.testing.judgement import Subject

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402

from planner.backends.torch import index as torch_index  # noqa: E402
from planner.backends.torch.contexts import traced as torch_operators  # noqa: E402
from planner.backends.torch.executable import Executable  # noqa: E402

SPEC = "nij, q[n]jk -> nik"


@pytest.fixture(autouse=True)
def forgotten():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, **options):
    """Without a code generator, whose C++ takes seconds a function: what is tested is what is recorded."""
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def small(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-3, 4, shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def agree(function, *arguments, **options):
    """A compiled function gives the values and gradients that it gives otherwise; return it."""
    made = compiled(function, **options)
    got, expected = made(*arguments), function(*arguments)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(got, expected)
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    if expected.requires_grad:
        gout = torch.arange(got.numel()).reshape(got.shape).remainder(5).to(got.dtype)
        gradients = (torch.autograd.grad(result, leaves, gout) for result in (got, expected))
        for found, wanted in zip(*gradients, strict=True):
            assert torch.equal(found, wanted)
    return made


@pytest.mark.parametrize("axes", ["\0'{\\", "×\u2028\u00a0\u3000", "µμK\u212a"])
def test_axes_may_be_any_character(axes):
    """They stand in the operators' arguments, and in the code that the compiler writes."""
    n, i, j, k = axes
    a, c = small((6, 2, 3), (4, 3, 5))
    q = torch.tensor([0, 3, 1, 1, 2, 3])
    spec = f"{n}{i}{j}, q[{n}]{j}{k} -> {n}{i}{k}"
    agree(lambda a, c, q: planner.contract(spec, a, c, q=q), a, c, q)
    assert torch.equal(planner.contract(spec, a, c, q=q), planner.contract(SPEC, a, c, q=q))


def test_values_and_gradients():
    @settings(max_examples=examples(15, 300))
    @given(exact_problems(("float32", "complex64"), max_size=3), st.booleans())
    def law(problem, limited):
        torch.compiler.reset()
        problem = dataclasses.replace(problem, strided=True)
        call = Subject().call(problem, memory_limit="1 MB" if limited else None)
        operands, indices = Torch().operands(problem), Torch().indices(problem)

        def function(*arrays):
            return call(arrays[: len(operands)], dict(zip(indices, arrays[len(operands) :], strict=True)))

        agree(function, *operands, *indices.values())

    law()


@pytest.mark.parametrize("mode", MODES)
def test_index_modes_prepared_indices_and_transforms(mode):
    a, c = small((6, 2, 3), (4, 3, 5))
    q = torch.tensor([0, 3, -1, 1, 2, 0] if mode == "raise" else [0, 3, 9, 1, -7, 0])
    prepared = planner.group(q, 4, index_mode=mode)

    def function(a, c, q):
        return planner.contract(SPEC, a, c, q=q, index_mode=mode)

    agree(function, a, c, q)
    agree(function, a, c, prepared)
    agree(lambda a, c: function(a, c, prepared), a, c)
    a, c = a.detach(), c.detach()
    agree(lambda a, c, q: torch.func.grad(lambda a: function(a, c, q).square().sum())(a), a, c, q)
    agree(lambda a, c, q: torch.func.vmap(lambda a: function(a, c, q))(a), torch.stack([a, 2 * a]), c, q)
    forward = agree(lambda a, c, q: torch.func.jvp(lambda a: function(a, c, q), (a,), (a + 1,))[1], a, c, q)
    if mode == "raise":
        with pytest.raises(planner.IndexRangeError, match=r"'q'\[1\] is 4"):
            forward(a, c, torch.tensor([0, 4, -1, 1, 2, 0]))


@pytest.mark.parametrize(
    ("spec", "first"),
    [("nj, q[n]k -> jk", [[1, 2], [np.nan, np.nan], [3, 1]]), ("j, q[n]j -> nj", [np.inf, 1])],
)
def test_what_a_dropped_index_meets_is_looked_at_when_it_comes(spec, first):
    """NaN that only a dropped index meets, and infinity that others meet too: recorded for finite numbers."""
    arrays = [np.array(first, np.float32), np.array([[1, -2], [3, 2], [-1, 2]], np.float32)]
    problem = Problem(spec, tuple(x.shape for x in arrays), indices={"q": np.array([0, 9, 1])}, index_mode="drop")
    engine, gout = Torch(), np.ones(problem.output_shape(), np.float32)
    q = engine.indices(problem)["q"]
    made = agree(lambda *xs: planner.contract(spec, *xs, q=q, index_mode="drop"), *engine.operands(problem))
    found = engine.pulled(lambda xs, _: made(*xs), engine.leaves(arrays), {}, engine.array(gout), (0, 1))
    expected = oracle(engine, problem, arrays, gout)
    for x, (_, wanted, _) in zip(found, expected, strict=True):
        assert np.array_equal(x.detach(), wanted)
        assert not np.isnan(wanted).any()
    with torch.no_grad():
        made(*engine.operands(problem))
        assert np.array_equal(made(*map(engine.array, arrays)), expected[0][1])


def test_an_operator_shares_no_memory_with_what_it_is_given():
    (a,) = (x.detach() for x in small((2, 3)))
    plan = planner.plan("ij->ji", planner.Operand((2, 3), requires_grad=True), backend="torch")
    (result,) = torch.ops.planner.forward(plan.to_json(), "[]", [], [a])
    (gradient,) = torch.ops.planner.backward(plan.to_json(), "[]", [], result, [a], [])
    assert torch.equal(result, a.T)
    assert torch.equal(gradient, a)
    assert len({x.untyped_storage().data_ptr() for x in (a, result, gradient)}) == 3


@pytest.mark.parametrize(
    ("spec", "shapes", "options"),
    [
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)], {"optimize": [(0, 1), (0, 1)]}),
        ("ij->", [(6, 2)], {"dtype": torch.float64}),
        ("ij->j", [(6, 2)], {"dtype": "float64"}),
        ("ij->j", [(6, 2)], {"dtype": np.float64}),
        ("ij->ji", [(6, 2)], {}),
        ("ij->ijk", [(6, 2)], {"sizes": {"k": 3}}),
        ("ab,b->ca", [(6, 2), (2,)], {"sizes": {"c": 2}, "minimize": "peak"}),
        ("ij,jk,ki->i", [(40, 40)] * 3, {"memory_limit": "24 kB"}),
        ("ij,jk,ki->i", [(40, 40)] * 3, {"retain_limit": 0}),
    ],
)
def test_options(spec, shapes, options):
    """Under a memory limit a loop runs, and under a limit of what is retained values are computed again."""
    operands = small(*shapes)
    plan = planner.plan(spec, *operands, **options)
    assert (plan.loop is not None) == ("memory_limit" in options)
    assert plan.keep != "all" or "retain_limit" not in options
    agree(lambda *xs: planner.contract(spec, *xs, **options), *operands)


def test_sublists_lists_and_several_calls():
    a, b = small((6, 2), (2, 3))
    agree(lambda a, b: planner.contract(a, [0, 1], b, [1, 2], [0, 2]), a, b)
    agree(lambda a, b: planner.contract("ij, jk -> ik", [a, b]) + planner.contract("ij, jk -> ik", (a, b)), a, b)
    agree(lambda a, b: planner.einsum(a, [..., 1], b, [1, 2], [2, ...]), a, b)
    agree(lambda a: planner.einsum(a, (0, 1), [1]), torch.ones(3, 2, dtype=torch.int8))
    agree(lambda a: planner.einsum(a, [0, 1], [0, 2], sizes={2: 5}), a)
    agree(lambda a: planner.contract("ij,ij->i", a, a) + planner.contract("ii->i", a[:2])[:1], a)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_small_gathers_are_fused_with_the_look_at_their_index(dtype):
    """The compiled program holds no product of matrices, and looks in its own loops."""
    operands, q = small((8, 4, 5), (6, 5, 3)), torch.tensor([0, 5, -1, 2, 2, -6, 3, 4], dtype=dtype)
    graphs = []

    def look(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    made = compiled(lambda a, c: planner.contract(SPEC, a, c, q=q), backend=aot_autograd(fw_compiler=look))
    assert torch.equal(made(*operands), planner.contract(SPEC, *operands, q=q))
    targets = {target for graph in graphs for target in graph}
    assert graphs
    assert not {torch.ops.aten.bmm.default, torch.ops.planner.in_range.default} & targets
    for bad in (6, -7):
        q[3] = bad
        with pytest.raises(planner.IndexRangeError, match=rf"'q'\[3\] is {bad}, outside of \[-6, 6\)"):
            made(*operands)


@pytest.mark.parametrize(
    ("spec", "shape", "rows"), [("q[]jk -> j", (2, 3, 2), ()), ("q[n]j -> nj", (4, 0), (3,)), ("q[]j -> j", (4, 0), ())]
)
def test_gradients_of_rows_that_a_single_number_chooses_and_of_empty_rows(spec, shape, rows):
    """What ties the index array to the output gradient has no dimensions of its own."""
    (a,) = small(shape)
    agree(lambda a, q: planner.contract(spec, a, q=q), a, torch.ones(rows, dtype=torch.int64))


def test_int32_counts_from_the_end_of_more_rows_than_it_names():
    """As the compiler records it: such a pool takes gigabytes."""
    q, rows = torch.tensor([-1, -(2**31), 2**31 - 1], dtype=torch.int32), 2**31 + 8
    assert torch_index._refused_if_outside(q, "q", "n", rows).tolist() == [rows - 1, 8, 2**31 - 1]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_sizes_that_change(dynamic, prepared):
    made = compiled(lambda a, c, q: planner.contract(SPEC, a, c, q=q), dynamic=dynamic)
    for n, m in ((6, 4), (8, 4), (8, 7), (11, 9)):
        a, c = small((n, 2, 3), (m, 3, 5))
        q = torch.arange(n) % m
        index = planner.group(q, m) if prepared else q
        assert torch.equal(made(a, c, index), planner.contract(SPEC, a, c, q=q))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: planner.contract("ij->ijk", a), "got ShapeError.*no input has the output's axis 'k'"),
        (lambda a: planner.contract("ij->i", a, memory_limit=10), "got PlannerLimitError"),
        (lambda a: planner.contract("ij,q[i]->j", a, a), "got SpecError"),
    ],
)
def test_the_reason_of_a_refusal_is_told(call, message):
    """Dynamo raises an error of its own, which holds ours."""
    (a,) = small((6, 2))
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=message):
        compiled(call)(a)


def test_what_is_not_recorded_runs_where_the_graph_may_break():
    a, q, plan = torch.ones(2, 3), torch.tensor([1, 0]), planner.plan("ij->j", (2, 3), backend="torch")
    for call, message in (
        (lambda a: planner.contract("ij->j", np.ones((2, 3))) + 1, "recorded with tensors only"),
        (lambda a: planner.group(q, 2).values + 1, "planner.group outside"),
        (lambda a: plan(a) + 1, "call planner.contract, which plans while it is recorded"),
    ):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            compiled(call)(a)
        torch.compiler.reset()
        assert (torch.compile(call, backend="eager")(a) == call(a)).all()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")
def test_as_users_compile_it():
    a, c = small((60, 2, 8), (5, 6, 8))
    q = torch.randint(0, 5, (60,), generator=torch.Generator().manual_seed(0))

    def function(a, c, q):
        return planner.contract(SPEC, (2 * a).transpose(0, 1).transpose(0, 1), c.transpose(1, 2), q=q).relu()

    agree(function, a, c, q, backend="inductor")


def test_the_plan_is_what_runs(monkeypatch):
    """Both programs are operators of the graph, and keep what the plan keeps."""
    from torch._dynamo.backends.common import aot_autograd

    a, c = small((500, 2, 128), (4, 128, 8))
    q = torch.randint(0, 4, (500,), generator=torch.Generator().manual_seed(0))
    graphs, ran = [], []

    def recorded(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    for name in ("forward", "backward"):
        real = getattr(Executable, name)
        monkeypatch.setattr(Executable, name, lambda *xs, real=real, name=name: ran.append(name) or real(*xs))
    backend = aot_autograd(fw_compiler=recorded, bw_compiler=recorded)
    made = torch.compile(lambda a, c, q: planner.contract(SPEC, a, c, q=q), fullgraph=True, backend=backend)
    made(a, c, q).sum().backward()
    forward, backward = ([t for t in targets if t.startswith("planner.")] for targets in graphs)
    assert forward == ["planner.forward.default"]
    assert backward == ["planner.backward.default"]
    assert ran == ["forward", "backward"]


def test_operators_are_as_torch_wants_them():
    a, c = (x.detach() for x in small((6, 2, 3), (4, 3, 5)))
    q = planner.group(torch.tensor([0, 3, 3, 1, 2, 0]), 4)
    plan = planner.plan(SPEC, *(planner.Operand(tuple(x.shape), requires_grad=True) for x in (a, c)), q=(6,),
                        backend="torch")  # fmt: skip
    names, arrays = torch_operators._split({"q": q})
    assert json.loads(names) == [["q", ["4", "raise", "False"]]]
    text = plan.to_json()
    result, *kept = torch.ops.planner.forward(text, names, arrays, [a, c])
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.planner.forward.default, (text, names, arrays, [a, c]), test_utils=checks)
    torch.library.opcheck(
        torch.ops.planner.backward.default, (text, names, arrays, result, [a, c], kept), test_utils=checks
    )


def test_dynamo_is_loaded_where_it_is_met():
    code = """
import sys, torch, planner
x = torch.ones(2, 2)
planner.contract("ij,jk->ik", x, x)
assert "torch._dynamo" not in sys.modules
made = torch.compile(lambda x: planner.contract("ij,jk->ik", x, x), fullgraph=True, backend="eager")
assert made(x).sum() == 8
"""
    run_python(code)


@pytest.mark.parametrize("trainable", [0, 1])
@pytest.mark.parametrize("spec", ["ij, jk -> ik", "nj, q[n]j -> n"])
def test_tensors_of_inference_mode_meet_torchs_error_where_einsums_would(spec, trainable):
    """In a compiled function, where a gradient reads one; what is indexed is another tensor."""
    operands = small((4, 4), (4, 4))
    with torch.inference_mode():
        operands[1 - trainable] = operands[1 - trainable].clone()
    rows, read = torch.tensor([2, 0, 1, 3]), []

    def ours(a, b):
        return planner.contract(spec, a, b, **({"q": rows} if "q" in spec else {}))

    def theirs(a, b):
        return torch.einsum("nj,nj->n", a, b[rows]) if "q" in spec else torch.einsum("ij,jk->ik", a, b)

    for function in (ours, theirs):
        try:
            read.append(torch.autograd.grad(compiled(function)(*operands).sum(), operands[trainable])[0])
        except RuntimeError as error:
            read.append(str(error)[:50])
    if isinstance(read[1], str):
        assert str(read[0]).startswith("Inference tensors cannot be saved for backward")
    else:
        assert torch.equal(*read)


def test_compiled_calls_of_other_sizes_search_for_nothing(monkeypatch):
    """The plan is made while the compiler traces."""
    x = (torch.arange(400.0 * 2 * 48) % 5).reshape(400, 2, 48).requires_grad_()
    c = (torch.arange(8.0 * 48 * 40) % 3).reshape(8, 48, 40).requires_grad_()
    q = torch.arange(400) % 8
    call = compiled(lambda x, c, q: planner.contract(SPEC, x, c, q=q), dynamic=True)

    def gradients(call, n):
        result = call(x[:n], c, q[:n])
        return [result, *torch.autograd.grad(result, (x, c), torch.ones_like(result))]

    gradients(call, 300)
    monkeypatch.setattr(SearchSpace, "search", lambda *_, **__: pytest.fail("a search"))
    for n in (310, 200, 400, 310):
        expected = gradients(lambda x, c, q: torch.einsum("nij,njk->nik", x, c[q]), n)
        for found, wanted in zip(gradients(call, n), expected, strict=True):
            assert torch.equal(found, wanted)
