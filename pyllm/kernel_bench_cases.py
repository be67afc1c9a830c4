"""The cases of `pyllm kernels bench`: each op with a kernel, at sizes of real models.

Sizes are fields of `Sizes`, so that tests run the same cases small. To add an op, write a function that yields its
cases, here or in the module that it belongs to, and add it to `_GROUPS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pyllm.kernel_bench import Arguments, BenchCase, Sample, Source
from pyllm.kernel_bench_experts import (
    gated_mul_mat_id_cases,
    group_experts_cases,
    mul_mat_id_cases,
    route_cases,
    weighted_sum_cases,
)
from pyllm.kernel_bench_kv import (
    attention_cases,
    clear_tags_cases,
    gather_rows_cases,
    page_cases,
    rope_set_rows_cases,
    set_rows_cases,
    token_tables_cases,
)
from pyllm.kernel_bench_products import decode_rows_cases, linear_cases, mul_mat_cases
from pyllm.kernel_bench_recurrent import recurrent_cases
from pyllm.kernel_bench_samples import (
    F16_LIMIT,
    F32_LIMIT,
    REAL,
    SAMPLED_TOKENS,
    Read,
    Sizes,
    all_bytes,
    by_rows,
    decoded,
    exactly,
    gelu_mul,
    normed,
    rotated,
    silu_mul,
    spread,
    wide,
)
from pyllm.ops.add import ADD
from pyllm.ops.gelu_mul import GELU_MUL
from pyllm.ops.get_rows import GET_ROWS
from pyllm.ops.keep_tokens import KEEP_TOKENS
from pyllm.ops.op import Op
from pyllm.ops.rms_norm import RMS_NORM
from pyllm.ops.rope import ROPE, ROPE_TABLE, RopePairing
from pyllm.ops.silu_mul import SILU_MUL
from pyllm.ops.softcap import SOFTCAP
from pyllm.ops.take_rows import TAKE_ROWS
from pyllm.ops.top_k import TOP_K, scratch_columns
from pyllm.quants import QuantType


def bench_cases(types: Sequence[QuantType], sizes: Sizes = REAL) -> list[BenchCase]:
    """All cases, op by op.

    Args:
        types: block types that the device multiplies with.
    """
    return [case for group in _GROUPS for case in group(sizes, sorted(types))]


def _elementwise(op: Op, compute: Callable[..., Any], scale: float, limit: float, exact: bool = False) -> Any:
    def group(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
        width = sizes.hidden if op is ADD else sizes.inner
        for tokens in (sizes.few, sizes.many):

            def arguments(source: Source, tokens: int = tokens) -> Arguments:
                first = source.normal(tokens, width, scale=scale)
                return first, source.normal(tokens, width), source.unwritten(tokens, width)

            sample = by_rows(compute, (0, 1), 2, exact)
            yield BenchCase(op, f"{tokens} x {width}", arguments, sample, all_bytes, limit=limit)

    return group


def _softcap_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    cap = 30.0
    for tokens in (1, sizes.few):

        def arguments(source: Source, tokens: int = tokens) -> Arguments:
            shape = tokens, sizes.vocabulary
            return source.normal(*shape, scale=20), cap, source.unwritten(*shape)

        sample = by_rows(lambda x: cap * np.tanh(x / cap), (0,), 2)
        yield BenchCase(SOFTCAP, f"{tokens} x {sizes.vocabulary}", arguments, sample, all_bytes, limit=F32_LIMIT)


def _rms_norm_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    eps = 1e-6
    for tokens in (1, sizes.few, sizes.many):
        for dtype in (np.float32, np.float16):

            def arguments(source: Source, tokens: int = tokens, dtype: type = dtype) -> Arguments:
                shape = tokens, sizes.hidden
                weight = source.normal(sizes.hidden)
                return source.normal(*shape), weight, eps, source.unwritten(*shape, dtype=dtype), False

            def sample(read: Read, arguments: Arguments) -> Sample:
                x, weight, _, out, _ = arguments
                rows = spread(x.shape[0], SAMPLED_TOKENS)
                exact = normed(wide(read(x, rows)), wide(read(weight)), eps)
                return lambda: [(read(out, rows), exact)]

            name = f"{tokens} x {sizes.hidden}" + (" to f16" if dtype == np.float16 else "")
            limit = F16_LIMIT if dtype == np.float16 else F32_LIMIT
            yield BenchCase(RMS_NORM, name, arguments, sample, all_bytes, limit=limit)


def _rope_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    head_dim = 128

    def table(source: Source) -> Arguments:
        positions = source.array(np.arange(sizes.many, dtype=np.int32))
        inv_freq = source.array((1e6 ** (-np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32))
        return positions, inv_freq, 1.0, *(source.unwritten(sizes.many, head_dim // 2) for _ in range(2))

    def of_table(read: Read, arguments: Arguments) -> Sample:
        positions, inv_freq, _, cos, sin = arguments
        angle = read(positions)[:, None].astype(np.float32) * read(inv_freq)  # rounded as the op rounds it
        return lambda: [(read(cos), np.cos(wide(angle))), (read(sin), np.sin(wide(angle)))]

    yield BenchCase(ROPE_TABLE, f"{sizes.many} x {head_dim // 2}", table, of_table, all_bytes, limit=F32_LIMIT)
    heads = max(1, sizes.hidden // head_dim)
    for tokens in (sizes.few, sizes.many):
        for pairing in RopePairing:

            def arguments(source: Source, tokens: int = tokens, pairing: RopePairing = pairing) -> Arguments:
                angle = source.rng.uniform(0, 2 * np.pi, (tokens, head_dim // 2))
                cos, sin = (source.array(function(angle).astype(np.float32)) for function in (np.cos, np.sin))
                return source.normal(tokens, heads, head_dim), cos, sin, pairing

            name = f"{tokens} x {heads} x {head_dim}, {pairing.name.lower()}"
            yield BenchCase(ROPE, name, arguments, _rope_sample, _rope_traffic, limit=F32_LIMIT)


def _rope_sample(read: Read, arguments: Arguments) -> Sample:
    x, cos, sin, pairing = arguments
    rows = spread(x.shape[0], SAMPLED_TOKENS)
    heads, c, s = (wide(read(array, rows)) for array in (x, cos, sin))
    exact = rotated(heads, c, s, pairing)
    return lambda: [(read(x, rows), exact)]


def _rope_traffic(arguments: Arguments) -> float:
    return all_bytes(arguments) + arguments[0].nbytes  # in place: read and written


def _get_rows_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    rows = sizes.matrices[0][0]
    for qtype in [QuantType.Q4_K, QuantType.F16]:
        for tokens in (sizes.few, sizes.many):

            def arguments(source: Source, qtype: QuantType = qtype, tokens: int = tokens) -> Arguments:
                ids = source.array(source.rng.integers(0, rows, tokens, np.int32))
                return source.weight(qtype, rows, sizes.hidden), ids, 1.0, source.unwritten(tokens, sizes.hidden)

            def sample(read: Read, arguments: Arguments) -> Sample:
                weight, ids, _, out = arguments
                exact = decoded(read(weight.array, read(ids)), weight.qtype).astype(np.float32)
                return lambda: exactly([(read(out), exact)])

            def traffic(arguments: Arguments) -> float:
                weight, ids, _, out = arguments
                return ids.nbytes + ids.shape[0] * weight.row_bytes + out.nbytes

            yield BenchCase(GET_ROWS, f"{qtype.name}, {tokens} of {rows} x {sizes.hidden}", arguments, sample, traffic)


def _take_rows_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    def arguments(source: Source) -> Arguments:
        ids = source.array(source.rng.integers(0, sizes.many, sizes.few, np.int32))
        return source.normal(sizes.many, sizes.hidden), ids, source.unwritten(sizes.few, sizes.hidden)

    def sample(read: Read, arguments: Arguments) -> Sample:
        x, ids, out = arguments
        exact = read(x, read(ids))
        return lambda: exactly([(read(out), exact)])

    def traffic(arguments: Arguments) -> float:
        _, ids, out = arguments
        return ids.nbytes + 2 * out.nbytes

    yield BenchCase(TAKE_ROWS, f"{sizes.few} of {sizes.many} x {sizes.hidden}", arguments, sample, traffic)


def _top_k_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    columns, k = sizes.vocabulary, 64
    for rows in (1, sizes.few, 4 * sizes.few):

        def arguments(source: Source, rows: int = rows) -> Arguments:
            scratch = rows, scratch_columns(rows, columns, k)
            outputs = source.unwritten(rows, k), source.unwritten(rows, k, dtype=np.int32)
            scratches = source.unwritten(*scratch), source.unwritten(*scratch, dtype=np.int32)
            return source.normal(rows, columns), *scratches, *outputs

        def sample(read: Read, arguments: Arguments) -> Sample:
            values, _, _, out_values, out_ids = arguments
            some = spread(values.shape[0], 2)
            found = read(values, some)
            ids = np.argsort(-found, axis=1, kind="stable")[:, :k].astype(np.int32)
            exact = np.take_along_axis(found, ids, axis=1)
            return lambda: exactly([(read(out_values, some), exact), (read(out_ids, some), ids)])

        def traffic(arguments: Arguments) -> float:
            return arguments[0].nbytes + arguments[3].nbytes + arguments[4].nbytes

        yield BenchCase(TOP_K, f"{rows} x {columns}, {k} of them", arguments, sample, traffic)


def _keep_tokens_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    rows, candidates = 4 * sizes.few, 64

    def arguments(source: Source) -> Arguments:
        ids = source.array(source.rng.integers(0, sizes.vocabulary, (rows, candidates), np.int32))
        places = source.array(source.rng.permutation(rows).astype(np.int32))
        return ids, places, source.unwritten(rows, dtype=np.int32)

    def sample(read: Read, arguments: Arguments) -> Sample:
        ids, places, kept = arguments
        exact = np.empty(rows, np.int32)
        exact[read(places)] = read(ids)[:, 0]
        return lambda: exactly([(read(kept), exact)])

    def traffic(arguments: Arguments) -> float:
        return 12.0 * rows  # a token, its place, and where it is kept

    yield BenchCase(KEEP_TOKENS, f"{rows} rows", arguments, sample, traffic)


_GROUPS: tuple[Callable[[Sizes, Sequence[QuantType]], Iterator[BenchCase]], ...] = (
    mul_mat_cases,
    linear_cases,
    decode_rows_cases,
    attention_cases,
    gather_rows_cases,
    rope_set_rows_cases,
    mul_mat_id_cases,
    gated_mul_mat_id_cases,
    route_cases,
    group_experts_cases,
    weighted_sum_cases,
    recurrent_cases,
    _rms_norm_cases,
    _rope_cases,
    _elementwise(SILU_MUL, silu_mul, 3.0, F32_LIMIT),
    _elementwise(GELU_MUL, gelu_mul, 3.0, F32_LIMIT),
    _elementwise(ADD, lambda a, b: (a + b).astype(np.float32), 1.0, 0.0, exact=True),
    _softcap_cases,
    _get_rows_cases,
    _take_rows_cases,
    token_tables_cases,
    set_rows_cases,
    page_cases,
    clear_tags_cases,
    _top_k_cases,
    _keep_tokens_cases,
)
