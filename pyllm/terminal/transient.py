"""A line on stderr that changes in place and is gone when something else is to be shown; only on terminals.

No control sequences but carriage returns: it works on every terminal, and no colour needs to be allowed.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress

_EVERY = 0.1  # seconds


class TransientLine:
    """Shown at most ten times a second, and only once `delay` seconds have passed: what is quick needs no words.

    Args:
        delay: seconds since this object was made.
    """

    def __init__(self, delay: float = 0.5) -> None:
        self._is_on = sys.stderr.isatty()
        self._next = time.monotonic() + delay
        self._width = 0

    def show(self, text: str, at_once: bool = False) -> None:
        """Put a text, ASCII, in place of what is shown.

        Args:
            at_once: if nothing is shown yet, do not wait for the delay to pass.
        """
        now = time.monotonic()
        if not self._is_on or (now < self._next and (self._width or not at_once)):
            return
        self._next = now + _EVERY
        text = text[: shutil.get_terminal_size().columns - 1]
        self._write(text + " " * (self._width - len(text)))
        self._width = len(text)

    def clear(self) -> None:
        """Take it away."""
        if self._width:
            self._write(" " * self._width)
            self._width = 0

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(f"\r{text}\r")
            sys.stderr.flush()
