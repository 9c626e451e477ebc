"""Files that outlive a process: the folder for them, and functions to read one and to replace one atomically."""

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

# No write takes so long. A temporary file that is older was left by a process that was killed.
ABANDONED_SECONDS = 3600
TEMPORARY = ".writing-"


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


def read_file(path: pathlib.Path, most_bytes: int) -> str:
    """Return the text of a file.

    Raises:
        OSError: the file does not exist or cannot be read, or it is a pipe or a device, which may never end.
        ValueError: the file is longer than `most_bytes`, or its text is not UTF-8.
    """

    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # `open` would wait for a pipe's writer

    with open(path, "rb", opener=without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError("it is too long")
    return data.decode()


def replace_file(path: pathlib.Path, text: str) -> None:
    """Write a file under a temporary name, then rename it. A reader sees the old file, the new one or none.

    An error before the renaming leaves the old file in place, and removes the temporary one. If the process is killed,
    the temporary file stays until a later process writes to the folder.

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
    """Remove the temporary files that killed processes left. Each process does so once for each folder."""
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()
