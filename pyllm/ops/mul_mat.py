"""mul_mat: activations times a weight matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight

if TYPE_CHECKING:
    from pyllm.device import Device


def mul_mat_ref(x: np.ndarray, weight: Weight, out: np.ndarray) -> None:
    matrix = weight.array if weight.qtype == QuantType.F32 else dequantize(weight.array, weight.qtype)
    np.matmul(x, matrix.T, out=out)


GPU_TYPES = frozenset(
    QuantType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)
"""Block types for which rawkernels/quants has a decoder."""

MAX_VEC_TOKENS = 8  # up to here reading the packed weights is what takes the time


def plan_mul_mat(target: Target, x: Any, weight: Weight, out: Any) -> list[KernelLaunch]:
    (num_tokens, k), n = x.shape, out.shape[1]
    require(k % 8 == 0, "mul_mat", f"rows of {weight.name} are not a multiple of 8 long")
    row_bytes, qtype = np.int64(weight.row_bytes), int(weight.qtype)
    if num_tokens <= MAX_VEC_TOKENS:
        warps = 128 // target.warp_size
        return [
            KernelLaunch(
                "mul_mat",
                "mul_mat_vec",
                (-(-n // warps),),
                (128,),
                (x, weight.array, out, row_bytes, np.int32(n), np.int32(k)),
                {"QTYPE": qtype, "TOKENS": num_tokens},
            )
        ]
    tile = 64 if num_tokens <= 64 or target.vendor == "host" else 128
    return [
        KernelLaunch(
            "mul_mat",
            "mul_mat_tile",
            (-(-n // tile), -(-num_tokens // tile)),
            (256,),
            (x, weight.array, out, row_bytes, np.int32(num_tokens), np.int32(n), np.int32(k)),
            {"QTYPE": qtype, "BM": tile, "BN": tile},
        )
    ]


MUL_MAT = Op("mul_mat", mul_mat_ref, plan_mul_mat)


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
