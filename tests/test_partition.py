"""What a step's arrays, placed on several devices, make it split. That the parts add up is `test_sharding_jax.py`."""

import planner
from planner.language.split import choose_splits, local_gathers, local_spec, place_index, place_term, splittable

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


def test_what_is_single_is_not_split():
    assert splittable(planner.resolve("iij, jk -> k", (4, 4, 1), (1, 3))) == ("i", "k")


def test_what_repeats_is_split_along_one_dimension():
    """Along the one that is split so already, or else the first."""
    assert choose_splits(planner.resolve("ii -> i", (4, 4)), [(("i", "i"), ((), ("x",)))]) == {"i": ("x",)}
    assert place_term(("i", "i"), {"i": ("x",)}, ((), ("x",))) == ((), ("x",))
    assert place_term(("i", "j", "i"), {"i": ("x",)}, ((), ("x",), ())) == (("x",), (), ())


def test_slices_of_pools_of_two_sizes_are_two_pools():
    """Slices of one size would be one pool, in which an index means one row."""
    two = planner.resolve("q[n]i, q[n]ij -> nj", (8, 3), (16, 3, 4), q=(5,))
    small, large = two.gathers
    local = local_gathers(two, {large: 2})
    assert local[small] == small
    assert local[large].size == small.size
    assert len(local_spec(two, {large: 2}).gathers) == 2


def test_an_index_array_in_two_brackets_is_whole():
    """Each bracket cuts its part out of it."""
    two = planner.resolve("q[n]i, q[m]i -> nm", (8, 3), (8, 3), q=(5,))
    assert place_index(two, "q", {"n": ("x",)}) == ((),)
    assert place_index(planner.resolve("q[n]i, q[n]i -> n", (8, 3), (8, 3), q=(5,)), "q", {"n": ("x",)}) == (("x",),)
