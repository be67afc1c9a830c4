"""Q5_0: 32 elements in 22 bytes, 5.5 bits a weight.

Layout    d f16@0; fifth bits u32@2: bit i belongs to element i; 16 bytes of nibbles @6: low ones first
Value     d * (n + 16 * h - 16)
"""

from __future__ import annotations

import numpy as np

from pyllm.quants.fields import f16_field, nibbles

BLOCK_SIZE, BLOCK_BYTES = 32, 22


def decode(blocks: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 22] -> float32 [n, 32]."""
    q = nibbles(blocks[:, 6:]).reshape(out.shape)
    q |= np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little") << 4
    signed = q.view(np.int8)
    signed -= 16
    out[...] = signed
    out *= f16_field(blocks, 0)
