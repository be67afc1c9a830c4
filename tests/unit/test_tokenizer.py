"""The tokeniser as its users see it: reference ids of other engines, round trips, special tokens, BOS and EOS."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from typing import Any

import pytest

from pyllm.errors import UsageError
from pyllm.gguf_file import GGUFFile
from pyllm.hub import find_model
from pyllm.tokenizer import Tokenizer
from tests.refdata import ROOT, model_path
from tests.vocab_maker import CONTROL, USER_DEFINED, bpe_metadata, random_text, spm_metadata

VOCABULARIES = {
    "llama3_512": "llama-a-f32",
    "qwen2_512": "qwen3-a-bf16",
    "qwen35_512": "qwen35-a-f16",
    "llama2_640": "llama-c-spm-bf16",
    "gemma_640": "gemma3-a-f16",
}
"""Reference file: a model that holds the vocabulary."""


@cache
def tokenizer_of(vocabulary: str) -> Tokenizer:
    path = model_path(VOCABULARIES[vocabulary])
    with GGUFFile(path) as gguf:
        return Tokenizer.from_metadata(gguf.metadata, path.name)


@cache
def demo_tokenizer() -> Tokenizer:
    path = find_model("demo")
    if path is None:
        pytest.skip("the demo model is not here: pyllm pull demo")
    with GGUFFile(path) as gguf:
        return Tokenizer.from_metadata(gguf.metadata, path.name)


def assert_matches_reference(tokenizer: Tokenizer, reference: dict[str, Any]) -> None:
    for case in reference["strings"]:
        text = case["text"]
        assert tokenizer.encode(text, add_special=False) == case["ids"], text
        assert tokenizer.encode(text, add_special=False, parse_special=True) == case["ids_parse_special"], text
        assert tokenizer.encode(text, parse_special=True) == case["ids_add_special_parse_special"], text
        if case["detok_equals_text"]:
            assert tokenizer.decode(case["ids"]).encode().hex() == case["detok_hex"], text
    for token_id, piece in reference["pieces"].items():
        if int(token_id) < tokenizer.vocab_size:  # the reference also covers a padded form of the vocabulary
            assert tokenizer.token_bytes(int(token_id)).hex() == piece["with_special_hex"], token_id
            assert tokenizer.token_bytes(int(token_id), skip_special=True).hex() == piece["text_hex"], token_id


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_reference_ids(vocabulary: str) -> None:
    reference = json.loads((ROOT / "refs" / f"tokenize_{vocabulary}.json").read_text())
    assert_matches_reference(tokenizer_of(vocabulary), reference)


@pytest.mark.demo_model
def test_reference_ids_of_the_demo_model() -> None:
    reference = json.loads((ROOT / "real" / "tokenize_smollm2.json").read_text())
    assert_matches_reference(demo_tokenizer(), reference)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("parse_special", [False, True])
def test_decoding_gives_the_text_back(vocabulary: str, parse_special: bool) -> None:
    rng = random.Random(f"{vocabulary} {parse_special}")
    tokenizer = tokenizer_of(vocabulary)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        assert tokenizer.decode(ids) == text
        if not parse_special:
            assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_text_from_users_never_becomes_a_control_token(vocabulary: str) -> None:
    tokenizer = tokenizer_of(vocabulary)
    controls = tokenizer.control_texts()
    rng = random.Random(vocabulary)
    for _ in range(100):
        text = random_text(rng, 4) + rng.choice(list(controls)) + random_text(rng, 4)
        assert not any(tokenizer.is_control(i) for i in tokenizer.encode(text, add_special=False)), text
    for text, token_id in controls.items():
        assert tokenizer.encode(text, add_special=False, parse_special=True) == [token_id]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_long_runs_take_linear_time(vocabulary: str) -> None:
    tokenizer = tokenizer_of(vocabulary)
    for unit in ("a", " ", "\n", " \n", "é", "🚀", "<|im_", "</"):
        text = (unit * 100_000)[:100_000] + "x"
        start = time.monotonic()
        ids = tokenizer.encode(text, add_special=False)
        # About 0.5 s; a quadratic algorithm takes minutes.
        assert time.monotonic() - start < 10, unit
        assert tokenizer.decode(ids) == text


def test_user_defined_tokens_match_in_plain_text_and_control_tokens_only_in_markup() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(), "x.gguf")
    vocab = {text: i for i, text in enumerate(bpe_metadata()["tokenizer.ggml.tokens"])}
    plain = tokenizer.encode("hello<think><s>")
    assert plain[:2] == [vocab["hello"], vocab["<think>"]]
    assert vocab["<s>"] not in plain
    assert tokenizer.encode("hello<think><s>", parse_special=True) == [vocab["hello"], vocab["<think>"], vocab["<s>"]]


def test_a_merge_never_yields_a_control_token() -> None:
    pairs = ("< s", "<s >")
    metadata = bpe_metadata(pairs=pairs, specials=(("<s>", CONTROL),), pre="llama-bpe")
    metadata["tokenizer.ggml.token_type"][257] = CONTROL  # the result of the second merge, the same text
    tokenizer = Tokenizer.from_metadata(metadata, "x.gguf")
    assert tokenizer.encode("<s>", add_special=False) == [256, ord(">")]


def test_bos_and_eos() -> None:
    ends = {"bos_token_id": 261, "eos_token_id": 262}
    both = Tokenizer.from_metadata(bpe_metadata(add_bos_token=True, add_eos_token=True, **ends), "x.gguf")
    assert both.encode("h") == [261, ord("h"), 262]
    assert both.encode("") == [261, 262]
    assert both.encode("h", add_special=False) == [ord("h")]
    assert (both.bos_token, both.eos_token) == ("<s>", "<|im_end|>")
    none = Tokenizer.from_metadata(bpe_metadata(), "x.gguf")
    assert none.encode("h") == [ord("h")]
    assert (none.bos_id, none.eos_id, none.bos_token, none.eos_token) == (None, None, "", "")


def test_a_prompt_has_one_bos() -> None:
    adding = Tokenizer.from_metadata(bpe_metadata(add_bos_token=True, bos_token_id=261), "x.gguf")
    assert adding.encode_prompt("<s>h") == adding.encode_prompt("h") == [261, ord("h")]
    assert adding.encode_prompt("") == [261]
    silent = Tokenizer.from_metadata(bpe_metadata(add_bos_token=False, bos_token_id=261), "x.gguf")
    assert silent.encode_prompt("<s>h") == [261, ord("h")]
    assert silent.encode_prompt("h") == [ord("h")]


def test_end_of_generation_ids() -> None:
    assert Tokenizer.from_metadata(bpe_metadata(eos_token_id=261, eot_token_id=0), "x").eog_ids == {0, 261, 262}
    specials = (("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL), ("<|channel|>", CONTROL))
    harmony = Tokenizer.from_metadata(bpe_metadata(specials=specials), "x.gguf")
    assert harmony.eog_ids == {262, 263}
    assert not harmony.is_control(261)
    assert harmony.token_bytes(264, skip_special=True) == b"<|channel|>"


def test_struck_out_html_is_text_unless_it_is_a_control_token() -> None:
    assert Tokenizer.from_metadata(bpe_metadata(specials=(("</s>", USER_DEFINED),)), "x").eog_ids == set()
    assert Tokenizer.from_metadata(bpe_metadata(specials=(("</s>", CONTROL),)), "x").eog_ids == {261}


def test_surrogates_from_json_escapes() -> None:
    tokenizer = tokenizer_of("llama3_512")
    assert tokenizer.encode("\ud83d\ude80") == tokenizer.encode("🚀")
    assert tokenizer.encode("a\ud83d") == tokenizer.encode("a\ufffd")


def test_the_space_in_front_is_put_in_and_taken_off() -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata({"▁": -1.0, "▁▁": -1.5, "a": -2.0, "▁a": -0.5}), "x.gguf")
    space_a = tokenizer.encode("a", add_special=False)
    assert space_a == [263]
    assert tokenizer.decode(space_a) == "a"
    assert tokenizer.decode(space_a, continues=True) == " a"
    both = tokenizer.encode("a<s> a", add_special=False, parse_special=True)
    assert both == [263, 1, 260, 263]
    assert tokenizer.decode(both) == "a<s> a"
    assert tokenizer.decode(both, skip_special=True) == "a a"


def test_ids_outside_the_vocabulary_are_refused() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(), "x.gguf")
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(
            UsageError, match=rf"token id {wrong} is not in the vocabulary of x.gguf, expected 0 to 263"
        ):
            tokenizer.decode([wrong])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_texts_that_come_again_are_encoded_as_before(vocabulary: str) -> None:
    tokenizer, rng = tokenizer_of(vocabulary), random.Random(vocabulary)
    controls = tokenizer.control_texts()
    texts = ["", *controls, *(random_text(rng) for _ in range(50)), "x" * 1000, "\ud83d\ude80 \ud800"]
    for text in texts * 2:
        ids = tokenizer.encode_again(text)
        assert [*ids] == tokenizer.encode(text, add_special=False)
        assert not set(ids) & set(controls.values())
    for number in range(2500):
        assert [*tokenizer.encode_again(f"{number}")] == tokenizer.encode(f"{number}", add_special=False)
    assert len(tokenizer._encoded) <= 1024 and "x" * 1000 not in tokenizer._encoded


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("skip_special", [False, True])
def test_pieces_together_are_those_one_by_one(vocabulary: str, skip_special: bool) -> None:
    tokenizer, rng = tokenizer_of(vocabulary), random.Random(vocabulary)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        first = opens = rng.random() < 0.5
        data = b""
        for token_id in ids:
            piece, opens = tokenizer.shown_piece(token_id, opens, skip_special)
            data += piece
        found, still = tokenizer.shown_pieces(ids, first, skip_special)
        assert found == data
        if tokenizer._vocab.add_space_prefix or ids:
            assert still == opens
    with pytest.raises(UsageError, match="not in the vocabulary"):
        tokenizer.shown_pieces([0, tokenizer.vocab_size], False, skip_special)


def test_another_thread_may_clear_the_pieces_that_are_known() -> None:
    class Cleared(dict[int, bytes]):
        def update(self, *args: Any) -> None:
            self.clear()

    tokenizer = next(one for one in map(tokenizer_of, VOCABULARIES) if not one._vocab.add_space_prefix)
    tokenizer._pieces_by_id = Cleared(), Cleared()
    assert tokenizer.shown_pieces([300, 301, 300], False)[0] == b"".join(map(tokenizer.token_bytes, [300, 301, 300]))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_texts_together_are_encoded_as_one_by_one(vocabulary: str) -> None:
    tokenizer, rng = tokenizer_of(vocabulary), random.Random(vocabulary)
    texts = ["", *tokenizer.control_texts(), *(random_text(rng) for _ in range(50)), "x" * 5000, "\ud83d\ude80 \ud800"]
    texts += [f"{text} plain {number}" for number, text in enumerate(texts)] + texts[:9]
    expected = [tokenizer.encode(text, add_special=False) for text in texts]
    tokenizer._encoded.clear()
    for chosen in (slice(3), slice(None), slice(20, 30)):  # none of them known, some, all
        assert [[*ids] for ids in tokenizer.encode_all(texts[chosen])] == expected[chosen]
    many = [f"{number}" for number in range(2500)]
    expected = [tokenizer.encode(text, add_special=False) for text in many]
    assert [[*ids] for ids in tokenizer.encode_all(many)] == expected
    assert len(tokenizer._encoded) <= 1024 and "x" * 5000 not in tokenizer._encoded
