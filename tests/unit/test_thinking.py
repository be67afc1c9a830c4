"""Answers in two parts, and limits on the reasoning: what follows a block that was closed is what a fresh run gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pyllm.chat_template import ChatTemplate
from pyllm.llm import LLM
from pyllm.thinking import Part, ThoughtfulAnswer
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path

QUESTION = [{"role": "user", "content": "Hello, who are you?"}]
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{{- '<|im_start|>assistant\n' }}"
)
OPENS = CHATML + "{{- '<think>\n' }}"
KNOWS = (
    CHATML + "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
)
CLOSING = "\n</think>\n\n"


@dataclass
class Engine:
    """A model whose template and tokens a test chooses."""

    llm: LLM

    def with_template(self, source: str) -> LLM:
        self.llm.__dict__["template"] = ChatTemplate(source, "", "<|im_end|>")
        return self.llm


@pytest.fixture(scope="module")
def opened() -> Iterator[LLM]:
    with open_engine(model_path("qwen3-a-bf16"), ctx_size=512, prefix_cache=True) as llm:
        yield llm


@pytest.fixture
def engine(opened: LLM) -> Engine:
    return Engine(opened)


def asked(llm: LLM, limit: int | None, max_tokens: int = 12, **more: Any) -> tuple[ThoughtfulAnswer, list[Part]]:
    answer = ThoughtfulAnswer(llm, QUESTION, greedy(max_tokens), limit, **more)
    return answer, list(answer.parts())


def sampled(parts: Sequence[Part]) -> list[int]:
    return [part.chunk.token for part in parts if part.chunk.token is not None]


def fresh_run(llm: LLM, prompt: list[int], max_tokens: int) -> list[int]:
    with open_engine(model_path("qwen3-a-bf16"), ctx_size=512) as fresh:
        return tokens(fresh.generate(prompt, greedy(max_tokens)))


def test_without_a_block_it_is_the_chat(engine: Engine) -> None:
    llm = engine.with_template(CHATML)
    calls: list[tuple[int, int, int]] = []
    answer, parts = asked(llm, 3, progress=lambda *numbers: calls.append(numbers))
    assert sampled(parts) == tokens(llm.chat(QUESTION, greedy(12)))
    assert not answer.was_reasoning and not answer.was_closed
    assert "".join(part.answer for part in parts) == "".join(c.text for c in llm.chat(QUESTION, greedy(12)))
    assert answer.stats["generated_tokens"] == 12
    total = len(llm.chat_tokens(QUESTION))
    assert calls[-1][:2] == (total, total) and all(0 <= done <= total for done, _, _ in calls)


@pytest.mark.parametrize("limit", [1, 5, 11])
def test_a_limit_closes_the_block(engine: Engine, limit: int) -> None:
    llm = engine.with_template(OPENS)
    answer, parts = asked(llm, limit)
    prompt = llm.chat_tokens(QUESTION)
    thoughts = fresh_run(llm, prompt, limit)
    closing = llm.tokenize(CLOSING, add_special=False, parse_special=True)
    rest = fresh_run(llm, [*prompt, *thoughts, *closing], 12 - limit)
    assert sampled(parts) == thoughts + rest
    assert answer.tokens == thoughts + closing + rest
    assert answer.was_reasoning and answer.was_closed
    shown = "".join(part.reasoning for part in parts)
    assert shown == llm.tokenizer.decode(thoughts, continues=True).rstrip("\ufffd")  # half a character is not shown
    assert parts[-1].chunk.finish_reason == "length"
    assert answer.stats["generated_tokens"] == len(answer.tokens)
    assert answer.stats["prompt_tokens"] == len(prompt)


def test_a_limit_that_is_not_reached_changes_nothing(engine: Engine) -> None:
    llm = engine.with_template(OPENS)
    answer, parts = asked(llm, 12)
    assert sampled(parts) == fresh_run(llm, llm.chat_tokens(QUESTION), 12) and not answer.was_closed
    assert "".join(part.answer for part in parts) == ""


def test_off_asks_the_template(engine: Engine) -> None:
    llm = engine.with_template(KNOWS)
    _, parts = asked(llm, 0)
    assert sampled(parts) == tokens(llm.chat(QUESTION, greedy(12), enable_thinking=False))
    assert sampled(parts) != tokens(llm.chat(QUESTION, greedy(12)))


def test_off_closes_what_the_template_opens(engine: Engine) -> None:
    llm = engine.with_template(OPENS)
    answer, parts = asked(llm, 0)
    closing = llm.tokenize(CLOSING, add_special=False, parse_special=True)
    assert sampled(parts) == fresh_run(llm, [*llm.chat_tokens(QUESTION), *closing], 12)
    assert "".join(part.reasoning for part in parts).strip() == ""
    assert answer.tokens == closing + sampled(parts)


@pytest.mark.parametrize(("limit", "more"), [(0, 0), (3, 3)])
def test_a_block_that_the_model_opens(engine: Engine, limit: int, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token becomes <think>, by a bias; the limit does not count it."""
    llm = engine.with_template(CHATML)
    (think,) = llm.tokenize("<think>", add_special=False, parse_special=True)
    first = tokens(llm.chat(QUESTION, greedy(1)))
    chat = llm.chat
    monkeypatch.setattr(llm, "chat", lambda *args, **more: _renamed(chat(*args, **more), first[0], think))
    answer, parts = asked(llm, limit)
    assert answer.was_closed and len(answer.tokens) == 12 + len(llm.tokenize(CLOSING, False, True))
    assert answer.tokens[0] == think
    assert len([part for part in parts if part.reasoning]) <= more


def _renamed(chunks: Iterator[Any], token: int, to: int) -> Iterator[Any]:
    """The first chunk as if the model had chosen another token."""
    for number, chunk in enumerate(chunks):
        yield chunk if number else chunk._replace(token=to, text="<think>")
