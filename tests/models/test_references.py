"""Every reference model against its reference, for the ways in which a prompt can be cut up and mixed with others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine import greedy, interleaved, open_engine, tokens
from tests.refdata import PROMPTS, model_path, quant_path, quant_reference, reference, same_until_unclear

MODELS = {
    "llama-a": "llama-a-f32",
    "llama-b-rope3": "llama-b-rope3-f16",
    "llama-c-spm": "llama-c-spm-bf16",
    "qwen2-a": "qwen2-a-f32",
    "qwen3-a": "qwen3-a-bf16",
    "qwen3moe-a": "qwen3moe-a-f16",
    "gemma3-a": "gemma3-a-f16",
    "gemma3-b-ropelinear": "gemma3-b-ropelinear-f32",
}
# Of the block types a few; that each is decoded to the bit is for tests/quants to say.
QUANTS = ("Q4_0", "Q2_K", "Q3_K", "Q4_K_M-mix")
FLOAT32_LIMIT = 1e-3  # max over the vocabulary of |engine - reference|, see tests/data/refdata/README.md
FLOAT16_MEDIAN, FLOAT16_MAX, FLOAT16_KL = 0.05, 0.2, 1e-4


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check_float32(logits: np.ndarray, ref: dict[str, np.ndarray], prompt: str) -> None:
    """All that a reference says about one prompt."""
    assert np.abs(logits[-8:] - ref[f"{prompt}_logits_last8"]).max() <= FLOAT32_LIMIT
    clear = ref[f"{prompt}_margin"] >= 2 * FLOAT32_LIMIT
    assert (logits.argmax(axis=-1) == ref[f"{prompt}_argmax"])[clear].all()
    following = ref[f"{prompt}_tokens"][1:]
    logprob = np.take_along_axis(log_softmax(logits[:-1]), following[:, None], axis=-1)[:, 0]
    assert np.abs(logprob - ref[f"{prompt}_next_logprob"]).max() <= 2 * FLOAT32_LIMIT


def check_greedy(found: list[int], ref: dict[str, np.ndarray], prompt: str) -> None:
    assert same_until_unclear(found, ref[f"{prompt}_greedy"], ref[f"{prompt}_greedy_margin"], 0.01)


# Every ring depth for two models; what a model computes does not depend on it (test_bit_equal.py).
RINGS = [
    (name, ring_depth) for name in MODELS for ring_depth in ((1, 2, 4) if name in ("llama-a", "qwen3-a") else (2,))
]


@pytest.mark.parametrize("ubatch_size", [1, 7, 64, 512])
@pytest.mark.parametrize(("name", "ring_depth"), RINGS)
def test_float32(name: str, ubatch_size: int, ring_depth: int) -> None:
    ref = reference(name)
    with open_engine(model_path(MODELS[name]), ubatch_size=ubatch_size, ring_depth=ring_depth) as llm:
        for prompt in PROMPTS:
            if ubatch_size == 1 and prompt == "n300" and (ring_depth != 2 or name not in ("llama-a", "gemma3-a")):
                continue  # 300 ubatches of one token are slow; two models and one ring depth of them are enough
            ids = ref[f"{prompt}_tokens"].tolist()
            check_float32(llm.logits(ids), ref, prompt)
            check_greedy(tokens(llm.generate(ids, greedy(32))), ref, prompt)


@pytest.mark.parametrize("ubatch_size", [7, 64, 512])
@pytest.mark.parametrize(("name", "ring_depth"), RINGS)
def test_three_interleaved_sequences(name: str, ubatch_size: int, ring_depth: int) -> None:
    ref = reference(name)
    prompts = [ref[f"{prompt}_tokens"].tolist() for prompt in PROMPTS]
    with open_engine(model_path(MODELS[name]), n_seqs=3, ubatch_size=ubatch_size, ring_depth=ring_depth) as llm:
        for prompt, logits in zip(PROMPTS, llm.logits_batch(prompts), strict=True):
            check_float32(logits, ref, prompt)
        found = interleaved([llm.generate(ids, greedy(32)) for ids in prompts])
    for prompt, answer in zip(PROMPTS, found, strict=True):
        check_greedy(answer, ref, prompt)


def check_float16(logits: np.ndarray, expected: np.ndarray) -> None:
    """The limits for float16 K/V rows; both arguments hold the last positions."""
    error = np.abs(logits - expected).max(axis=-1)
    assert np.median(error) <= FLOAT16_MEDIAN
    assert error.max() <= FLOAT16_MAX
    p, q = log_softmax(expected), log_softmax(logits)
    assert (np.exp(p) * (p - q)).sum(axis=-1).mean() <= FLOAT16_KL


@pytest.mark.parametrize("ubatch_size", [1, 7, 64, 512])
@pytest.mark.parametrize("name", MODELS)
def test_float16_rows(name: str, ubatch_size: int) -> None:
    ref = reference(name)
    with open_engine(model_path(MODELS[name]), kv_type="f16", ubatch_size=ubatch_size) as llm:
        for prompt in PROMPTS[: 2 if ubatch_size == 1 else 3]:
            logits = llm.logits(ref[f"{prompt}_tokens"].tolist())[-8:]
            check_float16(logits, ref[f"{prompt}_logits_last8"])


@pytest.mark.parametrize("ubatch_size", [1, 7, 64, 512])
@pytest.mark.parametrize("quant", QUANTS)
def test_quantised(quant: str, ubatch_size: int) -> None:
    ref = quant_reference(f"llama-q-{quant}")
    with open_engine(quant_path(f"llama-q-{quant}"), ubatch_size=ubatch_size) as llm:
        for prompt in PROMPTS[: 2 if ubatch_size == 1 else 3]:
            ids = ref[f"{prompt}_tokens"].tolist()
            check_float32(llm.logits(ids), ref, prompt)
            if ubatch_size == 64:
                check_greedy(tokens(llm.generate(ids, greedy(32))), ref, prompt)


@pytest.mark.parametrize("quant", QUANTS)
def test_quantised_with_float16_rows(quant: str) -> None:
    ref = quant_reference(f"llama-q-{quant}")
    with open_engine(quant_path(f"llama-q-{quant}"), kv_type="f16") as llm:
        for prompt in PROMPTS:
            logits = llm.logits(ref[f"{prompt}_tokens"].tolist())[-8:]
            check_float16(logits, ref[f"{prompt}_logits_last8"])
