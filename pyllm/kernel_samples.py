"""What arguments of kernel cases are made of: random arrays and weights, sequences in pages; roundings of kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyllm import faults
from pyllm.input_block import InputLayout, InputViews
from pyllm.kernel_check import Arguments, convert
from pyllm.kv_cache import LayerCache
from pyllm.kv_types import KVType
from pyllm.ops.flash_attention import (
    NUM_COUNTERS,
)
from pyllm.ops.op import Target
from pyllm.quants import FORMATS, QuantType, dequantize, row_bytes
from pyllm.weight import Weight

HALF = 2.0**-11  # relative error of a rounding to f16
HOPPER = Target("cuda", "sm_90", 32, "mma")  # has further kernels
EMULATED_MMA = Target("host", "host", 32, "mma")  # takes them at smaller sizes
COMMON_TYPES = (QuantType.F16, QuantType.Q4_0, QuantType.Q8_0, QuantType.Q4_K, QuantType.Q6_K)
_LARGEST_VALUE = 8.0  # of a random weight: beside the large error of an outlier all others would go unseen
_DIFFERENT_BLOCKS = 1 << 14  # of a random weight

Rng = np.random.Generator


def normal(rng: Rng, *shape: int) -> np.ndarray:
    """Random float32."""
    return rng.standard_normal(shape, np.float32)


def unwritten(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """An output before the op ran: NaN, or -1."""
    return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else -1, dtype)


def random_weight(rng: Rng, qtype: QuantType, rows: int, row_elements: int) -> Weight:
    """A weight of any block type whose values are zero or of usual size."""
    if qtype == QuantType.F32:
        return Weight("random", (rows, row_elements), qtype, normal(rng, rows, row_elements))
    count, size = rows * row_bytes(qtype, row_elements) // FORMATS[qtype].block_bytes, FORMATS[qtype].block_bytes
    blocks = rng.integers(0, 256, (min(count, _DIFFERENT_BLOCKS), size), np.uint8)
    # Random bits make some values huge, and others subnormal, which GPUs flush to zero: draw those blocks anew.
    while (bad := ~_usual(dequantize(blocks, qtype)).all(axis=1)).any():
        blocks[bad] = rng.integers(0, 256, (int(bad.sum()), size), np.uint8)
    if count > len(blocks):
        blocks = blocks[rng.integers(0, len(blocks), count)]
    return Weight("random", (rows, row_elements), qtype, blocks.reshape(rows, -1))


def _usual(values: np.ndarray) -> np.ndarray:
    size = np.abs(values)
    return (size < _LARGEST_VALUE) & ((size == 0) | (size >= np.finfo(np.float32).tiny))


def paged(
    rng: Rng,
    lengths: Sequence[int],
    new: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    kv_type: KVType,
    page_size: int = 8,
    written: bool = True,
) -> tuple[InputViews, LayerCache]:
    """Sequences in shuffled pages, and the inputs of a ubatch with their last tokens.

    Args:
        lengths: rows of each sequence, this ubatch included.
        new: tokens of each sequence in this ubatch.
        written: their rows are in the cache already; otherwise they carry another tag.
    """
    num_pages = [-(-length // page_size) for length in lengths]
    layout = InputLayout(sum(new), len(lengths), max(num_pages))
    inputs = layout.views(np.zeros(layout.num_bytes, np.uint8))
    pages = rng.permutation(sum(num_pages) + 3)
    k, v = (kv_type.encode(normal(rng, page_size * len(pages), num_kv_heads * head_dim)) for _ in range(2))
    tags = np.full(len(k), 7, np.uint32)
    inputs.cu_seqlens[1:] = np.cumsum(new)
    inputs.kv_lens[:] = lengths
    inputs.seq_ids[:] = 100 + np.arange(len(lengths))
    first = 0
    for seq, count in enumerate(num_pages):
        own = inputs.page_table[seq, :count] = pages[first : first + count]
        epochs = inputs.page_epochs[seq, :count] = rng.integers(8, 2**32, count, np.uint32)
        first += count
        rows = (own[:, None] * page_size + np.arange(page_size)).reshape(-1)[: lengths[seq]]
        start = lengths[seq] - new[seq]
        tokens = slice(*inputs.cu_seqlens[seq : seq + 2])
        inputs.positions[tokens] = np.arange(start, lengths[seq])
        inputs.token_seq[tokens] = seq
        inputs.row_ids[tokens] = rows[start:]
        present = lengths[seq] if written else start
        tags[rows[:present]] = np.repeat(epochs, page_size)[:present]
    return inputs, LayerCache(k, v, tags, page_size, 5, np.zeros(NUM_COUNTERS, np.int32))


def empty_record() -> np.ndarray:
    """A fault record without faults."""
    return np.zeros(faults.record_shape(), np.int32)


def half(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float32) if array.dtype == np.float32 else array.copy()


def half_operands(arguments: Arguments) -> Arguments:
    return convert(arguments, half)


def listed(numbers: Sequence[int]) -> str:
    """Several sizes in the name of a case."""
    return "+".join(map(str, numbers))
