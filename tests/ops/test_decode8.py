"""The decoders of rawkernels/quants: decode8 gives the reference's bits, decode8_half2 nearly those rounded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.kernel_samples import random_weight
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.quants import GPU_TYPES, QuantType, dequantize
from pyllm.weight import Weight

SOURCE = str(Path(__file__).with_name("decode8.cu"))
ROWS, COLUMNS = 33, 1280
SHARED = 16  # consecutive weights that have their scales in common, in every format
ULPS, SMALLEST = 1.5, 2.0**-20


def plan(target: Target, weight: Weight, run: int, out: Any) -> list[KernelLaunch]:
    entry = "decode_f32" if out.dtype == np.float32 else "decode_runs" if run else "decode_half2"
    args = (weight.array, out, np.int64(weight.row_bytes), np.int32(COLUMNS))
    defines = {"QTYPE": int(weight.qtype), "GROUPS": run}
    return [KernelLaunch(SOURCE, entry, (-(-COLUMNS // 256), ROWS), (32,), args, defines)]


def reference(weight: Weight, run: int, out: np.ndarray) -> None:
    values = dequantized(weight)
    out[...] = values.astype(np.float16).view(np.uint32) if out.dtype == np.uint32 else values


def dequantized(weight: Weight) -> np.ndarray:
    return weight.array if weight.qtype == QuantType.F32 else dequantize(weight.array, weight.qtype)


DECODE8 = Op("decode8", reference, plan)


def decoded(device: Device, weight: Weight, dtype: type, run: int = 0) -> np.ndarray:
    held = Weight(weight.name, weight.shape, weight.qtype, device.upload(weight.array))
    out = device.empty((ROWS, COLUMNS // 2 if dtype == np.uint32 else COLUMNS), dtype)
    device.launch(DECODE8, held, run, out)
    return device.download(out)


@pytest.mark.parametrize("qtype", sorted(GPU_TYPES), ids=lambda qtype: qtype.name)
def test_decode8(device: Device, qtype: QuantType) -> None:
    weight = random_weight(np.random.default_rng(int(qtype)), qtype, ROWS, COLUMNS)
    found, expected = decoded(device, weight, np.float32), dequantized(weight)
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize("qtype", sorted(GPU_TYPES), ids=lambda qtype: qtype.name)
def test_decode8_half2(device: Device, qtype: QuantType) -> None:
    weight = random_weight(np.random.default_rng(int(qtype)), qtype, ROWS, COLUMNS)
    expected = dequantized(weight).astype(np.float64)
    found = decoded(device, weight, np.uint32).view(np.float16).astype(np.float64)
    largest = np.abs(expected).reshape(-1, SHARED).max(axis=1).astype(np.float16)
    limit = np.maximum(ULPS * np.spacing(largest).astype(np.float64), SMALLEST)
    error = np.abs(found - expected).reshape(-1, SHARED).max(axis=1)
    assert (error <= limit).all(), (error / limit).max()
    if device.target is not None:
        run = 4 if qtype % 2 else 2
        assert (decoded(device, weight, np.uint32, run).view(np.float16) == found).all()
