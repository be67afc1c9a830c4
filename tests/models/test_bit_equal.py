"""How a ubatch gets to the device must not change a bit of what it computes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from pyllm.device.host import HostDevice
from pyllm.sampling import SamplingParams
from tests.engine import open_engine
from tests.refdata import PROMPTS, model_path, reference

MODELS = {
    "llama-a": "llama-a-f32",
    "qwen3-a": "qwen3-a-bf16",
    "qwen3next-b-eqheads": "qwen3next-b-eqheads-bf16",
}
CTX_SIZE, PAGE_SIZE, NUM_SEQS = 320, 16, 3
NUM_PAGES = NUM_SEQS * CTX_SIZE // PAGE_SIZE


def logits(name: str, device: HostDevice | None = None, **options: Any) -> list[np.ndarray]:
    """Three prompts side by side, cut into many ubatches."""
    options = {"ubatch_size": 48, "ctx_size": CTX_SIZE, "page_size": PAGE_SIZE, "n_seqs": NUM_SEQS, **options}
    prompts = [reference(name)[f"{prompt}_tokens"].tolist() for prompt in PROMPTS]
    with open_engine(model_path(MODELS[name]), device, **options) as llm:
        return llm.logits_batch(prompts)


def slow_device() -> HostDevice:
    """Each piece of work is late, so the host runs far ahead."""
    device = HostDevice(poison=True)
    device.stream.before_work = lambda: time.sleep(0.0005)
    return device


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {"ring_depth": 1, "inflight": 1},
        {"ring_depth": 2},
        {"ring_depth": 8, "inflight": 8},
        {"page_order": list(reversed(range(NUM_PAGES)))},
        {"page_order": np.random.default_rng(1).permutation(NUM_PAGES).tolist()},
        {"page_size": 64},
        {"page_size": 7},
        {"ctx_size": 2048},
        {"device": slow_device, "inflight": 8},
        {"device": slow_device, "ring_depth": 1},
        {"device": lambda: HostDevice(poison=False)},
    ],
    ids=[
        *("one slot", "two slots", "eight slots", "pages reversed", "pages shuffled", "pages of 64", "pages of 7"),
        *("a long context", "slow, eight queued", "slow, one slot", "not poisoned"),
    ],
)
def test_bit_equal(name: str, options: dict[str, Any]) -> None:
    make_device = options.get("device", lambda: None)
    options = {key: value for key, value in options.items() if key != "device"}
    expected = logits(name, ring_depth=4)
    for found, wanted in zip(logits(name, make_device(), **options), expected, strict=True):
        assert (found == wanted).all()


def test_repeated_runs_on_used_pages_are_bit_equal() -> None:
    prompt = reference("llama-a")["n300_tokens"].tolist()
    with open_engine(model_path("llama-a-f32"), ctx_size=CTX_SIZE, page_size=PAGE_SIZE, ubatch_size=48) as llm:
        first = llm.logits(prompt)
        for other in (prompt[:5], prompt[100:250], prompt[::-1]):
            llm.logits(other)
            assert (llm.logits(prompt) == first).all()


@pytest.mark.parametrize("name", MODELS)
def test_replayed_decode_steps_are_bit_equal(name: str) -> None:
    """Sampled with a seed, so that any difference in the logits would show."""
    prompt = reference(name)["n70_tokens"].tolist()
    params = SamplingParams(
        max_tokens=60, temperature=1.0, top_k=0, top_p=1, min_p=0, seed=3, ignore_eos=True, logprobs=5
    )
    answers = []
    for graphs in (True, False):
        device = HostDevice(poison=True)
        device.graphs = graphs
        with open_engine(model_path(MODELS[name]), device, ctx_size=CTX_SIZE, page_size=PAGE_SIZE) as llm:
            answers.append([(chunk.token, chunk.top_logprobs) for chunk in llm.generate(prompt, params)])
            assert bool(llm._executor._captured) == graphs
    assert answers[0] == answers[1]
