"""The race that this project exists for, on the host device; and what the executor promises otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pyllm import faults
from pyllm.device.host import HostDevice
from pyllm.errors import DeviceError, UsageError
from pyllm.executor import Batch, Segment, Step, TestHooks
from pyllm.faults import Fault, FaultKind
from pyllm.kv_cache import SequenceKV
from pyllm.llm import LLM
from tests.engine import open_engine
from tests.ops.lives import LIVES
from tests.refdata import model_path, reference

UBATCH, NUM_UBATCHES, RING_DEPTH = 16, 8, 2
IDS = reference("llama-a")["n300_tokens"][: UBATCH * NUM_UBATCHES].tolist()


class Engines(list[LLM]):
    """Engines of one test, on devices of one life."""

    life = "cpu"


# Emulated, one of the tiles will do: what is at stake are set_rows, copy_inputs and the tag check.
@pytest.fixture(params=[life for life in LIVES if life in ("cpu", "emulated-32", "gpu")])
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Engines to be closed after the test, its gates open or not."""
    opened = Engines()
    opened.life = request.param
    yield opened
    for llm in opened:
        llm.close()


def engine(engines: Engines, hooks: TestHooks | None = None, ring_depth: int = RING_DEPTH) -> LLM:
    device = LIVES[engines.life]()
    device.checks = device.checks and not (hooks and hooks.drop_wait)  # PYLLM_CHECK would stop what is to be seen here
    llm = open_engine(
        model_path("llama-a-f32"),
        device,
        ubatch_size=UBATCH,
        ctx_size=UBATCH * NUM_UBATCHES,
        page_size=8,
        ring_depth=ring_depth,
        inflight=NUM_UBATCHES,
        hooks=hooks or TestHooks(),
    )
    engines.append(llm)
    return llm


def submit_all(llm: LLM, submitted: list[Step] | None = None) -> tuple[SequenceKV, list[Step]]:
    """A prefill of all ubatches, one after the other; the last asks for logits."""
    steps = submitted if submitted is not None else []
    kv = llm._cache.new_sequence()
    for start in range(0, len(IDS), UBATCH):
        assert llm._cache.extend(kv, UBATCH)
        last = start + UBATCH == len(IDS)
        steps.append(llm._executor.submit([Segment(kv, start, IDS[start : start + UBATCH], int(last))]))
    return kv, steps


def stored_rows(llm: LLM, kv: SequenceKV, layer: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """K, V and whether the tag is right, for each position of a sequence."""
    rows = llm._cache.row_ids(kv, np.arange(kv.length))
    cache = llm._cache.layers[layer]
    epochs = np.repeat(kv.epochs, llm._cache.page_size)[: kv.length]
    k, v, tags = (llm._device.download(array) for array in (cache.k, cache.v, cache.tags))
    return k[rows], v[rows], tags[rows] == epochs


def misplaced(llm: LLM, kv: SequenceKV, right: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    """Positions at which the first layer's rows are not what they must be. (K and V of the first layer depend on token
    and position only, so a wrong row there is a row that landed elsewhere, or never.)"""
    k, v, _ = stored_rows(llm, kv)
    return np.flatnonzero((k != right[0]).any(axis=1) | (v != right[1]).any(axis=1))


def all_faults(steps: list[Step]) -> list[list[Fault]]:
    return [step.result()[1] for step in steps]


def guarded_run(engines: Engines) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Rows of the first layer and last logits, with slots used one at a time."""
    llm = engine(engines, ring_depth=1)
    kv, steps = submit_all(llm)
    results = [step.result() for step in steps]
    assert not any(found for _, found in results)
    return stored_rows(llm, kv), results[-1][0]


def test_without_the_wait_rows_are_misplaced_and_every_one_is_caught(engines: Engines) -> None:
    right, _ = guarded_run(engines)
    llm = engine(engines, TestHooks(drop_wait=True, enforce=False))
    gate = llm._device.gate()
    kv, steps = submit_all(llm)  # nothing waits: each slot is overwritten three times before the device reads it
    gate.open()
    found = all_faults(steps)
    wrong = misplaced(llm, kv, right)
    overwritten = range(NUM_UBATCHES - RING_DEPTH)
    assert wrong.tolist() == list(range(UBATCH * len(overwritten)))

    # By the serial check: exactly the ubatches whose rows are misplaced.
    caught = [
        index
        for index, faults_of_step in enumerate(found)
        if faults_of_step[:1] and faults_of_step[0].kind == FaultKind.SERIAL
    ]
    assert caught == list(overwritten)

    # And, independently, by the tag check: the first sound ubatch looks at all earlier rows and misses each one.
    stale = {f.position for f in found[NUM_UBATCHES - RING_DEPTH] if f.kind == FaultKind.TAG and f.layer == 0}
    assert stale == set(wrong.tolist())


def test_without_the_wait_the_checks_keep_wrong_rows_out(engines: Engines) -> None:
    right, _ = guarded_run(engines)
    llm = engine(engines, TestHooks(drop_wait=True))
    gate = llm._device.gate()
    kv, steps = submit_all(llm)
    gate.open()
    found = all_faults(steps)
    assert all(faults_of_step for faults_of_step in found)
    k, v, tag_is_right = stored_rows(llm, kv)
    written = np.flatnonzero(tag_is_right)
    assert written.tolist() == list(range(UBATCH * (NUM_UBATCHES - RING_DEPTH), len(IDS)))
    assert (k[written] == right[0][written]).all()
    assert (v[written] == right[1][written]).all()


def test_with_the_wait_no_row_is_misplaced(engines: Engines) -> None:
    right, right_logits = guarded_run(engines)
    llm = engine(engines)
    gate = llm._device.gate()
    submitted: list[Step] = []
    result: list[SequenceKV] = []
    thread = threading.Thread(target=lambda: result.append(submit_all(llm, submitted)[0]))
    thread.start()
    deadline = time.monotonic() + 120  # kernels may have to be compiled first
    while len(submitted) < RING_DEPTH and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    thread.join(timeout=0.2)
    assert thread.is_alive()  # it waits for a slot, since the device has read none
    assert len(submitted) == RING_DEPTH
    gate.open()
    thread.join()
    results = [step.result() for step in submitted]
    assert not any(found for _, found in results)
    assert misplaced(llm, result[0], right).size == 0
    assert (results[-1][0] == right_logits).all()


def test_views_of_a_slot_cannot_be_written_after_submission(engines: Engines) -> None:
    llm = engine(engines)
    ring = llm._executor._ring
    slot, views = ring.acquire()
    views.token_ids[0] = 1
    slot.seal()
    for view in vars(views).values():
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        slot.bytes[0] = 0


def test_a_slot_is_free_once_it_is_copied_however_long_the_ubatch_runs(engines: Engines) -> None:
    llm = engine(engines, ring_depth=1)
    forward, gates = llm._executor.model.forward, []

    def held(device: HostDevice, batch: Batch) -> object:
        gates.append(device.gate())  # behind copy_inputs and its event, before the model's ops
        return forward(device, batch)

    llm._executor.model.forward = held
    kv = llm._cache.new_sequence()
    steps = []
    for start in (0, UBATCH):  # the second would block if the slot were held until the first ubatch is done
        assert llm._cache.extend(kv, UBATCH)
        steps.append(llm._executor.submit([Segment(kv, start, IDS[start : start + UBATCH], 0)]))
    assert not steps[0].done.query()
    for gate in gates:
        gate.open()
    assert not any(all_faults(steps))


def test_a_slot_without_its_event_comes_back_only_after_a_synchronisation(engines: Engines) -> None:
    llm = engine(engines, ring_depth=1)
    ring = llm._executor._ring
    ring.acquire()  # and its submission broke off before an event was recorded
    gate, acquired = llm._device.gate(), threading.Event()
    thread = threading.Thread(target=lambda: (ring.acquire(), acquired.set()))
    thread.start()
    assert not acquired.wait(timeout=0.2)
    gate.open()
    thread.join()
    assert acquired.is_set()


def test_a_submission_that_breaks_off_leaves_the_ring_sound(engines: Engines) -> None:
    right, right_logits = guarded_run(engines)
    llm = engine(engines)
    forward = llm._executor.model.forward

    def broken(device: HostDevice, batch: object) -> None:
        raise RuntimeError("in the middle of a step")

    kv = llm._cache.new_sequence()
    assert llm._cache.extend(kv, UBATCH)
    for _ in range(2 * RING_DEPTH + 1):
        llm._executor.model.forward = broken
        with pytest.raises(RuntimeError, match="in the middle"):
            llm._executor.submit([Segment(kv, 0, IDS[:UBATCH], 0)])
    llm._executor.model.forward = forward
    llm._cache.release(kv)
    kv, steps = submit_all(llm)
    results = [step.result() for step in steps]
    assert not any(found for _, found in results)
    assert misplaced(llm, kv, right).size == 0
    assert (results[-1][0] == right_logits).all()


def test_a_failing_op_stops_the_engine(engines: Engines) -> None:
    if engines.life == "gpu":
        pytest.skip("what makes a GPU fail takes the whole process with it")
    llm = engine(engines)

    def broken_op() -> None:
        raise MemoryError("no scratch")

    llm._device.stream.enqueue(broken_op)
    with pytest.raises(DeviceError, match="no scratch"):
        submit_all(llm)[1][-1].result()


@pytest.mark.parametrize("bad", [-1, 512, 2**40])
def test_token_ids_out_of_range_are_refused_before_anything_is_queued(engines: Engines, bad: int) -> None:
    llm = engine(engines)
    kv = llm._cache.new_sequence()
    assert llm._cache.extend(kv, 1)
    with pytest.raises(UsageError, match=str(bad)):
        llm._executor.submit([Segment(kv, 0, [bad], 1)])
    assert llm._executor._serial == 0


def test_a_record_counts_beyond_its_capacity() -> None:
    record = np.zeros(faults.record_shape(), np.int32)
    entries = np.tile(np.array([[FaultKind.TAG, 1, 2, 3, 4, 5, 6, 7]], np.int32), (100, 1))
    faults.report(record, entries)
    faults.report(record, entries)
    assert faults.count(record) == 200
    assert len(faults.entries(record)) == faults.CAPACITY
    assert str(faults.entries(record)[-1]) == (
        "a K/V row is not this sequence's own: sequence 1, position 5, layer 2, page 3, row 4 (expected 6, found 7)"
    )


def test_slots_have_the_pages_that_sequences_have_now() -> None:
    """A slot keeps page tables from step to step: they follow sequences that grow, are cut, fork and change places."""
    rng = np.random.default_rng(5)
    with open_engine(model_path("llama-a-f32"), page_size=4, ctx_size=64, n_seqs=6, ubatch_size=64) as llm:
        cache, executor = llm._cache, llm._executor
        sequences = [cache.new_sequence() for _ in range(4)]
        for _ in range(60):
            for index, seq in enumerate(sequences):
                if seq.length and rng.random() < 0.2:
                    cache.truncate(seq, int(rng.integers(0, seq.num_clean + 1)))
                elif seq.length > 40:
                    cache.release(seq)
                    sequences[index] = cache.new_sequence()
                elif seq.num_clean > 5 and rng.random() < 0.2 and cache.num_free_pages > 8:
                    sequences[index] = cache.fork(seq, int(rng.integers(1, seq.num_clean)))
                    cache.release(seq)
            order = rng.permutation(4)[: rng.integers(1, 5)]
            segments = []
            for index in order:
                seq, count = sequences[index], int(rng.integers(1, 4))
                assert cache.extend(seq, count)
                segments.append(Segment(seq, seq.length - count, IDS[:count], int(rng.integers(0, 2))))
            step = executor.submit(segments)
            step.result()
            slot = executor._ring.slots[(executor._ring._next - 1) % len(executor._ring.slots)]
            views = executor.layout.views(slot.bytes)
            total = 0
            for row, segment in enumerate(segments):
                pages = segment.seq.pages
                assert views.page_table[row, : len(pages)].tolist() == pages
                assert views.page_epochs[row, : len(pages)].tolist() == segment.seq.epochs
                count = len(segment.token_ids)
                positions = np.arange(segment.start, segment.start + count)
                assert (views.positions[total : total + count] == positions).all()
                assert (views.row_ids[total : total + count] == cache.row_ids(segment.seq, positions)).all()
                assert (views.token_seq[total : total + count] == row).all()
                total += count
                assert views.cu_seqlens[row + 1] == total
                cache.publish(segment.seq, segment.seq.length)
