"""What a measurement says about where it was made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import pyllm
from pyllm.bench import machine


def test_the_version_names_the_commit_of_a_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a repository in which the package was installed."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    installed = tmp_path / "venv" / "lib" / "pyllm" / "__init__.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(pyllm, "__file__", str(installed))
    assert machine.pyllm_version() == f"pyllm {pyllm.__version__}"
    (installed.parent.parent / ".git").mkdir()
    monkeypatch.setattr(machine, "_output", lambda *command: "abc1234-dirty")
    assert machine.pyllm_version() == f"pyllm {pyllm.__version__}, commit abc1234-dirty"


def test_a_program_that_is_not_there_says_nothing() -> None:
    assert machine._output("no-such-program-here") == "" and machine._output("false") == ""


def test_the_cpu_and_its_memory() -> None:
    assert machine.processor_name() and machine.memory_size() > 1 << 28
    assert "NumPy" in machine.describe_machine("cpu", "cpu")
    assert machine.describe_machine("emulated", "emulated GPU").startswith("emulated GPU on ")


@pytest.mark.parametrize(
    ("is_hip", "version", "expected"),
    [(False, 13020, "CuPy 14.2 (CUDA 13.2)"), (True, 70051831, "CuPy 14.2 (ROCm 7.0)")],
)
def test_cupy(is_hip: bool, version: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(is_hip=is_hip, runtimeGetVersion=lambda: version)
    stub = SimpleNamespace(__version__="14.2", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", stub)
    assert machine.cupy_version() == expected


def test_the_hash_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert machine.file_hash(path) == "ba7816bf"
