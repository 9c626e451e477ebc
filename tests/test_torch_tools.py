"""Tools of torch that look at programs, or keep what they save: counters, profilers, checkpoints, hooks."""

import pytest
from test_torch_contexts import CALLS, cold_call, gradients, with_indices

import planner

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from planner.backends.torch.contexts.flops import product_flops  # noqa: E402

# -- FLOPs -----------------------------------------------------------------------------------------


def counted(function, *arguments):
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


def both(call, operands):
    """What the forward and the backward pass count; a result of integers has none."""
    found = []
    forward = counted(lambda: found.append(call(*operands)))
    return forward, counted(lambda: torch.autograd.grad(found[0], operands, torch.ones_like(found[0])))


# The FLOPs of the forward pass, by the size that makes a call new. The backward pass takes twice as many.
PRODUCTS = {
    "product": lambda n: 2 * n * 3 * 4,
    "layer": lambda n: 2 * 2 * n * 4 * 5,
    "transposed product": lambda n: 2 * 2 * 3 * n * 6 * 5,
    "product of copies": lambda n: 2 * n * 5 * 12,
    "elements": lambda n: 0,
    "sum": lambda n: 0,
    "gather": lambda n: 0,
    "scatter": lambda n: 0,
    "grouped product": lambda n: 2 * 500 * 2 * 128 * n,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_a_product(name):
    for _ in "cold", "warm":
        call, operands = cold_call(name)
        n = next(x for shape, x in zip(CALLS[name][1], operands) for x, free in zip(x.shape, shape) if free is None)
        assert both(call, operands) == (PRODUCTS[name](n), 2 * PRODUCTS[name](n))


@pytest.mark.parametrize("name", [name for name in CALLS if "measured" not in name])  # the clock decides those plans
def test_flops_are_those_of_the_plan(name):
    """On tensors with values, on meta tensors and on fake ones, cold and warm."""
    call, operands = cold_call(name)
    fake = FakeTensorMode().from_tensor
    for change in (lambda x: x, lambda x: x.detach().to("meta").requires_grad_(x.requires_grad), fake):
        changed, xs = with_indices(call, change)[0], [change(x) for x in operands]
        cold, warm = both(changed, xs), both(changed, xs)
        plan = planner.plan(*call.args, *xs, **changed.keywords)
        expected = product_flops(plan, plan.programs.forward), product_flops(plan, plan.programs.backward)
        assert cold == warm == expected
