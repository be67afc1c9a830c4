"""Where a text comes from: the argument, a file, or standard input."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import click

from pyllm.errors import PyllmError

_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def read_prompt(argument: str | None, file: str | None, what: str = "prompt") -> str:
    """The prompt: `argument`, or the text of `file` ("-" is standard input), or that of standard input when it is not
    a terminal. Standard input is left alone when one of the others is given.

    Args:
        what: the text is for, in messages.

    Raises:
        click.UsageError: there is no prompt, or two.
        PyllmError: it cannot be read, or is not UTF-8.
    """
    if argument is not None and file is not None:
        raise click.UsageError(f"there are two {what}s: give an argument or -f, not both")
    if argument is not None:
        return checked_text(argument, f"the {what}")
    if file is not None and file != "-":
        return read_file(file, what)
    if sys.stdin is None or (file is None and sys.stdin.isatty()):
        raise click.UsageError(f"there is no {what}: give it as an argument, with -f FILE, or on standard input")
    text = read_stdin()
    if not text:
        raise click.UsageError(f"there is no {what}: standard input is empty")
    return text


def read_file(name: str, what: str) -> str:
    """The text of a file, without the newline that ends its last line."""
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise PyllmError(f"{name} cannot be read: {error.strerror}; check the path of the {what} file") from None
    return _decode(data, name)


def read_stdin() -> str:
    """All of standard input, likewise; "" when it is closed."""
    return _decode(sys.stdin.buffer.read(), "standard input") if sys.stdin is not None else ""


def _decode(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PyllmError(
            f"{source} is not UTF-8 text: byte {data[error.start]:#04x} at position {error.start}; "
            "convert it first, for example with iconv"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def checked_text(text: str, what: str) -> str:
    """The text of an argument. The system hands it over as bytes; those that are none of the locale's characters are
    surrogates by now, and are taken for UTF-8.

    Raises:
        PyllmError: they are not UTF-8 either.
    """
    try:
        return os.fsencode(text).decode() if any("\udc80" <= char <= "\udcff" for char in text) else text
    except UnicodeDecodeError as error:
        raise PyllmError(f"{what} is not UTF-8 text at byte {error.start}; check the terminal's encoding") from None


def unescape(text: str) -> str:
    r"""\n, \t and \\ as the characters they stand for; everything else stays as it is."""
    return re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match.group()], text)
