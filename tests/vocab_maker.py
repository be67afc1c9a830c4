"""Small vocabularies as file metadata, and random texts, for tests of everything about text."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from pyllm.tokenizer_bpe import BYTE_OF_CHAR

CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_PIECES = (
    "Hello", " world", "  ", " ", "\n", "\r\n", "\t", "12", "345", "'s", "DON'T", "é", "e\u0301", "ß", "ı", "straße",
    "Привет", "мир", "你好", "世界。", "こんにちは", "カタカナ", "한국어", "สวัสดี", "नमस्ते", "שלום", "مرحبا", "🚀",
    "👩‍👩‍👧‍👦", "🇩🇪", "\u200b", "\u3000", "\xa0", "\ufeff", "\x00", "\x07", "\x1b[0m", "\x7f", "\u2028", "\ufffd", "𠀀",
    "\U0010ffff", "<|im_start|>",
    "<|im_end|>", "<|im_", "<s>", "</s>", "<0x0A>", "<think>", "{{ x }}", "{% y %}", "…", "—", "a",
)  # fmt: skip


def random_text(rng: random.Random, num_pieces: int = 12) -> str:
    """Scripts, emoji, control characters, special-token strings and single code points in any order."""
    parts = []
    for _ in range(rng.randrange(num_pieces)):
        code = rng.choice((rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x110000)))
        parts.append(rng.choice(_PIECES) if rng.random() < 0.8 or 0xD800 <= code < 0xE000 else chr(code))
    return "".join(parts)


def bpe_metadata(
    pairs: tuple[str, ...] = ("h e", "l l", "he ll", "hell o", "Ġ w"),
    specials: tuple[tuple[str, int], ...] = (("<s>", CONTROL), ("<|im_end|>", CONTROL), ("<think>", USER_DEFINED)),
    **overrides: Any,
) -> dict[str, Any]:
    """All 256 bytes, the merged `pairs`, then the special tokens. Overrides go by the last part of the key."""
    tokens = [CHAR_OF_BYTE[byte] for byte in range(256)] + [pair.replace(" ", "") for pair in pairs]
    types = [NORMAL] * len(tokens) + [token_type for _, token_type in specials]
    tokens += [text for text, _ in specials]
    values: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": list(pairs)}
    values["token_type"] = np.array(types, np.int32)
    return _metadata(values | overrides)


def spm_metadata(words: dict[str, float], **overrides: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 byte tokens, a user-defined <think>, then the words with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<think>", *words]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(words)]
    values: dict[str, Any] = {"model": "llama", "tokens": tokens, "token_type": np.array(types, np.int32)}
    values["scores"] = np.array([0.0] * 260 + list(words.values()), np.float32)
    return _metadata(values | overrides)


def _metadata(values: dict[str, Any]) -> dict[str, Any]:
    """Overrides of None leave the key out."""
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}
