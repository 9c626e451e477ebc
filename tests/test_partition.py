"""What a step's arrays, placed on several devices, make it split. That the parts add up is `test_sharding_jax.py`."""

import planner
from planner.language.split import choose_splits, splittable

SPEC = planner.resolve("ij, jk -> ik", (64, 8), (8, 2))


def test_the_largest_array_says_what_an_axis_of_the_mesh_splits():
    """Both want the axis x of the mesh: the smaller one moves."""
    wide = (("i", "j"), (("x",), ()))
    small = (("j", "k"), (("x",), ()))
    assert choose_splits(SPEC, [wide, small]) == choose_splits(SPEC, [small, wide]) == {"i": ("x",)}
    assert choose_splits(SPEC, [small]) == {"j": ("x",)}
    assert choose_splits(SPEC, [wide, small], {"k": ("x",)}) == {"k": ("x",)}


def test_axes_of_the_mesh_that_differ_split_both():
    found = choose_splits(SPEC, [(("i", "j"), (("x",), ())), (("j", "k"), ((), ("y", "z")))])
    assert found == {"i": ("x",), "k": ("y", "z")}


def test_what_repeats_or_is_single_is_not_split():
    assert splittable(planner.resolve("iij, jk -> k", (4, 4, 1), (1, 3))) == ("k",)
