"""PYLLM_CHECK=1: assertions that no memory is written, moved or freed while the device may still use it.

The rules that they watch hold by construction: host memory that the device reads can be written through
`PinnedBuffer.writable` and `InputRing.acquire` alone, and arenas hand blocks out again behind events. The assertions
say where that construction was broken. They cost a look-up per array of a launch, and wait for nothing.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pyllm.device.arena import Arena
    from pyllm.device.base import Event


def enabled() -> bool:
    """Whether the environment asks for checks; devices look when they are opened."""
    return os.environ.get("PYLLM_CHECK", "0") not in ("", "0")


def assert_done(last_use: Event | None, what: str) -> None:
    """Raise AssertionError unless the device is done with something; `what` says what is about to happen to it."""
    if last_use is not None and not last_use.query():
        raise AssertionError(f"{what} while queued work may still use it")


class LaunchCheck:
    """Watches that launches, and recordings of them, use memory that is out: not given back, not moved.

    Args:
        arenas: all memory of a device.
    """

    def __init__(self, arenas: Iterable[Arena]) -> None:
        self._arenas = list(arenas)
        self._recorded: list[tuple[str, Any]] | None = None

    def launch(self, name: str, args: Any) -> None:
        """Raise AssertionError if an array among the arguments of a launch lies outside of what is out."""
        arrays = [(name, array) for array in _arrays(args)]
        self._check(arrays)
        if self._recorded is not None:
            self._recorded.extend(arrays)

    @contextmanager
    def recording(self) -> Iterator[list[tuple[str, Any]]]:
        """Collects what launches inside the block use, for `replay`."""
        recorded: list[tuple[str, Any]] = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def replay(self, recorded: list[tuple[str, Any]]) -> None:
        """Raise AssertionError if something that a recording uses was given back since."""
        self._check(recorded)

    def _check(self, arrays: list[tuple[str, Any]]) -> None:
        for name, array in arrays:
            start = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr  # CuPy's, on a GPU
            if array.nbytes and not any(arena.contains(start, array.nbytes) for arena in self._arenas):
                raise AssertionError(f"{name} uses memory that was given back, or is not the device's")


class AddressBook:
    """Which of some blocks of memory an address lies in."""

    def __init__(self) -> None:
        self._stops: dict[int, int] = {}
        self._sorted: list[int] | None = None

    def add(self, start: int, num_bytes: int) -> None:
        self._stops[start] = start + num_bytes
        self._sorted = None

    def remove(self, start: int) -> None:
        self._stops.pop(start, None)
        self._sorted = None

    def contains(self, start: int, num_bytes: int) -> bool:
        """Whether the bytes lie in one block."""
        if self._sorted is None:
            self._sorted = sorted(self._stops)
        index = bisect_right(self._sorted, start) - 1
        return index >= 0 and start + num_bytes <= self._stops[self._sorted[index]]


def _arrays(value: Any) -> Iterator[Any]:
    """Arrays among arguments, inside tuples and dataclasses too. Scalars are no arrays, NumPy's neither."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _arrays(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _arrays(getattr(value, field.name))
    elif hasattr(value, "nbytes") and not isinstance(value, type) and len(value.shape):
        yield value
