"""What every device offers to the layers above it: memory, streams, events, launches.

The layers above (ops, models, executor, caches) use these classes only. They never import a backend, so a new kind of
device is one new file beside `host.py`.

Vocabulary, the same on all devices:

* An *array* of a device lives in that device's memory. The host must not read or write it; it goes through queued work.
* A *pinned buffer* is memory that both sides may touch. Who may touch it when is decided by events alone.
* A *launch* snapshots its scalars and keeps the addresses of its buffers: what a buffer holds when the work runs is
  what the work sees.
* An *event* marks a point in a stream; it completes when all work queued before it has run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from pyllm.device.memory_check import assert_done
from pyllm.errors import DeviceError, UnsupportedError
from pyllm.ops.op import Op, Target
from pyllm.quants import QuantType


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def query(self) -> bool:
        """True when everything queued before this point has run (or the stream has failed)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until `query()` is true.

        Raises:
            DeviceError: the stream failed before this point; its work is not done.
        """


class CopyStream(ABC):
    """A second stream: copies between pinned and device memory, while the first stream computes.

    It knows nothing of the first stream's work: `wait` says what must have run before. What it copies must stay where
    it is until the event that `record` gives behind the copy.

    Attributes:
        num_bytes: of all copies that were queued.
    """

    num_bytes = 0

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work that is queued here later begins when an event has completed."""

    @abstractmethod
    def copy(self, source: Any, target: Any) -> None:
        """Queue a copy between a device array and a view of a pinned buffer's `memory`, either way.

        Args:
            source, target: of the same shape and dtype; without their first axis, both contiguous.
        """

    @abstractmethod
    def record(self) -> Event:
        """An event behind everything queued here so far."""


class NotCapturable(Exception):
    """What was to be recorded can only be queued."""


class Graph(ABC):
    """Launches that were recorded, to be queued again together."""

    @abstractmethod
    def replay(self) -> None:
        """Queue them behind what is queued already."""


class PinnedBuffer:
    """Memory that the host and the device both touch.

    Args:
        array: [num_bytes] uint8, the memory.
        checks: assert at writes that the device is done with it.

    Attributes:
        array: the host's view; read-only.
        memory: for the device's copies and for test hooks; hosts write through `writable`.
    """

    def __init__(self, array: np.ndarray, checks: bool = False) -> None:
        self.memory = array
        self._checks = checks
        self._last_use: Event | None = None
        self.array = array[:]
        self.array.flags.writeable = False

    def writable(self) -> np.ndarray:
        """A view for the host to write. Nothing that is queued may still use the buffer."""
        if self._checks:
            assert_done(self._last_use, "pinned memory is written")
        return self.memory[:]

    def used_until(self, event: Event) -> None:
        """Queued work uses the buffer until an event has completed."""
        self._last_use = event


class Device(ABC):
    """One device with one compute stream.

    Attributes:
        name: "cpu", "gpu" or "emulated"; what error messages call it.
        description: for people: "cpu", "NVIDIA H200 (sm_90)".
        memory_bytes: how much memory the device has in all.
        weight_types: block types that `upload_weight` accepts.
        target: what kernels are compiled for; None where ops run in their reference form.
        default_ubatch_size: tokens that suit the device.
        activation_dtype: of activations between layers' ops; the residual stream is float32 everywhere.
        wants_candidates: true where bringing whole rows of logits to the host costs more than choosing from them there.
        default_inflight: ubatches to queue ahead: enough to keep the device busy, few enough to stop soon.
        poison: fresh and freed memory is filled with NaN patterns (test runs).
        checks: assertions on memory are made (PYLLM_CHECK); see `memory_check`.
        shares_memory: device memory is the host's: moving something to the host makes no room.
    """

    name: str
    description: str
    target: Target | None
    default_ubatch_size: int
    wants_candidates: bool
    activation_dtype: type
    default_inflight: int
    poison: bool
    checks: bool
    shares_memory: bool
    memory_bytes: int
    weight_types: frozenset[QuantType]

    # memory

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Fresh device memory, C-contiguous, its content undefined (poisoned in test runs)."""

    @abstractmethod
    def release(self, array: Any) -> None:
        """Give back what `empty` returned. The memory is used again only when all work queued so far has run."""

    @abstractmethod
    def pinned(self, num_bytes: int) -> PinnedBuffer:
        """A fresh pinned buffer, its content undefined (poisoned in test runs)."""

    @abstractmethod
    def release_pinned(self, buffer: PinnedBuffer, after: Event | None = None) -> None:
        """Give a pinned buffer back. It is used again only when `after` has completed; default: when all work that was
        queued for computing so far has run."""

    @abstractmethod
    def mapped(self, buffer: PinnedBuffer) -> Any:
        """A pinned buffer as launches see it that read it in place: an array of its bytes, not to be written."""

    @abstractmethod
    def upload(self, array: np.ndarray) -> Any:
        """Copy a host array into fresh device memory; returns when `array` may be changed again."""

    @abstractmethod
    def download(self, array: Any) -> np.ndarray:
        """Wait for all queued work, then copy a device array to the host. For tests and diagnostics."""

    @abstractmethod
    def upload_weight(self, data: np.ndarray, qtype: QuantType, shape: Sequence[int]) -> tuple[Any, QuantType]:
        """Bring a weight into the form in which this device multiplies it.

        Args:
            data: [..., row_bytes] uint8, rows as stored in the file.
            qtype: the block type of `data`; a member of `weight_types`.
            shape: logical shape in elements; the last axis is the row.

        Returns:
            The device array and the type in which it is held: [..., row_bytes] uint8 packed blocks, or
            [..., row_elements] float32 when the type is F32.
        """

    # queued work

    @abstractmethod
    def launch(self, op: Op, *args: Any) -> None:
        """Queue one op. Arrays are passed by address, scalars by value."""

    @abstractmethod
    def copy_to_pinned(self, source: Any, target: np.ndarray) -> None:
        """Queue a copy of a device array into a view of a pinned buffer's `array` with the same shape and dtype."""

    @abstractmethod
    def record(self) -> Event:
        """An event behind everything queued so far."""

    @property
    @abstractmethod
    def copies(self) -> CopyStream:
        """The stream of copies, made when it is first asked for."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work that is queued later begins when an event of the stream of copies has completed."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the launches of one ubatch. A device may hand them over together; order is kept."""
        yield

    def runs(self, op: Op) -> bool:
        """Whether the device can run an op."""
        return self.target is None or op.plan is not None

    def make_batch_invariant(self) -> None:
        """From here on, what ops compute of a token does not depend on how many tokens or sequences there are.

        Raises:
            UnsupportedError: ops run in their reference form here, on a library whose products depend on it.
        """
        if self.target is None:
            raise UnsupportedError(
                f"--batch-invariant (batch_invariant=True) needs a GPU: on {self.name} a library multiplies, which "
                "goes by the number of tokens; leave it out"
            )
        self.target = replace(self.target, batch_invariant=True)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether ops compute the same of a token however many tokens and sequences there are."""
        return self.target is not None and self.target.batch_invariant

    @property
    def captures(self) -> bool:
        """Whether `capture` works."""
        return False

    def capture(self, launches: Callable[[], Any], overlap: bool = False) -> Graph:
        """Call `launches`, but record what it queues instead of running it. It must not allocate.

        Args:
            overlap: kernels may start while the one before them ends, where the device can do that; results are the
                same. It helps where kernels are short.

        Raises:
            NotCapturable: something among it cannot be recorded; nothing has been queued.
        """
        raise DeviceError(f"{self.name} does not capture launches")

    @abstractmethod
    def delay(self, seconds: float) -> None:
        """Test hook: queue a wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until everything queued so far has run."""

    @abstractmethod
    def abandon(self) -> None:
        """Let those who wait for queued work go on soon, before `close`; other threads may use the device meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """Wait until nothing runs, then free everything. Calling it twice is harmless."""
