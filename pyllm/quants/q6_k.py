"""Q6_K: 256 elements in 210 bytes, 6.5625 bits a weight. Sixteen sub-blocks of 16 with an int8 scale each.

Layout    low nibbles [128]@0; high pairs of bits [64]@128; scales int8[16]@192; d f16@208. Each half of 128 elements is
          four runs of 32: runs 0 and 1 are the low nibbles of 64 bytes, runs 2 and 3 their high nibbles; the high bits
          of run r are bits 2r and 2r+1 of 32 bytes
Value     (d * scale) * (q - 32)
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import crumbs, f16_field, nibbles

BLOCK_SIZE, BLOCK_BYTES = 256, 210


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 210] -> float32 [n, 256]."""
    q = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    q |= crumbs(blocks[:, 128:192].reshape(-1, 2, 32)) << 4
    signed = q.view(np.int8)
    signed -= 32
    x = out.reshape(-1, 16, 16)
    x[...] = signed.reshape(x.shape)
    x *= (f16_field(blocks, 208) * blocks[:, 192:208].view(np.int8))[..., None]
