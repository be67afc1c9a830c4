"""IQ4_XS: 256 elements in 136 bytes, 4.25 bits a weight. Eight sub-blocks of 32 with a 6-bit scale, levels of IQ4_NL.

Layout    d f16@0; high two bits of the scales u16@2: bits 2j and 2j+1 for sub-block j; their low four bits [4]@4: even
          sub-blocks in the low nibbles, odd ones in the high ones; nibbles [128]@8: 16 bytes per sub-block, low ones
          first
Value     (d * (scale - 32)) * LEVELS[n]
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import crumbs, f16_field, nibbles
from pyllm.quants.iq4_nl import LEVELS

BLOCK_SIZE, BLOCK_BYTES = 256, 136


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 136] -> float32 [n, 256]."""
    scales = nibbles(blocks[:, 4:8, None]).reshape(-1, 8)
    scales |= crumbs(blocks[:, 2:4, None]).reshape(-1, 8) << 4
    signed_scales = scales.view(np.int8)
    signed_scales -= 32
    x = out.reshape(-1, 8, 32)
    np.take(LEVELS, nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(x.shape), out=x, mode="clip")
    x *= (f16_field(blocks, 0) * signed_scales)[..., None]
