"""Memory that is given back behind events.

Python frees an object when its last reference goes; a GPU may still be reading it then. So memory that queued work
touches comes from an arena: releasing a block only puts it on a list together with an event, and the block is handed
out again once that event has completed.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pyllm.device.base import Event

ALIGNMENT = 64  # bytes: a cache line, and what vector loads on the host like
POISON = 0xFF  # as float16, bfloat16 and float32 a NaN; as int32 -1


class Arena:
    """Host memory in blocks, reused by size.

    Attributes:
        bytes_in_use: of blocks that are out, including released ones whose event is still open.
        high_water: the largest `bytes_in_use` so far.
    """

    def __init__(self, poison: bool = False) -> None:
        self._poison = poison
        self._free: dict[int, list[np.ndarray]] = {}
        self._retired: deque[tuple[Event, np.ndarray]] = deque()
        self._out: dict[int, np.ndarray] = {}  # by address
        self.bytes_in_use = 0
        self.high_water = 0

    def take(self, num_bytes: int) -> np.ndarray:
        """A block of uint8, aligned to ALIGNMENT, its content undefined.

        Raises:
            MemoryError: the machine has no more memory.
        """
        self._reap()
        size = max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        free = self._free.get(size)
        block = free.pop() if free else _aligned(size)
        if self._poison:
            block[:] = POISON
        self._out[block.ctypes.data] = block
        self.bytes_in_use += size
        self.high_water = max(self.high_water, self.bytes_in_use)
        return block

    def release(self, address: int, after: Event) -> None:
        """Take a block back by its address. It is reused, and poisoned in test runs, when `after` has completed.

        Raises:
            KeyError: the address is not that of a block that is out (a double release, say).
        """
        self._retired.append((after, self._out.pop(address)))

    def clear(self) -> None:
        """Forget every block. Only when no queued work is left."""
        self._free.clear()
        self._retired.clear()
        self._out.clear()
        self.bytes_in_use = 0

    def _reap(self) -> None:
        while self._retired and self._retired[0][0].query():
            _, block = self._retired.popleft()
            if self._poison:
                block[:] = POISON
            self._free.setdefault(block.nbytes, []).append(block)
            self.bytes_in_use -= block.nbytes


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]
