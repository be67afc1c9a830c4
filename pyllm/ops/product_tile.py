"""Tiles of products on matrix instructions: sizes, shared memory and defines for rawkernels/common/product.cuh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from pyllm.ops.op import KernelLaunch, Target
from pyllm.quants import FORMATS, QuantType
from pyllm.weight import Weight

COPIED = QuantType.F16  # rows that need no decoding
ENOUGH_BLOCKS = 100  # of the 132 that a large GPU runs at the same time; with fewer, a part of it is idle
MANY_TOKENS = 1024
SHARED_KIB = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}  # of a block, and of all but one
OTHERS_SHARED_KIB = 99


def row_pitch(row_bytes: int, aligned: bool, by_words: bool) -> int:
    """Bytes of shared memory from one packed row to the next, so that lanes meet no bank conflicts.

    Args:
        row_bytes: that are wanted of a row.
        aligned: they begin at a multiple of 16.
        by_words: lanes read words, and not pairs of them.
    """
    pieces = -(-(row_bytes + (0 if aligned else 15)) // 16)
    return 16 * (pieces | 1) if by_words else next(n for n in count(16 * pieces, 16) if n % 128 in (32, 96))


@dataclass(frozen=True)
class Tile:
    """How a product is cut up.

    Attributes:
        bm, bn, bk: rows of x, rows of the weight, and elements of both that a block works on at a time.
        threads: of a block.
        x_stages: steps of x in shared memory, 2 or 3.
        staged: packed rows go through shared memory on their way to be decoded.
    """

    bm: int
    bn: int
    bk: int
    threads: int
    x_stages: int
    staged: bool

    @classmethod
    def of(cls, target: Target, num_tokens: int, num_rows: int, qtype: QuantType, x_f16: bool = True) -> Tile:
        """The tile for a product.

        Args:
            num_tokens: rows of x.
            num_rows: rows of the weight.
            x_f16: x is float16; float32 waits in registers, of which few warps have none to spare.
        """
        block = FORMATS[qtype]
        if target.vendor == "host":  # small: emulated products take their time
            return cls(64, 64, 32, 256, 3, target.tiles == "mma" and block.block_size > 1)
        if target.vendor == "hip":  # 64 KiB of shared memory
            return cls(64 if num_tokens <= 64 else 128, 128, 32, 256, 3, False)
        staged = block.block_size > 1
        largest = 64 if num_tokens <= 64 else 128 if num_tokens < MANY_TOKENS else 256
        few_warps = ((256, 128, 256), (128, 128, 128), (128, 64, 128)) if x_f16 else ()
        for bm, bn, threads in (*few_warps, (128, 128, 256), (128, 64, 256)):
            tile = cls(bm, bn, 64, threads, 2, staged)
            enough = -(-num_tokens // bm) * -(-num_rows // bn) >= ENOUGH_BLOCKS
            if bm <= largest and enough and tile._runs_well(target, qtype):
                return tile
        return cls(64, 64, 64, 128, 2, staged)

    @classmethod
    def of_experts(cls, target: Target, bm: int, num_rows: int, qtype: QuantType) -> Tile:
        """The tile for products of one expert each; `bm` is that of their lists."""
        staged = FORMATS[qtype].block_size > 1
        threads = 128 if bm > 128 and bm % 64 else 256  # four warps side by side take multiples of 64 pairs
        if target.vendor == "host":
            return cls(bm, 64, 64 if bm < 64 else 32, threads, 3, target.tiles == "mma" and staged)
        if target.vendor == "hip":
            return cls(bm, 128, 32, 256, 3, False)
        if bm > 128:  # lists for Hopper's tiles, but x in float32
            return cls(bm, 64, 32, threads, 2, staged)
        tile = cls(bm, 128 if bm == 128 else 64, 64, 128, 2, staged)
        return tile if tile._runs_well(target, qtype) else replace(tile, bn=64)

    def _runs_well(self, target: Target, qtype: QuantType) -> bool:
        """Whether eight warps fit into the shared memory of a multiprocessor: in one block, or in two."""
        available = SHARED_KIB.get(target.arch, OTHERS_SHARED_KIB) << 10
        blocks = 256 // self.threads
        return blocks * self.shared_bytes(qtype) + (blocks - 1 << 10) <= available

    def defines(self, qtype: QuantType, x: Any, output: int) -> dict[str, int]:
        """Macros of common/product.cuh.

        Args:
            x: the activations, float32 or float16.
            output: 0: float32, 1: float16, 2: added to float32.
        """
        return {
            "QTYPE": int(qtype),
            "BM": self.bm,
            "BN": self.bn,
            "BK": self.bk,
            "THREADS": self.threads,
            "X_STAGES": self.x_stages,
            "X_F16": int(x.dtype == np.float16),
            "STAGED": int(self.staged),
            "OUTPUT": output,
        }

    def shared_bytes(self, qtype: QuantType) -> int:
        """Dynamic shared memory: x, the decoded weight, and packed rows."""
        pitch = self.bk + 8
        elements = self.x_stages * self.bm * pitch + (self.x_stages if qtype == COPIED else 2) * self.bn * pitch
        return 2 * elements + (2 * self.bn * packed_pitch(qtype) if self.staged else 0)


def packed_pitch(qtype: QuantType) -> int:
    """Bytes of shared memory for a chunk of one packed row; PITCH in common/product_parts.cuh."""
    block = FORMATS[qtype]
    chunk = 256 if block.block_size == 256 else 64 if qtype == QuantType.F32 else 128
    chunk_bytes = chunk // block.block_size * block.block_bytes
    return 16 * ((chunk_bytes + (15 if block.block_bytes % 16 else 0) + 15) // 16 | 1)


def tile_launch(target: Target, x: Any, weight: Weight, out: Any, out_columns: int, output: int = 0) -> KernelLaunch:
    """x times a weight by `mul_mat_tile`.

    Args:
        x: [num_tokens, in_features] float32 or float16.
        out: the products' first element and all behind it, float32 or float16.
        out_columns: elements from one row of out to the next.
        output: 0: float32, 1: float16, 2: added to float32.
    """
    (num_tokens, k), n = x.shape, weight.shape[0]
    tile = Tile.of(target, num_tokens, n, weight.qtype, x.dtype == np.float16)
    sizes = map(np.int32, (num_tokens, n, k, out_columns))
    return KernelLaunch(
        "mul_mat",
        "mul_mat_tile",
        (-(-num_tokens // tile.bm), -(-n // tile.bn)),
        (tile.threads,),
        (x, weight.array, out, np.int64(weight.row_bytes), *sizes),
        tile.defines(weight.qtype, x, output),
        tile.shared_bytes(weight.qtype),
    )
