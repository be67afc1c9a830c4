"""Model files that pyllm cannot run are refused by name, before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllm.device.host import HostDevice
from pyllm.errors import ModelFileError, PyllmError, UnsupportedError
from pyllm.gguf_file import GGUFFile
from pyllm.llm import LLM, EngineOptions
from pyllm.models.config import refuse_keys
from pyllm.quants import QuantType
from tests import edited_model
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path, reference

LLAMA, QWEN = model_path("llama-a-f32"), model_path("qwen3-a-bf16")
F32 = QuantType.F32


def refused(path: Path, expected: type[PyllmError]) -> str:
    """The one line with which a file is refused; no weight may have been read by then."""
    device = HostDevice(poison=True)
    device.upload_weight = device.upload = None  # reading a weight would raise TypeError
    with pytest.raises(expected) as raised:
        LLM.with_options(path, device, EngineOptions())
    message = str(raised.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, ["general.architecture", "'mamba'", "llama, qwen2, qwen3"]),
        ({"general.architecture": None}, ["general.architecture"]),
        ({"llama.expert_count": 8}, ["llama.expert_count", "8"]),
        ({"llama.rope.scaling.type": "longrope"}, ["llama.rope.scaling.type", "longrope", "yarn"]),
        ({"llama.attention.head_count_kv": np.array([2, 2, 1, 2, 2], np.int32)}, ["head_count_kv", "layers"]),
        ({"tokenizer.ggml.model": "rwkv"}, ["tokenizer.ggml.model", "rwkv"]),
        ({"tokenizer.ggml.pre": "klingon"}, ["tokenizer.ggml.pre", "klingon"]),
    ],
    ids=str,
)
def test_unsupported(tmp_path: Path, metadata: dict[str, Any], words: list[str]) -> None:
    expected = UnsupportedError if next(iter(metadata.values())) is not None else ModelFileError
    message = refused(edited_model.write(LLAMA, tmp_path / "model.gguf", metadata), expected)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (8, UnsupportedError, "llama.expert_count is 8; pyllm"),
        (np.full(100, 12345678), UnsupportedError, "is an array of 100 int64 values; pyllm"),
        (["x" * 1_000_000] + [""] * 3000, ModelFileError, "is an array of 3001 strings, expected an integer"),
        ([np.ones(1, np.int32), np.ones(3, np.int32)], ModelFileError, "is an array of 2 arrays, expected an integer"),
        (np.array([np.nan]), ModelFileError, "is an array of 1 float64 values, expected an array of numbers"),
        ("a\nb" * 1_000_000, ModelFileError, "is 'a\\nba"),
        (0.5, ModelFileError, "is 0.5, expected an integer"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_keys_that_must_be_zero(value: Any, error: type[PyllmError], words: str) -> None:
    gguf = GGUFFile(LLAMA)
    gguf.metadata = {**gguf.metadata, "llama.expert_count": value}  # type: ignore[assignment]
    with pytest.raises(error) as raised:
        refuse_keys(gguf, {"expert_count": "experts"})
    assert words in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 500
    for zero in (0, np.zeros(5, np.int32)):
        gguf.metadata = {**gguf.metadata, "llama.expert_count": zero}  # type: ignore[assignment]
        refuse_keys(gguf, {"expert_count": "experts"})


def test_blocks_behind_the_last_one(tmp_path: Path) -> None:
    message = refused(edited_model.write(LLAMA, tmp_path / "a.gguf", {"llama.block_count": 3}), ModelFileError)
    assert "there is a tensor blk.3." in message and "llama.block_count is 3" in message
    vector = (F32, np.ones(8, np.float32))
    names = ("rope_freqs.weight.extra", "cls.weight", "dense_2.weight", "blk.4.unknown.weight", "blk.x.weight")
    with open_engine(edited_model.write(LLAMA, tmp_path / "b.gguf", None, dict.fromkeys(names, vector))) as llm:
        assert len(tokens(llm.generate([1, 2], greedy(2)))) == 2
    for name in ("blk.5.x.weight", "blk.99999999999999999999.x.weight"):
        path = edited_model.write(LLAMA, tmp_path / "c.gguf", None, {name: vector})
        assert f"there is a tensor {name}, but llama.block_count is 5" in refused(path, ModelFileError)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.block_count": None},
        {"llama.block_count": 0},
        {"llama.block_count": 6},  # blk.5 is not there
        {"llama.block_count": 2**31},
        {"llama.block_count": "five"},
        {"llama.embedding_length": 65},
        {"llama.embedding_length": 2**31},
        {"llama.feed_forward_length": 0},
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": 3},
        {"llama.attention.head_count_kv": np.array([2, 2], np.int32)},
        {"llama.attention.layer_norm_rms_epsilon": None},
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        {"llama.attention.layer_norm_rms_epsilon": -1.0},
        {"llama.context_length": 0},
        {"llama.rope.dimension_count": 7},
        {"llama.rope.dimension_count": 4096},
        {"llama.rope.freq_base": 0.0},
        {"llama.rope.freq_base": float("inf")},
        {"llama.rope.scaling.factor": -2.0},
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.merges": None},
    ],
    ids=str,
)
def test_damaged_metadata(tmp_path: Path, metadata: dict[str, Any]) -> None:
    message = refused(edited_model.write(LLAMA, tmp_path / "model.gguf", metadata), ModelFileError)
    key = next(iter(metadata))
    related = {"llama.block_count": "blk.5", "llama.embedding_length": "shape", "llama.attention.head_count": "3"}
    assert key in message or related[key] in message


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"blk.3.ffn_up.weight": None}, "blk.3.ffn_up.weight is missing"),
        ({"token_embd.weight": None}, "token_embd.weight is missing"),
        ({"output_norm.weight": (F32, np.ones(65, np.float32))}, "output_norm.weight has shape 65"),
        ({"blk.0.attn_k.weight": (F32, np.ones((16, 64), np.float32))}, "16 x 64, the metadata asks for 32 x 64"),
        ({"blk.1.attn_q.weight": (QuantType.I32, np.ones((64, 64), np.int32))}, "blk.1.attn_q.weight is I32"),
        ({"rope_freqs.weight": (F32, np.ones(5, np.float32))}, "rope_freqs.weight has shape (5,)"),
        ({"rope_freqs.weight": (F32, np.zeros(8, np.float32))}, "not positive"),
        ({"rope_freqs.weight": (F32, np.full(8, 1e-45, np.float32))}, "rope frequencies that float32 cannot hold"),
        ({"blk.0.ffn_up.bias": (F32, np.ones(160, np.float32))}, "feed-forward biases"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_tensors(tmp_path: Path, tensors: dict[str, Any], word: str) -> None:
    assert word in refused(edited_model.write(LLAMA, tmp_path / "model.gguf", tensors=tensors), ModelFileError)


def test_an_edited_copy_without_edits_still_runs(tmp_path: Path) -> None:
    copy = edited_model.write(LLAMA, tmp_path / "model.gguf")
    prompt = reference("llama-a")["n5_tokens"].tolist()
    with open_engine(copy) as llm:
        assert tokens(llm.generate(prompt, greedy(32))) == reference("llama-a")["n5_greedy"].tolist()


def test_attention_biases_are_added(tmp_path: Path) -> None:
    """Zero biases change nothing, others do."""
    prompt = reference("llama-a")["n5_tokens"].tolist()
    with open_engine(LLAMA) as llm:
        plain = llm.logits(prompt)
    for value, same in ((0.0, True), (0.5, False)):
        biases = {
            f"blk.{layer}.{name}.bias": (F32, np.full(size, value, np.float32))
            for layer in range(5)
            for name, size in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64))
        }
        with open_engine(edited_model.write(LLAMA, tmp_path / f"{value}.gguf", tensors=biases)) as llm:
            assert np.allclose(llm.logits(prompt), plain, atol=1e-6) == same


def test_padded_vocabularies_never_yield_a_token_without_text(tmp_path: Path) -> None:
    """The embedding may have more rows than the tokeniser has tokens."""
    rows = {
        name: (F32, np.concatenate([_rows(LLAMA, name), np.full((8, 64), 5, np.float32)]))
        for name in ("token_embd.weight", "output.weight")
    }
    prompt = reference("llama-a")["n70_tokens"].tolist()
    with open_engine(edited_model.write(LLAMA, tmp_path / "padded.gguf", tensors=rows)) as llm:
        assert llm.logits(prompt).shape == (70, 520)
        chunks = list(llm.generate(prompt, greedy(64)))
    assert all(chunk.token < 512 for chunk in chunks)


def _rows(path: Path, name: str) -> np.ndarray:
    from pyllm.gguf_file import GGUFFile

    with GGUFFile(path) as gguf:
        return np.ascontiguousarray(gguf.tensor_data(name)).view(np.float32)
