"""Conversations on disk: a new process finds them by their tokens; a folder is shared, bounded and private."""

from __future__ import annotations

import errno
import fcntl
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pyllm.errors import SessionError, UsageError
from pyllm.llm import LLM
from pyllm.prompt_cache import disk_tier, folder
from pyllm.prompt_cache.folder import begins_as_session, left_behind, make_private, remove_partial, session_files
from pyllm.prompt_cache.session_file import SessionReader, SessionWriter
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path, reference

PLAIN, HYBRID = "llama-a-f32", "qwen3next-b-eqheads-bf16"
IDS = {PLAIN: list(range(3, 250)), HYBRID: reference("qwen3next-b-eqheads")["n300_tokens"].tolist()}


@pytest.fixture(params=[PLAIN, HYBRID])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(name: str, folder: Path, **options: Any) -> LLM:
    options = {"ctx_size": 160, "page_size": 8, "prefix_cache": True, "cache_dir": folder / "c", **options}
    return open_engine(model_path(name), **options)


def ask(llm: LLM, prompt: list[int], count: int = 4) -> list[int]:
    return tokens(llm.generate(prompt, greedy(count)))


def files(folder: Path) -> list[Path]:
    return session_files(folder / "c")


def test_a_new_process_finds_a_conversation(name: str, tmp_path: Path) -> None:
    talk = IDS[name][:90]
    with engine(name, tmp_path) as llm:
        first = ask(llm, talk)
    with engine(name, tmp_path) as llm, engine(name, tmp_path, prefix_cache=False, cache_dir=None) as fresh:
        following = [*talk, *first, 5, 6]
        assert ask(llm, following) == ask(fresh, following)
        assert llm.stats["cached_tokens"] == len(talk) + 3
        assert ask(llm, IDS[name][100:190]) == ask(fresh, IDS[name][100:190])
        assert llm.stats["cached_tokens"] == 0
    assert len(files(tmp_path)) == 2  # the longer one took the place of the shorter
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


def test_what_is_short_or_known_is_not_written(name: str, tmp_path: Path) -> None:
    with engine(name, tmp_path) as llm:
        ask(llm, IDS[name][:30])
    assert not files(tmp_path)
    for _ in range(2):
        with engine(name, tmp_path) as llm:
            ask(llm, IDS[name][:90])
        (path,) = files(tmp_path)
        inode = path.stat().st_ino
    assert files(tmp_path)[0].stat().st_ino == inode


def test_what_is_left_of_a_conversation_replaces_no_more_of_it(name: str, tmp_path: Path) -> None:
    """Most of the pages gave way to another conversation before it was written."""
    with engine(name, tmp_path, ctx_size=240) as llm:
        talk = IDS[name][:90] + ask(llm, IDS[name][:90])
    (path,) = files(tmp_path)
    with engine(name, tmp_path, ctx_size=240) as llm:
        ask(llm, [*talk, *IDS[name][120:225]])
        ask(llm, IDS[name][100:240], 20)
    assert path.exists()
    with engine(name, tmp_path, ctx_size=240) as llm:
        ask(llm, talk)
        assert llm.stats["cached_tokens"] >= 90


def test_all_of_a_conversation_takes_the_place_of_what_was_left_of_it(tmp_path: Path) -> None:
    """Both files have the name that its tokens give."""
    talk = IDS[PLAIN][:200]
    with engine(PLAIN, tmp_path, ctx_size=240) as llm:
        ask(llm, talk)
        ask(llm, IDS[PLAIN][140:240], 20)
    parts = {path: path.stat().st_size for path in files(tmp_path)}
    assert len(parts) == 2
    with engine(PLAIN, tmp_path, ctx_size=240) as llm:
        ask(llm, talk)
    assert set(files(tmp_path)) == set(parts)
    with engine(PLAIN, tmp_path, ctx_size=240) as llm:
        ask(llm, talk)
        assert llm.stats["cached_tokens"] == len(talk) - 1


def test_a_file_that_was_written_anew_is_not_removed_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(PLAIN, tmp_path) as llm:
        ask(llm, IDS[PLAIN][:90])
    (path,) = files(tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :])
    with engine(PLAIN, tmp_path) as llm:
        load = llm._kept.disk._sessions.load  # type: ignore[union-attr]

        def replaced(path: Path) -> None:
            try:
                load(path)
            finally:
                fresh = path.with_name("fresh")
                fresh.write_bytes(good)  # by another process
                fresh.rename(path)

        monkeypatch.setattr(llm._kept.disk._sessions, "load", replaced)  # type: ignore[union-attr]
        ask(llm, IDS[PLAIN][:90])
        monkeypatch.undo()
    assert path.read_bytes() == good and not caplog.records


def test_conversations_are_written_when_they_are_left_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "IDLE", 0.05)
    with engine(name, tmp_path) as llm:
        ask(llm, IDS[name][:90])
        deadline = threading.Event()
        for _ in range(200):
            if files(tmp_path):
                break
            deadline.wait(0.05)
        assert files(tmp_path)


def test_the_budget_holds(tmp_path: Path) -> None:
    with engine(PLAIN, tmp_path) as llm:
        ask(llm, IDS[PLAIN][:90])
    size = files(tmp_path)[0].stat().st_size
    for start in (10, 20, 30):
        with engine(PLAIN, tmp_path, cache_disk=int(2.5 * size)) as llm:
            ask(llm, IDS[PLAIN][start : start + 90])
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 2.5 * size
    assert len(files(tmp_path)) == 2
    with engine(PLAIN, tmp_path, cache_disk=int(2.5 * size)) as llm:
        ask(llm, IDS[PLAIN][30:120])
        assert llm.stats["cached_tokens"] == 89  # the last one is there


def test_an_entry_larger_than_the_budget_is_skipped_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(PLAIN, tmp_path, cache_disk=1000) as llm:
        ask(llm, IDS[PLAIN][:90])
    assert not files(tmp_path)
    assert "larger than the cache on disk" in caplog.text and len(caplog.records) == 1


def test_damaged_entries_are_removed_and_not_used(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(name, tmp_path) as llm:
        expected = ask(llm, IDS[name][:90])
    (path,) = files(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with engine(name, tmp_path) as llm:
        assert ask(llm, IDS[name][:90]) == expected
        assert llm.stats["cached_tokens"] == 0
        assert not path.exists()
    assert "is damaged" in caplog.text and "removed from the cache" in caplog.text


def test_entries_of_other_engines_are_left_alone(tmp_path: Path) -> None:
    with engine(PLAIN, tmp_path) as llm:
        ask(llm, IDS[PLAIN][:90])
    with engine(PLAIN, tmp_path, kv_type="f16") as llm:
        ask(llm, IDS[PLAIN][:90])
        assert llm.stats["cached_tokens"] == 0
    assert len(files(tmp_path)) == 2


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    with engine(PLAIN, tmp_path) as one, engine(PLAIN, tmp_path) as other:
        expected = ask(one, IDS[PLAIN][:90])
        assert one._kept.disk is not None
        one._kept.disk.close()
        assert ask(other, IDS[PLAIN][:90]) == expected
        assert other.stats["cached_tokens"] == 89


def test_an_entry_that_another_process_removes_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(PLAIN, tmp_path) as llm:
        expected = ask(llm, IDS[PLAIN][:90])
    with engine(PLAIN, tmp_path) as llm:
        assert llm._kept.disk is not None
        llm._kept.disk._look()
        files(tmp_path)[0].unlink()
        llm._kept.disk._seen = (tmp_path / "c").stat().st_mtime_ns  # it has not looked since
        assert ask(llm, IDS[PLAIN][:90]) == expected
        assert llm.stats["cached_tokens"] == 0
    assert not caplog.records


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "c").mkdir()
    left, own = (tmp_path / "c" / f".a.session.{pid}-0123abcd.partial" for pid in (ended.pid, 1))
    left.touch()
    own.touch()
    with engine(PLAIN, tmp_path):
        assert not left.exists() and own.exists()


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    """By name, content and lock; with the next file that is written."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    header = struct.pack("<Q", 900) + b'{"__metadata__": {"format": "pyllm session", "version'
    names = [f".a.session.{ended.pid}-{number:08x}.partial" for number in range(5)]
    contents = [header, header[:30], b"", b"12345678 of another program", header]
    paths = [tmp_path / name for name in [*names, f".notes.{ended.pid}.partial", ".partial"]]
    for path, content in zip(paths, [*contents, b"", b""], strict=True):
        path.write_bytes(content)
    writing = paths[4].open("rb")
    fcntl.flock(writing, fcntl.LOCK_EX)  # by a process of another machine, or another numbering of processes
    link = tmp_path / f".a.session.{ended.pid}-aaaaaaaa.partial"
    link.symlink_to(paths[0])
    assert set(left_behind(tmp_path)) == set(paths[:3])
    with SessionWriter(tmp_path / "b.session", [], {}) as writer:
        assert writer._temporary.exists() and not set(left_behind(tmp_path))
        with pytest.raises(BlockingIOError), writer._temporary.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert set(tmp_path.iterdir()) == {*paths[3:], link, tmp_path / "b.session"}
    writing.close()
    assert left_behind(tmp_path) == [paths[4]]


def test_a_file_that_goes_before_it_has_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, which numbers processes otherwise, takes it for one that was left behind."""
    flock, removed = fcntl.flock, 0

    def late(file: Any, operation: int) -> None:
        nonlocal removed
        if removed < 2 and not isinstance(file, int):
            monkeypatch.setattr(folder.os.path, "exists", lambda path: False)  # type: ignore[attr-defined]
            removed += remove_partial(tmp_path)
            monkeypatch.undo()
            monkeypatch.setattr(fcntl, "flock", late)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with SessionWriter(tmp_path / "a.session", [], {}):
        assert removed == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.session"] and begins_as_session(tmp_path / "a.session")


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    from pyllm.errors import SessionError

    with pytest.raises(SessionError, match="cannot be made"):
        engine(PLAIN, tmp_path)
    with pytest.raises(UsageError, match="needs prefix_cache"):
        engine(PLAIN, tmp_path, prefix_cache=False)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """Neither removed for room, nor taken for the tier's own, whatever they are called."""
    (tmp_path / "c").mkdir()
    others = [tmp_path / "c" / f"{name}.session" for name in ("photos", "work")]
    for path in others:
        path.write_bytes(b"\x07" * 3000)
    own = set()
    for start in (3, 40, 80):
        with engine(PLAIN, tmp_path, cache_disk=200_000) as llm:
            ask(llm, [start, *IDS[PLAIN][start : start + 100]])
        own |= set(files(tmp_path)) - set(others)
    assert all(path.read_bytes() == b"\x07" * 3000 for path in others)
    assert len(own) > len(set(files(tmp_path)) - set(others)) > 0  # some of its own gave way


@pytest.mark.parametrize("name", [PLAIN], indirect=True)
def test_what_cannot_be_read_now_is_not_removed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(name, tmp_path) as llm:
        ask(llm, IDS[name][:90])
    (path,) = files(tmp_path)
    with engine(name, tmp_path) as llm:
        read = SessionReader.read

        def fail(self: SessionReader, section: str, memory: Any) -> int:
            if section.startswith("page."):
                self._unreadable(OSError(errno.EIO, "Input/output error"))
            return read(self, section, memory)

        monkeypatch.setattr(SessionReader, "read", fail)
        ask(llm, IDS[name][:90])
        assert llm.stats["cached_tokens"] == 0
        monkeypatch.undo()
    assert path.exists()


def test_a_folder_of_other_files_stays_as_open_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "notes.txt").write_text("of another program")
    with pytest.raises(SessionError, match=r"others can read this folder, and it holds other files \('notes.txt'\)"):
        make_private(shared)
    assert shared.stat().st_mode & 0o777 == 0o755
    shared.chmod(0o700)
    make_private(shared)
    shared.chmod(0o755)
    (shared / "notes.txt").rename(shared / "notes.session")
    make_private(shared)
    assert shared.stat().st_mode & 0o777 == 0o700


def test_a_file_stays_where_memory_cannot_be_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [3 + number % 50 for number in range(100)]
    options = {"prefix_cache": True, "cache_dir": tmp_path / "c", "page_size": 16}
    with open_engine(model_path("llama-a-f32"), **options) as llm:
        tokens(llm.generate(prompt, greedy(4)))
    before = files(tmp_path)
    assert before
    with open_engine(model_path("llama-a-f32"), **options) as llm:
        assert llm._kept is not None
        monkeypatch.setattr(llm._kept.sessions.pool, "take", lambda: None)
        assert tokens(llm.generate([*prompt, 7], greedy(4))) and llm.stats["cached_tokens"] == 0
        assert set(before) <= set(files(tmp_path))
