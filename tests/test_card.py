"""The command for a card (`make gpu`): each result is written as it comes, whatever happens to the process after it."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import planner
from planner.bench.card import collect
from planner.bench.cards import random_specs
from planner.bench.cards.findings import adopt, best_tiles
from planner.testing.laws import LAWS

ROOT = pathlib.Path(__file__).parent.parent


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def start(folder, part, *arguments, needs, **environment):
    """The command in a process of its own, which writes to a folder."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    command = [sys.executable, "-m", "planner.bench.card", *arguments, "--part", part, "--out", folder]
    environment = os.environ | {"PYTHONPATH": str(ROOT), **environment}
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, cwd=folder, **to)


def test_an_item_that_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "lines.jsonl"
    with path.open("x") as lines:
        results = collect([sys.executable, str(ROOT / "tests" / "fake_card.py")], lines)
    assert read(path) == results
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == results
    first, *rest = results
    assert (first["what"], first["framework"]) == ("circumstances", "fake")
    by_name = {line["what"]: line for line in rest}
    assert list(by_name) == [
        "right", "wrong", "raises", "after one that raised", "loses the card", "after a lost card", "ends",
        "copy, bytes/s", "the rest", "no arrays", "sum: planner", "sum: other",
    ]  # fmt: skip
    expected = {
        "right": {"difference": ""},
        "wrong": {"difference": "2 entries differ"},
        "raises": {"error": "ValueError: no such kernel"},
        "loses the card": {"error": "RuntimeError: an illegal memory access was encountered"},
        "ends": {"error": "the process ended: SIGKILL"},
        "copy, bytes/s": {"rate": 1e12},
        "the rest": {"step": "slow", "left_out": "slow has spent its time"},
        "no arrays": {"error": "MemoryError: too large"},
        "sum: planner": {"seconds": 1e-3, "extra_bytes": 64, "least_bytes": 8.0},
        "sum: other": {"way": "other", "error": "RuntimeError: it is not installed"},
    }
    assert all(by_name[name].items() >= wanted.items() for name, wanted in expected.items())
    # The process goes on after what raised, and another one takes its place when the card is lost.
    assert by_name["after one that raised"]["difference"] != by_name["after a lost card"]["difference"]


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


@pytest.mark.parametrize(("part", "needs"), [("torch", "triton"), ("jax", "jax")])
def test_the_command_works(part, needs, tmp_path):
    """Tiny sizes, the kernels interpreted."""
    run = start(tmp_path, part, "--smoke", needs=needs)
    said, _ = run.communicate()
    assert run.returncode == 0, said
    (path,) = tmp_path.glob(f"{part}-*.jsonl")
    first, *results = read(path)
    assert (first["what"], first["machine"], first["framework"]) == ("circumstances", "cpu", part)
    assert not [line for line in results if line.get("difference") or "error" in line]
    checks, times = ([line for line in results if key in line] for key in ("difference", "seconds"))
    names = {"torch": ("compile", "checks", "specs", "sanitizer", "prices", "tiles", "calls"),
             "jax": ("checks", "specs", "prices", "ragged_dot", "calls")}[part]  # fmt: skip
    assert tuple(dict.fromkeys(line["step"] for line in results)) == names
    assert len(checks) == {"torch": 37, "jax": 6}[part]
    assert len({line["comparison"] for line in times if "comparison" in line}) == {"torch": 6, "jax": 4}[part]
    assert len(read(tmp_path / "checks.jsonl")) == len(checks)
    if part == "torch":
        (compiled,) = (line["kernels"] for line in results if line["step"] == "compile")
        assert all(kernel["kernels"][0]["registers"] > 0 for kernel in compiled)
        check_that_findings_are_adopted(tmp_path, tmp_path / "checkout")
    if part == "jax":
        names = "stock", "taken, ragged_dot", "kernel", "kernel, tile after tile"
        assert [line["what"] for line in checks[:4]] == [f"{name} bfloat16 (50, 2, 5, 7, 4)" for name in names]


def test_a_law_that_breaks_is_told(monkeypatch, capsys):
    """And the next problem follows."""
    pytest.importorskip("torch", reason="torch is not installed")

    def holds(engine, subject, problem):
        raise AssertionError("no such sum")

    monkeypatch.setattr(random_specs, "LAWS", [dataclasses.replace(LAWS[1], holds=holds)])
    assert random_specs.main(["torch", "--smoke", "--seconds", "2"]) == 1
    *broken, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert last == {"held": {"gradients": 0}, "broken": len(broken)}
    assert len(broken) > 1
    assert all((line["law"], line["error"]) == ("gradients", "AssertionError: no such sum") for line in broken)


def check_that_findings_are_adopted(folder, root):
    """Tiles and rates that a run found are those of the library afterwards; those of a smoke run are refused."""
    tiles, device = (json.loads((folder / name).read_text()) for name in ("tiles.json", "device.json"))
    with pytest.raises(SystemExit, match="no results of a card"):
        list(adopt(folder, root))
    for path in folder.glob("*.json"):  # as if it had been a card
        path.write_text(path.read_text().replace('"smoke": true', '"smoke": false'))
    said = list(adopt(folder, root))
    assert [line.split()[0] for line in said] == [str(len(tiles["buckets"])), "the", "the"]
    assert (root / "docs" / "benchmarks" / "cpu-torch.md").read_text().count("mode=rows") == 5
    code = (
        "import ast, contextlib, json, pathlib, sys\n"
        "from planner.kernels.tiled_product import measured, triton_tiles\n"
        "measured.FILE, measured._capability = pathlib.Path(sys.argv[1]), lambda: '90'\n"
        "def read(text):\n"
        "    return ast.literal_eval(text) if text.isdigit() or text in ('True', 'False') else text\n"
        "for bucket in json.loads(sys.argv[2]):\n"
        "    arguments = {name: read(x) for name, x in (pair.split('=') for pair in bucket.split())}\n"
        "    print(json.dumps(triton_tiles.tiles_of(**arguments)._asdict()))\n"
    )
    path = root / "kernels" / "tiled_product" / "tiles.json"
    command = [sys.executable, "-c", code, path, json.dumps(list(tiles["buckets"]))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [x["tiles"] for x in tiles["buckets"].values()]
    (rates,) = json.loads((root / "planner" / "cost" / "cards.json").read_text()).values()
    assert rates.items() <= device["device"].items()
    assert not any(name.endswith(("launch_seconds", "kernel_seconds")) for name in rates)
    published = planner.Device.preset("h200")
    assert dataclasses.replace(published, **rates).sort_row_seconds == rates["sort_row_seconds"]


def test_the_fastest_tiles_are_those_whose_results_are_right():
    line = {"bucket": "b", "product": "p", "change": {}, "tiles": {"m": 64}, "seconds": 3.0, "difference": ""}
    wrong = {**line, "change": {"m": 16}, "tiles": {"m": 16}, "seconds": 1.0, "difference": "relative errors are 0.5"}
    faster = {**line, "change": {"m": 32}, "tiles": {"m": 32}, "seconds": 2.0}
    expected = {"tiles": {"m": 32}, "seconds": 2.0, "product": "p", "default_seconds": 3.0}
    assert best_tiles([line, wrong, faster, {"what": "another"}]) == {"b": expected}


def test_a_run_that_is_cut_off_leaves_what_it_found(tmp_path):
    run = start(tmp_path, "torch", "--smoke", needs="triton")
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
    assert results[0]["step"] == "compile"
    assert all(line["difference"] == "" for line in results[1:3])
    assert not any(line["what"].startswith("experts") for line in results)  # it was far from its end
    # Nobody uses the card on.
    while child is not None and pathlib.Path(f"/proc/{child}").exists():
        assert time.monotonic() < ends + 30
        time.sleep(0.05)


def test_a_machine_without_a_card_is_told_so(tmp_path):
    run = start(tmp_path, "torch", needs="torch", CUDA_VISIBLE_DEVICES="")
    said, _ = run.communicate()
    assert run.returncode == 1
    assert "torch sees no card here; --smoke runs tiny sizes on the CPU" in said
    assert not list(tmp_path.glob("*.md"))


def test_sums_by_parts_keep_their_32_terms(torch):
    """Whatever the sweep changes: sums of more terms on tensor cores would be less accurate."""
    pytest.importorskip("triton", reason="triton is not installed")
    from planner.bench.cards.sweep import CHANGES, with_tiles
    from planner.kernels.tiled_product.triton_tiles import tiles_of

    for change in CHANGES:
        with with_tiles(change, "bf16x6"):
            assert tiles_of("rows", 64, 512, 1024, 4, "bf16x6").k == 32
            assert tiles_of("rows", 64, 512, 1024, 4, "ieee").k == change.get("k", 32)
