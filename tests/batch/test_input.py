"""Reading lines, tables and files: what is damaged is one entry with an error."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from pyllm.batch import input as batch_input
from pyllm.batch.input import Entry, open_source
from pyllm.errors import PyllmError


def entries(path: Path | str, form: str | None = None) -> list[Entry]:
    return list(open_source(str(path), form).entries())


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def outcome(entry: Entry) -> tuple[int, object]:
    return entry.line, entry.error.code if entry.error is not None else entry.fields


def test_json_lines(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"id": 1}\r\n\r\n  \n[1]\n{"id": 2}\n"x"\n{"a":\n\xff\n{"n": NaN}\n{"id": "\xc3\xa9"}'
    path = written(tmp_path / "a.jsonl", data)
    assert list(map(outcome, entries(path))) == [
        (1, {"id": 1}),
        (4, "not_an_object"),
        (5, {"id": 2}),
        (6, "not_an_object"),
        (7, "invalid_json"),
        (8, "invalid_utf8"),
        (9, "invalid_json"),
        (10, {"id": "é"}),
    ]
    assert open_source(str(path)).count() == 8


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}", b"\x00" * 50, b'{"a": 1} {"b": 2}'])
def test_json_that_is_hard_to_read(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path / "a.jsonl", line + b"\n" + b"{}\n")
    assert list(map(outcome, entries(path))) == [(1, "invalid_json"), (2, {})]


def test_lines_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE", 1000)
    path = written(tmp_path / "a.jsonl", b'{"a": "' + b"x" * 5000 + b'"}\n{}\n')
    assert list(map(outcome, entries(path))) == [(1, "line_too_long"), (2, {})]
    table = written(tmp_path / "a.csv", b"id,prompt\n1," + b"x" * 5000 + b"\n2,b\n")
    assert list(map(outcome, entries(table))) == [(2, "line_too_long"), (3, {"id": "2", "prompt": "b"})]


def test_tables(tmp_path: Path) -> None:
    data = (
        b'\xef\xbb\xbfid, review\r\n1,"two\r\nlines, ""q"""\r\n\r\n2,a,b\r\n3,\xff\r\n4,"x" y\r\n5,good\r\n6,"open\r\n'
    )
    path = written(tmp_path / "a.csv", data)
    assert list(map(outcome, entries(path))) == [
        (2, {"id": "1", "review": 'two\r\nlines, "q"'}),
        (5, "invalid_csv"),
        (6, "invalid_utf8"),
        (7, "invalid_csv"),
        (8, {"id": "5", "review": "good"}),
        (9, "invalid_csv"),
    ]
    assert open_source(str(path)).count() == 6
    tabs = written(tmp_path / "a.tsv", b"id\tprompt\n1\ta, b\n")
    assert list(map(outcome, entries(tabs))) == [(2, {"id": "1", "prompt": "a, b"})]
    assert entries(written(tmp_path / "empty.csv", b"")) == []


@pytest.mark.parametrize("head", [b"a,a\n", b"a,\n", b"\xff,b\n", b'"a\n'])
def test_heads_that_name_no_columns(tmp_path: Path, head: bytes) -> None:
    with pytest.raises(PyllmError, match="line 1"):
        entries(written(tmp_path / "a.csv", head))


def test_folders_and_patterns(tmp_path: Path) -> None:
    written(tmp_path / "b.txt", b"\xef\xbb\xbfyes\r\n")
    written(tmp_path / "a.md", b"one\n\n")
    written(tmp_path / ".hidden", b"no")
    written(tmp_path / "c", b"\xff")
    out = written(tmp_path / "out.jsonl", b"")
    (tmp_path / "sub").mkdir()
    source = open_source(str(tmp_path), None, [out])
    assert list(map(outcome, source.entries())) == [
        (1, {"id": "a.md", "file": "a.md", "text": "one\n"}),
        (2, {"id": "b.txt", "file": "b.txt", "text": "yes"}),
        (3, "invalid_utf8"),
    ]
    assert [entry.fields and entry.fields["id"] for entry in source.entries()][2] == "c"
    for name in ("sub/deep/d.txt", "sub/.hidden/e.txt", "a/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path / name, b"d")
    (tmp_path / "link").symlink_to(tmp_path)
    names = [entry.fields and entry.fields["id"] for entry in open_source(str(tmp_path), None, [out]).entries()]
    assert names == ["a.md", "a/b.txt", "b.txt", "c", "sub/deep/d.txt"]
    assert [entry.line for entry in entries(f"{tmp_path}/*.txt")] == [1]
    assert [entry.fields for entry in entries(tmp_path / "b.txt")] == [
        {"id": str(tmp_path / "b.txt"), "file": str(tmp_path / "b.txt"), "text": "yes"}
    ]


def test_what_cannot_be_read_at_all(tmp_path: Path) -> None:
    unclear = written(tmp_path / "data.bin", b"")
    (tmp_path / "empty").mkdir()
    for argument, form, word in (
        (tmp_path / "nosuch", None, "no such file"),
        (unclear, None, "--format"),
        (tmp_path / "empty", None, "no files"),
        (f"{tmp_path}/*.nosuch", None, "no files match"),
        (tmp_path, "csv", "one file"),
        ("-", "text", "for files"),
    ):
        with pytest.raises(PyllmError, match=word):
            open_source(str(argument), form)


def test_a_named_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    source = open_source(str(tmp_path / "pipe"), "jsonl")
    assert source.count() is None and source.fingerprint() == {} and source.has_grown_from({})
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b'{"id": 1}\n{}',))
    writer.start()
    assert list(map(outcome, source.entries())) == [(1, {"id": 1}), (2, {})]
    writer.join()


def test_a_file_is_known_again_when_lines_were_added(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"id": 1}\n')
    fingerprint = open_source(str(path)).fingerprint()
    for data, same in (
        (b'{"id": 1}\n', True),
        (b'{"id": 1}\n{"id": 2}', True),
        (b'{"id": 2}\n', False),
        (b'{"id": 1}', False),
        (b"", False),
    ):
        assert open_source(str(written(path, data))).has_grown_from(fingerprint) is same
    unended = open_source(str(written(path, b'{"id": 1}'))).fingerprint()
    for data, same in ((b'{"id": 1}\n{"id": 2}', True), (b'{"id": 1}\r\n', True), (b'{"id": 1}2', False)):
        assert open_source(str(written(path, data))).has_grown_from(unended) is same
    folder = open_source(str(tmp_path))
    before = folder.fingerprint()
    assert folder.has_grown_from(before)
    written(tmp_path / "b.txt", b"new")
    assert not open_source(str(tmp_path)).has_grown_from(before)


def test_long_files_are_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for number in range(20_000):
            file.write(f'{{"id": {number}, "prompt": "{"x" * 500}"}}\n')
    tracemalloc.start()
    assert sum(1 for _ in open_source(str(path)).entries()) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 < path.stat().st_size
