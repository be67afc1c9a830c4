"""Greedy decoding queues steps whose tokens only the device knows yet; answers are those of one step at a time."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.device.host import HostDevice
from pyllm.executor import TestHooks
from pyllm.llm import LLM, EngineOptions
from pyllm.sampling import SamplingParams
from tests.refdata import model_path

PROMPTS = [[3, 5, 7], [11, 2, 9, 4, 8, 6], [1]]


class ChoosingHost(HostDevice):
    """A CPU that lets the device choose candidates, as GPUs do."""

    wants_candidates = True


def engine(choosing: bool, **options: Any) -> LLM:
    device = ChoosingHost(poison=True) if choosing else HostDevice(poison=True)
    return LLM.with_options(model_path("llama-a-f32"), device, EngineOptions(ctx_size=64, **options))


def greedy(max_tokens: int | None = 12, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **others)


def answers(llm: LLM, params: list[SamplingParams]) -> list[list[int | None]]:
    """Token ids of several prompts that run side by side."""
    streams = [llm.generate(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    found: list[list[int | None]] = [[] for _ in streams]
    open_streams = list(range(len(streams)))
    while open_streams:
        for index in list(open_streams):
            chunk = next(streams[index], None)
            if chunk is None:
                open_streams.remove(index)
            else:
                found[index].append(chunk.token)
    return found


def test_steps_are_queued_before_their_tokens_are_known() -> None:
    with engine(True, inflight=4, hooks=TestHooks(slow_stream=0.01)) as llm:
        stream = llm.generate(PROMPTS[0], greedy(20))
        for _ in range(4):
            next(stream)
        (request,) = llm._scheduler._running
        assert request.kv is not None
        assert request.kv.length > len(request.token_ids)
        stream.close()
        assert not llm._scheduler._running


def test_tokens_are_shown_as_they_come_from_a_device_faster_than_the_host() -> None:
    with engine(True, inflight=4) as llm:
        submit, count = llm._executor.submit, 0

        def slow(segments: Any) -> Any:
            nonlocal count
            count += 1
            step = submit(segments)
            llm._device.synchronize()
            return step

        llm._executor.submit = slow  # type: ignore[method-assign]
        stream = llm.generate(PROMPTS[0], greedy(20))
        for shown in range(1, 6):
            next(stream)
            assert count <= shown + 4
        stream.close()


@pytest.mark.parametrize("inflight", [1, 2, 4])
def test_answers_do_not_change(inflight: int) -> None:
    params = [greedy(), greedy(3), greedy(1)]
    with engine(False, n_seqs=3) as plain, engine(True, n_seqs=3, inflight=inflight) as ahead:
        assert answers(ahead, params) == answers(plain, params)


def test_others_that_sample_run_beside_it() -> None:
    params = [greedy(), SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True), greedy(4)]
    with engine(False, n_seqs=3) as plain, engine(True, n_seqs=3) as ahead:
        assert answers(ahead, params) == answers(plain, params)


def test_it_stops_at_the_end_of_the_context() -> None:
    with engine(False) as plain, engine(True) as ahead:
        expected = [chunk.token for chunk in plain.generate(PROMPTS[0], greedy(None))]
        assert [chunk.token for chunk in ahead.generate(PROMPTS[0], greedy(None))] == expected


def test_it_stops_at_an_end_token() -> None:
    with engine(False) as plain, engine(True) as ahead:
        ids = [chunk.token for chunk in plain.generate(PROMPTS[1], greedy(12))]
        for llm in (plain, ahead):
            llm._scheduler._is_end = lambda token: token == ids[5]
        params = SamplingParams(max_tokens=12, temperature=0)
        found = [[chunk.token for chunk in llm.generate(PROMPTS[1], params)] for llm in (plain, ahead)]
        assert found[0] == found[1]
        assert len(found[1]) <= 6
        again = [chunk.token for chunk in ahead.generate(PROMPTS[1], greedy(12))]
        assert again == ids  # what was queued in vain left nothing behind


@pytest.mark.parametrize(("max_tokens", "last_row"), [(5, 3 + 5 - 2), (None, 64 - 2)])
def test_no_step_is_queued_whose_token_nobody_wants(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int | None, last_row: int
) -> None:
    with engine(True, inflight=4) as llm:
        starts: list[int] = []
        submit = llm._executor.submit

        def noted(segments: Any) -> Any:
            starts.extend(segment.start + len(segment.token_ids) - 1 for segment in segments)
            return submit(segments)

        monkeypatch.setattr(llm._executor, "submit", noted)
        list(llm.generate(PROMPTS[0], greedy(max_tokens)))
        assert max(starts) == last_row
