"""The public API as its users see it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pyllm import LLM, SamplingParams
from pyllm.errors import DeviceError, ModelFileError, PyllmError, UsageError
from tests.engine import greedy, tokens
from tests.refdata import model_path, reference

LLAMA, QWEN = model_path("llama-a-f32"), model_path("qwen3-a-bf16")
PROMPT = reference("llama-a")["n5_tokens"].tolist()


def test_everything_but_the_path_has_a_default() -> None:
    with LLM(LLAMA) as llm:
        assert llm.device_name == "cpu"
        assert llm.ctx_size == 2048  # what the model was trained for
        assert llm.architecture == "llama"
        chunks = list(llm.generate("Hello", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)))
    assert len(chunks) == 8
    assert [chunk.finish_reason for chunk in chunks] == [None] * 7 + ["length"]


def test_text_and_ids_are_the_same_prompt() -> None:
    with LLM(LLAMA) as llm:
        ids = llm.tokenize("Hello there")
        assert tokens(llm.generate("Hello there", greedy(8))) == tokens(llm.generate(ids, greedy(8)))
        assert llm.detokenize(llm.tokenize("Hello there", add_special=False)) == "Hello there"


def test_logits_are_float32_for_every_position() -> None:
    with LLM(LLAMA, kv_type="f32", ubatch_size=2) as llm:
        logits = llm.logits(PROMPT)
    assert logits.dtype == np.float32
    assert logits.shape == (5, 512)
    assert np.abs(logits - reference("llama-a")["n5_logits_last8"]).max() <= 1e-3


def test_streamed_text_is_the_text_of_the_tokens() -> None:
    with LLM(QWEN) as llm:
        chunks = list(llm.generate("Hello", greedy(64)))
        shown = "".join(chunk.text for chunk in chunks)
        assert shown == llm.tokenizer.decode(tokens(iter(chunks)), skip_special=True, continues=True)


def test_stop_strings_end_the_text_before_them() -> None:
    with LLM(QWEN) as llm:
        whole = "".join(chunk.text for chunk in llm.generate("Hello", greedy(40)))
        stop = whole[20:24]
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=[stop])
        chunks = list(llm.generate("Hello", params))
        assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].finish_reason == "stop"
        assert llm.stats["finish_reason"] == "stop"
        assert llm._cache.num_free_pages == llm._cache.num_pages


def test_an_end_token_ends_the_answer_unless_ignored() -> None:
    with LLM(QWEN) as llm:
        first = tokens(llm.generate("Hello", greedy(1)))[0]
        llm._scheduler._is_end = lambda token: token == first
        stopping = SamplingParams(max_tokens=8, temperature=0)
        assert [(c.token, c.finish_reason) for c in llm.generate("Hello", stopping)] == [(first, "stop")]
        assert len(tokens(llm.generate("Hello", greedy(8)))) == 8


def test_chat_equals_generating_from_the_rendered_template() -> None:
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    plain = [{"role": "user", "content": "Hi"}]
    with LLM(QWEN) as llm:
        rendered = llm.apply_chat_template(plain)
        assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        ids = llm.tokenize(rendered, parse_special=True)
        assert tokens(llm.chat(plain, greedy(8))) == tokens(llm.generate(ids, greedy(8)))
        assert tokens(llm.chat(messages, greedy(8))) != tokens(llm.chat(plain, greedy(8)))
        with pytest.raises(UsageError, match="role"):
            llm.chat([{"content": "no role"}])


def test_stats_tell_about_the_last_request() -> None:
    with LLM(LLAMA) as llm:
        tokens(llm.generate(PROMPT, greedy(7)))
        stats = llm.stats
    assert (stats["prompt_tokens"], stats["generated_tokens"]) == (5, 7)
    assert stats["prefill_seconds"] > 0
    assert stats["decode_seconds"] > 0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("ctx_size", 0),
        ("ubatch_size", -1),
        ("batch_size", 1.5),
        ("n_seqs", True),
        ("inflight", 0),
        ("kv_type", "q9"),
        ("device", "tpu"),
    ],
)
def test_wrong_arguments_are_named(argument: str, value: object) -> None:
    with pytest.raises(UsageError, match=argument if argument != "device" else "tpu"):
        LLM(LLAMA, **{argument: value})


def test_a_missing_gpu_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # makes its import fail
    with pytest.raises(DeviceError, match="--device cpu"):
        LLM(LLAMA, device="gpu")


@pytest.mark.parametrize("graphs", [True, False])
def test_decode_steps_are_replayed_if_wanted(graphs: bool) -> None:
    with LLM(LLAMA, device="cpu", graphs=graphs) as llm:
        tokens(llm.generate(PROMPT, greedy(4)))
        assert bool(llm._executor._captured) == graphs


def test_missing_files_and_unknown_architectures() -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf"):
        LLM("nowhere.gguf")
    with pytest.raises(ModelFileError):
        LLM(Path(__file__))


def test_threads_end_when_an_engine_closes_or_fails_to_open(tmp_path: Path) -> None:
    before = threading.active_count()
    with LLM(LLAMA) as llm:
        stream = llm.generate(PROMPT, greedy(100))
        next(stream)
    llm.close()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(LLAMA.read_bytes()[:5000])
    with pytest.raises(ModelFileError):
        LLM(broken)
    assert threading.active_count() == before


def test_an_engine_left_open_does_not_hang_the_interpreter() -> None:
    code = f"""
import sys
from pyllm import LLM, SamplingParams
llm = LLM({str(LLAMA)!r})
stream = llm.generate([1, 2, 3], SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True))
print(next(stream).token)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit()


def test_importing_pyllm_loads_no_engine() -> None:
    code = "import sys, pyllm; print([m for m in ('numpy', 'cupy', 'tokenizers', 'gguf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_closed_engine_says_so_every_time() -> None:
    llm = LLM(LLAMA)
    llm.close()
    for _ in range(10):
        with pytest.raises(DeviceError, match="closed"):
            list(llm.generate(PROMPT, greedy(2)))
        with pytest.raises(DeviceError, match="closed"):
            llm.logits(PROMPT)


def test_an_interrupt_with_nothing_running_has_no_effect() -> None:
    with LLM(LLAMA) as llm:
        llm.interrupt()
        assert len(tokens(llm.generate(PROMPT, greedy(3)))) == 3
        llm.interrupt()
        assert len(llm.logits(PROMPT)) == 5


def test_an_interrupted_computation_of_logits_is_an_error() -> None:
    with LLM(LLAMA, ubatch_size=1) as llm:
        submit = llm._executor.submit

        def interrupting(segments):
            llm.interrupt()
            return submit(segments)

        llm._executor.submit = interrupting
        with pytest.raises(PyllmError, match="interrupted"):
            llm.logits(PROMPT * 10)


@pytest.mark.parametrize("prompt", [None, 5, b"hello", [1, 2.5], ["1"], [None]])
def test_prompts_of_a_wrong_type_are_refused(prompt: object) -> None:
    with LLM(LLAMA) as llm:
        with pytest.raises(UsageError, match="token id"):
            llm.generate(prompt)
        with pytest.raises(UsageError, match="token id"):
            llm.logits(prompt)
        with pytest.raises(UsageError, match="SamplingParams"):
            llm.generate("Hello", {"max_tokens": 2})


def test_a_path_of_a_wrong_type_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(UsageError, match="path"):
        LLM(5)
    assert threading.active_count() == before
