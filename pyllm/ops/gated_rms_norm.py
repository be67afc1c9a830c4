"""gated_rms_norm: normalise each head, then gate it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.columns import Columns, check_columns
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.rms_norm import rms_norm_ref

if TYPE_CHECKING:
    from pyllm.device import Device


def gated_rms_norm_ref(x: np.ndarray, weight: np.ndarray, eps: float, gate: Columns, out: np.ndarray) -> None:
    heads = x.reshape(len(x), -1, weight.shape[0])
    normed = np.empty_like(heads)
    rms_norm_ref(heads, weight, eps, normed, False)
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, 0
        silu = gate.view / (1 + np.exp(-gate.view))
    np.multiply(normed.reshape(x.shape), silu, out=out, casting="same_kind")


def plan_gated_rms_norm(target: Target, x: Any, weight: Any, eps: float, gate: Columns, out: Any) -> list[KernelLaunch]:
    num_tokens, size = x.shape
    head_dim = weight.shape[0]
    num_heads = size // head_dim
    sizes = (num_tokens * num_heads, num_heads, head_dim, gate.start, gate.row_size)
    args = (x, weight, gate.array, out, np.float32(eps), *map(np.int32, sizes))
    blocks = -(-num_tokens * num_heads // (256 // target.warp_size))
    vector = 1 if head_dim % 4 or gate.start % 4 or gate.row_size % 4 else 4
    defines = {"OUT_F16": int(out.dtype == np.float16), "VEC": vector}
    return [KernelLaunch("gated_rms_norm", "gated_rms_norm", (blocks,), (256,), args, defines)]


GATED_RMS_NORM = Op("gated_rms_norm", gated_rms_norm_ref, plan_gated_rms_norm)


def gated_rms_norm(device: Device, x: Any, weight: Any, eps: float, gate: Columns, out: Any) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight * silu(gate), with the mean over each head.

    Args:
        x: [num_tokens, num_heads * head_dim] float32.
        weight: [head_dim] float32, the same for all heads.
        eps: dimensionless, inside the square root.
        gate: like x.
        out: like x, or float16 (saturating); may be x itself.

    Numerics: float32, one rounding per element.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Yang et al. 2024, arXiv:2412.06464, the output of a Gated DeltaNet layer; norm first, then gate.
    """
    check_array("gated_rms_norm", "x", x, (None, None), ("float32",))
    check_array("gated_rms_norm", "weight", weight, (None,), ("float32",))
    head_dim = weight.shape[0]
    require(x.shape[1] % head_dim == 0, "gated_rms_norm", f"{x.shape[1]} columns are no heads of {head_dim}")
    check_columns("gated_rms_norm", "gate", gate, x.shape[0], x.shape[1])
    check_array("gated_rms_norm", "out", out, x.shape, ("float32", "float16"))
    device.launch(GATED_RMS_NORM, x, weight, float(eps), gate, out)
