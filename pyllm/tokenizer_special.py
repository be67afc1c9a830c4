"""Cutting special tokens out of raw text, longest first."""

from __future__ import annotations

from collections.abc import Iterable


class SpecialTokens:
    """Finds a fixed set of token texts.

    All occurrences of the longest text (in UTF-8 bytes) are claimed first, from left to right, then those of the next
    one in what is left: the longest wins, not the leftmost.
    """

    def __init__(self, tokens: Iterable[tuple[str, int]]) -> None:
        """Takes (text, id) pairs; no text is empty."""
        # Sorting is stable: of equal length, the lower id is claimed first.
        self._tokens = sorted(tokens, key=lambda item: -len(item[0].encode()))

    def split(self, text: str) -> list[str | int]:
        """The text as a sequence of ids of special tokens and of the non-empty texts between them."""
        spans = self._find(text)
        parts: list[str | int] = []
        position = 0
        for start in sorted(spans):
            end, token_id = spans[start]
            if position < start:
                parts.append(text[position:start])
            parts.append(token_id)
            position = end
        if position < len(text):
            parts.append(text[position:])
        return parts

    def _find(self, text: str) -> dict[int, tuple[int, int]]:
        """start: (end, id) of every special token. Every step is a C search; each token passes over the text once."""
        spans: dict[int, tuple[int, int]] = {}
        claimed = bytearray(len(text))
        # A vocabulary may have thousands of special tokens (Gemma: 6,400); most begin with a pair the text lacks.
        pairs = set(map(str.__add__, text, text[1:]))
        for token, token_id in self._tokens:
            if len(token) > 1 and token[:2] not in pairs:
                continue
            start = text.find(token)
            while start >= 0:
                end = start + len(token)
                blocked = claimed.rfind(1, start, end)
                if blocked < 0:
                    claimed[start:end] = b"\1" * len(token)
                    spans[start] = (end, token_id)
                else:
                    end = claimed.find(0, blocked)
                    if end < 0:
                        break
                start = text.find(token, end)
        return spans
