"""Lines with editing, history, completion and a status line, by prompt_toolkit.

Enter sends what was typed, unless a block of quotes is open; Alt-Enter begins a new line. A paste goes in as a whole,
however many lines it has.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_done
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import ConditionalContainer, FormattedTextControl, HSplit, Layout, Window
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from pyllm.terminal.blocks import block_content, is_whole_block, opens_block
from pyllm.terminal.completion import completions
from pyllm.terminal.editor import MARKER, MORE, Line
from pyllm.terminal.history import HistoryFile
from pyllm.terminal.style import has_styles
from pyllm.terminal.type_ahead import held_back

_STYLE = Style.from_dict({"status": "dim"})
_NO_STYLE = Style.from_dict({})


class PromptEditor:
    """Shows the status below the line; see `Editor`."""

    shows_status = True

    def __init__(
        self, commands: Iterable[str], arguments: Callable[[str, str], Iterable[str]], history: Path | None
    ) -> None:
        self._in_block = False
        self._status = ""
        output = Vt100_Output.from_pty(sys.stderr)
        # The question where the cursor is would be answered by some terminals late, and by others not at all.
        output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            MARKER,
            multiline=True,
            completer=_Completer(commands, arguments),
            complete_while_typing=False,
            history=_History(history),
            key_bindings=self._keys(),
            prompt_continuation=lambda width, number, is_soft: "" if is_soft else MORE,
            style=_STYLE if has_styles(sys.stderr) else _NO_STYLE,
            enable_open_in_editor=True,
            tempfile_suffix=".txt",
            output=output,
        )
        self._put_status_below()

    def read(self, status: str) -> Line:
        self._status, self._in_block = status, False
        sys.stdout.flush()
        with _terminal_restored_on_sigterm():
            text = self._session.prompt()
        if is_whole_block(text) and (self._in_block or "\n" not in text):
            return Line(block_content(text), is_message=True)
        return Line(text, is_message="\n" in text.strip())

    def while_answering(self) -> AbstractContextManager[None]:
        return held_back()

    def _put_status_below(self) -> None:
        """A toolbar of prompt_toolkit's own would ask the terminal where its cursor is."""
        status = Window(FormattedTextControl(lambda: [("class:status", self._status)]), height=1)
        rows = HSplit([self._session.app.layout.container, ConditionalContainer(status, ~is_done)])
        self._session.app.layout = Layout(rows, focused_element=self._session.default_buffer)

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if self._stays_open(buffer):
                buffer.newline(copy_margin=False)
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        return keys

    def _stays_open(self, buffer: Buffer) -> bool:
        """Whether the text is a block that is not closed. Only a typed line opens one: a pasted program that begins
        with quotes is none."""
        if "\n" not in buffer.text:
            self._in_block = opens_block(buffer.text)
        return self._in_block and opens_block(buffer.text)


@contextmanager
def _terminal_restored_on_sigterm() -> Iterator[None]:
    """While the terminal is as prompt_toolkit needs it, SIGTERM, and SIGHUP when it is closed, end the program by way
    of all that puts it back."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


class _Completer(Completer):
    def __init__(self, commands: Iterable[str], arguments: Callable[[str, str], Iterable[str]]) -> None:
        self._commands = tuple(commands)
        self._arguments = arguments

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        for replaced, whole in completions(document.text_before_cursor, self._commands, self._arguments):
            yield Completion(whole, start_position=-len(replaced))


class _History(History):
    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._file = HistoryFile(path) if path is not None else None

    def load_history_strings(self) -> Iterable[str]:
        return reversed(self._file.entries()) if self._file is not None else ()

    def store_string(self, string: str) -> None:
        if self._file is not None:
            self._file.append(string)
