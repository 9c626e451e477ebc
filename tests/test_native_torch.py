"""Which plans run as torch's own calls, with torch's own derivatives, and what these keep."""

import pytest

import planner

torch = pytest.importorskip("torch")


def integers(*shape, grad=False):
    return torch.randint(-2, 3, shape).float().requires_grad_(grad)


def gradients(result, operands):
    return torch.autograd.grad((result * result.detach()).sum(), operands)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("BTKGH,BSKH->BTKGS", [(2, 4, 3, 2, 5), (2, 6, 3, 5)]),  # both operands are copied
        ("uw,zu->zuw", [(8, 6), (5, 8)]),  # both are repeated
        ("bhl,h->bhl", [(2, 3, 4), (3,)]),
        ("bixy,ioxy->boxy", [(2, 3, 4, 5), (3, 6, 4, 5)]),  # matrices without unit strides
    ],
)
def test_small_products_have_the_derivatives_of_torch(spec, shapes):
    operands = [integers(*shape, grad=True) for shape in shapes]
    found, expected = planner.contract(spec, *operands), torch.einsum(spec, *operands)
    assert "Contract" not in found.grad_fn.name()
    assert torch.equal(found, expected)
    for ours, theirs in zip(gradients(found, operands), gradients(expected, operands), strict=True):
        assert torch.equal(ours, theirs)


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


def test_a_long_plan_keeps_operands_in_place_of_copies():
    operands = [planner.Operand(shape, requires_grad=True) for shape in [(8, 256, 4, 4, 64), (8, 256, 4, 64)]]
    plan = planner.plan("BTKGH,BSKH->BTKGS", *operands, backend="torch", device="cpu")
    assert plan.cost.seconds > 1e-3
    assert plan.cost.retained_bytes == 0


def test_products_without_gradients_that_need_views_are_one_call(monkeypatch):
    from planner.backends.torch import eager

    equations = []

    class Operators:
        def einsum(self, equation, operands):
            equations.append(equation)
            return torch.einsum(equation, *operands)

    monkeypatch.setattr(eager, "_OPERATORS", Operators())
    planner.caches().clear()
    operands = integers(2, 4, 3, 2, 5), integers(2, 6, 3, 5)
    found = planner.contract("BTKGH,BSKH->BTKGS", *operands)
    assert len(equations) == 1
    assert torch.equal(found, torch.einsum("BTKGH,BSKH->BTKGS", *operands))
    planner.contract("ij,jk->ik", integers(3, 4), integers(4, 5))
    assert len(equations) == 1, "`mm` needs no view"
