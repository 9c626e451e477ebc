"""Files that outlive a process: the folder for them, reading one, and writing one in a single move."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import stat
import sys
import tempfile
import time

__all__ = ["cache_folder", "read_file", "replace_file"]

# No write takes as long: a file that is being written and is older was left by a process that was killed.
ABANDONED_SECONDS = 3600
TEMPORARY = ".writing-"


def cache_folder() -> pathlib.Path:
    """Return the folder that the library may write to: PLANNER_CACHE, else `planner` in the user's cache folder.

    Example:
        >>> str(cache_folder()) == os.environ.get("PLANNER_CACHE", str(cache_folder()))
        True

    Returns:
        The folder, which need not exist.

    Raises:
        OSError: the user has no home folder.
    """
    if given := os.environ.get("PLANNER_CACHE"):
        return pathlib.Path(given)
    # By the standard a relative path there is to be ignored.
    if (given := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(given):
        return pathlib.Path(given, "planner")
    if sys.platform == "win32" and (given := os.environ.get("LOCALAPPDATA")):
        return pathlib.Path(given, "planner", "Cache")
    try:
        home = pathlib.Path.home()
    except RuntimeError as error:
        raise OSError(f"no cache folder: {error}; set PLANNER_CACHE") from None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "planner"


def read_file(path: pathlib.Path, most_bytes: int) -> str:
    """Return what a file holds.

    Raises:
        OSError: there is no such file, or it cannot be read; a pipe or a device, which may never end, is not.
        ValueError: it is longer than `most_bytes`, or no UTF-8.
    """

    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # for a pipe's writer, as `open` would

    with open(path, "rb", opener=without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError("it is too long")
    return data.decode()


def replace_file(path: pathlib.Path, text: str) -> None:
    """Write a file under another name and rename it: a reader sees the old one, the new one or none.

    Whatever happens before the renaming leaves the old file in place, and nothing beside it; but where the process is
    killed, the other file is left, and removed by a later write to the folder.

    Raises:
        OSError: the folder cannot be written.
    """
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
    """Remove what killed writers left; a process looks at a folder once."""
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()
