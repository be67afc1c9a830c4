"""Shifts in the middle of an answer: what a replay of the same tokens and shifts gives, on rows of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pyllm import sampling_filters
from pyllm.commands import main
from pyllm.device import Device
from pyllm.device.emulated import EmulatedDevice
from pyllm.errors import StaleKVError
from pyllm.kv_trace import hash_rows
from pyllm.llm import LLM
from pyllm.sampling import SamplingParams
from tests.engine import greedy, interleaved, open_engine, tokens
from tests.refdata import model_path, reference
from tests.replay import Replay

PLAIN, HYBRID = "llama-a-f32", "qwen3next-b-eqheads-bf16"
IDS = list(range(3, 250))
CTX, PAGE = 40, 8
OTHERS = [
    "llama-b-rope3-f16",
    "gemma3-a-f16",
    "gemma3-b-ropelinear-f32",
    "qwen2-a-f32",
    "qwen3-a-bf16",
    "qwen3moe-a-f16",
]


def engine(name: str = PLAIN, device: Device | None = None, **options: Any) -> LLM:
    options = {"ctx_size": CTX, "page_size": PAGE, "overflow": "shift", **options}
    return open_engine(model_path(name), device, **options)


def with_logprobs(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=1)


def check_replay(llm: LLM, prompt: list[int], count: int, kept: int, device: Device | None = None) -> None:
    """An answer, and the log-probabilities of its tokens in every bit, are those of a replay on another engine, whose
    pages are of another size."""
    chunks = list(llm.generate(prompt, with_logprobs(count)))
    kv_type = llm._cache.kv_type.name
    with engine(llm.model_path.stem, device, ctx_size=64, page_size=4, n_seqs=2, kv_type=kv_type) as fresh:
        replay = Replay(fresh)
        expected = replay.answer(prompt, count, CTX, kept, PAGE)
        logprobs = [
            sampling_filters.log_probabilities(row[: fresh.tokenizer.vocab_size], token, 1)[0]
            for row, token in zip(replay.logits, expected, strict=True)
        ]
    assert tokens(iter(chunks)) == expected
    assert [chunk.logprob for chunk in chunks] == logprobs


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("keep", [0, 5, 9, 1000])
def test_a_shift_is_a_replay_of_the_same_tokens_and_shifts(keep: int, prefix_cache: bool) -> None:
    prompt, kept = IDS[:30], {0: 8, 5: 8, 9: 16, 1000: 24}[keep]
    with engine(keep=keep, prefix_cache=prefix_cache) as llm:
        check_replay(llm, prompt, 50, kept)
        stats = llm.stats
    assert stats["dropped_tokens"] == stats["shifted_tokens"] == 5 * PAGE and stats["recomputed"] is None
    assert (stats["prompt_tokens"], stats["generated_tokens"], stats["finish_reason"]) == (30, 50, "length")
    assert stats["cached_tokens"] + stats["evaluated_tokens"] == 30


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0", "q4_0"])
def test_rows_of_other_types_are_shifted(kv_type: str) -> None:
    with engine("llama-b-rope3-f16", kv_type=kv_type) as llm:
        check_replay(llm, IDS[:30], 30, 8)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_shift(name: str) -> None:
    """Frequency factors, scaled and several bases, sliding windows, norms of heads, experts."""
    with engine(name) as llm:
        check_replay(llm, IDS[:30], 30, 8)


@pytest.mark.parametrize(("warp_size", "tiles"), [(32, "mma"), (64, "mfma")])
def test_kernels_shift(warp_size: int, tiles: str) -> None:
    device, other = (EmulatedDevice(warp_size, tiles, seed) for seed in (1, 2))
    with engine(device=device, kv_type="f16") as llm:
        check_replay(llm, IDS[:38], 5, 8, other)


def test_keys_of_the_first_layer_are_those_of_the_shorter_text() -> None:
    """They depend on token and position alone; all rows behind them on what stood there when they were computed."""
    with engine(ctx_size=64, n_seqs=2) as llm, engine(ctx_size=64) as fresh:
        cache, seq, ids = llm._cache, llm._cache.new_sequence(), IDS[:43]
        replay, shorter = Replay(llm), Replay(fresh)
        replay._kv = seq
        replay.feed(ids)
        assert cache.shift(seq, 1, 2, llm._model.key_turns(llm._device, -2 * PAGE))
        shorter.feed(ids[:PAGE] + ids[3 * PAGE :])
        for found, exact in zip(replay.rows(0), shorter.rows(0), strict=True):
            assert np.abs(found - exact).max() < 1e-5
        assert np.abs(replay.rows(1)[0] - shorter.rows(1)[0]).max() > 1e-2


def test_several_sequences_shift_at_their_own_time() -> None:
    prompts = [IDS[index : index + 20 + 5 * index] for index in range(3)]
    with engine(n_seqs=3) as llm:
        found = interleaved([llm.generate(prompt, greedy(40)) for prompt in prompts])
    for prompt, answer in zip(prompts, found, strict=True):
        with engine(ctx_size=64, n_seqs=2) as fresh:
            assert answer == Replay(fresh).answer(prompt, 40, CTX, PAGE, PAGE)


def test_rows_that_others_share_are_left_alone() -> None:
    """Two sequences with one beginning, which the index has too: one shifts, the rows of the others keep their bits."""
    with engine(n_seqs=2, prefix_cache=True) as llm:
        tokens(llm.generate(IDS[:25], greedy(1)))
        short, long = (llm.begin(IDS[:24] + more, greedy(15)) for more in ([7], IDS[100:114]))
        while long._request.num_generated < 1:
            llm.advance()
        kv, positions = short._request.kv, np.arange(25)
        shared, before = kv.pages[:3], hash_rows(llm._cache, kv, positions)
        assert long._request.kv.pages[:3] == shared
        while not long._request.num_shifted:
            llm.advance()
        after = hash_rows(llm._cache, kv, positions)
        assert long._request.kv.pages[0] == shared[0] and not set(shared[1:]) & set(long._request.kv.pages)
        assert after.own.all() and kv.pages[:3] == shared
        for name in ("layers", "pages", "rows", "k", "v"):
            assert (getattr(after, name) == getattr(before, name)).all()
        while not short.has_ended or not long.has_ended:
            llm.advance()
        assert llm.forget() is None and llm._cache.num_free_pages == llm._cache.num_pages


def test_no_prompt_gets_shifted_rows() -> None:
    """One with the very tokens that the shifted sequence ended with is computed from the first page on."""
    with engine(prefix_cache=True) as llm:
        tokens(llm.generate(IDS[:30], greedy(15)))
        ids = llm._kept._last_ids[:35]
        assert ids[:PAGE] == IDS[:PAGE] and ids[PAGE : 2 * PAGE] == IDS[2 * PAGE : 3 * PAGE]
        found = list(llm.generate(ids, with_logprobs(4)))
        assert llm.stats["cached_tokens"] == PAGE
    with engine() as fresh:
        exact = list(fresh.generate(ids, with_logprobs(4)))
    assert [chunk.token for chunk in found] == [chunk.token for chunk in exact]
    assert np.allclose(*([chunk.logprob for chunk in chunks] for chunks in (found, exact)), atol=1e-5)


def test_sessions_say_that_rows_were_shifted(tmp_path: Path) -> None:
    with engine(prefix_cache=True) as llm:
        tokens(llm.generate(IDS[:30], greedy(5)))
        assert not llm.save_session(tmp_path / "whole").shifted
        llm.forget()
        answer = tokens(llm.generate(IDS[:30], greedy(20)))
        ids = llm._kept._last_ids
        for token_ids in (None, IDS[:30] + answer):
            session = llm.save_session(tmp_path / "s", token_ids)
            assert session.shifted and session.token_ids == IDS[:PAGE]
    with engine(prefix_cache=True) as other:
        assert not other.load_session(tmp_path / "whole").shifted
        other.forget()
        assert other.load_session(tmp_path / "s").shifted
        assert other.save_session(tmp_path / "again", IDS[:30]).shifted
        found = tokens(other.generate(ids[:30], greedy(5)))
        assert other.stats["cached_tokens"] == PAGE
    with engine() as fresh:
        assert found == tokens(fresh.generate(ids[:30], greedy(5)))


def test_files_of_the_cache_hold_no_shifted_rows(tmp_path: Path) -> None:
    with engine(ctx_size=160, prefix_cache=True, cache_dir=tmp_path, keep=64) as llm:
        tokens(llm.generate(IDS[:150], greedy(20)))
        assert llm.stats["shifted_tokens"] == 40
    with engine(ctx_size=160, prefix_cache=True, cache_dir=tmp_path) as other:
        tokens(other.generate(IDS[:150], greedy(1)))
        assert other.stats["cached_tokens"] == 64


def test_where_rows_cannot_be_shifted_the_rest_is_computed_anew_and_the_reason_told() -> None:
    hybrid_ids = reference("qwen3next-b-eqheads")["n300_tokens"].tolist()
    for name, options, prompt, reason in (
        (HYBRID, {}, hybrid_ids[:30], "recurrent layers"),
        (PLAIN, {"page_size": 64}, IDS[:30], "a context of 40 tokens has too few pages of 64"),
        (PLAIN, {"page_size": 16, "keep": 17}, IDS[:30], "too few pages of 16"),
    ):
        with engine(name, prefix_cache=True, **options) as llm:
            kept = max(options.get("keep", 0), int(llm.tokenizer.add_bos))
            found, stats = tokens(llm.generate(prompt, greedy(12))), llm.stats
        assert reason in stats["recomputed"]
        assert (stats["dropped_tokens"], stats["shifted_tokens"]) == (10, 0)
        with engine(name, ctx_size=64) as fresh:
            shorter = [*prompt, *found[:10]]
            del shorter[kept : kept + 10]
            assert found[10:] == tokens(fresh.generate(shorter, greedy(2)))


def test_without_a_free_page_nothing_changes() -> None:
    with engine() as llm:
        generation = llm.begin(IDS[:30], greedy(30))
        request, cache = generation._request, llm._cache
        while request.num_generated < 9:
            llm.advance()
        kv, given_up = request.kv, request.kv.pages[1]
        cache.hold(given_up)
        before = list(kv.pages), list(kv.epochs), kv.length, hash_rows(cache, kv, np.arange(kv.length)).k.tolist()
        assert cache.num_free_pages == 0 and not cache.shift(kv, 1, 1, llm._model.key_turns(llm._device, -PAGE))
        after = list(kv.pages), list(kv.epochs), kv.length, hash_rows(cache, kv, np.arange(kv.length)).k.tolist()
        assert after == before and kv.shifted_from is None
        while not request.num_dropped:
            llm.advance()
        cache.let_go(given_up)
        while not generation.has_ended:
            llm.advance()
        stats = generation.stats()
        assert stats["recomputed"] == "no page is free to shift rows to" and stats["generated_tokens"] == 30
        assert stats["dropped_tokens"] - stats["shifted_tokens"] == 10  # the next ones could be


def test_what_cannot_be_shifted_is_refused_with_nothing_changed() -> None:
    with engine(n_seqs=2, ctx_size=64) as llm:
        replay, turns = Replay(llm), llm._model.key_turns(llm._device, -PAGE)
        replay.feed(IDS[:20])
        kv = replay._kv
        for first, count in ((0, 3), (2, 1), (-1, 1), (1, 0)):
            with pytest.raises(ValueError, match="has no pages"):
                llm._cache.shift(kv, first, count, turns)
        assert llm._cache.extend(kv, 1)  # a row that is under way
        with pytest.raises(ValueError, match="under way"):
            llm._cache.shift(kv, 1, 1, turns)
        assert kv.length == 21 and len(kv.pages) == 3
    with engine(HYBRID) as hybrid, pytest.raises(ValueError, match="recurrent"):
        hybrid._model.key_turns(hybrid._device, -PAGE)


def test_a_fault_names_the_position_after_the_shift() -> None:
    with engine() as llm:
        generation = llm.begin(IDS[:30], greedy(30))
        request = generation._request
        while not request.num_shifted:
            llm.advance()
        llm._device.synchronize()
        llm._cache.layers[1].tags[llm._cache.row_ids(request.kv, np.array([12]))] = 7
        with pytest.raises(StaleKVError, match="position 12, layer 1"):
            while True:
                llm.advance()
                while generation.take():
                    pass


def test_rows_that_were_absent_stay_so() -> None:
    with engine(ctx_size=64, n_seqs=2) as llm:
        replay, cache = Replay(llm), llm._cache
        replay.feed(IDS[:30])
        llm._device.synchronize()
        cache.layers[1].tags[cache.row_ids(replay._kv, np.array([20]))] = 7
        assert cache.shift(replay._kv, 1, 1, llm._model.key_turns(llm._device, -PAGE))
        own = hash_rows(cache, replay._kv, np.arange(22)).own.reshape(22, -1)[:, 1]
        assert np.flatnonzero(~own).tolist() == [12]


def test_traces_have_the_rows_before_and_after(tmp_path: Path) -> None:
    with engine(kv_trace=tmp_path / "t", kv_trace_every=1) as llm:
        tokens(llm.generate(IDS[:30], greedy(15)))
    lines = (tmp_path / "t").read_text().count('"layer": 0')
    assert lines == 39 + 36  # when the context was full, and at the end


def test_it_is_told() -> None:
    command = ["run", str(model_path(PLAIN)), "--raw", "--device", "cpu", "-n", "99", "--ignore-eos", "--temp", "0"]
    for size, told in (
        ("256", "64 tokens in its middle were left out, and the rows behind them shifted"),
        ("100", "were left out, the rest was computed anew (a context of 100 tokens has too few pages of 64"),
    ):
        prompt = "hello " * (12 if size == "100" else 40)
        result = CliRunner().invoke(main, [*command, "-c", size, "--overflow", "shift", prompt])
        assert result.exit_code == 0 and result.stderr.count("The context was full") == 1
        assert told in result.stderr, result.stderr


def test_a_shifted_sequence_that_gives_way_is_computed_anew() -> None:
    """The older one needs a page: the younger is put back, and goes on as its shorter text would."""
    with engine(n_seqs=2, prefix_cache=True) as llm:
        for page in list(llm._cache._free)[:4]:
            llm._cache.quarantine(page)
        older, younger = llm.begin(IDS[:6], greedy(20)), llm.begin(IDS[:38], greedy(20))
        request = younger._request
        while request.shifted_from is None:
            llm.advance()
        assert request.shifted_from == PAGE and not request.recomputed
        while request.shifted_from is not None:
            llm.advance()
        assert request.recomputed == "its pages were needed for others" and request.kv is None
        text, count = list(request.token_ids), request.num_generated
        while not older.has_ended or not younger.has_ended:
            llm.advance()
        found = [chunk.token for chunk in iter(younger.take, None)]
    with engine(ctx_size=64, n_seqs=2) as fresh:
        assert found[count:] == Replay(fresh).answer(text, 20 - count, CTX, PAGE, PAGE)


def test_marks_of_shifted_rows_go_with_the_rows() -> None:
    with engine(ctx_size=64, n_seqs=2) as llm:
        replay, cache = Replay(llm), llm._cache
        replay.feed(IDS[:40])
        turns = llm._model.key_turns(llm._device, -PAGE)
        assert cache.shift(replay._kv, 2, 1, turns) and replay._kv.shifted_from == 16
        assert cache.fork(replay._kv, 17).shifted_from == 16 and cache.fork(replay._kv, 16).shifted_from is None
        assert cache.shift(replay._kv, 1, 1, turns) and replay._kv.shifted_from == 8
        cache.truncate(replay._kv, 9)
        assert replay._kv.shifted_from == 8
        cache.truncate(replay._kv, 8)
        assert replay._kv.shifted_from is None


def test_saved_sessions_tell(tmp_path: Path) -> None:
    run = ["run", str(model_path(PLAIN)), "--device", "cpu", "-c", "256", "--ignore-eos", "--temp", "0"]
    run += ["--overflow", "shift", "--session", str(tmp_path / "s")]
    saved = CliRunner().invoke(main, [*run, "-n", "120", "hello " * 40])
    assert saved.exit_code == 0, saved.stderr
    assert "Saved 64 tokens" in saved.stderr and "were shifted when the context was full" in saved.stderr
    shown = CliRunner().invoke(main, ["cache", "show", str(tmp_path / "s")])
    assert "behind them rows were shifted" in shown.output
    again = CliRunner().invoke(main, [*run, "-n", "1", "and then?"])
    assert "64 tokens that need not be computed" in again.stderr and "were shifted when" in again.stderr
