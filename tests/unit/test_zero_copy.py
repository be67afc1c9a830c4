"""Ubatches that read their slot in place: when it is free again, and what happens when it is overwritten anyway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.executor import Batch, Segment, Step, TestHooks
from pyllm.faults import FaultKind
from pyllm.kv_cache import SequenceKV
from pyllm.llm import LLM
from tests.engine import open_engine
from tests.ops.lives import LIVES
from tests.refdata import model_path, reference

UBATCH, NUM_UBATCHES = 16, 6
IDS = reference("llama-a")["n300_tokens"][: UBATCH * NUM_UBATCHES].tolist()


@pytest.fixture(params=[life for life in LIVES if life in ("cpu", "emulated-32", "gpu")])
def opened(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens engines that are closed after the test."""
    with ExitStack() as stack:

        def open_one(**options: Any) -> LLM:
            options = {"ring_depth": 2, "inputs": "zero-copy", **options}
            sizes = {"ubatch_size": UBATCH, "ctx_size": len(IDS), "page_size": 8, "inflight": NUM_UBATCHES}
            device = LIVES[request.param]()
            device.checks = device.checks and "hooks" not in options  # PYLLM_CHECK would stop what is to be seen here
            return stack.enter_context(open_engine(model_path("llama-a-f32"), device, **sizes, **options))

        yield open_one


def submit(llm: LLM, kv: SequenceKV) -> Step:
    """The next ubatch; the last asks for logits."""
    start = kv.length
    assert llm._cache.extend(kv, UBATCH)
    return llm._executor.submit([Segment(kv, start, IDS[start : kv.length], int(kv.length == len(IDS)))])


def prefill(llm: LLM, count: int = NUM_UBATCHES) -> tuple[SequenceKV, list[Step]]:
    kv = llm._cache.new_sequence()
    return kv, [submit(llm, kv) for _ in range(count)]


def rows_of(llm: LLM, kv: SequenceKV) -> np.ndarray:
    """K rows of the first layer, which depend on token and position alone."""
    k = llm._device.download(llm._cache.layers[0].k)
    return k[llm._cache.row_ids(kv, np.arange(kv.length))]


def right_rows(opened: Any) -> np.ndarray:
    """The rows of a sound run. Both ways of giving inputs have then loaded their kernels in this process: a driver that
    has to load one may wait for all that is queued, also behind a closed gate."""
    found = []
    for inputs in ("copy", "zero-copy"):
        llm = opened(inputs=inputs)
        kv, steps = prefill(llm)
        assert not any(step.result()[1] for step in steps)
        found.append(rows_of(llm, kv))
    assert (found[0] == found[1]).all()
    return found[0]


def hold_first(llm: LLM) -> Any:
    """A gate in the first ubatch, behind `copy_inputs` and before the model's ops."""
    forward, gates = llm._executor.model.forward, []

    def held(device: Device, batch: Batch) -> object:
        if not gates:
            gates.append(device.gate())
        return forward(device, batch)

    llm._executor.model.forward = held
    return gates


def test_a_slot_is_free_only_when_its_ubatch_has_run(opened: Any) -> None:
    right, llm = right_rows(opened), opened(ring_depth=1)
    gates, kv = hold_first(llm), llm._cache.new_sequence()
    steps = [submit(llm, kv)]
    thread = threading.Thread(target=lambda: steps.append(submit(llm, kv)))
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive()  # the first has been copied, but not run
    gates[0].open()
    thread.join()
    assert not any(step.result()[1] for step in steps)
    assert (rows_of(llm, kv) == right[: kv.length]).all()


def test_overwritten_in_the_middle_of_a_ubatch(opened: Any) -> None:
    """No check before the first op can see it: the one behind the last op does."""
    right = right_rows(opened)
    llm = opened(hooks=TestHooks(drop_wait=True), ring_depth=1)
    gates = hold_first(llm)
    kv, steps = prefill(llm, 2)
    gates[0].open()
    (serial,), others = ([f for f in step.result()[1] if f.kind == FaultKind.SERIAL] for step in steps)
    assert (serial.expected, serial.found) == (1, 2)
    assert not others
    wrong = (rows_of(llm, kv) != right[: kv.length]).any(axis=1)
    assert wrong[:UBATCH].all()  # the report's fault: they went to the rows of the second ubatch,
    assert not wrong[UBATCH:].any()  # which then wrote its own
    missing = {f.position for f in steps[1].result()[1] if f.kind == FaultKind.TAG and f.layer == 0}
    assert missing == set(range(UBATCH))


@pytest.mark.parametrize("enforce", [True, False])
def test_overwritten_before_the_ubatch(opened: Any, enforce: bool) -> None:
    right = right_rows(opened)
    llm = opened(hooks=TestHooks(drop_wait=True, enforce=enforce))
    gate = llm._device.gate()
    kv, steps = prefill(llm)
    gate.open()
    found = [step.result()[1] for step in steps]
    caught = [[f.kind for f in faults].count(FaultKind.SERIAL) for faults in found]
    assert caught == [1] * (NUM_UBATCHES - 2) + [0, 0]
    wrong = (rows_of(llm, kv) != right).any(axis=1)
    assert wrong.tolist() == [True] * UBATCH * (NUM_UBATCHES - 2) + [False] * UBATCH * 2
