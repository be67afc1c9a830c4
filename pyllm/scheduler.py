"""The scheduler: which tokens of which sequences run next, and what their results mean.

Continuous batching: every ubatch takes the one pending token of each decoding sequence first, then chunks of prompts
in order of arrival. Ubatches are queued ahead of the device; a sequence is taken up again when the token that it waits
for has been sampled. Results come back in the order of submission, and nothing of a step is used before its fault
record was read clean. Knows sequences, pages and tokens; knows no array maths and no device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from pyllm.errors import ContextError, DeviceError, PyllmError, StaleKVError
from pyllm.executor import Executor, Logits, Segment, Step
from pyllm.fault_messages import as_pyllm_error, hits_whole_step, suspect_pages, what_hit
from pyllm.faults import Fault
from pyllm.interrupts import deferred_interrupt
from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.overflow import Overflow, shift_in_place
from pyllm.prompt_cache.index import PrefixIndex, Taken
from pyllm.prompt_cache.state_saving import save_end_of_turn, save_state, up_to_checkpoint
from pyllm.request import Request
from pyllm.sampling import Sampled, plain_sampled

STARTED_TOGETHER = 16  # a part of all sequences so small
FEW_PARTS = 16  # pages that are filled in part, beside each other, of prompts whose answers are not kept
HELD_BACK = 16  # steps, at most, that a request waits for others to start with
FIRST_PARTS = (8, 2)  # parts of a ubatch that do for the first ones, see `start_prompts`
_UNKNOWN = (0,)  # in the place of a token that only the device knows
_new_segment = partial(tuple.__new__, Segment)  # from a tuple of its fields; made hundreds of times a step
MAX_LOGITS_BYTES = 1 << 28  # of one ubatch, when the logits of every position are wanted


@dataclass(frozen=True)
class QueuedStep:
    """A step in flight with the requests of its segments."""

    step: Step
    requests: tuple[Request, ...]
    num_tokens: int


class Scheduler:
    """Owns waiting and running requests and the steps in flight.

    Args:
        ctx_size: tokens that a sequence may hold.
        batch_size: tokens that may be in flight.
        ubatch_size: tokens of one ubatch.
        n_seqs: sequences that run at the same time.
        is_end: tells whether a token ends a generation.
        num_tokens: tokens that have a text; columns of the logits behind them are padding.
        index: rows of ended sequences, from which prompts that begin alike go on; None: every prompt is computed anew.
        overflow: what happens when a context is full.
    """

    def __init__(
        self,
        executor: Executor,
        cache: KVCache,
        ctx_size: int,
        batch_size: int,
        ubatch_size: int,
        n_seqs: int,
        is_end: Callable[[int], bool],
        num_tokens: int,
        index: PrefixIndex | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        self._executor = executor
        self._cache = cache
        self._ctx_size = ctx_size
        self._batch_size = max(batch_size, ubatch_size)
        self._ubatch_size = ubatch_size
        self._n_seqs = n_seqs
        self._is_end = is_end
        self._num_tokens = num_tokens
        self._index = index
        self._overflow = overflow or Overflow()
        has_kernels = executor.device.target is not None
        self._least_free = max(1, n_seqs // STARTED_TOGETHER) if has_kernels else 1
        # The device's choice among all columns is the host's only where every column is a token.
        self._runs_ahead = executor.model.vocab_size == num_tokens
        self._num_held_back = 0
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_flight: deque[QueuedStep] = deque()
        self._ended: deque[Request] = deque()
        self._busy = False
        self._num_filled: int | None = None  # ubatches of `start_prompts`; None once all prompts are
        self._num_added = 0
        self._interrupted_up_to = self._num_interrupted = 0  # as asked for, and as done

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextError: its prompt is empty or does not fit.
            UsageError: a token id is out of range.
        """
        room = self._ctx_size - (request.sampler is not None)  # one place for the first generated token
        if not request.token_ids:
            raise ContextError("the prompt is empty: give at least one token")
        self._overflow.make_fit(request, self._ctx_size, room)
        self._executor.check_tokens(request.token_ids)
        request.started_at = time.perf_counter()
        self._num_added += 1
        request.number = self._num_added
        self._waiting.append(request)

    def end(self, request: Request, reason: str) -> None:
        """End a request, wherever it is.

        May be called at any moment, also by the garbage collector in the middle of a step, or by a thread that does not
        hold the engine's lock: the request is only marked, and taken out at the next safe point.
        """
        request.finish(reason)
        if not request.is_out:
            self._ended.append(request)

    def drop_ended(self) -> None:
        """Take marked requests out, unless a step is going on. Their pages are free at once: work that is queued later
        comes later in the stream."""
        if not self._ended or self._busy:
            return
        with deferred_interrupt():
            while self._ended and not self._busy:
                self._end(self._ended.popleft(), "cancelled")

    def interrupt(self) -> None:
        """End all requests that were added before. Safe in a signal handler: it only sets a number."""
        self._interrupted_up_to = self._num_added

    def running_sequences(self) -> list[SequenceKV]:
        """The rows of all requests that are running."""
        return [request.kv for request in self._running if request.kv is not None]

    def step(self, meanwhile: Callable[[], bool] | None = None) -> bool:
        """Queue what can be queued, then take what has come back; wait only when nothing could be queued.

        Args:
            meanwhile: called again and again where it would wait for the device, until it returns False.

        Returns:
            False when there was nothing to do.

        Raises:
            DeviceError: the device failed; no request can go on.
        """
        waited = False
        try:
            with self._undisturbed():
                self._check_interrupt()
                self._admit()
                num_open = len(self._running) + len(self._waiting)
                if self._num_filled is not None and self._num_prompt_tokens() < self._ubatch_size:
                    self._num_filled = None
                queued = self._queue_ubatches()
                ended = len(self._running) + len(self._waiting) < num_open  # so others may have room now
            if not queued:
                waited = self._wait(meanwhile)  # Ctrl-C may break it: nothing is half done here
            collected = False
            if self._in_flight and self._in_flight[0].step.done.query():
                with self._undisturbed():
                    collected = self._collect_done()
        except DeviceError as error:
            self._fail(error)
            raise
        return queued or collected or waited or ended

    def start_prompts(self) -> None:
        """For callers that are about to add more: start what waits, and queue a ubatch of prompts where they fill one,
        so that the device computes meanwhile; the first ones are smaller, so that it begins soon. What decodes waits:
        its steps are the better the more they are, and ubatches of prompts alone have few shapes.

        Raises:
            DeviceError: the device failed; no request can go on.
        """
        try:
            with self._undisturbed():
                self._check_interrupt()
                self._num_filled = self._num_filled or 0
                self._admit()
                self._collect_done()
                pending = self._num_prompt_tokens()
                tokens = sum(entry.num_tokens for entry in self._in_flight)
                has_room = tokens + self._ubatch_size <= self._batch_size
                parts = FIRST_PARTS[self._num_filled] if self._num_filled < len(FIRST_PARTS) else 1
                if pending and pending >= self._ubatch_size // parts and has_room and not self._executor.is_full:
                    self._queue_one(prompts_only=True)
                    self._num_filled += 1
        except DeviceError as error:
            self._fail(error)
            raise

    def _wait(self, meanwhile: Callable[[], bool] | None) -> bool:
        """For the oldest step; where there is none, for a sequence that is being restored, or a session that has pages
        which the first in the queue needs. False: for nothing."""
        restoring = (request.ready for request in self._running if request.ready is not None)
        event = self._in_flight[0].step.done if self._in_flight else next(restoring, None)
        if event is not None:
            while meanwhile is not None and not event.query() and meanwhile():
                pass
            event.synchronize()
        elif self._waiting and self._has_guests:
            time.sleep(0.001)
            return True
        return event is not None

    @property
    def _has_guests(self) -> bool:
        """Whether sessions that are being saved or loaded have pages, which come back by themselves."""
        return self._index is not None and self._index.num_guests > 0

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Around changes that belong together: no Ctrl-C in between, and no request is taken out underneath."""
        with deferred_interrupt():
            self.drop_ended()
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
                self.drop_ended()

    def _fail(self, error: DeviceError) -> None:
        for request in [*self._running, *self._waiting]:
            request.finish("error", error)
        self._running.clear()
        self._waiting.clear()

    # choosing

    def _check_interrupt(self) -> None:
        up_to = self._interrupted_up_to
        if up_to == self._num_interrupted:
            return
        for request in [*self._running, *self._waiting]:
            if request.number <= up_to:
                self._end(request, "interrupted")
        self._num_interrupted = up_to

    def _admit(self) -> None:
        """Start waiting requests while there are sequences and pages for them.

        Of many sequences several start together, unless more are about to come: a step with a prompt has a shape of its
        own, which takes the host longer than one in which all decode. Nobody waits long for others that may not end.
        """
        least_free = 1 if self._num_filled is not None else self._least_free
        num_free = self._n_seqs - len(self._running)
        if not self._waiting or not num_free:
            return
        if self._running and num_free < least_free and self._num_held_back < HELD_BACK:
            self._num_held_back += 1
            return
        self._num_held_back = 0
        places = sorted({*range(self._n_seqs)} - {other.place for other in self._running}, reverse=True)
        while self._waiting and len(self._running) < self._n_seqs:
            request = self._waiting[0]
            usable = self._cache.num_pages - len(self._cache.quarantined)
            needed = self._cache.pages_for(len(request.token_ids) + (request.sampler is not None))
            if needed > usable:
                self._end(request, "error", ContextError(f"{needed} K/V pages are needed, {usable} are in order"))
                continue
            is_short = self._running and needed > self._cache.num_free_pages
            if is_short and not self._has_pages(self._new_pages(request, needed)):
                return
            known = self._first_rows(request)
            kv = known.seq
            if self._running and not self._has_pages(needed - len(kv.pages) + (not kv.owns_tail)):
                self._cache.release(kv)
                return
            self._waiting.popleft()
            request.kv, request.num_submitted, request.is_kept = kv, kv.length, False
            request.ready, request.saved_at = known.ready, kv.length
            if not request.num_generated:
                request.num_cached = kv.length
            request.place = places.pop()  # the lowest
            request.logits.clear()
            self._running.append(request)

    def _new_pages(self, request: Request, needed: int) -> int:
        """How many of the needed pages are not known already."""
        if self._index is None or request.sampler is None:
            return needed
        return needed - self._index.known(request.token_ids[:-1]) // self._cache.page_size

    def _first_rows(self, request: Request) -> Taken:
        """A sequence for a request: with the rows of a known beginning of its tokens, except the last, whose logits are
        wanted."""
        known = None
        if self._index is not None and request.sampler is not None:
            known = self._index.take(request.token_ids[:-1])
            request.restored_bytes += known.num_bytes if known is not None else 0
        return known or Taken(self._cache.new_sequence())

    def _has_pages(self, num_pages: int) -> bool:
        """Whether so many pages are free, or become so when kept rows give way."""
        if self._index is not None:
            return self._index.make_room(num_pages)
        return num_pages <= self._cache.num_free_pages

    def _queue_ubatches(self) -> bool:
        queued = False
        tokens = sum(entry.num_tokens for entry in self._in_flight)
        while not self._executor.is_full:
            if queued and self._in_flight and self._in_flight[0].step.done.query():
                break  # a host slower than its device shows what has come back before it queues all that it could
            self._check_interrupt()
            has_room = tokens + self._ubatch_size <= self._batch_size or not tokens
            if not has_room and any(request.num_pending > 1 for request in self._running):
                break  # what decodes goes along with the next piece of the prompt
            count = self._queue_one(prompts_only=self._num_filled is not None)
            if self._num_filled is not None and (count is None or self._num_prompt_tokens() < self._ubatch_size):
                self._num_filled = None  # what is left goes along with what decodes
                if count is None:
                    continue
            if count is None:
                break
            tokens += count
            queued = True
        return queued

    def _num_prompt_tokens(self) -> int:
        """Of running requests, those that are not queued yet."""
        return sum(count for request in self._running if (count := request.num_pending) > 1)

    def _queue_one(self, prompts_only: bool = False) -> int | None:
        """Queue one ubatch; returns its tokens, None when there is nothing to compute."""
        try:
            chosen = self._choose(prompts_only)
            return self._submit(chosen) if chosen else None
        except BaseException:
            self._put_back_unqueued()
            raise

    def _choose(self, prompts_only: bool) -> list[tuple[Request, Segment]]:
        """Segments of the next ubatch, with room for their rows; the youngest sequences give way when pages run out."""
        room = self._ubatch_size
        output_room = max(1, MAX_LOGITS_BYTES // (4 * self._executor.model.vocab_size))
        chosen: list[tuple[Request, Segment]] = []
        others: list[Request] = []
        for request in [*self._running]:
            kv = request.kv
            if kv is None or request.finish_reason or (request.ready is not None and not self._is_ready(request)):
                continue  # it may have given way by now
            num_pending = len(request.token_ids) - kv.length
            if num_pending > 1:
                others.append(request)  # decoding first, then by age
            elif not room or prompts_only:
                continue
            elif num_pending == 1:
                if (segment := self._known_tokens(request, room, output_room, chosen)) is not None:
                    chosen.append((request, segment))
                    room, output_room = room - 1, output_room - segment.num_outputs
            elif request.is_kept and self._can_run_ahead(request, kv) and self._has_row(kv):
                given = (kv, kv.length - 1, _UNKNOWN, 1, request.whole_rows, request.place, request.place)
                chosen.append((request, _new_segment(given)))
                room -= 1
        for request in others:
            if room and (segment := self._known_tokens(request, room, output_room, chosen)) is not None:
                chosen.append((request, segment))
                room, output_room = room - len(segment.token_ids), output_room - segment.num_outputs
        return chosen

    def _known_tokens(
        self, request: Request, room: int, output_room: int, chosen: list[tuple[Request, Segment]]
    ) -> Segment | None:
        """Tokens of a request that the host knows, as many as there is room for; None where there is none."""
        if request.kv is None or request.finish_reason:
            return None  # it has given way
        count = min(request.num_pending, room)
        if self._index is not None:
            count = up_to_checkpoint(request, count)
        if request.sampler is None:
            count = min(count, output_room)
        if count <= 0 or not self._make_room(request, count, chosen):
            return None
        return self._segment(request, count)

    @staticmethod
    def _is_ready(request: Request) -> bool:
        if request.ready is not None and request.ready.query():
            request.ready = None
        return request.ready is None

    def _can_run_ahead(self, request: Request, kv: SequenceKV) -> bool:
        """Whether a step can be queued already for the token that the device has, or will have (`Request.is_kept`).

        The host may find out later that a token before it was the last; then the step was in vain, and its results are
        not taken.
        """
        needed = kv.length + 2  # with the token that the step itself brings
        most = request.params.max_tokens if request.params is not None else 0
        return needed <= self._ctx_size and (most is None or needed <= request.num_prompt + most)

    def _has_row(self, kv: SequenceKV) -> bool:
        """Make room for one more row, for which kept rows may give way, but no sequence."""
        if self._cache.extend(kv, 1):
            return True
        if self._index is None or not self._index.make_room(self._cache.num_free_pages + 1):
            return False
        return self._cache.extend(kv, 1)

    def _make_room(self, request: Request, count: int, chosen: list[tuple[Request, Segment]]) -> bool:
        """Extend a request's rows; put younger requests back into the queue while pages are short."""
        assert request.kv is not None
        while not self._cache.extend(request.kv, count):
            if self._index is not None:
                if self._index.make_room(self._cache.num_free_pages + 1):
                    continue
                if self._cache.extend(request.kv, count):
                    return True  # its last page, which the index had too, is its own now: no copy is needed
            taken = {id(other) for other, _ in chosen}
            younger = self._running[self._running.index(request) + 1 :]
            victim = next((other for other in reversed(younger) if id(other) not in taken), None)
            if victim is None:
                return self._wait_for_pages(request, bool(taken))
            self._put_back(victim)
        return True

    def _wait_for_pages(self, request: Request, others_run: bool) -> bool:
        """No younger sequence can give way: wait for older ones, or end when there is nobody to wait for."""
        if len(self._running) > 1 or others_run or self._has_guests:
            self._put_back(request)
        else:
            self._end(request, "error", ContextError("the K/V pages are used up; make the context larger (-c)"))
        return False

    def _put_back(self, request: Request) -> None:
        """Back to the front of the queue, to be computed anew. What was emitted stays emitted."""
        kv, request.kv = request.kv, None
        self._running.remove(request)
        self._waiting.appendleft(request)
        assert kv is not None
        if request.shifted_from is not None:
            request.shifted_from = None
            request.recomputed = request.recomputed or "its pages were needed for others"
        self._cache.release(kv)

    def _put_back_unqueued(self) -> None:
        """After a failure: sequences with rows for which no work was queued start anew."""
        for request in [*self._running]:
            if request.kv is not None and request.kv.length != request.num_submitted:
                self._put_back(request)

    @staticmethod
    def _segment(request: Request, count: int) -> Segment:
        """The next `count` tokens, for which the rows were just added."""
        kv, params = request.kv, request.params
        assert kv is not None
        start = kv.length - count
        token_ids = request.token_ids[start : kv.length]
        num_outputs = count if params is None else int(kv.length >= len(request.token_ids))
        place = request.place if num_outputs and request.takes_best else -1
        return Segment(kv, start, token_ids, num_outputs, request.whole_rows, place)

    def _submit(self, chosen: list[tuple[Request, Segment]]) -> int:
        """Queue a ubatch; returns its tokens. One that cannot be queued ends its requests, and no others."""
        requests, segments = zip(*chosen, strict=True)
        try:
            step = self._executor.submit(segments)
        except DeviceError:
            raise
        except Exception as error:
            for request in requests:
                self._end(request, "error", as_pyllm_error(error))
            return 0
        self._in_flight.append(QueuedStep(step, requests, step.num_tokens))
        keeps = self._runs_ahead and step.keeps
        saves_states = self._index is not None and self._cache.recurrent is not None
        for request, segment in chosen:
            request.num_submitted = segment.seq.length
            request.is_kept = keeps and segment.place >= 0
            if saves_states:
                save_state(self._cache, request)
        return step.num_tokens

    # taking results

    def _collect_done(self) -> bool:
        collected = False
        while self._in_flight and self._in_flight[0].step.done.query():
            self._collect()
            collected = True
        return collected

    def _collect(self) -> None:
        """Take the results of the oldest step, which is done."""
        entry = self._in_flight[0]
        logits, found = entry.step.take()
        self._in_flight.popleft()
        if found:
            self._handle_faults(entry, found)
        row, best, publish, sample = 0, logits.best(self._num_tokens), self._cache.publish, self._sample
        for request, segment in zip(entry.requests, entry.step.segments, strict=True):
            seq, start, token_ids, num_outputs, _, _, _ = segment
            first, row = row, row + num_outputs
            if request.kv is not seq or request.finish_reason is not None:
                continue
            try:
                publish(seq, start + len(token_ids))
                if request.sampler is None:
                    self._take_logits(request, logits, first, row)
                elif first < row:
                    sample(request, logits, row - 1, best[row - 1])
            except Exception as error:  # whatever it is, it concerns this request alone
                self._end(request, "error", as_pyllm_error(error))

    def _take_logits(self, request: Request, logits: Logits, start: int, stop: int) -> None:
        """Take rows start..stop-1, which are wanted themselves."""
        request.logits.append(logits.rows(start, stop))
        if request.num_pending == 0 and sum(map(len, request.logits)) == len(request.token_ids):
            self._end(request, "stop")

    def _sample(self, request: Request, logits: Logits, row: int, best: int | None) -> None:
        """Choose a token by a row, of which `best` is the likeliest, as far as that is known."""
        params, token_ids, num_prompt = request.params, request.token_ids, request.num_prompt
        assert params is not None
        # The likeliest is what the sampler would choose, without a row as long as the vocabulary.
        is_known = best is not None and request.takes_best
        sampled = plain_sampled(best) if is_known else self._drawn(request, logits, row)
        if len(token_ids) == num_prompt:
            request.first_token_at = time.perf_counter()
        token_ids.append(sampled.token)
        request.emitted.append(sampled)
        length, most = len(token_ids), params.max_tokens
        if not params.ignore_eos and self._is_end(sampled.token):
            self._end(request, "stop")
        elif most is not None and length >= num_prompt + most:
            self._end(request, "length")
        elif length >= self._ctx_size:
            self._end_of_context(request)

    def _drawn(self, request: Request, logits: Logits, row: int) -> Sampled:
        """The sampler's choice."""
        assert request.sampler is not None and request.params is not None
        if not request.takes_best and logits.ids is not None:
            token = request.sampler.sample_among(logits.values[row], logits.ids[row])
            if token is not None:
                return plain_sampled(token)
        return request.sampler.sample(logits.rows(row, row + 1)[0, : self._num_tokens], request.token_ids)

    def _end_of_context(self, request: Request) -> None:
        """No token has room behind the one that was just sampled."""
        if self._overflow.kind == "stop":
            self._end(request, "length")
        elif self._overflow.kind == "error":
            full = f"the context of {self._ctx_size} tokens is full; make it larger (-c), or choose another --overflow"
            self._end(request, "error", ContextError(full))
        else:
            before = request.num_dropped
            engine = self._executor, self._cache, self._index
            if why_not := shift_in_place(request, self._overflow, self._ctx_size, *engine):
                self._drop_and_put_back(request, why_not)
            request.num_dropped_later += request.num_dropped - before

    def _drop_and_put_back(self, request: Request, why: str) -> None:
        """What rows cannot be shifted for is computed at its new positions: behind what is kept of its beginning."""
        request.recomputed = request.recomputed or why
        if self._index is not None and request.kv is not None:
            self._index.keep(request.token_ids, request.kv)
        self._overflow.drop(request, self._ctx_size)
        self._put_back(request)

    def _handle_faults(self, entry: QueuedStep, found: list[Fault]) -> None:
        """End every sequence that the faults touch, with all that is kept on its pages, and take these out of use."""
        segments, page_size = entry.step.segments, self._cache.page_size
        pages = suspect_pages(found, segments, page_size)
        seq_ids = {fault.seq_id for fault in found}
        if hits_whole_step(found):
            seq_ids.update(segment.seq.seq_id for segment in segments)
        hit = [
            (request, what_hit(kv, found, segments, page_size))
            for request in self._running
            if (kv := request.kv) is not None and (kv.seq_id in seq_ids or not pages.isdisjoint(kv.pages))
        ]
        for request, what in hit:
            error = StaleKVError(f"{what}; the sequence was stopped, nothing of this step was shown")
            self._end(request, "error", error)
        for page in pages:
            self._cache.quarantine(page)
            if self._index is not None:
                self._index.forget(page)

    def _worth_keeping(self, index: PrefixIndex, request: Request) -> list[int]:
        """Without its answer, the prompt; only whole pages of it where many end beside each other in pages that are
        filled in part, which are looked through one by one. But where a state is needed, it is that at the prompt's
        end."""
        if request.keeps_answer:
            return request.token_ids
        prompt = request.token_ids[: request.num_prompt]
        if self._cache.recurrent is not None or index.num_parts(prompt) < FEW_PARTS:
            return prompt
        return prompt[: len(prompt) - len(prompt) % self._cache.page_size]

    def _end(self, request: Request, reason: str, error: PyllmError | None = None) -> None:
        request.finish(reason, error)
        kv, request.kv = request.kv, None
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        if kv is not None:
            with suppress(DeviceError):  # a device that has failed or is closed has no use for its pages
                if self._index is not None and reason != "error":
                    if request.keeps_answer:
                        save_end_of_turn(self._cache, request, kv)
                    self._index.keep(self._worth_keeping(self._index, request), kv)
                self._cache.release(kv)
        request.is_out = True
