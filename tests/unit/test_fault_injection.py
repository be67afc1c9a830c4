"""Inputs that go wrong between submission and execution: StaleKVError before any text of that step, others go on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pyllm.device import Device
from pyllm.errors import StaleKVError
from pyllm.executor import Segment, TestHooks
from pyllm.faults import CAPACITY, Fault, FaultKind
from pyllm.input_block import InputViews
from pyllm.llm import LLM, Chunk
from pyllm.scheduler import QueuedStep
from tests.engine import greedy, open_engine, tokens
from tests.ops.lives import LIVES
from tests.refdata import PROMPTS, model_path, reference

REF = reference("llama-a")
PROMPT = {name: REF[f"{name}_tokens"].tolist() for name in PROMPTS}
ANSWER = {name: REF[f"{name}_greedy"].tolist() for name in PROMPTS}
PAGE_SIZE, CTX_SIZE = 8, 128


class Corruption:
    """Changes the slot of the first ubatch that has tokens of a sequence from a position on.

    Attributes:
        armed: the sequence; 0 for none.
    """

    def __init__(self, what: str) -> None:
        self.what, self.armed, self.done = what, 0, False

    def __call__(self, serial: int, views: InputViews) -> None:
        index = next((i for i, seq in enumerate(views.seq_ids.tolist()) if seq == self.armed), None)
        if not self.armed or self.done or index is None or views.cu_seqlens[index] == views.cu_seqlens[index + 1]:
            return
        self.done = True
        getattr(self, self.what)(views, index, int(views.cu_seqlens[index]))

    def serial(self, views: InputViews, index: int, token: int) -> None:
        views.head_serial[0] = views.tail_serial[0] = views.head_serial[0] + 1

    def tail(self, views: InputViews, index: int, token: int) -> None:
        views.tail_serial[0] += 3  # as an overwriting that is half done

    def row_id(self, views: InputViews, index: int, token: int) -> None:
        views.row_ids[token] += 1

    def position(self, views: InputViews, index: int, token: int) -> None:
        views.positions[token] -= 1

    def page(self, views: InputViews, index: int, token: int) -> None:
        views.page_table[index, 0], views.page_table[index, 1] = views.page_table[index, 1], views.page_table[index, 0]

    def epoch(self, views: InputViews, index: int, token: int) -> None:
        views.page_epochs[index, 0] += 1


def opened(life: str, inputs: str, corruption: Corruption, **more: Any) -> LLM:
    device: Device = LIVES[life]()
    options: dict[str, Any] = {"page_size": PAGE_SIZE, "ctx_size": CTX_SIZE, "n_seqs": 2, "ubatch_size": 32, **more}
    hooks = TestHooks(corrupt=corruption, slow_stream=0.001)
    return open_engine(model_path("llama-a-f32"), device, inputs=inputs, hooks=hooks, **options)


def first(stream: Iterator[Chunk], count: int) -> list[int | None]:
    return [next(stream).token for _ in range(count)]


CASES = [
    ("serial", "the inputs of ubatch"),
    ("tail", "the inputs of ubatch"),
    ("row_id", "a row id is wrong"),
    ("position", "a row id is wrong"),
    ("page", "a K/V row is not this sequence's own"),
    ("epoch", "a K/V row is not this sequence's own"),
]
WHERE = {
    "the inputs of ubatch": r"sequence 2, positions \d+ to \d+, all layers, pages \[\d+",
    "a row id is wrong": r"sequence 2, position \d+, layer \d+, page \d+, row \d+",
    "a K/V row is not this sequence's own": r"sequence 2, position \d+, layer \d+, page \d+, row \d+",
}
RUNS = [("cpu", inputs, *case) for inputs in ("copy", "zero-copy") for case in CASES]
RUNS += [
    ("emulated-32", "zero-copy", *CASES[0]),
    ("emulated-32", "copy", *CASES[2]),
    ("emulated-32", "zero-copy", *CASES[5]),
]


@pytest.mark.parametrize(("life", "inputs", "what", "message"), RUNS)
def test_a_corrupted_slot(life: str, inputs: str, what: str, message: str) -> None:
    """A neighbour is decoding; the other sequence is hit while it decodes."""
    prompt, answer = PROMPT["n70"][:20], 6
    corruption = Corruption(what)
    with opened(life, inputs, corruption) as llm:
        right = tokens(llm.generate(prompt, greedy(answer)))  # sequence 1
        victim = llm.generate(prompt, greedy(answer))
        shown = first(victim, 2)
        corruption.armed = 2
        with pytest.raises(StaleKVError, match=message) as raised:
            shown += [chunk.token for chunk in victim]
        assert corruption.done and re.search(WHERE[message], str(raised.value)), raised.value
        assert "nothing of this step was shown" in str(raised.value)
        assert shown == right[: len(shown)]  # not one token of the step that went wrong, and none behind it
        quarantined = set(llm._cache.quarantined)
        assert quarantined
        assert tokens(llm.generate(prompt, greedy(answer))) == right
        assert llm._cache.quarantined == quarantined
        assert llm._cache.num_free_pages == llm._cache.num_pages - len(quarantined)


@pytest.mark.parametrize("inputs", ["copy", "zero-copy"])
@pytest.mark.parametrize(("what", "message"), CASES[2:])
def test_others_go_on(what: str, message: str, inputs: str) -> None:
    corruption = Corruption(what)
    with opened("cpu", inputs, corruption) as llm:
        neighbour = llm.generate(PROMPT["n5"], greedy(20))  # sequence 1
        found = first(neighbour, 2)
        victim = llm.generate(PROMPT["n70"], greedy(8))
        next(victim)
        corruption.armed = 2
        with pytest.raises(StaleKVError, match=message):
            tokens(victim)
        found += [chunk.token for chunk in neighbour]
        assert found == ANSWER["n5"][:20]


@pytest.mark.parametrize("inputs", ["copy", "zero-copy"])
def test_a_wait_that_is_dropped(inputs: str) -> None:
    """A prompt of several ubatches, whose slots are overwritten before they are read: no token of it is shown."""
    device = LIVES["cpu"]()
    device.checks = False  # PYLLM_CHECK would stop it earlier
    hooks = TestHooks(drop_wait=True, slow_stream=0.02)
    sizes = {"page_size": PAGE_SIZE, "ctx_size": CTX_SIZE, "ubatch_size": 8, "ring_depth": 2, "inflight": 8}
    with open_engine(model_path("llama-a-f32"), device, inputs=inputs, hooks=hooks, **sizes) as llm:
        with pytest.raises(StaleKVError, match=r"overwritten by those of ubatch \d+: sequence 1, positions 0 to 7"):
            tokens(llm.generate(PROMPT["n70"], greedy(8)))
        assert llm._cache.quarantined
        assert tokens(llm.generate(PROMPT["n5"], greedy(3))) == ANSWER["n5"][:3]  # one ubatch at a time: no race


def test_a_sequence_on_a_page_of_another_ones_step() -> None:
    """It is not part of the step that went wrong as a whole, but a page of its own is named."""
    with opened("cpu", "copy", Corruption("serial")) as llm:
        victim, bystander = (llm.generate(PROMPT[name], greedy(8)) for name in ("n70", "n5"))
        next(victim)
        next(bystander)
        first, second = llm._scheduler._running
        segment = Segment(first.kv, 70, [1], 1)
        entry = QueuedStep(SimpleNamespace(segments=[segment]), (first,), 1)
        serial = Fault(FaultKind.SERIAL, -1, -1, -1, -1, -1, 3, 5)
        tag = Fault(FaultKind.TAG, 99, 1, second.kv.pages[0], 2, 2, 3, 4)
        llm._scheduler._handle_faults(entry, [serial, tag])
        with pytest.raises(
            StaleKVError, match=r"overwritten by those of ubatch 5: sequence 1, positions 70 to 70, all"
        ):
            tokens(victim)
        with pytest.raises(StaleKVError, match="sequence 99, position 2, layer 1, page"):
            tokens(bystander)


SERIAL = Fault(FaultKind.SERIAL, -1, -1, -1, -1, -1, 3, 5)


def kept_pages(llm: LLM) -> set[int]:
    assert llm._scheduler._index is not None
    return {node.page for node in llm._scheduler._index._tree.nodes()}


@pytest.mark.parametrize("what", ["serial", "tail"])
def test_kept_rows_of_a_step_without_its_inputs(what: str) -> None:
    """The page that it was to write serves nobody any more; those before it are as right as they were."""
    prompt, corruption = PROMPT["n70"], Corruption(what)
    with opened("cpu", "copy", corruption, prefix_cache=True) as llm:
        right = tokens(llm.generate(prompt, greedy(6)))
        kept = kept_pages(llm)
        victim = llm.generate(prompt, greedy(6))
        next(victim)
        corruption.armed = llm._scheduler._running[0].kv.seq_id
        with pytest.raises(StaleKVError):
            tokens(victim)
        assert corruption.done and llm._cache.quarantined
        assert not llm._cache.quarantined & kept_pages(llm)
        assert kept_pages(llm) >= kept - llm._cache.quarantined
        assert tokens(llm.generate(prompt, greedy(6))) == right


@pytest.mark.parametrize("faults", [[SERIAL], [Fault(FaultKind.TAG, 1, 0, -1, 0, 0, 1, 2)] * CAPACITY])
def test_a_step_that_is_hit_as_a_whole_hits_who_shares_its_pages(faults: list[Fault]) -> None:
    """A bystander has the first rows of the page that the step was to write, and so has the index."""
    prompt = PROMPT["n70"]
    with opened("cpu", "copy", Corruption("serial"), prefix_cache=True) as llm:
        tokens(llm.generate(prompt, greedy(1)))
        victim, bystander = (llm.generate([*prompt[:64], *end], greedy(20)) for end in ([5, 6], [7, 8]))
        next(victim)
        next(bystander)
        first, second = llm._scheduler._running
        shared = first.kv.pages[7]  # rows 56 to 63
        assert shared == second.kv.pages[7] and shared in kept_pages(llm)
        number, suspects = second.kv.seq_id, {shared} if faults == [SERIAL] else {*first.kv.pages}
        segment = Segment(first.kv, 60, [1], 1)
        entry = QueuedStep(SimpleNamespace(segments=[segment]), (first,), 1)
        llm._scheduler._handle_faults(entry, faults)
        with pytest.raises(StaleKVError):
            tokens(victim)
        with pytest.raises(StaleKVError, match=rf"sequence {number} shares pages \[.*{shared}"):
            tokens(bystander)
        assert llm._cache.quarantined == suspects and not suspects & kept_pages(llm)
