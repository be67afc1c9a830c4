"""Finding special tokens, and parts of them, in raw text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

_MAX_PART = 256  # characters; parts of longer tokens are not looked for
_MAX_KEPT = 4096  # texts whose parts are remembered
_FEW = 32  # tokens that are looked for one after the other


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
        spans = self.find(text)
        if not spans:
            return [text] if text else []
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

    def find(self, text: str) -> dict[int, tuple[int, int]]:
        """start -> (end, id) of every special token. Every step is a C search; each token passes over the text once."""
        spans: dict[int, tuple[int, int]] = {}
        claimed = bytearray(len(text))
        tokens = self._tokens
        if len(tokens) > _FEW:
            # A vocabulary may have thousands of special tokens (Gemma: 6,400); most begin with a pair the text lacks.
            pairs = set(map(str.__add__, text, text[1:]))
            tokens = [one for one in tokens if one[0][:2] in pairs or len(one[0]) == 1]
        for token, token_id in tokens:
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


class ControlTexts:
    """The texts of a vocabulary's control tokens, and what of a text may become one together with others. Threads may
    share it.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        """Takes id by text; no text is empty."""
        self._tokens = SpecialTokens(ids.items())
        self._texts = [text for text in ids if len(text) <= _MAX_PART]
        self._parts: dict[str, tuple[tuple[int, int], ...]] = {}

    def split(self, text: str) -> list[str | int]:
        """See SpecialTokens.split."""
        return self._tokens.split(text)

    def parts(self, text: str) -> tuple[tuple[int, int], ...]:
        """(start, end) of control tokens in a text, of a beginning of one at its end, of an end of one at its start; or
        of all of the text if it is a part of one. They may overlap.
        """
        parts = self._parts.get(text)
        if parts is None:
            parts = tuple(self._find_parts(text))
            if len(self._parts) < _MAX_KEPT:
                self._parts[text] = parts
        return parts

    def _find_parts(self, text: str) -> Iterator[tuple[int, int]]:
        if len(text) <= _MAX_PART and text in self._joined:
            yield 0, len(text)
            return
        for start, (end, _) in self._tokens.find(text).items():
            yield start, end
        yield 0, _overlap(self._ends, text[::-1])
        yield len(text) - _overlap(self._starts, text), len(text)

    @cached_property
    def _joined(self) -> str:
        return "\0".join(self._texts)

    @cached_property
    def _starts(self) -> list[str]:
        return sorted(self._texts)

    @cached_property
    def _ends(self) -> list[str]:
        """All texts backwards: an end of a token at a text's start is a beginning at the end of the text backwards."""
        return sorted(text[::-1] for text in self._texts)


def _overlap(texts: list[str], text: str) -> int:
    """Length of the longest end of `text` with which one of the sorted texts begins; 0 if there is none."""
    for length in range(min(len(text), _MAX_PART), 0, -1):
        end = text[-length:]
        at = bisect_left(texts, end)
        if at < len(texts) and texts[at].startswith(end):
            return length
    return 0
