"""`pyllm run` with a fake engine: what each option becomes, what goes where."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pyllm.commands import main, options
from pyllm.commands.answer import Timings, summary
from pyllm.commands.models import model_and_text
from pyllm.commands.run import command
from pyllm.device import DEVICE_NAMES
from pyllm.engine_options import INPUTS
from pyllm.kv_types import KV_TYPES
from pyllm.llm import Chunk, EngineOptions
from pyllm.overflow import OVERFLOWS
from pyllm.prompt_cache.disk_tier import DEFAULT_BUDGET
from pyllm.sampling import SamplingParams
from tests.commands.fake_llm import FakeLLM

Run = Callable[..., Result]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.touch()
    return str(path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Use the fake engine; class attributes of it may be set with what is returned."""
    monkeypatch.setattr("pyllm.llm.LLM", FakeLLM)
    return monkeypatch


@pytest.fixture
def run(model: str, fake: pytest.MonkeyPatch) -> Run:
    def invoke(*arguments: str, stdin: str | bytes = "") -> Result:
        return CliRunner().invoke(main, ["run", model, *arguments], input=stdin)

    return invoke


def test_answer_on_stdout_everything_else_on_stderr(run: Run) -> None:
    result = run("Hi")
    assert result.exit_code == 0
    assert result.stdout == "Hello\n"
    assert result.stderr.splitlines() == [
        "Device: cpu",
        "10 prompt tokens, 20.0 tokens/s; 3 answer tokens, 8.0 tokens/s; --seed 42 repeats this answer",
    ]
    assert FakeLLM.opened.call == ("chat", [{"role": "user", "content": "Hi"}])
    assert FakeLLM.opened.closed


def test_defaults_are_those_of_the_engine(run: Run) -> None:
    run("Hi")
    assert FakeLLM.opened.params == SamplingParams(max_tokens=None)
    assert FakeLLM.opened.options == {"device": "auto", "graphs": True}


def test_help_tells_the_defaults_of_the_engine() -> None:
    defaults = {field.name: field.default for cls in (EngineOptions, SamplingParams) for field in fields(cls)}
    told = {
        option.name: match[1]
        for option in command.params
        if isinstance(option, click.Option) and (match := re.search(r"\[default: ([\w.]+)\]", option.help or ""))
    }
    defaults["cache_disk"] = f"{DEFAULT_BUDGET >> 30}G"
    assert told == {name: str(defaults[name]) for name in told}
    names = {field.name for group in (options.SamplingOptions, options.EngineOptions) for field in fields(group)}
    elsewhere = {"max_tokens", "seed", "stop", "ignore_eos", "logit_bias", "device", "no_graphs"}
    elsewhere |= {"batch_size", "ubatch_size", "inflight", "kv_trace", "batch_invariant"}
    assert set(told) == (names | {"cache_disk", "overflow", "keep"}) - elsewhere


def test_choices_are_those_of_the_engine() -> None:
    choices = {option.name: set(option.type.choices) for option in command.params if hasattr(option.type, "choices")}
    engines = {"device": set(DEVICE_NAMES), "kv_type": set(KV_TYPES), "inputs": set(INPUTS), "overflow": set(OVERFLOWS)}
    assert choices == engines


def test_sampling_options(run: Run) -> None:
    line = "-n 5 --temp 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 7 --ignore-eos"
    assert run("Hi", *line.split(), "--stop", "a", "--stop", r"b\n\t\\n\x").exit_code == 0
    assert FakeLLM.opened.params == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        ignore_eos=True,
        stop=("a", "b\n\t\\n\\x"),
    )


def test_penalties_and_further_filters(run: Run) -> None:
    line = (
        "--repeat-penalty 1.1 --frequency-penalty 0.2 --presence-penalty 0.3 --repeat-last-n 40 --typical-p 0.9 "
        "--top-n-sigma 1.5 --dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3 --xtc-probability 0.5 "
        "--xtc-threshold 0.2 --logit-bias 42=-1.5 --logit-bias 7=-inf --logit-bias 42=2"
    )
    assert run("Hi", *line.split()).exit_code == 0
    assert FakeLLM.opened.params == SamplingParams(
        max_tokens=None,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        penalty_last_n=40,
        typical_p=0.9,
        top_n_sigma=1.5,
        dry_multiplier=0.8,
        dry_base=2,
        dry_allowed_length=3,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        logit_bias={42: 2.0, 7: float("-inf")},
    )


@pytest.mark.parametrize("bias", ["42", "x=1", "42=", "42=nan", "=1", "-1=1", "42=inf"])
def test_logit_biases_that_are_none(run: Run, bias: str) -> None:
    result = run("Hi", f"--logit-bias={bias}")
    assert result.exit_code == 2 and "Error: " in result.stderr and "Traceback" not in result.stderr


def test_engine_options(run: Run) -> None:
    run("Hi", *["-c", "100", "-b", "64", "-ub", "32", "--kv-type", "f32", "--device", "cpu"])
    expected = {"ctx_size": 100, "batch_size": 64, "ubatch_size": 32, "kv_type": "f32", "device": "cpu"}
    expected["graphs"] = True
    assert FakeLLM.opened.options == expected
    run(
        "Hi", *["--ctx-size", "100", "--batch-size", "64", "--ubatch-size", "32", "--kv-type", "f32", "--device", "cpu"]
    )
    assert FakeLLM.opened.options == expected
    run("Hi", "--no-graphs", "--device", "emulated")
    assert FakeLLM.opened.options == {"device": "emulated", "graphs": False}
    run("Hi", "--inflight", "3", "--inputs", "zero-copy", "--kv-trace", "x.jsonl", "--kv-trace-every", "5")
    expected = {"device": "auto", "graphs": True, "inflight": 3, "kv_trace": "x.jsonl", "kv_trace_every": 5}
    expected["inputs"] = "zero-copy"
    assert FakeLLM.opened.options == expected


def test_system_message(run: Run) -> None:
    run("Hi", "--system", "Be brief.")
    assert FakeLLM.opened.call == (
        "chat",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    )


def test_raw_prompts(run: Run) -> None:
    run("Hi", "--raw")
    assert FakeLLM.opened.call == ("generate", ["Hi", True, False])
    run("Hi", "--raw", "--parse-special")
    assert FakeLLM.opened.call == ("generate", ["Hi", True, True])


@pytest.mark.parametrize(
    "option", [["--parse-special"], ["--raw", "--system", "x"], ["--logprobs", "2"], ["-n", "0"], ["-c", "0"]]
)
def test_options_that_make_no_sense(run: Run, option: list[str]) -> None:
    assert run("Hi", *option).exit_code == 2


@pytest.mark.parametrize("option", [["--temp", "-1"], ["--top-p", "2"], ["--seed", "-1"], ["--stop", ""]])
def test_values_out_of_range(run: Run, option: list[str]) -> None:
    result = run("Hi", *option)
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def prompt_of(engine: FakeLLM) -> str:
    assert engine.call is not None
    return engine.call[1][-1]["content"]


@pytest.mark.parametrize(
    ("content", "prompt"),
    [(b"Hi", "Hi"), (b"Hi\n", "Hi"), (b"Hi\r\n", "Hi"), (b"Hi\n\n", "Hi\n"), ("\ufeffGrüße".encode(), "Grüße")],
)
def test_prompt_from_file_and_stdin(run: Run, tmp_path: Path, content: bytes, prompt: str) -> None:
    (tmp_path / "prompt.txt").write_bytes(content)
    run("-f", str(tmp_path / "prompt.txt"))
    assert prompt_of(FakeLLM.opened) == prompt
    run("-f", "-", stdin=content)
    assert prompt_of(FakeLLM.opened) == prompt
    run(stdin=content)
    assert prompt_of(FakeLLM.opened) == prompt


def test_argument_leaves_stdin_alone(run: Run) -> None:
    run("Hi", stdin="something else")
    assert prompt_of(FakeLLM.opened) == "Hi"


@pytest.mark.parametrize("arguments", [[], ["-f", "-"], ["Hi", "-f", "x"]])
def test_no_prompt_or_two(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_prompts_that_are_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    for arguments, stdin in ((["-f", str(tmp_path / "bytes")], b""), ([], b"ab\xff")):
        result = run(*arguments, stdin=stdin)
        assert result.exit_code == 1 and "not UTF-8 text: byte 0xff at position 2" in result.stderr
    for arguments in (["\udcff"], ["Hi", "--system", "\udcff"], ["Hi", "--stop", "\udcff"]):
        assert "is not UTF-8 text" in run(*arguments).stderr
    assert "cannot be read" in run("-f", str(tmp_path / "nosuch")).stderr
    assert "cannot be read" in run("-f", str(tmp_path)).stderr


def test_json(run: Run, model: str) -> None:
    result = run("Hi", "--json")
    shown = json.loads(result.stdout)
    assert shown.pop("timings").keys() == {
        "load_seconds",
        "prefill_seconds",
        "decode_seconds",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
    }
    assert shown == {
        "model": model,
        "device": "cpu",
        "text": "Hello",
        "tokens": [1, 2, 3],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 10, "cached_tokens": 0, "completion_tokens": 3},
        "seed": 42,
    }


THOUGHTS = (Chunk("<think>\nHm", 1), Chunk(".\n</think>", 2), Chunk("\n\nYes", 3, "stop"))


def test_reasoning(run: Run, fake: pytest.MonkeyPatch) -> None:
    fake.setattr(FakeLLM, "chunks", THOUGHTS)
    assert run("Hi").stdout == "<think>\nHm.\n</think>\n\nYes\n"
    assert run("Hi", "--think", "hide").stdout == "Yes\n"
    shown = json.loads(run("Hi", "--json").stdout)
    assert (shown["reasoning"].strip(), shown["text"], shown["tokens"]) == ("Hm.", "Yes", [1, 2, 3])
    fake.setattr(FakeLLM, "chunks", (Chunk("<think>\nHm", 1), Chunk("m", 2, "length")))
    assert "No answer: the model was still thinking" in run("Hi").stderr


def test_reasoning_that_is_not_wanted(run: Run, fake: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    fake.setattr(FakeLLM, "apply_chat_template", lambda self, messages, **args: asked.append(args) or "assistant\n")
    fake.setattr(FakeLLM, "chat", lambda self, messages, params, **args: self._answer(("chat", messages), params))
    assert run("Hi", "--think", "off").exit_code == 0 and asked == [{"enable_thinking": False}]
    for arguments in (["--think", "some"], ["--think", "off", "--raw"]):
        assert run("Hi", *arguments).exit_code == 2


def test_json_tells_what_was_there(run: Run, fake: pytest.MonkeyPatch) -> None:
    stats = {**FakeLLM("x").stats, "cached_tokens": 7}
    fake.setattr(FakeLLM, "stats", stats)
    usage = {"prompt_tokens": 10, "cached_tokens": 7, "completion_tokens": 3}
    assert json.loads(run("Hi", "--json").stdout)["usage"] == usage


def test_json_with_logprobs(run: Run, fake: pytest.MonkeyPatch) -> None:
    never = float("-inf")
    chunks = (Chunk("a", 1, None, -0.5, ((1, -0.5), (2, -1.0))), Chunk("", 2, "stop", -0.0, ((2, 0.0), (1, never))))
    fake.setattr(FakeLLM, "chunks", chunks)
    shown = json.loads(run("Hi", "--json", "--logprobs", "2").stdout)
    assert FakeLLM.opened.params is not None and FakeLLM.opened.params.logprobs == 2
    assert shown["logprobs"] == [
        {
            "token": 1,
            "text": "<1>",
            "logprob": -0.5,
            "top": [{"token": 1, "text": "<1>", "logprob": -0.5}, {"token": 2, "text": "<2>", "logprob": -1.0}],
        },
        {
            "token": 2,
            "text": "<2>",
            "logprob": 0.0,
            "top": [{"token": 2, "text": "<2>", "logprob": 0.0}, {"token": 1, "text": "<1>", "logprob": None}],
        },
    ]


def test_seed_is_told_when_it_was_drawn(run: Run) -> None:
    assert "--seed 42" in run("Hi").stderr
    assert "--seed" not in run("Hi", "--seed", "7").stderr
    assert "--seed" not in run("Hi", "--temp", "0").stderr


def test_cut_answers_are_told(run: Run, fake: pytest.MonkeyPatch) -> None:
    fake.setattr(FakeLLM, "chunks", (Chunk("a", 1), Chunk("b", 2, "length")))
    assert "Cut off after -n 2 tokens" in run("Hi", "-n", "2").stderr
    assert "Cut off: the context of 4096 tokens (-c) is full" in run("Hi").stderr


def test_context_beyond_the_trained_one_is_told(run: Run, fake: pytest.MonkeyPatch) -> None:
    fake.setattr(FakeLLM, "trained_for", 2048)
    assert "Warning: the model was trained for 2048 tokens; -c 9000" in run("Hi", "-c", "9000").stderr
    assert "Warning" not in run("Hi", "-c", "2048").stderr
    assert "Warning" not in run("Hi").stderr


def test_ctrl_c_keeps_the_partial_answer(run: Run, fake: pytest.MonkeyPatch) -> None:
    calls = []

    def press_before_third_chunk() -> None:
        calls.append(None)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)

    fake.setattr(FakeLLM, "during", staticmethod(press_before_third_chunk))
    before = signal.getsignal(signal.SIGINT)
    result = run("Hi")
    assert result.exit_code == 130
    assert result.stdout == "Hel\n"
    assert "Interrupted" in result.stderr
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_engine_has_the_request_is_not_lost(run: Run, fake: pytest.MonkeyPatch) -> None:
    calls = []

    def interrupt(self: FakeLLM) -> None:
        calls.append(None)
        self.interrupted = len(calls) > 1  # the first one meets nothing that runs

    fake.setattr(FakeLLM, "interrupt", interrupt)
    fake.setattr(FakeLLM, "during", staticmethod(lambda: calls or signal.raise_signal(signal.SIGINT)))
    result = run("Hi")
    assert result.exit_code == 130 and result.stdout == "Hel\n"


def test_second_ctrl_c_does_not_wait(run: Run, fake: pytest.MonkeyPatch) -> None:
    def press_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    fake.setattr(FakeLLM, "during", staticmethod(press_twice))
    result = run("Hi")
    assert result.exit_code == 130 and FakeLLM.opened.closed


def test_known_model_is_fetched_first(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake.setattr("pyllm.hub.find_model", lambda name: None)
    fake.setattr("pyllm.hub.pull", lambda name, progress, force: tmp_path / "fetched.gguf")
    result = CliRunner().invoke(main, ["run", "demo", "Hi"])
    assert FakeLLM.opened.model_path == tmp_path / "fetched.gguf"
    assert result.stdout == "Hello\n"
    assert result.stderr.startswith("Fetching demo: SmolLM2-135M-Instruct (Apache-2.0), 92.9 MB")


def test_speeds_that_were_not_measured_are_left_out() -> None:
    stats = {"prompt_tokens": 10, "generated_tokens": 0, "prefill_seconds": 1.0, "decode_seconds": 0.0}
    assert summary(stats, Timings.of(0.0, stats)) == "10 prompt tokens; 0 answer tokens"
    stats["generated_tokens"] = 1
    assert summary(stats, Timings.of(0.0, stats)) == "10 prompt tokens, 10.0 tokens/s; 1 answer token"


def test_a_default_model_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_and_text("Hello?", None) == ("Hello?", None)
    monkeypatch.setenv("PYLLM_MODEL", "demo")
    assert model_and_text("Hello?", None) == ("demo", "Hello?")
    assert model_and_text("demo", None) == ("demo", None)
    assert model_and_text("other.gguf", None) == ("other.gguf", None)
    assert model_and_text("hf:a/b", None) == ("hf:a/b", None)
    assert model_and_text("Hello?", "World") == ("Hello?", "World")
