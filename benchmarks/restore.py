"""What bringing a long conversation back costs, beside computing it, and what saves and loads cost those who decode.

    python benchmarks/restore.py [MODEL] [--device gpu] [--tokens 20000] [--new 16] [--folder /tmp] [--repeats 3]

First a prompt of random tokens is computed, then it is saved, forgotten and loaded, and 16 more tokens follow; seconds
are those to the first token. Then another sequence decodes, in turns alone and while this conversation is saved or
loaded again and again in a second thread. The answers of all runs have to be the same tokens, up to the first that is
less than 0.05 in log-probability ahead of the next, which rounding may decide: a prompt that is computed and its last
tokens alone go through other kernels. Else the status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pyllm import LLM, SamplingParams
from pyllm.generation import Chunk
from pyllm.hub import resolve

MARGIN = 0.05

Answer = list[tuple[int, float]]  # tokens, and how far each was ahead


class Bench:
    """One engine, and the conversation that is saved and restored."""

    def __init__(self, llm: LLM, tokens: int, new: int, path: Path) -> None:
        self.llm, self.path = llm, path
        rng = np.random.default_rng(1)
        vocabulary = llm.tokenizer.vocab_size
        self.prompt, self.question, self.other = (
            rng.integers(0, vocabulary, count).tolist() for count in (tokens, 16, 100)
        )
        self.params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, logprobs=2)
        self.compared = self.wrong = 0
        self.known: dict[str, Answer] = {}

    def first_token(self) -> tuple[float, int]:
        """Seconds to the first token behind prompt and question, and how many tokens came from the cache."""
        started = time.perf_counter()
        chunks = self.llm.generate([*self.prompt, *self.question], self.params)
        first = next(chunks)
        seconds = time.perf_counter() - started
        self.check("conversation", [first, *chunks])
        return seconds, self.llm.stats["cached_tokens"]

    def check(self, name: str, chunks: Sequence[Chunk]) -> None:
        """Whether these are what came out of the same prompt before."""
        shown = [(chunk.token, chunk.top_logprobs) for chunk in chunks if chunk.token is not None]
        found = [(token, top[0][1] - top[1][1]) for token, top in shown]
        for (token, margin), (other, _) in zip(found, self.known.setdefault(name, found), strict=True):
            if margin < MARGIN:
                break
            self.compared += 1
            self.wrong += token != other

    def compute(self) -> float:
        self.llm.forget()
        seconds, cached = self.first_token()
        assert not cached, "computed, but not all of it"
        return seconds

    def save(self) -> float:
        started = time.perf_counter()
        self.llm.save_session(self.path, self.prompt)
        return time.perf_counter() - started

    def load(self) -> float:
        started = time.perf_counter()
        self.llm.load_session(self.path)
        return time.perf_counter() - started

    def restore(self) -> tuple[float, float]:
        """Seconds to load, and to the first token then."""
        self.llm.forget()
        loaded = self.load()
        seconds, cached = self.first_token()
        assert cached == len(self.prompt), f"{cached} of {len(self.prompt)} tokens were restored"
        return loaded, seconds

    def decode(self, count: int) -> float:
        """Tokens per second of another sequence."""
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        chunks = self.llm.generate(self.other, params)
        next(chunks)
        started = time.perf_counter()
        tokens = sum(chunk.token is not None for chunk in chunks)
        return tokens / (time.perf_counter() - started)

    def beside(self, work: Callable[[], None], count: int) -> tuple[float, int]:
        """The same while a thread does `work` again and again; and how many times it did."""
        stop, done, errors = threading.Event(), [0], []

        def again() -> None:
            try:
                while not stop.is_set():
                    work()
                    done[0] += 1
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=again)
        thread.start()
        try:
            rate = self.decode(count)
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]
        return rate, done[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--decode", type=int, default=1500, help="tokens that the other sequence decodes")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    room = options.tokens + options.decode + options.new + 1000
    with LLM(resolve(options.model), device=options.device, ctx_size=room, n_seqs=2, prefix_cache=True) as llm:
        path = options.folder / "restore.session"
        bench = Bench(llm, options.tokens, options.new, path)
        try:
            report(bench, options.repeats, options.decode)
        finally:
            path.unlink(missing_ok=True)
    print(f"answers: {bench.compared - bench.wrong} of {bench.compared} tokens equal those of the first run")
    return int(bool(bench.wrong) or not bench.compared)


def report(bench: Bench, repeats: int, count: int) -> None:
    print(bench.llm.device_description)
    bench.compute()  # compiles, records
    computed = statistics.median(bench.compute() for _ in range(repeats))
    saved = statistics.median(bench.save() for _ in range(repeats))
    size = bench.path.stat().st_size
    restored = [bench.restore() for _ in range(repeats)]
    loaded, first = (statistics.median(values) for values in zip(*restored, strict=True))
    print(
        f"{len(bench.prompt)} tokens, {size / 1e9:.2f} GB: first token after {computed:.3f} s computed; saved in "
        f"{saved:.2f} s; loaded in {loaded:.3f} s, {size / loaded / 1e9:.1f} GB/s, first token {first:.3f} s later"
    )

    def reload() -> None:
        bench.llm.forget(bench.prompt)
        bench.load()

    bench.decode(count)
    rates: dict[str, list[float]] = {"alone": [], "saves": [], "loads": []}
    times = {"saves": 0, "loads": 0}
    for _ in range(repeats):
        rates["alone"].append(bench.decode(count))
        for name, work in (("saves", lambda: bench.save()), ("loads", reload)):
            rate, done = bench.beside(work, count)
            rates[name].append(rate)
            times[name] += done
    alone = statistics.median(rates["alone"])
    for name in ("saves", "loads"):
        rate = statistics.median(rates[name])
        print(f"decode beside {times[name]} {name}: {rate:.0f} t/s, {rate / alone:.1%} of {alone:.0f} alone")


if __name__ == "__main__":
    sys.exit(main())
