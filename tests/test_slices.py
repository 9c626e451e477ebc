"""Slices of a plan's loop, run as pieces that travel: the same values, of the arrays no more than a piece reads."""

import dataclasses
import operator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from conftest import examples
from engines import Ask, in_each
from laws import MODES, assert_equal, exact_problems, hold, note_language, oracle
from looped import make_loop
from test_loops import cut, nodes_of, some_loop

import planner
from planner.program.plan import Loop
from planner.search.parts import large_part
from planner.testing.problem import Problem


def sent(piece):
    """What arrives in another process."""
    return ForkingPickler.loads(ForkingPickler.dumps(piece))


def far(piece):
    """A piece's result, as if another process had run it."""
    piece = sent(piece)
    return sent(piece.function(*piece.arguments))


def without_gradients(engine, arrays):
    """Operands that need no gradients."""
    return [x.detach() for x in arrays] if engine.name == "torch" else list(arrays)


def in_pieces(engine, problem):
    """What the pieces make together is what the oracle has."""
    plan = some_loop(engine, problem)

    def run(operands, indices):
        pieces = plan.slices(*operands, **indices)
        return [pieces.combine(map(far, pieces))]

    arrays = without_gradients(engine, engine.operands(problem)), engine.indices(problem)
    return [Ask(run, arrays, oracle(engine, problem)[:1])]


@in_each(
    numpy=(examples(40, 2_000), {"min_operands": 3, "max_operands": 5, "index_modes": (*MODES, "nan")}),
    torch=(examples(20, 2_000), {"min_operands": 3, "max_operands": 5, "index_modes": (*MODES, "nan")}),
    jax=(examples(6, 500), {"max_operands": 3, "max_size": 3, "max_axes": 4}),
)
def test_pieces_make_what_the_plan_makes(engine, sample, jax_in_a_hurry):
    count, small = sample

    def note(floors, problem):
        plan = some_loop(engine, problem)
        loops = [node for node in nodes_of(plan.tree) if isinstance(node.op, Loop)]
        part = bool(loops) and len(plan.programs.forward.steps) > 1
        operands = without_gradients(engine, engine.operands(problem))
        many = len(plan.slices(*operands, **engine.indices(problem))) > 1
        note_language(floors, problem, part=part, many=many)

    shares = {"many": 0.7, "nonzero": 0.3, "gather": 0.2, "part": 0.1}
    problems = exact_problems(**small).filter(partial(cut, engine))
    hold(engine, in_pieces, problems, count, note=note, **(shares if engine.name != "jax" else {"many": 0.5}))


# Slices of the first are added up, with index arrays; those of the second are parts of the result.
CHAIN = Problem("nij, q[n]jk, kl -> il", ((6, 2, 3), (4, 3, 5), (5, 2)), indices={"q": np.array([3, 0, -1, 1, 1, 0])})
PARTS = Problem("nij, njk, kl -> nil", ((7, 2, 3), (7, 3, 5), (5, 2)), dtypes=("bfloat16",) * 3)


def sliced(engine, problem, **axes):
    """A plan of a problem in slices, its operands and its index arrays."""
    operands, indices = without_gradients(engine, engine.operands(problem)), engine.indices(problem)
    return make_loop(engine.plan(problem, operands, indices), axes), operands, indices


@pytest.fixture(scope="module")
def pool():
    """A process that knows nothing of this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        yield executor


@in_each("numpy", "torch", "jax")
@pytest.mark.parametrize("problem", [CHAIN, PARTS], ids=["added up", "parts"])
def test_another_process_runs_the_pieces(engine, problem, pool):
    if engine.refuses(problem.dtypes[0]):
        problem = dataclasses.replace(problem, dtypes=("float32",) * 3)
    plan, operands, indices = sliced(engine, problem, n=2)
    pieces = plan.slices(*operands, **indices)
    assert len(pieces) == len(list(pieces)) == -(-problem.shapes[0][0] // 2)
    got = pieces.combine(pool.map(operator.call, pieces))
    assert type(got) is type(operands[0])
    assert_equal(engine.described(got), problem.expected(), problem.dtypes[0])
    futures = [pool.submit(piece.function, *piece.arguments) for piece in pieces]
    again = pieces.combine([future.result() for future in futures])
    assert_equal(engine.described(again), problem.expected(), problem.dtypes[0])


@in_each("numpy", "torch", "jax")
def test_only_the_slice_travels(engine):
    """Of a view of a large array too, which torch would send with all of its storage."""
    x = engine.array(np.ones((2, 64, 1024), "float32"))[0]
    plan = make_loop(planner.plan("ij, kj -> ik", x, x, backend=engine.name), {"i": 1})
    whole, piece = x.size * 4 if engine.name != "torch" else x.numel() * 4, next(iter(plan.slices(x, x)))
    assert whole + 4 * 1024 < len(ForkingPickler.dumps(piece)) < whole + 4 * 1024 + 12_000
    plan = make_loop(planner.plan("ij, ij -> i", x, x, backend=engine.name), {"i": 1})
    assert 8 * 1024 < len(ForkingPickler.dumps(next(iter(plan.slices(x, x))))) < 8 * 1024 + 12_000


@in_each("numpy", "torch", "jax")
def test_a_plan_without_a_loop_is_one_piece(engine):
    problem = dataclasses.replace(CHAIN, sizes=None)
    operands, indices = without_gradients(engine, engine.operands(problem)), engine.indices(problem)
    (piece,) = pieces = engine.plan(problem, operands, indices).slices(*operands, **indices)
    assert_equal(engine.described(pieces.combine([far(piece)])), problem.expected(), "float32")


@in_each("numpy", "torch", "jax")
@pytest.mark.parametrize("mode", ["raise", "drop"])
def test_what_no_index_names_counts_for_nothing(engine, mode):
    """Around a part of the tree, where other steps read the index; where indices drop rows the plan is one piece."""
    shapes, rows = ((5, 4), (5, 6), (4, 6, 3), (3, 3)), np.array([0, 2, 0, 2, 2])
    problem = Problem("ni, nj, ijk, q[n]k -> ik", shapes, indices={"q": rows}, index_mode=mode, seed=1)
    operands, indices = without_gradients(engine, engine.operands(problem)), engine.indices(problem)
    plan = engine.plan(problem, operands, indices, optimize=((0, 1), (0, 2), (0, 1)))
    root = next(node for node in nodes_of(plan.tree) if str(node.op.spec).startswith("inj, ijk"))
    plan = make_loop(plan, {"i": 2}, large_part(plan.contraction, plan.tree, root, 1))
    values = [np.array(engine.described(x)[0]) for x in operands]
    values[3][1] = np.nan
    spoilt = [engine.array(x) for x in values]
    pieces = plan.slices(*spoilt, **indices)
    assert len(pieces) == (2 if mode == "raise" else 1)
    got = pieces.combine(map(far, pieces))
    np.testing.assert_array_equal(engine.described(got)[0], engine.described(plan(*operands, **indices))[0])


@in_each("numpy", "torch", "jax")
def test_bad_indices_are_refused_before_a_piece_is_made(engine):
    plan, operands, _ = sliced(engine, CHAIN, n=2)
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[5\] is 4, outside of \[-4, 4\)"):
        plan.slices(*operands, q=engine.array(np.array([0, 0, 0, 0, 0, 4])))
    prepared = planner.group(engine.indices(CHAIN)["q"], 4)
    pieces = plan.slices(*operands, q=prepared)
    assert_equal(engine.described(pieces.combine(map(far, pieces))), CHAIN.expected(), "float32")


def test_results_that_are_missing_or_too_many_or_out_of_order_are_refused():
    a, b = np.ones((5, 3)), np.ones((3, 4))
    pieces = planner.Plan.of(make_loop(planner.plan("ij, jk -> ik", a, b), {"i": 2})).slices(a, b)
    results = [piece() for piece in pieces]
    for wrong in (results[:2], results * 2, [None] * 3):
        with pytest.raises(planner.PlannerError, match="there are 3 slices: pass one result for each"):
            pieces.combine(wrong)
    with pytest.raises(planner.ShapeError, match=r"result 0 has shape \(1, 4\), but slice 0 makes \(2, 4\)"):
        pieces.combine(results[::-1])
    assert (pieces.combine(iter(results)) == pieces.combine(results)).all()
    with pytest.raises(planner.ShapeError, match="takes 2 operands"):
        planner.plan("ij, jk -> ik", a, b).slices(a)


def test_slices_compute_no_gradients(torch):
    a, b = torch.ones(4, 3, requires_grad=True), torch.ones(3, 2)
    plan = make_loop(planner.plan("ij, jk -> ik", a, b), {"i": 2})
    with pytest.raises(planner.PlannerError, match="operand 0 needs a gradient, but slices compute values only"):
        plan.slices(a, b)
    with torch.no_grad():
        pieces = plan.slices(a, b)
    assert torch.equal(pieces.combine(map(far, pieces)), (a @ b).detach())
    with pytest.raises(planner.PlannerError, match="no values inside a transform"):
        torch.func.vmap(lambda x: plan.slices(x, b))(torch.ones(2, 4, 3))


def test_arrays_without_values_have_no_slices(torch):
    plan = planner.plan("q[n]j, jk -> nk", (4, 3), (3, 2), q=(5,), backend="torch")
    arrays = [torch.ones(shape, device="meta") for shape in ((4, 3), (3, 2))]
    with pytest.raises(planner.PlannerError, match="operand 0 is a meta or fake tensor: it has no values"):
        plan.slices(*arrays, q=torch.zeros(5, dtype=torch.int64, device="meta"))


def test_traced_arrays_have_no_slices(jax):
    plan = planner.plan("ij, jk -> ik", (4, 3), (3, 2), backend="jax")
    with pytest.raises(planner.PlannerError, match="operand 0 is traced"):
        jax.jit(lambda a, b: plan.slices(a, b))(jax.numpy.ones((4, 3)), jax.numpy.ones((3, 2)))


def test_jax_computes_in_64_bits_where_they_are_enabled(jax):
    """In a process where they are not, a piece is refused: nothing is narrowed in silence."""
    a = np.arange(12.0).reshape(4, 3)
    with jax.enable_x64(True):
        x = jax.numpy.asarray(a)
        pieces = make_loop(planner.plan("ij, kj -> ik", x, x), {"j": 2}).slices(x, x)
        arrived = [sent(piece) for piece in pieces]
        np.testing.assert_array_equal(pieces.combine(piece() for piece in arrived), a @ a.T)
    with pytest.raises(planner.PlannerError, match="dtype float64 is off in jax"):
        arrived[0]()
