"""The recurrent memory: owns the states of recurrent layers, their marks, and checkpoints of them.

A recurrent layer keeps of all tokens of a sequence one state of fixed size: a window of its convolution and a matrix
per head, in float32. A sequence has a *slot*, which holds two copies of the states of all layers: a step reads one copy
and writes the other, so a step that breaks off has not touched what it began from.

Beside each layer's copy lies its *mark*: the epoch of the sequence that it belongs to, fresh for every sequence, and
the position that it has reached. The op that goes on from a state compares both with what the host believes, and
reports a difference to the fault record.

A state cannot be taken back by some tokens: it is a sum. To go back, the state must have been saved at exactly that
position (`save`), in pinned memory, within a budget of bytes. A checkpoint may outlive its sequence (`hand_over`), and
sequences that begin with the same tokens may start from it (`restore`).

Host bookkeeping only: what touches states is queued on the device's streams, so a slot may be given to another
sequence while work of its former owner is still queued. Checkpoints are copied on the stream of copies. Until such a
copy has run, the row that it reads or writes is not written by others: `before_write` makes the compute stream wait.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyllm.device import Device, Event
from pyllm.device.arena import POISON
from pyllm.errors import ContextError
from pyllm.ops.copy_state import copy_state
from pyllm.ops.fill_state import fill_state
from pyllm.ops.reset_state import reset_state
from pyllm.prompt_cache.pinned_pool import Block, PinnedPool
from pyllm.recurrent_state import COPIES, ELEMENT_BYTES, MARK_WIDTH, LayerState, RecurrentShape

LAST_EPOCH = 2**32 - 1
DEFAULT_CHECKPOINT_BYTES = 1 << 30


@dataclass(frozen=True)
class StateRows:
    """All states, as ops that work on whole rows see them.

    Attributes:
        values: [num_rows, row_size] float32: per layer the window, then the matrices.
        marks: [num_rows, num_layers, MARK_WIDTH] uint32.
    """

    values: Any
    marks: Any


@dataclass
class SequenceState:
    """The recurrent state of one sequence.

    Attributes:
        slot: which two rows are its own.
        epoch: what their marks must say.
        copy: which of the two holds the state once all queued work has run.
        position: tokens that the state has seen by then.
    """

    slot: int
    epoch: int
    copy: int = 0
    position: int = 0

    @property
    def row(self) -> int:
        return COPIES * self.slot + self.copy

    def advance(self, num_tokens: int) -> None:
        """A step of so many tokens was queued: the other copy is the state now."""
        self.copy ^= 1
        self.position += num_tokens


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A saved state, in pinned memory, valid when its copy has run.

    Attributes:
        position: tokens that it has seen.
        epoch: what its marks must say besides.
        block: the memory; `block.is_kept` is false when the checkpoint had to give way.
        values: [row_size] float32.
        marks: [num_layers, MARK_WIDTH] uint32, as they were on the device.
    """

    position: int
    epoch: int
    block: Block
    values: np.ndarray
    marks: np.ndarray

    def own_layers(self) -> np.ndarray:
        """In which layers the state was the sequence's own: [num_layers] bool. Waits for the copy.

        Raises:
            DeviceError: the copy failed.
        """
        self.block.wait()
        return (self.marks == np.array([self.epoch, self.position], np.uint32)).all(axis=-1)


class RecurrentCache:
    """States for all sequences of one model.

    Args:
        device: where the states live.
        shape: sizes of the recurrent layers.
        num_slots: sequences that may have a state at the same time.
        checkpoint_bytes: pinned memory that checkpoints may take; those used least recently give way.

    Attributes:
        pool: memory of the checkpoints.
    """

    def __init__(
        self,
        device: Device,
        shape: RecurrentShape,
        num_slots: int,
        checkpoint_bytes: int = DEFAULT_CHECKPOINT_BYTES,
    ) -> None:
        self.device = device
        self.shape = shape
        self.checkpoint_bytes = checkpoint_bytes
        num_rows, num_layers = COPIES * num_slots, len(shape.layers)
        self.rows = StateRows(
            device.empty((num_rows, shape.row_size), np.float32),
            device.upload(np.zeros((num_rows, num_layers, MARK_WIDTH), np.uint32)),
        )
        self.layers = [LayerState(self.rows.values, self.rows.marks, shape, index) for index in range(num_layers)]
        self._free = deque(range(num_slots))
        self._next_epoch = itertools.count(1)
        self.pool = PinnedPool(device, self.bytes_per_checkpoint, checkpoint_bytes, "a checkpoint")
        self._checkpoints: dict[tuple[int, int], Checkpoint] = {}  # of live sequences, by epoch and position
        self._copying: dict[int, Event] = {}  # rows that a copy reads or writes

    @property
    def num_bytes(self) -> int:
        """Device memory of all states and marks."""
        return int(self.rows.values.nbytes + self.rows.marks.nbytes)

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    @property
    def bytes_per_checkpoint(self) -> int:
        """Pinned memory of one checkpoint."""
        return (self.shape.row_size + len(self.shape.layers) * MARK_WIDTH) * ELEMENT_BYTES

    @property
    def checkpoint_bytes_used(self) -> int:
        """Pinned memory of all checkpoints."""
        return self.pool.bytes_in_use

    def new_state(self) -> SequenceState:
        """The state of an empty sequence.

        Raises:
            ContextError: all slots are taken.
        """
        state = self._take_slot()
        self._reset_rows(state)
        return state

    def reset(self, state: SequenceState) -> None:
        """Back to no tokens, under a fresh epoch. Checkpoints of the sequence are dropped."""
        self._drop_checkpoints(state)
        state.epoch, state.copy, state.position = self._fresh_epoch(), 0, 0
        self._reset_rows(state)

    def release(self, state: SequenceState) -> None:
        """Give a slot back, and drop the sequence's checkpoints."""
        self._drop_checkpoints(state)
        self._free.append(state.slot)
        if self.device.poison:
            for row in _rows_of(state):
                self.before_write(row)
                fill_state(self.device, self.rows, row, POISON)

    def before_write(self, row: int) -> None:
        """Must come before an op that writes a row is queued: it runs when copies of the row have run."""
        event = self._copying.pop(row, None)
        if event is not None and not event.query():
            self.device.wait(event)

    def save(self, state: SequenceState) -> bool:
        """Keep a checkpoint of the state at its present position, behind the work that is queued.

        Returns:
            False when the budget has no room for it now.
        """
        if state.position == 0:
            return True  # the beginning can be gone back to without
        key = (state.epoch, state.position)
        if (saved := self._saved(*key)) is not None:
            self.pool.touch(saved.block)
            return True
        block = self.pool.take()
        if block is None:
            return False
        self._checkpoints[key] = self._copy_out(state, block)
        return True

    def hand_over(self, state: SequenceState) -> list[Checkpoint]:
        """The sequence's checkpoints, in order of position, for somebody who keeps them beyond its end."""
        positions = self.saved_positions(state)
        return [self._checkpoints.pop((state.epoch, position)) for position in positions]

    def new_checkpoint(self, position: int) -> Checkpoint | None:
        """A checkpoint whose values somebody will write before it is used; None where the budget has no room now."""
        block = self.pool.take()
        if block is None:
            return None
        values, marks = self._parts(block.writable())
        epoch = self._fresh_epoch()
        marks[...] = epoch, position
        return Checkpoint(position, epoch, block, values, marks)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Give up a checkpoint that was handed over."""
        self.pool.give_back(checkpoint.block)

    def restore(self, checkpoint: Checkpoint) -> tuple[SequenceState, Event] | None:
        """A new state that goes on from a checkpoint which was handed over. Copied while other sequences compute.

        Returns:
            The state, to be used when the event has completed; None when the checkpoint had to give way, or its marks
            are not right.

        Raises:
            ContextError: all slots are taken.
        """
        if not checkpoint.block.is_kept or not checkpoint.own_layers().all():
            return None
        state = self._take_slot()
        return state, self._copy_in(checkpoint, state, state.row)

    def saved_positions(self, state: SequenceState) -> list[int]:
        """Positions of the sequence's checkpoints, in ascending order."""
        own = [position for epoch, position in self._checkpoints if epoch == state.epoch]
        return sorted(position for position in own if self._saved(state.epoch, position) is not None)

    def can_rewind(self, state: SequenceState, position: int) -> bool:
        """Whether `rewind` can go to a position."""
        return position in (0, state.position) or self._saved(state.epoch, position) is not None

    def rewind(self, state: SequenceState, position: int) -> None:
        """Go back to a checkpoint at exactly this position, or to the beginning. Checkpoints behind it are dropped: the
        tokens that led to them are no longer the sequence's.

        Raises:
            ValueError: there is none; nothing has changed.
        """
        if position == state.position:
            return
        if position == 0:
            self.reset(state)
            return
        self._require_checkpoint(state, position)
        for epoch, later in list(self._checkpoints):
            if epoch == state.epoch and later > position:
                self._drop((epoch, later))
        target = state.row ^ 1  # what a step in flight goes on from stays as it is
        self.device.wait(self._copy_in(self._checkpoints[state.epoch, position], state, target))

    def fork(self, state: SequenceState, position: int) -> SequenceState:
        """A new state that is a copy of another at a position: its present one, that of a checkpoint, or 0.

        Raises:
            ValueError: there is no state of that position.
            ContextError: all slots are taken.
        """
        if position == 0:
            return self.new_state()
        if position != state.position:
            self._require_checkpoint(state, position)
        child = self._take_slot()
        if position == state.position:
            for row in _rows_of(child):
                self.before_write(row)
            copy_state(self.device, self.rows, state.row, child.row, state.epoch, position, child.epoch)
            child.position = position
        else:
            self.device.wait(self._copy_in(self._checkpoints[state.epoch, position], child, child.row))
        return child

    def _take_slot(self) -> SequenceState:
        if not self._free:
            num_slots = self.rows.values.shape[0] // COPIES
            raise ContextError(f"all {num_slots} recurrent states are taken; allow more sequences (n_seqs)")
        return SequenceState(self._free.popleft(), self._fresh_epoch())

    def _fresh_epoch(self) -> int:
        epoch = next(self._next_epoch)
        if epoch > LAST_EPOCH:
            raise OverflowError("all state epochs are used up; open the model again")
        return epoch

    def _reset_rows(self, state: SequenceState) -> None:
        for row in _rows_of(state):
            self.before_write(row)
        reset_state(self.device, self.rows, state.row, state.epoch)

    def _saved(self, epoch: int, position: int) -> Checkpoint | None:
        """A checkpoint, unless it had to give way."""
        checkpoint = self._checkpoints.get((epoch, position))
        if checkpoint is not None and not checkpoint.block.is_kept:
            del self._checkpoints[epoch, position]
            return None
        return checkpoint

    def _require_checkpoint(self, state: SequenceState, position: int) -> None:
        if self._saved(state.epoch, position) is None:
            raise ValueError(
                f"a recurrent state of {state.position} tokens cannot go back to {position}; "
                f"there are checkpoints at {self.saved_positions(state) or 'no position'}"
            )

    def _copy_out(self, state: SequenceState, block: Block) -> Checkpoint:
        """Behind the work that is queued, while later work goes on; the row is not written before it has run."""
        copies, (values, marks) = self.device.copies, self._parts(block.memory)
        copies.wait(self.device.record())
        copies.copy(self.rows.values[state.row], values)
        copies.copy(self.rows.marks[state.row], marks)
        self._copying[state.row] = done = copies.record()
        block.used(done)
        return Checkpoint(state.position, state.epoch, block, values, marks)

    def _parts(self, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values and marks of a checkpoint, in its block's memory."""
        size = self.shape.row_size * ELEMENT_BYTES
        marks = memory[size : self.bytes_per_checkpoint].view(np.uint32)
        return memory[:size].view(np.float32), marks.reshape(len(self.shape.layers), MARK_WIDTH)

    def _copy_in(self, saved: Checkpoint, state: SequenceState, row: int) -> Event:
        """Into one of the state's rows, which becomes its present one; the other becomes nobody's. Returns the event of
        the copy. A layer that was not the sequence's own when it was saved becomes nobody's too."""
        own, copies = saved.own_layers(), self.device.copies
        buffer = self.device.pinned(COPIES * saved.marks.nbytes)
        marks = buffer.writable().view(np.uint32).reshape(COPIES, *saved.marks.shape)
        marks[...] = 0
        marks[row % COPIES, own] = state.epoch, saved.position
        copies.wait(self.device.record())  # queued work that uses the rows, perhaps of a former owner
        copies.copy(saved.values, self.rows.values[row])
        first = COPIES * state.slot
        copies.copy(marks, self.rows.marks[first : first + COPIES])
        done = copies.record()
        self.device.release_pinned(buffer, done)
        saved.block.used(done)
        self.pool.touch(saved.block)
        for each in _rows_of(state):
            self._copying[each] = done
        state.copy, state.position = row % COPIES, saved.position
        return done

    def _drop(self, key: tuple[int, int]) -> None:
        self.pool.give_back(self._checkpoints.pop(key).block)

    def _drop_checkpoints(self, state: SequenceState) -> None:
        for key in [key for key in self._checkpoints if key[0] == state.epoch]:
            self._drop(key)


def _rows_of(state: SequenceState) -> range:
    return range(COPIES * state.slot, COPIES * (state.slot + 1))
