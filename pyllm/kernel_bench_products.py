"""Cases of `pyllm kernels bench`: products, alone and with what stands around them in a layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pyllm.kernel_bench import Arguments, BenchCase, Pairs, Sample, Source
from pyllm.kernel_bench_samples import (
    F16_LIMIT,
    SAMPLED_COLUMNS,
    SAMPLED_TOKENS,
    Read,
    Sizes,
    all_bytes,
    decoded,
    exactly,
    normed,
    silu_mul,
    spread,
    wide,
)
from pyllm.ops.linear import LINEAR, linear_scratch
from pyllm.ops.mul_mat import MUL_MAT, scratch_size
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.product_plan import Gate, Norm
from pyllm.quants import FORMATS, QuantType
from pyllm.weight import Weight

_EPS = 1e-6
MANY_TOKENS = 128  # up to which large matrices are multiplied; with more, others say as much


def mul_mat_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    for qtype in types:
        for rows, row_elements in sizes.matrices if qtype in sizes.all_matrices else sizes.matrices[:1]:
            for tokens in sizes.tokens:
                yield mul_mat_case(qtype, tokens, rows, row_elements)
        if FORMATS[qtype].block_size > 1:
            for tokens in sizes.tokens:
                if tokens <= MANY_TOKENS:
                    yield mul_mat_case(qtype, tokens, *sizes.large_matrix)


def mul_mat_case(qtype: QuantType, tokens: int, rows: int, row_elements: int) -> BenchCase:
    """Tokens times one weight."""
    name = f"{qtype.name}, {tokens} x {row_elements} x {rows}"
    arguments = partial(_product, qtype, tokens, rows, row_elements)
    flops = 2.0 * tokens * rows * row_elements
    return BenchCase(MUL_MAT, name, arguments, _product_sample, _product_traffic, flops, F16_LIMIT)


def _product(qtype: QuantType, tokens: int, rows: int, row_elements: int, source: Source) -> Arguments:
    weight = source.weight(qtype, rows, row_elements)
    size = scratch_size(source.device.target, tokens, weight)
    scratch = source.unwritten(size, dtype=np.float16) if size else None
    return source.normal(tokens, row_elements), weight, scratch, source.unwritten(tokens, rows)


def _product_sample(read: Read, arguments: Arguments) -> Sample:
    x, weight, _, out = arguments
    tokens, columns = spread(x.shape[0], SAMPLED_TOKENS), spread(weight.shape[0], SAMPLED_COLUMNS)
    exact = wide(read(x, tokens)) @ decoded(read(weight.array, columns), weight.qtype).T
    return lambda: [(read(out, tokens)[:, columns], exact)]


def _product_traffic(arguments: Arguments) -> float:
    x, weight, _, out = arguments
    return x.nbytes + weight.array.nbytes + out.nbytes


def decode_rows_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    rows, row_elements = sizes.matrices[0]
    for qtype in types:

        def arguments(source: Source, qtype: QuantType = qtype) -> Arguments:
            return source.weight(qtype, rows, row_elements), source.unwritten(rows, row_elements, dtype=np.float16)

        def sample(read: Read, arguments: Arguments) -> Sample:
            weight, out = arguments
            some = spread(rows, SAMPLED_COLUMNS)
            exact = decoded(read(weight.array, some), weight.qtype).astype(np.float16)
            return lambda: exactly([(read(out, some), exact)])

        name = f"{qtype.name}, {rows} x {row_elements}"
        yield BenchCase(_DECODE_ROWS, name, arguments, sample, all_bytes)


def _plan_decode_rows(target: Target, weight: Weight, out: Any) -> list[KernelLaunch]:
    rows, size = weight.shape
    grid = -(-size // 1024), rows
    arguments = weight.array, out, np.int64(weight.row_bytes), np.int32(size)
    return [KernelLaunch("decode_rows", "decode_rows", grid, (128,), arguments, {"QTYPE": int(weight.qtype)})]


_DECODE_ROWS = Op("decode_rows", lambda weight, out: None, _plan_decode_rows)  # a part of mul_mat, no op of its own


def linear_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    """Projections behind a norm, the gate of a feed-forward block behind a norm, and its way back to the stream."""
    hidden, inner, kv = sizes.hidden, sizes.inner, sizes.kv_width
    for qtype in sizes.all_matrices:
        for tokens in sizes.tokens:
            yield _linear("norm, q k v", qtype, tokens, hidden, (hidden, kv, kv))
            yield _linear("norm, gate and up", qtype, tokens, hidden, (inner, inner), Gate.SILU)
            yield _linear("down, added", qtype, tokens, inner, (hidden,), accumulate=True)


def _linear(
    what: str,
    qtype: QuantType,
    tokens: int,
    row_elements: int,
    rows: tuple[int, ...],
    gate: Gate = Gate.NONE,
    accumulate: bool = False,
) -> BenchCase:
    """As models call it: a norm before products that add to nothing, float16 where another product follows."""
    columns = rows[0] if gate else sum(rows)
    firsts = np.cumsum((0, *rows))

    def arguments(source: Source) -> Arguments:
        whole = source.weight(qtype, sum(rows), row_elements)
        weights = tuple(whole.rows(int(a), int(b)) for a, b in itertools.pairwise(firsts))
        norm = None if accumulate else Norm(source.normal(row_elements), _EPS)
        x = source.normal(tokens, row_elements, dtype=np.float16 if accumulate else np.float32)
        if accumulate:
            out = source.normal(tokens, columns)
        else:
            out = source.unwritten(tokens, columns, dtype=np.float16 if gate else np.float32)
        target = source.device.target
        size = linear_scratch(target, tokens, weights, x.dtype, norm is not None, bool(gate))
        scratch = source.unwritten(size, dtype=np.float16) if size else None
        return x, weights, norm, None, gate, accumulate, scratch, out

    def sample(read: Read, arguments: Arguments) -> Sample:
        x, weights, norm, *_, out = arguments
        chosen = spread(tokens, SAMPLED_TOKENS)
        h = wide(read(x, chosen))
        if norm is not None:
            h = normed(h, wide(read(norm.weight)), _EPS)
        of_each = [spread(weight.shape[0], SAMPLED_COLUMNS) for weight in weights]
        parts = [h @ decoded(read(w.array, index), qtype).T for w, index in zip(weights, of_each, strict=True)]
        before = wide(read(out, chosen)) if accumulate else np.zeros(1)

        def pairs() -> Pairs:
            found = read(out, chosen)
            if gate:
                return [(found[:, of_each[0]], silu_mul(*parts))]
            where = [index + first for index, first in zip(of_each, firsts, strict=False)]
            if accumulate:
                return [(found[:, where[0]], before[:, where[0]] + parts[0])]
            return [(found[:, index], part) for index, part in zip(where, parts, strict=True)]

        return pairs

    def traffic(arguments: Arguments) -> float:
        x, weights, norm, *_, out = arguments
        moved = x.nbytes + sum(weight.array.nbytes for weight in weights) + out.nbytes * (2 if accumulate else 1)
        return moved + (0 if norm is None else norm.weight.nbytes)

    name = f"{what}, {qtype.name}, {tokens} x {row_elements} x {sum(rows)}"
    return BenchCase(LINEAR, name, arguments, sample, traffic, 2.0 * tokens * row_elements * sum(rows), F16_LIMIT)
