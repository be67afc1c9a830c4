"""Products of few tokens: the kernels that plans choose for NVIDIA, and what they make of unusual activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.kernel_check import check_case
from pyllm.kernel_product_cases import linear_case
from pyllm.kernel_samples import random_weight
from pyllm.ops.linear import linear, linear_scratch
from pyllm.ops.mul_mat import mul_mat
from pyllm.ops.op import Target
from pyllm.ops.product_direct import FOURS_TYPES
from pyllm.ops.product_held import HELD_TYPES, Held
from pyllm.ops.product_plan import Gate, Staging
from pyllm.ops.product_tile import OTHERS_SHARED_KIB, SHARED_KIB
from pyllm.ops.product_whole import Whole
from pyllm.quants import FORMATS, GPU_TYPES, QuantType, dequantize
from pyllm.weight import Weight
from tests.ops.lives import check_against_float64, on_device

SHAPES = (
    (14336, 4096),
    (4096, 14336),
    (6144, 4096),
    (576, 576),
    (1536, 576),
    (151_936, 4096),
    (16, 256),
    (4096, 29_568),
)
WITH_MINIMA = (QuantType.Q4_1, QuantType.Q4_K, QuantType.Q5_K)
NVIDIA = ("sm_80", "sm_86", "sm_90", "sm_120")


@pytest.mark.parametrize("num_tokens", [3, 7, 11, 18])
@pytest.mark.parametrize("qtype", [*sorted(FOURS_TYPES), *WITH_MINIMA], ids=lambda qtype: qtype.name)
def test_products_side_by_side(device: Device, qtype: QuantType, num_tokens: int) -> None:
    """Rows are no whole number of what all warps of a block take at a time."""
    blocks = 3 if FORMATS[qtype].block_size == 256 else 12 if num_tokens > 8 else 9
    case = linear_case((qtype,) * 2, (33, 17), num_tokens, blocks * FORMATS[qtype].block_size, bias=True)
    verdict = check_case(device, case, repeats=1)
    assert verdict.passed, verdict


@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0], ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("num_tokens", [2, 12])
def test_gates(device: Device, qtype: QuantType, num_tokens: int) -> None:
    case = linear_case((qtype, qtype), (35, 35), num_tokens, 512, norm=True, gate=Gate.SILU)
    verdict = check_case(device, case, repeats=1)
    assert verdict.passed, verdict


def product(device: Device, qtype: QuantType, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the device finds, and the weight's values."""
    rows, k = 35, x.shape[1]
    packed = random_weight(np.random.default_rng(int(qtype)), qtype, rows, k).array.view(np.uint8)
    array, held = device.upload_weight(packed, qtype, (rows, k))
    out = device.empty((x.shape[0], rows), np.float32)
    mul_mat(device, on_device(device, x), Weight("test", (rows, k), held, array), out)
    return device.download(out), dequantize(packed, qtype).astype(np.float64)


@pytest.mark.parametrize("qtype", [QuantType.Q5_K, QuantType.IQ4_XS, QuantType.Q4_1], ids=lambda qtype: qtype.name)
def test_one_large_activation(device: Device, qtype: QuantType) -> None:
    """All others are then small beside the scale of their unit; the limit is that of rounding them to float16."""
    x = np.random.default_rng(3).standard_normal((3, 512), np.float32)
    x[1, 100] = 3e4
    found, values = product(device, qtype, x)
    plain = x.astype(np.float16).astype(np.float64) @ values.astype(np.float16).astype(np.float64).T
    for token in range(3):
        exact = x[token].astype(np.float64) @ values.T
        check_against_float64(found[token], exact, plain[token], floor=1e-6)


def test_zeros_and_missing_numbers(device: Device) -> None:
    x = np.zeros((2, 512), np.float32)
    x[1, 300] = np.nan
    found, _ = product(device, QuantType.Q4_K, x)
    assert (found[0] == 0).all()
    assert np.isnan(found[1]).all()


def weight(qtype: QuantType, rows: int, k: int) -> Weight:
    """Without memory."""
    block = FORMATS[qtype]
    shape = rows, k // block.block_size * block.block_bytes
    return Weight("test", (rows, k), qtype, np.broadcast_to(np.uint8(0), shape))


@pytest.mark.parametrize("arch", NVIDIA)
def test_plans_fit(arch: str) -> None:
    target, limit = Target("cuda", arch, 32, "mma"), SHARED_KIB.get(arch, OTHERS_SHARED_KIB) << 10
    for qtype in GPU_TYPES - {QuantType.F32}:
        for rows, k in SHAPES:
            if k % FORMATS[qtype].block_size:
                continue
            results = -(-rows // 16)
            for matrices in (1, 2):
                for num_tokens in (1, 2, 4, 7):
                    if whole := Whole.of(target, num_tokens, weight(qtype, rows, k), results, matrices):
                        assert whole.shared_bytes(target, num_tokens, k) < limit
                        assert whole.blocks * whole.tiles >= results * matrices
                        assert k % whole.unit_k == 0
                for num_tokens in (9, 16, 17, 32):
                    if held := Held.of(target, num_tokens, weight(qtype, rows, k), results, matrices):
                        assert held.shared_bytes(target) <= limit
                        assert held.blocks * held.tiles >= results * matrices
                        assert held.threads % 32 == 0 and held.threads // 32 >= held.tokens // 8
                        assert matrices == 1 or held.shares == 1
                for tokens in (2, 8, 16, 32):
                    staging = Staging.of(target, weight(qtype, rows, k), tokens, results, matrices)
                    assert staging.shared_bytes(target, qtype, tokens, k) <= limit
                    assert staging.threads % (32 * staging.results * matrices) == 0


def blocks_of(rng: np.random.Generator, qtype: QuantType, d: float, dmin: float, rows: int, k: int) -> np.ndarray:
    """Random codes, scales and minima; d and dmin the same in all blocks."""
    packed = (
        random_weight(rng, qtype, rows, k).array.view(np.uint8).copy().reshape(rows, -1, FORMATS[qtype].block_bytes)
    )
    packed[..., :4] = np.array([d, dmin], np.float16).view(np.uint8)
    return packed.reshape(rows, -1)


@pytest.mark.parametrize(
    ("d", "dmin"),
    [(0.0, 0.5), (0.5, 0.0), (0.0, 0.0), (6e-8, 6e-8), (6e-8, 1.0), (10.0, 10.0), (-0.01, 0.3), (0.02, -0.3)],
)
@pytest.mark.parametrize("qtype", sorted(HELD_TYPES), ids=lambda qtype: qtype.name)
def test_unusual_scales(device: Device, qtype: QuantType, d: float, dmin: float) -> None:
    """A power of two is taken out of them; what is left has to fit into float16 beside what it is added to."""
    rng = np.random.default_rng(5)
    rows, k, num_tokens = 113, 1024, 12
    packed = blocks_of(rng, qtype, d, dmin, rows, k)
    array, held = device.upload_weight(packed, qtype, (rows, k))
    x = (rng.standard_normal((num_tokens, k)) * 0.1).astype(np.float16)
    matrix = Weight("test", (rows, k), held, array)
    size = linear_scratch(device.target, num_tokens, [matrix], x.dtype)
    out = device.empty((num_tokens, rows), np.float32)
    linear(device, on_device(device, x), [matrix], out, scratch=device.empty((size,), np.float16) if size else None)
    values = dequantize(packed, qtype).astype(np.float64)
    bound = np.abs(x.astype(np.float64)) @ np.abs(values).T
    assert (np.abs(device.download(out) - x.astype(np.float64) @ values.T) <= 2.0**-10 * bound).all()


def test_which_weights_let_activations_stay() -> None:
    target = Target("cuda", "sm_90", 32, "mma")
    large = weight(QuantType.Q4_K, 14336, 4096)
    assert Held.of(target, 8, large, 896, 1) is None
    assert Held.of(target, 33, large, 896, 1) is None
    assert Held.of(replace(target, batch_invariant=True), 16, large, 896, 1) is None
    assert Held.of(target, 16, weight(QuantType.Q6_K, 14336, 4096), 896, 1) is None
    assert Held.of(target, 16, weight(QuantType.Q4_K, 1024, 1024), 64, 1) is None
    held = Held.of(target, 16, large, 896, 1)
    assert held is not None and (held.threads, held.shares) == (512, 1)
    held = Held.of(target, 32, weight(QuantType.Q4_K, 4096, 12288), 256, 1)
    assert held is not None and (held.threads, held.shares, held.blocks) == (256, 6, 22)


def test_whole_numbers_are_for_large_weights_on_nvidia() -> None:
    large, small = weight(QuantType.Q4_K, 14336, 4096), weight(QuantType.Q8_0, 576, 576)
    assert Whole.of(Target("cuda", "sm_90", 32, "mma"), 1, large, 896, 1) is not None
    assert Whole.of(Target("cuda", "sm_90", 32, "mma"), 1, small, 36, 1) is None
    assert Whole.of(Target("hip", "gfx942", 64, "mfma"), 1, large, 896, 1) is None
