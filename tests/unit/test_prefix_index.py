"""Rows of ended sequences are used again by prompts that begin alike, and by nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyllm.device.host import HostDevice
from pyllm.faults import Fault, FaultKind
from pyllm.kv_cache import KVCache, SequenceKV
from pyllm.kv_types import KV_TYPES
from pyllm.llm import LLM, EngineOptions
from pyllm.prompt_cache.index import PrefixIndex
from pyllm.sampling import SamplingParams
from pyllm.scheduler import FEW_PARTS
from tests.refdata import model_path

SIZE = 4


@pytest.fixture
def cache() -> Iterator[KVCache]:
    device = HostDevice(poison=True)
    yield KVCache(device, 1, 8, 8, 24, SIZE, KV_TYPES["f32"])
    device.close()


def ended(cache: KVCache, index: PrefixIndex, tokens: list[int], clean: int | None = None) -> list[int]:
    """A sequence of these tokens that ran and ended; returns its pages."""
    seq = cache.new_sequence()
    assert cache.extend(seq, len(tokens))
    cache.publish(seq, len(tokens) if clean is None else clean)
    pages = list(seq.pages)
    index.keep(tokens, seq)
    cache.release(seq)
    return pages


def taken(cache: KVCache, index: PrefixIndex, tokens: list[int]) -> tuple[int, list[int]]:
    """Rows and pages that a prompt of these tokens gets."""
    known = index.take(tokens)
    if known is None:
        return 0, []
    seq = known.seq
    result = seq.length, list(seq.pages)
    cache.release(seq)
    return result


def test_the_longest_beginning_is_found(cache: KVCache) -> None:
    index = PrefixIndex(cache)
    first = ended(cache, index, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert taken(cache, index, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == (9, first)
    assert taken(cache, index, [1, 2, 3, 4, 5, 6, 0]) == (6, first[:2])
    assert taken(cache, index, [1, 2, 3, 4]) == (4, first[:1])
    assert taken(cache, index, [1, 2, 0]) == (2, first[:1])
    assert taken(cache, index, [2, 3]) == (0, [])
    assert taken(cache, index, []) == (0, [])


def test_branches_share_their_beginning(cache: KVCache) -> None:
    index = PrefixIndex(cache)
    first = ended(cache, index, [1, 2, 3, 4, 5, 6, 7, 8])
    second = ended(cache, index, [1, 2, 3, 4, 9, 9, 9, 9, 9])
    assert taken(cache, index, [1, 2, 3, 4, 9, 9, 9, 9, 9]) == (9, [first[0], *second[1:]])
    assert taken(cache, index, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == (8, first)
    assert index.num_pages == 4


def test_longer_tails_replace_shorter_ones(cache: KVCache) -> None:
    index = PrefixIndex(cache)
    ended(cache, index, [1, 2])
    longer = ended(cache, index, [1, 2, 3])
    ended(cache, index, [1])
    assert index.num_pages == 1
    assert taken(cache, index, [1, 2, 3, 4]) == (3, longer)


def test_only_clean_rows_are_kept(cache: KVCache) -> None:
    index = PrefixIndex(cache)
    ended(cache, index, [1, 2, 3, 4, 5, 6], clean=5)
    assert taken(cache, index, [1, 2, 3, 4, 5, 6])[0] == 5
    ended(cache, index, [7, 8], clean=0)
    assert taken(cache, index, [7, 8])[0] == 0


def test_the_least_recently_used_leaves_give_way(cache: KVCache) -> None:
    index = PrefixIndex(cache)
    ended(cache, index, [1, 2, 3, 4, 5, 6, 7, 8])
    ended(cache, index, [9, 9, 9, 9])
    taken(cache, index, [1, 2, 3, 4, 0])
    assert index.make_room(cache.num_free_pages + 2)
    assert taken(cache, index, [9, 9, 9, 9])[0] == 0
    assert taken(cache, index, [1, 2, 3, 4, 5])[0] == 4
    assert index.make_room(24)
    assert index.num_pages == 0
    assert not index.make_room(25)


def test_pages_in_use_outlive_their_node(cache: KVCache) -> None:
    index = PrefixIndex(cache)
    pages = ended(cache, index, [1, 2, 3, 4])
    known = index.take([1, 2, 3, 4])
    assert known is not None
    seq = known.seq
    assert not index.make_room(24)
    assert seq.pages == pages
    assert cache.num_free_pages == 23
    cache.release(seq)
    assert cache.num_free_pages == 24


def test_a_page_that_is_not_trusted_takes_what_stands_on_it_along(cache: KVCache) -> None:
    index = PrefixIndex(cache)
    pages = ended(cache, index, list(range(12)))
    index.forget(pages[1])
    assert taken(cache, index, list(range(12))) == (4, pages[:1])
    assert cache.num_free_pages == 23


def test_no_page_is_lost_or_given_twice(cache: KVCache) -> None:
    index, rng = PrefixIndex(cache), random.Random(5)
    running: list[tuple[list[int], SequenceKV]] = []
    known: list[list[int]] = []
    for _ in range(3000):
        if running and (len(running) > 3 or rng.random() < 0.5):
            tokens, seq = running.pop(rng.randrange(len(running)))
            cache.publish(seq, rng.choice([seq.length, seq.num_clean]))
            if rng.random() < 0.8:
                index.keep(tokens, seq)
                known.append(tokens)
            cache.release(seq)
        else:
            base = rng.choice(known)[: rng.randrange(1, 12)] if known and rng.random() < 0.7 else []
            tokens = base + [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
            known_rows = index.take(tokens[:-1])
            seq = known_rows.seq if known_rows is not None else cache.new_sequence()
            assert seq.length < len(tokens)
            needed = cache.pages_for(len(tokens)) - len(seq.pages) + (not seq.owns_tail)
            if not index.make_room(needed):
                cache.release(seq)
                continue
            assert cache.extend(seq, len(tokens) - seq.length)
            running.append((tokens, seq))
        owned = [page for _, seq in running for page in seq.pages] + [node.page for node in index._tree.nodes()]
        counts = np.bincount(owned, minlength=24)
        assert counts.tolist() == cache._references
        assert cache.num_free_pages == int((counts == 0).sum())
    for _, seq in running:
        cache.release(seq)
    index.clear()
    assert cache.num_free_pages == 24


def engine(**options: Any) -> LLM:
    settings = EngineOptions(**{"ctx_size": 96, "kv_type": "f32", "page_size": 8, **options})
    return LLM.with_options(model_path("llama-a-f32"), HostDevice(poison=True), settings)


def answer(llm: LLM, prompt: list[int], count: int = 8) -> list[int | None]:
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    return [chunk.token for chunk in llm.generate(prompt, params)]


def test_answers_are_those_of_a_fresh_engine() -> None:
    rng = random.Random(3)
    base = [rng.randrange(200) for _ in range(40)]
    prompts = [base, [*base, 5, 6, 7], [*base[:21], 1, 2, 3], base[:16], base, [9, *base], base[:1]]
    with engine(prefix_cache=True) as cached:
        reused = []
        for prompt in prompts:
            with engine() as fresh:
                assert answer(cached, prompt) == answer(fresh, prompt)
            reused.append(cached.stats["cached_tokens"])
    assert reused == [0, 40, 21, 15, 39, 0, 0]


def test_a_turn_goes_on_from_the_answer_before_it() -> None:
    prompt = list(range(3, 25))
    with engine(prefix_cache=True) as llm, engine() as fresh:
        first = [token for token in answer(llm, prompt) if token is not None]
        following = [*prompt, *first, 7, 8]
        assert answer(llm, following) == answer(fresh, following)
        assert llm.stats["cached_tokens"] >= len(prompt) + len(first) - 1


def test_kept_rows_give_way_to_what_runs() -> None:
    with engine(prefix_cache=True, ctx_size=64) as llm, engine(ctx_size=64) as fresh:
        for start in range(0, 150, 10):
            prompt = list(range(start, start + 45))
            assert answer(llm, prompt, 12) == answer(fresh, prompt, 12)


def test_a_context_that_is_just_full_needs_no_page_more() -> None:
    """The last page is shared with the index, which holds all others: it gives way instead of being copied."""
    with engine(prefix_cache=True, ctx_size=40) as llm, engine(ctx_size=40) as fresh:
        prompt = list(range(3, 38))
        answer(llm, prompt, 3)
        following = [*prompt, 1, 2, 3]
        assert answer(llm, following, 2) == answer(fresh, following, 2)
        assert llm.stats["cached_tokens"] >= 35


def test_a_faulty_page_serves_nobody() -> None:
    prompt = list(range(3, 30))
    with engine(prefix_cache=True) as llm:
        answer(llm, prompt)
        scheduler = llm._scheduler
        assert scheduler._index is not None
        known = scheduler._index.take(prompt)
        assert known is not None
        page = known.seq.pages[1]
        llm._cache.release(known.seq)
        step = SimpleNamespace(step=SimpleNamespace(segments=[]))
        scheduler._handle_faults(step, [Fault(FaultKind.TAG, -1, 0, page, 0, 8, 1, 2)])  # type: ignore[arg-type]
        answer(llm, prompt)
        assert llm.stats["cached_tokens"] == 8  # the page before it
        assert page in llm._cache.quarantined
        assert page not in [node.page for node in scheduler._index._tree.nodes()]


def test_of_many_beginnings_the_longest_is_found() -> None:
    device, rng = HostDevice(poison=True), random.Random(3)
    cache = KVCache(device, 1, 8, 8, 2000, SIZE, KV_TYPES["f32"])
    index = PrefixIndex(cache)
    known = [[rng.randrange(3) for _ in range(rng.randrange(1, 3 * SIZE))] for _ in range(200)]
    for tokens in known:
        ended(cache, index, tokens)
    for _ in range(300):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(4 * SIZE))]
        shared = (next((i for i in range(min(len(a), len(prompt))) if a[i] != prompt[i]), len(a)) for a in known)
        assert taken(cache, index, prompt)[0] == min(max(shared), len(prompt))
    device.close()


def test_pages_that_are_lost_give_way_together() -> None:
    device = HostDevice(poison=True)
    cache = KVCache(device, 1, 8, 8, 320, SIZE, KV_TYPES["f32"])
    index = PrefixIndex(cache)
    for number in range(320):
        ended(cache, index, [number] * SIZE)
    assert cache.num_free_pages == 0 and index.make_room(1)
    assert cache.num_free_pages == 10 and index.num_pages == 310
    assert [taken(cache, index, [number] * SIZE)[0] for number in (0, 9, 10, 319)] == [0, 0, SIZE, SIZE]
    assert index.make_room(11) and cache.num_free_pages == 20
    device.close()


@pytest.mark.parametrize("keep_answer", [False, True])
def test_an_answer_that_nobody_will_go_on_from_is_not_kept(keep_answer: bool) -> None:
    prompt = list(range(3, 40))
    with engine(prefix_cache=True) as llm, engine() as fresh:
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        generation, first = llm.begin(prompt, params, keep_answer), list[int]()
        while len(first) < 40:
            llm.advance()
            while (chunk := generation.take()) is not None:
                first.append(chunk.token)  # type: ignore[arg-type]
        assert llm._scheduler._index.num_pages == (10 if keep_answer else 5)  # type: ignore[union-attr]
        following = [*prompt, *first, 7, 8]
        assert answer(llm, following) == answer(fresh, following)
        assert llm.stats["cached_tokens"] == (76 if keep_answer else 37)


def test_of_many_prompts_that_begin_alike_few_ends_are_kept() -> None:
    """Each has a whole page, which all share, and a part of the next."""
    beginning = list(range(3, 12))
    with engine(prefix_cache=True, ctx_size=400) as llm:
        index, cached = llm._scheduler._index, list[int]()
        assert index is not None
        for number in range(30):
            generation = llm.begin([*beginning, 20 + number], SamplingParams(max_tokens=2, temperature=0), False)
            while not generation.has_ended:
                llm.advance()
            cached.append(generation.usage()[1])
            assert index.num_parts([*beginning, 20 + number]) == min(number + 1, FEW_PARTS)
        assert cached == [0, *[9] * 29]
        assert index.num_parts([99] * 20) == 0
