"""The block formats of GGUF tensors: their type ids, sizes, and decoding to float32 with NumPy.

A row of a tensor is cut into blocks of `block_size` elements; each block is stored in `block_bytes` bytes. One module
per format gives the layout and the decoder. The grid, ternary and FP4 formats are decoded by the `gguf` package, which
is imported only when one of them is met. This package knows neither files nor devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pyllm.errors import ShapeError, UnsupportedError
from pyllm.quants import float as floats
from pyllm.quants import iq4_nl, iq4_xs, q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0

__all__ = ["FORMATS", "GPU_TYPES", "BlockFormat", "QuantType", "decodable_types", "dequantize", "row_bytes"]

# One chunk (512 KiB of float32 and a few times 128 KiB of bytes) stays in a core's L2 cache; half of it was measured to
# be 10 to 15 % slower, a quarter 40 %.
_CHUNK_ELEMENTS = 131072

Decoder = Callable[[np.ndarray, np.ndarray], None]


class QuantType(IntEnum):
    """Tensor type ids as stored in GGUF files. Missing numbers are retired formats."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


@dataclass(frozen=True)
class BlockFormat:
    """How one tensor type is stored.

    Attributes:
        block_size: elements per block; a row is a whole number of blocks.
        block_bytes: stored bytes per block.
        decode: decode(blocks uint8 [n, block_bytes], out float32 [n, block_size]), both C-contiguous; None when pyllm
            cannot decode the type.
    """

    type: QuantType
    block_size: int
    block_bytes: int
    decode: Decoder | None


def _gguf_decoder(qtype: QuantType) -> Decoder:
    def decode(blocks: np.ndarray, out: np.ndarray) -> None:
        from gguf import GGMLQuantizationType, quants

        try:
            out[...] = quants.dequantize(blocks, GGMLQuantizationType(int(qtype)))
        except (ValueError, NotImplementedError) as error:
            raise UnsupportedError(
                f"the installed gguf package cannot decode {qtype.name}; upgrade it (pip install -U gguf)"
            ) from error

    return decode


def _formats() -> dict[QuantType, BlockFormat]:
    t = QuantType
    own = {
        t.Q4_0: q4_0,
        t.Q4_1: q4_1,
        t.Q5_0: q5_0,
        t.Q5_1: q5_1,
        t.Q8_0: q8_0,
        t.Q2_K: q2_k,
        t.Q3_K: q3_k,
        t.Q4_K: q4_k,
        t.Q5_K: q5_k,
        t.Q6_K: q6_k,
        t.IQ4_NL: iq4_nl,
        t.IQ4_XS: iq4_xs,
    }
    via_gguf = [
        (t.IQ1_S, 256, 50),
        (t.IQ1_M, 256, 56),
        (t.IQ2_XXS, 256, 66),
        (t.IQ2_XS, 256, 74),
        (t.IQ2_S, 256, 82),
        (t.IQ3_XXS, 256, 98),
        (t.IQ3_S, 256, 110),
        (t.TQ1_0, 256, 54),
        (t.TQ2_0, 256, 66),
        (t.MXFP4, 32, 17),
        (t.NVFP4, 64, 36),
    ]
    # Q8_1 and Q8_K are run-time formats, integers and F64 are no weights; they may still be listed in a file.
    sizes_only = [
        (t.Q8_1, 32, 36),
        (t.Q8_K, 256, 292),
        (t.Q1_0, 128, 18),
        (t.Q2_0, 64, 18),
        (t.I8, 1, 1),
        (t.I16, 1, 2),
        (t.I32, 1, 4),
        (t.I64, 1, 8),
        (t.F64, 1, 8),
    ]
    formats = [
        BlockFormat(t.F32, 1, 4, floats.decode_f32),
        BlockFormat(t.F16, 1, 2, floats.decode_f16),
        BlockFormat(t.BF16, 1, 2, floats.decode_bf16),
    ]
    formats += [BlockFormat(qtype, m.BLOCK_SIZE, m.BLOCK_BYTES, m.decode) for qtype, m in own.items()]
    formats += [BlockFormat(*row, _gguf_decoder(row[0])) for row in via_gguf]
    formats += [BlockFormat(*row, None) for row in sizes_only]
    return {block_format.type: block_format for block_format in formats}


FORMATS: dict[QuantType, BlockFormat] = _formats()

GPU_TYPES = frozenset(qtype for qtype, block_format in FORMATS.items() if block_format.decode)
"""Block types that kernels read: those with a decoder here have one in rawkernels/quants too."""


def decodable_types() -> list[str]:
    """Names of the types that `dequantize` reads, for error messages."""
    return [block_format.type.name for block_format in FORMATS.values() if block_format.decode]


def row_bytes(qtype: QuantType, num_elements: int) -> int:
    """Stored bytes of a row.

    Raises:
        ShapeError: num_elements is negative or not a whole number of blocks.
    """
    block_format = FORMATS[qtype]
    num_blocks, rest = divmod(num_elements, block_format.block_size)
    if rest or num_elements < 0:
        raise ShapeError(
            f"a row of {num_elements} elements is not a whole number of {qtype.name} blocks "
            f"({block_format.block_size} elements each)"
        )
    return num_blocks * block_format.block_bytes


def dequantize(data: np.ndarray, qtype: QuantType, out: np.ndarray | None = None) -> np.ndarray:
    """Decode packed rows to float32, bit for bit as ggml does (NaN payloads aside).

    Args:
        data: uint8 [..., row_bytes]; never written to. Fast when C-contiguous, correct with any strides.
        out: float32 [..., row_elements], filled and returned; a new array when None.

    Returns:
        float32 [..., row_elements], never a view of `data`.

    Raises:
        ShapeError: data or out do not fit the type.
        UnsupportedError: pyllm cannot decode the type.

    Source: ggml's dequantize_row_* functions, as formulas in each module of this package.
    """
    block_format = FORMATS[qtype]
    if block_format.decode is None:
        raise UnsupportedError(f"pyllm cannot decode {qtype.name}; it reads {', '.join(decodable_types())}")
    shape = _row_shape(data, block_format)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.dtype != np.float32 or out.shape != shape:
        raise ShapeError(f"out is {out.dtype} {out.shape}, expected float32 {shape}")
    # Damaged scales may be NaN or infinite: the result then is too, which is no reason for a warning.
    with np.errstate(all="ignore"):
        _decode_rows(data, block_format, block_format.decode, out)
    return out


def _row_shape(data: np.ndarray, block_format: BlockFormat) -> tuple[int, ...]:
    if data.dtype != np.uint8 or data.ndim == 0:
        raise ShapeError(f"packed rows are {data.dtype} {data.shape}, expected uint8 [..., row_bytes]")
    num_blocks, rest = divmod(data.shape[-1], block_format.block_bytes)
    if rest:
        raise ShapeError(
            f"a row of {data.shape[-1]} bytes is not a whole number of {block_format.type.name} blocks "
            f"({block_format.block_bytes} bytes each)"
        )
    return (*data.shape[:-1], num_blocks * block_format.block_size)


def _decode_rows(data: np.ndarray, block_format: BlockFormat, decode: Decoder, out: np.ndarray) -> None:
    """Decode in chunks; a strided array one slice of its first axis at a time, in the end through copies of rows."""
    if data.flags.c_contiguous and out.flags.c_contiguous:
        blocks = data.reshape(-1, block_format.block_bytes)
        values = out.reshape(-1, block_format.block_size)
        step = _CHUNK_ELEMENTS // block_format.block_size
        for start in range(0, len(blocks), step):
            decode(blocks[start : start + step], values[start : start + step])
    elif data.ndim > 1:
        for packed, row in zip(data, out, strict=True):
            _decode_rows(packed, block_format, decode, row)
    else:
        row = np.empty(out.shape, np.float32)
        _decode_rows(np.ascontiguousarray(data), block_format, decode, row)
        out[...] = row
