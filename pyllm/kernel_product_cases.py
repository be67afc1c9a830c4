"""Cases of `pyllm kernels test`: products with packed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pyllm.kernel_check import Arguments, Case
from pyllm.kernel_samples import (
    COMMON_TYPES,
    EMULATED_MMA,
    HALF,
    HOPPER,
    Rng,
    half,
    listed,
    normal,
    random_weight,
    unwritten,
)
from pyllm.ops.linear import LINEAR, linear_scratch
from pyllm.ops.mul_mat import MUL_MAT, scratch_size
from pyllm.ops.product_plan import Gate, Norm
from pyllm.ops.rms_norm import RMS_NORM
from pyllm.quants import GPU_TYPES, QuantType, dequantize
from pyllm.weight import Weight

LIBRARY_PRODUCT = (2048, 4096, 4096)  # on Hopper the library is called for a product of this size


def _half_product(arguments: Arguments) -> Arguments:
    x, weight, scratch, out = arguments
    values = weight.array if weight.qtype == QuantType.F32 else dequantize(weight.array, weight.qtype)
    return half(x), replace(weight, qtype=QuantType.F32, array=half(values)), scratch, out


def mul_mat_cases() -> Iterator[Case]:
    for qtype in sorted(GPU_TYPES):
        for tokens in (1, 5, 33) if qtype in COMMON_TYPES else (33,):
            yield mul_mat_case(qtype, tokens, 97, 512)
    yield mul_mat_case(QuantType.Q4_K, *LIBRARY_PRODUCT)
    for qtype in (QuantType.Q4_K, QuantType.Q6_K, QuantType.F16):  # in large tiles
        yield mul_mat_case(qtype, 2048, 2048, 1024)
        yield mul_mat_case(qtype, 200, 8200, 1280)
    for qtype in (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0):  # few and many tokens
        yield mul_mat_case(qtype, 20, 97, 512)
        yield mul_mat_case(qtype, 100, 97, 768)
        yield mul_mat_case(qtype, 520, 97, 256)
    for size in (1, 33, 97):
        yield mul_mat_case(QuantType.F32, size, size, 72)


def mul_mat_case(qtype: QuantType, tokens: int, rows: int, row_elements: int, weight: Weight | None = None) -> Case:
    """Tokens times a weight; a random one by default."""

    def arguments(rng: Rng) -> Arguments:
        matrix = weight or random_weight(rng, qtype, rows, row_elements)
        size = max(scratch_size(target, tokens, matrix) for target in (HOPPER, EMULATED_MMA))
        scratch = np.zeros(size, np.float16) if size else None
        return normal(rng, tokens, row_elements), matrix, scratch, unwritten(tokens, rows)

    name = f"{qtype.name}, {tokens} x {row_elements} x {rows}"
    return Case(MUL_MAT, name, arguments, (3,), rounded=_half_product, large=tokens * row_elements * rows > 1 << 24)


def linear_cases() -> Iterator[Case]:
    q4, q8 = QuantType.Q4_K, QuantType.Q8_0
    yield linear_case((q4, q4, q4), (33, 17, 16), 1, 256, norm=True)
    yield linear_case((q4, q4, q8), (16, 16, 40), 3, 256, bias=True)
    yield linear_case((QuantType.Q4_1,) * 2, (49, 49), 2, 96, norm=True, gate=Gate.SILU)
    yield linear_case((q8, q8), (49, 49), 9, 64, gate=Gate.GELU)
    yield linear_case((q4, q8), (40, 40), 1, 256, gate=Gate.SILU, dtype=np.float16)
    yield linear_case((q8,), (40,), 5, 96, dtype=np.float16, accumulate=True)
    yield linear_case((QuantType.Q6_K,), (40,), 20, 256, accumulate=True, bias=True)
    for q, tokens in ((q4, 12), (QuantType.Q5_K, 12), (q4, 27), (QuantType.Q5_K, 27)):  # activations stay in registers
        yield linear_case((q,) * 3, (65, 33, 17), tokens, 1024, norm=True, bias=True)
        yield linear_case((q,), (113,), tokens, 3328, dtype=np.float16, accumulate=True)
        yield linear_case((q, q), (65, 65), tokens, 1280, norm=True, gate=Gate.SILU)
        yield linear_case((q, q), (65, 65), 3 * tokens + 20, 1280, norm=True, gate=Gate.SILU)
    yield linear_case((q8, q4), (40, 24), 35, 256, norm=True, bias=True)
    yield linear_case((q8, q8), (40, 40), 35, 96, norm=True, gate=Gate.SILU)
    yield linear_case((q4,) * 3, (97, 33, 17), 35, 256, norm=True, bias=True)
    for tokens in (64, 300):  # neighbours in one launch; blocks share k, and do not
        yield linear_case((QuantType.Q6_K,) * 3, (2050, 513, 511), tokens, 4096, norm=True)
    yield linear_case((q4,), (2050,), 128, 8192, dtype=np.float16, accumulate=True)
    yield linear_case((q4, q4), (8192, 8192), 1024, 4096, norm=True, gate=Gate.SILU)
    yield linear_case((q4,), (4096,), 1024, 4096, dtype=np.float16, accumulate=True)


def linear_case(
    qtypes: Sequence[QuantType],
    rows: Sequence[int],
    tokens: int,
    row_elements: int,
    norm: bool = False,
    bias: bool = False,
    gate: Gate = Gate.NONE,
    accumulate: bool = False,
    dtype: type = np.float32,
) -> Case:
    """Tokens (of a dtype) times some matrices."""

    def arguments(rng: Rng) -> Arguments:
        weights = tuple(random_weight(rng, qtype, n, row_elements) for qtype, n in zip(qtypes, rows, strict=True))
        columns = rows[0] if gate else sum(rows)
        x: np.ndarray = normal(rng, tokens, row_elements).astype(dtype)
        out = normal(rng, tokens, columns) if accumulate else unwritten(tokens, columns)
        layer_norm = Norm(normal(rng, row_elements), 1e-5) if norm else None
        size = max(
            linear_scratch(target, tokens, weights, x.dtype, norm, bool(gate)) for target in (HOPPER, EMULATED_MMA)
        )
        scratch = np.zeros(size, np.float16) if size else None
        return x, weights, layer_norm, normal(rng, sum(rows)) if bias else None, gate, accumulate, scratch, out

    extras = ["norm"] * norm + ["bias"] * bias + [gate.name.lower()] * bool(gate) + ["added"] * accumulate
    shape = f"{'+'.join(qtype.name for qtype in qtypes)}, {tokens} x {row_elements} x {listed(rows)}"
    name = ", ".join([shape, *extras, *["f16"] * (dtype == np.float16)])
    large = tokens * row_elements * sum(rows) > 1 << 24
    # What goes into a gate is rounded to f16, too, where there are many tokens; the floor stands for that.
    return Case(LINEAR, name, arguments, (7,), floor=HALF, rounded=_half_linear, large=large)


def _half_linear(arguments: Arguments) -> Arguments:
    x, weights, norm, *others = arguments
    if norm is not None:  # the normalised row is what is multiplied
        normed = np.empty_like(x)
        RMS_NORM.reference(x, norm.weight, norm.eps, normed, False)
        x = normed
    halves = []
    for weight in weights:
        values = weight.array if weight.qtype == QuantType.F32 else dequantize(weight.array, weight.qtype)
        halves.append(replace(weight, qtype=QuantType.F32, array=half(values)))
    return half(x), tuple(halves), None, *others


def half_weight(weight: Weight) -> Weight:
    values = weight.array if weight.qtype == QuantType.F32 else dequantize(weight.array, weight.qtype)
    return replace(weight, qtype=QuantType.F32, array=half(values))
