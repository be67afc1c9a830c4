"""get_rows: pick rows of a matrix by index; packed rows are decoded on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.quants import QuantType, dequantize
from pyllm.weight import Weight

if TYPE_CHECKING:
    from pyllm.device import Device


def get_rows_ref(weight: Weight, ids: np.ndarray, scale: float, out: np.ndarray) -> None:
    if weight.qtype == QuantType.F32:
        out[...] = weight.array[ids]
    else:
        dequantize(weight.array[ids], weight.qtype, out=out)
    if scale != 1:
        out *= np.float32(scale)


def plan_get_rows(target: Target, weight: Weight, ids: Any, scale: float, out: Any) -> list[KernelLaunch]:
    require(out.shape[1] % 8 == 0, "get_rows", f"rows of {weight.name} are not a multiple of 8 long")
    grid = (out.shape[0], -(-out.shape[1] // (8 * 128)))
    args = (weight.array, ids, out, np.float32(scale), np.int64(weight.row_bytes), np.int32(out.shape[1]))
    return [KernelLaunch("get_rows", "get_rows", grid, (128,), args, {"QTYPE": int(weight.qtype)})]


GET_ROWS = Op("get_rows", get_rows_ref, plan_get_rows)


def get_rows(device: Device, weight: Weight, ids: Any, out: Any, scale: float = 1.0) -> None:
    """out[i] = scale * weight[ids[i]], the token embedding.

    Args:
        weight: [num_rows, row_elements], any block type.
        ids: [n] int32, each in 0..num_rows-1 (the executor checks token ids before it submits them).
        out: [n, row_elements] float32.
        scale: dimensionless factor, rounded to float32.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    require(len(weight.shape) == 2, "get_rows", f"weight {weight.name} is not a matrix")
    check_array("get_rows", "ids", ids, (None,), ("int32",))
    check_array("get_rows", "out", out, (ids.shape[0], weight.shape[1]), ("float32",))
    device.launch(GET_ROWS, weight, ids, float(scale), out)
