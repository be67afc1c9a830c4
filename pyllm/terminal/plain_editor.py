"""Lines read one by one, with the editing that Python's readline has; for terminals that can do no more."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext, suppress

from pyllm.terminal.blocks import block_content, is_whole_block, opens_block
from pyllm.terminal.editor import MARKER, MORE, Line


class PlainEditor:
    """Shows no status; see `Editor`."""

    shows_status = False

    def read(self, status: str) -> Line:
        text = read_line(MARKER)
        is_block = opens_block(text)
        while opens_block(text):
            text += "\n" + read_line(MORE)
        if is_block or is_whole_block(text):
            return Line(block_content(text), is_message=True)
        return Line(text)

    def while_answering(self) -> AbstractContextManager[None]:
        return nullcontext()


def read_line(marker: str) -> str:
    """A line from the terminal. The marker goes to stderr.

    Raises:
        EOFError: there are no more lines (Ctrl-D).
        KeyboardInterrupt: Ctrl-C.
        UnicodeDecodeError: what was typed is not of the terminal's encoding.
    """
    # input() writes the marker to file descriptor 1, and readline the edited line; standard output is for answers.
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() uses it from then on)
        return input(marker)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
