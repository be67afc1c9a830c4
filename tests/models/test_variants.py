"""Layouts that the reference models do not have: fused tensors, sliding-window patterns, padded vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllm.device.host import HostDevice
from pyllm.errors import DeviceError
from pyllm.gguf_file import GGUFFile
from pyllm.models.config import TransformerConfig
from pyllm.models.gemma3 import Gemma3, slides
from pyllm.quants import QuantType
from tests import edited_model
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path, quant_path, quant_reference, reference

F32 = QuantType.F32


def float_rows(gguf: GGUFFile, name: str) -> np.ndarray:
    return np.ascontiguousarray(gguf.tensor_data(name)).view(np.float32)


def test_fused_qkv_equals_three_tensors(tmp_path: Path) -> None:
    source, prompt = model_path("qwen2-a-f32"), reference("qwen2-a")["n70_tokens"].tolist()
    parts, tensors = ("attn_q", "attn_k", "attn_v"), {}
    with GGUFFile(source) as gguf:
        for layer in range(5):
            for kind in ("weight", "bias"):
                names = [f"blk.{layer}.{part}.{kind}" for part in parts]
                rows = [
                    float_rows(gguf, name) if kind == "weight" else gguf.tensor_data(name).view(np.float32)
                    for name in names
                ]
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = (F32, np.concatenate(rows))
                tensors |= dict.fromkeys(names)
    with (
        open_engine(source) as plain,
        open_engine(edited_model.write(source, tmp_path / "fused.gguf", tensors=tensors)) as fused,
    ):
        assert np.abs(plain.logits(prompt) - fused.logits(prompt)).max() < 1e-5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [1, 1, 1, 1, 1, 0, 1]),
        (6, [1, 1, 1, 1, 1, 0, 1]),
        (2, [1, 0, 1, 0, 1, 0, 1]),
        (1, [0] * 7),
        (0, [1] * 7),
        (np.array([0, 1, 1, 0, 0, 0, 1], np.int32), [0, 1, 1, 0, 0, 0, 1]),
        (np.array([0, 1, 1, 0, 0, 0, 1], bool), [0, 1, 1, 0, 0, 0, 1]),
    ],
    ids=str,
)
def test_sliding_window_patterns(tmp_path: Path, value: Any, expected: list[int]) -> None:
    change = {"gemma3.attention.sliding_window_pattern": value}
    path = edited_model.write(model_path("gemma3-a-f16"), tmp_path / "model.gguf", change)
    with GGUFFile(path) as gguf:
        config = TransformerConfig.from_gguf(gguf)
        assert slides(gguf, config) == [bool(layer) for layer in expected]
        assert Gemma3.read_rope(gguf, config).of_layer == tuple(expected)
        windows = [params.window for params in Gemma3.attention_params(gguf, config)]
        assert windows == [24 * layer for layer in expected]


def test_final_soft_cap_bounds_the_logits(tmp_path: Path) -> None:
    source, prompt = model_path("gemma3-a-f16"), reference("gemma3-a")["n70_tokens"].tolist()
    capped = edited_model.write(source, tmp_path / "capped.gguf", {"gemma3.final_logit_softcapping": 2.0})
    with open_engine(source) as plain, open_engine(capped) as llm:
        assert np.allclose(llm.logits(prompt), 2 * np.tanh(plain.logits(prompt) / 2), atol=1e-5)


def test_weights_beyond_the_budget_stay_packed_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    ref = quant_reference("llama-q-Q4_0")
    device = HostDevice(poison=True, weight_budget=700_000)
    with open_engine(quant_path("llama-q-Q4_0"), device) as llm:
        types = {weight.qtype for weight in llm.weights.matrices}
        assert types == {QuantType.F32, QuantType.Q4_0}
        assert sum(w.array.nbytes for w in llm.weights.matrices if w.qtype == F32) <= 700_000
        logits = llm.logits(ref["n70_tokens"].tolist())
        assert np.abs(logits[-8:] - ref["n70_logits_last8"]).max() < 1e-3
        assert len(tokens(llm.generate([1, 2, 3], greedy(4)))) == 4
    assert caplog.text.count("stay packed") == 1


def test_a_context_that_cannot_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    change = {"llama.context_length": 2**30}
    path = edited_model.write(model_path("llama-a-f32"), tmp_path / "model.gguf", change)
    with pytest.raises(DeviceError, match=r"GB.*-c"):
        open_engine(path, ctx_size=2**30, n_seqs=2**20)
