"""mul_mat_id: each token times the matrices of the experts chosen for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import Op
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight

if TYPE_CHECKING:
    from pyllm.device import Device


def mul_mat_id_ref(x: np.ndarray, experts: np.ndarray, weight: Weight, out: np.ndarray) -> None:
    num_used = experts.shape[1]
    for expert in np.unique(experts):
        token, slot = np.nonzero(experts == expert)
        rows = x[token, slot if x.shape[1] == num_used else 0]
        packed = weight.array[expert]
        matrix = packed if weight.qtype == QuantType.F32 else dequantize(packed, weight.qtype)
        out[token, slot] = rows @ matrix.T


MUL_MAT_ID = Op("mul_mat_id", mul_mat_id_ref)


def mul_mat_id(device: Device, x: Any, experts: Any, weight: Weight, out: Any) -> None:
    """out[t, j] = x[t, j] @ weight[experts[t, j]].T

    Experts that no token chose are neither read nor decoded.

    Args:
        x: [num_tokens, num_used, in_features] float32; or [num_tokens, 1, in_features]: the same for all experts of a
            token.
        experts: [num_tokens, num_used] int32, each in 0..num_experts-1.
        weight: [num_experts, out_features, in_features], any block type.
        out: [num_tokens, num_used, out_features] float32; must not overlap x.

    Numerics: as mul_mat.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    require(len(weight.shape) == 3, "mul_mat_id", f"weight {weight.name} is not a stack of matrices")
    _, out_features, in_features = weight.shape
    check_array("mul_mat_id", "experts", experts, (None, None), ("int32",))
    num_tokens, num_used = experts.shape
    check_array("mul_mat_id", f"x (for {weight.name})", x, (num_tokens, None, in_features), ("float32",))
    require(
        x.shape[1] in (1, num_used), "mul_mat_id", f"x has {x.shape[1]} rows per token, {num_used} experts are used"
    )
    check_array("mul_mat_id", f"out (for {weight.name})", out, (num_tokens, num_used, out_features), ("float32",))
    device.launch(MUL_MAT_ID, x, experts, weight, out)
