"""Entries from JSON lines, tables and text files, one at a time: a long file is never held as a whole.

An entry that cannot be read comes as one with an error, and the next follows. A file that cannot be read at all, or a
table whose head is no head, stops the whole.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from pyllm.batch.errors import LineError
from pyllm.errors import PyllmError

FORMATS = ("jsonl", "csv", "tsv", "text")
STDIN = "-"

MAX_LINE = 64 << 20  # bytes of a line, of a field of a table, of a text file: far above any prompt
_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SUFFIXES = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".csv": "csv",
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
}


@dataclass(frozen=True)
class Entry:
    """One line of the input.

    Attributes:
        line: its number, from 1: of the line on which it begins, or of the file among text files.
        fields: what it holds.
        error: why there are no fields.
    """

    line: int
    fields: Mapping[str, Any] | None = None
    error: LineError | None = None


class Source(Protocol):
    """Where entries come from.

    Attributes:
        has_columns: the fields are the data's, named freely: those that are no settings are for the template alone.
    """

    has_columns: bool

    def entries(self) -> Iterator[Entry]:
        """All of them, from the first; blank lines are left out."""

    def count(self) -> int | None:
        """How many there are; None when that cannot be known."""

    def fingerprint(self) -> dict[str, Any]:
        """By which `has_grown_from` knows it again."""

    def has_grown_from(self, fingerprint: Mapping[str, Any]) -> bool:
        """Whether the lines that it had then are the same now."""


def open_source(argument: str, form: str | None = None, besides: Iterable[Path] = ()) -> Source:
    """The source that the command line names.

    Args:
        argument: a file, a folder, a pattern such as notes/*.txt, or - for standard input.
        form: one of FORMATS; default: what the file's name says, JSON lines for standard input.
        besides: files of a folder that are not for reading: those that are being written.

    Raises:
        PyllmError: there is no such file, or its name says nothing.
    """
    path = Path(argument)
    if argument != STDIN and (path.is_dir() or not path.exists()):
        return _text_files(argument, form, {os.path.realpath(other) for other in besides})
    form = form or ("jsonl" if argument == STDIN else _SUFFIXES.get(path.suffix.lower()))
    if form is None:
        raise PyllmError(f"{argument}: the name does not say what is in it; say --format {', '.join(FORMATS)}")
    if form == "text":
        if argument == STDIN:
            raise PyllmError("--format text is for files; standard input holds lines: --format jsonl, csv or tsv")
        return TextFiles([(argument, path)])
    lines = LineFile(None if argument == STDIN else path)
    return JsonLines(lines) if form == "jsonl" else Table(lines, "," if form == "csv" else "\t")


def _text_files(argument: str, form: str | None, besides: set[str]) -> Source:
    path = Path(argument)
    if path.is_dir():
        found = list(_files_below(path))
        what = "no files in this folder"
    elif glob.has_magic(argument):
        found = [(name, Path(name)) for name in glob.glob(argument, recursive=True)]
        what = "no files match; put the pattern in quotes"
    else:
        raise PyllmError(f"{argument}: no such file or folder; check the path of the input")
    if form not in (None, "text"):
        raise PyllmError(f"{argument}: a folder or pattern is read as text files; --format {form} is for one file")
    files = sorted((name, file) for name, file in found if file.is_file() and os.path.realpath(file) not in besides)
    if not files:
        raise PyllmError(f"{argument}: {what}")
    return TextFiles(files)


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names within the folder, and paths, of files in it and in its subfolders; hidden ones are left out, and links to
    folders, which may lead anywhere."""
    for place, folders, names in os.walk(folder, onerror=partial(_cannot_list, str(folder))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                path = Path(place, name)
                yield str(path.relative_to(folder)), path


def _cannot_list(folder: str, error: OSError) -> NoReturn:
    raise PyllmError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None


# lines


class LineFile:
    """The lines of a file or of standard input, as bytes, numbered from 1.

    Args:
        path: None for standard input, which can be read only once.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @property
    def can_be_read_again(self) -> bool:
        """Whether it is a file, not a pipe."""
        return self.path is not None and self.path.is_file()

    @property
    def name(self) -> str:
        return "standard input" if self.path is None else str(self.path)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        if self.path is None:
            yield _standard_input()
            return
        try:
            file = self.path.open("rb")
        except OSError as error:
            _cannot_read(self.name, error)
        with file:
            yield file

    def lines(self) -> Iterator[tuple[int, bytes | LineError]]:
        """Line number and line, with its end; a byte order mark at the start is left out."""
        with self._opened() as file:
            number = 0
            try:
                while line := file.readline(MAX_LINE):
                    number += 1
                    if number == 1:
                        line = line.removeprefix(_BOM)
                    if len(line) >= MAX_LINE - len(_BOM) and not line.endswith(b"\n"):
                        _skip_line(file)
                        yield number, LineError("line_too_long", f"the line is longer than {MAX_LINE >> 20} MB")
                    else:
                        yield number, line
            except OSError as error:
                _cannot_read(self.name, error)

    def fingerprint(self) -> dict[str, Any]:
        """Size and SHA-256; of a pipe nothing."""
        if self.path is None or not self.path.is_file():
            return {}
        size = self.path.stat().st_size
        return {"bytes": size, "sha256": self._digest(size)}

    def has_grown_from(self, fingerprint: Mapping[str, Any]) -> bool:
        """Whether the file begins with what it was then; a last line that was not ended then must be the same now."""
        if self.path is None or not self.path.is_file() or not fingerprint:
            return not self.can_be_read_again and not fingerprint
        size = fingerprint.get("bytes")
        if not isinstance(size, int) or not 0 <= size <= self.path.stat().st_size:
            return False
        with self._opened() as file:
            if size:
                file.seek(size - 1)
                last, following = file.read(1), file.read(1)
                if last != b"\n" and following not in (b"", b"\n", b"\r"):
                    return False
        return self._digest(size) == fingerprint.get("sha256")

    def _digest(self, size: int) -> str:
        digest = hashlib.sha256()
        with self._opened() as file:
            while size and (block := file.read(min(size, _BLOCK))):
                digest.update(block)
                size -= len(block)
        return digest.hexdigest()


def _standard_input() -> IO[bytes]:
    """A reader of its own: a thread may be waiting in it when the program ends, which sys.stdin would not survive."""
    if sys.stdin is None:
        return io.BytesIO()
    try:
        number = sys.stdin.fileno()
    except (OSError, ValueError):
        return sys.stdin.buffer
    return open(number, "rb", closefd=False)


def _skip_line(file: IO[bytes]) -> None:
    while (rest := file.readline(_BLOCK)) and not rest.endswith(b"\n"):
        pass


def _cannot_read(name: str, error: OSError) -> NoReturn:
    raise PyllmError(f"{name} cannot be read: {error.strerror or error}; check the path of the input") from None


def _not_utf8(data: bytes, at: int) -> LineError:
    return LineError("invalid_utf8", f"not UTF-8 text: byte {data[at]:#04x} at position {at}")


# formats


class JsonLines:
    """A JSON object on each line."""

    has_columns = False

    def __init__(self, lines: LineFile) -> None:
        self._lines = lines
        self.fingerprint = lines.fingerprint
        self.has_grown_from = lines.has_grown_from

    def entries(self) -> Iterator[Entry]:
        for number, line in self._filled():
            try:
                if isinstance(line, LineError):
                    raise line
                yield Entry(number, _json_object(line))
            except LineError as error:
                yield Entry(number, error=error)

    def count(self) -> int | None:
        return sum(1 for _ in self._filled()) if self._lines.can_be_read_again else None

    def _filled(self) -> Iterator[tuple[int, bytes | LineError]]:
        return ((number, line) for number, line in self._lines.lines() if isinstance(line, LineError) or line.strip())


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(line, error.start) from None
    try:
        value = _DECODER.decode(text) if not text.startswith("\ufeff") else json.loads(text)
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise LineError("invalid_json", "not JSON that can be read: nested too deep") from None
    except ValueError as error:
        raise LineError("invalid_json", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineError("not_an_object", f'a JSON {_kind(value)}; expected an object such as {{"prompt": ...}}')
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


class Table:
    """CSV or TSV; the first row names the columns. Quoted fields may hold line ends."""

    has_columns = True

    def __init__(self, lines: LineFile, delimiter: str) -> None:
        self._lines = lines
        self._delimiter = delimiter
        self.fingerprint = lines.fingerprint
        self.has_grown_from = lines.has_grown_from

    def entries(self) -> Iterator[Entry]:
        rows = self._rows()
        head = next(rows, None)
        if head is None:
            return
        columns = self._columns(*head)
        for number, row in rows:
            yield self._entry(number, row, columns)

    def count(self) -> int | None:
        return max(0, sum(1 for _ in self._rows()) - 1) if self._lines.can_be_read_again else None

    def _rows(self) -> Iterator[tuple[int, list[str] | LineError]]:
        """Number of its first line, and row; without blank lines."""
        csv.field_size_limit(MAX_LINE)
        too_long: list[LineError] = []
        reader = csv.reader(self._texts(too_long.append), delimiter=self._delimiter, strict=True)
        while True:
            number = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, LineError("invalid_csv", f"not a row: {error}")
                continue
            if too_long:
                yield number, too_long.pop()
            elif any(field.strip() for field in row):
                yield number, row

    def _texts(self, report: Callable[[LineError], None]) -> Iterator[str]:
        """Lines as texts; bytes that are not UTF-8 become surrogates, by which they are found in their row."""
        for _, line in self._lines.lines():
            if isinstance(line, LineError):
                report(line)
                yield "\n"
            else:
                yield line.decode(errors="surrogateescape")

    def _columns(self, number: int, row: list[str] | LineError) -> list[str]:
        """The head's names, checked."""
        if isinstance(row, LineError):
            raise PyllmError(f"{self._lines.name}, line {number}: {row}")
        columns = [name.strip() for name in row]
        if not all(columns) or len(set(columns)) < len(columns):
            raise PyllmError(
                f"{self._lines.name}, line {number}: the first row must name each column, and no two the same"
            )
        if any(_damaged(name) for name in columns):
            raise PyllmError(f"{self._lines.name}, line {number}: the first row is not UTF-8 text")
        return columns

    @staticmethod
    def _entry(number: int, row: list[str] | LineError, columns: list[str]) -> Entry:
        if isinstance(row, LineError):
            return Entry(number, error=row)
        if len(row) != len(columns):
            message = f"{len(row)} fields, the first row names {len(columns)}"
            return Entry(number, error=LineError("invalid_csv", message))
        for name, field in zip(columns, row, strict=True):
            if (at := _damaged(field)) is not None:
                return Entry(number, error=LineError("invalid_utf8", f"{name} is not UTF-8 text at position {at - 1}"))
        return Entry(number, dict(zip(columns, row, strict=True)))


def _damaged(text: str) -> int | None:
    """Position, from 1, of the first byte that was not UTF-8."""
    return next((at for at, char in enumerate(text, 1) if "\udc80" <= char <= "\udcff"), None)


class TextFiles:
    """A prompt from each file: fields text and file; the file's name is the id."""

    has_columns = True

    def __init__(self, files: list[tuple[str, Path]]) -> None:
        self._files = files

    def entries(self) -> Iterator[Entry]:
        for number, (name, path) in enumerate(self._files, 1):
            name = _shown_name(name)
            fields = {"id": name, "file": name}
            try:
                yield Entry(number, {**fields, "text": _text_of(path)})
            except LineError as error:
                yield Entry(number, fields, error)

    def count(self) -> int | None:
        return len(self._files)

    def fingerprint(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name, path in self._files:
            digest.update(_shown_name(name).encode() + b"\0")
            try:
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError:
                digest.update(b"unreadable")
        return {"files": len(self._files), "sha256": digest.hexdigest()}

    def has_grown_from(self, fingerprint: Mapping[str, Any]) -> bool:
        """Numbers follow from the names: one file more changes them, so nothing may change."""
        return self.fingerprint() == fingerprint


def _shown_name(name: str) -> str:
    """A file's name as text; bytes of it that are not UTF-8 are escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _text_of(path: Path) -> str:
    """A file's text without the newline that ends its last line."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LINE + 1)
    except OSError as error:
        raise LineError("unreadable", f"the file cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_LINE:
        raise LineError("line_too_long", f"the file is longer than {MAX_LINE >> 20} MB")
    data = data.removeprefix(_BOM)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(data, error.start) from None
    return text.removesuffix("\n").removesuffix("\r")
