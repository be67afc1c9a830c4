"""Q4_1: 32 elements in 20 bytes, 5 bits a weight.

Layout    d f16@0; m f16@2; 16 bytes of nibbles @4: elements 0..15 are the low nibbles, 16..31 the high ones
Value     d * n + m
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import f16_field, nibbles

BLOCK_SIZE, BLOCK_BYTES = 32, 20


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 20] -> float32 [n, 32]."""
    out[...] = nibbles(blocks[:, 4:]).reshape(out.shape)
    out *= f16_field(blocks, 0)
    out += f16_field(blocks, 2)
