"""A request: one prompt on its way to an answer."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pyllm.device import Event
from pyllm.errors import PyllmError
from pyllm.executor import CANDIDATES
from pyllm.kv_cache import SequenceKV
from pyllm.sampling import Sampled, Sampler, SamplingParams


@dataclass(eq=False, slots=True)  # hundreds are looked at in each step: what is small stays in the host's caches
class Request:
    """One sequence from its prompt to its end. The scheduler owns it while it runs.

    Attributes:
        token_ids: prompt, then what was generated.
        num_prompt: tokens of the prompt; less those that were dropped, of the answer too.
        keep: tokens at the beginning that stay when others have to give way.
        num_dropped, num_dropped_later: tokens that had to give way, see `overflow`; those among them that did so when
            the prompt had been computed.
        num_shifted: those among them behind which rows were shifted; what is behind others was computed anew.
        shifted_from: rows from here on were shifted; None: all are those of the tokens as they stand here.
        recomputed: why rows could not be shifted, or not stay so, and were computed anew; empty: they were not.
        params, sampler: how to choose tokens; None when the logits of every position are wanted instead.
        number: requests are counted as they are added.
        kv: its K/V rows; None while it waits.
        checkpoints: lengths at which the state of recurrent layers is worth keeping.
        bytes_before, bytes_moved: to and from what is kept, by all copies before it was queued, and until it ended; of
            other requests that ran meanwhile too.
        restored_bytes: of what was brought back from the host's memory for it, to go on from.
        ready: it may run when this event has completed; None: at once.
        saved_at: where its state was kept last.
        num_cached: tokens of the prompt whose rows were there already.
        num_submitted: tokens whose rows are queued to be written; `kv.length` outside of a step.
        place: where the device keeps its next token; given out while it runs.
        is_kept: the last step that was queued for it leaves its next token there: another can be queued before the host
            knows that token.
        emitted: generated tokens that the caller has not taken yet.
        logits: logits of every position, in pieces, when there is no sampler.
        keeps_answer: when it has ended, its answer is worth keeping as the beginning of another prompt; the prompt is.
        is_out: it has ended, and the scheduler has nothing of it any more.
        finish_reason: None while it runs; "stop", "length", "interrupted", "cancelled" or "error".
        whole_rows: choosing takes more of a row of logits than its candidates.
        takes_best: choosing takes the likeliest token, see `SamplingParams.takes_best`.
        error: why it ended, with "error".
        first_token_at, started_at, ended_at: seconds of time.perf_counter().
    """

    token_ids: list[int]
    num_prompt: int
    params: SamplingParams | None = None
    sampler: Sampler | None = None
    number: int = 0
    kv: SequenceKV | None = None
    checkpoints: tuple[int, ...] = ()
    bytes_before: int = 0
    bytes_moved: int = 0
    restored_bytes: int = 0
    ready: Event | None = None
    saved_at: int = 0
    keep: int = 0
    num_dropped: int = 0
    num_dropped_later: int = 0
    num_shifted: int = 0
    shifted_from: int | None = None
    recomputed: str = ""
    num_cached: int = 0
    num_submitted: int = 0
    place: int = -1
    is_kept: bool = False
    emitted: deque[Sampled] = field(default_factory=deque)
    logits: list[np.ndarray] = field(default_factory=list)
    keeps_answer: bool = True
    is_out: bool = False
    finish_reason: str | None = None
    error: PyllmError | None = None
    started_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    whole_rows: bool = field(init=False)
    takes_best: bool = field(init=False)

    def __post_init__(self) -> None:
        self.whole_rows = self.params is None or not self.params.chooses_among(CANDIDATES)
        self.takes_best = self.params is not None and self.params.takes_best

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not submitted yet; below 0 when some were submitted that only the device knows."""
        return len(self.token_ids) - (self.kv.length if self.kv is not None else 0)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_logits(self) -> int:
        """Positions of which the logits have come."""
        return sum(map(len, self.logits))

    def take_logits(self, start: int) -> np.ndarray:
        """The piece of logits that holds position `start`, from there on; an empty piece of its length stays behind."""
        end = 0
        for index, rows in enumerate(self.logits):
            end += len(rows)
            if end > start:
                self.logits[index] = np.empty((len(rows), 0), rows.dtype)
                return rows[len(rows) - (end - start) :]
        raise IndexError(start)

    def finish(self, reason: str, error: PyllmError | None = None) -> None:
        """End the request; the first reason stays."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error
            self.ended_at = time.perf_counter()

    def stats(self) -> dict[str, float | int | str | None]:
        """Counts and times of this request. Seconds are wall time: prefill ends with the first generated token."""
        prefill_end = self.first_token_at or self.ended_at
        return {
            "prompt_tokens": self.num_prompt + self.num_dropped,
            "cached_tokens": self.num_cached,
            "evaluated_tokens": self.num_prompt + self.num_dropped_later - self.num_cached,
            "dropped_tokens": self.num_dropped,
            "shifted_tokens": self.num_shifted,
            "recomputed": self.recomputed or None,
            "generated_tokens": self.num_generated,
            "bytes_moved": self.bytes_moved,
            "restored_bytes": self.restored_bytes,
            "prefill_seconds": max(0.0, prefill_end - self.started_at) if self.started_at else 0.0,
            "decode_seconds": max(0.0, self.ended_at - prefill_end) if self.started_at else 0.0,
            "finish_reason": self.finish_reason,
            "seed": self.sampler.seed if self.sampler is not None else None,
        }
