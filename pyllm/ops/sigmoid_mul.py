"""sigmoid_mul: the gate on the output of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, check_columns
from pyllm.ops.op import Op

if TYPE_CHECKING:
    from pyllm.device import Device


def sigmoid_mul_ref(gate: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, 0
        np.divide(x, 1 + np.exp(-gate), out=out, casting="same_kind")


SIGMOID_MUL = Op("sigmoid_mul", sigmoid_mul_ref)


def sigmoid_mul(device: Device, gate: Any, x: Any, out: Any) -> None:
    """out = sigmoid(gate) * x, element by element.

    Args:
        gate: [num_tokens, size] float32, rows with any stride.
        x: [num_tokens, size] float32 or float16.
        out: like x; may be x itself.

    Numerics: float32, one rounding.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Qiu et al. 2025, arXiv:2505.06708 (gated attention).
    """
    check_array("sigmoid_mul", "x", x, (None, None), ("float32", "float16"))
    check_columns("sigmoid_mul", "gate", gate, x.shape[1], ("float32",))
    check_array("sigmoid_mul", "out", out, x.shape, (x.dtype.name,))
    device.launch(SIGMOID_MUL, gate, x, out)
