"""gated_add: add the output of a shared expert, weighted by one gate per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def gated_add_ref(h: np.ndarray, weight: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    logits = h.astype(np.float32, copy=False) @ weight
    with np.errstate(over="ignore"):  # exp(-logits) = inf gives the right limit, 0
        out += x / (1 + np.exp(-logits))[:, None]


def plan_gated_add(target: Target, h: Any, weight: Any, x: Any, out: Any) -> list[KernelLaunch]:
    num_tokens, columns = out.shape
    defines = {"H_F16": int(h.dtype == np.float16), "X_F16": int(x.dtype == np.float16)}
    defines["VEC"] = 1 if h.shape[1] % 8 or columns % 8 else 8
    args = (h, weight, x, out, np.int32(h.shape[1]), np.int32(columns))
    return [KernelLaunch("gated_add", "gated_add", (num_tokens,), (256,), args, defines)]


GATED_ADD = Op("gated_add", gated_add_ref, plan_gated_add)


def gated_add(device: Device, h: Any, weight: Any, x: Any, out: Any) -> None:
    """out[t] += sigmoid(h[t] . weight) * x[t].

    Args:
        h: [num_tokens, size] float32 or float16, what the gate looks at.
        weight: [size] float32.
        x: [num_tokens, columns] float32 or float16.
        out: [num_tokens, columns] float32, changed.

    Numerics: the sum in float32.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: the shared expert of Qwen's mixtures of experts (Qwen2-MoE), arXiv:2407.10671.
    """
    check_array("gated_add", "h", h, (None, None), ("float32", "float16"))
    check_array("gated_add", "weight", weight, (h.shape[1],), ("float32",))
    check_array("gated_add", "x", x, (h.shape[0], None), ("float32", "float16"))
    check_array("gated_add", "out", out, x.shape, ("float32",))
    device.launch(GATED_ADD, h, weight, x, out)
