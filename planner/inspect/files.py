"""Writes what a report says to a file."""

from __future__ import annotations

import os
import pathlib

from planner.language.errors import PlannerError


def save(text: str, path: str | os.PathLike[str] | None) -> str | None:
    """Write a text to a file if a path is given, else return the text.

    Raises:
        PlannerError: the file cannot be written.
    """
    if path is None:
        return text
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise PlannerError(f"nothing was written to {str(path)!r:.200}: {error}") from None
    return None
