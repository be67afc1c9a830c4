"""Memory that is given back behind events.

Python frees an object when its last reference goes; a GPU may still be reading it then. So memory that queued work
touches comes from an arena: releasing a block only puts it on a list together with an event, and the block is handed
out again once that event has completed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from pyllm.device.base import Event
from pyllm.device.memory_check import AddressBook, assert_done, enabled

ALIGNMENT = 256  # bytes: what vector loads, cache lines and coalesced accesses want, on hosts and GPUs
POISON = 0xFF  # as float16, bfloat16 and float32 a NaN; as int32 -1


class Block(Protocol):
    """A piece of memory as an arena keeps it: an array of uint8 on the host or on a device."""

    nbytes: int


class Arena:
    """Blocks of one kind of memory, reused by size.

    Args:
        allocate: makes a fresh block of so many bytes, aligned to ALIGNMENT.
        address: where a block, or an array that begins with it, lies.
        poison: fills a block with POISON; None outside test runs.

    Attributes:
        bytes_in_use: of blocks that are out, including released ones whose event is still open.
        high_water: the largest `bytes_in_use` so far.
    """

    def __init__(
        self,
        allocate: Callable[[int], Any],
        address: Callable[[Any], int],
        poison: Callable[[Any], None] | None = None,
    ) -> None:
        self._allocate = allocate
        self._address = address
        self._poison = poison
        self._free: dict[int, list[Any]] = {}
        self._retired: deque[tuple[Event, Any]] = deque()
        self._out: dict[int, Any] = {}  # by address
        self._closed = False
        self._book = AddressBook() if enabled() else None
        self._last_use: dict[int, Event] = {}  # with checks, of blocks that were given back, by address
        self.bytes_in_use = 0
        self.high_water = 0

    def take(self, num_bytes: int) -> Any:
        """A block of at least num_bytes, its content undefined.

        Raises:
            MemoryError: there is no more memory.
        """
        self._reap()
        size = max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        free = self._free.get(size)
        block = free.pop() if free else self._allocate(size)
        if self._book is not None:
            assert_done(self._last_use.pop(self._address(block), None), "a block is handed out")
            self._book.add(self._address(block), block.nbytes)
        if self._poison is not None:
            self._poison(block)
        self._out[self._address(block)] = block
        self.bytes_in_use += size
        self.high_water = max(self.high_water, self.bytes_in_use)
        return block

    def release(self, array: Any, after: Event) -> None:
        """Take back the block that an array begins with. It is reused when `after` has completed.

        Raises:
            KeyError: no block that is out begins there (a double release, say).
        """
        address = self._address(array)
        block = self._out.pop(address, None)
        if block is not None:
            self._retired.append((after, block))
            if self._book is not None:
                self._book.remove(address)
                self._last_use[address] = after
        elif not self._closed:  # after `clear` nothing is out, whoever still gives back
            raise KeyError(address)

    def holds(self, array: Any) -> bool:
        """Whether an array begins with a block that is out."""
        return self._address(array) in self._out

    def covers(self, array: Any) -> bool:
        """Whether all of an array lies in a block that is out."""
        if self.holds(array):
            return True
        first = self._address(array)
        last = first + array.nbytes
        return any(start <= first and last <= start + block.nbytes for start, block in self._out.items())

    def contains(self, start: int, num_bytes: int) -> bool:
        """Whether bytes from an address on lie in a block that is out. Only with checks (PYLLM_CHECK)."""
        return self._book is not None and self._book.contains(start, num_bytes)

    def clear(self) -> None:
        """Forget every block, for good. Only when no queued work is left."""
        for event in self._last_use.values():
            assert_done(event, "a block is freed")
        self._closed = True
        self._free.clear()
        self._retired.clear()
        self._out.clear()
        self.bytes_in_use = 0

    def _reap(self) -> None:
        while self._retired and self._retired[0][0].query():
            event, block = self._retired.popleft()
            if self._book is not None:
                assert_done(self._last_use.get(self._address(block), event), "a block is taken back")
            if self._poison is not None:
                self._poison(block)
            self._free.setdefault(block.nbytes, []).append(block)
            self.bytes_in_use -= block.nbytes


def host_arena(poison: bool) -> Arena:
    """An arena of ordinary host memory."""
    return Arena(host_block, host_address, poison_host_block if poison else None)


def poison_host_block(block: np.ndarray) -> None:
    block[:] = POISON


def host_address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def host_block(size: int) -> np.ndarray:
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]
