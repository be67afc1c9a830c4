"""64-bit FNV-1a hashes of many rows at once.

Source: Fowler, Noll, Vo; draft-eastlake-fnv. h = offset; for each byte b: h = (h xor b) * prime, modulo 2**64.
"""

from __future__ import annotations

import numpy as np

OFFSET = np.uint64(0xCBF29CE484222325)
PRIME = np.uint64(0x100000001B3)


def fnv1a(rows: np.ndarray) -> np.ndarray:
    """Hash each row.

    Args:
        rows: [n, ...], any dtype, C-contiguous; a row's bytes are hashed as they lie in memory.

    Returns:
        [n] uint64.
    """
    hashes = np.full(len(rows), OFFSET)
    if not rows.size:
        return hashes
    # The bytes of one row depend on each other, rows do not: so a step takes one byte of each row.
    columns = np.ascontiguousarray(rows.reshape(len(rows), -1).view(np.uint8).T)
    for column in columns:
        hashes ^= column
        hashes *= PRIME
    return hashes
