"""Pinned memory for copies that the GPU makes: blocks of one size, within a budget of bytes.

A block is never handed out while a copy may still read or write it: it is free again when all events that `Block.used`
was told of have completed, however early its owner has dropped it. Memory is pinned when it is first needed and goes
back to the device when the device is closed, so nothing is unmapped underneath a copy.

The blocks that are kept stand in order of use. When the budget is spent the one used least recently gives way, before
anything new is taken: its owner finds `Block.is_kept` false. Two kinds of content of two sizes have two pools, so that
the blocks of one can never be too small for the other, and their budgets hold for what is allocated.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque

import numpy as np

from pyllm.device import Device, Event, PinnedBuffer
from pyllm.device.arena import POISON
from pyllm.errors import DeviceError, SessionError

_log = logging.getLogger("pyllm")


LARGEST_DEFAULT = 4 << 30
DEFAULT_SHARE = 8  # of the machine's memory, as a divisor


def default_budget() -> int:
    """Bytes of pinned memory that nobody minds: an eighth of the machine's memory, at most 4 GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(LARGEST_DEFAULT, memory // DEFAULT_SHARE)


class PinnedMemoryError(SessionError):
    """There is no pinned memory for copies now: nothing is wrong with what was to be copied."""


class Block:
    """One piece of pinned memory.

    Attributes:
        memory: [block_bytes] uint8, for copies; hosts write through `writable`.
        array: the same, read-only.
        num_pins: how many parts of the program rely on the content; it does not give way before they are done.
        is_kept: False when it gave way to another, or was given back: its content is somebody else's now.
    """

    def __init__(self, buffer: PinnedBuffer) -> None:
        self.buffer = buffer
        self.memory = buffer.memory
        self.array = buffer.array
        self.is_kept = True
        self.num_pins = 0
        self._uses: list[Event] = []

    def used(self, until: Event) -> None:
        """A copy that was queued uses the block until an event has completed."""
        self._uses = [event for event in self._uses if not event.query()]
        self._uses.append(until)
        self.buffer.used_until(until)  # copies are in one stream: the last ends last

    def writable(self) -> np.ndarray:
        """The memory for the host to write, see `PinnedBuffer.writable`."""
        return self.buffer.writable()

    @property
    def is_idle(self) -> bool:
        """Whether no copy uses it, and nobody relies on it."""
        return not self.num_pins and all(event.query() for event in self._uses)

    def wait(self) -> None:
        """Block until no copy uses it.

        Raises:
            DeviceError: a copy failed.
        """
        for event in self._uses:
            event.synchronize()


class PinnedPool:
    """Blocks of one size.

    Args:
        block_bytes: of each block.
        budget: bytes that all blocks may take together.
        what: what a block holds, for the line that says that the budget is too small for even one.
        evicts: blocks that are kept give way; False: they are their owner's until they are given back.

    Attributes:
        num_allocated: blocks that exist.
    """

    def __init__(self, device: Device, block_bytes: int, budget: int, what: str, evicts: bool = True) -> None:
        self.block_bytes = block_bytes
        self.num_allocated = 0
        self._device = device
        self._limit = budget // block_bytes
        self._what = what
        self._evicts = evicts
        self._kept: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self._free: list[PinnedBuffer] = []
        self._retired: deque[Block] = deque()
        self._high_water = 0
        self._told = False

    @property
    def bytes_in_use(self) -> int:
        """Of blocks that are kept, and of those given back that a copy still uses."""
        self._reap()
        return (len(self._kept) + len(self._retired)) * self.block_bytes

    def stats(self) -> dict[str, int]:
        """Bytes in use now and at most so far, and bytes of the budget."""
        return {
            "bytes": self.bytes_in_use,
            "high_water_bytes": self._high_water * self.block_bytes,
            "budget_bytes": self._limit * self.block_bytes,
        }

    def take(self) -> Block | None:
        """A block to keep something in; the least recently used ones give way.

        Returns:
            None where the budget has no room for even one, or every block is being copied.
        """
        if not self._limit:
            if not self._told:
                _log.warning("the cache has no room for %s of %d bytes; see --cache-ram", self._what, self.block_bytes)
            self._told = True
            return None
        self._reap()
        buffer = self._free.pop() if self._free else self._allocate() or self._evict()
        if buffer is None:
            return None
        buffer.writable()  # with checks: no copy uses what is handed out
        block = Block(buffer)
        self._kept[block] = None
        self._high_water = max(self._high_water, len(self._kept) + len(self._retired))
        return block

    def touch(self, block: Block) -> None:
        """It was used just now."""
        if block.is_kept:
            self._kept.move_to_end(block)

    def give_back(self, block: Block) -> None:
        """It is not needed any more; copies that use it end first. Twice is harmless."""
        if block.is_kept:
            block.is_kept = False
            del self._kept[block]
            self._retired.append(block)

    def give_all_back(self) -> None:
        """What an owner that was interrupted could not give back itself."""
        for block in list(self._kept):
            self.give_back(block)

    @property
    def blocks(self) -> list[Block]:
        """All that copies may still use: those that are kept, and those given back."""
        return [*self._kept, *self._retired]

    @property
    def retiring(self) -> Block | None:
        """A block that was given back and that a copy still uses; wait for it to have it to take."""
        return next((block for block in self._retired if not block.num_pins), None)

    def _allocate(self) -> PinnedBuffer | None:
        if self.num_allocated >= self._limit:
            return None
        try:
            buffer = self._device.pinned(self.block_bytes)
        except (MemoryError, DeviceError):  # the machine has less to pin than the budget allows
            self._limit = self.num_allocated
            return None
        self.num_allocated += 1
        return buffer

    def _evict(self) -> PinnedBuffer | None:
        block = next((block for block in self._kept if block.is_idle), None) if self._evicts else None
        if block is None:
            return None
        block.is_kept = False
        del self._kept[block]
        return block.buffer

    def _reap(self) -> None:
        for _ in range(len(self._retired)):
            block = self._retired.popleft()
            if block.is_idle:
                if self._device.poison:
                    block.writable()[:] = POISON
                self._free.append(block.buffer)
            else:
                self._retired.append(block)
