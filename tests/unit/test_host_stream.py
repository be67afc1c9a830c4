"""The host stream: order, events, gates, and what a failure does."""

from __future__ import annotations

import threading

import pytest

from pyllm.device.host_stream import Gate, HostStream
from pyllm.errors import DeviceError


@pytest.fixture
def stream():
    stream = HostStream()
    yield stream
    stream.close()


def test_work_runs_later_and_in_order(stream: HostStream) -> None:
    seen: list[int] = []
    gate = stream.gate()
    for value in range(100):
        stream.enqueue(lambda value=value: seen.append(value))
    event = stream.record()
    assert seen == []
    assert not event.query()
    gate.open()
    event.synchronize()
    assert event.query()
    assert seen == list(range(100))


def test_a_launch_keeps_buffers_and_snapshots_scalars(stream: HostStream) -> None:
    buffer, scalar, seen = [0], 1, []
    gate = stream.gate()
    stream.enqueue(lambda scalar=scalar: seen.append((buffer[0], scalar)))
    buffer[0], scalar = 7, 2
    gate.open()
    stream.synchronize()
    assert seen == [(7, 1)]


def test_events_inside_a_batch_complete_before_its_end(stream: HostStream) -> None:
    with stream.batch():
        first = stream.record()
        gate = stream.gate()
        last = stream.record()
        assert not first.query()  # handed over when the block ends
    first.synchronize()
    assert not last.query()
    gate.open()
    last.synchronize()


def test_a_batch_is_handed_over_when_its_block_raises(stream: HostStream) -> None:
    seen: list[int] = []
    with pytest.raises(KeyError), stream.batch():
        stream.enqueue(lambda: seen.append(1))
        event = stream.record()
        raise KeyError
    event.synchronize()
    assert seen == [1]


def test_the_first_failure_is_final_and_completes_all_events(stream: HostStream) -> None:
    seen: list[int] = []
    gate = stream.gate()
    before = stream.record()

    def broken_op() -> None:
        raise ValueError("no such row")

    stream.enqueue(broken_op)
    stream.enqueue(lambda: seen.append(1))
    after = stream.record()
    gate.open()
    before.synchronize()
    with pytest.raises(DeviceError, match=r"broken_op.*ValueError: no such row"):
        after.synchronize()
    assert after.query()
    with pytest.raises(DeviceError):
        stream.enqueue(lambda: seen.append(2))
    with pytest.raises(DeviceError):
        stream.synchronize()
    assert seen == []


def test_close_ends_the_work_in_hand_and_drops_the_rest() -> None:
    stream, seen, started = HostStream(), [], threading.Event()
    gate = Gate()
    stream.enqueue(lambda: (started.set(), gate.wait(), seen.append(1)))
    stream.enqueue(lambda: seen.append(2))
    event = stream.record()
    started.wait()
    closing = threading.Thread(target=stream.close)
    closing.start()
    gate.open()
    closing.join()
    stream.close()
    assert seen in ([1], [1, 2])  # the gate opened before or after close had marked the stream
    with pytest.raises(DeviceError, match="closed"):
        stream.enqueue(lambda: seen.append(3))
    assert event.query()
