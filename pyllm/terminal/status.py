"""Numbers as words: how far a prompt has been read, and how full the context is."""

from __future__ import annotations


def prefill_text(done: int, total: int, cached: int, seconds: float) -> str:
    """How far the prompt has been read.

    Args:
        done: tokens that are in the cache by now.
        total: tokens of the prompt.
        cached: those that were there before.
        seconds: since it began.
    """
    text = f"Reading the prompt: {done} of {total} tokens"
    computed = done - cached
    if computed <= 0 or seconds <= 0:
        return text
    rate = computed / seconds
    return f"{text}, {rate:.1f} tokens/s, {duration((total - done) / rate)} left"


def duration(seconds: float) -> str:
    """Seconds for people: "42 s", "3:05 min"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02} min"


def status_text(used: int, size: int, prompt: int, cached: int, rate: float) -> str:
    """One line about a conversation.

    Args:
        used, size: tokens of the context.
        prompt: tokens of the prompt that was read last; 0: none yet.
        cached: those of them that were there before.
        rate: tokens per second of the last answer; 0: not known.
    """
    text = f"context {used} of {size} tokens ({100 * used / size:.0f} %)"
    if prompt:
        text += f", {100 * cached / prompt:.0f} % of the prompt cached"
    return f"{text}, {rate:.1f} tokens/s" if rate else text
