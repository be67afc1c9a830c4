"""rope: rotary position embedding, and the table of angles that all layers of a ubatch share."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


class RopePairing(IntEnum):
    """Which two elements of a head form pair i of n/2."""

    NORM = 0  # (2i, 2i + 1)
    NEOX = 1  # (i, i + n/2)


def rope_table_ref(
    positions: np.ndarray, inv_freq: np.ndarray, magnitude: float, cos: np.ndarray, sin: np.ndarray
) -> None:
    angle = positions.astype(np.float32)[:, None] * inv_freq
    np.multiply(np.cos(angle), np.float32(magnitude), out=cos)
    np.multiply(np.sin(angle), np.float32(magnitude), out=sin)


def rope_ref(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairing: RopePairing) -> None:
    half = cos.shape[1]
    if pairing == RopePairing.NORM:
        a, b = x[:, :, 0 : 2 * half : 2], x[:, :, 1 : 2 * half : 2]
    else:
        a, b = x[:, :, :half], x[:, :, half : 2 * half]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated_a = a * cos - b * sin
    b[...] = a * sin + b * cos
    a[...] = rotated_a


def plan_rope_table(
    target: Target, positions: Any, inv_freq: Any, magnitude: float, cos: Any, sin: Any
) -> list[KernelLaunch]:
    args = (positions, inv_freq, cos, sin, np.float32(magnitude), np.int32(inv_freq.shape[0]))
    return [KernelLaunch("rope", "rope_table", (positions.shape[0],), (128,), args, {"NEOX": 0})]


def plan_rope(target: Target, x: Any, cos: Any, sin: Any, pairing: RopePairing) -> list[KernelLaunch]:
    num_tokens, heads, head_dim = x.shape
    half = cos.shape[1]
    args = (x, cos, sin, np.int32(heads), np.int32(head_dim), np.int32(half))
    defines = {"NEOX": int(pairing == RopePairing.NEOX)}
    return [KernelLaunch("rope", "rope", (num_tokens, -(-heads * half // 256)), (256,), args, defines)]


ROPE_TABLE = Op("rope_table", rope_table_ref, plan_rope_table)
ROPE = Op("rope", rope_ref, plan_rope)


def rope_table(device: Device, positions: Any, inv_freq: Any, magnitude: float, cos: Any, sin: Any) -> None:
    """cos[t, i] = magnitude * cos(positions[t] * inv_freq[i]), and sin alike.

    Args:
        positions: [num_tokens] int32.
        inv_freq: [n_rot / 2] float32, radians per position, scaling already applied (pyllm.models.rope_scaling).
        magnitude: dimensionless factor of YaRN; 1 otherwise.
        cos, sin: [num_tokens, n_rot / 2] float32, outputs.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    check_array("rope_table", "positions", positions, (None,), ("int32",))
    check_array("rope_table", "inv_freq", inv_freq, (None,), ("float32",))
    for name, array in (("cos", cos), ("sin", sin)):
        check_array("rope_table", name, array, (positions.shape[0], inv_freq.shape[0]), ("float32",))
    device.launch(ROPE_TABLE, positions, inv_freq, float(magnitude), cos, sin)


def rope(device: Device, x: Any, cos: Any, sin: Any, pairing: RopePairing) -> None:
    """Rotate the first n_rot elements of each head in place; the others stay as they are.

    Args:
        x: [num_tokens, num_heads, head_dim] float32, changed.
        cos, sin: [num_tokens, n_rot / 2] float32, from `rope_table`.
        pairing: which elements form a pair.

    Numerics: angles and products in float32.

    Raises:
        ShapeError: shapes or dtypes do not fit, or n_rot exceeds head_dim.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    check_array("rope", "x", x, (None, None, None), ("float32",))
    for name, array in (("cos", cos), ("sin", sin)):
        check_array("rope", name, array, (x.shape[0], None), ("float32",))
    require(tuple(cos.shape) == tuple(sin.shape), "rope", "cos and sin differ in shape")
    require(2 * cos.shape[1] <= x.shape[2], "rope", f"{2 * cos.shape[1]} rotated elements, head_dim {x.shape[2]}")
    device.launch(ROPE, x, cos, sin, pairing)
