"""2,000 damaged models: each opens and runs, or is refused with one line; in one process, with limits.

Another seed, or a single case: python -m tests.fuzz_child SEED FIRST COUNT FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SEED, COUNT = "0", 1200
ROOT = Path(__file__).parents[2]
MAX_GROWTH = 200 << 20  # bytes of peak memory beyond what the sound models took
SECONDS = 600  # the child stops itself earlier at a case that hangs


def run(seed: str, first: int, count: int, folder: Path) -> list[dict[str, Any]]:
    """What the child reported."""
    command = [sys.executable, "-m", "tests.fuzz_child", seed, str(first), str(count), str(folder)]
    # One thread does best on matrices this small.
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    log_path = folder / "log"
    with log_path.open("wb") as log:
        child = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | threads,
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=SECONDS,
            check=False,
        )
    log_end = log_path.read_text(errors="replace")[-6000:]  # the case that it ended at, and its stack
    assert child.returncode == 0, f"the child ended with {child.returncode} after:\n{log_end}"
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_damaged_models(tmp_path: Path) -> None:
    *failures, summary = run(SEED, 0, COUNT, tmp_path)
    shown = "\n".join(f"{failure['failed']}\n{failure['traceback']}" for failure in failures[:5])
    assert not failures, f"{len(failures)} failures with seed {SEED}:\n{shown}"
    outcomes = summary["outcomes"]
    assert sum(outcomes.values()) == COUNT
    assert min(outcomes["ran"], outcomes["ModelFileError"]) > COUNT / 5  # both were met
    assert "UnsupportedError" in outcomes
    assert {"TemplateError", "SamplingError"} <= summary["generations_refused"].keys()
    assert summary["growth_bytes"] <= MAX_GROWTH, summary
