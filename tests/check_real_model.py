"""Compares a real model with the reference data: tokenisation, greedy continuations, perplexity.

    python -m tests.check_real_model smollm2 PATH
    python -m tests.check_real_model gemma3 PATH
    python -m tests.check_real_model gemma3 PATH gpu

Not part of the test run: the files are large, and only the first is among the models that pyllm fetches. The reference
data hold their SHA-256. Gemma 3 takes about 2 GB of memory.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from pyllm.commands import main as command_line
from pyllm.llm import LLM
from tests.engine import greedy, tokens
from tests.refdata import ROOT
from tests.unit.test_tokenizer import assert_matches_reference

REAL = ROOT / "real"
# By type of the K/V rows; below, two tokens are too close to call.
LEAST_MARGINS = {"f32": 0.01, "f16": 0.05}
GPU_LEAST_MARGINS = {"f16": 0.1}  # products are in float16 there
PERPLEXITY_LIMIT = 0.002


def read(name: str) -> Any:
    return json.loads((REAL / f"{name}.json").read_text())


def check_tokenisation(llm: LLM, name: str) -> None:
    reference = read(f"tokenize_{name}")
    assert_matches_reference(llm.tokenizer, reference)
    print(f"tokenisation: all of {len(reference['strings'])} texts, {len(reference['pieces'])} pieces")


def check_greedy(llm: LLM, cases: list[dict[str, Any]], least_margin: float) -> None:
    for case in cases:
        prompt, expected = case["prompt_ids"], case["continuation"]
        assert llm.tokenize(case["prompt"], parse_special=True) == prompt
        clear = next((i for i, margin in enumerate(case["margin"]) if margin < least_margin), len(expected))
        found = tokens(llm.generate(prompt, greedy(len(expected))))
        same = next(
            (i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), len(expected)
        )
        print(f"  {same} of {len(expected)} tokens equal, {clear} have to be: {case['prompt'][:40]!r}")
        assert same >= clear, f"{found} instead of {expected}"


def check_perplexity(name: str, path: Path, device: str, kv_types: Iterable[str]) -> None:
    expected = read("perplexity")["models"][name]["exact"]["ppl"]
    for kv_type in kv_types:
        options = ["-f", str(REAL / "ppl_text.txt"), "-c", "512", "--device", device, "--kv-type", kv_type, "--json"]
        result = CliRunner().invoke(command_line, ["perplexity", str(path), *options])
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)["perplexity"]
        print(
            f"perplexity, {kv_type} rows: {found:.5f}, reference {expected:.5f}, {found / expected - 1:+.4%}",
            flush=True,
        )
        assert abs(found / expected - 1) <= PERPLEXITY_LIMIT


def main(name: str, path: Path, device: str = "cpu") -> None:
    margins = LEAST_MARGINS if device == "cpu" else GPU_LEAST_MARGINS
    reference = read(f"greedy_{name}_exact")
    if hashlib.sha256(path.read_bytes()).hexdigest() != reference["sha256"]:
        raise SystemExit(f"{path} is not the file of the reference data, whose SHA-256 is {reference['sha256']}")
    check_perplexity(name, path, device, margins)
    for kv_type, least_margin in margins.items():
        with LLM(path, device=device, kv_type=kv_type) as llm:
            if kv_type == next(iter(margins)):
                check_tokenisation(llm, name)
            print(f"greedy, {kv_type} rows:", flush=True)
            check_greedy(llm, reference["prompts"], least_margin)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
