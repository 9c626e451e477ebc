"""Routes the calls of a Python function, whatever name or object they come by."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from planner.language.errors import PlannerError

# What runs a call instead: it takes the function that was called, the arguments and the keywords.
Route = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_OWN = ("planner.backends.", "planner.kernels.")
_ROUTINGS: dict[str, Routing] = {}


class Routing:
    """Routes the calls of one function, for the threads that ask for it.

    The code of the function itself is replaced, because programs bind it to names, defaults and attributes of their
    own. The first route that is entered replaces it, and the last one puts it back.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Any],
        overridden: Callable[..., bool] | None = None,
        serves: Callable[[], bool] | None = None,
    ) -> None:
        """Say what is routed.

        Args:
            name: the name of the framework.
            find: returns the function.
            overridden: says whether others are to see a call first.
            serves: says whether the framework started the thread that asks, to work for another one.
        """
        self.name, self.find, self.overridden, self.serves = name, find, overridden, serves
        self.lock = threading.Lock()
        self.entered: list[Route] = []  # of all threads
        self.mine = threading.local()
        self.function: Any = None
        self.original: Any = None
        # The same in each replacement: torch's compiler compares it to know whether what it traced is routed.
        constants = _replaced.__code__.co_consts
        self.code = _replaced.__code__.replace(co_consts=tuple(name if x == _NAME else x for x in constants))
        _ROUTINGS[name] = self

    @contextlib.contextmanager
    def __call__(self, route: Route) -> Iterator[None]:
        """Route the calls that this thread makes."""
        with self.lock:
            if not self.entered:
                self._replace()
            self.entered.append(route)
        routes = self.mine.__dict__.setdefault("routes", [])
        routes.append(route)
        try:
            yield
        finally:
            routes.remove(route)
            with self.lock:
                self.entered.remove(route)
                if not self.entered:
                    self.function.__code__ = self.original.__code__

    def _replace(self) -> None:
        """Replace the function's code, and keep a function of the old one."""
        f = self.function = self.find()
        if not isinstance(f, types.FunctionType) or f.__closure__:
            raise PlannerError(f"the einsum of this version of {self.name} is no plain Python function to route")
        self.original = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__)
        self.original.__kwdefaults__ = f.__kwdefaults__
        f.__code__ = self.code

    def call(self, arguments: tuple[Any, ...], options: dict[str, Any], caller: str) -> Any:
        """Run a call of the function; the library's own are not routed, whenever XLA makes them."""
        routes = getattr(self.mine, "routes", None)
        if not routes and self.serves is not None and self.serves():
            routes = list(self.entered)
        if (
            not routes
            or getattr(self.mine, "running", False)
            or caller.startswith(_OWN)
            or (self.overridden and self.overridden(arguments))
        ):
            return self.original(*arguments, **options)
        self.mine.running = True  # what a route calls is not routed again
        try:
            return routes[-1](self.original, arguments, options)
        finally:
            self.mine.running = False


# `_replaced` repeats it: its code runs among the globals of another function, which has no such name.
_NAME = "name of a framework"


def _replaced(*arguments: Any, **options: Any) -> Any:
    """The code of a routed function. It runs among the globals of that function, and with a name in its constants."""
    from planner.backends.common.routing import route_call

    return route_call("name of a framework", arguments, options)


def route_call(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a call of a routed function."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return _ROUTINGS[name].call(arguments, options, caller)
