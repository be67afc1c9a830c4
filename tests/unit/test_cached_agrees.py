"""Cached and uncached runs agree, wherever the rows were meanwhile: on the device, in the host's memory, in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllm.llm import LLM
from pyllm.sampling import SamplingParams
from tests.engine import open_engine
from tests.refdata import model_path, reference

PLAIN, HYBRID = "llama-a-f32", "qwen3next-b-eqheads-bf16"
IDS = {PLAIN: list(range(3, 250)), HYBRID: reference("qwen3next-b-eqheads")["n300_tokens"].tolist()}
LIKELIEST = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=8)
BASE = 44  # tokens of the prompt that was there before: five pages and a half
CASES = {  # what comes after it, and the most of it that may be known
    "exact repeat": (lambda ids: ids[:BASE], BASE - 1),
    "longer": (lambda ids: ids[: BASE + 9], BASE),
    "shorter": (lambda ids: ids[: BASE - 11], BASE - 12),
    "a page shorter": (lambda ids: ids[: BASE - 4], BASE - 5),
    "diverging inside a page": (lambda ids: [*ids[:21], *ids[100:115]], 21),
    "diverging at a page": (lambda ids: [*ids[:24], *ids[100:115]], 24),
    "first token different": (lambda ids: [ids[99], *ids[1:BASE]], 0),
    "one token different": (lambda ids: [*ids[:30], ids[99], *ids[31:BASE]], 30),
    "last token different": (lambda ids: [*ids[: BASE - 1], ids[99]], BASE - 1),
    "one token": (lambda ids: ids[:1], 0),
    "unrelated": (lambda ids: ids[150:190], 0),
}
PLACES = ("device", "host", "file", "cancelled")


@pytest.fixture(params=[PLAIN, HYBRID])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fresh(name: str) -> Iterator[LLM]:
    with engine(name) as llm:
        yield llm


def engine(name: str, **options: Any) -> LLM:
    return open_engine(model_path(name), **{"ctx_size": 72, "page_size": 8, **options})


def answer(llm: LLM, prompt: list[int]) -> tuple[list[int | None], np.ndarray]:
    """Tokens, and log-probabilities of the eight likeliest of each."""
    chunks = list(llm.generate(prompt, LIKELIEST))
    return [chunk.token for chunk in chunks], np.array([[p for _, p in chunk.top_logprobs] for chunk in chunks])


def put(llm: LLM, ids: list[int], place: str, folder: Path) -> None:
    """Have the base prompt's rows in some place."""
    if place == "cancelled":
        stream = llm.generate(ids[:BASE], LIKELIEST)
        next(stream)
        stream.close()
        return
    answer(llm, ids[:BASE])
    if place == "host":
        for start in (60, 130):
            answer(llm, ids[start : start + 65])
        assert llm._kept is not None and llm._kept.index.num_copied_out > 0
    elif place == "file":
        llm.save_session(folder / "s", ids[:BASE])
        llm.forget()
        llm.load_session(folder / "s")


@pytest.mark.parametrize("case", CASES)
def test_agree(case: str, name: str, fresh: LLM, tmp_path: Path) -> None:
    make, most = CASES[case]
    prompt = make(IDS[name])
    tokens, values = answer(fresh, prompt)
    for place in PLACES:
        with engine(name, prefix_cache=True, cache_ram=1 << 22) as llm:
            put(llm, IDS[name], place, tmp_path)
            found, likely = answer(llm, prompt)
            assert found == tokens, place
            assert np.abs(likely - values).max() <= 1e-4, place
            cached = llm.stats["cached_tokens"]
            assert cached <= most, place
            if name == PLAIN and place != "cancelled":
                assert cached == most, place


@pytest.mark.parametrize("place", PLACES)
def test_empty_prompts_are_refused_as_ever(name: str, place: str, tmp_path: Path) -> None:
    from pyllm.errors import ContextError

    with engine(name, prefix_cache=True, cache_ram=1 << 22) as llm:
        put(llm, IDS[name], place, tmp_path)
        with pytest.raises(ContextError, match="the prompt is empty"):
            answer(llm, [])
