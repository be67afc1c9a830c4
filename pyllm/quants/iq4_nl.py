"""IQ4_NL: 32 elements in 18 bytes, 4.5 bits a weight; the nibbles index a table of unevenly spaced levels.

Layout    d f16@0; 16 bytes of nibbles @2: elements 0..15 are the low nibbles, 16..31 the high ones
Value     d * LEVELS[n]
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import f16_field, nibbles

BLOCK_SIZE, BLOCK_BYTES = 32, 18

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 18] -> float32 [n, 32]."""
    np.take(LEVELS, nibbles(blocks[:, 2:]).reshape(out.shape), out=out, mode="clip")
    out *= f16_field(blocks, 0)
