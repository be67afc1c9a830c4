"""In which form K and V rows are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyllm.errors import UsageError

BLOCK = 32  # elements of a block of a quantised type
ALIGNMENT = 16  # bytes: quantised rows are filled up to a multiple, so that each begins where a 16-byte load may
SMALLEST_SCALE = np.float32(1e-30)  # smaller ones count as 0: below them devices disagree about subnormal numbers


@dataclass(frozen=True)
class KVType:
    """A row type of the KV cache.

    Attributes:
        name: as in `kv_type=` and `--kv-type`.
        code: KV_TYPE in kernel sources.
        storage: NumPy dtype of the stored elements; bfloat16 is kept as uint16, since NumPy has no such type, quantised
            rows as bytes.
        encode: float32 [..., width] to storage [..., row_size(width)], rounded once.
        decode: storage to float32, exact.
        block: elements that are stored together; it divides the head size.
        block_bytes: bytes of a block.
    """

    name: str
    code: int
    storage: type
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]
    block: int = 1
    block_bytes: int = 0

    def row_size(self, width: int) -> int:
        """Stored elements of a row of `width` elements."""
        if self.block == 1:
            return width
        return -(-width // self.block * self.block_bytes // ALIGNMENT) * ALIGNMENT

    def width(self, row_size: int) -> int:
        """Elements of a row of that many stored elements."""
        return row_size if self.block == 1 else row_size // self.block_bytes * self.block

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` elements."""
        return self.row_size(width) * np.dtype(self.storage).itemsize


def _to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def _to_f16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # beyond 65504 a value becomes infinite, as it does on a GPU
        return x.astype(np.float16)


# Quantised rows: the codes of all elements, then the scales of blocks as float16, then zeros up to 16 bytes.
# Scales and codes as in GGUF's blocks of the same name. A block in which a value is not finite becomes NaN as a whole.


def _blocks(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., blocks, 32] float32 with zeros for blocks that are not finite, and which blocks are finite."""
    blocks = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    finite = np.asarray(np.isfinite(blocks).all(axis=-1))
    return np.where(finite[..., None], blocks, np.float32(0)), finite


def _scaled(blocks: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values in units of the block's step, in float32, and the step as float16."""
    usable = np.abs(step) >= SMALLEST_SCALE
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=usable)
    return blocks * inverse[..., None], _to_f16(np.where(usable, step, np.float32(0)))


def _row(codes: np.ndarray, scales: np.ndarray, finite: np.ndarray) -> np.ndarray:
    """Codes [..., blocks, bytes] and scales [..., blocks] as rows of bytes."""
    *lead, count, size = codes.shape
    scales = np.ascontiguousarray(np.where(finite, scales, np.float16(np.nan)).astype("<f2"))
    row = np.concatenate((codes.reshape(*lead, count * size), scales.view(np.uint8)), axis=-1)
    return np.pad(row, [(0, 0)] * len(lead) + [(0, -row.shape[-1] % ALIGNMENT)])


def _parts(rows: np.ndarray, code_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., blocks, code_bytes] and scales [..., blocks, 1] float32 of rows of bytes."""
    count = rows.shape[-1] // (code_bytes + 2)
    codes = rows[..., : count * code_bytes].reshape(*rows.shape[:-1], count, code_bytes)
    scales = np.ascontiguousarray(rows[..., count * code_bytes : count * (code_bytes + 2)]).view("<f2")
    return codes, scales.astype(np.float32)[..., None]


def _to_q8_0(x: np.ndarray) -> np.ndarray:
    blocks, finite = _blocks(x)
    scaled, scales = _scaled(blocks, np.abs(blocks).max(axis=-1) / np.float32(127))
    size = np.abs(scaled)
    whole = np.floor(size)
    whole += size - whole >= np.float32(0.5)  # half away from zero
    return _row(np.copysign(whole, scaled).astype(np.int8).view(np.uint8), scales, finite)


def _from_q8_0(rows: np.ndarray) -> np.ndarray:
    codes, scales = _parts(rows, BLOCK)
    return (codes.view(np.int8) * scales).reshape(*rows.shape[:-1], codes.shape[-2] * BLOCK)


def _to_q4_0(x: np.ndarray) -> np.ndarray:
    blocks, finite = _blocks(x)
    first_largest = np.abs(blocks).argmax(axis=-1)[..., None]
    extreme = np.take_along_axis(blocks, first_largest, axis=-1)[..., 0]
    scaled, scales = _scaled(blocks, extreme / np.float32(-8))
    codes = np.minimum(15, (scaled + np.float32(8.5)).astype(np.uint8))
    return _row(codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4, scales, finite)


def _from_q4_0(rows: np.ndarray) -> np.ndarray:
    codes, scales = _parts(rows, BLOCK // 2)
    nibbles = np.concatenate((codes & 15, codes >> 4), axis=-1)
    return ((nibbles.astype(np.float32) - 8) * scales).reshape(*rows.shape[:-1], codes.shape[-2] * BLOCK)


KV_TYPES = {
    kv_type.name: kv_type
    for kv_type in (
        KVType("f32", 0, np.float32, lambda x: x, lambda x: x),
        KVType("f16", 1, np.float16, _to_f16, lambda x: x.astype(np.float32)),
        KVType("bf16", 2, np.uint16, _to_bf16, _from_bf16),
        KVType("q8_0", 3, np.uint8, _to_q8_0, _from_q8_0, BLOCK, BLOCK + 2),
        KVType("q4_0", 4, np.uint8, _to_q4_0, _from_q4_0, BLOCK, BLOCK // 2 + 2),
    )
}


def kv_type_by_name(name: str) -> KVType:
    """Look a type up.

    Raises:
        UsageError: unknown name.
    """
    if name not in KV_TYPES:
        raise UsageError(f"kv_type {name!r} is unknown; choose one of {', '.join(KV_TYPES)}")
    return KV_TYPES[name]
