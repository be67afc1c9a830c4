"""Cases of `pyllm kernels test`: mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from pyllm.kernel_check import Arguments, Case
from pyllm.kernel_product_cases import half_weight
from pyllm.kernel_samples import (
    Rng,
    half,
    normal,
    random_weight,
    unwritten,
)
from pyllm.ops.gated_mul_mat_id import GATED_MUL_MAT_ID
from pyllm.ops.group_experts import GROUP_EXPERTS, ExpertLists, group_experts_ref
from pyllm.ops.mul_mat_id import MUL_MAT_ID
from pyllm.ops.route import ROUTE
from pyllm.ops.weighted_sum import WEIGHTED_SUM
from pyllm.quants import QuantType
from pyllm.weight import Weight


def expert_cases() -> Iterator[Case]:
    for tokens, num_experts, num_used in ((1, 8, 2), (33, 128, 8), (5, 512, 10)):
        name = f"{tokens} tokens, {num_used} of {num_experts}"
        yield Case(ROUTE, name, partial(_route, tokens, num_experts, num_used), (1, 2))
    for tokens, num_experts, num_used in ((1, 8, 2), (65, 128, 8)):
        name = f"{tokens} tokens, {num_used} of {num_experts}"
        yield Case(GROUP_EXPERTS, name, partial(_group, tokens, num_experts, num_used), (2,), floor=None)
    for dtype in (np.float32, np.float16):
        for accumulate in (False, True):
            name = f"{np.dtype(dtype).name}, 5 x 3 x 97" + ", added" * accumulate
            yield Case(WEIGHTED_SUM, name, partial(_weighted_sum, dtype, accumulate), (2,))
    for qtype in (QuantType.F16, QuantType.Q4_K):
        yield mul_mat_id_case(qtype, 1, 7, 3, 97, 256, 0)
        yield mul_mat_id_case(qtype, 33, 7, 3, 97, 512, 64)
    yield mul_mat_id_case(QuantType.Q8_0, 5, 7, 3, 33, 96, 0, shared_input=False, dtype=np.float16)
    yield mul_mat_id_case(QuantType.Q8_0, 33, 7, 3, 33, 96, 64, shared_input=False, dtype=np.float16)
    yield gated_mul_mat_id_case(QuantType.Q4_K, QuantType.Q4_K, 5, 0)
    yield gated_mul_mat_id_case(QuantType.Q4_K, QuantType.Q8_0, 5, 0)
    yield gated_mul_mat_id_case(QuantType.Q8_0, QuantType.Q8_0, 33, 64)
    yield gated_mul_mat_id_case(QuantType.Q4_K, QuantType.Q6_K, 70, 64, np.float16)
    yield gated_mul_mat_id_case(QuantType.Q4_K, QuantType.Q4_K, 90, 128, np.float16, rows=40)
    yield mul_mat_id_case(QuantType.Q4_K, 8, 128, 8, 768, 2048, 0)
    for bm in (32, 64, 128):
        yield mul_mat_id_case(QuantType.Q4_K, 256, 128, 8, 768, 2048, bm)


def _route(tokens: int, num_experts: int, num_used: int, rng: Rng) -> Arguments:
    experts = unwritten(tokens, num_used, dtype=np.int32)
    return 3 * normal(rng, tokens, num_experts), experts, unwritten(tokens, num_used)


def _choice(tokens: int, num_experts: int, num_used: int, rng: Rng) -> np.ndarray:
    return np.stack([rng.permutation(num_experts)[:num_used] for _ in range(tokens)]).astype(np.int32)


def _group(tokens: int, num_experts: int, num_used: int, rng: Rng) -> Arguments:
    size = ExpertLists.size(tokens * num_used, num_experts, 32)
    lists = ExpertLists(unwritten(size, dtype=np.int32), 32)
    return _choice(tokens, num_experts, num_used, rng), num_experts, lists


def _weighted_sum(dtype: type, accumulate: bool, rng: Rng) -> Arguments:
    x: np.ndarray = normal(rng, 5, 3, 97).astype(dtype)
    return x, normal(rng, 5, 3), normal(rng, 5, 97), accumulate


def mul_mat_id_case(
    qtype: QuantType,
    tokens: int,
    num_experts: int,
    num_used: int,
    rows: int,
    row_elements: int,
    bm: int,
    shared_input: bool = True,
    dtype: type = np.float32,
) -> Case:
    """Tokens times the matrices of random experts, in tiles of `bm` pairs; 0: each pair for itself."""

    def arguments(rng: Rng) -> Arguments:
        weight = _random_experts(rng, qtype, num_experts, rows, row_elements)
        experts = _choice(tokens, num_experts, num_used, rng)
        lists = None
        if bm:
            lists = ExpertLists(unwritten(ExpertLists.size(experts.size, num_experts, bm), dtype=np.int32), bm)
            group_experts_ref(experts, num_experts, lists)
        x: np.ndarray = normal(rng, tokens, 1 if shared_input else num_used, row_elements).astype(dtype)
        return x, experts, weight, lists, unwritten(tokens, num_used, rows)

    name = f"{qtype.name}, {tokens} x {row_elements} x {rows}, {num_used} of {num_experts}"
    name += f", tiles of {bm}" * bool(bm) + ", f16" * (dtype == np.float16)
    large = tokens * num_used * row_elements * rows > 1 << 24
    return Case(MUL_MAT_ID, name, arguments, (4,), rounded=_half_experts, large=large)


def gated_mul_mat_id_case(
    gate_type: QuantType, up_type: QuantType, tokens: int, bm: int, dtype: type = np.float32, rows: int = 33
) -> Case:
    """The first half of experts, 2 of 5; x and out of a dtype."""
    num_experts, row_elements = 5, 256

    def arguments(rng: Rng) -> Arguments:
        weights = (_random_experts(rng, qtype, num_experts, rows, row_elements) for qtype in (gate_type, up_type))
        gate, up = (replace(weight, name=name) for weight, name in zip(weights, ("gate", "up"), strict=True))
        experts = _choice(tokens, num_experts, 2, rng)
        lists = None
        if bm:
            lists = ExpertLists(unwritten(ExpertLists.size(experts.size, num_experts, bm), dtype=np.int32), bm)
            group_experts_ref(experts, num_experts, lists)
        scratch = unwritten(tokens, 2, rows, dtype=dtype) if bm or gate_type != up_type else None
        x: np.ndarray = normal(rng, tokens, 1, row_elements).astype(dtype)
        return x, experts, gate, up, lists, scratch, unwritten(tokens, 2, rows, dtype=dtype)

    name = f"{gate_type.name}+{up_type.name}, {tokens} x {row_elements} x {rows}" + f", tiles of {bm}" * bool(bm)
    name += ", f16" * (dtype == np.float16)
    return Case(GATED_MUL_MAT_ID, name, arguments, (6,), rounded=_half_experts)


def _random_experts(rng: Rng, qtype: QuantType, num_experts: int, rows: int, row_elements: int) -> Weight:
    flat = random_weight(rng, qtype, num_experts * rows, row_elements)
    return replace(flat, shape=(num_experts, rows, row_elements), array=flat.array.reshape(num_experts, rows, -1))


def _half_experts(arguments: Arguments) -> Arguments:
    x, *others = arguments
    return half(x), *(half_weight(other) if isinstance(other, Weight) else other for other in others)
