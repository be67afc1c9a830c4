"""The paged KV cache: owns K/V pages, page tables, epochs and row tags.

One K and one V buffer per layer, each of num_pages * page_size rows, and a tag per layer and row. A sequence owns a
list of pages; row `p` of a sequence lies in its page p // page_size. Pages may be shared by several sequences
(reference counts); a partly filled one is copied before a sequence writes behind rows that are not its own.

Every allocation of a page gets a fresh epoch, which `set_rows` writes beside each row and attention compares: rows left
behind by an earlier owner never carry the right tag.

Host bookkeeping only: what touches K, V or tags is queued as ops on the device's stream. So a page may be given to
another sequence while work of its former owner is still queued: the new owner's writes come later in the stream.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyllm.device import Device, Event
from pyllm.device.arena import POISON
from pyllm.kv_types import KVType
from pyllm.ops.clear_tags import clear_tags
from pyllm.ops.copy_rows import RowMove, copy_rows
from pyllm.ops.fill_rows import fill_rows
from pyllm.ops.flash_attention import NUM_COUNTERS
from pyllm.ops.shift_rows import KeyTurn, shift_rows
from pyllm.recurrent_cache import RecurrentCache, SequenceState

LAST_EPOCH = 2**32 - 1


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the cache, as ops see it.

    Attributes:
        k: [num_rows, row size of num_kv_heads * key_length elements] in the storage type.
        v: [num_rows, row size of num_kv_heads * value_length elements] in the storage type.
        tags: [num_rows] uint32, the epoch under which each row was written; 0 = no row.
        page_size: rows per page.
        layer: index, for fault records.
        counters: [NUM_COUNTERS] int32, shared by all layers: by them the blocks of a launch of `flash_attention` find
            out which of them is the last. Zero whenever no launch is running.
    """

    k: Any
    v: Any
    tags: Any
    page_size: int
    layer: int
    counters: Any


@dataclass(slots=True)
class SequenceKV:
    """The rows of one sequence, and its recurrent state where the model has recurrent layers.

    Attributes:
        seq_id: what fault records call it; never used twice.
        pages: physical page ids, in order of position.
        epochs: the tag that the rows of each of these pages must carry. Kept here, not looked up by page: should two
            sequences ever hold one page, the tags of one of them are wrong, and attention says so.
        length: rows that are written, or will be when all queued work has run.
        num_clean: rows whose fault record was read clean; only these may be shared.
        owns_tail: False when the last page holds further rows of another sequence; it is then copied before a write.
        state: recurrent state; None without recurrent layers.
        shifted_from: rows from here on were shifted: computed behind other rows than those that stand before them now.
            They are of no use to anybody else. None: no row was.
    """

    seq_id: int
    pages: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    length: int = 0
    num_clean: int = 0
    owns_tail: bool = True
    state: SequenceState | None = None
    shifted_from: int | None = None


class KVCache:
    """Pages for all sequences of one model.

    Args:
        device: where the rows live.
        num_layers: attention layers.
        k_width, v_width: elements per K and V row (kv heads times head length).
        num_pages: physical pages.
        page_size: rows per page.
        kv_type: storage type of the rows.
        page_order: order in which free pages are first handed out; default: ascending. Results do not depend on it.
        recurrent: states of recurrent layers, which sequences then have beside their rows.

    Attributes:
        k, v: [num_layers, num_rows, row size], storage type of the rows; tags: [num_layers, num_rows] uint32.
        quarantined: pages that are never handed out again.
        last_copy: event behind the last copy of a page to another, whose rows count as clean before it has run.
        before_removal: called with each sequence that is about to give rows up (diagnostics).
    """

    def __init__(
        self,
        device: Device,
        num_layers: int,
        k_width: int,
        v_width: int,
        num_pages: int,
        page_size: int,
        kv_type: KVType,
        page_order: Sequence[int] | None = None,
        recurrent: RecurrentCache | None = None,
    ) -> None:
        self.device = device
        self.recurrent = recurrent
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv_type = kv_type
        num_rows = num_pages * page_size
        self.tags = device.upload(np.zeros((num_layers, num_rows), np.uint32))
        self.counters = device.upload(np.zeros(NUM_COUNTERS, np.int32))
        # All layers in one buffer, so that a page of all of them is one copy.
        self.k, self.v = (
            device.empty((num_layers, num_rows, kv_type.row_size(width)), kv_type.storage)
            for width in (k_width, v_width)
        )
        self.layers = [
            LayerCache(self.k[layer], self.v[layer], self.tags[layer], page_size, layer, self.counters)
            for layer in range(num_layers)
        ]
        self.quarantined: set[int] = set()
        self.last_copy: Event | None = None
        self.before_removal: Callable[[SequenceKV], None] | None = None
        self._free = deque(range(num_pages) if page_order is None else page_order)
        self._references = [0] * num_pages
        self._next_epoch = itertools.count(1)
        self._next_seq_id = itertools.count(1)

    @property
    def num_bytes(self) -> int:
        """Device memory of all rows and tags."""
        return int(self.tags.nbytes + sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers))

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def new_sequence(self) -> SequenceKV:
        """An empty sequence.

        Raises:
            ContextError: as many sequences as there are recurrent states are there already.
        """
        state = self.recurrent.new_state() if self.recurrent is not None else None
        return SequenceKV(next(self._next_seq_id), state=state)

    def pages_for(self, num_rows: int) -> int:
        """Pages that num_rows rows need."""
        return -(-num_rows // self.page_size)

    def extend(self, seq: SequenceKV, num_rows: int) -> bool:
        """Make room for num_rows more rows and count them as written.

        Returns:
            False, with nothing changed, when too few pages are free.
        """
        length = seq.length + num_rows
        if seq.owns_tail and length <= len(seq.pages) * self.page_size:
            seq.length = length
            return True
        missing = self.pages_for(length) - len(seq.pages)
        if missing + self._must_copy_tail(seq) > len(self._free):
            return False
        self._own_tail(seq)
        for _ in range(missing):
            page, epoch = self.allocate()
            seq.epochs.append(epoch)
            seq.pages.append(page)
        seq.length += num_rows
        return True

    def row_ids(self, seq: SequenceKV, positions: np.ndarray) -> np.ndarray:
        """Physical rows ([n] int64) of positions ([n], each below seq.length)."""
        index, row = np.divmod(positions, self.page_size)
        return np.asarray(seq.pages, np.int64)[index] * self.page_size + row

    def truncate(self, seq: SequenceKV, length: int) -> None:
        """Drop the rows from `length` on. Rows that stay behind in a page of its own become absent.

        Raises:
            ValueError: the sequence has no such row, or its recurrent state no checkpoint there that was read clean;
                nothing has changed.
        """
        if not 0 <= length <= seq.length:
            raise ValueError(f"cannot cut a sequence of {seq.length} rows to {length}")
        self._rewind_state(seq, length)
        if self.before_removal is not None and length < seq.length:
            self.before_removal(seq)
        kept = self.pages_for(length)
        given_up = seq.pages[kept:]
        # First off the sequence, then back to the pool: a page is never in both.
        del seq.pages[kept:]
        del seq.epochs[kept:]
        written = min(seq.length, kept * self.page_size)
        seq.owns_tail = seq.owns_tail or written < seq.length
        seq.length = length
        seq.num_clean = min(seq.num_clean, length)
        if seq.shifted_from is not None and seq.shifted_from >= length:
            seq.shifted_from = None
        self._drop(given_up)
        if length % self.page_size == 0 or length == written:
            return
        if self._references[seq.pages[-1]] > 1:
            seq.owns_tail = False
        elif seq.owns_tail:
            self._clear_from(seq, written - length)

    def shift(self, seq: SequenceKV, first_page: int, num_pages: int, turns: Sequence[KeyTurn]) -> bool:
        """Give up whole pages in the middle of a sequence. The rows behind them become the sequence's own, on fresh
        pages, num_pages * page_size positions lower; all in stream order: queued work reads what it was to read.

        Args:
            first_page: pages before this one stay as they are.
            turns: for each layer, what turns keys by -num_pages * page_size positions.

        Returns:
            False, with nothing changed, when too few pages are free: one at a time is needed, since each page is let go
            when it was copied, and more where others own them too.

        Raises:
            ValueError: the sequence has no such pages, rows that were not read clean yet (a step that is under way
                means other positions), or a recurrent state; nothing has changed.
        """
        stop, size = first_page + num_pages, self.page_size
        if not 0 <= first_page < stop or stop * size > seq.length:
            raise ValueError(f"a sequence of {seq.length} rows has no pages {first_page} to {stop - 1}")
        if seq.num_clean != seq.length or seq.state is not None:
            raise ValueError(f"sequence {seq.seq_id} has rows under way or a recurrent state, and cannot be shifted")
        if not self._can_move(seq.pages[first_page:stop], seq.pages[stop:]):
            return False
        if self.before_removal is not None:
            self.before_removal(seq)
        given_up = seq.pages[first_page:stop]
        del seq.pages[first_page:stop]
        del seq.epochs[first_page:stop]
        seq.length = seq.num_clean = seq.length - num_pages * size
        seq.shifted_from = first_page * size if seq.shifted_from is None else min(seq.shifted_from, first_page * size)
        self._drop(given_up)
        for index in range(first_page, len(seq.pages)):
            page, num_rows = seq.pages[index], min(size, seq.length - index * size)
            seq.pages[index], seq.epochs[index] = self._copy_page(page, seq.epochs[index], num_rows, turns)
            self._drop([page])
        seq.owns_tail = True
        return True

    def _can_move(self, given_up: Sequence[int], moved: Sequence[int]) -> bool:
        """Whether there is a free page for each that moves, when it does."""
        freed = {page for page in (*given_up, *moved) if self._references[page] == 1 and page not in self.quarantined}
        num_free = len(self._free) + sum(page in freed for page in given_up)
        for page in moved:
            if not num_free:
                return False
            num_free += (page in freed) - 1
        return True

    def fork(self, seq: SequenceKV, length: int) -> SequenceKV:
        """A new sequence that shares the first `length` rows of `seq`. The tail page is copied when one writes to it.

        Raises:
            ValueError: the rows were not read clean yet, so they may not be shared; or there is no recurrent state of
                just this length.
            ContextError: no recurrent state is free.
        """
        if length > seq.num_clean:
            raise ValueError(f"only {seq.num_clean} rows of sequence {seq.seq_id} are published, {length} wanted")
        state = None
        if self.recurrent is not None and seq.state is not None:
            state = self.recurrent.fork(seq.state, length)
        child = SequenceKV(next(self._next_seq_id), state=state)
        child.pages = seq.pages[: self.pages_for(length)]
        child.epochs = seq.epochs[: self.pages_for(length)]
        for page in child.pages:
            self._references[page] += 1
        child.length = child.num_clean = length
        if seq.shifted_from is not None and seq.shifted_from < length:
            child.shifted_from = seq.shifted_from
        child.owns_tail = length % self.page_size == 0
        return child

    def adopt(
        self, pages: Sequence[int], epochs: Sequence[int], length: int, state: SequenceState | None = None
    ) -> SequenceKV:
        """A new sequence whose first `length` rows lie in pages that somebody holds. The tail page is copied when the
        sequence writes to it.

        Args:
            pages, epochs: as many as `length` rows need; all of these rows were read clean.
            state: its recurrent state, at just this length, where the model has recurrent layers.
        """
        seq = SequenceKV(next(self._next_seq_id), list(pages), list(epochs), length, length, state=state)
        seq.owns_tail = length % self.page_size == 0
        for page in seq.pages:
            self._references[page] += 1
        return seq

    def hold(self, page: int) -> None:
        """One owner more for a page that has one."""
        if not self._references[page]:
            raise ValueError(f"page {page} is free; nobody can hold it")
        self._references[page] += 1

    def is_shared(self, page: int) -> bool:
        """Whether a page has several owners."""
        return self._references[page] > 1

    def let_go(self, page: int) -> None:
        """One owner less; a page without owners is free again."""
        self._drop([page])

    def release(self, seq: SequenceKV) -> None:
        """Give all pages of a sequence back, and its recurrent state. The sequence is empty afterwards."""
        state, seq.state = seq.state, None
        self.truncate(seq, 0)
        if self.recurrent is not None and state is not None:
            self.recurrent.release(state)

    def checkpoint(self, seq: SequenceKV) -> bool:
        """Keep the sequence's recurrent state, so that it can be cut to its present length later.

        Returns:
            False when it was not kept: there are no recurrent layers (and then any length will do), or no room.
        """
        if self.recurrent is None or seq.state is None:
            return False
        return self.recurrent.save(seq.state)

    def _rewind_state(self, seq: SequenceKV, length: int) -> None:
        if self.recurrent is None or seq.state is None or length >= seq.state.position:
            return
        if length > seq.num_clean:
            raise ValueError(f"only {seq.num_clean} tokens of sequence {seq.seq_id} are published, {length} wanted")
        self.recurrent.rewind(seq.state, length)

    def quarantine(self, page: int) -> None:
        """Never hand this page out again; its present owners must end."""
        self.quarantined.add(page)
        if self._references[page] == 0 and page in self._free:
            self._free.remove(page)

    def publish(self, seq: SequenceKV, length: int) -> None:
        """The first `length` rows were read clean: they may be shared."""
        if length > seq.length:
            length = seq.length
        if length > seq.num_clean:
            seq.num_clean = length

    def allocate(self) -> tuple[int, int]:
        """A free page, of which there must be one, and the fresh epoch under which its rows will be written. It has one
        owner."""
        epoch = next(self._next_epoch)
        if epoch > LAST_EPOCH:
            raise OverflowError("all page epochs are used up; open the model again")
        page = self._free.popleft()
        self._references[page] = 1
        return page, epoch

    def _drop(self, pages: list[int]) -> None:
        """One owner less for each page; those without any are free again."""
        unowned = []
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                unowned.append(page)
                if page not in self.quarantined:
                    self._free.append(page)
        if self.device.poison:
            for page in unowned:
                for layer in self.layers:
                    fill_rows(self.device, layer, page * self.page_size, self.page_size, POISON)

    def _must_copy_tail(self, seq: SequenceKV) -> bool:
        return not seq.owns_tail and self._references[seq.pages[-1]] > 1

    def _own_tail(self, seq: SequenceKV) -> None:
        """Before a write: make the last page the sequence's own, with no other sequence's rows behind its own."""
        if seq.owns_tail:
            return
        page, tail = seq.pages[-1], seq.length % self.page_size
        if self._must_copy_tail(seq):
            seq.pages[-1], seq.epochs[-1] = self._copy_page(page, seq.epochs[-1], tail)
            self._drop([page])
        else:
            self._clear_from(seq, self.page_size - tail)
        seq.owns_tail = True

    def _clear_from(self, seq: SequenceKV, num_rows: int) -> None:
        """Make num_rows rows behind the sequence's last one absent; they lie in its last page."""
        first = seq.pages[-1] * self.page_size + seq.length % self.page_size
        clear_tags(self.device, self.tags, first, num_rows)

    def _copy_page(
        self, source: int, source_epoch: int, num_rows: int, turns: Sequence[KeyTurn] = ()
    ) -> tuple[int, int]:
        """A fresh page and its epoch; the page holds the first num_rows rows of another, the keys of each layer turned
        where `turns` says how."""
        target, epoch = self.allocate()
        move = RowMove(source * self.page_size, target * self.page_size, num_rows, source_epoch, epoch)
        try:
            for index, layer in enumerate(self.layers):
                if turns:
                    shift_rows(self.device, layer, self.kv_type, turns[index], move)
                else:
                    copy_rows(self.device, layer, move)
        except BaseException:
            self._drop([target])  # what is queued already comes before whatever a later owner writes
            raise
        self.last_copy = self.device.record()
        return target, epoch
