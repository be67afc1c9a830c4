"""Entered lines, kept from one run to the next: a file of JSON strings, one a line, that only its owner can read.

Several programs may append at the same time: each entry is written in one piece.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

MOST_ENTRIES = 1000
LONGEST = 10_000  # characters: what is longer was pasted, and is elsewhere


def history_path() -> Path:
    """Where the chat's lines are kept: in pyllm's folder below XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "pyllm" / "chat_history.jsonl"


class HistoryFile:
    """Entries on disk. What cannot be read or written is left out: nobody's conversation ends for it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self) -> list[str]:
        """From the oldest to the newest; damaged lines are skipped. A file that has grown long is cut."""
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, str):
                    found.append(entry)
        if len(lines) > 2 * MOST_ENTRIES:
            self._replace(found[-MOST_ENTRIES:])
        return found[-MOST_ENTRIES:]

    def append(self, entry: str) -> None:
        """Keep an entry, unless it is very long, or no text."""
        if len(entry) > LONGEST or any("\ud800" <= char <= "\udfff" for char in entry):
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, _as_line(entry))
            finally:
                os.close(file)

    def _replace(self, entries: list[str]) -> None:
        with suppress(OSError):
            file, name = tempfile.mkstemp(dir=self._path.parent)
            with open(file, "wb") as out:
                out.writelines(map(_as_line, entries))
            os.replace(name, self._path)


def _as_line(entry: str) -> bytes:
    return json.dumps(entry).encode() + b"\n"
