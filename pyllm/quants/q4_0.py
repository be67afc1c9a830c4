"""Q4_0: 32 elements in 18 bytes, 4.5 bits a weight.

Layout    d f16@0; 16 bytes of nibbles @2: elements 0..15 are the low nibbles, 16..31 the high ones
Value     d * (n - 8)
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import f16_field, nibbles

BLOCK_SIZE, BLOCK_BYTES = 32, 18


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 18] -> float32 [n, 32]."""
    q = nibbles(blocks[:, 2:]).view(np.int8)
    q -= 8
    out[...] = q.reshape(out.shape)
    out *= f16_field(blocks, 0)
