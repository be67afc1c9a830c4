"""Scratch memory of the layers: named device buffers that stay at their address from ubatch to ubatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyllm.device import Device


class Workspace:
    """Named buffers, each as large as the largest request so far.

    A buffer that has to grow moves; the old memory goes back to the device behind the work that is queued by then, so
    ubatches in flight keep what they read. Two arrays that are in use at the same time need two names.

    Attributes:
        num_moves: how often a buffer got an address; while it stays the same, so do all addresses.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.num_moves = 0
        self._buffers: dict[str, Any] = {}

    def array(self, name: str, shape: Sequence[int], dtype: Any = np.float32) -> Any:
        """A C-contiguous device array, its content undefined."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < num_bytes:
            # In this order: should one of the steps fail, the table never holds memory that was given back.
            outgrown, buffer = buffer, self._device.empty((num_bytes,), np.uint8)
            self._buffers[name] = buffer
            self.num_moves += 1
            if outgrown is not None:
                self._device.release(outgrown)
        return buffer[:num_bytes].view(dtype).reshape(shape)

    @property
    def num_bytes(self) -> int:
        """Device memory of all buffers."""
        return int(sum(buffer.nbytes for buffer in self._buffers.values()))
