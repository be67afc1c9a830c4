"""Rows of sequences that have ended, kept for prompts that begin like them.

A tree over token ids, a page at a time: a node stands for one page of K/V rows, and its path from the root for all
tokens before them. Rows depend on all tokens up to their own, so a path that a prompt shares is rows that it need not
compute. A node owns one reference to its page. Leaves may hold a page that is filled in part; a prompt may also share a
part of any page: its sequence then gets a copy of that page before it writes there (`KVCache.adopt`).

Only rows that were read clean come here. What was used least recently gives way when pages are short, leaves first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pyllm.kv_cache import KVCache, SequenceKV


@dataclass(eq=False)
class _Node:
    """One page.

    Attributes:
        tokens: those whose rows the page holds, at most a page full.
        page, epoch: where they lie, and the tag that they carry.
        used: when it was used last; parents at least as late as their children.
    """

    tokens: tuple[int, ...]
    page: int
    epoch: int
    parent: _Node | None
    used: int = 0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class PrefixIndex:
    """The tree of one cache.

    Args:
        cache: without recurrent layers, whose states are no rows.
    """

    def __init__(self, cache: KVCache) -> None:
        if cache.recurrent is not None:
            raise ValueError("recurrent states cannot be shared by rows")
        self._cache = cache
        self._root = _Node((), -1, 0, None)
        self._clock = itertools.count(1)

    @property
    def num_pages(self) -> int:
        """Pages that are kept."""
        return sum(1 for _ in self._nodes())

    def take(self, token_ids: Sequence[int]) -> SequenceKV | None:
        """A new sequence with the rows of the longest known beginning of a prompt; None when nothing is known."""
        path, length = self._longest(token_ids)
        if not length:
            return None
        now = next(self._clock)
        for node in path:
            node.used = now
        return self._cache.adopt([node.page for node in path], [node.epoch for node in path], length)

    def keep(self, token_ids: Sequence[int], seq: SequenceKV) -> None:
        """Keep the clean rows of a sequence that is about to be released.

        Args:
            token_ids: of the sequence's first rows at least; rows behind them are not kept.
        """
        size, length = self._cache.page_size, min(seq.num_clean, len(token_ids))
        node, now = self._root, next(self._clock)
        for index in range(self._cache.pages_for(length)):
            tokens = tuple(token_ids[index * size : min((index + 1) * size, length)])
            child = node.children.get(tokens) or self._covering(node, tokens)
            if child is None:
                self._drop_covered(node, tokens)
                child = _Node(tokens, seq.pages[index], seq.epochs[index], node)
                self._cache.hold(child.page)
                node.children[tokens] = child
            child.used = now
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
        """Nodes whose pages hold the beginning of a prompt, and how many of its tokens these are."""
        size, path, node, length = self._cache.page_size, [], self._root, 0
        while True:
            rest = tuple(token_ids[length : length + size])
            child = node.children.get(rest) if len(rest) == size else None
            if child is None:
                break
            path.append(child)
            node, length = child, length + size
        # A part of one more page.
        shared = {child: _shared(child.tokens, rest) for child in node.children.values()}
        best = max(shared, key=lambda child: shared[child], default=None)
        if best is not None and shared[best]:
            path.append(best)
            length += shared[best]
        return path, length

    @staticmethod
    def _covering(node: _Node, tokens: tuple[int, ...]) -> _Node | None:
        """A child that holds these tokens and more."""
        return next((child for child in node.children.values() if child.tokens[: len(tokens)] == tokens), None)

    def _drop_covered(self, node: _Node, tokens: tuple[int, ...]) -> None:
        """Drop children that hold nothing but a beginning of these tokens."""
        for child in list(node.children.values()):
            if tokens[: len(child.tokens)] == child.tokens:
                self._remove(child)

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
            self._cache.let_go(one.page)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
