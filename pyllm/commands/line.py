"""Reading lines that a person types at a terminal."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def at_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_line(marker: str) -> str:
    """A line from the terminal, with editing and history where Python has readline. The marker goes to stderr.

    Raises:
        EOFError: there are no more lines (Ctrl-D).
        KeyboardInterrupt: Ctrl-C.
        UnicodeDecodeError: what was typed is not of the terminal's encoding.
    """
    # input() writes the marker to file descriptor 1, and readline the edited line; standard output is for answers.
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() uses it from then on)
        return input(marker)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
