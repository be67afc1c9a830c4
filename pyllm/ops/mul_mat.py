"""mul_mat: activations times a weight matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import GemmLaunch, KernelLaunch, Op, Target
from pyllm.ops.product_plan import Products, plan_products, products_scratch
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight

if TYPE_CHECKING:
    from pyllm.device import Device


def mul_mat_ref(x: np.ndarray, weight: Weight, scratch: np.ndarray | None, out: np.ndarray) -> None:
    if weight.qtype == QuantType.F32:
        np.matmul(x, weight.array.T, out=out)
        return
    rows = max(1, DECODED_AT_ONCE // weight.shape[1])
    for first in range(0, weight.shape[0], rows):
        part = dequantize(weight.array[first : first + rows], weight.qtype)
        out[:, first : first + rows] = x @ part.T


DECODED_AT_ONCE = 1 << 20  # elements: what the reference decodes stays in the caches until it is multiplied


def plan_mul_mat(target: Target, x: Any, weight: Weight, scratch: Any, out: Any) -> list[KernelLaunch | GemmLaunch]:
    require(x.shape[1] % 8 == 0, "mul_mat", f"rows of {weight.name} are not a multiple of 8 long")
    return plan_products(target, Products(x, [weight], out), scratch)


def scratch_size(target: Target | None, num_tokens: int, weight: Weight) -> int:
    """float16 elements of scratch that `mul_mat` needs for float32 activations."""
    return products_scratch(target, num_tokens, [weight], np.float32)


MUL_MAT = Op("mul_mat", mul_mat_ref, plan_mul_mat)


def mul_mat(device: Device, x: Any, weight: Weight, out: Any, scratch: Any = None) -> None:
    """out = x @ weight.T

    Args:
        x: [num_tokens, in_features] float32.
        weight: [out_features, in_features], any block type.
        out: [num_tokens, out_features] float32; must not overlap x.
        scratch: [scratch_size(...)] float16 or None when that is 0; overwritten.

    Numerics: sums in float32. Kernels round x and the decoded weights to float16 first, or x as `linear` says.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    require(len(weight.shape) == 2, "mul_mat", f"weight {weight.name} is not a matrix")
    out_features, in_features = weight.shape
    check_array("mul_mat", f"x (for {weight.name})", x, (None, in_features), ("float32",))
    check_array("mul_mat", f"out (for {weight.name})", out, (x.shape[0], out_features), ("float32",))
    if size := scratch_size(device.target, x.shape[0], weight):
        require(scratch is not None, "mul_mat", f"{weight.name} needs scratch")
        check_array("mul_mat", f"scratch (for {weight.name})", scratch, (size,), ("float16",))
    device.launch(MUL_MAT, x, weight, scratch, out)
