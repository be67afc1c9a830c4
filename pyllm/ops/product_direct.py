"""Products of tens of tokens on Hopper whose weights are decoded into registers: how `mul_mat_wgmma_direct` cuts them
up, and the activations that `arrange_x` puts in its order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from pyllm.ops.op import KernelLaunch, Target
from pyllm.ops.product_tile import row_pitch
from pyllm.ops.product_wgmma import ALIGNMENT, CLEAR_GAIN, SHARED_OF_BLOCK, STATIC_SHARED, SUM_TIME, SUM_TIME_OF_ELEMENT
from pyllm.quants import FORMATS, QuantType
from pyllm.weight import Weight

DIRECT_MATRICES = 3  # of one launch
FEW_TOKENS = 16  # up to these, other kernels take less time
TILE_TOKENS = (32, 64, 128)
UNIT_K = 256
ARRANGE_THREADS = 256
ROWS_OF_GROUP = 64
W_STAGES = 2  # units of packed rows on their way to a warp
MOST_X_STAGES = 4
FOURS_TYPES = frozenset(QuantType[name] for name in ("Q4_0", "Q8_0", "Q6_K", "IQ4_NL", "IQ4_XS"))  # WHOLE in the kernel
HELD_TYPES = frozenset({QuantType.Q4_K, QuantType.Q5_K})
QUICK_TYPES = frozenset(QuantType[name] for name in ("Q4_0", "Q4_1", "Q5_1", "Q2_K", "Q4_K"))  # to decode
LARGE_PRODUCT = 1 << 26  # weights, from which on the others are faster, too
HELD_TOKENS = 64  # up to these, whose sums leave registers for those of one unit

# ns, measured (BENCHMARKS.md): of a step, in which each group has 64 x 256 weights; of these weights and of each token,
# one group after the other; of a tile, and more where groups share k
STEP_TIME, DECODE_TIME, DECODE_TIME_OF_HELD, TOKEN_TIME = 400.0, 680.0, 270.0, 3.9
TILE_TIME, SHARING_TIME = 300.0, 1700.0
FEW_STAGES = 1.15  # times as long, with two stages of x
ARRANGE_TIME, ARRANGE_TIME_OF_ELEMENT = 2200.0, 6 / 3500  # a launch, and 6 bytes of each


class Order(IntEnum):
    """Of each 32 k, which a lane supplies, and in what order; ORDER in arrange_x.cu."""

    EIGHTS = 0
    HELD_EIGHTS = 1
    FOURS = 2


@dataclass(frozen=True)
class Groups:
    """Of four warps each, how they share a tile.

    Attributes:
        groups: of a block.
        kparts: that share the k of 64 rows.
    """

    groups: int
    kparts: int

    def results(self, gate: bool) -> int:
        """Columns of out in a tile."""
        return ROWS_OF_GROUP * (self.groups // self.kparts) // (2 if gate else 1)


GROUPS = (Groups(4, 1), Groups(3, 1), Groups(4, 2), Groups(2, 1), Groups(4, 4), Groups(3, 3))


@dataclass(frozen=True)
class Direct:
    """How a product is cut up.

    Attributes:
        qtype: of the weights.
        tokens: of a tile.
        groups: that share a tile.
        shares: of k, each of other blocks; with several, sums of all are added up by `sum_parts`.
        blocks: of the launch.
        row_bytes: of a weight.
        time: about how long it takes, in ns.
    """

    qtype: QuantType
    tokens: int
    groups: Groups
    shares: int
    blocks: int
    row_bytes: int
    time: float

    @classmethod
    def of(cls, target: Target, num_tokens: int, weights: Sequence[Weight], gate: bool, most_shares: int = 1) -> Direct:
        """For up to DIRECT_MATRICES weights of one type, that which takes the least time.

        Args:
            gate: over the products of two of them.
            most_shares: of k; several only for a clear gain.
        """
        first, rows = weights[0], tuple(weight.shape[0] for weight in (weights[:1] if gate else weights))
        size = (first.qtype, rows, first.shape[1], first.row_bytes)
        return _best(target.multiprocessors, num_tokens, *size, gate, most_shares)

    @property
    def held(self) -> bool:
        """Whether a power of two of each unit's scales stays out of its weights."""
        return self.order == Order.HELD_EIGHTS

    @property
    def order(self) -> Order:
        """In which it takes x."""
        if self.qtype in HELD_TYPES and self.tokens <= HELD_TOKENS:
            return Order.HELD_EIGHTS
        return Order.FOURS if self.qtype in FOURS_TYPES else Order.EIGHTS

    @property
    def x_k(self) -> int:
        """k of a tile of x."""
        return 128 if self.tokens <= 32 else 64

    @property
    def unit_bytes(self) -> int:
        """Of UNIT_K weights of a row."""
        block = FORMATS[self.qtype]
        return UNIT_K // block.block_size * block.block_bytes

    @property
    def aligned(self) -> bool:
        """Whether units begin at multiples of 16 bytes."""
        return self.unit_bytes % 16 == 0 and self.row_bytes % 16 == 0

    @property
    def x_stages(self) -> int:
        """Of x in shared memory, at least two; 0 where there is no room."""
        room = SHARED_OF_BLOCK - STATIC_SHARED - self._shared_bytes(0)
        stages = min(MOST_X_STAGES, room // (self.groups.kparts * self.tokens * self.x_k * 2))
        return stages if stages >= 2 else 0

    @property
    def threads(self) -> int:
        """Of a block; the last group copies x."""
        return 128 * (self.groups.groups + 1)

    def _shared_bytes(self, x_stages: int) -> int:
        groups, kparts = self.groups.groups, self.groups.kparts
        x = x_stages * kparts * self.tokens * self.x_k * 2
        pitch = row_pitch(self.unit_bytes, self.aligned, self.qtype in FOURS_TYPES)
        exchange = (groups - groups // kparts) * self.tokens * ROWS_OF_GROUP * 4
        return ALIGNMENT + x + groups * 4 * W_STAGES * 16 * pitch + exchange

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: x, packed rows, and sums of groups that share k."""
        return self._shared_bytes(self.x_stages)

    def defines(self) -> dict[str, int]:
        """Macros of rawkernels/mul_mat_wgmma_direct.cu that cut the product up."""
        return {
            "QTYPE": int(self.qtype),
            "TOKENS": self.tokens,
            "GROUPS": self.groups.groups,
            "KPARTS": self.groups.kparts,
            "X_K": self.x_k,
            "X_STAGES": self.x_stages,
            "W_STAGES": W_STAGES,
            "HELD": int(self.held),
            "UNIT_BYTES": self.unit_bytes,
            "ALIGNED": int(self.aligned),
        }


@lru_cache(maxsize=4096)
def _best(
    multiprocessors: int,
    num_tokens: int,
    qtype: QuantType,
    rows: tuple[int, ...],
    k: int,
    row_bytes: int,
    gate: bool,
    most_shares: int,
) -> Direct:
    """`Direct.of`."""
    tokens, units = tile_tokens(num_tokens), k // UNIT_K
    decode = DECODE_TIME_OF_HELD if qtype in HELD_TYPES else DECODE_TIME

    def cut(groups: Groups, shares: int) -> Direct:
        tiles = sum(-(-n // groups.results(gate)) for n in rows) * -(-num_tokens // tokens) * shares
        units_of_share = -(-units // shares)
        steps = -(-units_of_share // groups.kparts)
        one = Direct(qtype, tokens, groups, shares, min(tiles, multiprocessors), row_bytes, 0.0)
        step = (STEP_TIME + groups.groups * (decode + TOKEN_TIME * tokens)) * (FEW_STAGES if one.x_stages == 2 else 1)
        tile = steps * step + TILE_TIME + (SHARING_TIME if groups.kparts > 1 else 0)
        of_sum = SUM_TIME + shares * num_tokens * sum(rows) * SUM_TIME_OF_ELEMENT if shares > 1 else 0.0
        return replace(one, time=-(-tiles // multiprocessors) * tile + of_sum)

    def best(shares: int) -> Direct:
        cuts = (cut(groups, shares) for groups in GROUPS)
        return min((one for one in cuts if one.x_stages), key=lambda one: one.time)

    alone = best(1)
    shared = min(
        (best(shares) for shares in range(2, min(most_shares, units) + 1)), key=lambda one: one.time, default=alone
    )
    return shared if shared.time <= CLEAR_GAIN * alone.time else alone


def tile_tokens(num_tokens: int) -> int:
    """Tokens of a tile."""
    return next((tokens for tokens in TILE_TOKENS if tokens >= num_tokens), TILE_TOKENS[-1])


def fits_direct(target: Target | None, num_tokens: int, weights: Sequence[Weight]) -> bool:
    """Whether these products can be such, on Hopper."""
    if target is None or target.arch != "sm_90" or target.batch_invariant or num_tokens <= FEW_TOKENS:
        return False
    return all(FORMATS[weight.qtype].block_size > 1 and weight.shape[1] % UNIT_K == 0 for weight in weights)


def gains_at_once(num_tokens: int, weights: Sequence[Weight]) -> bool:
    """Whether they take less time than those of `mul_mat_thin`, up to whose most tokens they are compared."""
    large = sum(weight.shape[0] for weight in weights) * weights[0].shape[1] >= LARGE_PRODUCT
    return large or all(weight.qtype in QUICK_TYPES for weight in weights)


def arrange_time(num_tokens: int, k: int) -> float:
    """About how long `arrange_x` takes, in ns."""
    return ARRANGE_TIME + num_tokens * k * ARRANGE_TIME_OF_ELEMENT


def arranged_size(num_tokens: int, k: int) -> int:
    """float16 elements that `arrange_launch` writes."""
    tokens = tile_tokens(num_tokens)
    return -(-num_tokens // tokens) * tokens * k


def arrange_launch(x: Any, norm: Any, eps: float, order: Order, out: Any, spare: Any) -> KernelLaunch:
    """x, or its RMS norm, in the order of a product.

    Args:
        x: [num_tokens, k] float32 or float16; float32 with a norm.
        norm: [k] float32 or None.
        eps: dimensionless, inside the norm's square root.
        out: [arranged_size] float16.
        spare: any array, for want of a norm.
    """
    num_tokens, k = x.shape
    tokens = tile_tokens(num_tokens)
    defines = {
        "TOKENS": tokens,
        "X_F16": int(x.dtype == np.float16),
        "NORM": int(norm is not None),
        "THREADS": ARRANGE_THREADS,
        "ORDER": int(order),
    }
    parts = 1 if norm is not None else -(-k // 8 // ARRANGE_THREADS)
    args = (x, spare if norm is None else norm, out, np.float32(eps), np.int32(num_tokens), np.int32(k))
    grid = (-(-num_tokens // tokens) * tokens, parts)
    return KernelLaunch("arrange_x", "arrange_x", grid, (ARRANGE_THREADS,), args, defines)


def direct_launch(
    direct: Direct,
    arranged: Any,
    weights: Sequence[Weight],
    bias: Any,
    out: Any,
    out_columns: int,
    num_tokens: int,
    output: int,
    gate: int,
) -> KernelLaunch:
    """Products of several matrices, side by side.

    Args:
        arranged: x by `arrange_launch`, in the order of `direct`.
        bias: [sum of rows] float32, or None.
        out: the first product and all behind it, float32 or float16.
        out_columns: elements from one row of products to the next.
        output: 0: float32, 1: float16, 2: added to float32, 3: float32 sums of each share of k.
        gate: GATE in the kernel.
    """
    first, spare = weights[0], DIRECT_MATRICES - len(weights)
    rows = [weight.shape[0] for weight in weights] + [0] * spare
    packed = [weight.array for weight in weights] + [first.array] * spare
    sizes = map(np.int32, (*rows, num_tokens, out_columns, first.shape[1], direct.shares))
    args = (arranged, *packed, first.array if bias is None else bias, out, np.int64(first.row_bytes), *sizes)
    defines = {"GATE": gate, "BIAS": int(bias is not None), "OUTPUT": output, **direct.defines()}
    name, shared = "mul_mat_wgmma_direct", direct.shared_bytes
    return KernelLaunch(name, name, (direct.blocks,), (direct.threads,), args, defines, shared, "sm_90a")
