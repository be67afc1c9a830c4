"""Shows an answer on standard output while it comes, its reasoning dimmed, between its marks, or not at all."""

from __future__ import annotations

import sys
import time

from pyllm.commands.console import without_controls
from pyllm.reasoning import CLOSE, OPEN
from pyllm.terminal.status import prefill_text
from pyllm.terminal.style import dimmed, has_styles
from pyllm.terminal.transient import TransientLine

_LONG_PROMPT = 256  # tokens: a part of them may take seconds, and nothing is known before it is done


class AnswerView:
    """One answer.

    Args:
        hides: show no reasoning; on terminals, a count of its tokens stands for it.
    """

    def __init__(self, hides: bool) -> None:
        self._hides = hides
        self._is_terminal = sys.stdout.isatty()
        self._has_styles = has_styles(sys.stdout)
        self._line = TransientLine()
        self._began = time.monotonic()
        self._in_reasoning = False
        self._column = 0  # only whether it is 0 counts
        self._num_thoughts = 0

    def prefill(self, done: int, total: int, cached: int) -> None:
        """How far the prompt has been read, on terminals, where that takes longer than a moment; see `LLM.chat`."""
        if done < total:
            takes_long = total - cached >= _LONG_PROMPT
            self._line.show(prefill_text(done, total, cached, time.monotonic() - self._began), takes_long)

    def reasoning(self, text: str) -> None:
        """A piece of reasoning."""
        self._num_thoughts += 1
        if self._hides:
            self._line.show(f"Thinking, {self._num_thoughts} tokens")
            return
        self._line.clear()
        if not self._in_reasoning:
            text = text.lstrip("\n")
            if not text:
                return
            self._in_reasoning = True
            if not self._has_styles:
                self._write(f"{OPEN}\n")
        self._write(text, dim=True)

    def answer(self, text: str) -> None:
        """A piece of the answer."""
        self._line.clear()
        self._end_reasoning()
        self._write(text)

    def end(self) -> None:
        """The answer is over."""
        self._line.clear()
        self._end_reasoning()
        if self._column:
            self._write("\n")

    def _end_reasoning(self) -> None:
        if self._in_reasoning:
            self._in_reasoning = False
            line_end = "\n" if self._column else ""
            self._write(line_end + ("\n" if self._has_styles else f"{CLOSE}\n\n"))

    def _write(self, text: str, dim: bool = False) -> None:
        if not text:
            return
        shown = without_controls(text) if self._is_terminal else text
        sys.stdout.write(dimmed(shown) if dim and self._has_styles else shown)
        sys.stdout.flush()
        self._column = 0 if text.endswith("\n") else 1
