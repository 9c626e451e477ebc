"""The trade-off: no point beats another, none is missed that a single objective finds, and each runs."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from laws import Floors, assert_equal, exact_problems, needing_gradients, stand_ins

import planner
from planner.cli import main

CHAIN = ("ab,bc,cd,de->ae", [(20, 30), (30, 4), (4, 50), (50, 9)])


def figures(plan):
    return plan.cost.seconds, plan.cost.peak_bytes, plan.cost.retained_bytes


def beats(one, other):
    pairs = list(zip(figures(one), figures(other), strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def chain(**options):
    return planner.tradeoff(CHAIN[0], *needing_gradients(*CHAIN[1]), backend="numpy", **options)


def test_the_laws_of_the_front():
    floors = Floors()

    @settings(max_examples=examples(18, 600))
    @given(exact_problems(max_operands=3, max_size=9))
    def law(case):
        if case.seed % 3:  # NumPy runs plans without gradients
            case = dataclasses.replace(case, requires_grad=(False,) * len(case.shapes))
        operands, given = stand_ins(case)
        options = {"backend": "numpy", **given}
        front = planner.tradeoff(case.spec, *operands, **options)
        assert [figures(p) for p in front] == sorted(figures(p) for p in front)
        assert not any(beats(one, other) for one in front for other in front)
        assert len({figures(p) for p in front}) == len(front)
        for place, objective in enumerate(("time", "peak", "retained")):
            single = planner.plan(case.spec, *operands, minimize=objective, **options)
            least = min(figures(p)[place] for p in front)
            # What one objective finds is on the front, or tied there: a point is as good in every figure.
            assert least <= figures(single)[place]
            assert least == figures(single)[place] or not single.proven
            assert any(figures(p) == figures(single) or beats(p, single) for p in front)
            for point in front:
                if single.proven and beats(point, single):
                    assert figures(point)[place] == figures(single)[place]
        assert planner.tradeoff(case.spec, *operands, **options) == front
        assert str(front)
        for point in front if front[0].programs.backward is None else ():
            got = point(*case.operands(), **case.indices)
            assert_equal((got, got.dtype.name), case.expected(), "float32")
        floors.note(run=front[0].programs.backward is None)

    law()
    assert len(chain()) > 1
    floors.at_least(examples(15, 500), run=0.3)


@pytest.mark.parametrize(
    ("spec", "shapes", "indices", "sliced"),
    [
        ("tm, e[ts] m h, ts -> th", [(4096, 64), (16, 64, 128), (4096, 2)], {"e": (4096, 2)}, 3),
        ("ab,bc,cd,de->ae", [(2000, 30), (30, 400), (400, 50), (50, 900)], {}, 0),
        ("ab,cb,ac,ad,de->ce", [(256, 16), (256, 16), (256, 256), (256, 16), (16, 192)], {}, 1),
    ],
)
def test_no_plan_within_the_figures_of_a_row_beats_it(spec, shapes, indices, sliced):
    options = {"backend": "torch", "device": "cpu", **indices}
    operands = needing_gradients(*shapes)
    front = planner.tradeoff(spec, *operands, **options)
    assert sum(point.loop is not None for point in front) >= sliced
    assert front[-1].cost.seconds <= 4 * front[0].cost.seconds
    for row in front:
        _, peak, retained = figures(row)
        assert not any(beats(other, row) for other in front)
        for limits in ((peak, None), (None, retained), (peak, retained)):
            within = dict(zip(("memory_limit", "retain_limit"), limits, strict=True))
            assert not beats(planner.plan(spec, *operands, **within, **options), row)


def test_each_point_has_the_right_gradients(torch):
    operands = [(torch.arange(n * m) % 3.0).reshape(n, m).requires_grad_() for n, m in CHAIN[1]]
    expected = torch.autograd.grad(torch.linalg.multi_dot(operands).sum(), operands)
    front = planner.tradeoff(CHAIN[0], *operands)
    assert len(front) > 1
    assert {p.keep for p in front} >= {"all", "inputs"}
    for point in front:
        found = torch.autograd.grad(point(*operands).sum(), operands)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_it_is_a_sequence_and_prints_as_a_table():
    front = chain()
    assert len(front) == len(list(front)) == len(front.plans) > 1
    assert front[0] == front.plans[0]
    head, columns, *rows = str(front).splitlines()
    assert head.startswith("ab,bc,cd,de->ae        numpy · cpu · float32")
    assert columns.split() == ["#", "time", "FLOPs", "peak", "retained", "how"]
    assert len(rows) == len(front)
    assert "all trees searched for time, of the family of a=32, b=32, d=64; recomputes nothing" in rows[0]
    assert repr(front) == f"<Tradeoff 'ab,bc,cd,de->ae' {len(front)} plans>"
    with pytest.raises(AttributeError):
        front.plans = ()


def test_limits_bound_the_front():
    whole = chain()
    peak = max(p.cost.peak_bytes for p in whole) - 1
    assert {p.cost.peak_bytes <= peak for p in chain(memory_limit=peak)} == {True}
    assert {p.cost.retained_bytes for p in chain(retain_limit="0 B")} == {0}
    with pytest.raises(planner.PlannerLimitError, match="no plan was found within memory_limit=1"):
        chain(memory_limit=1)


def test_a_given_path_holds_for_all_points():
    path = ((0, 1), (0, 1), (0, 1))
    assert {p.path for p in chain(optimize=path)} == {path}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimize": "measure"}, "tradeoff compares predictions"),
        ({"minimize": "time"}, "'minimize' is not an option"),
        ({"optimize": "luck"}, "optimize='luck' is unknown"),
        ({"memory_limit": "2 parsecs"}, "memory_limit='2 parsecs' is not a number of bytes"),
        ({"retain_limit": 1.5}, "retain_limit=1.5 is not a number of bytes"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(planner.PlannerError, match=message):
        chain(**options)


def test_plot_draws_a_point_for_each_plan(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    front = chain()
    axes = front.plot(tmp_path / "front.svg")
    (points,) = axes.collections
    np.testing.assert_allclose(points.get_offsets(), [figures(p)[:2] for p in front])
    assert (tmp_path / "front.svg").stat().st_size > 1000
    pyplot.close(axes.figure)


def test_a_front_needs_no_matplotlib_and_its_plot_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(planner.PlannerError, match=r"pip install 'contraction-planner\[viz\]'"):
        chain().plot()


# -- the command line ------------------------------------------------------------------------------------

COMMAND = ["tradeoff", "nij, q[n]jk, kl -> nil", "64x1x8", "8x8x8", "8x4", "--index", "q=64", "--grad"]


def test_the_command_prints_the_table(capsys):
    assert main(COMMAND) == 0
    operands = needing_gradients((64, 1, 8), (8, 8, 8), (8, 4))
    front = planner.tradeoff(COMMAND[1], *operands, q=(64,), backend="numpy")
    assert capsys.readouterr().out == f"{front}\n"


def test_the_command_prints_json_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "front.png"
    assert main([*COMMAND, "--json", "--plot", str(path)]) == 0
    plans = [planner.Plan.from_json(json.dumps(plan)) for plan in json.loads(capsys.readouterr().out)]
    assert plans
    assert path.read_bytes().startswith(b"\x89PNG")
