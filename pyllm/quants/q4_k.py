"""Q4_K: 256 elements in 144 bytes, 4.5 bits a weight. Eight sub-blocks of 32, each with a scale and a minimum.

Layout    d f16@0; dmin f16@2; 6-bit scales and mins [12]@4; nibbles [128]@16: each run of 32 bytes holds two
          sub-blocks, the even one in the low nibbles, the odd one in the high ones
Value     (d * scale) * q - dmin * min
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import f16_field, nibbles, scales_and_mins_6bit

BLOCK_SIZE, BLOCK_BYTES = 256, 144


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 144] -> float32 [n, 256]."""
    scales, mins = scales_and_mins_6bit(blocks, 4)
    x = out.reshape(-1, 8, 32)
    x[...] = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(x.shape)
    x *= (f16_field(blocks, 0) * scales)[..., None]
    x -= (f16_field(blocks, 2) * mins)[..., None]
