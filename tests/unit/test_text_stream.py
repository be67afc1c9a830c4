"""Streams of text: whole characters, and stop strings wherever tokens may end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pyllm.errors import UsageError
from pyllm.text_stream import TextStream
from tests.unit.test_tokenizer import VOCABULARIES, tokenizer_of
from tests.vocab_maker import random_text


class Bytes:
    """A tokeniser whose tokens are bytes, or any pieces given by number."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces or [bytes([byte]) for byte in range(256)]

    def shown_piece(self, token_id: int, opens: bool, skip_special: bool = False) -> tuple[bytes, bool]:
        return self.pieces[token_id], False

    def shown_pieces(self, token_ids: Sequence[int], opens: bool, skip_special: bool = False) -> tuple[bytes, bool]:
        return b"".join(self.pieces[token_id] for token_id in token_ids), False


def shown(stream: TextStream, ids: list[int] | bytes) -> list[str]:
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("skip_special", [False, True])
@pytest.mark.parametrize("continues", [False, True])
def test_the_stream_is_the_whole_decoding(vocabulary: str, skip_special: bool, continues: bool) -> None:
    tokenizer = tokenizer_of(vocabulary)
    rng = random.Random(f"{vocabulary} {skip_special}")
    for _ in range(60):
        text = random_text(rng)
        ids = tokenizer.encode(text, parse_special=True)
        parts = shown(TextStream(tokenizer, (), skip_special, continues), ids)
        assert "".join(parts) == tokenizer.decode(ids, skip_special, continues)
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)
        noise = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))]
        parts = shown(TextStream(tokenizer, (), skip_special, continues), noise)
        assert "".join(parts) == tokenizer.decode(noise, skip_special, continues)


def test_characters_appear_whole_and_at_once() -> None:
    assert shown(TextStream(Bytes()), "é🚀x".encode()) == ["", "é", "", "", "", "🚀", "x", ""]


def test_bytes_that_are_no_character_are_replaced() -> None:
    assert shown(TextStream(Bytes()), b"a\xffb") == ["a", "\ufffd", "b", ""]
    assert shown(TextStream(Bytes()), b"a\xf0\x9f") == ["a", "", "", "\ufffd"]
    assert shown(TextStream(Bytes()), b"\xf0\x9fa") == ["", "", "\ufffda", ""]


def test_stop_strings_at_every_split() -> None:
    data = "one é END two".encode()
    for first in range(len(data)):
        for second in range(first, len(data)):
            pieces = (data[:first], data[first:second], data[second:])
            stream = TextStream(Bytes(*pieces), ["END"])
            assert "".join(shown(stream, [0, 1, 2])) == "one é "
            assert stream.stopped


def text_until_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(len(text) + 1):
        hits = [len(word) for word in stop if text[:end].endswith(word)]
        if hits:
            return text[: end - max(hits)], True
    return text, False


def test_stop_strings_as_plainly() -> None:
    rng = random.Random(4)
    for _ in range(2000):
        stop = ["".join(rng.choices("abé", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        text = "".join(rng.choices("abé", k=rng.randrange(12)))
        data = text.encode()
        cuts = sorted(rng.sample(range(len(data) + 1), rng.randrange(len(data) + 1)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        stream = TextStream(Bytes(*pieces), stop)
        parts = shown(stream, list(range(len(pieces))))
        assert ("".join(parts), stream.stopped) == text_until_stop(text, stop)
        # Nothing shown early is taken back: no push ends with a part of a stop string that then comes true.
        expected = text_until_stop(text, stop)[0]
        assert all(expected.startswith("".join(parts[:n])) for n in range(len(parts)))


def test_false_starts_are_shown_as_soon_as_they_are_false() -> None:
    assert shown(TextStream(Bytes(), ["abcd"]), b"xababce") == ["x", "", "", "ab", "", "", "abce", ""]
    assert shown(TextStream(Bytes(), ["abcd"]), b"xab") == ["x", "", "", "ab"]


def test_nothing_comes_after_a_stop() -> None:
    stream = TextStream(Bytes(), "b")
    assert shown(stream, b"abc\xf0") == ["a", "", "", "", ""]
    assert stream.push(ord("z")) == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        TextStream(Bytes(), ["x", ""])
