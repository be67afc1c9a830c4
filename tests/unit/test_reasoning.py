"""Reasoning and answer."""

from __future__ import annotations

import pytest

from pyllm.reasoning import opens_reasoning, split_reasoning


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("plain", False, (None, "plain")),
        (" plain </think> x", False, (None, " plain </think> x")),
        ("<think>\nso\n</think>\n\nanswer\n", False, ("so", "answer\n")),
        ("\n<think></think>answer", False, ("", "answer")),
        ("<think>no end", False, ("no end", "")),
        ("so</think>\nanswer", True, ("so", "answer")),
        ("<think>so</think>answer", True, ("so", "answer")),
        ("never closed", True, ("never closed", "")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("", False, (None, "")),
    ],
)
def test_split(text: str, is_open: bool, expected: tuple[str | None, str]) -> None:
    assert split_reasoning(text, is_open) == expected


def test_templates_that_open_a_block() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
