"""Q8_0: 32 elements in 34 bytes, 8.5 bits a weight.

Layout    d f16@0; q int8[32]@2
Value     d * q
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import f16_field

BLOCK_SIZE, BLOCK_BYTES = 32, 34


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 34] -> float32 [n, 32]."""
    out[...] = blocks[:, 2:].view(np.int8)
    out *= f16_field(blocks, 0)
