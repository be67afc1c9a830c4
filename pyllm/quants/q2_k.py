"""Q2_K: 256 elements in 84 bytes, 2.625 bits a weight. Sixteen sub-blocks of 16 with a 4-bit scale and minimum.

Layout    scales [16]@0: scale in the low nibble, minimum in the high one; 2-bit values [64]@16: in each half of 128
          elements, run r of 32 is bits 2r and 2r+1 of 32 bytes; d f16@80; dmin f16@82
Value     (d * scale) * q - dmin * min
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import crumbs, f16_field

BLOCK_SIZE, BLOCK_BYTES = 256, 84


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 84] -> float32 [n, 256]."""
    scales = blocks[:, :16]
    x = out.reshape(-1, 16, 16)
    x[...] = crumbs(blocks[:, 16:80].reshape(-1, 2, 32)).reshape(x.shape)
    x *= (f16_field(blocks, 80) * (scales & 15))[..., None]
    x -= (f16_field(blocks, 82) * (scales >> 4))[..., None]
