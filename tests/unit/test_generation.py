"""A generation's tokens one by one and all at once: the same text, counts, ends and errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pyllm.errors import PyllmError
from pyllm.generation import Generation
from pyllm.request import Request
from pyllm.sampling import Sampled, SamplingParams


class Pieces:
    """Token 9 is a mark without a text."""

    pieces = (b"a", b"\xc3", b"\xa9", b"E", b"N", b"D", b" b", b"\xf0", b"x", b"")

    def shown_piece(self, token_id: int, opens: bool, skip_special: bool = False) -> tuple[bytes, bool]:
        return self.pieces[token_id], False

    def shown_pieces(self, token_ids: Sequence[int], opens: bool, skip_special: bool = False) -> tuple[bytes, bool]:
        return b"".join(self.pieces[token_id] for token_id in token_ids), False


MARKS = {9: "<mark>"}


def generation(stop: tuple[str, ...] = ()) -> tuple[Request, Generation, list[str]]:
    request, ended = Request([1], 1, SamplingParams(stop=stop)), []
    return request, Generation(request, Pieces(), lambda _, reason: ended.append(reason)), ended


def one_by_one(made: Generation) -> tuple[str, int, str | None] | None:
    text, count = "", 0
    while (chunk := made.take()) is not None:
        text, count = (
            text + chunk.text + MARKS.get(-1 if chunk.token is None else chunk.token, ""),
            count + (chunk.token is not None),
        )
        if chunk.finish_reason:
            return text, count, chunk.finish_reason
    return (text, count, None) if count else None


@pytest.mark.parametrize("stop", [(), ("END",), ("ND", "x")])
@pytest.mark.parametrize("reason", ["stop", "length", "interrupted"])
def test_all_at_once(stop: tuple[str, ...], reason: str) -> None:
    steps = [[], [0, 1], [2], [9, 3], [4, 0, 3, 4], [5, 6], [], [7, 8, 9], [7]]
    taken: list[list[object]] = []
    for at_once in (False, True):
        request, made, ended = generation(stop)
        found: list[object] = []
        for number, tokens in enumerate(steps):
            request.emitted.extend(map(Sampled, tokens))
            if number == len(steps) - 1:
                request.finish(reason)
            found.append(made.drain(MARKS) if at_once else one_by_one(made))
        found.append(made.drain(MARKS) if at_once else one_by_one(made))
        taken.append([*found, ended])
    texts = ["".join(part[0] for part in found[:-1] if part) for found in taken]
    assert texts[0] == texts[1] and taken[0][-1] == taken[1][-1] and len(taken[0][-1]) == 1
    counts = [sum(part[1] for part in found[:-1] if part) for found in taken]
    assert counts[0] == counts[1]
    reasons = [[part[2] for part in found[:-1] if part and part[2]] for found in taken]
    assert reasons[0] == reasons[1] and len(reasons[0]) == 1


def test_an_error_comes_behind_what_was_right() -> None:
    request, made, ended = generation()
    request.emitted.extend(map(Sampled, [0, 8]))
    request.finish("error", PyllmError("broken"))
    assert made.drain({}) == ("ax", 2, None)
    with pytest.raises(PyllmError, match="broken"):
        made.drain({})
    assert made.drain({}) is None and len(ended) == 1
