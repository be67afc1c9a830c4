"""The demo model, SmolLM2-135M-Instruct, against greedy continuations computed with exact float32 weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyllm.hub import find_model
from pyllm.llm import LLM
from tests.engine import greedy, tokens
from tests.refdata import ROOT

pytestmark = pytest.mark.demo_model

MARGIN_FLOAT32, MARGIN_FLOAT16_ROWS = 0.01, 0.05  # below, two tokens are too close to call


@pytest.fixture(scope="module")
def demo() -> Path:
    path = find_model("demo")
    if path is None:
        pytest.skip("the demo model is not here: pyllm pull demo")
    return path


@pytest.mark.parametrize(
    ("kv_type", "least_margin", "first"), [("f32", MARGIN_FLOAT32, 0), ("f16", MARGIN_FLOAT16_ROWS, 1)]
)
def test_greedy_continuations(demo: Path, kv_type: str, least_margin: float, first: int) -> None:
    """Every second of eight prompts for each type of rows: 256 tokens each."""
    cases = json.loads((ROOT / "real" / "greedy_smollm2_exact.json").read_text())["prompts"]
    assert len(cases) == 8
    with LLM(demo, device="cpu", kv_type=kv_type) as llm:
        for case in cases[first::2]:
            assert llm.tokenize(case["prompt"], parse_special=True) == case["prompt_ids"]
            expected = case["continuation"]
            unclear = (step for step, margin in enumerate(case["margin"]) if margin < least_margin)
            stop = next(unclear, len(expected))
            found = tokens(llm.generate(case["prompt_ids"], greedy(len(expected))))
            assert found[:stop] == expected[:stop]
