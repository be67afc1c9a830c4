"""Sessions and the other commands for whole conversations, at a terminal and in `run`, with tiny models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyllm.commands import main
from pyllm.commands.answer import Timings
from pyllm.commands.chat import Chat as Chat_
from pyllm.conversation import Conversation
from pyllm.errors import UsageError
from pyllm.llm import LLM
from pyllm.prompt_cache.folder import session_path, sessions_dir
from tests.commands.fake_editor import type_lines
from tests.commands.fake_llm import FakeLLM
from tests.commands.test_chat import Recorder, assistant, chat, engine, user  # noqa: F401 (fixtures)
from tests.refdata import model_path

Chat = Callable[..., Result]
PLAIN, HYBRID = "qwen3-a-bf16", "qwen35-a-f16"
SMALL = ["--device", "cpu", "-c", "256", "-n", "6", "--temp", "0"]


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Type lines to a real model."""

    def converse(name: str, *lines: str, options: list[str] | None = None) -> Result:
        type_lines(monkeypatch, *lines)
        return CliRunner().invoke(main, ["chat", str(model_path(name)), *SMALL, *(options or [])])

    return converse


def cached(result: Result) -> list[int]:
    """Of each answer: how many tokens of its prompt were there already."""
    lines = re.findall(r"(\d+) prompt tokens(?: \((\d+) of them from before\))?", result.stderr)
    return [int(found or 0) for _, found in lines]


def prompts(result: Result) -> list[int]:
    return [int(found) for found in re.findall(r"(\d+) prompt tokens", result.stderr)]


@pytest.mark.parametrize("name", [PLAIN, HYBRID])
def test_a_session_goes_on_in_a_new_process(talk: Chat, name: str) -> None:
    first = talk(name, "one two three", options=["--session", "work"])
    assert first.exit_code == 0, first.stderr
    path = sessions_dir() / "work.session"
    assert f"Saved {prompts(first)[0] + 5} tokens in {path}" in first.stderr
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    second = talk(name, "and four", options=["--session", "work"])
    assert "Session work: 1 turn, " in second.stderr
    assert cached(second)[0] > cached(first)[0] + 10
    unbroken = talk(name, "one two three", "and four")
    assert first.stdout + second.stdout == unbroken.stdout


def test_a_conversation_of_which_no_row_is_kept_is_saved(talk: Chat) -> None:
    """A hybrid's state is of no use once tokens were dropped; what was said is there all the same."""
    options = ["--session", "work", "--overflow", "shift", "-c", "64", "-n", "60"]
    first = talk(HYBRID, "one two three", options=options)
    assert first.exit_code == 0 and "Saved 0 tokens in " in first.stderr and "what was said is there" in first.stderr
    second = talk(HYBRID, "and four", options=options)
    assert second.exit_code == 0 and "Session work: 1 turn, 0 tokens" in second.stderr
    for result in (first, second):  # dropped tokens are not in the context, nor were they computed
        used, size = map(int, re.findall(r"(\d+) of (\d+) tokens of context used", result.stderr)[0])
        assert 16 < used <= size == 64


def test_dropped_tokens_do_not_count_as_computed() -> None:
    stats = {"prompt_tokens": 90, "cached_tokens": 10, "evaluated_tokens": 50, "generated_tokens": 3}
    timings = Timings.of(0.0, {**stats, "prefill_seconds": 2.0, "decode_seconds": 1.0})
    assert timings.prefill_tokens_per_second == 25


@pytest.mark.parametrize("name", [PLAIN, HYBRID])
def test_run_goes_on_with_a_session(name: str) -> None:
    results = []
    for question in ("one two three", "and four", "and five"):
        command = ["run", str(model_path(name)), *SMALL, "--session", "s", question]
        results.append(CliRunner().invoke(main, command))
    assert [result.exit_code for result in results] == [0, 0, 0], results[0].stderr
    reused = [cached(result)[0] for result in results]
    assert reused[0] == 0 < reused[1] < reused[2]
    refused = CliRunner().invoke(main, ["run", str(model_path(name)), "--raw", "--session", "s", "x"])
    assert refused.exit_code == 2 and "leave out --raw" in refused.stderr


def test_saved_and_loaded_at_the_prompt(talk: Chat, tmp_path: Path) -> None:
    path = tmp_path / "here.session"
    result = talk(PLAIN, "/save", "/save x", "one two", f"/save {path}", "/clear", f"/load {path}", "three", "/load no")
    for words in ("Give it a name", "nothing to save yet", f"tokens in {path}", "1 turn", "There is no session no"):
        assert words in result.stderr
    assert cached(result)[1] > 10 and path.exists()
    listed = talk(PLAIN, "/sessions", "one", "/save a b", "/sessions")
    assert "There are none in" in listed.stderr and "\na b  " in listed.stderr


def test_nothing_that_is_there_is_overwritten(talk: Chat, tmp_path: Path) -> None:
    talk(PLAIN, "one two", options=["--session", "work"])
    work, precious = sessions_dir() / "work.session", tmp_path / "precious.txt"
    precious.write_text("precious")
    before = work.read_bytes()
    result = talk(PLAIN, "other", "/save work", f"/save {precious}", f"/save -f {precious}")
    assert result.stderr.count("is there already") == 3 and "Saved" not in result.stderr
    assert work.read_bytes() == before and precious.read_text() == "precious"
    result = talk(PLAIN, "other", "/save -f work")
    assert "Saved" in result.stderr and work.read_bytes() != before


def test_a_new_conversation_leaves_the_saved_one_alone(talk: Chat) -> None:
    result = talk(PLAIN, "one two", "/clear", "other", options=["--session", "work"])
    assert result.stderr.count("Saved") == 1 and "Session work stays as it is" in result.stderr
    again = talk(PLAIN, "/save copy", "more", options=["--session", "work"])
    assert "Session work: 1 turn" in again.stderr
    assert sorted(re.findall(r"Saved .* in .*/(\w+)\.session", again.stderr)) == ["copy", "work"]


def test_a_session_of_another_model_is_refused(talk: Chat) -> None:
    talk(PLAIN, "one", options=["--session", "s"])
    result = talk(HYBRID, "two", options=["--session", "s"])
    assert result.exit_code == 1
    assert "Error" in result.stderr and "another architecture: 'qwen3', not 'qwen35'" in result.stderr
    result = talk(HYBRID, "/load s", "two")
    assert result.exit_code == 0 and "Error: " in result.stderr and len(cached(result)) == 1


def test_answers_that_were_generated_match_when_they_are_rendered_again() -> None:
    """Whatever their text would be encoded as."""
    with LLM(model_path(PLAIN), device="cpu", ctx_size=256, prefix_cache=True) as llm:
        text = "one two"
        odd = [token for char in text for token in llm.tokenize(char, add_special=False)]
        assert odd != llm.tokenize(text, add_special=False) and llm.detokenize(odd) == text
        messages = [user("q"), assistant(text), user("r")]
        ids = llm.chat_tokens(messages, answers=[odd])
        assert llm.detokenize(ids) == llm.detokenize(llm.chat_tokens(messages))
        start = next(i for i in range(len(ids)) if ids[i : i + len(odd)] == odd)
        assert ids[start - 1 :] and ids != llm.chat_tokens(messages)
        for other in ([odd[:-1]], [[*odd, 5]], [[]], []):
            assert llm.chat_tokens(messages, answers=other) == llm.chat_tokens(messages)
        control = next(iter(llm.tokenizer.control_texts().items()))
        posing = [user("q"), assistant(control[0]), user("r")]
        assert llm.chat_tokens(posing, answers=[[control[1]]]) == llm.chat_tokens(posing)


# With the fake engine: what the model is asked.


def test_questions_are_taken_back_asked_again_and_edited(chat: Chat) -> None:  # noqa: F811
    result = chat("a", "/undo", "/undo", "b", "/regen", "/edit c", "d", "/edit", "/undo", "/undo", "/regen", "/edit x")
    asked = [[message["content"] for message in messages] for messages in Recorder.asked]
    assert asked == [["a"], ["b"], ["b"], ["c"], ["c", "Hello", "d"]]
    for words in ("Taken back: a", "nothing to take back", "/edit TEXT puts", "no answer yet", "no question yet"):
        assert words in result.stderr


def test_an_answer_that_fails_leaves_the_last_one(chat: Chat) -> None:  # noqa: F811
    from pyllm.errors import ContextError

    Recorder.failures = {2: ContextError("too long")}
    chat("a", "/regen", "b")
    asked = [[message["content"] for message in messages] for messages in Recorder.asked]
    assert asked == [["a"], ["a"], ["a", "Hello", "b"]]


def test_branches_grow_by_themselves(chat: Chat) -> None:  # noqa: F811
    result = chat("a", "/fork", "b", "/fork 1", "c", "/fork 2", "d", "/fork 9")
    asked = [[message["content"] for message in messages] for messages in Recorder.asked]
    assert asked == [["a"], ["a", "Hello", "b"], ["a", "Hello", "c"], ["a", "Hello", "b", "Hello", "d"]]
    for words in ("Branch 2, a copy of 1", "Branch 1, 1 turns", "There are branches 1 to 2"):
        assert words in result.stderr


def test_answers_go_along_without_their_end(chat: Chat) -> None:  # noqa: F811
    chat("a", "b")
    assert FakeLLM.opened.answers == [(1, 2)]


def test_stats(chat: Chat) -> None:  # noqa: F811
    result = chat("a b", "/stats")
    assert "Context  [....................] 5 of 4096 tokens" in result.stderr
    assert "The last answer:\nPrompt   10 tokens, 0 of them from before (0 %)" in result.stderr


def test_stats_are_of_the_conversation_as_it_is(chat: Chat) -> None:  # noqa: F811
    result = chat(
        "a b", "c", "/stats", "/undo", "/stats", "/fork", "d", "/stats", "/fork 1", "/stats", "/clear", "/stats"
    )
    assert re.findall(r"(\d+) of 4096 tokens\n", result.stderr) == ["9", "5", "9", "5", "0"]


def test_the_status_line_is_of_the_conversation_as_it_is(talk: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    read = Chat_._read
    monkeypatch.setattr(Chat_, "_read", lambda self, editor: (shown.append(self._status), read(self, editor))[1])
    talk(PLAIN, "one two", "/save kept", "three", "/undo", "/clear", "/load kept", "/system be brief")
    used = [int(text.split()[1]) for text in shown]
    assert used[0] == used[5] == 0 and used[3] > used[1] + 8 and 0 <= used[4] - used[1] <= 4  # what ends a turn
    assert used[4] == used[6] and "cached" in shown[3] and "cached" not in shown[4] + shown[6]
    assert used[7] > used[6]


def test_conversations_survive_json() -> None:
    talked = Conversation("be brief")
    talked.add("q", "a", (1, 2))
    assert Conversation.from_json(talked.to_json()) == talked
    bad: list[Any] = [{}, {"system": 3, "turns": []}, {"system": None, "turns": [["q", "a", [-1]]]}, {"turns": 3}]
    for value in bad:
        with pytest.raises(ValueError, match="no conversation"):
            Conversation.from_json(value)


@pytest.mark.parametrize("name", ["", ".hidden", "a\nb", "x" * 200])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match="no name for a session"):
        session_path(name)
    assert session_path("./x") == Path("x") and session_path("x.session") == Path("x.session")
