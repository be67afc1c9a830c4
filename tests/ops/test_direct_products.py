"""Products of tens of tokens on Hopper whose weights are decoded into registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pyllm.device.emulated import EmulatedDevice
from pyllm.kernel_check import Case, check_case
from pyllm.kernel_product_cases import linear_case, mul_mat_case
from pyllm.kernel_samples import random_weight
from pyllm.ops import product_direct, product_plan
from pyllm.ops.linear import linear, linear_scratch
from pyllm.ops.op import KernelLaunch, Target
from pyllm.ops.product_direct import FOURS_TYPES, GROUPS, Direct, Groups, Order, arrange_launch
from pyllm.ops.product_plan import Gate, takes_direct
from pyllm.ops.product_wgmma import SHARED_OF_BLOCK, STATIC_SHARED
from pyllm.quants import FORMATS, GPU_TYPES, QuantType, dequantize
from tests.ops.test_product_plans import weight

HOPPER = Target("cuda", "sm_90", 32, "mma")
PACKED = sorted(qtype for qtype in GPU_TYPES if FORMATS[qtype].block_size > 1)
Q4_K, Q6_K, Q8_0 = QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0


@pytest.fixture(params=["emulated-32"])  # a name of a life: tests/conftest.py thins out rare block types
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(32, "mma")
    device.target = replace(device.target, arch="sm_90")
    yield device
    device.close()


def sources(case: Case) -> list[str]:
    assert case.op.plan is not None
    return [launch.source for launch in case.op.plan(HOPPER, *case.draw(0)) if isinstance(launch, KernelLaunch)]


def check(device: EmulatedDevice, case: Case, repeats: int = 1) -> None:
    assert "mul_mat_wgmma_direct" in sources(case), sources(case)
    verdict = check_case(device, case, repeats=repeats)
    assert verdict.passed, verdict


@pytest.mark.parametrize("qtype", PACKED, ids=lambda qtype: qtype.name)
def test_all_block_types(device: EmulatedDevice, qtype: QuantType) -> None:
    for tokens in (40, 70):
        check(device, mul_mat_case(qtype, tokens, 97, 512))


@pytest.mark.parametrize(
    ("groups", "tokens"),
    [(groups, tokens) for groups in GROUPS for tokens in (20, 50, 100, 140) if groups.kparts < 4 or tokens < 100],
    ids=lambda value: f"{value.groups} groups, {value.kparts} share k" if isinstance(value, Groups) else str(value),
)
def test_groups(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, groups: Groups, tokens: int) -> None:
    """Units of k that do not come to the same for all groups; more tiles than blocks; two columns of tokens."""
    monkeypatch.setattr(product_direct, "GROUPS", (groups,))
    monkeypatch.setattr(product_plan, "takes_direct", lambda *arguments: True)
    product_direct._best.cache_clear()
    device.target = replace(device.target, multiprocessors=2)
    try:
        case = mul_mat_case(Q4_K, tokens, 300, 768)
        verdict = check_case(device, case, repeats=2)
        assert verdict.passed, verdict
    finally:
        product_direct._best.cache_clear()


LINEAR_CASES = (
    linear_case((Q4_K,) * 3, (130, 33, 17), 35, 512, norm=True, bias=True),
    linear_case((Q4_K, Q4_K, QuantType.Q4_0), (65, 1, 40), 20, 256, norm=True, bias=True),
    linear_case((Q8_0,) * 4, (10, 70, 2, 66), 70, 256),
    linear_case((Q6_K,), (97,), 70, 768, dtype=np.float16, accumulate=True),
    linear_case((Q4_K, Q4_K), (70, 70), 20, 512, norm=True, gate=Gate.SILU),
    linear_case((Q8_0, Q8_0), (33, 33), 100, 512, gate=Gate.GELU, dtype=np.float16),
    linear_case((QuantType.Q5_1, Q4_K), (33, 33), 35, 512, norm=True, gate=Gate.SILU),
    linear_case((QuantType.Q5_K,), (40,), 64, 256, accumulate=True, bias=True),
)


@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_linear(device: EmulatedDevice, case: Case) -> None:
    assert "rms_norm" not in sources(case) and "add" not in sources(case)
    check(device, case)


@pytest.mark.parametrize("case", LINEAR_CASES[:4], ids=str)
def test_shares_of_k(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Blocks share k as for large matrices, and add up in one order."""
    monkeypatch.setattr(product_direct, "SUM_TIME", -1e9)
    product_direct._best.cache_clear()
    try:
        assert ("sum_parts" in sources(case)) == ("x 256" not in case.name), case.name
        check(device, case, repeats=2)
    finally:
        product_direct._best.cache_clear()


def test_neighbours_of_a_type_share_a_launch() -> None:
    q4, q8 = Q4_K, Q8_0
    product = "mul_mat_wgmma_direct"
    for types, wanted in (
        ((q4, q4, q4), ["arrange_x", product]),
        ((q4, q8, q8), ["arrange_x", product, "arrange_x", product]),
        ((q8, q8, q8, q8), ["arrange_x", product, product]),
        ((q8, QuantType.IQ4_XS), ["arrange_x", product, product]),
    ):
        assert sources(linear_case(types, (40,) * len(types), 35, 256, norm=True)) == wanted
    assert sources(linear_case((q4, q4), (40, 40), 35, 256, norm=True, gate=Gate.SILU)) == ["arrange_x", product]


@pytest.mark.parametrize(
    ("tokens", "types", "k", "wanted"),
    [
        (16, (Q4_K,), 4096, False),
        (17, (Q4_K,), 4096, True),
        (17, (Q6_K,), 4096, False),
        (33, (Q6_K,), 4096, True),
        (128, (Q4_K, Q6_K, Q8_0), 4096, True),
        (128, (Q4_K, QuantType.F16), 4096, False),
        (128, (Q8_0,), 4096 + 128, False),
        (256, (Q4_K,), 4096, True),
        (513, (Q4_K,), 4096, False),
    ],
)
def test_which_products_are_these(tokens: int, types: Sequence[QuantType], k: int, wanted: bool) -> None:
    weights = [weight(qtype, 4096, k) for qtype in types]
    assert takes_direct(HOPPER, tokens, weights) == wanted
    assert not takes_direct(replace(HOPPER, arch="sm_89"), tokens, weights)
    assert not takes_direct(replace(HOPPER, batch_invariant=True), tokens, weights)
    assert not takes_direct(None, tokens, weights)


def test_few_tokens_of_large_matrices_of_all_types() -> None:
    assert takes_direct(HOPPER, 20, [weight(Q6_K, 12288, 4096)] * 2)
    assert not takes_direct(HOPPER, 20, [weight(Q6_K, 12288, 4096)])


def test_cuts_that_were_the_fastest_on_an_h200() -> None:
    for tokens, rows, k, groups in (
        (32, 14336, 4096, Groups(4, 2)),
        (64, 14336, 4096, Groups(4, 2)),
        (128, 14336, 4096, Groups(2, 1)),
        (32, 24576, 4096, Groups(3, 1)),
        (256, 24576, 4096, Groups(3, 1)),
        (32, 131072, 4096, Groups(4, 1)),
        (128, 131072, 4096, Groups(4, 1)),
        (32, 6144, 4096, Groups(4, 4)),
    ):
        direct = Direct.of(HOPPER, tokens, [weight(Q4_K, rows, k)], False, 8)
        assert (direct.groups, direct.shares) == (groups, 1), (tokens, rows)
    for tokens in (32, 64, 128):
        assert Direct.of(HOPPER, tokens, [weight(Q4_K, 4096, 12288)], False, 8).shares > 1


@pytest.mark.parametrize("qtype", PACKED, ids=lambda qtype: qtype.name)
def test_cuts_fit_into_shared_memory(qtype: QuantType) -> None:
    for tokens in (17, 33, 65, 300):
        for rows, k in ((8, 256), (4096, 4096), (150_000, 4096), (5120, 27648), (48, 1280)):
            for gate in (False, True):
                direct = Direct.of(HOPPER, tokens, [weight(qtype, rows, k)] * 2, gate, 8)
                assert 2 <= direct.x_stages <= 4
                assert direct.shared_bytes + STATIC_SHARED <= SHARED_OF_BLOCK
                assert 1 <= direct.shares <= k // 256 and direct.blocks <= HOPPER.multiprocessors


@pytest.mark.parametrize("order", list(Order))
def test_arranged_activations(device: EmulatedDevice, order: Order) -> None:
    """Each lane's eight of 32 k stand where products take them, tokens that do not exist are zeros."""
    tokens, k = 20, 128
    x = np.arange(tokens * k, dtype=np.float32).reshape(tokens, k) % 2039
    out = device.upload(np.full(32 * k, np.nan, np.float16))
    spare = device.upload(np.zeros(16, np.uint8))
    device.launch_kernel(arrange_launch(device.upload(x), None, 0.0, order, out, spare))
    panels = device.download(out).astype(np.float32).reshape(k // 64, 32, 8, 8)
    of_lane = {
        Order.EIGHTS: [[8 * q + i for i in range(8)] for q in range(4)],
        Order.HELD_EIGHTS: [[8 * q + i for i in (0, 2, 1, 3, 4, 6, 5, 7)] for q in range(4)],
        Order.FOURS: [[4 * q + i for i in (0, 1, 2, 3, 16, 17, 18, 19)] for q in range(4)],
    }[order]
    for token in range(32):
        row = np.concatenate([panel[token][[p ^ token % 8 for p in range(8)]].ravel() for panel in panels])
        for first in range(0, k, 32):
            for q in range(4):
                places = [first + 16 * (i // 4) + 8 * (i // 2 % 2) + 2 * q + i % 2 for i in range(8)]
                wanted = x[token, first : first + 32][of_lane[q]] if token < tokens else np.zeros(8)
                assert np.array_equal(row[places], wanted), (token, first, q)


def test_activations_beyond_float16(device: EmulatedDevice) -> None:
    """They become the largest float16, and spoil nothing else."""
    rng = np.random.default_rng(3)
    packed = random_weight(rng, Q4_K, 40, 256)
    x = rng.standard_normal((35, 256)).astype(np.float32)
    x[3, 5], x[4, 6] = 1e6, -np.inf
    out = device.upload(np.full((35, 40), np.nan, np.float32))
    there = replace(packed, array=device.upload(packed.array))
    scratch = device.empty((linear_scratch(device.target, 35, [there], x.dtype),), np.float16)
    linear(device, device.upload(x), [there], out, scratch=scratch)
    wanted = np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64) @ dequantize(packed.array, Q4_K).T
    assert np.allclose(device.download(out), wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max(axis=1, keepdims=True))


def test_formats_are_read_as_their_kernels_do() -> None:
    for qtype in PACKED:
        direct = Direct.of(HOPPER, 40, [weight(qtype, 100, 512)], False)
        assert direct.held == (qtype in (Q4_K, QuantType.Q5_K))
        assert (direct.order == Order.FOURS) == (qtype in FOURS_TYPES)
    assert Direct.of(HOPPER, 100, [weight(Q4_K, 100, 512)], False).order == Order.EIGHTS
