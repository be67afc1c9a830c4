"""gated_rms_norm: normalise each head, then gate it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, check_columns, require
from pyllm.ops.op import Op
from pyllm.ops.rms_norm import rms_norm_ref

if TYPE_CHECKING:
    from pyllm.device import Device


def gated_rms_norm_ref(x: np.ndarray, weight: np.ndarray, eps: float, gate: np.ndarray, out: np.ndarray) -> None:
    heads = x.reshape(len(x), -1, weight.shape[0])
    normed = np.empty_like(heads)
    rms_norm_ref(heads, weight, eps, normed, False)
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, 0
        silu = gate / (1 + np.exp(-gate))
    np.multiply(normed.reshape(x.shape), silu, out=out, casting="same_kind")


GATED_RMS_NORM = Op("gated_rms_norm", gated_rms_norm_ref)


def gated_rms_norm(device: Device, x: Any, weight: Any, eps: float, gate: Any, out: Any) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight * silu(gate), with the mean over each head.

    Args:
        x: [num_tokens, num_heads * head_dim] float32.
        weight: [head_dim] float32, the same for all heads.
        eps: dimensionless, inside the square root.
        gate: like x, rows with any stride.
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
    check_columns("gated_rms_norm", "gate", gate, x.shape[1], ("float32",))
    check_array("gated_rms_norm", "out", out, x.shape, ("float32", "float16"))
    device.launch(GATED_RMS_NORM, x, weight, float(eps), gate, out)
