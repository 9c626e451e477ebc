"""DTensors on four gloo processes: values and gradients of one process, and no more exchanged than plans foretell.

`test_sharding_torch.py` runs this file in a process of its own, which forks the four, so that torch is imported once.
They run all cases, or those that are named; JSON says what went wrong in each.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import json
import math
import os
import pathlib
import random
import re
import sys
import tempfile
import traceback

import hypothesis
import pytest
import torch
import torch._dynamo  # the four inherit it
import torch.distributed as dist
from conftest import examples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from planner.language.options import INDEX_MODES
from planner.testing import problems

RANKS = 4
MESHES = {"line": (4,), "grid": (2, 2)}
DRAWN = examples(10, 200)
R = Replicate()
MESH = {}  # by the names of MESHES, in each process


# -- arrays ------------------------------------------------------------------------------------------------


def put(x, mesh, placements):
    """A DTensor of a tensor that every rank has. A sum of parts is one of different parts."""
    part, sums = x, [m for m, p in enumerate(placements) if p.is_partial()]
    if sums:
        first = all(mesh.get_coordinate()[m] == 0 for m in sums)
        count = torch.Size([mesh.size(m) for m in sums]).numel()
        part = x - (count - 1) if first else torch.ones_like(x)
    part = DTensor.from_local(part, mesh, [p if p.is_partial() else R for p in placements])
    return part.redistribute(placements=placements)


def needing_gradients(x):
    return x.detach().requires_grad_(x.is_floating_point())


def small(*shape, low=-3, high=4):
    return torch.randint(low, high, shape).double()


COLLECTIVES = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"


class Exchanged(TorchDispatchMode):
    """The bytes of what each collective is given."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        name = str(function)
        if name.startswith("_c10d_functional.") and name.split(".")[1] in COLLECTIVES:
            self.found.append((name.split(".")[1], args[0].nbytes))
        return function(*args, **kwargs or {})


def same(x, wanted):
    """Whether a DTensor holds the values of a tensor, NaN at the same places."""
    found = x.full_tensor()
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def compare(mesh, spec, xs, qs, places, to_result, **options):
    """Contract tensors and DTensors of them, by a plan for the mesh too; all values and gradients must be equal."""
    plain = [needing_gradients(x) for x in xs]
    wanted = planner.contract(spec, *plain, **options, **qs)
    gradient = small(*wanted.shape)
    operands = [needing_gradients(put(x, mesh, p)) for x, p in zip(xs, places, strict=False)]
    indices = {name: put(q, mesh, p) for (name, q), p in zip(qs.items(), places[len(xs) :], strict=True)}
    result = planner.contract(spec, *operands, **options, **indices)
    same(result, wanted)
    same(planner.plan(spec, *operands, mesh=mesh, **options, **indices)(*operands, **indices), wanted)
    result.backward(put(gradient, mesh, to_result))
    wanted.backward(gradient)
    for x, y in zip(operands, plain, strict=True):
        same(x.grad, y.grad)
    return result, [x.grad for x in operands]


# -- random specs and placements -----------------------------------------------------------------------------


# gloo gathers no unsigned integers.
GLOO = ["index dtypes"]


def drawn():
    found = []

    @hypothesis.settings(max_examples=DRAWN, phases=[hypothesis.Phase.generate])
    @hypothesis.given(problems(dtypes=["float64"], index_modes=INDEX_MODES, max_axes=5, max_size=7, without=GLOO))
    def draw(problem):
        found.append(problem)

    draw()
    return found[:DRAWN]


PROBLEMS = drawn()


def a_placement(rng, x, sums):
    kinds = [R] if x.ndim == 0 else [R, *[Shard(rng.randrange(x.ndim)) for _ in range(3)]]
    return rng.choice([*kinds, Partial()] if sums else kinds)


def run_drawn(number):
    rng, problem = random.Random(number), PROBLEMS[number]
    mesh = MESH[rng.choice(list(MESHES))]
    xs = [torch.from_numpy(x.copy()) for x in problem.operands()]
    qs = {name: torch.from_numpy(q.copy()) for name, q in problem.indices.items()}
    places = [[a_placement(rng, x, x.is_floating_point()) for _ in range(mesh.ndim)] for x in (*xs, *qs.values())]
    wanted = torch.zeros(problem.output_shape())
    to_result = [a_placement(rng, wanted, True) for _ in range(mesh.ndim)]
    try:
        compare(mesh, problem.spec, xs, qs, places, to_result, sizes=problem.sizes, index_mode=problem.index_mode)
    except Exception as error:
        raise AssertionError(f"{problem}, {places}") from error


# -- what is exchanged -----------------------------------------------------------------------------------------

ROWS = "nij, q[n]jk -> nik", ((8, 2, 4), (8, 4, 6)), {"q": ((8,), 8)}
UNEVEN = "nij, q[n]jk -> nik", ((13, 2, 5), (7, 5, 9)), {"q": ((13,), 7)}
CHAIN = "ij, jk, kl -> il", ((4, 8), (8, 12), (12, 4)), {}
TAKEN = "bj, q[b]k -> jk", ((8, 4), (6, 4)), {"q": ((8,), 6)}
SCATTER = "nj, nk -> q[n]jk", ((8, 4), (8, 2)), {"q": ((8,), 6)}
# An index counts from the end of each pool that it reads.
TWO_SIZES = "p[n]j, p[n]k, q[n]jk -> n", ((3, 4), (5, 6), (8, 4, 6)), {"p": ((8,), 3), "q": ((8,), 8)}
DIAGONAL = "iij, jk -> ik", ((9, 9, 4), (4, 5)), {}
TO_DIAGONAL = "i, ij -> jii", ((9,), (9, 4)), {}
POOLS = "q[n]q[n]j, nk -> njk", ((6, 6, 2), (8, 3)), {"q": ((8,), 6)}
TWO_BRACKETS = "p[n]j, p[m]j, n, m -> nm", ((6, 3), (6, 3), (8,), (8,)), {"p": ((8,), 6)}
KEYS = "bqhd, bhi[bhqk]d -> bhqk", ((4, 5, 2, 3), (4, 2, 9, 3)), {"i": ((4, 2, 5, 3), 9)}
# Letters and the dimensions of the mesh that they are split over.
SPLITS = {
    "rows": (ROWS, ["n 0", "j 0", "k 0", "q 0", "n 0, k 1", "n 0, q 1", "q 0, j 1", "n 01"]),
    "uneven": (UNEVEN, ["n 0", "j 0", "q 0", "n 0, q 1", "q 01"]),
    "chain": (CHAIN, ["i 0", "j 0", "k 0", "j 0, k 1"]),
    "taken": (TAKEN, ["b 0", "q 0", "k 0"]),
    "scatter": (SCATTER, ["n 0", "j 0"]),
    "two sizes": (TWO_SIZES, ["q 0", "n 0, q 1", "n 0", "j 0"]),
    "diagonal": (DIAGONAL, ["i 0", "j 0", "i 01", "i 0, k 1"]),
    "to diagonal": (TO_DIAGONAL, ["i 0", "j 0, i 1"]),
    "pools": (POOLS, ["q 0", "n 0, q 1"]),
    "two brackets": (TWO_BRACKETS, ["n 0", "n 0, m 1"]),
    "keys": (KEYS, ["b 0", "i 0", "b 0, i 1"]),
}


def run_split(case, text):
    """Arrays that are placed as letters say: where results lie, and what is exchanged."""
    spec, shapes, index_shapes = case
    split = dict(part.split() for part in text.split(", "))
    mesh = MESH["grid" if "1" in text else "line"]
    sizes = {"q": 6} if case is SCATTER else None
    xs = [small(*shape) for shape in shapes]
    qs = {name: torch.randint(-size, size, shape) for name, (shape, size) in index_shapes.items()}
    stand_ins = [planner.Operand(x.shape, "float64", requires_grad=True) for x in xs]
    plan = planner.plan(spec, *stand_ins, backend="torch", sizes=sizes, **qs)
    resolved = plan.resolved.spec

    def placements(term):
        letters = [getattr(entry, "array", entry) for entry in term]
        over = {int(m): Shard(letters.index(x)) for x, ms in split.items() for m in ms if x in letters}
        return [over.get(m, R) for m in range(mesh.ndim)]

    def summed(term):
        """The placements of a result with this term: a sum over what is split and what it lacks."""
        used = {int(m) for ms in split.values() for m in ms}
        return tuple(Partial() if p == R and m in used else p for m, p in enumerate(placements(term)))

    # An index array is whole where brackets differ.
    brackets = {name: {gather.axes for gather in resolved.gathers if gather.array == name} for name in qs}
    of_arrays = [() if len(axes) > 1 else min(axes) for axes in brackets.values()]
    places = list(map(placements, (*resolved.inputs, *of_arrays)))
    result, gradients = compare(mesh, spec, xs, qs, places, placements(resolved.output), sizes=sizes)
    assert [result.placements, *(g.placements for g in gradients)] == [
        *map(summed, (resolved.output, *resolved.inputs))
    ]
    with Exchanged() as exchanged:
        operands = [needing_gradients(put(x, mesh, p)) for x, p in zip(xs, places, strict=False)]
        indices = {name: put(q, mesh, p) for (name, q), p in zip(qs.items(), places[len(xs) :], strict=True)}
        result = planner.contract(spec, *operands, sizes=sizes, **indices)
        result.redistribute(placements=placements(resolved.output))
        result.backward(put(torch.ones(result.shape, dtype=torch.float64), mesh, placements(resolved.output)))
        for x in operands:
            x.grad.redistribute(placements=x.placements)
    parts = {letter: RANKS if mesh.ndim == 1 else 2 ** len(ms) for letter, ms in split.items()}
    # One after the other over the dimensions of the mesh.
    foretold = [c.bytes for c in plan.collectives(parts) for _ in split[c.over[0]]]
    assert [kind for kind, _ in exchanged.found] == ["all_reduce"] * len(foretold), (exchanged.found, foretold)
    if dist.get_rank() == 0 or case not in (UNEVEN, DIAGONAL, TO_DIAGONAL):  # the first rank has the largest parts
        assert sorted(size for _, size in exchanged.found) == sorted(foretold)


def run_proposal(case, mesh_name):
    """Arrays that lie as `planner.shard` proposes exchange what it says, and the result lies as it says."""
    (spec, shapes, index_shapes), mesh = case, MESH[mesh_name]
    stand_ins = [planner.Operand(shape, "float64", requires_grad=True) for shape in shapes]
    shapes_of_indices = {name: shape for name, (shape, _) in index_shapes.items()}
    found = planner.shard(spec, *stand_ins, mesh=mesh, **shapes_of_indices)
    assert found.mesh == dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    with Exchanged() as exchanged:
        operands = [
            needing_gradients(put(small(*x.shape), mesh, p)) for x, p in zip(stand_ins, found.operands, strict=True)
        ]
        indices = {
            name: put(torch.randint(0, size, shape), mesh, found.indices[name])
            for name, (shape, size) in index_shapes.items()
        }
        result = planner.contract(spec, *operands, **indices)
        assert result.placements == found.result
        whole = result.redistribute(placements=[R if p.is_partial() else p for p in result.placements])
        result.backward(whole.detach())
        for x in operands:
            x.grad.redistribute(placements=x.placements)
    assert sum(size for _, size in exchanged.found) == found.split.exchanged_bytes
    plan = planner.plan(spec, *operands, mesh=mesh, **indices)
    assert sum(each.bytes for each in plan.collectives()) == found.split.exchanged_bytes
    same(plan(*operands, **indices), result.full_tensor())


# -- index modes, derivatives, refusals -----------------------------------------------------------------------


def run_mode(mode):
    """Bad indices in a split index array, and of a split pool; a row that no index names holds NaN."""
    mesh = MESH["grid"]
    x, pool, q = small(9, 2, 4), small(7, 4, 6), torch.randint(0, 6, (9,))
    q[4], q[8], pool[6] = 7, -9, math.nan
    if mode == "clip":
        pool[6] = 1
    places = [[R, R], [R, Shard(0)], [Shard(0), R]]
    compare(mesh, ROWS[0], [x, pool], {"q": q}, places, [R, R], index_mode=mode)
    compare(mesh, "nj, nk -> q[n]jk", [x[:, 0], x[:, 1]], {"q": q}, [[Shard(0), R]] * 3, [R, R], sizes={"q": 7},
            index_mode=mode)  # fmt: skip
    # Rows are added into the part of the pool that each device reads; some indices are in range of one pool only.
    for split in [Shard(0), R], [R, Shard(0)], [Shard(0), Shard(0)]:
        xs, places = [small(7, 4), small(6), small(9, 4)], [split, [R, R], [R, R], [R, R]]
        compare(mesh, "q[n]j, q[n], nj -> q[n]j", xs, {"q": q}, places, [R, R], index_mode=mode)


def run_bad_index():
    """Every rank that holds the index refuses it, also where the row would lie elsewhere."""
    mesh, q = MESH["line"], torch.tensor([0, 1, 7, 2])
    for places in ([R], [Shard(0)]), ([Shard(0)], [R]):
        pool, index = (put(x, mesh, p) for x, p in zip((small(6, 2), q), places, strict=True))
        holds = places[1] == [R] or mesh.get_rank() == 2
        expected = pytest.raises(planner.IndexRangeError, match=r"is 7, outside of \[-6, 6\)")
        with expected if holds else contextlib.nullcontext():
            planner.contract("q[n]j -> nj", pool, q=index)


def run_second_derivatives():
    """Each operand and output gradient is in turn whole, split, and a sum of parts, which may stay apart."""
    for spec, shapes in ("ij, jk -> ik", ((8, 4), (4, 3))), ("i,  -> i", ((8,), ())), ("ij, ij -> i", ((8, 4),) * 2):
        for places in itertools.product([R, Shard(0), Partial()], repeat=3):
            both = []
            for of in lambda x, p: put(x, MESH["line"], [p if x.ndim or not p.is_shard() else R]), lambda x, p: x:
                torch.manual_seed(0)
                xs = [needing_gradients(of(small(*shape), p)) for shape, p in zip(shapes, places, strict=False)]
                result = planner.contract(spec, *xs)
                xs.append(needing_gradients(of(small(*result.shape), places[-1])))
                first = torch.autograd.grad(result, xs[:-1], xs[-1], create_graph=True)
                second = torch.autograd.grad(sum((g**2).sum() for g in first), xs)
                both.append((*first, *second))
            for found, wanted in zip(*both, strict=True):
                same(found, wanted)
    for places in [Shard(0)], [R], [Partial()]:
        both = []
        for of in lambda x, p: put(x, MESH["line"], p), lambda x, p: x:
            torch.manual_seed(0)
            a, c, q = small(9, 2, 4), small(7, 4, 6), torch.randint(0, 7, (9,))
            a, c, q = needing_gradients(of(a, places)), needing_gradients(of(c, [Shard(0)])), of(q, [R])
            result = planner.contract(ROWS[0], a, c, q=q)
            first = torch.autograd.grad((result**2).sum(), (a, c), create_graph=True)
            second = torch.autograd.grad(sum((g**2).sum() for g in first), (a, c))
            both.append((*first, *second))
        for found, wanted in zip(*both, strict=True):
            same(found, wanted)


def run_refusals():
    mesh = MESH["line"]
    x, pool, q = small(4, 3), small(5, 3), torch.randint(0, 5, (4,))
    X, POOL, Q = (put(y, mesh, [R]) for y in (x, pool, q))
    other = put(pool, MESH["grid"], [R, R])
    contract = planner.contract
    calls = {
        "operand 1 is a plain tensor, but operand 0 is a DTensor": lambda: contract(SPEC, X, pool, q=Q),
        "operand 0 is a plain tensor, but operand 1 is a DTensor": lambda: contract(SPEC, x, POOL, q=q),
        "index array 'q' is a plain tensor": lambda: contract(SPEC, X, POOL, q=q),
        "but index array 'q' is a DTensor": lambda: contract(SPEC, x, pool, q=Q),
        "was prepared by planner.group": lambda: contract(SPEC, X, POOL, q=planner.group(q, 5)),
        "planner.group takes no DTensor": lambda: planner.group(Q, 5),
        "operand 1 lies on": lambda: contract(SPEC, X, other, q=Q),
        "axis 'j' has size 3 in operand 0 but 4": lambda: contract(SPEC, X, put(small(5, 4), mesh, [R]), q=Q),
        "torch.func has no rule": lambda: torch.func.grad(lambda x: contract(SPEC, x, POOL, q=Q).sum())(X),
        "operand 0 is on several devices": lambda: planner.plan(SPEC, x, pool, q=q).analyze(X, pool, q=q),
        "sizes= takes a mapping": lambda: contract(SPEC, X, POOL, q=Q, sizes=5),
        "index_mode='wrong' is unknown": lambda: contract(SPEC, X, POOL, q=Q, index_mode="wrong"),
    }
    for said, call in calls.items():
        with pytest.raises(planner.PlannerError, match=re.escape(said)):
            call()


def run_options():
    """Options, sublists, operands in a list, and calls of a plan."""
    mesh = MESH["line"]
    x, y = small(8, 4), small(4, 6)
    X, Y = put(x, mesh, [Shard(0)]), put(y, mesh, [R])
    wanted = planner.contract("ij, jk -> ik", x, y)
    same(planner.contract("ij, jk -> ik", [X, Y]), wanted)
    same(planner.contract(X, [0, 1], Y, [1, 2], [0, 2]), wanted)
    same(planner.contract("ij, jk -> ik", X, Y, dtype="float32", minimize="peak", memory_limit="1 MB"), wanted.float())
    same(planner.contract("ij, jk -> ikz", X, Y, sizes={"z": 2}), wanted[..., None].expand(-1, -1, 2))
    same(planner.contract("ij, jk -> ikz", X, Y, sizes=[8, 6, 2]), wanted[..., None].expand(-1, -1, 2))
    q = torch.randint(0, 4, (8,))
    plan = planner.plan("ij, q[i]k -> kj", x, y, q=q)
    same(plan(X, Y, q=put(q, mesh, [R])), plan(x, y, q=q))
    view = planner.contract("ij -> ji", put(small(8, 6), mesh, [Shard(0)]))
    assert view.stride() == (1, 6)
    assert view.reshape(48).shape == (48,)


def run_sum_of_parts():
    """A contraction of a sum of parts is one, if it is no larger; nothing is exchanged."""
    mesh = MESH["line"]
    x, y = small(8, 4), small(4, 3)
    X, Y = put(x, mesh, [Partial()]), put(y, mesh, [R])
    with Exchanged() as exchanged:
        result = planner.contract("ij, jk -> ik", X, Y)
        wide = planner.contract("ij, k -> ijk", X, put(y[0], mesh, [R]))
    assert (result.placements, wide.placements) == ((Partial(),), (R,))
    assert exchanged.found == [("all_reduce", x.nbytes)]
    same(result, x @ y)
    bytes_ = DTensor.from_local(torch.full((8,), 100, dtype=torch.uint8), mesh, [Partial()])  # 400 is 144
    same(planner.contract("i, i -> i", bytes_, put(x[:, 0], mesh, [R])), 144 * x[:, 0])


def run_moved():
    """Of operands that disagree the smaller one is gathered, and its gradient is split as it is."""
    mesh = MESH["line"]
    x, y = small(8, 4), small(4, 4)
    result, gradients = compare(mesh, "ij, jk -> ik", [x, y], {}, [[Shard(0)], [Shard(1)]], [R])
    assert [result.placements, *(g.placements for g in gradients)] == [(Shard(0),), (Shard(0),), (Shard(1),)]


def run_compiled():
    """Dynamo and AOTAutograd record a call of DTensors; its index array is looked at when the program runs."""
    mesh, compiled = MESH["line"], torch.compile(gathered, backend="aot_eager", fullgraph=True)
    x, pool, q = small(8, 4), small(6, 4, 3), torch.randint(0, 6, (8,))
    found = []
    for function in gathered, compiled:
        X, POOL = needing_gradients(put(x, mesh, [R])), needing_gradients(put(pool, mesh, [Shard(0)]))
        result = function(X, POOL, put(q, mesh, [R]))
        (result.full_tensor() ** 2).sum().backward()
        found.append((result, X.grad, POOL.grad))
    for one, other in zip(*found, strict=True):
        assert one.placements == other.placements
        same(one, other.full_tensor())
    with pytest.raises(planner.IndexRangeError):
        compiled(X, POOL, put(q + 6, mesh, [R]))


def run_autocast():
    """The parts that are added up have the dtype of the whole: a part of size 1 alone would have another."""
    mesh, a, b = MESH["line"], small(4, 5), small(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        result = planner.contract("ab, bc -> ac", put(a, mesh, [Shard(1)]), put(b, mesh, [Shard(0)]))
        wanted = torch.einsum("ab, bc -> ac", a.float(), b.float())
    in_float32 = planner.contract("ab, bc -> ac", put(a.float(), mesh, [Shard(1)]), put(b.float(), mesh, [Shard(0)]))
    with torch.autocast("cpu", torch.bfloat16):
        cast = planner.contract("ab, bc -> ac", put(a.float(), mesh, [Shard(1)]), put(b.float(), mesh, [Shard(0)]))
    assert (cast.dtype, in_float32.dtype, result.dtype) == (wanted.dtype, torch.float32, a.dtype)
    same(cast, wanted)


def run_symbolic():
    """Sizes that a compiler treats as symbols are no keys."""
    mesh, compiled = MESH["line"], torch.compile(gathered, backend="aot_eager", dynamic=True)
    pool = small(6, 4, 3)
    for n in 8, 12:
        x, q = small(n, 4), torch.randint(0, 6, (n,))
        found = compiled(put(x, mesh, [Shard(0)]), put(pool, mesh, [R]), put(q, mesh, [Shard(0)]))
        same(found, gathered(x, pool, q))


def gathered(x, pool, q):
    return planner.contract("nj, q[n]jk -> nk", x, pool, q=q)


SPEC = "nj, q[n]j -> n"


# -- modules ------------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    def __init__(self, width, heads, size):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.randn(3, heads, width, size) / 4)
        self.out = torch.nn.Parameter(torch.randn(heads, size, width) / 4)

    def forward(self, x):
        q, k, v = (planner.contract("btd, hdk -> bhtk", x, w) for w in self.qkv.unbind(0))
        weights = planner.contract("bhtk, bhsk -> bhts", q, k).softmax(-1)
        return planner.contract("bhts, bhsk, hkd -> btd", weights, v, self.out)


class Experts(torch.nn.Module):
    """Each token goes to two experts."""

    def __init__(self, width, experts, hidden):
        super().__init__()
        self.gate = torch.nn.Parameter(torch.randn(width, experts))
        self.up = torch.nn.Parameter(torch.randn(experts, width, hidden) / 4)
        self.down = torch.nn.Parameter(torch.randn(experts, hidden, width) / 4)

    def forward(self, x):
        weights, chosen = planner.contract("btd, de -> bte", x, self.gate).softmax(-1).topk(2)
        hidden = planner.contract("btd, e[btk]dh -> btkh", x, self.up, e=chosen).relu()
        return planner.contract("btkh, e[btk]hd, btk -> btd", hidden, self.down, weights, e=chosen)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.experts = Attention(8, 4, 3), Experts(8, 4, 6)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.experts(self.norm(x))


class Split(ParallelStyle):
    """Splits parameters along a dimension each; the module takes and gives whole tensors."""

    def __init__(self, **dims):
        self.dims = dims

    def _apply(self, module, mesh):
        def distribute(name, part, mesh):
            for key, value in list(part.named_parameters(recurse=False)):
                place = [Shard(self.dims[key]) if key in self.dims else R]
                part.register_parameter(key, torch.nn.Parameter(distribute_tensor(value, mesh, place)))

        def take(module, inputs, mesh):
            return tuple(DTensor.from_local(x, mesh, [R]).redistribute(placements=[R]) for x in inputs)

        def give(module, result, mesh):
            return result.redistribute(placements=[R]).to_local()

        return distribute_module(module, mesh, distribute, take, give)


def split_module(block, mesh):
    styles = {"attention": Split(qkv=1, out=0), "experts": Split(up=0, down=0)}
    return parallelize_module(block, mesh, styles)


def losses(module, batch, target, mean=lambda loss: loss):
    optimizer, found = torch.optim.AdamW(module.parameters(), lr=0.05), []
    for _ in range(4):
        loss = ((module(batch) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(mean(loss.detach()).item())
    return found


def run_module(way):
    """A transformer block with a mixture of experts trains as on one process."""
    torch.manual_seed(1)
    plain, batch, target = Block().double(), torch.randn(8, 5, 8).double(), torch.randn(8, 5, 8).double()
    block = copy.deepcopy(plain)
    wanted = losses(plain, batch, target)
    assert wanted[-1] < wanted[0]
    parts, part = 1, 0
    if "tensor parallel" in way:
        split_module(block, MESH["grid"]["y"] if "FSDP2" in way else MESH["line"])
    if "FSDP2" in way:
        mesh = MESH["grid"]["x"] if "tensor parallel" in way else MESH["line"]
        for module in block.attention, block.experts, block:
            fully_shard(module, mesh=mesh)
        parts, part = mesh.size(), mesh.get_local_rank()

    def mean(loss):
        if parts > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=mesh.get_group())
        return loss / parts

    found = losses(block, batch.chunk(parts)[part], target.chunk(parts)[part], mean)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


FIXED = {f"{name} {text}": (run_split, (case, text)) for name, (case, texts) in SPLITS.items() for text in texts}
FIXED |= {
    f"proposal for {name} on the {mesh}": (run_proposal, (case, mesh))
    for name, case in {"rows": ROWS, "chain": CHAIN, "taken": TAKEN, "keys": KEYS}.items()
    for mesh in MESHES
}
FIXED |= {f"mode {mode}": (run_mode, (mode,)) for mode in ("drop", "clip", "nan")}
FIXED |= {name: (run_module, (name,)) for name in ("FSDP2", "tensor parallel", "FSDP2 and tensor parallel")}
FIXED |= {
    "a bad index": (run_bad_index, ()),
    "second derivatives": (run_second_derivatives, ()),
    "refusals": (run_refusals, ()),
    "options": (run_options, ()),
    "a sum of parts": (run_sum_of_parts, ()),
    "moved": (run_moved, ()),
    "compiled": (run_compiled, ()),
    "autocast": (run_autocast, ()),
    "symbolic": (run_symbolic, ()),
}
CASES = {**FIXED, **{f"drawn {number}": (run_drawn, (number,)) for number in range(DRAWN)}}


# -- four processes ----------------------------------------------------------------------------------------------


def run_case(name):
    function, arguments = CASES[name]
    torch.manual_seed(0)
    try:
        function(*arguments)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return None


def be_rank(rank, folder):
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, datetime.timedelta(seconds=60), RANKS, rank)
    for name, shape in MESHES.items():
        MESH[name] = init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)])
    wrong = {}
    for name in sys.argv[1:] or CASES:
        everywhere = [None] * RANKS
        dist.all_gather_object(everywhere, run_case(name))
        wrong[name] = next((f"rank {number}: {text}" for number, text in enumerate(everywhere) if text), None)
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                be_rank(rank, folder)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        print(pathlib.Path(folder, "0.json").read_text())


if __name__ == "__main__":
    main()
