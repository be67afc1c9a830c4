"""The executor: runs ubatches in stream order. Owns the input slots, the input block and the outputs in flight.

`submit` returns before the work has run. What the queued work reads from the host is one input slot, and its first op
copies that slot into the input block, whose address never changes; all later ops read the block. Outputs land in pinned
buffers that are read only behind their event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import and_, attrgetter, getitem, itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from pyllm import faults
from pyllm.device import Device, Event
from pyllm.device.base import Graph, NotCapturable
from pyllm.errors import UsageError
from pyllm.input_block import IN_PLACE, InputLayout, InputViews
from pyllm.input_slots import InputRing, InputSlot
from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.ops.check_inputs import check_inputs
from pyllm.ops.copy_inputs import copy_inputs
from pyllm.ops.keep_tokens import keep_tokens
from pyllm.ops.shift_rows import KeyTurn
from pyllm.ops.top_k import scratch_columns, top_k
from pyllm.workspace import Workspace

CANDIDATES = 64  # logits of a row that come back where the device chooses them: enough for top-k as people use it
MIN_BUCKET = 256  # rows
FEW_SEQS = 8  # up to here each number of sequences that decode is a shape of its own
OVERLAP_TOKENS = 64  # up to here kernels are so short that their starts count; see BENCHMARKS.md
MAX_CAPTURED = 64  # recordings that are kept; of decode steps there are a few, of other shapes there may be many
MAX_WARM = 4096  # shapes that are remembered as run once

_SEQ_ID, _PAGES, _EPOCHS, _LAST = attrgetter("seq_id"), attrgetter("pages"), attrgetter("epochs"), itemgetter(-1)
_NO_TABLE = (0, 0, 0)  # numbers of sequences begin with 1


class Segment(NamedTuple):
    """Consecutive tokens of one sequence in a ubatch.

    Attributes:
        seq: its K/V rows; `KVCache.extend` has made room for these tokens.
        start: position of the first token.
        token_ids: the tokens.
        num_outputs: how many of the last tokens need logits.
        whole_rows: False when the CANDIDATES largest logits of each row will do.
        place: where the likeliest token behind the last one is kept on the device; -1: nowhere.
        source: place of the only token, which the host need not know; `token_ids` then has any token in its stead.
    """

    seq: SequenceKV
    start: int
    token_ids: Sequence[int]
    num_outputs: int
    whole_rows: bool = True
    place: int = -1
    source: int = -1


class Columns:
    """The segments of one ubatch, field by field: a step of hundreds of them takes a device a millisecond or two, and
    what is done for all at once takes the host least.

    Attributes:
        seqs: [S], as in the segments.
        token_ids: [T], of all segments.
        starts, counts, wanted, places, sources: [S] int64: first positions, numbers of tokens and of outputs; as in the
            segments.
        ends: [S] int64, tokens up to the end of each segment.
        num_tokens, num_outputs: of all.
        needs_rows: some output needs its whole row.
        decodes: each segment has one token and one output.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        seqs, starts, tokens, wanted, whole, places, sources = zip(*segments, strict=True)
        self.seqs: tuple[SequenceKV, ...] = seqs
        self.token_ids: list[int] = [*chain.from_iterable(tokens)]
        counts = [*map(len, tokens)]
        numbers = np.array((starts, counts, wanted, places, sources), np.int64)
        self.starts, self.counts, self.wanted, self.places, self.sources = numbers
        self.ends = np.cumsum(self.counts)
        self.num_tokens, self.num_outputs = len(self.token_ids), sum(wanted)
        self.needs_rows = True in whole and any(map(and_, map(bool, wanted), whole))
        self.decodes = self.num_tokens == len(seqs) == self.num_outputs == counts.count(1) == wanted.count(1)


@dataclass(frozen=True)
class Batch:
    """What a model's forward pass gets: device views and host-side extents of one ubatch.

    Attributes:
        inputs: the input block; with zero-copy its tables lie in a slot.
        slot: number of the slot that `inputs` lies in; 0: in the block alone.
        by_token: tables in which each token is a sequence of its own, for devices that are batch-invariant.
        num_tokens, num_seqs, num_outputs: extents of this ubatch; the last tokens may be nobody's, in as many sequences
            without tokens.
        longest: most tokens that one sequence has in it.
        most_rows: rows of the longest sequence, this ubatch's included; an upper bound.
        all_rows: the same of all sequences together; 0 where each has one token, so that such steps, which do not ask,
            are recorded less often.
        cache: K/V pages, and recurrent states where the model has any.
        workspace: scratch buffers.
        record: the device's fault record.
    """

    inputs: InputViews
    num_tokens: int
    num_seqs: int
    num_outputs: int
    longest: int
    most_rows: int
    all_rows: int
    cache: KVCache
    workspace: Workspace
    record: Any
    slot: int = 0
    by_token: InputViews | None = None


class Model(Protocol):
    """What the executor needs of a model, and those that shift its rows."""

    vocab_size: int
    fixed_positions: ClassVar[str]

    def key_turns(self, device: Device, num_positions: int) -> list[KeyTurn]:
        """See `Decoder.key_turns`."""

    def forward(self, device: Device, batch: Batch) -> Any:
        """Queue the ops of one ubatch; returns the device array of logits [num_outputs, vocab_size] float32, or None
        when there are no outputs."""


@dataclass(frozen=True)
class TestHooks:
    """Faults on purpose. For tests only; no option leads here.

    Attributes:
        drop_wait: reuse input slots without waiting for their event.
        enforce: False lets a ubatch with a wrong serial run on, as an engine without the check would.
        slow_stream: seconds by which each ubatch is late, so that the host runs far ahead.
        corrupt: called with a ubatch's serial and writable views of its slot once it is queued; see `InputSlot.forge`.
    """

    __test__ = False  # not a test class, whatever pytest thinks of the name

    drop_wait: bool = False
    enforce: bool = True
    slow_stream: float = 0
    corrupt: Callable[[int, InputViews], None] | None = None


class Step:
    """A submitted ubatch.

    Attributes:
        segments: what was submitted.
        done: completes when its outputs are there.
        num_tokens: of all segments.
        keeps: it leaves tokens at the places of its segments: candidates are chosen on the device.
    """

    def __init__(
        self, segments: Sequence[Segment], done: Event, outputs: Outputs, num_tokens: int, keeps: bool
    ) -> None:
        self.segments = segments
        self.done = done
        self.num_tokens = num_tokens
        self.keeps = keeps
        self._outputs = outputs
        self._result: tuple[Logits, list[faults.Fault]] | None = None

    def take(self) -> tuple[Logits, list[faults.Fault]]:
        """Wait, then take the outputs. May be called again, also after a call that failed half-way.

        Returns:
            A copy of the logits, and the faults that the device reported. With any fault the logits must not be used.

        Raises:
            DeviceError: the stream failed.
        """
        if self._result is None:
            self.done.synchronize()
            self._result = self._outputs.logits(), faults.entries(self._outputs.record)
        self._outputs.release()
        return self._result

    def result(self) -> tuple[np.ndarray, list[faults.Fault]]:
        """`take`, with the logits as rows: [num_outputs, vocab_size] float32."""
        logits, found = self.take()
        return logits.rows(0, len(logits.values)), found


@dataclass(frozen=True)
class Logits:
    """What a step brought back of its logits.

    Attributes:
        values: [num_outputs, vocab_size] float32, or [num_outputs, num_candidates] in descending order.
        ids: [num_outputs, num_candidates] int32, columns of the candidates; None for whole rows.
        vocab_size: columns of a whole row.
    """

    values: np.ndarray
    ids: np.ndarray | None
    vocab_size: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [n, vocab_size] float32; -infinity for what is not among the candidates."""
        values = self.values[start:stop]
        if self.ids is None:
            return values
        rows = np.full((len(values), self.vocab_size), -np.inf, np.float32)
        np.put_along_axis(rows, self.ids[start:stop], values, axis=1)
        return rows

    def best(self, num_tokens: int) -> list[int | None]:
        """For each row the column below num_tokens with the largest value, the first of equals, where the candidates
        show it and it is finite."""
        if self.ids is None or not self.ids.size:
            return [None] * len(self.values)
        inside = self.ids < num_tokens
        first = inside.argmax(axis=1)[:, None]
        tokens = np.take_along_axis(self.ids, first, axis=1)[:, 0]
        known = inside.any(axis=1) & np.isfinite(np.take_along_axis(self.values, first, axis=1)[:, 0])
        if known.all():
            return tokens.tolist()  # type: ignore[no-any-return]
        return [token if is_known else None for token, is_known in zip(tokens.tolist(), known.tolist(), strict=True)]


class Outputs:
    """One pinned buffer for what a ubatch brings back: the fault record, and logits or the candidates among them.

    Args:
        num_rows: that come back.
        num_candidates: 0 for whole rows of logits.
        num_outputs: rows that somebody asked for, the first ones.

    Attributes:
        record: fault record, int32.
        arrays: [logits [num_rows, vocab_size] float32], or values and ids of the candidates.
    """

    def __init__(self, device: Device, num_rows: int, vocab_size: int, num_candidates: int, num_outputs: int) -> None:
        record_bytes = math.prod(faults.record_shape()) * 4
        shape = (num_rows, num_candidates or vocab_size)
        self._num_outputs = num_outputs
        size = math.prod(shape) * 4
        self._device = device
        self._vocab_size = vocab_size
        self._released = False
        self.num_candidates = num_candidates
        self._buffer = device.pinned(record_bytes + size * (2 if num_candidates else 1))
        pinned = self._buffer.array
        self.record = pinned[:record_bytes].view(np.int32).reshape(faults.record_shape())
        values = pinned[record_bytes : record_bytes + size].view(np.float32).reshape(shape)
        self.arrays: list[np.ndarray] = [values]
        if num_candidates:
            self.arrays.append(pinned[record_bytes + size :].view(np.int32).reshape(shape))

    def logits(self) -> Logits:
        """A copy."""
        values, *ids = (array[: self._num_outputs].copy() for array in self.arrays)
        return Logits(values, ids[0] if ids else None, self._vocab_size)

    def release(self) -> None:
        """Give the buffer back, behind the work that is queued by now. Only the first call does."""
        if not self._released:
            self._released = True
            self._device.release_pinned(self._buffer)


@dataclass(frozen=True)
class CapturedStep:
    """The model's launches for one bucket of shapes, recorded.

    Attributes:
        outputs: where they leave their results on the device.
    """

    graph: Graph
    outputs: list[Any]


class Executor:
    """Runs ubatches of one model on one device.

    Args:
        layout: capacity of a ubatch.
        ring_depth: input slots.
        inflight: ubatches that may be queued and not yet done; bounds how long an interrupt has to wait.
        zero_copy: ops read the tables of K/V rows in the slot; it is free again when the ubatch has run.
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
        zero_copy: bool = False,
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
        self._hooks = hooks
        self._block = device.upload(np.zeros(layout.num_bytes, np.uint8))
        self._zero_copy = zero_copy
        self._inputs = self._views_by_slot()
        self._kept = device.upload(np.zeros(layout.max_seqs, np.int32))
        self._step_counter = device.upload(np.zeros(1, np.int64))
        self._record = device.upload(np.zeros(faults.record_shape(), np.int32))
        self._serial = 0
        self._broke_off = False
        self._warm: set[tuple[int, ...]] = set()
        self._captured: dict[tuple[int, ...], CapturedStep] = {}
        self._plain: set[tuple[int, ...]] = set()  # shapes that cannot be recorded
        self._captured_at = 0
        self._outdated: deque[tuple[Event, list[CapturedStep]]] = deque()
        self._inflight = inflight
        self._queued: deque[Event] = deque()

    def submit(self, segments: Sequence[Segment]) -> Step:
        """Queue one ubatch. Blocks while too many are in flight, or while the next input slot is still unread.

        Raises:
            UsageError: token ids out of range, or more tokens or sequences than the layout holds.
            DeviceError: the stream has failed.
        """
        if not segments:
            raise UsageError("a ubatch without tokens")
        columns = Columns(segments)
        self._check(columns)
        self._bound_queue()
        self._resynchronise()
        slot, views = self._ring.acquire()
        self._write_inputs(slot, views, columns)
        fill = self._fill(columns)
        self._fill_up(views, len(segments), fill)
        slot.seal()
        num_outputs, num_candidates = columns.num_outputs, self._num_candidates(columns.needs_rows)
        outputs = Outputs(self.device, num_outputs + fill, self.model.vocab_size, num_candidates, num_outputs)
        try:
            with self.device.step():
                if self._hooks.slow_stream:
                    self.device.delay(self._hooks.slow_stream)
                self._queue_inputs(slot)
                self._await_states(segments)
                self._queue_model(slot, columns, fill, outputs)
                done = self.device.record()
                if self._hooks.corrupt is not None:
                    self._hooks.corrupt(self._serial, slot.forge())
        except BaseException:
            self._broke_off = True
            outputs.release()
            raise
        self._queued.append(done)
        if self.cache.recurrent is not None:
            # Only now: a step that broke off has left the states that it began from as they were.
            for segment in segments:
                if segment.seq.state is not None:
                    segment.seq.state.advance(len(segment.token_ids))
        return Step(segments, done, outputs, columns.num_tokens, keeps=bool(num_candidates))

    def _queue_inputs(self, slot: InputSlot) -> None:
        try:
            device, block, counter = self.device, self._block, self._step_counter
            copy_inputs(
                *(device, slot.bytes, self.layout, self._hooks.enforce, block, counter, self._kept, self._record),
                in_place=self._zero_copy,
            )
            self._serial += 1
        finally:
            if not self._zero_copy:
                slot.read_behind(self.device.record())

    def _await_states(self, segments: Sequence[Segment]) -> None:
        """The rows of recurrent states that this step will write may still be copied to checkpoints."""
        for segment in segments if self.cache.recurrent is not None else ():
            if segment.seq.state is not None:
                assert self.cache.recurrent is not None
                self.cache.recurrent.before_write(segment.seq.state.row ^ 1)

    def _views_by_slot(self) -> dict[int, InputViews]:
        """What ops read, by number of the slot; 0 stands for all of them."""
        block = self.layout.views(self._block)
        if not self._zero_copy:
            return {0: block}
        views = {}
        for slot in self._ring.slots:
            mapped = slot.mapped()
            views[slot.number] = replace(block, **{name: getattr(mapped, name) for name in IN_PLACE})
        return views

    def _num_candidates(self, needs_rows: bool) -> int:
        """How many logits of each row to bring back; 0 for all of them."""
        if not self.device.wants_candidates or needs_rows:
            return 0
        return min(CANDIDATES, self.model.vocab_size)

    def _queue_model(self, slot: InputSlot, columns: Columns, fill: int, outputs: Outputs) -> None:
        try:
            source = slot.number if self._zero_copy else 0
            results = self._run_model(self._batch(source, columns, fill), outputs.num_candidates)
            if self._zero_copy:
                check_inputs(self.device, slot.bytes, self.layout, self._block, self._step_counter, self._record)
        finally:
            if self._zero_copy:
                slot.read_behind(self.device.record())
        for array, target in zip(results, outputs.arrays, strict=False):
            self.device.copy_to_pinned(array, target)
        self.device.copy_to_pinned(self._record, outputs.record)

    def _fill(self, columns: Columns) -> int:
        """Tokens of nobody in a step in which many sequences decode, so that steps of similar numbers of sequences have
        one shape and share a recording. None for recurrent layers, which have no state for them."""
        count = len(columns.seqs)
        if count <= FEW_SEQS or self.device.target is None or self.cache.recurrent is not None or not columns.decodes:
            return 0
        grain = FEW_SEQS if count <= 8 * FEW_SEQS else 2 * FEW_SEQS
        return min(-count % grain, self.layout.max_seqs - count, self.layout.max_tokens - count)

    @staticmethod
    def _fill_up(views: InputViews, count: int, fill: int) -> None:
        """Nobody's tokens: they write no row, no sequence's extents hold them, and nobody looks at their logits."""
        rest = slice(count, count + fill)
        views.token_ids[rest] = views.positions[rest] = views.token_seq[rest] = 0
        views.row_ids[rest] = views.out_places[rest] = -1
        views.out_tokens[rest] = range(rest.start, rest.stop)

    def _batch(self, slot: int, columns: Columns, fill: int = 0) -> Batch:
        longest, rows = int(columns.counts.max()), columns.starts + columns.counts
        return Batch(
            inputs=self._inputs[slot],
            num_tokens=columns.num_tokens + fill,
            num_seqs=len(columns.seqs) + fill,
            num_outputs=columns.num_outputs + fill,
            longest=longest,
            most_rows=_bucket(int(rows.max())),
            all_rows=_bucket(int(rows.sum())) if longest > 1 else 0,
            cache=self.cache,
            workspace=self.workspace,
            record=self._record,
            slot=slot,
        )

    def _run_model(self, batch: Batch, num_candidates: int) -> list[Any]:
        """Queue the model's ops; returns device arrays for the outputs.

        A step of some shape runs as it is the first time, which compiles kernels and sizes buffers; the second time its
        launches are recorded, and from then on replayed.
        """
        if not self.device.captures:
            return self._compute(batch, num_candidates)
        rows = batch.most_rows, batch.all_rows
        sizes = (batch.num_tokens, batch.num_seqs, batch.longest, batch.num_outputs, *rows, num_candidates)
        key = (*sizes, batch.slot)  # a recording names addresses, those of the slot among them
        self._forget_moved()
        captured = self._captured.pop(key, None)
        if captured is None and key in self._warm and key not in self._plain:
            captured = self._capture(batch, num_candidates)
            if captured is None:
                self._plain.add(key)
        if captured is None:
            outputs = self._compute(batch, num_candidates)
            self._forget_moved()
            if len(self._warm) >= MAX_WARM:
                self._warm.clear()
                self._plain.clear()
            self._warm.add(key)
            return outputs
        self._captured[key] = captured  # the last one used stands last
        if len(self._captured) > MAX_CAPTURED:
            self._retire([self._captured.pop(next(iter(self._captured)))])
        if self.device.checks:
            assert self._captured_at == self.workspace.num_moves, "a recording is replayed whose buffers have moved"
        captured.graph.replay()
        return captured.outputs

    def _capture(self, batch: Batch, num_candidates: int) -> CapturedStep | None:
        """Record the model's ops; None where something among them cannot be recorded."""
        arrays: list[Any] = []
        try:
            overlap = batch.num_tokens <= OVERLAP_TOKENS
            graph = self.device.capture(lambda: arrays.extend(self._compute(batch, num_candidates)), overlap)
        except NotCapturable:
            return None
        return CapturedStep(graph, arrays)

    def forget_recordings(self) -> None:
        """Drop all recordings: the model computes something else from here on."""
        self._retire(list(self._captured.values()))
        self._captured.clear()
        self._warm.clear()
        self._plain.clear()

    def _retire(self, steps: list[CapturedStep]) -> None:
        """Keep recordings until the device is done with them."""
        self._outdated.append((self.device.record(), steps))

    def _forget_moved(self) -> None:
        """Drop recordings when a buffer that they name has moved. Graphs stay until the device is done with them."""
        while self._outdated and self._outdated[0][0].query():
            self._outdated.popleft()
        if self._captured_at == self.workspace.num_moves:
            return
        if self._captured:
            self._retire(list(self._captured.values()))
        self._captured.clear()
        self._warm.clear()
        self._captured_at = self.workspace.num_moves

    def _compute(self, batch: Batch, num_candidates: int) -> list[Any]:
        logits = self.model.forward(self.device, batch)
        if not batch.num_outputs:
            return []
        if not num_candidates:
            return [logits]
        rows, columns = logits.shape
        array, scratch = batch.workspace.array, (rows, scratch_columns(rows, columns, num_candidates))
        values, ids = array("top_values", (rows, num_candidates)), array("top_ids", (rows, num_candidates), np.int32)
        top_k(
            self.device,
            logits,
            array("top_values_scratch", scratch),
            array("top_ids_scratch", scratch, np.int32),
            values,
            ids,
        )
        keep_tokens(self.device, ids, batch.inputs.out_places[:rows], self._kept)
        return [values, ids]

    def _resynchronise(self) -> None:
        """After a submission that broke off: ask the device how many ubatches it has begun."""
        if self._broke_off:
            self._serial = int(self.device.download(self._step_counter)[0])
            self._broke_off = False

    @property
    def num_submitted(self) -> int:
        """Ubatches that the device was given so far."""
        return self._serial

    @property
    def is_full(self) -> bool:
        """Whether `submit` would have to wait for the device."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        return len(self._queued) >= self._inflight

    def _bound_queue(self) -> None:
        while self.is_full:
            self._queued[0].synchronize()

    def _check(self, columns: Columns) -> None:
        if not 0 < columns.num_tokens <= self.layout.max_tokens:
            raise UsageError(f"a ubatch of {columns.num_tokens} tokens; the limit is {self.layout.max_tokens}")
        if len(columns.seqs) > self.layout.max_seqs:
            raise UsageError(f"a ubatch of {len(columns.seqs)} sequences; the limit is {self.layout.max_seqs}")
        self.check_tokens(columns.token_ids)
        if max(columns.places.max(), columns.sources.max()) >= self.layout.max_seqs:
            raise UsageError(f"places end at {self.layout.max_seqs - 1}")
        if (columns.counts[columns.sources >= 0] != 1).any():
            raise UsageError("a segment with a source has one token")

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise UsageError unless every id is a row of the token embedding."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.model.vocab_size):
            bad = next(token for token in token_ids if not 0 <= token < self.model.vocab_size)
            raise UsageError(f"token id {bad} is not in 0..{self.model.vocab_size - 1}")

    def _write_inputs(self, slot: InputSlot, views: InputViews, columns: Columns) -> None:
        views.head_serial[0] = views.tail_serial[0] = self._serial + 1
        num_seqs, total = len(columns.seqs), columns.num_tokens
        starts, counts, ends = columns.starts, columns.counts, columns.ends
        views.cu_seqlens[0] = 0
        views.cu_seqlens[1 : num_seqs + 1] = ends
        views.cu_seqlens[num_seqs + 1 :] = total
        positions = np.arange(total) + np.repeat(starts - ends + counts, counts)
        sources = np.repeat(columns.sources, counts)
        views.token_ids[:total] = np.where(sources < 0, columns.token_ids, -1 - sources)
        views.positions[:total] = positions
        views.token_seq[:total] = np.repeat(np.arange(num_seqs), counts)
        views.row_ids[:total] = self._row_ids(columns, positions)
        self._write_outputs(views, ends, columns.wanted, columns.places)
        views.kv_lens[:num_seqs] = starts + counts
        seq_ids = [*map(_SEQ_ID, columns.seqs)]
        views.seq_ids[:num_seqs] = seq_ids
        self._write_tables(slot, views, columns.seqs, seq_ids)

    def _row_ids(self, columns: Columns, positions: np.ndarray) -> np.ndarray:
        seqs = columns.seqs
        index, row = np.divmod(positions, self.cache.page_size)
        if len(positions) == len(seqs):
            pages = np.array([*map(getitem, map(_PAGES, seqs), index.tolist())], np.int64)
        else:
            tables = [*map(_PAGES, seqs)]
            lengths = np.fromiter(map(len, tables), np.int64, len(tables))
            if (index[columns.ends - 1] >= lengths).any():
                raise IndexError("a position behind a sequence's last page")
            firsts = np.repeat(np.cumsum(lengths) - lengths, columns.counts)  # where each token's table begins
            pages = np.array([*chain.from_iterable(tables)], np.int64)[firsts + index]
        return pages * self.cache.page_size + row

    @staticmethod
    def _write_outputs(views: InputViews, ends: np.ndarray, wanted: np.ndarray, places: np.ndarray) -> None:
        """The last tokens of each segment, as many as wanted; the very last one's result has a place."""
        stops = np.cumsum(wanted)
        total = int(stops[-1])
        views.out_tokens[:total] = np.arange(total) + np.repeat(ends - stops, wanted)
        views.out_places[:total] = -1
        has_some = wanted > 0
        views.out_places[stops[has_some] - 1] = places[has_some]

    def _write_tables(
        self, slot: InputSlot, views: InputViews, seqs: Sequence[SequenceKV], seq_ids: Sequence[int]
    ) -> None:
        """Pages and states. A slot keeps the pages that it was given before: an epoch is given out once, so the number
        of pages and the last one's epoch say which pages of a sequence they are."""
        epochs = [*map(_EPOCHS, seqs)]
        tables = [*zip(seq_ids, map(len, epochs), map(_LAST, epochs), strict=True)]
        known = slot.tables if self._hooks.corrupt is None else []
        known += [_NO_TABLE] * (len(tables) - len(known))
        if known[: len(tables)] != tables:
            for index, (table, there) in enumerate(zip(tables, known, strict=False)):
                if table != there:
                    views.page_table[index, : table[1]] = seqs[index].pages
                    views.page_epochs[index, : table[1]] = epochs[index]
                    known[index] = table
        for index, seq in enumerate(seqs if self.cache.recurrent is not None else ()):
            if (state := seq.state) is not None:
                views.state_rows[index], views.state_epochs[index] = state.row, state.epoch


def _bucket(num_rows: int) -> int:
    """The next power of two: steps of one bucket have the same grids, so one recording serves them all."""
    return max(MIN_BUCKET, 1 << (num_rows - 1).bit_length())
