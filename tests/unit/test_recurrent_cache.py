"""The recurrent memory against a simple oracle: whatever is forked, rewound and released, each sequence's state is made
of its own tokens, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from pyllm.device.host import HostDevice
from pyllm.errors import ContextError
from pyllm.recurrent_cache import RecurrentCache, SequenceState
from pyllm.recurrent_state import RecurrentShape

SHAPE = RecurrentShape(layers=(0, 2, 3), kernel_size=4, num_channels=5, num_heads=2, head_dim=4)
NUM_SLOTS = 4


@dataclass
class Sequence:
    """A live sequence, and what its state must have seen. `saved`: positions that may be gone back to."""

    state: SequenceState
    tokens: list[int] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)


class World:
    """A memory whose steps add up tokens: every number of a state is a sum over the sequence, weighted by position."""

    def __init__(self, **options: int) -> None:
        self.device = HostDevice(poison=True)
        self.cache = RecurrentCache(self.device, SHAPE, NUM_SLOTS, **options)
        self.wrong: list[str] = []

    def step(self, sequence: Sequence, tokens: list[int]) -> None:
        """Queue a step, which looks at the marks as gated_delta_rule does."""
        rows, state = self.cache.rows, sequence.state
        row, epoch, position = state.row, state.epoch, state.position

        def run() -> None:
            if (rows.marks[row] != (epoch, position)).any():
                self.wrong.append(f"row {row}: {rows.marks[row].tolist()}, not {(epoch, position)}")
            added = sum(token * (position + index + 1) for index, token in enumerate(tokens))
            rows.values[row ^ 1] = rows.values[row] + np.float32(added)
            rows.marks[row ^ 1] = epoch, position + len(tokens)

        self.cache.before_write(row ^ 1)
        self.device.stream.enqueue(run)
        state.advance(len(tokens))
        sequence.tokens += tokens

    def settle(self) -> None:
        """Wait for all that is queued."""
        self.device.synchronize()
        self.device.copies.record().synchronize()

    def check(self, sequence: Sequence) -> None:
        values = self.device.download(self.cache.rows.values[sequence.state.row])
        expected = sum(token * (index + 1) for index, token in enumerate(sequence.tokens))
        assert (values == expected).all()
        assert sequence.state.position == len(sequence.tokens)
        assert not self.wrong


@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World()
    cache, live = world.cache, []
    for _ in range(200):
        action = rng.choice(["start", "step", "step", "step", "save", "rewind", "fork", "release"])
        sequence = live[rng.integers(len(live))] if live else None
        if action == "start" and cache.num_free_slots:
            live.append(Sequence(cache.new_state()))
        elif sequence is None:
            continue
        elif action == "step":
            world.step(sequence, rng.integers(1, 9, rng.integers(1, 5)).tolist())
        elif action == "save":
            assert cache.save(sequence.state)
            if sequence.tokens:
                sequence.saved.add(len(sequence.tokens))
        elif action == "rewind" and sequence.saved:
            position = int(rng.choice(sorted(sequence.saved)))
            cache.rewind(sequence.state, position)
            del sequence.tokens[position:]
            sequence.saved = {saved for saved in sequence.saved if saved <= position}
            assert cache.saved_positions(sequence.state) == sorted(sequence.saved)
        elif action == "fork" and cache.num_free_slots:
            position = int(rng.choice([*sequence.saved, len(sequence.tokens)]))
            live.append(Sequence(cache.fork(sequence.state, position), sequence.tokens[:position]))
        elif action == "release":
            live.remove(sequence)
            cache.release(sequence.state)
    for sequence in live:
        world.check(sequence)
        cache.release(sequence.state)
    world.settle()
    assert cache.num_free_slots == NUM_SLOTS
    assert cache.checkpoint_bytes_used == 0


def test_no_more_sequences_than_slots() -> None:
    cache = World().cache
    states = [cache.new_state() for _ in range(NUM_SLOTS)]
    for more in (cache.new_state, lambda: cache.fork(states[0], 0)):
        with pytest.raises(ContextError, match="all 4 recurrent states"):
            more()
    cache.release(states[2])
    assert cache.new_state().slot == states[2].slot


def test_the_oldest_checkpoints_give_way_within_the_budget() -> None:
    size = World().cache.bytes_per_checkpoint
    world = World(checkpoint_bytes=2 * size + 1)
    sequence = Sequence(world.cache.new_state())
    for _ in range(3):
        world.step(sequence, [3])
        assert world.cache.save(sequence.state)
        assert world.cache.checkpoint_bytes_used <= world.cache.checkpoint_bytes
        world.settle()
    assert world.cache.saved_positions(sequence.state) == [2, 3]
    tight = World(checkpoint_bytes=size - 1)
    sequence = Sequence(tight.cache.new_state())
    tight.step(sequence, [3])
    assert not tight.cache.save(sequence.state)


def test_a_position_without_a_checkpoint_is_refused_and_changes_nothing() -> None:
    world = World()
    sequence = Sequence(world.cache.new_state())
    world.step(sequence, [1, 2, 3])
    world.cache.save(sequence.state)
    world.step(sequence, [4, 5])
    for position in (1, 4):
        assert not world.cache.can_rewind(sequence.state, position)
        for act in (world.cache.rewind, world.cache.fork):
            with pytest.raises(ValueError, match=rf"5 tokens cannot go back to {position}.*\[3\]"):
                act(sequence.state, position)
    world.check(sequence)
    assert world.cache.num_free_slots == NUM_SLOTS - 1


def test_a_checkpoint_of_a_row_that_was_not_the_sequences_own_is_nobodys() -> None:
    world = World()
    sequence = Sequence(world.cache.new_state())
    world.step(sequence, [1, 2])
    world.device.synchronize()
    world.cache.rows.marks[sequence.state.row, 1] = 99, 2
    world.cache.save(sequence.state)
    child = Sequence(world.cache.fork(sequence.state, 2), [1, 2])
    world.step(sequence, [3])
    world.cache.rewind(sequence.state, 2)
    marks = world.device.download(world.cache.rows.marks)
    for state in (child.state, sequence.state):
        assert marks[state.row].tolist() == [[state.epoch, 2], [0, 0], [state.epoch, 2]]


def test_free_slots_are_poisoned_and_a_new_sequence_starts_from_zero() -> None:
    world = World()
    first = Sequence(world.cache.new_state())
    world.step(first, [7])
    slot = first.state.slot
    world.cache.release(first.state)
    values = world.device.download(world.cache.rows.values)
    assert np.isnan(values[2 * slot : 2 * slot + 2]).all()
    world.cache._free.rotate(1)  # the slot that was given back comes first
    second = Sequence(world.cache.new_state())
    assert second.state.slot == slot and second.state.epoch != first.state.epoch
    world.check(second)


def test_sizes() -> None:
    cache = World().cache
    layer = 3 * 5 + 2 * 4 * 4
    assert SHAPE.row_size == 3 * layer
    assert cache.num_bytes == NUM_SLOTS * SHAPE.sequence_bytes == NUM_SLOTS * 2 * 3 * (layer + 2) * 4
    for index, state in enumerate(cache.layers):
        assert state.layer == SHAPE.layers[index]
        assert all(np.shares_memory(view, cache.rows.values) for view in (state.windows, state.matrices))
        state.windows[...], state.matrices[...] = index, index
    assert (cache.rows.values == np.repeat(np.arange(3), layer)).all()


def test_a_copy_that_runs_late_neither_reads_nor_writes_anothers_rows() -> None:
    """With the stream of copies held back, steps go on until they would write a row that is being saved."""
    world = World()
    sequence = Sequence(world.cache.new_state())
    world.step(sequence, [1, 2])
    gate = world.device.copies.stream.gate()
    assert world.cache.save(sequence.state)
    world.step(sequence, [3])
    world.device.synchronize()  # the next step but one has to wait
    world.step(sequence, [4])
    waiting = world.device.record()
    assert not waiting.query()
    gate.open()
    world.check(sequence)
    (saved,) = world.cache.hand_over(sequence.state)
    assert (saved.values == 1 * 1 + 2 * 2).all() and saved.own_layers().all()


@pytest.mark.parametrize("late", [False, True])
def test_sequences_start_from_checkpoints_of_ended_ones(late: bool) -> None:
    world = World()
    sequence = Sequence(world.cache.new_state())
    world.step(sequence, [1, 2])
    world.cache.save(sequence.state)
    (saved,) = world.cache.hand_over(sequence.state)
    world.cache.release(sequence.state)
    world.settle()
    gate = world.device.copies.stream.gate()
    if not late:
        gate.open()
    restored = world.cache.restore(saved)
    assert restored is not None
    state, ready = restored
    if late:  # given up before the copy has run: the next owner of the slot is not disturbed
        world.cache.release(state)
        world.cache._free.rotate(1)
        other = Sequence(world.cache.new_state())
        assert other.state.slot == state.slot
        gate.open()
        world.step(other, [5])
        world.check(other)
    else:
        ready.synchronize()
        again = Sequence(state, [1, 2])
        world.step(again, [3])
        world.check(again)
    world.cache.drop(saved)
    assert world.cache.restore(saved) is None
    world.settle()
    assert world.cache.checkpoint_bytes_used == 0
