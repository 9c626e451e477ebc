"""A plan that is read from disk is the plan that was searched, and only what was searched to its end is on disk."""

import dataclasses
import functools
import json
import os
import pathlib
from unittest import mock

import pytest
from conftest import examples, run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import OBJECTIVES, exact_problems, needing_gradients, plan_of
from opt_einsum import RandomGreedy

import planner
from planner.cost import rates, store
from planner.program.frameworks import load_backend
from planner.search import choose, stored

CHAIN = "ab, bc, cd, de, ef, fg, gh, hi -> ai"
SHAPES = [(3, 5), (5, 4), (4, 6), (6, 2), (2, 7), (7, 3), (3, 8), (8, 5)]


@pytest.fixture(autouse=True)
def _nothing_is_priced():
    """Each test begins as a process does, whatever was priced before it."""
    planner.caches().clear()


@pytest.fixture
def every_search(disk, monkeypatch):
    """Each search is remembered, however short it is."""
    monkeypatch.setattr(stored, "LEAST_WORK", 0)
    monkeypatch.setattr(stored, "LEAST_PRICED", 0)
    return disk


@pytest.fixture
def searches(monkeypatch):
    """The contractions that were searched."""
    seen = []

    def search(contraction, *options):
        seen.append(contraction)
        return whole(contraction, *options)

    whole = choose._search_plan
    monkeypatch.setattr(choose, "_search_plan", search)
    return seen


def chain(**options):
    return planner.plan(CHAIN, *SHAPES, backend="numpy", device="cpu", **options)


def files(folder):
    return sorted(folder.rglob("searched-*/*.json"))


def read_again(make, searches):
    """A plan that is made once more by reading it: nothing is searched, and no price is known beforehand."""
    searches.clear()
    planner.caches().clear()
    plan = make()
    assert not searches
    return plan


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_a_plan_that_is_read_is_the_plan_that_was_searched(backend, every_search, searches):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    kinds = set()

    @settings(max_examples=examples(25 if backend == "numpy" else 8, 500))
    @given(
        exact_problems(max_operands=4),
        st.booleans(),
        st.sampled_from(OBJECTIVES),
        st.sampled_from(["auto", "optimal", "greedy"]),
        st.sampled_from(["", "memory_limit", "retain_limit"]),
    )
    def law(problem, gradients, minimize, optimize, limit):
        options = {"minimize": minimize, "optimize": optimize}
        if not gradients:
            problem = dataclasses.replace(problem, requires_grad=(False,) * len(problem.shapes))
        if limit and backend != "jax":  # nothing is compiled here
            least = "peak" if limit == "memory_limit" else "retained"
            cost = plan_of(problem, backend, minimize=least, optimize=optimize).cost
            options[limit] = cost.peak_bytes if limit == "memory_limit" else cost.retained_bytes
        make = functools.partial(plan_of, problem, backend, **options)
        fresh = make()
        again = read_again(make, searches)
        assert again == fresh
        assert str(again) == str(fresh)
        kinds.add((fresh.programs.backward is not None, fresh.proven))

    law()
    assert len(kinds) >= 3


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_loops_are_read_with_their_slices(backend, every_search, searches):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    shapes, options = ((60, 1, 8), (16, 8, 7)), {"q": (60,), "backend": backend, "device": "cpu"}
    operands = shapes if backend == "numpy" else needing_gradients(*shapes)

    def make():
        return planner.plan("nij, q[n]jk -> nik", *operands, memory_limit="6.5 kB", **options)

    fresh = make()
    assert fresh.loop is not None
    assert read_again(make, searches) == fresh


def test_long_searches_are_remembered_and_short_ones_are_not(disk, searches, monkeypatch):
    monkeypatch.setattr(stored, "LEAST_PRICED", 5)
    plan = chain()
    assert len(files(disk)) == 1
    assert chain() == plan
    assert len(searches) == 1
    planner.plan("ab, bc, cd -> ad", *SHAPES[:3], backend="numpy")
    assert len(searches) == 2
    assert len(files(disk)) == 1


@pytest.mark.parametrize("turned_off", ["by the variable", "by the function", "one more row", "another row"])
def test_nothing_is_remembered_where_the_disk_is_off_or_rows_are_the_users_own(turned_off, disk, monkeypatch):
    table = load_backend("numpy").table
    if turned_off == "by the variable":
        monkeypatch.setenv("PLANNER_DISK", "off")
    elif turned_off == "by the function":
        monkeypatch.setattr(store, "_ENABLED", True)
        store.use_disk(False)
    else:
        name = "mine" if turned_off == "one more row" else "matmul"
        monkeypatch.setitem(table.rows, name, dataclasses.replace(table.rows["matmul"], name=name))
    chain()
    assert not list(disk.rglob("*.json"))


@pytest.mark.parametrize(
    "options", [{"minimize": lambda cost: cost.flops}, {"optimize": RandomGreedy()}], ids=["minimize", "optimize"]
)
def test_what_a_function_decides_is_not_remembered(options, every_search, searches):
    chain(**options)
    assert len(searches) == 1
    assert not files(every_search)


def test_what_is_interrupted_is_not_remembered(every_search):
    with mock.patch.object(choose, "order_children", side_effect=KeyboardInterrupt):
        assert chain().origin.startswith("interrupted")
    assert not files(every_search)
    assert chain().proven
    assert len(files(every_search)) == 1


def test_another_machine_or_version_has_entries_of_its_own(every_search, searches, monkeypatch):
    plans = [chain()]
    monkeypatch.setattr(stored, "__version__", "0.0.1")
    plans.append(chain())
    monkeypatch.setattr(stored, "_code", lambda backend: "other code")
    plans.append(chain())
    slow = dataclasses.replace(planner.Device.preset("cpu"), launch_seconds=1.0)
    plans.append(planner.plan(CHAIN, *SHAPES, backend="numpy", device=slow))
    monkeypatch.setattr(type(load_backend("numpy")), "environment", lambda self, operands: {"numpy": "1.0"})
    plans.append(chain())
    assert len(searches) == len(files(every_search)) == len(plans)
    assert plans[0] == plans[1] == plans[2] == plans[4] != plans[3]


def test_an_entry_whose_prices_changed_is_not_read(every_search, searches):
    plan = chain()
    (path,) = files(every_search)
    entry = json.loads(path.read_text())
    step = entry["value"]["programs"]["forward"]["steps"][0]
    step["choice"]["cost"]["picoseconds"] += 1
    entry["checksum"] = store._digest(entry["value"])
    path.write_text(json.dumps(entry))
    assert chain() == plan
    assert len(searches) == 2


def test_a_folder_keeps_the_newest_files(disk, monkeypatch):
    for number in range(6):
        store.remember("example", {"number": number}, number)
        os.utime(store.entry_path("example", {"number": number}), (number, number))
    monkeypatch.setattr(store, "MOST_FILES", 3)
    store._remove_abandoned.cache_clear()
    store.remember("example", {"number": 6}, 6)
    found = [store.recall("example", {"number": number}) for number in range(7)]
    assert found == [None, None, None, 3, 4, 5, 6]


@pytest.mark.parametrize("folder", ["folder", "", "x" * 5_000], ids=["in a file", "a file", "too long"])
def test_a_folder_that_cannot_be_written_is_no_matter(folder, tmp_path, monkeypatch, recwarn):
    """Nothing is there, so nothing is damaged either."""
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("PLANNER_DISK", "on")
    monkeypatch.setenv("PLANNER_CACHE", str(blocked / folder))
    rates.load_rates.cache_clear()
    assert chain() == chain()
    rates.load_rates.cache_clear()
    assert not list(recwarn)


SECOND = """
import sys
import planner
from planner.search import choose

searched = []
search = choose._search_plan
choose._search_plan = lambda contraction, *options: searched.append(contraction) or search(contraction, *options)
print(planner.plan(sys.argv[1], *eval_shapes, backend="numpy", device="cpu").to_json(), len(searched))
""".replace("eval_shapes", repr(SHAPES))


def test_another_process_reads_the_plan(disk, monkeypatch):
    monkeypatch.setattr(stored, "LEAST_PRICED", 5)
    text = chain().to_json()
    assert run_python(SECOND, CHAIN) == f"{text} 0\n"
    assert run_python(SECOND, CHAIN, PLANNER_DISK="off") == f"{text} 1\n"


@pytest.mark.parametrize("backend", ["torch", "jax", "numpy"])
def test_a_change_of_any_module_of_a_backend_makes_other_plans(backend, monkeypatch):
    read, folder = set(), pathlib.Path(planner.__file__).parent
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: read.add(path) or b"")
    stored._code.__wrapped__(backend)
    modules = [path for name in ("common", backend) for path in (folder / "backends" / name).rglob("*.py")]
    assert len(modules) > 10
    assert read >= {*modules, *(folder / "kernels").rglob("*/*.py"), *(folder / "search").rglob("*.py")}
