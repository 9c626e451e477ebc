"""Measurements that are remembered between processes: one JSON file for each entry, in the user's cache folder.

Reading a file never runs code from it. It is JSON, and the program that reads it checks what it says. A damaged file is
ignored, and so is a file with another key, version or machine. Entries are written under a temporary name and then
renamed. So a reader in another process sees the old entry, the new one or none.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from planner.cost.files import cache_folder, read_file, replace_file

__all__ = ["entry_path", "recall", "remember"]

FORMAT = 1
# No plan takes nearly so much. A longer file is not read.
MOST_BYTES = 2**26
_WARNED: set[pathlib.Path | None] = set()


def entry_path(kind: str, key: Mapping[str, Any]) -> pathlib.Path | None:
    """Return the file of an entry: in the folder of its kind, named by the key's hash; None if the user has no home."""
    try:
        return cache_folder() / f"{kind}-{FORMAT}" / f"{_digest(key)[:40]}.json"
    except OSError:
        return None


def recall(kind: str, key: Mapping[str, Any]) -> Any:
    """Return the value that was remembered under a key, or None.

    Example:
        >>> remember("example", {"spec": "ij -> ji"}, {"seconds": 1.5})
        >>> recall("example", {"spec": "ij -> ji"})
        {'seconds': 1.5}
        >>> recall("example", {"spec": "ij -> i"})

    A file that is damaged or cannot be read is ignored. A warning names it, once in each process.
    """
    path = entry_path(kind, key)
    if path is None:
        return None
    try:
        entry = json.loads(read_file(path, MOST_BYTES), parse_constant=_refuse)
        if entry["format"] != FORMAT or entry["key"] != json.loads(_text(key)):
            return None
        if entry["checksum"] != _digest(entry["value"]):
            raise ValueError("its checksum differs")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        warn_of_damage(kind, key, error)
        return None
    return entry["value"]


def warn_of_damage(kind: str, key: Mapping[str, Any], why: object) -> None:
    """Warn that the file of an entry is damaged, once for each file."""
    path = entry_path(kind, key)
    _warn(path, f"ignoring {path}, which is damaged ({why}); deleting it is safe")


def remember(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Write an entry in place of an older one. If the file cannot be written, warn once."""
    path = entry_path(kind, key)
    if path is None:
        return
    entry = {"format": FORMAT, "key": key, "value": value, "checksum": _digest(value)}
    try:
        replace_file(path, json.dumps(entry, indent=1, allow_nan=False))
    except OSError as error:
        _warn(path.parent, f"nothing can be remembered in {path.parent} ({error}): PLANNER_CACHE names another folder")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _warn(about: pathlib.Path | None, message: str) -> None:
    if about not in _WARNED:
        _WARNED.add(about)
        warnings.warn(message, stacklevel=2)
