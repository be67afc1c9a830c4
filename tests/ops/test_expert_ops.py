"""route, mul_mat_id and weighted_sum against their formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.errors import ShapeError
from pyllm.ops.group_experts import ExpertLists, group_experts
from pyllm.ops.mul_mat_id import expert_tile_rows, mul_mat_id
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


@pytest.mark.parametrize(("num_experts", "num_used"), [(1, 1), (8, 2), (128, 8), (60, 60), (512, 10)])
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


def half(array: np.ndarray) -> np.ndarray:
    """What float16 holds of an array."""
    return array.astype(np.float16).astype(np.float32)


def lists_for(device: Device, experts: np.ndarray, weight: Weight) -> ExpertLists | None:
    bm, num_experts = expert_tile_rows(device.target, experts.size, weight), weight.shape[0]
    if not bm:
        return None
    lists = ExpertLists(device.empty((ExpertLists.size(experts.size, num_experts, bm),), np.int32), bm)
    group_experts(device, on_device(device, experts), num_experts, lists)
    return lists


@pytest.mark.parametrize("qtype", [QuantType.F32, QuantType.Q8_0, QuantType.Q4_K], ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("shared_input", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_mul_mat_id(device: Device, num_tokens: int, qtype: QuantType, shared_input: bool) -> None:
    rng = np.random.default_rng(0)
    num_used, num_experts, rows, columns = 3, 7, 31, 256
    packed = packed_rows(qtype, num_experts * rows, columns).reshape(num_experts, rows, -1)
    values = dequantize(packed, qtype)
    shape = (num_experts, rows, columns)
    array, held = device.upload_weight(packed, qtype, shape)
    experts = np.stack([rng.permutation(6)[:num_used] for _ in range(num_tokens)]).astype(np.int32)  # nobody picks 6
    x = random((num_tokens, 1 if shared_input else num_used, columns), 2)
    weight = Weight("w", shape, held, array)
    lists = lists_for(device, experts, weight)
    results = []
    for _ in range(3):
        out = device.empty((num_tokens, num_used, rows), np.float32)
        args = on_device(device, x), on_device(device, experts), weight, out, lists
        mul_mat_id(device, *args)
        results.append(device.download(out))
    assert (results[1] == results[0]).all() and (results[2] == results[0]).all()
    wide = np.broadcast_to(x, (num_tokens, num_used, columns))
    exact = np.einsum("tjk,tjnk->tjn", wide.astype(np.float64), values[experts].astype(np.float64))
    if device.target is not None:
        wide, values = half(wide), half(values)
    plain = np.einsum("tjk,tjnk->tjn", wide, values[experts])
    check_against_float64(results[0], exact, plain, floor=1e-6)


def test_mul_mat_id_of_packed_weights(device: Device) -> None:
    """A device may hold packed blocks: the reference decodes them itself."""
    packed = packed_rows(QuantType.Q4_K, 2 * 8, 256).reshape(2, 8, -1)
    weight = Weight("packed", (2, 8, 256), QuantType.Q4_K, on_device(device, packed))
    x, out = random((1, 1, 256), 2), device.empty((1, 1, 8), np.float32)
    mul_mat_id(device, on_device(device, x), on_device(device, np.array([[1]], np.int32)), weight, out)
    expected = x[0] @ dequantize(packed[1], QuantType.Q4_K).T
    assert np.abs(device.download(out)[0] - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_experts_that_do_not_exist_are_not_read(device: Device, num_tokens: int) -> None:
    """`route` cannot give such a number; damaged memory could. Other pairs are not affected."""
    if device.target is None:
        pytest.skip("NumPy refuses such an index")
    rows, columns, num_experts = 8, 64, 3
    values = half(random((num_experts, rows, columns), 5))
    weight = Weight("w", values.shape, QuantType.F32, on_device(device, values))
    experts = np.resize(np.array([2, 0, 1, 1], np.int32), (num_tokens, 2))
    experts[0] = [2, 1 << 30]
    if num_tokens > 1:
        experts[-1] = [-5, 3]
    x, out = half(random((num_tokens, 1, columns), 6)), device.empty((num_tokens, 2, rows), np.float32)
    lists = lists_for(device, experts, weight)
    mul_mat_id(device, on_device(device, x), on_device(device, experts), weight, out, lists)
    found = device.download(out)
    for token, slot in zip(*np.nonzero((experts >= 0) & (experts < num_experts)), strict=True):
        expected = values[experts[token, slot]] @ x[token, 0]
        assert np.abs(found[token, slot] - expected).max() < 1e-4


@pytest.mark.parametrize("bm", [32, 64])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_used"), [(1, 1, 1), (33, 7, 3), (257, 128, 8), (65, 512, 2)]
)
def test_group_experts(device: Device, num_tokens: int, num_experts: int, num_used: int, bm: int) -> None:
    rng = np.random.default_rng(num_tokens)
    experts = rng.integers(0, max(1, num_experts // 2), (num_tokens, num_used), np.int32)
    lists = ExpertLists(device.empty((ExpertLists.size(experts.size, num_experts, bm),), np.int32), bm)
    group_experts(device, on_device(device, experts), num_experts, lists)
    found, flat = device.download(lists.array), experts.reshape(-1)
    starts, (num_tiles,), pairs, tiles = np.split(found, np.cumsum([num_experts + 1, 1, experts.size]))
    assert pairs.tolist() == sorted(range(experts.size), key=lambda pair: flat[pair])
    assert starts.tolist() == [int((flat < expert).sum()) for expert in range(num_experts + 1)]
    expected = [[e, first] for e in range(num_experts) for first in range(starts[e], starts[e + 1], bm)]
    assert tiles[: 2 * num_tiles].reshape(-1, 2).tolist() == expected
    assert len(expected) <= ExpertLists.max_tiles(experts.size, num_experts, bm)


@pytest.mark.parametrize("size", [1, 65, 256])
def test_weighted_sum(device: Device, size: int) -> None:
    x, weights = random((5, 3, size), 3), random((5, 3), 4)
    out = device.empty((5, size), np.float32)
    weighted_sum(device, on_device(device, x), on_device(device, weights), out)
    exact = (x.astype(np.float64) * weights[..., None]).sum(axis=1)
    check_against_float64(device.download(out), exact, (x * weights[..., None]).sum(axis=1))
    before = device.download(out)
    weighted_sum(device, on_device(device, x), on_device(device, weights), out, accumulate=True)
    assert np.abs(device.download(out) - 2 * before).max() <= 1e-6 * np.abs(before).max()


def test_weighted_sum_of_float16(device: Device) -> None:
    x, weights = random((5, 3, 65), 3).astype(np.float16), random((5, 3), 4)
    out = device.empty((5, 65), np.float32)
    weighted_sum(device, on_device(device, x), on_device(device, weights), out)
    exact = (x.astype(np.float64) * weights[..., None]).sum(axis=1)
    check_against_float64(device.download(out), exact, (x.astype(np.float32) * weights[..., None]).sum(axis=1))


def test_wrong_arguments_are_named(device: Device) -> None:
    with pytest.raises(ShapeError, match="5 of 4 experts"):
        route(device, device.empty((1, 4), "f4"), device.empty((1, 5), "i4"), device.empty((1, 5), "f4"))
    weight = Weight("w", (2, 3, 4), QuantType.F32, device.empty((2, 3, 4), "f4"))
    experts, out = device.empty((1, 3), "i4"), device.empty((1, 3, 3), "f4")
    with pytest.raises(ShapeError, match="2 rows per token, 3 experts"):
        mul_mat_id(device, device.empty((1, 2, 4), "f4"), experts, weight, out)
