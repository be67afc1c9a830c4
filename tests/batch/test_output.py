"""The file of records: whole lines, found again, held by one process."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pyllm.batch.output import Output
from pyllm.batch.settings import check_same, read_settings, settings_path, write_settings
from pyllm.errors import PyllmError, UsageError


def simple(line: int, identifier: Any = "a", error: Any = None) -> dict[str, Any]:
    return {"id": identifier, "line": line, "error": error}


def test_records_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Output(path) as output:
        output.prepare()
        output.append(simple(1))
        output.append(simple(2, None, {"code": "x"}))
        output.append({"id": "batch_req_3", "custom_id": "ü\u2028", "line": 3, "error": None})
        lines = path.read_bytes().splitlines()  # there before it is closed
    assert len(lines) == 3 and all(line.isascii() for line in lines)
    with Output(path) as output:
        assert output.done == {1: "a", 2: None, 3: "ü\u2028"} and output.num_failed == 1 and not output.num_cut
    with Output(path, overwrite=True) as output:
        assert not output.done and path.read_bytes()
        output.prepare()
    assert path.read_bytes() == b""


def test_a_cut_last_line_is_taken_off_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, last = (json.dumps(simple(line)).encode() + b"\n" for line in (1, 2))
    for kept in range(len(last)):
        path.write_bytes(first + last[:kept])
        with Output(path) as output:
            assert output.done == {1: "a"} and output.num_cut == kept
            assert path.read_bytes() == first + last[:kept]
            output.prepare()
            output.append(simple(2, "b"))
        assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", "b"]


@pytest.mark.parametrize("line", [b"hello", b"5", b"{}", b'{"id": 1, "line": "2", "error": null}', b"\xff", b"\0\0"])
def test_other_files_are_left_alone(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(PyllmError, match="line 1: no record"):
        Output(path)
    assert path.read_bytes() == line + b"\n"


def test_records_of_errors_are_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    written = [simple(1), simple(2, "b", {"code": "x"}), simple(3, "c"), simple(4, None, {"code": "x"})]
    path.write_text("".join(json.dumps(record) + "\n" for record in written) + '{"id": "cut')
    link.symlink_to(path)
    with Output(link, without_failed=True) as output:
        assert output.done == {1: "a", 3: "c"} and (output.num_taken_out, output.num_failed) == (2, 0)
    with Output(link, without_failed=True) as output:
        monkeypatch.setattr(os, "replace", _no_room)
        with pytest.raises(PyllmError, match="nothing was changed"):
            output.prepare()
        monkeypatch.undo()
        assert len(path.read_bytes().splitlines()) == 5
        output.prepare()
        assert link.is_symlink() and [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "c"]
        with pytest.raises(PyllmError, match="being written by another"):
            Output(path)
        output.append(simple(2, "b"))
    with Output(path) as output:
        assert output.done == {1: "a", 3: "c", 2: "b"}


def _no_room(*paths: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_that_was_replaced_while_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    path.write_text(json.dumps(simple(1)) + "\n")
    other.write_text(json.dumps(simple(2)) + "\n")
    lock = Output._lock

    def replaced(self: Output, file: int) -> None:
        lock(self, file)
        if other.exists():
            os.replace(other, path)

    monkeypatch.setattr(Output, "_lock", replaced)
    with Output(path) as output:
        assert output.done == {2: "a"}


def test_a_line_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(simple(line)) + "\n" for line in (1, 2, 1)))
    with pytest.raises(PyllmError, match="second record of line 1"):
        Output(path)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Output(tmp_path / "out.jsonl"), pytest.raises(PyllmError, match="another pyllm batch"):
        Output(tmp_path / "out.jsonl")
    Output(tmp_path / "out.jsonl").close()


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PyllmError, match="cannot be written"):
        Output(tmp_path / "no" / "out.jsonl")
    with pytest.raises(PyllmError, match="cannot be written"):
        Output(tmp_path)
    with pytest.raises(PyllmError, match="regular file"):
        Output(Path("/dev/null"))
    path = tmp_path / "out.jsonl"
    real = os.write
    with Output(path) as output:
        output.prepare()
        output.append(simple(1))

        def full(file: int, data: memoryview) -> int:
            if len(data) < 10:
                raise OSError(28, "No space left on device")
            return real(file, data[:8])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(PyllmError, match="No space left"):
            output.append(simple(2))
        monkeypatch.undo()
    assert path.read_text() == json.dumps(simple(1)) + "\n"


def test_settings(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert read_settings(out) is None
    settings = {"raw": False, "sampling": {"temperature": 0.5, "stop": ()}, "input": {"bytes": 3}}
    write_settings(out, settings)
    then = read_settings(out)
    assert then is not None
    check_same(out, then, {**settings, "input": {"bytes": 4}})
    with pytest.raises(UsageError, match=r"raw was false, is true; sampling temperature was 0\.5, is none"):
        check_same(out, then, {**settings, "raw": True, "sampling": {"stop": []}})
    for damaged in (b"", b"[]", b'{"version": 99, "input": {}}', b"\xff"):
        settings_path(out).write_bytes(damaged)
        with pytest.raises(PyllmError, match="damaged"):
            read_settings(out)


def test_of_several_records_those_that_are_whole_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "out.jsonl", os.write
    records = [simple(line) for line in range(1, 6)]
    lines = [json.dumps(record) + "\n" for record in records]
    for room in range(len("".join(lines)) + 1):
        left = room

        def writes(file: int, data: memoryview) -> int:
            nonlocal left
            if not left:
                raise OSError(28, "No space left on device")
            count = real(file, data[: min(left, 50)])
            left -= count
            return count

        with Output(path, overwrite=True) as output:
            output.prepare()
            monkeypatch.setattr(os, "write", writes)
            with suppress(PyllmError):
                output.append(*records)
            monkeypatch.undo()
        whole = [line for number, line in enumerate(lines, 1) if len("".join(lines[:number])) <= room]
        assert path.read_text() == "".join(whole)
