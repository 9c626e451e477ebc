"""Wheel, sdist, editable install and plain PYTHONPATH all hold the real files behind the two symlinks."""

import importlib.metadata
import itertools
import os
import pathlib
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile

import pytest
from conftest import run

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([A-Za-z0-9._!]+)$")


def _name(requirement: str) -> str:
    """The distribution's name as packages compare it: `Jinja2>=3` is `jinja2`, `ml_dtypes` is `ml-dtypes`."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def _sources() -> set[str]:
    """The paths, as imported, of every file that a package must hold."""
    found = {"planner/py.typed", "planner/bench/corpus.csv", "planner/cost/cards.json"}
    found.add("planner/kernels/tiled_product/tiles.json")
    for top, prefix in (("planner", ""), ("backends", "planner/"), ("kernels", "planner/")):
        files = [path for ending in ("py", "css") for path in (ROOT / top).rglob(f"*.{ending}")]
        found |= {prefix + path.relative_to(ROOT).as_posix() for path in files}
    return found


def _python(*arguments: object, cwd: pathlib.Path, path: object = "", python: object = sys.executable) -> str:
    """What Python prints, which sees nothing of this checkout but by the path."""
    return run(python, *arguments, cwd=cwd, PYTHONPATH=str(path))


BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
WHERE = """
import importlib.util, pathlib
for name in ("planner", "planner.language.spec", "planner.kernels.grouping.keys", "planner.backends.protocol"):
    print(name, pathlib.Path(importlib.util.find_spec(name).origin).resolve())
"""


def _within(folder: pathlib.Path, printed: str) -> bool:
    """Whether the four modules that WHERE prints lie in a folder."""
    origins = [pathlib.Path(line.split()[1]) for line in printed.splitlines()]
    return len(origins) == 4 and all(origin.is_relative_to(folder.resolve()) for origin in origins)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what a clone holds, symlinks kept, to build in without leaving traces here."""
    copy = tmp_path_factory.mktemp("clone") / "tree"
    copy.mkdir()
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("planner", "backends", "kernels"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=junk)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def _build(kind: str, tree: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    return out / _python("-c", BUILD, kind, out, cwd=tree).split()[-1]


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    return _build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    return _build("sdist", tree, tmp_path_factory.mktemp("sdist"))


def _wheel_sources(wheel: pathlib.Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_symlinks():
    for name in ("backends", "kernels"):
        link = ROOT / "planner" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists()


def test_packages_are_all_listed():
    found = {source.rsplit("/", 1)[0].replace("/", ".") for source in _sources()}
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_wheel_holds_the_real_files(wheel):
    assert _wheel_sources(wheel) == _sources()
    with zipfile.ZipFile(wheel) as archive:
        for name in _sources():
            assert archive.read(name) == (ROOT / name).read_bytes()
        info = "contraction_planner-" + PYPROJECT["project"]["version"] + ".dist-info/"
        metadata = archive.read(info + "METADATA").decode()
        assert archive.read(info + "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in metadata


def test_sdist_holds_the_real_files_and_builds_the_same_wheel(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        top = archive.getnames()[0].split("/")[0]
        members = {member.name: member for member in archive.getmembers()}
        for name in _sources():
            assert members[f"{top}/{name}"].isfile()
        archive.extractall(tmp_path, filter="data")
    out = tmp_path / "wheel"
    out.mkdir()
    assert _wheel_sources(_build("wheel", tmp_path / top, out)) == _sources()


def test_wheel_installs_and_imports(wheel, tmp_path):
    site = tmp_path / "site"
    _python("-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    assert _within(site, _python("-c", WHERE, cwd=tmp_path, path=site))


def test_editable_install(tree, tmp_path):
    _python("-m", "venv", "--system-site-packages", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    base = _python("-c", "import numpy; print(numpy.__path__[0] + '/..')", cwd=tmp_path).strip()
    options = ["-q", "--no-deps", "--no-build-isolation", "--editable", tree]
    # The new interpreter does not see this environment's packages: setuptools comes to the build by its path.
    _python("-m", "pip", "--python", python, "install", *options, cwd=tmp_path, path=base)
    for folder in (tmp_path, tree):
        where = f"import sys; sys.path.append({base!r})\n{WHERE}"
        assert _within(tree, _python("-c", where, cwd=folder, python=python))


def test_plain_pythonpath(tmp_path):
    lines = _python("-c", WHERE, cwd=tmp_path, path=ROOT).splitlines()
    folders = {pathlib.Path(line.split()[1]).parent.relative_to(ROOT).as_posix() for line in lines}
    assert folders == {"planner", "planner/language", "backends", "kernels/grouping"}


def test_version_is_one():
    version = PYPROJECT["project"]["version"]
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
    import planner

    assert getattr(planner, "__version__", version) == version
    # Nothing when run from the tree alone.
    installed = {found.version for found in importlib.metadata.distributions(name="contraction-planner")}
    assert installed <= {version}


def test_every_requirement_is_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(PIN.match(line) for line in lines)
    pins = {_name(line) for line in lines}
    assert _name(lines[0]) == "torch"
    assert len(pins) == len(lines)
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *PYPROJECT["build-system"]["requires"], *PYPROJECT["dependency-groups"]["dev"]]
    asked += itertools.chain(*project["optional-dependencies"].values())
    assert {_name(requirement) for requirement in asked} - pins == set()


def test_every_install_passes_the_constraints():
    makefile = (ROOT / "Makefile").read_text()
    installs = [line for line in makefile.splitlines() if "pip install" in line]
    assert len(installs) == 1
    assert "--constraint constraints.txt" in installs[0]


def test_extras():
    assert set(PYPROJECT["project"]["optional-dependencies"]) == {
        "torch",
        "jax",
        "cuda",
        "testing",
        "viz",
        "large",
        "shell",
    }
    assert PYPROJECT["project"]["requires-python"] == ">=3.11,<3.14"
