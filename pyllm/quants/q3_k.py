"""Q3_K: 256 elements in 110 bytes, 3.4375 bits a weight. Sixteen sub-blocks of 16 with a 6-bit scale each.

Layout    third bits [32]@0: bit r of byte l belongs to element l of run r (eight runs of 32); 2-bit values [64]@32: in
          each half of 128 elements, run r of 32 is bits 2r and 2r+1 of 32 bytes; scales [12]@96: eight bytes hold the
          low four bits (scales 0..7 in the low nibbles, 8..15 in the high ones), four bytes the high two; d f16@108
Value     (d * (scale - 32)) * (q - 4 * (1 - h))
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import crumbs, f16_field, nibbles

BLOCK_SIZE, BLOCK_BYTES = 256, 110

_RUNS = np.arange(8, dtype=np.uint8)[:, None]


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 110] -> float32 [n, 256]."""
    scales = nibbles(blocks[:, 96:104]).reshape(-1, 16)
    scales |= crumbs(blocks[:, 104:108]).reshape(-1, 16) << 4
    signed_scales = scales.view(np.int8)
    signed_scales -= 32

    # q - 4 * (1 - h) = (q | h << 2) - 4
    q = crumbs(blocks[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 8, 32)
    q |= ((blocks[:, None, :32] >> _RUNS) & 1) << 2
    signed = q.view(np.int8)
    signed -= 4

    x = out.reshape(-1, 16, 16)
    x[...] = signed.reshape(x.shape)
    x *= (f16_field(blocks, 108) * signed_scales)[..., None]
