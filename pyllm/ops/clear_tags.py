"""clear_tags: make K/V rows absent, when a sequence is cut back inside a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device


def clear_tags_ref(tags: np.ndarray, first_row: int, num_rows: int) -> None:
    tags[:, first_row : first_row + num_rows] = 0


def plan_clear_tags(target: Target, tags: Any, first_row: int, num_rows: int) -> list[KernelLaunch]:
    args = (tags, np.int64(tags.shape[1]), np.int64(first_row), np.int32(num_rows))
    return [KernelLaunch("clear_tags", "clear_tags", (tags.shape[0],), (128,), args)]


CLEAR_TAGS = Op("clear_tags", clear_tags_ref, plan_clear_tags)


def clear_tags(device: Device, tags: Any, first_row: int, num_rows: int) -> None:
    """Set the tags of num_rows rows from first_row on to 0, which is no page's epoch, in all layers.

    Args:
        tags: [num_layers, num_rows_of_cache] uint32, changed.

    Raises:
        ShapeError: the rows are not inside the cache.
    """
    check_array("clear_tags", "tags", tags, (None, None), ("uint32",))
    require(first_row >= 0 and first_row + num_rows <= tags.shape[1], "clear_tags", "rows lie outside the cache")
    device.launch(CLEAR_TAGS, tags, first_row, num_rows)
