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

SELECTOR_TYPES = GRID_TYPES - {QuantType.IQ3_XXS, QuantType.IQ3_S}
"""Those of them with entries of eight elements, which have three levels."""

_SELECTOR_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
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


def grid_selectors(qtype: QuantType) -> tuple[np.ndarray, int]:
    """The codebook of a format with few levels, each element as the number of its level.

    Args:
        qtype: one of `SELECTOR_TYPES`.

    Returns:
        uint32 [entries], a nibble for each of eight elements, from the lowest one on elements 0, 4, 1, 5, 2, 6, 3, 7;
        and the levels, up to four bytes in a word, the smallest in the lowest byte.

    Raises:
        UnsupportedError: as `grid_words`.
    """
    elements = grid_words(qtype).view(np.uint8).reshape(-1, 8)
    levels, numbers = np.unique(elements, return_inverse=True)
    if len(levels) > 4:
        raise UnsupportedError(f"the installed gguf package has {len(levels)} levels in the codebook of {qtype.name}")
    nibbles = numbers.reshape(-1, 8)[:, _SELECTOR_ORDER].astype(np.uint32)
    selectors: np.ndarray = (nibbles << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
    return selectors, sum(int(level) << 8 * place for place, level in enumerate(levels))
