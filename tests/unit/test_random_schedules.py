"""Random schedules that run far ahead of the device, against a simple oracle of what each sequence's rows must hold.

PYLLM_RANDOM_STEPS=100000 takes more steps than the few thousand of a usual run.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from pyllm.device.arena import POISON
from pyllm.device.host import HostDevice
from pyllm.executor import Batch, Executor, Segment, Step
from pyllm.input_block import InputLayout
from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.kv_types import kv_type_by_name
from pyllm.ops.rope import RopePairing
from pyllm.ops.set_rows import set_rows
from pyllm.ops.shift_rows import KeyTurn

NUM_LAYERS, PAGE_SIZE, NUM_PAGES, MAX_PAGES, MAX_SEQS = 2, 4, 40, 8, 3
MAX_TOKENS = 24
STEPS = int(os.environ.get("PYLLM_RANDOM_STEPS", "3000"))
CHECK_EVERY = 40
SEEN = ("exhausted", "broken", "forked", "cancelled in flight", "truncate", "shifted", "shifted shared pages")


class Broken(Exception):
    """Raised in the middle of a step, on purpose."""


class TokenRows:
    """A model whose K row is the token's id and whose V row is its position; layer 1 stores them negated.

    Attributes:
        break_at: raise in this layer of the next step.
    """

    vocab_size = 1 << 30
    break_at: int | None = None

    def forward(self, device: HostDevice, batch: Batch) -> None:
        k = batch.workspace.array("k", (batch.num_tokens, 1))
        v = batch.workspace.array("v", (batch.num_tokens, 1))
        for layer, sign in enumerate((1, -1)):

            def rows(sign: int = sign) -> None:
                k[:, 0] = sign * batch.inputs.token_ids[: batch.num_tokens]
                v[:, 0] = sign * batch.inputs.positions[: batch.num_tokens]

            if self.break_at == layer:
                self.break_at = None
                raise Broken
            device.stream.enqueue(rows)
            set_rows(device, k, v, batch.inputs, batch.cache.layers[layer], batch.cache.kv_type, batch.record)


@dataclass(eq=False)
class Oracle:
    """One live sequence and what its rows must hold.

    Attributes:
        positions: at which its tokens were computed.
        cuts: how often it was cut; a step from before a cut publishes nothing.
    """

    kv: SequenceKV
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    cuts: int = 0
    ended: bool = False


@dataclass
class Flight:
    """A step whose result was not taken yet, and which rows it makes public: oracle, its cuts, rows."""

    step: Step
    written: list[tuple[Oracle, int, int]]


class World:
    """A cache, its executor, live sequences, and steps in flight."""

    def __init__(self, seed: int, inputs: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.device = HostDevice(poison=True)
        order = self.rng.permutation(NUM_PAGES).tolist()
        kv_type = kv_type_by_name("f32")
        self.cache = KVCache(self.device, NUM_LAYERS, 1, 1, NUM_PAGES, PAGE_SIZE, kv_type, order)
        self.model = TokenRows()
        self.turn = KeyTurn(*(np.empty((1, 0), np.float32) for _ in range(2)), RopePairing.NEOX, 1)
        layout = InputLayout(MAX_TOKENS, MAX_SEQS, MAX_PAGES)
        zero_copy = inputs == "zero-copy"
        self.executor = Executor(self.device, self.model, self.cache, layout, 3, 6, zero_copy=zero_copy)
        self.live: list[Oracle] = []
        self.flights: deque[Flight] = deque()
        self.next_token = 0
        self.seen: Counter[str] = Counter()

    # actions

    def start(self) -> None:
        if len(self.live) < 8:
            self.live.append(Oracle(self.cache.new_sequence()))

    def submit(self) -> None:
        """A ubatch of up to MAX_SEQS sequences; when it breaks off, they end, as the scheduler has it."""
        chosen = [self.live[i] for i in self.rng.permutation(len(self.live))[: self.rng.integers(1, MAX_SEQS + 1)]]
        segments, written = [], []
        for oracle in chosen:
            start = oracle.kv.length
            count = min(int(self.rng.integers(1, MAX_TOKENS // MAX_SEQS + 1)), MAX_PAGES * PAGE_SIZE - start)
            if not count:
                continue
            if not self.cache.extend(oracle.kv, count):
                self.seen["exhausted"] += 1
                continue
            fresh = list(range(self.next_token, self.next_token + count))
            self.next_token += count
            oracle.token_ids += fresh
            oracle.positions += range(start, start + count)
            segments.append(Segment(oracle.kv, start, fresh, 0))
            written.append((oracle, oracle.cuts, start + count))
        if not segments:
            return
        try:
            step = self.executor.submit(segments)
        except Broken:
            self.seen["broken"] += 1
            for oracle, _, _ in written:
                self.end(oracle)
        else:
            self.flights.append(Flight(step, written))

    def break_off(self) -> None:
        self.model.break_at = int(self.rng.integers(NUM_LAYERS))

    def slow_down(self) -> None:
        self.device.delay(0.001)

    def collect(self) -> None:
        """Take the oldest result; its rows become public."""
        if not self.flights:
            return
        flight = self.flights.popleft()
        assert flight.step.result()[1] == []
        for oracle, cuts, length in flight.written:
            if not oracle.ended and oracle.cuts == cuts:
                self.cache.publish(oracle.kv, length)

    def truncate(self) -> None:
        """Anywhere, most often inside a page, perhaps below rows that are still to be written."""
        oracle = self.any()
        length = int(self.rng.integers(oracle.kv.length + 1))
        self.cache.truncate(oracle.kv, length)
        del oracle.token_ids[length:]
        del oracle.positions[length:]
        oracle.cuts += 1

    def fork(self) -> None:
        oracle = self.any()
        if len(self.live) < 8 and oracle.kv.num_clean:
            length = int(self.rng.integers(1, oracle.kv.num_clean + 1))
            self.seen["forked"] += 1
            kv = self.cache.fork(oracle.kv, length)
            self.live.append(Oracle(kv, oracle.token_ids[:length], oracle.positions[:length]))

    def shift(self) -> None:
        """Give up pages in the middle of a sequence that has nothing in flight; keys of one element turn by nothing."""
        oracle = self.any()
        while any(oracle is other for flight in self.flights for other, _, _ in flight.written):
            self.collect()
        if oracle.kv.length < PAGE_SIZE or oracle.kv.num_clean < oracle.kv.length:
            return
        stop = int(self.rng.integers(1, oracle.kv.length // PAGE_SIZE + 1))
        first = int(self.rng.integers(stop))
        shared = sum(self.cache.is_shared(page) for page in oracle.kv.pages[first:])
        if self.cache.shift(oracle.kv, first, stop - first, [self.turn] * NUM_LAYERS):
            del oracle.token_ids[first * PAGE_SIZE : stop * PAGE_SIZE]
            del oracle.positions[first * PAGE_SIZE : stop * PAGE_SIZE]
            self.seen["shifted"] += 1
            self.seen["shifted shared pages"] += shared > 0
        else:
            assert shared
            self.seen["could not shift"] += 1

    def cancel(self) -> None:
        """End a sequence while steps of it may be in flight."""
        oracle = self.any()
        self.seen["cancelled in flight"] += any(oracle is other for f in self.flights for other, _, _ in f.written)
        self.end(oracle)

    def remove_all(self) -> None:
        for oracle in list(self.live):
            self.end(oracle)

    def any(self) -> Oracle:
        return self.live[self.rng.integers(len(self.live))]

    def end(self, oracle: Oracle) -> None:
        self.cache.release(oracle.kv)
        oracle.ended = True
        self.live.remove(oracle)

    # what must hold

    def check(self) -> None:
        self.check_rows()
        self.check_pages()

    def check_rows(self) -> None:
        """Every sequence has its own rows under the right tags; those behind its end, on its own page, lack them."""
        for layer, sign in enumerate((1, -1)):
            cache = self.cache.layers[layer]
            k, v, tags = (self.device.download(array) for array in (cache.k, cache.v, cache.tags))
            for oracle in self.live:
                positions = np.arange(oracle.kv.length)
                rows = self.cache.row_ids(oracle.kv, positions)
                epochs = np.repeat(np.array(oracle.kv.epochs, np.int64), PAGE_SIZE)
                assert k[rows, 0].tolist() == [sign * token for token in oracle.token_ids]
                assert v[rows, 0].tolist() == [sign * position for position in oracle.positions]
                assert (tags[rows] == epochs[: len(positions)]).all()
                if oracle.kv.length % PAGE_SIZE and oracle.kv.owns_tail:
                    page = oracle.kv.pages[-1] * PAGE_SIZE
                    behind = tags[page + oracle.kv.length % PAGE_SIZE : page + PAGE_SIZE]
                    assert (behind != oracle.kv.epochs[-1]).all()

    def check_pages(self) -> None:
        """References add up, and pages without an owner hold poison."""
        references = np.bincount([p for oracle in self.live for p in oracle.kv.pages], minlength=NUM_PAGES)
        assert references.tolist() == self.cache._references
        free = np.flatnonzero(references == 0)
        assert sorted(self.cache._free) == free.tolist()
        rows = (free[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)
        for layer in self.cache.layers:
            for array in (layer.k, layer.v):
                assert (self.device.download(array)[rows].view(np.uint8) == POISON).all()


ACTIONS = {
    World.submit: 40,
    World.collect: 25,
    World.truncate: 8,
    World.fork: 8,
    World.shift: 6,
    World.start: 8,
    World.cancel: 5,
    World.slow_down: 3,
    World.break_off: 2,
    World.remove_all: 0.3,
}


@pytest.mark.parametrize("inputs", ["copy", "zero-copy"])
def test_random_schedules(inputs: str) -> None:
    world = World(seed=7, inputs=inputs)
    odds = np.array(list(ACTIONS.values())) / sum(ACTIONS.values())
    actions = list(ACTIONS)
    try:
        for step, choice in enumerate(world.rng.choice(len(actions), STEPS, p=odds)):
            action = actions[choice]
            if world.live or action in (World.start, World.collect, World.slow_down):
                action(world)
                world.seen[action.__name__] += 1
            if step % CHECK_EVERY == 0:
                world.check()
        world.check()
        world.remove_all()
        world.check()
    finally:
        world.device.close()
    assert min(world.seen[name] for name in SEEN) > 10
