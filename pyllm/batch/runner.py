"""Keeps so many jobs going on an engine, and writes each record as soon as it is complete.

Continuous batching: the engine's scheduler runs `parallel` sequences at the same time and starts the next as soon as
one ends; the runner hands it jobs in the order of the input, a few more than run, so that no place stays empty. When
K/V pages run out, the scheduler puts the youngest back into its queue; nobody here notices.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pyllm.batch.errors import LineError, as_line_error
from pyllm.batch.input import Entry
from pyllm.batch.lines import Form, Job, LineReader, Ticket
from pyllm.batch.output import Output
from pyllm.batch.prefixes import LEAST, SharedPrefixes
from pyllm.batch.records import Result, Usage, error_record, record
from pyllm.errors import DeviceError, PyllmError
from pyllm.generation import Chunk
from pyllm.reasoning import CLOSE, OPEN, opens_reasoning, split_reasoning
from pyllm.sampling import SamplingParams

_MOST_AHEAD = 8  # jobs that wait in the engine's queue
_PROMPT_END = 8  # tokens in which a template's <think> is looked for
_TOGETHER = 0.1  # seconds whose tokens are taken together: many at once cost less
_WORTHWHILE = 8  # tokens: for fewer, nothing is taken while the device computes
_FEW = 8  # lines that are looked at before the device is
_PART = 16  # lines that are encoded before the device is given them
_WAIT = 0.2  # seconds between looks at whether to stop, while there is nothing to do
_READ_AHEAD = 64  # entries


class Generating(Protocol):
    """A generation that was begun, see `pyllm.generation.Generation`."""

    @property
    def has_ended(self) -> bool: ...

    @property
    def num_ready(self) -> int: ...

    def take(self) -> Chunk | None: ...

    def drain(self, marks: Mapping[int, str]) -> tuple[str, int, str | None] | None: ...

    def close(self) -> None: ...

    def usage(self) -> tuple[int, int]: ...


class Engine(Protocol):
    """What the runner needs of `pyllm.llm.LLM`."""

    tokenizer: Any

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def chats_tokens(
        self, conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]]
    ) -> Sequence[Sequence[int] | PyllmError]: ...

    def begin(self, prompt: Sequence[int], params: SamplingParams, keep_answer: bool = True) -> Generating: ...

    def start_prompts(self) -> None: ...

    def advance(self, meanwhile: Callable[[], bool] | None = None) -> bool: ...


@dataclass
class Tally:
    """What has been done.

    Attributes:
        resumed: records that were there before; they are in no other number but `failed`.
        finished: records that were written.
        failed: records that are errors.
        cut_off: answers that ended because the context was full.
        prefix_tokens: computed ahead, once for several lines; in no other number.
        seconds: since the first line was read.
        engine_seconds: of these, in steps of the engine; the rest went into reading, encoding and writing lines.
    """

    resumed: int = 0
    finished: int = 0
    failed: int = 0
    cut_off: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefix_tokens: int = 0
    seconds: float = 0.0
    engine_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens, those of running answers too."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class _Prepared:
    job: Job
    ids: Sequence[int]
    thinks: bool


@dataclass(eq=False, slots=True)
class _Running:
    job: Job
    generation: Generating
    thinks: bool
    num_known: int
    may_stop: bool  # by a stop string
    texts: list[str] = field(default_factory=list)
    tokens: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0


class Runner:
    """One pass over the input.

    Args:
        engine: with places for `parallel` sequences.
        model: its name, for records that show one.
        on_progress: called after each step with what has been done.

    Attributes:
        tally: what has been done so far.
    """

    def __init__(
        self,
        engine: Engine,
        reader: LineReader,
        output: Output,
        parallel: int,
        model: str,
        on_progress: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._output = output
        self._places = parallel + min(parallel, _MOST_AHEAD)
        self._model = model
        self._on_progress = on_progress
        self._prepared: deque[_Prepared] = deque()
        self._running: list[_Running] = []
        self._prefixes = SharedPrefixes()
        self._ahead: tuple[Generating, Sequence[int]] | None = None  # a prefix that is being computed
        self._seen: set[str] = set()
        self._usual = Form.SIMPLE
        self._is_stopping = False
        self._taken_at = 0.0  # when everything was taken last
        self._next_taken = self._num_looked_at = 0  # places in `_running`; of this step
        self._complete: list[Mapping[str, Any]] = []  # records of this step
        controls = engine.tokenizer.control_texts()
        self._marks = {controls[text]: text for text in (OPEN, CLOSE) if text in controls}
        self.tally = Tally(failed=output.num_failed)

    def stop(self) -> None:
        """End soon, without the answers that are not complete. Safe in a signal handler."""
        self._is_stopping = True

    def run(self, entries: Feed) -> bool:
        """Answer all entries; False when it was stopped before.

        Raises:
            PyllmError: it cannot go on. All records that were complete are written.
        """
        started = time.perf_counter()
        try:
            while not self._is_stopping:
                self._begin_more(entries)
                if entries.is_over and self._is_idle:
                    return True
                if not self._is_idle and not self._is_stopping:
                    moved = self._advance()
                    if not self._collect(all_of_it=not moved) and not moved:
                        raise PyllmError("the engine has nothing to do, but lines are not answered: please report this")
                self.tally.seconds = time.perf_counter() - started
                self._on_progress(self.tally)
            return False
        finally:
            for running in self._running:
                running.generation.close()
            if self._ahead is not None:
                self._ahead[0].close()

    def _advance(self) -> bool:
        began = time.perf_counter()
        self._num_looked_at = 0
        moved = self._engine.advance(self._take_meanwhile)
        self.tally.engine_seconds += time.perf_counter() - began
        return moved

    def _take_meanwhile(self) -> bool:
        """While the device computes: take what has come for some of the lines that go on, so that less is left to do
        when they end. Returns whether there may be more."""
        running = self._running
        for _ in range(min(_FEW, len(running) - self._num_looked_at)):
            self._num_looked_at += 1
            self._next_taken = (self._next_taken + 1) % len(running)
            one = running[self._next_taken]
            if one.generation.num_ready >= _WORTHWHILE and not (one.may_stop or one.generation.has_ended):
                self._take(one)
        return self._num_looked_at < len(running)

    @property
    def _is_idle(self) -> bool:
        return not (self._running or self._prepared or self._ahead)

    # beginning

    def _begin_more(self, entries: Feed) -> None:
        """Fill the places, part by part, so that a device has prompts to compute while others are encoded."""
        while not self._is_stopping:
            is_last = self._prepare_part(entries)
            self._begin_prepared(is_last)
            if is_last or self._ahead is not None:
                return
            began = time.perf_counter()
            self._engine.start_prompts()
            self.tally.engine_seconds += time.perf_counter() - began

    def _prepare_part(self, entries: Feed) -> bool:
        """Encode some lines; returns whether there are no more for now. One more than there are places is read, so that
        the last one is compared with what follows it."""
        jobs: list[Job] = []
        try:
            return self._read_part(entries, jobs)
        finally:
            self._prepare(jobs)

    def _read_part(self, entries: Feed, jobs: list[Job]) -> bool:
        for _ in range(_PART):
            if len(self._running) + len(self._prepared) + len(jobs) > self._places or self._is_stopping:
                return True
            entry = entries.next(wait=self._is_idle and not jobs)
            if entry is None:
                return True
            job = self._job(entry)
            if job is not None:
                jobs.append(job)
        return False

    def _begin_prepared(self, is_last: bool) -> None:
        while self._prepared and len(self._running) < self._places and self._ahead is None:
            if len(self._prepared) == 1 and not is_last:
                return  # it is compared with what follows it
            if len(self._prepared) > 1 and self._compute_ahead(self._prepared[0].ids, self._prepared[1].ids):
                return
            self._begin(self._prepared.popleft())

    def _compute_ahead(self, first: Sequence[int], second: Sequence[int]) -> bool:
        prefix = self._prefixes.to_compute(first, second)
        if prefix is None:
            return False
        try:
            self._ahead = self._engine.begin(prefix, SamplingParams(max_tokens=1, temperature=0)), prefix
        except DeviceError:
            raise
        except PyllmError:  # it does not fit, and neither does what follows: the lines say so
            return False
        return True

    def _begin(self, prepared: _Prepared) -> None:
        try:
            generation = self._engine.begin(prepared.ids, prepared.job.params, False)
        except DeviceError:
            raise
        except PyllmError as error:
            self._write_error(prepared.job.ticket, as_line_error(error))
            self._write_complete()
            return
        num_known = self._prefixes.known(prepared.ids)
        may_stop = bool(prepared.job.params.stop)
        self._running.append(_Running(prepared.job, generation, prepared.thinks, num_known, may_stop))

    def _job(self, entry: Entry) -> Job | None:
        """What is to be done for an entry; None when there is a record of it, from earlier or now of what is wrong."""
        ticket = Ticket(entry.line, None, self._usual)
        try:
            ticket = self._reader.ticket(entry, self._usual)
            if self._is_done(ticket):
                return None
            if ticket.id is not None and ticket.key in self._seen:
                identifier, ticket = ticket.id, replace(ticket, id=None)  # in the output, each id is there once
                raise LineError("duplicate_id", f"an earlier line has the id {identifier!r} too")
            if ticket.id is not None:
                self._seen.add(ticket.key)
            return self._reader.job(entry, ticket)
        except LineError as error:
            if not self._is_done(ticket):
                self._write_error(ticket, error)
                self._write_complete()
            return None

    def _is_done(self, ticket: Ticket) -> bool:
        """Whether the output has this line's record from an earlier run.

        Raises:
            PyllmError: what it has for this line is of another one.
        """
        if ticket.id is not None:
            self._usual = ticket.form
        if ticket.line not in self._output.done:
            return False
        found = self._output.done[ticket.line]
        if found is not None and ticket.id is not None and found != ticket.key:
            raise PyllmError(
                f"{self._output.path} has a record of line {ticket.line} with the id {found!r}, the input has "
                f"{ticket.key!r} there; it is another input: choose another -o"
            )
        if ticket.id is not None:
            self._seen.add(ticket.key)
        self.tally.resumed += 1
        return True

    def _prepare(self, jobs: Sequence[Job]) -> None:
        """Encode jobs, those with messages together."""
        chats = [(job.messages, job.template_args) for job in jobs if job.messages is not None]
        encoded = iter(self._engine.chats_tokens(chats) if chats else ())
        for job in jobs:
            found = self._continued(job) if job.messages is None else next(encoded)
            if isinstance(found, PyllmError):
                self._write_error(job.ticket, as_line_error(found))
            else:
                self._prepared.append(_Prepared(job, found, job.messages is not None and self._opens_reasoning(found)))
        self._write_complete()

    def _continued(self, job: Job) -> Sequence[int] | PyllmError:
        try:
            return self._engine.tokenize(job.prompt)
        except DeviceError:
            raise
        except PyllmError as error:
            return error

    def _opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside of a think block; mostly its last tokens show that it does not."""
        last = self._engine.detokenize(ids[-2:])
        if last.isascii() and (shown := last.rstrip()) and shown[-1] != OPEN[-1]:
            return False
        return opens_reasoning(self._engine.detokenize(ids[-_PROMPT_END:]))

    # collecting

    def _collect(self, all_of_it: bool) -> bool:
        """Take what has come and write what is complete; False when nothing was taken.

        Args:
            all_of_it: not only what cannot wait: lines that have ended, and those that a stop string may end.
        """
        now = time.perf_counter()
        if now - self._taken_at >= _TOGETHER:
            all_of_it, self._taken_at = True, now
        before = self.tally.completion_tokens, len(self._running), self._ahead
        self._take_ahead()
        try:
            over = {
                id(running)
                for running in self._running
                if (all_of_it or running.may_stop or running.generation.has_ended) and self._has_ended(running)
            }
        finally:
            self._write_complete()
        if over:
            self._running = [running for running in self._running if id(running) not in over]
        return (self.tally.completion_tokens, len(self._running), self._ahead) != before

    def _has_ended(self, running: _Running) -> bool:
        """Take what has come for a line; whether that was the last of it."""
        try:
            reason = self._take(running)
        except DeviceError:
            raise
        except PyllmError as error:
            self._write_error(running.job.ticket, as_line_error(error), self._usage(running))
            return True
        if reason in ("stop", "length"):
            self._write(running, reason)
        return reason is not None

    def _take_ahead(self) -> None:
        if self._ahead is None:
            return
        generation, prefix = self._ahead
        try:
            chunk = generation.take()
        except DeviceError:
            raise
        except PyllmError:  # the lines meet it, too, where it is more than a passing fault
            self._ahead = None
            self._prefixes.give_up()
            return
        if chunk is not None:
            self._ahead = None
            self._prefixes.add(prefix)
            self.tally.prefix_tokens += len(prefix)

    def _take(self, running: _Running) -> str | None:
        """All that has come; returns the finish reason with the last of it."""
        job, texts = running.job, running.texts
        if job.num_logprobs is None:
            found = running.generation.drain(self._marks if job.messages is not None else {})
            if found is None:
                return None
            text, count, reason = found
            texts.append(text)
            running.num_tokens += count
            self.tally.completion_tokens += count
            return reason
        before, reason = running.num_tokens, None
        while reason is None and (chunk := running.generation.take()) is not None:
            text, token, reason = chunk[:3]
            if text:
                texts.append(text)
            if token is not None:
                running.num_tokens += 1
                if token in self._marks and job.messages is not None:
                    texts.append(self._marks[token])  # a control token: it has no text of its own
                if job.num_logprobs is not None:
                    running.tokens.append(chunk)
        self.tally.completion_tokens += running.num_tokens - before
        return reason

    @staticmethod
    def _usage(running: _Running) -> Usage:
        return Usage(*running.generation.usage(), running.num_tokens)

    def _write(self, running: _Running, reason: str) -> None:
        text, reasoning = "".join(running.texts), None
        if running.job.messages is not None:
            reasoning, text = split_reasoning(text, running.thinks)
        usage = self._usage(running)
        if running.num_known >= LEAST and not usage.cached_tokens:
            self._prefixes.give_up()
        self.tally.prompt_tokens += usage.prompt_tokens
        self.tally.cached_tokens += usage.cached_tokens
        cut_off = reason == "length" and running.num_tokens != running.job.params.max_tokens
        self.tally.cut_off += cut_off
        result = Result(text, reasoning, reason, usage, running.tokens, cut_off)
        self._append(record(running.job, result, self._model, self._engine.tokenizer.token_bytes))

    def _write_error(self, ticket: Ticket, error: LineError, usage: Usage | None = None) -> None:
        self.tally.failed += 1
        self._append(error_record(ticket, error, usage))

    def _append(self, shown: Mapping[str, Any]) -> None:
        self._complete.append(shown)
        self.tally.finished += 1

    def _write_complete(self) -> None:
        """Of lines that end together in one call: each is still whole."""
        complete, self._complete = self._complete, []
        if complete:
            self._output.append(*complete)


class Feed:
    """Entries one by one, for a runner that has other things to do than wait.

    Args:
        entries: read as they are asked for.
        from_pipe: they come when they come: they are read in a thread of their own, a few ahead, and `next` gives up
            after a short while.
    """

    def __init__(self, entries: Iterator[Entry], from_pipe: bool = False) -> None:
        self.is_over = False
        self._entries = entries
        self._queue: queue.Queue[Entry | BaseException | None] | None = None
        if from_pipe:
            self._queue = queue.Queue(_READ_AHEAD)
            threading.Thread(target=self._read, args=(self._queue,), daemon=True).start()

    def _read(self, into: queue.Queue[Entry | BaseException | None]) -> None:
        try:
            for entry in self._entries:
                into.put(entry)
            into.put(None)
        except BaseException as error:
            into.put(error)

    def next(self, wait: bool) -> Entry | None:
        """The next entry; None when there is none now, or none any more (`is_over`).

        Args:
            wait: a moment, when there is none yet.

        Raises:
            PyllmError: the input cannot be read on.
        """
        if self.is_over:
            return None
        if self._queue is None:
            entry = next(self._entries, None)
        else:
            try:
                found = self._queue.get(block=wait, timeout=_WAIT)
            except queue.Empty:
                return None
            if isinstance(found, BaseException):
                raise found
            entry = found
        self.is_over = entry is None
        return entry
