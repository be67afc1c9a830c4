"""Which characters of a rendered template are the template's own.

A template's own texts (its literals, the roles, the BOS and EOS variables) are handed to it as `Own`: a str in every
respect, until it is put together with others or printed. Then `Marks.mark` replaces those of its characters that may be
part of a control token by stand-ins, and whatever the template goes on to do, the stand-ins tell where such a character
comes from. What others wrote is never marked. Finally `Marks.cut` cuts the text at control tokens of which every
character is marked, and gives the other marked characters their form back.

Marked are, in one own text: whole control tokens; a beginning of one at the text's end, an end of one at its start; and
a text that is a part of one, so that '<|' + role + '|>' becomes a token. Everything else stays as it is, so templates
can go on comparing and searching texts that they put together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import chain

from pyllm.template_limits import LimitError
from pyllm.tokenizer_special import ControlTexts

# Unicode's private-use planes. Characters of them that occur in the messages or in the template are left out.
_STAND_INS = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_STAND_IN = re.compile("[\U000f0000-\U0010ffff]")
_PLACEHOLDER = re.compile(r"(%s|\{\w*\})")  # texts go there, so what stands on its two sides ends there
_MOST_KEPT = 1024  # texts that are remembered
_LONGEST_KEPT = 1 << 16  # characters of one


class Own(str):
    """A text of the template's own."""

    __slots__ = ()


class Marks:
    """Stand-ins, for one rendering or for several, one after the other."""

    def __init__(self, controls: ControlTexts, foreign: Collection[str]) -> None:
        """
        Args:
            foreign: private-use characters that may get into the text unmarked, see `private_chars`.
        """
        self._controls = controls
        self._free = (char for char in map(chr, chain(*_STAND_INS)) if char not in foreign)
        self._stand_ins: dict[int, str] = {}
        self._chars: dict[int, str] = {}
        self._runs: re.Pattern[str] | None = None  # of stand-ins, those of `_chars`
        self._marked: dict[str, str] = {}
        self._split: dict[str, list[str | int]] = {}

    def mark(self, text: str) -> str:
        """An own text, its characters marked."""
        marked = self._marked.get(text)
        if marked is None:
            marked = "".join(map(self._mark_piece, _PLACEHOLDER.split(text)))
            if len(self._marked) < _MOST_KEPT and len(text) <= _LONGEST_KEPT:
                self._marked[text] = marked
        return marked

    def _mark_piece(self, text: str) -> str:
        chars = list(text)
        for start, end in self._controls.parts(text):
            chars[start:end] = map(self._stand_in, text[start:end])
        return "".join(chars)

    def _stand_in(self, char: str) -> str:
        stand_in = self._stand_ins.get(ord(char))
        if stand_in is None:
            stand_in = next(self._free, "")
            if not stand_in:
                raise LimitError("there are not enough private-use characters to tell its own texts from the messages")
            self._stand_ins[ord(char)] = stand_in
            self._chars[ord(stand_in)] = char
            self._runs = None
        return stand_in

    def plain(self, text: str) -> str:
        """The text with marked characters in their own form."""
        return text if text.isascii() else _STAND_IN.sub(lambda match: match[0].translate(self._chars), text)

    def cut(self, rendered: str) -> list[str | int]:
        """The rendered text as a sequence of ids of control tokens and of the non-empty texts between them."""
        if not self._chars:
            return [rendered] if rendered else []
        if self._runs is None:
            self._runs = re.compile(f"([{''.join(map(chr, self._chars))}]+)")
        pieces: list[str | int] = []
        text: list[str] = []
        # Odd parts are marked throughout.
        for index, part in enumerate(self._runs.split(rendered)):
            if index % 2 == 0:
                text.append(part)
                continue
            for found in self._split_run(part):
                if isinstance(found, str):
                    text.append(found)
                else:
                    pieces += ["".join(text), found]
                    text.clear()
        pieces.append("".join(text))
        return [piece for piece in pieces if piece != ""]

    def _split_run(self, run: str) -> list[str | int]:
        """Control tokens and texts of characters that are all marked."""
        found = self._split.get(run)
        if found is None:
            found = self._controls.split(self.plain(run))
            if len(self._split) < _MOST_KEPT and len(run) <= _LONGEST_KEPT:
                self._split[run] = found
        return found


def private_chars(texts: Iterable[str]) -> set[str]:
    """All characters of some texts that a stand-in must not be."""
    return {char for text in texts if not text.isascii() for char in _STAND_IN.findall(text)}
