"""Layouts are what the framework sees of strides: what can be viewed flat, and how results of steps lie in memory."""

import math
from random import Random

import numpy as np
import pytest
from conftest import examples
from engines import Torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from laws import Floors, exact_problems, in_other_strides

import planner
from planner.cost.device import CPU
from planner.cost.layout import Layout, flattens, layout_of, neighbours, permuted, strides_in, view_strides, without
from planner.inspect.memory import torch_memory
from planner.language.spec import Operand, Spec
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum
from planner.testing import Problem
from planner.workloads import WORKLOADS


@st.composite
def arrays(draw):
    """An array in memory that is permuted, has gaps, or repeats elements."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    array = in_other_strides(np.zeros(shape, np.float32), Random(draw(st.integers(0, 2**16))))
    repeated = draw(st.integers(0, 4))
    if repeated < len(shape):
        array = np.broadcast_to(np.expand_dims(array, repeated), (*shape[:repeated], 3, *shape[repeated:]))
    return array


def strides_of(array):
    return tuple(stride // array.itemsize for stride in array.strides)


def strides_of_view(tensor, shape):
    """What torch makes of a view, or None where it makes none."""
    try:
        return tensor.view(shape).stride()
    except RuntimeError:
        return None


def letters(count):
    return tuple("abcdefgh"[:count])


def spec_of(array):
    return Spec((letters(array.ndim),), (), tuple(zip(letters(array.ndim), array.shape, strict=True)))


@settings(max_examples=examples(150, 10_000))
@given(arrays(), st.randoms(use_true_random=False))
def test_what_flattens_can_be_viewed(torch, array, random):
    order = random.sample(range(array.ndim), array.ndim)
    cuts = sorted(random.sample(range(1, array.ndim), random.randint(0, array.ndim - 1))) if array.ndim > 1 else []
    groups = [order[a:b] for a, b in zip([0, *cuts], [*cuts, array.ndim], strict=True)]
    shape = [math.prod(array.shape[d] for d in group) for group in groups]
    tensor = torch.empty_strided(array.shape, strides_of(array)).permute(order)
    viewable = strides_of_view(tensor, shape) is not None
    term = letters(array.ndim)
    layout, named = layout_of(array.shape, strides_of(array)), [[term[d] for d in g] for g in groups]
    found = flattens(term, layout, named, spec_of(array))
    # Of several dimensions that repeat, one order is as good as another; only one of them is known.
    assert found == viewable or (viewable and strides_of(array).count(0) > 1)


@settings(max_examples=examples(250, 10_000))
@given(arrays(), st.randoms(use_true_random=False), st.booleans())
def test_view_strides_are_those_of_torch(torch, array, random, empty):
    """The same views exist, with the same strides, dimensions of size 1 included."""
    tensor = torch.empty_strided(array.shape, strides_of(array))
    if empty and array.ndim:
        tensor = tensor.narrow(random.randrange(array.ndim), 0, 0)
    # Other groups of neighbours, with dimensions of size 1 in between.
    factors = [f for n in tensor.shape for f in {4: (2, 2)}.get(n, (n,)) if f != 1]
    shape = []
    for factor in factors:
        if shape and random.random() < 0.4:
            shape[-1] *= factor
        else:
            shape += [1] * (random.random() < 0.2) + [factor]
    shape += [1] * (random.random() < 0.2)
    for into in (tuple(shape), tuple(tensor.shape)):
        found = view_strides(tensor.shape, tensor.stride(), into)
        assert found == strides_of_view(tensor, into), (tensor.shape, tensor.stride(), into)


@settings(max_examples=examples(100, 5_000))
@given(arrays(), st.randoms(use_true_random=False))
def test_views_have_the_layouts_of_their_strides(array, random):
    layout = layout_of(array.shape, strides_of(array))
    order = random.sample(range(array.ndim), array.ndim)
    view = array.transpose(order)
    if 0 not in strides_of(array):  # repeated dimensions are all outside, in any order
        assert permuted(layout, order, view.shape) == layout_of(view.shape, strides_of(view))
        for dim in range(array.ndim):
            slice_of_one = array.take(0, dim) if array.ndim == 1 else array[(slice(None),) * dim + (0,)]
            assert without(layout, dim, array.shape) == layout_of(slice_of_one.shape, strides_of(slice_of_one))
    term, wide = letters(array.ndim), [d for d in range(array.ndim) if array.shape[d] != 1]
    close = neighbours(term, layout, spec_of(array))
    assert close is None or strides_of(array)[term.index(close)] == 1
    assert close is not None or not any(strides_of(array)[d] == 1 for d in wide)


def test_dimensions_of_size_1_make_no_difference():
    operand = Operand((4, 1, 3), strides=(6, 99, 2))
    assert strides_in(operand, (4, 3)) == (6, 2)
    assert layout_of((4, 1, 3), operand.strides) == Layout(((0, 2),), unit=False)
    assert layout_of((1, 1), (7, 9)) is None
    assert layout_of((0, 3), (7, 9)) is None


@pytest.mark.parametrize(
    ("shape", "first", "second"),
    [
        ((1, 3, 4, 5), (7, 1, 15, 3), (60, 1, 15, 3)),  # images with neighbouring channels
        ((2, 1, 4, 5), (20, 1, 5, 1), (20, 20, 5, 1)),  # the same with one channel
        ((3, 4, 2), (1, 6, 3), (1, 6, 3)),  # dense and alike
        ((3, 1, 4), (1, 100, 3), (1, 100, 3)),  # the same with a dimension of size 1
        ((3, 4, 2), (1, 6, 3), (8, 2, 1)),  # dense, in two orders
        ((2, 3, 4), (0, 1, 3), (1, 2, 0)),  # each repeats along a dimension
        ((2, 2, 3), (3, 3, 1), (1, 2, 4)),  # two dimensions of equal strides
        ((3, 2, 2), (2, 2, 1), (0, 0, 0)),
    ],
)
def test_products_of_elements_lie_as_torch_lays_them(torch, shape, first, second):
    from planner.backends.torch.strides import STRIDE_OPS, Strided

    expected = torch.empty_strided(shape, first, requires_grad=True) * torch.empty_strided(shape, second)
    found = STRIDE_OPS.multiply(Strided(shape, first, requires_grad=True), Strided(shape, second))
    assert (found.shape, found.strides) == (tuple(expected.shape), expected.stride())


def test_stand_ins_have_the_shapes_and_strides_of_tensors(torch):
    """What the stock evaluation makes of stand-ins, step by step, beside what it makes of tensors."""
    from planner.backends.common.stock import evaluation
    from planner.backends.torch.ops import OPS
    from planner.backends.torch.strides import STRIDE_OPS, Strided

    floors = Floors()

    def standin(x):
        return Strided(tuple(x.shape), x.stride(), x.requires_grad)

    @settings(max_examples=examples(200, 10_000))
    @example(Problem("abcd, abcd -> abcd", ((2, 3, 4, 5), (2, 3, 4, 5)), seed=1), True, 1)
    @example(Problem("ik, kj -> ikj", ((5, 4), (4, 3))), True, 0)
    @example(Problem("db, abc -> bad", ((2, 1), (2, 1, 2))), False, 0)
    @given(exact_problems(max_operands=2, max_axes=5, max_size=3), st.booleans(), st.sampled_from((0, 1, 2, 2)))
    def law(problem, gradients, alike):
        arrays = [in_other_strides(x, Random(problem.seed)) for x in problem.operands()]
        operands = [torch.from_numpy(x) for x in arrays]
        if alike == 1:  # images with neighbouring channels, which torch tells from others
            operands = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in operands]
        if alike == 2:  # dense, in one order of memory
            operands = [x.mT.contiguous().mT if x.dim() > 1 else x for x in operands]
        operands = [x.detach().requires_grad_(gradients) for x in operands]
        indices = {name: torch.from_numpy(q).long() for name, q in problem.indices.items()}
        spec = planner.resolve(problem.spec, *operands, sizes=problem.sizes, **indices)
        views = [x.reshape(shape) for x, shape in zip(operands, map(spec.shape, spec.inputs), strict=True)]
        index = {g: (indices[g.array] % max(1, g.size or 1)).reshape(spec.shape(g.axes)) for g in spec.gathers}
        result = evaluation(OPS, spec)(views, index, False)
        shadow = {gather: standin(q) for gather, q in index.items()}
        found = evaluation(STRIDE_OPS, spec)([standin(x) for x in views], shadow, False)
        assert found.shape == tuple(result.shape), str(spec)
        # Nothing reads the strides of dimensions of size 1, nor of arrays without elements.
        read = [d for d, size in enumerate(found.shape) if size != 1 and 0 not in found.shape]
        assert [found.strides[d] for d in read] == [result.stride(d) for d in read], str(spec)
        assert found.requires_grad == result.requires_grad
        floors.note(pairs=len(operands) == 2, strided=not result.is_contiguous(), gathers=bool(index))

    law()
    floors.at_least(examples(200, 10_000), pairs=0.3, strided=0.1, gathers=0.1)


def planned_in_torch(problem, gradients=True, **options):
    """Operands in other strides, index arrays, and their plan."""
    engine = Torch()
    operands = [engine.array(in_other_strides(x, Random(problem.seed))) for x in problem.operands()]
    operands, indices = [x.requires_grad_(gradients) for x in operands], engine.indices(problem)
    return operands, indices, engine.plan(problem, operands, indices, **options)


def lies_as_said(result, plan, variable, masked=False):
    """Compare a result's strides with the plan's layout. Return whether they are known, and not row-major."""
    said = plan.programs.variables[variable].layout
    known = said is None or not said.unknown
    assert not known or masked or said == layout_of(result.shape, result.stride()), str(plan)
    return known, said is not None


def test_results_lie_in_memory_as_the_plan_says(torch):
    """Those of calls, and of every step of both programs, on operands of any strides.

    The result of a call whose last step multiplies by element may lie as torch lays it out, without gaps.
    """
    backend, floors = load_backend("torch"), Floors()

    @settings(max_examples=examples(50, 3_000))
    @example(Problem("aij, ajk -> kai", ((2, 3, 4), (2, 4, 5))), "time")
    @example(Problem("aij, ajk, kl -> lai", ((2, 3, 4), (2, 4, 5), (5, 3))), "time")
    @example(Problem("a, a, ab -> ab", ((2,), (2,), (2, 2)), seed=0), "time")
    @given(exact_problems(max_axes=5, max_size=3), st.sampled_from(["time", "peak", "flops"]))
    def law(problem, minimize):
        calls, steps = [], [(False, False)]
        for gradients in (False, True):
            operands, indices, plan = planned_in_torch(problem, gradients, minimize=minimize)
            masked = plan.index_mode == "drop"  # rows may be masked
            result, last = plan(*operands, **indices), plan.programs.forward.steps[-1:]
            by_element = any(step.choice.lowering == "multiply" for step in last)
            assert not by_element or result.stride() == torch.empty_like(result).stride()
            calls.append(lies_as_said(result, plan, plan.programs.result, masked or by_element))
        bare, values, ones = [x.detach() for x in operands], {}, None
        for program in (plan.programs.forward, plan.programs.backward):
            kept = {v: values[v] for v in plan.programs.kept if v in values}
            if values:  # a gradient that lies as the result does
                result, said = values[plan.programs.result], plan.programs.variables[plan.programs.result].layout
                ones = torch.ones(result.shape) if said is None or said.repeated else torch.ones_like(result)
            run = backend.stepwise(plan, bare, indices, ones, kept)
            values = dict(run.values)
            for step in program.steps:
                results = dict(zip(step.outputs, run.bind(step, [values[v] for v in step.inputs])(), strict=True))
                values |= results
                steps += [lies_as_said(result, plan, v, masked) for v, result in results.items()]
        known, laid = (any(facts) for facts in zip(*steps, strict=True))
        floors.note(known=known, laid=laid, plain_call=all(calls[0]), trained_call=all(calls[1]))

    law()
    floors.at_least(examples(50, 3_000), known=0.9, laid=0.1, plain_call=0.0001, trained_call=0.0001)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name.startswith(("seed-sliced", "seed-two-by"))])
def test_slices_of_one_array_are_not_copied(name, torch):
    workload = WORKLOADS[name].cpu()
    plan = planner.plan(workload.spec, *workload.operands("torch", requires_grad=True), minimize="time")
    assert plan.cost.copied_bytes == 0
    assert plan.cost.retained_bytes == 0
    assert plan.cost.forward.peak_bytes <= 4 * math.prod(plan.resolved.spec.output_shape) + 10**6


@pytest.mark.parametrize("spec", ["ijk, ikl -> jl", "ijk, ikl -> lj", "bijk, bikl -> bjl", "ijk, ilk -> jl"])
def test_ways_around_a_copy_agree_and_cost_what_they_say(spec, torch):
    table, shape = load_backend("torch").table, {"b": 2, "i": 3, "j": 40, "k": 50, "l": 20}
    first, second = spec.partition("->")[0].replace(" ", "").split(",")
    operands = [torch.randint(-3, 4, [shape[axis] for axis in term]).float() for term in (first, second)]
    op = Einsum(planner.resolve(spec, *operands), "float32")
    expected = torch.einsum(spec.replace(" ", ""), *operands)
    found = {choice.lowering: choice.cost for choice in table.choices(op, CPU)}
    assert found["matmul"].copied_bytes > 0
    assert "batched matmul, then sum" in found
    for name, cost in found.items():
        assert name == "matmul" or cost.copied_bytes == 0
        table.run(name, op, operands, {})
        results, memory = torch_memory(lambda name=name: table.run(name, op, operands, {}))
        assert (results[0] == expected).all(), name
        assert memory.peak_bytes <= 4 * expected.numel() + cost.scratch_bytes, name


def test_neighbours_in_memory_lie_along_the_last_axis_that_is_not_single():
    spec = planner.resolve("ijk -> ijk", (4, 3, 1))
    assert neighbours(spec.output, None, spec) == "j"
    assert neighbours(spec.output, layout_of((4, 3, 1), (1, 4, 1)), spec) == "i"
    assert neighbours(spec.output, layout_of((4, 3, 1), (6, 2, 1)), spec) is None
    single = planner.resolve("ij -> ij", (1, 1))
    assert neighbours(single.output, None, single) is None
