"""What is shown: answers with reasoning, lines that change in place, numbers as words."""

from __future__ import annotations

import io
import sys

import pytest

from pyllm.terminal.answer_view import AnswerView
from pyllm.terminal.status import duration, prefill_text, status_text
from pyllm.terminal.style import has_styles
from pyllm.terminal.transient import TransientLine


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def shown(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, hides: bool, *parts: tuple[str, str]) -> str:
    monkeypatch.setattr(sys, "stdout", Screen(is_terminal))
    view = AnswerView(hides)
    for reasoning, answer in parts:
        if reasoning:
            view.reasoning(reasoning)
        if answer:
            view.answer(answer)
    view.end()
    assert isinstance(sys.stdout, Screen)
    return sys.stdout.getvalue()


BOTH = (("\nLet me ", ""), ("see.\n", ""), ("", "Yes"), ("", "."))


def test_reasoning_in_pipes_stands_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, False, False, *BOTH) == "<think>\nLet me see.\n</think>\n\nYes.\n"


def test_reasoning_on_terminals_is_dimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "\x1b[2mLet me \x1b[22m\x1b[2msee.\n\x1b[22m\nYes.\n"
    assert shown(monkeypatch, True, False, *BOTH) == expected
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(monkeypatch, True, False, *BOTH) == "<think>\nLet me see.\n</think>\n\nYes.\n"


def test_reasoning_can_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, True, True, *BOTH) == "Yes.\n"
    assert shown(monkeypatch, False, True, *BOTH) == "Yes.\n"


def test_reasoning_that_breaks_off_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, False, False, ("Hm", "")) == "<think>\nHm\n</think>\n\n"
    assert shown(monkeypatch, True, False, ("Hm", "")) == "\x1b[2mHm\x1b[22m\n\n"
    assert shown(monkeypatch, True, False) == ""


def test_models_do_not_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "\x1b]0;title\x07"
    assert "\x1b]" not in shown(monkeypatch, True, False, (evil, ""), ("", evil))
    assert shown(monkeypatch, False, False, ("", evil)) == f"{evil}\n"


def test_where_styles_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_styles(Screen(True)) and not has_styles(Screen(False))
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not has_styles(Screen(True))
    monkeypatch.setenv("NO_COLOR", "")  # as the convention has it: only a value counts
    assert has_styles(Screen(True))


def test_a_line_that_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("pyllm.terminal.transient.time.monotonic", lambda: now[0])
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)
    line = TransientLine(delay=1)
    line.show("too early")
    now[0] = 1.5
    line.show("long words")
    line.show("too soon after the last")
    now[0] = 2
    line.show("short")
    line.clear()
    line.clear()
    assert screen.getvalue() == "\rlong words\r\rshort     \r\r     \r"
    line = TransientLine(delay=1)
    line.show("now", at_once=True)
    line.show("not so soon again", at_once=True)
    assert screen.getvalue().endswith("     \r\rnow\r")
    monkeypatch.setattr(sys, "stderr", Screen(False))
    line = TransientLine(delay=0)
    line.show("never in a file")
    assert isinstance(sys.stderr, Screen) and sys.stderr.getvalue() == ""


def test_a_long_prompt_is_spoken_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)
    view = AnswerView(hides=False)
    view.prefill(100, 300, 100)  # 200 tokens do not take long, as far as anybody knows
    assert screen.getvalue() == ""
    view.prefill(0, 300, 0)
    assert screen.getvalue() == "\rReading the prompt: 0 of 300 tokens\r"


def test_words_for_numbers() -> None:
    assert prefill_text(100, 100, 100, 1.0) == "Reading the prompt: 100 of 100 tokens"
    assert prefill_text(300, 700, 100, 2.0) == "Reading the prompt: 300 of 700 tokens, 100.0 tokens/s, 4 s left"
    assert duration(59.4) == "59 s" and duration(59.6) == "1:00 min" and duration(3725) == "62:05 min"
    assert status_text(0, 4096, 0, 0, 0.0) == "context 0 of 4096 tokens (0 %)"
    expected = "context 1024 of 4096 tokens (25 %), 90 % of the prompt cached, 21.5 tokens/s"
    assert status_text(1024, 4096, 1000, 900, 21.46) == expected
