"""A progress bar, for commands that take minutes."""

from __future__ import annotations

import sys


class Progress:
    """One line on stderr that is overwritten again and again; if stderr is not a terminal, nothing is written.

    Args:
        total: how often the bar will be called.
        beside: format of the text beside the bar, with `done` (the calls so far), `total` and `what` (what begins now).
    """

    def __init__(self, total: int, beside: str = "{what:.50}") -> None:
        self.total, self.done, self.beside = total, 0, beside

    def __call__(self, what: str) -> None:
        """Show what begins now."""
        if sys.stderr.isatty():
            filled = 24 * self.done // max(1, self.total)
            text = self.beside.format(done=self.done, total=self.total, what=what)
            sys.stderr.write(f"\r[{'#' * filled}{'.' * (24 - filled)}] {text}\033[K")
            sys.stderr.flush()
        self.done += 1

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
