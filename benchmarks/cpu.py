"""Prefill and decode on the CPU beside the bare matrix products of the same shapes; prints a row for BENCHMARKS.md.

    python benchmarks/cpu.py [MODEL]

The bare products are those of one forward pass with the model's own float32 weights: x @ w.T for every matrix, nothing
else. Engine and products are timed in turn, so that the ratio survives a machine whose speed drifts. The correctness
figure is the share of greedy tokens that equal the reference continuations of the demo model.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from pyllm import LLM, SamplingParams
from pyllm.hub import resolve

PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 512, 64, 5
REFERENCE = Path(__file__).parents[1] / "tests" / "data" / "refdata" / "real" / "greedy_smollm2_exact.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--depth", type=int, default=4, help="tokens before those that are decoded")
    arguments = parser.parse_args()
    model = arguments.model
    with LLM(resolve(model), device="cpu") as llm:
        matrices = [weight.array for weight in llm.weights.matrices]
        output_rows = max(len(matrix) for matrix in matrices)
        rounds = [measure(llm, matrices, output_rows, arguments.depth) for _ in range(ROUNDS)]
        right = correct_share(llm) if model == "demo" else None
    prefill, bare_prefill, decode, bare_decode = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = [(a / b, c / d) for a, b, c, d in rounds]
    prefill_share, decode_share = (statistics.median(column) for column in zip(*ratios, strict=True))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        "| machine | commit | model | prefill 512 | bare products | share | decode | bare products | share | correct |"
    )
    print("| --- " * 10 + "|")
    print(
        f"| {processor()} | {commit.stdout.strip()} | {model} | {prefill:.0f} t/s | {bare_prefill:.0f} t/s | "
        f"{prefill_share:.0%} | {decode:.1f} t/s | {bare_decode:.1f} t/s | {decode_share:.0%} | "
        f"{'-' if right is None else f'{right:.1%} of greedy tokens'} |"
    )


def measure(llm: LLM, matrices: list[np.ndarray], output_rows: int, depth: int) -> tuple[float, float, float, float]:
    """Tokens/s of prefill, its bare products, decode behind `depth` tokens, its bare products."""
    # The logits of a prompt are computed for its last token only: so are the products of the output matrix.
    bare_prefill = products(matrices, {output_rows: 1}, PROMPT_TOKENS, passes=2)
    prompt = np.random.default_rng().integers(0, llm.tokenizer.vocab_size, PROMPT_TOKENS).tolist()
    list(llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)))
    prefill_seconds = llm.stats["prefill_seconds"]
    bare_decode = products(matrices, {}, 1, passes=NEW_TOKENS)
    at_depth = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    list(llm.generate(prompt[:depth], at_depth))
    return (
        PROMPT_TOKENS / prefill_seconds,
        PROMPT_TOKENS / bare_prefill,
        (NEW_TOKENS - 1) / llm.stats["decode_seconds"],
        1 / bare_decode,
    )


def products(matrices: list[np.ndarray], tokens_of: dict[int, int], num_tokens: int, passes: int) -> float:
    """Seconds of all x @ w.T: the mean of several passes, as the engine's figures are means over its tokens."""
    rng = np.random.default_rng(0)
    inputs = [
        rng.standard_normal((tokens_of.get(len(matrix), num_tokens), matrix.shape[1]), np.float32)
        for matrix in matrices
    ]
    outputs = [np.empty((len(x), len(matrix)), np.float32) for x, matrix in zip(inputs, matrices, strict=True)]
    start = time.perf_counter()
    for _ in range(passes):
        for x, matrix, out in zip(inputs, matrices, outputs, strict=True):
            np.matmul(x, matrix.T, out=out)
    return (time.perf_counter() - start) / passes


def correct_share(llm: LLM) -> float:
    """Share of the reference continuations' tokens that the engine chooses, up to the first difference of each."""
    right = total = 0
    for case in json.loads(REFERENCE.read_text())["prompts"]:
        expected = case["continuation"]
        params = SamplingParams(max_tokens=len(expected), temperature=0, ignore_eos=True)
        found = [chunk.token for chunk in llm.generate(case["prompt_ids"], params)]
        total += len(expected)
        right += next((i for i, pair in enumerate(zip(found, expected, strict=True)) if len(set(pair)) > 1), len(found))
    return right / total


def processor() -> str:
    """The machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
