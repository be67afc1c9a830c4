"""What may follow what was typed: commands, and names of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

_MOST = 500  # files: more than anybody reads


def completions(
    text: str, commands: Iterable[str], arguments: Callable[[str, str], Iterable[str]]
) -> Iterator[tuple[str, str]]:
    """What the last part of a text before the cursor could become.

    Args:
        text: one line, up to the cursor.
        arguments: (command, beginning) -> whole arguments that begin so.

    Yields:
        (the part that is replaced, what it becomes).
    """
    if not text.startswith("/") or "\n" in text:
        return
    name, space, rest = text.partition(" ")
    if not space:
        yield from ((name, f"{command} ") for command in sorted(commands) if command.startswith(name))
    else:
        rest = rest.lstrip()
        yield from ((rest, whole) for whole in arguments(name, rest))


def files(beginning: str) -> Iterator[str]:
    """Paths that begin so; folders end with a slash. ~ is the home folder. Hidden ones show when a dot was typed."""
    start = beginning.rpartition("/")[2]
    given = beginning[: len(beginning) - len(start)]
    try:
        with os.scandir(os.path.expanduser(given) or ".") as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        return
    names = ((entry.name, _is_folder(entry)) for entry in entries if entry.name.startswith(start))
    shown = ((name, is_folder) for name, is_folder in names if _is_shown(name, start))
    for _, (name, is_folder) in zip(range(_MOST), shown, strict=False):
        yield f"{given}{name}{'/' if is_folder else ''}"


def _is_shown(name: str, start: str) -> bool:
    """Names with control characters, or with bytes that are no text, cannot be typed either."""
    return name.isprintable() and (not name.startswith(".") or start.startswith("."))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
