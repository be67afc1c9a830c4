"""Ctrl-C at safe points only.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. In the middle of a step that would leave
pages, serials and queued work half changed. So steps run inside `deferred_interrupt`, and Ctrl-C takes effect when the
block is left: nothing is lost, and what the program does with it is the program's own affair.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back while the block runs. Other threads than the main one never get it: no effect there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[FrameType | None] = []
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # ignored, default, or set by something else than Python
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: pending.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            previous(signal.SIGINT, pending[0])
