"""`pyllm chat` with a fake engine: which messages it gets, what the commands do, what ends the program."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyllm import errors
from pyllm.commands import main
from pyllm.llm import Chunk
from pyllm.sampling import SamplingParams
from pyllm.terminal.editor import Line
from tests.commands.fake_editor import Typed, type_lines
from tests.commands.fake_llm import FakeLLM

Chat = Callable[..., Result]


class Recorder(FakeLLM):
    """Remembers all conversations and settings, and can fail.

    Attributes:
        failures: by number of the answer, raised after its first chunk.
    """

    asked: list[list[dict[str, str]]]
    all_params: list[SamplingParams]
    failures: dict[int, Exception]

    def chat(self, messages: Any, params: SamplingParams, answers: Any = (), progress: Any = None) -> Iterator[Chunk]:
        self.answers = answers
        self.asked.append([dict(message) for message in messages])
        self.all_params.append(params)
        return self._failing(self._answer(("chat", messages), params), self.failures.get(len(self.asked)))

    @staticmethod
    def _failing(chunks: Iterator[Chunk], error: Exception | None) -> Iterator[Chunk]:
        for chunk in chunks:
            yield chunk
            if error is not None:
                raise error


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr("pyllm.llm.LLM", Recorder)
    for name, value in (("asked", []), ("all_params", []), ("failures", {})):
        monkeypatch.setattr(Recorder, name, value, raising=False)
    return Recorder


@pytest.fixture
def chat(engine: type[Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Type lines at a terminal; an exception stands for a key."""
    (tmp_path / "model.gguf").touch()

    def converse(*lines: Typed, options: list[str] | None = None) -> Result:
        type_lines(monkeypatch, *lines)
        return CliRunner().invoke(main, ["chat", str(tmp_path / "model.gguf"), *(options or [])])

    return converse


@pytest.fixture
def piped(engine: type[Recorder], tmp_path: Path) -> Chat:
    """Give something on standard input, which is no terminal."""
    (tmp_path / "model.gguf").touch()

    def converse(stdin: str | bytes, *options: str) -> Result:
        return CliRunner().invoke(main, ["chat", str(tmp_path / "model.gguf"), *options], input=stdin)

    return converse


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_conversation_grows(chat: Chat) -> None:
    result = chat("Hi", "", "  ", "And then? ", options=["--seed", "7"])
    assert result.exit_code == 0
    assert result.stdout == "Hello\nHello\n"
    assert Recorder.asked == [[user("Hi")], [user("Hi"), assistant("Hello"), user("And then?")]]
    assert result.stderr.splitlines() == [
        "Device: cpu",
        "Ctrl-C stops an answer, Ctrl-D or /exit ends the conversation, /help lists commands",
        *["10 prompt tokens, 20.0 tokens/s; 3 answer tokens, 8.0 tokens/s; 13 of 4096 tokens of context used"] * 2,
        "",
    ]
    assert FakeLLM.opened.closed


def test_options_are_those_of_run(chat: Chat) -> None:
    options = ["-n", "3", "--temp", "0", "--repeat-penalty", "1.2", "-c", "100", "--device", "cpu", "--seed", "5"]
    chat("Hi", options=options)
    expected = {"ctx_size": 100, "device": "cpu", "graphs": True, "prefix_cache": True}
    assert FakeLLM.opened.options == expected
    assert Recorder.all_params == [SamplingParams(max_tokens=3, temperature=0, repetition_penalty=1.2, seed=5)]


def test_bad_options_are_refused_before_anything_is_read(chat: Chat) -> None:
    result = chat("Hi", options=["--temp", "-1"])
    assert result.exit_code == 2 and result.stderr.startswith("Error: temperature")
    assert Recorder.asked == []


def test_seeds_count_up_and_the_first_is_told(chat: Chat) -> None:
    result = chat("a", "b")
    first, second = (params.seed for params in Recorder.all_params)
    assert first is not None and second == first + 1
    assert f"\n--seed {first} repeats this conversation\n" in result.stderr
    chat("a", "b", options=["--seed", str(2**64 - 1)])
    assert [params.seed for params in Recorder.all_params[2:]] == [2**64 - 1, 0]
    assert "repeats" not in chat("a", options=["--temp", "0"]).stderr


def test_system_message(chat: Chat) -> None:
    chat("a", "/system Be  brief.", "b", "/system", "c", options=["--system", "Hm."])
    assert [messages[0] for messages in Recorder.asked] == [
        {"role": "system", "content": "Hm."},
        {"role": "system", "content": "Be  brief."},
        user("a"),
    ]
    assert len(Recorder.asked[-1]) == 5


def test_clear_keeps_the_system_message(chat: Chat) -> None:
    chat("a", "/clear", "b", options=["--system", "Hm."])
    assert Recorder.asked[-1] == [{"role": "system", "content": "Hm."}, user("b")]


def test_exit(chat: Chat) -> None:
    assert chat("/exit", "never asked").exit_code == 0
    assert Recorder.asked == []


@pytest.mark.parametrize("line", ["/", "/nosuch", "/clear2", "/etc/passwd is what?"])
def test_unknown_commands_are_refused_with_a_list(chat: Chat, line: str) -> None:
    result = chat(line, " /etc is a message")
    commands = "/read, /save, /load, /sessions, /undo, /regen, /edit, /fork, /stats, /clear, /system, /help, /exit"
    assert f"There are {commands}; a message that begins with / needs a space before it\n" in result.stderr
    assert Recorder.asked == [[user("/etc is a message")]]


def test_ctrl_c_at_the_prompt(chat: Chat) -> None:
    hint = "Ctrl-C once more, Ctrl-D or /exit ends the conversation\n"
    result = chat(KeyboardInterrupt, "Hi", KeyboardInterrupt, KeyboardInterrupt, "never asked")
    assert result.exit_code == 130
    assert result.stderr.count(hint) == 2
    assert Recorder.asked == [[user("Hi")]]
    assert chat(KeyboardInterrupt).exit_code == 0


def press_at(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before a chunk, counted from 1 over all answers."""
    calls: list[None] = []

    def during() -> None:
        calls.append(None)
        if len(calls) == chunk:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(FakeLLM, "during", staticmethod(during))


def test_ctrl_c_keeps_what_was_shown(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    press_at(3, monkeypatch)
    result = chat("Hi", "Go on")
    assert result.exit_code == 0
    assert result.stdout == "Hel\nHello\n" and "Interrupted\n" in result.stderr
    assert Recorder.asked[1] == [user("Hi"), assistant("Hel"), user("Go on")]


def test_ctrl_c_before_the_first_token_takes_the_question_back(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    press_at(1, monkeypatch)
    result = chat("Hi", "Hm")
    assert result.stdout == "Hello\n" and "Interrupted; the question was taken back\n" in result.stderr
    assert Recorder.asked == [[user("Hi")], [user("Hm")]]


@pytest.mark.parametrize(
    "error",
    [
        errors.TemplateError("roles must alternate"),
        errors.ContextError("the prompt has 9 tokens"),
        errors.StaleKVError("row 3"),
        errors.SamplingError("no logit"),
    ],
)
def test_errors_of_one_answer(chat: Chat, engine: type[Recorder], error: Exception) -> None:
    engine.failures[2] = error
    result = chat("a", "b", "c")
    assert result.exit_code == 0
    assert result.stdout == "Hello\nHel\nHello\n"
    is_full = isinstance(error, errors.ContextError)
    advice = "; /clear starts a new conversation" if is_full else ""
    assert f"Error: {error}\nThe question was taken back{advice}\n" in result.stderr
    assert Recorder.asked[-1] == [user("a"), assistant("Hello"), user("c")]


def test_device_errors_end_it(chat: Chat, engine: type[Recorder]) -> None:
    engine.failures[1] = errors.DeviceError("it is gone")
    result = chat("a", "b")
    assert result.exit_code == 1 and result.stderr.endswith("Error: it is gone\n")
    assert len(Recorder.asked) == 1 and FakeLLM.opened.closed


def test_full_context_is_told(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "chunks", (Chunk("a", 1), Chunk("b", 2, "length")))
    full = "Cut off: the context of 4096 tokens (-c) is full; /clear starts a new conversation\n"
    assert full in chat("Hi").stderr
    assert "Cut off after -n 2 tokens\n" in chat("Hi", options=["-n", "2"]).stderr


def test_lines_that_are_no_text(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    result = chat("\udcff", "Hi")
    assert "This line is not UTF-8 text; it was not sent" in result.stderr
    assert Recorder.asked == [[user("Hi")]]


def test_piped_question_gives_one_answer(piped: Chat) -> None:
    result = piped("What is\n/exit here?\n")
    assert result.exit_code == 0 and result.stdout == "Hello\n"
    assert Recorder.asked == [[user("What is\n/exit here?")]]
    assert "Ctrl-" not in result.stderr


@pytest.mark.parametrize("stdin", ["", "\n \n"])
def test_nothing_piped_is_no_question(piped: Chat, stdin: str) -> None:
    result = piped(stdin)
    assert result.exit_code == 0 and result.stdout == "" and Recorder.asked == []


def test_a_model_that_is_not_there_is_an_error_also_without_a_question(piped: Chat, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").unlink()
    result = piped("")
    assert result.exit_code == 1 and result.stderr.startswith("Error: ")


def test_piped_failures_have_a_status(piped: Chat, engine: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    engine.failures[1] = errors.TemplateError("no")
    assert piped("Hi").exit_code == 1
    assert piped(b"\xff").exit_code == 1
    engine.failures.clear()
    press_at(2, monkeypatch)
    assert piped("Hi").exit_code == 130


THOUGHTS = (Chunk("<think>\nHm", 1), Chunk(".\n</think>", 2), Chunk("\n\nYes", 3, "stop"))


def test_reasoning_is_shown_and_not_kept(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "chunks", THOUGHTS)
    assert chat("a", "b").stdout == "<think>\nHm.\n</think>\n\nYes\n" * 2
    assert Recorder.asked[1] == [user("a"), assistant("Yes"), user("b")]
    assert FakeLLM.opened.answers == [()]  # their tokens say more than the conversation keeps
    assert chat("a", options=["--think", "hide"]).stdout == "Yes\n"


def test_reasoning_without_an_answer_is_taken_back(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "chunks", (Chunk("<think>\nHm", 1), Chunk("m", 2, "length")))
    result = chat("a", "b", options=["-n", "2"])
    assert "the model was still thinking; the question was taken back" in result.stderr
    assert "Cut off after -n 2 tokens" in result.stderr
    assert Recorder.asked[1] == [user("b")]


@pytest.mark.parametrize("value", ["", "on", "-1", "1.5", "1" * 10])
def test_what_think_may_be(chat: Chat, value: str) -> None:
    result = chat("a", options=["--think", value])
    assert result.exit_code == 2 and "is none of show, hide, off and a number of tokens" in result.stderr


def test_files_go_before_the_next_message(chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    Path("empty.txt").write_text(" \n")
    Path("bad.txt").write_bytes(b"a\xff")
    result = chat("/read notes.txt", "What?", "/read empty.txt", "/read bad.txt", "/read no.txt", "/read", "And?")
    sent = "notes.txt:\n\none\r\ntwo\n\nWhat?"
    assert Recorder.asked == [[user(sent)], [user(sent), assistant("Hello"), user("And?")]]
    for note in ("notes.txt: 3 tokens, sent", "empty.txt is empty", "bad.txt is not UTF-8", "no.txt cannot be read"):
        assert note in result.stderr


def test_files_stay_until_they_were_answered(chat: Chat, engine: type[Recorder], tmp_path: Path) -> None:
    (tmp_path / "a b").write_text("text")
    engine.failures[1] = errors.TemplateError("no")
    chat(f"/read {tmp_path}/a b", "one", "two", f"/read {tmp_path}/a b", "/clear", "three")
    before = f"{tmp_path}/a b:\n\ntext\n\n"
    assert [messages[-1] for messages in Recorder.asked] == [user(before + "one"), user(before + "two"), user("three")]


def test_messages_of_several_lines_are_no_commands(chat: Chat) -> None:
    chat(Line("/exit\nis a command", is_message=True), Line("/exit", is_message=True))
    assert [messages[-1] for messages in Recorder.asked] == [user("/exit\nis a command"), user("/exit")]


def test_help_lists_all_commands(chat: Chat) -> None:
    result = chat("/help")
    listed = [line.split()[0] for line in result.stderr.splitlines() if line.startswith("/")]
    unknown = chat("/nosuch").stderr
    assert sorted(listed) == sorted(unknown.partition("There are ")[2].partition(";")[0].split(", "))
