"""set_rows and flash_attention: pages, tags, masks, and float64 attention as the measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pyllm import faults
from pyllm.device import Device
from pyllm.faults import FaultKind
from pyllm.input_block import InputLayout, InputViews
from pyllm.kv_cache import LayerCache
from pyllm.kv_types import KV_TYPES
from pyllm.ops.clear_tags import clear_tags
from pyllm.ops.copy_inputs import copy_inputs
from pyllm.ops.copy_rows import RowMove, copy_rows
from pyllm.ops.fill_rows import fill_rows
from pyllm.ops.flash_attention import NUM_COUNTERS, AttentionParams, AttentionShape, flash_attention
from pyllm.ops.set_rows import set_rows
from tests.ops.lives import SIZES, input_views, on_device

LAYOUT = InputLayout(max_tokens=300, max_seqs=4, max_pages=40)
# Of elements as attention sees them. What quantising takes away is left out: there the measure is the rows as stored.
ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 2.0**-11, "q4_0": 2.0**-11}


@dataclass
class Case:
    """Sequences of given lengths of which the last tokens are in this ubatch.

    Attributes:
        lengths: rows per sequence, this ubatch included.
        new: tokens per sequence in this ubatch.
    """

    lengths: tuple[int, ...]
    new: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.num_seqs = len(self.lengths)
        pages_of = [-(-length // self.page_size) for length in self.lengths]
        shuffled = rng.permutation(sum(pages_of) + 3)
        self.num_pages = len(shuffled)
        self.page_table = np.zeros((self.num_seqs, max(pages_of)), np.int32)
        self.epochs = np.zeros_like(self.page_table, np.uint32)
        start = 0
        for seq, count in enumerate(pages_of):
            self.page_table[seq, :count] = shuffled[start : start + count]
            self.epochs[seq, :count] = rng.integers(1, 2**32, count, np.uint32)
            start += count
        width = self.num_kv_heads * self.head_dim
        self.k = [rng.standard_normal((length, width), np.float32) for length in self.lengths]
        self.v = [rng.standard_normal((length, width), np.float32) for length in self.lengths]
        self.q = rng.standard_normal((sum(self.new), self.num_heads, self.head_dim), np.float32)

    def rows(self, seq: int) -> np.ndarray:
        position = np.arange(self.lengths[seq])
        return self.page_table[seq, position // self.page_size].astype(np.int64) * self.page_size + (
            position % self.page_size
        )

    def positions(self, seq: int) -> np.ndarray:
        return np.arange(self.lengths[seq] - self.new[seq], self.lengths[seq])

    def inputs(self, device: Device) -> InputViews:
        return input_views(
            device,
            LAYOUT,
            positions=np.concatenate([self.positions(seq) for seq in range(self.num_seqs)]),
            token_seq=np.repeat(np.arange(self.num_seqs), self.new),
            row_ids=np.concatenate([self.rows(seq)[self.positions(seq)] for seq in range(self.num_seqs)]),
            cu_seqlens=np.pad(np.cumsum([0, *self.new]), (0, 4 - self.num_seqs), mode="edge"),
            kv_lens=np.array(self.lengths),
            seq_ids=100 + np.arange(self.num_seqs),
            page_table=self.page_table,
            page_epochs=self.epochs,
        )

    def cache(self, device: Device, kv_type: str = "f32", spoiled: np.ndarray | None = None) -> LayerCache:
        """All rows but this ubatch's are in place; all others, and the spoiled ones, are NaN with a foreign tag."""
        storage = KV_TYPES[kv_type]
        num_rows, width = self.num_pages * self.page_size, self.num_kv_heads * self.head_dim
        k, v = (storage.encode(np.full((num_rows, width), np.nan, np.float32)) for _ in range(2))
        tags = np.full(num_rows, 7, np.uint32)
        for seq in range(self.num_seqs):
            old = self.lengths[seq] - self.new[seq]
            rows = self.rows(seq)[:old]
            k[rows], v[rows] = storage.encode(self.k[seq][:old]), storage.encode(self.v[seq][:old])
            tags[rows] = np.repeat(self.epochs[seq], self.page_size)[:old]
        if spoiled is not None:
            k[spoiled] = v[spoiled] = storage.encode(np.full(width, np.nan, np.float32))
            tags[spoiled] = 12
        counters = np.zeros(NUM_COUNTERS, np.int32)
        arrays = (on_device(device, array) for array in (k, v, tags))
        return LayerCache(*arrays, self.page_size, 5, on_device(device, counters))

    def new_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V of this ubatch's tokens."""
        k = [rows[length - new :] for rows, length, new in zip(self.k, self.lengths, self.new, strict=True)]
        v = [rows[length - new :] for rows, length, new in zip(self.v, self.lengths, self.new, strict=True)]
        return np.concatenate(k), np.concatenate(v)

    def exact(
        self,
        params: AttentionParams,
        absent: dict[int, set[int]] | None = None,
        operands: type = np.float64,
        kv_type: str = "f32",
    ) -> np.ndarray:
        """Attention in float64, one query and head at a time; queries, rows and weights rounded to `operands` first.

        Quantised rows are taken as they are stored, others as they were.
        """
        storage = KV_TYPES[kv_type]
        out, token = np.zeros(self.q.shape), 0
        rounded_q = self.q.astype(operands)
        for seq in range(self.num_seqs):
            shape = (self.lengths[seq], self.num_kv_heads, self.head_dim)
            rows = [x[seq] if storage.block == 1 else storage.decode(storage.encode(x[seq])) for x in (self.k, self.v)]
            keys, values = (x.reshape(shape).astype(operands) for x in rows)
            for position in self.positions(seq):
                seen = [
                    j
                    for j in range(position + 1)
                    if (not params.window or position - j < params.window) and j not in (absent or {}).get(seq, set())
                ]
                for head in range(self.num_heads):
                    kv_head = head // (self.num_heads // self.num_kv_heads)
                    scores = (
                        keys[seen, kv_head].astype(np.float64)
                        @ rounded_q[token, head].astype(np.float64)
                        * params.scale
                    )
                    if params.softcap:
                        scores = params.softcap * np.tanh(scores / params.softcap)
                    weights = np.exp(scores - scores.max()) if seen else np.zeros(0)
                    if seen:
                        mixed = weights.astype(operands).astype(np.float64) @ values[seen, kv_head].astype(np.float64)
                        out[token, head] = mixed / weights.sum()
                token += 1
        return out


def attend(
    device: Device,
    case: Case,
    q: Any,
    inputs: InputViews,
    cache: LayerCache,
    params: AttentionParams,
    record: Any,
    out: Any,
    kv_type: str = "f32",
) -> None:
    """flash_attention with the kernel that its extents choose."""
    shape = AttentionShape.of(case.num_seqs, max(case.new), max(case.lengths), case.num_kv_heads)
    heads = case.num_heads, case.num_kv_heads, case.head_dim
    scratch = device.empty((shape.scratch_size(device.target, KV_TYPES[kv_type], *heads),), np.float32)
    flash_attention(device, q, inputs, shape, cache, KV_TYPES[kv_type], params, record, scratch, out)


def run(
    device: Device,
    case: Case,
    params: AttentionParams,
    kv_type: str = "f32",
    cache: LayerCache | None = None,
    dtype: type = np.float32,
) -> tuple[np.ndarray, np.ndarray, LayerCache]:
    """set_rows, then flash_attention with queries and output of `dtype`; returns output, fault record and the cache."""
    cache = cache or case.cache(device, kv_type)
    inputs, record = case.inputs(device), on_device(device, np.zeros(faults.record_shape(), np.int32))
    k, v = case.new_rows()
    set_rows(device, on_device(device, k), on_device(device, v), inputs, cache, KV_TYPES[kv_type], record)
    out = device.empty(case.q.shape, dtype)
    q = on_device(device, case.q.astype(dtype))
    attend(device, case, q, inputs, cache, params, record, out, kv_type)
    return device.download(out), device.download(record), cache


def check(
    device: Device,
    case: Case,
    out: np.ndarray,
    params: AttentionParams,
    kv_type: str = "f32",
    absent: dict[int, set[int]] | None = None,
) -> None:
    """Within twice the error of a plain computation with the same roundings, plus a floor.

    Devices with kernels compute many queries on matrix instructions with f16 operands.
    """
    exact = case.exact(params, absent, kv_type=kv_type)
    limit = 2e-5 + 8 * ROUNDING[kv_type]
    if device.target is not None and max(case.new) > 1:
        limit += 2 * np.abs(case.exact(params, absent, np.float16, kv_type) - exact).max()
    assert np.abs(out - exact).max() <= limit


CASES = {
    "one token": Case((1,), (1,)),
    "prefill": Case((33,), (33,)),
    "prefill in blocks": Case((257,), (257,), page_size=64),
    "chunk behind rows": Case((97,), (31,)),
    "decode": Case((65,), (1,)),
    "mixed": Case((1, 64, 33, 17), (1, 1, 33, 5)),
    "decode over several blocks": Case((600, 40), (1, 1), 2, 1, head_dim=64, page_size=32),
    "few tokens": Case((97, 40, 9), (5, 1, 8)),
    "a sequence without tokens here": Case((9, 16), (0, 16)),
    "all heads share one": Case((40, 9), (7, 1), num_heads=6, num_kv_heads=1),
    "no sharing": Case((40,), (7,), num_heads=3, num_kv_heads=3),
}
HEAD_SIZES = [(64, kv_type) for kv_type in KV_TYPES]
HEAD_SIZES += [(size, "f16") for size in (80, 96, 128, 192, 256)] + [(128, "f32"), (96, "q4_0"), (256, "q8_0")]


def whole_blocks(case: Case, kv_type: str) -> Case:
    """The case with heads that the row type can hold."""
    size = KV_TYPES[kv_type].block
    return replace(case, head_dim=-(-case.head_dim // size) * size)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention(device: Device, case: Case, kv_type: str) -> None:
    case = whole_blocks(case, kv_type)
    params = AttentionParams(scale=case.head_dim**-0.5)
    out, record, _ = run(device, case, params, kv_type)
    assert faults.count(record) == 0
    check(device, case, out, params, kv_type)


@pytest.mark.parametrize("name", ["chunk behind rows", "decode", "mixed"])
def test_float16_queries_and_output(device: Device, name: str) -> None:
    case, params = CASES[name], AttentionParams(scale=0.25)
    out, record, _ = run(device, case, params, "f16", dtype=np.float16)
    assert out.dtype == np.float16
    assert faults.count(record) == 0
    check(device, case, out, params, "f16")


@pytest.mark.parametrize("new", [1, 3, 19])
@pytest.mark.parametrize(("head_dim", "kv_type"), HEAD_SIZES)
def test_head_sizes(device: Device, head_dim: int, new: int, kv_type: str) -> None:
    case = Case((19,), (new,), num_heads=3, num_kv_heads=1, head_dim=head_dim)
    params = AttentionParams(scale=head_dim**-0.5)
    out, record, _ = run(device, case, params, kv_type)
    assert faults.count(record) == 0
    check(device, case, out, params, kv_type)


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("size", SIZES)
def test_attention_sizes(device: Device, size: int, decode: bool) -> None:
    case = Case((size,), (1 if decode else size,), num_heads=2, num_kv_heads=1, page_size=32)
    params = AttentionParams(scale=0.25)
    out, record, _ = run(device, case, params, "f16")
    assert faults.count(record) == 0
    check(device, case, out, params, "f16")


@pytest.mark.parametrize("window", [1, 7, 8, 24, 1000])
@pytest.mark.parametrize("name", ["prefill in blocks", "chunk behind rows", "decode", "mixed", "few tokens"])
def test_sliding_window(device: Device, name: str, window: int) -> None:
    case = CASES[name]
    params = AttentionParams(scale=0.25, window=window)
    out, record, _ = run(device, case, params)
    assert faults.count(record) == 0
    check(device, case, out, params)


def test_softcap(device: Device) -> None:
    params = AttentionParams(scale=2.0, softcap=3.0)
    out, _, _ = run(device, CASES["mixed"], params)
    check(device, CASES["mixed"], out, params)


@pytest.mark.parametrize("scale", [0.0, 1e-12])
@pytest.mark.parametrize("name", ["chunk behind rows", "decode"])
def test_scores_that_are_all_alike_give_the_mean(device: Device, name: str, scale: float) -> None:
    case, params = CASES[name], AttentionParams(scale=scale)
    out, _, _ = run(device, case, params)
    check(device, case, out, params)


@pytest.mark.parametrize("name", ["chunk behind rows", "decode"])
def test_large_scores_do_not_overflow(device: Device, name: str) -> None:
    case = CASES[name]
    out, _, _ = run(device, case, AttentionParams(scale=1e4))
    assert np.isfinite(out).all()
    if device.target is None or name == "decode":  # rounded to f16, scores of this size pick other rows
        assert np.abs(out - case.exact(AttentionParams(scale=1e4))).max() <= 1e-3


def test_every_row_gets_its_pages_epoch_and_no_other_row_is_touched(device: Device) -> None:
    case = CASES["mixed"]
    _, _, cache = run(device, case, AttentionParams(scale=0.25))
    tags = device.download(cache.tags)
    own = np.zeros(len(tags), bool)
    for seq in range(case.num_seqs):
        rows = case.rows(seq)
        own[rows] = True
        assert (tags[rows] == np.repeat(case.epochs[seq], case.page_size)[: len(rows)]).all()
    assert (tags[~own] == 7).all()
    assert np.isnan(device.download(cache.k)[~own]).all()


@pytest.mark.parametrize("window", [0, 24])
def test_stale_rows_are_left_out_and_each_one_is_reported(device: Device, window: int) -> None:
    case = Case((65, 30), (1, 9))
    params = AttentionParams(scale=0.25, window=window)
    absent = {0: {0, 50, 63}, 1: {3, 20}}
    stale = np.concatenate([case.rows(seq)[sorted(positions)] for seq, positions in absent.items()])
    cache = case.cache(device, spoiled=stale)  # whatever the rows hold must not matter
    out, record, _ = run(device, case, params, cache=cache)
    check(device, case, out, params, absent=absent)
    reach = {0: range(0 if not window else 65 - window, 65), 1: range(0, 30)}
    expected = {
        (100 + seq, position, int(case.page_table[seq, position // 8]), position % 8)
        for seq, positions in absent.items()
        for position in positions
        if position in reach[seq]
    }
    found = faults.entries(record)
    assert {(f.seq_id, f.position, f.page, f.row) for f in found} == expected
    assert all(f.kind == FaultKind.TAG and f.layer == 5 for f in found)


@pytest.mark.parametrize(("length", "new"), [(1, 1), (65, 1), (5, 5), (97, 70)])
def test_a_query_that_sees_nothing_gives_zeros(device: Device, length: int, new: int) -> None:
    case = Case((length,), (new,))
    cache = case.cache(device, spoiled=case.rows(0))
    inputs, record = case.inputs(device), on_device(device, np.zeros(faults.record_shape(), np.int32))
    out = device.empty(case.q.shape, np.float32)
    params = AttentionParams(scale=1.0)
    q = on_device(device, case.q)
    attend(device, case, q, inputs, cache, params, record, out)  # no row carries its page's epoch; all are NaN
    assert (device.download(out) == 0).all()
    assert faults.count(device.download(record)) >= 1


@pytest.mark.parametrize("name", ["mixed", "decode over several blocks"])
def test_twenty_runs_give_the_same_bits(device: Device, name: str) -> None:
    case = CASES[name]
    params = AttentionParams(scale=0.25)
    first = run(device, case, params)[0]
    for _ in range(19):
        assert (run(device, case, params)[0] == first).all()


@pytest.mark.parametrize(
    ("value", "stored"),
    [(1.0, 0x3F80), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (-2.5, 0xC020), (3.4e38, 0x7F80), (np.nan, 0x7FC0)],
)
def test_bf16_rounds_to_nearest_even(value: float, stored: int) -> None:
    assert KV_TYPES["bf16"].encode(np.array([value], np.float32))[0] == stored


def slot(head: int, tail: int) -> np.ndarray:
    """A slot with something in every field."""
    buffer = np.ones(LAYOUT.num_bytes, np.uint8)
    views = LAYOUT.views(buffer)
    views.head_serial[0], views.tail_serial[0], views.status[0] = head, tail, 0
    return buffer


def copied(device: Device, head: int, tail: int, counter: int, enforce: bool = True) -> tuple[InputViews, Any, Any]:
    block = device.empty((LAYOUT.num_bytes,), np.uint8)
    step_counter = on_device(device, np.array([counter], np.int64))
    record = on_device(device, np.full(faults.record_shape(), 99, np.int32))  # must be cleared
    copy_inputs(
        device,
        on_device(device, slot(head, tail)),
        LAYOUT,
        enforce,
        block,
        step_counter,
        on_device(device, np.zeros(4, np.int32)),
        record,
    )
    return LAYOUT.views(device.download(block)), device.download(step_counter), device.download(record)


def test_copy_inputs_copies_everything_and_counts(device: Device) -> None:
    views, counter, record = copied(device, 5, 5, counter=4)
    assert counter[0] == 5
    assert faults.count(record) == 0
    expected = LAYOUT.views(slot(5, 5))
    for name in LAYOUT.fields():
        assert (getattr(views, name) == getattr(expected, name)).all()


@pytest.mark.parametrize(("head", "tail"), [(6, 6), (5, 6), (6, 5), (4, 4), (2**40 + 5, 2**40 + 5)])
def test_a_wrong_serial_empties_the_block(device: Device, head: int, tail: int) -> None:
    views, counter, record = copied(device, head, tail, counter=4)
    assert counter[0] == 5  # it advances all the same: the next ubatch is judged on its own
    (fault,) = faults.entries(record)
    assert (fault.kind, fault.expected) == (FaultKind.SERIAL, 5)
    assert views.status[0] == 1
    assert (views.row_ids == -1).all() and (views.out_places == -1).all()
    assert not views.cu_seqlens.any()
    assert not views.page_table.any()


def test_an_empty_block_writes_and_reads_no_row(device: Device) -> None:
    case = Case((9,), (9,))
    inputs = input_views(device, LAYOUT, row_ids=np.full(LAYOUT.max_tokens, -1), status=[1])
    cache, record = case.cache(device), on_device(device, np.zeros(faults.record_shape(), np.int32))
    k, v = (on_device(device, rows) for rows in case.new_rows())
    set_rows(device, k, v, inputs, cache, KV_TYPES["f32"], record)
    out = on_device(device, np.full(case.q.shape, 3, np.float32))
    q, params = on_device(device, case.q), AttentionParams(scale=1.0)
    attend(device, case, q, inputs, cache, params, record, out)
    assert (device.download(cache.tags) == 7).all()
    assert np.isnan(device.download(cache.k)).all()
    assert (device.download(out) == 3).all()
    assert faults.count(device.download(record)) == 0


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_rows_are_copied_under_a_new_tag_if_their_own_is_right(device: Device, kv_type: str) -> None:
    case = whole_blocks(Case((24,), (8,)), kv_type)
    cache = case.cache(device, kv_type)
    source, target = (int(page) * 8 for page in case.page_table[0, :2])
    tags = device.download(cache.tags)
    copy_rows(device, cache, RowMove(source, target, 5, int(tags[source]), 77))
    stale = source + 2
    before, after = tags, device.download(cache.tags)
    assert (after[target : target + 5] == 77).all()
    assert (after[target + 5 : target + 8] == before[target + 5 : target + 8]).all()
    k = device.download(cache.k).view(np.uint8)
    assert (k[target : target + 5] == k[source : source + 5]).all()
    assert (k[target + 5] != k[source + 5]).any()
    copy_rows(device, cache, RowMove(stale, target, 3, 1, 78))  # another tag was expected: the rows become absent
    assert (device.download(cache.tags)[target : target + 3] == 0).all()
    assert (device.download(cache.k).view(np.uint8)[target : target + 3] == k[target : target + 3]).all()


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_rows_are_filled_and_tags_cleared_where_asked(device: Device, kv_type: str) -> None:
    case = whole_blocks(Case((24,), (8,)), kv_type)
    cache = case.cache(device, kv_type)
    tags, k = device.download(cache.tags), device.download(cache.k).view(np.uint8)
    fill_rows(device, cache, 3, 7, 0x5A)
    filled = [device.download(rows).view(np.uint8) for rows in (cache.k, cache.v)]
    assert all((rows[3:10] == 0x5A).all() for rows in filled)
    assert (filled[0][:3] == k[:3]).all() and (filled[0][10:] == k[10:]).all()
    assert (device.download(cache.tags) == tags).all()
    both = on_device(device, np.stack([tags, tags]))
    clear_tags(device, both, 2, 5)
    cleared = device.download(both)
    assert not cleared[:, 2:7].any()
    assert (cleared[:, :2] == tags[:2]).all() and (cleared[:, 7:] == tags[7:]).all()


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_float16_rows_are_stored_as_their_float32_values(device: Device, kv_type: str) -> None:
    case = whole_blocks(Case((24,), (8,)), kv_type)
    k, v = (rows.astype(np.float16) for rows in case.new_rows())
    caches = []
    for dtype in (np.float16, np.float32):
        cache, record = case.cache(device, kv_type), on_device(device, np.zeros(faults.record_shape(), np.int32))
        new = (on_device(device, rows.astype(dtype)) for rows in (k, v))
        set_rows(device, *new, case.inputs(device), cache, KV_TYPES[kv_type], record)
        caches.append([device.download(rows).view(np.uint8) for rows in (cache.k, cache.v)])
    assert all((a == b).all() for a, b in zip(*caches, strict=True))
