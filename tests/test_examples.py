"""Every example runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.refdata import model_path

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNS = {"generate.py": (["Once upon a time"], ""), "chat.py": ([], "Hello\nAnd then?\n\n")}


def test_all_examples_are_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str) -> None:
    arguments, typed = RUNS[name]
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, model_path("llama-a-f32"), *arguments],
        input=typed,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    assert len(result.stdout) > 10 and "Traceback" not in result.stderr


@pytest.mark.demo_model
def test_generate_without_arguments(demo_model: Path) -> None:
    shown = subprocess.run(
        [sys.executable, EXAMPLES / "generate.py"], capture_output=True, encoding="utf-8", timeout=120, check=True
    )
    assert shown.stdout.startswith("The three largest cities of Japan are Tokyo")
