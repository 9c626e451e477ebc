"""Networks of many operands: trees only get better, and plans are right however deep their trees are."""

from __future__ import annotations

import copy
import io
import math
import random
import sys
import time

import numpy as np
import opt_einsum
import pytest
from conftest import run_python
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.bench import large
from planner.cost.device import CPU
from planner.language.errors import PlannerError
from planner.language.units import count_text
from planner.program.tree import Leaf, flatten, keep_nothing, nodes_of, path_of, unflatten
from planner.search.exact.network import Network
from planner.search.many.greedy import _greedy_steps, improved_path, number_axes, random_greedy, steps_of
from planner.search.many.reconfigure import OrderTree, StepSizes, estimate_of

OBJECTIVES = ("flops", "bytes", "time", "peak", "retained")
LETTERS = [opt_einsum.get_symbol(i) for i in range(15_000)]


@st.composite
def networks(draw, least=3, most=14):
    """A random connected network with hyperedges, private axes and an output: its spec and shapes."""
    operands, rng = draw(st.integers(least, most)), random.Random(draw(st.integers(0, 10**6)))
    terms = [[] for _ in range(operands)]
    sizes = {}
    for axis in range(operands + rng.randrange(operands)):
        first = axis % operands
        others = rng.sample(range(operands), rng.choice((1, 1, 1, 2)))
        for operand in {first, *others}:
            terms[operand].append(LETTERS[axis])
        sizes[LETTERS[axis]] = rng.choice((1, 2, 2, 3))
    output = rng.sample(sorted(sizes), rng.randrange(3))
    return ",".join(map("".join, terms)) + "->" + "".join(output), [tuple(sizes[a] for a in t) for t in terms]


def grid(rows, columns):
    """A grid of tensors with bonds of size 2: its spec and shapes."""
    names = iter(LETTERS)
    down = [[next(names) for _ in range(columns)] for _ in range(rows - 1)]
    across = [[next(names) for _ in range(columns - 1)] for _ in range(rows)]
    terms = []
    for i in range(rows):
        for j in range(columns):
            bonds = [down[i - 1][j]] * (i > 0) + [down[i][j] if i < rows - 1 else ""]
            terms.append("".join(bonds) + (across[i][j - 1] if j else "") + (across[i][j] if j < columns - 1 else ""))
    return ",".join(terms) + "->", [(2,) * len(term) for term in terms]


def chain(length):
    """A chain of matrices: its spec."""
    terms = ",".join(LETTERS[i] + LETTERS[i + 1] for i in range(length))
    return f"{terms}->{LETTERS[0]}{LETTERS[length]}"


def order_tree(problem, objective, requires=False):
    """A tree of a problem in a random order, and its network."""
    network = Network(planner.resolve(problem[0], *problem[1]))
    numbered = number_axes(network)
    operands = len(numbered.inputs)
    logs = [math.log2(size) for size in numbered.sizes]
    needs = [requires] + [False] * (operands - 1)
    steps = steps_of(random_greedy(numbered, random.Random(1)), operands, by_number=True)
    return OrderTree(numbered.inputs, numbered.output, logs, needs, estimate_of(objective, CPU, "float32"), steps)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(problem=networks(), requires=st.booleans(), seed=st.none() | st.integers(0, 3))
def test_sweeps_never_make_a_tree_worse(objective, problem, requires, seed):
    tree = order_tree(problem, objective, requires)
    before = tree.cost
    tree.sweep(7, None if seed is None else random.Random(seed), lambda: True)
    after = tree.cost
    assert after <= before + 1e-9
    # What is kept for each step is what a tree made anew from the path says.
    operands = tree.operands
    again = OrderTree(
        tree.axes[:operands],
        tree.axes[-1],
        tree.sizes,
        [bool(need) for need in tree.needs[:operands]],
        tree.estimate,
        steps_of(tree.path(), operands),
    )
    assert set(again.axes[-1]) == set(tree.axes[-1])
    assert again.cost == pytest.approx(after, abs=1e-6)


@given(problem=networks(most=6))
def test_a_part_of_all_operands_gives_the_least_flops(problem):
    """The exact search of the plan knows nothing of the tables of the search over parts."""
    tree = order_tree(problem, "flops")
    tree.improve(len(tree.children) - 1, len(problem[1]))
    path = tree.path()
    exact = planner.plan(problem[0], *problem[1], minimize="flops", backend="numpy").cost.flops
    ours = planner.plan(problem[0], *problem[1], minimize="flops", backend="numpy", optimize=path).cost.flops
    # Estimates count no axes of size 1, and plans count an add for each step that sums one.
    assert exact <= ours
    if all(1 not in shape for shape in problem[1]):
        assert ours == exact


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_estimates_are_finite_for_any_size(objective):
    sizes = StepSizes(*(np.array([0.0, 3.0, 5_000.0]) for _ in range(4)))
    assert np.isfinite(estimate_of(objective, CPU, "float32")(sizes, 4_100.0)).all()


@given(problem=networks(least=13, most=18))
@settings(max_examples=12)
def test_plans_are_never_above_opt_einsums_auto(problem):
    spec, shapes = problem
    ours = planner.plan(spec, *shapes, minimize="flops", backend="numpy").cost.flops
    assert ours <= planner.plan(spec, *shapes, minimize="flops", backend="numpy", optimize="auto").cost.flops
    path, _ = opt_einsum.contract_path(spec, *shapes, shapes=True, optimize="auto")
    if all(len(step) == 2 for step in path):
        assert ours <= planner.plan(spec, *shapes, minimize="flops", backend="numpy", optimize=path).cost.flops


@pytest.mark.parametrize("without", [True, False], ids=["without cotengrust", "as installed"])
def test_a_grid_has_the_value_that_opt_einsum_gives(without, monkeypatch):
    if without:
        monkeypatch.setitem(sys.modules, "cotengrust", None)
    spec, shapes = grid(6, 6)
    rng = np.random.default_rng(0)
    operands = [rng.integers(0, 2, shape).astype(float) for shape in shapes]
    plan = planner.plan(spec, *operands, minimize="flops")
    assert plan.origin.startswith("improved greedy")
    assert plan(*operands) == opt_einsum.contract(spec, *operands)
    assert plan.cost.flops < planner.plan(spec, *operands, optimize="greedy", minimize="flops").cost.flops


@pytest.mark.parametrize("operands", [85, 100, 127, 128])
@pytest.mark.parametrize("kind", ["star", "chain"])
def test_many_operands_with_sums_of_their_own_are_planned(operands, kind):
    """cotengrust numbers the values of less than 128 operands in one byte; sums within operands once exceeded it."""
    links = [LETTERS[i] + LETTERS[i + 1] for i in range(operands)]
    own = LETTERS[operands + 1 : 2 * operands + 1]
    terms = [link + axis for link, axis in zip(links, own, strict=True)] if kind == "chain" else ["a" + x for x in own]
    spec, shapes = ",".join(terms) + "->a", [(2,) * len(terms[0])] * operands
    for seed in range(4):
        steps = _greedy_steps(number_axes(Network(planner.resolve(spec, *shapes))), seed)
        assert sorted(value for step in steps for value in step) == [*range(2 * operands - 2)]
    assert len([step for step in planner.plan(spec, *shapes, backend="numpy").path if len(step) == 2]) == operands - 1


@pytest.mark.parametrize("fault", ["a panic", "a value used twice"])
def test_a_fault_of_cotengrust_leaves_opt_einsums_trees(monkeypatch, fault):
    cotengrust = pytest.importorskip("cotengrust", reason="cotengrust is not installed")
    asked = []

    def search(*arguments, **options):
        asked.append(arguments)
        if fault == "a panic":
            raise type("PanicException", (BaseException,), {})
        return [(0, 1), (0, 2), *[(0, 3)] * 33], 0.0

    monkeypatch.setattr(cotengrust, "optimize_random_greedy_track_flops", search)
    spec, shapes = grid(6, 6)
    plan = planner.plan(spec, *shapes, minimize="flops", backend="numpy")
    assert asked
    assert plan.origin.startswith("improved greedy")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_passes_through_cotengrust(monkeypatch, kind):
    cotengrust = pytest.importorskip("cotengrust", reason="cotengrust is not installed")

    def search(*arguments, **options):
        raise kind

    monkeypatch.setattr(cotengrust, "optimize_random_greedy_track_flops", search)
    with pytest.raises(kind):
        _greedy_steps(number_axes(Network(planner.resolve("ij,jk->ik", (2, 2), (2, 2)))), 0)


def test_the_text_of_an_alternative_is_short():
    path = [(0, 1), *[(0, left - 1) for left in range(999, 1, -1)]]
    plan = planner.plan(chain(1000), *[(3, 3)] * 1000, backend="numpy", optimize=path)
    text = str(plan.alternatives(1)[0])
    assert "; ... 979 more steps ...; " in text
    assert len(text) < 2000


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_while_a_large_network_is_planned(monkeypatch, terminal):
    written = io.StringIO()
    written.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", written)
    spec, shapes = grid(4, 5)
    planner.plan(spec, *shapes, minimize="flops", backend="numpy")
    assert ("20 operands: tree 1" in written.getvalue()) is terminal
    assert written.getvalue().endswith("\r\033[K" * terminal)  # the bar is removed


PROGRAM = """
import hashlib, sys
sys.path.insert(0, "tests")
import planner
from test_large import grid
spec, shapes = grid(5, 7)
plan = planner.plan(spec, *shapes, backend="numpy")
print(hashlib.sha256(repr(plan.path).encode()).hexdigest())
"""


def test_two_processes_find_the_same_tree():
    assert len({run_python(PROGRAM, PYTHONHASHSEED=seed) for seed in ("0", "1")}) == 1


def test_a_chain_of_a_thousand_permutations_in_a_deep_tree():
    rng = np.random.default_rng(0)
    orders = [rng.permutation(3) for _ in range(1000)]
    matrices = [np.eye(3)[order] for order in orders]
    path = [(0, 1), *[(0, left - 1) for left in range(999, 1, -1)]]
    plan = planner.plan(chain(1000), *matrices, optimize=path)
    expected = matrices[0]
    for matrix in matrices[1:]:
        expected = expected @ matrix
    assert (plan(*matrices) == expected).all()
    # Printed, written and compared, though the tree is 999 steps deep.
    assert len(str(plan)) < 10_000
    again = planner.Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert copy.deepcopy(plan.tree) == plan.tree
    assert len(plan.path) == 999
    assert keep_nothing(plan.tree) != plan.tree


def test_a_deep_tree_has_its_gradients_in_torch(torch):
    rng = np.random.default_rng(0)
    matrices = [torch.eye(3, dtype=torch.float64)[rng.permutation(3)] for _ in range(300)]
    matrices[150].requires_grad_()
    path = [(0, 1), *[(0, left - 1) for left in range(299, 1, -1)]]
    result = planner.contract(chain(300), *matrices, optimize=path)
    assert (result == torch.linalg.multi_dot(matrices)).all()
    (gradient,) = torch.autograd.grad(result.sum(), matrices[150:151])
    assert (gradient == 1).all()


def test_labels_need_not_be_letters():
    rng = np.random.default_rng(0)
    matrices = [np.eye(3)[rng.permutation(3)] for _ in range(60)]
    labelled = [x for i, matrix in enumerate(matrices) for x in (matrix, [10 * i, 10 * i + 10])]
    assert (planner.contract(*labelled, [0, 600]) == np.linalg.multi_dot(matrices)).all()


@given(problem=networks(most=8))
def test_trees_come_back_from_their_flat_form(problem):
    tree = planner.plan(problem[0], *problem[1], backend="numpy", optimize="greedy").tree
    assert unflatten(flatten(tree)) == tree
    if not isinstance(tree, Leaf):
        assert path_of(tree, len(problem[1])) == path_of(unflatten(flatten(tree)), len(problem[1]))
        assert len(list(nodes_of(tree))) == sum(not isinstance(entry, int) for entry in flatten(tree))


def test_what_is_no_flat_tree_is_refused():
    with pytest.raises(ValueError, match="lacks children"):
        unflatten(flatten(planner.plan("ij,jk->ik", (2, 3), (3, 4), backend="numpy").tree)[1:])


def test_a_deadline_ends_the_search():
    spec, shapes = grid(16, 16)
    begun = time.monotonic()
    plan = planner.plan(spec, *shapes, backend="numpy", deadline=0.2)
    assert time.monotonic() - begun < 3  # a loaded machine; without the deadline it is a second or two more
    free = planner.plan(spec, *shapes, backend="numpy", deadline=100.0)
    assert free.cost.seconds <= plan.cost.seconds


def test_ctrl_c_gives_the_best_so_far(monkeypatch):
    network = Network(planner.resolve(grid(20, 20)[0], *grid(20, 20)[1]))
    estimate = estimate_of("flops", CPU, "float32")
    sweeps, sweep = [], OrderTree.sweep

    def interrupted(self, *arguments):
        sweeps.append(arguments)
        if len(sweeps) == 3:
            raise KeyboardInterrupt
        return sweep(self, *arguments)

    monkeypatch.setattr(OrderTree, "sweep", interrupted)
    improved = improved_path(network, [False] * 400, estimate, [])
    assert improved.interrupted
    assert len(improved.paths[0]) == 399


@pytest.mark.parametrize("minimize", OBJECTIVES)
def test_flops_beyond_the_range_of_floats_are_exact(minimize):
    """The outer product of 20 vectors of 2^60 elements, which is then multiplied by each of them once more."""
    size, vectors = 2**60, LETTERS[:20]
    path = [(0, 1), *[(0, left - 1) for left in range(39, 1, -1)]]
    spec, shapes = ",".join(vectors * 2) + "->", [(size,)] * 40
    plan = planner.plan(spec, *shapes, backend="numpy", minimize=minimize, optimize=path)
    grows, shrinks = range(2, 21), range(20, 0, -1)
    flops = sum(size**k for k in grows) + sum(2 * size**k for k in shrinks)
    assert plan.cost.flops == flops or plan.loop is not None  # slices are added up
    assert plan.cost.flops >= flops
    assert 0 < plan.cost.seconds < math.inf
    assert count_text(plan.cost.flops) in str(plan)  # 3 x 2^1200 without a loop
    assert planner.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("minimize", OBJECTIVES)
def test_the_search_goes_past_a_path_that_floats_cannot_price(minimize):
    spec, shapes = ",".join(LETTERS[:20] * 2) + "->", [(2**60,)] * 40
    assert planner.plan(spec, *shapes, backend="numpy", minimize=minimize).cost.flops < 2**67


def test_too_many_operands_are_refused():
    with pytest.raises(PlannerError, match="5001 operands are more than the 5000"):
        planner.plan(",".join(["a"] * 5001) + "->", *[(2,)] * 5001, backend="numpy")


def test_the_least_peak_is_looked_for_among_several_improved_trees():
    """The best tree by the estimate has a peak of 832 bytes, as that of cotengra's path has."""
    spec, shapes = large.networks(25)["lattice"]
    assert planner.plan(spec, *shapes, backend="numpy", minimize="peak").cost.peak_bytes < 832
