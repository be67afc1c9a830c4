"""The codebooks of the IQ1, IQ2 and IQ3 formats, as the `gguf` package has them.

GPU kernels get them as constants (`pyllm.device.kernel_source`); NumPy decoding leaves these formats to the package as
a whole.
"""

from __future__ import annotations

import numpy as np

from pyllm.errors import UnsupportedError
from pyllm.quants import QuantType

GRID_TYPES = frozenset(QuantType[name] for name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"))
"""Formats that have a codebook."""

_SIGNED = (QuantType.IQ1_S, QuantType.IQ1_M)  # entries are -1, 0 and 1


def grid_words(qtype: QuantType) -> np.ndarray:
    """The codebook of a format, its entries one behind the other.

    Args:
        qtype: one of `GRID_TYPES`.

    Returns:
        uint32 [entries * entry size / 4]: four elements in a word, the first in the lowest byte. Those of IQ1 are held
        plus one.

    Raises:
        UnsupportedError: the installed gguf package has no such codebook.
    """
    from gguf import quants

    try:
        kind = getattr(quants, qtype.name)
        kind.init_grid()
        elements = np.asarray(kind.grid).reshape(kind.grid_shape) + (qtype in _SIGNED)
    except AttributeError as error:
        raise UnsupportedError(
            f"the installed gguf package has no codebook of {qtype.name}; upgrade it (pip install -U gguf)"
        ) from error
    return np.ascontiguousarray(elements.astype(np.uint8)).reshape(-1).view("<u4")
