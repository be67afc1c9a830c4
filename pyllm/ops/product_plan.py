"""Which kernels multiply activations with packed weights: what the plans of mul_mat and linear have in common.

Four ways, chosen by shapes and target alone:

* tens of tokens on Hopper: `arrange_x` puts x, or its norm, in order, and `mul_mat_wgmma_direct` decodes weights into
  registers, with the gate, bias or addition;
* few tokens: `mul_mat_thin`, or `mul_mat_thin_s8` where `Whole` and `mul_mat_thin_held` where `Held` says so, reads
  packed weights once, of up to three matrices in one launch, with the gate or addition, for two tokens the norm, too;
* more tokens: `mul_mat_tile` decodes weights into shared memory while it multiplies, on Hopper `mul_mat_wgmma`;
* large products on NVIDIA: `decode_rows` writes the weights as float16, and the vendor's library multiplies.

For a batch-invariant target there is one way: `mul_mat_thin` as it is cut up for its most tokens, so often as it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from pyllm.ops.check import part_of
from pyllm.ops.op import GemmLaunch, KernelLaunch, Target
from pyllm.ops.product_direct import (
    DIRECT_MATRICES,
    FOURS_TYPES,
    Direct,
    Order,
    arrange_launch,
    arrange_time,
    arranged_size,
    direct_launch,
    fits_direct,
    gains_at_once,
)
from pyllm.ops.product_held import Held
from pyllm.ops.product_tile import OTHERS_SHARED_KIB, SHARED_KIB, row_pitch, tile_launch
from pyllm.ops.product_wgmma import WGMMA_MATRICES, Cut, for_type, gains_together, product_cut, uses_wgmma, wgmma_launch
from pyllm.ops.product_whole import MULTIPROCESSORS, Whole
from pyllm.quants import FORMATS, QuantType
from pyllm.weight import Weight

THIN_TOKENS = 32  # up to here the time of a product is that of reading the weights
THIN_MATRICES = 3  # of one launch
FUSED_NORM_TOKENS = 2  # up to here every block may normalise the whole input for itself
FUSED_NORM_BYTES = 48 << 10
UNIT_K = 256  # k that a warp works on at a time, where rows are long enough
STAGES = 2  # units on their way to a warp
MOST_STAGE_BYTES = 16 * 288  # of one of these, whatever the block type
ALWAYS_DIRECT_TOKENS, MOST_DIRECT_TOKENS = 128, 512  # of product_direct.py; between them by what they cost, ...
DIRECT_GAIN = 0.95  # ... which is so much of what others do, at most
SUM_THREADS = 128
SHARED_SUMS = 3  # OUTPUT of kernels whose blocks share k
MOST_SHARES = 8  # of k, of products of many tokens
SHARED_X_TOKENS = 8  # beyond these, x goes through shared memory, ...
WHOLE_X_TOKENS = 16  # ... and beyond these in pieces

LIBRARY_WORK = 1 << 33  # multiply-adds; from there on the library gains more than its two further launches cost ...
LIBRARY_WORK_WGMMA = 1 << 35  # ... and where `mul_mat_wgmma` is the other choice
# ns: three launches; a weight in float16, written and read, and packed; a multiply-add
LIBRARY_TIME, LIBRARY_TIME_OF_BYTE, LIBRARY_TIME_OF_WORK = 6000.0, 1 / 3400, 1 / 310_000
LIBRARY_SCRATCH = 1 << 26  # decoded weights at a time
LIBRARY_ROWS = 65_024  # at a time: the second extent of a grid ends at 65,535


class Gate(IntEnum):
    """What becomes of the products of two matrices; GATE in mul_mat_thin."""

    NONE = 0
    SILU = 1
    GELU = 2


class Output(IntEnum):
    """How products leave a kernel; OUTPUT in kernels."""

    F32 = 0
    F16 = 1
    ADD = 2

    @classmethod
    def of(cls, out: Any, accumulate: bool) -> Output:
        """That of an output array."""
        if accumulate:
            return cls.ADD
        return cls.F16 if out.dtype == np.float16 else cls.F32


@dataclass(frozen=True)
class Norm:
    """An RMS norm before a product.

    Attributes:
        weight: [in_features] float32.
        eps: dimensionless, inside the square root.
    """

    weight: Any
    eps: float


@dataclass(frozen=True)
class Products:
    """x times several matrices, side by side in out.

    Attributes:
        x: [num_tokens, in_features] float32 or float16.
        weights: matrices with rows of in_features.
        out: [num_tokens, sum of rows] float32 or float16.
        accumulate: add to out (float32).
        bias: [sum of rows] float32, or None (`fuses_bias`).
        norm: applied to x first (`fuses_norm`).
        gate: over the products of two matrices, which are then as wide as out (`fuses_gate`).
        apart: in place of out, an array of its own for each matrix, all of one width; not for few tokens.
    """

    x: Any
    weights: Sequence[Weight]
    out: Any
    accumulate: bool = False
    bias: Any = None
    norm: Norm | None = None
    gate: Gate = Gate.NONE
    apart: Sequence[Any] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.x.shape[0])

    @property
    def k(self) -> int:
        return int(self.x.shape[1])


def is_thin(target: Target, num_tokens: int) -> bool:
    """Whether the kernel for few tokens is taken."""
    return target.batch_invariant or num_tokens <= THIN_TOKENS


def takes_direct(target: Target | None, num_tokens: int, weights: Sequence[Weight]) -> bool:
    """Whether all of these products are those of product_direct.py: where that was measured, or costs promise, to take
    less time."""
    if target is None or not fits_direct(target, num_tokens, weights):
        return False
    if num_tokens <= THIN_TOKENS:
        return gains_at_once(num_tokens, weights)
    if num_tokens <= ALWAYS_DIRECT_TOKENS:
        return True
    if num_tokens > MOST_DIRECT_TOKENS:
        return False
    sizes = tuple((weight.qtype, weight.shape, weight.row_bytes) for weight in weights)
    return _direct_costs_less(target, num_tokens, sizes)


@lru_cache(maxsize=4096)  # all layers of a model ask, several times for each product
def _direct_costs_less(
    target: Target, num_tokens: int, sizes: tuple[tuple[QuantType, tuple[int, ...], int], ...]
) -> bool:
    """Whether products with matrices of such types, shapes and bytes of a row take clearly less time."""
    weights = [  # of no memory
        Weight("", shape, qtype, np.broadcast_to(np.uint8(0), (shape[0], row_bytes)))
        for qtype, shape, row_bytes in sizes
    ]
    places = [_Place(weight, None, 0) for weight in weights]
    direct = arrange_time(num_tokens, weights[0].shape[1])
    for group in _direct_groups(places):
        direct += Direct.of(target, num_tokens, [place.weight for place in group], False, MOST_SHARES).time
    apart = 0.0
    for (wgmma, _), same in groupby(places, key=lambda place: _kind(target, num_tokens, place.weight)):
        if wgmma:
            apart += sum(cut.time for _, cut in _wgmma_groups(target, num_tokens, list(same), True))
        else:
            apart += sum(_library_time(num_tokens, place.weight) for place in same)
    return direct < DIRECT_GAIN * apart


def fuses_norm(target: Target, num_tokens: int, weights: Sequence[Weight]) -> bool:
    """Whether the norm of float32 activations is a part of their products."""
    k = weights[0].shape[1]
    if takes_direct(target, num_tokens, weights):
        return True
    if target.batch_invariant or num_tokens > FUSED_NORM_TOKENS or 2 * FUSED_NORM_TOKENS * k > FUSED_NORM_BYTES:
        return False
    limit = SHARED_KIB.get(target.arch, OTHERS_SHARED_KIB) if target.vendor == "cuda" else 64
    warps = _thin_threads(target) // target.warp_size
    return 2 * num_tokens * k + warps * STAGES * MOST_STAGE_BYTES <= limit << 10


def _thin_threads(target: Target) -> int:
    """Of a block of `mul_mat_thin` whose warps read x themselves."""
    return 256 if target.vendor == "cuda" else 128


def fuses_bias(target: Target, num_tokens: int, weights: Sequence[Weight]) -> bool:
    """Whether a bias is a part of the products."""
    return is_thin(target, num_tokens) or takes_direct(target, num_tokens, weights)


def fuses_gate(target: Target, num_tokens: int, weights: Sequence[Weight]) -> bool:
    """Whether the gate is a part of the products."""
    return fuses_bias(target, num_tokens, weights) and weights[0].qtype == weights[1].qtype


def plan_products(target: Target, products: Products, scratch: Any) -> list[KernelLaunch | GemmLaunch]:
    """All launches."""
    launches: list[KernelLaunch | GemmLaunch] = []
    x, num_tokens = products.x, products.num_tokens
    if takes_direct(target, num_tokens, products.weights):
        return [*_direct_launches(target, products, scratch)]
    if x.dtype != np.float16 and any(_takes_half(target, num_tokens, weight) for weight in products.weights):
        x, scratch = part_of(scratch, x.size).reshape(x.shape), scratch[-(-x.size // 8) * 8 :]
        launches.append(decode_launch(products.x, QuantType.F32, 4 * products.k, x))
    if is_thin(target, num_tokens):
        return [*launches, *_thin_launches(target, replace(products, x=x), scratch)]
    for (wgmma, _), group in groupby(_places(products), key=lambda place: _kind(target, num_tokens, place.weight)):
        places = list(group)
        if wgmma:
            launches += _wgmma_launches(target, x, places, products.accumulate, scratch)
            continue
        for place in places:
            if uses_library(target, num_tokens, place.weight):
                launches += _library_launches(x, place, products.accumulate, scratch)
            else:
                output = int(Output.of(place.out, products.accumulate))
                launches.append(tile_launch(target, products.x, place.weight, place.first, place.width, output))
    return launches


@dataclass(frozen=True)
class _Place:
    """Where the products with a matrix go: columns of out from `column` on."""

    weight: Weight
    out: Any
    column: int

    @property
    def first(self) -> Any:
        """The first of them and all behind it."""
        return self.out.reshape(-1)[self.column :]

    @property
    def width(self) -> int:
        return int(self.out.shape[1])


def _places(products: Products) -> Iterator[_Place]:
    if products.apart:
        yield from (_Place(weight, out, 0) for weight, out in zip(products.weights, products.apart, strict=True))
        return
    column = 0
    for weight in products.weights:
        yield _Place(weight, products.out, column)
        column += weight.shape[0]


def _direct_launches(target: Target, products: Products, scratch: Any) -> Iterator[KernelLaunch]:
    num_tokens, norm = products.num_tokens, products.norm
    size = arranged_size(num_tokens, products.k)
    arranged, scratch = part_of(scratch, size), scratch[size:]
    order: Order | None = None
    for group in _direct_groups(_places(products)):
        weights = [place.weight for place in group]
        direct = Direct.of(target, num_tokens, weights, bool(products.gate), 1 if products.gate else MOST_SHARES)
        if direct.order != order:
            order = direct.order
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            yield arrange_launch(products.x, weight, eps, order, arranged, weights[0].array)
        yield from _direct_launch(direct, products, group, arranged, scratch)


def _direct_groups(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    """Neighbours of one block type whose products go to one array, as many as one launch takes."""
    for _, group in groupby(places, key=lambda place: (place.weight.qtype, id(place.out))):
        same = list(group)
        yield from (same[first : first + DIRECT_MATRICES] for first in range(0, len(same), DIRECT_MATRICES))


def _direct_launch(
    direct: Direct, products: Products, group: Sequence[_Place], arranged: Any, scratch: Any
) -> Iterator[KernelLaunch]:
    """The product, and the sum of its parts where blocks share k."""
    weights, out, num_tokens = [place.weight for place in group], group[0].first, products.num_tokens
    width, output = group[0].width, Output.of(group[0].out, products.accumulate)
    bias = None if products.bias is None else products.bias[group[0].column :]
    if direct.shares == 1:
        yield direct_launch(direct, arranged, weights, bias, out, width, num_tokens, int(output), int(products.gate))
        return
    columns = sum(weight.shape[0] for weight in weights)
    parts = part_of(scratch, parts_size(direct.shares, num_tokens, columns)).view(np.float32)
    yield direct_launch(direct, arranged, weights, None, parts, columns, num_tokens, SHARED_SUMS, 0)
    yield sum_launch(parts, bias, out, width, direct.shares, num_tokens, columns, output)


def _kind(target: Target, num_tokens: int, weight: Weight) -> tuple[bool, QuantType]:
    """Neighbours of the same kind may share a launch of `mul_mat_wgmma`, if that is what they take."""
    library = uses_library(target, num_tokens, weight)
    return not library and uses_wgmma(target, weight.qtype), weight.qtype


def _wgmma_groups(
    target: Target, num_tokens: int, places: Sequence[_Place], side_by_side: bool
) -> Iterator[tuple[Sequence[_Place], Cut]]:
    """Neighbours that one launch takes, and how."""
    k, most_shares = places[0].weight.shape[1], MOST_SHARES if side_by_side else 1

    def rows_of(places: Sequence[_Place]) -> list[int]:
        return [place.weight.shape[0] for place in places]

    for first in range(0, len(places), WGMMA_MATRICES):
        some = places[first : first + WGMMA_MATRICES]
        together = gains_together(target, num_tokens, rows_of(some), k, most_shares)
        for group in [some] if together else [[place] for place in some]:
            yield group, product_cut(target, num_tokens, rows_of(group), k, most_shares)


def _wgmma_launches(
    target: Target, x: Any, places: Sequence[_Place], accumulate: bool, scratch: Any
) -> Iterator[KernelLaunch]:
    num_tokens, output = x.shape[0], Output.of(places[0].out, accumulate)
    side_by_side = all(place.out is places[0].out for place in places)
    for group, cut in _wgmma_groups(target, num_tokens, places, side_by_side):
        weights, outs, width = [place.weight for place in group], [place.first for place in group], group[0].width
        tile = for_type(cut.tile, weights[0].qtype)
        if cut.shares == 1:
            yield wgmma_launch(target, x, weights, outs, width, int(output), tile)
            continue
        columns = sum(weight.shape[0] for weight in weights)
        parts = part_of(scratch, parts_size(cut.shares, num_tokens, columns)).view(np.float32)
        begins = np.cumsum([0, *(weight.shape[0] for weight in weights)])
        of_each = [parts[begin:] for begin in begins[:-1]]
        yield wgmma_launch(target, x, weights, of_each, columns, int(Output.F32), tile, cut.shares)
        yield sum_launch(parts, None, outs[0], width, cut.shares, num_tokens, columns, output)


def parts_size(shares: int, num_tokens: int, columns: int) -> int:
    """float16 elements for the sums of several shares of k; none where there is one."""
    return 2 * shares * num_tokens * columns if shares > 1 else 0


def sum_launch(
    parts: Any, bias: Any, out: Any, out_columns: int, shares: int, num_tokens: int, columns: int, output: Output
) -> KernelLaunch:
    """The sum of parts [shares, num_tokens, columns], and a bias or None, as columns of out."""
    defines = {"OUTPUT": int(output), "BIAS": int(bias is not None), "THREADS": SUM_THREADS}
    args = (parts, parts if bias is None else bias, out, *map(np.int32, (shares, num_tokens, columns, out_columns)))
    return KernelLaunch(
        "sum_parts", "sum_parts", (-(-columns // SUM_THREADS), num_tokens), (SUM_THREADS,), args, defines
    )


def _thin_groups(weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Neighbours of one block type, as many as one launch takes."""
    for _, group in groupby(weights, key=lambda weight: weight.qtype):
        same = list(group)
        yield from (same[first : first + THIN_MATRICES] for first in range(0, len(same), THIN_MATRICES))


def _thin_launches(target: Target, products: Products, scratch: Any) -> Sequence[KernelLaunch]:
    launches, column = [], 0
    for some in _thin_groups(products.weights):
        launches += _thin_launch(target, products, some, column, scratch)
        column += sum(weight.shape[0] for weight in some)
    return launches


def _tiles_of(weights: Sequence[Weight], gate: bool) -> int:
    """Of 16 columns of the output."""
    return sum(-(-weight.shape[0] // 16) for weight in (weights[:1] if gate else weights))


def _thin_launch(
    target: Target, products: Products, weights: Sequence[Weight], column: int, scratch: Any
) -> list[KernelLaunch]:
    x, num_tokens, k, out = products.x, products.num_tokens, products.k, products.out
    bias, norm, first = products.bias, products.norm, weights[0]
    spare = THIN_MATRICES - len(weights)
    rows = [weight.shape[0] for weight in weights] + [0] * spare
    packed = [weight.array for weight in weights] + [first.array] * spare
    matrices = 2 if products.gate else 1
    tiles = _tiles_of(weights, bool(products.gate))
    defines = {
        "X_F16": int(x.dtype == np.float16),
        "NORM": int(norm is not None),
        "OUTPUT": int(Output.of(out, products.accumulate)),
        "GATE": int(products.gate),
        "BIAS": int(bias is not None),
    }
    args = (
        x,
        first.array if norm is None else norm.weight,
        *packed,
        first.array if bias is None else bias[column:],
        out.reshape(-1)[column:],  # the kernels count columns from the first of their own
        np.int64(first.row_bytes),
        np.float32(0 if norm is None else norm.eps),
        *map(np.int32, (*rows, num_tokens, out.shape[1], k)),
    )
    if x.dtype == np.float16 and norm is None and (held := Held.of(target, num_tokens, first, tiles, matrices)):
        return _held_launches(target, held, products, weights, packed, column, scratch)
    if not target.batch_invariant and (whole := Whole.of(target, num_tokens, first, tiles, matrices)):
        shared = whole.shared_bytes(target, num_tokens, k)
        name = "mul_mat_thin_s8"
        return [KernelLaunch(name, name, (whole.blocks,), (whole.threads,), args, defines | whole.defines(), shared)]
    fits = (size for size in (2, 8, 16) if size >= num_tokens and not target.batch_invariant)
    tokens = next(fits, THIN_TOKENS)
    staging = Staging.of(target, first, tokens, tiles, matrices)
    defines |= {"TOKENS": tokens, "FULL": int(k % staging.unit_k == 0), **staging.defines(first.qtype)}
    shared = staging.shared_bytes(target, first.qtype, tokens, k) + (2 * num_tokens * k if norm is not None else 0)
    grid = (-(-tiles // staging.results), -(-num_tokens // tokens))
    return [KernelLaunch("mul_mat_thin", "mul_mat_thin", grid, (staging.threads,), args, defines, shared)]


def _held_launches(
    target: Target,
    held: Held,
    products: Products,
    weights: Sequence[Weight],
    packed: Sequence[Any],
    column: int,
    scratch: Any,
) -> list[KernelLaunch]:
    """The product, and the sum of its parts where blocks share k."""
    out, num_tokens, k = products.out.reshape(-1)[column:], products.num_tokens, products.k
    rows = [weight.shape[0] for weight in weights]
    columns, row_length = sum(rows), products.out.shape[1]
    output, gate, biased = Output.of(products.out, products.accumulate), int(products.gate), products.bias is not None
    bias = products.bias[column:] if biased else weights[0].array
    apart = held.shares > 1
    parts = part_of(scratch, parts_size(held.shares, num_tokens, columns)).view(np.float32) if apart else out
    defines = {"OUTPUT": SHARED_SUMS if apart else int(output), "GATE": gate, "BIAS": int(biased and not apart)}
    sizes = (*rows, *[0] * (THIN_MATRICES - len(rows)), num_tokens, columns if apart else row_length, k)
    args = (products.x, *packed, bias, parts, np.int64(weights[0].row_bytes), *map(np.int32, sizes))
    name, grid, shared = "mul_mat_thin_held", (held.blocks, held.shares), held.shared_bytes(target)
    launches = [KernelLaunch(name, name, grid, (held.threads,), args, defines | held.defines(), shared)]
    if apart:
        bias = bias if biased else None
        launches.append(sum_launch(parts, bias, out, row_length, held.shares, num_tokens, columns, output))
    return launches


@dataclass(frozen=True)
class Staging:
    """How `mul_mat_thin` cuts up rows.

    Attributes:
        threads: of a block.
        unit_k, unit_bytes: what a warp works on at a time.
        stages: units on their way into shared memory; 0: rows are read in place.
        aligned: units begin at multiples of 16 bytes.
        results: columns of 16 outputs of a block.
        x_stages: pieces of x on their way into shared memory, for all warps of a block; 1: x as a whole; 0: each warp
            reads it itself.
        workers: warps that share the k of a tile.
    """

    threads: int
    unit_k: int
    unit_bytes: int
    stages: int
    aligned: bool
    results: int = 1
    x_stages: int = 0
    workers: int = 0

    @classmethod
    def of(cls, target: Target, weight: Weight, tokens: int, results: int, matrices: int) -> Staging:
        """For rows like those of a weight.

        Args:
            tokens: for so many the kernel is compiled.
            results: columns of 16 outputs, each from `matrices` tiles of rows.
        """
        shared = cls._sharing_x(target, weight, tokens, results, matrices)
        if shared is not None:
            return shared
        block = FORMATS[weight.qtype]
        k = weight.shape[-1]
        threads = _thin_threads(target)
        if block.block_size == 1:
            return cls(threads, 32, 32 * block.block_bytes, 0, True)
        if weight.qtype == QuantType.Q4_K:  # aligned, and decoded block by block: shared memory would be a detour
            return cls(threads, 256, block.block_bytes, 0, True)
        # Short rows in small units, so that all warps have some.
        workers = threads // target.warp_size // matrices
        unit_k = max(64, block.block_size)
        while unit_k < UNIT_K and k >= 2 * unit_k * workers:
            unit_k *= 2
        unit_bytes = unit_k // block.block_size * block.block_bytes
        return cls(threads, unit_k, unit_bytes, STAGES, unit_bytes % 16 == 0 and weight.row_bytes % 16 == 0)

    @classmethod
    def _sharing_x(cls, target: Target, weight: Weight, tokens: int, results: int, matrices: int) -> Staging | None:
        """Where x is large and a block of an NVIDIA GPU has several results that need it; None elsewhere."""
        block, k, host = FORMATS[weight.qtype], weight.shape[-1], target.vendor == "host"
        own = _results_of_block(3 if host else MULTIPROCESSORS, results, 2 if host else 7 if matrices == 1 else 4)
        in_place = weight.qtype == QuantType.Q4_K and not host
        if target.tiles != "mma" or tokens <= SHARED_X_TOKENS or block.block_size == 1 or own == 1:
            return None
        if in_place and own * matrices < 4:
            return None
        limit = 64 if host else SHARED_KIB.get(target.arch, OTHERS_SHARED_KIB)
        most_warps = 4 if host else 16
        unit_k = max(block.block_size, 128 if k < 4 * UNIT_K else UNIT_K)
        unit_bytes = unit_k // block.block_size * block.block_bytes
        aligned = unit_bytes % 16 == 0 and weight.row_bytes % 16 == 0
        for workers in (4, 2, 1):
            warps = own * matrices * workers
            for x_stages in (1, 2) if tokens <= WHOLE_X_TOKENS else (2,):
                staging = cls(32 * warps, unit_k, unit_bytes, STAGES, aligned, own, x_stages, workers)
                fits = staging.shared_bytes(target, weight.qtype, tokens, k) <= limit << 10
                if warps <= most_warps and workers * unit_k <= max(k, unit_k) and fits:
                    return staging
        return None

    def defines(self, qtype: QuantType) -> dict[str, int]:
        """Macros of rawkernels/mul_mat_thin.cu that cut rows up."""
        return {
            "QTYPE": int(qtype),
            "THREADS": self.threads,
            "UNIT_K": self.unit_k,
            "UNIT_BYTES": self.unit_bytes,
            "STAGES": self.stages,
            "ALIGNED": int(self.aligned),
            "RESULTS": self.results,
            "X_STAGES": self.x_stages,
        }

    def shared_bytes(self, target: Target, qtype: QuantType, tokens: int, k: int) -> int:
        """Dynamic shared memory: the stages, or the partial sums of the warps where those are more."""
        by_words = self.x_stages > 0 and qtype in FOURS_TYPES
        pitch = row_pitch(self.unit_bytes, self.aligned, by_words)
        warps = self.threads // target.warp_size
        x_k = k if self.x_stages == 1 else self.workers * self.unit_k
        x = self.x_stages * tokens * (x_k + (16 if by_words else 32)) * 2
        return max(warps * self.stages * 16 * pitch + x, warps * max(tokens, 16) * 16 * 4)


def _results_of_block(blocks: int, results: int, most: int) -> int:
    """So that all blocks that run at a time have about the same number."""
    waves = -(-results // (blocks * most))
    return -(-results // (blocks * waves))


def uses_library(target: Target | None, num_tokens: int, weight: Weight) -> bool:
    """Where decoding the weights to float16 and calling the library's product was measured to be faster than tiles:
    on NVIDIA, for products that outweigh two launches more. See BENCHMARKS.md."""
    if target is None or target.vendor != "cuda" or is_thin(target, num_tokens):
        return False
    n, k = weight.shape
    return num_tokens * n * k >= (LIBRARY_WORK_WGMMA if uses_wgmma(target, weight.qtype) else LIBRARY_WORK)


def _library_time(num_tokens: int, weight: Weight) -> float:
    """About how long the library's product takes on Hopper, in ns."""
    n, k = weight.shape
    return (
        LIBRARY_TIME + n * (2 * k + weight.row_bytes) * LIBRARY_TIME_OF_BYTE + num_tokens * n * k * LIBRARY_TIME_OF_WORK
    )


def _takes_half(target: Target | None, num_tokens: int, weight: Weight) -> bool:
    """Whether a product has to have its x in float16: what brings it into shared memory piece by piece only copies."""
    if target is None:
        return False
    if is_thin(target, num_tokens):
        packed = FORMATS[weight.qtype].block_size > 1
        return num_tokens > WHOLE_X_TOKENS and packed and target.tiles == "mma" and not target.batch_invariant
    return uses_library(target, num_tokens, weight) or uses_wgmma(target, weight.qtype)


def products_scratch(target: Target | None, num_tokens: int, weights: Sequence[Weight], x_dtype: Any) -> int:
    """float16 elements of scratch that the launches need."""
    if target is not None and takes_direct(target, num_tokens, weights):
        return arranged_size(num_tokens, weights[0].shape[1]) + _direct_parts_scratch(target, num_tokens, weights)
    decoded = [0]
    for weight in weights:
        n, k = weight.shape
        if uses_library(target, num_tokens, weight):
            decoded.append(min(n, _rows_at_once(k)) * k)
    if target is not None:
        decoded.append(_parts_scratch(target, num_tokens, weights))
    narrows = x_dtype != np.float16 and any(_takes_half(target, num_tokens, weight) for weight in weights)
    return max(decoded) + (-(-num_tokens * weights[0].shape[1] // 8) * 8 if narrows else 0)


def _parts_scratch(target: Target, num_tokens: int, weights: Sequence[Weight]) -> int:
    """What sums of several shares of k take, whether matrices go side by side or not."""
    sizes = [0]
    if is_thin(target, num_tokens):
        for some in _thin_groups(weights):
            if held := Held.of(target, num_tokens, some[0], _tiles_of(some, False), 1):
                sizes.append(parts_size(held.shares, num_tokens, sum(weight.shape[0] for weight in some)))
        return max(sizes)
    places = [_Place(weight, None, 0) for weight in weights]
    for (wgmma, _), same in groupby(places, key=lambda place: _kind(target, num_tokens, place.weight)):
        for group, cut in _wgmma_groups(target, num_tokens, list(same), True) if wgmma else ():
            columns = sum(place.weight.shape[0] for place in group)
            sizes.append(parts_size(cut.shares, num_tokens, columns))
    return max(sizes)


def _direct_parts_scratch(target: Target, num_tokens: int, weights: Sequence[Weight]) -> int:
    """The same of products in registers."""
    sizes = [0]
    for group in _direct_groups(_Place(weight, None, 0) for weight in weights):
        some = [place.weight for place in group]
        for together in (some, *([weight] for weight in some)):
            direct = Direct.of(target, num_tokens, together, False, MOST_SHARES)
            sizes.append(parts_size(direct.shares, num_tokens, sum(weight.shape[0] for weight in together)))
    return max(sizes)


def _rows_at_once(k: int) -> int:
    return max(1, min(LIBRARY_ROWS, LIBRARY_SCRATCH // k))


def _library_launches(x: Any, place: _Place, accumulate: bool, scratch: Any) -> list[KernelLaunch | GemmLaunch]:
    """The weight as float16, in pieces that fit into the scratch, times x in float16."""
    weight = place.weight
    n, k = weight.shape
    launches: list[KernelLaunch | GemmLaunch] = []
    for first in range(0, n, _rows_at_once(k)):
        rows = min(n - first, _rows_at_once(k))
        decoded = part_of(scratch, rows * k).reshape(rows, k)
        launches.append(decode_launch(weight.array[first : first + rows], weight.qtype, weight.row_bytes, decoded))
        launches.append(GemmLaunch(x, decoded, place.out, place.column + first, accumulate))
    return launches


def decode_launch(packed: Any, qtype: QuantType, row_bytes: int, out: Any) -> KernelLaunch:
    """Packed rows as float16 [rows, k]."""
    rows, k = out.shape
    args = (packed, out, np.int64(row_bytes), np.int32(k))
    return KernelLaunch("decode_rows", "decode_rows", (-(-k // 1024), rows), (128,), args, {"QTYPE": int(qtype)})
