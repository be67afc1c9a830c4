"""Random weights in block formats.

A block is made of random bits, but for its scales, which are drawn so that the decoded values have a given size and a
mean of 0. The mean matters: weights that are a little positive all together would blow up the sum of all activations
from layer to layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from pyllm.errors import UsageError
from pyllm.kv_types import KV_TYPES
from pyllm.quants import FORMATS, QuantType, dequantize, row_bytes

_PIECE_BYTES = 8 << 20  # drawn at a time
_SAMPLE_BLOCKS = 4096  # from which the size of a format's values is measured
_JITTER = 0.25  # scales differ by so much, relatively


class _Scales(NamedTuple):
    """Where a block's float16 scales lie.

    Attributes:
        scale: byte offset of the factor.
        minimum: byte offset of what is added or taken off; None where the format has none.
        ratio: minimum over scale, at which the values' mean is 0.
    """

    scale: int
    minimum: int | None = None
    ratio: float = 0.0


_T = QuantType
_SCALES = {
    _T.Q4_0: _Scales(0),
    _T.Q4_1: _Scales(0, 2, -7.5),  # q in 0..15 times the scale, plus the minimum
    _T.Q5_0: _Scales(0),
    _T.Q5_1: _Scales(0, 2, -15.5),
    _T.Q8_0: _Scales(0),
    _T.Q2_K: _Scales(80, 82, 1.5),  # minima are taken off, and have 4- or 6-bit factors like the scales
    _T.Q3_K: _Scales(108),
    _T.Q4_K: _Scales(0, 2, 7.5),
    _T.Q5_K: _Scales(0, 2, 15.5),
    _T.Q6_K: _Scales(208),
    _T.IQ1_S: _Scales(0),
    _T.IQ2_XXS: _Scales(0),
    _T.IQ2_XS: _Scales(0),
    _T.IQ2_S: _Scales(0),
    _T.IQ3_XXS: _Scales(0),
    _T.IQ3_S: _Scales(0),
    _T.IQ4_NL: _Scales(0),
    _T.IQ4_XS: _Scales(0),
    _T.TQ1_0: _Scales(52),
    _T.TQ2_0: _Scales(64),
}
_FLOATS = (_T.F32, _T.F16, _T.BF16)

# What quantisers use where a row is no whole number of blocks; both have blocks of 32.
_FALLBACKS = {
    _T.Q4_K: _T.Q5_0,
    _T.Q5_K: _T.Q5_1,
    _T.Q6_K: _T.Q8_0,
    **dict.fromkeys((_T.Q2_K, _T.Q3_K, _T.IQ1_S, _T.IQ2_XXS, _T.IQ2_XS, _T.IQ2_S), _T.IQ4_NL),
    **dict.fromkeys((_T.IQ3_XXS, _T.IQ3_S, _T.IQ4_XS), _T.IQ4_NL),
}


def drawable_types() -> list[str]:
    """Names of the types in which weights can be drawn."""
    return [qtype.name for qtype in (*_FLOATS, *_SCALES)]


def drawable_type(name: str) -> QuantType:
    """Look a type up by its name, in upper or lower case.

    Raises:
        UsageError: no weights can be drawn in it.
    """
    known = {known.lower(): known for known in drawable_types()}
    if name.lower() not in known:
        raise UsageError(f"weights cannot be drawn as {name!r}; choose one of {', '.join(known.values())}")
    return QuantType[known[name.lower()]]


def stored_type(qtype: QuantType, row_elements: int) -> QuantType:
    """The type in which rows of this length are stored: `qtype`, or the one that quantisers put in its place where the
    row is no whole number of blocks."""
    for candidate in (qtype, _FALLBACKS.get(qtype, QuantType.F16)):
        if row_elements % FORMATS[candidate].block_size == 0:
            return candidate
    return QuantType.F16


def random_rows(
    rng: np.random.Generator, qtype: QuantType, num_rows: int, row_elements: int, std: float, mean: float = 0.0
) -> Iterator[np.ndarray]:
    """Random rows, some at a time.

    Args:
        qtype: one of `drawable_types`; `row_elements` is a whole number of its blocks.
        std, mean: of the decoded values. Only floats can have a mean other than 0.

    Yields:
        uint8 [some rows, row_bytes], C-contiguous.
    """
    assert not mean or qtype in _FLOATS
    size = row_bytes(qtype, row_elements)
    rows_at_once = max(1, _PIECE_BYTES // size)
    for first in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - first)
        if qtype in _FLOATS:
            values = rng.standard_normal((rows, row_elements), np.float32) * np.float32(std) + np.float32(mean)
            yield _encode(values, qtype).view(np.uint8).reshape(rows, size)
        else:
            count = rows * row_elements // FORMATS[qtype].block_size
            yield _blocks(rng, qtype, count, std / _unit_std(qtype)).reshape(rows, size)


def _encode(values: np.ndarray, qtype: QuantType) -> np.ndarray:
    if qtype == QuantType.BF16:
        return KV_TYPES["bf16"].encode(values)
    return values.astype(np.float16) if qtype == QuantType.F16 else values


def _blocks(rng: np.random.Generator, qtype: QuantType, count: int, scale: float) -> np.ndarray:
    """[count, block_bytes] uint8; the scale's sign is random too, so that formats with an uneven range have no mean."""
    num_bytes = count * FORMATS[qtype].block_bytes
    # Whole words are drawn four times as fast as single bytes.
    words = rng.integers(0, 1 << 64, -(-num_bytes // 8), np.uint64)
    blocks = words.view(np.uint8)[:num_bytes].reshape(count, -1)
    factor = rng.uniform(1 - _JITTER, 1 + _JITTER, count) * rng.choice((-scale, scale), count)
    where = _SCALES[qtype]
    _put(blocks, where.scale, factor)
    if where.minimum is not None:
        _put(blocks, where.minimum, factor * where.ratio)
    return blocks


def _put(blocks: np.ndarray, offset: int, values: np.ndarray) -> None:
    blocks[:, offset : offset + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


@cache
def _unit_std(qtype: QuantType) -> float:
    """Standard deviation of the values of random blocks with a scale of 1."""
    blocks = _blocks(np.random.default_rng(0), qtype, _SAMPLE_BLOCKS, 1.0)
    return float(np.std(dequantize(blocks, qtype), dtype=np.float64))
