"""`pyllm chat` as users start it: at a terminal, and in pipes, with a small model."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.refdata import model_path

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[2]
MODEL = model_path("llama-a-f32")
SECONDS = 60
CTRL_C, CTRL_D = "\x03", "\x04"
# The marker, behind what readline tells the terminal before it.
AT_PROMPT = re.compile(rb"(^|\n|\r|\x1b\[\?2004h)> $")


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, *options: object, stdout: int | None = None) -> None:
        self._terminal, side = pty.openpty()
        termios.tcsetwinsize(side, (25, 200))
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), "chat", str(MODEL), *map(str, options)],
            stdin=side,
            stdout=side if stdout is None else stdout,
            stderr=side,
            start_new_session=True,
            preexec_fn=self._take_terminal,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(side)
        self.shown = b""

    @staticmethod
    def _take_terminal() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, keys: str) -> None:
        self.shown = b""
        os.write(self._terminal, keys.encode())

    def wait_for(self, reached: Callable[[bytes], object]) -> str:
        """What was shown since the last keys, once it is enough."""
        deadline = time.monotonic() + SECONDS
        while not reached(self.shown):
            assert select.select([self._terminal], [], [], max(0, deadline - time.monotonic()))[0], self.shown
            self.shown += os.read(self._terminal, 1000)
        return self.shown.decode()

    def ask(self, line: str) -> str:
        self.type(line + "\n")
        return self.wait_for(AT_PROMPT.search)

    def interrupt_typing(self, keys: str) -> None:
        """Ctrl-C while a line is being typed. Its echo is awaited first: then readline is reading for sure, and not
        only about to."""
        self.type(keys)
        self.wait_for(lambda shown: keys.encode() in shown)
        self.type(CTRL_C)

    def end(self) -> int:
        """Read the rest; the exit status."""
        with suppress(OSError):  # the other side is closed: Linux says EIO
            while data := os.read(self._terminal, 1000):
                self.shown += data
        return self.process.wait(SECONDS)

    def close(self) -> None:
        os.close(self._terminal)
        self.process.kill()
        self.process.wait()


Start = Callable[..., Terminal]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Terminal] = []

    def at_prompt(*options: object, stdout: int | None = None) -> Terminal:
        terminal = Terminal(*options, stdout=stdout)
        started.append(terminal)
        terminal.wait_for(AT_PROMPT.search)
        return terminal

    yield at_prompt
    for terminal in started:
        terminal.close()


def context_used(shown: str) -> int:
    match = re.search(r"; (\d+) of 2048 tokens of context used\r\n", shown)
    assert match is not None, shown
    return int(match[1])


def test_two_turns_and_ctrl_d(start: Start) -> None:
    terminal = start("--temp", 0, "-n", 20)
    first = context_used(terminal.ask("Hello"))
    second = context_used(terminal.ask("And then?"))
    assert second > first + 20
    assert context_used(terminal.ask("/clear") + terminal.ask("Hello")) == first
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_ctrl_c_stops_the_answer_not_the_program(start: Start) -> None:
    terminal = start("--temp", 0, "--ignore-eos")
    terminal.type("Hello\n")
    terminal.wait_for(lambda shown: len(shown) > 100)
    terminal.type(CTRL_C)
    interrupted = terminal.wait_for(AT_PROMPT.search)
    assert "Interrupted\r\n" in interrupted
    used = context_used(interrupted)
    terminal.type("Go on\n")
    terminal.wait_for(lambda shown: len(shown) > 100)
    terminal.type(CTRL_C)
    assert context_used(terminal.wait_for(AT_PROMPT.search)) > used
    terminal.type("/exit\n")
    assert terminal.end() == 0
    assert b"Traceback" not in terminal.shown


def test_ctrl_c_at_the_prompt(start: Start) -> None:
    terminal = start("--temp", 0, "-n", 5)
    terminal.interrupt_typing("half a line")
    assert "Ctrl-C once more" in terminal.wait_for(AT_PROMPT.search)
    context_used(terminal.ask("Hello"))
    terminal.interrupt_typing("x")
    terminal.wait_for(AT_PROMPT.search)
    terminal.interrupt_typing("y")
    assert terminal.end() == 130
    assert b"Traceback" not in terminal.shown


def test_history(start: Start) -> None:
    pytest.importorskip("readline")
    terminal = start("--temp", 0, "-n", 5)
    terminal.ask("Hello")
    assert "Hello" in terminal.ask("\x1b[A")  # the key that goes up


def test_full_context_leaves_the_conversation_usable(start: Start) -> None:
    terminal = start("--temp", 0, "--ignore-eos", "-c", 100)
    assert "the context of 100 tokens (-c) is full; /clear starts a new conversation" in terminal.ask("Hello")
    assert "Error: the prompt has" in terminal.ask("And then?")
    terminal.ask("/clear")
    assert "is full" in terminal.ask("Hello")
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_answers_alone_on_stdout(start: Start) -> None:
    read_end, write_end = os.pipe()
    terminal = start("--temp", 0, "-n", 20, stdout=write_end)
    os.close(write_end)
    notes = terminal.ask("Hello")
    terminal.type(CTRL_D)
    assert terminal.end() == 0
    with open(read_end, encoding="utf-8") as pipe:
        answer = pipe.read()
    asked = subprocess.run(
        [sys.executable, ROOT / "cli.py", "chat", MODEL, "--temp", "0", "-n", "20"],
        input="Hello\n",
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS,
        check=True,
    )
    assert answer == asked.stdout != "" and answer.endswith("\n")
    assert "20 answer tokens" in notes and "20 answer tokens" in asked.stderr


def test_closed_pipe_ends_quietly(start: Start) -> None:
    read_end, write_end = os.pipe()
    terminal = start("--temp", 0, "--ignore-eos", stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    terminal.type("Hello\n")
    terminal.end()
    assert b"Traceback" not in terminal.shown and b"Error" not in terminal.shown
