"""Long searches are remembered on disk, so that another process need not repeat them.

How long a search took is counted: in steps that the backend's table priced. So a plan never depends on a clock, and it
is the same whether it was searched or read.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from planner.cost.store import disk_enabled, recall, remember, warn_of_damage
from planner.language.errors import PlannerError
from planner.language.options import SEARCHES
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.plan import PlanRecord
from planner.program.program import Programs
from planner.program.serial import decode, encode
from planner.program.tree import Leaf, Node, Tree
from planner.search.paths import PATH_NAMES
from planner.version import __version__

# A search that priced fewer steps is not remembered: 200 take some 50 ms. Reading a plan takes 2 to 20 ms.
LEAST_PRICED = 200
# The disk is not asked about a contraction without limits of which the exact search would score fewer steps: the
# question takes 0.3 ms. Six operands have 364 steps, seven 1,093.
LEAST_WORK = 1_000
# What the choice of a plan depends on: the folders of their modules, below `planner`.
_FOLDERS = ("language", "cost", "program", "search", "search/*", "backends/common", "backends/{}", "backends/{}/*",
            "kernels/*")  # fmt: skip

# What reading an entry may raise that is none of ours, or that someone changed.
_DAMAGE = (PlannerError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError,
           RecursionError)  # fmt: skip


def remembered(contraction: Contraction, loops: bool, search: Callable[[], PlanRecord]) -> PlanRecord:
    """Return the plan that is on disk, or else search it, and remember it if the search was long.

    A search that Ctrl-C or a deadline ended is not remembered.

    Args:
        contraction: what to plan.
        loops: whether the plan may be a loop over slices.
        search: searches the plan.
    """
    key = _key(contraction, loops) if _may_take_long(contraction) and disk_enabled() else None
    if key is None:
        return search()

    def make(value: Mapping[str, Any], tree: Tree, programs: Programs) -> PlanRecord:
        proven, origin = value["proven"], value["origin"]
        if not (isinstance(proven, bool) and isinstance(origin, str)):
            raise ValueError("it holds no plan")
        return PlanRecord.of_contraction(contraction, tree=tree, programs=programs, proven=proven, origin=origin)

    plan = recall_plan("searched", key, make)
    if plan is not None:
        return plan
    table = load_backend(contraction.backend).table
    before = table.priced
    plan = search()
    ended = plan.interrupted or (contraction.options.deadline is not None and not plan.proven)
    if table.priced - before >= LEAST_PRICED and not ended:
        parts = {name: encode(getattr(plan, name)) for name in ("tree", "programs", "proven", "origin")}
        remember("searched", key, parts, quiet=True)
    return plan


def _may_take_long(contraction: Contraction) -> bool:
    options, spec = contraction.options, contraction.resolved.spec
    return options.limited or 3 ** (len(spec.inputs) + len(spec.gathers)) // 2 >= LEAST_WORK


def _key(contraction: Contraction, loops: bool) -> dict[str, Any] | None:
    """Return everything that the choice depends on, as JSON; None if a function, or a row of the user's own, is part.

    Whether either has changed cannot be known.
    """
    options, backend = contraction.options, load_backend(contraction.backend)
    known = isinstance(options.optimize, tuple) or options.optimize in (*SEARCHES, *PATH_NAMES)
    if callable(options.minimize) or not known or backend.table.has_changed:
        return None
    return {
        "planner": __version__,
        "code": _code(contraction.backend),
        "opt_einsum": version("opt_einsum"),
        "cotengrust": version("cotengrust") if find_spec("cotengrust") else None,
        "environment": backend.environment(()),
        "rows": _digest("\n".join(backend.table.rows).encode()),
        "backend": contraction.backend,
        "device": encode(contraction.device),
        "resolved": encode(contraction.resolved),
        "operands": encode(contraction.operands),
        "dtype": contraction.dtype,
        "index_mode": contraction.index_mode,
        "options": encode(options),
        "gradient_strides": encode(contraction.gradient_strides),
        "mesh": encode(contraction.mesh),
        "loops": loops,
        "symbols": bool(contraction.symbols),
    }


@functools.lru_cache(maxsize=8)
def _code(backend: str) -> str:
    """Return a digest of the library's own code: a change of a price or a search in it makes other plans."""
    folder = pathlib.Path(sys.modules["planner"].__file__ or "").parent
    files = sorted(path for pattern in _FOLDERS for path in folder.glob(f"{pattern.format(backend)}/*.py"))
    return _digest(b"\0".join(path.read_bytes() for path in files))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def recall_plan(
    kind: str, key: Mapping[str, Any], make: Callable[[Mapping[str, Any], Tree, Programs], PlanRecord]
) -> PlanRecord | None:
    """Return a plan that is remembered, if the backend has all of its implementations at the same costs; else None.

    Args:
        kind: the kind of entry.
        key: its key.
        make: makes the plan of the entry, its tree and its programs. It raises a ValueError if the entry is damaged.
    """
    value = recall(kind, key)
    if value is None:
        return None
    try:
        tree, programs = decode(value["tree"]), decode(value["programs"])
        if not (isinstance(tree, Leaf | Node) and isinstance(programs, Programs)):
            raise ValueError("it holds no plan")
        plan = make(value, tree, programs)
        table = load_backend(plan.backend).table
        offered = all(table.offers(step.choice, step.op, part.device) for part, step in plan.inner_steps(every=True))
    except _DAMAGE as error:
        warn_of_damage(kind, key, error)
        return None
    return plan if offered else None
