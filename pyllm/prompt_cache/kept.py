"""All that one engine keeps of sequences that have ended: the index and its tiers, set up and closed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyllm.guests import Guests
from pyllm.kv_cache import KVCache
from pyllm.prompt_cache.disk_tier import DEFAULT_BUDGET, DiskTier
from pyllm.prompt_cache.host_tier import HostTier
from pyllm.prompt_cache.index import PrefixIndex
from pyllm.prompt_cache.pinned_pool import default_budget
from pyllm.prompt_cache.sessions import Lock, Session, Sessions
from pyllm.request import Request


def budgets(cache_ram: int | None, keeps_pages: bool, has_states: bool) -> tuple[int, int]:
    """Bytes of the host's memory for pages and for states, which share what there is."""
    total = default_budget() if cache_ram is None else cache_ram
    if not keeps_pages:
        return 0, total
    return (total // 2, total // 2) if has_states else (total, 0)


class KeptPrompts:
    """What is kept by one engine.

    Args:
        lock, guests: the engine's.
        identity: the engine's fingerprint.
        vocab_size: token ids are below that.
        page_budget: bytes of the host's memory for pages that leave the device; 0: they are lost.
        cache_dir, cache_disk: see `LLM`.

    Attributes:
        index, sessions, disk: the parts; `disk` is None without a folder.

    Raises:
        SessionError: the folder cannot be used.
    """

    def __init__(
        self,
        cache: KVCache,
        lock: Lock,
        guests: Guests,
        identity: Mapping[str, str],
        vocab_size: int,
        page_budget: int,
        cache_dir: Path | None = None,
        cache_disk: int | None = None,
    ) -> None:
        self._cache = cache
        self._lock, self._guests = lock, guests
        self._tier = HostTier(cache, page_budget) if page_budget else None
        self._last_ids: list[int] = []
        self.index = PrefixIndex(cache, self._tier)
        self.sessions = Sessions(cache, self.index, lock, guests, identity, vocab_size)
        self.disk: DiskTier | None = None
        if cache_dir is not None:
            budget = DEFAULT_BUDGET if cache_disk is None else cache_disk
            self.disk = DiskTier(cache_dir, budget, self.sessions, identity)

    @property
    def bytes_moved(self) -> int:
        """By all copies between the device and what is kept, so far."""
        return self._cache.device.copies.num_bytes

    def begin(self, request: Request) -> None:
        """Before a request is queued: bring what files know of it. Without the engine's lock."""
        if self.disk is not None and request.sampler is not None:
            with self._guests.alone(self._lock):
                known = self.index.known(request.token_ids[:-1], anywhere=True)
            self.disk.bring(request.token_ids, known)
        request.bytes_before = self.bytes_moved

    def end(self, request: Request) -> None:
        """When a request has ended. Waits for nothing."""
        request.bytes_moved = self.bytes_moved - request.bytes_before
        self._last_ids = request.token_ids
        if self.disk is not None and request.sampler is not None and request.error is None:
            self.disk.note(request.token_ids[: request.shifted_from])

    def save(self, path: Path, token_ids: Sequence[int] | None, chat: Mapping[str, Any]) -> Session:
        """See `LLM.save_session`."""
        return self.sessions.save(path, self._last_ids if token_ids is None else token_ids, chat)

    def forget(self, token_ids: Sequence[int] | None) -> None:
        """See `LLM.forget`."""
        with self._guests.alone(self._lock):
            self.index.clear(token_ids)

    def memory(self) -> dict[str, dict[str, int]]:
        """Of each kind of pinned memory that is in use, its bytes, high_water_bytes and budget_bytes."""
        owners = {"checkpoints": self._cache.recurrent, "pages": self._tier, "sessions": self.sessions}
        with self._guests.alone(self._lock):  # counting takes back what copies are done with
            return {name: owner.pool.stats() for name, owner in owners.items() if owner is not None}

    def close(self) -> None:
        """Write to disk what is not written yet."""
        if self.disk is not None:
            self.disk.close()
