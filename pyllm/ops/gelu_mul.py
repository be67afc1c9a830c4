"""gelu_mul: the gate of a GEGLU feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device

SQRT_2_OVER_PI = 0.7978845608028654
CUBIC = 0.044715


def gelu_mul_ref(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> None:
    if gate.dtype == np.float16:
        gate = gate.astype(np.float32)
    with np.errstate(over="ignore"):  # an infinite cube gives the right limits of tanh
        inner = np.float32(SQRT_2_OVER_PI) * (gate + np.float32(CUBIC) * gate * gate * gate)
    gelu = np.float32(0.5) * gate * (1 + np.tanh(inner))
    np.multiply(gelu, up, out=out)


def plan_gelu_mul(target: Target, gate: Any, up: Any, out: Any) -> list[KernelLaunch]:
    args = (gate, up, out, np.int64(gate.size))
    defines = {"GATE": 2, "IN_F16": int(gate.dtype == np.float16), "OUT_F16": int(out.dtype == np.float16)}
    return [KernelLaunch("gate_mul", "gate_mul", (-(-gate.size // 2048),), (256,), args, defines)]


GELU_MUL = Op("gelu_mul", gelu_mul_ref, plan_gelu_mul)


def gelu_mul(device: Device, gate: Any, up: Any, out: Any) -> None:
    """out = gelu(gate) * up, with gelu(g) = 0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g³))).

    Args:
        gate, up: [num_tokens, feed_forward_length] float32, or both float16.
        out: like gate, float32 or float16 (saturating); may be gate or up where the types agree.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415, the tanh form; gating: Shazeer 2020, arXiv:2002.05202.
    """
    check_array("gelu_mul", "gate", gate, (None, None), ("float32", "float16"))
    check_array("gelu_mul", "up", up, gate.shape, (gate.dtype.name,))
    check_array("gelu_mul", "out", out, gate.shape, ("float32", "float16"))
    device.launch(GELU_MUL, gate, up, out)
