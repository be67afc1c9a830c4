"""gather_rows: K and V rows of a ubatch's longer sequences as float16, side by side.

`flash_attention` launches it before its kernel for many queries, which otherwise converts the same rows for every block
of queries anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputViews
from pyllm.kv_types import KVType
from pyllm.ops.check import require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.kv_cache import LayerCache

UNIT = 16  # rows of a block of the kernel; each sequence begins at a multiple
_THREADS = 256
_LARGEST = np.float32(65504)  # of float16


@dataclass(frozen=True)
class GatheredRows:
    """Where rows are gathered. C = capacity in rows, a multiple of UNIT; S = sequences.

    Attributes:
        k, v: [C, num_kv_heads * head_dim] float16.
        own: [C] uint32: 1, or 0 for a row that is not its sequence's own.
        spans: [S, 3] int32: row of a sequence's first gathered position, that position, and the one behind the last.
    """

    k: Any
    v: Any
    own: Any
    spans: Any

    @classmethod
    def within(cls, scratch: Any, num_rows: int, num_seqs: int, width: int) -> GatheredRows:
        """Views of scratch, [scratch_size(...)] float32 at least."""
        capacity = capacity_of(num_rows, num_seqs)
        size = capacity * width // 2
        k, v = (scratch[i * size : (i + 1) * size].view(np.float16).reshape(capacity, width) for i in range(2))
        own = scratch[2 * size : 2 * size + capacity].view(np.uint32)
        behind = 2 * size + capacity
        return cls(k, v, own, scratch[behind : behind + 3 * num_seqs].view(np.int32).reshape(num_seqs, 3))


def capacity_of(num_rows: int, num_seqs: int) -> int:
    """Rows for sequences of so many rows together, each of which begins at a multiple of UNIT."""
    return (-(-num_rows // UNIT) + num_seqs) * UNIT


def scratch_size(num_rows: int, num_seqs: int, width: int) -> int:
    """float32 elements of scratch for rows of `width` elements."""
    return capacity_of(num_rows, num_seqs) * (width + 1) + 3 * num_seqs


def gather_rows_ref(
    inputs: InputViews,
    num_seqs: int,
    min_tokens: int,
    window: int,
    cache: LayerCache,
    kv_type: KVType,
    record: np.ndarray,
    gathered: GatheredRows,
) -> None:
    base, capacity = 0, gathered.own.shape[0]
    for seq in range(num_seqs):
        tokens, stop = int(inputs.cu_seqlens[seq + 1] - inputs.cu_seqlens[seq]), int(inputs.kv_lens[seq])
        if tokens < min_tokens:
            continue
        first = max(0, stop - tokens - window + 1) if window else 0
        last = min(stop, first + max(0, capacity - base))
        gathered.spans[seq] = base, first, last
        _gather(inputs, seq, np.arange(first, last), cache, kv_type, record, gathered, base)
        base += -(-(stop - first) // UNIT) * UNIT


def _gather(
    inputs: InputViews,
    seq: int,
    positions: np.ndarray,
    cache: LayerCache,
    kv_type: KVType,
    record: np.ndarray,
    gathered: GatheredRows,
    base: int,
) -> None:
    slots, in_page = np.divmod(positions, cache.page_size)
    pages, expected = inputs.page_table[seq, slots], inputs.page_epochs[seq, slots]
    rows = pages.astype(np.int64) * cache.page_size + in_page
    own = cache.tags[rows] == expected
    target = slice(base, base + len(positions))
    for stored, out in ((cache.k, gathered.k), (cache.v, gathered.v)):
        values = np.clip(kv_type.decode(stored[rows]), -_LARGEST, _LARGEST)
        out[target] = np.where(own[:, None], values, np.float32(0))
    gathered.own[target] = own
    stale = np.flatnonzero(~own)
    if stale.size:
        entries = np.empty((len(stale), faults.WIDTH), np.int32)
        entries[:, 0], entries[:, 1], entries[:, 2] = faults.FaultKind.TAG, inputs.seq_ids[seq], cache.layer
        entries[:, 3], entries[:, 4], entries[:, 5] = pages[stale], in_page[stale], positions[stale]
        entries[:, 6], entries[:, 7] = expected[stale].view(np.int32), cache.tags[rows[stale]].view(np.int32)
        faults.report(record, entries)


def plan_gather_rows(
    target: Target,
    inputs: InputViews,
    num_seqs: int,
    min_tokens: int,
    window: int,
    cache: LayerCache,
    kv_type: KVType,
    record: Any,
    gathered: GatheredRows,
) -> list[KernelLaunch]:
    """Launches for all sequences with `min_tokens` tokens or more; others' rows are left out.

    Of each, the rows that a token of this ubatch sees: all, or with a window those from the first token's window on. A
    row whose tag differs from its page's epoch becomes zeros and a TAG fault. What does not fit into the capacity is
    left out, and missing in the spans.

    Numerics: one rounding to float16, to nearest even, of what float16 does not hold; beyond its range the largest.
    """
    capacity, width = gathered.k.shape
    require(kv_type.name != "f16", "gather_rows", "rows are float16 already")
    require(width % 8 == 0, "gather_rows", f"rows of {width} elements are not multiples of 8")
    require(capacity % UNIT == 0, "gather_rows", f"{capacity} rows are no multiple of {UNIT}")
    tables = (inputs.cu_seqlens, inputs.kv_lens, inputs.seq_ids, inputs.page_table, inputs.page_epochs, record)
    out = (gathered.k, gathered.v, gathered.own, gathered.spans)
    row_size, max_pages = cache.k.shape[1], inputs.page_table.shape[1]
    sizes = (num_seqs, min_tokens, window, width, row_size, max_pages, cache.page_size, cache.layer, capacity)
    args = (cache.k, cache.v, cache.tags, *tables, *out, *map(np.int32, sizes))
    grid, defines = (capacity // UNIT, 2), {"KV_TYPE": kv_type.code}
    return [KernelLaunch("gather_rows", "gather_rows", grid, (_THREADS,), args, defines)]


GATHER_ROWS = Op("gather_rows", gather_rows_ref, plan_gather_rows)
