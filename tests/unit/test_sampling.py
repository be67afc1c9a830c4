"""Sampling: settings are checked, filters keep what their definitions say, the same seed gives the same tokens."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from pyllm import sampling_filters as filters
from pyllm.errors import SamplingError, UsageError
from pyllm.sampling import Sampler, SamplingParams, breaker_ids
from pyllm.sampling_filters import Candidates
from pyllm.sampling_penalties import penalize_repeats, penalize_tokens
from pyllm.tokenizer import Tokenizer
from tests.vocab_maker import bpe_metadata

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def params(**settings: Any) -> SamplingParams:
    """Every filter off but those given."""
    return SamplingParams(**(OFF | {"temperature": 1.0, "seed": 1} | settings))


def row(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


def log(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def seen(settings: SamplingParams, logits: np.ndarray, draws: int = 300, history: tuple[int, ...] = ()) -> set[int]:
    """All tokens that a sampler chooses in many draws."""
    sampler = Sampler(settings, len(logits))
    return {sampler.sample(logits, history).token for _ in range(draws)}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 0, "an integer from 1 to"),
        ("max_tokens", 1.5, "an integer from 1 to"),
        ("temperature", -0.1, "a number from 0 to 100"),
        ("temperature", math.nan, "a number from 0 to 100"),
        ("temperature", "hot", "a number from 0 to 100"),
        ("top_k", -1, "an integer from 0 to"),
        ("top_k", True, "an integer from 0 to"),
        ("top_p", 1.1, "a number from 0 to 1"),
        ("min_p", -0.1, "a number from 0 to 1"),
        ("typical_p", 2, "a number from 0 to 1"),
        ("seed", -1, "an integer from 0 to"),
        ("seed", 2**64, "an integer from 0 to"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", 5, "a text or a list of texts"),
        ("ignore_eos", 1, "True or False"),
        ("repetition_penalty", 0, "a number from 0.01 to 100"),
        ("frequency_penalty", math.inf, "a number from -100 to 100"),
        ("penalty_last_n", -2, "an integer from -1 to"),
        *(
            ("logit_bias", value, "token ids with numbers from -10000 to 10000 or -inf")
            for value in (
                {"x": 1},
                {1: math.nan},
                {-1: 1},
                {1.7: 1},
                {2.0: 1},
                {True: 1},
                {"1.0": 1},
                {5: 1e308},
                {5: math.inf},
                {5: True},
                {5: 10**50},
                3,
            )
        ),
        ("dry_base", 0.5, "a number from 1 to 100"),
        ("xtc_probability", 1.5, "a number from 0 to 1"),
        ("logprobs", -1, "an integer from 0 to"),
    ],
)
def test_wrong_settings_are_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}, expected ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("digits", [400, 5000])
def test_huge_numbers_are_refused_in_a_short_line(digits: int) -> None:
    huge = 10**digits
    for name, value in (
        ("temperature", huge),
        ("max_tokens", huge),
        ("stop", huge),
        ("ignore_eos", huge),
        ("logit_bias", {5: -huge}),
        ("logit_bias", {huge: math.nan}),
    ):
        with pytest.raises(UsageError, match=f"{name} is .*, expected ") as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 250


def test_settings_take_lists_and_numpy_numbers() -> None:
    settings = SamplingParams(stop=["a", "b"], top_k=np.int64(3), temperature=np.float32(0.5), logit_bias={"7": 1})  # type: ignore[arg-type]
    assert settings.stop == ("a", "b")
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert settings.logit_bias == ((7, 1.0),)
    assert hash(settings) == hash(SamplingParams(stop=("a", "b"), top_k=3, temperature=0.5, logit_bias=((7, 1.0),)))


def test_temperature_zero_takes_the_first_of_the_best() -> None:
    for settings in (SamplingParams(temperature=0), params(top_k=1), params(top_p=0.0), params(min_p=1.0)):
        assert seen(settings, row(1, 5, 2, 4.5), 20) == {1}
    assert seen(SamplingParams(temperature=0), row(1, 5, 5), 5) == {1}
    assert seen(params(temperature=1e-320), row(1, 5, 4.999), 20) == {1}
    assert seen(params(top_k=1), row(5, 1, 5), 20) == {0}


def test_off_values_filter_nothing() -> None:
    assert seen(params(), row(0, 0, 0, -1), 400) == {0, 1, 2, 3}


def test_top_k() -> None:
    assert seen(params(top_k=2), row(0, 3, 1, 2.9)) == {1, 3}
    assert seen(params(top_k=2), row(1, 1, 1, 1)) == {0, 1}
    assert seen(params(top_k=100), row(1, 1)) == {0, 1}
    assert seen(params(top_k=3), row(-np.inf, 1, -np.inf, 1)) == {1, 3}


def test_top_p() -> None:
    logits = log(0.1, 0.5, 0.15, 0.25)
    assert seen(params(top_p=0.5 - 1e-6), logits) == {1}
    assert seen(params(top_p=0.74), logits) == {1, 3}
    assert seen(params(top_p=0.76), logits) == {1, 2, 3}
    assert seen(params(top_p=0.76, top_k=2), logits) == {1, 3}  # probabilities among those that top_k left


def test_min_p() -> None:
    logits = log(0.1, 0.5, 0.15, 0.25)
    assert seen(params(min_p=0.49), logits) == {1, 3}
    assert seen(params(min_p=0.51), logits) == {1}
    assert seen(params(min_p=0.29, top_k=4), logits) == {1, 2, 3}


def test_filters_of_whole_rows_are_those_of_candidates() -> None:
    rng = np.random.default_rng(0)
    for scale in (0.1, 1.0, 5.0):
        logits = np.round(rng.normal(size=5000) * scale, 2).astype(np.float32)  # rounded: many are equal
        logits[rng.integers(5000, size=50)] = -np.inf
        everything = filters.all_finite(logits)
        for p in (1e-6, 0.3, 0.95, 0.9999):
            assert_same(filters.top_p_of_row(logits, p), filters.top_p(everything, p))
            assert_same(filters.min_p_of_row(logits, p), filters.min_p(everything, p))
        for k in (1, 40, 4999, 6000):
            assert_same(filters.top_k(logits, k), everything.kept(slice(k)))


def assert_same(found: Candidates, expected: Candidates) -> None:
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.logits.tolist() == expected.logits.tolist()


def test_typical_p_prefers_the_expected_surprise() -> None:
    # Entropy 1.22; the surprises 0.69, 1.61, 1.61 and 2.30 are 0.53, 0.39, 0.39 and 1.08 away from it.
    logits = log(0.5, 0.2, 0.2, 0.1)
    assert seen(params(typical_p=0.39), logits) == {1, 2}
    assert seen(params(typical_p=0.41), logits) == {0, 1, 2}
    assert seen(params(typical_p=0.0), logits) == {1}


def test_top_n_sigma() -> None:
    logits = row(10, 9, 0, 0, 0, 0)
    sigma = float(np.std(logits.astype(np.float64)))
    assert seen(params(temperature=100, top_n_sigma=0.9 / sigma), logits) == {0}
    assert seen(params(temperature=100, top_n_sigma=1.1 / sigma), logits) == {0, 1}
    assert seen(params(temperature=100, top_n_sigma=100), logits) == set(range(6))


def test_xtc_drops_the_top_choices_but_the_least_of_them() -> None:
    logits = log(0.4, 0.05, 0.3, 0.25)
    assert seen(params(xtc_probability=1, xtc_threshold=0.2), logits) == {1, 3}
    assert seen(params(xtc_probability=1, xtc_threshold=0.35), logits) == {0, 1, 2, 3}
    assert seen(params(xtc_probability=1, xtc_threshold=0.6), logits) == {0, 1, 2, 3}
    assert seen(params(xtc_probability=0, xtc_threshold=0.2), logits) == {0, 1, 2, 3}


def test_any_combination_leaves_a_candidate() -> None:
    rng = np.random.default_rng(3)
    for seed in range(300):
        settings = params(
            seed=seed,
            temperature=float(rng.choice([0, 1e-6, 1, 100])),
            top_k=int(rng.choice([0, 1, 2])),
            top_p=float(rng.choice([0, 0.5, 1])),
            min_p=float(rng.choice([0, 0.5, 1])),
            typical_p=float(rng.choice([0, 0.5, 1])),
            top_n_sigma=float(rng.choice([0, 1e-9, 1])),
            xtc_probability=1.0,
            xtc_threshold=float(rng.choice([0, 0.1])),
        )
        logits = (rng.normal(size=7) * rng.choice([0, 1, 1e4])).astype(np.float32)
        logits[rng.integers(7, size=3)] = rng.choice([-np.inf, np.nan])
        token = Sampler(settings, 7).sample(logits).token
        assert np.isfinite(logits[token])


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = np.array([0.5, 0.3, 0.2])
    for temperature in (1.0, 0.5):
        expected = probabilities ** (1 / temperature)
        expected /= expected.sum()
        sampler = Sampler(params(temperature=temperature), 3)
        counts = Counter(sampler.sample(log(*probabilities)).token for _ in range(20_000))
        for token in range(3):
            assert abs(counts[token] / 20_000 - expected[token]) < 0.015


def test_rows_without_a_choice_are_refused() -> None:
    with pytest.raises(SamplingError, match="no logit is a finite number"):
        Sampler(params(), 2).sample(row(np.nan, -np.inf))
    with pytest.raises(SamplingError, match=r"logit of token 1 is \+inf"):
        Sampler(params(), 3).sample(row(np.nan, np.inf, 0))
    with pytest.raises(SamplingError, match=r"shape \(3,\), expected \(2,\)"):
        Sampler(params(), 2).sample(row(1, 2, 3))
    with pytest.raises(SamplingError, match="forbids every token"):
        Sampler(params(logit_bias={0: -math.inf}), 2).sample(row(1, -np.inf))


def test_nan_never_wins_and_the_row_is_left_alone() -> None:
    logits = row(np.nan, 1, np.nan, 0)
    for settings in (params(), params(temperature=0), params(top_k=3), params(repetition_penalty=2.0)):
        before = logits.copy()
        assert seen(settings, logits, history=(0, 1)) <= {1, 3}
        assert np.array_equal(logits, before, equal_nan=True)


def test_seeds() -> None:
    logits = np.zeros(1000, np.float32)

    def tokens(sampler: Sampler) -> list[int]:
        return [sampler.sample(logits).token for _ in range(10)]

    assert tokens(Sampler(params(seed=7), 1000)) == tokens(Sampler(params(seed=7), 1000))
    assert tokens(Sampler(params(seed=7), 1000)) != tokens(Sampler(params(seed=8), 1000))
    unseeded = Sampler(params(seed=None), 1000)
    assert tokens(Sampler(params(seed=unseeded.seed), 1000)) == tokens(unseeded)
    one, other = Sampler(params(seed=7), 1000), Sampler(params(seed=7), 1000)
    interleaved = [(one.sample(logits).token, other.sample(logits).token) for _ in range(10)]
    assert [first for first, _ in interleaved] == [second for _, second in interleaved]


def test_a_seed_means_the_same_tokens_on_every_machine() -> None:
    logits = np.linspace(0, 3, 100, dtype=np.float32)
    sampler = Sampler(SamplingParams(seed=42), 100)
    uniform = np.random.Generator(np.random.PCG64(42))
    for _ in range(20):
        kept = np.arange(99, 59, -1)  # top_k 40; then top_p and min_p
        weights = np.exp(logits[kept].astype(np.float64))
        kept = kept[: int(np.searchsorted(np.cumsum(weights / weights.sum()), 0.95)) + 1]
        weights = np.exp((logits[kept].astype(np.float64) - 3) / 0.8)
        sums = np.cumsum(weights)
        assert sampler.sample(logits).token == kept[np.searchsorted(sums, uniform.random() * sums[-1], side="right")]


def test_penalties_of_tokens() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.0])
    penalize_tokens(logits, np.array([0, 0, 1, 3]), repetition=2.0, frequency=0.25, presence=0.5)
    # Once per token; a negative logit is multiplied; counts enter the frequency part only.
    assert logits.tolist() == [2 / 2 - 0.5 - 0.5, -2 * 2 - 0.25 - 0.5, 1.0, 0 - 0.25 - 0.5]


def test_penalties_look_at_the_last_n_tokens() -> None:
    logits = row(1, 0.9)
    greedy = {"temperature": 0.0, "presence_penalty": 1.0}
    assert seen(params(**greedy), logits, 1, history=(0,)) == {1}
    assert seen(params(**greedy, penalty_last_n=1), logits, 1, history=(0, 1)) == {0}
    assert seen(params(**greedy, penalty_last_n=0), logits, 1, history=(0,)) == {0}
    assert seen(params(**greedy, penalty_last_n=-1), logits, 1, history=(0,)) == {1}


def test_penalties_leave_out_tokens_beyond_the_row() -> None:
    settings = params(
        temperature=0, repetition_penalty=1.5, frequency_penalty=1.0, dry_multiplier=1.0, dry_allowed_length=1
    )
    assert seen(settings, row(1, 0.9), 1, history=(7, 0, 7)) == {1}


@pytest.mark.filterwarnings("error")
def test_the_strongest_settings_do_not_overflow() -> None:
    largest = float(np.finfo(np.float32).max)
    logits = row(largest, largest / 2, -largest, 0.0)
    for filtered in ({}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.5}, {"top_n_sigma": 1.0}, {"top_k": 2}):
        settings = params(
            **filtered,
            temperature=1e-320,
            logit_bias={0: 10_000, 2: -10_000},
            repetition_penalty=0.01,
            frequency_penalty=-100,
            dry_multiplier=100,
            dry_base=100,
            logprobs=2,
        )
        assert seen(settings, logits, 3, history=(0, 1, 2, 3) * 100)


def test_logit_bias() -> None:
    assert seen(params(temperature=0, logit_bias={1: 5.0}), row(1, 0), 1) == {1}
    assert seen(params(logit_bias={0: -math.inf}), row(9, 0)) == {1}
    with pytest.raises(UsageError, match="logit_bias names token 2, expected 0 to 1"):
        Sampler(params(logit_bias={2: 1.0}), 2)


def dry_plainly(context: list[int], breakers: set[int], allowed: int) -> dict[int, int]:
    """token: longest n such that the last n tokens stand earlier with the token after them, and hold no breaker."""
    longest: dict[int, int] = {}
    for end in range(len(context) - 1):
        n = 0
        while n <= end and context[end - n] == context[-1 - n] and context[-1 - n] not in breakers:
            n += 1
        token = context[end + 1]
        if n >= allowed and token not in breakers:
            longest[token] = max(longest.get(token, 0), n)
    return longest


def test_dry_as_plainly() -> None:
    rng = np.random.default_rng(5)
    for _ in range(500):
        context = rng.integers(4, size=rng.integers(1, 40))
        breakers = {3} if rng.random() < 0.5 else set()
        allowed = int(rng.integers(1, 4))
        logits = np.zeros(4)
        penalize_repeats(logits, context, 2.0, 1.5, allowed, frozenset(breakers))
        expected = np.zeros(4)
        for token, n in dry_plainly(context.tolist(), breakers, allowed).items():
            expected[token] = -2.0 * 1.5 ** (n - allowed)
        np.testing.assert_allclose(logits, expected)


def test_dry_of_long_repeats_stays_finite() -> None:
    logits = np.zeros(3)
    penalize_repeats(logits, np.ones(20_000, np.int64), 1.0, 50.0, 2, frozenset())
    assert -np.inf < logits[1] < -1e20
    penalize_repeats(logits, np.ones(5, np.int64), 1.0, 1.0, 300, frozenset())
    penalize_repeats(logits, np.empty(0, np.int64), 1.0, 1.0, 1, frozenset())


def test_dry_breakers_of_a_vocabulary() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(), "x.gguf")
    found = breaker_ids(tokenizer, ["\n", "ll"])
    assert {tokenizer.decode([i]) for i in found} == {"\n", "ll", "hell", "hello"}
    logits = row(*[0.0] * tokenizer.vocab_size)
    logits[5] = 1.0
    sampler = Sampler(params(temperature=0, dry_multiplier=2.0), tokenizer.vocab_size, found)
    assert sampler.sample(logits, [4, 6, 5, 4, 6]).token == 0
    assert sampler.sample(logits, [4, 10, 5, 4, 10]).token == 5  # 10 is "\n"


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = row(1, 3, 2, 2, -np.inf)
    expected = logits - np.log(np.exp(logits).sum())
    settings = params(temperature=0, logprobs=3, logit_bias={1: -100.0}, top_k=1)
    sampled = Sampler(settings, 5).sample(logits)
    assert sampled.token == 2
    assert sampled.logprob == pytest.approx(expected[2])
    assert [token for token, _ in sampled.top_logprobs] == [1, 2, 3]
    assert [value for _, value in sampled.top_logprobs] == pytest.approx(expected[[1, 2, 3]].tolist())
    assert len(Sampler(params(logprobs=50), 5).sample(logits).top_logprobs) == 4
    assert Sampler(params(), 5).sample(logits).logprob is None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5},
        {"top_k": 1},
        {"top_k": 64, "top_p": 1.0, "min_p": 0.0},
        {"top_p": 1.0, "min_p": 0.2},
        {"top_p": 0.3, "min_p": 0.0},
        {"typical_p": 0.7},
        {"xtc_probability": 0.5},
        {"temperature": 1e-310},
        {"temperature": 5.0, "top_k": 40},
    ],
)
def test_candidates_do_where_rows_would(settings: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    params = SamplingParams(**{"seed": 11, **settings})
    by_row, among = Sampler(params, 500), Sampler(params, 500)
    for step in range(200):
        row = rng.standard_normal(500).astype(np.float32) * 3
        if step % 3 == 0:
            row = np.round(row)  # many equal ones
        ids = np.argsort(-row, kind="stable")[:64].astype(np.int32)
        assert among.sample_among(row[ids], ids) == by_row.sample(row).token


def test_where_candidates_do_not_do() -> None:
    ids, values = np.arange(64, dtype=np.int32), np.linspace(5, 1, 64, dtype=np.float32)
    sampler = Sampler(SamplingParams(seed=1), 64)
    for at, value in ((0, np.inf), (39, -np.inf), (20, np.nan)):
        broken = values.copy()
        broken[at] = value
        assert sampler.sample_among(broken, ids) is None
    assert sampler.sample_among(values, ids + 30) is None  # columns that are no tokens
    for settings in ({"temperature": 0.0}, {"top_k": 65}, {"top_k": 0}):
        assert Sampler(SamplingParams(**settings), 64).sample_among(values, ids) is None
    assert sampler.sample_among(values, ids) == Sampler(SamplingParams(seed=1), 64).sample(values).token


def test_another_seed_leaves_the_rest() -> None:
    params = SamplingParams(temperature=0, stop="a", seed=1)
    assert params.takes_best
    other = params.with_seed(5)
    assert other == SamplingParams(temperature=0, stop="a", seed=5) and other.takes_best and params.seed == 1
    assert params.with_seed(None).seed is None
    for wrong in (-1, 2**64, True, 1.5):
        with pytest.raises(UsageError, match="seed"):
            params.with_seed(wrong)
