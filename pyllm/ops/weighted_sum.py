"""weighted_sum: put the outputs of a token's experts together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def weighted_sum_ref(x: np.ndarray, weights: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
    total = np.einsum("tjd,tj->td", x, weights)
    out[...] = out + total if accumulate else total


def plan_weighted_sum(target: Target, x: Any, weights: Any, out: Any, accumulate: bool) -> list[KernelLaunch]:
    num_tokens, num_used, size = x.shape
    args = (x, weights, out, np.int32(num_used), np.int32(size))
    defines = {"X_F16": int(x.dtype == np.float16), "ADD": int(accumulate)}
    return [KernelLaunch("weighted_sum", "weighted_sum", (-(-size // 256), num_tokens), (256,), args, defines)]


WEIGHTED_SUM = Op("weighted_sum", weighted_sum_ref, plan_weighted_sum)


def weighted_sum(device: Device, x: Any, weights: Any, out: Any, accumulate: bool = False) -> None:
    """out[t] = sum over j of weights[t, j] * x[t, j], or out[t] += it.

    Args:
        x: [num_tokens, num_used, size] float32 or float16.
        weights: [num_tokens, num_used] float32.
        out: [num_tokens, size] float32.
        accumulate: add to out.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    check_array("weighted_sum", "x", x, (None, None, None), ("float32", "float16"))
    check_array("weighted_sum", "weights", weights, x.shape[:2], ("float32",))
    check_array("weighted_sum", "out", out, (x.shape[0], x.shape[2]), ("float32",))
    device.launch(WEIGHTED_SUM, x, weights, out, accumulate)
