"""The recurrent memory: owns the states of recurrent layers, their marks, and checkpoints of them.

A recurrent layer keeps of all tokens of a sequence one state of fixed size: a window of its convolution and a matrix
per head, in float32. A sequence has a *slot*, which holds two copies of the states of all layers: a step reads one copy
and writes the other, so a step that breaks off has not touched what it began from.

Beside each layer's copy lies its *mark*: the epoch of the sequence that it belongs to, fresh for every sequence, and
the position that it has reached. The op that goes on from a state compares both with what the host believes, and
reports a difference to the fault record.

A state cannot be taken back by some tokens: it is a sum. To go back, the state must have been saved at exactly that
position (`save`), in pinned memory, within a budget of bytes.

Host bookkeeping only: what touches states is queued as ops on the device's stream, so a slot may be given to another
sequence while work of its former owner is still queued.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyllm.device import Device
from pyllm.device.arena import POISON
from pyllm.device.base import PinnedBuffer
from pyllm.errors import ContextError
from pyllm.ops.copy_state import copy_state
from pyllm.ops.fill_state import fill_state
from pyllm.ops.load_state import load_state
from pyllm.ops.reset_state import reset_state
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


@dataclass(frozen=True)
class Checkpoint:
    """A saved state: [row_size] float32 and the marks that it had, in pinned memory, valid when queued work has run."""

    epoch: int
    buffer: PinnedBuffer
    values: np.ndarray
    marks: np.ndarray


class RecurrentCache:
    """States for all sequences of one model.

    Args:
        device: where the states live.
        shape: sizes of the recurrent layers.
        num_slots: sequences that may have a state at the same time.
        checkpoint_bytes: pinned memory that checkpoints may take; the oldest give way.
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
        self._checkpoints: OrderedDict[tuple[int, int], Checkpoint] = OrderedDict()  # by epoch and position

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
        return len(self._checkpoints) * self.bytes_per_checkpoint

    def new_state(self) -> SequenceState:
        """The state of an empty sequence.

        Raises:
            ContextError: all slots are taken.
        """
        state = self._take_slot()
        reset_state(self.device, self.rows, state.row, state.epoch)
        return state

    def reset(self, state: SequenceState) -> None:
        """Back to no tokens, under a fresh epoch. Checkpoints of the sequence are dropped."""
        self._drop_checkpoints(state)
        state.epoch, state.copy, state.position = self._fresh_epoch(), 0, 0
        reset_state(self.device, self.rows, state.row, state.epoch)

    def release(self, state: SequenceState) -> None:
        """Give a slot back, and drop the sequence's checkpoints."""
        self._drop_checkpoints(state)
        self._free.append(state.slot)
        if self.device.poison:
            for copy in range(COPIES):
                fill_state(self.device, self.rows, COPIES * state.slot + copy, POISON)

    def save(self, state: SequenceState) -> bool:
        """Keep a checkpoint of the state at its present position, behind the work that is queued.

        Returns:
            False when the budget has no room for even one.
        """
        if state.position == 0:
            return True  # the beginning can be gone back to without
        key = (state.epoch, state.position)
        if key in self._checkpoints:
            self._checkpoints.move_to_end(key)
            return True
        if self.bytes_per_checkpoint > self.checkpoint_bytes:
            return False
        while self.checkpoint_bytes_used + self.bytes_per_checkpoint > self.checkpoint_bytes:
            self._drop(next(iter(self._checkpoints)))
        self._checkpoints[key] = self._copy_out(state)
        return True

    def saved_positions(self, state: SequenceState) -> list[int]:
        """Positions of the sequence's checkpoints, in ascending order."""
        return sorted(position for epoch, position in self._checkpoints if epoch == state.epoch)

    def can_rewind(self, state: SequenceState, position: int) -> bool:
        """Whether `rewind` can go to a position."""
        return position in (0, state.position) or (state.epoch, position) in self._checkpoints

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
        self._copy_in(self._checkpoints[state.epoch, position], state, position, state.epoch)

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
            copy_state(self.device, self.rows, state.row, child.row, state.epoch, position, child.epoch)
            child.position = position
        else:
            self._copy_in(self._checkpoints[state.epoch, position], child, position, child.epoch)
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

    def _require_checkpoint(self, state: SequenceState, position: int) -> None:
        if (state.epoch, position) not in self._checkpoints:
            raise ValueError(
                f"a recurrent state of {state.position} tokens cannot go back to {position}; "
                f"there are checkpoints at {self.saved_positions(state) or 'no position'}"
            )

    def _copy_out(self, state: SequenceState) -> Checkpoint:
        buffer = self.device.pinned(self.bytes_per_checkpoint)
        size = self.shape.row_size * ELEMENT_BYTES
        values = buffer.array[:size].view(np.float32)
        marks = buffer.array[size:].view(np.uint32).reshape(len(self.shape.layers), MARK_WIDTH)
        self.device.copy_to_pinned(self.rows.values[state.row], values)
        self.device.copy_to_pinned(self.rows.marks[state.row], marks)
        return Checkpoint(state.epoch, buffer, values, marks)

    def _copy_in(self, saved: Checkpoint, state: SequenceState, position: int, epoch: int) -> None:
        """Into the copy that is not the present state; it becomes the present one."""
        target = state.row ^ 1
        load_state(self.device, saved.values, saved.marks, saved.epoch, position, self.rows, target, epoch)
        state.copy ^= 1
        state.position = position

    def _drop(self, key: tuple[int, int]) -> None:
        self.device.release_pinned(self._checkpoints.pop(key).buffer)

    def _drop_checkpoints(self, state: SequenceState) -> None:
        for key in [key for key in self._checkpoints if key[0] == state.epoch]:
            self._drop(key)
