"""-t N: the number of CPU threads reaches the library below NumPy before it is loaded."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pyllm.commands.threads import VARIABLES, set_threads
from tests.refdata import model_path

ROOT = Path(__file__).parents[2]
AT_IMPORT = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            print("threads:", *(os.environ.get(name) for name in {names}))
sys.meta_path.insert(0, Finder())
sys.argv = ["pyllm", *{arguments}]
from pyllm.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", str(model_path("llama-a-f32")), "Hi", "-n", "2", "-t", "3"],
        ["chat", str(model_path("llama-a-f32")), "--threads", "3", "-n", "2"],
        ["perplexity", str(model_path("llama-a-f32")), "-f", "-", "-c", "64", "-t", "3"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_number_is_known_before_numpy_is_loaded(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "2")  # the option wins
    script = AT_IMPORT.format(names=VARIABLES, arguments=arguments)
    result = subprocess.run(
        [sys.executable, "-c", script],
        input="Hello there. " * 50,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("threads: 3 3\n")
    assert "-t" not in result.stderr


@click.command()
@click.option("-t", type=int, callback=set_threads, expose_value=False)
def command() -> None: ...


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")  # put back afterwards


@pytest.mark.usefixtures("clean")
def test_when_numpy_is_loaded_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)  # not installed
    assert CliRunner().invoke(command, []).stderr == ""
    assert CliRunner().invoke(command, ["-t", "2"]).stderr == (
        "Warning: -t 2 has no effect: NumPy was loaded before; set OPENBLAS_NUM_THREADS=2 in the environment\n"
    )


@pytest.mark.usefixtures("clean")
def test_when_numpy_is_loaded_threadpoolctl_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setitem(sys.modules, "threadpoolctl", types.SimpleNamespace(threadpool_limits=limits.append))
    assert CliRunner().invoke(command, ["-t", "2"]).stderr == ""
    assert limits == [2]
