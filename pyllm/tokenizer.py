"""Text to token ids and back, as the model file prescribes.

This module puts the parts together: special tokens are cut out of the text, what lies between them goes through the
file's algorithm (`tokenizer_bpe`, `tokenizer_spm`), BOS and EOS are put around it. It knows nothing of streams of
tokens (`text_stream`) or of messages (`chat_template`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from pyllm.errors import UsageError
from pyllm.tokenizer_bpe import BpeModel
from pyllm.tokenizer_special import ControlTexts, SpecialTokens
from pyllm.tokenizer_spm import SpmModel, byte_token_value
from pyllm.tokenizer_vocab import BPE, HIDDEN_TYPES, MARKED_TYPES, TokenType, Vocabulary, read_vocabulary

_MOST_SHOWN = 1 << 14  # pieces that are kept
_MOST_ENCODED = 1024  # texts whose ids are kept
_LONGEST_ENCODED = 256  # characters of one


class Tokenizer:
    """The tokeniser of one model file. Not changed by use; threads may share it.

    Attributes:
        vocab_size: number of tokens that the file names; a model's logits may have more columns (padding).
        bos_id, eos_id: None when the file has none.
        eog_ids: any of these ends a generation.
        add_bos, add_eos: whether `encode` puts them around a text.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._model = BpeModel(vocab) if vocab.kind == BPE else SpmModel(vocab)
        marked = [(vocab.tokens[i], i) for i in vocab.ids_of_types(MARKED_TYPES)]
        self._in_markup = SpecialTokens(marked)
        self._in_text = SpecialTokens([(text, i) for text, i in marked if vocab.types[i] not in HIDDEN_TYPES])
        self.vocab_size = len(vocab.tokens)
        self.bos_id, self.eos_id = vocab.bos_id, vocab.eos_id
        self.eog_ids = vocab.eog_ids
        self.add_bos, self.add_eos = vocab.add_bos, vocab.add_eos
        self._shown: dict[tuple[int, bool, bool], tuple[bytes, bool]] = {}
        self._pieces_by_id: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}  # with control tokens, and without
        self._encoded: dict[str, tuple[int, ...]] = {}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str) -> Tokenizer:
        """Build the tokeniser that a GGUF file describes.

        Args:
            metadata: the file's key-value pairs, as `GGUFFile.metadata` gives them.
            source: file name, for error messages.

        Raises:
            UnsupportedError: a kind of tokeniser, or a pre-tokeniser, that pyllm does not have.
            ModelFileError: a value is missing, or of the wrong type, length or range.
        """
        return cls(read_vocabulary(metadata, source))

    @property
    def bos_token(self) -> str:
        """Text of the BOS token; "" when there is none."""
        return "" if self.bos_id is None else self._vocab.tokens[self.bos_id]

    @property
    def eos_token(self) -> str:
        """Text of the EOS token; "" when there is none."""
        return "" if self.eos_id is None else self._vocab.tokens[self.eos_id]

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text.

        Args:
            text: lone surrogates are read as U+FFFD.
            add_special: put BOS and EOS around it where `add_bos` and `add_eos` say so.
            parse_special: the texts of control tokens (such as <|im_end|>) become those tokens. Leave it off for text
                from users; tokens that the file calls user-defined are found in either case.
        """
        special = self._in_markup if parse_special else self._in_text
        ids: list[int] = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        for part in special.split(_without_surrogates(text)):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._model.encode(part)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_again(self, text: str) -> Sequence[int]:
        """The ids of `encode` for a text without BOS, EOS and control tokens, which probably comes again: those of the
        last hundreds of short texts are kept."""
        found = self._encoded.get(text)
        if found is None:
            found = self._kept(text, self.encode(text, add_special=False))
        return found

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """`encode_again` of each, at less cost: those that are not known are encoded together."""
        found = {text: self._encoded.get(text) for text in texts}
        missing = [text for text, ids in found.items() if ids is None]
        split = [self._in_text.split(_without_surrogates(text)) for text in missing]
        encoded = iter(self._model.encode_all([part for parts in split for part in parts if isinstance(part, str)]))
        for text, parts in zip(missing, split, strict=True):
            found[text] = self._kept(
                text, chain.from_iterable((part,) if isinstance(part, int) else next(encoded) for part in parts)
            )
        return [found[text] or () for text in texts]

    def _kept(self, text: str, ids: Iterable[int]) -> tuple[int, ...]:
        """The ids of a text, kept if it is short."""
        found = tuple(ids)
        if len(text) <= _LONGEST_ENCODED:
            if len(self._encoded) >= _MOST_ENCODED:
                self._encoded.clear()
            self._encoded[text] = found
        return found

    def encode_prompt(self, rendered: str) -> list[int]:
        """Ids of a rendered chat template: markup becomes control tokens, and there is one BOS, never two.

        Templates differ in whether they print BOS themselves. No EOS is added: the model is to go on.
        """
        ids = self.encode(rendered, add_special=False, parse_special=True)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False, continues: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: each below `vocab_size`.
            skip_special: leave control tokens out; otherwise their text is shown.
            continues: the ids go on from earlier ones, so a leading space is the model's own. `encode` puts one in
                front of a text for some files (SentencePiece); without this flag it is taken off again.
        """
        return b"".join(self._pieces(ids, skip_special, continues)).decode(errors="replace")

    def _pieces(self, ids: Iterable[int], skip_special: bool, continues: bool) -> Iterator[bytes]:
        opens = not continues
        for token_id in ids:
            piece, opens = self.shown_piece(token_id, opens, skip_special)
            yield piece

    def shown_piece(self, token_id: int, opens: bool, skip_special: bool = False) -> tuple[bytes, bool]:
        """`piece`, and whether the next token opens a stretch of text. Those of the last thousands of tokens are kept.

        Raises:
            UsageError: no such token.
        """
        key = token_id, opens, skip_special
        found = self._shown.get(key)
        if found is None:
            if len(self._shown) >= _MOST_SHOWN:
                self._shown.clear()
            found = self._shown[key] = self.piece(token_id, opens, skip_special), self.is_special(token_id)
        return found

    def shown_pieces(self, token_ids: Sequence[int], opens: bool, skip_special: bool = False) -> tuple[bytes, bool]:
        """What `shown_piece` gives for one after the other, joined, and whether the next token opens a stretch of text.

        Raises:
            UsageError: no such token.
        """
        if self._vocab.add_space_prefix or not token_ids:
            pieces = []
            for token_id in token_ids:
                data, opens = self.shown_piece(token_id, opens, skip_special)
                pieces.append(data)
            return b"".join(pieces), opens
        # Without that space a token's piece is always the same.
        known = self._pieces_by_id[skip_special]
        try:
            data = b"".join(map(known.__getitem__, token_ids))
        except KeyError:
            # Another thread may clear what is known.
            fresh = {one: known.get(one) or self.token_bytes(one, skip_special) for one in dict.fromkeys(token_ids)}
            data = b"".join(map(fresh.__getitem__, token_ids))
            if len(known) + len(fresh) > _MOST_SHOWN:
                known.clear()
            known.update(fresh)
        return data, self.is_special(token_ids[-1])

    def piece(self, token_id: int, opens: bool, skip_special: bool = False) -> bytes:
        """Like `token_bytes`, without the space that `encode` added if the token opens a stretch of text: the first
        one, and those after special tokens.
        """
        data = self.token_bytes(token_id, skip_special)
        if opens and self._vocab.add_space_prefix and not self.is_special(token_id):
            return data.removeprefix(b" ")
        return data

    def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes:
        """Bytes of one token: any part of a UTF-8 text, also of a character.

        Raises:
            UsageError: no such token.
        """
        token_type, token = self._type(token_id), self._vocab.tokens[token_id]
        if token_type == TokenType.NORMAL:
            return self._model.text_bytes(token)
        if token_type in HIDDEN_TYPES:
            return b"" if skip_special else token.encode()
        if token_type == TokenType.USER_DEFINED:
            return token.encode()
        if token_type == TokenType.BYTE and (value := byte_token_value(token)) is not None:
            return bytes([value])
        return b""

    @cached_property
    def controls(self) -> ControlTexts:
        """The texts of all control tokens, to be found in a rendered template."""
        return ControlTexts(self.control_texts())

    def control_texts(self) -> dict[str, int]:
        """Text to id of all control tokens: what text from users must never become by itself."""
        return {self._vocab.tokens[token_id]: token_id for token_id in self._vocab.ids_of_types(HIDDEN_TYPES)}

    def is_control(self, token_id: int) -> bool:
        """Whether a token is markup, which `skip_special` leaves out."""
        return self._type(token_id) in HIDDEN_TYPES

    def is_special(self, token_id: int) -> bool:
        """Whether `encode` may cut the token out of raw text: markup, or user-defined."""
        return self._type(token_id) in MARKED_TYPES

    def is_eog(self, token_id: int) -> bool:
        """Whether a token ends a generation."""
        return token_id in self.eog_ids

    def _type(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(
                f"token id {token_id} is not in the vocabulary of {self._vocab.source}, expected 0 to "
                f"{self.vocab_size - 1}"
            )
        return self._vocab.types[token_id]


def _without_surrogates(text: str) -> str:
    """Pairs of surrogates become their character, lone ones U+FFFD: both come from JSON escapes such as \\ud83d."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
