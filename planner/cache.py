"""Files that outlive a process: the folder for them, and writing one in a single move."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import tempfile

__all__ = ["cache_folder", "replace_file"]


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


def replace_file(path: pathlib.Path, text: str) -> None:
    """Write a file under another name and rename it: a reader sees the old one, the new one or none.

    Whatever happens before the renaming leaves the old file in place, and nothing beside it.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(prefix=".writing-", suffix=".tmp", dir=path.parent)
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
