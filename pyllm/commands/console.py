"""What the commands share for writing to people: notes on stderr, progress bars, text that is safe to show."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import click

_MAX_LINE = 2000
# Control characters could move the cursor, retitle the window or worse; files and models are not to do that.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def note(text: str) -> None:
    """A line on stderr, if that can be written to: the answer is not to be lost for a note."""
    with suppress(OSError):
        click.echo(one_line(text), err=True)


def warn(text: str) -> None:
    """A line on stderr that begins with "Warning:"."""
    note(f"Warning: {text}")


def without_controls(text: str) -> str:
    """The text with control characters other than newlines and tabs escaped."""
    return text.translate(_CONTROLS)


def one_line(text: str, limit: int = _MAX_LINE) -> str:
    """The text as one line of printable characters, shortened to `limit`."""
    shown = text[: limit + 1]
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else _escaped(char) for char in shown)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def size_text(num_bytes: int) -> str:
    """A size for people, in powers of 1000."""
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


class Progress(Protocol):
    """Moves a bar: parts done, parts in all, and perhaps a few words to show beside it."""

    def __call__(self, done: int, total: int, words: str = "") -> None: ...


@contextmanager
def progress_bar(description: str, unit: str = "B") -> Iterator[Progress]:
    """A bar on stderr, if that is a terminal. Gone afterwards.

    Args:
        unit: of the parts; bytes unless said otherwise.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, words="": None
        return
    from tqdm import tqdm

    with tqdm(desc=description, unit=unit, unit_scale=unit == "B", leave=False, file=sys.stderr) as bar:

        def show(done: int, total: int, words: str = "") -> None:
            bar.total = total
            bar.set_postfix_str(words, refresh=False)
            bar.update(done - bar.n)

        yield show
