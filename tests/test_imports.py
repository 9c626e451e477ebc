"""Who may import whom, read from the source, and what `import planner` loads, seen in a fresh process."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FRAMEWORKS = ("torch", "jax", "jaxlib", "triton")

# The rooms of the library, in the order in which they may import one another: a module imports from its own room and
# from those above it, inside functions and for type checkers too. A room is a folder, or a module outside of all.
ROOMS = (
    "planner.version", "planner.progress", "planner.language",
    "planner.kernels.grouping", "planner.kernels.tiled_product", "planner.kernels.segment_sum",
    "planner.kernels.grouped_matmul", "planner.kernels.gathered_dot",
    "planner.cost", "planner.program",
    "planner.backends.common", "planner.backends.numpy", "planner.backends.torch", "planner.backends.jax",
    "planner.search", "planner.run", "planner.workloads", "planner.tune", "planner.inspect",
    "planner.plan", "planner.api", "planner.groups", "planner.tradeoff", "planner",
    "planner.backends.protocol", "planner.backends.torch_operators",
    "planner.calibrate", "planner.testing", "planner.demo", "planner.bench", "planner.cli", "planner.__main__",
)  # fmt: skip
# Rooms that see less than all above them: what each may import.
RUNNING = ("planner.language", "planner.kernels", "planner.cost", "planner.program", "planner.backends.common")
SEES = {
    "planner.kernels": ("planner.kernels", "planner.language.errors", "planner.language.dtypes"),
    "planner.backends.torch": RUNNING,
    "planner.backends.jax": RUNNING,
}
# What plans does not import what computes. `planner.program.frameworks` loads a backend by its name; torch's compiler
# reads a statement in `planner.run`.
PLANNING = ROOMS[: ROOMS.index("planner.testing")]
DYNAMO = ("planner.run", "planner.backends.torch.dynamo")
BY_NAME = ("planner/program/frameworks.py", "planner/bench/card.py")
# Programs that run on a card, and import what they measure when they are imported.
CARD = ("planner.bench.torch_card", "planner.bench.jax_card", "planner.bench.ahead_of_time")
MOST_MODULES, MOST_LINES = 14, 450
# How many of its modules `import planner` may load: 58 do today, in some 100 ms of processor time.
MOST_LOADED = 64
# The exact search is one search, the oracle shares no code with what it judges.
LONGER = ("planner.search.dynamic", "planner.testing.reference")
BANNED_CALLS = {"eval", "exec", "__import__"}
BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}


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
    found = []
    for folder in folders:
        for directory, subfolders, names in os.walk(ROOT / folder, followlinks=False):
            subfolders[:] = sorted(s for s in subfolders if s != "__pycache__")
            found += [pathlib.Path(directory, name) for name in sorted(names) if name.endswith(".py")]
    return found


TREES = {path: ast.parse(path.read_text(), str(path)) for path in _files("planner", "backends", "kernels")}
MODULES = {_module(path): path for path in TREES}


def _imports(nodes: list[ast.stmt] | ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement below; `from planner import tree` names planner.tree."""
    for node in ast.walk(nodes) if isinstance(nodes, ast.AST) else (n for s in nodes for n in ast.walk(s)):
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


def _type_checking_lines(tree: ast.Module) -> set[int]:
    """The lines under `if TYPE_CHECKING:`, which no program ever runs."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.body:
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def _top_level(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The imports that run when the module is imported: outside functions and outside `if TYPE_CHECKING:`."""
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
        if inner is not node
    }
    skipped = _type_checking_lines(tree)
    early = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and id(n) not in late]
    for node in early:
        yield from (found for found in _imports([node]) if found[0] not in skipped)


def room_of(module: str) -> str:
    """The room that a module stands in."""
    rooms = [room for room in ROOMS if _within(module, room) and (room != "planner" or module == "planner")]
    return max(rooms, key=len, default="")


def violations(path: pathlib.Path, tree: ast.Module) -> list[str]:
    """What one file imports against the order of the rooms."""
    where, module = path.relative_to(ROOT).as_posix(), _module(path)
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
    if not _within(module, "planner.backends", "planner.kernels", *CARD):
        bad += [
            f"{where}:{line} imports {name} when it is itself imported"
            for line, name in _top_level(tree)
            if _within(name, *FRAMEWORKS)
        ]
    return bad


def dangerous(path: pathlib.Path, tree: ast.Module) -> list[str]:
    """eval, exec, pickle and the like, and imports by name outside dispatch."""
    where = path.relative_to(ROOT).as_posix()
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


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_one_way(path):
    assert violations(path, TREES[path]) == []


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_dangerous(path):
    assert dangerous(path, TREES[path]) == []


def test_tests_unpickle_and_evaluate_nothing():
    for path in _files("tests"):
        tree = ast.parse(path.read_text(), str(path))
        assert [name for _, name in _imports(tree) if _within(name, *BANNED_MODULES)] == [], path
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert calls & BANNED_CALLS == set(), path


@pytest.mark.parametrize(
    ("where", "source", "expected"),
    [
        ("planner/program/tree.py", "from planner.backends.torch import backend", True),
        ("planner/program/tree.py", "def f():\n    import planner.kernels.grouping.keys", True),
        ("planner/program/tree.py", "import torch", True),
        ("planner/program/tree.py", "if True:\n    import jax.numpy as jnp", True),
        ("planner/program/tree.py", "def f():\n    import torch", False),
        ("planner/program/tree.py", "if TYPE_CHECKING:\n    import torch", False),
        ("planner/program/tree.py", "if TYPE_CHECKING:\n    from planner.search import space", True),
        ("planner/program/tree.py", "def f():\n    from planner import api", True),
        ("planner/program/tree.py", "from planner.language import spec", False),
        ("planner/search/space.py", "from planner.backends.common import stock", True),
        ("planner/run.py", "def f():\n    from planner.backends.torch import dynamo", False),
        ("planner/api.py", "def f():\n    from planner.backends.torch import dynamo", True),
        ("planner/language/spec.py", "from planner.cost import device", True),
        ("kernels/grouping/keys.py", "from planner.language import spec", True),
        ("kernels/grouping/keys.py", "from planner.language.errors import IndexRangeError", False),
        ("kernels/grouping/keys.py", "import planner.backends.torch.backend", True),
        ("kernels/grouping/keys.py", "from planner.kernels.gathered_dot import torch_pooled", True),
        ("kernels/grouping/keys.py", "import torch", False),
        ("backends/torch/backend.py", "from planner.kernels.grouping import keys", False),
        ("backends/torch/backend.py", "from kernels.grouping import keys", True),
        ("backends/jax/backend.py", "from planner.backends.torch import modes", True),
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


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The modules that import one another in a circle."""
    reach = {module: set(seen) for module, seen in graph.items()}
    for middle in graph:
        for seen in reach.values():
            if middle in seen:
                seen |= reach[middle]
    together = {tuple(sorted(other for other in seen if module in reach[other])) for module, seen in reach.items()}
    return [list(modules) for modules in together if modules]


def test_no_module_imports_itself_over_others():
    """Every import counts: inside functions and for type checkers too. `import planner` is what users write."""
    graph = {
        module: {name for _, name in _imports(TREES[path]) if name in MODULES and name not in ("planner", module)}
        for module, path in MODULES.items()
    }
    assert circles(graph) == []


def test_the_test_of_circles_can_fail():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def _folders() -> dict[pathlib.Path, list[pathlib.Path]]:
    """The modules of each folder, `__init__` and what users start aside."""
    folders: dict[pathlib.Path, list[pathlib.Path]] = {}
    for path in TREES:
        folders.setdefault(path.parent, []).append(path)
    return folders


@pytest.mark.parametrize("folder", _folders(), ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_folder_has_few_modules_and_says_what_it_is_for(folder):
    modules = [path for path in _folders()[folder] if not path.stem.startswith("__")]
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


def _fresh_process(code: str) -> Any:
    """What the code prints as JSON, run by a new interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


IMPORT = """
import json, sys
import numpy, opt_einsum
before = set(sys.modules)
import planner
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_planner_loads_little():
    """No framework, no tool, no package but NumPy and opt_einsum; of its own modules those that plans are made with."""
    loaded = _fresh_process(IMPORT)
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"planner"}
    own = [name for name in loaded if name.startswith("planner.")]
    assert len(own) <= MOST_LOADED
    assert not [name for name in own if name.startswith(("planner.kernels.", "planner.testing", "planner.bench"))]


def test_tools_load_no_framework():
    """The workload table, the demo and the benchmark can be imported, and listed, without any framework."""
    code = (
        "import json, sys; import planner.workloads, planner.demo.command, planner.bench.command; "
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    assert set(_fresh_process(code)) & set(FRAMEWORKS) == set()


def test_the_names_that_users_rows_and_exported_graphs_need_stay():
    """Rows of a user's own are written with the names of the first; exported graphs name operators of the second."""
    code = (
        "import importlib.util, json; from planner.backends import protocol; "
        "assert protocol.Lowering is protocol.Implementation; found = [protocol.StepCost.__name__]\n"
        "if importlib.util.find_spec('torch'):\n"
        "    import torch, planner.backends.torch_operators\n"
        "    torch.ops.planner.forward.default, torch.ops.planner.backward.default\n"
        "print(json.dumps(found))"
    )
    assert _fresh_process(code) == ["StepCost"]
