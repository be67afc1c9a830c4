"""`pyllm batch` with an engine that repeats prompts: options, notes, statuses, resuming."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyllm.commands import main
from tests.batch.stub import StubGeneration, StubLLM

Batch = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").write_bytes(b"x" * 100)
    return tmp_path


@pytest.fixture
def batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """Runs `pyllm batch model.gguf INPUT -o out.jsonl`."""
    monkeypatch.setattr("pyllm.llm.LLM", StubLLM)
    monkeypatch.chdir(folder)

    def invoke(source: str, *arguments: str, stdin: str | bytes = "", parallel: bool = True) -> Result:
        given = ["--parallel", "4"] if parallel else []
        line = ["batch", "model.gguf", source, "-o", "out.jsonl", *given, *arguments]
        return CliRunner().invoke(main, line, input=stdin)

    return invoke


def lines(*objects: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in objects)


def records(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return sorted(found, key=lambda record: record["line"])


def test_all_good(batch: Batch, folder: Path) -> None:
    (folder / "in.jsonl").write_text(lines({"id": "a", "prompt": "Hi there"}, {"id": "b", "prompt": "x"}))
    result = batch("in.jsonl", "--temp", "0", "-c", "50", "--kv-type", "f32")
    assert (result.exit_code, result.stdout) == (0, "")
    notes = result.stderr.splitlines()
    assert notes[0] == "Device: stub; 4 lines at a time" and notes[1].startswith("2 lines in ")
    assert "seed" not in result.stderr and len(notes) == 2
    assert [record["text"] for record in records(folder)] == ["Hi there", "x"]
    options = {
        "ctx_size": 50,
        "kv_type": "f32",
        "device": "auto",
        "graphs": True,
        "n_seqs": 4,
        "prefix_cache": True,
        "cache_pages": False,
    }
    assert StubLLM.last.options == options


def test_some_failed(batch: Batch, folder: Path) -> None:
    (folder / "in.jsonl").write_text("nonsense\n" + lines({"prompt": "x"}))
    result = batch("in.jsonl")
    assert result.exit_code == 3 and "1 failed: see error in out.jsonl; --seed " in result.stderr
    again = batch("in.jsonl")
    assert again.exit_code == 3
    assert again.stderr.splitlines() == ["Resuming: 2 of 2 lines have a record already", "Nothing is left to do"]


def test_input_of_every_kind(batch: Batch, folder: Path) -> None:
    (folder / "notes").mkdir()
    for name in ("a", "b"):
        (folder / "notes" / f"{name}.txt").write_text(f"text of {name}\n")
    (folder / "t.csv").write_text("id,text\n1,one\n2,two\n")
    (folder / "t.data").write_text("id\ttext\n1\tone\n")
    template = ("--overwrite", "--template", r"Sum:\n{text}")
    for source, more, stdin, expected in (
        ("notes", (), "", ["Sum: text of a", "Sum: text of b"]),
        ("notes/b*", (), "", ["Sum: text of b"]),
        ("t.csv", (), "", ["Sum: one", "Sum: two"]),
        ("t.data", ("--format", "tsv"), "", ["Sum: one"]),
        ("-", (), lines({"text": "x"}), ["Sum: x"]),
        ("-", ("--format", "csv"), "text\ny\n", ["Sum: y"]),
    ):
        result = batch(source, *template, *more, stdin=stdin)
        assert result.exit_code == 0, result.stderr
        assert [record["text"] for record in records(folder)] == expected


def test_resuming_and_changed_settings(batch: Batch, folder: Path) -> None:
    (folder / "in.jsonl").write_text(lines(*({"id": number, "prompt": f"p{number}"} for number in range(5))))
    assert batch("in.jsonl", "--temp", "0.5", "--system", "s").exit_code == 0
    seeds = [params.seed for _, params in StubLLM.last.begun]
    out = folder / "out.jsonl"
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    before = out.read_bytes()
    for arguments, difference in (
        (["--system", "s"], "sampling temperature was 0.5, is 0.8"),
        (["--temp", "0.5", "--system", "t"], 'system was "s", is "t"'),
        (["--temp", "0.5", "--system", "s", "--seed", "1"], "seed was "),
        (["--temp", "0.5", "--system", "s", "-c", "60"], "context was 4096, is 60"),
        (["--temp", "0.5", "--system", "s", "--template", "{id}"], 'template was none, is "{id}"'),
    ):
        result = batch("in.jsonl", *arguments)
        assert result.exit_code == 2 and difference in result.stderr and result.stderr.count("\n") == 1
        assert out.read_bytes() == before
    (folder / "model.gguf").write_bytes(b"y" * 100)
    assert "model ends was" in batch("in.jsonl", "--temp", "0.5", "--system", "s").stderr
    (folder / "model.gguf").write_bytes(b"x" * 100)
    result = batch("in.jsonl", "--temp", "0.5", "--system", "s", "--parallel", "2", "-t", "1")  # speed may change
    assert result.exit_code == 0
    assert "ended in the middle of a record" in result.stderr and "Resuming: 2 of 5 lines" in result.stderr
    assert [record["id"] for record in records(folder)] == [0, 1, 2, 3, 4]
    assert [params.seed for _, params in StubLLM.last.begun] == seeds[2:]  # as if it had never ended
    (folder / "in.jsonl").write_text(lines({"id": 0, "prompt": "other"}))
    assert "lines that were there have changed" in batch("in.jsonl", "--temp", "0.5", "--system", "s").stderr
    assert batch("in.jsonl", "--overwrite").exit_code == 0 and len(records(folder)) == 1


def test_failed_lines_once_more(batch: Batch, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"id": "g", "prompt": "fine"}
    (folder / "in.jsonl").write_text(lines(good, {"id": "f", "prompt": "BOOM"}, good, {"id": "h", "prompt": "BOOM"}))
    assert batch("in.jsonl").exit_code == 3
    out = folder / "out.jsonl"
    out.chmod(0o640)
    first = out.read_bytes()
    assert batch("in.jsonl").exit_code == 3 and out.read_bytes() == first  # nothing is left to do
    refused = batch("in.jsonl", "--retry-failed", "--temp", "0.5")
    assert refused.exit_code == 2 and out.read_bytes() == first
    take = StubGeneration.take

    def mended(self: StubGeneration) -> Any:
        self.words = ["mended" if word == "BOOM" else word for word in self.words]
        return take(self)

    monkeypatch.setattr(StubGeneration, "take", mended)
    result = batch("in.jsonl", "--retry-failed")
    assert result.exit_code == 3 and "3 records of errors are taken out" in result.stderr
    assert len(StubLLM.last.begun) == 2
    found = [(record["line"], record["id"], record["text"]) for record in records(folder)]
    assert found == [(1, "g", "fine"), (2, "f", "mended"), (3, None, None), (4, "h", "mended")]
    assert out.stat().st_mode & 0o777 == 0o640
    assert not (folder / ".out.jsonl.retried").exists()


def test_files_beside_out_are_left_alone_when_failed_lines_are_taken_out(batch: Batch, folder: Path) -> None:
    (folder / "in.jsonl").write_text(lines({"id": "f", "prompt": "BOOM"}))
    assert batch("in.jsonl").exit_code == 3
    precious, fresh = folder / "out.jsonl.new", folder / ".out.jsonl.retried"
    precious.write_text("another batch's")
    fresh.symlink_to(precious)
    first = (folder / "out.jsonl").read_bytes()
    refused = batch("in.jsonl", "--retry-failed")
    assert refused.exit_code == 1 and "cannot be written" in refused.stderr and "nothing was changed" in refused.stderr
    assert precious.read_text() == "another batch's" and (folder / "out.jsonl").read_bytes() == first
    fresh.unlink()
    fresh.write_text("left by a program that was killed")
    assert batch("in.jsonl", "--retry-failed").exit_code == 3
    assert not fresh.exists() and precious.read_text() == "another batch's" and len(records(folder)) == 1


@pytest.mark.parametrize("bad", range(29, 36))
def test_many_bad_lines_before_good_ones(batch: Batch, folder: Path, bad: int) -> None:
    good = [{"id": number, "prompt": f"p{number}"} for number in range(40)]
    (folder / "in.jsonl").write_text("nonsense\n" * bad + lines(good[0]) + "nonsense\n" * 64 + lines(*good[1:]))
    assert batch("in.jsonl").exit_code == 3
    assert [record["text"] for record in records(folder) if not record["error"]] == [f"p{n}" for n in range(40)]
    (folder / "in.jsonl").write_text((folder / "in.jsonl").read_text() + lines({"id": "x", "prompt": "last"}))
    assert batch("in.jsonl").exit_code == 3 and records(folder)[-1]["text"] == "last"


def test_lines_that_were_added_are_answered(batch: Batch, folder: Path) -> None:
    (folder / "in.jsonl").write_text(lines({"prompt": "a"}))
    assert batch("in.jsonl").exit_code == 0
    with (folder / "in.jsonl").open("a") as file:
        file.write(lines({"prompt": "b"}))
    assert batch("in.jsonl").exit_code == 0
    assert [record["text"] for record in records(folder)] == ["a", "b"]


def test_outputs_that_are_refused(batch: Batch, folder: Path) -> None:
    (folder / "in.jsonl").write_text(lines({"prompt": "a"}))
    (folder / "out.jsonl").write_text(lines({"id": 1, "line": 1, "error": None}))
    assert "not the settings of the run that wrote them" in batch("in.jsonl").stderr
    (folder / "out.jsonl").write_text("precious\n")
    assert "no record of pyllm batch" in batch("in.jsonl").stderr
    assert (folder / "out.jsonl").read_text() == "precious\n"
    for arguments in (["in.jsonl", "-o", "in.jsonl"], ["in.jsonl", "-o", "model.gguf"]):
        result = batch(*arguments, "--overwrite")
        assert result.exit_code == 2 and "is read and would be written" in result.stderr
    assert batch("in.jsonl", "-o", "-").exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [["--raw", "--system", "x"], ["--parallel", "0"], ["--template", "{"], ["--temp", "-1"], ["--format", "xml"]],
)
def test_command_lines_that_make_no_sense(batch: Batch, folder: Path, arguments: list[str]) -> None:
    (folder / "in.jsonl").write_text(lines({"prompt": "a"}))
    result = batch("in.jsonl", *arguments)
    assert result.exit_code == 2 and "Error: " in result.stderr and not (folder / "out.jsonl").exists()


def test_progress_for_programs(batch: Batch, folder: Path) -> None:
    (folder / "in.jsonl").write_text(lines({"prompt": "a b c"}, {"prompt": "", "id": "x"}))
    result = batch("in.jsonl", "--progress", "json")
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert [event["event"] for event in events] == ["start", "progress", "end"]
    assert events[0] == {"event": "start", "done": 0, "total": 2, "device": "stub", "parallel": 4}
    end = events[-1]
    assert (end["done"], end["total"], end["failed"], end["status"]) == (2, 2, 1, 3)
    assert (end["completion_tokens"], end["seconds_left"]) == (3, 0)
    assert 0 <= end["engine_seconds"] <= end["seconds"]
    again = json.loads(batch("in.jsonl", "--progress", "json").stderr)
    assert (again["event"], again["done"], again["failed"], again["status"]) == ("end", 2, 1, 3)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_keep_what_is_complete(
    batch: Batch, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    (folder / "in.jsonl").write_text(lines(*({"prompt": "word " * count} for count in range(1, 21))))
    steps = []

    def during() -> None:
        steps.append(None)
        if len(steps) == 9:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(StubLLM, "during", staticmethod(during))
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    result = batch("in.jsonl")
    assert result.exit_code == status and "Interrupted; the same command goes on." in result.stderr
    assert 0 < len(records(folder)) < 20
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers
    assert batch("in.jsonl").exit_code == 0 and len(records(folder)) == 20


def test_second_ctrl_c_does_not_wait(batch: Batch, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "in.jsonl").write_text(lines({"prompt": "a b"}))
    monkeypatch.setattr(StubLLM, "during", staticmethod(lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]))
    assert batch("in.jsonl").exit_code == 130


def test_empty_input(batch: Batch, folder: Path) -> None:
    (folder / "in.jsonl").write_text("\n\n")
    result = batch("in.jsonl")
    assert result.exit_code == 0 and records(folder) == []


def test_a_model_from_the_environment(batch: Batch, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "in.jsonl").write_text(lines({"prompt": "a"}))
    alone = CliRunner().invoke(main, ["batch", "in.jsonl", "-o", "out.jsonl"])
    assert alone.exit_code == 2 and "there is no INPUT" in alone.stderr
    monkeypatch.setenv("PYLLM_MODEL", "model.gguf")
    assert CliRunner().invoke(main, ["batch", "in.jsonl", "-o", "out.jsonl", "--parallel", "2"]).exit_code == 0
    assert [record["text"] for record in records(folder)] == ["a"]
    assert batch("in.jsonl").stderr.count("\n") == 2  # named on the command line, it is the same model
