"""The examples in docstrings of modules that need no framework beyond numpy run as they stand."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import planner

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


@pytest.mark.parametrize("name", [name for name in planner.__all__ if callable(getattr(planner, name))])
def test_public_functions_and_classes_say_what_they_are(name):
    kind = getattr(planner, name)
    doc = kind.__doc__ or ""
    assert len(doc.splitlines()[0]) > 20
    if not (isinstance(kind, type) and (issubclass(kind, Exception) or "Cost" in name or name == "Gather")):
        assert ">>>" in doc
