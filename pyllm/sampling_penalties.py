"""Changes to logits that depend on the tokens so far. Each works in place on a float64 row.

Tokens so far may lie beyond the row: a prompt of ids can hold those of padding rows of the embedding, which no row of
logits shows. There is nothing to change for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

# Penalties end at e^60, beyond any logit. Repeats are followed no further than that, and at most this many tokens:
# a long text of equal tokens takes time for each.
_MAX_REPEAT = 256
_LARGEST_EXPONENT = 60.0


def last(history: Sequence[int], n: int) -> np.ndarray:
    """The last n tokens as int64 [<= n]; all of them for n = -1."""
    if n == 0:
        return np.empty(0, np.int64)
    return np.asarray(history if n < 0 else history[-n:], np.int64)


def add_bias(row: np.ndarray, biases: Iterable[tuple[int, float]]) -> None:
    """Add each (token, bias)."""
    for token, bias in biases:
        row[token] += bias


def penalize_tokens(row: np.ndarray, recent: np.ndarray, repetition: float, frequency: float, presence: float) -> None:
    """Make recent tokens less likely: l / repetition (l * repetition below zero) - count * frequency - presence.

    The repetition penalty applies once to a token, however often it occurred.

    Source: Keskar et al. 2019, arXiv:1909.05858 (repetition); OpenAI's API reference (frequency, presence).
    """
    tokens, counts = np.unique(recent[recent < len(row)], return_counts=True)
    values = row[tokens]
    # Dividing a negative logit would raise it.
    values = np.where(values > 0, values / repetition, values * repetition)
    row[tokens] = values - counts * frequency - presence


def penalize_repeats(
    row: np.ndarray, context: np.ndarray, multiplier: float, base: float, allowed: int, breakers: frozenset[int]
) -> None:
    """Make tokens less likely that would continue a repeat of an earlier sequence (DRY, "don't repeat yourself").

    If the last n tokens also stand earlier, and t came after them there, then t loses multiplier * base^(n - allowed),
    for the largest such n, when n >= allowed. A repeat does not reach across a breaker, and breakers are never
    penalised.

    Source: the DRY sampler by its author p-e-w, text-generation-webui pull request 5677.
    """
    growth = math.log(base)
    saturated = allowed + math.ceil(_LARGEST_EXPONENT / growth) if growth else allowed
    limit = _repeat_limit(context, breakers, min(saturated, max(allowed, _MAX_REPEAT)))
    if limit < allowed:
        return
    repeats = _repeat_lengths(context, limit)
    places = np.flatnonzero(repeats >= allowed)
    places = places[np.argsort(repeats[places], kind="stable")]
    # Ascending, so the longest repeat before a token is the one that the mapping keeps.
    longest = dict(zip(context[places + 1].tolist(), repeats[places].tolist(), strict=True))
    for token, length in longest.items():
        if token < len(row) and token not in breakers:
            row[token] -= multiplier * math.exp(min((length - allowed) * growth, _LARGEST_EXPONENT))


def _repeat_limit(context: np.ndarray, breakers: frozenset[int], most: int) -> int:
    """How many tokens there are since the last breaker, up to `most`."""
    tail = context[::-1][:most].tolist()
    return next((n for n, token in enumerate(tail) if token in breakers), len(tail))


def _repeat_lengths(context: np.ndarray, limit: int) -> np.ndarray:
    """For each position but the last: how many tokens up to it equal the context's last ones. [n - 1] integer."""
    lengths = np.zeros(max(len(context) - 1, 0), np.int64)
    # All places of the last token, then those of them that match one token more, and so on.
    ends = np.flatnonzero(context[:-1] == context[-1])
    for length in range(1, limit + 1):
        lengths[ends] = length
        ends = ends[ends >= length]
        if not len(ends):
            break
        ends = ends[context[ends - length] == context[-1 - length]]
    return lengths
