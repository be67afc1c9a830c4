"""What happens when a context is full: an error, the end of the answer, or tokens in its middle give way.

"shift" drops tokens behind the first `keep` ones and computes the rest anew at its new positions, instead of turning
the keys of rows that are there: the result is exactly that of the shorter text, for every model and type of rows,
hybrids among them, and such rows may be kept and shared like others. It costs a prefill of three quarters of the
context for every quarter that is written. Tokens go in whole steps of a quarter of the context, so that the next turn
of a conversation, which begins with the same tokens, drops the same ones and finds its rows again.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyllm.errors import ContextError, UsageError
from pyllm.request import Request

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
        keep = max(0, min(max(self.keep, request.keep), ctx_size // 2, len(request.token_ids) - at_least - 1))
        count = min(-(-at_least // step) * step, len(request.token_ids) - keep - 1)
        del request.token_ids[keep : keep + count]
        request.num_prompt -= count
        request.num_dropped += count
        request.checkpoints = tuple(position - count for position in request.checkpoints if position > keep + count)
