"""How fast states, pages and sessions are copied, next to a pinned copy on the same device; a line per kind.

    python benchmarks/kept.py [--device gpu] [--tokens 20000] [--folder /tmp]

States are those of a 35B-A3B hybrid (30 layers, 66 MB), pages those of the qwen3-8b shape in float16 (36 layers, 1,024
numbers for K and for V). All content is random, and compared bit for bit after it came back; rates are medians of
--repeats runs, from the first call to the last event. A session is written, synced, forgotten and read by the same code
as in `pyllm chat --session`; beside it the rates of one thread that reads its file, and that computes CRC-32. The steps
beside saves copy a page in each of 36 layers, a launch for each; saves go on all the time.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.device import Device, open_device
from pyllm.guests import Guests
from pyllm.kv_cache import KVCache
from pyllm.kv_types import KV_TYPES
from pyllm.ops.copy_rows import copy_rows
from pyllm.prompt_cache.index import PrefixIndex
from pyllm.prompt_cache.page_copies import PageCopies
from pyllm.prompt_cache.pinned_pool import PinnedPool
from pyllm.prompt_cache.sessions import Sessions
from pyllm.recurrent_cache import RecurrentCache
from pyllm.recurrent_state import RecurrentShape

HYBRID = RecurrentShape(tuple(range(30)), 4, 8192, 32, 128)
LAYERS, WIDTH, PAGE = 36, 1024, 64
STATES = 8
PINNED = 256 << 20
PARTS = (
    "architecture",
    "name",
    "types",
    "metadata",
    "weights",
    "tokenizer",
    "kv_type",
    "page_size",
    "shapes",
    "layout",
)


class Bench:
    """One device and how often things are repeated."""

    def __init__(self, device: Device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def seconds(self, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
        taken = []
        for _ in range(self.repeats):
            before()
            self.settle()
            started = time.perf_counter()
            work()
            self.device.copies.record().synchronize()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    def settle(self) -> None:
        self.device.synchronize()
        self.device.copies.record().synchronize()

    def pinned(self) -> None:
        array, buffer = self.device.empty((PINNED,), np.uint8), self.device.pinned(PINNED)
        copies = self.device.copies
        out = self.seconds(lambda: copies.copy(array, buffer.memory))
        back = self.seconds(lambda: copies.copy(buffer.memory, array))
        self.tell(f"pinned copy of {PINNED >> 20} MB", PINNED, out, back)

    def states(self) -> None:
        cache = RecurrentCache(self.device, HYBRID, STATES, STATES * 70 << 20)
        size, states = cache.bytes_per_checkpoint, [cache.new_state() for _ in range(STATES)]
        rows = np.random.default_rng(1).random((STATES, HYBRID.row_size), np.float32)
        for state, row in zip(states, rows, strict=True):
            state.position = 7
            marks = np.tile(np.array([state.epoch, 7], np.uint32), (len(HYBRID.layers), 1))
            for values, target in ((row, cache.rows.values), (marks, cache.rows.marks)):
                self.write(values, target[state.row])

        def drop() -> None:
            for state in states:
                cache._drop_checkpoints(state)

        def save() -> None:
            assert all(cache.save(state) for state in states)

        save()  # pins the memory
        out = self.seconds(save, drop)
        saved = [cache.hand_over(state)[0] for state in states]
        assert all((one.values == row).all() for one, row in zip(saved, rows, strict=True)), "states differ"
        restored: list[Any] = []

        def restore() -> None:
            restored.extend(cache.restore(one) for one in saved)

        def release() -> None:
            for state in [*states, *(state for state, _ in restored)]:
                cache.release(state)
            states.clear()
            restored.clear()

        back = self.seconds(restore, release)
        for (state, _), row in zip(restored, rows, strict=True):
            assert (self.device.download(cache.rows.values[state.row]) == row).all(), "states differ"
        self.tell(f"states of {size / 1e6:.1f} MB, {STATES} in a row", STATES * size, out, back)

    def pages(self, tokens: int, folder: Path) -> None:
        count = -(-tokens // PAGE)
        cache = KVCache(self.device, LAYERS, WIDTH, WIDTH, 2 * count + 20, PAGE, KV_TYPES["f16"])
        index = PrefixIndex(cache)
        ids = self.sequence(cache, index, tokens)
        copies = PageCopies(cache)
        pool = PinnedPool(self.device, copies.num_bytes, count * copies.num_bytes, "a page")
        blocks = [block for block in (pool.take() for _ in range(count)) if block is not None]
        held = index.hold(ids)
        targets = [cache.allocate() for _ in range(count)]

        def save() -> None:
            for place, block in enumerate(blocks):
                copies.save(held.pages[place], held.rows_of(place), block)

        def load() -> None:
            for place, (block, (page, epoch)) in enumerate(zip(blocks, targets, strict=True)):
                copies.load(block, page, held.rows_of(place), epoch)

        out, back = self.seconds(save), self.seconds(load)
        self.compare(cache, held, [page for page, _ in targets])
        self.tell(f"{count} pages of {copies.num_bytes / 1e6:.1f} MB", count * copies.num_bytes, out, back)
        self.beside(cache, save, (held.pages[0], held.epochs[0]), targets[0])
        for block in blocks:
            pool.give_back(block)
        for page, _ in targets:
            cache.let_go(page)
        self.session(cache, index, ids, held, folder)

    def sequence(self, cache: KVCache, index: PrefixIndex, tokens: int) -> list[int]:
        """Random rows under their tags, known to the index."""
        rng, seq, ids = np.random.default_rng(2), cache.new_sequence(), list(range(tokens))
        assert cache.extend(seq, tokens)
        for page, epoch in zip(seq.pages, seq.epochs, strict=True):
            rows = slice(page * PAGE, (page + 1) * PAGE)
            for layer in range(LAYERS):
                for target in (cache.k, cache.v):
                    self.write(rng.integers(0, 31000, (PAGE, WIDTH), np.uint16).view(np.float16), target[layer, rows])
                self.write(np.full(PAGE, epoch, np.uint32), cache.tags[layer, rows])
        self.settle()
        cache.publish(seq, tokens)
        index.keep(ids, seq)
        cache.release(seq)
        return ids

    def write(self, values: np.ndarray, target: Any) -> None:
        """Host values into device memory, through pinned memory."""
        buffer = self.device.pinned(values.nbytes)
        pinned = buffer.writable().view(values.dtype).reshape(values.shape)
        pinned[...] = values
        self.device.copies.copy(pinned, target)
        self.device.release_pinned(buffer, self.device.copies.record())

    def compare(self, cache: KVCache, held: Any, pages: list[int]) -> None:
        for place in range(0, len(pages), max(1, len(pages) // 8)):
            count = held.rows_of(place)
            for rows in (cache.k, cache.v):
                left, right = (
                    self.device.download(rows[place % LAYERS, page * PAGE : page * PAGE + count]).view(np.uint16)
                    for page in (held.pages[place], pages[place])
                )
                assert (left == right).all(), "pages differ"

    def beside(
        self, cache: KVCache, save: Callable[[], None], source: tuple[int, int], target: tuple[int, int]
    ) -> None:
        """Steps of copies of rows, alone and with saves going on all the time."""

        def steps(count: int) -> float:
            started = time.perf_counter()
            for _ in range(count):
                for layer in cache.layers:
                    copy_rows(self.device, layer, source[0] * PAGE, target[0] * PAGE, PAGE, source[1], target[1])
            self.device.synchronize()
            return (time.perf_counter() - started) / count

        steps(20)
        alone, slowest, rounds = steps(200), 0.0, 0
        save()
        while rounds < 3 or self.device.copies.record().query():
            save()
            slowest = max(slowest, steps(20))
            rounds += 1
            if rounds > 20:
                break
        self.settle()
        print(f"steps of {LAYERS} launches: {alone * 1e6:.0f} us alone, at most {slowest * 1e6:.0f} us beside saves")

    def session(self, cache: KVCache, index: PrefixIndex, ids: list[int], held: Any, folder: Path) -> None:
        sessions = Sessions(cache, index, threading.RLock(), Guests(), dict.fromkeys(PARTS, "bench"), 1 << 20)
        path = folder / "bench.session"
        started = time.perf_counter()
        size = sessions.save(path, ids, {}).num_bytes
        saved = time.perf_counter() - started
        buffer, started = np.empty(16 << 20, np.uint8), time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer.data):
                pass
        read, started = time.perf_counter() - started, time.perf_counter()
        zlib.crc32(buffer)
        checked = (time.perf_counter() - started) * size / buffer.nbytes
        taken = []
        for _ in range(self.repeats):
            index.clear()
            started = time.perf_counter()
            sessions.load(path)
            taken.append(time.perf_counter() - started)
        again = index.hold(ids)
        self.compare(cache, held, list(again.pages))
        path.unlink()
        loaded = statistics.median(taken)
        print(
            f"session of {len(ids)} tokens, {size / 1e9:.2f} GB: saved in {saved:.2f} s, loaded in {loaded:.2f} s, "
            f"{size / loaded / 1e9:.1f} GB/s; one thread reads {size / read / 1e9:.1f}, "
            f"CRC-32 {size / checked / 1e9:.1f}"
        )

    def tell(self, what: str, num_bytes: int, out: float, back: float) -> None:
        rates = f"{num_bytes / out / 1e9:.1f} GB/s to the host, {num_bytes / back / 1e9:.1f} back"
        print(f"{what}: {rates} ({out * 1e3:.1f} and {back * 1e3:.1f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = open_device(options.device)
    try:
        bench = Bench(device, options.repeats)
        print(device.description)
        bench.pinned()
        bench.states()
        bench.pages(options.tokens, options.folder)
    finally:
        device.close()


if __name__ == "__main__":
    main()
