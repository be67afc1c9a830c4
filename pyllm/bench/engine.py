"""Timed runs on the engine's real path: requests, the scheduler, sampling, and results on the host.

A run at a depth needs rows that are in the cache already. They are computed once, as a `Prefix`; each run gets a fork
of it, which shares the pages, and is handed to the scheduler as a request whose beginning is done. This is the one
module of the benchmark that reaches into the engine for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyllm.bench.plan import Point
from pyllm.errors import PyllmError
from pyllm.kv_cache import SequenceKV
from pyllm.llm import LLM
from pyllm.models.decoder import Decoder
from pyllm.request import Request
from pyllm.sampling import Sampled, Sampler, SamplingParams

Clock = Callable[[], float]


@dataclass(frozen=True)
class Prefix:
    """The beginning of a sequence, whose rows are in the cache.

    Attributes:
        token_ids: its tokens.
        kv: its rows, held until `EngineUnderTest.drop`; None when it is empty.
    """

    token_ids: list[int]
    kv: SequenceKV | None


class RowTaker:
    """Stands for a sampler: chooses the tokens of a script, and keeps the logits that it is shown.

    Args:
        script: the tokens to "choose"; 0 behind its end.
        before: called with each row, before anything comes of it.
    """

    seed = 0

    def __init__(self, script: Sequence[int] = (), before: Callable[[np.ndarray], Any] = lambda row: None) -> None:
        self.rows: list[np.ndarray] = []
        self._script = list(script)
        self._before = before

    def sample_among(self, values: np.ndarray, ids: np.ndarray) -> None:
        """It wants rows."""

    def sample(self, row: np.ndarray, history: Sequence[int]) -> Sampled:
        self._before(row)
        self.rows.append(row.copy())
        count = len(self.rows)
        return Sampled(self._script[count - 1] if count <= len(self._script) else 0)


class EngineUnderTest:
    """An engine whose runs are timed.

    Args:
        llm: nothing else may use it.
        seed: draws the tokens.
        clock: seconds; tests have one of their own.
    """

    def __init__(self, llm: LLM, seed: int = 0, clock: Clock = time.perf_counter) -> None:
        self.llm = llm
        self._scheduler = llm._scheduler
        self._cache = llm._cache
        self._clock = clock
        self._rng = np.random.default_rng(seed)

    def random_tokens(self, count: int) -> list[int]:
        """Token ids of the vocabulary."""
        return self._rng.integers(0, self.llm.tokenizer.vocab_size, count).tolist()

    @property
    def kv_bytes_per_row(self) -> float:
        """Device memory of the K/V rows of one token, tags included."""
        return self._cache.num_bytes / (self._cache.num_pages * self._cache.page_size)

    @contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        """Let the model end after some of its layers for a while. Rows of sequences from before are of no use then."""
        executor, model = self.llm._executor, self.llm._executor.model
        assert isinstance(model, Decoder)
        model.num_run = count
        executor.forget_recordings()
        try:
            yield
        finally:
            model.num_run = model.config.num_layers
            executor.forget_recordings()

    # sequences whose beginning is done

    def lengthen(self, prefix: Prefix, depth: int) -> Prefix:
        """A prefix of `depth` random tokens that begins like another."""
        more = self.random_tokens(depth - len(prefix.token_ids))
        if not more:
            return Prefix(list(prefix.token_ids), None if prefix.kv is None else self._fork(prefix))
        made: list[SequenceKV] = []

        def keep(row: np.ndarray) -> None:  # the rows were just published, and the request is about to end
            assert request.kv is not None
            made.append(self._cache.fork(request.kv, depth))

        request = self._request(prefix, more, SamplingParams(max_tokens=1, ignore_eos=True), RowTaker(before=keep))
        self._finish([request])
        return Prefix(request.token_ids[:depth], made[0])

    def drop(self, prefix: Prefix) -> None:
        """Give the rows of a prefix back."""
        if prefix.kv is not None:
            self._cache.release(prefix.kv)

    def _fork(self, prefix: Prefix) -> SequenceKV:
        if prefix.kv is None:
            return self._cache.new_sequence()
        return self._cache.fork(prefix.kv, len(prefix.token_ids))

    # runs

    def seconds(self, point: Point, prefixes: Sequence[Prefix]) -> float:
        """Run a point once.

        Args:
            prefixes: one for each of its sequences, of its depth.

        Returns:
            From handing the requests over to the last token on the host.
        """
        decode = point.kind == "decode"
        new_tokens = point.tokens if decode else 1
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, seed=0)
        requests = []
        for prefix in prefixes:
            tokens = self.random_tokens(1 if decode else point.tokens)
            sampler = Sampler(params, self.llm.tokenizer.vocab_size)
            requests.append(self._request(prefix, tokens, params, sampler))
        start = self._clock()
        self._finish(requests)
        return self._clock() - start

    def decoded_rows(self, prefix: Prefix, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of tokens behind a prefix, computed one by one as in decoding: float32 [len(token_ids), columns]."""
        taker = RowTaker(token_ids[1:])
        # Log-probabilities are asked for so that whole rows come back, not the likeliest candidates alone.
        params = SamplingParams(max_tokens=len(token_ids), ignore_eos=True, logprobs=1)
        self._finish([self._request(prefix, token_ids[:1], params, taker)])
        return np.stack(taker.rows)

    def _request(self, prefix: Prefix, tokens: Sequence[int], params: SamplingParams, sampler: Any) -> Request:
        token_ids = [*prefix.token_ids, *tokens]
        request = Request(token_ids, len(token_ids), params, sampler, kv=self._fork(prefix))
        request.num_submitted = len(prefix.token_ids)
        return request

    def _finish(self, requests: Sequence[Request]) -> None:
        """Run requests, which have their rows already, to their end. They get what the scheduler gives others when it
        admits them: a number, by which interrupts end requests, and a place for the token that the device keeps."""
        for place, request in enumerate(requests):
            self._scheduler._num_added += 1
            request.number, request.place = self._scheduler._num_added, place
        self._scheduler._running.extend(requests)
        try:
            while any(request.finish_reason is None for request in requests):
                if not self._scheduler.step():
                    raise PyllmError("the engine has nothing to do, but a run is not complete: please report this")
        finally:
            for request in requests:
                self._scheduler.end(request, "cancelled")
            self._scheduler.drop_ended()
        for request in requests:
            if request.error is not None:
                raise request.error
            if request.finish_reason != "length":
                raise PyllmError(f"a run ended early: {request.finish_reason}")
