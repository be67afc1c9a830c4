"""Tiles of products on Hopper's matrix instructions: sizes, shared memory and defines for
rawkernels/common/product_wgmma.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from pyllm.ops.op import KernelLaunch, Target
from pyllm.ops.product_tile import COPIED, packed_pitch
from pyllm.quants import QuantType
from pyllm.weight import Weight

ALIGNMENT = 1024  # bytes
BK = 64
SHARED_OF_BLOCK, SHARED_OF_ALL = 227 << 10, 228 << 10  # bytes: at most, and of all blocks of a multiprocessor
RESERVED = 1 << 10  # bytes of each block that are the system's
STATIC_SHARED = 256  # bytes: the kernel's signals
WGMMA_MATRICES = 3  # of one launch
EARLY_TOKENS = 64  # up to here launches start early (`executor.OVERLAP_TOKENS`)
SHARE_K = 256  # a multiple of which each share of k has
SUM_TIME, SUM_TIME_OF_ELEMENT = 3000.0, 8 / 3500  # ns, of `sum_parts`: its launch, and 8 bytes of each element
CLEAR_GAIN = 0.85  # of the time as it would be otherwise: where costs promised 0.91 it was longer (BENCHMARKS.md)


@dataclass(frozen=True)
class WgmmaTile:
    """How a product is cut up.

    Attributes:
        rows, tokens: rows of the weight and of x that a block works on at a time.
        grain: products are computed for tokens up to the next multiple of this.
        x_stages, w_stages: steps of 64 elements of both in shared memory.
        consumers, decoders: groups of four warps that multiply, and that decode; without the latter weights are copied
            as they are. One more copies x.
        blocks: that share a multiprocessor.
        costs: what a step takes, in ns, where 1, 2, .. `blocks` blocks share a multiprocessor; see BENCHMARKS.md.
    """

    rows: int
    tokens: int
    grain: int = 64
    x_stages: int = 4
    w_stages: int = 4
    consumers: int = 2
    decoders: int = 2
    blocks: int = 1
    costs: tuple[int, ...] = ()

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + self.decoders + 1)

    def defines(self, qtype: QuantType, output: int) -> dict[str, int]:
        """Macros of common/product_wgmma.cuh.

        Args:
            output: as in `wgmma_launch`.
        """
        return {
            "QTYPE": int(qtype),
            "ROWS": self.rows,
            "TOKENS": self.tokens,
            "GRAIN": self.grain,
            "X_STAGES": self.x_stages,
            "W_STAGES": self.w_stages,
            "CONSUMERS": self.consumers,
            "DECODERS": self.decoders,
            "BLOCKS": self.blocks,
            "OUTPUT": output,
        }

    def shared_bytes(self, qtype: QuantType) -> int:
        """Dynamic shared memory: x and the decoded weight of all stages, and packed rows."""
        stages = 2 * BK * (self.x_stages * self.tokens + self.w_stages * self.rows)
        return ALIGNMENT + stages + (0 if qtype == COPIED else 2 * self.rows * packed_pitch(qtype))

    def fits(self, qtype: QuantType) -> bool:
        """Whether a multiprocessor has the shared memory for its blocks."""
        block = self.shared_bytes(qtype) + STATIC_SHARED
        return block <= SHARED_OF_BLOCK and self.blocks * (block + RESERVED) <= SHARED_OF_ALL

    def num_tiles(self, num_tokens: int, num_rows: Sequence[int]) -> int:
        """How many products with several matrices have."""
        return -(-num_tokens // self.tokens) * sum(-(-rows // self.rows) for rows in num_rows)

    def cost(self, num_tokens: int, num_rows: Sequence[int], multiprocessors: int, shares: int = 1) -> int:
        """About how long all waves of blocks take, in ns per step of K; `shares`: of k, each with tiles of its own."""
        tiles = self.num_tiles(num_tokens, num_rows) * shares
        waves, rest = divmod(tiles, multiprocessors * self.blocks)
        sharing = -(-rest // multiprocessors)
        last = self.costs[sharing - 1] if sharing else 0
        if sharing and num_tokens <= EARLY_TOKENS:  # blocks may find places beside each other while others are free
            last = (last + self.costs[-1]) // 2
        return waves * self.costs[-1] + last


def uses_wgmma(target: Target | None, qtype: QuantType) -> bool:
    """Whether products of many tokens are these: on Hopper, of all block types."""
    return target is not None and target.arch == "sm_90"


TILES = (
    WgmmaTile(128, 256, x_stages=4, w_stages=3, costs=(1010,)),
    WgmmaTile(128, 128, x_stages=4, w_stages=4, costs=(660,)),
    WgmmaTile(128, 64, x_stages=4, w_stages=4, costs=(530,)),
    WgmmaTile(64, 128, x_stages=3, w_stages=3, consumers=1, decoders=1, blocks=2, costs=(450, 750)),
    WgmmaTile(64, 64, x_stages=4, w_stages=4, consumers=1, decoders=1, blocks=2, costs=(360, 580)),
)
EXPERT_TOKENS = (32, 64, 128, 160, 192)  # that lists of experts may have in a tile


@dataclass(frozen=True)
class Cut:
    """How a product is cut up: into tiles, and k into shares, whose sums `sum_parts` adds up.

    Attributes:
        time: about how long it takes, in ns.
    """

    tile: WgmmaTile
    shares: int
    time: float


def product_cut(target: Target, num_tokens: int, num_rows: Sequence[int], k: int, most_shares: int = 1) -> Cut:
    """For matrices of so many rows with `k` elements, that which takes the least time; shares only for a clear gain."""
    return _cut(target.multiprocessors, num_tokens, tuple(num_rows), k, most_shares)


@lru_cache(maxsize=4096)  # all layers of a model ask, several times for each product
def _cut(multiprocessors: int, num_tokens: int, num_rows: tuple[int, ...], k: int, most_shares: int) -> Cut:
    """`product_cut`."""
    steps = -(-k // BK)

    def best(shares: int) -> Cut:
        costs = (tile.cost(num_tokens, num_rows, multiprocessors, shares) for tile in TILES)
        cost, tile = min(zip(costs, TILES, strict=True), key=lambda pair: pair[0])
        of_sum = SUM_TIME + shares * num_tokens * sum(num_rows) * SUM_TIME_OF_ELEMENT if shares > 1 else 0.0
        return Cut(tile, shares, -(-steps // shares) * cost + of_sum)

    alone = best(1)
    several = range(2, min(most_shares, k // SHARE_K) + 1) if k % SHARE_K == 0 else ()
    shared = min((best(shares) for shares in several), key=lambda cut: cut.time, default=alone)
    return shared if shared.time <= CLEAR_GAIN * alone.time else alone


def gains_together(target: Target, num_tokens: int, num_rows: Sequence[int], k: int, most_shares: int = 1) -> bool:
    """Whether products with several matrices take clearly less time in one launch than in one each."""
    apart = sum(product_cut(target, num_tokens, [rows], k, most_shares).time for rows in num_rows)
    return product_cut(target, num_tokens, num_rows, k, most_shares).time <= CLEAR_GAIN * apart


def expert_tile(bm: int, qtype: QuantType) -> WgmmaTile:
    """The tile for products of one expert each; `bm` is that of their lists."""
    if bm == 64 and qtype != COPIED:  # bound by what decodes: more of it, where packed rows leave room
        several = (WgmmaTile(64 * n, bm, grain=32, w_stages=7 - n, consumers=2 + n % 2, decoders=n) for n in (4, 3))
        if tile := next((tile for tile in several if tile.fits(qtype)), None):
            return tile
    return for_type(WgmmaTile(128, bm, grain=32), qtype)


def for_type(tile: WgmmaTile, qtype: QuantType) -> WgmmaTile:
    """A tile for a block type: weights that are copied as they are need no decoders and no room for packed rows; where
    packed rows are large, fewer steps of x have to do."""
    if qtype == COPIED:
        return replace(tile, decoders=0, x_stages=4, w_stages=4)
    while not tile.fits(qtype):
        tile = replace(tile, x_stages=tile.x_stages - 1)
    return tile


def wgmma_launch(
    target: Target,
    x: Any,
    weights: Sequence[Weight],
    outs: Sequence[Any],
    out_columns: int,
    output: int,
    tile: WgmmaTile,
    shares: int = 1,
) -> KernelLaunch:
    """x times up to WGMMA_MATRICES weights of one block type by `mul_mat_wgmma`.

    Args:
        x: [num_tokens, in_features] float16.
        outs: of each weight, its products' first element and all behind it, float32 or float16.
        out_columns: elements from one row of products to the next.
        output: 0: float32, 1: float16, 2: added to float32.
        tile: as `for_type` has it.
        shares: of k. With several, outs are those of the first, in float32; the next are num_tokens * out_columns on.
    """
    (num_tokens, k), first = x.shape, weights[0]
    rows, spare = [weight.shape[0] for weight in weights], WGMMA_MATRICES - len(weights)
    blocks = min(tile.num_tiles(num_tokens, rows) * shares, target.multiprocessors * tile.blocks)
    packed = [*(weight.array for weight in weights), *[first.array] * spare]
    sizes = map(np.int32, (num_tokens, *rows, *[0] * spare, k, out_columns, shares))
    return KernelLaunch(
        "mul_mat_wgmma",
        "mul_mat_wgmma",
        (blocks,),
        (tile.threads,),
        (x, *packed, *outs, *[outs[0]] * spare, np.int64(first.row_bytes), *sizes),
        tile.defines(first.qtype, output),
        tile.shared_bytes(first.qtype),
        "sm_90a",
    )
