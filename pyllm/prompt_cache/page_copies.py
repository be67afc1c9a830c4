"""Pages of K/V rows between the device and pinned memory, a page of all layers in three copies.

A page in pinned memory, and in a session file: K rows of all layers, then V rows of all layers, each [layers,
page_size, row]; in pinned memory the tags [layers, page_size] stand behind them, as they were on the device or are to
be there.

The copies run beside the computation. Who asks for one holds the page until its event has completed.
"""

from __future__ import annotations

import math

import numpy as np

from pyllm.device import Event
from pyllm.kv_cache import KVCache
from pyllm.prompt_cache.pinned_pool import Block


class PageCopies:
    """Copies of one cache's pages.

    Attributes:
        rows_bytes: of the rows of a page.
        num_bytes: with their tags: what a block must have.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._parts = []
        start = 0
        for array in (cache.k, cache.v, cache.tags):
            shape = (array.shape[0], cache.page_size, *array.shape[2:])
            num_bytes = math.prod(shape) * array.dtype.itemsize
            self._parts.append((shape, array.dtype, start, start + num_bytes))
            start += num_bytes
        self.num_bytes = start
        self.rows_bytes = self._parts[2][2]

    def save(self, page: int, num_rows: int, block: Block) -> Event:
        """Queue a copy of a page's first rows, and their tags, which were read clean: nothing queued writes them, but
        for copies of pages that sequences part on."""
        copies, rows = self._cache.device.copies, self._rows(page, num_rows)
        if self._cache.last_copy is not None and not self._cache.last_copy.query():
            copies.wait(self._cache.last_copy)
        for array, part in zip(self._arrays, self._views(block.memory), strict=True):
            copies.copy(array[:, rows], part[:, :num_rows])
        done = copies.record()
        block.used(done)
        return done

    def load(self, block: Block, page: int, num_rows: int, epoch: int) -> Event:
        """Queue a copy of a block's first rows into a page that nobody uses yet. They get the page's epoch as their
        tag; rows behind them become absent. Waits until no copy uses the block."""
        block.wait()
        copies, device = self._cache.device.copies, self._cache.device
        tags = self._views(block.writable())[2]
        tags[:, :num_rows] = epoch
        tags[:, num_rows:] = 0
        copies.wait(device.record())  # queued work of the page's former owner
        for array, part, count in zip(
            self._arrays, self._views(block.memory), (num_rows, num_rows, self._cache.page_size), strict=True
        ):
            copies.copy(part[:, :count], array[:, self._rows(page, count)])
        done = copies.record()
        block.used(done)
        return done

    def is_sound(self, block: Block, num_rows: int, epoch: int) -> bool:
        """Whether the rows of a page that was saved carried its tag; waits for the copy. Rows behind them, which may be
        anybody's, are zeroed.

        Raises:
            DeviceError: the copy failed.
        """
        block.wait()
        k, v, tags = self._views(block.writable())
        k[:, num_rows:] = 0
        v[:, num_rows:] = 0
        return bool((tags[:, :num_rows] == epoch).all())

    @property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._cache.k, self._cache.v, self._cache.tags

    def _rows(self, page: int, num_rows: int) -> slice:
        first = page * self._cache.page_size
        return slice(first, first + num_rows)

    def _views(self, memory: np.ndarray) -> list[np.ndarray]:
        return [memory[start:stop].view(dtype).reshape(shape) for shape, dtype, start, stop in self._parts]
