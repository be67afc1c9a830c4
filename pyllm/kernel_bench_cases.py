"""The cases of `pyllm kernels bench`: each op with a kernel, at sizes of real models.

Sizes are fields of `Sizes`, so that tests run the same cases small. To add an op, write a function that yields its
cases and add it to `_GROUPS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputLayout, InputViews
from pyllm.kernel_bench import Arguments, BenchCase, Pairs, Sample, Source, arrays_in
from pyllm.kernel_cases import paged
from pyllm.kernel_check import convert
from pyllm.kv_cache import LayerCache
from pyllm.kv_types import KV_TYPES, KVType
from pyllm.ops.add import ADD
from pyllm.ops.clear_tags import CLEAR_TAGS
from pyllm.ops.copy_rows import COPY_ROWS
from pyllm.ops.fill_rows import FILL_ROWS
from pyllm.ops.flash_attention import FLASH_ATTENTION, AttentionParams, AttentionShape
from pyllm.ops.gated_mul_mat_id import GATED_MUL_MAT_ID
from pyllm.ops.gelu_mul import GELU_MUL
from pyllm.ops.get_rows import GET_ROWS
from pyllm.ops.group_experts import GROUP_EXPERTS, ExpertLists, group_experts_ref
from pyllm.ops.mul_mat import MUL_MAT, scratch_size
from pyllm.ops.mul_mat_id import MUL_MAT_ID, expert_tile_rows
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.rms_norm import RMS_NORM
from pyllm.ops.rope import ROPE, ROPE_TABLE, RopePairing
from pyllm.ops.route import ROUTE
from pyllm.ops.set_rows import SET_ROWS
from pyllm.ops.silu_mul import SILU_MUL
from pyllm.ops.softcap import SOFTCAP
from pyllm.ops.take_rows import TAKE_ROWS
from pyllm.ops.top_k import TOP_K, scratch_columns
from pyllm.ops.weighted_sum import WEIGHTED_SUM
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight

Read = Callable[..., np.ndarray]

F32_LIMIT = 1e-5  # sums in float32, and functions that GPUs approximate
F16_LIMIT = 2e-3  # factors rounded to float16
_LARGE_GPU = Target("cuda", "sm_90", 32, "mma")  # whose tiles experts are cut into
_SAMPLED_TOKENS = 8
_SAMPLED_COLUMNS = 64
_SAMPLED_QUERIES = 2
_PAGE_SIZE = 64
_LAYERS = 36


@dataclass(frozen=True)
class Sizes:
    """Extents of the cases.

    Attributes:
        tokens: of products.
        matrices: (rows, row elements) of weights; every block type is measured with the first, the types of
            `all_matrices` with all of them.
        few, many: tokens of the other ops, as in decoding and in prefill.
        hidden, inner: width of the residual stream, and of the feed-forward block.
        kv_width: elements of a K or V row.
        heads: (elements, query heads, K/V heads); those of the second are measured in decoding, too.
        prefill_rows: lengths of prompts.
        decode: (sequences, rows of each).
        vocabulary: columns of the logits.
        experts: (experts, used, rows, row elements), and tokens.
    """

    tokens: tuple[int, ...] = (1, 8, 32, 128, 512, 2048)
    matrices: tuple[tuple[int, int], ...] = ((14336, 4096), (4096, 4096), (12288, 4096))
    all_matrices: tuple[QuantType, ...] = (QuantType.Q4_K, QuantType.Q8_0)
    few: int = 8
    many: int = 2048
    hidden: int = 4096
    inner: int = 12288
    kv_width: int = 1024
    heads: tuple[tuple[int, int, int], ...] = ((64, 32, 8), (128, 32, 8), (256, 16, 4))
    prefill_rows: tuple[int, ...] = (2048, 8192)
    decode: tuple[tuple[int, int], ...] = ((1, 32768), (8, 32768), (32, 32768))
    vocabulary: int = 151_936
    experts: tuple[int, int, int, int] = (128, 8, 768, 2048)
    expert_tokens: tuple[int, ...] = (1, 8, 512, 2048)


SMALL = Sizes(
    tokens=(1, 33),
    matrices=((96, 512),),
    few=2,
    many=9,
    hidden=256,
    inner=512,
    kv_width=128,
    heads=((16, 2, 2), (32, 4, 2)),
    prefill_rows=(70,),
    decode=((1, 130), (3, 70)),
    vocabulary=5000,
    experts=(8, 2, 64, 256),
    expert_tokens=(1, 9),
)


def bench_cases(types: Sequence[QuantType], sizes: Sizes = Sizes()) -> list[BenchCase]:
    """All cases, op by op.

    Args:
        types: block types that the device multiplies with.
    """
    return [case for group in _GROUPS for case in group(sizes, sorted(types))]


# what samples are made of


def _exact(pairs: Pairs) -> Pairs:
    """Pairs of bytes: every bit has to be right."""
    return [(_bytes(found), _bytes(exact)) for found, exact in pairs]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _some(count: int, most: int) -> np.ndarray:
    """Indices that are spread over 0..count-1, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _by_rows(compute: Callable[..., Any], inputs: Sequence[int], output: int, exact: bool = False) -> Any:
    """A sample of rows of an op that computes row by row.

    Args:
        compute: compute(*inputs) in float64.
        inputs: positions of the arguments that are taken apart by rows; others are given whole.
        output: position of the output.
        exact: compare bits, in the type of the output.
    """

    def sample(read: Read, arguments: Arguments) -> Sample:
        rows = _some(arguments[output].shape[0], _SAMPLED_TOKENS)
        given = [_wide(read(arguments[position], rows)) for position in inputs]

        def pairs() -> Pairs:
            found, expected = read(arguments[output], rows), compute(*given)
            if exact:
                return _exact([(found, expected.astype(found.dtype))])
            return [(found, expected)]

        return pairs

    return sample


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _all_bytes(arguments: Arguments) -> float:
    return sum(array.nbytes for array in arrays_in(arguments))


# cases


def _elementwise(op: Op, compute: Callable[..., Any], scale: float, limit: float, exact: bool = False) -> Any:
    def group(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
        width = sizes.hidden if op is ADD else sizes.inner
        for tokens in (sizes.few, sizes.many):

            def arguments(source: Source, tokens: int = tokens) -> Arguments:
                first = source.normal(tokens, width, scale=scale)
                return first, source.normal(tokens, width), source.unwritten(tokens, width)

            sample = _by_rows(compute, (0, 1), 2, exact)
            yield BenchCase(op, f"{tokens} x {width}", arguments, sample, _all_bytes, limit=limit)

    return group


def _silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def _gelu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(inner)) * up


def _softcap_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    cap = 30.0
    for tokens in (1, sizes.few):

        def arguments(source: Source, tokens: int = tokens) -> Arguments:
            shape = tokens, sizes.vocabulary
            return source.normal(*shape, scale=20), cap, source.unwritten(*shape)

        sample = _by_rows(lambda x: cap * np.tanh(x / cap), (0,), 2)
        yield BenchCase(SOFTCAP, f"{tokens} x {sizes.vocabulary}", arguments, sample, _all_bytes, limit=F32_LIMIT)


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
                rows = _some(x.shape[0], _SAMPLED_TOKENS)
                values = _wide(read(x, rows))
                norm = values / np.sqrt(np.mean(values**2, axis=1, keepdims=True) + eps) * _wide(read(weight))
                return lambda: [(read(out, rows), norm)]

            name = f"{tokens} x {sizes.hidden}" + (" to f16" if dtype == np.float16 else "")
            limit = F16_LIMIT if dtype == np.float16 else F32_LIMIT
            yield BenchCase(RMS_NORM, name, arguments, sample, _all_bytes, limit=limit)


def _rope_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    head_dim = 128

    def table(source: Source) -> Arguments:
        positions = source.array(np.arange(sizes.many, dtype=np.int32))
        inv_freq = source.array((1e6 ** (-np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32))
        return positions, inv_freq, 1.0, *(source.unwritten(sizes.many, head_dim // 2) for _ in range(2))

    def of_table(read: Read, arguments: Arguments) -> Sample:
        positions, inv_freq, _, cos, sin = arguments
        angle = read(positions)[:, None].astype(np.float32) * read(inv_freq)  # rounded as the op rounds it
        return lambda: [(read(cos), np.cos(_wide(angle))), (read(sin), np.sin(_wide(angle)))]

    yield BenchCase(ROPE_TABLE, f"{sizes.many} x {head_dim // 2}", table, of_table, _all_bytes, limit=F32_LIMIT)
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
    rows = _some(x.shape[0], _SAMPLED_TOKENS)
    rotated, c, s = (_wide(read(array, rows)) for array in (x, cos, sin))
    half = c.shape[1]
    first = slice(0, None, 2) if pairing == RopePairing.NORM else slice(0, half)
    second = slice(1, None, 2) if pairing == RopePairing.NORM else slice(half, None)
    a, b = rotated[:, :, first].copy(), rotated[:, :, second].copy()
    rotated[:, :, first] = a * c[:, None] - b * s[:, None]
    rotated[:, :, second] = a * s[:, None] + b * c[:, None]
    return lambda: [(read(x, rows), rotated)]


def _rope_traffic(arguments: Arguments) -> float:
    return _all_bytes(arguments) + arguments[0].nbytes  # in place: read and written


def _mul_mat_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    for qtype in types:
        for rows, row_elements in sizes.matrices if qtype in sizes.all_matrices else sizes.matrices[:1]:
            for tokens in sizes.tokens:
                name = f"{qtype.name}, {tokens} x {row_elements} x {rows}"
                arguments = partial(_product, qtype, tokens, rows, row_elements)
                flops = 2.0 * tokens * rows * row_elements
                yield BenchCase(MUL_MAT, name, arguments, _product_sample, _product_traffic, flops, F16_LIMIT)


def _product(qtype: QuantType, tokens: int, rows: int, row_elements: int, source: Source) -> Arguments:
    weight = source.weight(qtype, rows, row_elements)
    size = scratch_size(source.device.target, tokens, weight)
    scratch = source.unwritten(size, dtype=np.float16) if size else None
    return source.normal(tokens, row_elements), weight, scratch, source.unwritten(tokens, rows)


def _product_sample(read: Read, arguments: Arguments) -> Sample:
    x, weight, _, out = arguments
    tokens, columns = _some(x.shape[0], _SAMPLED_TOKENS), _some(weight.shape[0], _SAMPLED_COLUMNS)
    exact = _wide(read(x, tokens)) @ _decoded(read(weight.array, columns), weight.qtype).T
    return lambda: [(read(out, tokens)[:, columns], exact)]


def _product_traffic(arguments: Arguments) -> float:
    x, weight, _, out = arguments
    return x.nbytes + weight.array.nbytes + out.nbytes


def _decoded(packed: np.ndarray, qtype: QuantType) -> np.ndarray:
    return _wide(packed if qtype == QuantType.F32 else dequantize(packed, qtype))


def _decode_rows_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    rows, row_elements = sizes.matrices[0]
    for qtype in types:

        def arguments(source: Source, qtype: QuantType = qtype) -> Arguments:
            return source.weight(qtype, rows, row_elements), source.unwritten(rows, row_elements, dtype=np.float16)

        def sample(read: Read, arguments: Arguments) -> Sample:
            weight, out = arguments
            some = _some(rows, _SAMPLED_COLUMNS)
            exact = _decoded(read(weight.array, some), weight.qtype).astype(np.float16)
            return lambda: _exact([(read(out, some), exact)])

        name = f"{qtype.name}, {rows} x {row_elements}"
        yield BenchCase(_DECODE_ROWS, name, arguments, sample, _all_bytes)


def _plan_decode_rows(target: Target, weight: Weight, out: Any) -> list[KernelLaunch]:
    rows, size = weight.shape
    grid = -(-size // 1024), rows
    arguments = weight.array, out, np.int64(weight.row_bytes), np.int32(size)
    return [KernelLaunch("decode_rows", "decode_rows", grid, (128,), arguments, {"QTYPE": int(weight.qtype)})]


_DECODE_ROWS = Op("decode_rows", lambda weight, out: None, _plan_decode_rows)  # a part of mul_mat, no op of its own


def _get_rows_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    rows = sizes.matrices[0][0]
    for qtype in [QuantType.Q4_K, QuantType.F16]:
        for tokens in (sizes.few, sizes.many):

            def arguments(source: Source, qtype: QuantType = qtype, tokens: int = tokens) -> Arguments:
                ids = source.array(source.rng.integers(0, rows, tokens, np.int32))
                return source.weight(qtype, rows, sizes.hidden), ids, 1.0, source.unwritten(tokens, sizes.hidden)

            def sample(read: Read, arguments: Arguments) -> Sample:
                weight, ids, _, out = arguments
                exact = _decoded(read(weight.array, read(ids)), weight.qtype).astype(np.float32)
                return lambda: _exact([(read(out), exact)])

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
        return lambda: _exact([(read(out), exact)])

    def traffic(arguments: Arguments) -> float:
        _, ids, out = arguments
        return ids.nbytes + 2 * out.nbytes

    yield BenchCase(TAKE_ROWS, f"{sizes.few} of {sizes.many} x {sizes.hidden}", arguments, sample, traffic)


def _top_k_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    columns, k = sizes.vocabulary, 64
    for rows in (1, sizes.few, 4 * sizes.few):

        def arguments(source: Source, rows: int = rows) -> Arguments:
            scratch = rows, scratch_columns(columns, k)
            outputs = source.unwritten(rows, k), source.unwritten(rows, k, dtype=np.int32)
            scratches = source.unwritten(*scratch), source.unwritten(*scratch, dtype=np.int32)
            return source.normal(rows, columns), *scratches, *outputs

        def sample(read: Read, arguments: Arguments) -> Sample:
            values, _, _, out_values, out_ids = arguments
            some = _some(values.shape[0], 2)
            found = read(values, some)
            ids = np.argsort(-found, axis=1, kind="stable")[:, :k].astype(np.int32)
            exact = np.take_along_axis(found, ids, axis=1)
            return lambda: _exact([(read(out_values, some), exact), (read(out_ids, some), ids)])

        def traffic(arguments: Arguments) -> float:
            return arguments[0].nbytes + arguments[3].nbytes + arguments[4].nbytes

        yield BenchCase(TOP_K, f"{rows} x {columns}, {k} of them", arguments, sample, traffic)


# K/V rows


@dataclass(frozen=True)
class _Pages:
    """Sequences in shuffled pages, on the host: the inputs of a ubatch with their last tokens, and the rows' tags."""

    inputs: InputViews
    tags: np.ndarray

    @classmethod
    def of(cls, rng: np.random.Generator, lengths: Sequence[int], new: Sequence[int]) -> _Pages:
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


def _record(source: Source) -> Any:
    return source.array(np.zeros(faults.record_shape(), np.int32))


def _attention_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    for heads in sizes.heads:
        for length in sizes.prefill_rows:
            yield _attention("f16", (length,), (length,), *heads)
    usual, prompt = sizes.heads[1], sizes.prefill_rows[0]
    for sequences, length in sizes.decode:
        yield _attention("f16", (length,) * sequences, (1,) * sequences, *usual)
    for name in KV_TYPES:
        if name != "f16":
            yield _attention(name, (prompt,), (prompt,), *usual)
            yield _attention(name, (sizes.decode[0][1],), (1,), *usual)


def _attention(
    kv_name: str, lengths: Sequence[int], new: Sequence[int], head_dim: int, heads: int, kv_heads: int
) -> BenchCase:
    kv_type = KV_TYPES[kv_name]
    params = AttentionParams(head_dim**-0.5)
    shape = AttentionShape.of(len(lengths), max(new), max(lengths), kv_heads)
    made: list[_Pages] = []  # what the arguments were made of, for the sample

    def arguments(source: Source) -> Arguments:
        pages = _Pages.of(source.rng, lengths, new)
        made[:] = [pages]
        inputs, cache = pages.on_device(source, kv_type, kv_heads * head_dim)
        q, out = source.normal(sum(new), heads, head_dim), source.unwritten(sum(new), heads, head_dim)
        scratch = source.unwritten(shape.scratch_size(heads, head_dim))
        return q, inputs, shape, cache, kv_type, params, _record(source), scratch, out

    def sample(read: Read, arguments: Arguments) -> Sample:
        q, _, _, cache, *_, record, _, out = arguments
        (pages,) = made
        tokens = _some(sum(new), _SAMPLED_QUERIES)
        exact = np.stack([_attend(read, pages, cache, kv_type, int(token), read(q, [token])[0]) for token in tokens])
        no_faults = np.zeros(faults.record_shape(), np.int32)
        return lambda: [(read(out, tokens), exact), *_exact([(read(record), no_faults)])]

    def traffic(arguments: Arguments) -> float:
        q, _, _, cache, *_, out = arguments
        row_size = (cache.k.nbytes + cache.v.nbytes + cache.tags.nbytes) / cache.tags.shape[0]
        return q.nbytes + out.nbytes + sum(lengths) * row_size

    seen = sum(length * (length + 1) / 2 if count > 1 else length for length, count in zip(lengths, new, strict=True))
    what = f"prefill of {new[0]}" if new[0] > 1 else f"decode, {len(lengths)} x {lengths[0]} rows"
    name = f"{kv_name}, {what}, {heads}/{kv_heads} heads of {head_dim}"
    return BenchCase(FLASH_ATTENTION, name, arguments, sample, traffic, 4 * seen * heads * head_dim, F16_LIMIT)


def _attend(read: Read, pages: _Pages, cache: LayerCache, kv_type: KVType, token: int, q: np.ndarray) -> np.ndarray:
    """Attention of one token in float64: [heads, head_dim]."""
    heads, head_dim = q.shape
    seq, count = int(pages.inputs.token_seq[token]), int(pages.inputs.positions[token]) + 1
    rows = pages.rows_of(seq, count)
    k, v = (kv_type.decode(read(stored, rows)).reshape(count, -1, head_dim) for stored in (cache.k, cache.v))
    group = heads // k.shape[1]
    out = np.empty((heads, head_dim))
    for head in range(heads):
        scores = _wide(k[:, head // group]) @ _wide(q[head]) * head_dim**-0.5
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ _wide(v[:, head // group])
    return out


def _set_rows_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    for kv_type in KV_TYPES.values():
        for sequences, tokens in ((sizes.few, 1), (1, sizes.many)):
            lengths, new = (sizes.many,) * sequences, (tokens,) * sequences

            def arguments(
                source: Source, kv_type: KVType = kv_type, lengths: Any = lengths, new: Any = new
            ) -> Arguments:
                inputs, cache = _Pages.of(source.rng, lengths, new).on_device(source, kv_type, sizes.kv_width)
                k, v = (source.normal(sum(new), sizes.kv_width) for _ in range(2))
                return k, v, inputs, cache, kv_type, _record(source)

            def sample(read: Read, arguments: Arguments) -> Sample:
                k, v, inputs, cache, kv_type, _ = arguments
                tokens = _some(k.shape[0], _SAMPLED_TOKENS)
                rows = read(inputs.row_ids)[tokens]
                exact = [kv_type.encode(read(array, tokens)) for array in (k, v)]
                return lambda: _exact(list(zip((read(cache.k, rows), read(cache.v, rows)), exact, strict=True)))

            def traffic(arguments: Arguments) -> float:
                k, v, _, cache, *_ = arguments
                row_size = (cache.k.nbytes + cache.v.nbytes + cache.tags.nbytes) / cache.tags.shape[0]
                return k.nbytes + v.nbytes + k.shape[0] * row_size

            name = f"{kv_type.name}, {sequences * tokens} x {sizes.kv_width}"
            yield BenchCase(SET_ROWS, name, arguments, sample, traffic)


def _page_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    """One page of one layer: what is copied when two sequences part, and overwritten in tests."""
    last = 3 * _PAGE_SIZE

    def cache_of(source: Source, kv_type: KVType) -> LayerCache:
        tags = np.full(4 * _PAGE_SIZE, 11, np.uint32)
        pool = kv_type.encode(source.rng.standard_normal((len(tags), sizes.kv_width), np.float32))
        k, v = source.array(pool), source.array(pool[::-1].copy())
        return _layer_cache(source, kv_type, k, v, source.array(tags))

    def of_copy(read: Read, arguments: Arguments) -> Sample:
        cache = arguments[0]
        source, target = np.arange(_PAGE_SIZE), np.arange(last, last + _PAGE_SIZE)
        exact = [read(cache.k, source), read(cache.v, source), np.full(_PAGE_SIZE, 77, np.uint32)]
        return lambda: _exact(
            list(zip([read(array, target) for array in (cache.k, cache.v, cache.tags)], exact, strict=True))
        )

    def of_fill(read: Read, arguments: Arguments) -> Sample:
        cache = arguments[0]
        target = np.arange(last, last + _PAGE_SIZE)

        def pairs() -> Pairs:
            found = [_bytes(read(array, target)) for array in (cache.k, cache.v)]
            return [(array, np.full_like(array, 0x5A)) for array in found]

        return pairs

    def rows_written(arguments: Arguments) -> float:
        cache = arguments[0]
        return (cache.k.nbytes + cache.v.nbytes) * _PAGE_SIZE / cache.tags.shape[0]

    for kv_type in KV_TYPES.values():
        name = f"{kv_type.name}, {_PAGE_SIZE} x {sizes.kv_width}"

        def copy(source: Source, kv_type: KVType = kv_type) -> Arguments:
            return cache_of(source, kv_type), 0, last, _PAGE_SIZE, 11, 77

        def fill(source: Source, kv_type: KVType = kv_type) -> Arguments:
            return cache_of(source, kv_type), last, _PAGE_SIZE, 0x5A

        yield BenchCase(COPY_ROWS, name, copy, of_copy, lambda a: 2 * rows_written(a) + 8 * _PAGE_SIZE)
        yield BenchCase(FILL_ROWS, name, fill, of_fill, rows_written)


def _clear_tags_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    first, count = 7, _PAGE_SIZE - 7

    def arguments(source: Source) -> Arguments:
        return source.array(source.rng.integers(1, 2**32, (_LAYERS, 4 * _PAGE_SIZE), np.uint32)), first, count

    def sample(read: Read, arguments: Arguments) -> Sample:
        exact = read(arguments[0])
        exact[:, first : first + count] = 0
        return lambda: _exact([(read(arguments[0]), exact)])

    name = f"{_LAYERS} layers, {count} rows"
    yield BenchCase(CLEAR_TAGS, name, arguments, sample, lambda arguments: 4.0 * _LAYERS * count)


# mixtures of experts


def _route_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    experts, used, *_ = sizes.experts
    for tokens in (1, sizes.few, sizes.many):

        def arguments(source: Source, tokens: int = tokens) -> Arguments:
            outputs = source.unwritten(tokens, used, dtype=np.int32), source.unwritten(tokens, used)
            return source.normal(tokens, experts), *outputs

        def sample(read: Read, arguments: Arguments) -> Sample:
            logits, chosen, weights = arguments
            rows = _some(logits.shape[0], _SAMPLED_TOKENS)
            given = read(logits, rows)
            ids = np.argsort(-given, axis=1, kind="stable")[:, :used].astype(np.int32)
            likely = np.exp(_wide(np.take_along_axis(given, ids, axis=1)))
            exact = likely / likely.sum(axis=1, keepdims=True)
            return lambda: [*_exact([(read(chosen, rows), ids)]), (read(weights, rows), exact)]

        yield BenchCase(ROUTE, f"{tokens} tokens, {used} of {experts}", arguments, sample, _all_bytes, limit=F32_LIMIT)


def _weighted_sum_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    _, used, _, width = sizes.experts
    for tokens in (1, sizes.few, sizes.many):

        def arguments(source: Source, tokens: int = tokens) -> Arguments:
            x, weights = source.normal(tokens, used, width), source.normal(tokens, used)
            return x, weights, source.unwritten(tokens, width), False

        sample = _by_rows(lambda x, weights: np.einsum("tjd,tj->td", x, weights), (0, 1), 2)
        yield BenchCase(WEIGHTED_SUM, f"{tokens} x {used} x {width}", arguments, sample, _all_bytes, limit=F32_LIMIT)


def _group_experts_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    experts, used, *_ = sizes.experts
    bm = 64

    def arguments(source: Source) -> Arguments:
        chosen = np.stack([source.rng.permutation(experts)[:used] for _ in range(sizes.many)]).astype(np.int32)
        lists = np.zeros(ExpertLists.size(chosen.size, experts, bm), np.int32)
        return source.array(chosen), experts, ExpertLists(source.array(lists), bm)

    def sample(read: Read, arguments: Arguments) -> Sample:
        chosen, _, lists = arguments
        exact = np.zeros(lists.array.shape, np.int32)
        group_experts_ref(read(chosen), experts, ExpertLists(exact, bm))
        return lambda: _exact([(read(lists.array), exact)])

    name = f"{sizes.many} tokens, {used} of {experts}"
    yield BenchCase(GROUP_EXPERTS, name, arguments, sample, _all_bytes)


def _mul_mat_id_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    for qtype in (QuantType.Q4_K, QuantType.Q8_0):
        for tokens in sizes.expert_tokens:
            yield _experts_case(qtype, tokens, *sizes.experts)


def _experts_case(qtype: QuantType, tokens: int, experts: int, used: int, rows: int, row_elements: int) -> BenchCase:
    def arguments(source: Source) -> Arguments:
        chosen = np.stack([source.rng.permutation(experts)[:used] for _ in range(tokens)]).astype(np.int32)
        weight = source.weight(qtype, experts, rows, row_elements)
        out = source.unwritten(tokens, used, rows)
        lists = None
        if bm := expert_tile_rows(_LARGE_GPU, chosen.size, experts):
            filled = ExpertLists(np.zeros(ExpertLists.size(chosen.size, experts, bm), np.int32), bm)
            group_experts_ref(chosen, experts, filled)
            lists = ExpertLists(source.array(filled.array), bm)
        return source.normal(tokens, 1, row_elements), source.array(chosen), weight, lists, out

    def sample(read: Read, arguments: Arguments) -> Sample:
        x, chosen, weight, _, out = arguments
        some, columns = _some(tokens, 2), _some(rows, _SAMPLED_COLUMNS)
        ids, given = read(chosen, some), _wide(read(x, some))
        exact = np.empty((len(some), used, len(columns)))
        for index, slot in np.ndindex(ids.shape):
            packed = read(weight.array, [ids[index, slot]])[0, columns]
            exact[index, slot] = _decoded(packed, qtype) @ given[index, 0]
        return lambda: [(read(out, some)[:, :, columns], exact)]

    def traffic(arguments: Arguments) -> float:
        x, chosen, weight, _, out = arguments
        needed = experts * (1 - (1 - used / experts) ** tokens)  # of experts, on average
        return x.nbytes + chosen.nbytes + needed / experts * weight.array.nbytes + out.nbytes

    name = f"{qtype.name}, {tokens} x {row_elements} x {rows}, {used} of {experts}"
    flops = 2.0 * tokens * used * rows * row_elements
    return BenchCase(MUL_MAT_ID, name, arguments, sample, traffic, flops, F16_LIMIT)


def _gated_mul_mat_id_cases(sizes: Sizes, types: Sequence[QuantType]) -> Iterator[BenchCase]:
    experts, used, rows, row_elements = sizes.experts

    def arguments(source: Source) -> Arguments:
        chosen = source.rng.permutation(experts)[None, :used].astype(np.int32)
        gate, up = (source.weight(QuantType.Q4_K, experts, rows, row_elements) for _ in range(2))
        out = source.unwritten(1, used, rows)
        return source.normal(1, 1, row_elements), source.array(chosen), gate, up, None, None, out

    def sample(read: Read, arguments: Arguments) -> Sample:
        x, chosen, gate, up, *_, out = arguments
        given, ids, columns = _wide(read(x))[0, 0], read(chosen)[0], _some(rows, _SAMPLED_COLUMNS)
        g, u = (
            np.stack([_decoded(read(weight.array, [expert])[0, columns], weight.qtype) @ given for expert in ids])
            for weight in (gate, up)
        )
        return lambda: [(read(out)[0][:, columns], g / (1 + np.exp(-g)) * u)]

    def traffic(arguments: Arguments) -> float:
        x, chosen, gate, up, *_, out = arguments
        return x.nbytes + chosen.nbytes + used / experts * (gate.array.nbytes + up.array.nbytes) + out.nbytes

    name = f"Q4_K, 1 x {row_elements} x {rows}, {used} of {experts}"
    flops = 4.0 * used * rows * row_elements
    yield BenchCase(GATED_MUL_MAT_ID, name, arguments, sample, traffic, flops, F16_LIMIT)


_GROUPS: tuple[Callable[[Sizes, Sequence[QuantType]], Iterator[BenchCase]], ...] = (
    _mul_mat_cases,
    _decode_rows_cases,
    _attention_cases,
    _mul_mat_id_cases,
    _gated_mul_mat_id_cases,
    _route_cases,
    _group_experts_cases,
    _weighted_sum_cases,
    _rms_norm_cases,
    _rope_cases,
    _elementwise(SILU_MUL, _silu_mul, 3.0, F32_LIMIT),
    _elementwise(GELU_MUL, _gelu_mul, 3.0, F32_LIMIT),
    _elementwise(ADD, lambda a, b: (a + b).astype(np.float32), 1.0, 0.0, exact=True),
    _softcap_cases,
    _get_rows_cases,
    _take_rows_cases,
    _set_rows_cases,
    _page_cases,
    _clear_tags_cases,
    _top_k_cases,
)
