"""softcap: bound logits smoothly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def softcap_ref(x: np.ndarray, cap: float, out: np.ndarray) -> None:
    np.tanh(x / np.float32(cap), out=out)
    out *= np.float32(cap)


def plan_softcap(target: Target, x: Any, cap: float, out: Any) -> list[KernelLaunch]:
    args = (x, out, np.float32(cap), np.int64(x.size))
    return [KernelLaunch("softcap", "softcap", (-(-x.size // 1024),), (256,), args)]


SOFTCAP = Op("softcap", softcap_ref, plan_softcap)


def softcap(device: Device, x: Any, cap: float, out: Any) -> None:
    """out = cap * tanh(x / cap), element by element.

    Args:
        x: [rows, size] float32.
        cap: positive.
        out: like x; may be x.

    Raises:
        ShapeError: shapes or dtypes do not fit, or the cap is not positive.

    Source: Gemma Team 2024, arXiv:2408.00118.
    """
    check_array("softcap", "x", x, (None, None), ("float32",))
    check_array("softcap", "out", out, x.shape, ("float32",))
    require(cap > 0, "softcap", f"cap is {cap}")
    device.launch(SOFTCAP, x, float(cap), out)
