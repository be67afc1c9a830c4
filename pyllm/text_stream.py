"""Tokens in, text out, one sequence at a time: whole characters only, and nothing of a stop string.

This module knows nothing of when a generation ends for other reasons (end tokens, limits): its caller does.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from pyllm.errors import UsageError

_Decoder = codecs.getincrementaldecoder("utf-8")


class PieceSource(Protocol):
    """What a stream needs of a tokeniser."""

    def shown_piece(self, token_id: int, opens: bool, skip_special: bool = False) -> tuple[bytes, bool]: ...

    def shown_pieces(self, token_ids: Sequence[int], opens: bool, skip_special: bool = False) -> tuple[bytes, bool]: ...


class TextStream:
    """The text of a sequence that grows token by token.

    What `push` and `flush` return, joined, is `Tokenizer.decode(ids, skip_special, continues)` up to the first stop
    string. Which stop string comes first does not depend on where tokens end: it is the one that is complete first,
    and of those that end together the longest.

    Attributes:
        stopped: a stop string was seen. The text before it was returned, nothing after it will be.
    """

    def __init__(
        self, tokenizer: PieceSource, stop: Sequence[str] = (), skip_special: bool = True, continues: bool = True
    ) -> None:
        """
        Args:
            tokenizer: a Tokenizer.
            stop: non-empty texts.
            skip_special: leave control tokens out; otherwise their text is shown (and may complete a stop string).
            continues: the tokens go on from a prompt, see `Tokenizer.decode`.

        Raises:
            UsageError: an empty stop string, which would stop everything.
        """
        if isinstance(stop, str):
            stop = (stop,)
        if not all(stop):
            raise UsageError("stop contains an empty string; every stop string needs at least one character")
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special = skip_special
        self._opens = not continues
        # Holds back the bytes of a character that is still incomplete; what can be no character becomes U+FFFD at once.
        self._decoder = _Decoder("replace")
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take a token; return the text that is safe to show now, often "".

        Raises:
            UsageError: no such token.
        """
        data, self._opens = self._tokenizer.shown_piece(token_id, self._opens, self._skip_special)
        if not self._stop and not self._decoder.buffer and data.isascii():
            return data.decode("ascii")
        return self._take(self._decoder.decode(data))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """What `push` returns for one after the other, at less cost."""
        if self._stop:
            return "".join(map(self.push, token_ids))
        data, self._opens = self._tokenizer.shown_pieces(token_ids, self._opens, self._skip_special)
        return self._take(self._decoder.decode(data))

    def flush(self) -> str:
        """The sequence is over: return what was held back. An incomplete character becomes U+FFFD."""
        text = self._take(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text += self._held
        self._held = ""
        return text

    def _take(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that could become `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
