"""Memory behind events: nothing is handed out again, or poisoned, while queued work may read it."""

from __future__ import annotations

import numpy as np
import pytest

from pyllm.device.arena import ALIGNMENT
from pyllm.device.host import HostDevice


@pytest.fixture
def device():
    device = HostDevice(poison=True)
    yield device
    device.close()


def test_fresh_memory_is_poisoned_and_aligned(device: HostDevice) -> None:
    array = device.empty((3, 5), np.float32)
    assert np.isnan(array).all()
    assert array.ctypes.data % ALIGNMENT == 0
    assert array.flags.c_contiguous


def test_released_memory_stays_until_queued_work_has_run(device: HostDevice) -> None:
    array = device.empty((64,), np.float32)
    array[:] = 1
    gate = device.stream.gate()
    device.release(array)
    other = device.empty((64,), np.float32)
    assert other.ctypes.data != array.ctypes.data
    assert (array == 1).all()  # queued work would still read it
    gate.open()
    device.synchronize()
    again = device.empty((64,), np.float32)
    assert again.ctypes.data == array.ctypes.data
    assert np.isnan(again).all()


def test_pinned_memory_follows_the_same_rule(device: HostDevice) -> None:
    buffer = device.pinned(128)
    address = buffer.array.ctypes.data
    gate = device.stream.gate()
    device.release_pinned(buffer)
    assert device.pinned(128).array.ctypes.data != address
    gate.open()
    device.synchronize()
    assert device.pinned(128).array.ctypes.data == address


def test_parts_of_blocks_are_covered(device: HostDevice) -> None:
    array = device.empty((1000,), np.uint8)
    beyond = np.lib.stride_tricks.as_strided(array[500:], (1000,), (1,))
    assert device.memory.covers(array) and device.memory.covers(array[500:])
    assert not device.memory.covers(beyond)
    assert not device.memory.covers(np.zeros(4, np.uint8))
    device.release(array)
    assert not device.memory.covers(array[500:])


def test_a_double_release_is_refused(device: HostDevice) -> None:
    array = device.empty((1,), np.int64)
    device.release(array)
    with pytest.raises(KeyError):
        device.release(array)


def test_bytes_are_counted(device: HostDevice) -> None:
    before = device.memory.bytes_in_use
    array = device.empty((1000,), np.float32)
    assert device.memory.bytes_in_use == before + 4096  # 4,000 rounded up
    device.release(array)
    device.synchronize()
    device.empty((1,), np.float32)
    assert device.memory.bytes_in_use == before + ALIGNMENT
    assert device.memory.high_water >= before + 4096
