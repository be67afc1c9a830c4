"""A weight on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyllm.quants import QuantType


@dataclass(frozen=True)
class Weight:
    """A matrix (or a stack of them) that ops multiply with.

    Attributes:
        name: as in the file; errors name it.
        shape: logical, in elements: (rows, row_elements), or (stack, rows, row_elements).
        qtype: the block type in which the device holds it.
        array: device array, [..., row_bytes] uint8 of packed blocks, or [..., row_elements] float32 for F32.
    """

    name: str
    shape: tuple[int, ...]
    qtype: QuantType
    array: Any

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.array.shape[-1] * self.array.dtype.itemsize

    def rows(self, start: int, stop: int) -> Weight:
        """Some rows of a matrix, as a view."""
        return Weight(self.name, (stop - start, self.shape[1]), self.qtype, self.array[start:stop])
