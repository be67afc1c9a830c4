"""Somebody who types at a terminal."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest

from pyllm.terminal.editor import Line

Typed = str | Line | type[BaseException]


class FakeEditor:
    """Stands for the editor of `pyllm chat`. An exception stands for a key; Ctrl-D comes at the end."""

    shows_status = False

    def __init__(self, *typed: Typed) -> None:
        self._typed = iter([*typed, EOFError])

    def read(self, status: str) -> Line:
        entered = next(self._typed)
        if isinstance(entered, str):
            return Line(entered)
        if isinstance(entered, Line):
            return entered
        raise entered

    def while_answering(self) -> AbstractContextManager[None]:
        return nullcontext()


def type_lines(monkeypatch: pytest.MonkeyPatch, *typed: Typed) -> None:
    """From now on a chat gets these lines."""
    monkeypatch.setattr("pyllm.commands.chat.at_terminal", lambda: True)
    monkeypatch.setattr("pyllm.commands.chat.open_editor", lambda *arguments: FakeEditor(*typed))
