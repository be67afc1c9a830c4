"""l2_norm: scale each head to length 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def l2_norm_ref(x: np.ndarray, num_heads: int, head_dim: int, eps: float) -> None:
    heads = x[:, : num_heads * head_dim].reshape(len(x), num_heads, head_dim)
    squares = np.einsum("thi,thi->th", heads, heads)
    scale = 1 / np.sqrt(squares + np.float32(eps))
    x[:, : num_heads * head_dim] = (heads * scale[..., None]).reshape(len(x), -1)


def plan_l2_norm(target: Target, x: Any, num_heads: int, head_dim: int, eps: float) -> list[KernelLaunch]:
    num_tokens, row_size = x.shape
    args = (x, np.float32(eps), *map(np.int32, (num_tokens * num_heads, num_heads, head_dim, row_size)))
    blocks = -(-num_tokens * num_heads // (256 // target.warp_size))
    return [KernelLaunch("l2_norm", "l2_norm", (blocks,), (256,), args)]


L2_NORM = Op("l2_norm", l2_norm_ref, plan_l2_norm)


def l2_norm(device: Device, x: Any, num_heads: int, head_dim: int, eps: float) -> None:
    """x / sqrt(sum(x²) + eps) for each of the first num_heads heads of a row, in place; columns after them stay.

    Args:
        x: [num_tokens, columns] float32, changed.
        num_heads, head_dim: columns h * head_dim to (h + 1) * head_dim - 1 are head h.
        eps: inside the square root, so that a head of zeros stays one.

    Numerics: float32.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Yang et al. 2024, arXiv:2412.06464: queries and keys of the gated delta rule.
    """
    check_array("l2_norm", "x", x, (None, None), ("float32",))
    require(num_heads * head_dim <= x.shape[1], "l2_norm", f"{num_heads} heads of {head_dim}, {x.shape[1]} columns")
    device.launch(L2_NORM, x, num_heads, head_dim, float(eps))
