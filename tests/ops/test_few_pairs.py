"""Products of few (token, slot) pairs with experts' matrices as whole numbers, `mul_mat_id_s8`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyllm.device.emulated import EmulatedDevice
from pyllm.kernel_check import Case, check_case
from pyllm.kernel_expert_cases import gated_mul_mat_id_case, mul_mat_id_case
from pyllm.ops.mul_mat_id import few_pairs_launch
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.product_tile import OTHERS_SHARED_KIB, SHARED_KIB
from pyllm.ops.product_whole import WHOLE_TYPES, WholeExperts, static_bytes_of_experts
from pyllm.quants import FORMATS, GPU_TYPES, QuantType
from pyllm.weight import Weight

NVIDIA = ("sm_80", "sm_86", "sm_90", "sm_120")


@pytest.fixture(params=["emulated-32"])
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(32, "mma")
    yield device
    device.close()


def without_limits(case: Case, blocks: int = 3, pairs: int = 32) -> Case:
    """The case by this kernel, however many pairs there are.

    Args:
        pairs: that a block holds at a time, at most.
    """

    def plan(target: Target, x: Any, experts: Any, *others: Any) -> list[KernelLaunch]:
        gate = len(others) == 5
        weight, up = others[0], others[gate]
        launch = few_pairs_launch(target, x, experts, weight, up, others[-1], int(gate))
        assert launch.source == "mul_mat_id_s8"
        *args, capacity, chunk = launch.args
        return [replace(launch, grid=(blocks,), args=(*args, np.int32(min(capacity, pairs)), chunk))]

    return replace(case, op=Op(case.op.name, case.op.reference, plan))


def check(device: EmulatedDevice, case: Case, repeats: int = 1) -> None:
    verdict = check_case(device, case, repeats=repeats)
    assert verdict.passed, verdict


def check_type(device: EmulatedDevice, qtype: QuantType, num_tokens: int) -> None:
    k = (5 if FORMATS[qtype].block_size == 256 else 9) * FORMATS[qtype].block_size
    check(device, without_limits(mul_mat_id_case(qtype, num_tokens, 6, 2, 35, k, 0, shared_input=num_tokens == 1)))


@pytest.mark.parametrize("qtype", sorted(WHOLE_TYPES), ids=lambda qtype: qtype.name)
def test_block_types(device: EmulatedDevice, qtype: QuantType) -> None:
    """Rows that are no multiple of a tile's; rows of several chunks."""
    check_type(device, qtype, 1)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "NVFP4", "IQ2_S", "IQ1_M"])
def test_more_tokens(device: EmulatedDevice, name: str) -> None:
    check_type(device, QuantType[name], 17)


@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0], ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("num_tokens", [1, 7, 19])
def test_gates(device: EmulatedDevice, qtype: QuantType, num_tokens: int) -> None:
    check(device, without_limits(gated_mul_mat_id_case(qtype, qtype, num_tokens, 0)), repeats=2)


@pytest.mark.parametrize("blocks", [1, 2, 50])
def test_more_pairs_than_a_block_holds(device: EmulatedDevice, blocks: int) -> None:
    """An expert with more pairs than a product has columns; rounds of one group and of several; blocks without any."""
    case = mul_mat_id_case(QuantType.Q4_K, 23, 5, 2, 20, 256, 0)
    check(device, without_limits(case, blocks, 8))
    check(device, without_limits(case, blocks, 19))
    check(device, without_limits(mul_mat_id_case(QuantType.Q8_0, 15, 3, 2, 20, 96, 0, shared_input=False), blocks, 8))


def run(device: EmulatedDevice, case: Case, x: np.ndarray, experts: np.ndarray, weight: Weight) -> np.ndarray:
    out = device.empty((len(x), experts.shape[1], weight.shape[1]), np.float32)
    arrays = device.upload(x), device.upload(experts)
    device.launch(case.op, *arrays, weight, None, out)
    return device.download(out)


def test_results_do_not_depend_on_other_tokens(device: EmulatedDevice) -> None:
    """All bits: alone, in other company, and where shares of warps begin elsewhere."""
    case = without_limits(mul_mat_id_case(QuantType.Q4_K, 19, 6, 2, 40, 1280, 0))
    x, experts, weight, *_ = case.draw(1)
    array, held = device.upload_weight(weight.array, weight.qtype, weight.shape)
    weight = replace(weight, qtype=held, array=array)
    together = run(device, case, x, experts, weight)
    for some in ([0], [5], [2, 10], [1, 3, 4, 6, 7, 8, 18]):
        assert (run(device, case, x[some], experts[some], weight) == together[some]).all()


@pytest.mark.parametrize("arch", NVIDIA)
def test_plans_fit(arch: str) -> None:
    target, limit = Target("cuda", arch, 32, "mma"), SHARED_KIB.get(arch, OTHERS_SHARED_KIB) << 10
    for qtype in GPU_TYPES - {QuantType.F32}:
        for rows, k in ((768, 2048), (2048, 768), (512, 2048), (2048, 512), (14336, 4096), (4096, 14336), (64, 96)):
            block = FORMATS[qtype]
            if k % block.block_size:
                continue
            packed = np.broadcast_to(np.uint8(0), (128, rows, k // block.block_size * block.block_bytes))
            weight = Weight("test", (128, rows, k), qtype, packed)
            for num_tokens in (1, 8, 64):
                for gate in (False, True):
                    whole = WholeExperts.of(target, num_tokens, 8 * num_tokens, weight, gate)
                    assert whole is None or qtype in WHOLE_TYPES
                    if whole is not None:
                        assert whole.shared_bytes(target, k) + static_bytes_of_experts(qtype) <= limit
                        assert whole.tokens <= whole.capacity <= 32
                        assert 0 <= whole.chunk * whole.chunks - k // whole.unit_k < whole.chunk
                    elif arch == "sm_90" and num_tokens > 1:
                        assert qtype not in WHOLE_TYPES or k > 4096
