"""Who wants the engine's lock while another thread takes it for one step after the other.

A lock goes to whoever asks first, and a thread that lets go and asks again at once always is first: a session that is
loaded, or a request that begins, beside a long answer would wait until that is complete. So threads that want the lock
once say so, and those that step give way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pyllm.interrupts import deferred_interrupt

_PAUSE = 50e-6  # seconds; enough for the other thread to wake up and take the lock


class Guests:
    """The threads that wait for the lock, or have it, outside of stepping: `with guests, lock:`."""

    def __init__(self) -> None:
        self._threads: set[int] = set()

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())

    def __exit__(self, *exc_info: object) -> None:
        self._threads.discard(threading.get_ident())

    @contextmanager
    def alone(self, lock: AbstractContextManager[Any]) -> Iterator[None]:
        """With the lock, and without Ctrl-C: for changes that belong together."""
        with deferred_interrupt(), self, lock:
            yield

    def give_way(self) -> None:
        """To be called between two steps, without the lock."""
        if self._threads:
            time.sleep(_PAUSE)
