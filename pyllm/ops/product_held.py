"""Products of 9 to 32 tokens whose activations stay in registers: how `mul_mat_thin_held` cuts them up, on NVIDIA."""

from __future__ import annotations

from dataclasses import dataclass

from pyllm.ops.op import Target
from pyllm.ops.product_tile import OTHERS_SHARED_KIB, SHARED_KIB, row_pitch
from pyllm.ops.product_whole import ENOUGH_BYTES, MULTIPROCESSORS, WHOLE_TOKENS
from pyllm.quants import FORMATS, QuantType
from pyllm.weight import Weight

HELD_TYPES = frozenset({QuantType.Q4_K, QuantType.Q5_K})
HELD_TOKENS = 32
UNIT_K = 256  # of a warp
ENOUGH_UNITS = 8  # of a row, so that there is one for each of so many warps
STAGES = 2  # steps on their way
# A block brings activations anew for each step of k. With more than two steps, or two and few tiles of rows to use them
# for, blocks share k instead.
MOST_STEPS = 2
FEW_TILES = 300


@dataclass(frozen=True)
class Held:
    """How a product is cut up.

    Attributes:
        qtype: of the weight.
        tokens: for so many the kernel is compiled, 16 or 32.
        threads: of a block.
        blocks: that share the rows.
        shares: of k, each of other blocks; with several, sums of all are added up by `sum_parts`.
        tiles: of 16 rows, the most that a block has.
    """

    qtype: QuantType
    tokens: int
    threads: int
    blocks: int
    shares: int
    tiles: int

    @classmethod
    def of(cls, target: Target, num_tokens: int, weight: Weight, results: int, matrices: int) -> Held | None:
        """For rows like those of a weight, or None where another kernel is to be taken.

        Args:
            results: tiles of 16 columns of the output.
            matrices: that each of them takes.
        """
        if target.tiles != "mma" or weight.qtype not in HELD_TYPES or target.batch_invariant:
            return None
        if not WHOLE_TOKENS < num_tokens <= HELD_TOKENS:
            return None
        host = target.vendor == "host"
        tokens = 16 if num_tokens <= 16 else 32
        most_warps = (2 if host else 16) if tokens == 16 else (4 if host else 8)
        units = weight.shape[-1] // UNIT_K
        steps = -(-units // most_warps)
        warps = max(-(-units // steps), tokens // 8)  # so many add up the sums of a tile
        if units < (most_warps if host else ENOUGH_UNITS):
            return None
        if 16 * results * matrices * weight.row_bytes < ENOUGH_BYTES and not (host and results * matrices >= 6):
            return None
        alone = steps == 1 or matrices > 1 or (steps <= MOST_STEPS and results >= FEW_TILES)
        shares = 1 if alone else steps
        blocks = min(results, max(1, (3 if host else MULTIPROCESSORS) // shares))
        held = cls(
            weight.qtype, tokens, warps * target.warp_size, blocks, shares, tiles=-(-results // blocks) * matrices
        )
        limit = 64 if host else SHARED_KIB.get(target.arch, OTHERS_SHARED_KIB)
        return held if held.shared_bytes(target) <= limit << 10 else None

    def defines(self) -> dict[str, int]:
        """Macros of rawkernels/mul_mat_thin_held.cu that cut the product up."""
        return {"QTYPE": int(self.qtype), "TOKENS": self.tokens, "THREADS": self.threads, "STAGES": STAGES}

    def shared_bytes(self, target: Target) -> int:
        """Dynamic shared memory: packed rows, the sums of the warps for two tiles, and those of all tiles."""
        warps = self.threads // target.warp_size
        pitch = row_pitch(warps * FORMATS[self.qtype].block_bytes, True, False)
        return STAGES * 16 * pitch + (2 * warps + self.tiles) * self.tokens * 64
