"""decode_rows, the kernel before a library's product: every block type as float16, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight
from tests.ops.lives import on_device
from tests.ops.test_dense_ops import WEIGHT_TYPES, weight_on


def reference(weight: Weight, out: np.ndarray) -> None:
    values = weight.array if weight.qtype == QuantType.F32 else dequantize(weight.array, weight.qtype)
    out[...] = np.clip(values, -65504, 65504)


def plan(target: Target, weight: Weight, out: Any) -> list[KernelLaunch]:
    rows, k = weight.shape
    args = (weight.array, out, np.int64(weight.row_bytes), np.int32(k))
    return [KernelLaunch("decode_rows", "decode_rows", (-(-k // 1024), rows), (128,), args, {"QTYPE": weight.qtype})]


DECODE_ROWS = Op("decode_rows", reference, plan)


@pytest.mark.parametrize("qtype", WEIGHT_TYPES, ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("shape", [(1, 256), (33, 1280)])
def test_decode_rows(device: Device, shape: tuple[int, int], qtype: QuantType) -> None:
    weight, values = weight_on(device, qtype, *shape)
    for _ in range(20):
        out = device.empty(shape, np.float16)
        device.launch(DECODE_ROWS, weight, out)
        assert (device.download(out) == values.astype(np.float16)).all()


def test_values_beyond_float16_saturate(device: Device) -> None:
    values = np.array([[1e6, -1e6, 65504, 65519, 1, 0, -0.0, np.nan]], np.float32)
    out = device.empty((1, 8), np.float16)
    device.launch(DECODE_ROWS, Weight("test", (1, 8), QuantType.F32, on_device(device, values)), out)
    expected = np.array([[65504, -65504, 65504, 65504, 1, 0, 0, np.nan]], np.float16)
    assert np.array_equal(device.download(out), expected, equal_nan=True)
