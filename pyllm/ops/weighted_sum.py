"""weighted_sum: put the outputs of a token's experts together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array
from pyllm.ops.op import Op

if TYPE_CHECKING:
    from pyllm.device import Device


def weighted_sum_ref(x: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    np.einsum("tjd,tj->td", x, weights, out=out)


WEIGHTED_SUM = Op("weighted_sum", weighted_sum_ref)


def weighted_sum(device: Device, x: Any, weights: Any, out: Any) -> None:
    """out[t] = sum over j of weights[t, j] * x[t, j].

    Args:
        x: [num_tokens, num_used, size] float32.
        weights: [num_tokens, num_used] float32.
        out: [num_tokens, size] float32.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    check_array("weighted_sum", "x", x, (None, None, None), ("float32",))
    check_array("weighted_sum", "weights", weights, x.shape[:2], ("float32",))
    check_array("weighted_sum", "out", out, (x.shape[0], x.shape[2]), ("float32",))
    device.launch(WEIGHTED_SUM, x, weights, out)
