"""`patch`: within a `with`, the einsum of each framework is planner's, however a program imported it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from planner.dropin.einsum import einsum_in, read_arguments
from planner.language.errors import PlannerError
from planner.language.resolve import shorten
from planner.program.frameworks import BACKENDS, framework_of, load_backend


@dataclasses.dataclass
class Patched:
    """What became of the calls of einsum within a `patch`.

    Example:
        >>> import numpy as np
        >>> import planner
        >>> with planner.patch("numpy") as report:
        ...     _ = np.einsum("ij, jk -> ik", np.eye(2), np.eye(2))
        ...     _ = np.einsum("i->", np.array([1, 2], dtype=object))
        >>> print(report)
        1 call routed, 1 passed on
          1: operand 0: dtype 'object' is not supported; ...

    Attributes:
        routed: how many calls ran on planner.
        passed_on: how many calls the framework's own einsum ran, by the reason why planner refused them.
    """

    routed: int = 0
    passed_on: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __str__(self) -> str:
        calls = f"{self.routed} call{'s' * (self.routed != 1)} routed, {self.passed_on.total()} passed on"
        return "\n".join([calls, *(f"  {count}: {shorten(why)}" for why, count in self.passed_on.most_common())])


@contextlib.contextmanager
def patch(*frameworks: str) -> Iterator[Patched]:
    """Run the einsum of frameworks on planner within a `with`.

    Example:
        >>> import numpy as np
        >>> import planner
        >>> with planner.patch() as report:
        ...     total = np.einsum("ij->", np.ones((2, 3)))
        >>> total, report.routed
        (np.float64(6.0), 1)

    The code of the framework's function itself is replaced, so calls of other functions cost nothing. Modes and objects
    that override torch's functions see a call first. Only calls of the thread that entered the `with` are routed. Calls
    that planner refuses run on the framework's own einsum; `report.passed_on` counts them by reason. A refused call
    with brackets raises planner's error, since no other einsum reads brackets. Patches may be nested; the innermost
    routes.

    A function that `jax.jit` traced before the `with` stays as it was traced, and one that was traced within stays
    routed. `torch.compile` compiles a function once for calls within a patch, and once for others. Calls count each
    time that a compiler traces them. TorchScript has operators of its own, which are not seen.

    Args:
        *frameworks: "torch", "jax", "numpy"; by default those that are imported.

    Yields:
        The report, which counts while calls are made.

    Raises:
        PlannerError: a framework is unknown or not installed.
    """
    names = frameworks or tuple(name for name in BACKENDS if name in sys.modules)
    report = Patched()

    def count(refusal: str) -> bool:
        """Count a call that planner refused for a reason, or that it ran if there is none."""
        if refusal:
            report.passed_on[refusal] += 1
        else:
            report.routed += 1
        return True

    # torch's compiler calls this, as by torch.compiler.assume_constant_result. Tracing it would guard the counts.
    count.__dict__["_dynamo_marked_constant"] = True
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(names):
            route = functools.partial(_route, count, name)
            stack.enter_context(load_backend(name).routing(route))
        yield report


def _route(
    count: Callable[[str], bool],
    framework: str,
    original: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    """Run a call of einsum on planner, or as it was meant if planner refuses it."""
    try:
        spec, operands, read = read_arguments(arguments, dict(options))
        if framework == "torch" and (other := [x for x in operands if framework_of(x) != "torch"]):
            raise PlannerError(f"a {type(other[0]).__name__} is no tensor")
        result = einsum_in(framework, spec, operands, read)
    except PlannerError as error:
        # Only planner reads brackets, so its error is the one to see.
        if arguments and isinstance(arguments[0], str) and "[" in arguments[0]:
            raise
        why = str(error)
    else:
        count("")
        return result
    count(why.splitlines()[0])
    return original(*arguments, **options)
