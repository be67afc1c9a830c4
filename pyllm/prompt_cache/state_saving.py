"""When the states of recurrent layers are worth keeping: at the positions that a request names, at the end of a turn,
and on the way through what is long.

A state is kept between steps, so steps are cut there. Sequences without such states are left alone.
"""

from __future__ import annotations

from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.request import Request

CHECKPOINT_EVERY = 1024  # tokens, at least: between checkpoints that nothing but length asks for


def up_to_checkpoint(request: Request, count: int) -> int:
    """How many of the next `count` tokens may run in one step: not beyond the next position to be kept."""
    if request.kv is None or request.kv.state is None:
        return count
    length = request.kv.length
    return min(count, *(position - length for position in request.checkpoints if position > length), count)


def save_state(cache: KVCache, request: Request) -> None:
    """After a step was queued: keep the state that it leaves, where that is worth while."""
    if request.kv is None or request.kv.state is None:
        return
    length = request.kv.length
    if length in request.checkpoints or length - request.saved_at >= CHECKPOINT_EVERY:
        cache.checkpoint(request.kv)
        request.saved_at = length


def save_end_of_turn(cache: KVCache, request: Request, kv: SequenceKV) -> None:
    """When a request ends: keep its state, unless it has run past the last token, or was not read clean yet."""
    if kv.state is not None and kv.state.position == kv.num_clean <= len(request.token_ids):
        cache.checkpoint(kv)
