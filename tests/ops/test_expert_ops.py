"""route, mul_mat_id and weighted_sum against their formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.errors import ShapeError
from pyllm.ops.mul_mat_id import mul_mat_id
from pyllm.ops.route import route
from pyllm.ops.weighted_sum import weighted_sum
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight
from tests.ops.lives import check_against_float64, on_device
from tests.ops.test_dense_ops import packed_rows, random


def routed(device: Device, logits: np.ndarray, num_used: int) -> tuple[np.ndarray, np.ndarray]:
    experts, weights = (
        device.empty((len(logits), num_used), np.int32),
        device.empty((len(logits), num_used), np.float32),
    )
    route(device, on_device(device, logits), experts, weights)
    return device.download(experts), device.download(weights)


@pytest.mark.parametrize(("num_experts", "num_used"), [(1, 1), (8, 2), (128, 8), (60, 60)])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_route(device: Device, num_tokens: int, num_experts: int, num_used: int) -> None:
    logits = random((num_tokens, num_experts), 1) * 3
    experts, weights = routed(device, logits, num_used)
    probability = np.exp(logits.astype(np.float64))
    probability /= probability.sum(axis=-1, keepdims=True)
    for token in range(num_tokens):
        best = sorted(range(num_experts), key=lambda e: -probability[token, e])[:num_used]
        assert experts[token].tolist() == best
        expected = probability[token, best] / probability[token, best].sum()
        assert np.abs(weights[token] - expected).max() < 1e-6


def test_route_with_equal_and_extreme_logits(device: Device) -> None:
    logits = np.array([[1, 2, 2, 1], [-1e30, 1e30, 0, 0], [0, 0, 0, 0]], np.float32)
    experts, weights = routed(device, logits, 2)
    assert experts.tolist() == [[1, 2], [1, 0], [0, 1]]
    assert np.allclose(weights, [[0.5, 0.5], [1, 0], [0.5, 0.5]])


@pytest.mark.parametrize("qtype", [QuantType.F32, QuantType.Q8_0, QuantType.Q4_K], ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("shared_input", [True, False])
@pytest.mark.parametrize("held_packed", [True, False])
def test_mul_mat_id(device: Device, qtype: QuantType, shared_input: bool, held_packed: bool) -> None:
    rng = np.random.default_rng(0)
    num_tokens, num_used, num_experts, rows, columns = 33, 3, 7, 31, 256
    packed = packed_rows(qtype, num_experts * rows, columns).reshape(num_experts, rows, -1)
    values = dequantize(packed, qtype).astype(np.float64)
    shape = (num_experts, rows, columns)
    array, held = device.upload_weight(packed, qtype, shape)
    if held_packed and qtype != QuantType.F32:
        array, held = on_device(device, packed), qtype
    experts = np.stack([rng.permutation(6)[:num_used] for _ in range(num_tokens)]).astype(np.int32)  # nobody picks 6
    x = random((num_tokens, 1 if shared_input else num_used, columns), 2)
    out = device.empty((num_tokens, num_used, rows), np.float32)
    mul_mat_id(device, on_device(device, x), on_device(device, experts), Weight("w", shape, held, array), out)
    wide = np.broadcast_to(x, (num_tokens, num_used, columns)).astype(np.float64)
    exact = np.einsum("tjk,tjnk->tjn", wide, values[experts])
    plain = np.einsum("tjk,tjnk->tjn", wide.astype(np.float32), values[experts].astype(np.float32))
    check_against_float64(device.download(out), exact, plain, floor=1e-6)


@pytest.mark.parametrize("size", [1, 65, 256])
def test_weighted_sum(device: Device, size: int) -> None:
    x, weights = random((5, 3, size), 3), random((5, 3), 4)
    out = device.empty((5, size), np.float32)
    weighted_sum(device, on_device(device, x), on_device(device, weights), out)
    exact = (x.astype(np.float64) * weights[..., None]).sum(axis=1)
    check_against_float64(device.download(out), exact, (x * weights[..., None]).sum(axis=1))


def test_wrong_arguments_are_named(device: Device) -> None:
    with pytest.raises(ShapeError, match="5 of 4 experts"):
        route(device, device.empty((1, 4), "f4"), device.empty((1, 5), "i4"), device.empty((1, 5), "f4"))
    weight = Weight("w", (2, 3, 4), QuantType.F32, device.empty((2, 3, 4), "f4"))
    experts, out = device.empty((1, 3), "i4"), device.empty((1, 3, 3), "f4")
    with pytest.raises(ShapeError, match="2 rows per token, 3 experts"):
        mul_mat_id(device, device.empty((1, 2, 4), "f4"), experts, weight, out)
