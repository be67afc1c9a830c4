"""Standard streams that are closed or cannot be written to."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO

from pyllm.commands.console import note


def prepare() -> None:
    """Make up for streams that were closed before the program started. Without standard output it ends here.

    Raises:
        SystemExit: standard output is closed.
    """
    stdout_closed = sys.stdout is None
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:
            _point_to_nothing(number)  # or the next file to be opened takes the number, and gets what is printed
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    if stdout_closed:
        note("Error: standard output is closed, where the result was to go")
        sys.exit(1)


def finish(status: str | int | None) -> str | int | None:
    """Write out what is still held back, so that nothing can fail at interpreter exit; returns the exit status."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        error = _flush(stream)
        if error is None:
            continue
        if number == 1 and not status:
            note(f"Error: {error.strerror or error}")
            status = 1
        _point_to_nothing(number)
    return status


def _flush(stream: IO[str] | None) -> OSError | None:
    try:
        if stream is not None:
            stream.flush()
    except OSError as error:
        return error
    return None


def _point_to_nothing(number: int) -> None:
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing != number:
            os.dup2(nothing, number)
            os.close(nothing)
