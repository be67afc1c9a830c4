"""The parts of `pyllm bench`: plans, runs on the engine, comparisons, bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from pyllm.bench.accuracy import compare
from pyllm.bench.engine import EngineUnderTest, Prefix, RowTaker
from pyllm.bench.plan import Plan, Point
from pyllm.bench.session import Results, Session, read_model
from pyllm.bench.traffic import Traffic
from pyllm.errors import UsageError
from pyllm.executor import Executor, Segment, Step
from pyllm.gguf_split import open_model
from pyllm.llm import LLM
from pyllm.quants import QuantType
from pyllm.sampling import SamplingParams
from pyllm.synth.shapes import DecoderShape
from pyllm.synth.writer import write_model
from tests.tiny_shape import TINY, TINY_EXPERTS, TINY_HYBRID_EXPERTS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    write_model(path, TINY, QuantType.Q8_0)
    return path


@pytest.fixture
def engine(tiny: Path) -> Iterator[EngineUnderTest]:
    ticks = itertools.count()
    with LLM(tiny, device="cpu", ctx_size=256, n_seqs=3, kv_type="f32") as llm:
        yield EngineUnderTest(llm, clock=lambda: float(next(ticks)))


def test_points_come_in_order_and_once() -> None:
    plan = Plan.of((64, 32, 64, 0), 8, (100, 0), (4, 2, 4), 3)
    assert [str(point) for point in plan.all_points()] == [
        *("prefill 32", "prefill 64", "decode 8"),
        *("prefill 32 behind 100", "prefill 64 behind 100", "decode 8 behind 100"),
        *("decode 8, 2 sequences", "decode 8, 4 sequences"),
        *("decode 8 behind 100, 2 sequences", "decode 8 behind 100, 4 sequences"),
    ]
    assert [point.rows for point in plan.alone(100)] == [132, 164, 109]
    with pytest.raises(UsageError, match="nothing to measure"):
        Plan.of((0,), 0, (0,), (1,), 3)


def test_rows_behind_a_prefix_are_those_of_the_whole_sequence(engine: EngineUnderTest) -> None:
    """A run on a fork attends to the prefix's rows: its first token is the one that the whole prompt gives."""
    short = engine.lengthen(Prefix([], None), 70)  # ends inside of a page
    prefix = engine.lengthen(short, 150)
    assert prefix.token_ids[:70] == short.token_ids and len(prefix.token_ids) == 150
    whole = engine.llm.logits([*prefix.token_ids, 5])[-1]
    taken = []
    for _ in range(2):
        taker = RowTaker()
        request = engine._request(prefix, [5], SamplingParams(max_tokens=1, logprobs=1), taker)
        engine._finish([request])
        taken.append(taker.rows[0])
    np.testing.assert_allclose(taken[0], whole[: len(taken[0])], atol=1e-4)
    np.testing.assert_array_equal(taken[0], taken[1])


def test_all_pages_come_back(engine: EngineUnderTest) -> None:
    cache = engine.llm._cache
    prefixes = [engine.lengthen(Prefix([], None), 70) for _ in range(3)]
    for point in (Point("prefill", 40, 70), Point("decode", 9, 70, 3)):
        assert engine.seconds(point, prefixes[: point.sequences]) == 1
    for prefix in prefixes:
        engine.drop(prefix)
    assert cache.num_free_pages == cache.num_pages and not cache.quarantined


def test_tokens_one_by_one_give_the_logits_of_all_together(engine: EngineUnderTest) -> None:
    for depth in (0, 60):
        prefix, tokens = engine.lengthen(Prefix([], None), depth), engine.random_tokens(20)
        expected = engine.llm.logits([*prefix.token_ids, *tokens])[depth:]
        figure = compare("", engine.decoded_rows(prefix, tokens), expected)
        engine.drop(prefix)
        assert figure.positions == figure.same_top == 20 and figure.max_difference < 1e-4


def test_greedy_decoding_runs_ahead_as_it_does_elsewhere(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device keeps tokens, steps are queued before the host has seen the token that they take."""
    sources: list[int] = []
    submit = Executor.submit

    def spy(executor: Executor, segments: Sequence[Segment]) -> Step:
        sources.extend(segment.source for segment in segments)
        return submit(executor, segments)

    monkeypatch.setattr(Executor, "submit", spy)
    with LLM(tiny, device="emulated", ctx_size=64, n_seqs=2) as llm:
        engine = EngineUnderTest(llm)
        engine.seconds(Point("decode", 6, 0, 2), [Prefix([], None)] * 2)
    assert {0, 1} <= set(sources)


def test_comparisons() -> None:
    rng = np.random.default_rng(3)
    reference = rng.standard_normal((5, 300)).astype(np.float32) * 4
    assert compare("a", reference, reference).max_difference == 0
    assert compare("a", reference, reference).passed
    off = reference.copy()
    off[3, 7] += 2 * reference[3].std()
    found = compare("a", off, reference)
    assert found.max_difference == pytest.approx(2, rel=1e-4) and not found.passed
    other = compare("a", rng.standard_normal((5, 300)).astype(np.float32), reference)
    assert not other.passed and other.kl > 0.1
    for wrong in (np.nan, np.inf):
        off = reference.copy()
        off[0, 0] = wrong
        assert not compare("a", off, reference).passed
    assert "5 of 5 top tokens equal" in str(compare("a", reference, reference))


def test_with_experts_the_median_token_counts() -> None:
    rng = np.random.default_rng(3)
    reference = rng.standard_normal((5, 300)).astype(np.float32)
    off = reference.copy()
    off[:2] = rng.standard_normal((2, 300))
    assert compare("a", off, reference, has_experts=True).passed and not compare("a", off, reference).passed
    off[2] = rng.standard_normal(300)
    assert not compare("a", off, reference, has_experts=True).passed
    off = reference.copy()
    off[0, 0] = np.nan
    assert not compare("a", off, reference, has_experts=True).passed


def test_a_model_can_end_after_its_first_layers(tmp_path: Path) -> None:
    write_model(tmp_path / "two", TINY, QuantType.Q8_0)
    ids = list(range(3, 40))
    with LLM(tmp_path / "two", device="cpu") as llm:
        whole = [llm.logits(ids) for _ in range(3)][-1]  # from a recording
        with EngineUnderTest(llm).first_layers(1):
            short = [llm.logits(ids) for _ in range(3)]
            assert all((found == short[0]).all() for found in short)
        assert (llm.logits(ids) == whole).all()
    assert np.abs(short[0] - whole).max() > 0.1 * whole.std()


@pytest.mark.parametrize("shape", [TINY_EXPERTS, TINY_HYBRID_EXPERTS], ids=lambda shape: shape.architecture)
def test_models_with_experts_are_compared_behind_a_few_layers(shape: DecoderShape, tmp_path: Path) -> None:
    write_model(tmp_path / "experts", shape.with_layers(6), QuantType.Q8_0)
    plan, results = Plan.of((20,), 4, (0,), (), 1), Results()
    Session(read_model(tmp_path / "experts"), plan, "cpu").run(results)
    (figure,) = results.figures
    assert figure.what == "decode against prefill, behind 4 of 6 layers"
    assert results.passed and figure.max_difference < 1e-2


def test_bytes_of_a_step(tiny: Path, tmp_path: Path) -> None:
    traffic = Traffic(1000, 800, 0.25, windows=(0, 10))
    assert traffic.step_bytes(1, 5, 8) == 1000 + 200 + 40
    assert traffic.step_bytes(2, 100, 8) == 1000 + 800 * (1 - 0.75**2) + 2 * 55 * 8
    model = read_model(tiny)
    with open_model(tiny) as gguf:
        embedding = gguf.tensors["token_embd.weight"].nbytes
    assert model.traffic.dense_bytes == model.num_bytes - embedding
    assert next(iter(model.types)) == "Q8_0" and model.context_length == 512
    write_model(tmp_path / "experts", TINY_EXPERTS, QuantType.Q8_0)
    experts = read_model(tmp_path / "experts").traffic
    assert experts.expert_share == 0.25 and experts.expert_bytes == 2 * 3 * 8 * 64 * 96 * 34 // 32


def test_a_session(tiny: Path) -> None:
    plan = Plan.of((20, 30), 5, (0, 70), (2,), 2)
    shown: list[tuple[int, int]] = []
    session = Session(read_model(tiny), plan, "cpu", progress=lambda done, total, words: shown.append((done, total)))
    session.check()
    results = Results()
    session.run(results)
    assert [row.point for row in results.rows] == plan.all_points()
    assert all(len(row.rates) == 2 and min(row.rates) > 0 for row in results.rows)
    assert results.passed and [figure.what for figure in results.figures] == ["decode against prefill"]
    assert max(done for done, _ in shown) == shown[0][1] - 1


def test_recurrent_models_too() -> None:
    model = Path(__file__).parents[1] / "data" / "refdata" / "models" / "qwen35-a-f16.gguf"
    plan, results = Plan.of((20,), 4, (0, 70, 100), (2,), 1), Results()
    Session(read_model(model), plan, "cpu").run(results)
    assert [row.point for row in results.rows] == plan.all_points() and results.passed
    assert results.figures[0].same_top == 16


def test_a_context_that_is_too_short(tiny: Path) -> None:
    model = read_model(tiny)
    with pytest.raises(UsageError, match=r"decode 10 behind 502 needs a context of 577 tokens; .* was trained for 512"):
        Session(model, Plan.of((10,), 10, (502,), (1,), 1)).check()
    with pytest.raises(UsageError, match=r"prefill 65 needs a context of 65 tokens; -c is 64"):
        Session(model, Plan.of((65,), 0, (0,), (1,), 1), ctx_size=64).check()
    Session(model, Plan.of((512,), 511, (0,), (1,), 1)).check()


def test_the_whole_context_can_be_used(tiny: Path) -> None:
    results = Results()
    Session(read_model(tiny), Plan.of((64,), 63, (448,), (1,), 1), "cpu").run(results)
    assert len(results.rows) == 2
