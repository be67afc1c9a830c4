"""Pages that leave the device go to the host's memory and come back when a prompt begins like them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pyllm.device.emulated import EmulatedDevice
from pyllm.device.host import HostDevice
from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.kv_types import KV_TYPES
from pyllm.llm import LLM
from pyllm.prompt_cache.host_tier import HostTier
from pyllm.prompt_cache.index import PrefixIndex
from pyllm.prompt_cache.page_copies import PageCopies
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path, reference

SIZE, PAGES = 4, 12
PLAIN, HYBRID = "llama-a-f32", "qwen3next-b-eqheads-bf16"
IDS = {PLAIN: list(range(3, 150)), HYBRID: reference("qwen3next-b-eqheads")["n300_tokens"].tolist()}


class World:
    """A cache whose rows say which tokens they stand for."""

    def __init__(self, blocks: int = 50) -> None:
        self.device = HostDevice(poison=True)
        self.cache = KVCache(self.device, 2, 8, 8, PAGES, SIZE, KV_TYPES["f32"])
        size = PageCopies(self.cache).num_bytes
        self.tier = HostTier(self.cache, blocks * size)
        self.index = PrefixIndex(self.cache, self.tier)

    def value(self, tokens: list[int], position: int) -> float:
        return float(sum(token * (i + 1) for i, token in enumerate(tokens[: position + 1])) % 9973)

    def write(self, seq: SequenceKV, tokens: list[int], start: int) -> None:
        """What a step does: rows under their tags, queued."""
        positions = np.arange(start, len(tokens))
        rows, epochs = self.cache.row_ids(seq, positions), [seq.epochs[p // SIZE] for p in positions]

        def run() -> None:
            for row, epoch, position in zip(rows, epochs, positions, strict=True):
                self.cache.k[:, row] = self.cache.v[:, row] = self.value(tokens, position)
                self.cache.tags[:, row] = epoch

        self.device.stream.enqueue(run)

    def check(self, seq: SequenceKV, tokens: list[int]) -> None:
        self.device.synchronize()
        for position in range(seq.length):
            row = int(self.cache.row_ids(seq, np.array([position]))[0])
            assert (self.cache.tags[:, row] == seq.epochs[position // SIZE]).all()
            for rows in (self.cache.k, self.cache.v):
                assert (rows[:, row] == self.value(tokens, position)).all()

    def run(self, tokens: list[int]) -> int:
        """A prompt that runs and ends; returns how many tokens were known."""
        known = self.index.take(tokens[:-1])
        seq = known.seq if known is not None else self.cache.new_sequence()
        if known is not None and known.ready is not None:
            known.ready.synchronize()
        start = seq.length
        self.check(seq, tokens)
        needed = self.cache.pages_for(len(tokens)) - len(seq.pages) + (not seq.owns_tail)
        assert self.index.make_room(needed)
        assert self.cache.extend(seq, len(tokens) - start)
        self.write(seq, tokens, start)
        self.check(seq, tokens)
        self.cache.publish(seq, len(tokens))
        self.index.keep(tokens, seq)
        self.cache.release(seq)
        return start


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.device.close()


def test_a_conversation_comes_back(world: World) -> None:
    first = list(range(1, 31))
    assert world.run(first) == 0
    for start in (100, 200, 300):
        assert world.run(list(range(start, start + 40))) == 0
    assert all(node.page < 0 for node in world.index._tree.nodes() if node.tokens[0] < 100)
    assert world.run([*first, 5, 6]) == 30
    assert world.index.num_brought_in > 0


def test_random_conversations_on_few_pages() -> None:
    rng = random.Random(1)
    for blocks in (0, 3, 8, 50):
        world = World(blocks)
        known: list[list[int]] = [[]]
        for _ in range(150):
            base = rng.choice(known)[: rng.randrange(30)]
            tokens = base + [rng.randrange(4) for _ in range(rng.randrange(1, 45 - len(base)))]
            world.run(tokens)
            known.append(tokens)
            assert world.tier.pool.num_allocated <= blocks
        world.device.copies.record().synchronize()
        world.index._settle()
        owned = [node.page for node in world.index._tree.nodes() if node.page >= 0]
        assert world.cache.num_free_pages == PAGES - len(owned)
        world.index.clear()
        assert world.cache.num_free_pages == PAGES
        world.device.copies.record().synchronize()
        assert world.tier.pool.bytes_in_use == 0
        world.device.close()


def test_pages_stay_where_they_are_until_their_copy_has_run(world: World) -> None:
    world.run(list(range(1, 41)))
    world.device.copies.record().synchronize()
    world.index._settle()
    gate = world.device.copies.stream.gate()
    world.run(list(range(100, 109)))  # leaves few pages free: some are copied, behind the gate
    held = [page for _, page in world.index._moving]
    assert held
    world.index.clear()
    assert not set(held) & set(world.cache._free)
    gate.open()
    world.device.copies.record().synchronize()
    world.index._settle()
    assert world.cache.num_free_pages == PAGES


def test_a_page_that_is_still_being_copied_on_the_device_is_saved_whole(world: World) -> None:
    """Its sequence parted from another inside a page and ended at once, with the copy still queued."""
    first = list(range(1, 15))
    world.run(first)
    gate = world.device.gate()
    known = world.index.take(first[:10])
    assert known is not None
    seq = known.seq
    assert world.cache.extend(seq, 1)  # the page is copied, behind the gate
    world.index.clear()
    world.index.keep(first[:10], seq)
    world.cache.release(seq)
    for node in world.index._tree.by_age():
        world.index._copy(node)
    assert not world.device.copies.record()._reached.wait(0.3)  # they wait for the copy on the device
    gate.open()
    copies = [node.host for node in world.index._tree.nodes() if node.host is not None]
    assert len(copies) == 3 and all(map(world.tier.is_sound, copies))


def test_a_copy_that_was_damaged_is_not_used(world: World) -> None:
    first = list(range(1, 31))
    world.run(first)
    world.run(list(range(100, 140)))
    world.device.copies.record().synchronize()
    for node in world.index._tree.nodes():
        if node.start == 8 and node.tokens[0] == 9 and node.host is not None:
            node.host.block.memory[-4:] ^= 1
    assert world.run([*first, 1]) == 8


def test_a_budget_that_is_too_small_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(blocks=0)
    for start in (0, 100, 200):
        world.run(list(range(start, start + 40)))
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "no room for a page" in caplog.records[0].getMessage()
    world.device.close()


def engine(name: str, device: HostDevice | None = None, **options: Any) -> LLM:
    options = {"ctx_size": 80, "page_size": 8, "prefix_cache": True, "cache_ram": 1 << 22, **options}
    return open_engine(model_path(name), device, **options)


@pytest.mark.parametrize("name", [PLAIN, HYBRID])
def test_more_conversations_than_the_device_holds(name: str) -> None:
    """Four of them on room for one and a half, in turns: each goes on from what is in the host's memory."""
    with engine(name) as llm, engine(name, prefix_cache=False) as fresh:
        talks = [IDS[name][10 * index : 10 * index + 30] for index in range(4)]
        for turn in range(3):
            for index, talk in enumerate(talks):
                answer = tokens(llm.generate(talk, greedy(5)))
                assert answer == tokens(fresh.generate(talk, greedy(5)))
                assert not turn or llm.stats["cached_tokens"] >= len(talk) - 3
                talks[index] = [*talk, *answer, 7, 8]
        memory = llm.stats["memory"]
        assert memory["pages"]["high_water_bytes"] <= memory["pages"]["budget_bytes"] <= 1 << 22


def test_several_sequences_while_pages_come_and_go() -> None:
    rng = np.random.default_rng(0)
    with engine(PLAIN, n_seqs=3, ctx_size=48) as llm, engine(PLAIN, prefix_cache=False) as fresh:
        talks = [IDS[PLAIN][20 * index : 20 * index + 25] for index in range(6)]
        for _ in range(8):
            chosen = rng.permutation(6)[:3].tolist()
            running = [llm.begin(talks[index], greedy(4)) for index in chosen]
            found: list[list[int]] = [[] for _ in chosen]
            while any(generation.stats()["finish_reason"] is None for generation in running):
                llm.advance()
            for out, generation in zip(found, running, strict=True):
                while (chunk := generation.take()) is not None:
                    out.append(chunk.token or 0)
                generation.close()
            for index, out in zip(chosen, found, strict=True):
                assert out == tokens(fresh.generate(talks[index], greedy(4)))


def test_sessions_are_saved_from_the_hosts_memory(tmp_path: Any) -> None:
    with engine(PLAIN) as llm:
        talk = IDS[PLAIN][:40]
        answer = tokens(llm.generate(talk, greedy(3)))
        tokens(llm.generate(IDS[PLAIN][60:130], greedy(3)))
        assert llm._kept is not None
        held = llm._kept.index.hold(talk)
        assert any(page < 0 for page in held.pages)
        llm._kept.index.let_go(held)
        llm.save_session(tmp_path / "s", talk)
    with engine(PLAIN) as llm, engine(PLAIN, prefix_cache=False) as fresh:
        assert len(llm.load_session(tmp_path / "s").token_ids) == 40
        assert tokens(llm.generate(talk, greedy(3))) == answer == tokens(fresh.generate(talk, greedy(3)))
        assert llm.stats["cached_tokens"] == 39


def test_kernels_see_the_rows_that_came_back() -> None:
    with engine(PLAIN, EmulatedDevice(), ctx_size=40) as llm, engine(PLAIN, EmulatedDevice(), ctx_size=40) as fresh:
        talk = IDS[PLAIN][:20]
        first = tokens(llm.generate(talk, greedy(3)))
        tokens(llm.generate(IDS[PLAIN][60:95], greedy(2)))
        again = tokens(llm.generate(talk, greedy(3)))
        assert llm.stats["cached_tokens"] == 19
        assert again == first == tokens(fresh.generate(talk, greedy(3)))
