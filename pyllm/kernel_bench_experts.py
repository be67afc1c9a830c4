"""Cases of `pyllm kernels bench`: mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pyllm.kernel_bench import Arguments, BenchCase, Sample, Source
from pyllm.kernel_bench_samples import (
    F16_LIMIT,
    F32_LIMIT,
    SAMPLED_COLUMNS,
    SAMPLED_TOKENS,
    Read,
    Sizes,
    all_bytes,
    by_rows,
    decoded,
    exactly,
    silu_mul,
    spread,
    wide,
)
from pyllm.ops.gated_mul_mat_id import GATED_MUL_MAT_ID, gate_needs_scratch
from pyllm.ops.group_experts import GROUP_EXPERTS, ExpertLists, group_experts_ref
from pyllm.ops.mul_mat_id import MUL_MAT_ID, expert_tile_rows
from pyllm.ops.route import ROUTE
from pyllm.ops.weighted_sum import WEIGHTED_SUM
from pyllm.quants import QuantType
from pyllm.weight import Weight


def route_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    experts, used, *_ = sizes.experts
    for tokens in (1, sizes.few, sizes.many):

        def arguments(source: Source, tokens: int = tokens) -> Arguments:
            outputs = source.unwritten(tokens, used, dtype=np.int32), source.unwritten(tokens, used)
            return source.normal(tokens, experts), *outputs

        def sample(read: Read, arguments: Arguments) -> Sample:
            logits, chosen, weights = arguments
            rows = spread(logits.shape[0], SAMPLED_TOKENS)
            given = read(logits, rows)
            ids = np.argsort(-given, axis=1, kind="stable")[:, :used].astype(np.int32)
            likely = np.exp(wide(np.take_along_axis(given, ids, axis=1)))
            exact = likely / likely.sum(axis=1, keepdims=True)
            return lambda: [*exactly([(read(chosen, rows), ids)]), (read(weights, rows), exact)]

        yield BenchCase(ROUTE, f"{tokens} tokens, {used} of {experts}", arguments, sample, all_bytes, limit=F32_LIMIT)


def weighted_sum_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    _, used, _, width = sizes.experts
    for tokens in (1, sizes.few, sizes.many):

        def arguments(source: Source, tokens: int = tokens) -> Arguments:
            x, weights = source.normal(tokens, used, width), source.normal(tokens, used)
            return x, weights, source.unwritten(tokens, width), False

        sample = by_rows(lambda x, weights: np.einsum("tjd,tj->td", x, weights), (0, 1), 2)
        yield BenchCase(WEIGHTED_SUM, f"{tokens} x {used} x {width}", arguments, sample, all_bytes, limit=F32_LIMIT)


def group_experts_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    experts, used, *_ = sizes.experts
    bm = 64

    def arguments(source: Source) -> Arguments:
        chosen = _choice(source, sizes.many, experts, used)
        lists = np.zeros(ExpertLists.size(chosen.size, experts, bm), np.int32)
        return source.array(chosen), experts, ExpertLists(source.array(lists), bm)

    def sample(read: Read, arguments: Arguments) -> Sample:
        chosen, _, lists = arguments
        exact = np.zeros(lists.array.shape, np.int32)
        group_experts_ref(read(chosen), experts, ExpertLists(exact, bm))
        return lambda: exactly([(read(lists.array), exact)])

    name = f"{sizes.many} tokens, {used} of {experts}"
    yield BenchCase(GROUP_EXPERTS, name, arguments, sample, all_bytes)


def mul_mat_id_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    for qtype in sizes.all_matrices:
        for tokens in sizes.expert_tokens:
            yield _experts_case(qtype, tokens, *sizes.experts)


def _experts_case(qtype: QuantType, tokens: int, experts: int, used: int, rows: int, row_elements: int) -> BenchCase:
    def arguments(source: Source) -> Arguments:
        chosen = _choice(source, tokens, experts, used)
        weight = source.weight(qtype, experts, rows, row_elements)
        out = source.unwritten(tokens, used, rows, dtype=np.float16)
        x = source.normal(tokens, 1, row_elements, dtype=np.float16)
        return x, source.array(chosen), weight, _lists(source, chosen, weight), out

    def sample(read: Read, arguments: Arguments) -> Sample:
        x, chosen, weight, _, out = arguments
        some, columns = spread(tokens, 2), spread(rows, SAMPLED_COLUMNS)
        exact = _products(read, x, chosen, weight, some, columns)
        return lambda: [(read(out, some)[:, :, columns], exact)]

    def traffic(arguments: Arguments) -> float:
        x, chosen, weight, _, out = arguments
        packed = _share_needed(tokens, experts, used) * weight.array.nbytes
        return x.nbytes + chosen.nbytes + packed + out.nbytes

    name = f"{qtype.name}, {tokens} x {row_elements} x {rows}, {used} of {experts}"
    flops = 2.0 * tokens * used * rows * row_elements
    return BenchCase(MUL_MAT_ID, name, arguments, sample, traffic, flops, F16_LIMIT)


def gated_mul_mat_id_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    for tokens in sizes.expert_tokens:
        yield _gated_experts_case(tokens, *sizes.experts)


def _gated_experts_case(tokens: int, experts: int, used: int, rows: int, row_elements: int) -> BenchCase:
    def arguments(source: Source) -> Arguments:
        chosen = _choice(source, tokens, experts, used)
        both = source.weight(QuantType.Q4_K, 2 * experts, rows, row_elements)
        halves = both.array[:experts], both.array[experts:]
        gate, up = (replace(both, shape=(experts, rows, row_elements), array=half) for half in halves)
        x = source.normal(tokens, 1, row_elements, dtype=np.float16)
        out = source.unwritten(tokens, used, rows, dtype=np.float16)
        target, scratch = source.device.target, None
        if gate_needs_scratch(target, chosen.size, gate, up, x.dtype):
            scratch = source.unwritten(tokens, used, rows, dtype=np.float16)
        return x, source.array(chosen), gate, up, _lists(source, chosen, gate, up), scratch, out

    def sample(read: Read, arguments: Arguments) -> Sample:
        x, chosen, gate, up, *_, out = arguments
        some, columns = spread(tokens, 2), spread(rows, SAMPLED_COLUMNS)
        exact = silu_mul(*(_products(read, x, chosen, weight, some, columns) for weight in (gate, up)))
        return lambda: [(read(out, some)[:, :, columns], exact)]

    def traffic(arguments: Arguments) -> float:
        x, chosen, gate, up, *_, out = arguments
        packed = gate.array.nbytes + up.array.nbytes
        return x.nbytes + chosen.nbytes + _share_needed(tokens, experts, used) * packed + out.nbytes

    name = f"Q4_K, {tokens} x {row_elements} x {rows}, {used} of {experts}"
    flops = 4.0 * tokens * used * rows * row_elements
    return BenchCase(GATED_MUL_MAT_ID, name, arguments, sample, traffic, flops, F16_LIMIT)


def _choice(source: Source, tokens: int, experts: int, used: int) -> np.ndarray:
    return np.stack([source.rng.permutation(experts)[:used] for _ in range(tokens)]).astype(np.int32)


def _lists(source: Source, chosen: np.ndarray, *weights: Weight) -> ExpertLists | None:
    bm, experts = expert_tile_rows(source.device.target, chosen.size, *weights), weights[0].shape[0]
    if not bm:
        return None
    filled = ExpertLists(np.zeros(ExpertLists.size(chosen.size, experts, bm), np.int32), bm)
    group_experts_ref(chosen, experts, filled)
    return ExpertLists(source.array(filled.array), bm)


def _products(
    read: Read, x: np.ndarray, chosen: np.ndarray, weight: Weight, some: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Those of some tokens with the same input for all of their experts, and some rows."""
    ids, given = read(chosen, some), wide(read(x, some))
    exact = np.empty((*ids.shape, len(columns)))
    for index, slot in np.ndindex(ids.shape):
        packed = read(weight.array, [ids[index, slot]])[0, columns]
        exact[index, slot] = decoded(packed, weight.qtype) @ given[index, 0]
    return exact


def _share_needed(tokens: int, experts: int, used: int) -> float:
    """Share of the experts that somebody chose, on average."""
    return float(1 - (1 - used / experts) ** tokens)
