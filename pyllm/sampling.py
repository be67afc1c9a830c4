"""Logits to tokens: the settings that a user chooses, and the sampler that one sequence owns.

Order of the steps: logit bias and penalties; then filters, each on what the one before left: top-n-sigma, top-k,
typical-p, top-p, min-p, XTC; then temperature, and a draw. Filters judge the model's own distribution: temperature
only changes how the survivors are weighted.

The mathematics of the steps is in `sampling_filters` and `sampling_penalties`; all of it runs in float64 on the host.
This module does not know when a sequence ends (`max_tokens`, `stop`, `ignore_eos` are carried for those who do).
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from pyllm import sampling_filters as filters
from pyllm import sampling_penalties as penalties
from pyllm.errors import SamplingError, UsageError
from pyllm.sampling_filters import Candidates

_MAX_SEED = 2**64 - 1
_MAX_BIAS = 10_000.0  # far beyond any logit
_SHOWN = 80  # characters of a wrong value in a message


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when generation ends. Checked when made.

    Attributes:
        max_tokens: at most so many new tokens; None: until the context is full.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: keep so many of the most likely tokens; 0: off.
        top_p: keep the fewest tokens whose probabilities reach this sum; 1: off.
        min_p: keep tokens at least so likely relative to the most likely one; 0: off.
        seed: of the sequence's random numbers, 0 to 2^64-1; None: a new one each time, told by `Sampler.seed`.
        stop: texts that end the generation; they are not part of it.
        ignore_eos: go on after end-of-generation tokens.
        repetition_penalty: divides positive and multiplies negative logits of recent tokens; 1: off.
        frequency_penalty: subtracted from a recent token's logit once per occurrence; 0: off.
        presence_penalty: subtracted from a recent token's logit once; 0: off.
        penalty_last_n: how many of the last tokens the three penalties look at, prompt included; -1: all, 0: none.
        logit_bias: added to the logits, by token id; from -10000 to 10000, or -inf, which forbids a token.
        dry_multiplier: strength of the penalty on repeated sequences (DRY); 0: off.
        dry_base: growth of that penalty with each further repeated token, at least 1.
        dry_allowed_length: repeats shorter than this many tokens are free.
        dry_penalty_last_n: how many of the last tokens DRY looks at; -1: all, 0: none.
        dry_sequence_breakers: a token that contains one of these texts ends a repeat.
        xtc_probability: chance, at each token, that XTC acts; 0: off.
        xtc_threshold: XTC removes all tokens at least so likely but the least likely of them; over 0.5: off.
        typical_p: keep the tokens whose surprise is closest to the expected one, up to this sum; 1: off.
        top_n_sigma: keep logits within so many standard deviations of the best one; 0: off.
        logprobs: report the log-probability of the chosen token and of so many of the likeliest; 0: off.

    Raises:
        UsageError: a value of the wrong type or range.
    """

    max_tokens: int | None = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    logprobs: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                self._check_int(name, least, _MAX_SEED)
        for name, least in (
            ("top_k", 0),
            ("penalty_last_n", -1),
            ("dry_allowed_length", 1),
            ("dry_penalty_last_n", -1),
            ("logprobs", 0),
        ):
            self._check_int(name, least)
        for name, low, high in (
            ("temperature", 0, 100),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("typical_p", 0, 1),
            ("xtc_probability", 0, 1),
            ("xtc_threshold", 0, 1),
            ("top_n_sigma", 0, 1000),
            ("repetition_penalty", 0.01, 100),
            ("frequency_penalty", -100, 100),
            ("presence_penalty", -100, 100),
            ("dry_multiplier", 0, 100),
            ("dry_base", 1, 100),
        ):
            self._check_float(name, low, high)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos is {_shown(self.ignore_eos)}, expected True or False")
        for name in ("stop", "dry_sequence_breakers"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def chooses_among(self, num_candidates: int) -> bool:
        """Whether the likeliest `num_candidates` tokens of a row are all that sampling looks at."""
        whole_row = (self.repetition_penalty != 1, self.frequency_penalty, self.presence_penalty, self.logit_bias)
        if any((*whole_row, self.dry_multiplier, self.top_n_sigma, self.logprobs)):
            return False
        return self.temperature == 0 or 0 < self.top_k <= num_candidates

    def with_seed(self, seed: int | None) -> SamplingParams:
        """The same with another seed, at less cost than `replace`: only that is checked.

        Raises:
            UsageError: the seed is out of range.
        """
        other = object.__new__(SamplingParams)
        other.__dict__.update(self.__dict__)
        object.__setattr__(other, "seed", seed)
        if seed is not None:
            other._check_int("seed", 0, _MAX_SEED)
        return other

    @cached_property
    def takes_best(self) -> bool:
        """Whether the token is the one with the largest logit, whatever else the row holds."""
        return self.temperature == 0 and self.chooses_among(1)

    def _check_int(self, name: str, low: int, high: int = 2**31 - 1) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
            raise UsageError(f"{name} is {_shown(value)}, expected an integer from {low} to {high}")
        object.__setattr__(self, name, int(value))

    def _check_float(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not low <= value <= high:
            raise UsageError(f"{name} is {_shown(value)}, expected a number from {low} to {high}")
        object.__setattr__(self, name, float(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{name} is {_shown(value)}, expected a text or a list of texts, none of them empty")
    return tuple(texts)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Checked (id, bias) pairs, by id. Ids may be texts, as JSON objects have them."""
    biases = {}
    try:
        for token_id, bias in dict(value).items():
            if not _is_number(bias) or not (bias == -math.inf or -_MAX_BIAS <= bias <= _MAX_BIAS):
                raise ValueError
            biases[_token_id(token_id)] = float(bias)
    except (TypeError, ValueError):
        raise UsageError(
            f"logit_bias is {_shown(value)}, expected token ids with numbers from {-_MAX_BIAS:.0f} to {_MAX_BIAS:.0f} "
            "or -inf, such as {42: -1.5}"
        ) from None
    return tuple(sorted(biases.items()))


def _token_id(value: Any) -> int:
    token_id = int(value) if isinstance(value, str) and value.isdecimal() else operator.index(value)
    if isinstance(value, bool) or token_id < 0:
        raise ValueError
    return token_id


def _shown(value: object) -> str:
    """A wrong value, fit for one line of a message."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no integers of more than 4,300 digits
        text = f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token.

    Attributes:
        logprob: natural logarithm of its probability under the raw logits; None when `logprobs` is 0.
        top_logprobs: (token, logprob) of the likeliest, best first.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


_COLD = 1e-3  # a temperature

plain_sampled = lru_cache(1 << 15)(Sampled)
"""Tokens without more, made once."""


class PieceSource(Protocol):
    """What `breaker_ids` needs of a tokeniser."""

    vocab_size: int

    def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes: ...


def breaker_ids(tokenizer: PieceSource, breakers: Iterable[str]) -> frozenset[int]:
    """Ids of all tokens whose text contains one of the given texts (for `Sampler(dry_breakers=...)`)."""
    wanted = [text.encode() for text in breakers]
    pieces = ((i, tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    return frozenset(i for i, piece in pieces if any(text in piece for text in wanted))


class Sampler:
    """Chooses the tokens of one sequence, with random numbers of its own: the same seed and logits give the same
    tokens, whatever other sequences do.

    Attributes:
        seed: the one in use, also when `params.seed` is None.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, dry_breakers: frozenset[int] = frozenset()) -> None:
        """
        Args:
            params: may be shared by samplers.
            vocab_size: length of the rows of logits.
            dry_breakers: tokens that end a repeated sequence, see `breaker_ids`.

        Raises:
            UsageError: `logit_bias` names a token beyond the vocabulary.
        """
        self._biases = _biases(params.logit_bias) if params.logit_bias else ()
        for token_id, _ in self._biases:
            if token_id >= vocab_size:
                raise UsageError(f"logit_bias names token {token_id}, expected 0 to {vocab_size - 1}")
        self.params = params
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._vocab_size = vocab_size
        self._dry_breakers = dry_breakers

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, logits: np.ndarray, history: Sequence[int] = ()) -> Sampled:
        """Choose the next token.

        Args:
            logits: [vocab_size] float32, left unchanged. NaN and -inf entries are never chosen.
            history: all ids of the sequence so far, prompt included; used by the penalties.

        Raises:
            SamplingError: no logit is finite, or one is +inf.
        """
        row = _checked_row(logits, self._vocab_size)
        adjusted = self._adjusted(row, history)
        token = self._greedy(adjusted) if self.params.temperature == 0 else self._draw(adjusted)
        if not self.params.logprobs:
            return Sampled(token)
        logprob, top = filters.log_probabilities(row, token, self.params.logprobs)
        return Sampled(token, logprob, top)

    def sample_among(self, values: np.ndarray, ids: np.ndarray) -> int | None:
        """The token that `sample` would choose by a row of which only the largest logits are known, where its settings
        are such that these do (`SamplingParams.chooses_among`). It draws the same random numbers.

        Args:
            values: [n] float32, in descending order; of equals the lower id first.
            ids: [n] integer, their tokens.

        Returns:
            None, with nothing drawn, where the row itself is needed: for greedy sampling, or for a logit that is not
            finite, or a column that is no token.
        """
        params = self.params
        logits = values[: params.top_k].astype(np.float64)
        tokens = ids[: params.top_k]
        known = params.temperature > 0 and 0 < params.top_k <= len(values)
        if not known or not math.isfinite(logits.sum()) or tokens.max() >= self._vocab_size:
            return None
        if params.typical_p < 1 or params.xtc_probability:
            return self._drawn(self._filtered(Candidates(tokens, logits), params.top_p, params.min_p))
        # The usual filters keep a beginning of what is sorted: the same sums, in a few calls.
        below = logits - logits[0]
        count = len(logits)
        if params.top_p < 1 or params.min_p:
            weights = np.exp(below)
            if params.top_p < 1:
                count = int(np.searchsorted(np.cumsum(weights / weights.sum()), params.top_p)) + 1
            if params.min_p:
                count = int(np.count_nonzero(weights[:count] >= params.min_p))
        below = below[:count]
        if params.temperature < _COLD:  # what is divided by it may overflow
            return self._drawn(Candidates(tokens[:count], logits[:count]))
        sums = np.cumsum(np.exp(below / params.temperature))
        chosen = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return int(tokens[min(chosen, count - 1)])

    def _adjusted(self, row: np.ndarray, history: Sequence[int]) -> np.ndarray:
        """The row with bias and penalties, float64 [vocab_size]; the row itself when there are none."""
        steps = list(self._adjustments(history))
        if not steps:
            return row
        adjusted = row.astype(np.float64)
        for step in steps:
            step(adjusted)
        if adjusted.max() == -np.inf:
            raise SamplingError("logit_bias forbids every token that the model allows; forbid fewer tokens")
        return adjusted

    def _adjustments(self, history: Sequence[int]) -> Iterator[Callable[[np.ndarray], None]]:
        params = self.params
        if self._biases:
            yield lambda row: penalties.add_bias(row, self._biases)
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            recent = penalties.last(history, params.penalty_last_n)
            yield lambda row: penalties.penalize_tokens(
                row, recent, params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            )
        if params.dry_multiplier:
            context = penalties.last(history, params.dry_penalty_last_n)
            yield lambda row: penalties.penalize_repeats(
                row, context, params.dry_multiplier, params.dry_base, params.dry_allowed_length, self._dry_breakers
            )

    @staticmethod
    def _greedy(logits: np.ndarray) -> int:
        return int(np.argmax(logits))  # the first of equals

    def _draw(self, logits: np.ndarray) -> int:
        if self.params.top_n_sigma:
            logits = filters.top_n_sigma(logits, self.params.top_n_sigma)
        return self._drawn(self._filtered(*self._first_filter(logits)))

    def _drawn(self, candidates: Candidates) -> int:
        weights = candidates.weights(self.params.temperature)
        # One uniform number per token, through the inverse of the cumulative distribution.
        sums = np.cumsum(weights)
        chosen = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return int(candidates.ids[min(chosen, len(sums) - 1)])

    def _filtered(self, candidates: Candidates, top_p: float, min_p: float) -> Candidates:
        """What is left when all filters but the first are done."""
        params = self.params
        if params.typical_p < 1:
            candidates = filters.typical_p(candidates, params.typical_p)
        if top_p < 1:
            candidates = filters.top_p(candidates, top_p)
        if min_p:
            candidates = filters.min_p(candidates, min_p)
        if params.xtc_probability and self._random.random() < params.xtc_probability:
            candidates = filters.xtc(candidates, params.xtc_threshold)
        return candidates

    def _first_filter(self, logits: np.ndarray) -> tuple[Candidates, float, float]:
        """The filter that meets the whole row, and the top_p and min_p still to be done.

        Without top_k, others come first in a form that does not sort the vocabulary.
        """
        params = self.params
        if params.top_k:
            return filters.top_k(logits, params.top_k), params.top_p, params.min_p
        if params.typical_p < 1:
            return filters.all_finite(logits), params.top_p, params.min_p
        if params.top_p < 1:
            return filters.top_p_of_row(logits, params.top_p), 1.0, params.min_p
        if params.min_p:
            return filters.min_p_of_row(logits, params.min_p), 1.0, 0.0
        return (filters.all_finite if params.xtc_probability else filters.unsorted)(logits), 1.0, 0.0


def _checked_row(logits: np.ndarray, vocab_size: int) -> np.ndarray:
    """The row with NaN replaced by -inf, if it has any; else the row itself."""
    if logits.shape != (vocab_size,):
        raise SamplingError(f"logits have shape {logits.shape}, expected ({vocab_size},)")
    best = logits.max()  # NaN if any entry is
    if np.isnan(best):
        logits = np.where(np.isnan(logits), -np.inf, logits)
        best = logits.max()
    if best == np.inf:
        raise SamplingError(
            f"the logit of token {int(np.argmax(logits))} is +inf: the model's numbers overflowed; try a wider type"
        )
    if best == -np.inf:
        raise SamplingError("no logit is a finite number: the model's numbers are broken; check the model file")
    return logits
