"""The parts of the tokeniser against plain versions of themselves."""

from __future__ import annotations

import random
import time
import warnings
from itertools import pairwise

import pytest
from tokenizers import Regex, pre_tokenizers

from pyllm.tokenizer import Tokenizer
from pyllm.tokenizer_ascii import AsciiCuts
from pyllm.tokenizer_bpe import BpeModel
from pyllm.tokenizer_pre import PRE_TOKENIZERS
from pyllm.tokenizer_special import SpecialTokens
from pyllm.tokenizer_spm import SpmModel
from pyllm.tokenizer_vocab import read_vocabulary
from tests.vocab_maker import bpe_metadata, random_text, spm_metadata


def split_plainly(text: str, tokens: list[tuple[str, int]]) -> list[str | int]:
    """Longest text first, each cut out of every fragment that is left."""
    parts: list[str | int] = [text]
    for token, token_id in sorted(tokens, key=lambda item: -len(item[0].encode())):
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            for i, fragment in enumerate(part.split(token)):
                cut += [token_id] if i else []
                cut.append(fragment)
        parts = cut
    return [part for part in parts if part != ""]


def test_special_tokens_are_cut_longest_first() -> None:
    special = SpecialTokens([("<a>", 0), ("<a><b>", 1), ("b><c", 2), (">", 3)])
    assert special.split("x<a><b><c>") == ["x", 1, "<c", 3]
    assert special.split("<b><c>") == ["<", 2, 3]
    assert special.split("<a>") == [0]
    assert special.split("") == []


def test_special_tokens_as_plainly() -> None:
    rng = random.Random(1)
    for _ in range(500):
        texts = {"".join(rng.choices("ab中", k=rng.randrange(1, 5))) for _ in range(rng.randrange(6))}
        tokens = [(text, i) for i, text in enumerate(sorted(texts))]
        text = "".join(rng.choices("ab中c", k=rng.randrange(30)))
        assert SpecialTokens(tokens).split(text) == split_plainly(text, tokens)


def test_many_special_tokens_in_a_long_text() -> None:
    special = SpecialTokens([(f"<unused{i}>", i) for i in range(6000)] + [(" " * n, 7000 + n) for n in range(1, 32)])
    start = time.monotonic()
    parts = special.split("".join(f"<unused{i}>x" for i in range(6000)) + " " * 50_000)
    assert time.monotonic() - start < 10
    assert parts[:4] == [0, "x", 1, "x"]
    assert parts[-1] == 7000 + 50_000 % 31


def merge_plainly(word: str, scores: dict[str, float]) -> list[str]:
    """Again and again the best pair of neighbours, the leftmost of equals."""
    symbols = list(word)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def test_sentencepiece_merges_as_plainly() -> None:
    rng = random.Random(2)
    for _ in range(300):
        words = {"".join(rng.choices("ab▁", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 20))}
        # Few different scores, for ties.
        scores = {word: float(rng.randrange(4)) for word in sorted(words)}
        model = SpmModel(read_vocabulary(spm_metadata(scores, add_space_prefix=False), "x.gguf"))
        tokens = spm_metadata(scores)["tokenizer.ggml.tokens"]
        text = "".join(rng.choices("ab c", k=rng.randrange(40)))
        expected: list[str] = []
        for symbol in merge_plainly(text.replace(" ", "▁"), scores):
            expected += [symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        assert [tokens[i] for i in model.encode(text)] == expected


def test_a_byte_without_a_token_is_the_unknown_token() -> None:
    metadata = spm_metadata({"a": 0.0})
    metadata["tokenizer.ggml.tokens"][3 + 0xC3] = "gone"
    tokenizer = Tokenizer.from_metadata(metadata, "x.gguf")
    assert tokenizer.encode("é", add_special=False)[-2:] == [0, 3 + 0xA9]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loses_nothing(pre: str) -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(pre=pre), "x.gguf")
    rng = random.Random(pre)
    for _ in range(20):
        text = random_text(rng)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm", "deepseek-llm", "deepseek-v3", "tekken", "gpt-4o", "default"])
def test_no_pre_tokenizer_is_quadratic(pre: str) -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(pre=pre), "x.gguf")
    for unit in (" ", "A", "\r"):
        start = time.monotonic()
        tokenizer.encode(unit * 100_000 + "x")
        assert time.monotonic() - start < 10, unit


def pieces(pre: str, text: str) -> list[str]:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("llama-bpe", "I'LL go  12345\n\n x", ["I", "'LL", " go", " ", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "a 12", ["a", " ", "1", "2"]),
        ("qwen35", "e\u0301x", ["e\u0301x"]),
        ("gpt-2", "I'LL 123!?", ["I", "'", "LL", " 123", "!?"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("default", "a 12345!", ["a", " ", "123", "45", "!"]),
        ("falcon", "x`y", ["x", "`", "y"]),
        ("tekken", "CamelCase 12", ["Camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "CamelCase'S 1234", ["Camel", "Case'S", " ", "123", "4"]),
        ("deepseek-llm", "a 中文12 b  ", ["a", " ", "中文", "12", " b", "  "]),
        ("deepseek-coder", "a\n 12.", ["a", "\n", " ", "1", "2", "."]),
        ("deepseek-v3", "1234中文.a", ["123", "4", "中文", ".a"]),
    ],
)
def test_where_pre_tokenizers_cut(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(pre, text) == expected


def test_final_spaces_of_deepseek_llm_are_those_of_the_original_pattern() -> None:
    original = pre_tokenizers.Split(Regex(r"\s+$"), "isolated")
    ours = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["deepseek-llm"].patterns[3]), "isolated")
    rng = random.Random(3)
    for _ in range(500):
        text = "".join(rng.choices("a \t\u3000", k=rng.randrange(12)))
        assert ours.pre_tokenize_str(text) == original.pre_tokenize_str(text)


@pytest.mark.parametrize("patterns", sorted({pre.patterns for pre in PRE_TOKENIZERS.values()}))
def test_ascii_texts_are_cut_as_the_package_cuts_them(patterns: tuple[str, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of `re`, about sets that may mean something else one day
        cuts = AsciiCuts.of(patterns)
    if cuts is None:
        assert any("$" in pattern.replace(r"\$", "") for pattern in patterns)
        return
    package = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])
    rng, everything = random.Random(str(patterns)), [chr(code) for code in range(128)]
    texts = everything + [left + right for left in everything for right in "a1 '\n.S\x1f"]
    for number in range(2000):
        letters = everything if number % 3 == 0 else "aA '\n\r\t 1.$sSrRetdlLmM`-_!12 "
        texts.append("".join(rng.choices(letters, k=rng.randrange(16))))
    for text in texts:
        assert cuts.cut(text) == [piece for piece, _ in package.pre_tokenize_str(text)], text


def test_patterns_that_python_would_understand_otherwise_are_left_to_the_package() -> None:
    for pattern in (r"a$", r"\p{M}+", r"\p{L}|x+$"):
        assert AsciiCuts.of([r"\p{N}", pattern]) is None
    assert AsciiCuts.of([r"[a$]|[\p{L}\p{M}]+|\$"]) is not None
    with pytest.raises(KeyError):
        AsciiCuts.of([r"\p{Han}"])


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm", "deepseek-llm", "default"])  # merges are ignored, or are not
def test_pieces_that_are_remembered_are_encoded_as_whole_texts(pre: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllm.tokenizer_bpe._MOST_PIECES", 100)
    monkeypatch.setattr("pyllm.tokenizer_bpe._SHORT", 40)
    pairs = ("a b", "ab a", "b a", "Ġ a", "1 2", "aba b")
    model = BpeModel(read_vocabulary(bpe_metadata(pairs, pre=pre), "x.gguf"))
    rng = random.Random(pre)
    texts = ["", "x" * 1000, "ab " * 30, *(random_text(rng) for _ in range(100))]
    texts += ["".join(rng.choices("ab 12\n\x00.", k=rng.randrange(60))) for _ in range(300)]
    expected = [model._pipeline.encode(text, add_special_tokens=False).ids for text in texts]
    for _ in range(2):
        assert [model.encode(text) for text in texts] == expected
        assert model.encode_all(texts) == expected
    assert model.encode_all(texts[:3]) == expected[:3] and model.encode_all([]) == []
    assert len(model._pieces) <= 100 and max(map(len, model._pieces), default=0) <= 64
