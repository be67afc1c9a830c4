"""Perplexity: how well a model predicts a text, and how far its predictions are from those of another run.

The definition is that of the most used engine. The text is tokenised once and cut into windows that share nothing; what
is left at the end is not used. Where the tokeniser puts BOS before a text, BOS replaces the first token of each window.
In a window of n tokens, those behind position n // 2 are scored: each has at least half a window of context. Perplexity
is exp of the mean negative log-probability of all scored tokens, its standard error that of the mean times the
perplexity.

Everything here is float64. What is in memory at a time is the logits of a ubatch, not those of a window. Knows models
as something that streams logits; `kl_base` keeps log-probabilities in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pyllm.errors import PyllmError, UsageError

MIN_WINDOW = 4
_BLOCK_ELEMENTS = 1 << 21  # of log-probabilities in work at a time: 16 MB of float64


class TextTokenizer(Protocol):
    """What is needed of a tokeniser."""

    vocab_size: int
    bos_id: int | None
    add_bos: bool

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]: ...


class LogitsSource(Protocol):
    """What is needed of an engine."""

    def stream_logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]: ...


class Base(Protocol):
    """Log-probabilities of another run: the next `count` scored positions, float64 [count, vocab_size]."""

    def take(self, count: int) -> np.ndarray: ...


Save = Callable[[np.ndarray], None]


def cut_windows(tokenizer: TextTokenizer, text: str, size: int, limit: int | None = None) -> np.ndarray:
    """The windows of a text: int32 [windows, size].

    Args:
        size: tokens of a window.
        limit: of the windows, only so many from the start.

    Raises:
        UsageError: a window is too small to score anything.
        PyllmError: the text is too short for one.
    """
    if size < MIN_WINDOW:
        raise UsageError(f"a window of {size} tokens is too small; it must have at least {MIN_WINDOW}")
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids = bos + tokenizer.encode(text, add_special=False)
    if len(ids) < size:
        raise PyllmError(
            f"the text has {len(ids)} tokens, a window takes {size}; give a longer text, or smaller windows (-c)"
        )
    count = min(len(ids) // size, limit or len(ids))
    windows = np.array(ids[: count * size], np.int32).reshape(count, size)
    if bos:
        windows[:, 0] = bos
    return windows


def num_scored(size: int) -> int:
    """Scored tokens of a window."""
    return size - 1 - size // 2


@dataclass(frozen=True)
class Block:
    """Consecutive scored positions of a window.

    Attributes:
        logprobs: float64 [positions, vocab_size], natural logarithms.
        targets: [positions], the tokens that follow.
    """

    logprobs: np.ndarray
    targets: np.ndarray

    @property
    def nll(self) -> np.ndarray:
        """Negative log-probabilities of the tokens that follow: float64 [positions]."""
        return -np.take_along_axis(self.logprobs, self.targets[:, None], axis=1)[:, 0]


def score(llm: LogitsSource, window: np.ndarray, vocab_size: int) -> Iterator[Block]:
    """The scored positions of one window, in order.

    Args:
        vocab_size: columns of the logits beyond it are padding.

    Raises:
        PyllmError: the model's numbers are broken.
    """
    first, last = len(window) // 2, len(window) - 1
    step = max(1, _BLOCK_ELEMENTS // vocab_size)
    start = 0
    for piece in llm.stream_logits(window.tolist()):
        for row in range(max(0, first - start), min(len(piece), last - start), step):
            end = min(row + step, len(piece), last - start)
            logprobs = log_softmax(piece[row:end, :vocab_size])
            yield Block(logprobs, window[start + row + 1 : start + end + 1])
        start += len(piece)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of rows of logits, float64.

    Raises:
        PyllmError: a logit is not finite.
    """
    rows = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # told below
        rows -= rows.max(axis=1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    if not np.isfinite(rows).all():
        raise PyllmError("a logit is not a finite number: the model's numbers are broken; check the model file")
    return rows


@dataclass(frozen=True)
class Mean:
    """A mean of samples with its standard error; the error of a single sample is 0."""

    value: float
    error: float

    @classmethod
    def of(cls, samples: np.ndarray) -> Mean:
        """Of float64 samples, one at least."""
        error = samples.std() / np.sqrt(len(samples) - 1) if len(samples) > 1 else 0.0
        return cls(float(samples.mean()), float(error))


def perplexity(nll: np.ndarray) -> Mean:
    """Of negative log-probabilities."""
    mean = Mean.of(nll)
    value = float(np.exp(mean.value))
    return Mean(value, value * mean.error)


@dataclass(frozen=True)
class Comparison:
    """How predictions differ from those of the base, over the same positions.

    Attributes:
        base: perplexity of the base.
        delta: perplexity minus that of the base.
        kl: mean Kullback-Leibler divergence of the base's distribution from this one, in nats.
        kl_max, kl_median, kl_99: its largest value, its median, its 99th percentile.
        same_top: share of positions where both find the same token likeliest, 0 to 1.
    """

    base: Mean
    delta: Mean
    kl: Mean
    kl_max: float
    kl_median: float
    kl_99: float
    same_top: Mean


@dataclass(frozen=True)
class WindowScores:
    """One window, position by position; float64 arrays, None where there is no base.

    Attributes:
        nll, base_nll: negative log-probabilities of the tokens that follow.
        kl: divergence from the base, in nats.
        same_top: 1.0 where both find the same token likeliest, else 0.0.
    """

    nll: np.ndarray
    base_nll: np.ndarray | None = None
    kl: np.ndarray | None = None
    same_top: np.ndarray | None = None


def score_window(
    llm: LogitsSource, window: np.ndarray, vocab_size: int, base: Base | None = None, save: Save | None = None
) -> WindowScores:
    """Score one window.

    Args:
        vocab_size: columns of the logits beyond it are padding.
        base: what to compare with.
        save: called with all log-probabilities, in order.
    """
    rows = []
    for block in score(llm, window, vocab_size):
        if save is not None:
            save(block.logprobs)
        rows.append([block.nll] if base is None else _compared(block, base))
    return WindowScores(*map(np.concatenate, zip(*rows, strict=True)))


def _compared(block: Block, base: Base) -> list[np.ndarray]:
    theirs = Block(base.take(len(block.targets)), block.targets)
    same_top = block.logprobs.argmax(axis=1) == theirs.logprobs.argmax(axis=1)
    return [block.nll, theirs.nll, divergence(theirs.logprobs, block.logprobs), same_top.astype(np.float64)]


def divergence(base: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence of each row's distribution from the base's, in nats: float64 [rows]."""
    return np.maximum((np.exp(base) * (base - logprobs)).sum(axis=1), 0.0)


def all_nll(windows: Sequence[WindowScores]) -> np.ndarray:
    """Negative log-probabilities of all windows, one at least."""
    return np.concatenate([window.nll for window in windows])


def compare(windows: Sequence[WindowScores]) -> Comparison:
    """Sum up windows that were scored with a base, one at least."""
    nll, base_nll, kl, same_top = (
        np.concatenate([getattr(window, name) for window in windows]) for name in ("nll", "base_nll", "kl", "same_top")
    )
    mine, base = perplexity(nll), perplexity(base_nll)
    # To first order, a position moves the difference by this much; the two runs are far from independent.
    effects = mine.value * nll - base.value * base_nll
    return Comparison(
        base=base,
        delta=Mean(mine.value - base.value, Mean.of(effects).error),
        kl=Mean.of(kl),
        kl_max=float(kl.max()),
        kl_median=float(np.median(kl)),
        kl_99=float(np.quantile(kl, 0.99)),
        same_top=Mean.of(same_top),
    )
