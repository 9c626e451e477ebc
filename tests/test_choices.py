"""What is chosen for a card at published rates, beside a kernel expert's estimates for an H200."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import planner  # noqa: E402
from planner.bench.choices import known_plans, main, plan_on_card  # noqa: E402
from planner.cost.device import PRESETS, Device  # noqa: E402
from planner.search.alternatives import alternatives  # noqa: E402
from planner.workloads import WORKLOADS  # noqa: E402

SEED = WORKLOADS["seed-gathered-matmul"]
CARDS = [name for name, device in PRESETS.items() if device.kind == "cuda"]
US = 1e-6


def rows(plan):
    return [step.choice.lowering for step in plan.steps]


@pytest.mark.parametrize("card", CARDS)
def test_the_seed_never_builds_a_matrix_for_each_row(card):
    """On every card the kernel beats `c[q]` by far, forward and backward, and one walk makes both gradients."""
    plan = plan_on_card(SEED, card)
    assert rows(plan) == ["grouped matmul, Triton", "both grouped gradients, Triton"]
    assert plan.naive_cost.seconds > 5 * plan.cost.seconds
    for other in known_plans(plan).values():
        assert other.cost.seconds >= plan.cost.seconds


# By workload, dtype and pass: the floor that bandwidth or the matrix rate sets, and the time of the kernels before
# they were tuned.
EXPECTED = {
    ("seed-gathered-matmul", "float32", "forward"): (24 * US, 130 * US),
    ("seed-gathered-matmul", "float32", "backward"): (39 * US, 120 * US),
    # 658 MB at the card's 4.8 TB/s; the products run on tensor cores by parts.
    ("sparse-convolution", "float32", "forward"): (137 * US, 700 * US),
}


@pytest.mark.parametrize(("name", "dtype", "which"), EXPECTED)
def test_predictions_lie_between_the_floor_and_the_untuned_kernel(name, dtype, which):
    floor, untuned = EXPECTED[name, dtype, which]
    cost = getattr(plan_on_card(WORKLOADS[name], "h200", dtype, prepared=True).cost, which)
    assert floor <= cost.seconds <= untuned


def test_predictions_of_gathered_keys_lie_between_the_floor_and_the_untuned_kernel():
    workload = WORKLOADS["seed-gathered-keys"].resized(h=8)
    cost = plan_on_card(workload, "h200", prepared=True, gradients=False).cost
    assert 150 * US <= cost.seconds <= 600 * US


def test_a_tree_whose_values_lie_badly_is_compared_with_those_of_other_searches():
    """The search for the least time takes values to be row-major, and prefers a product of all experts: 300 us."""
    plan = plan_on_card(WORKLOADS["experts/8"], "h200", "bfloat16")
    assert plan.cost.seconds <= min(other.plan.cost.seconds for other in alternatives(plan, 100)) <= 275 * US


def test_experts_run_at_a_part_of_the_matrix_rate():
    """At 8k rows, 8 experts and sides of 2048 and 4096, between the kernel's 200 TFLOP/s and the card's 790."""
    operands = [planner.Operand(shape, "bfloat16") for shape in ((8192, 2048), (8, 2048, 4096))]
    card = Device.preset("h200").prepared()
    plan = planner.plan("ti, q[t]io -> to", *operands, q=(8192,), backend="torch", device=card)
    assert rows(plan)[0].startswith("grouped matmul")
    assert plan.cost.flops / 790e12 <= plan.cost.seconds <= plan.cost.flops / 200e12


def test_an_index_that_is_sorted_in_the_call_costs_what_sorting_takes():
    loose, prepared = (plan_on_card(SEED, "h200", prepared=prepared, gradients=False) for prepared in (False, True))
    assert rows(loose) == rows(prepared)
    # The check, the sort and its launches: 40 to 90 us more.
    assert 40 * US <= loose.cost.seconds - prepared.cost.seconds <= 90 * US


def test_the_table_shows_each_choice_beside_others(capsys):
    assert main(["--device", "a100", "--prepared"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    names = [line[0].removeprefix("| ") for line in lines[2:]]
    assert names == [name for name, workload in WORKLOADS.items() if workload.parsed.gathers]
    seed = dict(zip(names, lines[2:], strict=True))["seed-gathered-matmul"]
    assert "grouped matmul, Triton" in seed[1]
    assert "us: " in seed[2]
    assert "ms" in seed[3]
