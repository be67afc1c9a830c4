"""What holds for every command: help, version, and errors as one line with a status."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import pyllm
from pyllm import commands, errors

ROOT = Path(__file__).parents[2]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `pyllm inspect x` raise something."""

    def install(error: BaseException) -> None:
        def resolve(name: str) -> None:
            raise error

        monkeypatch.setattr("pyllm.hub.resolve", resolve)

    return install


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (errors.ModelFileError("x.gguf is damaged"), 1, "Error: x.gguf is damaged"),
        (errors.UsageError("top_k is -1"), 2, "Error: top_k is -1"),
        (errors.DeviceError("two\nlines \x1b[31m"), 1, r"Error: two\nlines \x1b[31m"),
        (OSError(28, "No space left on device"), 1, "Error: No space left on device"),
        (PermissionError(13, "Permission denied", "a.gguf"), 1, "Error: Permission denied: a.gguf"),
        (ZeroDivisionError("oh"), 1, "Error: unexpected ZeroDivisionError: oh; set PYLLM_DEBUG=1 to see where"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line(failing: Any, error: BaseException, status: int, line: str) -> None:
    failing(error)
    result = CliRunner().invoke(commands.main, ["inspect", "x"])
    assert result.exit_code == status
    assert result.stdout == ""
    assert result.stderr.startswith(line) and result.stderr.count("\n") == bool(line)


def test_debug_shows_where(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLLM_DEBUG", "1")
    error = errors.ModelFileError("x")
    failing(error)
    assert CliRunner().invoke(commands.main, ["inspect", "x"]).exception is error


@pytest.mark.parametrize("arguments", [["nosuch"], ["run"], ["run", "x", "--nosuch"], ["pull"], ["inspect", "a", "b"]])
def test_wrong_command_lines_have_status_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(commands.main, arguments)
    assert result.exit_code == 2 and "Error: " in result.stderr


@pytest.mark.parametrize("name", commands.COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_has_help(name: str, option: str) -> None:
    result = CliRunner().invoke(commands.main, [name, option])
    assert result.exit_code == 0 and f"pyllm {name}" in result.stdout.replace("main", "pyllm")


def test_help_lists_all_commands() -> None:
    shown = CliRunner().invoke(commands.main, ["--help"]).stdout
    assert all(f"\n  {name} " in shown for name in commands.COMMANDS)
    assert isinstance(commands.main, click.Group)


@pytest.mark.parametrize("arguments", [["--help"], *([name, "-h"] for name in commands.COMMANDS), ["--version"]])
def test_help_does_not_load_the_engine(arguments: list[str]) -> None:
    script = f"import sys; sys.argv = ['pyllm', *{arguments}]\nfrom pyllm.commands import main\ntry: main()\n"
    script += "finally: print(sorted({'numpy', 'jinja2', 'tqdm', 'pyllm.llm'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


def test_launcher_in_a_checkout(tmp_path: Path) -> None:
    started = time.monotonic()
    shown = subprocess.run(
        [sys.executable, ROOT / "cli.py", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert shown == f"pyllm, version {pyllm.__version__}\n"
    assert time.monotonic() - started < 10


def test_closed_pipe_ends_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, ROOT / "cli.py", "--help"], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)
    assert result.stderr == ""
