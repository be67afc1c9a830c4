"""The cases with which `pyllm kernels test` and the tests check kernels: a few for each op that has one.

A case is stated as the arguments of its op's reference, drawn from a seed; `kernel_check` runs and judges it. The sizes
are small and awkward, so that all cases take seconds on the emulated device too. To add an op, write a function that
yields its cases and add it to `_GROUPS`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputLayout, InputViews
from pyllm.kernel_check import Arguments, Case, convert
from pyllm.kernel_recurrent_cases import recurrent_cases
from pyllm.kv_cache import LayerCache
from pyllm.kv_types import KV_TYPES, KVType
from pyllm.ops.add import ADD
from pyllm.ops.check_inputs import CHECK_INPUTS
from pyllm.ops.clear_tags import CLEAR_TAGS
from pyllm.ops.copy_inputs import COPY_INPUTS
from pyllm.ops.copy_rows import COPY_ROWS
from pyllm.ops.fill_rows import FILL_ROWS
from pyllm.ops.flash_attention import (
    FLASH_ATTENTION,
    NUM_COUNTERS,
    AttentionParams,
    AttentionShape,
)
from pyllm.ops.gated_mul_mat_id import GATED_MUL_MAT_ID
from pyllm.ops.gelu_mul import GELU_MUL
from pyllm.ops.get_rows import GET_ROWS
from pyllm.ops.group_experts import GROUP_EXPERTS, ExpertLists, group_experts_ref
from pyllm.ops.keep_tokens import KEEP_TOKENS
from pyllm.ops.linear import LINEAR, linear_scratch
from pyllm.ops.mul_mat import MUL_MAT, plan_mul_mat, scratch_size
from pyllm.ops.mul_mat_id import MUL_MAT_ID
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.product_plan import Gate, Norm
from pyllm.ops.rms_norm import RMS_NORM
from pyllm.ops.rope import ROPE, ROPE_TABLE, RopePairing
from pyllm.ops.rope_set_rows import ROPE_SET_ROWS, HeadNorms
from pyllm.ops.route import ROUTE
from pyllm.ops.set_rows import SET_ROWS
from pyllm.ops.silu_mul import SILU_MUL
from pyllm.ops.softcap import SOFTCAP
from pyllm.ops.take_rows import TAKE_ROWS
from pyllm.ops.top_k import PART, TOP_K, scratch_columns
from pyllm.ops.weighted_sum import WEIGHTED_SUM
from pyllm.quants import FORMATS, GPU_TYPES, QuantType, dequantize, row_bytes
from pyllm.weight import Weight

HALF = 2.0**-11  # relative error of a rounding to f16
_EMULATED_TARGET = Target("host", "host", 32, "mma")
_LIBRARY_TARGET = Target("cuda", "sm_90", 32, "mma")  # has further kernels; mul_mat may call a library ...
_LIBRARY_PRODUCT = (2048, 4096, 4096)  # ... for a product of this size
_LARGEST_VALUE = 8.0  # of a random weight: beside the large error of an outlier all others would go unseen
_DIFFERENT_BLOCKS = 1 << 14  # of a random weight

_COMMON_TYPES = (QuantType.F16, QuantType.Q4_0, QuantType.Q8_0, QuantType.Q4_K, QuantType.Q6_K)

Rng = np.random.Generator


@cache
def all_cases() -> tuple[Case, ...]:
    """All cases, op by op."""
    return tuple(case for group in _GROUPS for case in group())


def planned_kernels(case: Case) -> list[tuple[str, str]]:
    """Source and entry point of the kernels that a small case launches."""
    assert case.op.plan is not None
    return _kernels(case.op.plan(_EMULATED_TARGET, *case.draw(0)))


def ops_of_kernels() -> dict[str, set[str]]:
    """For each kernel source the names of the ops that launch it."""
    users: dict[str, set[str]] = {}
    for case in all_cases():
        if not case.large:
            for source, _ in planned_kernels(case):
                users.setdefault(source, set()).add(case.op.name)
    tokens, rows, row_elements = _LIBRARY_PRODUCT
    weight = Weight("any", (rows, row_elements), QuantType.F16, np.empty((rows, 2 * row_elements), np.uint8))
    scratch = np.empty(scratch_size(_LIBRARY_TARGET, tokens, weight), np.float16)
    x, out = np.empty((tokens, row_elements), np.float32), np.empty((tokens, rows), np.float32)
    for source, _ in _kernels(plan_mul_mat(_LIBRARY_TARGET, x, weight, scratch, out)):
        users.setdefault(source, set()).add(MUL_MAT.name)
    for case in (
        attention_case("f16", (33,), (33,), 4, 2, 64),
        mul_mat_case(QuantType.Q8_0, 33, 8, 32),
        mul_mat_id_case(QuantType.Q8_0, 33, 7, 3, 8, 32, 32, dtype=np.float16),
    ):
        assert case.op.plan is not None
        for source, _ in _kernels(case.op.plan(_LIBRARY_TARGET, *case.draw(0))):
            users.setdefault(source, set()).add(case.op.name)
    return users


def _kernels(launches: Sequence[Any]) -> list[tuple[str, str]]:
    return [(launch.source, launch.entry) for launch in launches if isinstance(launch, KernelLaunch)]


# what arguments are made of


def normal(rng: Rng, *shape: int) -> np.ndarray:
    """Random float32."""
    return rng.standard_normal(shape, np.float32)


def unwritten(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """An output before the op ran: NaN, or -1."""
    return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else -1, dtype)


def random_weight(rng: Rng, qtype: QuantType, rows: int, row_elements: int) -> Weight:
    """A weight of any block type whose values are zero or of usual size."""
    if qtype == QuantType.F32:
        return Weight("random", (rows, row_elements), qtype, normal(rng, rows, row_elements))
    count, size = rows * row_bytes(qtype, row_elements) // FORMATS[qtype].block_bytes, FORMATS[qtype].block_bytes
    blocks = rng.integers(0, 256, (min(count, _DIFFERENT_BLOCKS), size), np.uint8)
    # Random bits make some values huge, and others subnormal, which GPUs flush to zero: draw those blocks anew.
    while (bad := ~_usual(dequantize(blocks, qtype)).all(axis=1)).any():
        blocks[bad] = rng.integers(0, 256, (int(bad.sum()), size), np.uint8)
    if count > len(blocks):
        blocks = blocks[rng.integers(0, len(blocks), count)]
    return Weight("random", (rows, row_elements), qtype, blocks.reshape(rows, -1))


def _usual(values: np.ndarray) -> np.ndarray:
    size = np.abs(values)
    return (size < _LARGEST_VALUE) & ((size == 0) | (size >= np.finfo(np.float32).tiny))


def paged(
    rng: Rng,
    lengths: Sequence[int],
    new: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    kv_type: KVType,
    page_size: int = 8,
    written: bool = True,
) -> tuple[InputViews, LayerCache]:
    """Sequences in shuffled pages, and the inputs of a ubatch with their last tokens.

    Args:
        lengths: rows of each sequence, this ubatch included.
        new: tokens of each sequence in this ubatch.
        written: their rows are in the cache already; otherwise they carry another tag.
    """
    num_pages = [-(-length // page_size) for length in lengths]
    layout = InputLayout(sum(new), len(lengths), max(num_pages))
    inputs = layout.views(np.zeros(layout.num_bytes, np.uint8))
    pages = rng.permutation(sum(num_pages) + 3)
    k, v = (kv_type.encode(normal(rng, page_size * len(pages), num_kv_heads * head_dim)) for _ in range(2))
    tags = np.full(len(k), 7, np.uint32)
    inputs.cu_seqlens[1:] = np.cumsum(new)
    inputs.kv_lens[:] = lengths
    inputs.seq_ids[:] = 100 + np.arange(len(lengths))
    first = 0
    for seq, count in enumerate(num_pages):
        own = inputs.page_table[seq, :count] = pages[first : first + count]
        epochs = inputs.page_epochs[seq, :count] = rng.integers(8, 2**32, count, np.uint32)
        first += count
        rows = (own[:, None] * page_size + np.arange(page_size)).reshape(-1)[: lengths[seq]]
        start = lengths[seq] - new[seq]
        tokens = slice(*inputs.cu_seqlens[seq : seq + 2])
        inputs.positions[tokens] = np.arange(start, lengths[seq])
        inputs.token_seq[tokens] = seq
        inputs.row_ids[tokens] = rows[start:]
        present = lengths[seq] if written else start
        tags[rows[:present]] = np.repeat(epochs, page_size)[:present]
    return inputs, LayerCache(k, v, tags, page_size, 5, np.zeros(NUM_COUNTERS, np.int32))


def empty_record() -> np.ndarray:
    """A fault record without faults."""
    return np.zeros(faults.record_shape(), np.int32)


# the roundings of kernels


def _half(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float32) if array.dtype == np.float32 else array.copy()


def _half_operands(arguments: Arguments) -> Arguments:
    return convert(arguments, _half)


def _half_product(arguments: Arguments) -> Arguments:
    x, weight, scratch, out = arguments
    values = weight.array if weight.qtype == QuantType.F32 else dequantize(weight.array, weight.qtype)
    return _half(x), replace(weight, qtype=QuantType.F32, array=_half(values)), scratch, out


# cases


def _add_cases() -> Iterator[Case]:
    for rows, size in ((1, 1), (5, 33)):
        yield Case(ADD, f"{rows}x{size}", partial(_elementwise, rows, size), (2,), floor=None)
    yield Case(
        ADD, "3x97, a bias", lambda rng: (normal(rng, 3, 97), normal(rng, 97), unwritten(3, 97)), (2,), floor=None
    )


def _elementwise(rows: int, size: int, rng: Rng) -> Arguments:
    return normal(rng, rows, size) * 4, normal(rng, rows, size), unwritten(rows, size)


def _gate_cases(op: Op) -> Iterator[Case]:
    for rows, size in ((1, 1), (3, 33), (2, 257)):
        yield Case(op, f"{rows}x{size}", partial(_elementwise, rows, size), (2,))

    def in_place(rng: Rng) -> Arguments:
        gate = normal(rng, 3, 97) * 30
        return gate, normal(rng, 3, 97), gate

    yield Case(op, "3x97 in place, large", in_place, (2,))


def _softcap_cases() -> Iterator[Case]:
    for rows, size in ((1, 1), (3, 97)):
        yield Case(SOFTCAP, f"{rows}x{size}", partial(_softcap, rows, size), (2,))


def _softcap(rows: int, size: int, rng: Rng) -> Arguments:
    return normal(rng, rows, size) * 50, 30.0, unwritten(rows, size)


def _rms_norm_cases() -> Iterator[Case]:
    for rows, size in ((1, 1), (3, 97), (2, 1032)):
        yield Case(RMS_NORM, f"{rows}x{size}", partial(_rms_norm, rows, size), (3,))

    def narrow(rng: Rng) -> Arguments:
        x, weight, eps, _, accumulate = _rms_norm(3, 100, rng)
        return x, weight, eps, unwritten(3, 100, dtype=np.float16), accumulate

    def added(rng: Rng) -> Arguments:
        x, weight, eps, _, _ = _rms_norm(5, 65, rng)
        return x, weight, eps, normal(rng, 5, 65), True

    def in_place(rng: Rng) -> Arguments:
        heads = normal(rng, 5, 3, 32)
        return heads, normal(rng, 32), 1e-6, heads, False

    yield Case(RMS_NORM, "3x100 to f16", narrow, (3,), floor=HALF)
    yield Case(RMS_NORM, "5x65 added", added, (3,))
    yield Case(RMS_NORM, "15x32 in place", in_place, (3,))


def _rms_norm(rows: int, size: int, rng: Rng) -> Arguments:
    return normal(rng, rows, size), normal(rng, size), 1e-5, unwritten(rows, size), False


def _rope_cases() -> Iterator[Case]:
    for tokens, half in ((1, 16), (33, 32)):
        yield Case(ROPE_TABLE, f"{tokens} x {half} angles", partial(_rope_table, tokens, half), (3, 4))
    for pairing in RopePairing:
        for tokens, head_dim, rotated in ((1, 64, 64), (33, 80, 80), (9, 96, 24)):
            name = f"{pairing.name.lower()}, {tokens} x 3 x {head_dim}, {rotated} of them rotated"
            yield Case(ROPE, name, partial(_rope, tokens, head_dim, rotated // 2, pairing), (0,))


def _rope_table(tokens: int, half: int, rng: Rng) -> Arguments:
    inv_freq = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
    positions = rng.integers(0, 4096, tokens, np.int32)
    return positions, inv_freq, 1.25, unwritten(tokens, half), unwritten(tokens, half)


def _rope(tokens: int, head_dim: int, half: int, pairing: RopePairing, rng: Rng) -> Arguments:
    angle = rng.uniform(0, 2 * np.pi, (tokens, half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return normal(rng, tokens, 3, head_dim), cos, sin, pairing


def _mul_mat_cases() -> Iterator[Case]:
    for qtype in sorted(GPU_TYPES):
        for tokens in (1, 5, 33) if qtype in _COMMON_TYPES else (33,):
            yield mul_mat_case(qtype, tokens, 97, 512)
    yield mul_mat_case(QuantType.Q4_K, *_LIBRARY_PRODUCT)
    for qtype in (QuantType.Q4_K, QuantType.Q6_K, QuantType.F16):  # in large tiles
        yield mul_mat_case(qtype, 2048, 2048, 1024)
        yield mul_mat_case(qtype, 200, 8200, 1280)
    for size in (1, 33, 97):
        yield mul_mat_case(QuantType.F32, size, size, 72)


def mul_mat_case(qtype: QuantType, tokens: int, rows: int, row_elements: int, weight: Weight | None = None) -> Case:
    """Tokens times a weight; a random one by default."""

    def arguments(rng: Rng) -> Arguments:
        matrix = weight or random_weight(rng, qtype, rows, row_elements)
        size = scratch_size(_LIBRARY_TARGET, tokens, matrix)
        scratch = np.zeros(size, np.float16) if size else None
        return normal(rng, tokens, row_elements), matrix, scratch, unwritten(tokens, rows)

    name = f"{qtype.name}, {tokens} x {row_elements} x {rows}"
    return Case(MUL_MAT, name, arguments, (3,), rounded=_half_product, large=tokens * row_elements * rows > 1 << 24)


def _linear_cases() -> Iterator[Case]:
    q4, q8 = QuantType.Q4_K, QuantType.Q8_0
    yield linear_case((q4, q4, q4), (33, 17, 16), 1, 256, norm=True)
    yield linear_case((q4, q4, q8), (16, 16, 40), 3, 256, bias=True)
    yield linear_case((QuantType.Q4_1,) * 2, (49, 49), 2, 96, norm=True, gate=Gate.SILU)
    yield linear_case((q8, q8), (49, 49), 9, 64, gate=Gate.GELU)
    yield linear_case((q4, q8), (40, 40), 1, 256, gate=Gate.SILU, dtype=np.float16)
    yield linear_case((q8,), (40,), 5, 96, dtype=np.float16, accumulate=True)
    yield linear_case((QuantType.Q6_K,), (40,), 20, 256, accumulate=True, bias=True)
    yield linear_case((q8, q4), (40, 24), 35, 256, norm=True, bias=True)
    yield linear_case((q8, q8), (40, 40), 35, 96, norm=True, gate=Gate.SILU)
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
        size = linear_scratch(_LIBRARY_TARGET, tokens, weights, x.dtype, norm, bool(gate))
        scratch = np.zeros(size, np.float16) if size else None
        return x, weights, layer_norm, normal(rng, sum(rows)) if bias else None, gate, accumulate, scratch, out

    extras = ["norm"] * norm + ["bias"] * bias + [gate.name.lower()] * bool(gate) + ["added"] * accumulate
    shape = f"{'+'.join(qtype.name for qtype in qtypes)}, {tokens} x {row_elements} x {_list(rows)}"
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
        halves.append(replace(weight, qtype=QuantType.F32, array=_half(values)))
    return _half(x), tuple(halves), None, *others


def _rope_set_rows_cases() -> Iterator[Case]:
    for kv_type in KV_TYPES.values():
        yield rope_set_rows_case(kv_type, 32)
    yield rope_set_rows_case(KV_TYPES["f32"], 80, norms=True)
    yield rope_set_rows_case(KV_TYPES["f16"], 64, norms=True, pairing=RopePairing.NORM, dtype=np.float16)
    yield rope_set_rows_case(KV_TYPES["f16"], 32, wrong=True)


def rope_set_rows_case(
    kv_type: KVType,
    head_dim: int,
    norms: bool = False,
    pairing: RopePairing = RopePairing.NEOX,
    dtype: type = np.float32,
    wrong: bool = False,
) -> Case:
    """Three heads of queries over two of keys; `wrong`: a token with another's row."""

    def arguments(rng: Rng) -> Arguments:
        inputs, cache = paged(rng, (1, 20, 9), (1, 3, 9), 2, head_dim, kv_type, written=False)
        inputs.row_ids[4] = inputs.row_ids[3] if wrong else -1
        angle = rng.uniform(0, 2 * np.pi, (13, head_dim // 2 - 4))
        tables = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        weights = HeadNorms(normal(rng, head_dim), normal(rng, head_dim), 1e-6) if norms else None
        out = unwritten(13, 3, head_dim, dtype=dtype)
        qkv = normal(rng, 13, 7 * head_dim)
        return qkv, weights, *tables, pairing, inputs, cache, kv_type, empty_record(), out

    extras = ["norms"] * norms + ["a wrong row"] * wrong + ["f16 queries"] * (dtype == np.float16)
    name = ", ".join([kv_type.name, f"heads of {head_dim}", pairing.name.lower(), *extras])
    outputs, unit = ((9,), 1.0) if kv_type.block > 1 or kv_type.name == "bf16" else ((6, 8, 9), 8.0)
    floor = HALF if "f16" in (kv_type.name, np.dtype(dtype).name.replace("float", "f")) else 1e-6
    return Case(ROPE_SET_ROWS, name, arguments, outputs, floor=floor, unit=unit)


def _expert_cases() -> Iterator[Case]:
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


def gated_mul_mat_id_case(gate_type: QuantType, up_type: QuantType, tokens: int, bm: int) -> Case:
    """The first half of experts, 2 of 5."""
    num_experts, rows, row_elements = 5, 33, 256

    def arguments(rng: Rng) -> Arguments:
        weights = (_random_experts(rng, qtype, num_experts, rows, row_elements) for qtype in (gate_type, up_type))
        gate, up = (replace(weight, name=name) for weight, name in zip(weights, ("gate", "up"), strict=True))
        experts = _choice(tokens, num_experts, 2, rng)
        lists = None
        if bm:
            lists = ExpertLists(unwritten(ExpertLists.size(experts.size, num_experts, bm), dtype=np.int32), bm)
            group_experts_ref(experts, num_experts, lists)
        scratch = unwritten(tokens, 2, rows) if bm or gate_type != up_type else None
        return normal(rng, tokens, 1, row_elements), experts, gate, up, lists, scratch, unwritten(tokens, 2, rows)

    name = f"{gate_type.name}+{up_type.name}, {tokens} x {row_elements} x {rows}" + f", tiles of {bm}" * bool(bm)
    return Case(GATED_MUL_MAT_ID, name, arguments, (6,), rounded=_half_experts)


def _random_experts(rng: Rng, qtype: QuantType, num_experts: int, rows: int, row_elements: int) -> Weight:
    flat = random_weight(rng, qtype, num_experts * rows, row_elements)
    return replace(flat, shape=(num_experts, rows, row_elements), array=flat.array.reshape(num_experts, rows, -1))


def _half_experts(arguments: Arguments) -> Arguments:
    x, *others = arguments
    return _half(x), *(_half_weight(other) if isinstance(other, Weight) else other for other in others)


def _half_weight(weight: Weight) -> Weight:
    values = weight.array if weight.qtype == QuantType.F32 else dequantize(weight.array, weight.qtype)
    return replace(weight, qtype=QuantType.F32, array=_half(values))


def _get_rows_cases() -> Iterator[Case]:
    for qtype in sorted(GPU_TYPES):
        yield Case(GET_ROWS, f"{qtype.name}, 5 of 33", partial(_get_rows, qtype, 1.0), (3,), floor=None)
    yield Case(GET_ROWS, "Q8_0, 5 of 33, scaled", partial(_get_rows, QuantType.Q8_0, 25.3), (3,), floor=None)


def _get_rows(qtype: QuantType, scale: float, rng: Rng) -> Arguments:
    return random_weight(rng, qtype, 33, 256), np.array([0, 32, 5, 5, 31], np.int32), scale, unwritten(5, 256)


def _take_rows_cases() -> Iterator[Case]:
    for rows, size in ((1, 1), (33, 97)):
        yield Case(TAKE_ROWS, f"{rows}x{size}", partial(_take_rows, rows, size), (2,), floor=None)


def _take_rows(rows: int, size: int, rng: Rng) -> Arguments:
    return normal(rng, rows, size), rng.integers(0, rows, 4, np.int32), unwritten(4, size)


def _set_rows_cases() -> Iterator[Case]:
    for kv_type in KV_TYPES.values():
        yield Case(SET_ROWS, kv_type.name, partial(_set_rows, kv_type, False), (3, 5), floor=None)
    for name in ("q8_0", "q4_0"):
        yield Case(SET_ROWS, f"{name}, whole numbers", partial(_set_whole_rows, KV_TYPES[name]), (3, 5), floor=None)
    yield Case(SET_ROWS, "a wrong row", partial(_set_rows, KV_TYPES["f16"], True), (3, 5), floor=None)


def _set_whole_rows(kv_type: KVType, rng: Rng) -> Arguments:
    """Several elements of a block have the largest magnitude, of either sign; some blocks have an infinity."""
    k, v, *rest = _set_rows(kv_type, False, rng)
    for rows in (k, v):
        rows[...] = rng.integers(-3, 4, rows.shape)
    k[5, [40, 70]] = np.inf, -np.inf
    return k, v, *rest


def _set_rows(kv_type: KVType, wrong: bool, rng: Rng) -> Arguments:
    head_dim = max(16, kv_type.block)
    inputs, cache = paged(rng, (1, 64, 33), (1, 5, 33), 3, head_dim, kv_type, written=False)
    inputs.row_ids[4] = inputs.row_ids[3] if wrong else -1
    k, v = normal(rng, 39, 3 * head_dim), normal(rng, 39, 3 * head_dim)
    k[2], v[3, :40] = 0, np.nan
    return k, v, inputs, cache, kv_type, empty_record()


def _flash_attention_cases() -> Iterator[Case]:
    mixed = (1, 64, 33, 17), (1, 1, 33, 5)
    yield attention_case("f16", (33,), (33,), 4, 2, 64)
    yield attention_case("f32", (9, 1), (1, 1), 2, 1, 64)
    yield attention_case("f16", (97,), (1,), 4, 2, 64)
    yield attention_case("f32", *mixed, 4, 4, 16)
    yield attention_case("bf16", *mixed, 6, 1, 80)
    yield attention_case("bf16", (1, 257, 65), (1, 1, 1), 9, 1, 96)
    yield attention_case("f16", (65,), (31,), 4, 1, 128, AttentionParams(128**-0.5, window=24))
    yield attention_case("f16", (65,), (1,), 4, 1, 64, AttentionParams(1 / 8, window=24))
    yield attention_case("f32", (65, 9), (1, 1), 2, 1, 128, AttentionParams(1.0, softcap=3.0))
    yield attention_case("f16", (65,), (9,), 2, 1, 32, stale=(3,))
    yield attention_case("f16", (65,), (1,), 2, 1, 32, stale=(50,))
    yield attention_case("q8_0", (65,), (31,), 4, 2, 64)
    yield attention_case("q8_0", (97, 9), (1, 1), 6, 2, 96, stale=(3,))
    yield attention_case("q4_0", (65,), (31,), 4, 2, 32, stale=(3,))
    yield attention_case("q4_0", (97, 1), (1, 1), 4, 2, 128)
    yield attention_case("f16", (65, 40), (4, 1), 4, 2, 64, AttentionParams(1 / 8, window=24))
    yield attention_case("f16", *mixed, 4, 2, 64)
    yield attention_case("f16", (65, 40), (9, 20), 4, 2, 64, stale=(3,))
    yield attention_case("f16", (97,), (41,), 9, 1, 64, AttentionParams(1 / 8, window=24))
    yield attention_case("f16", (65, 9), (20, 9), 2, 1, 64, AttentionParams(1.0, softcap=3.0))
    for head_dim in (192, 256):
        yield attention_case("f16", (33,), (17,), 2, 1, head_dim)
    yield attention_case("f16", (33,), (33,), 4, 2, 64, dtype=np.float16)
    yield attention_case("f16", (97, 1), (1, 1), 4, 2, 64, dtype=np.float16)
    yield attention_case("f16", (1024,), (512,), 8, 2, 128, page_size=64)
    yield attention_case("f16", (4096, 1000), (1, 1), 9, 1, 128, page_size=64)


def attention_case(
    kv_type_name: str,
    lengths: Sequence[int],
    new: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    params: AttentionParams | None = None,
    page_size: int = 8,
    stale: Sequence[int] = (),
    dtype: type = np.float32,
) -> Case:
    """The last tokens of some sequences over all their rows.

    Args:
        stale: positions of the first sequence whose row has another tag, and NaN in it.
        dtype: of queries and output.
    """
    kv_type = KV_TYPES[kv_type_name]
    params = params or AttentionParams(scale=head_dim**-0.5)
    shape = AttentionShape.of(len(lengths), max(new), max(lengths), num_kv_heads)

    def arguments(rng: Rng) -> Arguments:
        inputs, cache = paged(rng, lengths, new, num_kv_heads, head_dim, kv_type, page_size)
        for position in stale:
            row = inputs.page_table[0, position // page_size] * page_size + position % page_size
            cache.tags[row] = 7
            cache.k[row] = cache.v[row] = kv_type.encode(unwritten(num_kv_heads * head_dim))
        q: np.ndarray = normal(rng, sum(new), num_heads, head_dim).astype(dtype)
        out = unwritten(*q.shape, dtype=dtype)
        scratch = unwritten(shape.scratch_size(num_heads, head_dim))
        return q, inputs, shape, cache, kv_type, params, empty_record(), scratch, out

    tokens = f"{sum(new)} of {sum(lengths)} rows" if len(new) == 1 else f"{_list(new)} of {_list(lengths)} rows"
    extras = [f"window {params.window}"] * bool(params.window) + [f"softcap {params.softcap}"] * bool(params.softcap)
    extras += [f"{len(stale)} stale"] * bool(stale) + ["f16 queries"] * (dtype == np.float16)
    name = ", ".join([kv_type.name, tokens, f"{num_heads}/{num_kv_heads} heads of {head_dim}", *extras])
    large = sum(map(operator.mul, lengths, new)) * num_heads * head_dim > 1 << 22
    if max(new) == 1 and kv_type.block == 1:
        return Case(FLASH_ATTENTION, name, arguments, (6, 8), floor=1e-5, unit=0, large=large)
    # Tiles: queries and rows are rounded to f16, and so are the softmax's weights, which the floor stands for.
    return Case(FLASH_ATTENTION, name, arguments, (6, 8), floor=HALF, unit=0, rounded=_half_operands, large=large)


def _list(numbers: Sequence[int]) -> str:
    return "+".join(map(str, numbers))


def _copy_inputs_cases() -> Iterator[Case]:
    for name, serial in (("the right serial", 5), ("a wrong serial", 6)):
        for place, in_place in (("", False), (", tables left in the slot", True)):
            yield Case(COPY_INPUTS, name + place, partial(_copy_inputs, serial, in_place), (3, 4, 6), floor=None)


def _copy_inputs(serial: int, in_place: bool, rng: Rng) -> Arguments:
    layout = InputLayout(max_tokens=300, max_seqs=4, max_pages=40)
    slot = rng.integers(0, 256, layout.num_bytes, np.uint8)
    views = layout.views(slot)
    views.head_serial[0] = views.tail_serial[0] = serial
    block = np.full(layout.num_bytes, 0xFF, np.uint8)
    views.token_ids[:] = np.where(rng.random(300) < 0.1, -1 - rng.integers(0, 4, 300), rng.integers(0, 99, 300))
    kept = rng.integers(100, 200, 4, np.int32)
    record = np.full(faults.record_shape(), 99, np.int32)
    return slot, layout, True, block, np.array([4], np.int64), kept, record, in_place


def _check_inputs_cases() -> Iterator[Case]:
    for name, copied, serial in (("untouched", 5, 5), ("overwritten", 5, 6), ("reported already", 6, 6)):
        yield Case(CHECK_INPUTS, name, partial(_check_inputs, copied, serial), (4,), floor=None)


def _check_inputs(copied: int, serial: int, rng: Rng) -> Arguments:
    layout = InputLayout(max_tokens=300, max_seqs=4, max_pages=40)
    slot, block = (rng.integers(0, 256, layout.num_bytes, np.uint8) for _ in range(2))
    for array, number in ((slot, serial), (block, copied)):
        views = layout.views(array)
        views.head_serial[0] = views.tail_serial[0] = number
    return slot, layout, block, np.array([5], np.int64), np.zeros(faults.record_shape(), np.int32)


def _keep_tokens_cases() -> Iterator[Case]:
    def arguments(rows: int, rng: Rng) -> Arguments:
        places = np.where(rng.random(rows) < 0.5, -1, rng.permutation(rows)).astype(np.int32)
        return rng.integers(0, 999, (rows, 3), np.int32), places, np.full(rows, -7, np.int32)

    for rows in (1, 200):
        yield Case(KEEP_TOKENS, f"{rows} rows", partial(arguments, rows), (2,), floor=None)


def _clear_tags_cases() -> Iterator[Case]:
    for first, count in ((0, 1), (31, 33)):
        yield Case(CLEAR_TAGS, f"{count} from {first}", partial(_clear_tags, first, count), (0,), floor=None)


def _clear_tags(first: int, count: int, rng: Rng) -> Arguments:
    return rng.integers(1, 2**32, (3, 97), np.uint32), first, count


def _page_cases() -> Iterator[Case]:
    for kv_type in KV_TYPES.values():
        yield Case(COPY_ROWS, kv_type.name, partial(_copy_rows, kv_type), (0,), floor=None)
    for kv_type in KV_TYPES.values():
        yield Case(FILL_ROWS, kv_type.name, partial(_fill_rows, kv_type), (0,), floor=None)


def _copy_rows(kv_type: KVType, rng: Rng) -> Arguments:
    _, cache = paged(rng, (24,), (8,), 2, 32, kv_type)
    cache.tags[:] = 11
    cache.tags[2] = 12  # a row of another epoch
    return cache, 0, 8, 5, 11, 77


def _fill_rows(kv_type: KVType, rng: Rng) -> Arguments:
    _, cache = paged(rng, (24,), (8,), 2, 32, kv_type)
    return cache, 3, 7, 0x5A


def _top_k_cases() -> Iterator[Case]:
    for columns, k in ((97, 3), (PART, 1), (3 * PART + 77, 64), (151_936, 64)):
        yield top_k_case(2, columns, k)

    def ties(rng: Rng) -> Arguments:
        values, *others = _top_k(2, PART + 97, 9, rng)
        values[0] = np.round(values[0])
        values[1, ::3] = np.nan
        return values, *others

    yield Case(TOP_K, f"9 of {PART + 97}, equal values and NaN", ties, (3, 4), floor=None)


def top_k_case(rows: int, columns: int, k: int) -> Case:
    """The largest of random values."""
    arguments = partial(_top_k, rows, columns, k)
    return Case(TOP_K, f"{k} of {columns}", arguments, (3, 4), floor=None, large=columns > 1 << 14)


def _top_k(rows: int, columns: int, k: int, rng: Rng) -> Arguments:
    scratch = rows, scratch_columns(columns, k)
    outputs: tuple[Any, ...] = unwritten(rows, k), unwritten(rows, k, dtype=np.int32)
    return normal(rng, rows, columns), unwritten(*scratch), unwritten(*scratch, dtype=np.int32), *outputs


_GROUPS = (
    _add_cases,
    _check_inputs_cases,
    _clear_tags_cases,
    _copy_inputs_cases,
    _keep_tokens_cases,
    _page_cases,
    recurrent_cases,
    _expert_cases,
    _flash_attention_cases,
    partial(_gate_cases, GELU_MUL),
    _get_rows_cases,
    _linear_cases,
    _mul_mat_cases,
    _rms_norm_cases,
    _rope_cases,
    _rope_set_rows_cases,
    _set_rows_cases,
    partial(_gate_cases, SILU_MUL),
    _softcap_cases,
    _take_rows_cases,
    _top_k_cases,
)
