"""What is kept, on the CPU and on a GPU where there is one (make test-gpu): pages and states that left and came back,
sessions. Some of it emulated too. That bits agree on the CPU is tests/unit/test_cached_agrees.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.errors import ContextError
from pyllm.llm import LLM
from pyllm.sampling import SamplingParams
from tests.engine import greedy, open_engine, tokens
from tests.models.test_kernel_lives import MARGIN
from tests.models.test_references import check_float16
from tests.ops.lives import LIVES
from tests.refdata import model_path, reference
from tests.unit.test_cached_agrees import BASE, CASES, PLACES, answer

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
        assert llm.stats["bytes_moved"] >= llm.stats["restored_bytes"] > 0
        assert llm.stats["memory"]["pages"]["high_water_bytes"] > 0


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


class Compared:
    """Answers beside those of the CPU with f32 rows, which keeps nothing: within the limits of the references."""

    def __init__(self, plain: LLM, num_tokens: int) -> None:
        self.plain = plain
        self.params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, logprobs=1)
        self.found: list[np.ndarray] = []
        self.expected: list[np.ndarray] = []
        self.known: dict[tuple[int, ...], tuple[list[int], np.ndarray]] = {}

    def check(self, llm: LLM, prompt: list[int]) -> None:
        """The same tokens, up to the first that rounding may decide; the logits up to there are noted."""
        if tuple(prompt) not in self.known:
            self.known[tuple(prompt)] = answer(self.plain, prompt, self.params)
        for token, logits, other, exact in zip(
            *answer(llm, prompt, self.params), *self.known[tuple(prompt)], strict=True
        ):
            self.found.append(logits)
            self.expected.append(exact)
            second, best = np.sort(exact)[-2:]
            if best - second < MARGIN:
                return
            assert token == other

    def check_logits(self) -> None:
        check_float16(np.array(self.found), np.array(self.expected))


def put(llm: LLM, prompt: list[int], others: list[int], place: str, file: Path) -> None:
    """Have the rows of a prompt in some place, and no others there."""
    llm.forget()
    stream = llm.generate(prompt, greedy(3))
    if place == "cancelled":
        next(stream)
        stream.close()
        return
    tokens(stream)
    if place == "host":
        for start in (0, 40):
            tokens(llm.generate(others[start : start + 65], greedy(3)))
    elif place == "file":
        llm.save_session(file, prompt)
        llm.forget()
        llm.load_session(file)


@pytest.mark.parametrize("life", [life for life in LIVES if life != "cpu"])
def test_cached_runs_agree_with_those_of_the_cpu(name: str, life: str, tmp_path: Path) -> None:
    """And what was saved there goes on on the CPU. Emulation is slow: rows that stayed on the device, a few cases."""
    few = life != "gpu"
    cases = {case: CASES[case] for case in (("longer", "diverging inside a page") if few else CASES)}
    ids, path, device = IDS[name], model_path(name), LIVES[life]()
    options = {**OPTIONS, "ubatch_size": 48, "ctx_size": 72, "prefix_cache": True, "cache_ram": 1 << 22}
    with open_engine(path, ctx_size=72) as plain, open_engine(path, device, **options) as llm:
        compared = Compared(plain, 2 if few else 3)
        for place in ("device",) if few else PLACES:
            for number, (make, most) in enumerate(cases.values()):
                if not few or not number:
                    put(llm, ids[:BASE], ids[160:], place, tmp_path / "s")
                compared.check(llm, make(ids))
                assert llm.stats["cached_tokens"] <= most
                if name == PLAIN and place != "cancelled":
                    assert llm.stats["cached_tokens"] == most
        with pytest.raises(ContextError, match="the prompt is empty"):
            llm.generate([]).__next__()
        compared.check_logits()
        known = llm.save_session(tmp_path / "s", ids[:BASE]).token_ids
        from_device = Compared(plain, 8)
        with open_engine(path, **options) as cpu:
            assert cpu.load_session(tmp_path / "s").token_ids == known == ids[:BASE]
            for following in (ids[200:203], ids[210:220], ids[230:240]):
                from_device.check(cpu, [*known, *following])
                assert cpu.stats["cached_tokens"] == BASE
        from_device.check_logits()
    device.close()
