"""Where files that outlive a process are kept, and how they are written."""

import os
import sys
from pathlib import Path

import pytest

from planner.cost.store import cache_folder, write_json


@pytest.mark.parametrize(
    ("system", "variables", "folder"),
    [
        ("linux", {"PLANNER_CACHE": "/p", "XDG_CACHE_HOME": "/x"}, "/p"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/planner"),
        ("linux", {"PLANNER_CACHE": "", "XDG_CACHE_HOME": "relative"}, "/h/.cache/planner"),
        ("linux", {}, "/h/.cache/planner"),
        ("darwin", {}, "/h/Library/Caches/planner"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/planner/Cache"),
    ],
)
def test_the_folder(system, variables, folder, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(Path, "home", lambda: Path("/h"))
    for name in ("PLANNER_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_a_user_without_a_home(monkeypatch):
    def nowhere():
        raise RuntimeError("no home")

    for name in ("PLANNER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(OSError, match="set PLANNER_CACHE"):
        cache_folder()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    write_json(path, "old")

    def refuse(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        write_json(path, "new")
    assert [p.read_text() for p in path.parent.iterdir()] == ['"old"']
