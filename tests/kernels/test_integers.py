"""Products of integers and booleans on a card, where torch multiplies no matrices of them.

Tensors lie on the CPU and say that they are on a card. Torch's matrix products refuse integers, as they do there.
"""

import functools

import pytest
from hypothesis import given, settings

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import planner  # noqa: E402
from planner.backends.torch import ops  # noqa: E402
from planner.cost.device import H200  # noqa: E402
from planner.inspect.verdicts import table_verdicts  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.testing.engines import TorchEngine  # noqa: E402
from planner.testing.reference import reference  # noqa: E402
from planner.testing.strategies import problems  # noqa: E402

INTEGERS = ("int32", "int64", "int8", "uint8")
# The rows that call torch's matrix products.
MULTIPLYING = {"matmul", "matmul by slices", "batched matmul, then sum"}
NAMES = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "_grouped_mm")


class NoMatrices(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses matrix products of integers, also where other functions of torch call them."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function._schema.name.removeprefix("aten::")
        if name.rstrip("_") in NAMES and not (arguments[0].is_floating_point() or arguments[0].is_complex()):
            raise NotImplementedError(f"{name} not implemented for {arguments[0].dtype}")
        return function(*arguments, **(options or {}))


@pytest.fixture
def card(monkeypatch):
    """Tensors that say that they are on a card, and are planned for one; matrix products refuse integers."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(type(load_backend("torch")), "device", lambda self, operands: H200)
    for name in ("mm", "bmm", "matmul", "einsum", "addmm", "baddbmm"):
        monkeypatch.setattr(torch, name, _refusing(getattr(torch, name)))


def _refusing(function):
    @functools.wraps(function)
    def call(*arguments, **options):
        tensors = [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        if any(not (x.is_floating_point() or x.is_complex()) for x in tensors):
            raise NotImplementedError(f"{function.__name__} not implemented for {tensors[0].dtype}")
        return function(*arguments, **options)

    return call


def planned(problem, operands, indices, **options):
    return planner.plan(problem.spec, *operands, **{**problem.arguments(), **indices}, device="h200", **options)


def drawn(problem, dtype):
    """The operands, or whether they are not zero, with the index arrays and the expected result."""
    engine = TorchEngine()
    operands, indices, values = engine.operands(problem), engine.indices(problem), problem.operands()
    if dtype == "bool":
        operands, values = [x.bool() for x in operands], [(x != 0).astype(int) for x in values]
    expected = torch.from_numpy(reference(problem.spec, *values, **problem.arguments()))
    return operands, indices, expected.to(operands[0].dtype)


@pytest.mark.parametrize("minimize", ["time", "flops", "peak", "bytes"])
@pytest.mark.parametrize("dtype", ["", "bool"])
def test_no_row_that_multiplies_matrices_takes_integers_on_a_card(minimize, dtype):
    """And some row takes each step, also of the naive plan."""
    table = load_backend("torch").table

    @settings(max_examples=25)
    @given(problems(dtypes=INTEGERS, index_modes=("raise", "drop", "clip")))
    def plans(problem):
        operands, indices, _ = drawn(problem, dtype)
        plan = planned(problem, operands, indices, minimize=minimize)
        assert plan.naive_cost.seconds >= 0
        for _, step in plan.inner_steps():
            assert step.choice.lowering not in MULTIPLYING
            verdicts = table_verdicts(table, step.op, plan.device)
            assert not isinstance(verdicts[step.choice.lowering], str)
            assert all(isinstance(verdicts.get(name, ""), str) for name in MULTIPLYING)

    plans()


@pytest.mark.parametrize("wide", [1, ops.MOST_MULTIPLIED])
@pytest.mark.parametrize("dtype", ["", "bool"])
def test_random_calls_of_integers_on_a_card(card, monkeypatch, wide, dtype):
    """By `contract`, `einsum`, in a mode, by native calls, and under a limit; in one part of the terms or in many."""
    monkeypatch.setattr(ops, "MOST_MULTIPLIED", wide)

    @settings(max_examples=40)
    @given(problems(dtypes=INTEGERS, index_modes=("raise", "drop", "clip")))
    def runs(problem):
        operands, indices, expected = drawn(problem, dtype)
        asked = {**problem.arguments(), **indices}
        results = [planner.contract(problem.spec, *operands, **asked)]
        results.append(planner.contract(problem.spec, *operands, minimize="peak", **asked))
        with NoMatrices():
            results.append(planner.contract(problem.spec, *operands, **asked))
            results.append(planned(problem, operands, indices)(*operands, **indices))
        for result in results:
            assert result.dtype == operands[0].dtype
            assert torch.equal(result, expected)

    runs()


SPECS = ["ij,jk->ik", "ij,jk->ki", "bij,bjk->bik", "bij,bjk->kbi", "i,i->", "ij,j", "ij,jk,kl->il", "ijk,jl,kl->il"]


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
@pytest.mark.parametrize("spec", SPECS)
def test_einsums_of_integers_on_a_card(card, spec, dtype):
    """The first call plans; the second one runs what the first one found."""
    sizes = dict(zip("bijkl", (2, 3, 4, 5, 6), strict=True))
    terms = spec.split("->")[0].split(",")
    operands = [torch.randint(0, 3, [sizes[e] for e in term]).to(getattr(torch, dtype)) for term in terms]
    expected = planner.einsum(spec, *[x.double().clone() for x in operands])
    with NoMatrices():
        for _ in range(3):
            found = planner.einsum(spec, *operands)
            assert torch.equal(found.double(), expected.bool().double() if dtype == "bool" else expected)


@pytest.mark.parametrize("spec", ["nij, q[n]jk -> nik", "ij, jk -> ik", "q[n]j, nj -> q[n]"])
def test_a_compiled_call_of_integers_multiplies_no_matrices(card, spec):
    """What a compiler records are calls that torch has on a card."""
    recorded = []

    def record(module, _):
        recorded.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    shapes = {"nij, q[n]jk -> nik": ((6, 2, 3), (4, 3, 5)), "ij, jk -> ik": ((2, 3), (3, 4))}
    a, c = (torch.randint(-3, 4, shape) for shape in shapes.get(spec, ((4, 3), (6, 3))))
    q = {"q": torch.tensor([3, 0, 0, 1, 2, 3])} if "q" in spec else {}
    sizes = {"sizes": {"q": 4}} if spec.endswith("q[n]") else {}
    compiled = torch.compile(lambda a, c: planner.contract(spec, a, c, **q, **sizes), backend=record, fullgraph=True)
    expected = planner.contract(spec, *(x.double() for x in (a, c)), **q, **sizes)
    assert torch.equal(compiled(a, c).double(), expected)
    assert recorded
    assert not [name for name in recorded if any(f".{each}" in name for each in ("mm", "bmm", "matmul", "einsum"))]


def test_a_product_of_integers_takes_memory_as_predicted():
    """A large product is multiplied in parts, and the plan says so."""
    a, b = torch.ones(512, 4096, dtype=torch.int32), torch.ones(4096, 512, dtype=torch.int32)
    plan = planner.plan("ij, jk -> ik", a, b, device="h200")
    assert [step.choice.lowering for step in plan.steps] == ["multiply integers, sum"]
    assert 4 * ops.MOST_MULTIPLIED <= plan.cost.peak_bytes <= 5 * ops.MOST_MULTIPLIED
    from planner.inspect import memory

    measured = memory.torch_memory(lambda: ops.multiply_and_sum(a, b))
    assert torch.equal(measured[0], torch.full((512, 512), 4096, dtype=torch.int32))
    assert measured[1].peak_bytes <= plan.cost.peak_bytes
