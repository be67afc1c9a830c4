"""Every example runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyllm.kernel_check import EMULATED
from tests.refdata import model_path

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTES = Path(__file__).parent / "data" / "notes"
LLAMA = model_path("llama-a-f32")
SHORT = ["--document", "200", "--ubatch", "16", "--slow", "0.02", "--chat-tokens", "10", "--tokens", "4", "--idle", "0"]
RUNS = {
    "chat.py": ([LLAMA], "Hello\nAnd then?\n\n"),
    "generate.py": ([LLAMA, "Once upon a time"], ""),
    "kernel_test.py": ([], ""),
    "resumable_job.py": ([LLAMA], ""),
    "summarise_folder.py": ([LLAMA, NOTES], ""),
    "kv_contamination.py": ([LLAMA, *SHORT], ""),
    "prompt_cache_soak.py": ([LLAMA, "--device", "cpu", "--rounds", "1", "--filler", "40"], ""),
}


def test_all_examples_are_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, tmp_path: Path) -> None:
    arguments, typed = RUNS[name]
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        input=typed,
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    assert len(result.stdout) > 10 and "Traceback" not in result.stderr


def test_the_kernel_example_runs_emulated() -> None:
    shown = subprocess.run(
        [sys.executable, EXAMPLES / "kernel_test.py"], capture_output=True, encoding="utf-8", timeout=120, check=True
    )
    assert [line.split(",")[0] for line in shown.stdout.splitlines()][:9:3] == list(EMULATED)


@pytest.mark.parametrize("inputs", ["copy", "zero-copy"])
def test_the_fault_shows_and_is_caught(inputs: str) -> None:
    arguments = [sys.executable, EXAMPLES / "kv_contamination.py", LLAMA, *SHORT, "--inputs", inputs]
    shown = subprocess.run(arguments, capture_output=True, encoding="utf-8", timeout=120, check=True).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()[2:]]
    guarded, dropped, caught = ({"misplaced": int(row[2]), "stale": int(row[4]), "faults": int(row[5])} for row in rows)
    assert guarded == {"misplaced": 0, "stale": 0, "faults": 0} and rows[0][6] == "0"
    assert dropped["misplaced"] > 0 and dropped["stale"] > 0 and float(rows[1][6]) > 0
    assert rows[1][3] == rows[1][2], "the checks name every row that is misplaced"
    assert caught["stale"] == 0 and caught["faults"] > 0 and rows[2][7] == "none: StaleKVError"


@pytest.mark.parametrize(("name", "wanted"), [("llama-a-f32", 12), ("qwen3next-b-eqheads-bf16", 12)])
def test_the_soak_restores(name: str, wanted: int) -> None:
    """Most requests go on from what was brought back; `run` has the uncached engine's answers compared."""
    command = [sys.executable, EXAMPLES / "prompt_cache_soak.py", model_path(name), "--device", "cpu"]
    shown = subprocess.run(
        [*command, "--restores", str(wanted), "--filler", "120"],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    ).stdout
    rounds, requests, restores, host, files, device, _, faults, mismatches, *_ = map(int, shown.split("\n")[-2].split())
    assert restores == host + files >= wanted and host >= wanted // 2 and 0 < files <= rounds
    assert 2 * restores >= requests - 6 and restores + device <= requests  # the first of each computes its filler
    assert not faults and not mismatches


def test_the_job_is_resumed(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, EXAMPLES / "resumable_job.py", LLAMA, tmp_path],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    ).stdout.splitlines()
    answers = [line.partition(" ")[0] for line in shown if "x" in line.partition(" ")[0]]
    assert sorted(answers) == [f"{a}x{b}" for a in range(2, 6) for b in range(2, 6)]
    assert shown[0] == "start: 0 of 16 lines" and "end: 16 of 16 lines" in shown


def test_the_folder_is_summarised(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for _ in range(2):  # the second time, all is there
        shown = subprocess.run(
            [sys.executable, EXAMPLES / "summarise_folder.py", LLAMA, NOTES, out],
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=True,
        ).stdout
        assert [line.partition(":")[0] for line in shown.splitlines()] == ["bakery.txt", "trains.txt"]


@pytest.mark.demo_model
def test_generate_without_arguments(demo_model: Path) -> None:
    shown = subprocess.run(
        [sys.executable, EXAMPLES / "generate.py"], capture_output=True, encoding="utf-8", timeout=120, check=True
    )
    assert shown.stdout.startswith("The three largest cities of Japan are Tokyo")
