"""The corpus of public einsum strings: its table, and the part of the benchmark that runs it."""

import dataclasses
import math
import re

import numpy as np
import pytest

import planner
from planner.bench import corpus as bench
from planner.bench.corpus import corpus, gather_then_einsum, random_rows
from planner.bench.timing import SCALES, Settings
from planner.workloads import WORKLOADS

ROWS = corpus("overhead")


def small(row):
    """Return a row with sizes of at most 3; sizes of pools too."""
    return row.resized(**{letter: min(size, 3) for letter, size in (row.sizes | row.pools).items()})


def renamed(row):
    """Return the spec with letters numbered as they appear, and how operands are stored."""
    names = {}
    return re.sub(
        "[A-Za-z]", lambda found: names.setdefault(found.group(), f"{len(names)}."), row.name.replace(" ", "")
    )


def test_the_corpus_has_250_strings_and_50_gathers_that_differ_by_more_than_names():
    assert len(ROWS) >= 250
    assert sum(bool(row.pools) for row in ROWS) >= 50
    assert len({renamed(row) for row in ROWS}) == len(ROWS)
    assert all(row.source and row.field for row in ROWS)


@pytest.mark.parametrize("scale", SCALES)
def test_sizes_fit_their_scale(scale):
    most = {"overhead": 2**18, "cache": 2**20, "memory": 2**25}[scale]
    for small_row, row in zip(ROWS, corpus(scale), strict=True):
        arrays = [*row.shapes, row.output_shape]
        assert 4 * sum(map(math.prod, arrays)) <= most, row.name
        assert set(row.grow) <= row.sizes.keys() | row.pools.keys(), row.name
        grown = {letter for letter, size in row.sizes.items() if size > small_row.sizes[letter]}
        assert grown <= set(row.grow), row.name
    if scale == "memory":
        assert all(
            math.prod(row.sizes.values()) > math.prod(few.sizes.values())
            for few, row in zip(ROWS, corpus(scale), strict=True)
        )


def test_planner_and_what_users_write_agree_on_every_row():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for row in map(small, ROWS):
        operands, indices = row.operands("torch"), row.indices("torch")
        expected = gather_then_einsum(row)(torch, *operands, **indices)
        found = planner.contract(row.spec, *operands, **row.options, **indices)
        assert tuple(expected.shape) == row.output_shape, row.name
        assert torch.equal(found, expected), row.name


def test_jax_writes_gathers_the_same_way():
    jnp = pytest.importorskip("jax.numpy")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = [row for row in ROWS if row.pools][::5]
    for row in map(small, rows):
        expected = gather_then_einsum(row)(torch, *row.operands("torch"), **row.indices("torch"))
        found = gather_then_einsum(row)(jnp, *row.operands("jax"), **row.indices("jax"))
        assert np.array_equal(np.asarray(found), expected.numpy()), row.name


def test_operands_are_stored_as_the_table_says():
    pytest.importorskip("torch", reason="torch is not installed")
    rows = [row for row in ROWS if row.views]
    assert len(rows) >= 10
    for row in rows:
        assert not all(x.is_contiguous() for x in row.operands("torch")), row.name


def test_the_part_says_how_far_planner_is_from_einsum_and_which_rows_are_worst(monkeypatch, capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    rows = {row.spec: small(row) for row in ROWS}
    kept = tuple(rows[spec] for spec in ("bij,bje->bie", "uw,zu->zuw", "s[e]c, e -> d[e]c"))
    monkeypatch.setattr(bench, "corpus", lambda scale: kept)
    settings = Settings(scales=("overhead",), row_seconds=0.0)
    results = list(bench.compare_corpus("torch", settings))
    assert [result.target for result in results] == [0.95, 1.05, 1.15] * 2
    text = capsys.readouterr().out
    assert "einsum again by einsum: median" in text
    assert all(text.count(row.spec) == 2 for row in kept), "forward, and with gradients"


def test_the_least_times_of_several_passes_through_all_rows_count(monkeypatch, capsys):
    seconds, order = iter([3e-6, 1e-6, 9e-6, 9e-6, 2e-6, 4e-6, 9e-6, 9e-6]), []
    rows = [dataclasses.replace(ROWS[0], name=name) for name in ("first", "second")]

    def timed(row, framework, settings):
        order.append(row.name)
        return {which: {bench.EINSUM: next(seconds), bench.OURS: 2e-6} for which in ("f", "g")}

    monkeypatch.setattr(bench, "time_row", timed)
    monkeypatch.setattr(bench, "corpus", lambda scale: tuple(rows))
    results = list(bench.compare_corpus("torch", Settings(scales=("cache",), passes=2)))
    assert order == ["first", "second"] * 2
    assert [results[2].measured, results[5].measured] == [1.0, 2.0]
    assert {result.part for result in results} == {"corpus"}
    assert capsys.readouterr().out.count("  1.00  first  us: einsum 2.0  planner.contract 2.0") == 1


def test_named_workloads_are_timed_at_their_cpu_sizes_but_large_ones(monkeypatch, capsys):
    named = {
        "scattered": dataclasses.replace(WORKLOADS["message-passing"], name="scattered", cpu_sizes={"e": 5, "c": 3}),
        "too large": dataclasses.replace(WORKLOADS["repeated"].resized(n=2**14, p=2**7, q=2**7), name="too large"),
    }
    timed = []
    monkeypatch.setattr(bench, "WORKLOADS", named)
    monkeypatch.setattr(bench, "time_row", lambda row, *_: timed.append(row) or {"f": TIMES, "g": TIMES})
    results = list(bench.compare_workloads("torch", Settings()))
    assert [(row.name, row.sizes["e"]) for row in timed] == [("scattered", 5)]
    assert [result.part for result in results] == ["workloads"] * 6
    assert [result.what for result in results[::3]] == [
        "CPU sizes, forward: median of the times, by einsum's",
        "CPU sizes, forward and gradients: median of the times, by einsum's",
    ]
    assert re.findall("left out: (.*), whose arrays take", capsys.readouterr().out) == ["too large"]


TIMES = {bench.EINSUM: 1e-6, bench.AGAIN: 1e-6, bench.OURS: 1e-6}


def test_every_named_workload_equals_einsum():
    """Timing a row compares the results first; here with arrays of a few elements."""
    pytest.importorskip("torch", reason="torch is not installed")
    for workload in WORKLOADS.values():
        row = workload.resized(**{letter: min(size, 3) for letter, size in (workload.sizes | workload.pools).items()})
        assert set(bench.time_row(row, "torch", Settings(row_seconds=0.0))) == {"f", "g"}


@pytest.mark.parametrize("scale", ["overhead", "cache", "memory"])
def test_random_strings_are_distinct_and_the_same_for_a_seed(scale):
    rows = random_rows(scale, 40, seed=3)
    assert rows == random_rows(scale, 40, seed=3) != random_rows(scale, 40, seed=4)
    assert len({row.spec for row in rows}) == 40
    assert 3 < sum(bool(row.parsed.gathers) for row in rows) < 25
    for row in map(small, rows):
        arrays = {gather.array: np.zeros(row.sizes[gather.axes[0]], int) for gather in row.parsed.gathers}
        assert gather_then_einsum(row)(np, *map(np.ones, row.shapes), **arrays).shape == row.output_shape


def test_random_strings_take_the_place_of_the_corpus(capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    settings = Settings(scales=("overhead",), row_seconds=0.0, strings=3, sample=1)
    assert len(list(bench.compare_corpus("torch", settings))) == 6
    text = capsys.readouterr().out
    assert all(text.count(row.spec) == 2 for row in random_rows("overhead", 1, seed=3))


def test_rows_that_need_more_memory_than_einsum_are_printed_and_counted(monkeypatch, capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    rows = [row for row in corpus("cache") if row.name in ("bie,bje->bij", "bm,bm->b")]
    monkeypatch.setattr(bench, "corpus", lambda scale: tuple(rows))
    settings = Settings(scales=("cache",))
    assert [result.measured for result in bench.corpus_bytes("torch", settings)] == [0, 0, 0]
    capsys.readouterr()
    wasteful = bench.Way(bench.OURS, lambda xp, x, *others: xp.einsum(rows[0].spec, x.clone().clone(), *others))
    monkeypatch.setattr(bench, "our_way", lambda row: wasteful)
    monkeypatch.setattr(bench, "corpus", lambda scale: tuple(rows[:1]))
    forward, _, _ = bench.corpus_bytes("torch", settings)
    assert forward.measured == 1
    assert not forward.met
    assert f"! {rows[0].name}  bytes of einsum and planner: forward " in capsys.readouterr().out


def test_ratios_are_by_einsum_and_the_worst_stand_first(capsys):
    times = {f"row {n}": {bench.EINSUM: 1e-6, bench.OURS: n * 1e-6} for n in range(1, 31)}
    median, high, worst = bench._distribution("corpus", times, "overhead", "torch")
    assert (median.measured, worst.measured) == pytest.approx((15.5, 30))
    assert 29 < high.measured < 30
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[2] for line in lines] == [str(n) for n in range(30, 10, -1)]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_is_written_by_hand_is_the_same_product(framework):
    xp = pytest.importorskip("torch" if framework == "torch" else "jax.numpy")
    rows = [row for row in map(small, ROWS) if bench.by_hand(row)]
    assert len(rows) > 100
    for row in rows if framework == "torch" else rows[::30]:
        operands = row.operands(framework)
        found, expected = (way(xp, *operands) for way in (bench.by_hand(row), gather_then_einsum(row)))
        assert np.array_equal(np.asarray(found), np.asarray(expected)), row.name


LEAN_ROWS = {
    "torch": ("bm,bm->b", "zui,zui->zu", "xi,xij,xj->x", "p,pijk,i,j->k", "bhij,bhijdm->bhidm", "bi, w[b]i -> b",
              "ti, q[t]ir, q[t]ro -> to", "uv,ijk,vj->uivk", "ijk,uw,zvj->zuiwk", "w,ijk,wij->wk"),
    "jax": ("ij,baj->bai", "ijk,zuvij->zuk", "bhnd,bhde,bhn->bhne", "x[pi]c, w[p]cm -> o[pi]m"),
}  # fmt: skip


@pytest.mark.parametrize(("framework", "name"), [(key, name) for key, names in LEAN_ROWS.items() for name in names])
def test_plans_take_no_more_memory_than_einsum(framework, name):
    """Without gradients they allocate no more, with gradients they keep no more: measured, by default."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    row = next(row for row in corpus("cache") if row.name == name)
    einsum = bench.RUNS[framework](bench.Way(bench.EINSUM, gather_then_einsum(row)), row, row.takes_gradient)
    ours = einsum.use(bench.our_way(row))
    for run in (einsum, ours):
        run.once()  # plans, and fills caches
    (peak, _, retained), (our_peak, _, our_retained) = einsum.memory(), ours.memory()
    assert our_peak <= max(peak, 2**16)
    assert our_retained <= max(retained, 2**16)
