"""The file of records: each is appended whole or not at all, and what is there says where to go on."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyllm.errors import PyllmError

_ENCODER = json.JSONEncoder(separators=(", ", ": "), allow_nan=False)  # ASCII


class Output:
    """Open for appending, and held against other processes until it is closed or the process ends, however that is.

    A last line without its end, left by a process that was killed or a disk that was full, counts for nothing. Nothing
    in the file is changed before `prepare`.

    Args:
        path: made when it is not there.
        overwrite: what it holds counts for nothing.
        without_failed: neither do its records of errors: `prepare` takes them out.

    Attributes:
        done: ids by line, as text, of the records that count; None for a line whose id could not be used.
        num_failed: how many of them are errors.
        num_taken_out: records of errors that do not count.
        num_cut: bytes of a last line without its end.

    Raises:
        PyllmError: it cannot be written, is in use, or holds something else than records.
    """

    def __init__(self, path: Path, overwrite: bool = False, without_failed: bool = False) -> None:
        self.path = path
        self.num_taken_out = 0
        self._without_failed = without_failed
        self.done: dict[int, str | None] = {}
        self.num_failed = 0
        self._lines: set[int] = set()
        self._kept: list[int] = []  # numbers of the records that count
        self.num_cut = 0
        self._is_prepared = False
        self._file = self._opened()
        try:
            self._size = 0 if overwrite else self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _opened(self) -> int:
        """The file, locked; another process may replace it in the moment before."""
        while True:
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise PyllmError(f"{self.path} cannot be written: {error.strerror}; check the path of -o") from None
            try:
                self._lock(file)
                if os.path.samestat(os.fstat(file), os.stat(self.path)):
                    return file
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _lock(self, file: int) -> None:
        import fcntl

        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise PyllmError(f"{self.path} is no regular file; a batch is resumed from its output, which must be one")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PyllmError(f"{self.path} is being written by another pyllm batch; wait for it") from None

    def _read(self) -> int:
        """Take in all whole records; returns where they end."""
        end = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self.num_cut = len(line)
                    break
                self._take(number, line)
                end += len(line)
        return end

    def _take(self, number: int, line: bytes) -> None:
        try:
            value = json.loads(line)
            identifier = value["custom_id"] if "custom_id" in value else value["id"]
            source, failed = value["line"], value["error"] is not None
            if type(source) is not int:
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise PyllmError(
                f"{self.path}, line {number}: no record of pyllm batch; choose another -o, or --overwrite"
            ) from None
        if source in self._lines:
            raise PyllmError(f"{self.path}, line {number}: a second record of line {source}; choose another -o")
        self._lines.add(source)
        if failed and self._without_failed:
            self.num_taken_out += 1
            return
        self._kept.append(number)
        self.done[source] = None if identifier is None else str(identifier)
        self.num_failed += failed

    def prepare(self) -> None:
        """Cut off what counts for nothing.

        Raises:
            PyllmError: records cannot be taken out; they are all there.
        """
        if self.num_taken_out:
            self._take_out()
        os.ftruncate(self._file, self._size)
        os.lseek(self._file, self._size, os.SEEK_SET)
        self._is_prepared = True

    def _take_out(self) -> None:
        """Put a file with the other records in the place of this one; either is there, whole, at any time."""
        target = os.path.realpath(self.path)  # behind links, which stay
        folder, name = os.path.split(target)
        fresh = os.path.join(folder, f".{name}.retried")  # hidden: no text of a folder that is read
        try:
            file = self._created(fresh)
            try:
                self._lock(file)
                self._size = self._copy_kept(file)
                os.fchmod(file, stat.S_IMODE(os.fstat(self._file).st_mode))
                os.fsync(file)
                os.replace(fresh, target)
            except BaseException:
                os.close(file)
                with suppress(OSError):
                    os.unlink(fresh)
                raise
        except OSError as error:
            raise PyllmError(f"{fresh} cannot be written: {error.strerror}; nothing was changed") from None
        os.close(self._file)
        self._file = file

    @staticmethod
    def _created(path: str) -> int:
        """A new file. One that a killed program left gives way: only who has the lock of OUT comes here."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileExistsError:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise
            os.unlink(path)
            return os.open(path, flags, 0o600)

    def _copy_kept(self, file: int) -> int:
        """Copy the records that count; returns their bytes."""
        kept = iter([*self._kept, 0])
        following, size = next(kept), 0
        with open(self._file, "rb", closefd=False) as source, open(file, "wb", closefd=False) as target:
            source.seek(0)
            for number, line in enumerate(source, 1):
                if number == following:
                    following = next(kept)
                    size += target.write(line)
        return size

    def append(self, *records: Mapping[str, Any]) -> None:
        """Write records behind the others, once `prepare` was called; they are the system's when this returns.

        Raises:
            PyllmError: not all can be written; those in the file are whole.
        """
        assert self._is_prepared
        data = b"".join(_lines(records))
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._size += data.rfind(b"\n", 0, len(data) - len(rest)) + 1
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise PyllmError(
                f"{self.path} cannot be written: {error.strerror}; what is there is whole, run again to go on"
            ) from None
        self._size += len(data)

    def close(self) -> None:
        """Let go of it, written out to the disk. Calling it twice is harmless."""
        if self._file >= 0:
            file, self._file = self._file, -1
            with suppress(OSError):
                os.fsync(file)
            os.close(file)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _lines(records: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    for record in records:
        yield _ENCODER.encode(record).encode() + b"\n"
