"""Byte-level BPE (`gpt2`): text is cut by regexes, its UTF-8 bytes become printable characters, pairs merge by rank.

The merging itself is done by the `tokenizers` package, built from the file's vocabulary. Special tokens are not its
business: it sees only text between them (`tokenizer.Tokenizer` cuts them out).

Source: Sennrich et al. 2016, arXiv:1508.07909 (BPE); Radford et al. 2019 (its form over bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as _Pipeline

from pyllm.tokenizer_ascii import AsciiCuts
from pyllm.tokenizer_pre import PRE_TOKENIZERS
from pyllm.tokenizer_vocab import HIDDEN_TYPES, Vocabulary

_SHORT = 4096  # characters of a text that is cut here
_MOST_PIECES, _LONGEST_PIECE = 1 << 15, 64  # that are remembered; characters of one
_MANY = 4  # texts: for fewer, starting threads costs more than it saves


def _byte_of_char() -> dict[str, int]:
    """Printable characters that stand for bytes: Latin-1 where that is visible, U+0100 onwards for the other 68."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF_CHAR = _byte_of_char()


class BpeModel:
    """Encodes text that holds no special tokens."""

    def __init__(self, vocab: Vocabulary) -> None:
        pre = PRE_TOKENIZERS[vocab.pre]
        # Without the markup tokens: no merge and no whole piece of user text may turn into one.
        ids = {
            token: i
            for i, (token, token_type) in enumerate(zip(vocab.tokens, vocab.types, strict=True))
            if token and token_type not in HIDDEN_TYPES
        }
        # The first of equal pairs has the better rank; the package would keep the last.
        merges = [
            (left, right)
            for left, right in dict.fromkeys(vocab.merges)
            if left in ids and right in ids and left + right in ids
        ]
        bpe = models.BPE(ids, merges, ignore_merges=pre.ignore_merges, fuse_unk=False, byte_fallback=False)
        self._pipeline = _Pipeline(bpe)
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
        ]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._pipeline.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
        self._ascii = AsciiCuts.of(pre.patterns)
        self._one_piece = _Pipeline(bpe)  # of texts that are cut already
        self._one_piece.pre_tokenizer = to_bytes
        self._pieces: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a text without lone surrogates. Bytes that the vocabulary lacks are left out."""
        if self._ascii is not None and len(text) <= _SHORT and text.isascii():
            return self._encode_ascii(self._ascii.cut(text))
        return self._pipeline.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, at less cost: on several cores, where they are not short."""
        others = [text for text in texts if self._ascii is None or len(text) > _SHORT or not text.isascii()]
        if len(others) < _MANY:
            return [self.encode(text) for text in texts]
        found = dict(zip(others, self._pipeline.encode_batch_fast(others, add_special_tokens=False), strict=True))
        return [found[text].ids if text in found else self.encode(text) for text in texts]

    def _encode_ascii(self, pieces: Sequence[str]) -> list[int]:
        """Ids of what a text was cut into. No merge reaches across, so each piece has its own, which are remembered."""
        known = self._pieces
        try:
            return [*chain.from_iterable(map(known.__getitem__, pieces))]
        except KeyError:
            missing = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        encoded = self._one_piece.encode_batch_fast(missing, add_special_tokens=False)
        fresh = {piece: found.ids for piece, found in zip(missing, encoded, strict=True)}
        ids = [*chain.from_iterable(fresh[piece] if piece in fresh else known[piece] for piece in pieces)]
        if len(known) + len(fresh) > _MOST_PIECES:
            self._pieces = known = {}
        known.update((piece, its) for piece, its in fresh.items() if len(piece) <= _LONGEST_PIECE)
        return ids

    @staticmethod
    def text_bytes(token: str) -> bytes:
        """The bytes of a NORMAL token; characters outside the byte map stand for themselves."""
        try:
            return bytes([BYTE_OF_CHAR[char] for char in token])
        except KeyError:
            return b"".join(bytes([BYTE_OF_CHAR[char]]) if char in BYTE_OF_CHAR else char.encode() for char in token)
