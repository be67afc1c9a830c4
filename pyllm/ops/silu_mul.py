"""silu_mul: the gate of a SwiGLU feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def silu_mul_ref(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> None:
    if gate.dtype == np.float16:
        gate = gate.astype(np.float32)
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, 0
        sigmoid = 1 / (1 + np.exp(-gate))
    np.multiply(gate * sigmoid, up, out=out)


def plan_silu_mul(target: Target, gate: Any, up: Any, out: Any) -> list[KernelLaunch]:
    args = (gate, up, out, np.int64(gate.size))
    defines = {"GATE": 1, "IN_F16": int(gate.dtype == np.float16), "OUT_F16": int(out.dtype == np.float16)}
    return [KernelLaunch("gate_mul", "gate_mul", (-(-gate.size // 2048),), (256,), args, defines)]


SILU_MUL = Op("silu_mul", silu_mul_ref, plan_silu_mul)


def silu_mul(device: Device, gate: Any, up: Any, out: Any) -> None:
    """out = gate * sigmoid(gate) * up, element by element.

    Args:
        gate, up: [num_tokens, feed_forward_length] float32, or both float16.
        out: like gate, float32 or float16 (saturating); may be gate or up where the types agree.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).
    """
    check_array("silu_mul", "gate", gate, (None, None), ("float32", "float16"))
    check_array("silu_mul", "up", up, gate.shape, (gate.dtype.name,))
    check_array("silu_mul", "out", out, gate.shape, ("float32", "float16"))
    device.launch(SILU_MUL, gate, up, out)
