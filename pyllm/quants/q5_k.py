"""Q5_K: 256 elements in 176 bytes, 5.5 bits a weight. As Q4_K, with a fifth bit per element.

Layout    d f16@0; dmin f16@2; 6-bit scales and mins [12]@4; fifth bits [32]@16: bit j of byte l belongs to element l of
          sub-block j; nibbles [128]@48: each run of 32 bytes holds two sub-blocks, even low, odd high
Value     (d * scale) * q - dmin * min
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import f16_field, nibbles, scales_and_mins_6bit

BLOCK_SIZE, BLOCK_BYTES = 256, 176

_SUB_BLOCKS = np.arange(8, dtype=np.uint8)[:, None]


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 176] -> float32 [n, 256]."""
    scales, mins = scales_and_mins_6bit(blocks, 4)
    q = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    q |= ((blocks[:, None, 16:48] >> _SUB_BLOCKS) & 1) << 4
    x = out.reshape(-1, 8, 32)
    x[...] = q
    x *= (f16_field(blocks, 0) * scales)[..., None]
    x -= (f16_field(blocks, 2) * mins)[..., None]
