"""What one rendering of a chat template may use: steps, time, size of values, memory. Knows nothing of Jinja."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NODE_SIZE = 16
"""Of a list item or a mapping entry, in characters."""

_ITEM_BYTES = 128  # an item that was made together with its list: more than a number, a short text or a method takes


class LimitError(Exception):
    """The template asked for more than it may have."""


@dataclass
class Limits:
    """What one rendering may still use.

    Attributes:
        steps: loop rounds and calls.
        size: characters of the output, and of any one value (list items and mapping entries count as 16).
        memory: bytes of all values together, whether they are still in use or not: a template can keep each of them.
        deadline: on the clock of time.monotonic, in seconds.
    """

    steps: int
    size: int
    memory: int
    deadline: float

    def __post_init__(self) -> None:
        self.printed = 0

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise LimitError("it runs too many steps; it probably loops for ever")
        self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitError("it takes too long")

    def print(self, num_chars: int) -> None:
        self.printed += num_chars
        if self.printed > self.size:
            raise LimitError(f"its output is longer than {self.size} characters")

    def fit(self, size: int) -> None:
        """Refuse a value of this size."""
        if size > self.size:
            raise LimitError(f"it builds a value larger than {self.size} characters")

    def measure(self, value: Any) -> int:
        """The size of a value written out, refused if it is too large. A list may hold another one many times: all of
        them count.
        """
        size, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str | bytes):
                size += len(item)
            elif isinstance(item, Mapping):
                size += NODE_SIZE * len(item)
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, list | tuple):
                size += NODE_SIZE * len(item)
                self.fit(size)
                waiting += item
            self.fit(size)
        return size

    def made(self, value: Any, with_items: bool = False) -> None:
        """Count a new value.

        Args:
            with_items: its items are new too; of texts among them only so much as a short one takes is counted.
        """
        num_bytes = sys.getsizeof(value, _ITEM_BYTES)
        if with_items and isinstance(value, list | tuple | Mapping):
            num_bytes += _ITEM_BYTES * len(value)
        self.take(num_bytes)

    def joined(self, left: str, right: str) -> str:
        """Two texts put together, measured and counted."""
        self.fit(len(left) + len(right))
        text = left + right
        self.take(sys.getsizeof(text))
        return text

    def take(self, num_bytes: int) -> None:
        """Count so many bytes."""
        self.memory -= num_bytes
        if self.memory < 0:
            raise LimitError("it builds more or larger values than fit into its memory")
