"""Prefill and decode on a GPU: tokens/s, launches and host time per token; prints a row for BENCHMARKS.md.

    python benchmarks/gpu.py [MODEL]

Loading, compiling and capturing are left out: a figure is the median of several runs after two that are not counted.
Host time is wall time less what the host spends waiting for events. The correctness figure is the share of greedy
tokens that equal the reference continuations of the demo model, up to the first difference of each.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time

import numpy as np
from cpu import correct_share

from pyllm.device import gpu
from pyllm.hub import resolve
from pyllm.llm import LLM, EngineOptions
from pyllm.sampling import SamplingParams

PROMPTS, NEW_TOKENS, WARM_UP, ROUNDS = (512, 2048, 8000), 128, 2, 5


class Waiting:
    """Adds up the time spent in `GpuEvent.synchronize`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        original = gpu.GpuEvent.synchronize

        def timed(event: gpu.GpuEvent) -> None:
            start = time.perf_counter()
            original(event)
            self.seconds += time.perf_counter() - start

        gpu.GpuEvent.synchronize = timed  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--no-graphs", action="store_true")
    arguments = parser.parse_args()
    device = gpu.GpuDevice(poison=False, graphs=not arguments.no_graphs)
    options = EngineOptions(ctx_size=8192, batch_size=8192)
    with LLM.with_options(resolve(arguments.model), device, options) as llm:
        prefill = [measure_prefill(llm, length) for length in PROMPTS if length < llm.ctx_size]
        decode, launches, host_ms = measure_decode(llm, device)
        right = correct_share(llm) if arguments.model == "demo" else None
        weights = llm.weights.num_bytes
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print("| GPU | commit | model | graphs | prefill | decode | weights read | launches/token | host/token | correct |")
    print("| --- " * 10 + "|")
    print(
        f"| {device.description} | {commit.stdout.strip() or '-'} | {arguments.model} | "
        f"{'off' if arguments.no_graphs else 'on'} | {' / '.join(f'{rate:.0f}' for rate in prefill)} t/s | "
        f"{decode:.0f} t/s | {decode * weights / 1e9:.0f} GB/s | {launches:.0f} | {host_ms:.2f} ms | "
        f"{'-' if right is None else f'{right:.1%}'} |"
    )


def measure_prefill(llm: LLM, length: int) -> float:
    """Tokens/s, the median."""
    rng, rates = np.random.default_rng(), []
    for _ in range(WARM_UP + ROUNDS):
        prompt = rng.integers(0, llm.tokenizer.vocab_size, length).tolist()
        list(llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)))
        rates.append(length / llm.stats["prefill_seconds"])
    return statistics.median(rates[WARM_UP:])


def measure_decode(llm: LLM, device: gpu.GpuDevice) -> tuple[float, float, float]:
    """Tokens/s, launches per token, milliseconds of host time per token."""
    waiting, rates, host, launches = Waiting(), [], [], []
    for _ in range(WARM_UP + ROUNDS):
        stream = llm.generate([1, 2, 3], SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))
        for _ in range(4):  # the prompt, a plain step, a captured one
            next(stream)
        start, waited, launched = time.perf_counter(), waiting.seconds, device.num_launches
        tokens = len(list(stream))
        seconds = time.perf_counter() - start
        rates.append(tokens / seconds)
        host.append(1000 * (seconds - (waiting.seconds - waited)) / tokens)
        launches.append((device.num_launches - launched) / tokens)
    return tuple(statistics.median(column[WARM_UP:]) for column in (rates, launches, host))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
