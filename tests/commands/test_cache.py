"""`pyllm cache`: files are listed, shown, verified, removed; damaged ones are told."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyllm.commands import main
from pyllm.commands.options import byte_size
from pyllm.conversation import Conversation
from pyllm.prompt_cache.folder import session_path
from pyllm.prompt_cache.session_file import SessionReader
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path

Run = Callable[..., Result]


@pytest.fixture
def pyllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, with three sessions: a (the oldest), b, c."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    session_path("a").parent.mkdir(parents=True)
    talked = Conversation("Be brief.")
    talked.add("What is it?", "It \x1b[31mis.", (1, 2))
    with open_engine(model_path("llama-a-f32"), prefix_cache=True) as llm:
        for index, name in enumerate("abc"):
            tokens(llm.generate(list(range(3, 20 + index)), greedy(3)))
            llm.save_session(session_path(name), chat=talked.to_json())
            os.utime(session_path(name), (1, time.time() - (3 - index) * 100_000))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["cache", *arguments])

    return run


def damage(name: str) -> None:
    content = bytearray(session_path(name).read_bytes())
    content[len(content) // 2] ^= 1
    session_path(name).write_bytes(content)


def test_list(pyllm: Run) -> None:
    result = pyllm("list")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["c", "b", "a"]
    assert "21 tokens, 1 turns, " in result.stdout and ", f32" in result.stdout
    assert "3 files, " in result.stderr
    assert pyllm("list", "--dir", "/nowhere").stderr.startswith("0 files")
    ended = subprocess.Popen(["true"])
    ended.wait()
    (session_path("a").parent / f".d.session.{ended.pid}-0123abcd.partial").touch()
    assert "1 more were not finished" in pyllm("list").stderr
    assert "1 files removed" in pyllm("prune").stderr and "finished" not in pyllm("list").stderr


def test_show(pyllm: Run) -> None:
    result = pyllm("show", "a")
    assert "19 tokens" in result.stdout and "f32, 64 to a page" in result.stdout
    assert result.stdout.endswith("system: Be brief.\n\nuser: What is it?\n\nassistant: It \\x1b[31mis.\n")
    assert "no such session" in pyllm("show", "z").stderr


def test_verify(pyllm: Run) -> None:
    assert pyllm("verify").exit_code == 0
    damage("b")
    result = pyllm("verify")
    assert result.exit_code == 1
    assert [line.endswith("in order") for line in result.stdout.splitlines()] == [True, False, True]
    assert pyllm("verify", "a", "c").exit_code == 0
    assert "section 'page.0' is damaged" in pyllm("verify", "b").stdout


def test_remove(pyllm: Run) -> None:
    assert pyllm("remove", "a", "b").exit_code == 0
    assert [line.split()[0] for line in pyllm("list").stdout.splitlines()] == ["c"]
    assert pyllm("remove", "a").exit_code == 2


def test_prune(pyllm: Run) -> None:
    session_path("b").write_bytes(session_path("b").read_bytes()[:-1])
    assert "Removed b" in pyllm("prune").stderr
    assert session_path("a").exists() and not session_path("b").exists()
    assert "not used for 2 days" in pyllm("prune", "--older-than", "2").stderr
    assert not session_path("a").exists() and session_path("c").exists()
    assert "beyond --max-size" in pyllm("prune", "--max-size", "10").stderr
    assert not session_path("c").exists()


def test_prune_leaves_alone_what_is_no_session(pyllm: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs have files of that name, too; and what cannot be read now may be in order."""
    folder = session_path("a").parent
    (folder / "of_others.session").write_bytes(b"SQLite format 3\0" + bytes(100))
    (folder / "link.session").symlink_to(tmp_path / "of_others")
    (tmp_path / "of_others").write_bytes(b"1")
    (folder / "empty.session").touch()  # as a session that was cut off: it holds nothing of anybody
    os.utime(folder / "of_others.session", (1, 1))
    read_header = SessionReader._read_header

    def unreadable(self: SessionReader) -> None:
        if self.path.name == "b.session":
            self._unreadable(OSError(errno.EIO, "Input/output error"))
        read_header(self)

    monkeypatch.setattr(SessionReader, "_read_header", unreadable)
    told = pyllm("prune", "--older-than", "3", "--max-size", "1G").stderr
    assert "Left alone: of_others" in told and "Left alone: link" in told
    assert {path.name for path in folder.iterdir()} == {
        *("b.session", "c.session"),
        *("of_others.session", "link.session"),
    }


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("800", 800), ("4k", 4096), ("1.5M", 3 << 19), ("2G", 2 << 30), ("1TiB", 1 << 40)]
)
def test_sizes(text: str, size: int) -> None:
    assert byte_size(None, None, text) == size  # type: ignore[arg-type]
    assert byte_size(None, None, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "x", "-1", "1x", "1e9", "0x10", "9" * 30, "1.5.2G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    result = CliRunner().invoke(main, ["cache", "prune", "--max-size", text])
    assert result.exit_code == 2 and "is not a size, such as 800M or 4G" in result.stderr


def test_a_disk_budget_needs_a_folder() -> None:
    result = CliRunner().invoke(main, ["chat", str(model_path("llama-a-f32")), "--cache-disk", "1G"], input="x")
    assert result.exit_code == 2 and "--cache-disk needs --cache-dir" in result.stderr
