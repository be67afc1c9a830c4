"""What the cases of `pyllm kernels bench` are made of: their sizes, samples of outputs, and what samples are compared
with, computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyllm.kernel_bench import Arguments, Pairs, Sample, arrays_in
from pyllm.ops.rope import RopePairing
from pyllm.quants import QuantType, dequantize

Read = Callable[..., np.ndarray]

F32_LIMIT = 1e-5  # sums in float32, and functions that GPUs approximate
F16_LIMIT = 2e-3  # factors rounded to float16
SAMPLED_TOKENS = 8
SAMPLED_COLUMNS = 64


@dataclass(frozen=True)
class Sizes:
    """Extents of the cases.

    Attributes:
        tokens: of products.
        matrices: (rows, row elements) of weights; every block type is measured with the first, the types of
            `all_matrices` with all of them.
        large_matrix: the same of a weight as large as that of a vocabulary, which one token is multiplied with; of
            every packed block type. Beside its time that of starting a kernel is short.
        few, many: tokens of the other ops, as in decoding and in prefill.
        hidden, inner: width of the residual stream, and of the feed-forward block.
        kv_width: elements of a K or V row.
        heads: (elements, query heads, K/V heads); those of the second are measured in decoding, too.
        prefill: (tokens, rows) of a sequence, its tokens included; the second with all types of rows and all heads.
        decode: (sequences, rows of each).
        vocabulary: columns of the logits.
        experts: (experts, used, rows, row elements), and tokens.
        delta: key heads, value heads and their elements, of recurrent layers.
    """

    tokens: tuple[int, ...] = (1, 8, 32, 128, 512, 2048)
    matrices: tuple[tuple[int, int], ...] = ((14336, 4096), (4096, 4096), (12288, 4096))
    all_matrices: tuple[QuantType, ...] = (QuantType.Q4_K, QuantType.Q8_0)
    large_matrix: tuple[int, int] = (131_072, 4096)
    few: int = 8
    many: int = 2048
    hidden: int = 4096
    inner: int = 12288
    kv_width: int = 1024
    heads: tuple[tuple[int, int, int], ...] = ((64, 32, 8), (128, 32, 8), (256, 16, 4))
    prefill: tuple[tuple[int, int], ...] = ((2048, 2048), (2048, 8192))
    decode: tuple[tuple[int, int], ...] = ((1, 32768), (8, 32768), (32, 32768))
    vocabulary: int = 151_936
    experts: tuple[int, int, int, int] = (128, 8, 768, 2048)
    expert_tokens: tuple[int, ...] = (1, 8, 64, 512, 2048, 8192)
    delta: tuple[int, int, int] = (16, 32, 128)


REAL = Sizes()
SMALL = Sizes(
    tokens=(1, 17),
    matrices=((64, 256),),
    all_matrices=(QuantType.Q4_K,),
    large_matrix=(80, 256),
    few=2,
    many=9,
    hidden=256,
    inner=256,
    kv_width=128,
    heads=((16, 2, 2), (32, 4, 2)),
    prefill=((70, 70), (9, 130)),
    decode=((1, 130), (3, 70)),
    vocabulary=5000,
    experts=(8, 2, 64, 256),
    expert_tokens=(1, 9),
    delta=(1, 2, 32),
)


def exactly(pairs: Pairs) -> Pairs:
    """Pairs of bytes: every bit has to be right."""
    return [(as_bytes(found), as_bytes(exact)) for found, exact in pairs]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array."""
    return np.ascontiguousarray(array).view(np.uint8)


def spread(count: int, most: int) -> np.ndarray:
    """Indices that are spread over 0..count-1, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def by_rows(compute: Callable[..., Any], inputs: Sequence[int], output: int, exact: bool = False) -> Any:
    """A sample of rows of an op that computes row by row.

    Args:
        compute: compute(*inputs) in float64.
        inputs: positions of the arguments that are taken apart by rows; others are given whole.
        output: position of the output.
        exact: compare bits, in the type of the output.
    """

    def sample(read: Read, arguments: Arguments) -> Sample:
        rows = spread(arguments[output].shape[0], SAMPLED_TOKENS)
        given = [wide(read(arguments[position], rows)) for position in inputs]

        def pairs() -> Pairs:
            found, expected = read(arguments[output], rows), compute(*given)
            if exact:
                return exactly([(found, expected.astype(found.dtype))])
            return [(found, expected)]

        return pairs

    return sample


def wide(array: np.ndarray) -> np.ndarray:
    """Floats as float64, others as they are."""
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def all_bytes(arguments: Arguments) -> float:
    """The size of all arrays: what an op moves that reads or writes each of them once."""
    return sum(array.nbytes for array in arrays_in(arguments))


def decoded(packed: np.ndarray, qtype: QuantType) -> np.ndarray:
    """Rows of a weight in float64."""
    return wide(packed if qtype == QuantType.F32 else dequantize(packed, qtype))


def silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up."""
    return gate / (1 + np.exp(-gate)) * up


def gelu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gelu(gate) * up, by the formula with tanh."""
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(inner)) * up


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairing: RopePairing) -> np.ndarray:
    """Heads [tokens, heads, head_dim], rotated by angles [tokens, n_rot / 2]."""
    half = cos.shape[1]
    interleaved = pairing == RopePairing.NORM
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    out = x.copy()
    a, b = x[:, :, first], x[:, :, second]
    out[:, :, first] = a * cos[:, None] - b * sin[:, None]
    out[:, :, second] = a * sin[:, None] + b * cos[:, None]
    return out


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm along the last axis."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight
