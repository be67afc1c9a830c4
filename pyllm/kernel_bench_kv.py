"""Cases of `pyllm kernels bench`: attention, and what writes K/V rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputLayout, InputViews
from pyllm.kernel_bench import Arguments, BenchCase, Pairs, Sample, Source
from pyllm.kernel_bench_samples import (
    F16_LIMIT,
    SAMPLED_TOKENS,
    Read,
    Sizes,
    as_bytes,
    exactly,
    normed,
    rotated,
    spread,
    wide,
)
from pyllm.kernel_check import convert
from pyllm.kernel_samples import paged
from pyllm.kv_cache import LayerCache
from pyllm.kv_types import KV_TYPES, KVType
from pyllm.ops.clear_tags import CLEAR_TAGS
from pyllm.ops.copy_rows import COPY_ROWS, RowMove
from pyllm.ops.fill_rows import FILL_ROWS
from pyllm.ops.flash_attention import FLASH_ATTENTION, AttentionParams, AttentionShape
from pyllm.ops.gather_rows import GATHER_ROWS, GatheredRows, capacity_of
from pyllm.ops.rope import RopePairing
from pyllm.ops.rope_set_rows import ROPE_SET_ROWS, HeadNorms
from pyllm.ops.set_rows import SET_ROWS
from pyllm.ops.shift_rows import SHIFT_ROWS, KeyTurn
from pyllm.ops.token_tables import TABLES, TOKEN_TABLES
from pyllm.quants import QuantType

_SAMPLED_QUERIES = 2
_PAGE_SIZE = 64
_LAYERS = 36
_EPS = 1e-6


@dataclass(frozen=True)
class Pages:
    """Sequences in shuffled pages, on the host: the inputs of a ubatch with their last tokens, and the rows' tags."""

    inputs: InputViews
    tags: np.ndarray

    @classmethod
    def of(cls, rng: np.random.Generator, lengths: Sequence[int], new: Sequence[int]) -> Pages:
        counts = [-(-length // _PAGE_SIZE) for length in lengths]
        layout = InputLayout(sum(new), len(lengths), max(counts))
        inputs = layout.views(np.zeros(layout.num_bytes, np.uint8))
        pages = rng.permutation(sum(counts)).astype(np.int32)
        tags = np.zeros((len(pages), _PAGE_SIZE), np.uint32)
        inputs.cu_seqlens[1:] = np.cumsum(new)
        inputs.kv_lens[:] = lengths
        inputs.seq_ids[:] = 1 + np.arange(len(lengths))
        first = 0
        for seq, count in enumerate(counts):
            own = inputs.page_table[seq, :count] = pages[first : first + count]
            epochs = inputs.page_epochs[seq, :count] = rng.integers(1, 2**32, count, np.uint32)
            tags[own] = epochs[:, None]
            positions = np.arange(lengths[seq] - new[seq], lengths[seq])
            tokens = slice(*inputs.cu_seqlens[seq : seq + 2])
            inputs.positions[tokens], inputs.token_seq[tokens] = positions, seq
            inputs.row_ids[tokens] = own[positions // _PAGE_SIZE] * np.int64(_PAGE_SIZE) + positions % _PAGE_SIZE
            first += count
        return cls(inputs, tags.reshape(-1))

    def rows_of(self, seq: int, count: int) -> np.ndarray:
        """Physical rows of the first `count` positions of a sequence."""
        pages = self.inputs.page_table[seq].astype(np.int64)
        return (pages[:, None] * _PAGE_SIZE + np.arange(_PAGE_SIZE)).reshape(-1)[:count]

    def on_device(self, source: Source, kv_type: KVType, width: int) -> tuple[InputViews, LayerCache]:
        """The inputs and a layer's rows, random ones."""
        fields = {name: source.array(np.array(array)) for name, array in vars(self.inputs).items()}
        pool = kv_type.encode(source.rng.standard_normal((4096, width), np.float32))
        k, v = (source.repeated(pool, len(self.tags)) for _ in range(2))
        return InputViews(**fields), _layer_cache(source, kv_type, k, v, source.array(self.tags))


def _layer_cache(source: Source, kv_type: KVType, k: Any, v: Any, tags: Any) -> LayerCache:
    """A layer's rows; what else it consists of comes from a small one."""
    _, small = paged(source.rng, (1,), (1,), 1, 32, kv_type, _PAGE_SIZE)
    return replace(convert(small, source.array), k=k, v=v, tags=tags)


def fault_record(source: Source) -> Any:
    return source.array(np.zeros(faults.record_shape(), np.int32))


def attention_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    usual, (tokens, rows) = sizes.heads[1], sizes.prefill[1]
    for name, kv_type in KV_TYPES.items():
        for heads in sizes.heads:
            if heads[0] % kv_type.block == 0:
                yield _attention(name, (rows,), (tokens,), *heads)
        for sequences, length in sizes.decode:
            yield _attention(name, (length,) * sequences, (1,) * sequences, *usual)
    short = sizes.prefill[0]
    for heads in sizes.heads:
        yield _attention("f16", short[1:], short[:1], *heads)
    for name in KV_TYPES:
        if name != "f16":
            yield _attention(name, short[1:], short[:1], *usual)


def gather_rows_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    tokens, count = sizes.prefill[1]
    for kv_type in KV_TYPES.values():
        if kv_type.name == "f16":
            continue

        def arguments(source: Source, kv_type: KVType = kv_type) -> Arguments:
            inputs, cache = Pages.of(source.rng, (count,), (tokens,)).on_device(source, kv_type, sizes.kv_width)
            shape = capacity_of(count, 1), sizes.kv_width
            k, v = (source.unwritten(*shape, dtype=np.float16) for _ in range(2))
            own, spans = source.unwritten(shape[0], dtype=np.uint32), source.unwritten(1, 3, dtype=np.int32)
            return inputs, 1, 1, 0, cache, kv_type, fault_record(source), GatheredRows(k, v, own, spans)

        def sample(read: Read, arguments: Arguments) -> Sample:
            inputs, _, _, _, cache, kv_type, record, gathered = arguments
            rows = spread(count, SAMPLED_TOKENS)
            stored = read(inputs.page_table)[0, rows // _PAGE_SIZE] * np.int64(_PAGE_SIZE) + rows % _PAGE_SIZE
            limit = np.float32(np.finfo(np.float16).max)
            exact = [kv_type.decode(read(array, stored)) for array in (cache.k, cache.v)]
            exact = [np.clip(array, -limit, limit).astype(np.float16) for array in exact]
            expected = [*exact, np.ones(len(rows), np.uint32), np.array([[0, 0, count]], np.int32), 0 * read(record)]

            def pairs() -> Pairs:
                found = [read(gathered.k, rows), read(gathered.v, rows), read(gathered.own, rows)]
                return exactly(list(zip([*found, read(gathered.spans), read(record)], expected, strict=True)))

            return pairs

        def traffic(arguments: Arguments) -> float:
            cache, gathered = arguments[4], arguments[7]
            row_size = (cache.k.nbytes + cache.v.nbytes + cache.tags.nbytes) / cache.tags.shape[0]
            return count * (row_size + 4 * gathered.k.shape[1] + 4)

        yield BenchCase(GATHER_ROWS, f"{kv_type.name}, {count} x {sizes.kv_width}", arguments, sample, traffic)


def _attention(
    kv_name: str, lengths: Sequence[int], new: Sequence[int], head_dim: int, heads: int, kv_heads: int
) -> BenchCase:
    kv_type = KV_TYPES[kv_name]
    params = AttentionParams(head_dim**-0.5)
    shape = AttentionShape.of(len(lengths), max(new), max(lengths), kv_heads)
    made: list[Pages] = []  # what the arguments were made of, for the sample

    def arguments(source: Source) -> Arguments:
        pages = Pages.of(source.rng, lengths, new)
        made[:] = [pages]
        inputs, cache = pages.on_device(source, kv_type, kv_heads * head_dim)
        extents = sum(new), heads, head_dim
        q, out = source.normal(*extents, dtype=np.float16), source.unwritten(*extents, dtype=np.float16)
        scratch = source.unwritten(shape.scratch_size(source.device.target, kv_type, heads, kv_heads, head_dim))
        return q, inputs, shape, cache, kv_type, params, fault_record(source), scratch, out

    def sample(read: Read, arguments: Arguments) -> Sample:
        q, _, _, cache, *_, record, _, out = arguments
        (pages,) = made
        tokens = spread(sum(new), _SAMPLED_QUERIES)
        exact = np.stack([_attend(read, pages, cache, kv_type, int(token), read(q, [token])[0]) for token in tokens])
        no_faults = np.zeros(faults.record_shape(), np.int32)
        return lambda: [(read(out, tokens), exact), *exactly([(read(record), no_faults)])]

    def traffic(arguments: Arguments) -> float:
        q, _, _, cache, *_, out = arguments
        row_size = (cache.k.nbytes + cache.v.nbytes + cache.tags.nbytes) / cache.tags.shape[0]
        return q.nbytes + out.nbytes + sum(lengths) * row_size

    # Each token sees one row more than the one before it, the last all of them.
    seen = sum(count * (length - (count - 1) / 2) for length, count in zip(lengths, new, strict=True))
    what = f"prefill of {new[0]} over {lengths[0]}" if new[0] > 1 else f"decode, {len(lengths)} x {lengths[0]}"
    name = f"{kv_name}, {what} rows, {heads}/{kv_heads} heads of {head_dim}"
    return BenchCase(FLASH_ATTENTION, name, arguments, sample, traffic, 4 * seen * heads * head_dim, F16_LIMIT)


def _attend(read: Read, pages: Pages, cache: LayerCache, kv_type: KVType, token: int, q: np.ndarray) -> np.ndarray:
    """Attention of one token in float64: [heads, head_dim]."""
    heads, head_dim = q.shape
    seq, count = int(pages.inputs.token_seq[token]), int(pages.inputs.positions[token]) + 1
    rows = pages.rows_of(seq, count)
    k, v = (kv_type.decode(read(stored, rows)).reshape(count, -1, head_dim) for stored in (cache.k, cache.v))
    group = heads // k.shape[1]
    out = np.empty((heads, head_dim))
    for head in range(heads):
        scores = wide(k[:, head // group]) @ wide(q[head]) * head_dim**-0.5
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ wide(v[:, head // group])
    return out


def set_rows_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    for kv_type in KV_TYPES.values():
        for sequences, tokens in ((sizes.few, 1), (1, sizes.many), (1, 4 * sizes.many)):
            lengths, new = (4 * sizes.many,) * sequences, (tokens,) * sequences

            def arguments(
                source: Source, kv_type: KVType = kv_type, lengths: Any = lengths, new: Any = new
            ) -> Arguments:
                inputs, cache = Pages.of(source.rng, lengths, new).on_device(source, kv_type, sizes.kv_width)
                k, v = (source.normal(sum(new), sizes.kv_width) for _ in range(2))
                return k, v, inputs, cache, kv_type, fault_record(source)

            def sample(read: Read, arguments: Arguments) -> Sample:
                k, v, inputs, cache, kv_type, _ = arguments
                tokens = spread(k.shape[0], SAMPLED_TOKENS)
                rows = read(inputs.row_ids)[tokens]
                exact = [kv_type.encode(read(array, tokens)) for array in (k, v)]
                return lambda: exactly(list(zip((read(cache.k, rows), read(cache.v, rows)), exact, strict=True)))

            def traffic(arguments: Arguments) -> float:
                k, v, _, cache, *_ = arguments
                row_size = (cache.k.nbytes + cache.v.nbytes + cache.tags.nbytes) / cache.tags.shape[0]
                return k.nbytes + v.nbytes + k.shape[0] * row_size

            name = f"{kv_type.name}, {sequences * tokens} x {sizes.kv_width}"
            yield BenchCase(SET_ROWS, name, arguments, sample, traffic)


def rope_set_rows_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    """With norms of the heads, as qwen3 has them."""
    for kv_type in KV_TYPES.values():
        for sequences, tokens in ((1, 1), (sizes.few, 1), (1, sizes.many)):
            yield _rope_set_rows(kv_type, (max(sizes.few, tokens),) * sequences, (tokens,) * sequences, *sizes.heads[1])


def _rope_set_rows(
    kv_type: KVType, lengths: Sequence[int], new: Sequence[int], head_dim: int, num_heads: int, kv_heads: int
) -> BenchCase:
    tokens, width = sum(new), kv_heads * head_dim

    def arguments(source: Source) -> Arguments:
        inputs, cache = Pages.of(source.rng, lengths, new).on_device(source, kv_type, width)
        angle = source.rng.uniform(0, 2 * np.pi, (tokens, head_dim // 2))
        cos, sin = (source.array(function(angle).astype(np.float32)) for function in (np.cos, np.sin))
        norms = HeadNorms(source.normal(head_dim), source.normal(head_dim), _EPS)
        qkv = source.normal(tokens, (num_heads + 2 * kv_heads) * head_dim)
        out = source.unwritten(tokens, num_heads, head_dim, dtype=np.float16)
        return qkv, norms, cos, sin, RopePairing.NEOX, inputs, cache, kv_type, fault_record(source), out

    def sample(read: Read, arguments: Arguments) -> Sample:
        qkv, norms, cos, sin, pairing, inputs, cache, *_, out = arguments
        chosen = spread(tokens, SAMPLED_TOKENS)
        rows = read(inputs.row_ids)[chosen]
        heads = wide(read(qkv, chosen)).reshape(len(chosen), -1, head_dim)
        q, k, v = np.split(heads, (num_heads, num_heads + kv_heads), axis=1)
        c, s = wide(read(cos, chosen)), wide(read(sin, chosen))
        q, k = (rotated(normed(x, wide(read(w)), _EPS), c, s, pairing) for x, w in ((q, norms.q), (k, norms.k)))

        def pairs() -> Pairs:
            stored = [kv_type.decode(read(array, rows))[:, :width] for array in (cache.k, cache.v)]
            # What is stored is compared with what the type makes of the exact rows: its own rounding is no error.
            expected = [kv_type.decode(kv_type.encode(x.reshape(len(chosen), -1).astype(np.float32))) for x in (k, v)]
            return [(read(out, chosen), q), *zip(stored, (x[:, :width] for x in expected), strict=True)]

        return pairs

    def traffic(arguments: Arguments) -> float:
        qkv, _, cos, sin, _, _, cache, *_, out = arguments
        row_size = (cache.k.nbytes + cache.v.nbytes + cache.tags.nbytes) / cache.tags.shape[0]
        return qkv.nbytes + cos.nbytes + sin.nbytes + out.nbytes + tokens * row_size

    name = f"{kv_type.name}, {tokens} x {num_heads}/{kv_heads} heads of {head_dim}, normed"
    limit = F16_LIMIT if kv_type.block == 1 else 2e-2  # a value next to the middle may fall to either code
    return BenchCase(ROPE_SET_ROWS, name, arguments, sample, traffic, limit=limit)


def token_tables_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    tokens, rows = 4 * sizes.few, 32 * _PAGE_SIZE

    def arguments(source: Source) -> Arguments:
        inputs = Pages.of(source.rng, (rows,) * tokens, (1,) * tokens).inputs
        given, out = (
            InputViews(**{name: source.array(array * array.dtype.type(factor)) for name, array in vars(inputs).items()})
            for factor in (1, 0)
        )
        return given, tokens, out

    def sample(read: Read, arguments: Arguments) -> Sample:
        inputs, _, out = arguments
        exact = [read(getattr(inputs, name)) for name in TABLES]
        return lambda: exactly([(read(getattr(out, name)), array) for name, array in zip(TABLES, exact, strict=True)])

    def traffic(arguments: Arguments) -> float:
        return 2.0 * sum(getattr(arguments[2], name).nbytes for name in TABLES)

    yield BenchCase(TOKEN_TABLES, f"{tokens} of {rows} rows", arguments, sample, traffic)


def page_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    """One page of one layer: what is copied when two sequences part or the context ends, and overwritten in tests."""
    last = 3 * _PAGE_SIZE
    move = RowMove(0, last, _PAGE_SIZE, 11, 77)

    def cache_of(source: Source, kv_type: KVType) -> LayerCache:
        tags = np.full(4 * _PAGE_SIZE, 11, np.uint32)
        pool = kv_type.encode(source.rng.standard_normal((len(tags), sizes.kv_width), np.float32))
        k, v = source.array(pool), source.array(pool[::-1].copy())
        return _layer_cache(source, kv_type, k, v, source.array(tags))

    def of_copy(read: Read, arguments: Arguments) -> Sample:
        cache = arguments[0]
        source, target = np.arange(_PAGE_SIZE), np.arange(last, last + _PAGE_SIZE)
        exact = [read(cache.k, source), read(cache.v, source), np.full(_PAGE_SIZE, 77, np.uint32)]
        return lambda: exactly(
            list(zip([read(array, target) for array in (cache.k, cache.v, cache.tags)], exact, strict=True))
        )

    def of_shift(read: Read, arguments: Arguments) -> Sample:
        cache, kv_type, turn, *_ = arguments
        source, target = np.arange(_PAGE_SIZE), np.arange(last, last + _PAGE_SIZE)
        v = read(cache.v, source)
        heads = wide(kv_type.decode(read(cache.k, source))).reshape(_PAGE_SIZE, -1, turn.head_dim)
        cos, sin = (np.repeat(wide(read(array)), _PAGE_SIZE, axis=0) for array in (turn.cos, turn.sin))
        turned = rotated(heads, cos, sin, turn.pairing).reshape(_PAGE_SIZE, -1).astype(np.float32)
        k, tags = kv_type.decode(kv_type.encode(turned)), np.full(_PAGE_SIZE, 77, np.uint32)

        def pairs() -> Pairs:
            moved = [(read(cache.v, target), v), (read(cache.tags, target), tags)]
            return [(kv_type.decode(read(cache.k, target)), k), *exactly(moved)]

        return pairs

    def of_fill(read: Read, arguments: Arguments) -> Sample:
        cache = arguments[0]
        target = np.arange(last, last + _PAGE_SIZE)

        def pairs() -> Pairs:
            found = [as_bytes(read(array, target)) for array in (cache.k, cache.v)]
            return [(array, np.full_like(array, 0x5A)) for array in found]

        return pairs

    def rows_written(arguments: Arguments) -> float:
        cache = arguments[0]
        return (cache.k.nbytes + cache.v.nbytes) * _PAGE_SIZE / cache.tags.shape[0]

    for kv_type in KV_TYPES.values():
        name = f"{kv_type.name}, {_PAGE_SIZE} x {sizes.kv_width}"

        def copy(source: Source, kv_type: KVType = kv_type) -> Arguments:
            return cache_of(source, kv_type), move

        def shift(source: Source, kv_type: KVType = kv_type) -> Arguments:
            head_dim = sizes.heads[1][0]
            angle = source.rng.uniform(0, 2 * np.pi, (1, head_dim // 2))
            cos, sin = (source.array(function(angle).astype(np.float32)) for function in (np.cos, np.sin))
            turn = KeyTurn(cos, sin, RopePairing.NEOX, head_dim)
            return cache_of(source, kv_type), kv_type, turn, move

        def fill(source: Source, kv_type: KVType = kv_type) -> Arguments:
            return cache_of(source, kv_type), last, _PAGE_SIZE, 0x5A

        yield BenchCase(COPY_ROWS, name, copy, of_copy, lambda a: 2 * rows_written(a) + 8 * _PAGE_SIZE)
        limit = F16_LIMIT if kv_type.block == 1 else 2e-2  # a value next to the middle may fall to either code
        yield BenchCase(SHIFT_ROWS, name, shift, of_shift, lambda a: 2 * rows_written(a) + 8 * _PAGE_SIZE, limit=limit)
        yield BenchCase(FILL_ROWS, name, fill, of_fill, rows_written)


def clear_tags_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    first, count = 7, _PAGE_SIZE - 7

    def arguments(source: Source) -> Arguments:
        return source.array(source.rng.integers(1, 2**32, (_LAYERS, 4 * _PAGE_SIZE), np.uint32)), first, count

    def sample(read: Read, arguments: Arguments) -> Sample:
        exact = read(arguments[0])
        exact[:, first : first + count] = 0
        return lambda: exactly([(read(arguments[0]), exact)])

    name = f"{_LAYERS} layers, {count} rows"
    yield BenchCase(CLEAR_TAGS, name, arguments, sample, lambda arguments: 4.0 * _LAYERS * count)
