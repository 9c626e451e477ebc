"""JSON files that outlive a process: the folder for them, reading one safely, and replacing one atomically.

Reading a file never runs code from it. It is JSON, and the program that reads it checks what it says. Files are written
under a temporary name and then renamed, so a reader in another process sees the old file, the new one or none.

`remember` and `recall` store measurements, a file for each. A damaged file is ignored, and so is a file with another
key or format.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

# No write takes so long. A temporary file that is older was left by a process that was killed.
ABANDONED_SECONDS = 3600
TEMPORARY = ".writing-"
FORMAT = 1
# No plan takes nearly so much. A longer file is not read.
MOST_BYTES = 2**26
_WARNED: set[pathlib.Path | None] = set()
_ENABLED = True
# How many files a folder may hold when a process first writes to it: the oldest are removed.
MOST_FILES = 4_096


def cache_folder() -> pathlib.Path:
    """Return the folder that the library may write to: PLANNER_CACHE, or else `planner` in the user's cache folder.

    Example:
        >>> str(cache_folder()) == os.environ.get("PLANNER_CACHE", str(cache_folder()))
        True

    Returns:
        The folder. It may not exist yet.

    Raises:
        OSError: the user has no home folder.
    """
    if folder := os.environ.get("PLANNER_CACHE"):
        return pathlib.Path(folder)
    # The XDG standard says to ignore a relative path here.
    if (folder := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(folder):
        return pathlib.Path(folder, "planner")
    if sys.platform == "win32" and (folder := os.environ.get("LOCALAPPDATA")):
        return pathlib.Path(folder, "planner", "Cache")
    try:
        home = pathlib.Path.home()
    except RuntimeError as error:
        raise OSError(f"no cache folder: {error}; set PLANNER_CACHE") from None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "planner"


def read_json(path: pathlib.Path, most_bytes: int = MOST_BYTES) -> Any:
    """Return what a JSON file says.

    Raises:
        OSError: the file does not exist or cannot be read, or it is a pipe or a device, which may never end.
        ValueError: the file is longer than `most_bytes`, or is not JSON in UTF-8.
        RecursionError: it is nested too deeply.
    """

    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # `open` would wait for a pipe's writer

    with open(path, "rb", opener=without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError("it is too long")
    return json.loads(data.decode(), parse_constant=_refuse)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write a JSON file under a temporary name, then rename it. A reader sees the old file, the new one or none.

    An error before the renaming leaves the old file in place, and removes the temporary one. If the process is killed,
    the temporary file stays until a later process writes to the folder.

    Raises:
        OSError: the folder cannot be written.
    """
    text = json.dumps(value, indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_abandoned(path.parent)
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@functools.lru_cache(maxsize=16)
def _remove_abandoned(folder: pathlib.Path) -> None:
    """Remove the temporary files that killed processes left, and the oldest of too many entries.

    Each process does so once for each folder.
    """
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-MOST_FILES]:
            path.unlink()


def entry_path(kind: str, key: Mapping[str, Any]) -> pathlib.Path | None:
    """Return the file of an entry: in the folder of its kind, named by the key's hash; None if there is no folder."""
    try:
        return cache_folder() / f"{kind}-{FORMAT}" / f"{_digest(key)[:40]}.json"
    except OSError:
        return None


def use_disk(enabled: bool) -> None:
    """Turn on or off whether this process remembers anything on disk. PLANNER_DISK=off turns it off for all."""
    global _ENABLED
    _ENABLED = enabled


def disk_enabled() -> bool:
    """Return whether `remember` and `recall` use the disk."""
    return _ENABLED and os.environ.get("PLANNER_DISK") != "off"


def recall(kind: str, key: Mapping[str, Any]) -> Any:
    """Return the value that was remembered under a key, or None.

    Example:
        >>> remember("example", {"spec": "ij -> ji"}, {"seconds": 1.5})
        >>> recall("example", {"spec": "ij -> ji"})
        {'seconds': 1.5}
        >>> recall("example", {"spec": "ij -> i"})

    A file that is damaged or cannot be read is ignored. A warning names it, once in each process.
    """
    path = entry_path(kind, key) if disk_enabled() else None
    if path is None:
        return None
    try:
        entry = read_json(path)
        if entry["format"] != FORMAT or entry["key"] != json.loads(_text(key)):
            return None
        if entry["checksum"] != _digest(entry["value"]):
            raise ValueError("its checksum differs")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if os.path.exists(path):
            warn_of_damage(kind, key, error)
        return None
    return entry["value"]


def warn_of_damage(kind: str, key: Mapping[str, Any], why: object) -> None:
    """Warn that the file of an entry is damaged, once for each file."""
    path = entry_path(kind, key)
    _warn(path, f"ignoring {path}, which is damaged ({why}); deleting it is safe")


def remember(kind: str, key: Mapping[str, Any], value: Any, quiet: bool = False) -> None:
    """Write an entry in place of an older one. If the file cannot be written, warn once unless `quiet`."""
    path = entry_path(kind, key) if disk_enabled() else None
    if path is None:
        return
    entry = {"format": FORMAT, "key": key, "value": value, "checksum": _digest(value)}
    try:
        write_json(path, entry)
    except OSError as error:
        if not quiet:
            _warn(
                path.parent, f"nothing can be remembered in {path.parent} ({error}): PLANNER_CACHE names another folder"
            )


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
