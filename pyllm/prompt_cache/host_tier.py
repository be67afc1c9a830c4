"""Pages of K/V rows in the host's pinned memory, for those that have to leave the device."""

from __future__ import annotations

from dataclasses import dataclass

from pyllm.device import Event
from pyllm.kv_cache import KVCache
from pyllm.prompt_cache.page_copies import PageCopies
from pyllm.prompt_cache.pinned_pool import Block, PinnedPool


@dataclass(eq=False)
class HostPage:
    """A page's rows.

    Attributes:
        block: the memory; `block.is_kept` is false when the page had to give way.
        num_rows: rows that it holds.
        epoch: what their tags must say.
    """

    block: Block
    num_rows: int
    epoch: int


class HostTier:
    """Copies of pages, within a budget.

    Args:
        budget: bytes that they may take together.

    Attributes:
        pool: their memory.
    """

    def __init__(self, cache: KVCache, budget: int) -> None:
        self._copies = PageCopies(cache)
        self.pool = PinnedPool(cache.device, self._copies.num_bytes, budget, "a page")

    def save(self, page: int, num_rows: int, epoch: int) -> tuple[HostPage, Event] | None:
        """Start to copy a page's rows out; those used least recently give way. None where there is no room now."""
        block = self.pool.take()
        if block is None:
            return None
        return HostPage(block, num_rows, epoch), self._copies.save(page, num_rows, block)

    def is_sound(self, host: HostPage) -> bool:
        """Whether the rows that were copied were the page's own; waits for the copy."""
        return host.block.is_kept and self._copies.is_sound(host.block, host.num_rows, host.epoch)

    def load(self, host: HostPage, page: int, epoch: int) -> Event:
        """Start to copy rows to a fresh page of the device."""
        done = self._copies.load(host.block, page, host.num_rows, epoch)
        host.epoch = epoch  # the tags in the block are the new ones now
        return done
