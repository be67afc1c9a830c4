"""sigmoid_mul: the gate on the output of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def sigmoid_mul_ref(gate: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, 0
        np.divide(x, 1 + np.exp(-gate), out=out, casting="same_kind")


def plan_sigmoid_mul(target: Target, gate: Any, x: Any, out: Any) -> list[KernelLaunch]:
    vector = 1 if x.size % 8 else 8
    defines = {"X_F16": int(x.dtype == np.float16), "VEC": vector}
    args = (gate, x, out, np.int64(x.size))
    return [KernelLaunch("sigmoid_mul", "sigmoid_mul", (-(-x.size // (256 * vector)),), (256,), args, defines)]


SIGMOID_MUL = Op("sigmoid_mul", sigmoid_mul_ref, plan_sigmoid_mul)


def sigmoid_mul(device: Device, gate: Any, x: Any, out: Any) -> None:
    """out = sigmoid(gate) * x, element by element.

    Args:
        gate: [num_tokens, size] float32.
        x: [num_tokens, size] float32 or float16.
        out: like x; may be x itself.

    Numerics: float32, one rounding.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Qiu et al. 2025, arXiv:2505.06708 (gated attention).
    """
    check_array("sigmoid_mul", "x", x, (None, None), ("float32", "float16"))
    check_array("sigmoid_mul", "gate", gate, x.shape, ("float32",))
    check_array("sigmoid_mul", "out", out, x.shape, (x.dtype.name,))
    device.launch(SIGMOID_MUL, gate, x, out)
