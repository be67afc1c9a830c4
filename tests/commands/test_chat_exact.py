"""Ctrl-C in `pyllm chat` leaves nothing behind: what follows equals a fresh run of the same conversation."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from pyllm.commands.chat import Chat
from pyllm.commands.options import SamplingOptions
from pyllm.conversation import Conversation
from pyllm.llm import LLM
from pyllm.terminal.answer_view import AnswerView
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path

MODELS = ["llama-a-f32", "qwen35-a-f16"]
LENGTH = 12
LONG = "a long question " * 20

SETTINGS: dict[str, Any] = dict.fromkeys(SamplingOptions.__dataclass_fields__)
SETTINGS |= {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, "stop": (), "logit_bias": {}, "seed": 1}


def chat_with(llm: LLM) -> Chat:
    return Chat(llm, Conversation("Be brief."), SamplingOptions(**SETTINGS))


def open_model(name: str, **options: Any) -> LLM:
    return open_engine(model_path(name), ctx_size=1024, ubatch_size=16, batch_size=32, inflight=2, **options)


def fresh_answer(name: str, conversation: Conversation, question: str) -> list[int]:
    """By an engine that has seen nothing yet."""
    messages, answers = conversation.asking(question), conversation.answers()
    with open_model(name) as llm:
        return tokens(llm.chat(messages, greedy(LENGTH), answers=answers))


def press(monkeypatch: pytest.MonkeyPatch, method: str, at: int) -> None:
    """Ctrl-C in the at-th call of a method of the view."""
    calls: list[None] = []
    original = getattr(AnswerView, method)

    def wrapped(self: AnswerView, *arguments: Any) -> None:
        calls.append(None)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        original(self, *arguments)

    monkeypatch.setattr(AnswerView, method, wrapped)


@pytest.fixture(autouse=True)
def default_ctrl_c() -> Any:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("at", [1, 3, 6])
def test_ctrl_c_while_the_prompt_is_read(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(name, prefix_cache=True) as llm:
        chat = chat_with(llm)
        chat.answer("Hello")
        with monkeypatch.context() as patch:
            press(patch, "prefill", at)
            assert chat.answer(LONG).finish_reason == "interrupted"
        assert len(chat.conversation.turns) == 1
        for question in (LONG, "And then?"):
            expected = fresh_answer(name, chat.conversation, question)
            assert chat.answer(question).tokens == expected
            assert llm.stats["cached_tokens"] > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("at", [1, 2, 5])
def test_ctrl_c_while_it_answers(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(name, prefix_cache=True) as llm:
        chat = chat_with(llm)
        with monkeypatch.context() as patch:
            press(patch, "answer", at)
            assert chat.answer("Hello").finish_reason == "interrupted"
        (turn,) = chat.conversation.turns
        assert 0 < len(turn.answer_ids) < LENGTH
        for question in ("Go on", LONG):
            expected = fresh_answer(name, chat.conversation, question)
            assert chat.answer(question).tokens == expected
            assert llm.stats["cached_tokens"] > 0
