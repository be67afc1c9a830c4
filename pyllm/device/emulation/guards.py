"""An arena with guard bytes before and behind every block, and the search for those that were overwritten."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numpy as np

from pyllm.device.arena import ALIGNMENT, Arena, host_address, host_block, poison_host_block
from pyllm.device.base import Event
from pyllm.device.emulation.kernel import runtime
from pyllm.errors import DeviceError

GUARD_BYTES = ALIGNMENT  # at least; what rounding leaves behind a block is guarded too
PATTERN = 0xA5


@dataclass(frozen=True)
class _Guarded:
    """A block that is out: what the arena beneath knows it by, and its guards."""

    whole: np.ndarray
    num_bytes: int

    @property
    def guards(self) -> tuple[np.ndarray, np.ndarray]:
        return self.whole[:GUARD_BYTES], self.whole[GUARD_BYTES + self.num_bytes :]


class GuardedArena(Arena):
    """Blocks of host memory, of exactly the bytes that were asked for, with guards around them.

    Blocks are taken by the host thread; guards are read by the stream's worker, and stay watched until the stream has
    come to the point of their release.
    """

    def __init__(self, poison: bool) -> None:
        super().__init__(host_block, host_address, poison_host_block if poison else None)
        self._blocks: dict[int, _Guarded] = {}  # that are out, by the address that users know
        self._lock = threading.Lock()
        self._watched: dict[int, _Guarded] = {}
        self._ranges: tuple[list[_Guarded], np.ndarray, np.ndarray] | None = None  # of all guards, for `check`

    def take(self, num_bytes: int) -> np.ndarray:
        num_bytes = max(num_bytes, 1)
        whole = super().take(num_bytes + 2 * GUARD_BYTES)
        guarded = _Guarded(whole, num_bytes)
        for guard in guarded.guards:
            guard[:] = PATTERN
        block = whole[GUARD_BYTES : GUARD_BYTES + num_bytes]
        self._blocks[block.ctypes.data] = guarded
        with self._lock:
            self._watched[block.ctypes.data] = guarded
            self._ranges = None
        return block

    def release(self, array: np.ndarray, after: Event) -> None:
        super().release(self._blocks.pop(array.ctypes.data).whole, after)

    def unwatch(self, address: int) -> None:
        """Check a block's guards for the last time. To be queued ahead of the event of its release.

        Raises:
            DeviceError: they were overwritten.
        """
        with self._lock:
            guarded = self._watched.pop(address)
            self._ranges = None
        if any((guard != PATTERN).any() for guard in guarded.guards):
            raise DeviceError(f"a kernel {_complaint(guarded)}")

    def check(self, culprit: str) -> None:
        """Compare all guards.

        Raises:
            DeviceError: one was overwritten; `culprit` is named as what ran last.
        """
        with self._lock:
            if self._ranges is None:
                self._ranges = _guard_ranges(list(self._watched.values()))
            blocks, addresses, lengths = self._ranges
        damaged = runtime().emulation_first_damaged(
            addresses.ctypes, lengths.ctypes, ctypes.c_int64(len(addresses)), PATTERN
        )
        if damaged >= 0:
            raise DeviceError(f"{culprit} {_complaint(blocks[damaged // 2])}")

    def clear(self) -> None:
        super().clear()
        self._blocks.clear()
        self._watched.clear()
        self._ranges = None


def _guard_ranges(blocks: list[_Guarded]) -> tuple[list[_Guarded], np.ndarray, np.ndarray]:
    guards = [guard for block in blocks for guard in block.guards]
    addresses = np.array([guard.ctypes.data for guard in guards], np.uint64)
    return blocks, addresses, np.array([guard.nbytes for guard in guards], np.uint64)


def _complaint(guarded: _Guarded) -> str:
    """Where the first overwritten guard byte of a block lies."""
    before, behind = ((guard != PATTERN) for guard in guarded.guards)
    if behind.any():
        where = f"{int(behind.argmax())} bytes behind the end"
    else:
        where = f"{GUARD_BYTES - int(before.argmax())} bytes before the start"
    return f"wrote outside its arrays: {where} of an allocation of {guarded.num_bytes} bytes"
