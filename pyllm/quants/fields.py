"""Reading the fields of packed blocks. Shared by the block formats; knows no format itself.

Blocks arrive as uint8 [n, block_bytes] with a contiguous last axis, so that a few bytes of each block can be viewed as
another type without a copy. Numbers in GGUF files are little-endian.
"""

from __future__ import annotations

import numpy as np


def f16_field(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at byte `offset` of each block, as float32 [n, 1]: ready to be broadcast over the block."""
    return blocks[:, offset : offset + 2].view("<f2").astype(np.float32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Split bytes uint8 [..., k] into their low and high halves: uint8 [..., 2, k]. Every format stores all low
    nibbles of a run of elements first, then all high ones.
    """
    halves = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=halves[..., 0, :])
    np.right_shift(packed, 4, out=halves[..., 1, :])
    return halves


def crumbs(packed: np.ndarray) -> np.ndarray:
    """Split bytes uint8 [..., k] into their four 2-bit parts, lowest first: uint8 [..., 4, k]."""
    shifts = np.array([[0], [2], [4], [6]], np.uint8)
    return (packed[..., None, :] >> shifts) & 3


def scales_and_mins_6bit(blocks: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Unpack the eight 6-bit scales and eight 6-bit minimums that Q4_K and Q5_K keep in 12 bytes p[0..11].

    Sub-blocks 0..3: scale p[j] & 63, minimum p[j+4] & 63. Sub-blocks 4..7: low four bits in the nibbles of p[j+4],
    high two bits in the top of p[j-4] (scale) and p[j] (minimum).

    Returns:
        scales, mins: each uint8 [n, 8].
    """
    p = blocks[:, offset : offset + 12]
    first, second, last = p[:, 0:4], p[:, 4:8], p[:, 8:12]
    scales = np.concatenate([first & 63, (last & 15) | ((first >> 6) << 4)], axis=1)
    mins = np.concatenate([second & 63, (last >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, mins
