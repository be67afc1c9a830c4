"""How much faster `pyllm batch` answers lines side by side than one by one, and what share of the time is its own.

    python benchmarks/batch.py [MODEL] [--lines 64] [--tokens 24] [--parallel 8] [--rounds 3] [--device cpu]

Each round is two processes, --parallel 1 and --parallel N, in turns; times are those of the lines, without loading. The
answers must be the same, or the status is 1. Keys and values are kept in float32, so that on a CPU they are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--lines", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def answered(options: argparse.Namespace, folder: Path, parallel: int) -> tuple[dict[str, Any], dict[int, str]]:
    """The "end" event of a batch, and its answers by line."""
    out = folder / f"{parallel}.jsonl"
    command = [sys.executable, str(ROOT / "cli.py"), "batch", options.model, str(folder / "in.jsonl"), "-o", str(out)]
    command += ["--overwrite", "--temp", "0", "--ignore-eos", "--kv-type", "f32", "--device", options.device]
    command += ["--parallel", str(parallel), "--progress", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    records = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return json.loads(done.stderr.splitlines()[-1]), {record["line"]: record["text"] for record in records}


def main() -> int:
    options = arguments()
    times: dict[int, list[float]] = {1: [], options.parallel: []}
    shares, differing = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "in.jsonl").open("w", encoding="utf-8") as file:
            for number in range(options.lines):
                prompt = f"Write a sentence about the number {number}."
                file.write(json.dumps({"prompt": prompt, "max_tokens": options.tokens}) + "\n")
        for _ in range(options.rounds):
            texts = []
            for parallel, seconds in times.items():
                end, answers = answered(options, folder, parallel)
                seconds.append(end["seconds"])
                texts.append(answers)
                if parallel > 1:
                    shares.append(1 - end["engine_seconds"] / end["seconds"])
            differing += sum(texts[0][line] != texts[1][line] for line in texts[0])
    one, many = (statistics.median(seconds) for seconds in times.values())
    tokens = options.lines * options.tokens
    print(f"{options.lines} lines of {options.tokens} tokens, medians of {options.rounds} rounds")
    print(f"one by one: {one:.2f} s, {tokens / one:.1f} tokens/s")
    print(f"{options.parallel} at a time: {many:.2f} s, {tokens / many:.1f} tokens/s, {one / many:.2f} times as fast")
    print(f"share of the batch layer: {100 * statistics.median(shares):.2f} %")
    print(f"answers that differ: {differing} of {options.lines * options.rounds}")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
