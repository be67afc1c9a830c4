"""Reasoning and answer: what a model wrote between <think> and </think> before it answered, and what follows.

Templates may open the block themselves, behind the last message; the model's text then begins inside of it.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def opens_reasoning(prompt_end: str) -> bool:
    """Whether a rendered prompt, of which this is the end, leaves a block open for the model to write in."""
    return prompt_end.rstrip().endswith(OPEN)


def split_reasoning(text: str, is_open: bool = False) -> tuple[str | None, str]:
    """Reasoning, without the marks and the white space around it, and answer; None when there is no block.

    A block that was not closed is all reasoning: nothing of it is an answer.

    Args:
        is_open: the prompt opened the block, see `opens_reasoning`.
    """
    inside = text.lstrip()
    if inside.startswith(OPEN):
        inside = inside.removeprefix(OPEN)
    elif not is_open:
        return None, text
    reasoning, _, answer = inside.partition(CLOSE)
    return reasoning.strip(), answer.lstrip()


class ReasoningStream:
    """`split_reasoning` for a text that comes in pieces.

    All that `push` and `flush` return, joined, is reasoning and answer as `split_reasoning` has them, but for white
    space around the reasoning.

    Args:
        is_open: the prompt opened the block, see `opens_reasoning`.

    Attributes:
        is_inside: what comes next is reasoning, as far as is known.
        was_inside: there is a block.
    """

    def __init__(self, is_open: bool = False) -> None:
        self.is_inside = self.was_inside = is_open
        self._began = False  # something but white space has come
        self._answered = False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Take a piece; returns what is known to be reasoning, and answer."""
        self._held += text
        if not self._began:
            start = self._held.lstrip()
            if not start or (OPEN.startswith(start) and start != OPEN):
                return "", ""
            self._began = True
            if start.startswith(OPEN):
                self.is_inside = self.was_inside = True
                self._held = start.removeprefix(OPEN)
        if not self.is_inside:
            return "", self._answer()
        reasoning, mark, answer = self._held.partition(CLOSE)
        if mark:
            self.is_inside = False
            self._held = answer
            return reasoning, self._answer()
        kept = next((n for n in range(len(CLOSE) - 1, 0, -1) if self._held.endswith(CLOSE[:n])), 0)
        self._held = reasoning[len(reasoning) - kept :]
        return reasoning[: len(reasoning) - kept], ""

    def flush(self) -> tuple[str, str]:
        """The text is over: what was held back."""
        held, self._held = self._held, ""
        return (held, "") if self.is_inside else ("", held)

    def _answer(self) -> str:
        """What is held, without white space between a block and its answer."""
        answer, self._held = self._held, ""
        if self.was_inside and not self._answered:
            answer = answer.lstrip()
        self._answered = self._answered or bool(answer)
        return answer
