"""What every way of reading lines at a terminal has in common, and the choice among them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pyllm.terminal.style import is_dumb

MARKER, MORE = "> ", "| "


@dataclass(frozen=True)
class Line:
    """What was entered; bytes that are no text are surrogates in it.

    Attributes:
        is_message: it has several lines, or stood between quotes: it is no command, whatever it begins with.
    """

    text: str
    is_message: bool = False


class Editor(Protocol):
    """Reads what a person enters.

    Attributes:
        shows_status: it shows the status while it reads.
    """

    shows_status: bool

    def read(self, status: str) -> Line:
        """The next line or message.

        Args:
            status: one line to be shown beside it, where the terminal can do that.

        Raises:
            EOFError: there are no more (Ctrl-D).
            KeyboardInterrupt: Ctrl-C.
            UnicodeError: what was typed is not of the terminal's encoding.
        """

    def while_answering(self) -> AbstractContextManager[None]:
        """Around what is shown meanwhile: what is typed then is for the next `read`."""


def at_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin is not None and sys.stdin.isatty()


def open_editor(
    commands: Iterable[str],
    arguments: Callable[[str, str], Iterable[str]],
    history: Path | None,
    note: Callable[[str], None],
) -> Editor:
    """The best way of reading lines that this terminal and this installation have.

    Args:
        commands: names that begin with a slash, for completion.
        arguments: what a command's argument that begins so may be: (command, beginning) -> whole arguments.
        history: where entered lines are kept; None: for this run only.
        note: shows a line to the person.
    """
    from pyllm.terminal.plain_editor import PlainEditor

    if is_dumb() or not sys.stderr.isatty():
        return PlainEditor()
    try:
        from pyllm.terminal.prompt_editor import PromptEditor
    except ImportError:
        note(
            "prompt_toolkit is not installed: no completion, no pasting of several lines, no status line; "
            "pip install prompt_toolkit"
        )
        return PlainEditor()
    return PromptEditor(commands, arguments, history)
