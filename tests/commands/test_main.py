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
from tests.refdata import model_path

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


@pytest.mark.parametrize("arguments", [[], ["kernels"], ["cache"]])
def test_groups_without_a_command_show_their_help(arguments: list[str]) -> None:
    shown = CliRunner().invoke(commands.main, arguments).output
    assert shown == CliRunner().invoke(commands.main, [*arguments, "--help"]).stdout


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


# streams that are closed or full, on the real program


def program(*arguments: str, closed: tuple[int, ...] = (), full: int | None = None) -> tuple[int, str, str]:
    """Runs the program; returns status, standard output and standard error.

    Args:
        closed: descriptors of standard streams to close first.
        full: the one whose every write fails for lack of room.
    """

    def prepare() -> None:
        for number in closed:
            os.close(number)
        if full is not None:
            os.dup2(os.open("/dev/full", os.O_WRONLY), full)

    result = subprocess.run(
        [sys.executable, ROOT / "cli.py", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        preexec_fn=prepare,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


TOKENIZE = ("tokenize", str(model_path("llama-a-f32")), "Hello")
RUN = ("run", str(model_path("llama-a-f32")), "Hello", "--temp", "0", "-n", "4")


@pytest.mark.parametrize("arguments", [("--version",), TOKENIZE, RUN], ids=lambda arguments: arguments[0])
def test_closed_standard_output(arguments: tuple[str, ...]) -> None:
    assert program(*arguments, closed=(1,)) == (1, "", "Error: standard output is closed, where the result was to go\n")
    assert program(*arguments, closed=(0, 1, 2)) == (1, "", "")


@pytest.mark.parametrize("arguments", [("--version",), ("-h",), ("run", "-h"), TOKENIZE, RUN], ids=" ".join)
def test_full_standard_output(arguments: tuple[str, ...]) -> None:
    status, _, shown = program(*arguments, full=1)
    assert status == 1 and shown.endswith("Error: No space left on device\n")
    assert [line for line in shown.splitlines() if "Device" not in line] == ["Error: No space left on device"]


def test_what_cannot_be_noted_does_not_stop_an_answer() -> None:
    status, answer, _ = program(*RUN)
    assert status == 0 and answer
    assert program(*RUN, closed=(2,)) == (0, answer, "")
    assert program(*RUN, closed=(0, 2)) == (0, answer, "")
    assert program(*RUN, full=2) == (0, answer, "")
    assert program("run", "nosuch.gguf", "Hello", full=2) == (1, "", "")
    assert program("run", full=2) == (2, "", "")


def test_long_arguments_are_not_shown_whole() -> None:
    long = "4" + "a" * 100_000
    for arguments in (
        ["run", "x", "-n", long],
        ["run", "x", "y", long],
        ["run", "x", "--temp", f"a {long} b"],
        ["run", "x", f"--{long}"],
        ["run", "x", "--logit-bias", "a " * 50_000],
        ["run", "x", "y", "--stop", "", "--logit-bias", f"{long}=1"],
        [long],
    ):
        result = CliRunner().invoke(commands.main, arguments)
        assert result.exit_code == 2
        assert "Error: " in result.stderr and len(result.stderr) < 1000


# Ctrl-C where no command can catch it

AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
AT_EXIT = """
import atexit, os, signal, sys
atexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(99)])
"""
START = """
sys.argv = ["pyllm", "--version"]
from pyllm.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("before", "status"),
    [
        (AT_IMPORT.format(module="click"), 130),
        (AT_IMPORT.format(module="pyllm.commands.console"), 130),
        (AT_EXIT, 130),
        ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + AT_IMPORT.format(module="click"), 0),
    ],
    ids=["library", "module", "exit", "ignored"],
)
def test_ctrl_c_around_a_command_ends_quietly(before: str, status: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", before + START], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (result.returncode, result.stderr) == (status, "")


def test_closed_pipe_ends_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, ROOT / "cli.py", "--help"], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)
    assert result.stderr == ""
