"""mul_mat: activations times a weight matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import Op
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight

if TYPE_CHECKING:
    from pyllm.device import Device


def mul_mat_ref(x: np.ndarray, weight: Weight, out: np.ndarray) -> None:
    matrix = weight.array if weight.qtype == QuantType.F32 else dequantize(weight.array, weight.qtype)
    np.matmul(x, matrix.T, out=out)


MUL_MAT = Op("mul_mat", mul_mat_ref)


def mul_mat(device: Device, x: Any, weight: Weight, out: Any) -> None:
    """out = x @ weight.T

    Args:
        x: [num_tokens, in_features] float32.
        weight: [out_features, in_features], any block type.
        out: [num_tokens, out_features] float32; must not overlap x.

    Numerics: products and sums in float32 of the decoded weights.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    require(len(weight.shape) == 2, "mul_mat", f"weight {weight.name} is not a matrix")
    out_features, in_features = weight.shape
    check_array("mul_mat", f"x (for {weight.name})", x, (None, in_features), ("float32",))
    check_array("mul_mat", f"out (for {weight.name})", out, (x.shape[0], out_features), ("float32",))
    device.launch(MUL_MAT, x, weight, out)
