"""The host device: NumPy on the CPU behind an asynchronous stream.

Ops run in their reference form. Weights are expanded to float32 when they are loaded.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np

from pyllm.device.arena import host_arena
from pyllm.device.base import CopyStream, Device, Event, Graph, PinnedBuffer
from pyllm.device.host_stream import Gate, HostEvent, HostStream
from pyllm.device.memory_check import LaunchCheck, enabled
from pyllm.errors import DeviceError
from pyllm.ops.op import Op
from pyllm.quants import FORMATS, QuantType, dequantize

WEIGHT_SHARE = 0.6  # of the machine's memory

_log = logging.getLogger("pyllm")


class HostGraph(Graph):
    """Captured work and the stream that it runs on; with checks, the arrays that it uses."""

    def __init__(self, stream: HostStream, work: list[Any], check: Callable[[], None] = lambda: None) -> None:
        self._stream = stream
        self._work = work
        self._check = check

    def replay(self) -> None:
        self._check()
        self._stream.replay(self._work)


class HostCopyStream(CopyStream):
    """A worker of its own.

    Attributes:
        stream: for test hooks.
    """

    def __init__(self, check: Callable[[str, Any], None]) -> None:
        self.stream = HostStream()
        self._check = check

    def wait(self, event: Event) -> None:
        self.stream.wait(event)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        check_copy(source, target)
        self._check("a copy", (source, target))
        self.num_bytes += source.nbytes
        self.stream.enqueue(partial(np.copyto, target, source))

    def record(self) -> HostEvent:
        return self.stream.record()


def check_copy(source: Any, target: Any) -> None:
    """Raise DeviceError unless a stream of copies can copy one to the other."""
    if source.shape != target.shape or source.dtype != target.dtype:
        raise DeviceError(f"a copy of {source.shape} {source.dtype} to {target.shape} {target.dtype}")
    for array in (source, target):
        if len(array) and not array[0].flags.c_contiguous:
            raise DeviceError("copies are of arrays whose rows are contiguous")


class HostDevice(Device):
    """The CPU.

    Args:
        weight_budget: bytes that weights may take as float32; those beyond stay packed and are decoded at each use,
            which is slower and is said. Default: WEIGHT_SHARE of the machine's memory.
        poison: fill fresh and freed memory with NaN patterns; default: the environment's PYLLM_POISON.
    """

    name = "cpu"
    description = "cpu"
    default_ubatch_size = 512
    activation_dtype: type = np.float32
    wants_candidates = False  # a row of logits is next door
    shares_memory = True
    default_inflight = 2  # the host's share of a ubatch is small: one in work and one behind it is enough

    def __init__(self, poison: bool | None = None, weight_budget: int | None = None) -> None:
        if poison is None:
            poison = os.environ.get("PYLLM_POISON", "0") not in ("", "0")
        self.poison = poison
        self.checks = enabled()
        self.stream = HostStream()
        self._copies: HostCopyStream | None = None
        self.memory = host_arena(poison)
        self.pinned_memory = host_arena(poison)
        self.target = None
        self.graphs = True
        self.memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._weight_budget = int(WEIGHT_SHARE * self.memory_bytes) if weight_budget is None else weight_budget
        self._expanded_bytes = 0
        self._warned = False
        self.weight_types = frozenset(qtype for qtype, form in FORMATS.items() if form.decode)
        self._closed = False

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return self.memory.take(num_bytes)[:num_bytes].view(dtype).reshape(shape)

    def release(self, array: np.ndarray) -> None:
        self.memory.release(array, self.record())

    def pinned(self, num_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(self.pinned_memory.take(num_bytes)[:num_bytes], self.checks)

    def release_pinned(self, buffer: PinnedBuffer, after: Event | None = None) -> None:
        self.pinned_memory.release(buffer.array, after or self.record())

    def mapped(self, buffer: PinnedBuffer) -> np.ndarray:
        view = buffer.array[:]
        view.flags.writeable = False
        return view

    def upload(self, array: np.ndarray) -> np.ndarray:
        target = self.empty(array.shape, array.dtype)
        target[...] = array
        return target

    def download(self, array: np.ndarray) -> np.ndarray:
        self.synchronize()
        return array.copy()

    def upload_weight(self, data: np.ndarray, qtype: QuantType, shape: Sequence[int]) -> tuple[np.ndarray, QuantType]:
        size = 4 * math.prod(shape)
        if qtype != QuantType.F32 and self._expanded_bytes + size > self._weight_budget:
            self._warn_of_packed_weights()
            return self.upload(data), qtype
        self._expanded_bytes += size
        target = self.empty(shape, np.float32)
        dequantize(data, qtype, out=target)
        return target, QuantType.F32

    def _warn_of_packed_weights(self) -> None:
        if not self._warned:
            self._warned = True
            budget = f"{self._weight_budget / 1e9:.1f} GB"
            _log.warning("weights beyond %s as float32 stay packed and are decoded at each use: slower", budget)

    @cached_property
    def _launch_check(self) -> LaunchCheck:
        return LaunchCheck([self.memory, self.pinned_memory])

    def launch(self, op: Op, *args: Any) -> None:
        if self.checks:
            self._launch_check.launch(op.name, args)
        self.stream.enqueue(partial(op.reference, *args))

    def copy_to_pinned(self, source: np.ndarray, target: np.ndarray) -> None:
        if self.checks:
            self._launch_check.launch("a copy to pinned memory", (source, target))
        self.stream.enqueue(partial(np.copyto, _writable(target), source))

    def record(self) -> HostEvent:
        return self.stream.record()

    @property
    def copies(self) -> HostCopyStream:
        if self._copies is None:
            self._copies = HostCopyStream(self._launch_check.launch if self.checks else lambda name, args: None)
        return self._copies

    def wait(self, event: Event) -> None:
        self.stream.wait(event)

    @contextmanager
    def step(self) -> Iterator[None]:
        with self.stream.batch():
            yield

    @property
    def captures(self) -> bool:
        return self.graphs

    def capture(self, launches: Callable[[], Any], overlap: bool = False) -> HostGraph:
        if not self.checks:
            return HostGraph(self.stream, self.stream.capture(launches))
        with self._launch_check.recording() as recorded:
            work = self.stream.capture(launches)
        return HostGraph(self.stream, work, partial(self._launch_check.replay, recorded))

    def delay(self, seconds: float) -> None:
        self.stream.enqueue(partial(time.sleep, seconds))

    def gate(self) -> Gate:
        """Test hook: hold all later work back until the gate is opened."""
        return self.stream.gate()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def abandon(self) -> None:
        streams = [self.stream, *([self._copies.stream] if self._copies is not None else [])]
        for stream in streams:
            stream.stop()
        for stream in streams:
            stream.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.abandon()
        self.memory.clear()
        self.pinned_memory.clear()


def _writable(pinned: np.ndarray) -> np.ndarray:
    """The memory of a view of a pinned buffer, for the stream to write: the view itself is read-only for the host. The
    arena keeps it until the work that is queued now has run."""
    memory = (ctypes.c_ubyte * pinned.nbytes).from_address(pinned.ctypes.data)
    return np.frombuffer(memory, pinned.dtype).reshape(pinned.shape)  # type: ignore[call-overload]
