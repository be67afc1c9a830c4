"""Plans for batch-invariant targets choose the same kernels for every number of tokens. Those for GPUs need none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.kernel_recurrent_cases import recurrent_cases
from pyllm.kernel_samples import empty_record, normal, paged, random_weight, unwritten
from pyllm.kv_types import KV_TYPES
from pyllm.models.by_token import attention_parts
from pyllm.ops.causal_conv1d import plan_causal_conv1d
from pyllm.ops.flash_attention import AttentionParams, AttentionShape, flash_attention, plan_flash_attention
from pyllm.ops.gated_delta_rule import scratch_shape
from pyllm.ops.group_experts import ExpertLists
from pyllm.ops.linear import linear_scratch, plan_linear
from pyllm.ops.mul_mat_id import expert_tile_rows, plan_mul_mat_id
from pyllm.ops.op import GemmLaunch, Target
from pyllm.ops.product_plan import Gate, Norm
from pyllm.quants import QuantType
from pyllm.weight import Weight
from tests.ops.lives import LIVES, on_device

TARGETS = {
    "sm_90": Target("cuda", "sm_90", 32, "mma", batch_invariant=True),
    "sm_80": Target("cuda", "sm_80", 32, "mma", 108, batch_invariant=True),
    "gfx1151": Target("hip", "gfx1151", 32, "wmma", batch_invariant=True),
    "gfx942": Target("hip", "gfx942", 64, "mfma", batch_invariant=True),
    "emulated": Target("host", "host", 32, "mma", batch_invariant=True),
}
COUNTS = (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 1000, 2048)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


def chosen(launches: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What decides the order of a token's sums: kernels and how they are compiled and cut up, but for the grid."""
    assert not any(isinstance(launch, GemmLaunch) for launch in launches)
    return [(launch.entry, launch.block, dict(launch.defines), launch.shared_bytes) for launch in launches]


def check_same(plan: Callable[[int], Sequence[Any]], counts: Sequence[int] = COUNTS) -> None:
    first = chosen(plan(counts[0]))
    for count in counts[1:]:
        assert chosen(plan(count)) == first, f"{count} tokens"


def weight(qtype: QuantType, rows: int, k: int) -> Weight:
    return replace(random_weight(np.random.default_rng(1), qtype, 1, k), shape=(rows, k))


@pytest.mark.parametrize("qtype", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("form", ["plain", "norm", "bias", "gate", "three", "added"])
def test_products(target: Target, qtype: str, form: str) -> None:
    k = 4096
    matrices = [weight(QuantType[qtype], rows, k) for rows in ((4096, 4096) if form == "gate" else (4096, 1024, 1024))]
    matrices = matrices if form in ("gate", "three") else matrices[:1]
    norm = Norm(np.ones(k, np.float32), 1e-5) if form in ("norm", "gate", "three") else None
    gate = Gate.SILU if form == "gate" else Gate.NONE
    columns = 4096 if form == "gate" else sum(matrix.shape[0] for matrix in matrices)
    bias = np.ones(columns, np.float32) if form == "bias" else None

    def plan(count: int) -> Sequence[Any]:
        x = np.empty((count, k), np.float32)
        size = linear_scratch(target, count, matrices, x.dtype, norm is not None, bool(gate))
        out = np.empty((count, columns), np.float32)
        return plan_linear(target, x, matrices, norm, bias, gate, form == "added", np.empty(size, np.float16), out)

    check_same(plan)


@pytest.mark.parametrize("qtype", ["F16", "Q4_K"])
def test_experts(target: Target, qtype: str) -> None:
    one = weight(QuantType[qtype], 1, 2048)
    experts = Weight("experts", (16, 512, 2048), one.qtype, one.array)

    def plan(count: int) -> Sequence[Any]:
        ids = np.zeros((count, 8), np.int32)
        bm = expert_tile_rows(target, ids.size, 16)
        lists = ExpertLists(np.zeros(ExpertLists.size(ids.size, 16, bm), np.int32), bm)
        x, out = np.empty((count, 1, 2048), np.float16), np.empty((count, 8, 512), np.float16)
        return plan_mul_mat_id(target, x, ids, experts, lists, out)

    check_same(plan)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention(target: Target, kv_type: str, head_dim: int) -> None:
    inputs, cache = paged(np.random.default_rng(1), (40,), (40,), 2, head_dim, KV_TYPES[kv_type])
    params = AttentionParams(head_dim**-0.5)

    def plan(most_rows: int, count: int) -> Sequence[Any]:
        q = np.empty((count, 8, head_dim), np.float16)
        shape = AttentionShape.by_token(count, most_rows)
        rest = (params, empty_record(), np.empty(1, np.float32), q)
        return plan_flash_attention(target, q, inputs, shape, cache, KV_TYPES[kv_type], *rest)

    for rows in (1, 500, 5000, 100_000):
        check_same(lambda count, rows=rows: plan(rows, count))
    check_same(lambda rows: plan(rows, 7), (1, 500, 5000, 100_000))


def test_recurrent_layers(target: Target) -> None:
    conv = next(case for case in recurrent_cases() if case.op.name == "causal_conv1d")
    x, taps, inputs, _, state, norm, out = conv.arguments(np.random.default_rng(1))

    def plan(count: int) -> Sequence[Any]:
        some = np.zeros((count, x.array.shape[1]), np.float32)
        columns = replace(x, array=some)
        rows = np.zeros((count, out.shape[1]), np.float32)
        return plan_causal_conv1d(target, columns, taps, inputs, min(count, 3), state, norm, rows)

    check_same(plan)
    rule = next(case for case in recurrent_cases() if case.op.name == "gated_delta_rule")
    heads = rule.arguments(np.random.default_rng(1))[5]
    assert all(scratch_shape(target, heads, count, 1, count) is None for count in COUNTS)


@pytest.fixture(params=[life for life in LIVES if life != "cpu"])
def device(request: pytest.FixtureRequest) -> Device:
    return LIVES[request.param]()


@pytest.mark.parametrize("window", [0, 1190])
def test_attention_of_a_token_in_any_company(device: Device, window: int) -> None:
    """Rows enough to be split: 1,300 of its own, beside tokens before it, and others with fewer and more."""
    rng, head_dim = np.random.default_rng(3), 64
    kv_type, params = KV_TYPES["f16"], AttentionParams(head_dim**-0.5, window)
    inputs, cache = paged(rng, (1300, 30, 2100), (2, 1, 1), 1, head_dim, kv_type, page_size=64)
    q = normal(rng, 4, 2, head_dim).astype(np.float16)
    given = replace(cache, **{name: on_device(device, getattr(cache, name)) for name in ("k", "v", "tags", "counters")})

    def attended(chosen: Sequence[int]) -> np.ndarray:
        rows = np.array(chosen)
        owner = inputs.token_seq[rows]
        own = replace(
            inputs,
            cu_seqlens=np.arange(len(rows) + 1, dtype=np.int32),
            kv_lens=inputs.positions[rows] + np.int32(1),
            **{name: getattr(inputs, name)[owner].copy() for name in ("seq_ids", "page_table", "page_epochs")},
        )
        most = int(own.kv_lens.max())
        shape = AttentionShape.by_token(len(rows), most)
        assert shape.splits > 1 or most < 1024
        queries = on_device(device, np.ascontiguousarray(q[rows]))
        on = replace(own, **{name: on_device(device, array) for name, array in vars(own).items()})
        scratch = on_device(device, unwritten(shape.scratch_size(device.target, kv_type, 2, 1, head_dim)))
        out = on_device(device, unwritten(len(rows), 2, head_dim, dtype=np.float16))
        record = on_device(device, empty_record())
        flash_attention(device, queries, on, shape, given, kv_type, params, record, scratch, out)
        return device.download(out)

    beside = attended([0, 1, 2, 3])
    for token in range(4):
        assert attended([token])[0].tobytes() == beside[token].tobytes()
    assert np.isfinite(beside.astype(np.float32)).all()


def test_attention_is_launched_in_parts_that_its_counters_take() -> None:
    inputs, _ = paged(np.random.default_rng(1), (2000,), (1500,), 1, 32, KV_TYPES["f16"])

    class Batch:
        by_token = replace(
            inputs,
            **{
                name: np.zeros((1501, 2), np.int32)
                for name in ("cu_seqlens", "kv_lens", "seq_ids", "page_table", "page_epochs")
            },
        )
        num_tokens, most_rows = 1500, 2048

    parts = list(attention_parts(Batch(), 32, 8))
    assert [shape.num_seqs for _, shape in parts] == [512, 512, 476]
    assert all(len(views.cu_seqlens) == shape.num_seqs + 1 for views, shape in parts)
    assert all(shape.splits == 4 for _, shape in parts)
