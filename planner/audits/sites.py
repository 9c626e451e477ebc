"""What an audit records: a site for each line of a program that multiplies, with its calls."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import os
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from planner.audits.expression import Problem
from planner.audits.replay import Today

# Packages whose frames are not the user's program; our own files, and those of them that watch it.
_LIBRARIES = ("torch", "jax", "jaxlib", "einops", "opt_einsum", "contextlib", "functools")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_WATCHING = (os.path.join(_OURS, "audits"), os.path.join(_OURS, "backends", "torch", "contexts", "routing"))

# The code that `torch.fx` writes.
_GENERATED = "<eval_with_key>"
# A name has at most two dots.
_DEPTH = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A line of a program."""

    file: str
    line: int

    @property
    def code(self) -> str:
        """The text of the line; "" if the file is not at hand."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{os.path.relpath(self.file) if os.path.isabs(self.file) else self.file}:{self.line}"


@dataclasses.dataclass(slots=True)
class Call:
    """One call at a place.

    Attributes:
        place: where it is.
        function: what was called.
        problem: what the call computes.
        today: the calls that compute it; None if the audit does not measure.
        backward: whether JAX derived the call from one at that line, for a gradient.
    """

    place: Place
    function: str
    problem: Problem
    today: Today | None = None
    backward: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What one call takes, gradients included.

    Example:
        >>> import jax.numpy as jnp
        >>> import planner
        >>> (site,) = planner.audit(lambda x, w: x @ w, jnp.ones((3, 4)), jnp.ones((4, 5)))
        >>> site.today.peak_bytes, site.planned.retained_bytes, site.today.measured
        (60, 0, False)

    Attributes:
        seconds: the time.
        peak_bytes: most bytes that are newly allocated at any moment, the result included.
        retained_bytes: bytes kept for the backward pass.
        copied_bytes: bytes of operands that are copied into another order, and of rows that are read. Never measured.
        measured: whether the other figures were measured.
        noise: seconds between the lower quartile of the measured times and their median; 0.0 if nothing was measured.
    """

    seconds: float
    peak_bytes: int
    retained_bytes: int
    copied_bytes: int
    measured: bool = False
    noise: float = 0.0


class Record:
    """The calls of a program. A call that another one completes, as a sum completes a product, gives way to it."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._next = 0

    def add(self, call: Call, completes: tuple[int, ...] = ()) -> int:
        """Add a call in place of those that it completes; return its number."""
        for number in completes:
            self._calls.pop(number, None)
        self._next += 1
        self._calls[self._next] = call
        return self._next

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)


def user_frame() -> FrameType | None:
    """Return the innermost frame that belongs to no library; None within a call of planner itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            if not file.startswith(_WATCHING):
                return None
        elif (
            not file.startswith(_GENERATED)
            and str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES
        ):
            return frame
        frame = frame.f_back
    return None


def find_place(frame: FrameType | None) -> Place:
    """Return the line that a frame is at."""
    return Place(frame.f_code.co_filename, frame.f_lineno) if frame is not None else Place("?", 0)


def name_in(frame: FrameType | None, value: Any) -> str:
    """Return what a frame calls a value: a variable, or an attribute of one such as ``self.down.weight``; else ""."""
    if frame is None:
        return ""
    for scope in (frame.f_locals, frame.f_globals):
        held = [(name, found) for name, found in scope.items() if name.isidentifier()]
        for _ in range(_DEPTH):
            for name, found in held:
                if found is value:
                    return name
            held = [inner for name, found in held for inner in _attributes(name, found)]
    return ""


def _attributes(name: str, owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, parameters and parts of a module too, by dotted names."""
    held = None
    with contextlib.suppress(Exception):  # proxies may raise anything
        held = None if isinstance(owner, type | ModuleType) else getattr(owner, "__dict__", None)
    if not isinstance(held, dict):
        return
    for table in (held, *(held.get(part) for part in ("_parameters", "_buffers", "_modules"))):
        if isinstance(table, dict):
            for attribute, inner in table.items():
                if isinstance(attribute, str) and attribute.isidentifier():
                    yield f"{name}.{attribute}", inner
