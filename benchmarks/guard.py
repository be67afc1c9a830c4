"""What the guard of the input slots costs: tokens/s with and without it, in interleaved pairs; a row per shape.

    python benchmarks/guard.py [MODEL] [--device gpu] [--inputs zero-copy] [--pairs 20]

Without the guard: a second engine that never waits for a slot and looks at no fault record. It has a slot for every
ubatch that may be queued and one more, so that its inputs are right all the same and both engines compute the same; two
runs of a pair follow each other, in turn first, so that the ratio survives a machine whose speed drifts. Queued ahead:
ubatches that were not done when another was submitted, the median of guarded runs and the most. Correct: whether the
whole row of logits and all K and V rows of guarded prefills, one before and one behind the pairs, equal in every bit
those of an engine with one slot. --prefills N repeats the first prompt, guarded, and counts the runs that differ.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from pyllm.device import open_device
from pyllm.executor import TestHooks
from pyllm.hub import resolve
from pyllm.kv_cache import SequenceKV
from pyllm.llm import LLM, EngineOptions
from pyllm.sampling import Sampled, Sampler, SamplingParams

WARM_UP = 2  # runs of each kind that are not counted: kernels are compiled, steps recorded


class QueueDepth:
    """Notes at each submission how many ubatches are queued and not done."""

    def __init__(self, llm: LLM) -> None:
        self.depths: list[int] = []
        executor, original = llm._executor, llm._executor.submit

        def submit(segments: Any) -> Any:
            step = original(segments)
            self.depths.append(sum(not event.query() for event in executor._queued) - 1)
            return step

        executor.submit = submit  # type: ignore[method-assign]


def open_engine(given: argparse.Namespace, ring: int, guarded: bool = True) -> LLM:
    options = EngineOptions(
        ctx_size=max(given.prompts) + given.new_tokens,
        batch_size=given.inflight * given.ubatch,
        ubatch_size=given.ubatch,
        inflight=given.inflight,
        ring_depth=ring,
        inputs=given.inputs,
        hooks=TestHooks(enforce=guarded),
    )
    llm = LLM.with_options(given.model, open_device(given.device), options)
    if not guarded:
        llm._executor._ring._wait = False
        llm._scheduler._handle_faults = lambda entry, found: None  # type: ignore[method-assign]
    return llm


def rate(llm: LLM, prompt: list[int], new_tokens: int) -> float:
    """Tokens/s of a prefill, or of decoding where more than one token is wanted."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    stream = llm.generate(prompt, params)
    next(stream)
    first = time.perf_counter()
    count = 1 + sum(chunk.token is not None for chunk in stream)
    end = time.perf_counter()
    return len(prompt) / (first - start) if count == 1 else (count - 1) / (end - first)


class Prefill:
    """What a prompt leaves: the row of logits behind it, and its K and V rows in all layers."""

    def __init__(self, llm: LLM, prompt: list[int]) -> None:
        self.arrays: list[Any] = []
        cache, length = llm._cache, len(prompt)

        def keep_rows(seq: SequenceKV) -> None:
            llm._device.synchronize()
            rows = cache.row_ids(seq, np.arange(length))
            self.arrays += [array[:, rows].view(np.uint8) for array in (cache.k, cache.v)]  # where the device has them

        # Log-probabilities are asked for so that whole rows of logits come back.
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=1)
        original = Sampler.sample

        def keep_logits(sampler: Sampler, row: np.ndarray, history: list[int]) -> Sampled:
            self.arrays.append(row.view(np.uint8).copy())
            return original(sampler, row, history)

        cache.before_removal, Sampler.sample = keep_rows, keep_logits  # type: ignore[method-assign]
        try:
            list(llm.generate(prompt, params))
        finally:
            cache.before_removal, Sampler.sample = None, original  # type: ignore[method-assign]
        assert [array.ndim for array in self.arrays] == [1, 3, 3]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Prefill)
        return all(bool((a == b).all()) for a, b in zip(self.arrays, other.arrays, strict=True))


def shapes(
    given: argparse.Namespace, rng: np.random.Generator, vocab_size: int
) -> Iterator[tuple[str, list[int], int]]:
    """Name, prompt and new tokens of each shape."""
    for length in given.prompts:
        yield f"prefill {length:,}", rng.integers(0, vocab_size, length).tolist(), 1
    yield f"decode {given.new_tokens:,}", [1, 2, 3], given.new_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--inputs", default="zero-copy", choices=["copy", "zero-copy"])
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[21000, 2000])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--ubatch", type=int, default=512, help="tokens")
    parser.add_argument("--inflight", type=int, default=8, help="ubatches queued ahead")
    parser.add_argument("--ring", type=int, default=4, help="input slots; fewer than --inflight, or nothing ever waits")
    parser.add_argument("--prefills", type=int, default=0)
    given = parser.parse_args()
    given.model = resolve(given.model)
    rng = np.random.default_rng(1)
    with open_engine(given, ring=1) as llm:
        prompt = rng.integers(0, llm.tokenizer.vocab_size, given.prompts[0]).tolist()
        expected = Prefill(llm, prompt)
    rows = []
    with open_engine(given, given.ring) as llm:
        right = Prefill(llm, prompt) == expected
        if given.pairs:
            with open_engine(given, given.inflight + 1, guarded=False) as other:
                rows = [measure(llm, other, given, *shape) for shape in shapes(given, rng, llm.tokenizer.vocab_size)]
            right = right and Prefill(llm, prompt) == expected
        queue = QueueDepth(llm)
        progress = tqdm(range(given.prefills), unit="prefill", disable=None)
        wrong = sum(Prefill(llm, prompt) != expected for _ in progress)
        device = llm.device_description
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print("| device | commit | model | inputs | shape | guarded | not guarded | ratio | queued ahead | correct |")
    print("| --- " * 10 + "|")
    for row in rows:
        head = f"{device} | {commit.stdout.strip() or '-'} | {given.model.name} | {given.inputs}"
        print(f"| {head} | {row} | {'yes' if right else 'NO'} |")
    if given.prefills:
        print(
            f"\n{wrong} of {given.prefills:,} guarded prefills of {len(prompt):,} tokens differ in logits, K or V from "
            f"one slot; {given.ring} slots, up to {max(queue.depths)} ubatches queued ahead"
        )


def measure(llm: LLM, other: LLM, given: argparse.Namespace, name: str, prompt: list[int], new_tokens: int) -> str:
    """Columns from the shape to what is queued ahead; `other` is the engine without the guard."""
    queue, pairs, depths = QueueDepth(llm), [], []
    for index in range(WARM_UP + given.pairs):
        rates = {}
        for engine in (llm, other) if index % 2 else (other, llm):
            queue.depths.clear()
            rates[engine is llm] = rate(engine, prompt, new_tokens)
            depths += [list(queue.depths)] if engine is llm else []
        pairs.append(rates)
    counted = pairs[WARM_UP:]
    guarded, unguarded = (statistics.median(pair[kind] for pair in counted) for kind in (True, False))
    ratio = statistics.median(pair[True] / pair[False] for pair in counted)
    ahead = f"{statistics.median(map(statistics.median, depths[WARM_UP:])):.0f}, at most {max(map(max, depths))}"
    return f"{name} | {guarded:,.0f} t/s | {unguarded:,.0f} t/s | {ratio:.3f} | {ahead}"


if __name__ == "__main__":
    main()
