"""The executor: runs ubatches in stream order. Owns the input slots, the input block and the outputs in flight.

`submit` returns before the work has run. What the queued work reads from the host is one input slot, and its first op
copies that slot into the input block, whose address never changes; all later ops read the block. Outputs land in pinned
buffers that are read only behind their event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pyllm import faults
from pyllm.device import Device, Event
from pyllm.errors import UsageError
from pyllm.input_block import InputLayout, InputViews
from pyllm.input_slots import InputRing, InputSlot
from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.ops.copy_inputs import copy_inputs
from pyllm.workspace import Workspace


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in a ubatch.

    Attributes:
        seq: its K/V rows; `KVCache.extend` has made room for these tokens.
        start: position of the first token.
        token_ids: the tokens.
        num_outputs: how many of the last tokens need logits.
    """

    seq: SequenceKV
    start: int
    token_ids: Sequence[int]
    num_outputs: int


@dataclass(frozen=True)
class Batch:
    """What a model's forward pass gets: device views and host-side extents of one ubatch.

    Attributes:
        inputs: the input block.
        num_tokens, num_seqs, num_outputs: extents of this ubatch.
        longest: most tokens that one sequence has in it.
        most_rows: rows of the longest sequence, this ubatch's included; an upper bound.
        cache: K/V pages.
        workspace: scratch buffers.
        record: the device's fault record.
    """

    inputs: InputViews
    num_tokens: int
    num_seqs: int
    num_outputs: int
    longest: int
    most_rows: int
    cache: KVCache
    workspace: Workspace
    record: Any


class Model(Protocol):
    """What the executor needs of a model."""

    vocab_size: int

    def forward(self, device: Device, batch: Batch) -> Any:
        """Queue the ops of one ubatch; returns the device array of logits [num_outputs, vocab_size] float32, or None
        when there are no outputs."""


@dataclass(frozen=True)
class TestHooks:
    """Faults on purpose. For tests only; no option leads here.

    Attributes:
        drop_wait: reuse input slots without waiting for their event.
        enforce: False lets a ubatch with a wrong serial run on, as an engine without the check would.
    """

    __test__ = False  # not a test class, whatever pytest thinks of the name

    drop_wait: bool = False
    enforce: bool = True


class Step:
    """A submitted ubatch.

    Attributes:
        segments: what was submitted.
        done: completes when its outputs are there.
    """

    def __init__(self, segments: Sequence[Segment], done: Event, outputs: Outputs) -> None:
        self.segments = segments
        self.done = done
        self._outputs = outputs
        self._result: tuple[np.ndarray, list[faults.Fault]] | None = None

    def result(self) -> tuple[np.ndarray, list[faults.Fault]]:
        """Wait, then take the outputs. May be called again, also after a call that failed half-way.

        Returns:
            logits [num_outputs, vocab_size] float32 (a copy), and the faults that the device reported. With any fault
            the logits must not be used.

        Raises:
            DeviceError: the stream failed.
        """
        if self._result is None:
            self.done.synchronize()
            self._result = self._outputs.logits.copy(), faults.entries(self._outputs.record)
        self._outputs.release()
        return self._result


class Outputs:
    """One pinned buffer for what a ubatch brings back.

    Attributes:
        record: fault record, int32.
        logits: [num_outputs, vocab_size] float32.
    """

    def __init__(self, device: Device, num_outputs: int, vocab_size: int) -> None:
        record_bytes = math.prod(faults.record_shape()) * 4
        self._device = device
        self._released = False
        self._buffer = device.pinned(record_bytes + num_outputs * vocab_size * 4)
        self.record = self._buffer.array[:record_bytes].view(np.int32).reshape(faults.record_shape())
        self.logits = self._buffer.array[record_bytes:].view(np.float32).reshape(num_outputs, vocab_size)

    def release(self) -> None:
        """Give the buffer back, behind the work that is queued by now. Only the first call does."""
        if not self._released:
            self._released = True
            self._device.release_pinned(self._buffer)


class Executor:
    """Runs ubatches of one model on one device.

    Args:
        layout: capacity of a ubatch.
        ring_depth: input slots.
        inflight: ubatches that may be queued and not yet done; bounds how long an interrupt has to wait.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        cache: KVCache,
        layout: InputLayout,
        ring_depth: int,
        inflight: int,
        hooks: TestHooks = TestHooks(),
    ) -> None:
        for name, value in (("ring_depth", ring_depth), ("inflight", inflight)):
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
        self.device = device
        self.model = model
        self.cache = cache
        self.layout = layout
        self.workspace = Workspace(device)
        self._ring = InputRing(device, layout, ring_depth, wait=not hooks.drop_wait)
        self._enforce = hooks.enforce
        self._block = device.upload(np.zeros(layout.num_bytes, np.uint8))
        self._inputs = layout.views(self._block)
        self._step_counter = device.upload(np.zeros(1, np.int64))
        self._record = device.upload(np.zeros(faults.record_shape(), np.int32))
        self._serial = 0
        self._broke_off = False
        self._inflight = inflight
        self._queued: deque[Event] = deque()

    def submit(self, segments: Sequence[Segment]) -> Step:
        """Queue one ubatch. Blocks while too many are in flight, or while the next input slot is still unread.

        Raises:
            UsageError: token ids out of range, or more tokens or sequences than the layout holds.
            DeviceError: the stream has failed.
        """
        self._check(segments)
        self._bound_queue()
        self._resynchronise()
        slot, views = self._ring.acquire()
        self._write_inputs(views, segments)
        slot.seal()
        outputs = Outputs(self.device, sum(segment.num_outputs for segment in segments), self.model.vocab_size)
        try:
            with self.device.step():
                self._queue_inputs(slot)
                self._queue_model(segments, outputs)
                done = self.device.record()
        except BaseException:
            self._broke_off = True
            outputs.release()
            raise
        self._queued.append(done)
        return Step(segments, done, outputs)

    def _queue_inputs(self, slot: InputSlot) -> None:
        try:
            copy_inputs(
                self.device, slot.bytes, self.layout, self._enforce, self._block, self._step_counter, self._record
            )
            self._serial += 1
        finally:
            slot.read_behind(self.device.record())

    def _queue_model(self, segments: Sequence[Segment], outputs: Outputs) -> None:
        counts = [len(segment.token_ids) for segment in segments]
        num_outputs = len(outputs.logits)
        batch = Batch(
            inputs=self._inputs,
            num_tokens=sum(counts),
            num_seqs=len(segments),
            num_outputs=num_outputs,
            longest=max(counts),
            most_rows=max(segment.start + len(segment.token_ids) for segment in segments),
            cache=self.cache,
            workspace=self.workspace,
            record=self._record,
        )
        logits = self.model.forward(self.device, batch)
        if num_outputs:
            self.device.copy_to_pinned(logits, outputs.logits)
        self.device.copy_to_pinned(self._record, outputs.record)

    def _resynchronise(self) -> None:
        """After a submission that broke off: ask the device how many ubatches it has begun."""
        if self._broke_off:
            self._serial = int(self.device.download(self._step_counter)[0])
            self._broke_off = False

    @property
    def is_full(self) -> bool:
        """Whether `submit` would have to wait for the device."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        return len(self._queued) >= self._inflight

    def _bound_queue(self) -> None:
        while self.is_full:
            self._queued[0].synchronize()

    def _check(self, segments: Sequence[Segment]) -> None:
        num_tokens = sum(len(segment.token_ids) for segment in segments)
        if not 0 < num_tokens <= self.layout.max_tokens:
            raise UsageError(f"a ubatch of {num_tokens} tokens; the limit is {self.layout.max_tokens}")
        if len(segments) > self.layout.max_seqs:
            raise UsageError(f"a ubatch of {len(segments)} sequences; the limit is {self.layout.max_seqs}")
        for segment in segments:
            self.check_tokens(segment.token_ids)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise UsageError unless every id is a row of the token embedding."""
        bad = next((token for token in token_ids if not 0 <= token < self.model.vocab_size), None)
        if bad is not None:
            raise UsageError(f"token id {bad} is not in 0..{self.model.vocab_size - 1}")

    def _write_inputs(self, views: InputViews, segments: Sequence[Segment]) -> None:
        views.head_serial[0] = views.tail_serial[0] = self._serial + 1
        views.cu_seqlens[:] = 0
        token, output = 0, 0
        for index, segment in enumerate(segments):
            count = len(segment.token_ids)
            span = slice(token, token + count)
            positions = np.arange(segment.start, segment.start + count)
            views.token_ids[span] = segment.token_ids
            views.positions[span] = positions
            views.token_seq[span] = index
            views.row_ids[span] = self.cache.row_ids(segment.seq, positions)
            wanted = range(token + count - segment.num_outputs, token + count)
            views.out_tokens[output : output + len(wanted)] = wanted
            views.kv_lens[index] = segment.start + count
            views.seq_ids[index] = segment.seq.seq_id
            pages = segment.seq.pages
            views.page_table[index, : len(pages)] = pages
            views.page_epochs[index, : len(pages)] = segment.seq.epochs
            token, output = token + count, output + len(wanted)
            views.cu_seqlens[index + 1 :] = token
