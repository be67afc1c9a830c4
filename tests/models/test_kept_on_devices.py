"""What is kept, on the CPU and on a GPU where there is one (make test-gpu): pages and states that left and came back,
sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllm.device import Device
from tests.engine import greedy, open_engine, tokens
from tests.ops.lives import LIVES
from tests.refdata import model_path, reference

PLAIN, HYBRID = "qwen3-a-bf16", "qwen3next-b-eqheads-bf16"
IDS = {
    PLAIN: reference("qwen3-a")["n300_tokens"].tolist(),
    HYBRID: reference("qwen3next-b-eqheads")["n300_tokens"].tolist(),
}
OPTIONS = {"page_size": 8, "kv_type": "f16", "ubatch_size": 32}


@pytest.fixture(params=[name for name in ("cpu", "gpu") if name in LIVES])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = LIVES[request.param]()
    yield device
    device.close()


@pytest.fixture(params=[PLAIN, HYBRID])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_conversations_that_left_the_device_come_back(name: str, device: Device) -> None:
    """Three on room for one: each goes on from the host's memory, with the tokens of the first time."""
    with open_engine(model_path(name), device, ctx_size=48, prefix_cache=True, cache_ram=1 << 22, **OPTIONS) as llm:
        prompts = [IDS[name][start : start + 30] for start in (0, 40, 80)]
        first = [tokens(llm.generate(prompt, greedy(3))) for prompt in prompts]
        for prompt, answer in zip(prompts, first, strict=True):
            again = tokens(llm.generate(prompt, greedy(3)))
            assert llm.stats["cached_tokens"] == 29
            assert again == answer
        assert llm.stats["bytes_moved"] > 0 and llm.stats["memory"]["pages"]["high_water_bytes"] > 0


def test_a_session_is_restored(name: str, device: Device, tmp_path: Path) -> None:
    prompt = IDS[name][:40]
    with open_engine(model_path(name), device, ctx_size=64, prefix_cache=True, **OPTIONS) as llm:
        answer = tokens(llm.generate(prompt, greedy(4)))
        llm.save_session(tmp_path / "s")
        llm.forget()
        assert len(llm.load_session(tmp_path / "s").token_ids) >= 40
        assert tokens(llm.generate(prompt, greedy(4))) == answer
        assert llm.stats["cached_tokens"] == 39


def test_checkpoints_are_copied_beside_decoding(device: Device) -> None:
    """Others decode while one sequence after the other is restored from a checkpoint."""
    prompts = [IDS[HYBRID][start : start + 20] for start in (0, 30, 60)]
    with open_engine(model_path(HYBRID), device, ctx_size=96, n_seqs=2, prefix_cache=True, **OPTIONS) as llm:
        expected = [tokens(llm.generate(prompt, greedy(3))) for prompt in prompts]
        other = llm.generate(IDS[HYBRID][100:110], greedy(60))
        next(other)
        for prompt, answer in zip(prompts, expected, strict=True):
            assert tokens(llm.generate(prompt, greedy(3))) == answer
            assert llm.stats["cached_tokens"] == 19
        other.close()
