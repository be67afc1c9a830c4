"""PYLLM_CHECK=1: what would be a silent fault is an assertion."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from pyllm.device.host import HostDevice
from pyllm.errors import PyllmError
from pyllm.executor import Segment, TestHooks
from pyllm.ops.add import ADD
from pyllm.prompt_cache.pinned_pool import PinnedPool
from pyllm.sampling import SamplingParams
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path, reference

IDS = reference("llama-a")["n70_tokens"].tolist()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    monkeypatch.setenv("PYLLM_CHECK", "1")
    device = HostDevice(poison=True)
    yield device
    device.close()


def test_a_slot_that_is_written_too_early(device: HostDevice) -> None:
    llm = open_engine(model_path("llama-a-f32"), device, ring_depth=1, inflight=4, hooks=TestHooks(drop_wait=True))
    gate, kv = device.gate(), llm._cache.new_sequence()
    assert llm._cache.extend(kv, 2)
    llm._executor.submit([Segment(kv, 0, IDS[:1], 0)])
    with pytest.raises(AssertionError, match="an input slot is written while queued work may still use it"):
        llm._executor.submit([Segment(kv, 1, IDS[1:2], 0)])
    gate.open()


def test_a_request_is_told(device: HostDevice) -> None:
    options = {"ring_depth": 1, "inflight": 4, "ubatch_size": 8, "hooks": TestHooks(drop_wait=True)}
    llm = open_engine(model_path("llama-a-f32"), device, **options)
    gate = device.gate()
    with pytest.raises(PyllmError, match="AssertionError: an input slot is written"):
        tokens(llm.generate(IDS, SamplingParams(max_tokens=1)))
    gate.open()


def test_pinned_memory_is_written_behind_events_only(device: HostDevice) -> None:
    buffer, gate = device.pinned(64), device.gate()
    with pytest.raises(ValueError, match="read-only"):
        buffer.array[0] = 1
    buffer.used_until(device.record())
    with pytest.raises(AssertionError, match="pinned memory is written"):
        buffer.writable()
    gate.open()
    device.synchronize()
    buffer.writable()[0] = 1
    assert buffer.array[0] == 1


def test_memory_that_was_given_back(device: HostDevice) -> None:
    a, b = (device.upload(np.ones(8, np.float32)) for _ in range(2))
    graph = device.capture(lambda: device.launch(ADD, a, a, b))
    graph.replay()
    device.release(b)
    for use in (lambda: device.launch(ADD, a, a, b), graph.replay):
        with pytest.raises(AssertionError, match="add uses memory that was given back"):
            use()
    with pytest.raises(AssertionError, match="is not the device's"):
        device.launch(ADD, a, a, np.ones(8, np.float32))


def test_a_block_whose_event_is_open(device: HostDevice) -> None:
    a = device.empty((8,), np.float32)
    gate = device.gate()
    device.release(a)
    device.memory._free[256] = [device.memory._retired.pop()[1]]  # as if an arena forgot to look at the event
    with pytest.raises(AssertionError, match="a block is handed out while queued work may still use it"):
        device.empty((8,), np.float32)
    gate.open()


def test_a_pinned_block_under_a_copy(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that forgets to look at events, and an owner that writes too early."""
    pool = PinnedPool(device, 64, 64, "a test")
    rows, gate = device.empty((64,), np.uint8), device.gate()
    block = pool.take()
    assert block is not None
    device.copies.wait(device.record())
    device.copies.copy(rows, block.memory)
    block.used(device.copies.record())
    with pytest.raises(AssertionError, match="pinned memory is written while queued work may still use it"):
        block.writable()
    assert pool.take() is None
    monkeypatch.setattr(type(block), "is_idle", True)
    with pytest.raises(AssertionError, match="pinned memory is written while queued work may still use it"):
        pool.take()
    monkeypatch.undo()
    gate.open()
    device.copies.record().synchronize()
    block.writable()[:] = 1


def test_a_block_that_comes_back_behind_an_earlier_event(device: HostDevice) -> None:
    done, a = device.record(), device.empty((8,), np.float32)
    device.synchronize()
    gate = device.gate()
    device.release(a)
    device.memory._retired = deque((done, block) for _, block in device.memory._retired)  # as if events were mixed up
    with pytest.raises(AssertionError, match="a block is taken back while queued work may still use it"):
        device.empty((8,), np.float32)
    gate.open()


@pytest.mark.parametrize("memory", ["memory", "pinned_memory"])
def test_memory_that_is_freed_under_queued_work(device: HostDevice, memory: str) -> None:
    given_back, pinned = device.empty((8,), np.float32), device.pinned(64)
    gate = device.gate()
    device.release(given_back)
    device.release_pinned(pinned)
    arena = getattr(device, memory)
    with pytest.raises(AssertionError, match="a block is freed while queued work may still use it"):
        arena.clear()
    gate.open()
    device.synchronize()
    arena.clear()
    assert arena.bytes_in_use == 0


def test_a_recording_whose_buffers_have_moved(device: HostDevice) -> None:
    with open_engine(model_path("llama-a-f32"), device) as llm:
        executor = llm._executor
        tokens(llm.generate(IDS[:5], greedy(4)))
        captured, moves = dict(executor._captured), executor.workspace.num_moves
        assert captured
        executor._forget_moved = lambda: None  # type: ignore[method-assign]
        with pytest.raises(PyllmError, match="AssertionError: a recording is replayed whose buffers have moved"):
            tokens(llm.generate(IDS, greedy(4)))  # a longer prompt: buffers grow
        assert executor._captured == captured and executor.workspace.num_moves > moves


def test_answers_are_the_same(device: HostDevice) -> None:
    with open_engine(model_path("llama-a-f32"), device) as llm:
        assert device.checks
        assert tokens(llm.generate(IDS, greedy(8))) == reference("llama-a")["n70_greedy"][:8].tolist()
