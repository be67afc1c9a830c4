"""flash_attention: causal attention of a ubatch over the paged KV cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputViews
from pyllm.kv_types import KV_TYPES, KVType
from pyllm.ops import gather_rows
from pyllm.ops.check import check_array, require
from pyllm.ops.gather_rows import GatheredRows, plan_gather_rows
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.kv_cache import LayerCache

# How the kernels cut up their work.
MAX_FEW = 8  # tokens of a sequence that are few: its rows are worth splitting over blocks
TARGET_BLOCKS = 132  # fill a large card
LEAST_ROWS = 256  # that are worth a block of their own while blocks are too few to fill the card ...
LEAST_ROWS_MORE = 4096  # ... and when they are not: one sequence may be much longer than the others
MOST_MORE = 8 * TARGET_BLOCKS  # blocks, then
SHORT = 2048  # rows that are read so fast that what happens before and after counts
MAX_SPLITS = 64
NUM_COUNTERS = 1 << 14  # of LayerCache.counters
WGMMA_ROWS = 128  # of a block
WGMMA_ALIGNMENT = 1024  # bytes
WGMMA_PANEL = 64  # elements
WGMMA_STATIC = 1 << 10  # bytes of static shared memory beyond STATIC_SHARED
MOST_STAGES = 7  # units of copies on their way
STATIC_SHARED = 2 << 10  # bytes that the kernels need beside their tiles
TOKEN_ROWS, TOKEN_SPLITS = 512, 16  # rows of a part and most parts, where each token is attended to by itself
GATHER_TOKENS = 64  # of a sequence: rows of other types are worth being converted for all of them at once
GATHER_ELEMENTS = 1 << 27  # of K, at most; each takes four bytes of scratch

LOG2_E = 1.4426950408889634
SMALLEST_FACTOR = 1e-30

QUERY_BLOCK = 128  # queries scored at once by the reference: bounds its scratch, changes no result


@dataclass(frozen=True)
class AttentionParams:
    """What an attention layer computes.

    Attributes:
        scale: factor on the scores, usually 1 / sqrt(key_length).
        window: sliding window in tokens, the query's own included; 0 means none.
        softcap: scores become softcap * tanh(score / softcap); 0 means none.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class AttentionShape:
    """Extents of a ubatch that choose kernels and their grids.

    Attributes:
        num_seqs: sequences.
        longest: most tokens that one sequence has here.
        few: sequences with at most so many tokens have their rows split; 0 when there are none.
        splits: most parts into which the rows of such a sequence are cut. A short one is cut into fewer.
        least_rows: rows that are worth a part.
        short: whether all sequences are short.
        num_rows: rows of all sequences together, at most.
    """

    num_seqs: int
    longest: int
    few: int
    splits: int
    least_rows: int
    short: bool
    num_rows: int

    @classmethod
    def of(
        cls, num_seqs: int, longest: int, most_rows: int, num_kv_heads: int, all_rows: int | None = None
    ) -> AttentionShape:
        """Choose the splits.

        Args:
            most_rows: rows of the longest sequence; an upper bound will do.
            all_rows: rows of all sequences together, or an upper bound; None: all may be as long as the longest.
        """
        num_rows = num_seqs * most_rows if all_rows is None else min(all_rows, num_seqs * most_rows)
        few = longest if longest <= MAX_FEW else int(num_seqs > 1)
        chunks, short = num_seqs * num_kv_heads, most_rows <= SHORT
        if not few or chunks * MAX_SPLITS > NUM_COUNTERS:
            return cls(num_seqs, longest, few, int(few > 0), LEAST_ROWS, short, num_rows)
        fill = min(TARGET_BLOCKS // chunks, -(-most_rows // LEAST_ROWS))
        more = min(MOST_MORE // chunks, most_rows // LEAST_ROWS_MORE)
        least_rows = LEAST_ROWS if fill >= more else LEAST_ROWS_MORE
        splits = max(1, min(max(fill, more), MAX_SPLITS))
        return cls(num_seqs, longest, few, splits, least_rows, short, num_rows)

    @classmethod
    def by_token(cls, num_tokens: int, most_rows: int) -> AttentionShape:
        """For tokens that each are a sequence of their own (`token_tables`): how a token's rows are split depends on
        their number alone.

        Args:
            most_rows: rows of the token that sees most; an upper bound will do.
        """
        splits = min(TOKEN_SPLITS, -(-most_rows // TOKEN_ROWS))
        return cls(num_tokens, 1, 1, splits, TOKEN_ROWS, False, 0)

    def scratch_size(
        self, target: Target | None, kv_type: KVType, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> int:
        """float32 elements of scratch: sums, a maximum and a total for each split, and later gathered rows."""
        tokens = 1 << (self.few - 1).bit_length() if self.few else 0
        parts = self.splits if self.splits > 1 else 0
        size = max(1, self.num_seqs * tokens * num_heads * parts * (head_dim + 2))
        width = num_kv_heads * head_dim
        if self.gathers(target, kv_type, head_dim, width):
            size = max(size, gather_rows.scratch_size(self.num_rows, self.num_seqs, width))
        return size

    def gathers(self, target: Target | None, kv_type: KVType, head_dim: int, width: int) -> bool:
        """Whether rows are converted once for all queries, into scratch."""
        if target is None or not _has_wgmma(target, head_dim) or kv_type.name == "f16":
            return False
        return self.longest >= GATHER_TOKENS and self.num_rows * width <= GATHER_ELEMENTS


def _has_wgmma(target: Target, head_dim: int) -> bool:
    return target.arch == "sm_90" and head_dim % 64 == 0


def flash_attention_ref(
    q: np.ndarray,
    inputs: InputViews,
    shape: AttentionShape,
    cache: LayerCache,
    kv_type: KVType,
    params: AttentionParams,
    record: np.ndarray,
    scratch: np.ndarray,
    out: np.ndarray,
) -> None:
    for seq in range(shape.num_seqs):
        start, stop = int(inputs.cu_seqlens[seq]), int(inputs.cu_seqlens[seq + 1])
        if start == stop:
            continue
        positions = inputs.positions[start:stop]
        first = max(0, int(positions.min()) - params.window + 1) if params.window else 0
        keys, values, absent = _own_rows(inputs, seq, first, int(positions.max()) + 1, cache, kv_type, record)
        for begin in range(start, stop, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, stop)
            block = inputs.positions[begin:end]
            visible = int(block.max()) + 1 - first
            mask = _mask(block, first, visible, params.window, absent)
            out[begin:end] = _attend(q[begin:end], keys[:visible], values[:visible], mask, params)


def _own_rows(
    inputs: InputViews, seq: int, first: int, stop: int, cache: LayerCache, kv_type: KVType, record: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Rows of positions first..stop-1 of a sequence as float32, and which of them are not its own (zeroed)."""
    size = cache.page_size
    index = np.arange(first // size, -(-stop // size))
    pages, epochs = inputs.page_table[seq, index], inputs.page_epochs[seq, index]
    skip = first - int(index[0]) * size
    wanted = slice(skip, skip + stop - first)
    if pages.size == 1 or (np.diff(pages) == 1).all():  # neighbours in memory: a view does
        base = int(pages[0]) * size
        rows: Any = slice(base + wanted.start, base + wanted.stop)
    else:
        rows = (pages.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)[wanted]
    expected = np.repeat(epochs, size)[wanted]
    tags = cache.tags[rows]
    keys, values = kv_type.decode(cache.k[rows]), kv_type.decode(cache.v[rows])
    absent = tags != expected
    if not absent.any():
        return keys, values, None
    stale = np.flatnonzero(absent)
    _report_stale(
        stale + first,
        int(inputs.seq_ids[seq]),
        np.repeat(pages, size)[wanted][stale],
        expected[stale],
        tags[stale],
        cache,
        record,
    )
    return _without(keys, absent), _without(values, absent), absent


def _without(rows: np.ndarray, absent: np.ndarray) -> np.ndarray:
    # Zeroed, not only masked: a weight of 0 times a NaN is a NaN.
    return np.where(absent[:, None], np.float32(0), rows)


def _report_stale(
    positions: np.ndarray,
    seq_id: int,
    pages: np.ndarray,
    expected: np.ndarray,
    found: np.ndarray,
    cache: LayerCache,
    record: np.ndarray,
) -> None:
    entries = np.empty((len(positions), faults.WIDTH), np.int32)
    entries[:, 0] = faults.FaultKind.TAG
    entries[:, 1] = seq_id
    entries[:, 2] = cache.layer
    entries[:, 3] = pages
    entries[:, 4] = positions % cache.page_size
    entries[:, 5] = positions
    entries[:, 6] = expected.view(np.int32)
    entries[:, 7] = found.view(np.int32)
    faults.report(record, entries)


def _mask(positions: np.ndarray, first: int, visible: int, window: int, absent: np.ndarray | None) -> np.ndarray | None:
    """[num_queries, visible] bool, true where a key must not be seen; None when every key may be seen."""
    if len(positions) == 1 and absent is None and (not window or positions[0] - first < window):
        return None  # one query, and the rows were cut to what it may see
    key = np.arange(first, first + visible)
    hidden = key[None, :] > positions[:, None]
    if window:
        hidden |= positions[:, None] - key[None, :] >= window
    if absent is not None:
        hidden |= absent[None, :visible]
    return hidden


def _attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, hidden: np.ndarray | None, params: AttentionParams
) -> np.ndarray:
    """softmax(scale * q kᵀ) v for one block of queries of one sequence."""
    num_queries, num_heads, key_length = q.shape
    num_kv_heads = keys.shape[1] // key_length
    group = num_heads // num_kv_heads
    # [kv_heads, group * queries, key_length] x [kv_heads, key_length, rows]: query head j uses kv head j // group
    by_head = q.reshape(num_queries, num_kv_heads, group, key_length).transpose(1, 2, 0, 3)
    grouped = by_head.reshape(num_kv_heads, group * num_queries, key_length)
    scores = np.matmul(grouped, keys.reshape(-1, num_kv_heads, key_length).transpose(1, 2, 0))
    scores *= np.float32(params.scale)
    if params.softcap:
        scores = np.float32(params.softcap) * np.tanh(scores / np.float32(params.softcap))
    if hidden is not None:
        np.copyto(scores.reshape(num_kv_heads, group, num_queries, -1), -np.inf, where=hidden)
    weights = _softmax(scores)
    mixed = np.matmul(weights, values.reshape(values.shape[0], num_kv_heads, -1).transpose(1, 0, 2))
    by_query = mixed.reshape(num_kv_heads, group, num_queries, -1).transpose(2, 0, 1, 3)
    return by_query.reshape(num_queries, num_heads, -1)


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax along the last axis, in place; a row without a visible key becomes zeros."""
    peak = scores.max(axis=-1, keepdims=True)
    peak[np.isneginf(peak)] = 0
    scores -= peak
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    total[total == 0] = 1
    scores /= total
    return scores


@dataclass(frozen=True)
class _Tile:
    """Compile-time extents of the kernel for many queries; see rawkernels/flash_attention.cu."""

    slice_keys: int
    warps: int
    row_tiles: int
    q_shared: int

    def rows(self) -> int:
        return 16 * self.row_tiles * self.warps

    def shared_bytes(self, head_dim: int) -> int:
        """Two slices of K and V, and the queries."""
        return 2 * (head_dim + 8) * (4 * self.slice_keys + self.q_shared * self.rows())


_TILES = (_Tile(64, 4, 2, 1), _Tile(32, 4, 2, 1), _Tile(32, 4, 1, 0), _Tile(32, 4, 1, 1), _Tile(16, 4, 1, 1))
_LARGE_TILES = (_Tile(32, 8, 1, 1), _Tile(16, 4, 1, 1), _Tile(16, 2, 1, 1))  # heads whose sums fill the registers


def _shared_limit(target: Target) -> int:
    """Bytes of shared memory for a block's tiles."""
    limit = 64
    if target.arch.startswith("sm_"):
        version = int(target.arch.removeprefix("sm_"))
        limit = 99 if version in (86, 89, 120, 121) else 163 if version < 90 else 227
    return (limit << 10) - STATIC_SHARED


def _tile(target: Target, kv_type: KVType, head_dim: int) -> _Tile:
    tiles: tuple[_Tile, ...] = _TILES if head_dim <= 128 else _LARGE_TILES
    if kv_type.name != "f16":  # conversions take registers
        tiles = tuple(tile for tile in tiles if tile.slice_keys <= 32)
    if target.vendor == "hip":  # queries take twice the registers of NVIDIA's products
        tiles = tuple(tile for tile in tiles if tile.row_tiles == 1 and (tile.q_shared or head_dim <= 64))
    return next(tile for tile in tiles if tile.shared_bytes(head_dim) <= _shared_limit(target))


def _divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`."""
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)


def plan_flash_attention(
    target: Target,
    q: Any,
    inputs: InputViews,
    shape: AttentionShape,
    cache: LayerCache,
    kv_type: KVType,
    params: AttentionParams,
    record: Any,
    scratch: Any,
    out: Any,
) -> list[KernelLaunch]:
    _, num_heads, head_dim = q.shape
    require(head_dim % 16 == 0, "flash_attention", f"head size {head_dim} is not a multiple of 16")
    require(head_dim % kv_type.block == 0, "flash_attention", f"head size {head_dim} cuts blocks of {kv_type.name}")
    require(out.shape == q.shape, "flash_attention", "key and value length differ")
    require(params.scale >= 0, "flash_attention", "a negative scale")
    kv_heads = kv_type.width(cache.k.shape[1]) // head_dim
    group = num_heads // kv_heads
    tables = (inputs.seq_ids, inputs.page_table, inputs.page_epochs, record)
    rows = (q, cache.k, cache.v, cache.tags)
    # Weights are powers of two. A factor of zero would spoil the -infinity of rows that are not seen.
    factor = LOG2_E * (1.0 if params.softcap else max(params.scale, SMALLEST_FACTOR))
    numbers = (np.float32(params.scale), np.float32(params.softcap), np.float32(factor), np.int32(params.window))
    sizes = (cache.k.shape[1], inputs.page_table.shape[1], cache.page_size, cache.layer)
    defines = {"KV_TYPE": kv_type.code, "HEAD_DIM": head_dim, "IO_F16": int(q.dtype.name == "float16")}
    defines["HAS_SOFTCAP"] = int(params.softcap > 0)
    launches = []
    if shape.few:
        tokens = 1 << (shape.few - 1).bit_length()
        split, shared = _split(target, kv_type, head_dim, group, tokens, shape.short)
        grid = (shape.splits, kv_heads * -(-group // split["HEADS"]), shape.num_seqs)
        extents = map(np.int32, (kv_heads, group, *sizes, shape.least_rows))
        lengths = (inputs.cu_seqlens, inputs.kv_lens)
        args = (*rows, *lengths, *tables, scratch, cache.counters, out, *numbers, *extents)
        block = (split["WARPS"] * target.warp_size,)
        source = "flash_attention_split"
        launches.append(KernelLaunch(source, source, grid, block, args, {**defines, **split}, shared))
    if shape.longest > shape.few and _has_wgmma(target, head_dim):
        pack = _divisor(group, min(group, WGMMA_ROWS // 2))
        tiles = num_heads // pack * -(-shape.longest // (WGMMA_ROWS // pack)) * shape.num_seqs
        width, stored_as, page_epochs = kv_heads * head_dim, kv_type, inputs.page_epochs
        gathers = shape.gathers(target, kv_type, head_dim, width)
        if gathers:
            gathered = GatheredRows.within(scratch, shape.num_rows, shape.num_seqs, width)
            given = (shape.num_seqs, shape.few + 1, params.window, cache, kv_type, record, gathered)
            launches += plan_gather_rows(target, inputs, *given)
            rows, tables = (
                (q, gathered.k, gathered.v, gathered.own),
                (inputs.seq_ids, gathered.spans, page_epochs, record),
            )
            stored_as, sizes = KV_TYPES["f16"], (width, gathered.spans.shape[1], cache.page_size, cache.layer)
        cut, shared = _wgmma(stored_as, head_dim, _shared_limit(target) - WGMMA_STATIC)
        extents = map(np.int32, (shape.num_seqs, num_heads, kv_heads, *sizes, shape.few + 1))
        args = (*rows, inputs.positions, inputs.cu_seqlens, *tables, cache.counters, out, *numbers, *extents)
        defines |= {"KV_TYPE": stored_as.code, "PACK": pack, "GATHERED": int(gathers), **cut}
        source, blocks = "flash_attention_wgmma", min(tiles, TARGET_BLOCKS)
        launches.append(KernelLaunch(source, source, (blocks,), (384,), args, defines, shared, "sm_90a"))
    elif shape.longest > shape.few:
        tile = _tile(target, kv_type, head_dim)
        pack = _divisor(group, min(group, tile.rows() // 2))
        grid = (num_heads // pack, -(-shape.longest // (tile.rows() // pack)), shape.num_seqs)
        extents = map(np.int32, (kv_heads, *sizes, shape.few + 1))
        args = (*rows, inputs.positions, inputs.cu_seqlens, *tables, out, *numbers, *extents)
        defines |= {"PACK": pack, "SLICE": tile.slice_keys, "WARPS": tile.warps}
        defines |= {"ROW_TILES": tile.row_tiles, "Q_SHARED": tile.q_shared}
        block, shared = (tile.warps * target.warp_size,), tile.shared_bytes(head_dim)
        launches.append(KernelLaunch("flash_attention", "flash_attention", grid, block, args, defines, shared))
    return launches


def _wgmma(kv_type: KVType, head_dim: int, limit: int) -> tuple[dict[str, int], int]:
    """Compile-time extents of rawkernels/flash_attention_wgmma.cu, and bytes of its dynamic shared memory."""
    slice_keys = 128 if WGMMA_ALIGNMENT + 2 * head_dim * (WGMMA_ROWS + 4 * 128) <= limit else 64
    tiles = WGMMA_ALIGNMENT + 2 * head_dim * (WGMMA_ROWS + 4 * slice_keys)  # the queries, and two slices of K and V
    if kv_type.name == "f16":
        return {"SLICE": slice_keys, "STAGES": 0}, tiles
    blocks = WGMMA_PANEL // kv_type.block
    stored = kv_type.row_bytes(WGMMA_PANEL) if kv_type.block == 1 else blocks * (kv_type.block_bytes - 2)
    copies = slice_keys * head_dim // WGMMA_PANEL * stored // 16 // 128  # of a thread, of K or V
    unit = next(size for size in (4, 3, 2, 1) if copies % size == 0)
    unit_bytes = 128 * unit * (16 if kv_type.block == 1 else 20)
    stages = min(MOST_STAGES, 2 * copies // unit + 1, (limit - tiles) // unit_bytes)
    return {"SLICE": slice_keys, "STAGES": stages}, tiles + stages * unit_bytes


def _split(
    target: Target, kv_type: KVType, head_dim: int, group: int, tokens: int, short: bool
) -> tuple[dict[str, int], int]:
    """Compile-time extents of rawkernels/flash_attention_split.cu, and bytes of its dynamic shared memory."""
    exact = int(tokens == 1)
    most_rows = (8 if exact else 16) * (2 if head_dim <= 128 else 1)
    split = {"HEADS": min(group, most_rows // tokens), "TOKENS": tokens, "EXACT": exact}
    direct = target.tiles == "mma" and kv_type.name != "f16" and head_dim % 64 == 0
    whole = direct and exact and kv_type.block > 1  # scores in whole numbers
    split["KEYS"] = 16 if short or head_dim > 128 or ((head_dim > 64 or direct) and not whole) else 32
    split["DIRECT"] = int(direct)
    # Slices in flight; a few warps with several do more than many with one.
    ahead = (2,) if short or (whole and split["KEYS"] == 32) else (3, 2)
    sizes = [*itertools.product((8, 4, 2), ahead), *itertools.product((8, 4, 2, 1), (1,))]
    if direct:  # rows take more registers than shared memory
        sizes = [*itertools.product((8, 6), ahead), (4, 2), (3, 2), *sizes]
    if target.vendor == "hip":  # nothing is copied in the background there
        sizes = [(warps, 1) for warps in (8, 4, 2, 1)]
    for split["WARPS"], split["STAGES"] in sizes:
        shared = _split_shared_bytes(kv_type, head_dim, split)
        if shared + _split_static_bytes(head_dim, split) <= _shared_limit(target):
            break
    return split, shared


def _split_rows(split: dict[str, int]) -> int:
    used = 8 if split["EXACT"] else 16
    return -(-split["HEADS"] * split["TOKENS"] // used) * used


def _split_static_bytes(head_dim: int, split: dict[str, int]) -> int:
    tiles = _split_rows(split) // (8 if split["EXACT"] else 16)
    return 2 * tiles * 16 * (head_dim + 8) + 8 * split["WARPS"] * _split_rows(split)


def _split_shared_bytes(kv_type: KVType, head_dim: int, split: dict[str, int]) -> int:
    """Slices of K and V, and tiles of one; behind the loop all warps' sums, then the shares of all splits."""
    rows, terms = 2 * split["KEYS"], 2 if kv_type.name == "f32" and split["EXACT"] else 1
    tiles = terms * rows * 2 * (head_dim + 8)
    converted = 0 if split["DIRECT"] else tiles
    if kv_type.name == "f16":
        slices = split["STAGES"] * tiles
    elif kv_type.block == 1:
        slices = split["STAGES"] * rows * kv_type.row_bytes(head_dim) + converted
    else:
        scales = head_dim // kv_type.block * 2
        codes = head_dim // kv_type.block * kv_type.block_bytes - scales
        pieces = 1 if scales <= 16 and 16 % scales == 0 else 2
        slices = split["STAGES"] * rows * (codes + 16 * pieces) + converted
    num_rows = _split_rows(split)
    return max(split["WARPS"] * max(slices, 4 * num_rows * head_dim), 4 * num_rows * (MAX_SPLITS + 1))


FLASH_ATTENTION = Op("flash_attention", flash_attention_ref, plan_flash_attention)


def flash_attention(
    device: Device,
    q: Any,
    inputs: InputViews,
    shape: AttentionShape,
    cache: LayerCache,
    kv_type: KVType,
    params: AttentionParams,
    record: Any,
    scratch: Any,
    out: Any,
) -> None:
    """Causal grouped-query attention of each token over the rows of its own sequence.

    Token t of sequence s at position p sees rows j <= p (and p - j < window) of s. They are found through the page
    table, so rows of other sequences are not even addressed. A row whose tag differs from its page's epoch counts as
    absent: it is left out of the sum and a TAG fault is recorded. The rows of this ubatch must have been written by
    `set_rows` before.

    Args:
        q: [num_tokens, num_heads, key_length] float32 or float16; num_heads is a multiple of the kv heads.
        inputs: the device's input block.
        shape: extents of this ubatch.
        cache: one layer's K, V and tags.
        kv_type: how rows are stored.
        params: scale, window, soft cap.
        record: fault record; appended to.
        scratch: [shape.scratch_size(device.target, ...)] float32; overwritten.
        out: [num_tokens, num_heads, value_length] as q; must not overlap it.

    Numerics: scores, softmax and sums in float32, one rounding to a float16 `out`. Kernels for many queries round rows
    to float16 first; what is beyond its range becomes the largest float16. A query that sees no row gives zeros.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023, arXiv:2305.13245.
    """
    check_array("flash_attention", "q", q, (None, None, None), ("float32", "float16"))
    num_tokens, num_heads, key_length = q.shape
    k_width = kv_type.width(cache.k.shape[1])
    require(k_width % key_length == 0, "flash_attention", f"key_length {key_length} does not divide the rows")
    num_kv_heads = k_width // key_length
    require(num_heads % num_kv_heads == 0, "flash_attention", f"{num_heads} heads over {num_kv_heads} kv heads")
    value_length = kv_type.width(cache.v.shape[1]) // num_kv_heads
    check_array("flash_attention", "out", out, (num_tokens, num_heads, value_length), (q.dtype.name,))
    check_array("flash_attention", "record", record, faults.record_shape(), ("int32",))
    size = shape.scratch_size(device.target, kv_type, num_heads, num_kv_heads, value_length)
    check_array("flash_attention", "scratch", scratch, (size,), ("float32",))
    device.launch(FLASH_ATTENTION, q, inputs, shape, cache, kv_type, params, record, scratch, out)
