"""Hybrid models on a GPU, within the limits of float16: several ubatch sizes, cut prompts, sequences side by side."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyllm.device import Device
from tests.engine import greedy, interleaved, open_engine, tokens
from tests.models.test_hybrids import MODELS, last_logits, submit
from tests.models.test_references import FLOAT16_MEDIAN, check_float16
from tests.ops.lives import LIVES
from tests.refdata import PROMPTS, model_path, quant_path, quant_reference, reference, same_until_unclear

pytestmark = pytest.mark.skipif("gpu" not in LIVES, reason="for a GPU (make test-gpu); tests/models has others")

QUANTS = sorted(path.stem for path in quant_path("").parent.glob("qwen35moe-q-*.gguf"))
MARGIN = 0.1  # of float16 matrix products
ROUTER_GAP = 0.005  # between an expert and the next one; as much as such products move it, and with it what follows


@pytest.fixture
def gpu() -> Iterator[Device]:
    device = LIVES["gpu"]()
    yield device
    device.close()


def open_named(name: str, gpu: Device, **options: object):
    path = quant_path(name) if name in QUANTS else model_path(MODELS[name])
    ref = quant_reference(name) if name in QUANTS else reference(name)
    return open_engine(path, gpu, kv_type="f16", **options), ref


def check_logits(name: str, logits: np.ndarray, expected: np.ndarray) -> None:
    """An expert chosen otherwise moves one position by more than any rounding: with experts the median counts (see
    README.md of the reference data)."""
    if "moe" in name or "next" in name:
        limit = 0.25 if name == "qwen3next-a" else FLOAT16_MEDIAN
        assert np.median(np.abs(logits - expected).max(axis=-1)) <= limit
    else:
        check_float16(logits, expected)


def check_answer(found: list[int], ref: dict[str, np.ndarray], prompt: str) -> None:
    expected, margins = (ref[f"{prompt}_greedy{what}"][: len(found)] for what in ("", "_margin"))
    if (gaps := f"{prompt}_greedy_router_gap") in ref:
        margins = np.where(ref[gaps][: len(found)] < ROUTER_GAP, 0, margins)
    assert same_until_unclear(found, expected, margins, MARGIN)


@pytest.mark.parametrize("ubatch_size", [1, 3, 64, 512])
@pytest.mark.parametrize("name", [*MODELS, *QUANTS])
def test_references(gpu: Device, name: str, ubatch_size: int) -> None:
    llm, ref = open_named(name, gpu, ubatch_size=ubatch_size)
    with llm:
        for prompt in PROMPTS:
            ids = ref[f"{prompt}_tokens"].tolist()
            check_logits(name, llm.logits(ids)[-8:], ref[f"{prompt}_logits_last8"])
            check_answer(tokens(llm.generate(ids, greedy(32))), ref, prompt)


@pytest.mark.parametrize("ubatch_size", [3, 64, 512])
@pytest.mark.parametrize("name", [*MODELS, *QUANTS])
def test_three_interleaved_sequences(gpu: Device, name: str, ubatch_size: int) -> None:
    llm, ref = open_named(name, gpu, ubatch_size=ubatch_size, n_seqs=3)
    with llm:
        prompts = [ref[f"{prompt}_tokens"].tolist() for prompt in PROMPTS]
        for prompt, logits in zip(PROMPTS, llm.logits_batch(prompts), strict=True):
            check_logits(name, logits[-8:], ref[f"{prompt}_logits_last8"])
        found = interleaved([llm.generate(ids, greedy(32)) for ids in prompts])
    for prompt, answer in zip(PROMPTS, found, strict=True):
        check_answer(answer, ref, prompt)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_split_at_every_point(gpu: Device, name: str) -> None:
    llm, ref = open_named(name, gpu, n_seqs=1, page_size=8, ctx_size=128)
    ids = ref["n70_tokens"][:12].tolist()
    with llm:
        expected = llm.logits(ids)[-1:]
        for cut in range(1, len(ids)):
            kv = llm._cache.new_sequence()
            submit(llm, kv, ids[:cut])
            check_logits(name, last_logits(llm, kv, ids[cut:])[None], expected)
            llm._cache.release(kv)


@pytest.mark.parametrize("graphs", [True, False])
def test_used_and_poisoned_slots_give_the_same_bits(gpu: Device, graphs: bool) -> None:
    gpu.graphs = graphs
    llm, ref = open_named("qwen35-a", gpu, ctx_size=128, ubatch_size=16)
    ids = ref["n70_tokens"].tolist()
    with llm:
        first, answer = llm.logits(ids), tokens(llm.generate(ids, greedy(20)))
        for other in (ids[:5], ids[20:50], ids[::-1]):
            llm.logits(other)
            assert (llm.logits(ids) == first).all()
            assert tokens(llm.generate(ids, greedy(20))) == answer
