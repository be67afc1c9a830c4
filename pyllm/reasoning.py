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
