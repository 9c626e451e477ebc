# ruff: noqa: E501
"""Whatever comes in, an error of ours goes out: named culprit, bounded time, bounded memory."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
from conftest import run_python

import planner
from planner.cost.products import CLASSES
from planner.language.spec import is_letter
from planner.language.units import parse_bytes
from planner.program.frameworks import load_backend

# -- size ------------------------------------------------------------------------------------------------

CASES = {
    "sizes of 2^62": "planner.plan('ij,jk->ik', (2**62, 2), (2, 2**62), backend='numpy')",
    "joint space of 2^120": "planner.plan('ij,jk->', (2**60, 2), (2, 2**60), backend='numpy')",
    "a scatter into 2^62": "planner.plan('n->q[n]', (3,), q=(3,), sizes={'q': 2**62}, backend='numpy')",
    "a broadcast to 2^80": "planner.plan('->abcd', (), sizes=(2**20,)*4, backend='numpy')",
    "huge axes that only meet": "planner.plan('ia,ib,ic->i', (2**20,2**30),(2**20,2**30),(2**20,2**30), backend='numpy')",
    "beyond Python's floats": "planner.plan(','.join(L[:40])+'->', *[(2**61,)]*40, backend='numpy')",
    "a term of 10^5 letters": "planner.plan('a'*10**5, (2,)*10, backend='numpy')",
    "10^5 blanks": "planner.plan(' '*10**5, (), backend='numpy')",
    "10^5 open brackets": "planner.plan('q['*50_000, (2,), backend='numpy')",
    "10^5 commas": "planner.plan(','*10**5, *[()]*10, backend='numpy')",
    "10^5 distinct letters": "planner.plan(''.join(L[:50_000]), (2,)*10, backend='numpy')",
    "a bracket of 10^5 letters": "planner.plan('q['+'a'*10**5+']->', (2,), q=(2,), backend='numpy')",
    "chain of 200": "planner.plan(','.join(L[i]+L[i+1] for i in range(200))+'->'+L[0]+L[200], *[(3,3)]*200, backend='numpy')",
    "star of 200": "planner.plan(','.join('a'+L[i+2] for i in range(200))+'->a', *[(3,2)]*200, backend='numpy')",
    "star of 100": "planner.plan(','.join('a'+x for x in L[1:101])+'->a', *[(4,2)]*100, backend='numpy')",
    "outer product of 200": "planner.plan(','.join(L[:200])+'->'+''.join(L[:200]), *[(2,)]*200, backend='numpy')",
    "outer product of 60": "planner.plan(','.join(L[:60])+'->'+''.join(L[:60]), *[(2,)]*60, backend='numpy')",
    "200 in one sum": "planner.plan(','.join(['a']*200)+'->', *[(5,)]*200, backend='numpy')",
    "200 scalars": "planner.plan(','.join(['']*200)+'->', *[()]*200, backend='numpy')",
    "200 with gradients": "planner.plan(','.join(L[i]+L[i+1] for i in range(200))+'->', *[planner.Operand((3,3), requires_grad=True)]*200, backend='numpy', minimize='peak')",
    "20 large matrices with gradients": "planner.plan(','.join(L[i]+L[i+1] for i in range(20))+'->'+L[0]+L[20], *[planner.Operand((2000, 2000), requires_grad=True)]*20, backend='numpy')",
    "50 large matrices": "planner.plan(','.join(L[i]+L[i+1] for i in range(50))+'->', *[(2000, 2000)]*50, backend='numpy')",
    "200 matrices worth slicing": "planner.plan(','.join(L[i]+L[i+1] for i in range(200))+'->', *[(300, 300)]*200, backend='numpy')",
    "400 operands": "planner.plan(','.join(['a']*400)+'->', *[(3,)]*400, backend='numpy')",
    "50,000 operands": "planner.plan('a,'*49_999+'a->', *[(5,)]*50_000, backend='numpy')",
    "200 gathers through one index": "planner.plan(','.join(f'q[n]{L[i+30]}' for i in range(200))+'->n', *[(9,2)]*200, q=(4,), backend='numpy')",
    "8 index arrays in one operand": "planner.plan(''.join(f'{x}[n]' for x in 'abcdefgh')+'->n', (3,)*8, **{x: (4,) for x in 'abcdefgh'}, backend='numpy')",
    "8 index arrays, one an operand": "planner.plan(','.join(f'{x}[n]k' for x in 'abcdefgh')+'->nk', *[(3, 2)]*8, **{x: (4,) for x in 'abcdefgh'}, backend='numpy')",
    "12 index arrays, scattered too": "planner.plan(','.join(f'{x}[n]k' for x in 'abcdefghijlm')+'->a[n]b[n]k', *[(3, 2)]*12, **{x: (4,) for x in 'abcdefghijlm'}, backend='numpy', sizes=(3,3,2))",
    "40 index arrays": "planner.plan(','.join(f'{L[i+1]}[a]' for i in range(40))+'->a', *[(3,)]*40, **{L[i+1]: (4,) for i in range(40)}, backend='numpy')",
    "20 index arrays in one operand": "planner.plan(''.join(f'{L[i+1]}[a]' for i in range(20))+'->a', (3,)*20, **{L[i+1]: (4,) for i in range(20)}, backend='numpy')",
    "20 scattered index arrays": "planner.plan('a->'+''.join(f'{L[i+1]}[a]' for i in range(20)), (4,), **{L[i+1]: (4,) for i in range(20)}, sizes=(2,)*20, backend='numpy')",
    "10 operands at the peak": "planner.plan(','.join(L[i]+L[(i*3+1)%7] for i in range(10))+'->a', *[(3,3)]*10, backend='numpy', minimize='peak')",
}  # fmt: skip


# The seconds of CPU time that a case may take on an idle Xeon server, where the slowest took 2.2 s and the one that has
# a limit of its own 4.7 s. A slower or busier machine is given as many times more as it takes longer for a loop, which
# is timed before and after. A case that never ends is killed.
SECONDS, MORE_SECONDS = 5, {"40 index arrays": 20}
KILLED = 8  # times the seconds
PROGRAM = """
import resource
import time
import numpy as np
import planner
from planner.language.spec import unused_letters

def peak_bytes():
    # `ru_maxrss` begins as that of the process that started this one.
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def slowness():
    # How many times longer than on that server a loop takes, at least 1.
    begun, tables = time.process_time(), [np.zeros(64) for _ in range(4)]
    for n in range(30_000):
        tables[n % 4][: len({n: str(n)})] += 1
    return max(1.0, (time.process_time() - begun) / LOOP_SECONDS)

planner.plan("ij,jk->ik", (2, 2), (2, 2), backend="numpy")
L = unused_letters((), 50_000)
slow = slowness()
begun = time.process_time()
limit = int(begun + KILLED * SECONDS) + 2
resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
before = peak_bytes()
try:
    print(CASE)
except (planner.SpecError, planner.ShapeError, planner.SearchLimitError) as error:
    assert len(str(error)) < 1000, len(str(error))
took, grown = time.process_time() - begun, peak_bytes() - before
assert grown < 512 * 2**20, grown
assert took < SECONDS * max(slow, slowness()), took
"""
LOOP_SECONDS = 0.055


def run_hostile(case, seconds=SECONDS):
    """Run a case in a process of its own; an AssertionError says if it took too much time or memory."""
    program = PROGRAM.replace("CASE", case).replace("LOOP_SECONDS", str(LOOP_SECONDS)).replace("KILLED", str(KILLED))
    run_python(program.replace("SECONDS", str(seconds)))


@pytest.mark.parametrize("name", CASES)
def test_hostile_sizes_end_in_time_and_memory(name):
    run_hostile(CASES[name], MORE_SECONDS.get(name, SECONDS))


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="only Linux tells a process's own peak")
def test_the_memory_of_a_hostile_case_is_its_own():
    """What this process has taken is no part of it."""
    taken = b"x" * (700 * 2**20)
    with pytest.raises(AssertionError, match="AssertionError: [67]"):
        run_hostile("len(b'x' * (600 * 2**20))")
    assert taken


def test_the_time_of_a_hostile_case_is_limited():
    with pytest.raises(AssertionError, match=r"AssertionError: 0\.\d+"):
        run_hostile("sum(range(10**7))", seconds=0.02)
    with pytest.raises(AssertionError, match="-9 == 0"):
        run_hostile("any(iter(int, 1))", seconds=0.1)


# -- wrong arguments -------------------------------------------------------------------------------------

A, B = np.ones((2, 3)), np.ones((3, 4))
C, Q = np.ones((5, 3)), np.array([0, 4, -1])
GATHER = "q[n]j->nj"

WRONG = [
    ("ij,jk->ik", (A,), {}, planner.ShapeError, "2 input terms, but 1 operands"),
    ("ij,jk->ik", (A, B, B), {}, planner.ShapeError, "2 input terms, but 3 operands were given\n"),
    (GATHER, (C, Q), {}, planner.ShapeError, "2 operands were given; index arrays are keywords: q=...\n"),
    ("ij jk->ik", (A, B), {}, planner.ShapeError, "'ij jk->ik' has 1 input terms, .*; separate terms by commas"),
    ("q(n)j->nj", (C,), {"q": Q}, planner.SpecError, r"has no index arrays; did you mean q\[n\]\?"),
    ("ij,jk->il", (A, B), {}, planner.ShapeError, r"pass sizes=\{'l': N\}, or mend a typo: the inputs have i, j, k"),
    ("ij->ij", (A,), {"memory_limit": "2 kbit"}, planner.PlannerError, "in one of B, kB, MB, GB, TB, KiB, MiB"),
    ("ij,jk->ik", (), {}, planner.PlannerError, "no operands were given"),
    (GATHER, (), {"q": Q}, planner.PlannerError, "no operands were given"),
    ("ij,jk->ik", (A, np.ones((5, 4))), {}, planner.ShapeError, "'j' has size 3 in operand 0 but 5 in operand 1"),
    ("ij,jk->ik", (A, np.ones(3)), {}, planner.ShapeError, "operand 1 has 1 dimensions, but its axes are jk"),
    ("ii->i", (A,), {}, planner.ShapeError, "'i' repeats within operand 0 with sizes 2 and 3"),
    ("i->ij", (np.ones(2),), {}, planner.ShapeError, r"pass sizes=\{'j': N\}"),
    ("n->q[n]", (np.ones(3),), {"q": Q}, planner.ShapeError, r"pass sizes=\{'q': N\}"),
    ("ij->ij", (A,), {"sizes": {"i": 7}}, planner.ShapeError, "sizes= says 7 for axis 'i', but the inputs say 2"),
    ("ij->ij", (A,), {"sizes": (2, 4)}, planner.ShapeError, "says 4 for axis 'j', but the inputs say 3"),
    ("ij->ij", (A,), {"sizes": (2,)}, planner.ShapeError, "has 1 entries, but the output 'ij' has 2"),
    ("ij->ij", (A,), {"sizes": {"z": 2}}, planner.ShapeError, "'z', which is neither an axis nor an index array"),
    ("i->ij", (np.ones(2),), {"sizes": {"j": -1}}, planner.ShapeError, "'j' must be a non-negative integer, not -1"),
    ("i->ij", (np.ones(2),), {"sizes": {"j": np.ones(2, int)}}, planner.ShapeError, "'j' must be a non-negative inte"),
    ("i->ij", (np.ones(2),), {"sizes": {"j": 1.5}}, planner.ShapeError, "not 1.5"),
    ("i->ij", (np.ones(2),), {"sizes": {"j": True}}, planner.ShapeError, "not True"),
    (GATHER, (C,), {"q": Q, "sizes": {"q": 99}}, planner.ShapeError, "says 99 for the dimension that 'q' indexes.*say 5"),
    ("q[n]j,q[n]k->njk", (C, A), {"q": Q, "sizes": {"q": 7}}, planner.ShapeError, "says 7 .* the inputs say 2 and 5"),
    ("i->ij", (np.ones(2),), {"sizes": "ij"}, planner.ShapeError, "not str"),
    ("i->ij", (np.ones(2),), {"sizes": 3}, planner.ShapeError, "not int"),
    (GATHER, (C,), {}, planner.SpecError, "'q' is missing: pass it as the keyword q="),
    (GATHER, (C,), {"q": Q, "p": Q}, planner.SpecError, "'p'.*has the index arrays q"),
    ("ij->ij", (A,), {"minimise": "time"}, planner.PlannerTypeError, "'minimise' is not an option.*did you mean 'minimize'"),
    ("ij->ij", (A,), {"devise": 3}, planner.PlannerTypeError, "'devise' is not an option.*options are sizes, optimize"),
    ("ij->ij", (A,), {"memory_limit": np.array(2.5)}, planner.PlannerError, "memory_limit=array"),
    (A, ([0, 1], [0, 1, 2]), {"sizes": {3: 4}}, planner.ShapeError, "names 3, which is not a label of the lists: .0, 1, 2"),
    ("ij->ij", (A,), {"out": A}, planner.PlannerTypeError, "'out' is not an option, and the name of an index array is one letter"),
    (planner.resolve("ij->ij", (2, 3)), (A,), {"sizes": (7, 7)}, planner.ShapeError, r"says \(7, 7\), but .*\(2, 3\)"),
    (planner.resolve("ij->ij", (2, 3)), (A,), {"sizes": {"z": 9}}, planner.ShapeError, "says 9 for 'z'"),
    (planner.resolve("ij->ij", (2, 3)), (A,), {"sizes": {"j": 2}}, planner.ShapeError, "says 2 for 'j'"),
    (GATHER, (C,), {"q": Q.astype(float)}, planner.PlannerError, "'q' has dtype float64"),
    (GATHER, (C,), {"q": Q > 0}, planner.PlannerError, "'q' has dtype bool"),
    (GATHER, (C,), {"q": Q[None]}, planner.ShapeError, "'q' has 2 dimensions, but its axes are n"),
    (GATHER, (C,), {"q": [0, 1]}, planner.PlannerTypeError, "'q' is a list"),
    (GATHER, (C,), {"q": 3}, planner.PlannerTypeError, "'q' is a int"),
    (GATHER, (C,), {"q": None}, planner.PlannerTypeError, "'q' is a NoneType"),
    (GATHER, (C,), {"q": np.array([0, 5])}, planner.IndexRangeError, r"'q'\[1\] is 5, outside of \[-5, 5\)"),
    (GATHER, (C,), {"q": np.array([-6])}, planner.IndexRangeError, r"'q'\[0\] is -6"),
    (GATHER, (C[:0],), {"q": np.array([0]), "index_mode": "clip"}, planner.IndexRangeError, "size 0"),
    (GATHER, (C,), {"q": Q, "index_mode": "wrap"}, planner.PlannerError, "index_mode='wrap' is unknown"),
    (GATHER, (C,), {"q": Q, "index_mode": ["raise"]}, planner.PlannerError, "index_mode=.* is unknown"),
    ("ij->ij", ([[1.0]],), {}, planner.PlannerTypeError, "operand 0 is a list"),
    ("ij,jk->ik", (A, [B]), {}, planner.PlannerTypeError, "operand 1 is a list, not an array of torch, jax or numpy: convert it first; give the operands one by one, or all of them in one list or tuple"),
    ("ij,jk->ik", ([A, [B]],), {}, planner.PlannerTypeError, "operand 1 is a list, not an array"),
    ("ij,jk->ik", ([A, B], B), {}, planner.PlannerTypeError, "operand 0 is a list, not an array"),
    ("ij,jk->ik", ([A],), {}, planner.ShapeError, "2 input"),
    ("ij->ij", ([],), {}, planner.PlannerTypeError, "operand 0 is a list"),
    ([A, B], ("ij,jk->ik",), {}, planner.PlannerTypeError, "the spec must be a string, not list"),
    ("ij,jk->ik", (A, None), {}, planner.PlannerTypeError, "operand 1 is a NoneType"),
    ("ij->ij", ("ab",), {}, planner.PlannerTypeError, "operand 0 is a str"),
    ("ij->ij", (A,), {"minimize": "speed"}, planner.PlannerError, "minimize='speed' is unknown"),
    ("ij->ij", (A,), {"minimize": None}, planner.PlannerError, "minimize=None is unknown"),
    ("ij->ij", (A,), {"minimize": ["time"]}, planner.PlannerError, "minimize=.*is unknown"),
    ("ij->ij", (A,), {"optimize": "speed"}, planner.PlannerError, "optimize='speed' is unknown"),
    ("ij->ij", (A,), {"optimize": None}, planner.PlannerError, "optimize=None is not a path"),
    ("ij,kj->ik", (A, A), {"optimize": []}, planner.PlannerError, "of optimize= leaves 2 operands"),
    ("ij->ij", (A,), {"optimize": True}, planner.PlannerError, "optimize=True is not a path"),
    ("ij->ij", (A,), {"memory_limit": "2 parsecs"}, planner.PlannerError, "memory_limit='2 parsecs'"),
    ("ij->ij", (A,), {"memory_limit": -1}, planner.PlannerError, "memory_limit=-1"),
    ("ij->ij", (A,), {"memory_limit": 1.5}, planner.PlannerError, "memory_limit=1.5"),
    ("ij->ij", (A,), {"retain_limit": True}, planner.PlannerError, "retain_limit=True"),
    ("ij->ij", (A,), {"deadline": 0}, planner.PlannerError, "deadline=0 is not a number of seconds"),
    ("ij->ij", (A,), {"deadline": "1 s"}, planner.PlannerError, "deadline='1 s' is not a number of seconds"),
    ("ij->ij", (A,), {"deadline": True}, planner.PlannerError, "deadline=True"),
    ("ij->ij", (A,), {"deadline": float("nan")}, planner.PlannerError, "deadline=nan"),
    ("ij->ij", (A,), {"dtype": "float13"}, planner.PlannerTypeError, "dtype='float13': dtype 'float13' is not supported"),
    ("ij->ij", (A,), {"dtype": object()}, planner.PlannerTypeError, "dtype"),
    ("ij->ij", (A,), {"precision": "high"}, planner.PlannerError, "precision= is for jax"),
    ("ij->ij", (np.array([["a"]]),), {}, planner.PlannerTypeError, "dtype"),
    ("ij->ij", (np.array([[None]]),), {}, planner.PlannerTypeError, "dtype"),
    (3, (A,), {}, planner.PlannerTypeError, "the spec must be a string, not int"),
    (None, (A,), {}, planner.PlannerTypeError, "the spec must be a string, not NoneType"),
    (b"ij->ij", (A,), {}, planner.PlannerTypeError, "the spec must be a string, not bytes"),
    (A, ([0, 1], B), {}, planner.PlannerTypeError, "list of labels"),
    (A, (0, B, [1, 2]), {}, planner.PlannerTypeError, "argument 1 must be a list of labels, not int"),
    (A, ([0, "a"],), {}, planner.PlannerTypeError, "labels must be hashable and of one sortable type"),
    (A, ([0, [1]],), {}, planner.PlannerTypeError, "labels must be hashable"),
    (A, ([..., ...],), {}, planner.SpecError, "at most one Ellipsis"),
    (A, (np.array([0.0, 1.0]),), {}, planner.PlannerTypeError, "argument 1 must be a list of labels, not ndarray"),
]  # fmt: skip


@pytest.mark.parametrize("spec", [[0, 1], ["ij"], 3, None, A])
def test_what_is_no_spec_is_named(spec):
    with pytest.raises(planner.PlannerTypeError, match=f"the spec must be a string, not {type(spec).__name__}"):
        planner.resolve(spec, (2, 3))


@pytest.mark.parametrize(("spec", "operands", "options", "kind", "message"), WRONG)
def test_wrong_calls_name_the_culprit(spec, operands, options, kind, message):
    for _ in range(2):  # the second time too, when caches are warm
        with pytest.raises(planner.PlannerError, match=f"(?s){message}") as caught:
            planner.contract(spec, *operands, **options)
        assert type(caught.value) is kind
        assert isinstance(caught.value, TypeError) == (kind is planner.PlannerTypeError)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_mixed_frameworks_name_the_operand(torch):
    with pytest.raises(planner.PlannerError, match="operand 1 is a torch array, but operand 0 is of numpy"):
        planner.contract("ij,jk->ik", A, torch.ones(3, 4))
    with pytest.raises(planner.PlannerError, match="index array 'q' is a torch array, but operand 0 is of numpy"):
        planner.contract(GATHER, C, q=torch.tensor([0]))


PAIR = ("ij,jk->ik", (2, 2), (2, 2))
MODES = "is unknown: take one of 'raise', 'drop', 'clip'"
WRONG_PLANS = [
    (("ij->ij", (2, -3)), {}, planner.ShapeError, "operand 0.*-3"),
    (("ij->ij", (2, 2.5)), {}, planner.ShapeError, "operand 0"),
    (("ij->ij", "ab"), {}, planner.PlannerError, "operand 0"),
    (("ij->ij", 3), {}, planner.PlannerError, "operand 0"),
    (("q[n]->n", (3,)), {"q": (2.5,)}, planner.ShapeError, "'q'"),
    (("q[n]->n", (3,)), {"q": (-2,)}, planner.ShapeError, "'q'"),
    (("q[n]->n", (3,)), {"q": 7}, planner.ShapeError, "'q'"),
    (("ij->ij", (2, 3)), {"backend": "tensorflow"}, planner.PlannerError, "backend 'tensorflow' is unknown"),
    (("ij->ij", (2, 3)), {"backend": ["torch"]}, planner.PlannerError, "is not a name: take one of"),
    (("ij->ij", planner.Operand((2, 3), "float13")), {}, planner.PlannerTypeError, "operand 0: .*float13"),
    (("ij->ij", planner.Operand((2, 3), object)), {}, planner.PlannerTypeError, "operand 0: .*object"),
    (("ij->ij", (2, 3)), {"minimse": "time"}, planner.PlannerTypeError, "did you mean 'minimize'"),
    (("ij->ij", (2, 3)), {"precision": "high"}, planner.PlannerError, "precision= is for jax"),
    (("ij->ij", (2, 3)), {"device": "abacus"}, planner.PlannerError, "device 'abacus' .* take one of cpu"),
    (("ij->ij", (2, 3)), {"device": 3}, planner.PlannerError, "device=3"),
    ((",".join("a" * 5_001) + "->", *[(2,)] * 5_001), {}, planner.SearchLimitError, "5001 operands are more than the 5000"),
    (("ij->ij", np.dtype(float)), {}, planner.PlannerError, r"operand 0 is a .*pass planner.Operand\(shape, dtype\)"),
    (PAIR, {"memory_limit": "9" * 5000}, planner.PlannerError, "memory_limit='9999.* is not a number of bytes"),
    (("ij->ij", planner.Operand((2, 3), strides=(3.0, 1))), {}, planner.ShapeError, "operand 0 has the strides .* are integers"),
    (("ij->ij", planner.Operand((2, 3), requires_grad="no")), {}, planner.PlannerTypeError, "operand 0 has requires_grad='no'"),
    (PAIR, {"deadline": 10**400}, planner.PlannerError, "deadline=1000"),
    (PAIR, {"optimize": lambda: 1}, planner.PlannerError, "optimize= raised TypeError.* as opt_einsum calls"),
    (PAIR, {"optimize": lambda *arguments: 1 / 0}, planner.PlannerError, "optimize= raised ZeroDivisionError"),
    (PAIR, {"minimize": lambda: 1}, planner.PlannerError, "minimize= raised TypeError"),
    (PAIR, {"minimize": lambda cost: cost.money}, planner.PlannerError, "has seconds, flops, bytes_moved"),
    (PAIR, {"minimize": lambda cost: None}, planner.PlannerError, "minimize= gave"),
    (PAIR, {"minimize": lambda cost: "less"}, planner.PlannerError, "minimize= gave"),
    *(((GATHER, C), {"q": Q, "index_mode": x}, planner.PlannerError, MODES) for x in ("wrap", "checked", None, ["raise"], np.ones(2), 0)),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "kind", "message"), WRONG_PLANS)
def test_wrong_plans_name_the_culprit(arguments, options, kind, message):
    with pytest.raises(planner.PlannerError, match=message) as caught:
        planner.plan(*arguments, **{"backend": "numpy", **options})
    assert type(caught.value) is kind


def test_wrong_arguments_of_methods_are_named():
    plan = planner.plan(*PAIR, backend="numpy")
    for most in (-1, 1.5, "x", True):
        with pytest.raises(planner.PlannerError, match=f"most={most!r}"):
            plan.alternatives(most)
    with pytest.raises(planner.PlannerError, match="analysis=3"):
        plan.to_html(analysis=3)
    arrays = [np.ones(operand.shape, "float32") for operand in plan.operands]
    for rounds in (0, 1.5, "x", True):
        with pytest.raises(planner.PlannerError, match=f"rounds={rounds!r}"):
            plan.analyze(*arrays, rounds=rounds)
    assert plan.analyze(*arrays, rounds=np.int64(1)).rounds == 1


RATES = [field.name for field in dataclasses.fields(planner.Device) if field.type in ("float", "int")]


@pytest.mark.parametrize("rate", sorted({*RATES} - {"capability"}))
def test_rates_of_a_device_are_numbers(rate):
    """A wrong one would end in a division by zero deep in a search, or in a negative time."""
    good, zero = planner.Device.preset("cpu"), [] if rate.endswith(("bytes", "seconds")) or rate == "half_rate" else [0]
    for value in (-1, np.nan, "1", None, True, 10**400, *zero):
        with pytest.raises(planner.PlannerError, match=f"'cpu' has {rate}={value!r:.60}"):
            dataclasses.replace(good, **{rate: value})


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "gpu"}, {"products": None}, {"products": (1e9,)}, {"products": (0.0,) * len(CLASSES)}, {"source": None},
     {"capability": "x"}, {"cache_bytes": np.inf}, {"fresh_bytes": 1.5}],
)  # fmt: skip
def test_other_fields_of_a_device_are_what_they_say(wrong):
    with pytest.raises(planner.PlannerError, match=next(iter(wrong))):
        planner.Device("mine", 1e9, 1e9, **wrong)
    with pytest.raises(planner.PlannerError, match="device 3 is not a preset"):
        planner.Device.preset(3)


def test_a_device_takes_numbers_of_numpy_and_whole_floats():
    """A plan for it goes to JSON and back, and its search may be remembered."""
    given = {"flop_rate": np.float32(1e11), "cache_bytes": 1e6, "fresh_bytes": np.int64(4), "capability": 90.0}
    products = tuple(np.full(len(CLASSES), 1e9, np.float32))
    device = dataclasses.replace(planner.Device.preset("cpu"), products=products, **given)
    spec = "aem,aijno,aeg,ach,adgl,fhk,acfjo,adm,abn,aikl->ab"
    plan = planner.plan(spec, *[(2,) * len(term) for term in spec[:-4].split(",")], backend="numpy", device=device)
    assert planner.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(((5, mode), MODES) for mode in ("wrap", "checked", None, ["raise"], np.ones(2), 0)),
        *(((size,), f"non-negative int, not {size!r}") for size in (-1, 2.0, True, "3", None)),
        ((3,), r"'q'\[1\] is 4, outside of \[-3, 3\).* that it indexes"),
    ],
)
def test_wrong_groups_name_the_culprit(arguments, message):
    with pytest.raises(planner.PlannerError, match=message):
        planner.group(Q, *arguments)


@pytest.mark.parametrize(("dtype", "name"), [("f8", "float64"), ("?", "bool"), (np.int8, "int8"), ("half", "float16")])
def test_dtypes_are_taken_in_every_form(dtype, name):
    assert planner.contract("ij->i", A, dtype=dtype).dtype == name


def test_sizes_and_limits_are_taken_in_every_form(torch):
    assert planner.group(Q, np.int64(5)).size == 5
    assert planner.contract(planner.resolve("ij->ij", (2, 3)), A, sizes={"i": 2}).shape == (2, 3)
    assert planner.transpose(planner.resolve("ij->j", (2, 3)), np.int64(0)).output_shape == (2, 3)
    assert planner.batched(planner.resolve("ij->j", (2, 3)), np.int64(4)).output_shape == (4, 3)
    both = planner.resolve("q[n]j->q[n]j", (5, 3), sizes={"q": 7}, q=(3,))
    assert planner.plan(both, (5, 3), q=(3,), sizes={"q": 7}, backend="numpy").resolved.spec.output_shape == (7, 3)
    with pytest.raises(planner.ShapeError, match="says 5 for 'q'.*'q': 7"):
        planner.plan(both, (5, 3), q=(3,), sizes={"q": 5}, backend="numpy")
    gathered = planner.resolve("q[n]j->nj", (5, 3), q=(3,))
    assert planner.contract(gathered, C, q=Q, sizes={"q": 5}).shape == (3, 3)
    assert planner.contract(np.ones(2), ["row"], ["row", "row 2"], sizes={"row 2": 4}).shape == (2, 4)
    assert planner.plan(A, [0, 1], [0, 1, 2], sizes={2: 4}).resolved.spec.output_shape == (2, 3, 4)
    assert planner.plan("ij->ij", (2, 3), memory_limit=np.int64(1000)).options.memory_limit == 1000
    assert planner.plan("ij->ij", planner.Operand((2, 3), torch.float64), backend="torch").dtype == "float64"


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_backends_are_held_to_the_protocol(name):
    pytest.importorskip(name, reason=f"{name} is not installed")
    from planner.program.frameworks import Backend

    asked = {asked for asked in vars(Backend) if not asked.startswith("_")} | {"name", "table"}
    backend = type(load_backend(name))
    assert Backend in backend.__mro__
    # An inherited body of the protocol would return None: that is meant where nothing compiles. Others do something.
    inherited = {
        "signature",
        "compiles",
        "strided",
        "conjugated_bytes",
        "pins_tiles",
        "unwatched",
        "bind_family",
        "divided",
        "numbers",
        "fuses_cast",
        "bind_symbols",
        "family_signature",
        "kept_copies",
        "autograd_rows",
        "call_seconds",
        "order_seconds",
        "einsum_copies",
        "einsum_cost",
        "is_in_range",
    } | (set() if backend.compiles else {"compiled_bytes", "compiled_peak"})
    assert all(vars(backend)[method] for method in asked - {"table"} - inherited)


def test_limits_take_units_in_any_case():
    wanted = {"200 kb": 200_000, "200KB": 200_000, "1.5 mib": 3 * 2**19, "7": 7, "7 b": 7}
    assert {text: parse_bytes(text, "limit") for text in wanted} == wanted


def test_letters_are_letters():
    assert is_letter("漢")
    assert is_letter("é")
    assert not any(map(is_letter, ("_", "1", "²", "\ud800", " ", "->", "", "ﬁ", "\u212a")))


def test_a_plan_of_steps_that_are_not_here_is_refused():
    plan = planner.plan("ij,jk->ik", (2, 2), (2, 2), backend="numpy")
    (step,) = plan.steps
    changed = planner.Plan.from_json(plan.to_json().replace(f'"{step.choice.lowering}"', '"another way"'))
    with pytest.raises(planner.PlannerError, match="'another way', which numpy does not have here"):
        changed(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))


def test_a_plan_for_a_card_names_it_where_arrays_are_on_a_cpu(torch):
    pytest.importorskip("triton", reason="Triton is not installed")
    program = """
import planner, torch
for n in (8, 80_000):  # a take and a grouped product
    shapes = (n, 1, 64), (500, 64, 64)
    plan = planner.plan("nij, q[n]jk -> nik", *shapes, q=(n,), backend="torch", device="h100")
    try:
        plan(*map(torch.ones, shapes), q=torch.zeros(n, dtype=torch.long))
    except planner.PlannerError as error:
        print(any("Triton" in step.choice.lowering for step in plan.steps), error)
"""
    lines = run_python(program, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="").splitlines()
    assert len(lines) == 2
    assert all(line.startswith("True the plan runs Triton kernels, and the arrays are on a CPU") for line in lines)
