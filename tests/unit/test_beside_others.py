"""What happens to one request must not happen to those beside it."""

from __future__ import annotations

from typing import Any

import pytest

import pyllm.scheduler as scheduler
from pyllm.device import Device
from pyllm.device.emulated import EmulatedDevice
from pyllm.device.host import HostDevice
from pyllm.executor import TestHooks
from pyllm.input_block import InputViews
from pyllm.llm import LLM, EngineOptions
from tests.engine import greedy
from tests.refdata import model_path

PROMPT = [11, 2, 9, 4, 8, 6, 1, 2]  # a page


class KeepsTokens(HostDevice):
    wants_candidates = True


def engine(device: Device, **options: Any) -> LLM:
    given = {"ctx_size": 64, "kv_type": "f32", "n_seqs": 2, "page_size": 8, **options}
    return LLM.with_options(model_path("llama-a-f32"), device, EngineOptions(**given))


def answer_beside_a_prompt(forged: bool) -> tuple[list[int | None], BaseException | None]:
    """Tokens of a sequence that has run ahead of a ubatch with another's prompt only, and how that one ended."""
    step = 0

    def corrupt(serial: int, views: InputViews) -> None:
        if forged and serial == step:
            views.head_serial[0] = 99

    hooks = TestHooks(slow_stream=0.02, corrupt=corrupt)
    device = KeepsTokens(poison=True)
    with engine(device, inflight=8, ubatch_size=8, batch_size=64, hooks=hooks) as llm:
        executor = llm._executor
        executor._inflight = 1
        first = llm.begin([3, 5, 7], greedy(14))
        llm.advance()
        executor._inflight = 8
        other = llm.begin(PROMPT, greedy(4))
        step = executor.num_submitted + 1
        llm.start_prompts()
        assert executor.num_submitted == step
        while llm.advance():
            pass
        found = []
        while (chunk := first.take()) is not None:
            found.append(chunk.token)
        return found, other._request.error


def test_an_emptied_ubatch_keeps_no_token_for_others() -> None:
    right, no_error = answer_beside_a_prompt(forged=False)
    found, error = answer_beside_a_prompt(forged=True)
    assert no_error is None and "overwritten" in str(error)
    assert len(right) >= 14 and found == right


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_logits_wait_for_room_beside_those_that_decode(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(HostDevice(poison=True), n_seqs=4) as llm:
        monkeypatch.setattr(scheduler, "MAX_LOGITS_BYTES", rows * 4 * llm.vocab_size)
        others = [llm.begin([3 + index, 5], greedy(20)) for index in range(3)]
        for _ in range(3):
            llm.advance()
        assert llm.logits(PROMPT).shape == (8, llm.vocab_size)
        while llm.advance():
            pass
        assert [one.stats()["finish_reason"] for one in others] == ["length"] * 3


def test_who_waits_for_pages_goes_on_when_another_runs_out_of_them() -> None:
    with engine(KeepsTokens(poison=True), inflight=2) as llm:
        for page in range(llm._cache.num_pages - 5):
            llm._cache.quarantine(page)
        first, second = llm.generate([3] * 10, greedy(50)), llm.generate([5] * 10, greedy(20))
        next(first)
        assert sum(chunk.token is not None for chunk in second) == 20


def test_a_request_does_not_wait_for_many_places() -> None:
    """Of 32 sequences one is free, and the others go on for long."""
    with engine(EmulatedDevice(), n_seqs=32, ctx_size=256, page_size=16) as llm:
        others = [llm.begin([3 + index], greedy(200)) for index in range(31)]
        llm.advance()
        request = llm.begin(PROMPT, greedy(2))
        steps = 0
        while request.stats()["finish_reason"] is None:
            assert llm.advance()
            steps += 1
        assert steps < 60 and all(one.stats()["finish_reason"] is None for one in others)
