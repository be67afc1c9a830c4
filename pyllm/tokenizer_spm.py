"""SentencePiece BPE (`llama`): characters merge by the score of the token that they form; leftovers become bytes.

No regex cuts the text: merges cross words. Special tokens are not this module's business.

Source: Kudo & Richardson 2018, arXiv:1808.06226 (SentencePiece); Sennrich et al. 2016, arXiv:1508.07909 (BPE).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence

from pyllm.tokenizer_vocab import TokenType, Vocabulary

SPACE = "▁"
_MERGEABLE = frozenset({TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED})
_BYTE_TEXT = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_CACHE_WORDS = 1 << 15
_CACHE_WORD_LENGTH = 32


class SpmModel:
    """Encodes text that holds no special tokens."""

    def __init__(self, vocab: Vocabulary) -> None:
        # Markup and byte tokens never come from text: someone who types <s> or <0x0A> means those characters.
        self._ids = {
            token: i
            for i, (token, token_type) in enumerate(zip(vocab.tokens, vocab.types, strict=True))
            if token and token_type in _MERGEABLE
        }
        self._scores = vocab.scores
        self._prefix = SPACE if vocab.add_space_prefix else ""
        self._byte_ids = self._bytes_to_ids(vocab)
        # No token reaches from any other character into a following ▁, so no merge does: texts cut there give the same
        # ids, and words repeat (see _merge for what is saved).
        before_space = {token[at - 1] for token in self._ids for at in _inner_spaces(token)}
        look_behind = f"(?<![{re.escape(''.join(sorted(before_space)))}])" if before_space else ""
        self._word_start = re.compile(f"{look_behind}(?={SPACE})")
        self._cache: dict[str, list[int]] = {}

    def _bytes_to_ids(self, vocab: Vocabulary) -> list[list[int]]:
        """Ids for each byte of a character that is no token: its byte token, else the character of that number, else
        the unknown token.
        """
        fallback = [] if vocab.unk_id is None else [vocab.unk_id]
        ids = [[self._ids[chr(byte)]] if chr(byte) in self._ids else fallback for byte in range(256)]
        for i in vocab.ids_of_types({TokenType.BYTE}):
            value = byte_token_value(vocab.tokens[i])
            if value is not None:
                ids[value] = [i]
        return ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text without lone surrogates. It comes first or follows a special token: a space may go in front."""
        ids: list[int] = []
        for word in self._word_start.split(self._prefix + text.replace(" ", SPACE)):
            ids += self._encode_word(word)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def _encode_word(self, word: str) -> list[int]:
        ids = self._cache.get(word)
        if ids is None:
            ids = []
            for symbol in self._merge(word):
                token_id = self._ids.get(symbol)
                if token_id is not None:
                    ids.append(token_id)
                else:
                    for byte in symbol.encode():
                        ids += self._byte_ids[byte]
            if len(word) <= _CACHE_WORD_LENGTH:
                if len(self._cache) >= _CACHE_WORDS:
                    self._cache.clear()
                self._cache[word] = ids
        return ids

    def _merge(self, word: str) -> list[str]:
        """Merge neighbours, the pair with the best score first (the leftmost of equals), until no pair is a token.

        A heap of candidate pairs over a linked list of symbols: O(n log n) for n characters.
        """
        symbols: list[str] = list(word)
        end = len(symbols)
        following = list(range(1, end + 1))
        preceding = list(range(-1, end - 1))
        ids, scores = self._ids, self._scores
        heap: list[tuple[float, int, int]] = []  # (-score, index of the left symbol, length of the merged symbol)

        def consider(left: int, right: int) -> None:
            merged = symbols[left] + symbols[right]
            token_id = ids.get(merged)
            if token_id is not None:
                heapq.heappush(heap, (-scores[token_id], left, len(merged)))

        for left in range(end - 1):
            consider(left, left + 1)
        while heap:
            _, left, length = heapq.heappop(heap)
            right = following[left]
            # Symbols only grow, and merged ones become empty: another length means that the pair is gone.
            if not symbols[left] or right == end or len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after = following[left] = following[right]
            if after < end:
                preceding[after] = left
                consider(left, after)
            if preceding[left] >= 0:
                consider(preceding[left], left)
        return [symbol for symbol in symbols if symbol]

    @staticmethod
    def text_bytes(token: str) -> bytes:
        """The bytes of a NORMAL token."""
        return token.replace(SPACE, " ").encode()


def _inner_spaces(token: str) -> list[int]:
    """Positions of ▁ after the first character."""
    return [at for at in range(1, len(token)) if token[at] == SPACE] if SPACE in token[1:] else []


def byte_token_value(token: str) -> int | None:
    """The byte that a token such as <0x0A> stands for."""
    match = _BYTE_TEXT.fullmatch(token)
    return int(match[1], 16) if match else None
