"""Reasoning and answer."""

from __future__ import annotations

import pytest

from pyllm.reasoning import ReasoningStream, opens_reasoning, split_reasoning


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


TEXTS = (
    "<think>\nhm</think>\n\nyes",
    "  \n<think>a < b </thin </think>c</think>d",
    "no block <think>at</think> all",
    " leading space",
    "<think>never closed </thi",
    "<thin",
    "<",
    "",
    "hm</think>yes",
    "</think>\n\nyes\n\n more",
)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_parted_like_the_whole(text: str, is_open: bool) -> None:
    reasoning, answer = split_reasoning(text, is_open)
    for size in (1, 2, 3, 5, 100):
        stream = ReasoningStream(is_open)
        parts = [stream.push(text[at : at + size]) for at in range(0, len(text), size)] + [stream.flush()]
        assert "".join(part for part, _ in parts).strip() == (reasoning or "")
        assert "".join(part for _, part in parts) == answer
        assert stream.was_inside == (reasoning is not None)


def test_what_is_known_is_given_at_once() -> None:
    stream = ReasoningStream()
    assert stream.push("<think>") == ("", "") and stream.is_inside
    assert stream.push("a </th") == ("a ", "") and stream.push("e") == ("</the", "")
    assert stream.push("</think>\n") == ("", "") and not stream.is_inside
    assert stream.push("\nb") == ("", "b") and stream.push(" c") == ("", " c")
