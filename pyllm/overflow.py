"""What happens when a context is full: an error, the end of the answer, or tokens in its middle give way.

"shift" drops tokens behind the first `keep` ones. A prompt that is too long is cut before it is computed, in whole
steps of a quarter of the context, so that the next turn of a conversation, which begins with the same tokens, drops the
same ones and finds its rows again.

In the middle of an answer whole pages give way, about a quarter of the context, and the rows behind them are shifted
(`shift_in_place`): they get pages of their own, and their keys are turned to the lower positions. Nothing is computed
anew. These rows were computed when the dropped tokens still stood before them, so what follows is not what the shorter
text would give: it is what the same tokens and the same shifts give, on any engine. Shifted rows are therefore of use
to their own sequence alone; they are never kept for prompts, nor saved. The first page always stays: attention leaves
much on the first tokens, and goes astray without them (Xiao et al. 2023, arXiv:2309.17453).

Where rows cannot be shifted, tokens are dropped as from a prompt, and the rest is computed anew; the request knows why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllm.errors import ContextError, UsageError
from pyllm.request import Request

if TYPE_CHECKING:
    from pyllm.executor import Executor
    from pyllm.kv_cache import KVCache
    from pyllm.prompt_cache.index import PrefixIndex

OVERFLOWS = ("stop", "error", "shift")
_STEPS = 4  # of a full context


@dataclass(frozen=True)
class Overflow:
    """The rule of an engine.

    Attributes:
        kind: one of OVERFLOWS.
        keep: with "shift", tokens at the beginning that stay, if a request does not ask for more; at most half of the
            context does.
    """

    kind: str = "stop"
    keep: int = 0

    def __post_init__(self) -> None:
        if self.kind not in OVERFLOWS:
            raise UsageError(f"overflow is {self.kind!r}; choose one of {', '.join(OVERFLOWS)}")
        if type(self.keep) is not int or self.keep < 0:
            raise UsageError(f"keep is {self.keep!r}; it must be a number of tokens")

    def make_fit(self, request: Request, ctx_size: int, room: int) -> None:
        """Before a request starts: see that its tokens fit.

        Args:
            room: most tokens that it may begin with.

        Raises:
            ContextError: they do not, and none may be dropped.
        """
        if len(request.token_ids) <= room:
            return
        if self.kind != "shift" or request.sampler is None:
            raise ContextError(
                f"the prompt has {request.num_prompt} tokens, the context of {ctx_size} has room for {room}; "
                "shorten it or make the context larger (-c)"
            )
        self.drop(request, ctx_size, len(request.token_ids) - room)

    def drop(self, request: Request, ctx_size: int, at_least: int = 1) -> None:
        """Drop tokens behind those that are kept, so that others have room. What was dropped is counted."""
        step = max(1, ctx_size // _STEPS)
        keep = max(0, min(self._num_kept(request, ctx_size), len(request.token_ids) - at_least - 1))
        count = min(-(-at_least // step) * step, len(request.token_ids) - keep - 1)
        _take_out(request, keep, count)

    def pages(self, request: Request, ctx_size: int, page_size: int) -> tuple[int, int]:
        """The first of the pages that give way, behind those that are kept, and how many these are."""
        return max(1, -(-self._num_kept(request, ctx_size) // page_size)), max(1, ctx_size // _STEPS // page_size)

    def _num_kept(self, request: Request, ctx_size: int) -> int:
        return min(max(self.keep, request.keep), ctx_size // 2)


def shift_in_place(
    request: Request, overflow: Overflow, ctx_size: int, executor: Executor, cache: KVCache, index: PrefixIndex | None
) -> str:
    """Make place for further tokens of a running request, of which no step is under way: whole pages give way, and the
    rows behind them are shifted.

    Args:
        index: gives pages up where there are too few.

    Returns:
        Why that is not possible, with nothing changed; empty when it was done.
    """
    assert request.kv is not None
    if executor.model.fixed_positions:
        return executor.model.fixed_positions
    size = cache.page_size
    first, count = overflow.pages(request, ctx_size, size)
    if (first + count) * size > request.kv.length:
        return f"a context of {ctx_size} tokens has too few pages of {size} to give one up"
    turns = executor.model.key_turns(executor.device, -count * size)
    while not (is_done := cache.shift(request.kv, first, count, turns)):
        if index is None or not index.make_room(cache.num_free_pages + 1):
            break
    # Pages that the index had too may be the sequence's alone now.
    if not is_done and not cache.shift(request.kv, first, count, turns):
        return "no page is free to shift rows to"
    _take_out(request, first * size, count * size)
    request.num_shifted += count * size
    request.num_submitted, request.shifted_from = request.kv.length, request.kv.shifted_from
    return ""


def _take_out(request: Request, first: int, count: int) -> None:
    """Tokens from position `first` on are counted as dropped."""
    del request.token_ids[first : first + count]
    request.num_prompt -= count
    request.num_dropped += count
    request.checkpoints = tuple(position - count for position in request.checkpoints if position > first + count)
