"""Rows of sequences that have ended, kept for prompts that begin like them.

A tree over token ids, a page at a time: a node stands for one page of K/V rows, and its path from the root for all
tokens before them. Rows depend on all tokens up to their own, so a path that a prompt shares is rows that it need not
compute. A node owns one reference to its page. Leaves may hold a page that is filled in part; a prompt may also share a
part of any page: its sequence then gets a copy of that page before it writes there (`KVCache.adopt`).

Where a model has recurrent layers, rows alone are not enough: a prompt can go on only from a checkpoint of their
states, at exactly its position. Nodes hold the checkpoints whose positions lie in their page; a prompt gets the rows up
to the last checkpoint that it shares all tokens with.

Only what was read clean comes here. What was used least recently gives way when pages are short, leaves first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pyllm.device import Event
from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.recurrent_cache import Checkpoint


@dataclass(eq=False)
class _Node:
    """One page.

    Attributes:
        tokens: those whose rows the page holds, at most a page full.
        page, epoch: where they lie, and the tag that they carry.
        start: position of the first of them.
        used: when it was used last; parents at least as late as their children.
        states: checkpoints by position, from start + 1 to the end of the page's tokens.
    """

    tokens: tuple[int, ...]
    page: int
    epoch: int
    parent: _Node | None
    start: int = 0
    used: int = 0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    states: dict[int, Checkpoint] = field(default_factory=dict)

    def last_state(self, stop: int) -> int:
        """Position of the last checkpoint up to `stop`; 0 without one."""
        for position in [position for position, saved in self.states.items() if not saved.block.is_kept]:
            del self.states[position]
        return max((position for position in self.states if position <= stop), default=0)


@dataclass(frozen=True)
class Taken:
    """A sequence that begins with known rows.

    Attributes:
        seq: the sequence.
        ready: it may be computed on when this event has completed; None: at once.
    """

    seq: SequenceKV
    ready: Event | None = None


@dataclass(frozen=True)
class Held:
    """What is known of some tokens, held so that it stays: pages and checkpoints.

    Attributes:
        token_ids: those that are known, `length` of them.
        states: in order of position.
    """

    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    epochs: tuple[int, ...]
    states: tuple[Checkpoint, ...]
    page_size: int

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def rows_of(self, index: int) -> int:
        """Rows that its `index`-th page has."""
        return min(self.page_size, self.length - index * self.page_size)


class PrefixIndex:
    """The tree of one cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._root = _Node((), -1, 0, None)
        self._clock = itertools.count(1)

    @property
    def num_pages(self) -> int:
        """Pages that are kept."""
        return sum(1 for _ in self._nodes())

    def take(self, token_ids: Sequence[int]) -> Taken | None:
        """A new sequence with the rows, and the recurrent state, of the longest known beginning of a prompt; None when
        nothing is known.

        Raises:
            ContextError: as many sequences as there are recurrent states are there already.
        """
        state, ready = None, None
        while True:
            path, length = self._longest(token_ids)
            if not length:
                return None
            if self._cache.recurrent is None:
                break
            restored = self._cache.recurrent.restore(path[-1].states[length])
            if restored is not None:
                state, ready = restored
                break
            self._drop_state(path[-1], length)  # its marks are not right
        now = next(self._clock)
        for node in path:
            node.used = now
        seq = self._cache.adopt([node.page for node in path], [node.epoch for node in path], length, state)
        return Taken(seq, ready)

    def known(self, token_ids: Sequence[int]) -> int:
        """How many tokens of a prompt `take` would find rows for."""
        return self._longest(token_ids)[1]

    def keep(self, token_ids: Sequence[int], seq: SequenceKV) -> None:
        """Keep the clean rows of a sequence that is about to be released, and its checkpoints.

        Args:
            token_ids: of the sequence's first rows at least; rows behind them are not kept.
        """
        length = min(seq.num_clean, len(token_ids))
        states = self._checkpoints(seq, length)
        if self._cache.recurrent is not None:
            length = max(states, default=0)  # rows behind the last checkpoint are of no use
        self._add(token_ids[:length], seq.pages, seq.epochs, states)

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], epochs: Sequence[int], saved: Sequence[Checkpoint]
    ) -> None:
        """Keep rows, and checkpoints, that were brought in. The caller holds the pages and lets them go afterwards."""
        states = {one.position: one for one in saved}
        self._add(token_ids, pages, epochs, states)

    def hold(self, token_ids: Sequence[int]) -> Held:
        """Hold what is known of the beginning of some tokens, until `let_go`."""
        path, length = self._longest(token_ids)
        for node in path:
            self._cache.hold(node.page)
        found = [saved for node in path for saved in node.states.values() if saved.position <= length]
        states = sorted((saved for saved in found if saved.block.is_kept), key=lambda saved: saved.position)
        for saved in states:
            saved.block.num_pins += 1
        pages, epochs = (node.page for node in path), (node.epoch for node in path)
        return Held(tuple(token_ids[:length]), tuple(pages), tuple(epochs), tuple(states), self._cache.page_size)

    def let_go(self, held: Held) -> None:
        """The end of `hold`."""
        for saved in held.states:
            saved.block.num_pins -= 1
        for page in held.pages:
            self._cache.let_go(page)

    def _add(
        self, token_ids: Sequence[int], pages: Sequence[int], epochs: Sequence[int], states: dict[int, Checkpoint]
    ) -> None:
        """Make rows known; what is known already stays."""
        size, length = self._cache.page_size, len(token_ids)
        node, now = self._root, next(self._clock)
        for index in range(self._cache.pages_for(length)):
            tokens = tuple(token_ids[index * size : min((index + 1) * size, length)])
            child = node.children.get(tokens) or self._covering(node, tokens)
            if child is None:
                known = self._drop_covered(node, tokens)
                child = _Node(tokens, pages[index], epochs[index], node, index * size, states=known)
                self._cache.hold(child.page)
                node.children[tokens] = child
            child.used = now
            self._add_states(child, states, index * size + len(tokens))
            if len(tokens) < size:
                return
            node = child

    def make_room(self, num_pages: int) -> bool:
        """Give pages up until so many are free. Returns False when there are not enough; what could go has gone."""
        if self._cache.num_free_pages >= num_pages:
            return True
        # Parents were used no earlier than their children, so that in this order each node is a leaf when it goes.
        for _, _, node in sorted(self._by_age(), key=lambda item: item[:2]):
            self._remove(node)
            if self._cache.num_free_pages >= num_pages:
                return True
        return False

    def forget(self, page: int) -> None:
        """Drop a page that is not trusted any more, and all that was built on it."""
        for node in [node for node in self._nodes() if node.page == page]:
            self._remove(node)

    def clear(self) -> None:
        """Give all pages up."""
        for node in list(self._root.children.values()):
            self._remove(node)

    def _by_age(self) -> Iterator[tuple[int, int, _Node]]:
        """Time of last use, depth below zero, and node."""
        stack = [(child, -1) for child in self._root.children.values()]
        while stack:
            node, depth = stack.pop()
            yield node.used, depth, node
            stack.extend((child, depth - 1) for child in node.children.values())

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _longest(self, token_ids: Sequence[int]) -> tuple[list[_Node], int]:
        """Nodes whose pages hold the beginning of a prompt, and how many of its tokens these are; with recurrent layers
        up to a checkpoint."""
        size, path, best = self._cache.page_size, list[_Node](), (list[_Node](), 0)
        node: _Node | None = self._root
        while node is not None:
            start = len(path) * size
            rest, following = tuple(token_ids[start : start + size]), None
            for child in node.children.values():
                shared = shared_length(child.tokens, rest)
                usable = start + shared if self._cache.recurrent is None else child.last_state(start + shared)
                if shared and usable > best[1]:
                    best = [*path, child], usable
                if shared == size:
                    following = child
            if following is not None:
                path.append(following)
            node = following
        return best

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

    def _add_states(self, node: _Node, states: dict[int, Checkpoint], stop: int) -> None:
        """Move those up to a position to the node; one that is there already stays."""
        for position in [position for position in states if position <= stop]:
            saved = states.pop(position)
            if node.last_state(position) == position:
                self._drop_state(node, position)
            node.states[position] = saved

    def _drop_state(self, node: _Node, position: int) -> None:
        assert self._cache.recurrent is not None
        self._cache.recurrent.drop(node.states.pop(position))

    @staticmethod
    def _covering(node: _Node, tokens: tuple[int, ...]) -> _Node | None:
        """A child that holds these tokens and more."""
        return next((child for child in node.children.values() if child.tokens[: len(tokens)] == tokens), None)

    def _drop_covered(self, node: _Node, tokens: tuple[int, ...]) -> dict[int, Checkpoint]:
        """Drop children that hold nothing but a beginning of these tokens; returns their checkpoints."""
        states: dict[int, Checkpoint] = {}
        for child in list(node.children.values()):
            if tokens[: len(child.tokens)] == child.tokens:
                states |= child.states
                child.states.clear()
                self._remove(child)
        return states

    def _remove(self, node: _Node) -> None:
        """Take a node and all below it out of the tree, and give their pages up."""
        if node.parent is not None:
            node.parent.children.pop(node.tokens, None)
            node.parent = None
        stack = [node]
        while stack:
            one = stack.pop()
            stack.extend(one.children.values())
            one.children.clear()
            one.parent = None
            for position in list(one.states):
                self._drop_state(one, position)
            self._cache.let_go(one.page)


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
