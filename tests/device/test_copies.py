"""The stream of copies: beside the compute stream, ordered with it by events alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.device.emulated import EmulatedDevice
from pyllm.device.host import HostDevice
from pyllm.errors import DeviceError
from tests.ops.lives import LIVES


@pytest.fixture(params=[HostDevice, EmulatedDevice])
def device(request: pytest.FixtureRequest) -> Iterator[HostDevice]:
    device = request.param(poison=True)
    yield device
    device.close()


@pytest.fixture(params=[name for name in ("cpu", "gpu") if name in LIVES])
def any_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = LIVES[request.param]()
    yield device
    device.close()


def test_copies_run_while_the_compute_stream_is_held(device: HostDevice) -> None:
    array, buffer = device.upload(np.arange(12, dtype=np.float32).reshape(3, 4)), device.pinned(48)
    gate = device.gate()
    device.copies.copy(array, buffer.memory.view(np.float32).reshape(3, 4))
    device.copies.record().synchronize()
    assert buffer.array.view(np.float32).tolist() == list(range(12))
    gate.open()


def test_a_copy_waits_for_work_of_the_compute_stream(device: HostDevice) -> None:
    array, buffer = device.upload(np.zeros(4, np.float32)), device.pinned(16)
    gate = device.gate()
    device.stream.enqueue(partial(array.fill, 7))
    device.copies.wait(device.record())
    device.copies.copy(array, buffer.memory.view(np.float32))
    done = device.copies.record()
    assert not done.query()
    gate.open()
    done.synchronize()
    assert (buffer.array.view(np.float32) == 7).all()


def test_the_compute_stream_waits_for_a_copy(device: HostDevice) -> None:
    array, buffer = device.upload(np.zeros(4, np.float32)), device.pinned(16)
    buffer.writable().view(np.float32)[:] = 5
    seen: list[float] = []
    gate = device.copies.stream.gate()
    device.copies.copy(buffer.memory.view(np.float32), array)
    device.wait(device.copies.record())
    device.stream.enqueue(lambda: seen.extend(array.tolist()))
    done = device.record()
    assert not done.query()
    gate.open()
    done.synchronize()
    assert seen == [5] * 4


def test_rows_of_several_layers_in_one_copy(any_device: Device) -> None:
    device, rng = any_device, np.random.default_rng(0)
    layers = rng.standard_normal((3, 10, 8)).astype(np.float32)
    array, buffer = device.upload(layers), device.pinned(3 * 4 * 8 * 4)
    page = buffer.memory.view(np.float32).reshape(3, 4, 8)
    device.copies.wait(device.record())
    device.copies.copy(array[:, 5:8], page[:, :3])
    device.copies.copy(page[:, :3], array[:, :3])
    device.copies.record().synchronize()
    assert (device.download(array)[:, :3] == layers[:, 5:8]).all()


def test_streams_wait_for_each_other(any_device: Device) -> None:
    """Up and down many times: each copy finds what the one before it left on the other side."""
    device, buffer = any_device, any_device.pinned(1 << 20)
    array = device.upload(np.zeros(1 << 18, np.float32))
    for number in range(20):
        device.copies.record().synchronize()
        buffer.writable().view(np.float32)[:] = number
        device.copies.copy(buffer.memory.view(np.float32), array)
        device.wait(device.copies.record())
        host = device.pinned(1 << 20)
        device.copy_to_pinned(array, host.array.view(np.float32))
        device.copies.wait(device.record())
        device.synchronize()
        assert (host.array.view(np.float32) == number).all()
        device.release_pinned(host, device.copies.record())


def test_what_does_not_fit_is_refused(device: HostDevice) -> None:
    array, buffer = device.upload(np.zeros((4, 4), np.float32)), device.pinned(64)
    memory = buffer.memory.view(np.float32).reshape(4, 4)
    for source, target in ((array[:3], memory), (array.view(np.int32), memory), (array[:, :2], memory[:, 2:])):
        with pytest.raises(DeviceError, match="cop"):
            device.copies.copy(source.T if source.shape == (4, 2) else source, target)


def test_pinned_memory_is_not_used_again_before_its_copy(device: HostDevice) -> None:
    array, buffer = device.upload(np.zeros(64, np.float32)), device.pinned(256)
    gate = device.copies.stream.gate()
    device.copies.copy(array, buffer.memory.view(np.float32))
    device.release_pinned(buffer, device.copies.record())
    other = device.pinned(256)
    assert other.array.ctypes.data != buffer.array.ctypes.data
    gate.open()
    device.copies.record().synchronize()


def test_streams_that_wait_for_each_other_can_be_closed(device: HostDevice) -> None:
    device.copies.stream.gate()
    device.wait(device.copies.record())
    device.copies.wait(device.record())
    device.close()
    with pytest.raises(DeviceError):
        device.copies.wait(device.record())
