"""fill_rows: fill K/V rows with a byte pattern. Test runs poison freed pages with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllm.ops.check import require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.kv_cache import LayerCache


def fill_rows_ref(cache: LayerCache, first_row: int, num_rows: int, byte: int) -> None:
    for rows in (cache.k, cache.v):
        rows[first_row : first_row + num_rows].view(np.uint8)[...] = byte


def plan_fill_rows(target: Target, cache: LayerCache, first_row: int, num_rows: int, byte: int) -> list[KernelLaunch]:
    k, v = (rows.view(np.uint16) for rows in (cache.k, cache.v))
    args = (k, v, np.int32(k.shape[1]), np.int32(v.shape[1]), np.int64(first_row), np.int32(byte))
    return [KernelLaunch("fill_rows", "fill_rows", (num_rows,), (128,), args)]


FILL_ROWS = Op("fill_rows", fill_rows_ref, plan_fill_rows)


def fill_rows(device: Device, cache: LayerCache, first_row: int, num_rows: int, byte: int) -> None:
    """Set every byte of num_rows K and V rows; tags stay, so that what trusts them wrongly reads the pattern.

    Args:
        cache: one layer's K, V and tags; changed.
        byte: 0..255.

    Raises:
        ShapeError: rows lie outside the cache.
    """
    require(first_row >= 0 and first_row + num_rows <= cache.k.shape[0], "fill_rows", "rows lie outside the cache")
    device.launch(FILL_ROWS, cache, first_row, num_rows, byte)
