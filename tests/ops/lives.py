"""The lives in which an op can run on this machine. A test states a case once; it runs on each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.device.emulated import EmulatedDevice
from pyllm.device.gpu import GpuDevice
from pyllm.device.host import HostDevice
from pyllm.input_block import InputLayout, InputViews
from pyllm.ops.op import Op


class EmulatedLife(EmulatedDevice):
    """Skips the test at an op that has no kernel."""

    def launch(self, op: Op, *args: Any) -> None:
        if not self.runs(op):
            pytest.skip(f"op {op.name} has no kernel")
        super().launch(op, *args)


LIVES: dict[str, Callable[[], Device]] = {
    "cpu": lambda: HostDevice(poison=True),
    "emulated-32": lambda: EmulatedLife(32, "mma"),
    "emulated-32-wmma": lambda: EmulatedLife(32, "wmma"),
    "emulated-64": lambda: EmulatedLife(64, "mfma"),
}

if os.environ.get("PYLLM_TEST_GPU", "0") not in ("", "0"):  # make test-gpu; without a GPU its tests fail, and say why

    class GpuLife(GpuDevice):
        """Skips the test at an op that has no kernel."""

        def launch(self, op: Op, *args: Any) -> None:
            if not self.runs(op):
                pytest.skip(f"op {op.name} has no kernel")
            super().launch(op, *args)

    LIVES["gpu"] = lambda: GpuLife(poison=True)

SIZES = (1, 31, 32, 33, 63, 64, 65, 97, 257)


def on_device(device: Device, array: np.ndarray) -> Any:
    """A device copy of a host array."""
    return device.upload(np.ascontiguousarray(array))


def overwrite(device: Device, target: Any, values: np.ndarray) -> None:
    """Write host values over a device array, behind all queued work and before what comes."""
    with device.stream if isinstance(device, GpuDevice) else nullcontext():  # CuPy's own stream would not wait
        target[...] = on_device(device, values)


def input_views(device: Device, layout: InputLayout, **fields: Any) -> InputViews:
    """An input block on the device, as `copy_inputs` would leave it; fields that are not given are zero."""
    block = np.zeros(layout.num_bytes, np.uint8)
    views = layout.views(block)
    for name, values in fields.items():
        values = np.asarray(values)
        getattr(views, name)[tuple(slice(extent) for extent in values.shape)] = values
    return layout.views(device.upload(block))


def check_against_float64(found: np.ndarray, exact: np.ndarray, plain: np.ndarray, floor: float = 1e-7) -> None:
    """The error is at most twice that of a plain float32 computation, plus a floor relative to the largest value."""
    assert not np.isnan(found).any(), "an element was not written"
    limit = 2 * np.abs(plain - exact).max() + floor * max(1.0, float(np.abs(exact).max()))
    assert np.abs(found - exact).max() <= limit, (np.abs(found - exact).max(), limit)
