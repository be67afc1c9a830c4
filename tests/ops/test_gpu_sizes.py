"""Ops at the sizes of real models, on a GPU: judged as the cases of `pyllm kernels test`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.device.gpu import import_cupy
from pyllm.kernel_attention_cases import attention_case
from pyllm.kernel_cases import top_k_case
from pyllm.kernel_check import Case, check_case, convert, expected, outputs_of
from pyllm.kernel_product_cases import mul_mat_case
from pyllm.kernel_samples import random_weight
from pyllm.quants import GPU_TYPES, QuantType
from pyllm.weight import Weight
from tests.ops.lives import LIVES, overwrite

pytestmark = pytest.mark.skipif("gpu" not in LIVES, reason="sizes of real models are for a GPU (make test-gpu)")


@pytest.fixture
def gpu() -> Iterator[Device]:
    device = LIVES["gpu"]()
    yield device
    device.close()


def check(gpu: Device, case: Case) -> None:
    verdict = check_case(gpu, case, repeats=3)
    assert verdict.passed, f"{case}: {verdict}"


@cache
def weight(qtype: QuantType) -> Weight:
    return random_weight(np.random.default_rng(int(qtype)), qtype, 4096, 4096)


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 64, 65, 2048])
@pytest.mark.parametrize("qtype", sorted(GPU_TYPES), ids=lambda qtype: qtype.name)
def test_mul_mat(gpu: Device, qtype: QuantType, num_tokens: int) -> None:
    check(gpu, mul_mat_case(qtype, num_tokens, 4096, 4096, weight(qtype)))


def test_a_library_product_comes_behind_what_is_queued(gpu: Device) -> None:
    """CuPy's own stream runs on while the device's is held: nothing of the product may be on it."""
    case = mul_mat_case(QuantType.Q8_0, 2048, 4096, 4096, weight(QuantType.Q8_0))
    arguments = case.draw(0)
    exact, limit = expected(case, arguments)
    on_device = convert(arguments, gpu.upload)
    gpu.launch(case.op, *on_device)  # kernels are loaded, and the library asks for memory: both wait for the whole GPU
    (out,) = outputs_of(case, on_device)
    overwrite(gpu, out, np.full(out.shape, np.nan, np.float32))
    gpu.synchronize()
    gate = gpu.gate()
    gpu.launch(case.op, *on_device)
    import_cupy().cuda.Stream.null.synchronize()
    gate.open()
    (found,) = (gpu.download(array) for array in outputs_of(case, on_device))
    assert np.abs(found - exact[0]).max() <= limit


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (9, 1)], ids=["group of 4", "group of 9"])
@pytest.mark.parametrize("new", [1, 2048])
def test_flash_attention(gpu: Device, new: int, num_heads: int, num_kv_heads: int) -> None:
    check(gpu, attention_case("f16", (8192,), (new,), num_heads, num_kv_heads, 128, page_size=64))


def test_flash_attention_of_many_sequences(gpu: Device) -> None:
    lengths = (8192, 1, 64, 65, 4097, 2048, 33, 8191)
    check(gpu, attention_case("f16", lengths, (1,) * 8, 8, 2, 128, page_size=64))
    check(gpu, attention_case("bf16", lengths, (7, 1, 64, 1, 129, 1, 33, 1), 8, 2, 128, page_size=64))


@pytest.mark.parametrize("k", [1, 64, 256])
@pytest.mark.parametrize("rows", [1, 8])
def test_top_k(gpu: Device, rows: int, k: int) -> None:
    check(gpu, top_k_case(rows, 151_936, k))
