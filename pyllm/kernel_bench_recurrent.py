"""Cases of `pyllm kernels bench`: recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputViews
from pyllm.kernel_bench import Arguments, BenchCase, Pairs, Sample, Source
from pyllm.kernel_bench_samples import (
    F16_LIMIT,
    F32_LIMIT,
    SAMPLED_TOKENS,
    Read,
    Sizes,
    all_bytes,
    as_bytes,
    by_rows,
    exactly,
    normed,
    spread,
    wide,
)
from pyllm.kernel_check import convert
from pyllm.kernel_recurrent_cases import EPS, TAPS, delta_qkv, delta_shape, sequences, state_rows
from pyllm.ops.causal_conv1d import CAUSAL_CONV1D, HeadNorm
from pyllm.ops.columns import Columns
from pyllm.ops.copy_state import COPY_STATE
from pyllm.ops.fill_state import FILL_STATE
from pyllm.ops.gated_add import GATED_ADD
from pyllm.ops.gated_delta_rule import GATED_DELTA_RULE, DeltaHeads, by_token, scratch_shape
from pyllm.ops.gated_rms_norm import GATED_RMS_NORM
from pyllm.ops.l2_norm import L2_NORM
from pyllm.ops.load_state import LOAD_STATE
from pyllm.ops.reset_state import RESET_STATE
from pyllm.ops.sigmoid_mul import SIGMOID_MUL
from pyllm.quants import QuantType
from pyllm.recurrent_cache import StateRows
from pyllm.recurrent_state import LayerState

_ROW_SLOTS = 4
_ROW_LAYERS = 3
_SAMPLED_HEADS = 2
_RULE_LIMIT = 1e-4  # of sums over as many tokens as a prompt has


def recurrent_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    """Cases of all of these ops."""
    heads = DeltaHeads(*sizes.delta, True)
    for counts in ((1,), (1,) * sizes.few, (sizes.many,)):
        yield _conv_case(heads, counts)
        yield _rule_case(heads, counts)
        yield from _norm_cases(heads, sum(counts))
        yield from _gate_cases(sizes, sum(counts))
    for count in (sizes.many // 2, 4 * sizes.many):
        yield _rule_case(heads, (count,))
    yield from _row_cases(heads)


def _tokens(counts: Sequence[int]) -> str:
    return f"{len(counts)} x {counts[0]} tokens"


def _layer(source: Source, heads: DeltaHeads, num_seqs: int) -> LayerState:
    shape = delta_shape(heads)
    rows = state_rows(source.rng, shape, num_seqs, range(1, 1 + num_seqs))
    return LayerState(source.array(rows.values), source.array(rows.marks), shape, 0)


def _inputs(source: Source, counts: Sequence[int]) -> InputViews:
    return convert(sequences(counts, range(1, 1 + len(counts))), source.array)


def _scratch(source: Source, heads: DeltaHeads, counts: Sequence[int]) -> Any:
    shape = scratch_shape(source.device.target, heads, sum(counts), len(counts), max(counts))
    return None if shape is None else source.unwritten(*shape)


def _conv_case(heads: DeltaHeads, counts: Sequence[int]) -> BenchCase:
    count, channels = sum(counts), heads.num_channels

    def arguments(source: Source) -> Arguments:
        x = Columns(source.normal(count, channels + heads.v_size), 0, channels)
        out = source.unwritten(count, channels)
        state = _layer(source, heads, len(counts))
        norm = HeadNorm(2 * heads.num_k_heads, heads.head_dim, EPS)
        return x, source.normal(channels, TAPS), _inputs(source, counts), len(counts), state, norm, out

    def sample(read: Read, arguments: Arguments) -> Sample:
        x, weight, _, _, state, _, out = arguments
        window = wide(read(state.values, [0])[:, : (TAPS - 1) * channels].reshape(TAPS - 1, channels))
        inputs = wide(read(x.array, np.arange(counts[0]))[:, :channels])  # of the first sequence
        history, taps = np.concatenate([window, inputs]), wide(read(weight))

        def pairs() -> Pairs:
            total = sum(history[tap : tap + counts[0]] * taps[:, tap] for tap in range(TAPS))
            total /= 1 + np.exp(-total)
            keys = total[:, : 2 * heads.k_size].reshape(counts[0], -1, heads.head_dim)
            keys /= np.sqrt((keys**2).sum(-1, keepdims=True) + EPS)
            return [(read(out, np.arange(counts[0])), total)]

        return pairs

    def traffic(arguments: Arguments) -> float:
        windows = 2 * len(counts) * (TAPS - 1) * channels
        return 4.0 * (2 * count * channels + channels * TAPS + windows)

    return BenchCase(CAUSAL_CONV1D, f"{_tokens(counts)} x {channels}", arguments, sample, traffic, limit=F32_LIMIT)


def _rule_case(heads: DeltaHeads, counts: Sequence[int]) -> BenchCase:
    count, num_v, dim = sum(counts), heads.num_v_heads, heads.head_dim

    def arguments(source: Source) -> Arguments:
        rates = source.normal(count, 2 * num_v)
        decay = source.array(-np.exp(source.rng.standard_normal(num_v, np.float32)))
        return (
            *(
                source.array(delta_qkv(source.rng, heads, count)),
                Columns(rates, 0, num_v),
                Columns(rates, num_v, num_v),
            ),
            *(decay, source.normal(num_v), heads, _inputs(source, counts), len(counts), max(counts)),
            *(_layer(source, heads, len(counts)), source.array(np.zeros(faults.record_shape(), np.int32))),
            *(_scratch(source, heads, counts), source.unwritten(count, heads.v_size)),
        )

    def sample(read: Read, arguments: Arguments) -> Sample:
        qkv, beta, _, decay, dt_bias, *_, state, record, _, out = arguments
        first, some = np.arange(counts[0]), spread(num_v, _SAMPLED_HEADS)
        parts = wide(read(qkv, first)).reshape(counts[0], -1, dim).transpose(1, 0, 2)
        q, k = (parts[start + heads.k_head[some]] for start in (0, heads.num_k_heads))
        rates = wide(read(beta.array, first))
        steps = np.log1p(np.exp(rates[:, num_v:] + wide(read(dt_bias))))
        gates = 1 / (1 + np.exp(-rates[:, :num_v])), wide(read(decay)) * steps
        matrices = wide(read(state.values, [0])[0, state.matrix_start :].reshape(num_v, dim, dim)[some])

        def pairs() -> Pairs:
            v, (rate, log_decay) = parts[2 * heads.num_k_heads + some], (gate[:, some].T for gate in gates)
            exact = by_token(q / np.sqrt(dim), k, v, rate, log_decay, matrices)
            found = read(out, first).reshape(counts[0], num_v, dim)[:, some].transpose(1, 0, 2)
            return [(found, exact), *exactly([(read(record)[:1], np.zeros((1, faults.WIDTH), np.int32))])]

        return pairs

    def traffic(arguments: Arguments) -> float:
        state = 2 * len(counts) * num_v * dim * dim
        return 4.0 * (count * (heads.num_channels + heads.v_size + 2 * num_v) + state)

    name = f"{_tokens(counts)}, {num_v} heads of {dim}"
    return BenchCase(GATED_DELTA_RULE, name, arguments, sample, traffic, limit=_RULE_LIMIT)


def _norm_cases(heads: DeltaHeads, count: int) -> Iterator[BenchCase]:
    dim, num_k, size = heads.head_dim, 2 * heads.num_k_heads, heads.v_size

    def scaled(source: Source) -> Arguments:
        return source.normal(count, heads.num_channels), num_k, dim, EPS

    def of_scaled(read: Read, arguments: Arguments) -> Sample:
        x, rows = arguments[0], spread(count, SAMPLED_TOKENS)
        given = wide(read(x, rows))[:, : num_k * dim].reshape(len(rows), num_k, dim)
        exact = given / np.sqrt((given**2).sum(-1, keepdims=True) + EPS)
        return lambda: [(read(x, rows)[:, : num_k * dim], exact.reshape(len(rows), -1))]

    def bytes_of_keys(arguments: Arguments) -> float:
        return 8.0 * count * num_k * dim

    yield BenchCase(L2_NORM, f"{count} x {num_k} x {dim}", scaled, of_scaled, bytes_of_keys, limit=F32_LIMIT)

    def gated(source: Source) -> Arguments:
        gate = Columns(source.normal(count, 2 * size), size, size)
        return (
            source.normal(count, size),
            source.normal(dim),
            EPS,
            gate,
            source.unwritten(count, size, dtype=np.float16),
        )

    def of_gated(read: Read, arguments: Arguments) -> Sample:
        x, weight, eps, gate, out = arguments
        rows = spread(count, SAMPLED_TOKENS)
        given, gates = wide(read(x, rows)).reshape(len(rows), -1, dim), wide(read(gate.array, rows))[:, size:]
        exact = normed(given, wide(read(weight)), eps).reshape(len(rows), -1) * gates / (1 + np.exp(-gates))
        return lambda: [(read(out, rows), exact)]

    def bytes_of_gated(arguments: Arguments) -> float:
        return 10.0 * count * size

    name = f"{count} x {heads.num_v_heads} x {dim} to f16"
    yield BenchCase(GATED_RMS_NORM, name, gated, of_gated, bytes_of_gated, limit=F16_LIMIT)


def _gate_cases(sizes: Sizes, count: int) -> Iterator[BenchCase]:
    size = sizes.hidden

    def attention(source: Source) -> Arguments:
        x = source.normal(count, size, dtype=np.float16)
        return source.normal(count, size), x, source.unwritten(count, size, dtype=np.float16)

    sample = by_rows(lambda gate, x: x / (1 + np.exp(-gate)), (0, 1), 2)
    yield BenchCase(SIGMOID_MUL, f"{count} x {size}", attention, sample, all_bytes, limit=F16_LIMIT)

    def shared(source: Source) -> Arguments:
        h, x = (source.normal(count, size, dtype=np.float16) for _ in range(2))
        return h, source.normal(size, scale=size**-0.5), x, source.normal(count, size)

    def of_shared(read: Read, arguments: Arguments) -> Sample:
        h, weight, x, out = arguments
        rows = spread(count, SAMPLED_TOKENS)
        logits = wide(read(h, rows)) @ wide(read(weight))
        exact = wide(read(out, rows)) + wide(read(x, rows)) / (1 + np.exp(-logits))[:, None]
        return lambda: [(read(out, rows), exact)]

    def traffic(arguments: Arguments) -> float:
        return 12.0 * count * size

    yield BenchCase(GATED_ADD, f"{count} x {size}", shared, of_shared, traffic, limit=F32_LIMIT)


def _row_cases(heads: DeltaHeads) -> Iterator[BenchCase]:
    """All states of one sequence: a few layers of them."""
    shape = delta_shape(heads, _ROW_LAYERS)

    def rows_of(source: Source) -> tuple[StateRows, StateRows]:
        rows = state_rows(source.rng, shape, _ROW_SLOTS, (11,))
        return rows, convert(rows, source.array)

    def check(row: int, position: int, expected: Any) -> Any:
        """The values of a row afterwards."""

        def sample(read: Read, arguments: Arguments) -> Sample:
            exact = expected(read, arguments)
            return lambda: exactly([(as_bytes(read(arguments[position].values, [row])), as_bytes(exact))])

        return sample

    def reset(source: Source) -> Arguments:
        return rows_of(source)[1], 3, 21

    def fill(source: Source) -> Arguments:
        return rows_of(source)[1], 3, 0x5A

    def copy(source: Source) -> Arguments:
        return rows_of(source)[1], 0, 3, 11, 7, 21

    def load(source: Source) -> Arguments:
        host, rows = rows_of(source)
        return source.array(host.values[0]), source.array(host.marks[0]), 11, 7, rows, 3, 21

    size = 4.0 * shape.row_size
    name = f"{_ROW_LAYERS} layers, {heads.num_v_heads} heads of {heads.head_dim}"
    zeros = np.zeros((1, shape.row_size), np.float32)
    yield BenchCase(RESET_STATE, name, reset, check(3, 0, lambda *_: zeros), lambda _: size)
    fives = np.full((1, 4 * shape.row_size), 0x5A, np.uint8).view(np.float32)
    yield BenchCase(FILL_STATE, name, fill, check(3, 0, lambda *_: fives), lambda _: size)
    copied = check(3, 0, lambda read, arguments: read(arguments[0].values, [0]))
    yield BenchCase(COPY_STATE, name, copy, copied, lambda _: 2 * size)
    loaded = check(3, 4, lambda read, arguments: read(arguments[0])[None])
    yield BenchCase(LOAD_STATE, name, load, loaded, lambda _: 2 * size)
