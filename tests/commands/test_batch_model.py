"""`pyllm batch` as users start it: a process of its own with a small model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine import greedy, open_engine
from tests.refdata import model_path

ROOT = Path(__file__).parents[2]
MODEL = model_path("llama-a-f32")
SECONDS = 120
OPTIONS = ("--device", "cpu", "--kv-type", "f32", "--temp", "0", "--ignore-eos")


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "cli.py"), "batch", *map(str, arguments)]


def pyllm(*arguments: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    settings.setdefault("input", "")
    return subprocess.run(
        command(*arguments), capture_output=True, encoding="utf-8", timeout=SECONDS, check=False, **settings
    )


def written(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    """All records by line, each of which is there once and whole."""
    found = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert len({record["line"] for record in found}) == len(found)
    return sorted(found, key=lambda record: record["line"])


@pytest.mark.parametrize("name", ["llama-a-f32", "qwen3-a-bf16", "gemma3-a-f16"])
def test_greedy_answers_are_those_of_single_runs(tmp_path: Path, name: str) -> None:
    begin = (
        "The same beginning of many prompts, long enough to fill a page of rows with tokens of this small vocabulary. "
    )
    lines = [
        {
            "id": number,
            "prompt": (begin * 4 if number % 8 > 3 else "") + "word " * (number % 11),
            "max_tokens": 1 + number % 17,
        }
        for number in range(24)
    ]
    lines[0]["prompt"] = "Hello"
    written(tmp_path / "in.jsonl", lines)
    for parallel in (1, 7):
        out = tmp_path / f"{parallel}.jsonl"
        result = pyllm(model_path(name), tmp_path / "in.jsonl", "-o", out, "--parallel", parallel, *OPTIONS)
        assert result.returncode in (0, 3), result.stderr
    with open_engine(model_path(name)) as llm:
        for line, one, seven in zip(lines, records(tmp_path / "1.jsonl"), records(tmp_path / "7.jsonl"), strict=True):
            if not line["prompt"]:
                assert one["error"]["code"] == seven["error"]["code"] == "no_prompt"
                continue
            messages = [{"role": "user", "content": line["prompt"]}]
            alone = "".join(chunk.text for chunk in llm.chat(messages, greedy(line["max_tokens"])))
            assert one["text"] == seven["text"] == alone and one["error"] is None
            assert seven["usage"]["completion_tokens"] == line["max_tokens"]
            assert seven["usage"]["prompt_tokens"] == len(llm.chat_tokens(messages)) > seven["usage"]["cached_tokens"]


def test_a_shared_beginning_is_computed_once(tmp_path: Path) -> None:
    begin = " ".join(f"word {number}" for number in range(200))
    lines = [{"id": number, "prompt": f"{begin}: {number:02}", "max_tokens": 4} for number in range(32)]
    written(tmp_path / "in.jsonl", lines)
    arguments = (MODEL, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--parallel", 8, *OPTIONS)
    result = pyllm(*arguments, "--progress", "json")
    assert result.returncode == 0
    end = json.loads(result.stderr.splitlines()[-1])
    assert end["prefix_tokens"] > 1000
    usages = [record["usage"] for record in records(tmp_path / "out.jsonl")]
    # The first two lines share the "0" of their numbers, too.
    assert len(usages) == 32 and all(usage["cached_tokens"] >= end["prefix_tokens"] - 1 for usage in usages)
    computed = end["prompt_tokens"] - end["cached_tokens"] + end["prefix_tokens"]
    assert computed < 2 * usages[0]["prompt_tokens"]


def test_the_default_of_parallel_is_told(tmp_path: Path) -> None:
    written(tmp_path / "in.jsonl", [{"prompt": "Hello", "max_tokens": 2}])
    result = pyllm(MODEL, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "-c", 100, *OPTIONS)
    assert result.returncode == 0 and "Device: cpu; 8 lines at a time, " in result.stderr
    assert "(--parallel 8)" in result.stderr


def test_settings_of_lines_and_logprobs(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    lines = [
        {"prompt": "Hello", "max_tokens": 3, "logprobs": 2},
        {"prompt": "Hello", "max_tokens": 3, "temperature": 1, "top_k": 1},
        {"custom_id": "c", "body": chat},
        {"prompt": "x " * 300},
        {"messages": [{"role": "nobody"}]},
    ]
    written(tmp_path / "in.jsonl", lines)
    result = pyllm(MODEL, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "-c", 200, *OPTIONS)
    assert result.returncode == 3 and "Traceback" not in result.stderr
    first, second, third, fourth, _ = records(tmp_path / "out.jsonl")
    assert first["text"] == second["text"] and len(first["logprobs"]) == 3 and "logprobs" not in second
    assert [len(entry["top"]) for entry in first["logprobs"]] == [2, 2, 2]
    choice = third["response"]["body"]["choices"][0]
    assert choice["message"]["content"] == first["text"]
    shown = [entry["logprob"] for entry in first["logprobs"]]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(shown, abs=1e-5)
    assert fourth["error"]["code"] == "context_length_exceeded" and "-c" in fourth["error"]["message"]


def start(*arguments: object, **settings: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A test run in the background may have been started with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **settings,
    )


class Pipe:
    """A batch that reads its lines from a pipe, so that the test says how far it can get."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.process = start(MODEL, "-", "-o", out, "--parallel", 2, *OPTIONS, stdin=subprocess.PIPE)

    def send(self, *lines: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self.process.stdin.flush()

    def wait_for_records(self, number: int) -> None:
        """Reads the output until it has so many lines; it is appended to by a process that then waits for input."""
        import time

        end = time.monotonic() + SECONDS
        while not self.out.exists() or self.out.read_bytes().count(b"\n") < number:
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.01)

    def end(self, number: int) -> tuple[int, bytes]:
        self.process.send_signal(number)
        _, notes = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, notes


LINES = [{"id": number, "prompt": f"Hello {number}", "max_tokens": 5} for number in range(8)]
ENDLESS = {"id": "long", "prompt": "Hello", "max_tokens": 4000}


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_resuming_after_signals(tmp_path: Path, number: int, status: int) -> None:
    """Ended in the middle of a line, resumed from the same lines."""
    lines = [*LINES[:3], {**ENDLESS, "max_tokens": 1500}, *LINES[3:]]
    pipe = Pipe(tmp_path / "out.jsonl")
    pipe.send(*lines[:5])
    pipe.wait_for_records(4)  # all but the long one
    returned, notes = pipe.end(number)
    assert returned == status and b"Traceback" not in notes
    if number != signal.SIGKILL:
        assert b"Interrupted; the same command goes on. 4 lines" in notes
    before = (tmp_path / "out.jsonl").read_bytes()
    assert [record["id"] for record in records(tmp_path / "out.jsonl")] == [0, 1, 2, 3]
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(before[:50])  # as if the last record had been cut
    lines[3] = {**ENDLESS, "max_tokens": 7}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    result = pyllm(MODEL, "-", "-o", tmp_path / "out.jsonl", "--parallel", 3, *OPTIONS, input=text)
    assert result.returncode == 0, result.stderr
    assert "ended in the middle of a record" in result.stderr and "Resuming: 4 lines" in result.stderr
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    written(tmp_path / "in.jsonl", lines)
    assert pyllm(MODEL, tmp_path / "in.jsonl", "-o", tmp_path / "whole.jsonl", *OPTIONS).returncode == 0
    whole, resumed = records(tmp_path / "whole.jsonl"), records(tmp_path / "out.jsonl")
    assert [(r["id"], r["text"]) for r in resumed] == [(r["id"], r["text"]) for r in whole]


def test_sigterm_while_it_waits_for_lines(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "out.jsonl")
    pipe.send(LINES[0])
    pipe.wait_for_records(1)
    returned, notes = pipe.end(signal.SIGTERM)
    assert returned == 143 and b"Traceback" not in notes and b"Fatal" not in notes


def test_one_process_at_a_time(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "out.jsonl")
    pipe.send(LINES[0])
    pipe.wait_for_records(1)
    refused = pyllm(MODEL, "-", "-o", tmp_path / "out.jsonl", *OPTIONS)
    assert refused.returncode == 1 and "another pyllm batch" in refused.stderr and refused.stderr.count("\n") == 1
    pipe.process.communicate(timeout=SECONDS)
    assert pipe.process.returncode == 0


def test_what_cannot_run(tmp_path: Path) -> None:
    written(tmp_path / "in.jsonl", LINES)
    for model, source, out in (
        ("nosuch", tmp_path / "in.jsonl", tmp_path / "out.jsonl"),
        (MODEL, tmp_path / "nosuch.jsonl", tmp_path / "out.jsonl"),
        (MODEL, tmp_path / "in.jsonl", tmp_path / "no" / "out.jsonl"),
        (tmp_path / "in.jsonl", tmp_path / "in.jsonl", tmp_path / "out.jsonl"),
    ):
        result = pyllm(model, source, "-o", out, *OPTIONS)
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    import resource

    written(tmp_path / "in.jsonl", [{"prompt": "Hello", "max_tokens": 40} for _ in range(20)])

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    arguments = (MODEL, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--parallel", 4, *OPTIONS)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    result = pyllm(*arguments, preexec_fn=prepare, env=environment)
    assert result.returncode == 1 and "Error: " in result.stderr and "run again to go on" in result.stderr
    assert 0 < len(records(tmp_path / "out.jsonl")) < 20
    assert pyllm(*arguments).returncode == 0
    assert len(records(tmp_path / "out.jsonl")) == 20
