"""Sequences side by side: running out of pages, cancelling, interrupting, and faults that end the right ones."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from pyllm.errors import ContextError, DeviceError, StaleKVError
from pyllm.llm import LLM
from pyllm.ops.op import Op
from pyllm.request import Request
from pyllm.sampling import Sampler, SamplingParams
from tests.engine import greedy, interleaved, open_engine, tokens
from tests.refdata import PROMPTS, model_path, reference

REF = reference("llama-a")
PROMPT = {name: REF[f"{name}_tokens"].tolist() for name in PROMPTS}
ANSWER = {name: REF[f"{name}_greedy"].tolist() for name in PROMPTS}  # all margins of llama-a are wide


def engine(**options: Any) -> LLM:
    return open_engine(model_path("llama-a-f32"), **options)


def test_more_requests_than_sequences_wait_their_turn() -> None:
    with engine(n_seqs=2, ubatch_size=32) as llm:
        found = interleaved([llm.generate(PROMPT[name], greedy(32)) for name in PROMPTS * 2])
    assert found == [ANSWER[name] for name in PROMPTS * 2]


def test_the_youngest_gives_way_when_pages_run_out_and_nothing_is_lost() -> None:
    # 5 + 70 + 70 tokens and 32 more each need 31 pages of 8 rows; there are 24.
    with engine(n_seqs=3, ctx_size=112, page_size=8, ubatch_size=32) as llm:
        llm._cache._free = type(llm._cache._free)(list(llm._cache._free)[:24])
        put_back: list[object] = []
        original = llm._scheduler._put_back
        llm._scheduler._put_back = lambda request: (put_back.append(request), original(request))[1]
        names = ("n5", "n70", "n70")
        found = interleaved([llm.generate(PROMPT[name], greedy(32)) for name in names])
        assert put_back
        assert llm._cache.num_free_pages == 24
    assert found == [ANSWER[name] for name in names]


def test_a_sequence_that_can_never_fit_ends_with_an_error() -> None:
    with engine(ctx_size=112, page_size=8) as llm:
        llm._cache._free.clear()
        with pytest.raises(ContextError, match="pages"):
            list(llm.generate(PROMPT["n5"], greedy(32)))


def test_closing_a_stream_frees_its_pages_and_leaves_the_others_alone() -> None:
    with engine(n_seqs=2, page_size=8) as llm:
        free = llm._cache.num_free_pages
        kept, dropped = llm.generate(PROMPT["n70"], greedy(32)), llm.generate(PROMPT["n300"], greedy(32))
        next(dropped)
        first = [next(kept).token, next(kept).token]
        dropped.close()
        assert first + tokens(kept) == ANSWER["n70"]
        assert llm._cache.num_free_pages == free


def test_an_interrupt_ends_everything_and_the_engine_stays_usable() -> None:
    with engine(n_seqs=2) as llm:
        streams = [llm.generate(PROMPT[name], greedy(200)) for name in ("n5", "n70")]
        taken = [[next(stream).token for _ in range(5)] for stream in streams]
        llm.interrupt()
        rest = [list(stream) for stream in streams]
        assert [chunks[-1].finish_reason for chunks in rest] == ["interrupted", "interrupted"]
        for name, before, after in zip(("n5", "n70"), taken, rest, strict=True):
            found = before + [chunk.token for chunk in after if chunk.token is not None]
            assert found == ANSWER[name][: len(found)]
        assert tokens(llm.generate(PROMPT["n300"], greedy(32))) == ANSWER["n300"]


def test_prompts_that_do_not_fit_are_refused_and_full_contexts_end_with_length() -> None:
    with engine(ctx_size=75) as llm:
        with pytest.raises(ContextError, match=r"300 tokens.*75.*74.*-c"):
            next(llm.generate(PROMPT["n300"], greedy(1)))
        with pytest.raises(ContextError, match="empty"):
            next(llm.generate([], greedy(1)))
        with pytest.raises(ContextError):
            llm.logits([1] * 76)
        assert llm.logits([1] * 75).shape == (75, 512)
        chunks = list(llm.generate(PROMPT["n70"], greedy(32)))
        assert [chunk.token for chunk in chunks] == ANSWER["n70"][:5]
        assert chunks[-1].finish_reason == "length"
        assert llm.stats["finish_reason"] == "length"


def test_a_stale_row_ends_its_sequence_by_name_and_no_other() -> None:
    with engine(n_seqs=2, page_size=8) as llm:
        victim, other = llm.generate(PROMPT["n70"], greedy(32)), llm.generate(PROMPT["n5"], greedy(32))
        shown = [next(victim).token]
        before = [next(other).token]
        kv = llm._scheduler._running[0].kv
        assert kv is not None
        page, row = kv.pages[3], 8 * kv.pages[3] + 5

        def overwrite(tags: np.ndarray) -> None:
            tags[2, row] = 12345

        llm._device.launch(Op("overwrite", overwrite), llm._cache.tags)
        with pytest.raises(StaleKVError) as raised:
            shown += tokens(victim)
        assert f"sequence {kv.seq_id}, position 29, layer 2, page {page}, row 5" in str(raised.value)
        assert shown == ANSWER["n70"][: len(shown)]
        assert before + tokens(other) == ANSWER["n5"]
        assert page in llm._cache.quarantined
        for _ in range(20):  # the page is never handed out again
            assert tokens(llm.generate(PROMPT["n70"], greedy(2))) == ANSWER["n70"][:2]
            assert page not in llm._cache._free


def test_a_failed_device_is_reported_to_every_request() -> None:
    with engine(n_seqs=2) as llm:
        streams = [llm.generate(PROMPT[name], greedy(32)) for name in ("n5", "n70")]
        for stream in streams:
            next(stream)

        def broken_op() -> None:
            raise OSError("the card fell off the bus")

        llm._device.stream.enqueue(broken_op)
        for stream in streams:
            with pytest.raises(DeviceError, match="fell off the bus"):
                list(stream)
        with pytest.raises(DeviceError):
            list(llm.generate(PROMPT["n5"], greedy(1)))


def test_callers_in_several_threads_get_their_own_answers() -> None:
    found: dict[int, list[int]] = {}
    names = ("n5", "n70", "n300", "n5", "n70", "n300")
    with engine(n_seqs=3, ubatch_size=32) as llm:

        def run(index: int) -> None:
            found[index] = tokens(llm.generate(PROMPT[names[index]], greedy(32)))

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(names))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {index: ANSWER[name] for index, name in enumerate(names)}


def test_seeds_belong_to_sequences() -> None:
    def sampled(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)

    with engine(n_seqs=3) as llm:
        alone = [tokens(llm.generate(PROMPT["n5"], sampled(seed))) for seed in (1, 2)]
        together = interleaved([llm.generate(PROMPT["n5"], sampled(seed)) for seed in (2, 1, 1)])
    assert alone[0] != alone[1]
    assert together == [alone[1], alone[0], alone[0]]


def test_results_of_a_sequence_that_was_put_back_are_not_taken() -> None:
    with engine() as llm:
        params = greedy(8)
        request = Request(list(PROMPT["n5"]), 5, params, Sampler(params, 512))
        gate = llm._device.gate()
        llm._scheduler.add(request)
        llm._scheduler.step()  # its prompt is in flight
        llm._scheduler._put_back(request)
        llm._scheduler.step()  # and once more, with other pages
        gate.open()
        while request.finish_reason is None:
            llm._scheduler.step()
        assert [sampled.token for sampled in request.emitted] == ANSWER["n5"][:8]


def test_prompts_are_started_in_whole_ubatches_while_others_are_added() -> None:
    with engine(n_seqs=5, ubatch_size=32) as llm:
        shapes: list[list[int]] = []
        submit = llm._executor.submit

        def submitted(segments: Any) -> Any:
            shapes.append([len(segment.token_ids) for segment in segments])
            return submit(segments)

        llm._executor.submit = submitted  # type: ignore[method-assign]
        begun = []
        names = ("n5", "n5", "n70", "n5", "n70")
        for name in names:
            begun.append(llm.begin(PROMPT[name], greedy(32)))
            llm.start_prompts()
            assert len(llm._scheduler._running) == len(begun)  # each at once, however few places are left
            llm._device.synchronize()
        assert shapes == [[5], [5, 27], [32], [11, 5, 16]]  # prompts alone; what does not fill a ubatch waits
        while llm.advance():
            pass
        found = [tokens(iter(one.take, None)) for one in begun]
    assert found == [ANSWER[name] for name in names]


def test_what_is_to_be_done_meanwhile_is_done_while_the_device_computes() -> None:
    with engine(n_seqs=2, ubatch_size=32, inflight=1) as llm:
        calls: list[int] = []

        def meanwhile() -> bool:
            calls.append(len(calls))
            if len(calls) == 3:
                gate.open()
            return len(calls) < 3

        gate = llm._device.gate()  # type: ignore[attr-defined]
        generation = llm.begin(PROMPT["n5"], greedy(32))
        while len(calls) < 3:
            assert llm.advance(meanwhile)
        found: list[int] = []
        while not found or not generation.has_ended or generation.num_ready:
            found += [] if (chunk := generation.take()) is None else [chunk.token]  # type: ignore[list-item]
            if not generation.num_ready:
                llm.advance()
        assert found == ANSWER["n5"] and calls == [0, 1, 2]


def test_what_has_ended_is_not_ended_again() -> None:
    with engine(n_seqs=2, page_size=8) as llm:
        generation = llm.begin(PROMPT["n5"], greedy(3))
        other = llm.begin(PROMPT["n70"], greedy(32))
        while not generation.has_ended:
            llm.advance()
        assert generation._request.is_out and not other._request.is_out
        generation.close()
        assert not llm._scheduler._ended
        assert llm.stats["generated_tokens"] == 3 and llm.stats["finish_reason"] == "length"
        other.close()
        assert other._request.is_out and llm.stats["finish_reason"] == "cancelled"
        assert llm._cache.num_free_pages == llm._cache.num_pages
