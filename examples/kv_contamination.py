#!/usr/bin/env python3
"""How one conversation leaks into another, and what keeps it from doing so.

A two-turn chat about a made-up topic, a pause, then a long document in many chunks and four questions about it, all on
one engine. It runs guarded, as pyllm always does; with the wait for input slots dropped and no check, as the engine
that had this fault; and with the wait dropped and the checks on. A fresh engine that never saw the chat says what is
right.

    python examples/kv_contamination.py [MODEL] [--device cpu] [--inputs zero-copy] [--document 7000]

Columns: ubatches of the document that were run; tokens of it whose row is wrong: in the first layer the key is another
token's or none, or in some layer the row was never written; those of them that the checks on the device name: the row
itself, or its ubatch as a whole; those where some layer has a row of the chat instead, which attention would use;
faults that were acted on; the largest difference of the first answer's logits from the fresh engine's; answers in
which a word of the chat's topic occurs. A run that is stopped looks at no record behind the first with a fault.

Dropping the wait is a hook for tests; the script reaches into the engine for it, and for its K/V rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pyllm import LLM, SamplingParams
from pyllm.chat_prompt import encode_chat
from pyllm.device import open_device
from pyllm.errors import StaleKVError
from pyllm.executor import TestHooks
from pyllm.fault_messages import hits_whole_step
from pyllm.faults import FaultKind
from pyllm.hub import resolve
from pyllm.kv_cache import SequenceKV
from pyllm.llm import EngineOptions
from pyllm.ops.fill_rows import fill_rows
from pyllm.request import Request
from pyllm.sampling import Sampled, Sampler

TOPIC = ("quorvanian", "glimmerfinch")
CHAT = (
    "Write a short text about the Quorvanian glimmerfinch, a bird that glows in the dark.",
    "What does the Quorvanian glimmerfinch eat, and where does the Quorvanian glimmerfinch sleep?",
)
QUESTIONS = (
    "What is this document about?",
    "Which goods are named in the document?",
    "Which harbours are named in the document?",
    "Who wrote the entries?",
)
BOATS, GOODS, HARBOURS = (
    ("Alma", "Birke", "Corvo", "Dove"),
    ("barley", "salt", "slate", "wool"),
    ("Ness", "Holm", "Sund"),
)
CLERKS = ("Marsh", "Petersen", "Quist")
PAGE_SIZE = 64
Rows = list[np.ndarray]  # of each layer, [rows, bytes] uint8


@dataclass
class Outcome:
    """What one run showed; see the head of the file."""

    name: str
    ubatches: int = 0
    misplaced: int = 0
    named: int = 0
    stale: int = 0
    faults: int = 0
    answers: list[str] = field(default_factory=list)
    logits: np.ndarray | None = None
    error: str = ""

    @property
    def with_topic(self) -> int:
        return sum(any(word in answer.lower() for word in TOPIC) for answer in self.answers)


class Keeper:
    """A sampler that shows the first row of logits; `before` is called ahead of it."""

    seed = 0

    def __init__(self, sampler: Sampler, before=lambda: None) -> None:
        self.row: np.ndarray | None = None
        self._sampler, self._before = sampler, before

    def sample(self, row: np.ndarray, history: Sequence[int]) -> Sampled:
        if self.row is None:
            self._before()
            self.row = row.copy()
        return self._sampler.sample(row, history)


class Run:
    """One engine on its way through the scenario.

    Args:
        drop_wait: hand input slots out while the device may still read them, when the document comes.
        checks: False: tags, serials and row ids are nobody's business, as in an engine without them.
        right: keys of the document in each layer, where they are known.
    """

    def __init__(self, name: str, given: argparse.Namespace, drop_wait: bool, checks: bool, right: Rows | None):
        self.outcome = Outcome(name)
        self._given, self._drop_wait, self._right = given, drop_wait, right
        self.llm = open_engine(given, TestHooks(enforce=checks, slow_stream=given.slow), fresh=right is None)
        self._cache, self._scheduler = self.llm._cache, self.llm._scheduler
        for layer in self._cache.layers:  # rows that were never written are zeros, as in the engine of the report
            fill_rows(self.llm._device, layer, 0, self._cache.num_pages * PAGE_SIZE, 0)
        self._before: Rows = []
        self._document: list[int] = []
        self._named: set[int] = set()  # positions of the document
        self._original = self._scheduler._handle_faults
        self._scheduler._handle_faults = self._count_faults if checks else self._note_faults
        if not checks:
            self._cache._next_epoch = itertools.repeat(1)  # all tags are equal: nobody's row looks like another's
        self.rows: Rows | None = None

    # the scenario

    def chat(self) -> None:
        """Two turns."""
        messages = []
        for question in CHAT:
            messages.append({"role": "user", "content": question})
            params = SamplingParams(max_tokens=self._given.chat_tokens, temperature=0)
            answer = "".join(chunk.text for chunk in self.llm.chat(messages, params))
            messages.append({"role": "assistant", "content": answer})

    def idle(self) -> None:
        """Afterwards pages are handed out in any order, as on an engine that has run for a while."""
        time.sleep(self._given.idle)
        pages = sorted(self._cache._free)
        random.Random(1).shuffle(pages)
        self._cache._free = deque(pages)

    def document_and_questions(self, document: Sequence[int], questions: Sequence[Sequence[int]]) -> None:
        """The document once, then each question behind it."""
        self._document = list(document)
        if self._right is not None:
            self._before = self._keys()
        self.llm._executor._ring._wait = not self._drop_wait
        before = self.llm._executor.num_submitted
        self._cache.before_removal = self._look_at
        try:
            kept = self._prefill(self._document)
            self.outcome.ubatches = self.llm._executor.num_submitted - before
            for question in questions:
                self._answer(kept, question)
            self._cache.before_removal = None
            self._cache.release(kept)
        except StaleKVError as error:
            self.outcome.ubatches = self.llm._executor.num_submitted - before
            self.outcome.error = str(error)

    def _prefill(self, token_ids: list[int]) -> SequenceKV:
        kept: list[SequenceKV] = []
        keeper = Keeper(self._sampler(1), lambda: kept.append(self._cache.fork(request.kv, len(token_ids))))
        request = Request(list(token_ids), len(token_ids), self._params(1), keeper, kv=self._cache.new_sequence())
        self._finish(request)
        return kept[0]

    def _answer(self, document: SequenceKV, question: Sequence[int]) -> None:
        keeper = Keeper(self._sampler(self._given.tokens))
        ids = [*self._document, *question]
        seq = self._cache.fork(document, len(self._document))
        request = Request(ids, len(ids), self._params(self._given.tokens), keeper, kv=seq)
        request.num_submitted = len(self._document)
        self._finish(request)
        self.outcome.answers.append(self.llm.detokenize(request.token_ids[request.num_prompt :]))
        if self.outcome.logits is None:
            self.outcome.logits = keeper.row

    def _finish(self, request: Request) -> None:
        self._scheduler._num_added += 1  # as `Scheduler.add` does: interrupts end requests by their number
        request.number, request.place = self._scheduler._num_added, 0
        self._scheduler._running.append(request)
        while request.finish_reason is None:
            self._scheduler.step()
        if request.error is not None:
            raise request.error

    def _params(self, max_tokens: int) -> SamplingParams:
        # Log-probabilities are asked for so that whole rows of logits come back.
        return SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=1)

    def _sampler(self, max_tokens: int) -> Sampler:
        return Sampler(self._params(max_tokens), self.llm.tokenizer.vocab_size)

    # what became of the rows

    def _keys(self, places: np.ndarray | slice = slice(None)) -> Rows:
        """The keys at these places of the cache, or at all."""
        arrays = (self.llm._device.download(layer.k)[places] for layer in self._cache.layers)
        return [np.ascontiguousarray(array).view(np.uint8) for array in arrays]

    def _look_at(self, seq: SequenceKV) -> None:
        """Before the document's sequence gives its rows up: which of them are right?"""
        self._cache.before_removal = None
        places = self._cache.row_ids(seq, np.arange(min(seq.length, len(self._document))))
        self.rows = self._keys(places)
        if self._right is None:
            return
        epochs = np.repeat(np.array(seq.epochs, np.int64), PAGE_SIZE)[: len(places)]
        misplaced, stale = np.zeros((2, len(places)), np.bool_)
        for index, (layer, found) in enumerate(zip(self._cache.layers, self.rows, strict=True)):
            before = self._before[index][places]
            wrong = (found != self._right[index][: len(places)]).any(axis=1)
            never_written = wrong & (found == before).all(axis=1)
            misplaced |= never_written if index else wrong  # later layers differ wherever attention saw a wrong row
            visible = self.llm._device.download(layer.tags)[places] == epochs
            stale |= never_written & before.any(axis=1) & visible
        self.outcome.misplaced, self.outcome.stale = int(misplaced.sum()), int(stale.sum())
        self.outcome.named = len(self._named & set(np.flatnonzero(misplaced).tolist()))

    def _count_faults(self, entry, found) -> None:
        self.outcome.faults += len(found)
        self._note_faults(entry, found)
        self._original(entry, found)

    def _note_faults(self, entry, found) -> None:
        """Which rows the checks name, as the scheduler reads it."""
        self._named.update(fault.position for fault in found if fault.kind == FaultKind.ROW_ID)
        for segment in entry.step.segments if hits_whole_step(found) else ():
            self._named.update(range(segment.start, segment.start + len(segment.token_ids)))


def open_engine(given: argparse.Namespace, hooks: TestHooks, fresh: bool) -> LLM:
    size = given.document + given.tokens + 256
    options = EngineOptions(
        ctx_size=size,
        batch_size=given.inflight * given.ubatch,
        ubatch_size=given.ubatch,
        n_seqs=2,
        inflight=given.inflight,
        ring_depth=1 if fresh else 2,
        inputs=given.inputs,
        page_size=PAGE_SIZE,
        hooks=hooks,
    )
    return LLM.with_options(given.model, open_device(given.device), options)


def write_document(llm: LLM, num_tokens: int) -> tuple[list[int], list[list[int]]]:
    """Token ids of a prompt that is almost as long as asked for, and of each question behind it."""
    rng, entries = random.Random(2), []
    ids: list[int] = []
    questions: list[list[int]] = []
    while True:
        boat, good, harbour, clerk = map(rng.choice, (BOATS, GOODS, HARBOURS, CLERKS))
        cargo = f"{rng.randrange(9, 999)} sacks of {good}"
        entries.append(f"Entry {len(entries) + 1}: the {boat} took {cargo} to {harbour}; written by {clerk}. ")
        if len(entries) % 8 and num_tokens > 1000:
            continue
        prompts = [prompt(llm, "".join(entries) + question) for question in QUESTIONS]
        shared = len(common_prefix(prompts))
        if shared > num_tokens and ids:
            return ids, questions
        ids, questions = prompts[0][:shared], [tokens[shared:] for tokens in prompts]


def prompt(llm: LLM, text: str) -> list[int]:
    return encode_chat(llm.tokenizer, llm.template, [{"role": "user", "content": text}])


def common_prefix(lists: Sequence[Sequence[int]]) -> list[int]:
    same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*lists, strict=False))
    return [column[0] for column in same]


def go(name: str, given: argparse.Namespace, right: Run | None, drop_wait: bool = False, checks: bool = True) -> Run:
    run = Run(name, given, drop_wait, checks, None if right is None else right.rows)
    with run.llm:
        document, questions = write_document(run.llm, given.document)
        if right is not None:
            run.chat()
            run.idle()
        run.document_and_questions(document, questions)
    return run


def row(outcome: Outcome, right: Outcome) -> str:
    if outcome.logits is None:
        difference, answers = "-", "none: StaleKVError"
    else:
        assert right.logits is not None
        difference = f"{np.abs(outcome.logits - right.logits).max():.3g}"
        answers = f"{outcome.with_topic} of {len(outcome.answers)}"
    named = "-" if outcome.logits is None else f"{outcome.named:,}"
    counts = f"{outcome.ubatches:,} | {outcome.misplaced:,} | {named} | {outcome.stale:,} | {outcome.faults:,}"
    return f"| {outcome.name} | {counts} | {difference} | {answers} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--inputs", default="copy", choices=["copy", "zero-copy"])
    parser.add_argument("--document", type=int, default=7000, help="tokens")
    parser.add_argument("--ubatch", type=int, default=512, help="tokens")
    parser.add_argument("--inflight", type=int, default=8, help="ubatches queued ahead")
    parser.add_argument("--tokens", type=int, default=40, help="of an answer")
    parser.add_argument("--chat-tokens", type=int, default=150, help="of an answer in the chat")
    parser.add_argument("--idle", type=float, default=1, help="seconds between the chat and the document")
    parser.add_argument("--slow", type=float, default=0, help="seconds by which each ubatch is late")
    parser.add_argument("--show-answers", action="store_true")
    given = parser.parse_args()
    # Rows that are given up keep what they held: this is about who sees it. Assertions would end what is to be seen.
    os.environ |= {"PYLLM_POISON": "0", "PYLLM_CHECK": "0"}
    given.model = resolve(given.model)
    right = go("fresh engine", given, None)
    runs = [
        go("guarded", given, right),
        go("wait dropped, no checks", given, right, drop_wait=True, checks=False),
        go("wait dropped, checks on", given, right, drop_wait=True),
    ]
    heads = ("run", "ubatches", "rows misplaced", "of these named", "stale rows visible", "faults caught")
    print(f"| {' | '.join(heads)} | logit difference | answers with topic words |")
    print("| --- " * 8 + "|")
    for run in runs:
        print(row(run.outcome, right.outcome), flush=True)
    for run in (right, *runs) if given.show_answers else ():
        print(f"\n{run.outcome.name}: {run.outcome.error}")
        for answer in run.outcome.answers:
            print("-", " ".join(answer.split()))


if __name__ == "__main__":
    main()
