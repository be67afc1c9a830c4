"""Prompts of hybrid models go on from checkpoints of others that begin alike, with the results of a fresh run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pyllm.device.emulated import EmulatedDevice
from pyllm.device.host import HostDevice
from pyllm.llm import LLM
from pyllm.sampling import SamplingParams
from tests.engine import greedy, in_fresh_process, interleaved, open_engine, tokens
from tests.models.test_hybrids import MODELS, SMALL
from tests.refdata import model_path, reference

IDS = reference(SMALL)["n70_tokens"].tolist()
LIKELIEST = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=5)  # whole rows: nobody runs ahead


def small(device: HostDevice | None = None, **options: Any) -> LLM:
    options = {"ctx_size": 160, "page_size": 8, "ubatch_size": 16, "prefix_cache": True, **options}
    return open_engine(model_path(MODELS[SMALL]), device, **options)


@pytest.fixture
def fresh() -> Iterator[LLM]:
    with small(prefix_cache=False) as llm:
        yield llm


def answer(llm: LLM, prompt: list[int], params: SamplingParams = LIKELIEST) -> list[tuple[int, Any]]:
    """Tokens with the log-probabilities of the likeliest."""
    return [(chunk.token, chunk.top_logprobs) for chunk in llm.generate(prompt, params) if chunk.token is not None]


def agree(found: list[tuple[int, Any]], expected: list[tuple[int, Any]]) -> None:
    """The same tokens; log-probabilities up to the order of sums, which follows from how a prompt is cut."""
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert np.abs(np.array([p for _, p in one]) - np.array([p for _, p in other])).max() <= 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_an_exact_repeat_computes_one_token(name: str) -> None:
    with open_engine(model_path(MODELS[name]), prefix_cache=True, ctx_size=160) as llm:
        first = answer(llm, IDS[:40])
        again = answer(llm, IDS[:40])
        agree(again, first)
        assert llm.stats["cached_tokens"] == 39
        assert llm.stats["evaluated_tokens"] == 1


def test_turns_branches_and_edits_reuse_checkpoints(fresh: LLM) -> None:
    """A conversation by token ids: a turn more, an answer regenerated, an earlier turn edited, the old branch again."""
    with small() as llm:
        turns, ends = IDS[:30], [30]
        for question in (IDS[30:35], IDS[40:47]):
            found = answer(llm, turns)
            agree(found, answer(fresh, turns))
            turns = turns + [token for token, _ in found] + question
            ends.append(len(turns))
        agree(answer(llm, turns), answer(fresh, turns))
        assert llm.stats["cached_tokens"] == ends[1] + 6 - 1  # up to the end of the turn before
        agree(answer(llm, turns), answer(fresh, turns))  # regenerated
        assert llm.stats["cached_tokens"] == len(turns) - 1
        edited = [*turns[: ends[1] - 2], 3, 4, 5, 6]
        agree(answer(llm, edited), answer(fresh, edited))
        assert llm.stats["cached_tokens"] == ends[0] + 6 - 1
        agree(answer(llm, [*turns, 9]), answer(fresh, [*turns, 9]))  # back
        assert llm.stats["cached_tokens"] == len(turns)


def test_running_ahead_keeps_no_state_behind_the_last_token(fresh: LLM) -> None:
    """On devices that choose tokens themselves the state is beyond the accepted tokens when an answer ends."""
    prompt = IDS[:9]
    with small(EmulatedDevice(), inflight=4) as llm, small(EmulatedDevice(), prefix_cache=False) as other:
        found = tokens(llm.generate(prompt, greedy(5)))
        following = prompt + found + [7, 8]
        second = tokens(llm.generate(following, greedy(3)))
        assert llm.stats["cached_tokens"] in (9, 13)
        assert second == tokens(other.generate(following, greedy(3)))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 33])
def test_a_checkpoint_is_used_at_exactly_its_position(length: int, fresh: LLM) -> None:
    with small() as llm:
        answer(llm, IDS[:20])  # checkpoints at 19, 20 and the end of the answer
        for prompt in (IDS[:length], [*IDS[:length], 1, 2, 3], [5, *IDS[:length]]):
            agree(answer(llm, prompt), answer(fresh, prompt))
            assert llm.stats["cached_tokens"] in (0, 19, 20, length - 1, length)


def test_an_answer_that_was_given_up_changes_nothing(fresh: LLM) -> None:
    rng = np.random.default_rng(5)
    with small(n_seqs=2) as llm:
        for _ in range(20):
            cut = int(rng.integers(1, 40))
            stream = llm.generate(IDS[:cut] + rng.integers(0, 500, 3).tolist(), greedy(20))
            for _ in range(int(rng.integers(0, 12))):
                next(stream)
            if rng.random() < 0.3:
                llm.interrupt()
            stream.close()
            prompt = IDS[: int(rng.integers(1, 60))]
            agree(answer(llm, prompt), answer(fresh, prompt))


def test_prompts_side_by_side_share_what_ended_before(fresh: LLM) -> None:
    with small(n_seqs=3) as llm:
        tokens(llm.generate(IDS[:40], greedy(1)))
        prompts = [[*IDS[:40], index, 7] for index in range(3)]
        found = interleaved([llm.generate(prompt, greedy(8)) for prompt in prompts])
        assert found == [tokens(fresh.generate(prompt, greedy(8))) for prompt in prompts]
        assert llm.stats["cached_tokens"] == 40


def test_restoring_lets_others_go_on() -> None:
    with small(n_seqs=2) as llm:
        tokens(llm.generate(IDS[:40], greedy(1)))
        other = llm.generate(IDS[50:60], greedy(30))
        next(other)
        gate = llm._device.copies.stream.gate()
        restored = llm.begin(IDS[:42], greedy(2))
        for _ in range(10):
            next(other)
        assert not restored.has_news
        gate.open()
        while not restored.has_news:
            llm.advance()
        restored.close()
        other.close()


def test_a_budget_of_checkpoints_is_kept(fresh: LLM) -> None:
    with small() as llm:
        recurrent = llm._cache.recurrent
        assert recurrent is not None
        recurrent.pool._limit = 3
        for start in range(0, 60, 6):
            prompt = IDS[start : start + 10]
            agree(answer(llm, prompt), answer(fresh, prompt))
            assert recurrent.pool.num_allocated <= 3


def test_a_checkpoint_that_is_not_the_sequences_own_is_not_used(fresh: LLM) -> None:
    with small() as llm:
        answer(llm, IDS[:20])
        index = llm._scheduler._index
        assert index is not None
        for node in index._tree.nodes():
            for saved in node.states.values():
                saved.block.memory[-4:] ^= 1  # the last layer's position
        agree(answer(llm, IDS[:25]), answer(fresh, IDS[:25]))
        assert llm.stats["cached_tokens"] == 0


def answer_alone(prompt: list[int]) -> list[tuple[int, Any]]:
    with small(prefix_cache=False) as llm:
        return answer(llm, prompt)


def test_a_code_word_is_forgotten() -> None:
    """30 rounds of a prompt with a word of its own, and an unrelated one in several chunks, as in a fresh process."""
    rng = np.random.default_rng(7)
    unrelated = IDS[:50]
    expected = in_fresh_process(answer_alone, unrelated)
    with small(n_seqs=2) as llm:
        for _ in range(30):
            word = rng.integers(0, 512, 4).tolist()
            tokens(llm.generate(unrelated[:10] + word + unrelated[14:45], greedy(5)))
            agree(answer(llm, unrelated), expected)


def test_long_prompts_are_kept_on_the_way(monkeypatch: pytest.MonkeyPatch, fresh: LLM) -> None:
    monkeypatch.setattr("pyllm.prompt_cache.state_saving.CHECKPOINT_EVERY", 16)
    with small() as llm:
        answer(llm, IDS[:64])
        changed = [*IDS[:40], 1, 2, 3, 4]
        agree(answer(llm, changed), answer(fresh, changed))
        assert llm.stats["cached_tokens"] == 32


def test_chats_reuse_the_start_of_the_assistants_turn() -> None:
    path = model_path(MODELS["qwen35-a"])
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=5)
    messages = [{"role": "user", "content": "one two three four"}]
    longer = [*messages, {"role": "assistant", "content": "something else"}, {"role": "user", "content": "go on"}]
    with open_engine(path, prefix_cache=True, ctx_size=256) as llm, open_engine(path, ctx_size=256) as other:
        if not llm._templates:
            pytest.skip("no template")
        cached = []
        for asked in (messages, messages, longer):
            found, expected = ([(c.token, c.top_logprobs) for c in one.chat(asked, params)] for one in (llm, other))
            agree(found, expected)
            cached.append(llm.stats["cached_tokens"])
        assert cached[0] == 0 and cached[1] > 0 and cached[2] == cached[1]


def test_stats_add_up(fresh: LLM) -> None:
    with small() as llm:
        for stop in (10, 30, 50):
            answer(llm, IDS[:stop])
            stats = llm.stats
            assert stats["cached_tokens"] + stats["evaluated_tokens"] == stats["prompt_tokens"] == stop


def test_memory_of_checkpoints_is_told_and_is_what_is_taken() -> None:
    with small() as llm:
        answer(llm, IDS[:20])
        pool, pinned = llm._cache.recurrent.pool, llm._device.pinned_memory  # type: ignore[union-attr]
        blocks = [block.nbytes for block in pinned._out.values() if block.nbytes >= pool.block_bytes]
        assert pool.num_allocated == sum(size - pool.block_bytes < 256 for size in blocks)
        assert pool.block_bytes == llm.sequence_bytes["checkpoint"]
        assert 2 * pool.block_bytes == llm.sequence_bytes["recurrent_state"]


def test_of_a_line_whose_answer_is_not_kept_the_prompt_is(fresh: LLM) -> None:
    """The state at its end, though it is no whole page."""
    with small() as llm:
        generation = llm.begin(IDS[:27], LIKELIEST, False)
        while not generation.has_ended:
            llm.advance()
        generation.close()
        agree(answer(llm, [*IDS[:27], 5, 6]), answer(fresh, [*IDS[:27], 5, 6]))
        assert llm.stats["cached_tokens"] == 27
