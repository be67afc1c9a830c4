"""Products of few tokens as whole numbers: how `mul_mat_thin_s8` cuts them up, on NVIDIA."""

from __future__ import annotations

from dataclasses import dataclass

from pyllm.ops.op import Target
from pyllm.ops.product_tile import OTHERS_SHARED_KIB, SHARED_KIB
from pyllm.quants import FORMATS, QuantType
from pyllm.weight import Weight

WHOLE_TOKENS = 8
WHOLE_TYPES = frozenset(
    QuantType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
)
MULTIPROCESSORS = 132  # of a large GPU: so many blocks share the rows of a product
ENOUGH_BYTES = 2 << 20  # of weights; and, beyond two tokens, rows for each:
ENOUGH_ROWS = 1536  # with fewer, what every block spends on bringing x costs more than is gained
STAGES = 2  # units on their way to a warp
STATIC_BYTES = 1 << 10  # what the kernel itself declares, at most

_FLOAT_MINIMA = (QuantType.Q4_1,)
_WHOLE_MINIMA = (QuantType.Q4_K, QuantType.Q5_K)
_PAIRS = (QuantType.Q4_K, QuantType.Q5_K)  # read as pairs of words


@dataclass(frozen=True)
class Whole:
    """How a product is cut up.

    Attributes:
        qtype: of the weight.
        tokens: for so many the kernel is compiled, 4 or 8.
        blocks, threads: of the launch.
        tiles: of 16 rows, the most that a block has.
        unit_k, unit_bytes: what a warp works on at a time.
        aligned: units begin at multiples of 16 bytes.
    """

    qtype: QuantType
    tokens: int
    blocks: int
    threads: int
    tiles: int
    unit_k: int
    unit_bytes: int
    aligned: bool

    @classmethod
    def of(cls, target: Target, num_tokens: int, weight: Weight, results: int, matrices: int) -> Whole | None:
        """For rows like those of a weight, or None where the kernel for any tokens is to be taken.

        Args:
            results: tiles of 16 columns of the output.
            matrices: that each of them takes.
        """
        if target.tiles != "mma" or weight.qtype not in WHOLE_TYPES or num_tokens > WHOLE_TOKENS:
            return None
        block, k = FORMATS[weight.qtype], weight.shape[-1]
        host = target.vendor == "host"
        rows = 16 * results * matrices
        enough_rows = num_tokens <= 2 or rows >= ENOUGH_ROWS * num_tokens
        if not host and (rows * weight.row_bytes < ENOUGH_BYTES or not enough_rows):
            return None
        blocks = min(results, 3 if host else MULTIPROCESSORS)
        tiles = -(-results // blocks) * matrices
        largest = 128 if host else 512
        unit_k = block.block_size
        while unit_k < 256 and k % (2 * unit_k) == 0 and tiles * k >= 2 * unit_k * largest // target.warp_size:
            unit_k *= 2
        unit_bytes = unit_k // block.block_size * block.block_bytes
        aligned = unit_bytes % 16 == 0 and weight.row_bytes % 16 == 0
        tokens = 4 if num_tokens <= 4 else 8
        limit = 64 if host else SHARED_KIB.get(target.arch, OTHERS_SHARED_KIB)
        for threads in (largest, largest // 2):
            whole = cls(weight.qtype, tokens, blocks, threads, tiles, unit_k, unit_bytes, aligned)
            if whole.shared_bytes(target, num_tokens, k) + STATIC_BYTES <= limit << 10:
                return whole
        return None

    def defines(self) -> dict[str, int]:
        """Macros of rawkernels/mul_mat_thin_s8.cu that cut the product up."""
        return {
            "QTYPE": int(self.qtype),
            "TOKENS": self.tokens,
            "THREADS": self.threads,
            "UNIT_K": self.unit_k,
            "UNIT_BYTES": self.unit_bytes,
            "STAGES": STAGES,
            "ALIGNED": int(self.aligned),
        }

    def shared_bytes(self, target: Target, num_tokens: int, k: int) -> int:
        """Dynamic shared memory: packed units, the activations, and the sums of the warps."""
        pieces = -(-(self.unit_bytes + 16 - (16 if self.aligned else self.unit_bytes & -self.unit_bytes)) // 16)
        pitch = 32 * ((pieces + 1) // 2 | 1) if self.qtype in _PAIRS else 16 * (pieces | 1)
        warps, units = self.threads // target.warp_size, num_tokens * k // self.unit_k
        minima = 32 if self.qtype in _WHOLE_MINIMA else self.unit_k // 8 if self.qtype in _FLOAT_MINIMA else 0
        x = num_tokens * (2 * k + 64) + -(-units // 4) * 16 + -(-units * minima // 16) * 16
        sums = (warps + self.tiles) * self.tokens * 64 + self.tiles * 8 + self.tokens * 4
        squares = 4 * num_tokens * -(-k // (8 * target.warp_size))
        return warps * STAGES * 16 * pitch + x + sums + squares
