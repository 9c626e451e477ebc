"""The command for a card (`make gpu`): each result is written as it comes, whatever happens to the process after it."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from planner.bench.card import collect

ROOT = pathlib.Path(__file__).parent.parent

# A card of which one item raises, one loses the card, and one ends its process.
FAKE = """
import os, signal, sys
from planner.bench.card import Comparison, serve

class Fake:
    device, lost = "a fake", False

    def alive(self):
        return not self.lost

    def checks(self):
        yield "right", lambda: ""
        yield "wrong", lambda: "2 entries differ"
        yield "raises", self.raises
        yield "after one that raised", lambda: str(os.getpid())
        yield "loses the card", self.loses
        yield "after a lost card", lambda: str(os.getpid())
        yield "ends", lambda: os.kill(os.getpid(), signal.SIGKILL)

    def raises(self):
        raise ValueError("no such kernel")

    def loses(self):
        self.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    def rates(self):
        yield "copy, bytes/s", lambda: 1e12

    def comparisons(self):
        yield "no arrays", self.none
        yield "two ways", self.two

    def none(self):
        raise MemoryError("too large")
        yield

    def two(self):
        print("a library prints")
        yield Comparison("sum", {"planner": len, "other": None}, 8.0)

    def seconds(self, program):
        if program is None:
            raise RuntimeError("it is not installed")
        return 1e-3

    def extra_bytes(self, program):
        return 64

serve(Fake, "fake", True, int(sys.argv[1]))
"""


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def environment(**more):
    return os.environ | {"PYTHONPATH": str(ROOT), **more}


def test_an_item_that_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script, path = tmp_path / "fake.py", tmp_path / "lines.jsonl"
    script.write_text(FAKE)
    with path.open("x") as lines:
        results = collect([sys.executable, str(script)], lines)
    assert read(path) == results
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == results
    first, *rest = results
    assert (first["what"], first["framework"]) == ("circumstances", "fake")
    by_name = {line["what"]: line for line in rest}
    assert list(by_name) == [
        "right", "wrong", "raises", "after one that raised", "loses the card", "after a lost card", "ends",
        "copy, bytes/s", "no arrays", "sum: planner", "sum: other",
    ]  # fmt: skip
    assert by_name["right"]["difference"] == ""
    assert by_name["wrong"]["difference"] == "2 entries differ"
    assert by_name["raises"]["error"] == "ValueError: no such kernel"
    assert "illegal memory access" in by_name["loses the card"]["error"]
    # The process goes on after what raised, and another one takes its place when the card is lost.
    assert by_name["after one that raised"]["difference"] != by_name["after a lost card"]["difference"]
    assert by_name["ends"]["error"] == "the process ended: SIGKILL"
    assert by_name["copy, bytes/s"]["rate"] == 1e12
    assert by_name["no arrays"]["error"] == "MemoryError: too large"
    assert by_name["sum: planner"].items() >= {"seconds": 1e-3, "extra_bytes": 64, "least_bytes": 8.0}.items()
    assert by_name["sum: other"].items() >= {"way": "other", "error": "RuntimeError: it is not installed"}.items()


@pytest.mark.parametrize(
    ("code", "seconds", "why"),
    [
        ("import time; time.sleep(1000)", 1, "not finished within --seconds"),
        ("raise SystemExit(4)", 1000, "the process ended: exit status 4"),
        ("import os; os.kill(os.getpid(), 6)", 1000, "the process ended: SIGABRT"),
    ],
    ids=["hangs", "fails", "crashes"],
)
def test_a_process_that_gives_nothing_is_told(code, seconds, why, tmp_path):
    path = tmp_path / "lines.jsonl"
    with path.open("x") as lines:
        collect([sys.executable, "-c", code], lines, time.monotonic() + seconds)
    assert read(path) == [{"what": "the process", "error": why}]


def command(*arguments):
    return [sys.executable, "-m", "planner.bench.card", *map(str, arguments)]


@pytest.mark.parametrize("part", ["torch", "jax"])
def test_the_command_works(part, tmp_path):
    """Tiny sizes, the kernels interpreted."""
    needed = {"torch": "triton", "jax": "jax"}[part]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    done = subprocess.run(
        command("--smoke", "--part", part, "--out", tmp_path),
        env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob(f"{part}-*.jsonl")
    first, *results = read(path)
    assert (first["what"], first["machine"], first["framework"]) == ("circumstances", "cpu", part)
    assert not [line for line in results if line.get("difference") or "error" in line]
    checks, times = ([line for line in results if key in line] for key in ("difference", "seconds"))
    assert len(checks) == {"torch": 21, "jax": 3}[part]
    assert len({line["comparison"] for line in times}) == {"torch": 6, "jax": 4}[part]
    if part == "jax":
        assert any(line["what"] == "kernel bfloat16 (50, 2, 5, 7, 4)" for line in checks)


def test_a_run_that_is_cut_off_leaves_what_it_found(tmp_path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    run = subprocess.Popen(
        command("--smoke", "--part", "torch", "--out", tmp_path),
        env=environment(), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        ends = time.monotonic() + 120
        while time.monotonic() < ends and run.poll() is None:
            found = [path for path in tmp_path.glob("torch-*.jsonl") if path.read_text().count("\n") >= 4]
            if found:
                break
            time.sleep(0.05)
        children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children")
        child = int(children.read_text().split()[0]) if children.exists() else None
    finally:
        run.kill()
    assert run.wait() == -signal.SIGKILL
    first, *results = read(found[0])
    assert first["what"] == "circumstances"
    assert len(results) >= 3
    assert all(line["difference"] == "" for line in results[:3])
    assert not any(line["what"].startswith("experts") for line in results)  # it was far from its end
    # Nobody uses the card on.
    while child is not None and pathlib.Path(f"/proc/{child}").exists():
        assert time.monotonic() < ends + 30
        time.sleep(0.05)


def test_a_machine_without_a_card_is_told_so(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    done = subprocess.run(
        command("--part", "torch", "--out", tmp_path),
        env=environment(CUDA_VISIBLE_DEVICES=""), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "torch sees no card here; --smoke runs tiny sizes on the CPU" in done.stdout
    assert not list(tmp_path.glob("*.md"))
