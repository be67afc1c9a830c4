"""take_rows: gather rows of an activation, for the tokens whose logits are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def take_rows_ref(x: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    np.take(x, ids, axis=0, out=out)


def plan_take_rows(target: Target, x: Any, ids: Any, out: Any) -> list[KernelLaunch]:
    require(x.shape[1] * x.itemsize % 4 == 0, "take_rows", f"rows of {x.shape[1]} elements are no whole words")
    words = x.view(np.uint32)
    args = (words, ids, out.view(np.uint32), np.int32(words.shape[1]))
    return [KernelLaunch("take_rows", "take_rows", (ids.shape[0],), (256,), args)]


TAKE_ROWS = Op("take_rows", take_rows_ref, plan_take_rows)


def take_rows(device: Device, x: Any, ids: Any, out: Any) -> None:
    """out[i] = x[ids[i]].

    Args:
        x: [num_tokens, hidden_size] float32 or float16; rows are multiples of 4 bytes.
        ids: [n] int32, each in 0..num_tokens-1.
        out: [n, hidden_size], as x; must not overlap x.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    check_array("take_rows", "x", x, (None, None), ("float32", "float16"))
    check_array("take_rows", "ids", ids, (None,), ("int32",))
    check_array("take_rows", "out", out, (ids.shape[0], x.shape[1]), (x.dtype.name,))
    device.launch(TAKE_ROWS, x, ids, out)
