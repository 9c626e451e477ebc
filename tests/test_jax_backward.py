"""What a plan shows for the backward pass in JAX is what runs there."""

import collections
import dataclasses
import re

import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.cost.objective import step_key
from planner.program.build import Lowerer, build
from planner.program.frameworks import load_backend
from planner.program.ops import Cast, Guard
from planner.testing import problems

jax = pytest.importorskip("jax", reason="jax is not installed")

from jax.extend.core import jaxprs_in_params  # noqa: E402

from planner.backends.jax.evaluation import lowerer_of, plain_row  # noqa: E402


def planner_rows():
    """The names of all implementations in JAX."""
    return load_backend("jax").table.rows


def steps_in(jaxpr):
    """The steps that a traced program binds, those inside of its calls too, each with its implementation.

    A product that is JAX's own has neither.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "planner_step":
            yield eqn.params["op"], eqn.params["lowering"]
        if eqn.primitive.name == "dot_general":
            yield None, None
        for inner in jaxprs_in_params(eqn.params):
            yield from steps_in(inner)


def shown(plan):
    """The steps of a plan, or of its programs, each with its implementation. Guards run inside of other steps."""
    return collections.Counter((s.op, s.choice.lowering) for s in plan.steps if not isinstance(s.op, Cast | Guard))


def assert_runs(program, arguments, steps, plan):
    """Assert that a program runs these steps, but for plain steps of the plan and their gradients: these are JAX's."""
    found = collections.Counter(steps_in(jax.make_jaxpr(program)(*arguments).jaxpr))
    products, lower = found.pop((None, None), 0), lowerer_of(plan)
    plain = {step.op for step in plan.steps if plain_row(step.op, lower)}
    gradients = {step.op for op in plain for step in lower.gradients(op, (True,) * len(op.spec.inputs))}
    assert found <= steps
    others = steps - found
    assert {op for op, _ in others} <= plain | gradients
    assert sum(count for (op, _), count in others.items() if len(op.spec.inputs) == 2) == products


def differentiated(plan, indices):
    """A function that computes a plan's result and, by JAX's own differentiation, all gradients; and its arguments."""
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in plan.operands]

    def gradients(xs, indices, gradient):
        result, pullback = jax.vjp(lambda *xs: plan(*xs, **indices), *xs)
        return result, pullback(gradient)

    return gradients, (operands, indices, jax.ShapeDtypeStruct(plan.resolved.spec.output_shape, plan.dtype))


@settings(max_examples=examples(30, 1000))
@given(problems(index_modes=["clip"]), st.sampled_from(["time", "peak", "flops", "retained"]))
def test_steps_of_the_backward_pass_are_those_of_the_plan(problem, minimize):
    operands = [planner.Operand(x, requires_grad=True) for x in problem.shapes]
    plan = planner.plan(
        problem.spec,
        *operands,
        **problem.indices,
        sizes=problem.sizes,
        minimize=minimize,
        backend="jax",
        index_mode="clip",
    )
    assert_runs(*differentiated(plan, problem.indices), shown(plan), plan)


STEPS = {
    "grouped": ("nij, q[n]jk -> nik", [(512, 1, 64), (16, 64, 64)], {"q": (512,)}, {}),
    "pooled": ("bqd, b i[bqk] d -> bqk", [(4, 100, 16), (4, 120, 16)], {"i": (4, 100, 30)}, {}),
    "summed": ("s[e]i, ij -> t[e]j", [(40, 8), (8, 8)], {"s": (90,), "t": (90,)}, {"sizes": {"t": 40}}),
}


@pytest.mark.parametrize("name", STEPS)
def test_compiled_programs_hold_the_implementations_that_the_plan_shows(name, xla_sizes):
    """XLA's program names them, but for a product by element that it fuses into the sum of its rows.

    Not all objectives choose the same.
    """
    spec, shapes, indices, options = STEPS[name]
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    arrays = {letter: jax.ShapeDtypeStruct(shape, "int32") for letter, shape in indices.items()}
    found = {}
    for minimize in ("time", "peak", "flops"):
        plan = planner.plan(spec, *operands, backend="jax", minimize=minimize, **indices, **options)
        gradients, arguments = differentiated(plan, arrays)
        program = jax.jit(gradients).lower(*arguments).compile().as_text()
        names = {lowering for _, lowering in shown(plan)}
        named = {row for row in planner_rows() if re.search(rf"[/(]{row}[/)]", program)}
        fused = {"multiply"} if (name, minimize) == ("pooled", "flops") else set()
        assert named == names - fused
        found[minimize] = [step.choice.lowering for step in plan.steps]
    assert len(set(map(tuple, found.values()))) > 1


@pytest.mark.parametrize("name", STEPS)
def test_plans_that_were_not_chosen_run_as_they_show(name):
    """The naive one among them, of which no step is what the objective would choose."""
    spec, shapes, indices, options = STEPS[name]
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    plan = planner.plan(spec, *operands, backend="jax", **indices, **options)
    arrays = {letter: jax.ShapeDtypeStruct(shape, "int32") for letter, shape in indices.items()}
    others = [other.plan for other in plan.alternatives(20) if other.plan.keep == "all"]
    assert others
    for other in others:
        assert_runs(*differentiated(other, arrays), shown(other), other)


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_read_from_json_runs_as_it_shows(name):
    spec, shapes, indices, options = STEPS[name]
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    plan = planner.plan(spec, *operands, backend="jax", minimize="peak", **indices, **options)
    arrays = {letter: jax.ShapeDtypeStruct(shape, "int32") for letter, shape in indices.items()}
    for same in (plan, planner.Plan.from_json(plan.to_json())):
        assert_runs(*differentiated(same, arrays), shown(plan), plan)


@pytest.mark.parametrize("minimize", ["time", "peak"])
@pytest.mark.parametrize("way", ["second derivatives", "vmap"])
def test_steps_that_a_plan_does_not_show_are_chosen_by_its_objective(way, minimize):
    spec, shapes, indices, options = STEPS["grouped"]
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    plan = planner.plan(spec, *operands, backend="jax", minimize=minimize, **indices, **options)

    def run(xs, q):
        return (plan(*xs, q=q) ** 2).sum()

    def seconds(xs, q):
        return jax.grad(lambda *xs: sum(g.sum() for g in jax.grad(run)(xs, q)))(*xs)

    lead = (2,) if way == "vmap" else ()
    xs = [jax.ShapeDtypeStruct((*lead, *shape), "float32") for shape in shapes]
    q = jax.ShapeDtypeStruct(indices["q"], "int32")
    program = jax.vmap(jax.grad(run), (0, None)) if way == "vmap" else seconds
    lower = Lowerer(lambda op: load_backend("jax").table.choices(op, plan.device), step_key(minimize))
    steps = set(steps_in(jax.make_jaxpr(program)(xs, q).jaxpr)) - set(shown(plan))
    assert steps
    for op, lowering in steps:
        assert lowering == lower(op).lowering


def test_vmap_over_an_index_that_drops_repeats_no_operand():
    shapes = {"x": (4096, 256), "w": (16, 256, 256)}
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes.values()]
    many = jax.ShapeDtypeStruct((5, 4096), "int32")

    def call(x, w, q):
        return planner.contract("nd, q[n]dk -> nk", x, w, q=q, index_mode="drop")

    steps = steps_in(jax.make_jaxpr(jax.vmap(call, (None, None, 0)))(*arguments, many).jaxpr)
    assert {op.input_shapes[1] for op, _ in steps if len(op.spec.inputs) == 2} == {shapes["w"]}


@pytest.mark.parametrize("minimize", ["time", "peak", "flops"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_that_no_plan_has_are_chosen_by_its_objective(name, minimize):
    """Inside of `jit` no array says that it takes a gradient, so the plan has no backward program."""
    spec, shapes, indices, options = STEPS[name]
    plan = planner.plan(spec, *shapes, backend="jax", minimize=minimize, **indices, **options)
    assert plan.programs.backward is None
    lower = Lowerer(lambda op: load_backend("jax").table.choices(op, plan.device), step_key(minimize))
    wanting = tuple(dataclasses.replace(operand, requires_grad=True) for operand in plan.operands)
    wanting = dataclasses.replace(plan.contraction, operands=wanting)
    steps = build(plan.tree, wanting, plan.programs.variables[: len(shapes)], lower)
    arrays = {letter: jax.ShapeDtypeStruct(shape, "int32") for letter, shape in indices.items()}
    assert_runs(*differentiated(plan, arrays), shown(steps), plan)
