"""Which beginning of the prompts is to be computed before they start side by side.

The engine serves a prompt's beginning from rows of sequences that have ended. Lines that share one and start together
would each compute it; so it is computed by itself first, once, and they follow. Whether the engine kept it is seen in
what it says of the lines behind it; where it did not, nothing is computed ahead again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

LEAST = 128  # tokens: for less, waiting costs more than it saves
_REMEMBERED = 16


class SharedPrefixes:
    """What was computed, and whether it was of use."""

    def __init__(self) -> None:
        self._computed: deque[Sequence[int]] = deque(maxlen=_REMEMBERED)
        self._is_useful = True

    def to_compute(self, first: Sequence[int], second: Sequence[int]) -> Sequence[int] | None:
        """The beginning that the next two prompts share, unless it is short, or known but for a little."""
        if not self._is_useful:
            return None
        length = _shared(first, second)
        return first[:length] if length >= LEAST and length - self.known(first) >= LEAST else None

    def known(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt's beginning that were computed ahead."""
        return max((_shared(prompt, prefix) for prefix in self._computed), default=0)

    def add(self, prefix: Sequence[int]) -> None:
        """It was computed."""
        self._computed.append(prefix)

    def give_up(self) -> None:
        """It is of no use here."""
        self._is_useful = False


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
