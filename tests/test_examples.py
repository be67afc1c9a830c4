"""Every example runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyllm.kernel_check import EMULATED
from tests.refdata import model_path

EXAMPLES = Path(__file__).parents[1] / "examples"
LLAMA = model_path("llama-a-f32")
RUNS = {
    "chat.py": ([LLAMA], "Hello\nAnd then?\n\n"),
    "generate.py": ([LLAMA, "Once upon a time"], ""),
    "kernel_test.py": ([], ""),
}


def test_all_examples_are_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str) -> None:
    arguments, typed = RUNS[name]
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        input=typed,
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


@pytest.mark.demo_model
def test_generate_without_arguments(demo_model: Path) -> None:
    shown = subprocess.run(
        [sys.executable, EXAMPLES / "generate.py"], capture_output=True, encoding="utf-8", timeout=120, check=True
    )
    assert shown.stdout.startswith("The three largest cities of Japan are Tokyo")
