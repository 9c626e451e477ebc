"""Families: plans that differ in sizes only share one search, and are as good as if each were searched for."""

import dataclasses
import gc
import random
import tracemalloc
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

import planner.api
import planner.run
from planner import Operand
from planner.backends.torch.products.transposed import TRANSPOSED
from planner.bench.corpus import corpus
from planner.cost import store
from planner.inspect.memory import torch_memory
from planner.program.frameworks import load_backend
from planner.search.choose import make_plan
from planner.search.family import FAMILIES, WIDE, Family, family_of
from planner.search.refine import call_seconds
from planner.search.slicing import LARGE_BYTES

# Specs with the letters of each operand's sizes; capitals are gathered dimensions, and index arrays follow. 1 is a
# dimension that is broadcast.
SPECS = {
    "ij, jk, kl -> il": (("ij", "jk", "kl"), {}, {}),
    "bqhd, bkhd -> bhqk": (("bqhd", "bkhd"), {}, {}),
    "nj, q[n]jk, kl -> nl": (("nj", "Gjk", "kl"), {"q": "n"}, {}),
    "s[e] d, e d -> t[e] d": (("Gd", "ed"), {"s": "e", "t": "e"}, {"t": "H"}),
    "b i[bqk] d, bqd -> bqk": (("bGd", "bqd"), {"i": "bqk"}, {}),
    "iij, jk, k -> ki": (("iij", "jk", "k"), {}, {}),
    "i -> ii": (("i",), {}, {}),
    "ij, j -> ijk": (("ij", "j"), {}, {"k": "k"}),
    "nj -> t[n]j": (("nj",), {"t": "n"}, {"t": "H"}),
    "q[n]t[m] -> nm": (("GH",), {"q": "n", "t": "m"}, {}),
    "t[n]q[mk]d -> nmkd": (("HGd",), {"q": "mk", "t": "n"}, {}),
    "c -> c t[c]": (("c",), {"t": "1"}, {"t": "H"}),
    "q[n]j, q[m]k -> njmk": (("Gj", "Gk"), {"q": "n"}, {}),
    "nj, q[n]j, q[m]k, mk -> jk": (("nj", "Gj", "Gk", "nk"), {"q": "n"}, {}),
    "...i, ...ij -> ...j": (("b1i", "cij"), {}, {}),
    "...j, q[...]jk -> ...k": (("1nj", "Gjk"), {"q": "mn"}, {}),
    "q[n]c, nc -> n": (("Gc", "nc"), {"q": "n"}, {}),
}


@st.composite
def problems(draw):
    """Return a spec, and the size of each letter."""
    spec = draw(st.sampled_from(sorted(SPECS)))
    operands, indices, sizes = SPECS[spec]
    letters = sorted(set("".join((*operands, *indices.values(), *sizes.values()))))
    return spec, {letter: draw(st.integers(1, 40)) for letter in letters} | {"1": 1}, draw(st.booleans())


def plan_of(problem, **options):
    spec, sizes, gradients = problem
    operands, indices, given_sizes = SPECS[spec]
    standins = [Operand(tuple(sizes[a] for a in term), requires_grad=gradients) for term in operands]
    arrays = {name: tuple(sizes[a] for a in axes) for name, axes in indices.items()}
    options = {"backend": "torch", "device": "cpu", "sizes": {n: sizes[a] for n, a in given_sizes.items()}, **options}
    return planner.plan(spec, *standins, **arrays, **options)


@example([("ij, jk, kl -> il", dict.fromkeys("ijkl", size), True) for size in (30, 31, 17)], 0)
@settings(max_examples=20)
@given(st.lists(problems(), min_size=2, max_size=4), st.integers(0, 5))
def test_plans_do_not_depend_on_the_order_of_calls(cases, seed):
    FAMILIES.clear()
    first = [plan_of(case) for case in cases]
    FAMILIES.clear()
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    again = {number: plan_of(cases[number]) for number in order}
    assert first == [again[number] for number in range(len(cases))]


# The member's product has too many columns for the row of the largest member.
@example(("iij, jk, k -> ki", {"i": 12, "j": 22, "k": 33, "1": 1}, True))
@settings(max_examples=30)
@given(problems())
def test_a_member_has_the_steps_of_its_representative(case):
    plan = plan_of(case)
    family = family_of(plan.contraction)
    if family is None:
        assert "family" not in plan.origin
        return
    assert not plan.proven
    assert plan.path == family.plan.path
    if plan.loop is not None:  # loops are a member's own
        return
    table = load_backend(plan.backend).table
    for step, of_family in zip(plan.steps, family.plan.steps, strict=True):
        row = of_family.choice.lowering
        if table.rows[row].refusal(step.op, plan.device) is None:
            assert step.choice.lowering == row
        else:
            others = table.choices(step.op, plan.device)
            assert step.choice.cost.picoseconds == min(other.cost.picoseconds for other in others)
    assert plan.programs.forward.results == family.plan.programs.forward.results
    assert "of the family of" in str(plan)


def test_plans_under_families_are_as_good_as_those_of_their_own_search():
    rng, ratios = random.Random(0), []
    for spec in SPECS:
        letters = sorted(set("".join((*SPECS[spec][0], *SPECS[spec][1].values(), *SPECS[spec][2].values()))))
        for _ in range(4):
            sizes = {a: rng.randint(2, 130) for a in letters} | {"1": 1}
            plan = plan_of((spec, sizes, rng.random() < 0.5))
            ratios.append(plan.cost.seconds / make_plan(plan.contraction).cost.seconds)
    assert sorted(ratios)[len(ratios) * 95 // 100] <= 1.1


@pytest.mark.parametrize(
    "options", [{"optimize": "optimal"}, {"minimize": "flops"}, {"memory_limit": 10**9}, {"retain_limit": 10**9}]
)
def test_other_questions_are_not_answered_by_a_family(options):
    case = ("ij, jk, kl -> il", {"i": 100, "j": 20, "k": 30, "l": 40}, True)
    assert "family" in plan_of(case).origin
    plan = plan_of(case, **options)
    assert "family" not in plan.origin
    assert plan.proven or options.get("memory_limit")


def test_a_family_that_is_not_good_for_all_members_is_split(monkeypatch):
    case = ("ij, jk, kl -> il", {"i": 100, "j": 20, "k": 30, "l": 40}, False)
    tried = []

    def find(plan, low, parts):
        tried.append(dict(plan.resolved.spec.sizes)["i"])
        return Family(plan, settled=len(tried) == 3)

    FAMILIES.clear()
    monkeypatch.setattr("planner.search.family._judged", find)
    assert "for the family of i=112," in plan_of(case).origin
    assert tried == [128, 128, 112]
    FAMILIES.clear()
    monkeypatch.setattr("planner.search.family._judged", lambda plan, low, parts: Family(plan, settled=False))
    assert plan_of(case).proven
    FAMILIES.clear()


def test_the_batch_of_two_operands_has_wide_classes():
    forget()
    for edges in (17, 60, 300, 512):
        plan = plan_of(("s[e] d, e d -> t[e] d", {"e": edges, "d": 16, "G": 100, "H": 100}, False))
        assert edges == 512 or dict(family_of(plan.contraction).plan.resolved.spec.sizes)["e"] == 512
    assert len(FAMILIES) == 1
    # The other sizes have a class between two powers of two.
    family = family_of(plan_of(("s[e] d, e d -> t[e] d", {"e": 60, "d": 17, "G": 100, "H": 200}, False)).contraction)
    assert [gather.size for gather in family.plan.resolved.spec.gathers] == [128, 256]
    assert family.plan.resolved.spec.by_axis == {"d": 32, "e": 512}
    assert plan_of(("ij, jk, kl -> il", dict.fromkeys("ijkl", 100), False)).origin.endswith(
        "i=128, j=128, k=128, l=128"
    )


def test_a_family_may_take_longer_than_trees_that_need_more_memory_than_einsum():
    """A product by element and its sum are faster here, but allocate twice what einsum does."""
    forget()
    for edges in (300, 350, 500):
        plan = plan_of(("q[n]c, nc -> n", {"n": edges, "c": 64, "G": 3000}, False))
        assert "of the family of" in str(plan)
        assert plan.cost.peak_bytes <= plan.naive_cost.peak_bytes
    assert len(FAMILIES) == 1


def test_a_loop_that_is_as_lean_as_einsum_and_faster_is_found_in_families_too():
    """Without a loop the fastest plan needs more memory than einsum, and what needs no more takes twice as long."""
    plan = planner.plan("nij, q[n]jk -> nik", (20_000, 2, 8), (6, 8, 4), q=(20_000,), backend="torch", device="cpu")
    assert plan.loop is not None
    assert plan.cost.seconds < 0.8 * plan.naive_cost.seconds
    assert plan.cost.peak_bytes <= plan.naive_cost.peak_bytes


def test_wide_classes_are_split_where_autograd_runs_the_smallest_members_only():
    """512 rows take so long that a Function computes their gradients; 32 rows are faster by autograd."""
    x, w, s = torch.ones(16, 8, requires_grad=True), torch.ones(32, 8, 8, requires_grad=True), torch.arange(32) % 16
    result = planner.contract("s[e]i, eio -> d[e]o", x, w, s=s, d=s, sizes=(16, 8))
    assert "Contract" not in result.grad_fn.name()


@pytest.mark.parametrize(
    ("spec", "shapes"), [("i, j -> ij", [(151,), (16,)]), ("zui, zu -> zui", [(142, 16, 3), (142, 16)])]
)
def test_families_of_plans_that_autograd_runs_settle(spec, shapes):
    """Their steps take longer than a Function's, which takes longer beside them. Each new size took 2 ms for 50 us."""
    forget()
    plan = planner.plan(spec, *[Operand(shape, requires_grad=True) for shape in shapes], backend="torch", device="cpu")
    assert "by autograd" in plan.origin
    assert "family" in plan.origin


def test_a_class_settles_whose_largest_plans_keep_copies_as_its_smallest_do():
    """From 2.5 ms on only einsum's own tree is compared with a Function. Some new sizes took 8 ms."""
    forget()
    for positions in (300, 360):
        operands = [Operand((2, positions, 4, 16), requires_grad=True)] * 2
        assert "family" in planner.plan("bqhd, bkhd -> bhqk", *operands, backend="torch", device="cpu").origin
    (family,) = (family for family in FAMILIES.values() if family.settled)
    assert family.plan.programs.copies is not None
    assert family.plan.cost.seconds > 2.5e-3


def test_a_plan_as_lean_as_einsum_may_be_run_by_autograd():
    """The fastest plan that autograd runs retains 1% more. A leaner Function is predicted to take 1.8 times as long."""
    operands = [Operand(shape, requires_grad=True) for shape in [(4, 64, 9, 32), (64,), (9,)]]
    plan = planner.plan("pijk, i, j -> k", *operands, backend="torch", device="cpu")
    assert "as lean as einsum, by autograd" in plan.origin
    assert plan.cost.retained_bytes <= plan.naive_cost.retained_bytes
    assert call_seconds(plan.contraction, plan) == plan.cost.seconds  # nothing beside its steps


def test_a_batch_that_a_kernel_may_run_has_narrow_classes():
    FAMILIES.clear()
    operands = [Operand((250, 32)), Operand((8, 32, 32))]
    plan = planner.plan("nj, q[n]jk -> nk", *operands, q=(250,), backend="torch", device="cpu")
    assert family_of(plan.contraction).settled
    assert WIDE not in {parts for _, parts in FAMILIES}


def test_on_a_card_members_have_the_same_divisors():
    h100 = planner.Device.preset("h100")
    plan = planner.plan("ij, jk -> ik", (1000, 40), (40, 100), backend="torch", device=h100)
    family = family_of(plan.contraction)
    assert dict(family.plan.resolved.spec.sizes) == {"i": 1016, "j": 56, "k": 124}


def arrays_of(problem, rng, transposed=False):
    """Return operands and index arrays with small integers, and `sizes=`."""
    spec, sizes, gradients = problem
    operands, indices, given_sizes = SPECS[spec]
    tensors = []
    for term in operands:
        shape = [sizes[a] for a in term]
        x = torch.tensor(rng.integers(-2, 3, shape[::-1] if transposed else shape), dtype=torch.float32)
        tensors.append((x.permute(*reversed(range(x.dim()))) if transposed else x).requires_grad_(gradients))
    pools = {"q": "G", "s": "G", "i": "G", "t": "H"}
    arrays = {n: torch.tensor(rng.integers(0, sizes[pools[n]], [sizes[a] for a in t])) for n, t in indices.items()}
    arrays = dict(rng.permutation(np.array([*arrays.items()], object)))  # keywords come in any order
    return tensors, arrays, {n: sizes[a] for n, a in given_sizes.items()} or None


def run(call, tensors, gradient):
    """Return a call's result with its strides and the bytes that it saves, and the gradients."""
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call()
    if not result.requires_grad:
        return result, None, result.stride(), 0, []
    by = {"sum": lambda x: x.sum(), "plain": lambda x: (x * torch.ones_like(x)).sum(), "turned": turned_sum}[gradient]
    return result, result.detach(), result.stride(), sum(saved.values()), torch.autograd.grad(by(result), tensors)


def turned_sum(x):
    ones = torch.ones(x.shape[::-1])
    return (x * ones.permute(*reversed(range(x.dim())))).sum()


def forget():
    planner.caches().clear()


@settings(max_examples=40)
@given(
    problems(),
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from(["sum", "plain", "turned"]),
    st.sampled_from(["raise", "clip"]),
)
def test_members_run_as_if_they_were_bound_by_themselves(case, seed, transposed, gradient, mode):
    rng = np.random.default_rng(seed)
    spec, sizes, gradients = case
    forget()
    # Another member of the family is called before.
    other = {
        a: n if n <= 16 else int(rng.integers((1 << (n - 1).bit_length()) // 2 + 1, n + 1)) for a, n in sizes.items()
    }
    for case in ((spec, other, gradients), (spec, sizes, gradients)):
        tensors, arrays, given_sizes = arrays_of(case, rng, transposed)
        options = {"sizes": given_sizes, "index_mode": mode, **arrays}
        found = run(partial(planner.contract, spec, *tensors, **options), tensors, gradient)
        plan = planner.plan(spec, *tensors, **options)
        expected = run(partial(planner.run.bind_plan(plan), tensors, arrays), tensors, gradient)
        assert torch.equal(found[0], expected[0])
        assert found[2:4] == expected[2:4]
        assert [torch.equal(x, y) for x, y in zip(found[4], expected[4], strict=True)] == [True] * len(expected[4])


@pytest.mark.parametrize(
    ("spec", "first", "second"), [("mbi, zbm -> zi", "mbi", "zbm"), ("dba, abe -> de", "dba", "abe")]
)
def test_members_keep_what_their_own_plans_say(spec, first, second):
    """The larger operand says in which order axes are summed, and may be another one than the representative's."""
    forget()
    for length, other in ((50, 40), (40, 50), (63, 33), (33, 63)):
        size = {"i": length, "z": other, "m": 36, "b": 37, "d": length, "e": other, "a": 36}
        operands = [torch.ones([size[axis] for axis in term], requires_grad=True) for term in (first, second)]
        plan = planner.plan(spec, *operands)
        planner.contract(spec, *operands)
        measured = torch_memory(lambda operands=operands: planner.contract(spec, *operands))[1]
        assert measured.retained_bytes == plan.cost.retained_bytes > 0
    assert "for the family of" in plan.origin


@settings(max_examples=20)
@given(problems(), st.integers(0, 2**32))
def test_numpy_members_run_as_if_they_were_bound_by_themselves(case, seed):
    forget()
    spec, sizes, _ = case
    for member in (sizes, {a: n if n <= 16 else n - 1 for a, n in sizes.items()}):
        tensors, arrays, given_sizes = arrays_of((spec, member, False), np.random.default_rng(seed))
        operands, indices = [x.numpy() for x in tensors], {n: q.numpy() for n, q in arrays.items()}
        found = planner.contract(spec, *operands, sizes=given_sizes, **indices)
        plan = planner.plan(spec, *operands, sizes=given_sizes, **indices)
        assert np.array_equal(found, planner.run.bind_plan(plan)(operands, indices))


def test_a_new_member_of_a_known_family_makes_no_plan(monkeypatch):
    forget()
    w = torch.ones(40, 50, requires_grad=True)
    planner.contract("ij, jk -> ik", torch.ones(100, 40), w).sum().backward()
    for name in ("accept_plan", "bind_plan", "bind_first_member"):
        monkeypatch.setattr(f"planner.api.{name}", None)
    result = planner.contract("ij, jk -> ik", torch.ones(101, 40), w)
    assert result.shape == (101, 50)
    result.sum().backward()


def test_new_members_that_refuse_a_row_of_their_family_share_what_runs_them(monkeypatch):
    """Each took 2 ms: the family's plan transposes a gradient of 512 rows, and theirs has 20 rows, too few for it."""
    forget()
    w = torch.ones(20, 11, requires_grad=True)
    x, y = (torch.ones(z, 20, 20, requires_grad=True) for z in (92, 77))
    planner.contract("am, zba -> zbm", w, x).sum().backward()
    (family,) = (family for family in FAMILIES.values() if family.settled)
    assert TRANSPOSED in rows_of(family.plan)
    assert TRANSPOSED not in rows_of(planner.plan("am, zba -> zbm", w, y))
    for name in ("accept_plan", "bind_plan", "bind_first_member"):
        monkeypatch.setattr(f"planner.api.{name}", None)
    result = planner.contract("am, zba -> zbm", w, y)
    assert torch.equal(result, torch.full((77, 20, 11), 20.0))
    result.sum().backward()
    assert torch.equal(w.grad, torch.full((20, 11), (92.0 + 77.0) * 20))


def rows_of(plan):
    return [step.choice.lowering for step in plan.steps]


@pytest.mark.parametrize("needs", [False, True])
def test_new_sizes_of_public_products_make_no_search(needs, monkeypatch):
    """A third size once took milliseconds for 25 of 382. A few still do, because their leanness ends within a class."""
    rows = [row for row in corpus("overhead") if row.grow]
    rows = random.Random(0).sample(rows, examples(len(rows) // 7, len(rows)))
    searched = set()
    for row in rows:
        forget()
        search = Mock(side_effect=make_plan)
        for number, size in enumerate((115, 126, 118)):  # one class of the narrowest
            sized = row.resized(**{row.grow[0]: size})
            operands = [x.requires_grad_(needs) for x in sized.operands("torch", seed=0)]
            with monkeypatch.context() as patch:
                if number == 2:
                    patch.setattr("planner.search.family.make_plan", search)
                result = planner.contract(row.spec, *operands, **sized.options, **sized.indices("torch", seed=0))
                if needs:
                    result.sum().backward()
        if search.called:
            searched.add(row.spec)
    assert len(searched) <= len(rows) // 20


def test_new_sizes_of_large_products_are_not_searched_for_loops(monkeypatch):
    """Each took 50 to 250 ms. The loops of the largest member are searched for all."""
    spec, shapes = "nij, q[n]jk -> nik", [(3283, 64, 64), (400, 64, 128)]
    forget()
    first = planner.plan(spec, *shapes, q=(3283,), backend="torch", device="cpu")
    assert first.loop is None
    assert first.cost.peak_bytes > LARGE_BYTES
    monkeypatch.setattr("planner.search.choose.loop_candidates", None)
    second = planner.plan(spec, (3000, 64, 64), (350, 64, 128), q=(3000,), backend="torch", device="cpu")
    assert "family" in second.origin
    assert second.path == first.path


@pytest.mark.parametrize("needs", [False, True])
def test_members_of_a_family_whose_largest_takes_a_loop_may_take_one(needs):
    forget()
    operands = [Operand(shape, requires_grad=needs) for shape in [(3585, 8, 128), (677, 128)]]
    plan = planner.plan("bid, q[bk]d -> bik", *operands, q=(3585, 128), backend="torch", device="cpu")
    family = family_of(plan.contraction)
    assert plan.loop is not None
    assert family is None or family.searches_loops


def test_a_family_whose_search_for_loops_is_interrupted_is_not_remembered(monkeypatch):
    def plan(n):
        return planner.plan("nij, q[n]jk -> nik", (n, 64, 64), (400, 64, 128), q=(n,), backend="torch", device="cpu")

    def interrupted(*_):
        yield from ()
        raise KeyboardInterrupt

    forget()
    with monkeypatch.context() as patch:
        patch.setattr("planner.search.choose.loop_candidates", interrupted)
        assert plan(3283).origin.startswith("interrupted")
    again = plan(3283)
    assert not again.origin.startswith("interrupted")
    assert not family_of(again.contraction).searches_loops
    forget()
    assert plan(3283).to_json() == again.to_json()


def test_no_search_begins_after_an_interrupted_one_for_a_plan_as_lean_as_einsum(monkeypatch):
    """A plan as slow as this would be searched for loops too."""
    operands = [Operand(shape, requires_grad=True) for shape in [(4, 64, 9, 32), (64,), (9,)]]
    lean = planner.plan("pijk, i, j -> k", *operands, backend="torch", device="cpu")
    assert "as lean as einsum" in lean.origin
    slow = dataclasses.replace(lean.programs, cost=dataclasses.replace(lean.cost, seconds=1))
    found = dataclasses.replace(lean, programs=slow, origin="interrupted: exact")
    search = Mock(return_value=found)
    monkeypatch.setattr("planner.search.choose.make_plan", search)
    assert make_plan(lean.contraction).origin.startswith("interrupted: exact")
    assert search.call_count == 1


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("kli, lkj -> ij", [(20, 244, 83), (244, 20, 38)]),  # its largest member cuts the other summed axis
        ("bhid, jd -> bhij", [(126, 4, 16, 32), (31, 32)]),
        ("bnd, nk -> bkd", [(118, 32, 32), (32, 8)]),
    ],
)
def test_members_that_sum_batches_or_slices_hold_what_their_own_plans_say(spec, shapes):
    forget()
    operands = [torch.ones(shape) for shape in shapes]
    planner.contract(spec, *[torch.ones([size + 1 for size in shape]) for shape in shapes])
    expected = torch.einsum(spec.replace(" ", ""), *operands)
    assert torch.equal(planner.contract(spec, *operands), expected)
    measured = torch_memory(lambda: planner.contract(spec, *operands))[1]
    assert measured.peak_bytes <= planner.plan(spec, *operands).cost.peak_bytes


def test_members_whose_other_operand_is_the_larger_one_copy_what_their_own_plans_say():
    forget()
    x, y = torch.ones(32, 3, 64, 17, requires_grad=True), torch.ones(64, 64, 3, 32, requires_grad=True)
    arrays = {"q": torch.arange(256) % 32, "p": torch.arange(256) % 64}
    spec = "q[n]abi, p[n]bak -> nik"
    planner.contract(spec, x, y, **arrays)
    measured = torch_memory(lambda: planner.contract(spec, x, y, **arrays))[1]
    assert measured.peak_bytes <= planner.plan(spec, x, y, **arrays).cost.peak_bytes


def test_a_loop_that_is_a_little_faster_than_a_lean_plan_is_not_taken():
    """Each new size was searched for loops, 28 ms for a call of 0.5 ms."""
    plan = planner.plan("zi, zj, ijk -> zk", (9000, 3), (9000, 5), (3, 5, 7), backend="torch", device="cpu")
    assert plan.loop is None
    assert family_of(plan.contraction) is not None


@pytest.mark.parametrize("shapes", [((101, 40), (41, 50)), ((101, 40), (39, 50))])
def test_members_whose_sizes_contradict_are_refused(shapes):
    planner.contract("ij, jk -> ik", torch.ones(100, 40), torch.ones(40, 50))
    with pytest.raises(planner.ShapeError, match="axis 'j'"):
        planner.contract("ij, jk -> ik", *map(torch.ones, shapes))
    planner.contract(
        "nj, q[n]jk -> nk", torch.ones(100, 4), torch.ones(20, 4, 5), q=torch.zeros(100, dtype=torch.int64)
    )
    with pytest.raises(planner.ShapeError, match="axis 'n'"):
        planner.contract(
            "nj, q[n]jk -> nk", torch.ones(99, 4), torch.ones(20, 4, 5), q=torch.zeros(98, dtype=torch.int64)
        )
    with pytest.raises(planner.IndexRangeError, match="20"):
        planner.contract("nj, q[n]jk -> nk", torch.ones(99, 4), torch.ones(20, 4, 5), q=torch.full((99,), 20))


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("mode", ["raise", "clip", "drop", "nan"])
def test_members_treat_bad_indices_as_other_calls_do(needs, mode):
    """Native calls leave the check of ranges to torch's operators, which know neither modes nor negative indices."""
    forget()
    spec = "s[e] d, e d -> t[e] d"
    nodes = torch.arange(40.0).reshape(20, 2).requires_grad_(needs)

    def call(n, bad, **options):
        s, t = torch.arange(n) % 20, torch.arange(n) % 19
        edges = torch.arange(2.0 * n).reshape(n, 2) % 5
        for array, value in bad:
            {"s": s, "t": t}[array][n // 2] = value
        return planner.contract(spec, nodes, edges, s=s, t=t, sizes={"t": 20}, index_mode=mode, **options)

    for n in (50, 51, 60):  # the first is the first member
        for bad in ([], [("s", -3)], [("t", -3)], [("s", 20)], [("t", 25)], [("s", -21)]):
            found, expected = (outcome(call, n, bad, **more) for more in ({}, {"optimize": "optimal"}))
            assert found == expected, (n, bad)


def outcome(call, *given, **options):
    """Return the values of a result, NaN as text, or the text of the error."""
    try:
        return str(call(*given, **options).tolist())
    except planner.IndexRangeError as error:
        return str(error)


def test_second_derivatives_and_vmap_of_members():
    x, w = (torch.randn(n, n, dtype=torch.float64, requires_grad=True) for n in (20, 20))
    planner.contract(
        "ij, jk -> ik",
        torch.ones(19, 19, dtype=torch.float64, requires_grad=True),
        torch.ones(19, 19, dtype=torch.float64),
    )

    def call(x, w):
        return planner.contract("ij, ij, jk -> ik", x, x, w)

    call(torch.ones(19, 19, dtype=torch.float64, requires_grad=True), torch.ones(19, 19, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(
        lambda x: call(x[:, :2].repeat(1, 10), w).sum(), x[:, :2].detach().requires_grad_()
    )
    batch = torch.randn(3, 20, 20, dtype=torch.float64)
    assert torch.allclose(torch.func.vmap(call, (0, None))(batch, w), torch.stack([call(b, w) for b in batch]))


def test_caches_tell_their_sizes_and_are_cleared():
    planner.caches().clear()
    planner.contract("ij, jk -> ik", torch.ones(100, 40), torch.ones(40, 50))
    planner.contract("ij, jk -> ik", torch.ones(3, 4), torch.ones(4, 5))
    caches = planner.caches()
    assert (caches.members, caches.plans, caches.families, caches.bound) == (1, 1, 1, 1)
    assert caches.steps > 0
    assert str(caches).splitlines()[1] == "members           1    0.0 MB"
    caches.clear()
    assert planner.caches().bytes == 0


def test_many_shapes_hold_little_memory():
    """A tenth of the promise, 6,000 shapes in 60 MB."""
    planner.caches().clear()
    w = torch.ones(40, 50, requires_grad=True)
    planner.contract("ij, jk -> ik", torch.ones(100, 40), w)
    gc.collect()
    tracemalloc.start()
    for n in range(100, 700):
        planner.contract("ij, jk -> ik", torch.ones(n, 40), w)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 6_000_000


def test_the_disk_is_turned_off(disk):
    planner.caches().disk(False)
    store.remember("example", {"a": 1}, 2)
    assert not [*disk.iterdir()]
    planner.caches().disk(True)
    store.remember("example", {"a": 1}, 2)
    assert store.recall("example", {"a": 1}) == 2
