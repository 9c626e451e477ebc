"""What is stored survives: writers that are killed tear no file, and of a damaged file nothing is believed or run."""

from __future__ import annotations

import base64
import colorsys
import contextlib
import copy
import functools
import importlib
import json
import math
import operator
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import warnings
from unittest import mock

import numpy as np
import pytest
from conftest import examples

import planner
from planner.cost import rates
from planner.cost import store as files
from planner.cost.device import CPU
from planner.search import choose, stored
from planner.tune import autotune as measure

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEY = rates.Key("a processor, 2 threads", "numpy", "2.0", "cpu")
SPEC = "ab,bc,cd->ad"
OPERANDS = [np.ones(shape) for shape in ((3, 4), (4, 5), (5, 6))]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANNER_CACHE", str(tmp_path))
    monkeypatch.setenv("PLANNER_DISK", "on")
    monkeypatch.setattr(files, "_WARNED", set())
    rates.load_rates.cache_clear()
    yield tmp_path
    rates.load_rates.cache_clear()


# -- writers that are killed -----------------------------------------------------------------------------

# Each goes on from where the one before it was killed, so that a thousand writes are made however often it is.
WRITER = """
import dataclasses, sys, warnings
warnings.simplefilter("error")
from planner.cost import rates
from planner.cost import store as files
from planner.cost.device import CPU
name, count = sys.argv[1], int(sys.argv[2])
key = rates.Key("a processor, 2 threads", "numpy", "2.0", "cpu")
big = list(range(2_000))
for number in range(count):
    if number % 2:
        rates.write(dataclasses.replace(CPU, source=name * 150), key)
        assert rates.read(key).source in [c * 150 for c in "abcdefgh"]
    else:
        files.remember("race", {"entry": number % 6}, {"by": name, "big": big})
        found = files.recall("race", {"entry": number % 6})
        assert found["by"] in "abcdefgh" and found["big"] == big
    print(number, flush=True)
"""


class Writer:
    """A process that writes until it has made its writes, started again when it was killed."""

    def __init__(self, name, writes, folder):
        self.name, self.left, self.log = name, writes, folder / f"{name}.log"
        self.start()

    def start(self):
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WRITER, self.name, str(self.left)],
                env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

    def kill(self):
        """Kill it if it has begun to write; whether it was killed."""
        if not self.log.stat().st_size or self.process.poll() is not None:
            return False
        self.process.send_signal(signal.SIGKILL)
        _, errors = self.process.communicate()
        assert self.process.returncode in (-signal.SIGKILL, 0), errors
        self.left -= len(self.log.read_text().splitlines())
        self.start()
        return True

    def finish(self):
        _, errors = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, errors


def test_killed_writers_tear_no_file(folder, tmp_path_factory):
    writes, kills = examples(62, 1_000), examples(12, 100)
    logs, chance = tmp_path_factory.mktemp("logs"), random.Random(0)
    writers = [Writer(name, writes, logs) for name in "abcdefgh"]
    done = 0
    while done < kills:
        assert any(writer.process.poll() is None for writer in writers), f"ended after {done} kills"
        done += chance.choice(writers).kill()
        time.sleep(chance.random() / 50)
    for writer in writers:
        writer.finish()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rates.read(KEY).source in [c * 150 for c in "abcdefgh"]
        found = [files.recall("race", {"entry": n}) for n in (0, 2, 4)]
    assert [x["big"] for x in found] == [list(range(2_000))] * 3
    for path in folder.rglob("*"):
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert path.is_dir() or path.name.startswith(files.TEMPORARY), path


def test_what_killed_writers_left_is_removed_in_time(folder):
    for name, age in (("old", files.ABANDONED_SECONDS + 60), ("new", 60)):
        path = folder / f"{files.TEMPORARY}{name}.tmp"
        path.write_text("{")
        os.utime(path, (time.time() - age,) * 2)
    rates.write(CPU, KEY)
    assert sorted(path.name for path in folder.iterdir()) == [f"{files.TEMPORARY}new.tmp", rates.path_of(KEY).name]


# -- damaged files ---------------------------------------------------------------------------------------


def bomb(path):
    """What would write a file, if it were unpickled or evaluated."""
    call = f"__import__('pathlib').Path({str(path)!r}).touch()"
    pickled = f"cbuiltins\neval\n(V{call}\ntR.".encode()
    return {
        "pickle": pickled,
        "pickle in JSON": json.dumps({"py/reduce": [{"py/function": "builtins.eval"}, [call]]}).encode(),
        "base64": base64.b64encode(pickled),
        "expression": call.encode(),
        "tag": f"!!python/object/apply:eval [{call!r}]".encode(),
    }


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "1e-400", "9" * 400, "9" * 5_000, "true", "null", "[]",
           '"5"', "{}", "1.5", str(2**63)]  # fmt: skip


def spots(value, trail=()):
    """The way to every place in JSON."""
    yield trail
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from spots(inner, (*trail, key))


def changed(text, rng):
    """Text with one place in it replaced, removed, or exchanged for another."""
    whole = json.loads(text)
    (*trail, last), other = (rng.choice([t for t in spots(whole) if t]) for _ in range(2))
    parent = functools.reduce(operator.getitem, trail, whole)
    kind = rng.randrange(4)
    if kind == 0:
        parent[last] = "\0"
        return json.dumps(whole).replace('"\\u0000"', rng.choice(NUMBERS))
    if kind == 1:
        parent[last] = copy.deepcopy(functools.reduce(operator.getitem, other, whole))
    elif kind == 2:
        del parent[last]
    else:
        words = ["os.system", "Plan", "eval", "\ud800", "", "x" * 10_000, "Leaf", "Forgotten", "type"]
        parent[last] = {"type": rng.choice(words), rng.choice(words): 1}
    return json.dumps(whole)


def damaged_bytes(text, rng, sentinel):
    """One damage of many kinds."""
    data = text.encode()
    at = rng.randrange(len(data))
    damages = [
        lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        lambda: data[:at],
        lambda: data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:],
        lambda: rng.choice([b"[", b'{"type":', b'{"a":[']) * rng.choice([10, 2_000, 50_000]),
        lambda: rng.choice([b"", b"\0", b"\xff\xfe\0", b"\xef\xbb\xbf" + data, data * 2, b" " * 100_000 + data]),
        lambda: rng.choice(list(bomb(sentinel).values())),
        *[lambda: changed(text, rng).encode(errors="surrogatepass")] * 3,
    ]
    return rng.choice(damages)()


def no_files(path, rng):
    """In the place of the file something that is none."""
    kind = rng.choice(["folder", "pipe", "loop", "device", "nowhere"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"loop": path, "device": "/dev/zero", "nowhere": path.parent / "nothing"}[kind])


RUNS_CODE = {"exec", "compile", "pickle.find_class", "os.system", "subprocess.Popen", "marshal.loads"}
WATCHING = []


def watch(event, _):
    """Note what runs code, while it is watched for."""
    if WATCHING and event in RUNS_CODE:
        WATCHING[0].append(event)


@contextlib.contextmanager
def watched():
    """What is run within, by Python's own audit."""
    WATCHING.append([])
    yield WATCHING[0]
    WATCHING.clear()


@pytest.fixture(scope="module", autouse=True)
def audit():
    sys.addaudithook(watch)
    with watched() as ran:
        importlib.reload(colorsys)
    assert ran.count("exec") == 1, "the audit sees nothing"


def planned():
    return planner.plan(SPEC, *OPERANDS, optimize="measure")


def read_rates():
    found = rates.read(KEY)
    if found is not None:
        values = [getattr(found, name) for name in rates.rate_fields()]
        flat = [rate for value in values for rate in (value if isinstance(value, tuple) else (value,))]
        assert all(rate >= 0 and not math.isnan(rate) for rate in flat)
    return found


def read_plan():
    plan = planned()
    np.testing.assert_array_equal(plan(*OPERANDS), np.linalg.multi_dot(OPERANDS))
    return None if plan.origin.startswith("measured") else plan


def read_search():
    """The plan if it was read; None if it was searched."""
    with mock.patch.object(choose, "_search_plan", wraps=choose._search_plan) as search:
        plan = planner.plan(SPEC, *OPERANDS)
    np.testing.assert_array_equal(plan(*OPERANDS), np.linalg.multi_dot(OPERANDS))
    return None if search.called else plan


@pytest.mark.parametrize("store", ["rates", "plans", "searches"])
def test_damaged_files_are_named_and_nothing_of_them_is_run(folder, tmp_path_factory, store, monkeypatch):
    monkeypatch.setattr(measure, "BUDGET_SECONDS", 0)
    if store == "rates":
        path, read = rates.write(CPU, KEY), read_rates
    elif store == "searches":
        monkeypatch.setattr(stored, "LEAST_WORK", 0)
        monkeypatch.setattr(stored, "LEAST_PRICED", 0)
        assert read_search() is None
        (path,), read = folder.rglob("*.json"), read_search
    else:
        planned()
        (path,), read = folder.rglob("*.json"), read_plan
    text, sentinel, ignored = path.read_text(), tmp_path_factory.mktemp("run") / "ran", 0
    assert read() is not None
    for seed in range(examples(60, 1_000)):
        rng = random.Random(seed)
        path.unlink()
        if seed % 25 == 0:
            no_files(path, rng)
        else:
            path.write_bytes(damaged_bytes(text, rng, sentinel))
        files._WARNED.clear()
        with warnings.catch_warnings(record=True) as caught, watched() as ran:
            warnings.simplefilter("always")
            found = read()
        assert not ran, seed
        assert all(str(path) in str(w.message) for w in caught), seed
        # A symlink to nothing is not a file; an entry with the key of another problem is not an entry.
        ignored += found is None
        assert found is not None or caught or path.is_symlink() or store != "rates", seed
        if path.is_dir():
            path.rmdir()
            path.touch()
    assert ignored > 0.5 * seed if store == "rates" else ignored > 0.9 * seed
    assert not sentinel.exists()


def test_damaged_plans_in_json_are_refused(tmp_path):
    plans = [
        planner.plan(SPEC, *OPERANDS),
        planner.plan(
            "q[n]j, jk -> q[n]k", planner.Operand((4, 3), requires_grad=True), planner.Operand((3, 2)), q=(5,),
            sizes={"q": 4}, backend="numpy",
        ),
    ]  # fmt: skip
    # The first reading compiles the annotations of the library's own classes.
    assert [planner.Plan.from_json(plan.to_json()) for plan in plans] == plans
    refused = 0
    for seed in range(examples(125, 5_000)):
        rng = random.Random(seed)
        data = damaged_bytes(rng.choice(plans).to_json(), rng, tmp_path / "ran")
        with watched() as ran:
            try:
                planner.Plan.from_json(data.decode(errors="surrogateescape"))
            except planner.PlannerError as error:
                refused += 1
                assert str(error), seed  # noqa: PT017
        assert not ran, seed
    assert refused > 0.8 * seed
    assert not (tmp_path / "ran").exists()
