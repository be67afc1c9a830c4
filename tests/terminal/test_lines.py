"""What is typed: blocks, completion, history."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pyllm.terminal import history as history_file
from pyllm.terminal.blocks import block_content, is_whole_block, opens_block
from pyllm.terminal.completion import completions, files
from pyllm.terminal.editor import Line
from pyllm.terminal.history import HistoryFile, history_path
from pyllm.terminal.plain_editor import PlainEditor

Q = '"""'


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["a"], Line("a")),
        ([f"{Q}a{Q}"], Line("a", True)),
        ([f"  {Q}a b{Q} "], Line("a b", True)),
        ([Q, "a", "", "b", Q], Line("a\n\nb", True)),
        ([f"{Q}/exit", f"b{Q}"], Line("/exit\nb", True)),
        ([Q, f"{Q}"], Line("", True)),
        ([f"{Q}{Q}"], Line("", True)),
        ([f'{Q}a "quoted"', f"x{Q}y", Q], Line(f'a "quoted"\nx{Q}y', True)),
        ([f"a {Q}"], Line(f"a {Q}")),
        (['""'], Line('""')),
    ],
)
def test_plain_lines_and_blocks(typed: list[str], expected: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(typed)
    monkeypatch.setattr("pyllm.terminal.plain_editor.read_line", lambda marker: next(lines))
    assert PlainEditor().read("") == expected
    assert list(lines) == []


def test_what_opens_a_block() -> None:
    assert opens_block(Q) and opens_block(f"{Q}a") and opens_block(f"  {Q}") and opens_block(f'{Q}""')
    assert not opens_block(f"{Q}{Q}") and not opens_block('""') and not opens_block(f"a{Q}")
    assert is_whole_block(f"{Q}a{Q}") and not is_whole_block(Q) and not is_whole_block('""""')
    assert block_content(f"{Q}\n\na\n\n{Q}") == "\na\n"


def test_commands_are_completed() -> None:
    names = ("/read", "/regen", "/exit")

    def found(text: str) -> list[str]:
        return [whole for _, whole in completions(text, names, lambda command, start: [f"{command}:{start}"])]

    assert found("/re") == ["/read ", "/regen "]
    assert found("/") == ["/exit ", "/read ", "/regen "]
    assert found("/read  no") == ["/read:no"]
    assert found("") == found("Hello /re") == found("/read\n/re") == []


def test_files_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b file.txt", "a.txt", ".hidden", "new\nline", "umlaut-ä"):
        (tmp_path / name).touch()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "deep.txt").touch()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).touch()
    start = f"{tmp_path}/"
    assert [path.removeprefix(start) for path in files(start)] == ["a.txt", "b file.txt", "inner/", "umlaut-ä"]
    assert list(files(f"{start}b f")) == [f"{start}b file.txt"]
    assert list(files(f"{start}.h")) == [f"{start}.hidden"]
    assert list(files(f"{start}inner/")) == [f"{start}inner/deep.txt"]
    assert list(files(f"{start}nothing/")) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(files("~/inner/d")) == ["~/inner/deep.txt"]
    monkeypatch.chdir(tmp_path)
    assert list(files("inn")) == ["inner/"]


def test_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    history = HistoryFile(path)
    assert history.entries() == []
    for entry in ("one", "two\nlines", "ä", "x" * 20_000, "\udcff"):
        history.append(entry)
    assert HistoryFile(path).entries() == ["one", "two\nlines", "ä"]
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("ab") as file:
        file.write(b'{"no": "text"}\n\xff\nhalf a li')
    assert history.entries() == ["one", "two\nlines", "ä"]
    monkeypatch.setattr(history_file, "MOST_ENTRIES", 3)
    for number in range(5):
        history.append(str(number))
    assert history.entries() == ["2", "3", "4"]
    assert [json.loads(line) for line in path.read_text().splitlines()] == ["2", "3", "4"]
    assert path.stat().st_mode & 0o777 == 0o600 and len(list(path.parent.iterdir())) == 1


def test_history_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = HistoryFile(tmp_path / "file" / "history.jsonl")
    history.append("one")
    assert history.entries() == []


def test_where_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "pyllm" / "chat_history.jsonl"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_path() == tmp_path / ".local" / "state" / "pyllm" / "chat_history.jsonl"
