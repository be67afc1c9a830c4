"""/read: texts of files that go before the next message."""

from __future__ import annotations

import os
from collections.abc import Callable

from pyllm.commands.console import note
from pyllm.commands.prompt import checked_text, read_file
from pyllm.errors import PyllmError


class Attachments:
    """Files that were read and not sent yet.

    Args:
        count: tokens of a text.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._texts: list[str] = []

    def read(self, name: str) -> None:
        """Read a file, or say why not."""
        if not name:
            note("/read FILE puts the text of FILE before the next message")
            return
        try:
            text = read_file(os.path.expanduser(name), "/read")
        except PyllmError as error:
            note(f"Error: {error}")
            return
        if not text.strip():
            note(f"{name} is empty")
            return
        shown = checked_text(name, "the name of the file")
        self._texts.append(f"{shown}:\n\n{text}")
        note(f"{name}: {self._count(text)} tokens, sent with the next message; /clear forgets them")

    def before(self, question: str) -> str:
        """The message: the files, then the question."""
        return "\n\n".join([*self._texts, question])

    def clear(self) -> None:
        """They were sent, or are not wanted any more."""
        self._texts.clear()
