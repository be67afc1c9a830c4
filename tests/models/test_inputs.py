"""Copy or zero-copy, however many slots and steps in flight, recorded or not, on whatever pages: the same bits."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.device.host import HostDevice
from pyllm.errors import UsageError
from pyllm.llm import EngineOptions
from pyllm.sampling import SamplingParams
from tests.engine import open_engine
from tests.ops.lives import LIVES
from tests.pairwise import pairwise
from tests.refdata import model_path, reference

CTX_SIZE, PAGE_SIZE, NUM_SEQS = 128, 8, 3
NUM_PAGES = NUM_SEQS * CTX_SIZE // PAGE_SIZE
SETTINGS = {
    "inputs": ["zero-copy", "copy"],
    "ring_depth": [1, 2, 3, 8],
    "inflight": [8, 3, 1],
    "graphs": [True, False],
    "pages": ["ascending", "descending", "random"],
    "slow": [False, True],
}
PAGE_ORDERS = {
    "ascending": list(range(NUM_PAGES)),
    "descending": list(reversed(range(NUM_PAGES))),
    "random": np.random.default_rng(1).permutation(NUM_PAGES).tolist(),
}
CASES = pairwise(SETTINGS)
FEW = 3  # emulated, these do
ALL = [(life, case) for life in LIVES if life in ("cpu", "gpu") for case in CASES]
ALL += [("emulated-32", case) for case in CASES[:FEW]]

Found = tuple[list[np.ndarray], list[list[tuple[int | None, Any]]]]


def prepared(life: str, graphs: bool, slow: bool) -> Device:
    device = LIVES[life]()
    device.graphs = graphs
    if slow and isinstance(device, HostDevice):
        device.stream.before_work = lambda: time.sleep(0.0002)  # the host runs far ahead
    return device


def results(life: str, graphs: bool = True, slow: bool = False, pages: str = "ascending", **options: Any) -> Found:
    """Logits of three prompts in many ubatches side by side, and what is sampled behind them with log-probabilities."""
    small = life.startswith("emulated")
    prompts = [reference("llama-a")[f"{name}_tokens"].tolist() for name in ("n5", "n70", "n5")]
    prompts = [prompts[0], prompts[1][:20] if small else prompts[1], prompts[2][:3]]
    params = SamplingParams(
        max_tokens=4 if small else 20, temperature=1.0, top_k=0, top_p=1, min_p=0, seed=3, ignore_eos=True, logprobs=3
    )
    options |= {"ctx_size": CTX_SIZE, "page_size": PAGE_SIZE, "n_seqs": NUM_SEQS, "ubatch_size": 16}
    device = prepared(life, graphs, slow)
    with open_engine(model_path("llama-a-f32"), device, page_order=PAGE_ORDERS[pages], **options) as llm:
        logits = llm.logits_batch(prompts)
        # One after the other: which tokens of several sequences decode together is a matter of time, and changes bits.
        chunks = [[(chunk.token, chunk.top_logprobs) for chunk in llm.generate(ids, params)] for ids in prompts[:2]]
        assert llm._cache.num_free_pages == NUM_PAGES
        assert bool(llm._executor._captured) == graphs
        return logits, chunks


@cache
def expected(life: str) -> Found:
    return results(life, graphs=False, ring_depth=1, inflight=1)


@pytest.mark.parametrize(("life", "case"), ALL, ids=str)
def test_the_same_bits(life: str, case: dict[str, Any]) -> None:
    logits, chunks = results(life, **case)
    for found, wanted in zip(logits, expected(life)[0], strict=True):
        assert (found == wanted).all()
    assert chunks == expected(life)[1]


def test_all_pairs_are_among_the_cases() -> None:
    for a, b in (("inputs", "graphs"), ("ring_depth", "pages"), ("inflight", "slow")):
        assert {(case[a], case[b]) for case in CASES} == {(x, y) for x in SETTINGS[a] for y in SETTINGS[b]}


def test_a_way_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="inputs is 'zerocopy'; choose one of copy, zero-copy"):
        EngineOptions(inputs="zerocopy")
