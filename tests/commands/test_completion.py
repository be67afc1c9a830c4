"""Completion in shells: as scripts that those shells read, and as answers to what they ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pyllm.commands import main
from pyllm.commands.completion import SHELLS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """An environment in which `pyllm` is this checkout's, in a folder with a file."""
    launcher = tmp_path / "bin" / "pyllm"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from pyllm.__main__ import main; main()" "$@"\n')
    start = f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    launcher.write_text(start + "from pyllm.__main__ import main\nmain()\n")
    launcher.chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "my model.gguf").touch()
    return {**os.environ, "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}


def run(command: list[str], env: dict[str, str]) -> str:
    place = Path(env["HOME"]) / "work"
    return subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, check=True, timeout=60).stdout


def asked(env: dict[str, str], *words: str) -> list[str]:
    """What bash's part of the protocol says: lines of kind and value."""
    env = {**env, "_PYLLM_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    return run(["pyllm"], env).splitlines()


def test_what_is_completed(program: dict[str, str]) -> None:
    assert {"plain,batch", "plain,bench"} == set(asked(program, "pyllm", "b"))
    assert "plain,--max-tokens" in asked(program, "pyllm", "run", "--max")
    assert asked(program, "pyllm", "kernels", "bu") == ["plain,build"]
    assert asked(program, "pyllm", "run", "de") == ["plain,demo"]
    assert asked(program, "pyllm", "run", "my") == ["file,my"]
    assert asked(program, "pyllm", "run", "demo", "-f", "no") == ["file,no"]
    assert asked(program, "pyllm", "cache", "list", "--dir", "wo") == ["dir,wo"]
    assert asked(program, "pyllm", "run", "--device", "g") == ["plain,gpu"]
    assert asked(program, "pyllm", "completion", "") == [f"plain,{shell}" for shell in SHELLS]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_read_by_their_shells(program: dict[str, str], shell: str) -> None:
    script = run(["pyllm", "completion", shell], program)
    assert f"_PYLLM_COMPLETE={shell}_complete" in script
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    path = Path(program["HOME"]) / "script"
    path.write_text(script)
    subprocess.run([shell, "-n", str(path)], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_in_bash(program: dict[str, str]) -> None:
    script = (
        'eval "$(pyllm completion bash)"\nCOMP_WORDS=(pyllm ch) COMP_CWORD=1\n'
        '_pyllm_completion pyllm ch pyllm\nprintf "%s\\n" "${COMPREPLY[@]}"\ncomplete -p pyllm\n'
    )
    first, registered = run(["bash", "-c", script], program).splitlines()
    assert first == "chat" and "_pyllm_completion" in registered


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_in_fish(program: dict[str, str]) -> None:
    script = 'pyllm completion fish | source\ncomplete -C "pyllm ch"\ncomplete -C "pyllm run my"\n'
    lines = run(["fish", "-c", script], program).splitlines()
    assert lines[0].split("\t")[0] == "chat"
    assert [line.replace("\\", "") for line in lines[1:]] == ["my model.gguf"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_in_zsh(program: dict[str, str]) -> None:
    script = 'autoload -Uz compinit\ncompinit -u\neval "$(pyllm completion zsh)"\nprint $_comps[pyllm]\n'
    assert run(["zsh", "-f", "-c", script], program).splitlines()[-1] == "_pyllm_completion"


def test_unknown_shells_are_refused() -> None:
    result = CliRunner().invoke(main, ["completion", "tcsh"])
    assert result.exit_code == 2 and "'bash', 'zsh', 'fish'" in result.stderr
