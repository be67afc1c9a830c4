"""The vocabulary of a model file: tokens, their types, special ids, and the flags that steer encoding; all checked.

Metadata comes from strangers: everything is checked here, so that the algorithms (`tokenizer_bpe`, `tokenizer_spm`)
can trust it. This module knows the keys of `tokenizer.ggml.*`; it does not know how text becomes ids.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.errors import ModelFileError, UnsupportedError
from pyllm.gguf_metadata import TypedMetadata, described
from pyllm.tokenizer_pre import DEFAULT_PRE, PRE_TOKENIZERS

BPE, SPM = "gpt2", "llama"
_KINDS = {BPE: "byte-level BPE", SPM: "SentencePiece BPE"}

_log = logging.getLogger(__name__)

# A generation ends at these tokens, whatever the id keys say: many files name only one of the two or three tokens that
# end a turn. They count only where the file marks them as special.
_EOG_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)
# In Qwen's and Gemma's vocabularies this is the end of struck-out HTML: it must be a control token to count.
_EOG_CONTROL_TEXT = "</s>"
# Padding and file separators of fill-in-the-middle training; a model that emits one has nothing more to say.
_FIM_END_TEXTS = frozenset(
    {
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    }
)
# Markers of structured output (gpt-oss): special to the file, but part of what the user reads.
_SHOWN_TEXTS = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


MARKED_TYPES = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED})
"""Tokens of these types are cut out of raw text before anything else; the last one even from plain user text."""

HIDDEN_TYPES = frozenset({TokenType.UNKNOWN, TokenType.CONTROL})
"""Tokens of these types are markup, not text."""


@dataclass(frozen=True)
class Vocabulary:
    """Checked `tokenizer.ggml.*` metadata.

    Attributes:
        source: file name, for error messages.
        kind: BPE or SPM.
        pre: name of the pre-tokeniser (BPE only).
        tokens: text of each id, as stored (byte-mapped for BPE, with ▁ for SPM).
        types: a TokenType of each id.
        merges: (left, right), best first; BPE only.
        scores: of each id; SPM only, else empty.
        eog_ids: any of these ends a generation.
    """

    source: str
    kind: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    scores: list[float]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    def ids_of_types(self, types: Iterable[int]) -> list[int]:
        """Ids of all tokens of the given types, ascending; tokens without text are left out."""
        wanted = frozenset(types)
        return [i for i, token_type in enumerate(self.types) if token_type in wanted and self.tokens[i]]


class _Keys(TypedMetadata):
    """Typed reading of `tokenizer.ggml.<name>`."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.path = Path(source)

    def key(self, name: str) -> str:
        return f"tokenizer.ggml.{name}"

    def token_id(self, name: str, vocab_size: int, default: int | None = None) -> int | None:
        if default is not None and default >= vocab_size:
            default = None
        return self.get_int(self.key(name), default, minimum=0, maximum=vocab_size - 1)

    def flag(self, name: str, default: bool) -> bool:
        return self.get_bool(self.key(name), default)


def read_vocabulary(metadata: Mapping[str, Any], source: str) -> Vocabulary:
    """Read and check a file's vocabulary.

    Args:
        metadata: the file's key-value pairs; arrays of numbers are NumPy arrays, arrays of strings lists.
        source: file name, for error messages.

    Raises:
        UnsupportedError: a kind of tokeniser, or a pre-tokeniser, that pyllm does not have.
        ModelFileError: a value is missing, or of the wrong type, length or range.
    """
    keys = _Keys(metadata, source)
    kind = _kind(keys, source)
    pre = _pre_tokenizer(keys, source) if kind == BPE else DEFAULT_PRE
    tokens = _tokens(keys, source)
    types = _types(keys, source, len(tokens))
    bos_id, eos_id, unk_id = (
        keys.token_id(name, len(tokens), default if kind == SPM else None)
        for name, default in (("bos_token_id", 1), ("eos_token_id", 2), ("unknown_token_id", 0))
    )
    end_ids = {keys.token_id(name, len(tokens)) for name in ("eot_token_id", "eom_token_id")} | {eos_id}
    eog_ids = _mark_end_of_generation(tokens, types, end_ids | _fim_ends(keys, len(tokens)))
    return Vocabulary(
        source=source,
        kind=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        merges=_merges(keys, source) if kind == BPE else [],
        scores=_scores(keys, source, len(tokens)) if kind == SPM else [],
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=unk_id,
        eog_ids=eog_ids,
        add_bos=_adds(keys, source, "bos", kind == SPM or PRE_TOKENIZERS[pre].add_bos, bos_id),
        add_eos=_adds(keys, source, "eos", False, eos_id),
        add_space_prefix=kind == SPM and keys.flag("add_space_prefix", True),
    )


def _kind(keys: _Keys, source: str) -> str:
    kind = keys.get_str(keys.key("model"))
    if kind not in _KINDS:
        known = ", ".join(f"{name} ({meaning})" for name, meaning in _KINDS.items())
        raise UnsupportedError(f"{source}: {keys.key('model')} is {described(kind)}; pyllm reads {known}")
    return kind


def _pre_tokenizer(keys: _Keys, source: str) -> str:
    pre = keys.get_str(keys.key("pre"), None)
    if pre is None:
        _log.warning(
            "%s: %s is missing; text is split by the general rule, which may cost quality: convert the model anew",
            source,
            keys.key("pre"),
        )
        return DEFAULT_PRE
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"{source}: {keys.key('pre')} is {described(pre)}; pyllm reads {known}")
    return pre


def _tokens(keys: _Keys, source: str) -> list[str]:
    tokens = keys.get_strs(keys.key("tokens"))
    if not tokens:
        raise ModelFileError(f"{source}: {keys.key('tokens')} is empty, expected one string per token")
    _check_texts(tokens, keys.key("tokens"), source)
    return tokens


def _check_texts(texts: list[str], key: str, source: str) -> None:
    """Strings that UTF-8 can hold. One join checks a large vocabulary in a few ms; a search finds the culprit."""
    try:
        "".join(texts).encode()
    except (TypeError, UnicodeEncodeError):
        for i, text in enumerate(texts):
            if not isinstance(text, str) or any(0xD800 <= ord(char) < 0xE000 for char in text):
                raise ModelFileError(
                    f"{source}: {key}[{i}] is {described(text)}, expected a string of valid UTF-8"
                ) from None


def _types(keys: _Keys, source: str, vocab_size: int) -> list[int]:
    types = keys.get_array(keys.key("token_type"), np.int32, None, length=vocab_size)
    if types is None:
        return [int(TokenType.NORMAL)] * vocab_size
    wrong = np.flatnonzero((types < 0) | (types > max(TokenType)))
    if len(wrong):
        i = int(wrong[0])
        raise ModelFileError(
            f"{source}: {keys.key('token_type')}[{i}] is {types[i]}, expected 0 to {max(TokenType)}; "
            "the file is damaged or was converted wrongly"
        )
    return types.tolist()


def _scores(keys: _Keys, source: str, vocab_size: int) -> list[float]:
    scores = keys.get_array(keys.key("scores"), np.float64, None, length=vocab_size)
    if scores is None:
        return [0.0] * vocab_size
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        i = int(wrong[0])
        raise ModelFileError(f"{source}: {keys.key('scores')}[{i}] is {scores[i]}, expected a finite number")
    return scores.tolist()


def _merges(keys: _Keys, source: str) -> list[tuple[str, str]]:
    lines = keys.get_strs(keys.key("merges"))
    _check_texts(lines, keys.key("merges"), source)
    merges = []
    for i, line in enumerate(lines):
        # From the second character on: the left part is never empty, and may itself begin with a space.
        cut = line.find(" ", 1)
        if cut < 0 or cut + 1 == len(line):
            raise ModelFileError(
                f"{source}: {keys.key('merges')}[{i}] is {line[:80]!r}, expected two tokens with a space between them"
            )
        merges.append((line[:cut], line[cut + 1 :]))
    return merges


def _fim_ends(keys: _Keys, vocab_size: int) -> set[int | None]:
    return {keys.token_id(f"fim_{name}_token_id", vocab_size) for name in ("pad", "rep", "sep")}


def _mark_end_of_generation(tokens: list[str], types: list[int], known: set[int | None]) -> frozenset[int]:
    """The ids that end a generation. Makes those found by their text CONTROL in `types`, so that they stay unseen."""
    marked = {tokens[i]: i for i, token_type in enumerate(types) if token_type in MARKED_TYPES}
    eog = marked.keys() & (_EOG_TEXTS | _FIM_END_TEXTS)
    if _EOG_CONTROL_TEXT in marked and types[marked[_EOG_CONTROL_TEXT]] == TokenType.CONTROL:
        eog.add(_EOG_CONTROL_TEXT)
    for text in eog:
        types[marked[text]] = TokenType.CONTROL
    # gpt-oss and its kin: <|end|> ends one message of several, and the reader sees the structure.
    ends_calls = bool({"<|call|>", "<|calls|>"} & eog)
    if "<|end|>" in eog and ends_calls and ({"<|return|>", "<|flush|>"} & eog):
        eog.discard("<|end|>")
        types[marked["<|end|>"]] = TokenType.USER_DEFINED
    if _EOG_CONTROL_TEXT in eog and "<|tool_response>" in eog:
        eog.discard(_EOG_CONTROL_TEXT)
        types[marked[_EOG_CONTROL_TEXT]] = TokenType.NORMAL
    for text in _SHOWN_TEXTS & marked.keys():
        types[marked[text]] = TokenType.USER_DEFINED
    return frozenset({marked[text] for text in eog} | {i for i in known if i is not None})


def _adds(keys: _Keys, source: str, name: str, default: bool, token_id: int | None) -> bool:
    adds = keys.flag(f"add_{name}_token", default)
    if adds and token_id is None:
        if keys.key(f"add_{name}_token") in keys.metadata:
            _log.warning(
                "%s: %s is true, but %s is missing; none is added",
                source,
                keys.key(f"add_{name}_token"),
                keys.key(f"{name}_token_id"),
            )
        return False
    return adds
