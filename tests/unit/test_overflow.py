"""The end of the context: an error, the end, or the shorter text where rows cannot be shifted; see also test_shift."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from pyllm.commands import main
from pyllm.errors import ContextError, UsageError
from pyllm.llm import LLM
from tests.engine import greedy, interleaved, open_engine, tokens
from tests.refdata import model_path, reference

PLAIN, HYBRID = "llama-a-f32", "qwen3next-b-eqheads-bf16"
IDS = {PLAIN: list(range(3, 250)), HYBRID: reference("qwen3next-b-eqheads")["n300_tokens"].tolist()}


@pytest.fixture(params=[PLAIN, HYBRID])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(name: str, **options: Any) -> LLM:
    return open_engine(model_path(name), **{"ctx_size": 40, "page_size": 8, "overflow": "shift", **options})


def anew(name: str, **options: Any) -> LLM:
    """An engine that cannot shift rows: its context has one page, or its model recurrent layers."""
    return engine(name, page_size=8 if name == HYBRID else 64, **options)


def replay(name: str, prompt: list[int], count: int, keep: int) -> tuple[list[int], int]:
    """What dropping tokens gives: whenever 40 tokens are there, ten behind those that are kept go, and an engine that
    never saw them continues the rest. Returns the answer, and how many went."""
    text, answer, dropped = list(prompt), [], 0
    with engine(name, ctx_size=64) as fresh:
        while len(answer) < count:
            piece = tokens(fresh.generate(text, greedy(min(40 - len(text), count - len(answer)))))
            text, answer = text + piece, answer + piece
            if len(text) == 40 and len(answer) < count:
                del text[keep : keep + 10]
                dropped += 10
    return answer, dropped


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("keep", [0, 5, 19, 1000])
def test_what_is_computed_anew_is_the_shorter_text(name: str, keep: int, prefix_cache: bool) -> None:
    prompt = IDS[name][:30]
    with anew(name, keep=keep, prefix_cache=prefix_cache) as llm:
        bos = int(llm.tokenizer.add_bos)
        found = tokens(llm.generate(prompt, greedy(50)))
        stats = llm.stats
    expected, dropped = replay(name, prompt, 50, min(max(keep, bos), 20))
    assert found == expected
    assert (stats["prompt_tokens"], stats["generated_tokens"], stats["dropped_tokens"]) == (30, 50, dropped)
    assert stats["cached_tokens"] + stats["evaluated_tokens"] == 30


def test_long_prompts_are_cut_in_whole_steps(name: str) -> None:
    """So that the next turn drops the same tokens, and finds its rows again."""
    with engine(name, keep=4, prefix_cache=True) as llm:
        for length in (41, 45, 48):
            prompt = IDS[name][:length]
            found = tokens(llm.generate(prompt, greedy(1)))
            assert llm.stats["dropped_tokens"] == 10 and llm.stats["prompt_tokens"] == length
            with engine(name, ctx_size=64) as fresh:
                assert found == tokens(fresh.generate(prompt[:4] + prompt[14:], greedy(1)))
        assert llm.stats["cached_tokens"] >= 34
        tokens(llm.generate(IDS[name][:120], greedy(1)))
        assert llm.stats["dropped_tokens"] == 90


def test_several_sequences_drop_tokens_at_their_own_time(name: str) -> None:
    prompts = [IDS[name][index : index + 20 + 5 * index] for index in range(3)]
    with anew(name, n_seqs=3) as llm:
        bos = int(llm.tokenizer.add_bos)
        found = interleaved([llm.generate(prompt, greedy(40)) for prompt in prompts])
    assert found == [replay(name, prompt, 40, bos)[0] for prompt in prompts]


def test_a_shift_ends_on_the_smallest_contexts() -> None:
    for ctx_size in (2, 3, 5):
        with engine(PLAIN, ctx_size=ctx_size, keep=9, page_size=1) as llm:
            assert len(tokens(llm.generate([5], greedy(20)))) == 20
            assert bool(llm.stats["shifted_tokens"]) == (ctx_size > 2)
            assert len(tokens(llm.generate(IDS[PLAIN][:30], greedy(4)))) == 4


def test_stop_and_error(name: str) -> None:
    with engine(name, overflow="stop") as llm:
        chunks = list(llm.generate(IDS[name][:30], greedy(50)))
        assert len(chunks) == 10 and chunks[-1].finish_reason == "length"
        with pytest.raises(ContextError, match="has room for 39"):
            tokens(llm.generate(IDS[name][:40], greedy(1)))
    with engine(name, overflow="error") as llm:
        stream, found = llm.generate(IDS[name][:30], greedy(50)), []
        with pytest.raises(ContextError, match="context of 40 tokens is full"):
            found.extend(chunk.token for chunk in stream)
        assert tokens(llm.generate(IDS[name][:30], greedy(10)))
    for options in ({"overflow": "no"}, {"keep": -1}):
        with pytest.raises(UsageError, match=r"overflow is|keep is"):
            engine(name, **options)


def test_the_system_message_of_a_chat_stays() -> None:
    with open_engine(model_path("qwen35-a-f16"), ctx_size=64, overflow="shift") as llm:
        system = [{"role": "system", "content": "be brief"}]
        messages = [*system, {"role": "user", "content": "one two three " * 30}]
        ids = llm.chat_tokens(messages)
        kept = len(llm.chat_tokens(system, add_generation_prompt=False))
        assert len(ids) > 64 > 2 * kept
        found = tokens(llm.chat(messages, greedy(4)))
        dropped = llm.stats["dropped_tokens"]
    with open_engine(model_path("qwen35-a-f16"), ctx_size=64) as fresh:
        assert found == tokens(fresh.generate(ids[:kept] + ids[kept + dropped :], greedy(4)))


def test_logits_are_never_cut() -> None:
    with engine(PLAIN) as llm, pytest.raises(ContextError, match="the prompt has 41 tokens"):
        llm.logits(IDS[PLAIN][:41])


def test_it_is_told() -> None:
    command = ["run", str(model_path(PLAIN)), "--raw", "--device", "cpu", "-c", "40", "-n", "60", "--ignore-eos"]
    result = CliRunner().invoke(main, [*command, "--overflow", "shift", "hello"])
    assert result.exit_code == 0
    assert "The context was full: " in result.stderr and "were left out" in result.stderr
    stopped = CliRunner().invoke(main, [*command, "hello"])
    assert "Cut off: the context of 40 tokens (-c) is full" in stopped.stderr
    failed = CliRunner().invoke(main, [*command, "--overflow", "error", "hello"])
    assert failed.exit_code == 1 and "is full; make it larger" in failed.stderr
