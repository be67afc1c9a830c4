"""copy_rows: copy K/V rows from one page to another, for a tail page that two sequences part on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pyllm.ops.check import require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.kv_cache import LayerCache


@dataclass(frozen=True)
class RowMove:
    """Rows that are copied within a layer's cache.

    Attributes:
        source_row, target_row: first rows, in different pages.
        num_rows: at most a page.
        source_epoch: the tag of rows that are copied; a row with another one becomes absent.
        target_epoch: the tag that they get.
    """

    source_row: int
    target_row: int
    num_rows: int
    source_epoch: int
    target_epoch: int

    @property
    def source(self) -> slice:
        return slice(self.source_row, self.source_row + self.num_rows)

    @property
    def target(self) -> slice:
        return slice(self.target_row, self.target_row + self.num_rows)

    @property
    def kernel_args(self) -> tuple[np.int64, np.int64, np.uint32, np.uint32]:
        """First rows and epochs."""
        rows = np.int64(self.source_row), np.int64(self.target_row)
        return *rows, np.uint32(self.source_epoch), np.uint32(self.target_epoch)

    def check(self, op: str, cache: LayerCache) -> None:
        """Raise ShapeError where rows lie outside the cache or overlap."""
        last = cache.tags.shape[0] - self.num_rows
        require(0 <= self.source_row <= last and 0 <= self.target_row <= last, op, "rows lie outside the cache")
        require(abs(self.source_row - self.target_row) >= self.num_rows, op, "source and target overlap")


def copy_rows_ref(cache: LayerCache, move: RowMove) -> None:
    source, target = move.source, move.target
    own = cache.tags[source] == np.uint32(move.source_epoch)
    cache.k[target][own] = cache.k[source][own]
    cache.v[target][own] = cache.v[source][own]
    cache.tags[target] = np.where(own, np.uint32(move.target_epoch), np.uint32(0))


def plan_copy_rows(target: Target, cache: LayerCache, move: RowMove) -> list[KernelLaunch]:
    k, v = (rows.view(np.uint16) for rows in (cache.k, cache.v))
    words = (np.int32(k.shape[1]), np.int32(v.shape[1]))
    args = (k, v, cache.tags, *words, *move.kernel_args)
    return [KernelLaunch("copy_rows", "copy_rows", (move.num_rows,), (128,), args)]


COPY_ROWS = Op("copy_rows", copy_rows_ref, plan_copy_rows)


def copy_rows(device: Device, cache: LayerCache, move: RowMove) -> None:
    """Copy rows whose tag is source_epoch and give them target_epoch; a row with another tag becomes absent.

    Args:
        cache: one layer's K, V and tags; changed.

    Raises:
        ShapeError: rows lie outside the cache or overlap.
    """
    move.check("copy_rows", cache)
    device.launch(COPY_ROWS, cache, move)
