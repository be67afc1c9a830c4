"""Cases of `pyllm kernels test`: rotary embedding, K/V rows and attention."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from pyllm.input_block import InputLayout
from pyllm.kernel_check import Arguments, Case
from pyllm.kernel_samples import (
    HALF,
    HOPPER,
    Rng,
    empty_record,
    half_operands,
    listed,
    normal,
    paged,
    unwritten,
)
from pyllm.kv_types import KV_TYPES, KVType
from pyllm.ops.clear_tags import CLEAR_TAGS
from pyllm.ops.copy_rows import COPY_ROWS, RowMove
from pyllm.ops.fill_rows import FILL_ROWS
from pyllm.ops.flash_attention import (
    FLASH_ATTENTION,
    AttentionParams,
    AttentionShape,
)
from pyllm.ops.gather_rows import GATHER_ROWS, GatheredRows, capacity_of
from pyllm.ops.rope import ROPE, ROPE_TABLE, RopePairing
from pyllm.ops.rope_set_rows import ROPE_SET_ROWS, HeadNorms
from pyllm.ops.set_rows import SET_ROWS
from pyllm.ops.shift_rows import SHIFT_ROWS, KeyTurn
from pyllm.ops.token_tables import TOKEN_TABLES


def token_tables_cases() -> Iterator[Case]:
    yield Case(TOKEN_TABLES, "one token", partial(_token_tables, (300,), (1,), False), (2,), floor=None)
    sizes = (1, 2000, 33), (1, 150, 3)
    yield Case(TOKEN_TABLES, "three sequences", partial(_token_tables, *sizes, False), (2,), floor=None)
    yield Case(TOKEN_TABLES, "a block that was emptied", partial(_token_tables, *sizes, True), (2,), floor=None)


def _token_tables(lengths: Sequence[int], new: Sequence[int], emptied: bool, rng: Rng) -> Arguments:
    inputs, _ = paged(rng, lengths, new, 1, 32, KV_TYPES["f16"])
    if emptied:
        for array in vars(inputs).values():
            array[...] = 0
    layout = InputLayout(sum(new), sum(new), inputs.page_table.shape[1])
    return inputs, len(lengths), layout.views(np.full(layout.num_bytes, 0xFF, np.uint8))


def rope_cases() -> Iterator[Case]:
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


def rope_set_rows_cases() -> Iterator[Case]:
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


def set_rows_cases() -> Iterator[Case]:
    for kv_type in KV_TYPES.values():
        yield Case(SET_ROWS, kv_type.name, partial(_set_rows, kv_type, False), (3, 5), floor=None)
    for name in ("q8_0", "q4_0"):
        yield Case(SET_ROWS, f"{name}, whole numbers", partial(_set_whole_rows, KV_TYPES[name]), (3, 5), floor=None)
    for name in ("f16", "q4_0"):
        wide = partial(_set_rows, KV_TYPES[name], False, head_dim=512)
        yield Case(SET_ROWS, f"{name}, wide rows", wide, (3, 5), floor=None)
    yield Case(SET_ROWS, "a wrong row", partial(_set_rows, KV_TYPES["f16"], True), (3, 5), floor=None)


def _set_whole_rows(kv_type: KVType, rng: Rng) -> Arguments:
    """Several elements of a block have the largest magnitude, of either sign; some blocks have an infinity."""
    k, v, *rest = _set_rows(kv_type, False, rng)
    for rows in (k, v):
        rows[...] = rng.integers(-3, 4, rows.shape)
    k[5, [40, 70]] = np.inf, -np.inf
    return k, v, *rest


def _set_rows(kv_type: KVType, wrong: bool, rng: Rng, head_dim: int = 16) -> Arguments:
    head_dim = max(head_dim, kv_type.block)
    inputs, cache = paged(rng, (1, 64, 33), (1, 5, 33), 3, head_dim, kv_type, written=False)
    inputs.row_ids[4] = inputs.row_ids[3] if wrong else -1
    k, v = normal(rng, 39, 3 * head_dim), normal(rng, 39, 3 * head_dim)
    k[2], v[3, :40] = 0, np.nan
    return k, v, inputs, cache, kv_type, empty_record()


def flash_attention_cases() -> Iterator[Case]:
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
        scratch = unwritten(shape.scratch_size(HOPPER, kv_type, num_heads, num_kv_heads, head_dim))
        return q, inputs, shape, cache, kv_type, params, empty_record(), scratch, out

    tokens = f"{sum(new)} of {sum(lengths)} rows" if len(new) == 1 else f"{listed(new)} of {listed(lengths)} rows"
    extras = [f"window {params.window}"] * bool(params.window) + [f"softcap {params.softcap}"] * bool(params.softcap)
    extras += [f"{len(stale)} stale"] * bool(stale) + ["f16 queries"] * (dtype == np.float16)
    name = ", ".join([kv_type.name, tokens, f"{num_heads}/{num_kv_heads} heads of {head_dim}", *extras])
    large = sum(map(operator.mul, lengths, new)) * num_heads * head_dim > 1 << 22
    if max(new) == 1 and kv_type.block == 1:
        return Case(FLASH_ATTENTION, name, arguments, (6, 8), floor=1e-5, unit=0, large=large)
    # Tiles: queries and rows are rounded to f16, and so are the softmax's weights, which the floor stands for.
    return Case(FLASH_ATTENTION, name, arguments, (6, 8), floor=HALF, unit=0, rounded=half_operands, large=large)


def gather_rows_cases() -> Iterator[Case]:
    for kv_type in KV_TYPES.values():
        if kv_type.name == "f16":
            continue  # which attention reads as they are
        yield Case(GATHER_ROWS, kv_type.name, partial(_gather_rows, kv_type, 0, 0), (6, 7), floor=None)
    yield Case(GATHER_ROWS, "q8_0, window 24", partial(_gather_rows, KV_TYPES["q8_0"], 24, 0), (6, 7), floor=None)
    yield Case(GATHER_ROWS, "bf16, too little room", partial(_gather_rows, KV_TYPES["bf16"], 0, 32), (6, 7), floor=None)


def _gather_rows(kv_type: KVType, window: int, missing: int, rng: Rng) -> Arguments:
    """Two sequences with many tokens, one with few; a stale row, and one of which float16 does not hold all."""
    head_dim = max(16, kv_type.block)
    inputs, cache = paged(rng, (97, 65, 33), (31, 5, 33), 3, head_dim, kv_type)
    page, beside = inputs.page_table[0, 70 // 8] * 8, inputs.page_table[2, 2] * 8
    cache.tags[page + 70 % 8] = 7
    cache.k[page + 70 % 8] = cache.v[page + 70 % 8] = kv_type.encode(unwritten(3 * head_dim))
    if kv_type.block == 1:
        cache.v[beside] = kv_type.encode(np.geomspace(1e-9, 1e9, 3 * head_dim, dtype=np.float32))
    capacity = capacity_of(97 + 33, 3) - missing - 32
    k, v = (unwritten(capacity, 3 * head_dim, dtype=np.float16) for _ in range(2))
    own, spans = np.full(capacity, 7, np.uint32), unwritten(3, 3, dtype=np.int32)
    return inputs, 3, 9, window, cache, kv_type, empty_record(), GatheredRows(k, v, own, spans)


def clear_tags_cases() -> Iterator[Case]:
    for first, count in ((0, 1), (31, 33)):
        yield Case(CLEAR_TAGS, f"{count} from {first}", partial(_clear_tags, first, count), (0,), floor=None)


def _clear_tags(first: int, count: int, rng: Rng) -> Arguments:
    return rng.integers(1, 2**32, (3, 97), np.uint32), first, count


def page_cases() -> Iterator[Case]:
    for kv_type in KV_TYPES.values():
        yield Case(COPY_ROWS, kv_type.name, partial(_copy_rows, kv_type), (0,), floor=None)
    for kv_type in KV_TYPES.values():
        yield shift_rows_case(kv_type, 32, 16, RopePairing.NEOX)
    yield shift_rows_case(KV_TYPES["f32"], 80, 40, RopePairing.NEOX)
    yield shift_rows_case(KV_TYPES["f16"], 144, 18, RopePairing.NORM)
    yield shift_rows_case(KV_TYPES["q8_0"], 64, 17, RopePairing.NORM)
    for kv_type in KV_TYPES.values():
        yield Case(FILL_ROWS, kv_type.name, partial(_fill_rows, kv_type), (0,), floor=None)


def _copy_rows(kv_type: KVType, rng: Rng) -> Arguments:
    _, cache = paged(rng, (24,), (8,), 2, 32, kv_type)
    cache.tags[:] = 11
    cache.tags[2] = 12  # a row of another epoch
    return cache, RowMove(0, 8, 5, 11, 77)


def shift_rows_case(kv_type: KVType, head_dim: int, half: int, pairing: RopePairing) -> Case:
    """Five heads; a row of another epoch, and keys that are 0, or so large that some types cannot hold them turned."""

    def arguments(rng: Rng) -> Arguments:
        _, cache = paged(rng, (24,), (8,), 5, head_dim, kv_type)
        cache.tags[:] = 11
        cache.tags[2] = 12
        rows: np.ndarray = normal(rng, 3, 5 * head_dim)
        rows[0], rows[1] = 0, 6e4
        cache.k[:3] = kv_type.encode(rows)
        angle = rng.uniform(0, 2 * np.pi, (1, half))
        turn = KeyTurn(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), pairing, head_dim)
        return cache, kv_type, turn, RowMove(0, 8, 5, 11, 77)

    name = f"{kv_type.name}, heads of {head_dim}, {pairing.name.lower()}, {2 * half} of them rotated"
    return Case(SHIFT_ROWS, name, arguments, (0,), floor=None)


def _fill_rows(kv_type: KVType, rng: Rng) -> Arguments:
    _, cache = paged(rng, (24,), (8,), 2, 32, kv_type)
    return cache, 3, 7, 0x5A
