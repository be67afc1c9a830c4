"""Rows of sequences that have ended, kept for prompts that begin like them.

A tree over token ids, a page at a time (`tree`). Rows depend on all tokens up to their own, so a path that a prompt
shares is rows that it need not compute. A node owns one reference to its page. Leaves may hold a page that is filled in
part; a prompt may also share a part of any page: its sequence then gets a copy of that page before it writes there
(`KVCache.adopt`).

Where a model has recurrent layers, rows alone are not enough: a prompt can go on only from a checkpoint of their
states, at exactly its position. Nodes hold the checkpoints whose positions lie in their page; a prompt gets the rows up
to the last checkpoint that it shares all tokens with.

Only what was read clean comes here. Pages that were used least recently give way when pages are short. With a host tier
they are copied out ahead of that, while less than half of the pages are free: then a page gives way, and its node
stays.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pyllm.device import Event
from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.prompt_cache.host_tier import HostPage, HostTier
from pyllm.prompt_cache.pinned_pool import Block
from pyllm.prompt_cache.tree import Node, Tree
from pyllm.recurrent_cache import Checkpoint

GIVEN_UP_TOGETHER = 32  # a part of all pages so small


@dataclass(frozen=True)
class Taken:
    """A sequence that begins with known rows.

    Attributes:
        seq: the sequence.
        ready: it may be computed on when this event has completed; None: at once.
        num_bytes: of pages and states that had to be brought back from the host's memory for it.
    """

    seq: SequenceKV
    ready: Event | None = None
    num_bytes: int = 0


@dataclass(frozen=True)
class Held:
    """What is known of some tokens, held so that it stays: pages and checkpoints.

    Attributes:
        token_ids: those that are known, `length` of them.
        pages: of the device; -1: its rows are in `hosts`.
        states: in order of position.
        shifted: a sequence that began with all of these tokens had its further rows shifted, so that they are not kept.
    """

    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    epochs: tuple[int, ...]
    states: tuple[Checkpoint, ...]
    hosts: tuple[HostPage | None, ...]
    page_size: int
    shifted: bool = False

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def blocks(self) -> list[Block]:
        """Pinned memory among it."""
        return [*(host.block for host in self.hosts if host is not None), *(saved.block for saved in self.states)]

    def rows_of(self, index: int) -> int:
        """Rows that its `index`-th page has."""
        return min(self.page_size, self.length - index * self.page_size)


class PrefixIndex:
    """What is known of one cache.

    Args:
        tier: the host's memory, for pages that have to give way.

    Attributes:
        num_copied_out, num_brought_in: pages, so far.
        num_guests: sessions that are being saved or loaded, and have pages until then.
    """

    def __init__(self, cache: KVCache, tier: HostTier | None = None) -> None:
        self._cache = cache
        self._tier = tier
        self._tree = Tree(cache.page_size, cache.recurrent is not None, self._give_up)
        self._clock = itertools.count(1)
        self._moving: deque[tuple[Event, int]] = deque()  # pages that are copied, held until then
        self.num_copied_out = 0
        self.num_brought_in = 0
        self.num_guests = 0

    @property
    def num_pages(self) -> int:
        """Pages that are kept, here or there."""
        return sum(1 for _ in self._tree.nodes())

    def take(self, token_ids: Sequence[int]) -> Taken | None:
        """A new sequence with the rows, and the recurrent state, of the longest known beginning of a prompt; None when
        nothing is known. Pages and states that are in the host's memory are on their way then.

        Raises:
            ContextError: as many sequences as there are recurrent states are there already.
        """
        self._settle()
        state, on_device, num_bytes, before = None, False, 0, self.num_brought_in
        while True:
            path, length = self._tree.longest(token_ids, on_device)
            if not length:
                return None
            self._use(path)
            if not self._bring_in(path):
                on_device = True
                continue
            ready = next((node.ready for node in reversed(path) if not _is_ready(node)), None)
            if self._cache.recurrent is None:
                break
            restored = self._cache.recurrent.restore(path[-1].states[length])
            if restored is not None:
                state, ready = restored  # its copy comes behind those of the pages
                num_bytes = self._cache.recurrent.bytes_per_checkpoint
                break
            self._drop_state(path[-1], length)  # its marks are not right
        seq = self._cache.adopt([node.page for node in path], [node.epoch for node in path], length, state)
        if self._tier is not None:
            num_bytes += (self.num_brought_in - before) * self._tier.pool.block_bytes
        return Taken(seq, ready, num_bytes)

    def known(self, token_ids: Sequence[int], anywhere: bool = False) -> int:
        """How many tokens of a prompt have rows on the device, so that it needs no pages for them; or anywhere."""
        return self._tree.longest(token_ids, on_device=not anywhere)[1]

    def num_parts(self, token_ids: Sequence[int]) -> int:
        """How many pages that are filled in part lie behind the whole pages of some tokens."""
        return self._tree.num_parts(token_ids)

    def keep(self, token_ids: Sequence[int], seq: SequenceKV) -> None:
        """Keep the clean rows of a sequence that is about to be released, and its checkpoints.

        Args:
            token_ids: of the sequence's first rows at least; rows behind them are not kept.
        """
        length = min(seq.num_clean, len(token_ids))
        if seq.shifted_from is not None:
            length = min(length, seq.shifted_from)  # whole pages
        states = self._checkpoints(seq, length)
        if self._cache.recurrent is not None:
            length = max(states, default=0)  # rows behind the last checkpoint are of no use
        self._add(token_ids[:length], seq.pages, seq.epochs, states, length == seq.shifted_from)
        self._copy_out()

    def insert(
        self,
        token_ids: Sequence[int],
        pages: Sequence[int],
        epochs: Sequence[int],
        saved: Sequence[Checkpoint],
        shifted: bool = False,
    ) -> None:
        """Keep rows, and checkpoints, that were brought in. The caller holds the pages and lets them go afterwards.

        Args:
            shifted: as in `Held`.
        """
        states = {one.position: one for one in saved}
        self._add(token_ids, pages, epochs, states, shifted)
        for left in states.values():
            self._cache.recurrent.drop(left)  # type: ignore[union-attr]

    def hold(self, token_ids: Sequence[int]) -> Held:
        """Hold what is known of the beginning of some tokens, until `let_go`."""
        path, length = self._tree.longest(token_ids)
        hosts = tuple(None if node.page >= 0 else node.host for node in path)
        found = [saved for node in path for saved in node.states.values() if saved.position <= length]
        states = sorted((saved for saved in found if saved.block.is_kept), key=lambda saved: saved.position)
        pages, epochs = tuple(node.page for node in path), tuple(node.epoch for node in path)
        shifted = bool(path) and path[-1].shifted
        held = Held(tuple(token_ids[:length]), pages, epochs, tuple(states), hosts, self._cache.page_size, shifted)
        for page in pages:
            if page >= 0:
                self._cache.hold(page)
        for block in held.blocks:
            block.num_pins += 1
        self.num_guests += 1
        return held

    def let_go(self, held: Held) -> None:
        """The end of `hold`."""
        self.num_guests -= 1
        for block in held.blocks:
            block.num_pins -= 1
        for page in held.pages:
            if page >= 0:
                self._cache.let_go(page)

    def make_room(self, num_pages: int, but: Collection[Node] = ()) -> bool:
        """Give pages up until so many are free, or, where they are lost, some more than that. Returns False when there
        are not enough; what could go has gone.

        Args:
            but: nodes that keep theirs.
        """
        self._settle()
        short = num_pages - self._cache.num_free_pages
        if short <= 0:
            return True
        if self._tier is None:  # looking for the oldest costs more than giving some more of them up
            short = max(short, self._cache.num_pages // GIVEN_UP_TOGETHER)
        leaving: list[Node] = []
        for node in self._tree.by_age():
            if node.page >= 0 and node not in but:
                leaving.append(node)
                self._copy(node)
                short -= not self._cache.is_shared(node.page)
                if short <= 0:
                    break
        for node in leaving:
            self._leave_device(node)
        self._settle()
        while self._moving and self._cache.num_free_pages < num_pages:  # of nodes that were given up meanwhile
            self._moving[0][0].synchronize()
            self._settle()
        return self._cache.num_free_pages >= num_pages

    def forget(self, page: int) -> None:
        """Drop a page that is not trusted any more, and all that was built on it."""
        for node in [node for node in self._tree.nodes() if node.page == page]:
            self._tree.remove(node)

    def clear(self, token_ids: Sequence[int] | None = None) -> None:
        """Give all pages up; with tokens, those that begin with the page that these begin with."""
        path, _ = self._tree.longest(token_ids) if token_ids is not None else ([], 0)
        for node in path[:1] if token_ids is not None else list(self._tree.root.children.values()):
            self._tree.remove(node)

    def _add(
        self,
        token_ids: Sequence[int],
        pages: Sequence[int],
        epochs: Sequence[int],
        states: dict[int, Checkpoint],
        shifted: bool,
    ) -> None:
        """Make rows known; what is known already stays. Takes the states that belong to them."""
        size, length = self._cache.page_size, len(token_ids)
        node, now, is_end = self._tree.root, next(self._clock), False
        for index in range(self._cache.pages_for(length)):
            tokens = tuple(token_ids[index * size : min((index + 1) * size, length)])
            if is_end:
                child, is_new = self._tree.append(node, tokens, pages[index], epochs[index]), True
            else:
                child, is_new = self._tree.add(node, tokens, pages[index], epochs[index])
                is_end = is_new  # nothing can be below it
            if not is_new and child.page < 0 and child.tokens == tokens:  # back on the device
                child.page, child.epoch, is_new = pages[index], epochs[index], True
            if is_new:
                self._cache.hold(child.page)
            child.used = now
            child.shifted |= shifted and index * size + len(tokens) == length
            self._add_states(child, states, index * size + len(tokens))
            if len(tokens) < size:
                return
            node = child

    def _use(self, path: Sequence[Node]) -> None:
        """What is nearer to the root gives way later."""
        now = next(self._clock)
        for node in reversed(path):
            node.used = now
            if self._tier is not None and node.host is not None:
                self._tier.pool.touch(node.host.block)

    # between the device and the host

    def _bring_in(self, path: Sequence[Node]) -> bool:
        """Start copies of pages that are not on the device; False when there is no room for them, or a copy is not what
        it should be."""
        missing = [node for node in path if node.page < 0]
        if not missing:
            return True
        if self._tier is None or not self.make_room(len(missing), set(path)):
            return False
        for node in missing:
            if node.host is None or not self._tier.is_sound(node.host):
                self._tree.remove(node)
                return False
            node.page, node.epoch = self._cache.allocate()
            node.ready = self._tier.load(node.host, node.page, node.epoch)
            self._hold_until(node.ready, node.page)
            self.num_brought_in += 1
        return True

    def _copy_out(self) -> None:
        """Copy pages to the host, the least recently used first, until half of all are free or could be."""
        if self._tier is None:
            return
        wanted = self._cache.num_pages // 2 - self._cache.num_free_pages
        for node in self._tree.by_age():
            if wanted <= 0:
                return
            if node.page >= 0:
                self._copy(node)
                wanted -= 1

    def _copy(self, node: Node) -> None:
        """Start a copy of a page to the host, unless there is one, or no room for it now."""
        if self._tier is None or node.has_copy:
            return
        started = self._tier.save(node.page, len(node.tokens), node.epoch)
        if started is not None:
            node.host, done = started
            self._hold_until(done, node.page)
            self.num_copied_out += 1

    def _leave_device(self, node: Node) -> None:
        """Give a node's page up; without a copy the node goes, and all below it, which was used before it."""
        if node.page < 0 or node.parent is None:
            return  # it went with another
        if node.host is None or not node.has_copy:
            self._tree.remove(node)
            return
        node.host.block.wait()
        self._cache.let_go(node.page)
        node.page, node.ready = -1, None

    def _hold_until(self, event: Event, page: int) -> None:
        self._cache.hold(page)
        self._moving.append((event, page))

    def _settle(self) -> None:
        """Let pages go whose copies have run."""
        while self._moving and self._moving[0][0].query():
            self._cache.let_go(self._moving.popleft()[1])

    # states

    def _checkpoints(self, seq: SequenceKV, length: int) -> dict[int, Checkpoint]:
        """Those of a sequence that may be kept, by position; the others are given up."""
        recurrent, kept = self._cache.recurrent, {}
        if recurrent is None or seq.state is None:
            return {}
        for saved in recurrent.hand_over(seq.state):
            if saved.position <= length:
                kept[saved.position] = saved
            else:
                recurrent.drop(saved)
        return kept

    def _add_states(self, node: Node, states: dict[int, Checkpoint], stop: int) -> None:
        """Move those up to a position to the node, in the place of one that is there already."""
        if not states:
            return
        for position in [position for position in states if position <= stop]:
            saved = states.pop(position)
            if node.last_state(position) == position:
                self._drop_state(node, position)
            node.states[position] = saved

    def _drop_state(self, node: Node, position: int) -> None:
        assert self._cache.recurrent is not None
        self._cache.recurrent.drop(node.states.pop(position))

    def _give_up(self, node: Node) -> None:
        """What a node owned that has left the tree."""
        for position in list(node.states):
            self._drop_state(node, position)
        if self._tier is not None and node.host is not None:
            self._tier.pool.give_back(node.host.block)
        if node.page >= 0:
            self._cache.let_go(node.page)


def _is_ready(node: Node) -> bool:
    if node.ready is not None and node.ready.query():
        node.ready = None
    return node.ready is None
