"""Compares a real model with the reference data: tokenisation, greedy continuations, perplexity.

    python -m tests.check_real_model smollm2 PATH
    python -m tests.check_real_model gemma3 PATH

Not part of the test run: the files are large, and only the first is among the models that pyllm fetches. The reference
data hold their SHA-256. Gemma 3 takes about 2 GB of memory.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from pyllm.commands import main as command_line
from pyllm.llm import LLM
from tests.engine import greedy, tokens
from tests.refdata import ROOT
from tests.unit.test_tokenizer import assert_matches_reference

REAL = ROOT / "real"
LEAST_MARGINS = {"f32": 0.01, "f16": 0.05}  # by type of the K/V rows; below, two tokens are too close to call
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


def check_perplexity(name: str, path: Path) -> None:
    expected = read("perplexity")["models"][name]["exact"]["ppl"]
    for kv_type in LEAST_MARGINS:
        options = ["-f", str(REAL / "ppl_text.txt"), "-c", "512", "--device", "cpu", "--kv-type", kv_type, "--json"]
        result = CliRunner().invoke(command_line, ["perplexity", str(path), *options])
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)["perplexity"]
        print(
            f"perplexity, {kv_type} rows: {found:.5f}, reference {expected:.5f}, {found / expected - 1:+.4%}",
            flush=True,
        )
        assert abs(found / expected - 1) <= PERPLEXITY_LIMIT


def main(name: str, path: Path) -> None:
    reference = read(f"greedy_{name}_exact")
    if hashlib.sha256(path.read_bytes()).hexdigest() != reference["sha256"]:
        raise SystemExit(f"{path} is not the file of the reference data, whose SHA-256 is {reference['sha256']}")
    check_perplexity(name, path)
    for kv_type, least_margin in LEAST_MARGINS.items():
        with LLM(path, device="cpu", kv_type=kv_type) as llm:
            if kv_type == "f32":
                check_tokenisation(llm, name)
            print(f"greedy, {kv_type} rows:", flush=True)
            check_greedy(llm, reference["prompts"], least_margin)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
