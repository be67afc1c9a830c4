"""The paged cache against a simple oracle: after any schedule each sequence reads exactly the rows that it wrote."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pyllm import faults
from pyllm.device.host import HostDevice
from pyllm.executor import Batch, Executor, Segment
from pyllm.input_block import InputLayout
from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.kv_types import kv_type_by_name
from pyllm.ops.op import Op
from pyllm.ops.rope import RopePairing
from pyllm.ops.set_rows import set_rows
from pyllm.ops.shift_rows import KeyTurn

NUM_LAYERS, PAGE_SIZE, NUM_PAGES, MAX_PAGES = 2, 4, 24, 8
SIZES = {"max_tokens": 16, "max_seqs": 4}


class TokenRows:
    """A model whose K row is the token's id and whose V row is its position; layer 1 stores them negated."""

    vocab_size = 1 << 20

    def forward(self, device: HostDevice, batch: Batch) -> None:
        k = batch.workspace.array("k", (batch.num_tokens, 1))
        v = batch.workspace.array("v", (batch.num_tokens, 1))
        for layer, sign in enumerate((1, -1)):

            def rows(sign: int = sign) -> None:
                k[:, 0] = sign * batch.inputs.token_ids[: batch.num_tokens]
                v[:, 0] = sign * batch.inputs.positions[: batch.num_tokens]

            device.stream.enqueue(rows)
            set_rows(device, k, v, batch.inputs, batch.cache.layers[layer], batch.cache.kv_type, batch.record)


@dataclass
class Oracle:
    """One live sequence and what its rows must hold."""

    kv: SequenceKV
    token_ids: list[int] = field(default_factory=list)


@dataclass
class World:
    """A cache, its executor and the sequences in it."""

    device: HostDevice = field(default_factory=lambda: HostDevice(poison=True))
    live: list[Oracle] = field(default_factory=list)
    next_token: int = 0

    def __post_init__(self) -> None:
        kv_type = kv_type_by_name("f32")
        order = np.random.default_rng(0).permutation(NUM_PAGES).tolist()
        self.cache = KVCache(self.device, NUM_LAYERS, 1, 1, NUM_PAGES, PAGE_SIZE, kv_type, order)
        layout = InputLayout(max_pages=MAX_PAGES, **SIZES)
        self.executor = Executor(self.device, TokenRows(), self.cache, layout, ring_depth=2, inflight=4)

    def start(self) -> None:
        self.live.append(Oracle(self.cache.new_sequence()))

    def append(self, oracle: Oracle, count: int) -> None:
        count = min(count, MAX_PAGES * PAGE_SIZE - len(oracle.token_ids))
        before = list(oracle.kv.pages), oracle.kv.length
        if count == 0:
            return
        if not self.cache.extend(oracle.kv, count):
            assert (oracle.kv.pages, oracle.kv.length) == before
            return
        fresh = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        step = self.executor.submit([Segment(oracle.kv, len(oracle.token_ids), fresh, 0)])
        assert step.result()[1] == []
        oracle.token_ids += fresh
        self.cache.publish(oracle.kv, len(oracle.token_ids))

    def truncate(self, oracle: Oracle, length: int) -> None:
        self.cache.truncate(oracle.kv, length)
        del oracle.token_ids[length:]

    def fork(self, oracle: Oracle, length: int) -> None:
        self.live.append(Oracle(self.cache.fork(oracle.kv, length), oracle.token_ids[:length]))

    def release(self, oracle: Oracle) -> None:
        self.cache.release(oracle.kv)
        self.live.remove(oracle)

    def check(self) -> None:
        """Every sequence reads its own rows under the right tags, and page accounting adds up."""
        for layer, sign in enumerate((1, -1)):
            cache = self.cache.layers[layer]
            k, v, tags = (self.device.download(array) for array in (cache.k, cache.v, cache.tags))
            for oracle in self.live:
                positions = np.arange(oracle.kv.length)
                rows = self.cache.row_ids(oracle.kv, positions)
                epochs = np.repeat(np.array(oracle.kv.epochs, np.int64), PAGE_SIZE)[: len(positions)]
                assert oracle.kv.length == len(oracle.token_ids)
                assert (tags[rows] == epochs).all()
                assert k[rows, 0].tolist() == [sign * token for token in oracle.token_ids]
                assert v[rows, 0].tolist() == (sign * positions).tolist()
        used = {page for oracle in self.live for page in oracle.kv.pages}
        assert used.isdisjoint(self.cache._free)
        assert len(used) + self.cache.num_free_pages == NUM_PAGES
        references = np.bincount([p for oracle in self.live for p in oracle.kv.pages], minlength=NUM_PAGES)
        assert references.tolist() == self.cache._references

    def check_rows_behind_the_end(self) -> None:
        """A row behind a sequence's end, in a page of its own, is absent: a write that never lands would be caught."""
        tags = self.device.download(self.cache.tags)
        for oracle in self.live:
            rest = -oracle.kv.length % PAGE_SIZE
            if rest and oracle.kv.owns_tail and self.cache._references[oracle.kv.pages[-1]] == 1:
                first = oracle.kv.pages[-1] * PAGE_SIZE + oracle.kv.length % PAGE_SIZE
                assert (tags[:, first : first + rest] != oracle.kv.epochs[-1]).all()


@pytest.fixture
def world():
    world = World()
    yield world
    world.device.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(world: World, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for step in range(400):
        action = rng.choice(["start", "append", "append", "append", "truncate", "fork", "release"])
        oracle = world.live[rng.integers(len(world.live))] if world.live else None
        if action == "start" and len(world.live) < 6:
            world.start()
        elif oracle is None:
            continue
        elif action == "append":
            world.append(oracle, int(rng.integers(1, 10)))
        elif action == "truncate":
            world.truncate(oracle, int(rng.integers(len(oracle.token_ids) + 1)))
        elif action == "fork" and len(world.live) < 6:
            world.fork(oracle, int(rng.integers(len(oracle.token_ids) + 1)))
        elif action == "release":
            world.release(oracle)
        if step % 5 == 0:
            world.check()
            world.check_rows_behind_the_end()
    for oracle in list(world.live):
        world.release(oracle)
    world.check()
    assert world.cache.num_free_pages == NUM_PAGES


def test_rows_that_were_not_read_clean_are_not_shared(world: World) -> None:
    world.start()
    kv = world.live[0].kv
    assert world.cache.extend(kv, 6)
    world.cache.publish(kv, 4)
    with pytest.raises(ValueError, match="only 4 rows"):
        world.cache.fork(kv, 5)
    assert world.cache.fork(kv, 4).pages == kv.pages[:1]


def test_a_quarantined_page_in_use_is_not_handed_out_when_it_is_given_back(world: World) -> None:
    world.start()
    oracle = world.live[0]
    world.append(oracle, 4)
    page = oracle.kv.pages[0]
    world.cache.quarantine(page)
    world.release(oracle)
    assert page not in world.cache._free
    assert world.cache.num_free_pages == NUM_PAGES - 1


def test_a_fresh_page_has_a_fresh_epoch(world: World) -> None:
    world.start()
    oracle = world.live[0]
    seen: set[int] = set()
    for _ in range(10):
        world.append(oracle, 8)
        epochs = oracle.kv.epochs
        assert seen.isdisjoint(epochs)
        seen.update(epochs)
        world.truncate(oracle, 0)


def test_freed_pages_are_poisoned_in_stream_order(world: World) -> None:
    world.start()
    oracle = world.live[0]
    world.append(oracle, 4)
    page = oracle.kv.pages[0]
    gate = world.device.stream.gate()
    world.release(oracle)
    rows = world.cache.layers[0].k[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
    assert not np.isnan(rows).any()
    gate.open()
    world.device.synchronize()
    assert np.isnan(rows).all()


def test_a_wrong_row_id_writes_nothing_and_is_reported(world: World) -> None:
    world.start()
    oracle = world.live[0]
    world.append(oracle, 6)
    assert world.cache.extend(oracle.kv, 2)
    right = world.executor._row_ids
    world.executor._row_ids = lambda columns, positions: right(columns, positions) + np.array([0, 1])
    step = world.executor.submit([Segment(oracle.kv, 6, [111, 222], 0)])
    _, found = step.result()
    world.executor._row_ids = right
    assert [(f.kind, f.layer, f.position) for f in found] == [
        (faults.FaultKind.ROW_ID, 0, 7),
        (faults.FaultKind.ROW_ID, 1, 7),
    ]
    k = world.device.download(world.cache.layers[0].k)[:, 0]
    assert k[world.cache.row_ids(oracle.kv, np.array([6]))] == 111
    assert 222 not in k


@pytest.mark.parametrize("at", range(NUM_LAYERS))
@pytest.mark.parametrize("shifted", [False, True])
def test_a_page_whose_copy_breaks_off_is_free_again(
    world: World, monkeypatch: pytest.MonkeyPatch, at: int, shifted: bool
) -> None:
    cache, launch, launches = world.cache, world.device.launch, itertools.count()
    kv = cache.new_sequence()
    assert cache.extend(kv, 2 * PAGE_SIZE + 1)
    cache.publish(kv, kv.length)
    other = cache.fork(kv, kv.length)
    zero, one = (np.full((1, 1), value, np.float32) for value in (0, 1))
    turns = [KeyTurn(one[:, :0], zero[:, :0], RopePairing.NORM, 1)] * NUM_LAYERS

    def breaks_off(op: Op, *args: Any) -> None:
        if op.name in ("copy_rows", "shift_rows") and next(launches) == at:
            raise MemoryError
        launch(op, *args)

    monkeypatch.setattr(world.device, "launch", breaks_off)
    with pytest.raises(MemoryError):
        if shifted:
            cache.shift(other, 0, 1, turns)
        else:
            cache.extend(other, 1)
    monkeypatch.undo()
    cache.release(other)
    cache.release(kv)
    assert cache.num_free_pages == NUM_PAGES
