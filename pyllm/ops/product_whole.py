"""Products of few tokens as whole numbers: how `mul_mat_thin_s8` and `mul_mat_id_s8` cut them up, on NVIDIA."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyllm.ops.op import Target
from pyllm.ops.product_tile import OTHERS_SHARED_KIB, SHARED_KIB
from pyllm.ops.route import MAX_EXPERTS
from pyllm.quants import FORMATS, QuantType
from pyllm.weight import Weight

WHOLE_TOKENS = 8
WHOLE_TYPES = frozenset(
    QuantType[name]
    for name in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    )
)
MULTIPROCESSORS = 132  # of a large GPU: so many blocks share the rows of a product
ENOUGH_BYTES = 2 << 20  # of weights; and, beyond two tokens, rows for each:
ENOUGH_ROWS = 1536  # with fewer, what every block spends on bringing x costs more than is gained
ENOUGH_WEIGHTS = 12 << 20  # of formats that were not timed with fewer, which are not _TIMED_SMALL
THREADS = 512  # of a block, at most
STAGES = 2  # units on their way to a warp
TABLE_WORDS = 2048  # of a codebook with its copies, for one token
MANY_UNITS = 32  # for each warp: with so many, each of two blocks
STATIC_BYTES = 1 << 10  # what the kernel itself declares, at most, but for a codebook
STATIC_BYTES_OF_EXPERTS = 10 << 10

MAX_PAIRS = 1024  # (token, slot) pairs of one launch of `mul_mat_id_s8`
MAX_GROUPS = 32  # that a block works on at a time, and their pairs
ENOUGH_PAIRS = 32  # with fewer, each pair reads rows for itself where formats are _CHEAP to decode
CHUNKS = 4  # of a row of an expert's matrix, at most: sums over one are those of one warp

_TIMED_SMALL = frozenset(
    QuantType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
)
_FLOAT_MINIMA = (QuantType.Q4_1, QuantType.Q5_1)
_WHOLE_MINIMA = (QuantType.Q4_K, QuantType.Q5_K)
# Of one token, each lane adds up its own weights (rawkernels/common/product_apart.cuh).
APART_TYPES = frozenset(QuantType[name] for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ1_S", "IQ1_M"))
_CHEAP = frozenset(QuantType[name] for name in ("Q5_0", "Q5_1", "Q2_K", "TQ2_0", "MXFP4", "NVFP4"))
_PAIRS = (QuantType.Q4_K, QuantType.Q5_K)  # read as pairs of words
_TABLES = {  # words of a codebook in shared memory
    QuantType.IQ2_XXS: 256,
    QuantType.IQ2_XS: 512,
    QuantType.IQ2_S: 1024,
    QuantType.IQ3_XXS: 256,
    QuantType.IQ3_S: 512,
    QuantType.IQ1_S: 2048,
    QuantType.IQ1_M: 2048,
}


@dataclass(frozen=True)
class Whole:
    """How a product is cut up.

    Attributes:
        qtype: of the weight.
        tokens: for so many the kernel is compiled, 1, 4 or 8.
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
        enough = rows * weight.row_bytes >= ENOUGH_BYTES and (num_tokens <= 2 or rows >= ENOUGH_ROWS * num_tokens)
        if not host and not (enough and (weight.qtype in _TIMED_SMALL or rows * k >= ENOUGH_WEIGHTS)):
            return None
        blocks = min(results, 3 if host else MULTIPROCESSORS)
        tiles = -(-results // blocks) * matrices
        largest = 128 if host else THREADS
        unit_k = block.block_size
        while unit_k < 256 and k % (2 * unit_k) == 0 and tiles * k >= 2 * unit_k * largest // target.warp_size:
            unit_k *= 2
        apart = num_tokens == 1 and weight.qtype in APART_TYPES
        if apart and k % (2 * unit_k) == 0 and tiles * k >= MANY_UNITS * unit_k * largest // target.warp_size:
            unit_k *= 2
        unit_bytes = unit_k // block.block_size * block.block_bytes
        aligned = unit_bytes % 16 == 0 and weight.row_bytes % 16 == 0
        tokens = 1 if apart else 4 if num_tokens <= 4 else 8
        limit = 64 if host else SHARED_KIB.get(target.arch, OTHERS_SHARED_KIB)
        for threads in (largest, largest // 2):
            whole = cls(weight.qtype, tokens, blocks, threads, tiles, unit_k, unit_bytes, aligned)
            if whole.shared_bytes(target, num_tokens, k) + static_bytes(weight.qtype, tokens) <= limit << 10:
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
        warps = self.threads // target.warp_size
        stages = warps * _stage_bytes(self.qtype, self.unit_bytes, self.aligned)
        sums = (warps + self.tiles) * self.tokens * 64 + self.tiles * 8 + self.tokens * 4
        squares = 4 * num_tokens * -(-k // (8 * target.warp_size))
        return stages + _activation_bytes(self.qtype, min(self.unit_k, 256), num_tokens, k) + sums + squares


@dataclass(frozen=True)
class WholeExperts:
    """How products of few (token, slot) pairs with experts' matrices are cut up by `mul_mat_id_s8`.

    Attributes:
        qtype: of the weight.
        tokens: pairs of an expert that are multiplied at a time, 4 or 8.
        small: there are at most as many pairs as lanes.
        threads: of a block.
        gate: whether each result takes two matrices.
        unit_k, unit_bytes: what a warp works on at a time.
        aligned: units begin at multiples of 16 bytes.
        chunk, chunks: units of k whose sum belongs to one warp, and how many of those a row has.
        capacity: pairs whose activations a block holds at a time.
    """

    qtype: QuantType
    tokens: int
    small: bool
    threads: int
    gate: bool
    unit_k: int
    unit_bytes: int
    aligned: bool
    chunk: int
    chunks: int
    capacity: int

    @classmethod
    def of(cls, target: Target, num_tokens: int, num_pairs: int, weight: Weight, gate: bool) -> WholeExperts | None:
        """For a stack of matrices, or None where this kernel cannot take it."""
        num_experts, _, k = weight.shape
        if target.tiles != "mma" or weight.qtype not in WHOLE_TYPES:
            return None
        if num_pairs > MAX_PAIRS or num_experts > MAX_EXPERTS:
            return None
        if num_pairs < ENOUGH_PAIRS and weight.qtype in _CHEAP and target.vendor != "host":
            return None
        block, host = FORMATS[weight.qtype], target.vendor == "host"
        unit_k = block.block_size
        while unit_k < 256 and k % (2 * unit_k) == 0:
            unit_k *= 2
        unit_bytes = unit_k // block.block_size * block.block_bytes
        aligned = unit_bytes % 16 == 0 and weight.row_bytes % 16 == 0
        chunk = -(-k // (unit_k * CHUNKS))
        chunks = -(-k // (unit_k * chunk))
        tokens = 4 if num_tokens <= 4 else 8
        limit = (64 if host else SHARED_KIB.get(target.arch, OTHERS_SHARED_KIB)) << 10
        for threads in (128, 64) if host else (384, 256):
            small = num_pairs <= target.warp_size
            one = cls(
                weight.qtype, tokens, small, threads, gate, unit_k, unit_bytes, aligned, chunk, chunks, capacity=0
            )
            room = limit - static_bytes_of_experts(weight.qtype) - one.shared_bytes(target, k)
            capacity = min(room // _activation_bytes(weight.qtype, unit_k, 1, k), max(num_pairs, tokens), MAX_GROUPS)
            if capacity >= tokens:
                return replace(one, capacity=capacity)
        return None

    def defines(self) -> dict[str, int]:
        """Macros of rawkernels/mul_mat_id_s8.cu that cut the product up."""
        return {
            "QTYPE": int(self.qtype),
            "TOKENS": self.tokens,
            "SMALL": int(self.small),
            "GATE": int(self.gate),
            "THREADS": self.threads,
            "UNIT_K": self.unit_k,
            "UNIT_BYTES": self.unit_bytes,
            "STAGES": STAGES,
            "ALIGNED": int(self.aligned),
            "CHUNKS": self.chunks,
        }

    def shared_bytes(self, target: Target, k: int) -> int:
        """Dynamic shared memory: packed units, the activations, and the sums of the warps."""
        warps = self.threads // target.warp_size
        stages = warps * _stage_bytes(self.qtype, self.unit_bytes, self.aligned)
        sums = warps * (self.chunks + 2 * self.gate) * self.tokens * 64
        return stages + _activation_bytes(self.qtype, self.unit_k, self.capacity, k) + sums


def static_bytes(qtype: QuantType, tokens: int) -> int:
    """Static shared memory of `mul_mat_thin_s8` compiled for so many tokens, at most."""
    return STATIC_BYTES + 4 * (TABLE_WORDS if tokens == 1 else _TABLES.get(qtype, 0))


def static_bytes_of_experts(qtype: QuantType) -> int:
    """Static shared memory of `mul_mat_id_s8`, at most."""
    return STATIC_BYTES_OF_EXPERTS + 4 * _TABLES.get(qtype, 0)


def _stage_bytes(qtype: QuantType, unit_bytes: int, aligned: bool) -> int:
    """Of all stages of a warp."""
    pieces = -(-(unit_bytes + 16 - (16 if aligned else unit_bytes & -unit_bytes)) // 16)
    return STAGES * 16 * (32 * ((pieces + 1) // 2 | 1) if qtype in _PAIRS else 16 * (pieces | 1))


def _activation_bytes(qtype: QuantType, unit_k: int, num_tokens: int, k: int) -> int:
    """Of so many rows of x as whole numbers."""
    minima = 32 if qtype in _WHOLE_MINIMA else unit_k // 8 if qtype in _FLOAT_MINIMA else 0
    units = num_tokens * k // unit_k
    return num_tokens * (2 * k + 64) + -(-units // 4) * 16 + -(-units * minima // 16) * 16
