"""The examples in docstrings run as they stand, and every name on the page of the API has one, there or elsewhere.

Modules that only run with a framework are left out.
"""

from __future__ import annotations

import doctest
import importlib
import operator
import pathlib
import pkgutil
import re
import types

import pytest

import planner
import planner.audits.report
import planner.testing

FRAMEWORKS = ("torch", "jax", "triton", "pallas", "demo", "bench", "measure")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(planner.__path__, "planner.")
    if not any(word in module.name for word in (*FRAMEWORKS, "__main__"))
]


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("name", ["planner", *MODULES])
def test_examples_run(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert failed == 0


ROOT = pathlib.Path(__file__).parent.parent
API = (ROOT / "docs" / "guide" / "api.rst").read_text(encoding="utf-8")
# What the page says of itself: modules with all that they export, classes beside them, and methods that it leaves out.
LISTED = [
    *(getattr(module, name) for module in (planner, planner.testing) for name in module.__all__),
    *(operator.attrgetter(path)(planner) for path in re.findall(r"autoclass:: planner\.([\w.]+)", API)),
]
LEFT_OUT = re.findall(r"\w+", re.search(r":exclude-members:(.*?)\n\n", API, re.DOTALL)[1])
NAMED = {thing.__qualname__: thing for thing in LISTED if callable(thing)}


def _examples():
    """All code that tests run and the site shows: examples of docstrings, and blocks of Python on the pages."""
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, ["planner", *MODULES])
    code = [example.source for module in modules for test in finder.find(module) for example in test.examples]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        code += re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return "\n".join(code)


def _methods(kind):
    """The public methods of a class that are the library's own and on the page."""
    for owner in kind.__mro__:
        if not owner.__module__.startswith("planner."):
            continue
        for name, member in vars(owner).items():
            if isinstance(member, types.FunctionType | classmethod | staticmethod) and name[0] != "_":
                yield name


@pytest.mark.parametrize("name", NAMED)
def test_every_name_of_the_api_says_what_it_is_by_an_example(name):
    doc = NAMED[name].__doc__ or ""
    assert len(doc.splitlines()[0]) > 20
    assert ">>>" in doc


def test_every_method_of_the_api_is_in_an_example():
    code = _examples()
    classes = [thing for thing in NAMED.values() if isinstance(thing, type)]
    assert len(classes) > 20
    methods = {(kind.__name__, name) for kind in classes for name in _methods(kind) if name not in LEFT_OUT}
    assert len(methods) > 30
    assert sorted((kind, name) for kind, name in methods if f".{name}(" not in code) == []
    everything = {name for kind in classes for name in _methods(kind)}
    assert sorted(set(LEFT_OUT) - everything) == []
    assert all(
        kind.__dict__[name].__doc__ for kind in classes for name in vars(kind) if (kind.__name__, name) in methods
    )
