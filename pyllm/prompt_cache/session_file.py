"""Session files: what was computed of a conversation, on disk.

The container is safetensors: 8 bytes with the length of a JSON header, the header, then all tensors without gaps, so
that other tools can look into a file. It is written and read here, not by the safetensors library, because that takes
all tensors in memory at once and maps files instead of reading them: here each section goes straight between pinned
memory and the file, with its checksum computed on the way.

    tokens        I32 [num_tokens]          of all rows, in order of position from 0 on; none where no row was kept
    page.0 ...    U8 [bytes]                rows of one page: K of all layers, then V of all layers, as on the device;
                                            rows behind the last token are zero
    state.P ...   F32 [elements]            the state of all recurrent layers at position P
    checksums     U32 [sections + 2]        CRC-32 of the header with its length, of each section, and of these numbers

`__metadata__` has "format", "version", and as JSON "fingerprint", "rows" and "chat". Whatever is wrong with a file is a
`SessionError` of one line, found before anybody uses a byte of it. A file appears under its name only when it is whole:
it is written under another, synced and renamed. What writers that were killed left under such names goes with the next
file that is written into the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn, Self

import numpy as np

from pyllm.errors import SessionError
from pyllm.prompt_cache.folder import PARTIAL, remove_partial

FORMAT = "pyllm session"
VERSION = 1
MAX_HEADER = 64 << 20  # bytes
MAX_TOKENS = 1 << 27
_DTYPES = {"I32": np.int32, "U8": np.uint8, "F32": np.float32, "U32": np.uint32}
_LENGTH = struct.Struct("<Q")
_CHECKSUMS = "checksums"
_TOO_NEW = "it needs a newer pyllm"


@dataclass(frozen=True)
class Section:
    """One tensor of a file.

    Attributes:
        start: of its bytes, counted from the end of the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(_DTYPES[self.dtype]).itemsize


class SessionWriter:
    """Writes one file, section after section. As a context manager: the file is there when the block ends without an
    error, and else nothing is.

    Args:
        sections: what will be written, in this order; without the checksums.
        metadata: further entries of `__metadata__`.

    Raises:
        SessionError: the file cannot be written.
    """

    def __init__(self, path: Path, sections: Sequence[Section], metadata: Mapping[str, str]) -> None:
        if path.name in ("", "..") or (os.path.lexists(path) and not path.is_file()):
            raise SessionError(f"{path}: this is no place for a file; choose another name")
        self._path = path
        self._sections = [*sections, Section(_CHECKSUMS, "U32", (len(sections) + 2,))]
        self._header = _header(self._sections, metadata)
        self._checksums = [zlib.crc32(self._header)]
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")

    def __enter__(self) -> Self:
        remove_partial(self._path.parent)
        with self._told():
            self._file = self._created()
        with self._told(), self._removed_on_error():
            self._put(self._header)
        return self

    def _created(self) -> BinaryIO:
        """The file, locked. To one that numbers processes otherwise this one seems to have ended: before there is a
        lock it may remove the file, which then is made again."""
        while True:
            handle = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            file: BinaryIO = open(handle, "wb", buffering=0)  # noqa: SIM115
            with contextlib.suppress(OSError):  # not all file systems have locks; the process's number is in the name
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()

    def write(self, content: np.ndarray) -> None:
        """The next section: C-contiguous, as many bytes as were said.

        Raises:
            SessionError: it cannot be written.
        """
        section = self._sections[len(self._checksums) - 1]
        assert content.nbytes == section.num_bytes, f"{content.nbytes} bytes for {section}"
        data = content.reshape(-1).view(np.uint8).data
        with self._told():
            self._put(data)
        self._checksums.append(zlib.crc32(data))

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with self._told(), self._removed_on_error():
            if kind is not None:
                self._give_up()
                return
            numbers = np.array(self._checksums, "<u4")
            self._put(np.append(numbers, np.uint32(zlib.crc32(numbers.tobytes()))).tobytes())
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self._path)
            _sync_folder(self._path.parent)

    def _put(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) or 0 :]

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    @contextlib.contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._give_up()
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SessionError(f"{self._path}: the session cannot be written: {error.strerror}") from error


class UnreadableSession(SessionError):
    """The system does not give the file's content now: it may be in order."""


class SessionReader:
    """An open file whose header, tokens and layout are right; sections are checked when they are read.

    Attributes:
        tokens: [num_tokens] int32.
        sections: by name.
        metadata: `__metadata__`.
        size: of the file, in bytes.

    Raises:
        SessionError: it is missing, damaged, cut off, or something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Without waiting for the other end of a pipe, which may stand under this name.
            self._file: BinaryIO = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UnreadableSession(f"{path}: the session cannot be read: {error.strerror}") from error
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def refuse(self, problem: str, remedy: str = "it is not used") -> NoReturn:
        raise SessionError(f"{self.path}: {problem}; {remedy}")

    def _unreadable(self, error: OSError) -> NoReturn:
        raise UnreadableSession(f"{self.path}: it cannot be read: {error.strerror}; it is not used") from error

    def json(self, name: str) -> dict[str, Any]:
        """An entry of the metadata that holds an object."""
        try:
            value = json.loads(self.metadata[name])
        except (KeyError, ValueError, TypeError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self.refuse(f"the header has no {name!r}")
        return value

    def read(self, name: str, memory: np.ndarray) -> int:
        """Read a section into [bytes] uint8; returns its CRC-32, for `check`. Several threads may: positions are given
        with each read.

        Raises:
            SessionError: the file is shorter now, or cannot be read.
        """
        section, done = self.sections[name], 0
        view = memory[: section.num_bytes].data
        while done < section.num_bytes:
            try:
                count = os.preadv(self._file.fileno(), [view[done:]], self._start + section.start + done)
            except OSError as error:
                self._unreadable(error)
            if not count:
                self.refuse(f"the file ends in section {name!r}")
            done += count
        return zlib.crc32(view)

    def check(self, name: str, checksum: int) -> None:
        """Compare what `read` returned.

        Raises:
            SessionError: the section is damaged.
        """
        if checksum != self._expected[name]:
            self.refuse(f"section {name!r} is damaged")

    def _read_header(self) -> None:
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            self.refuse("it is no ordinary file")
        size = self.size = status.st_size
        start = self._at(0, _LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        if not 2 <= length <= min(MAX_HEADER, size - _LENGTH.size):
            self.refuse("it is not a session file, or cut off")
        header = self._at(_LENGTH.size, length)
        self._start = _LENGTH.size + length
        try:
            entries = json.loads(header)
            self.metadata = dict(entries.pop("__metadata__"))
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            self.refuse("its header is damaged")
        if self.metadata.get("format") != FORMAT:
            self.refuse("it is not a session file of pyllm")
        if self.metadata.get("version") != str(VERSION):
            found = str(self.metadata.get("version"))[:20]
            self.refuse(f"it is of version {found}, this pyllm reads version {VERSION}", _TOO_NEW)
        self.sections = {name: self._section(name, entry) for name, entry in entries.items()}
        self._check_layout(size)
        self._read_checksums(_LENGTH.pack(length) + header)
        if self.sections["tokens"].shape[0] > MAX_TOKENS:
            self.refuse("it says that it has more tokens than any model reads")
        self.tokens = np.empty(self.sections["tokens"].shape, np.int32)
        self.check("tokens", self.read("tokens", self.tokens.view(np.uint8)))

    def _at(self, start: int, count: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), count, start)
        except OSError as error:
            self._unreadable(error)

    def _section(self, name: str, entry: Any) -> Section:
        try:
            dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = all(type(value) is int and 0 <= value < 1 << 48 for value in (*shape, start, stop))
            section = Section(name, dtype, tuple(shape), start)
            right = whole and len(shape) == 1 and dtype in _DTYPES and start + section.num_bytes == stop
        except (KeyError, TypeError, ValueError):
            right = False
        if not right:
            self.refuse(f"its header is damaged at section {name[:40]!r}")
        return section

    def _check_layout(self, size: int) -> None:
        """One section behind the other, from the first byte to the last."""
        stop = 0
        for section in self.sections.values():
            if section.start != stop:
                self.refuse(f"its header is damaged at section {section.name[:40]!r}")
            stop += section.num_bytes
        if self._start + stop != size:
            self.refuse(f"it has {size} bytes, its header says {self._start + stop}: cut off or damaged")
        names = list(self.sections)
        if names[:1] != ["tokens"] or names[-1] != _CHECKSUMS or self.sections["tokens"].dtype != "I32":
            self.refuse("it has no tokens or no checksums")

    def _read_checksums(self, header: bytes) -> None:
        if self.sections[_CHECKSUMS].shape != (len(self.sections) + 1,):
            self.refuse("it has another number of checksums than of sections")
        numbers = np.empty(self.sections[_CHECKSUMS].shape, "<u4")
        self.read(_CHECKSUMS, numbers.view(np.uint8))
        first, *others, last = map(int, numbers)
        if zlib.crc32(numbers[:-1].tobytes()) != last:
            self.refuse("its checksums are damaged")
        if first != zlib.crc32(header):
            self.refuse("its header is damaged")
        self._expected = dict(zip(self.sections, others, strict=False))


def _header(sections: Sequence[Section], metadata: Mapping[str, str]) -> bytes:
    """The header with its length in front."""
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": str(VERSION), **metadata}}
    start = 0
    for section in sections:
        stop = start + section.num_bytes
        entries[section.name] = {"dtype": section.dtype, "shape": section.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise SessionError(f"the conversation's texts take {len(text)} bytes; a session file holds {MAX_HEADER}")
    return _LENGTH.pack(len(text)) + text


def _sync_folder(folder: Path) -> None:
    """So that the new name is there after a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
