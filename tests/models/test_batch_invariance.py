"""--batch-invariant: logits and answers are the same bits, whatever runs beside a sequence and however it is cut up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllm.errors import SessionError, UnsupportedError
from pyllm.llm import LLM, Chunk
from pyllm.models import by_token, feed_forward
from pyllm.ops import gated_delta_rule, gated_mul_mat_id, linear, mul_mat_id, product_plan
from pyllm.ops.flash_attention import AttentionShape
from pyllm.ops.op import Target
from pyllm.quants import QuantType
from pyllm.sampling import SamplingParams
from pyllm.synth.writer import write_model
from tests.engine import interleaved, open_engine
from tests.models.test_references import check_float16
from tests.ops.lives import LIVES
from tests.refdata import model_path, quant_path, reference
from tests.tiny_shape import TINY, TINY_EXPERTS, TINY_GEMMA, TINY_HYBRID, TINY_HYBRID_EXPERTS, TINY_TIED

MODELS = {
    "llama": model_path("llama-a-f32"),
    "llama, Q4_K": quant_path("llama-q-Q4_K_M-mix"),
    "gemma3": model_path("gemma3-a-f16"),
    "qwen3moe": model_path("qwen3moe-a-f16"),
    "qwen35moe": model_path("qwen35moe-a-f16"),
}
WIDE = {"hidden_size": 1024, "intermediate_size": 1536, "num_heads": 8, "num_kv_heads": 4, "head_dim": 128}
ON_GPU = {
    "dense": replace(TINY, **WIDE),
    "tied": replace(TINY_TIED, **{**WIDE, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 576}),
    "experts": replace(TINY_EXPERTS, **{**WIDE, "intermediate_size": 256}),
    "hybrid": TINY_HYBRID,
    "hybrid, experts": TINY_HYBRID_EXPERTS,
    "windows": TINY_GEMMA,
}
QUANTS = ("F16", "Q4_1", "Q4_K", "Q6_K", "Q8_0")
LENGTH = 2  # of answers; longer on a GPU
OPTIONS = {"kv_type": "f16", "ctx_size": 256, "page_size": 16}


@pytest.fixture(params=[life for life in LIVES if life != "cpu"])
def life(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(path: Path, life: str, **options: object) -> LLM:
    return open_engine(path, LIVES[life](), **{**OPTIONS, "batch_invariant": True, **options})


def prompts(llm: LLM) -> list[list[int]]:
    """More tokens than any kernel for few has, and fewer; the last two begin alike."""
    rng = np.random.default_rng(7)
    counts = (37, 2, 9, 40, 1, 40) if llm.device_name == "emulated" else (150, 2, 9, 33, 1, 64, 17, 12, 90, 90)
    lines = [rng.integers(3, llm.vocab_size, count).tolist() for count in counts]
    lines[-1][:32] = lines[3][:32]
    return lines


def params(llm: LLM) -> SamplingParams:
    length = LENGTH if llm.device_name == "emulated" else 16
    return SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, logprobs=20)


def told(chunks: list[Chunk]) -> list[object]:
    """What a generation said: tokens, and what is computed of whole rows of logits."""
    return [(chunk.token, chunk.logprob, chunk.top_logprobs) for chunk in chunks if chunk.token is not None]


def alone(path: Path, life: str, **options: object) -> tuple[list[np.ndarray], list[list[object]]]:
    """Logits and answers of each line by itself: prompts in one piece, answers token by token."""
    with opened(path, life, **options) as llm:
        lines = prompts(llm)
        return [llm.logits(line) for line in lines], [told(list(llm.generate(line, params(llm)))) for line in lines]


def together(path: Path, life: str, **options: object) -> tuple[list[np.ndarray], list[list[object]]]:
    """The same side by side, prompts in pieces, in pages that are used again."""
    settings = {"n_seqs": 4, "ubatch_size": 24, "prefix_cache": True, **options}
    with opened(path, life, **settings) as llm:
        lines = prompts(llm)
        logits = llm.logits_batch(lines)
        chunks: list[list[Chunk]] = [[] for _ in lines]

        def stream(number: int):
            for chunk in llm.generate(lines[number], params(llm)):
                chunks[number].append(chunk)
                yield chunk

        interleaved([stream(number) for number in range(len(lines))])
        return logits, [told(answer) for answer in chunks]


def differing(some: list[np.ndarray], others: list[np.ndarray]) -> int:
    return sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in zip(some, others, strict=True))


def check_same(path: Path, life: str, **options: object) -> None:
    logits, answers = alone(path, life, **options)
    found, beside = together(path, life, **options)
    assert differing(logits, found) == 0
    assert beside == answers


@pytest.mark.parametrize("name", MODELS)
def test_lines_side_by_side_are_those_alone(life: str, name: str) -> None:
    check_same(MODELS[name], life)


@pytest.mark.skipif("gpu" not in LIVES, reason="for a GPU (make test-gpu); others are emulated")
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("quant", QUANTS)
def test_lines_side_by_side_on_a_gpu(name: str, quant: str, tmp_path: Path) -> None:
    """Wider than the models of the reference data, and without them."""
    write_model(tmp_path / "model.gguf", ON_GPU[name], QuantType[quant])
    for kv_type in ("f16", "q8_0"):
        check_same(tmp_path / "model.gguf", "gpu", kv_type=kv_type)


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_many_sequences_decode_in_few_shapes(life: str, name: str) -> None:
    """Steps are filled up with tokens of nobody, which change nothing of the others."""
    lines = [[5 + number, 7, 11 + 2 * number] for number in range(13)]

    def wanted(llm: LLM, number: int) -> SamplingParams:
        return replace(params(llm), max_tokens=1 + number % 4)

    def answers(llm: LLM) -> list[list[object]]:
        open_ones = [llm.begin(line, wanted(llm, number)) for number, line in enumerate(lines)]
        while llm.advance():
            pass
        return [told(list(iter(one.take, None))) for one in open_ones]

    with opened(MODELS[name], life) as llm:
        expected = [told(list(llm.generate(line, wanted(llm, number)))) for number, line in enumerate(lines)]
    with opened(MODELS[name], life, n_seqs=13) as llm:
        forward, shapes = llm._executor.model.forward, set()

        def seen(device: object, batch: Any) -> object:
            if batch.longest == 1:
                shapes.add(batch.num_tokens)
            return forward(device, batch)

        llm._device.graphs = False  # what is replayed would not be seen
        llm._executor.model.forward = seen
        assert answers(llm) == expected
    assert {count for count in shapes if count > 8} == {13} and len(shapes) > 1


def test_an_answer_read_as_a_prompt_has_the_same_logits(life: str) -> None:
    """What is put back into the queue is computed anew in this way."""
    with opened(MODELS["llama"], life) as llm:
        line = prompts(llm)[0]
        chunks = list(llm.generate(line, params(llm)))
        answer = [chunk.token for chunk in chunks if chunk.token is not None]
        again = [told(list(llm.generate(line + answer[:count], params(llm))))[0] for count in range(len(answer))]
    assert again == told(chunks)


@pytest.mark.parametrize("name", ["llama-a-f32", "gemma3-a-f16", "qwen35-a-f16"])
def test_logits_are_those_of_the_reference(life: str, name: str) -> None:
    ref = reference(name.rpartition("-")[0])
    with opened(model_path(name), life) as llm:
        prompt = "n70" if llm.device_name != "emulated" else "short"
        prompt = prompt if f"{prompt}_tokens" in ref else next(key for key in ref if key.endswith("_tokens"))[:-7]
        check_float16(llm.logits(ref[f"{prompt}_tokens"].tolist())[-8:], ref[f"{prompt}_logits_last8"])


# The tests above would see each choice that is not pinned: with one of them left to the number of tokens they fail.


def variant(target: Target) -> Target:
    return Target(target.vendor, target.arch, target.warp_size, target.tiles, target.multiprocessors)


def unpinned(original: Callable[..., object]) -> Callable[..., object]:
    """A choice of a plan as it is without the flag."""
    return lambda target, *args, **more: original(target and variant(target), *args, **more)


def leave_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (product_plan, linear):
        for name in ("is_thin", "fuses_gate", "fuses_norm"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, unpinned(getattr(product_plan, name)))


def leave_thin_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = product_plan._thin_launch
    monkeypatch.setattr(product_plan, "_thin_launch", unpinned(launch))


def leave_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(batch, num_heads: int, num_kv_heads: int):
        yield batch.inputs, AttentionShape.of(batch.num_seqs, batch.longest, batch.most_rows, num_kv_heads)

    monkeypatch.setattr(by_token, "attention_parts", parts)
    monkeypatch.setattr("pyllm.models.decoder.attention_parts", parts)


def leave_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, without = mul_mat_id.expert_tile_rows, mul_mat_id.without_lists
    for module in (mul_mat_id, feed_forward):
        monkeypatch.setattr(module, "expert_tile_rows", unpinned(rows))
    for module in (mul_mat_id, gated_mul_mat_id):
        monkeypatch.setattr(module, "without_lists", unpinned(without))


def leave_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = gated_delta_rule.scratch_shape
    for module in ("pyllm.ops.gated_delta_rule", "pyllm.models.delta_net"):
        monkeypatch.setattr(f"{module}.scratch_shape", unpinned(shape))


@pytest.mark.parametrize(
    ("name", "leave"),
    [
        ("llama", leave_products),
        ("llama, Q4_K", leave_thin_tokens),
        ("llama", leave_attention),
        ("qwen3moe", leave_experts),
        ("qwen35moe", leave_delta_rule),
    ],
)
def test_a_choice_that_is_not_pinned_is_seen(
    name: str, leave: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch)
    with pytest.raises(AssertionError):
        check_same(MODELS[name], "emulated-32")


def test_without_the_option_bits_differ() -> None:
    with pytest.raises(AssertionError):
        check_same(MODELS["llama, Q4_K"], "emulated-32", batch_invariant=False)


def test_rows_of_other_engines_are_refused(tmp_path: Path) -> None:
    """They are right up to rounding, which is not enough; the other way round it is."""
    files = {}
    for invariant in (False, True):
        with opened(MODELS["llama"], "emulated-32", batch_invariant=invariant, prefix_cache=True) as llm:
            list(llm.generate(prompts(llm)[0], params(llm)))
            files[invariant] = tmp_path / f"{invariant}.session"
            llm.save_session(files[invariant])
            llm.forget()
            llm.load_session(files[invariant])
            if invariant:
                with pytest.raises(SessionError, match="order of sums"):
                    llm.load_session(files[False])
    with opened(MODELS["llama"], "emulated-32", batch_invariant=False, prefix_cache=True) as llm:
        llm.load_session(files[True])


def test_a_cpu_refuses() -> None:
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        open_engine(MODELS["llama"], batch_invariant=True)
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        LLM(MODELS["llama"], device="cpu", batch_invariant=True)
