"""A made-up tokenizer of a given size: byte-level BPE with all bytes, merges of letters, and three control tokens.

Text in it is sound: every string can be encoded, and decodes to itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from pyllm.errors import UsageError
from pyllm.tokenizer_bpe import BYTE_OF_CHAR

_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"  # by frequency: the usual pairs merge first
_SPACE = "Ġ"
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NORMAL, _CONTROL = 1, 3

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class SynthVocabulary:
    """What the `tokenizer.ggml.*` keys hold.

    Attributes:
        types: of each token, 1 (normal) or 3 (control).
        merges: pairs separated by a space, the ones that merge first at the beginning.
        bos_id, eos_id: ids of <|endoftext|> and <|im_end|>.
    """

    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos_id: int
    eos_id: int


def make_vocabulary(size: int) -> SynthVocabulary:
    """A vocabulary of exactly `size` tokens.

    Raises:
        UsageError: it is too small for the bytes and control tokens, or larger than can be made up.
    """
    num_merges = size - len(BYTE_OF_CHAR) - len(CONTROL_TOKENS)
    merges = list(itertools.islice(_merges(), max(0, num_merges)))
    if len(merges) != num_merges:
        raise UsageError(f"a vocabulary of {size} tokens cannot be made up; choose from 259 to 490,000")
    tokens = [*_byte_characters(), *(merge.replace(" ", "") for merge in merges), *CONTROL_TOKENS]
    types = [_NORMAL] * (size - len(CONTROL_TOKENS)) + [_CONTROL] * len(CONTROL_TOKENS)
    return SynthVocabulary(tokens, types, merges, bos_id=size - 3, eos_id=size - 1)


def _byte_characters() -> list[str]:
    return sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__)


def _merges() -> Iterator[str]:
    """Pairs that make pieces of two letters, then of three, then of four, each from a piece that is there already."""
    pieces = [*_LETTERS, _SPACE]
    for _ in range(3):
        longer = []
        for piece, letter in itertools.product(pieces, _LETTERS):
            yield f"{piece} {letter}"
            longer.append(piece + letter)
        pieces = longer
