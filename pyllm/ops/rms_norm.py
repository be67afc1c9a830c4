"""rms_norm: root-mean-square layer normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def rms_norm_ref(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray, accumulate: bool) -> None:
    mean_square = np.einsum("...i,...i->...", x, x) / np.float32(x.shape[-1])
    target = np.empty_like(x) if accumulate or out.dtype != x.dtype else out
    np.multiply(x, (1 / np.sqrt(mean_square + np.float32(eps)))[..., None], out=target)
    target *= weight
    if accumulate:
        out += target
    elif target is not out:
        out[...] = target


def plan_rms_norm(target: Target, x: Any, weight: Any, eps: float, out: Any, accumulate: bool) -> list[KernelLaunch]:
    size = x.shape[-1]
    output = 2 if accumulate else int(out.dtype == np.float16)
    defines = {"OUTPUT": output, "WIDE": int(size % 4 == 0)}
    args = (x, weight, out, np.float32(eps), np.int32(size))
    return [KernelLaunch("rms_norm", "rms_norm", (x.size // size,), (256,), args, defines)]


RMS_NORM = Op("rms_norm", rms_norm_ref, plan_rms_norm)


def rms_norm(device: Device, x: Any, weight: Any, eps: float, out: Any, accumulate: bool = False) -> None:
    """Normalise each row: out = x / sqrt(mean(x²) + eps) * weight; out += that with `accumulate`.

    Args:
        x: [..., size] float32, rows along the last axis.
        weight: [size] float32.
        eps: dimensionless, inside the square root.
        out: like x, or float16 (saturating) unless `accumulate`; may be x itself.

    Numerics: sums in float32, one rounding per element.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    check_array("rms_norm", "x", x, (None,) * len(x.shape), ("float32",))
    check_array("rms_norm", "weight", weight, (x.shape[-1],), ("float32",))
    check_array("rms_norm", "out", out, x.shape, ("float32",) if accumulate else ("float32", "float16"))
    device.launch(RMS_NORM, x, weight, float(eps), out, accumulate)
