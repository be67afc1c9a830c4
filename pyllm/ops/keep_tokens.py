"""keep_tokens: leave the likeliest tokens of a step where the next step finds them without the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def keep_tokens_ref(ids: np.ndarray, places: np.ndarray, kept: np.ndarray) -> None:
    wanted = (places >= 0) & (places < len(kept))
    kept[places[wanted]] = ids[wanted, 0]


def plan_keep_tokens(target: Target, ids: Any, places: Any, kept: Any) -> list[KernelLaunch]:
    rows, columns = ids.shape
    args = (ids, places, kept, *map(np.int32, (rows, columns, kept.shape[0])))
    return [KernelLaunch("keep_tokens", "keep_tokens", (-(-rows // 128),), (128,), args)]


KEEP_TOKENS = Op("keep_tokens", keep_tokens_ref, plan_keep_tokens)


def keep_tokens(device: Device, ids: Any, places: Any, kept: Any) -> None:
    """kept[places[i]] = ids[i, 0], for each place that is not -1.

    Args:
        ids: [rows, candidates] int32, the likeliest token of each row first.
        places: [rows] int32, -1 for a row whose token is not kept; no place twice.
        kept: [num_places] int32; `copy_inputs` reads it in place of token ids below 0.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    check_array("keep_tokens", "ids", ids, (None, None), ("int32",))
    check_array("keep_tokens", "places", places, (ids.shape[0],), ("int32",))
    check_array("keep_tokens", "kept", kept, (None,), ("int32",))
    device.launch(KEEP_TOKENS, ids, places, kept)
