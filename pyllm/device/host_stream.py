"""An asynchronous stream on the CPU: a worker thread that runs queued work in order.

It behaves like a GPU stream where it matters: work runs later than it is queued, buffers are read when it runs, events
complete in order, and the first failure is final. So the ordering rules of the layers above are exercised on every
machine.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from pyllm.device.base import Event
from pyllm.errors import DeviceError

Work = Callable[[], None]


class HostEvent(Event):
    """Completes when the worker reaches it, also after a failure; `synchronize` then raises."""

    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._reached = threading.Event()
        self._error: BaseException | None = None

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._stream.check_process()
        self._reached.wait()
        if self._error is not None:
            raise _failure(self._error)

    def _complete(self, error: BaseException | None) -> None:
        self._error = error
        self._reached.set()


class Gate:
    """Test hook: work queued behind it waits until `open()` is called."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        self._open.wait()


class HostStream:
    """A FIFO and the thread that empties it.

    One queue entry is a list of work: `batch()` gathers a whole ubatch into one entry, since a round trip through the
    queue costs more than a small op.

    Attributes:
        before_work: test hook, called by the worker before each piece of work.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[Work | HostEvent] | None] = queue.SimpleQueue()
        self._gathering: list[Work | HostEvent] | None = None
        self._error: BaseException | None = None
        self.before_work: Work | None = None
        self._gates: list[Gate] = []
        self._closed = False
        self._closing = threading.Lock()
        self._process = os.getpid()
        self._worker = threading.Thread(target=self._run, name="pyllm-host-stream", daemon=True)
        self._worker.start()

    def enqueue(self, work: Work) -> None:
        """Queue one piece of work.

        Raises:
            DeviceError: earlier work failed; nothing more runs on this stream.
        """
        self.check_process()
        if self._error is not None:
            raise _failure(self._error)
        self._put(work)

    def record(self) -> HostEvent:
        """An event behind all work queued so far. Works on a failed stream too: the event completes with its error."""
        self.check_process()
        event = HostEvent(self)
        self._put(event)
        return event

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Hand over everything queued inside the block as one entry, also when the block raises."""
        gathered: list[Work | HostEvent] = []
        self._gathering = gathered
        try:
            yield
        finally:
            self._gathering = None
            self._hand_over(gathered)

    def capture(self, launches: Work) -> list[Work | HostEvent]:
        """Call `launches`; what it queues is returned, not run."""
        outer, self._gathering = self._gathering, []
        try:
            launches()
            return self._gathering
        finally:
            self._gathering = outer

    def replay(self, recorded: list[Work | HostEvent]) -> None:
        """Queue captured work.

        Raises:
            DeviceError: as `enqueue`.
        """
        self.check_process()
        if self._error is not None:
            raise _failure(self._error)
        if self._gathering is not None:
            self._gathering.extend(recorded)
        else:
            self._hand_over(recorded)

    def gate(self) -> Gate:
        """Test hook: queue a gate that holds all later work back."""
        gate = Gate()
        self._gates.append(gate)
        self.enqueue(gate.wait)
        return gate

    def synchronize(self) -> None:
        """Block until all work queued so far has run; raises DeviceError if any of it failed."""
        self.record().synchronize()

    def wait(self, event: Event) -> None:
        """Hold later work back until an event, perhaps of another stream, has completed; that stream's failure is then
        this one's too."""
        self.enqueue(event.synchronize)

    def close(self) -> None:
        """End the worker after the piece of work that it is at; the rest is dropped, and its events complete.

        Gates are opened, so that a failing test ends too. Other threads may use the stream at the same time.
        """
        self.stop()
        if self._process == os.getpid() and threading.current_thread() is not self._worker:  # a fork has no worker
            self._worker.join()

    def stop(self) -> None:
        """Let the worker end soon, without waiting for it. Streams that wait for each other are all stopped first."""
        if self._error is None:
            self._error = DeviceError("the device is closed")
        for gate in self._gates:
            gate.open()
        with self._closing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def check_process(self) -> None:
        """Raise DeviceError in a fork of the process that opened the stream: the worker did not come along."""
        if self._process != os.getpid():
            raise DeviceError("an engine cannot be used in a fork of the process that opened it; open it there")

    def _put(self, work: Work | HostEvent) -> None:
        if self._gathering is not None:
            self._gathering.append(work)
        else:
            self._hand_over([work])

    def _hand_over(self, entry: list[Work | HostEvent]) -> None:
        with self._closing:
            if not self._closed:
                self._queue.put(entry)
                return
        for work in entry:
            if isinstance(work, HostEvent):
                work._complete(self._error)

    def _run(self) -> None:
        # NaN and infinity are values like any other here: a damaged model gives them, and no warning is due.
        with np.errstate(all="ignore"):
            while (entry := self._queue.get()) is not None:
                for work in entry:
                    self._run_one(work)

    def _run_one(self, work: Work | HostEvent) -> None:
        if isinstance(work, HostEvent):
            work._complete(self._error)
        elif self._error is None:
            try:
                if self.before_work is not None:
                    self.before_work()
                work()
            except BaseException as error:
                error.add_note(f"in {_describe(work)}")
                self._error = error


def _describe(work: Work) -> str:
    function = work.func if isinstance(work, partial) else work
    return getattr(function, "__name__", repr(function))


def _failure(error: BaseException) -> DeviceError:
    if isinstance(error, DeviceError):
        return DeviceError(str(error))
    where = " ".join(getattr(error, "__notes__", []))
    failure = DeviceError(f"the host stream stopped {where}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
