"""Small runs on a device whose results are known."""

from __future__ import annotations

import numpy as np

from pyllm.device import Device
from pyllm.ops.add import ADD

ROWS, COLUMNS = 3, 257


def numbers(seed: int) -> np.ndarray:
    """[ROWS, COLUMNS] float32."""
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS), np.float32)


def sum_is_right(device: Device) -> bool:
    """Launch one kernel and look at every number that comes out."""
    a, b = numbers(1), numbers(2)
    out = device.empty(a.shape, np.float32)
    device.launch(ADD, device.upload(a), device.upload(b), out)
    return bool((device.download(out) == a + b).all())


def reads_pinned_memory(device: Device) -> bool:
    """Whether a kernel reads pinned host memory in place: what the inputs of every step go through."""
    a, b = numbers(3), numbers(4)
    buffer = device.pinned(a.nbytes)
    pinned = buffer.array.view(np.float32).reshape(a.shape)
    buffer.writable().view(np.float32).reshape(a.shape)[...] = a
    out = device.empty(a.shape, np.float32)
    device.launch(ADD, pinned, device.upload(b), out)
    right = bool((device.download(out) == a + b).all())
    device.release_pinned(buffer)
    return right


def copies_asynchronously(device: Device) -> str:
    """Copy to pinned memory behind held work: it must wait for that, and the host must not. Returns what is wrong."""
    a = numbers(5)
    source = device.upload(a)
    buffer = device.pinned(a.nbytes)
    target = buffer.array.view(np.float32).reshape(a.shape)
    buffer.writable()[:] = 0
    device.synchronize()
    gate = device.gate()  # type: ignore[attr-defined]
    try:
        device.copy_to_pinned(source, target)
        event = device.record()
        early = event.query() or bool(target.any())
    finally:
        gate.open()
    event.synchronize()
    if early:
        return "a copy did not wait for the work before it"
    return "" if (target == a).all() else "a copy brought other bytes"


def replays_graphs(device: Device) -> bool:
    """Whether recorded launches give the same when they are replayed, with what the buffers hold then."""
    a, b = numbers(6), numbers(7)
    first, second, out = device.upload(a), device.upload(b), device.empty(a.shape, np.float32)
    device.launch(ADD, first, second, out)  # compiled before it is recorded
    graph = device.capture(lambda: device.launch(ADD, out, second, out))
    for _ in range(3):
        graph.replay()
    expected = a + b
    for _ in range(3):
        expected = expected + b
    return bool((device.download(out) == expected).all())
