"""Filters of the next token's distribution: each keeps some candidates, at least one. Plain functions of arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Candidates:
    """Tokens that may be chosen, the best first; of equal logits the lower id first.

    Attributes:
        ids: [n] integer.
        logits: [n] float64, finite; not increasing, but for `unsorted`.
    """

    ids: np.ndarray
    logits: np.ndarray

    def weights(self, temperature: float = 1.0) -> np.ndarray:
        """[n] float64 in (0, 1]: probabilities relative to that of the best candidate."""
        with np.errstate(over="ignore"):  # a tiny temperature: -inf, which becomes 0
            return np.exp((self.logits - self.logits.max()) / temperature)

    def probabilities(self) -> np.ndarray:
        """[n] float64, sum 1."""
        weights = self.weights()
        return weights / weights.sum()

    def kept(self, which: np.ndarray | slice) -> Candidates:
        """Some of the candidates; order as it is."""
        return Candidates(self.ids[which], self.logits[which])


def _sorted(ids: np.ndarray, logits: np.ndarray) -> Candidates:
    values = logits[ids].astype(np.float64)
    order = np.argsort(-values, kind="stable")  # ids ascend, so the lower id comes first among equals
    return Candidates(ids[order], values[order])


def unsorted(logits: np.ndarray) -> Candidates:
    """Every token whose logit is finite, by id: enough where nothing is filtered; sorting 262,144 takes 30 ms."""
    ids = np.flatnonzero(logits > -np.inf)
    return Candidates(ids, logits[ids].astype(np.float64))


def all_finite(logits: np.ndarray) -> Candidates:
    """Every token whose logit is finite. Sorts the vocabulary."""
    return _sorted(np.flatnonzero(logits > -np.inf), logits)


def top_k(logits: np.ndarray, k: int) -> Candidates:
    """The k best tokens, without sorting the rest.

    Args:
        logits: [vocab_size] float, no NaN; -inf entries are no candidates.
        k: at least 1.
    """
    if k >= len(logits):
        return all_finite(logits)
    # The k-th best value, and then all that reach it: unlike argpartition, this treats equal logits by id.
    bound = np.partition(logits, len(logits) - k)[len(logits) - k]
    ids = np.flatnonzero(logits >= bound) if bound > -np.inf else np.flatnonzero(logits > -np.inf)
    return _sorted(ids, logits).kept(slice(k))


def top_n_sigma(logits: np.ndarray, n: float) -> np.ndarray:
    """-inf for logits more than n standard deviations below the best one. Returns a new row.

    Source: Tang et al. 2024, arXiv:2411.07641.
    """
    finite = logits[logits > -np.inf].astype(np.float64)
    bound = finite.max() - n * finite.std()
    return np.where(logits >= bound, logits, -np.inf)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """The fewest best candidates whose probabilities sum to at least p (nucleus sampling).

    Source: Holtzman et al. 2019, arXiv:1904.09751.
    """
    return candidates.kept(slice(_reaching(candidates.probabilities(), p)))


def top_p_of_row(logits: np.ndarray, p: float) -> Candidates:
    """`top_p` of a whole row, sorting no more of it than needed."""
    everything = unsorted(logits)
    total = everything.weights().sum()
    size = 512
    while size < len(everything.ids):
        head = top_k(logits, size)
        sums = np.cumsum(head.weights()) / total
        if sums[-1] >= p:
            return head.kept(slice(int(np.searchsorted(sums, p)) + 1))
        size *= 8
    return top_p(all_finite(logits), p)


def min_p_of_row(logits: np.ndarray, p: float) -> Candidates:
    """`min_p` of a whole row, sorting only what it keeps."""
    everything = unsorted(logits)
    return _sorted(everything.ids[everything.weights() >= p], logits)


def _reaching(probabilities: np.ndarray, p: float) -> int:
    """How many of the first entries it takes to reach the sum p; at least one."""
    return int(np.searchsorted(np.cumsum(probabilities), p)) + 1


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Candidates at least p times as likely as the best one.

    Source: Nguyen et al. 2024, arXiv:2407.01082.
    """
    return candidates.kept(candidates.weights() >= p)


def typical_p(candidates: Candidates, p: float) -> Candidates:
    """The candidates whose surprise is closest to the entropy, as few as reach the sum p (locally typical sampling).

    Source: Meister et al. 2022, arXiv:2202.00666.
    """
    probabilities = candidates.probabilities()
    surprise = -np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    entropy = float(probabilities @ surprise)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    closest = order[: _reaching(probabilities[order], p)]
    return candidates.kept(np.sort(closest))


def xtc(candidates: Candidates, threshold: float) -> Candidates:
    """Without the top choices: of those at least `threshold` likely, only the least likely stays, and all others do.

    Source: the "exclude top choices" sampler by its author p-e-w, text-generation-webui pull request 6335.
    """
    num_top = int(np.count_nonzero(candidates.probabilities() >= threshold))
    return candidates.kept(slice(max(num_top - 1, 0), None))


def log_probabilities(logits: np.ndarray, token: int, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """log-softmax of a row: its value at `token`, and the n best entries as (id, value), best first."""
    row = logits.astype(np.float64)
    best = row.max()
    log_sum = best + np.log(np.exp(row - best).sum())
    top = top_k(row, n)
    pairs = zip(top.ids.tolist(), (top.logits - log_sum).tolist(), strict=True)
    return float(row[token] - log_sum), tuple(pairs)
