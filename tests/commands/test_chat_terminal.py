"""`pyllm chat` as users start it: at a terminal, and in pipes, with a small model.

What holds for both ways of reading lines is tested with both: with prompt_toolkit, and without.
"""

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

from pyllm.prompt_cache.session_file import SessionReader
from tests.refdata import model_path

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[2]
MODEL = model_path("llama-a-f32")
SECONDS = 60
CTRL_C, CTRL_D = "\x03", "\x04"
# The marker, behind what readline tells the terminal before it; or the status line below it.
AT_PROMPT = re.compile(rb"(^|\n|\r|\x1b\[\?2004h)> $|> ?\x1b\[0m\r\r\n[^>]*context \d+ of \d+ tokens[^>]*\x1b\[\?25h$")
BOTH = pytest.mark.parametrize("editor", ["prompt_toolkit", "plain"])
MISSING = "prompt_toolkit is not installed: no completion"


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, options: tuple[object, ...], env: dict[str, str], stdout: int | None = None) -> None:
        self.terminal, side = pty.openpty()
        termios.tcsetwinsize(side, (25, 200))
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), "chat", str(MODEL), *map(str, options)],
            stdin=side,
            stdout=side if stdout is None else stdout,
            stderr=side,
            start_new_session=True,
            preexec_fn=self._take_terminal,
            env={**os.environ, **env},
        )
        os.close(side)
        self.shown = b""

    @staticmethod
    def _take_terminal() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, keys: str | bytes) -> None:
        """Also a long text: what comes back in the meantime is read, or both sides would wait for each other."""
        self.shown = b""
        data = keys.encode() if isinstance(keys, str) else keys
        while data:
            ready, free, _ = select.select([self.terminal], [self.terminal], [], SECONDS)
            assert ready or free
            if ready:
                self.shown += os.read(self.terminal, 1000)
            if free:
                data = data[os.write(self.terminal, data[:1000]) :]

    def wait_for(self, reached: Callable[[bytes], object]) -> str:
        """What was shown since the last keys, once it is enough."""
        deadline = time.monotonic() + SECONDS
        while not reached(self.shown):
            assert select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))[0], self.shown
            self.shown += os.read(self.terminal, 1000)
        return self.shown.decode(errors="replace")

    def ask(self, line: str | bytes) -> str:
        self.type(line + "\n" if isinstance(line, str) else line + b"\n")
        return self.wait_for(AT_PROMPT.search)

    def interrupt_typing(self, keys: str) -> None:
        """Ctrl-C while a line is being typed. Its echo is awaited first, and a moment for Python to look for the next
        key: a signal that comes right before it does is only seen with that key."""
        self.type(keys)
        self.wait_for(lambda shown: keys.encode() in visible(shown))
        time.sleep(0.2)
        self.type(CTRL_C)

    def end(self) -> int:
        """Read the rest; the exit status."""
        with suppress(OSError):  # the other side is closed: Linux says EIO
            while data := os.read(self.terminal, 1000):
                self.shown += data
        return self.process.wait(SECONDS)

    def close(self) -> None:
        os.close(self.terminal)
        self.process.kill()
        self.process.wait()


Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Terminal] = []

    def at_prompt(*options: object, editor: str = "prompt_toolkit", stdout: int | None = None, **env: str) -> Terminal:
        env = {"TERM": "xterm", "XDG_STATE_HOME": str(tmp_path), **env}
        if editor == "plain":
            (tmp_path / "prompt_toolkit.py").write_text("raise ImportError")
            env["PYTHONPATH"] = str(tmp_path)
        terminal = Terminal(options, env, stdout)
        started.append(terminal)
        assert (MISSING in terminal.wait_for(AT_PROMPT.search)) == (editor == "plain")
        return terminal

    yield at_prompt
    for terminal in started:
        terminal.close()


def context_used(shown: str) -> int:
    """By the status line, or by the line behind the answer."""
    match = re.findall(r"(?:context |; )(\d+) of 2048 tokens", shown)
    assert match, shown
    return int(match[-1])


def is_answering(shown: bytes) -> bool:
    """A part of the answer is there; where prompt_toolkit is, behind what it tells the terminal when it has a line."""
    is_prompt_toolkit = b"\x1b[?25l" in shown
    _, end, answer = shown.rpartition(b"\x1b[?2004l")
    return len(answer) > 100 and (bool(end) or not is_prompt_toolkit)


def visible(shown: bytes) -> bytes:
    """Without what moves the cursor or changes colours."""
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown)


@BOTH
def test_two_turns_and_ctrl_d(start: Start, editor: str) -> None:
    terminal = start("--temp", 0, "-n", 20, editor=editor)
    first = context_used(terminal.ask("Hello"))
    second = context_used(terminal.ask("And then?"))
    assert second > first + 20
    assert context_used(terminal.ask("/clear") + terminal.ask("Hello")) == first
    terminal.type(CTRL_D)
    assert terminal.end() == 0


@BOTH
def test_ctrl_c_stops_the_answer_not_the_program(start: Start, editor: str) -> None:
    terminal = start("--temp", 0, "--ignore-eos", editor=editor)
    terminal.type("Hello\n")
    terminal.wait_for(is_answering)
    terminal.type(CTRL_C)
    interrupted = terminal.wait_for(AT_PROMPT.search)
    assert "Interrupted\r\n" in interrupted
    used = context_used(interrupted)
    terminal.type("Go on\n")
    terminal.wait_for(is_answering)
    terminal.type(CTRL_C)
    assert context_used(terminal.wait_for(AT_PROMPT.search)) > used
    terminal.type("/exit\n")
    assert terminal.end() == 0
    assert b"Traceback" not in terminal.shown


@BOTH
def test_ctrl_c_at_the_prompt(start: Start, editor: str) -> None:
    terminal = start("--temp", 0, "-n", 5, editor=editor)
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


@BOTH
def test_full_context_leaves_the_conversation_usable(start: Start, editor: str) -> None:
    terminal = start("--temp", 0, "--ignore-eos", "-c", 100, editor=editor)
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
    assert context_used(notes) == context_used(asked.stderr)


@BOTH
def test_closed_pipe_ends_quietly(start: Start, editor: str) -> None:
    read_end, write_end = os.pipe()
    terminal = start("--temp", 0, "--ignore-eos", stdout=write_end, editor=editor)
    os.close(write_end)
    os.close(read_end)
    terminal.type("Hello\n")
    terminal.end()
    assert b"Traceback" not in terminal.shown and b"Error" not in terminal.shown


# with prompt_toolkit


def test_a_paste_is_one_message(start: Start) -> None:
    """200 KB, and CRLF; what it is shows in the number of its tokens, and in the history."""
    terminal = start("--temp", 0, "-n", 5)
    first = context_used(terminal.ask("a\x1b\rb\x1b\rc"))  # Alt-Enter
    terminal.ask("/clear")
    assert context_used(terminal.ask("\x1b[200~a\r\nb\r\nc\x1b[201~")) == first
    terminal.ask("/clear")
    words = ("word " * 19 + "word\r\n") * 2000
    assert len(words) > 200_000
    shown = terminal.ask(f"\x1b[200~{words}\x1b[201~")
    assert shown.count("Error: the prompt has ") == 1
    tokens = re.search(r"the prompt has (\d+) tokens, the context of 2048", shown)
    assert tokens is not None and int(tokens[1]) > 40_000
    assert context_used(terminal.ask("a\x1b\rb\x1b\rc")) == first


@BOTH
def test_blocks(start: Start, editor: str) -> None:
    terminal = start("--temp", 0, "-n", 5, editor=editor)
    terminal.type('"""/help\n')
    terminal.wait_for(lambda shown: b"|" in shown)
    terminal.type("b\n")
    terminal.wait_for(lambda shown: b"b" in shown)
    used = context_used(terminal.ask('c"""'))
    if editor == "prompt_toolkit":
        terminal.ask("/clear")
        assert context_used(terminal.ask("\x1b[200~/help\nb\nc\x1b[201~")) == used
        terminal.ask("/clear")
        # A pasted text that begins with quotes opens no block.
        assert context_used(terminal.ask('\x1b[200~"""\nb\x1b[201~'))


def test_completion_and_files(start: Start, tmp_path: Path) -> None:
    (tmp_path / "some notes.txt").write_text("one two three\n")
    terminal = start("--temp", 0, "-n", 5)
    plain = context_used(terminal.ask("Hello"))
    terminal.ask("/clear")
    terminal.type("/rea\t")
    terminal.wait_for(lambda shown: b"/read" in visible(shown))
    terminal.type(f"{tmp_path}/some\t")
    terminal.wait_for(lambda shown: b"notes.txt" in visible(shown))
    shown = terminal.ask("")
    assert "some notes.txt: " in shown and "sent with the next message" in shown
    assert context_used(terminal.ask("Hello")) > plain + 3
    assert "cannot be read: No such file" in terminal.ask("/read /no/such/file")


def test_history_is_kept_for_the_next_time(start: Start, tmp_path: Path) -> None:
    terminal = start("--temp", 0, "-n", 5)
    terminal.ask("Remember this")
    terminal.type(CTRL_D)
    assert terminal.end() == 0
    assert "Remember this" in start("--temp", 0, "-n", 5).ask("\x1b[A")
    kept = tmp_path / "pyllm" / "chat_history.jsonl"
    assert kept.stat().st_mode & 0o777 == 0o600
    size = kept.stat().st_size
    other = start("--temp", 0, "-n", 5, "--no-history")
    other.ask("A secret")
    assert kept.stat().st_size == size


def test_ctrl_c_while_a_long_prompt_is_read(start: Start) -> None:
    terminal = start("--temp", 0, "-n", 5, "-ub", 1)
    terminal.type("\x1b[200~" + "word " * 400 + "\x1b[201~\r")
    terminal.wait_for(lambda shown: b"Reading the prompt: " in shown and b" left" in shown)
    terminal.type(CTRL_C)
    assert "Interrupted; the question was taken back" in terminal.wait_for(AT_PROMPT.search)
    terminal.ask("Hello")


@pytest.mark.parametrize(
    ("editor", "env"),
    [("prompt_toolkit", {}), ("plain", {}), ("plain", {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})],
)
def test_bytes_that_are_no_text(start: Start, editor: str, env: dict[str, str]) -> None:
    terminal = start("--temp", 0, "-n", 5, editor=editor, LC_ALL="C", **env)
    assert "This line is not UTF-8 text; it was not sent" in terminal.ask(b"a\xffb")
    used = context_used(terminal.ask("Grüße"))
    terminal.ask("/clear")
    assert context_used(terminal.ask("GruBe")) < used
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_colour_is_for_terminals_that_want_it(start: Start) -> None:
    styled = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m")
    assert styled.search(start("--temp", 0, "-n", 5).ask("Hello"))
    assert not styled.search(start("--temp", 0, "-n", 5, NO_COLOR="1").ask("/he\t"))


def test_sigterm_leaves_the_terminal_as_it_was(start: Start) -> None:
    terminal = start("--temp", 0)
    assert not termios.tcgetattr(terminal.terminal)[3] & termios.ICANON
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM
    assert termios.tcgetattr(terminal.terminal)[3] & termios.ICANON


def test_a_terminal_that_knows_lines_only(start: Start) -> None:
    terminal = start("--temp", 0, "-n", 5, TERM="dumb")
    shown = terminal.ask("Hello")
    context_used(shown)
    assert "\x1b" not in shown


def test_a_paste_while_an_answer_is_shown(start: Start) -> None:
    paste = "\x1b[200~" + "one two\r\n" * 2000 + "three\x1b[201~"
    terminal = start("--temp", 0, "--ignore-eos", "-n", 300)
    terminal.type("Hello\r")
    terminal.wait_for(is_answering)
    terminal.type(paste)
    shown = terminal.wait_for(lambda shown: b"three" in shown)
    assert "200~" not in visible(shown.encode()).decode()
    terminal.type("\r")
    held = re.search(r"the prompt has (\d+) tokens", terminal.wait_for(AT_PROMPT.search))
    typed = re.search(r"the prompt has (\d+) tokens", terminal.ask(paste))
    assert held is not None and typed is not None and held[1] == typed[1]


def test_sigterm_while_an_answer_is_shown(start: Start, tmp_path: Path) -> None:
    """The terminal is as it was, and the session with the answer so far is saved."""
    terminal = start("--temp", 0, "--ignore-eos", "--session", tmp_path / "talk.session")
    terminal.type("Hello\r")
    terminal.wait_for(is_answering)
    assert not termios.tcgetattr(terminal.terminal)[3] & termios.ECHO
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM
    assert termios.tcgetattr(terminal.terminal)[3] & termios.ECHO
    with SessionReader(tmp_path / "talk.session") as reader:
        ((question, answer, *_),) = reader.json("chat")["turns"]
    assert question == "Hello" and answer
