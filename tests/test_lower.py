"""Which steps have the form of a product, written out one by one."""

import pytest

import planner
from planner.cost.device import CPU
from planner.inspect.verdicts import table_verdicts
from planner.program.forms import GroupedForm, grouped_form, inner_product, pooled_form, product_form
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum


def test_repeats_private_axes_and_gathers_are_no_matrices():
    for text in ("iij, jk -> ik", "ij, jjk -> ik", "ij, jk -> iik", "ij, jk -> k", "ij, jk -> i", "ij -> ji"):
        sizes = {"i": 2, "j": 3, "k": 4}
        shapes = [tuple(sizes[axis] for axis in term.strip()) for term in text.split("->")[0].split(",")]
        assert product_form(planner.resolve(text, *shapes)) is None, text
    assert product_form(planner.resolve("q[i]j, jk -> ik", (5, 3), (3, 4), q=(2,))) is None


def test_a_batched_product_has_its_groups():
    form = product_form(planner.resolve("bij, jbk -> kib", (2, 3, 4), (4, 2, 5)))
    assert (form.batch, form.left, form.right, form.contracted) == (("b",), ("i",), ("k",), ("j",))


def test_forms_have_exactly_one_gather():
    two = planner.resolve("q[n]j, q[n]jk -> nk", (5, 3), (5, 3, 4), q=(6,))
    none = planner.resolve("ij, jk -> ik", (2, 3), (3, 4))
    for spec in (two, none):
        assert grouped_form(spec) == pooled_form(spec) == "needs two operands and exactly one gather"
    form = grouped_form(planner.resolve("nij, q[n]jk -> nik", (6, 2, 3), (5, 3, 4), q=(6,)))
    assert isinstance(form, GroupedForm)
    assert (form.matrix, form.outer, form.inner, form.left, form.right) == (1, False, ("i",), ("j",), ("k",))


def test_rows_that_their_operand_lacks_altogether_are_refused():
    """Some of the row axes may be missing there, not all."""
    shapes = [(6, 2, 3), (5, 3, 4)]
    some = planner.resolve("nij, q[nm]jk -> nmik", *shapes, q=(6, 7))
    assert isinstance(grouped_form(some), GroupedForm)
    lacking = planner.resolve("ij, q[n]jk -> nik", (2, 3), (5, 3, 4), q=(6,))
    assert grouped_form(lacking) == "the rows' operand has no row axis"


def test_what_is_left_of_inputs_is_multiplied_in_the_order_of_the_output():
    spec = planner.resolve("ij, jk -> ki", (2, 3), (3, 4))
    inner = inner_product(spec, [("i", "j"), ("j", "k")])
    assert str(inner) == "ij, jk -> ki"


@pytest.mark.parametrize(
    ("text", "shapes"),
    [("abij, q[ab]jk -> aik", [(4, 3, 2, 5), (6, 5, 7)]), ("aij, q[ab]jk -> abik", [(4, 2, 5), (6, 5, 7)])],
)
def test_both_gradients_share_a_loop_only_where_each_row_is_its_own(text, shapes, torch):
    op = Einsum(planner.resolve(text, *shapes, q=(4, 3)), "float32").joint_gradient()
    assert table_verdicts(load_backend("torch").table, op, CPU)["both grouped gradients"] == "rows are shared or summed"
