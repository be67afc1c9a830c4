"""get_rows, take_rows, rms_norm, mul_mat, silu_mul, add against their formulas in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.errors import ShapeError
from pyllm.kernel_samples import random_weight
from pyllm.ops.add import add
from pyllm.ops.gelu_mul import gelu_mul
from pyllm.ops.get_rows import get_rows
from pyllm.ops.linear import linear
from pyllm.ops.mul_mat import mul_mat, scratch_size
from pyllm.ops.product_plan import Norm
from pyllm.ops.rms_norm import rms_norm
from pyllm.ops.silu_mul import silu_mul
from pyllm.ops.softcap import softcap
from pyllm.ops.take_rows import take_rows
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight
from tests.ops.lives import SIZES, check_against_float64, on_device

WEIGHT_TYPES = [QuantType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")]


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def packed_rows(qtype: QuantType, rows: int, row_elements: int) -> np.ndarray:
    """Rows of a type as a file stores them, with values of usual size."""
    return random_weight(np.random.default_rng(int(qtype)), qtype, rows, row_elements).array.view(np.uint8)


def weight_on(device: Device, qtype: QuantType, rows: int, row_elements: int) -> tuple[Weight, np.ndarray]:
    """A weight as the device holds it, and its values."""
    packed = packed_rows(qtype, rows, row_elements)
    array, held = device.upload_weight(packed, qtype, (rows, row_elements))
    return Weight("test", (rows, row_elements), held, array), dequantize(packed, qtype)


def multiply(device: Device, x: Any, weight: Weight, out: Any) -> None:
    """mul_mat with the scratch that it needs."""
    size = scratch_size(device.target, x.shape[0], weight)
    mul_mat(device, x, weight, out, device.empty((size,), np.float16) if size else None)


def plain_product(device: Device, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """x @ values.T as a plain implementation computes it: in float32; on devices with kernels, operands are rounded to
    f16 for the matrix instructions."""
    if device.target is not None:
        x, values = (array.astype(np.float16).astype(np.float32) for array in (x, values))
    return np.array([[np.add.reduce(row * column) for column in values] for row in x])


@pytest.mark.parametrize("qtype", WEIGHT_TYPES, ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 33])
def test_mul_mat(device: Device, qtype: QuantType, num_tokens: int) -> None:
    weight, values = weight_on(device, qtype, 97, 512)
    x = random((num_tokens, 512))
    out = device.empty((num_tokens, 97), np.float32)
    multiply(device, on_device(device, x), weight, out)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    check_against_float64(device.download(out), exact, plain_product(device, x, values), floor=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_mul_mat_sizes(device: Device, size: int) -> None:
    weight, values = weight_on(device, QuantType.F32, size, 72)
    x = random((size, 72), 1)
    out = device.empty((size, size), np.float32)
    multiply(device, on_device(device, x), weight, out)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    check_against_float64(device.download(out), exact, plain_product(device, x, values), floor=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 2.0**-8, 2.0**8, 1e12])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_mul_mat_of_small_and_large_values(device: Device, num_tokens: int, scale: float) -> None:
    if device.target is not None and not 1e-4 < scale < 1e4:
        pytest.skip("kernels round activations to float16, which does not hold such values")
    weight, values = weight_on(device, QuantType.Q8_0, 33, 512)
    x = random((num_tokens, 512)) * np.float32(scale)
    out = device.empty((num_tokens, 33), np.float32)
    mul_mat(device, on_device(device, x), weight, out)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    check_against_float64(
        device.download(out) / scale, exact / scale, plain_product(device, x, values) / scale, floor=1e-6
    )


@pytest.mark.parametrize("size", SIZES)
def test_get_rows_sizes(device: Device, size: int) -> None:
    weight, values = weight_on(device, QuantType.Q4_0, size, 8 * 32)
    ids = np.arange(size, dtype=np.int32)[::-1]
    out = device.empty((size, 8 * 32), np.float32)
    get_rows(device, weight, on_device(device, ids), out)
    assert (device.download(out) == values[ids]).all()


@pytest.mark.parametrize("qtype", WEIGHT_TYPES, ids=lambda qtype: qtype.name)
def test_get_rows_is_exact(device: Device, qtype: QuantType) -> None:
    weight, values = weight_on(device, qtype, 33, 256)
    ids = np.array([0, 32, 5, 5, 31], np.int32)
    out = device.empty((5, 256), np.float32)
    get_rows(device, weight, on_device(device, ids), out)
    assert (device.download(out) == values[ids]).all()


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_activations_beyond_float16_stay_finite(device: Device, num_tokens: int) -> None:
    weight, values = weight_on(device, QuantType.F32, 8, 64)
    x = random((num_tokens, 64), 5)
    x[:, 3] = 1e5
    out = device.empty((num_tokens, 8), np.float32)
    multiply(device, on_device(device, x), weight, out)
    found = device.download(out)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    assert np.isfinite(found).all()
    assert (np.sign(found) == np.sign(exact)).all()


def test_packed_weights_give_what_expanded_ones_give(device: Device) -> None:
    """A device may hold packed blocks: the reference of both ops decodes them itself."""
    packed = packed_rows(QuantType.Q4_K, 8, 256)
    weight = Weight("packed", (8, 256), QuantType.Q4_K, on_device(device, packed))
    ids, x = np.array([7, 0], np.int32), random((3, 256))
    rows, out = device.empty((2, 256), np.float32), device.empty((3, 8), np.float32)
    get_rows(device, weight, on_device(device, ids), rows)
    multiply(device, on_device(device, x), weight, out)
    values = dequantize(packed, QuantType.Q4_K)
    assert (device.download(rows) == values[ids]).all()
    exact = x.astype(np.float64) @ values.T.astype(np.float64)
    check_against_float64(device.download(out), exact, plain_product(device, x, values), 1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_take_rows(device: Device, size: int) -> None:
    x, ids = random((33, size)), np.array([32, 0, 7, 7], np.int32)
    out = device.empty((4, size), np.float32)
    take_rows(device, on_device(device, x), on_device(device, ids), out)
    assert (device.download(out) == x[ids]).all()


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e4, 1e12])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(device: Device, size: int, scale: float) -> None:
    x, weight = random((3, size), 2) * np.float32(scale), random((size,), 3)
    out = device.empty(x.shape, np.float32)
    rms_norm(device, on_device(device, x), on_device(device, weight), 1e-5, out)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + 1e-5) * weight
    plain = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-5)) * weight
    check_against_float64(device.download(out), exact, plain)


@pytest.mark.parametrize("size", [65, 128])
def test_rms_norm_adds_to_its_output(device: Device, size: int) -> None:
    x, total, weight = random((5, size), 4), random((5, size), 5), random((size,), 6)
    out = on_device(device, total)
    rms_norm(device, on_device(device, x), on_device(device, weight), 1e-6, out, accumulate=True)
    norm = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-6) * weight
    assert np.abs(device.download(out) - (total + norm)).max() < 1e-5


@pytest.mark.parametrize("size", [65, 128])
def test_rms_norm_rounds_once_to_float16(device: Device, size: int) -> None:
    x, weight = random((5, size), 4), random((size,), 6)
    weight[3] = 1e9
    out = device.empty(x.shape, np.float16)
    rms_norm(device, on_device(device, x), on_device(device, weight), 1e-6, out)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-6) * weight
    found = device.download(out).astype(np.float64)
    limits = np.clip(exact, -65504, 65504)
    if device.target is not None:  # the host's float16 becomes infinite; kernels saturate
        assert np.abs(found[:, 3]).max() == 65504
    rest = np.arange(size) != 3
    assert np.abs((found - limits) / limits)[:, rest].max() < 2.0**-10


def test_rms_norm_of_heads_in_place(device: Device) -> None:
    x, weight = random((5, 3, 32), 7), random((32,), 8)
    heads = on_device(device, x)
    rms_norm(device, heads, on_device(device, weight), 1e-6, heads)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-6) * weight
    assert np.abs(device.download(heads) - exact).max() < 1e-5


def test_rms_norm_of_zeros_is_zero(device: Device) -> None:
    out = device.empty((2, 64), np.float32)
    rms_norm(device, on_device(device, np.zeros((2, 64), np.float32)), on_device(device, random((64,))), 1e-6, out)
    assert (device.download(out) == 0).all()


@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(device: Device, size: int) -> None:
    gate, up = random((3, size), 9) * 4, random((3, size), 10)
    out = device.empty(gate.shape, np.float32)
    silu_mul(device, on_device(device, gate), on_device(device, up), out)
    wide = gate.astype(np.float64)
    exact = wide / (1 + np.exp(-wide)) * up
    plain = gate / (1 + np.exp(-gate)) * up
    check_against_float64(device.download(out), exact, plain)


def test_silu_mul_at_the_ends_of_the_range(device: Device) -> None:
    gate = np.array([[-np.float32(3e38), -200, -100, 0, 100, 3e38]], np.float32)
    out = on_device(device, gate)
    silu_mul(device, out, on_device(device, np.ones_like(gate)), out)
    assert np.allclose(device.download(out), [[0, 0, 0, 0, 100, 3e38]], atol=1e-30)


@pytest.mark.parametrize("size", SIZES)
def test_gelu_mul(device: Device, size: int) -> None:
    gate, up = random((3, size), 11) * 4, random((3, size), 12)
    out = device.empty(gate.shape, np.float32)
    gelu_mul(device, on_device(device, gate), on_device(device, up), out)

    def formula(g: np.ndarray) -> np.ndarray:
        return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi).astype(g.dtype) * (g + g.dtype.type(0.044715) * g**3)))

    check_against_float64(device.download(out), formula(gate.astype(np.float64)) * up, formula(gate) * up)


def test_gelu_mul_at_the_ends_of_the_range(device: Device) -> None:
    out = on_device(device, np.array([[-3e38, -1e13, -50, 0, 50, 1e13]], np.float32))
    gelu_mul(device, out, on_device(device, np.ones((1, 6), np.float32)), out)
    assert np.allclose(device.download(out), [[0, 0, 0, 0, 50, 1e13]])


@pytest.mark.parametrize("size", SIZES)
def test_softcap(device: Device, size: int) -> None:
    x = random((3, size), 13) * 50
    out = device.empty(x.shape, np.float32)
    softcap(device, on_device(device, x), 30.0, out)
    exact = 30 * np.tanh(x.astype(np.float64) / 30)
    check_against_float64(device.download(out), exact, np.float32(30) * np.tanh(x / np.float32(30)))


def test_get_rows_scales(device: Device) -> None:
    weight, values = weight_on(device, QuantType.Q8_0, 4, 64)
    out = device.empty((2, 64), np.float32)
    get_rows(device, weight, on_device(device, np.array([3, 1], np.int32)), out, scale=25.3)
    assert (device.download(out) == values[[3, 1]] * np.float32(25.3)).all()


def test_softcap_at_the_ends_of_the_range(device: Device) -> None:
    out = on_device(device, np.array([[-3e38, -1e4, -1e-30, 0, 1e-30, 1e4, 3e38]], np.float32))
    softcap(device, out, 30.0, out)
    assert np.allclose(device.download(out), [[-30, -30, 0, 0, 0, 30, 30]])


@pytest.mark.parametrize("size", SIZES)
def test_add(device: Device, size: int) -> None:
    x, y, bias = random((5, size)), random((5, size), 1), random((size,), 2)
    out = device.empty(x.shape, np.float32)
    add(device, on_device(device, x), on_device(device, y), out)
    assert (device.download(out) == x + y).all()
    add(device, out, on_device(device, bias), out)
    assert (device.download(out) == x + y + bias).all()


def test_wrong_arguments_are_named(device: Device) -> None:
    x, out = device.empty((2, 8), np.float32), device.empty((2, 4), np.float32)
    weight, _ = weight_on(device, QuantType.F32, 5, 8)
    with pytest.raises(ShapeError, match=r"mul_mat: out \(for test\) has shape \(2, 4\), expected \(2, 5\)"):
        mul_mat(device, x, weight, out)
    with pytest.raises(ShapeError, match="rms_norm: weight is float64, expected float32"):
        rms_norm(device, x, device.empty((8,), np.float64), 1e-6, x)
    with pytest.raises(ShapeError, match="silu_mul: up is not C-contiguous"):
        silu_mul(device, out, device.empty((4, 2), np.float32).T, out)
    with pytest.raises(ShapeError, match="rms_norm: out is float16, expected float32"):
        rms_norm(device, x, device.empty((8,), np.float32), 1e-6, device.empty((2, 8), np.float16), accumulate=True)
    wide = device.empty((2, 5), np.float16)
    with pytest.raises(ShapeError, match=r"linear: out \(for test\) is float16, expected float32"):
        linear(device, x, [weight], wide, bias=device.empty((5,), np.float32))
    with pytest.raises(ShapeError, match="linear: x is float16, expected float32"):
        norm = Norm(device.empty((8,), np.float32), 1e-6)
        linear(device, device.empty((2, 8), np.float16), [weight], device.empty((2, 5), np.float32), norm=norm)
