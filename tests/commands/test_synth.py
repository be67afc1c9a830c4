"""`pyllm synth`."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from pyllm.commands import main
from pyllm.synth import real_shapes, writer
from tests.tiny_shape import TINY


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(real_shapes.SHAPES, "qwen3-0.6b", TINY)


def synth(*arguments: object):
    return CliRunner().invoke(main, ["synth", "--like", "qwen3-0.6b", *map(str, arguments)])


def test_it_writes_a_model_and_prints_its_path(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    result = synth(path)
    assert result.exit_code == 0 and result.stdout == f"{path}\n"
    assert "matrices are Q5_0: their rows of 96 are no whole number of Q4_K blocks" in result.stderr
    inspected = CliRunner().invoke(main, ["inspect", str(path)])
    assert "pyllm runs it  yes" in inspected.stdout


def test_it_replaces_nothing_unasked(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_text("mine")
    result = synth(path, "--quant", "q8_0")
    assert result.exit_code == 2 and result.stderr == f"Error: {path} is there already; --force replaces it\n"
    assert path.read_text() == "mine"
    assert synth(path, "--quant", "q8_0", "--force").exit_code == 0
    assert path.read_bytes().startswith(b"GGUF")


def test_a_type_that_cannot_be_drawn(tmp_path: Path) -> None:
    result = synth(tmp_path / "tiny.gguf", "--quant", "Q9_9")
    assert result.exit_code == 2 and "weights cannot be drawn as 'Q9_9'; choose one of F32" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "tiny.gguf"))

    monkeypatch.setattr(writer, "random_rows", full)
    result = synth(tmp_path / "tiny.gguf")
    assert result.exit_code == 1
    assert result.stderr == f"Error: No space left on device: {tmp_path / 'tiny.gguf'}\n"
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "random_rows", interrupted)
    result = synth(tmp_path / "tiny.gguf")
    assert result.exit_code == 130 and result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = synth(tmp_path / "nowhere" / "tiny.gguf")
    assert result.exit_code == 1 and result.stderr.startswith("Error: No such file or directory")


def test_the_names_on_the_command_line_are_the_shapes() -> None:
    from pyllm.commands.synth import _LIKE

    assert set(_LIKE) == set(real_shapes.SHAPES)
