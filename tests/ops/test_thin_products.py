"""Products of few tokens: the kernels that plans choose for NVIDIA, and what they make of unusual activations."""

from __future__ import annotations

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.kernel_check import check_case
from pyllm.kernel_product_cases import linear_case
from pyllm.kernel_samples import random_weight
from pyllm.ops.mul_mat import mul_mat
from pyllm.ops.op import Target
from pyllm.ops.product_plan import WORDS_TYPES, Gate, Staging
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
@pytest.mark.parametrize("qtype", [*sorted(WORDS_TYPES), *WITH_MINIMA], ids=lambda qtype: qtype.name)
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
                for tokens in (2, 8, 16, 32):
                    staging = Staging.of(target, weight(qtype, rows, k), tokens, results, matrices)
                    assert staging.shared_bytes(target, qtype, tokens, k) <= limit
                    assert staging.threads % (32 * staging.results * matrices) == 0


def test_whole_numbers_are_for_large_weights_on_nvidia() -> None:
    large, small = weight(QuantType.Q4_K, 14336, 4096), weight(QuantType.Q8_0, 576, 576)
    assert Whole.of(Target("cuda", "sm_90", 32, "mma"), 1, large, 896, 1) is not None
    assert Whole.of(Target("cuda", "sm_90", 32, "mma"), 1, small, 36, 1) is None
    assert Whole.of(Target("hip", "gfx942", 64, "mfma"), 1, large, 896, 1) is None
