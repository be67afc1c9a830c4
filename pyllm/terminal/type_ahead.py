"""What is typed while an answer is shown.

Left alone, the terminal would echo it into the answer, and hand a paste over line by line. Here it is held back, unseen
and whole, until somebody reads again; Ctrl-C still is a signal (and drops what was held). Who pastes more than the
terminal can hold is throttled.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_PASTE_ON = "\x1b[?2004h"  # pastes come between marks
_LOCAL_FLAGS = 3  # of what termios.tcgetattr returns


@contextmanager
def held_back() -> Iterator[None]:
    """Hold it back while the block runs. Standard input and standard error are a terminal."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    silent = [*before]
    silent[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO)

    def restore() -> None:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(keyboard, termios.TCSANOW, before)

    with _restored_on_sigterm(restore):
        try:
            termios.tcsetattr(keyboard, termios.TCSANOW, silent)
            with suppress(OSError):
                sys.stderr.write(_PASTE_ON)
                sys.stderr.flush()
            yield
        finally:
            restore()


@contextmanager
def _restored_on_sigterm(restore: Callable[[], None]) -> Iterator[None]:
    """SIGTERM ends the program as it would have, but not before the terminal is as it was."""

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
