"""copy_rows: copy K/V rows from one page to another, for a tail page that two sequences part on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllm.ops.check import require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.kv_cache import LayerCache


def copy_rows_ref(
    cache: LayerCache, source_row: int, target_row: int, num_rows: int, source_epoch: int, target_epoch: int
) -> None:
    source, target = slice(source_row, source_row + num_rows), slice(target_row, target_row + num_rows)
    own = cache.tags[source] == np.uint32(source_epoch)
    cache.k[target][own] = cache.k[source][own]
    cache.v[target][own] = cache.v[source][own]
    cache.tags[target] = np.where(own, np.uint32(target_epoch), np.uint32(0))


def plan_copy_rows(
    target: Target,
    cache: LayerCache,
    source_row: int,
    target_row: int,
    num_rows: int,
    source_epoch: int,
    target_epoch: int,
) -> list[KernelLaunch]:
    k, v = (rows.view(np.uint16) for rows in (cache.k, cache.v))
    words = (np.int32(k.shape[1]), np.int32(v.shape[1]))
    epochs = (np.uint32(source_epoch), np.uint32(target_epoch))
    args = (k, v, cache.tags, *words, np.int64(source_row), np.int64(target_row), *epochs)
    return [KernelLaunch("copy_rows", "copy_rows", (num_rows,), (128,), args)]


COPY_ROWS = Op("copy_rows", copy_rows_ref, plan_copy_rows)


def copy_rows(
    device: Device,
    cache: LayerCache,
    source_row: int,
    target_row: int,
    num_rows: int,
    source_epoch: int,
    target_epoch: int,
) -> None:
    """Copy rows whose tag is source_epoch and give them target_epoch; a row with another tag becomes absent.

    Args:
        cache: one layer's K, V and tags; changed.
        source_row, target_row: first rows, in different pages.
        num_rows: at most a page.

    Raises:
        ShapeError: rows lie outside the cache or overlap.
    """
    last = cache.tags.shape[0] - num_rows
    require(0 <= source_row <= last and 0 <= target_row <= last, "copy_rows", "rows lie outside the cache")
    require(abs(source_row - target_row) >= num_rows, "copy_rows", "source and target overlap")
    device.launch(COPY_ROWS, cache, source_row, target_row, num_rows, source_epoch, target_epoch)
