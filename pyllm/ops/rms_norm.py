"""rms_norm: root-mean-square layer normalisation, with the residual addition that precedes it in most models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def rms_norm_ref(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, delta: np.ndarray | None) -> None:
    if delta is not None:
        x += delta
    mean_square = np.einsum("...i,...i->...", x, x) / np.float32(x.shape[-1])
    np.multiply(x, (1 / np.sqrt(mean_square + np.float32(eps)))[..., None], out=out)
    out *= weight


def plan_rms_norm(target: Target, x: Any, weight: Any, eps: float, out: Any, delta: Any) -> list[KernelLaunch]:
    size = x.shape[-1]
    args = (x, x if delta is None else delta, weight, out, np.float32(eps), np.int32(size))
    defines = {"HAS_DELTA": int(delta is not None)}
    return [KernelLaunch("rms_norm", "rms_norm", (x.size // size,), (256,), args, defines)]


RMS_NORM = Op("rms_norm", rms_norm_ref, plan_rms_norm)


def rms_norm(device: Device, x: Any, weight: Any, eps: float, out: Any, delta: Any = None) -> None:
    """Normalise each row: out = x / sqrt(mean(x²) + eps) * weight; with `delta`, first x += delta.

    Args:
        x: [..., size] float32, rows along the last axis; changed when `delta` is given.
        weight: [size] float32.
        eps: dimensionless, inside the square root.
        out: like x; may be x itself when `delta` is None.
        delta: like x or None, the output of the block before, added to the residual stream x.

    Numerics: sums in float32, one rounding per element.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    check_array("rms_norm", "x", x, (None,) * len(x.shape), ("float32",))
    check_array("rms_norm", "weight", weight, (x.shape[-1],), ("float32",))
    check_array("rms_norm", "out", out, x.shape, ("float32",))
    if delta is not None:
        check_array("rms_norm", "delta", delta, x.shape, ("float32",))
        require(out is not x, "rms_norm", "out must not be x when delta is added to x")
    device.launch(RMS_NORM, x, weight, float(eps), out, delta)
