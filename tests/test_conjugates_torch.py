"""The bytes of conjugates that gradients of complex products copy."""

import math

import pytest
from conftest import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

import planner  # noqa: E402
from planner.inspect.memory import torch_backward_memory  # noqa: E402

# What torch takes at once to transpose an operand, see `docs/limits.md`.
BUFFER = 3600 * 8


def complex_operands(terms, sizes, needs):
    """Tensors of small complex integers."""
    numbers = [torch.arange(math.prod(sizes[axis] for axis in term)) for term in terms]
    numbers = [torch.complex((n % 5 - 2).float(), (n % 3 - 1).float()) for n in numbers]
    shaped = [x.reshape([sizes[axis] for axis in term]) for x, term in zip(numbers, terms, strict=True)]
    return [x.requires_grad_(need) for x, need in zip(shaped, needs, strict=True)]


def gradients_and_peak(call, operands):
    """The gradients, and the measured peak of the backward pass."""
    result = call()
    of = [x for x in operands if x.requires_grad]
    gradient = torch.ones_like(result) * (1 + 2j)
    return torch.autograd.grad(result, of, gradient), torch_backward_memory(call, of, gradient)[1].peak_bytes


@settings(max_examples=examples(30, 2_000))
@given(st.data())
def test_gradients_take_no_more_than_the_plan_says(data):
    """They are those of einsum, too."""
    axes = "abcd"[: data.draw(st.integers(2, 4))]
    term = st.lists(st.sampled_from(axes), unique=True, min_size=1, max_size=3).map("".join)
    terms = data.draw(st.lists(term, min_size=1, max_size=3))
    used = sorted(set("".join(terms)))
    out = "".join(data.draw(st.lists(st.sampled_from(used), unique=True, max_size=3)))
    sizes = {axis: data.draw(st.sampled_from((2, 3, 8, 32, 64, 100))) for axis in used}
    needs = data.draw(st.lists(st.booleans(), min_size=len(terms), max_size=len(terms)))
    assume(any(needs) and all(math.prod(sizes[a] for a in t) <= 300_000 for t in (*terms, out, "".join(used))))
    operands, spec = complex_operands(terms, sizes, needs), f"{','.join(terms)}->{out}"
    plan = planner.plan(spec, *operands)
    found, peak = gradients_and_peak(lambda: planner.contract(spec, *operands), operands)
    expected, _ = gradients_and_peak(lambda: torch.einsum(spec, *operands), operands)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert peak <= plan.cost.backward.peak_bytes + BUFFER


@pytest.mark.parametrize(
    ("spec", "sizes", "needs", "native"),
    [
        ("cb,cab->ca", {"a": 64, "b": 16, "c": 32}, (True, False), True),
        ("cb,cab->ca", {"a": 64, "b": 128, "c": 32}, (True, False), False),  # 2 MiB would be copied
        ("cb,cab->ca", {"a": 64, "b": 128, "c": 32}, (False, True), True),  # of `cb`
        ("abi,abi->abi", {"a": 32, "b": 64, "i": 128}, (True, False), True),  # the output's gradient is as large
        ("bc,a,bca->ab", {"a": 100, "b": 100, "c": 64}, (True, False, False), False),
        ("ai,ai->a", {"a": 2, "i": 100_000}, (False, True), False),
    ],
)
def test_plans_that_would_copy_large_conjugates_run_as_a_function(spec, sizes, needs, native):
    operands = complex_operands(spec.split("->")[0].split(","), sizes, needs)
    assert ("Contract" not in planner.contract(spec, *operands).grad_fn.name()) == native
    plan = planner.plan(spec, *operands)
    _, peak = gradients_and_peak(lambda: planner.contract(spec, *operands), operands)
    assert peak <= plan.cost.backward.peak_bytes < 1.1 * peak
    _, of_einsum = gradients_and_peak(lambda: torch.einsum(spec, *operands), operands)
    assert native or peak < of_einsum


@pytest.mark.parametrize(("rows", "native"), [(100, True), (4000, False)])
def test_conjugates_of_rows_count_as_rows(rows, native):
    """Of a small pool many rows may be taken."""
    pool, q = complex_operands(["rj"], {"r": 8, "j": 64}, [False])[0], torch.arange(rows) % 8
    x = complex_operands(["nj"], {"n": rows, "j": 64}, [True])[0]
    plan = planner.plan("nj, q[n]j -> n", x, pool, q=q)
    result = planner.contract("nj, q[n]j -> n", x, pool, q=q)
    assert ("Contract" not in result.grad_fn.name()) == native
    _, peak = gradients_and_peak(lambda: planner.contract("nj, q[n]j -> n", x, pool, q=q), [x])
    assert peak <= plan.cost.backward.peak_bytes
