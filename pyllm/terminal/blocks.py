'''Messages of several lines between lines of three quotes.

A block begins with a typed line that starts with """ and ends with the first """ at the end of a line. What lies
between is the message; line breaks next to the quotes are not part of it.
'''

from __future__ import annotations

QUOTES = '"""'


def opens_block(line: str) -> bool:
    """Whether a line begins a block that it does not end."""
    return line.lstrip().startswith(QUOTES) and not is_whole_block(line)


def is_whole_block(text: str) -> bool:
    """Whether a text is a block from its first quotes to its last."""
    inside = text.strip()
    return len(inside) >= 2 * len(QUOTES) and inside.startswith(QUOTES) and inside.endswith(QUOTES)


def block_content(text: str) -> str:
    """What is between the quotes of a whole block."""
    content = text.strip()[len(QUOTES) : -len(QUOTES)]
    return content.removeprefix("\n").removesuffix("\n")
