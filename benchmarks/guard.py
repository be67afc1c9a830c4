"""What the guard of the input slots costs: tokens/s with and without it, in interleaved pairs; a row per shape.

    python benchmarks/guard.py [MODEL] [--device gpu] [--inputs zero-copy] [--pairs 20]

Without the guard, slots are handed out while the device may still read them, and nobody looks at what the checks find:
the tokens may be wrong then, but as many are computed. Both runs of a pair are on one engine, in turn, so that the
ratio survives a machine whose speed drifts. Queued ahead: ubatches that were not done when another was submitted, the
median of guarded runs. Correct: whether logits of guarded prefills, one before and one behind the pairs, equal in every
bit those of an engine with one slot. --prefills N repeats the first prompt, guarded, and counts the runs whose logits
differ.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pyllm.device import open_device
from pyllm.executor import TestHooks
from pyllm.hub import resolve
from pyllm.llm import LLM, EngineOptions
from pyllm.sampling import SamplingParams

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


@contextmanager
def guard(llm: LLM, guarded: bool) -> Iterator[None]:
    """Switch the guard of an engine on or off for a while."""
    executor, scheduler = llm._executor, llm._scheduler
    hooks, handle = executor._hooks, scheduler._handle_faults
    if not guarded:
        executor._hooks, executor._ring._wait = TestHooks(enforce=False), False
        scheduler._handle_faults = lambda entry, found: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm._device.synchronize()
        executor._hooks, executor._ring._wait, scheduler._handle_faults = hooks, True, handle  # type: ignore[method-assign]


def open_engine(given: argparse.Namespace, ring: int) -> LLM:
    options = EngineOptions(
        ctx_size=max(given.prompts) + given.new_tokens,
        batch_size=given.inflight * given.ubatch,
        ubatch_size=given.ubatch,
        inflight=given.inflight,
        ring_depth=ring,
        inputs=given.inputs,
    )
    return LLM.with_options(given.model, open_device(given.device), options)


def rate(llm: LLM, guarded: bool, prompt: list[int], new_tokens: int) -> float:
    """Tokens/s of a prefill, or of decoding where more than one token is wanted."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    with guard(llm, guarded):
        start = time.perf_counter()
        stream = llm.generate(prompt, params)
        next(stream)
        first = time.perf_counter()
        count = 1 + sum(chunk.token is not None for chunk in stream)
        end = time.perf_counter()
    return len(prompt) / (first - start) if count == 1 else (count - 1) / (end - first)


def last_logits(llm: LLM, prompt: list[int]) -> np.ndarray:
    """The row behind a prompt, as its log-probabilities show it."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=20)
    (chunk,) = llm.generate(prompt, params)
    return np.array([(token, value) for token, value in chunk.top_logprobs])


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
        expected = last_logits(llm, prompt)
    with open_engine(given, given.ring) as llm:
        before = last_logits(llm, prompt)
        # All tags are equal from here on: reports of stale rows take time that an engine without checks would not need.
        llm._cache._next_epoch = itertools.repeat(1)
        rows = [measure(llm, given, *shape) for shape in shapes(given, rng, llm.tokenizer.vocab_size)]
        right = (before == expected).all() and (last_logits(llm, prompt) == expected).all()
        wrong = sum(not (last_logits(llm, prompt) == expected).all() for _ in range(given.prefills))
        device = llm.device_description
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print("| device | commit | model | inputs | shape | guarded | not guarded | ratio | queued ahead | correct |")
    print("| --- " * 10 + "|")
    for row in rows:
        head = f"{device} | {commit.stdout.strip() or '-'} | {given.model.name} | {given.inputs}"
        print(f"| {head} | {row} | {'yes' if right else 'NO'} |")
    if given.prefills:
        print(f"\n{wrong} of {given.prefills:,} guarded prefills of {len(prompt):,} tokens differ from one slot")


def measure(llm: LLM, given: argparse.Namespace, name: str, prompt: list[int], new_tokens: int) -> str:
    """Columns from the shape to what is queued ahead."""
    queue, pairs, depths = QueueDepth(llm), [], []
    for index in range(WARM_UP + given.pairs):
        rates = {}
        for guarded in (True, False) if index % 2 else (False, True):
            queue.depths.clear()
            rates[guarded] = rate(llm, guarded, prompt, new_tokens)
            depths += [statistics.median(queue.depths)] if guarded else []
        pairs.append(rates)
    counted = pairs[WARM_UP:]
    guarded, other = (statistics.median(pair[kind] for pair in counted) for kind in (True, False))
    ratio = statistics.median(pair[True] / pair[False] for pair in counted)
    return f"{name} | {guarded:,.0f} t/s | {other:,.0f} t/s | {ratio:.3f} | {statistics.median(depths[WARM_UP:]):.0f}"


if __name__ == "__main__":
    main()
