"""The corpus of public einsum strings: its table, and the part of the benchmark that runs it."""

import math
import re

import numpy as np
import pytest

import planner
from planner.bench.corpus import SCALES, corpus, gather_then_einsum

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
    torch = pytest.importorskip("torch")
    for row in map(small, ROWS):
        operands, indices = row.operands("torch"), row.indices("torch")
        expected = gather_then_einsum(row)(torch, *operands, **indices)
        found = planner.contract(row.spec, *operands, **row.options, **indices)
        assert tuple(expected.shape) == row.output_shape, row.name
        assert torch.equal(found, expected), row.name


def test_jax_writes_gathers_the_same_way():
    jnp = pytest.importorskip("jax.numpy")
    torch = pytest.importorskip("torch")
    rows = [row for row in ROWS if row.pools][::5]
    for row in map(small, rows):
        expected = gather_then_einsum(row)(torch, *row.operands("torch"), **row.indices("torch"))
        found = gather_then_einsum(row)(jnp, *row.operands("jax"), **row.indices("jax"))
        assert np.array_equal(np.asarray(found), expected.numpy()), row.name


def test_operands_are_stored_as_the_table_says():
    pytest.importorskip("torch")
    rows = [row for row in ROWS if row.views]
    assert len(rows) >= 10
    for row in rows:
        assert not all(x.is_contiguous() for x in row.operands("torch")), row.name
