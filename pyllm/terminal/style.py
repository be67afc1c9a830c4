"""Whether a stream is a terminal that may be given colours, and the few styles that are used."""

from __future__ import annotations

import os
from typing import TextIO

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


def is_dumb() -> bool:
    """Whether the terminal understands nothing but lines."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


def has_styles(stream: TextIO) -> bool:
    """Whether styles may be used on a stream: on terminals, unless NO_COLOR (https://no-color.org) is set."""
    return stream.isatty() and not is_dumb() and not os.environ.get("NO_COLOR")


def dimmed(text: str) -> str:
    """The text, less bright than what surrounds it."""
    return f"{_DIM}{text}{_PLAIN}" if text else ""
