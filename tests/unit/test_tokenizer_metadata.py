"""Strange metadata: one clear line, never a traceback."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pyllm.errors import ModelFileError, PyllmError, UnsupportedError
from pyllm.tokenizer import Tokenizer
from tests.vocab_maker import bpe_metadata, spm_metadata


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; pyllm reads gpt2 (byte-level BPE), llama"),
        ({"pre": "klingon"}, "tokenizer.ggml.pre is 'klingon'; pyllm reads a.x-4.0"),
    ],
)
def test_unknown_kinds_are_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        Tokenizer.from_metadata(bpe_metadata(**overrides), "x.gguf")
    assert str(caught.value).startswith(f"x.gguf: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        {"model": None},
        {"model": 3},
        {"pre": 3},
        {"tokens": None},
        {"tokens": "abc"},
        {"tokens": []},
        {"tokens": np.arange(264)},
        {"tokens": ["\ud800"] + ["a"] * 263},
        {"token_type": np.ones(3, np.int32)},
        {"token_type": np.full(264, 7, np.int32)},
        {"token_type": np.full(264, -1, np.int32)},
        {"token_type": np.full(264, 1.5)},
        {"token_type": "normal"},
        {"merges": None},
        {"merges": ["ab"]},
        {"merges": ["a "]},
        {"merges": [""]},
        {"merges": np.arange(3)},
        {"bos_token_id": 264},
        {"bos_token_id": -1},
        {"bos_token_id": "1"},
        {"eos_token_id": 2**32 - 1},
        {"eot_token_id": 264},
        {"fim_pad_token_id": 264},
        {"add_bos_token": 2},
        {"add_eos_token": "yes"},
    ],
    ids=str,
)
def test_wrong_values_are_one_line(overrides: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_metadata(bpe_metadata(**overrides), "x.gguf")
    (name,) = overrides
    assert str(caught.value).startswith(f"x.gguf: tokenizer.ggml.{name}")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "overrides",
    [
        {"scores": np.zeros(3)},
        {"scores": np.full(261, np.nan)},
        {"scores": np.full(261, 0x7FA00000, np.uint32).view(np.float32)},  # a NaN of the kind that traps
        {"scores": "high"},
        {"add_space_prefix": 5},
    ],
    ids=str,
)
def test_wrong_values_of_sentencepiece_are_one_line(overrides: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_metadata(spm_metadata({"a": 0.0}, **overrides), "x.gguf")
    (name,) = overrides
    assert str(caught.value).startswith(f"x.gguf: tokenizer.ggml.{name}")
    assert "\n" not in str(caught.value)


def test_missing_values_have_defaults(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(pre=None, token_type=None), "x.gguf")
    assert tokenizer.decode(tokenizer.encode("hello <s>")) == "hello <s>"
    assert "tokenizer.ggml.pre is missing" in caplog.text
    spm = Tokenizer.from_metadata(spm_metadata({"a": 0.0}, scores=None, token_type=None), "x.gguf")
    assert (spm.bos_id, spm.eos_id, spm.add_bos) == (1, 2, True)
    tiny = Tokenizer.from_metadata({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}, "x.gguf")
    assert (tiny.bos_id, tiny.eos_id, tiny.add_bos) == (None, None, False)


def test_a_bos_that_does_not_exist_is_not_added(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(add_bos_token=True), "x.gguf")
    assert tokenizer.encode("h") == [ord("h")]
    assert "add_bos_token is true, but tokenizer.ggml.bos_token_id is missing" in caplog.text


def test_odd_vocabularies_work() -> None:
    # Doubles, empty tokens, merges of tokens that do not exist, tokens outside the byte map, no bytes at all.
    tokens = ["a", "a", "", "\ufffd", "中", "<0x", "ab"]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens}
    metadata["tokenizer.ggml.merges"] = ["a b", "a b", "x y", "  a"]
    tokenizer = Tokenizer.from_metadata(metadata, "x.gguf")
    assert tokenizer.encode("aab\0") == [1, 1]
    assert tokenizer.decode(range(7)) == "aa\ufffd中<0xab"
    metadata["tokenizer.ggml.model"] = "llama"
    spm = Tokenizer.from_metadata(metadata, "x.gguf")
    assert spm.decode(range(7)) == "aa\ufffd中<0xab"


def test_any_mixture_of_values_loads_or_is_refused() -> None:
    rng = random.Random(5)
    strange = [None, -1, 0, 1, 2.5, True, "", "gpt2", "llama", [], ["a"], [["a"]], np.zeros(0), np.arange(264), b"x"]
    names = [key.rpartition(".")[2] for key in bpe_metadata()]
    names += ["bos_token_id", "eos_token_id", "add_bos_token", "add_space_prefix", "scores", "unknown_token_id"]
    for _ in range(500):
        overrides = {name: rng.choice(strange) for name in rng.sample(names, rng.randrange(1, 4))}
        try:
            tokenizer = Tokenizer.from_metadata(bpe_metadata(**overrides), "x.gguf")
        except PyllmError as error:
            assert "\n" not in str(error)
        else:
            tokenizer.decode(tokenizer.encode("hello <s>\n", parse_special=True))
