"""Saving what the prefix index knows of a conversation to a file, and bringing it back, also in another process.

Both run in the calling thread and hold the engine's lock only for moments: other sequences go on meanwhile. Pages are
held while they are copied. Of a file nothing reaches the index before all of it was read and checked; what is loaded
then serves prompts like rows that were computed here.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.device import Event
from pyllm.errors import ContextError, UsageError
from pyllm.guests import Guests
from pyllm.interrupts import deferred_interrupt
from pyllm.kv_cache import KVCache
from pyllm.prompt_cache.fingerprint import difference
from pyllm.prompt_cache.index import Held, PrefixIndex
from pyllm.prompt_cache.page_copies import PageCopies
from pyllm.prompt_cache.pinned_pool import Block, PinnedMemoryError, PinnedPool
from pyllm.prompt_cache.session_file import Section, SessionReader, SessionWriter
from pyllm.recurrent_cache import Checkpoint

IN_FLIGHT = 8  # pages that are copied, written or checked at the same time
CHECKERS = 4  # threads that read and check

Lock = AbstractContextManager[Any]


@dataclass(frozen=True)
class Session:
    """What a file holds.

    Attributes:
        token_ids: of the rows that it holds.
        chat: what the saving program put there.
        num_bytes: of the file.
        shifted: behind these rows the conversation's were shifted, when its context was full: those are not in the file
            and will be computed anew.
    """

    token_ids: list[int]
    chat: dict[str, Any]
    num_bytes: int
    shifted: bool = False


@dataclass
class _Loading:
    """What has been brought in so far and is in nobody's hands yet."""

    pages: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    states: list[Checkpoint] = field(default_factory=list)
    copies: list[Event] = field(default_factory=list)
    is_guest: bool = False  # counted as one


class Sessions:
    """Saves and loads for one engine.

    Args:
        lock, guests: the engine's.
        identity: the engine's fingerprint.
        vocab_size: token ids of files are below that.

    Attributes:
        pool: pinned memory for pages on their way, `IN_FLIGHT` of them at most; beside the budget of what is kept.
    """

    def __init__(
        self,
        cache: KVCache,
        index: PrefixIndex,
        lock: Lock,
        guests: Guests,
        identity: Mapping[str, str],
        vocab_size: int,
    ) -> None:
        self._cache = cache
        self._index = index
        self._lock, self._guests = lock, guests
        self._identity = identity
        self._vocab_size = vocab_size
        self._copies = PageCopies(cache)
        self._one_at_a_time = threading.Lock()
        size = self._copies.num_bytes
        self.pool = PinnedPool(cache.device, size, IN_FLIGHT * size, "a page", evicts=False)

    def _alone(self) -> AbstractContextManager[None]:
        """The engine's lock. Ctrl-C waits: what is held has to be noted, or nobody lets it go."""
        return self._guests.alone(self._lock)

    # saving

    def save(self, path: Path, token_ids: Sequence[int], chat: Mapping[str, Any]) -> Session:
        """Write what is known of these tokens' beginning; where that is nothing, what the program adds alone.

        Raises:
            UsageError: nothing of it is known, and the program adds nothing.
            SessionError: the file cannot be written; one that was there is as it was.
        """
        with self._one_at_a_time:
            held = None
            try:
                with self._alone():
                    self.pool.give_all_back()  # of one that was interrupted between taking a block and noting it
                    held = self._index.hold(token_ids)
                if not held.length and not chat:
                    raise UsageError("nothing of this conversation is kept, so there is nothing to save")
                shifted = held.shifted and held.length < len(token_ids)
                self._write(path, held, chat, shifted)
            finally:
                if held is not None:
                    with deferred_interrupt():
                        self._let_go(held)
        return Session(list(held.token_ids), dict(chat), path.stat().st_size, shifted)

    def _let_go(self, held: Held) -> None:
        """When nothing reads it any more: a save that broke off leaves copies on their way."""
        try:
            with self._alone():
                blocks = self.pool.blocks
            for block in blocks:
                block.wait()
        finally:
            with self._alone():
                self._index.let_go(held)

    def extent(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """How many of these tokens are known, which `save` would write, and how many bytes that is, about."""
        with self._alone():
            held = self._index.hold(token_ids)
            try:
                states = sum(saved.values.nbytes for saved in held.states)
                return held.length, len(held.pages) * self._copies.rows_bytes + states + 8 * held.length
            finally:
                self._index.let_go(held)

    def _write(self, path: Path, held: Held, chat: Mapping[str, Any], shifted: bool) -> None:
        metadata = {
            "fingerprint": json.dumps(dict(self._identity)),
            "rows": json.dumps({"num_rows": held.length, "first_position": 0, "shifted": shifted}),
            "chat": json.dumps(chat),
        }
        sections = [
            Section("tokens", "I32", (held.length,)),
            *(Section(f"page.{index}", "U8", (self._copies.rows_bytes,)) for index in range(len(held.pages))),
            *(Section(f"state.{saved.position}", "F32", saved.values.shape) for saved in held.states),
        ]
        with SessionWriter(path, sections, metadata) as writer:
            writer.write(np.array(held.token_ids, np.int32))
            queued: deque[tuple[int, Block]] = deque()
            try:
                for index in range(len(held.pages)):
                    queued.append((index, self._start_save(path, held, index)))
                    if len(queued) == IN_FLIGHT:
                        self._write_page(writer, held, *queued.popleft())
                while queued:
                    self._write_page(writer, held, *queued.popleft())
            finally:  # of a save that broke off
                with self._alone():
                    for index, block in queued:
                        if held.hosts[index] is None:
                            self.pool.give_back(block)
            for saved in held.states:
                if not saved.own_layers().all():
                    raise UsageError(f"the state at token {saved.position} is not the conversation's own; not saved")
                writer.write(saved.values)

    def _start_save(self, path: Path, held: Held, index: int) -> Block:
        host = held.hosts[index]
        if host is not None:
            return host.block
        return self._take_block(
            str(path), lambda block: self._copies.save(held.pages[index], held.rows_of(index), block)
        )

    def _write_page(self, writer: SessionWriter, held: Held, index: int, block: Block) -> None:
        try:
            host = held.hosts[index]
            with self._alone():  # a copy to the device writes tags
                epoch = host.epoch if host is not None else held.epochs[index]
                is_sound = self._copies.is_sound(block, held.rows_of(index), epoch)
            if not is_sound:
                raise UsageError(f"page {index} of the conversation has rows that are not its own; it is not saved")
            writer.write(block.array[: self._copies.rows_bytes])
        finally:
            if held.hosts[index] is None:
                with self._alone():
                    self.pool.give_back(block)

    # loading

    def load(self, path: Path) -> Session:
        """Check a file and make its rows known.

        Raises:
            SessionError: the file is damaged, or of another model or engine; nothing has changed.
            ContextError: there is no room for its rows now.
        """
        with SessionReader(path) as reader, self._one_at_a_time:
            loading = _Loading()
            try:
                with self._alone():
                    self.pool.give_all_back()  # as in `save`
                    self._index.num_guests += 1
                    loading.is_guest = True
                self._check(reader)
                self._read_pages(reader, loading)
                self._read_states(reader, loading)
                for copy in loading.copies:
                    copy.synchronize()
                shifted = reader.json("rows")["shifted"]
                session = Session(reader.tokens.tolist(), reader.json("chat"), reader.size, shifted)
            except BaseException:
                with self._alone():
                    for state in loading.states:
                        self._cache.recurrent.drop(state)  # type: ignore[union-attr]
                raise
            else:
                with self._alone():
                    self._index.insert(session.token_ids, loading.pages, loading.epochs, loading.states, shifted)
            finally:
                with deferred_interrupt():
                    self._end_loading(loading)
        return session

    def _end_loading(self, loading: _Loading) -> None:
        """Let go of what was brought in: somebody else has it now, or it is of no use."""
        for copy in loading.copies:
            copy.synchronize()
        with self._alone():
            self._index.num_guests -= loading.is_guest
            for saved in loading.states:
                saved.block.num_pins -= 1
            for page in loading.pages:
                self._cache.let_go(page)

    def _check(self, reader: SessionReader) -> None:
        """All that can be checked without reading rows."""
        unlike = difference(reader.json("fingerprint"), self._identity)
        if unlike is not None:
            reader.refuse(unlike)
        rows = reader.json("rows")
        whole = {"num_rows": len(reader.tokens), "first_position": 0, "shifted": rows.get("shifted") is True}
        if rows != whole:
            reader.refuse("it does not hold the rows of its tokens from the first one on")
        if len(reader.tokens) and (reader.tokens.min() < 0 or reader.tokens.max() >= self._vocab_size):
            reader.refuse(f"it has token ids outside of the model's {self._vocab_size}")
        pages = [name for name in reader.sections if name.startswith("page.")]
        states = [name for name in reader.sections if name.startswith("state.")]
        if pages != [f"page.{index}" for index in range(self._cache.pages_for(len(reader.tokens)))]:
            reader.refuse("it has another number of pages than of rows")
        positions = [int(text) if (text := name[6:]).isdecimal() and len(text) < 10 else 0 for name in states]
        ascending = all(a < b for a, b in zip([0, *positions], positions, strict=False))
        if not ascending or (positions and positions[-1] > len(reader.tokens)):
            reader.refuse("its states are of positions that it does not have")
        if len(reader.tokens) and (self._cache.recurrent is None) != (not states):
            reader.refuse("it has no state of the recurrent layers" if not states else "it has states of other layers")
        sizes = dict.fromkeys(pages, self._copies.rows_bytes)
        if self._cache.recurrent is not None:
            sizes |= dict.fromkeys(states, 4 * self._cache.recurrent.shape.row_size)
        wrong = next((name for name, size in sizes.items() if reader.sections[name].num_bytes != size), None)
        if wrong is not None or len(sizes) + 2 != len(reader.sections):
            reader.refuse(f"section {wrong!r} has another size" if wrong else "it has unknown sections")

    def _read_pages(self, reader: SessionReader, loading: _Loading) -> None:
        """Read, check and copy page after page to fresh pages of the device, several at a time."""
        count = self._cache.pages_for(len(reader.tokens))
        queued: deque[tuple[int, Block, Future[int]]] = deque()
        threads = ThreadPoolExecutor(CHECKERS, "pyllm-session")
        try:
            for index in range(count + IN_FLIGHT - 1):
                if index < count:
                    block = self._take_block(str(reader.path))
                    queued.append((index, block, threads.submit(reader.read, f"page.{index}", block.writable())))
                if index >= IN_FLIGHT - 1 and queued:
                    self._take_page(reader, loading, *queued.popleft())
            while queued:
                self._take_page(reader, loading, *queued.popleft())
        finally:
            with deferred_interrupt():  # nobody has a block that a thread may still write
                threads.shutdown(cancel_futures=True)
                with self._alone():
                    for _, block, _ in queued:
                        self.pool.give_back(block)

    def _take_block(self, path: str, use: Callable[[Block], object] = lambda block: None) -> Block:
        """A block for copies, and what is done with it under the same lock. Waits while all blocks are being copied."""
        while True:
            with self._alone():
                block = self.pool.take()
                if block is not None:
                    try:
                        use(block)
                    except BaseException:
                        self.pool.give_back(block)
                        raise
                    return block
                retiring = self.pool.retiring
            if retiring is None:
                raise PinnedMemoryError(f"{path}: there is no pinned memory for copies; close other programs")
            retiring.wait()

    def _take_page(self, reader: SessionReader, loading: _Loading, index: int, block: Block, read: Future[int]) -> None:
        try:
            reader.check(f"page.{index}", read.result())
            with self._alone():
                if not self._index.make_room(1):
                    room = self._cache.num_pages * self._cache.page_size
                    raise ContextError(
                        f"{reader.path}: its {len(reader.tokens)} tokens need more room than is free of {room}; "
                        "make the context larger (-c)"
                    )
                page, epoch = self._cache.allocate()
                loading.pages.append(page)
                loading.epochs.append(epoch)
                size = self._cache.page_size
                loading.copies.append(
                    self._copies.load(block, page, min(size, len(reader.tokens) - index * size), epoch)
                )
        finally:
            with self._alone():
                self.pool.give_back(block)

    def _read_states(self, reader: SessionReader, loading: _Loading) -> None:
        recurrent = self._cache.recurrent
        if recurrent is None or not len(reader.tokens):
            return
        names = [name for name in reader.sections if name.startswith("state.")]
        for name in reversed(names):  # the last ones are worth most, should the budget be small
            with self._alone():
                saved = recurrent.new_checkpoint(int(name[6:]))
                if saved is None:
                    break
                saved.block.num_pins += 1
                loading.states.append(saved)
            reader.check(name, reader.read(name, saved.values.view(np.uint8)))
        if not loading.states:
            raise ContextError(
                f"{reader.path}: there is no memory for its states of the recurrent layers; see --cache-ram"
            )
