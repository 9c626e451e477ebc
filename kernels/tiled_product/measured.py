"""Tiles that were measured on a card, in place of those that `triton_tiles.tiles_of` chooses from sizes alone.

``python -m planner.bench.card --adopt FOLDER`` writes `tiles.json` beside this module: for each compute capability, the
fastest tiles by *bucket*. A bucket is a choice's other arguments, with sizes rounded up to powers of two. Tiles depend
on nothing else, so equal calls on equal cards still run equal programs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

FILE = pathlib.Path(__file__).with_name("tiles.json")
_Choice = TypeVar("_Choice", bound=Callable[..., Any])
# What `forced` puts in place of the chosen tiles: a function of a bucket and the tiles.
_forces: list[Callable[[str, Any], Any]] = []


@functools.cache
def read_tiles() -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    """Return the fields of measured tiles by capability and bucket; nothing if none were adopted."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


@functools.cache
def _capability() -> str:
    """Return the compute capability of the current card, times ten; "" without one, and on AMD."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return ""
    return "{}{}".format(*torch.cuda.get_device_capability())


def bucket_of(arguments: Mapping[str, Any]) -> str:
    """Return the bucket of a choice of tiles.

    >>> bucket_of({"mode": "rows", "m": 65, "n": 64, "k": 3, "itemsize": 4})
    'mode=rows m=128 n=64 k=4 itemsize=4'
    """
    rounded = {
        name: 1 << max(0, value - 1).bit_length() if name in ("m", "n", "k") else value
        for name, value in arguments.items()
        if name not in ("tiling", "capability")
    }
    return " ".join(f"{name}={value}" for name, value in rounded.items())


def measurable(choose: _Choice) -> _Choice:
    """Make a function that chooses tiles return the measured ones, where there are some and no tiling is asked for."""
    signature = inspect.signature(choose)

    def find(*arguments: Any, **named: Any) -> Any:
        tiles = choose(*arguments, **named)
        if not (_forces or read_tiles()):
            return tiles
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        if bound.arguments.get("tiling"):
            return tiles
        bucket = bucket_of(bound.arguments)
        for force in _forces:
            return force(bucket, tiles)
        fields = read_tiles().get(_capability(), {}).get(bucket)
        return tiles if fields is None else type(tiles)(**fields)

    known = functools.lru_cache(maxsize=4096)(find)

    @functools.wraps(choose)
    def chosen(*arguments: Any, **named: Any) -> Any:
        return (find if _forces else known)(*arguments, **named)

    return chosen  # type: ignore[return-value]


@contextlib.contextmanager
def forced(force: Callable[[str, Any], Any]) -> Iterator[None]:
    """Let calls take the tiles that a function makes of a bucket and of the tiles that were chosen."""
    _forces.append(force)
    try:
        yield
    finally:
        _forces.remove(force)
