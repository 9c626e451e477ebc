"""Who may import whom, read from the source, and what `import planner` loads, seen in a fresh process."""

import ast
import graphlib
import json
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest
from conftest import run_python

ROOT = pathlib.Path(__file__).resolve().parent.parent
FRAMEWORKS = ("torch", "jax", "jaxlib", "triton")

# The rooms of the library, in the order in which they may import one another: a module imports from its own room and
# from those above it, inside functions and for type checkers too. A room is a folder, or a module outside of all.
ROOMS = (
    "planner.version", "planner.progress", "planner.language",
    "planner.kernels.grouping", "planner.kernels.tiled_product", "planner.kernels.segment_sum",
    "planner.kernels.take",
    "planner.kernels.grouped_matmul", "planner.kernels.gathered_dot",
    "planner.cost", "planner.program",
    "planner.backends.common", "planner.backends.numpy", "planner.backends.torch", "planner.backends.jax",
    "planner.search", "planner.run", "planner.members", "planner.workloads", "planner.tune", "planner.inspect",
    "planner.pages",
    "planner.slices", "planner.plan", "planner.compare", "planner.api", "planner.dropin", "planner.groups",
    "planner.audits", "planner.caches", "planner.tradeoff", "planner.sharding", "planner",
    "planner.backends.protocol", "planner.backends.torch_operators",
    "planner.calibrate", "planner.testing", "planner.demo", "planner.bench", "planner.cli", "planner.__main__",
)  # fmt: skip
# Rooms that see less than all above them: what each may import.
RUNNING = ("planner.language", "planner.kernels", "planner.cost", "planner.program", "planner.backends.common")
SEES = {
    "planner.kernels": (
        "planner.kernels",
        "planner.language.cached",
        "planner.language.errors",
        "planner.language.dtypes",
    ),
    "planner.backends.torch": RUNNING,
    "planner.backends.jax": RUNNING,
}
# What plans does not import what computes. `planner.program.frameworks` loads a backend by its name; torch's compiler
# reads a statement in `planner.run`.
PLANNING = ROOMS[: ROOMS.index("planner.testing")]
DYNAMO = ("planner.run", "planner.backends.torch.contexts.dynamo")
BY_NAME = ("planner/program/frameworks.py", "planner/bench/card.py")
# Programs that import what they measure when they are imported.
CARD = ("planner.bench.cards", "planner.bench.ahead_of_time", "planner.bench.training")
MOST_MODULES, MOST_LINES = 14, 450
# How many of its modules `import planner` may load: 98 do today, in some 100 ms of processor time.
MOST_LOADED = 99
# The exact search is one search, the oracle shares no code with what it judges.
LONGER = ("planner.search.exact.dynamic", "planner.testing.reference")
BANNED_CALLS = {"eval", "exec", "__import__"}
BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}


def _named(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module(path: pathlib.Path) -> str:
    """`planner.tree` for planner/tree.py, `planner.backends.x` for backends/x.py."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("backends", "kernels"):
        parts.insert(0, "planner")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def _files(*folders: str) -> list[pathlib.Path]:
    """The real Python files of folders at the top; the symlinks inside planner/ are not walked again."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


TREES = {path: ast.parse(path.read_text(), str(path)) for path in _files("planner", "backends", "kernels")}
MODULES = {_module(path): path for path in TREES}


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement below; `from planner import tree` names planner.tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            base = node.module or ""
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if whole in MODULES or _is_package(whole) else base


def _is_package(name: str) -> bool:
    return any(module.startswith(name + ".") for module in MODULES)


def _within(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def room_of(module: str) -> str:
    """The room that a module stands in."""
    rooms = [room for room in ROOMS if _within(module, room) and (room != "planner" or module == "planner")]
    return max(rooms, key=len, default="")


def violations(path: pathlib.Path, tree: ast.Module) -> list[str]:
    """What one file imports against the order of the rooms."""
    where, module = _named(path), _module(path)
    room = room_of(module)
    if not room:
        return [f"{where}: {module} is in no room: give it a place in ROOMS"]
    place = ROOMS.index(room)
    sees = next((seen for name, seen in SEES.items() if _within(module, name)), None)
    bad = []
    for line, name in _imports(tree):
        if _within(name, "backends", "kernels"):
            bad.append(f"{where}:{line} imports {name}: the import name is planner.{name}")
        if not _within(name, "planner"):
            continue
        below = room_of(name)
        if not below:
            bad.append(f"{where}:{line} imports {name}, which is in no room")
        elif ROOMS.index(below) > place:
            bad.append(f"{where}:{line} imports {name}: {below} comes after {room}")
        if sees is not None and not _within(name, room, *sees):
            bad.append(f"{where}:{line} imports {name}: {room} sees {', '.join(sees)}")
        computes = _within(name, "planner.backends", "planner.kernels")
        plans = room in PLANNING and not _within(module, "planner.backends", "planner.kernels")
        if plans and computes and (module, name) != DYNAMO:
            bad.append(f"{where}:{line} imports {name}: what plans reaches a backend by its name only")
    return bad


def dangerous(path: pathlib.Path, tree: ast.Module) -> list[str]:
    """eval, exec, pickle and the like, and imports by name outside dispatch."""
    where = _named(path)
    bad = [f"{where}:{line} imports {name}" for line, name in _imports(tree) if _within(name, *BANNED_MODULES)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in BANNED_CALLS or called.startswith("builtins."):
            bad.append(f"{where}:{node.lineno} calls {called}")
        if called.split(".")[-1] == "import_module" and where.startswith("planner/") and where not in BY_NAME:
            bad.append(f"{where}:{node.lineno} calls {called}")
    return bad


@pytest.mark.parametrize("path", TREES, ids=_named)
def test_imports_run_one_way(path):
    assert violations(path, TREES[path]) == []


@pytest.mark.parametrize("path", [*TREES, *_files("tests")], ids=_named)
def test_nothing_dangerous(path):
    assert dangerous(path, ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("where", "source", "expected"),
    [
        ("planner/program/tree.py", "from planner.backends.torch import backend", True),
        ("planner/program/tree.py", "def f():\n    import planner.kernels.grouping.keys", True),
        ("planner/program/tree.py", "if TYPE_CHECKING:\n    from planner.search import space", True),
        ("planner/program/tree.py", "def f():\n    from planner import api", True),
        ("planner/program/tree.py", "from planner.language import spec", False),
        ("planner/search/space.py", "from planner.backends.common import stock", True),
        ("planner/run.py", "def f():\n    from planner.backends.torch.contexts import dynamo", False),
        ("planner/api.py", "def f():\n    from planner.backends.torch.contexts import dynamo", True),
        ("planner/language/spec.py", "from planner.cost import device", True),
        ("kernels/grouping/keys.py", "from planner.language import spec", True),
        ("kernels/grouping/keys.py", "from planner.language.errors import IndexRangeError", False),
        ("kernels/grouping/keys.py", "import planner.backends.torch.backend", True),
        ("kernels/grouping/keys.py", "from planner.kernels.gathered_dot import torch_pooled", True),
        ("backends/torch/backend.py", "from planner.kernels.grouping import keys", False),
        ("backends/torch/backend.py", "from kernels.grouping import keys", True),
        ("backends/jax/backend.py", "from planner.backends.torch.contexts import modes", True),
        ("backends/jax/backend.py", "def f():\n    from planner.search import choose", True),
        ("backends/cupy/backend.py", "", True),
        ("planner/cost/device.py", "from planner.nowhere import thing", True),
    ],
)
def test_the_test_of_the_order_can_fail(where, source, expected):
    assert bool(violations(ROOT / where, ast.parse(source))) == expected


@pytest.mark.parametrize("source", ["eval('1')", "exec(s)", "import pickle", "importlib.import_module(name)"])
def test_the_danger_test_can_fail(source):
    assert dangerous(ROOT / "planner" / "program" / "tree.py", ast.parse(source)) != []


def test_no_module_imports_itself_over_others():
    """Every import counts: inside functions and for type checkers too. `import planner` is what users write."""
    graph = {
        module: {name for _, name in _imports(TREES[path]) if name in MODULES and name not in ("planner", module)}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names a circle


@pytest.mark.parametrize("folder", dict.fromkeys(path.parent for path in TREES), ids=_named)
def test_a_folder_has_few_modules_and_says_what_it_is_for(folder):
    # `__init__` and what users start do not count as modules of it.
    modules = [path for path in TREES if path.parent == folder and not path.stem.startswith("__")]
    assert len(modules) <= MOST_MODULES
    if folder.name in ("backends", "kernels"):  # roots without code of their own; see test_packaging
        return
    text = ast.get_docstring(TREES[folder / "__init__.py"])
    assert text is not None
    assert len(re.findall(r"[.!?](?:\s|$)", text)) >= 2, "two sentences: what lives there, what may be touched"


def test_every_room_exists():
    assert {room_of(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module):
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= MOST_LINES or module in LONGER


IMPORT = """
import json, sys
import numpy, opt_einsum
before = set(sys.modules)
import planner
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_planner_loads_little():
    """No framework, no tool, no package but NumPy and opt_einsum; of its own modules those that plans are made with."""
    loaded = json.loads(run_python(IMPORT))
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"planner"}
    own = [name for name in loaded if name.startswith("planner.")]
    assert len(own) <= MOST_LOADED
    assert not [name for name in own if name.startswith(("planner.kernels.", "planner.testing", "planner.bench"))]


EACH = """
import importlib, json, sys
import hypothesis  # it loads what it needs of planner.testing, in an order of its own
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(list(sys.modules)))
"""


def test_only_what_computes_loads_a_framework():
    """The others can be imported, and the workload table, the demo and the benchmark listed, without any framework."""
    started = [name for name in MODULES if name.endswith("__main__")]
    others = [m for m in MODULES if not _within(m, "planner.backends", "planner.kernels", *CARD, *started)]
    assert set(json.loads(run_python(EACH, *others))) & set(FRAMEWORKS) == set()


def test_the_names_that_users_rows_need_stay():
    from planner.backends import protocol

    assert protocol.Lowering is protocol.Implementation
    assert protocol.StepCost.__name__ == "StepCost"
    assert protocol.Work.__name__ == "Work"


def test_the_operators_that_exported_graphs_name_stay(torch):
    registered = "torch.ops.planner.forward.default, torch.ops.planner.backward.default"
    run_python(f"import torch, planner.backends.torch_operators\n{registered}")
