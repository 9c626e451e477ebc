"""What is chosen for a card at published rates, beside a kernel expert's estimates for an H200."""

import pytest
from conftest import examples
from hypothesis import given, settings
from laws import plan_of

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import planner  # noqa: E402
from planner.bench.choices import ESTIMATES, _other_rows, estimates, known_plans, main, plan_on_card  # noqa: E402
from planner.cost.device import PRESETS  # noqa: E402
from planner.program.forms import GroupedForm, grouped_form  # noqa: E402
from planner.search.alternatives import alternatives  # noqa: E402
from planner.search.naive import naive_plan  # noqa: E402
from planner.testing.strategies import problems  # noqa: E402
from planner.workloads import WORKLOADS  # noqa: E402

SEED, CONVOLUTION = WORKLOADS["seed-gathered-matmul"], WORKLOADS["sparse-convolution"]
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


@pytest.mark.parametrize("grad", [False, True])
def test_all_plans_that_are_compared_can_run(grad):
    """torch's own einsum is a step of plans without gradients alone."""
    operands = [planner.Operand(shape, requires_grad=grad) for shape in ((2, 8, 4, 3), (2, 4, 8))]
    plan = planner.plan("mbnd,mlb->lbnd", *operands, backend="torch")
    assert ("step 0 as einsum" in known_plans(plan)) != grad


@pytest.mark.parametrize("name", ESTIMATES)
def test_predictions_lie_between_the_floor_and_the_untuned_kernel(name):
    """Bandwidth or the matrix rate sets the floor; and no row for a step is predicted to be faster than the chosen."""
    estimate = ESTIMATES[name]
    plan = estimate.plan()
    assert estimate.floor * US <= estimate.seconds(plan) <= estimate.untuned * US
    assert all(more >= 0 for _, more, _ in _other_rows(plan))


def test_the_rows_for_a_card_are_ranked_as_an_expert_ranks_them():
    """Kernels that read matrices by the index beat `c[q]`, which takes a millisecond. In float32 gradients are two.

    Scores of 100 of 1,000 keys cost as much by a kernel as by a product of all. Sums of rows are kernels.
    """
    found = {name: cells for name, *cells in estimates()}
    for name, row, beaten in (
        ("seed, forward", "grouped matmul, Triton", "naive: takes first"),
        ("seed, both gradients", "grouped matmul, Triton, grouped outer, Triton", "naive: takes first"),
        ("gathered dot, k = 100", "matmul, take, Triton", "naive: takes first"),
        ("sparse convolution", "rows times matrices, added up, Triton", "step 0 as take, multiply, add"),
        ("experts", "grouped matmul, grouped_mm", "step 0 as grouped matmul, Triton"),
    ):
        _, chosen, others = found[name]
        assert chosen.partition(": ")[2] == row
        assert beaten in others


def test_a_tree_whose_values_lie_badly_is_compared_with_those_of_other_searches():
    """The search for the least time takes values to be row-major, and prefers a product of all experts."""
    plan = plan_on_card(WORKLOADS["experts/8"], "h200", "bfloat16")
    assert plan.cost.seconds <= min(other.plan.cost.seconds for other in alternatives(plan, 100)) <= 310 * US


def test_an_index_that_is_sorted_in_the_call_costs_what_sorting_takes():
    loose, prepared = (plan_on_card(SEED, "h200", prepared=prepared, gradients=False) for prepared in (False, True))
    assert rows(loose) == rows(prepared)
    # The check, the sort and its launches: 40 to 90 us more.
    assert 40 * US <= loose.cost.seconds - prepared.cost.seconds <= 90 * US


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize(("card", "dtype"), [("h200", "float32"), ("h200", "bfloat16"), ("a100", "bfloat16")])
def test_a_convolution_multiplies_blocks_of_rows(card, dtype, prepared):
    """Not each row by a matrix of its own: tiles would pad that to 16 rows, and read the matrix for each of them."""
    for gradients in (False, True):
        plan = plan_on_card(CONVOLUTION, card, dtype, prepared, gradients)
        forms = [grouped_form(step.op.spec) for step in plan.steps if "Triton" in step.choice.lowering]
        for form in forms:
            assert not isinstance(form, GroupedForm) or min(form.sizes[3:]) >= 16


def test_a_convolution_and_its_gradients_are_one_step_each():
    """The gradient of its rows is a convolution too. Nothing is retained."""
    plan = plan_on_card(CONVOLUTION, "h200", prepared=True)
    convolution = "rows times matrices, added up, Triton"
    assert rows(plan) == [convolution, convolution, "taken rows times matrices, Triton"]
    assert plan.cost.retained_bytes == 0


@pytest.mark.parametrize("spec", ["q[]c, q[]cb -> b", "x[]c, x[]cb -> y[]b"])
@pytest.mark.parametrize("card", ["a100", "h100"])
def test_single_numbers_that_choose_rows_are_planned_for_a_card(card, spec):
    """Their gradients add up one row, which is no batch of rows."""
    operands = [planner.Operand((4, 5), requires_grad=True), planner.Operand((4, 5, 3), requires_grad=True)]
    indices = {name: () for name in "qxy" if f"{name}[" in spec}
    plan = planner.plan(
        spec, *operands, backend="torch", device=card, sizes={"y": 6} if "y" in spec else None, **indices
    )
    assert len(plan.steps) >= 3
    assert plan.cost.seconds > 0


def test_the_table_shows_each_choice_beside_others(capsys):
    assert main(["--device", "a100", "--prepared"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    names = [line[0].removeprefix("| ") for line in lines[2:]]
    workloads = [name for name, workload in WORKLOADS.items() if workload.parsed.gathers]
    assert names[: len(workloads)] == workloads
    assert names[-len(ESTIMATES) :] == list(ESTIMATES)
    seed = dict(zip(workloads, lines[2:], strict=False))["seed-gathered-matmul"]
    assert "grouped matmul, Triton" in seed[1]
    assert "ms: " in seed[2]
    assert "ms" in seed[3]


@pytest.mark.parametrize("backend", ["torch", "jax"])
@settings(max_examples=examples(15, 200))
@given(problem=problems(4, 6, max_axes=7, max_size=7, strided=False))
def test_no_plan_for_a_card_is_predicted_slower_than_the_naive_one(backend, problem):
    """There launches take most of the time of small steps, and a search may end before it has seen the fewest."""
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    plan = plan_of(problem, backend, device="h200")
    naive = naive_plan(plan.contraction, as_run=True)
    assert plan.cost.seconds <= naive.cost.seconds
    assert plan.cost.bound <= plan.cost.seconds
