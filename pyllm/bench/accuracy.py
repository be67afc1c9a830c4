"""How far logits computed in one way are from those computed in another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# What is accepted. Rounding activations to float16 was measured to move logits by up to 0.009 of their standard
# deviation (KL divergence 2e-6), q4_0 K/V rows by 0.02; a wrong kernel, row or position moves them by all of it.
MAX_DIFFERENCE = 0.2
MAX_KL = 1e-3
# A token that rounding sends to another expert differs by far more, and so do those behind it, layer after layer: noise
# of 3e-4 in the products leaves a third of the top tokens equal behind 40 layers of a random mixture of experts. Such
# models are compared behind a few layers, by the median of tokens that nothing stands before: that noise moves it by
# 0.01 there (256 experts of 512 x 2048, five prompts), and by up to 0.16 behind 56 other tokens.
LAYERS_WITH_EXPERTS = 4


@dataclass(frozen=True)
class Figure:
    """A comparison of two sets of logits.

    Attributes:
        what: what was compared with what.
        positions: how many rows.
        max_difference: the largest difference of two logits, in standard deviations of their row; infinite for NaN.
        median_difference: the same of the median row.
        kl: mean Kullback-Leibler divergence from the reference's probabilities, in nats.
        same_top: rows whose largest logit is the same one.
        has_experts: the median row counts, see LAYERS_WITH_EXPERTS.
    """

    what: str
    positions: int
    max_difference: float
    median_difference: float
    kl: float
    same_top: int
    has_experts: bool = False

    @property
    def passed(self) -> bool:
        """Whether it is within what rounding explains."""
        if self.has_experts:
            return self.median_difference <= MAX_DIFFERENCE and math.isfinite(self.max_difference)
        return self.max_difference <= MAX_DIFFERENCE and self.kl <= MAX_KL

    def __str__(self) -> str:
        return (
            f"{self.what}: logits differ by at most {self.max_difference:.2g} of their standard deviation"
            f"{f' (median token {self.median_difference:.2g})' if self.has_experts else ''}, "
            f"KL divergence {self.kl:.2g}, {self.same_top} of {self.positions} top tokens equal"
        )


def compare(what: str, found: np.ndarray, reference: np.ndarray, has_experts: bool = False) -> Figure:
    """Compare logits [positions, columns] with a reference of the same shape."""
    found, reference = found.astype(np.float64), reference.astype(np.float64)
    with np.errstate(all="ignore"):
        differences = np.abs(found - reference) / np.std(reference, axis=1, keepdims=True)
        rows = np.max(differences, axis=1)
        largest, median = float(np.max(rows)), float(np.median(rows))
        p, q = _log_softmax(reference), _log_softmax(found)
        kl = float(np.mean(np.sum(np.exp(p) * (p - q), axis=1)))
    same = int(np.sum(np.argmax(found, axis=1) == np.argmax(reference, axis=1)))
    numbers = (_or_infinite(largest), _or_infinite(median), max(0.0, _or_infinite(kl)))
    return Figure(what, len(found), *numbers, same, has_experts)


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
