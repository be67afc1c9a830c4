"""Forty chats from four threads, each with tokens of its own, on an engine that keeps, moves and restores rows all the
time: each gets the answer of an engine that knows nothing else."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path, reference

CHATS, THREADS, TURNS = 40, 4, 2
MODELS = {"llama-a-f32": list(range(3, 80)), "qwen3next-b-eqheads-bf16": reference("qwen3next-b-eqheads")["n70_tokens"]}


@pytest.mark.parametrize("name", MODELS)
def test_no_reply_is_that_of_another_chat(name: str) -> None:
    base = [int(token) for token in MODELS[name]]
    rng = np.random.default_rng(11)
    markers = [rng.integers(3, 200, 6).tolist() for _ in range(CHATS)]
    options: dict[str, Any] = {"ctx_size": 64, "page_size": 8}
    expected: dict[tuple[int, int], list[int]] = {}
    with open_engine(model_path(name), **options) as fresh:
        for chat, marker in enumerate(markers):
            talk = base[:10] + marker + base[10 + chat % 5 : 20]
            for turn in range(TURNS):
                expected[chat, turn] = tokens(fresh.generate(talk, greedy(4)))
                talk = [*talk, *expected[chat, turn], *marker[:3]]
    found: dict[tuple[int, int], list[int]] = {}
    reused = []

    def converse(thread: int) -> None:
        for chat in range(thread, CHATS, THREADS):
            talk = base[:10] + markers[chat] + base[10 + chat % 5 : 20]
            for turn in range(TURNS):
                found[chat, turn] = tokens(llm.generate(talk, greedy(4)))
                reused.append(llm.stats["cached_tokens"])
                talk = [*talk, *found[chat, turn], *markers[chat][:3]]

    with open_engine(model_path(name), n_seqs=3, prefix_cache=True, cache_ram=1 << 21, **options) as llm:
        threads = [threading.Thread(target=converse, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == expected
    assert sum(map(bool, reused)) > CHATS // 2
