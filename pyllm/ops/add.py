"""add: sums of activations, and of activations and a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def add_ref(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    np.add(x, y, out=out)


def plan_add(target: Target, x: Any, y: Any, out: Any) -> list[KernelLaunch]:
    args = (x, y, out, np.int64(x.size), np.int64(y.size))
    return [KernelLaunch("add", "add", (-(-x.size // 256),), (256,), args)]


ADD = Op("add", add_ref, plan_add)


def add(device: Device, x: Any, y: Any, out: Any) -> None:
    """out = x + y.

    Args:
        x: [num_tokens, size] float32.
        y: like x, or [size] float32: one bias for every row.
        out: like x; may be x or y.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    check_array("add", "x", x, (None, None), ("float32",))
    require(tuple(y.shape) in (tuple(x.shape), tuple(x.shape[1:])), "add", f"y has shape {tuple(y.shape)}")
    check_array("add", "y", y, y.shape, ("float32",))
    check_array("add", "out", out, x.shape, ("float32",))
    device.launch(ADD, x, y, out)
