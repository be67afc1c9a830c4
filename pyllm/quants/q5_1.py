"""Q5_1: 32 elements in 24 bytes, 6 bits a weight.

Layout    d f16@0; m f16@2; fifth bits u32@4: bit i belongs to element i; 16 bytes of nibbles @8: low ones first
Value     d * (n + 16 * h) + m
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import f16_field, nibbles

BLOCK_SIZE, BLOCK_BYTES = 32, 24


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 24] -> float32 [n, 32]."""
    q = nibbles(blocks[:, 8:]).reshape(out.shape)
    q |= np.unpackbits(blocks[:, 4:8], axis=1, bitorder="little") << 4
    out[...] = q
    out *= f16_field(blocks, 0)
    out += f16_field(blocks, 2)
