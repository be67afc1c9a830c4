"""mul_mat: activations times a weight matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import GemmLaunch, KernelLaunch, Op, Target
from pyllm.ops.product_tile import tile_launch
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

LIBRARY_WORK = 1 << 31  # multiply-adds; from there on the library gains more than its two further launches cost
LIBRARY_SCRATCH = 1 << 26  # decoded weights at a time

MAX_VEC_TOKENS = 8  # up to here reading the packed weights is what takes the time


def plan_mul_mat(target: Target, x: Any, weight: Weight, scratch: Any, out: Any) -> list[KernelLaunch | GemmLaunch]:
    (num_tokens, k), n = x.shape, out.shape[1]
    require(k % 8 == 0, "mul_mat", f"rows of {weight.name} are not a multiple of 8 long")
    if _uses_library(target, num_tokens, n, k):
        return _plan_library(x, weight, scratch, out)
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
    return [tile_launch(target, x, weight, out, n)]


def _uses_library(target: Target | None, num_tokens: int, n: int, k: int) -> bool:
    """Where decoding the weights to float16 and calling the library's product was measured to be faster than tiles:
    on NVIDIA, for products that outweigh two launches more. See BENCHMARKS.md."""
    return target is not None and target.vendor == "cuda" and num_tokens * n * k >= LIBRARY_WORK


def scratch_size(target: Target | None, num_tokens: int, weight: Weight) -> int:
    """float16 elements of scratch that `mul_mat` needs."""
    n, k = weight.shape
    if not _uses_library(target, num_tokens, n, k):
        return 0
    return (num_tokens + min(n, _rows_at_once(k))) * k


def _rows_at_once(k: int) -> int:
    return max(1, LIBRARY_SCRATCH // k)


def _plan_library(x: Any, weight: Weight, scratch: Any, out: Any) -> list[KernelLaunch | GemmLaunch]:
    """x and the weight as float16, the weight in pieces that fit into the scratch."""
    (num_tokens, k), n = x.shape, weight.shape[0]
    narrow = scratch[: num_tokens * k].reshape(num_tokens, k)
    launches: list[KernelLaunch | GemmLaunch] = [
        KernelLaunch(
            "decode_rows",
            "decode_rows",
            (-(-k // 1024), num_tokens),
            (128,),
            (x, narrow, np.int64(4 * k), np.int32(k)),
            {"QTYPE": int(QuantType.F32)},
        )
    ]
    for first in range(0, n, _rows_at_once(k)):
        rows = min(n - first, _rows_at_once(k))
        decoded = scratch[num_tokens * k : (num_tokens + rows) * k].reshape(rows, k)
        launches.append(
            KernelLaunch(
                "decode_rows",
                "decode_rows",
                (-(-k // 1024), rows),
                (128,),
                (weight.array[first : first + rows], decoded, np.int64(weight.row_bytes), np.int32(k)),
                {"QTYPE": int(weight.qtype)},
            )
        )
        launches.append(GemmLaunch(narrow, decoded, out, first))
    return launches


MUL_MAT = Op("mul_mat", mul_mat_ref, plan_mul_mat)


def mul_mat(device: Device, x: Any, weight: Weight, out: Any, scratch: Any = None) -> None:
    """out = x @ weight.T

    Args:
        x: [num_tokens, in_features] float32.
        weight: [out_features, in_features], any block type.
        out: [num_tokens, out_features] float32; must not overlap x.
        scratch: [scratch_size(...)] float16 or None when that is 0; overwritten.

    Numerics: sums in float32. Kernels for many tokens round x and the decoded weights to float16 first.

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
