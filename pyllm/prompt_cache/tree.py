"""The tree of the prefix index: nodes, how a prompt finds its way, how branches come and go.

A node stands for one page of K/V rows, and its path from the root for all tokens before them. Its page may lie on the
device, in the host's memory, or in both. What it owns is given up through the functions that the tree was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pyllm.device import Event
from pyllm.prompt_cache.host_tier import HostPage
from pyllm.recurrent_cache import Checkpoint


@dataclass(eq=False, slots=True)
class Node:
    """One page.

    Attributes:
        tokens: those whose rows the page holds, at most a page full.
        page, epoch: where they lie on the device, and the tag that they carry; page -1: not there.
        start: position of the first of them.
        used: when it was used last; parents at least as late as their children.
        parts: those of the children whose pages are not full.
        states: checkpoints by position, from start + 1 to the end of the page's tokens.
        host: a copy in the host's memory.
        ready: the page may be computed with when this event has completed; None: at once.
        shifted: a sequence went on from here with rows that were shifted, of which nothing is kept.
    """

    tokens: tuple[int, ...]
    page: int
    epoch: int
    parent: Node | None
    start: int = 0
    used: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    parts: dict[tuple[int, ...], Node] = field(default_factory=dict)
    states: dict[int, Checkpoint] = field(default_factory=dict)
    host: HostPage | None = None
    ready: Event | None = None
    shifted: bool = False

    @property
    def has_copy(self) -> bool:
        """Whether its rows are in the host's memory."""
        return self.host is not None and self.host.block.is_kept

    @property
    def is_known(self) -> bool:
        """Whether its rows are anywhere."""
        return self.page >= 0 or self.has_copy

    def last_state(self, stop: int) -> int:
        """Position of the last checkpoint up to `stop`; 0 without one."""
        for position in [position for position, saved in self.states.items() if not saved.block.is_kept]:
            del self.states[position]
        return max((position for position in self.states if position <= stop), default=0)


class Tree:
    """All nodes.

    Args:
        page_size: tokens of a full page.
        needs_states: a prompt can go on only from a checkpoint.
        give_up: called with each node that leaves the tree.
    """

    def __init__(self, page_size: int, needs_states: bool, give_up: Callable[[Node], None]) -> None:
        self.root = Node((), -1, 0, None)
        self._page_size = page_size
        self._needs_states = needs_states
        self._give_up = give_up

    def nodes(self) -> Iterator[Node]:
        """All of them, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def by_age(self) -> list[Node]:
        """The least recently used first, children before their parents."""
        found: list[tuple[int, int, int, Node]] = []
        stack = [(child, -1) for child in self.root.children.values()]
        while stack:
            node, depth = stack.pop()
            found.append((node.used, depth, len(found), node))
            if node.children:
                stack.extend((child, depth - 1) for child in node.children.values())
        return [node for *_, node in sorted(found)]

    def longest(self, token_ids: Sequence[int], on_device: bool = False) -> tuple[list[Node], int]:
        """Nodes whose pages hold the beginning of a prompt, and how many of its tokens these are; where states are
        needed, up to a checkpoint.

        Args:
            on_device: of pages on the device alone.
        """
        size, path, best = self._page_size, list[Node](), (list[Node](), 0)
        node: Node | None = self.root
        while node is not None:
            start = len(path) * size
            rest, following = tuple(token_ids[start : start + size]), None
            for child in list(node.children.values()):
                if not child.is_known:
                    self.remove(child)
                    continue
                at_least = max(1, best[1] - start + 1)  # tokens that it has to share: hundreds of children begin alike
                if child.tokens[:at_least] != rest[:at_least] or (on_device and child.page < 0):
                    continue
                shared = shared_length(child.tokens, rest)
                usable = child.last_state(start + shared) if self._needs_states else start + shared
                if usable > best[1]:
                    best = [*path, child], usable
                if shared == size:
                    following = child
            if following is not None:
                path.append(following)
            node = following
        return best

    def num_parts(self, token_ids: Sequence[int]) -> int:
        """How many children that are not full the node has at which the whole pages of some tokens end."""
        node: Node | None = self.root
        for start in range(0, len(token_ids) - self._page_size + 1, self._page_size):
            node = node.children.get(tuple(token_ids[start : start + self._page_size])) if node is not None else None
        return len(node.parts) if node is not None else 0

    def add(self, node: Node, tokens: tuple[int, ...], page: int, epoch: int) -> tuple[Node, bool]:
        """The child of a node for some tokens, and whether it was made now; one that has these and more is as good."""
        child = node.children.get(tokens)
        if child is None and len(tokens) < self._page_size:
            child = self._covering(node, tokens)
        if child is not None and child.is_known:
            return child, False
        known = self._drop_covered(node, tokens) if node.parts or child is not None else dict[int, Checkpoint]()
        child = self.append(node, tokens, page, epoch)
        child.states = known
        return child, True

    def append(self, node: Node, tokens: tuple[int, ...], page: int, epoch: int) -> Node:
        """A new child of a node, which has none that begins like it."""
        child = Node(tokens, page, epoch, node, node.start + len(node.tokens))
        node.children[tokens] = child
        if len(tokens) < self._page_size:
            node.parts[tokens] = child
        return child

    def remove(self, node: Node) -> None:
        """Take a node and all below it out."""
        if node.parent is not None:
            node.parent.children.pop(node.tokens, None)
            node.parent.parts.pop(node.tokens, None)
            node.parent = None
        stack = [node]
        while stack:
            one = stack.pop()
            stack.extend(one.children.values())
            one.children.clear()
            one.parts.clear()
            one.parent = None
            self._give_up(one)

    def _covering(self, node: Node, tokens: tuple[int, ...]) -> Node | None:
        """A child that holds these tokens, less than a page full, and more."""
        return next((child for child in node.children.values() if child.tokens[: len(tokens)] == tokens), None)

    def _drop_covered(self, node: Node, tokens: tuple[int, ...]) -> dict[int, Checkpoint]:
        """Drop children that hold nothing but a beginning of these tokens; returns their checkpoints."""
        states: dict[int, Checkpoint] = {}
        covered = [child for child in node.parts.values() if tokens[: len(child.tokens)] == child.tokens]
        same = node.children.get(tokens)
        if same is not None and same not in covered:
            covered.append(same)
        for child in covered:
            states |= child.states
            child.states.clear()
            self.remove(child)
        return states


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
