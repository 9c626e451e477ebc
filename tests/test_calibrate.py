"""Measured rates: the file they live in, what is refused, and that predictions are sane. Nothing is timed."""

import dataclasses
import json
import math
import os
import warnings
from functools import partial

import numpy as np
import pytest
from conftest import installed_frameworks
from laws import tiny
from looped import make_loop

import planner
from planner.calibrate import command as calibrate
from planner.calibrate import labs, measurements, predictions
from planner.cost import rates
from planner.cost.device import CPU, GPU, H200, PRESETS, gpu_preset
from planner.cost.figures import Work
from planner.cost.products import CLASSES, SIDES, class_rate
from planner.tune import timing

KEY = rates.Key("a processor, 2 threads", "numpy", "2.0", "cpu")
NUMPY_KEY = labs.Lab().key
MEASURED = dataclasses.replace(CPU, flop_rate=3e11, source="measured in a test")
# One device does not measure how fast it reaches others.
STORED = dataclasses.replace(MEASURED, link_bandwidth=math.inf, link_seconds=0.0)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANNER_CACHE", str(tmp_path))
    rates.load_rates.cache_clear()
    yield tmp_path
    rates.load_rates.cache_clear()


def test_what_is_written_is_read():
    infinite = dataclasses.replace(STORED, fresh_bandwidth=math.inf, reused_bandwidth=math.inf, fresh_bytes=0)
    classes = dataclasses.replace(STORED, products=tuple(map(float, range(1, len(CLASSES) + 1))))
    for device in (STORED, infinite, classes):
        path = rates.write(device, KEY)
        assert rates.read(KEY) == device
        json.loads(path.read_text(), parse_constant=pytest.fail)


def test_other_keys_read_nothing():
    rates.write(MEASURED, KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change in ({"machine": "x"}, {"framework": "torch"}, {"framework_version": "2.1"}, {"kind": "cuda"}):
            assert rates.read(dataclasses.replace(KEY, **change)) is None


def with_rate(name, value):
    return lambda text: json.dumps({**json.loads(text), "rates": {**json.loads(text)["rates"], name: value}})


BAD_RATES = [
    ("flop_rate", 0), ("flop_rate", None), ("flop_rate", "fast"), ("flop_rate", True), ("bandwidth", -1.0),
    ("bandwidth", math.nan), ("launch_seconds", math.inf), ("fresh_bytes", 1.5), ("speed_of_light", 3e8),
    ("products", None), ("products", [1e9]), ("products", [0.0] * len(CLASSES)), ("products", [True] * len(CLASSES)),
]  # fmt: skip
BAD_FIELDS = [
    {"format": "another tool's"}, {"version": 0}, {"version": rates.VERSION + 1}, {"key": {"machine": "another"}},
    {"rates": None}, {"rates": {}}, {"source": None},
]  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [
        *("", "[" * 60_000, "[]", "\udcff", None),
        *(lambda text: text[: len(text) // 2], lambda text: " " * 100_000 + text),
        *(lambda text, fields=fields: json.dumps({**json.loads(text), **fields}) for fields in BAD_FIELDS),
        *(with_rate(name, value) for name, value in BAD_RATES),
    ],
)
def test_a_file_that_is_no_good_is_ignored_by_name(damage):
    path = rates.write(MEASURED, KEY)
    if damage is None:  # a folder in its place
        path.unlink()
        path.mkdir()
    else:
        text = damage(path.read_text()) if callable(damage) else damage
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match="is ignored") as caught:
        assert rates.read(KEY) is None
    assert str(path) in str(caught[0].message)


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(folder, monkeypatch, failure):
    rates.write(MEASURED, KEY)

    def fail(*arguments):
        raise failure

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(failure)):
        rates.write(CPU, KEY)
    assert rates.read(KEY) == STORED
    assert len(list(folder.iterdir())) == 1


def test_plans_use_what_is_stored_and_say_so():
    shapes = ((200, 300), (300, 400))
    before = planner.plan("ij,jk->ik", *shapes, backend="numpy")
    assert before.device == CPU
    rates.write(MEASURED, NUMPY_KEY)
    after = planner.plan("ij,jk->ik", *shapes, backend="numpy")
    assert after.device == MEASURED
    assert "measured in a test" in str(after)
    assert CPU.source in str(before)
    assert after.cost.seconds < before.cost.seconds


def test_stored_rates_are_read_once(monkeypatch):
    reads = []
    monkeypatch.setattr(rates, "read", reads.append)
    for rows in (2, 3, 4):
        planner.plan("ij,jk->ik", (rows, 3), (3, 4), backend="numpy")
    assert reads == [NUMPY_KEY]


# -- presets -------------------------------------------------------------------------------------------


CARDS = ("a100", "l40s", "H100", "h200", "B200", "MI300X")


def test_presets_by_name():
    assert {planner.Device.preset(name).name for name in ("CPU", *CARDS, "TPU-v5e")} == set(PRESETS)
    assert {device.kind for device in PRESETS.values()} == {"cpu", "cuda", "tpu"}
    assert all(device.source != "given" for device in PRESETS.values())
    with pytest.raises(planner.PlannerError, match="'abacus' is not a preset: take one of cpu"):
        planner.Device.preset("abacus")


def test_a_graphics_card_is_known_by_its_product_name():
    assert gpu_preset("NVIDIA A100-SXM4-80GB").name == "a100"
    assert gpu_preset("NVIDIA H100 80GB HBM3").name == "h100"
    assert gpu_preset("NVIDIA H200").name == "h200"
    assert gpu_preset("NVIDIA L40S").name == "l40s"
    assert gpu_preset("NVIDIA B200").name == "b200"
    assert gpu_preset("AMD Instinct MI300X").name == "mi300x"
    assert gpu_preset("Quadro") is GPU


def test_a_prepared_call_pays_no_sort_on_a_card():
    """The same step costs less by what the sort takes, and by nothing else; on a CPU prices are the same."""
    q = np.array([1, 0, 2, 2, 1])
    card, cpu = planner.Device.preset("h200"), planner.Device.preset("cpu")
    for device, sorts in ((card, True), (cpu, False)):
        prepared = planner.group(q, 3)
        plans = [planner.plan("nj, q[n]jk -> nk", (5, 4), (3, 4, 6), backend="numpy", device=device, q=x)
                 for x in (q, prepared)]  # fmt: skip
        assert [plan.device for plan in plans] == [device, device.prepared() if sorts else device]
    work = Work(1000, moved=1000, launches=1, kernels=1, sorted=50)
    seconds = card.work_seconds(work) - card.prepared().work_seconds(work)
    assert seconds == pytest.approx(card.group_seconds + 50 * card.sort_row_seconds)
    assert card.work_seconds(work) - card.work_seconds(work._replace(kernels=0)) == pytest.approx(card.kernel_seconds)


ROWS = (1, 100, 10_000, 1_000_000)


@pytest.mark.parametrize("name", PRESETS)
def test_a_larger_problem_is_never_predicted_faster(name):
    device = planner.Device.preset(name)
    for backend in installed_frameworks():
        table = planner.program.frameworks.load_backend(backend).table
        for text, sizes, resolved in (
            ("ij,jk->ik", (1, 4, 7, 8, 9, 64, 4096), lambda n, text: planner.resolve(text, (n, 64), (64, 32))),
            ("bij,bjk->bik", (1, 2, 4, 7, 8, 9, 64), lambda n, text: planner.resolve(text, (5, n, 16), (5, 16, 32))),
            ("q[n]j->nj", ROWS, lambda n, text: planner.resolve(text, (8, 16), q=(n,))),
            ("nj->q[n]j", ROWS, lambda n, text: planner.resolve(text, (n, 16), sizes={"q": 8}, q=(n,))),
        ):
            last: dict[str, int] = {}
            for size in sizes:
                spec = resolved(size, text)
                for choice in table.choices(planner.program.ops.Einsum(spec, "float32"), device):
                    cost = choice.cost.picoseconds
                    assert cost >= last.get(choice.lowering, 0), (text, size, choice.lowering)
                    last[choice.lowering] = cost


# -- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(calibrate, "make_labs", lambda: iter([labs.Lab()]))
    monkeypatch.setattr(calibrate, "measure", lambda lab, progress: MEASURED)


def test_the_command_stores_and_prints(quick, capsys):
    assert calibrate.main([]) == 0
    assert rates.read(NUMPY_KEY) == STORED
    out = capsys.readouterr().out
    assert "measured in a test" in out
    assert str(rates.path_of(NUMPY_KEY)) in out
    assert all(name in out for name in rates.rate_fields())


def test_a_dry_run_stores_nothing(quick, capsys, folder):
    assert calibrate.main(["--dry-run", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["path"], found["measured"]["flop_rate"]) == (None, 3e11)
    assert list(folder.iterdir()) == []


def test_an_interrupt_leaves_the_old_file(quick, monkeypatch, capsys):
    rates.write(MEASURED, NUMPY_KEY)

    def interrupted(lab, progress):
        progress("flop_rate")
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "measure", interrupted)
    assert calibrate.main([]) == 130
    assert rates.read(NUMPY_KEY) == STORED
    assert "unchanged" in capsys.readouterr().err


def test_measured_rates_are_rates(monkeypatch):
    """The measurements run, on a clock that only counts: every field is filled in and can be stored."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    lab = labs.Lab()
    lab.is_tiny = True
    stages = []
    device = measurements.measure(lab, stages.append)
    assert len(stages) == measurements.STAGES
    rates.write(device, lab.key)
    assert rates.read(lab.key) == device


def test_each_time_is_the_least_of_all_passes(monkeypatch):
    """What disturbs one pass, another time in each, does not count."""
    lab, passes, count = labs.Lab(), [], iter(range(10**9))
    lab.is_tiny = True
    steady, asked = [1e-3 * (1 + n % 7) for n in range(1000)], []

    def seconds(run, finish, blocks):
        asked.append(next(count) - sum(passes))
        return steady[asked[-1]] * (5 if (asked[-1] + len(passes)) % 2 else 1)

    monkeypatch.setattr(measurements, "least_seconds", seconds)
    measurements.measure(lab)
    passes.append(len(asked))
    found = measurements.measure(lab)
    assert len(asked) == 2 * passes[0]
    quiet, asked[:] = labs.Lab(), []
    quiet.is_tiny = True
    monkeypatch.setattr(
        measurements, "least_seconds", lambda run, finish, blocks: asked.append(0) or steady[len(asked) - 1]
    )
    assert found == measurements.measure(quiet)


def test_a_card_is_measured_in_all_its_rates(monkeypatch):
    """A CPU stands in for the card, at tiny sizes with interpreted kernels; what is measured can be stored."""
    pytest.importorskip("triton", reason="triton is not installed")
    lab = pytest.importorskip("torch") and labs.TorchLab()
    lab.is_tiny, lab.preset, lab.key = True, H200, dataclasses.replace(lab.key, machine="a card", kind="cuda")
    ticks = iter(range(10**9))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    found = measurements.measure(lab)
    assert (found.kind, found.fresh_bandwidth) == ("cuda", math.inf)
    assert found.group_seconds > 0
    assert found.half_rate > 0
    rates.write(found, lab.key)
    assert rates.read(lab.key) == found


class _Told:
    """A lab that measures nothing: each stretch of work is told what it took."""

    key, is_tiny = KEY, False

    def filling(self, count, anew):
        return partial(tuple, (count, anew))

    def copying(self, count):
        return partial(tuple, (count,))


@pytest.mark.parametrize(
    ("small", "large", "bound", "fresh"),
    [(1e-10, 5e-10, 12, 16), (1e-10, 5e-10, 20, 32), (1e-10, 5e-10, 36, 64), (2e-10, 2e-10, 12, 0)],
)
def test_fresh_memory_has_two_rates_that_part_at_a_power_of_two(monkeypatch, small, large, bound, fresh):
    """Where each new byte costs `small` seconds beyond the writing, and `large` beyond a bound of megabytes."""

    def seconds(lab, run):
        count, anew = run.args[0]
        slope = large if 4 * count > bound * measurements.MEGABYTE else small
        return 4 * count / 1e10 + slope * 4 * count * anew

    monkeypatch.setattr(measurements, "seconds_of", seconds)
    found = measurements._fresh(_Told())
    assert found.pop("fresh_bytes") == fresh * measurements.MEGABYTE
    assert found == {"fresh_bandwidth": pytest.approx(1 / large), "reused_bandwidth": pytest.approx(1 / small)}


def test_rates_are_work_by_time(monkeypatch):
    monkeypatch.setattr(measurements, "seconds_of", lambda lab, run, blocks=7: 0.5)
    monkeypatch.setattr(measurements, "_step", lambda lab, spec, *shapes: None)
    assert measurements._bandwidth(_Told()) == 2 * 128 * 2**20 / 0.5
    assert measurements._flop_rate(_Told()) == 2 * 512**3 / 0.5
    assert measurements._skinny_rate(_Told()) == 2 * 4 * 1024**2 / 0.5
    assert measurements._half_rate(_Told()) == 0


def test_a_cache_holds_what_is_copied_nearly_as_fast_as_less(monkeypatch):
    """Copies of up to 4 MiB, which move 8, run at 100 GB/s here, larger ones at 10."""
    monkeypatch.setattr(
        measurements, "seconds_of", lambda lab, run: 8 * run.args[0][0] / (1e11 if run.args[0][0] <= 2**20 else 1e10)
    )
    found = measurements._cache(_Told(), 1e10)
    assert found == {
        "cache_bytes": 2**23, "cache_bandwidth": pytest.approx(1e11),
        "outer_cache_bytes": 0, "outer_cache_bandwidth": math.inf,
    }  # fmt: skip


def test_an_outer_cache_is_slower_than_a_cache_and_faster_than_memory(monkeypatch):
    """Copies that move up to 2 MiB run at 64 GB/s here, up to 64 MiB at 24, and larger ones at 12."""

    def seconds(lab, run):
        moved = 8 * run.args[0][0]
        return moved / (6.4e10 if moved <= 2**21 else 2.4e10 if moved <= 2**26 else 1.2e10)

    monkeypatch.setattr(measurements, "seconds_of", seconds)
    found = measurements._cache(_Told(), 1.2e10)
    assert (found["cache_bytes"], found["outer_cache_bytes"]) == (2**21, 2**26)
    assert found["outer_cache_bandwidth"] == pytest.approx(2.4e10)
    device = dataclasses.replace(CPU, bandwidth=1.2e10, **found)
    for moved, rate in ((2**21, found["cache_bandwidth"]), (2**26, 2.4e10), (2**26 + 1, 1.2e10)):
        assert device.moving_seconds(moved) == pytest.approx(moved / rate)
    assert device.packing_seconds(2**26) == pytest.approx(2**26 / math.sqrt(2.4e10 * 1.2e10))


def test_products_are_measured_by_class_without_their_launch(monkeypatch):
    """On a machine whose products take 1 us and 0.5 ns for each multiplication, all classes have one rate."""
    monkeypatch.setattr(measurements, "_product", lambda lab, *sizes: partial(tuple, sizes))
    monkeypatch.setattr(measurements, "seconds_of", lambda lab, run, blocks: 1e-6 + 5e-10 * math.prod(run.args[0]))
    found = measurements._products(_Told(), 1e-6)
    assert len(found) == len(CLASSES)
    for rate, (batched, *sides) in zip(found, CLASSES, strict=True):
        if batched or math.prod(sides) > 1000:  # others take a small part of the time of their launch
            assert rate == pytest.approx(4e9)


def test_rates_between_classes_are_geometric_means():
    """The rate of a class is that of its entry; half-way between two sides it is the geometric mean."""
    products = tuple(1e9 * (1 + n % 7) * (2 if batched else 1) for n, (batched, *_) in enumerate(CLASSES))
    for rate, (batched, *sides) in zip(products, CLASSES, strict=True):
        assert class_rate(products, batched, *sides) == pytest.approx(rate)
    device = dataclasses.replace(CPU, flop_rate=1e12, products=products)
    ends = [device.product_rate(side, 16, 64) for side in (4, 16)]
    assert device.product_rate(8, 16, 64) == pytest.approx(math.sqrt(ends[0] * ends[1]))
    assert device.product_rate(3, 16, 64) == pytest.approx(0.75 * device.product_rate(4, 16, 64))
    assert device.product_rate(4096, 16, 64, batch=2) == device.product_rate(SIDES[-1], 16, 64, batch=9)
    assert dataclasses.replace(device, flop_rate=1e9).product_rate(8, 16, 64) == 1e9


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(predictions.WORKLOADS, "equivariant", tiny(predictions.WORKLOADS["equivariant"]))


def test_the_check_times_every_step(small):
    found = predictions.check(["equivariant"])
    assert {t.framework for t in found} >= {"numpy"}
    assert all(t.predicted > 0 and t.measured > 0 for t in found)
    assert "within 2x" in predictions.check_text(found)
    assert {t.framework for t in found} == set(installed_frameworks())
    with pytest.raises(planner.PlannerError, match="no workload 'nothing'"):
        predictions.check(["nothing"])


def test_the_check_says_what_share_was_within_twice():
    step = partial(predictions.StepTime, "numpy", "w", "ij -> i", "sum", False, 1.0)
    times = [step(seconds) for seconds in (0.5, 1.9, 2.0, 2.1)]
    lines = predictions.check_text(times).splitlines()
    of_all = "of 4 steps 0% within 1.5x, 75% within 2x"
    assert lines[-2:] == [f"numpy: {of_all}", f"all: {of_all}"]
    assert [" ! " in line for line in lines[1:5]] == [False, False, False, True]


def test_the_check_times_the_steps_of_a_slice(small, monkeypatch):
    whole = predictions.check(["equivariant"])
    monkeypatch.setattr(
        predictions, "plan", lambda *given, **options: make_loop(planner.plan(*given, **options), {"n": 1})
    )
    slices = predictions.check(["equivariant"])
    assert {(t.framework, t.backward) for t in slices} == {(t.framework, t.backward) for t in whole}
    assert all("loop" not in t.lowering and t.measured > 0 for t in slices)


def test_measured_rates_of_a_card_keep_its_name(monkeypatch):
    """How its kernels multiply float32 depends on the name."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from planner.backends.torch import backend

    measured = planner.Device("cuda", flop_rate=5e13, bandwidth=4e12, kind="cuda")
    monkeypatch.setattr(backend, "load_rates", lambda *_: measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = backend._card(torch.device("cuda"))
    assert (found.name, found.capability, found.flop_rate) == ("h200", 90, 5e13)
