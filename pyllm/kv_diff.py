"""Where two traces of K/V rows part. See `pyllm.kv_trace` for what is in them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pyllm.errors import PyllmError, UsageError
from pyllm.kv_trace import VERSION

MAX_LINE = 4096  # characters; a line of a trace has about 170

_NUMBERS = ("step", "sequence", "layer", "page", "row", "position")
_SETTINGS = ("every", "layers", "kv_type")  # page sizes may differ: positions are compared, not places


@dataclass(frozen=True)
class TraceLine:
    """One row of a trace, and the line of the file on which it stands."""

    line: int
    step: int
    sequence: int
    layer: int
    page: int
    row: int
    position: int
    own: bool
    k: str
    v: str

    @property
    def what(self) -> tuple[int, int, int]:
        return self.sequence, self.position, self.layer

    @property
    def content(self) -> tuple[bool, str, str]:
        return self.own, self.k, self.v

    def __str__(self) -> str:
        state = "" if self.own else ", not the sequence's own"
        return (
            f"sequence {self.sequence}, position {self.position}, layer {self.layer}: "
            f"page {self.page}, row {self.row}, step {self.step}, k {self.k}, v {self.v}{state}"
        )


@dataclass(frozen=True)
class Difference:
    """The first place at which two traces part.

    Attributes:
        num_same: rows before it, which are the same.
        reason: one phrase.
        a, b: what the traces hold there; None where one has ended.
    """

    num_same: int
    reason: str
    a: TraceLine | None
    b: TraceLine | None


class TraceReader:
    """Reads a trace line by line.

    Attributes:
        settings: what its first line says.

    Raises:
        PyllmError: the file cannot be read, or is no trace; one line with file, line and finding.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._texts = self._read()
        _, first = next(self._texts, (1, {}))
        if first.get("kv_trace") != VERSION:
            raise self._bad(1, f"the first line is not that of a K/V trace of version {VERSION}")
        self.settings = {name: first.get(name) for name in _SETTINGS}

    def __iter__(self) -> Iterator[TraceLine]:
        for number, values in self._texts:
            wrong = [name for name in _NUMBERS if type(values.get(name)) is not int]
            wrong += [name for name in ("k", "v") if not _is_hash(values.get(name))]
            wrong += ["own"] if not isinstance(values.get("own"), bool) else []
            if wrong:
                raise self._bad(number, f"{wrong[0]} is missing, or is not what it must be")
            names = (*_NUMBERS, "own", "k", "v")
            yield TraceLine(number, **{name: values[name] for name in names})

    def _read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        try:
            with open(self._path, encoding="latin-1") as file:  # any byte; only JSON of ASCII is a line of a trace
                while text := file.readline(MAX_LINE):
                    number += 1
                    yield number, self._parse(number, text)
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}") from None

    def _parse(self, number: int, text: str) -> dict[str, Any]:
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            what = "cut off" if not text.endswith("\n") else "not a JSON object"
            raise self._bad(number, what)
        return values

    def _bad(self, number: int, finding: str) -> PyllmError:
        return PyllmError(f"{self._path}, line {number}: {finding}; `--kv-trace FILE` makes a K/V trace")


def first_difference(a: TraceReader, b: TraceReader) -> tuple[Difference | None, int]:
    """Compare two traces row by row. Steps and places may differ; sequences, positions, layers and content must not.

    Returns:
        The first difference or None, and how many rows are the same before it.

    Raises:
        PyllmError: a file is no trace, or the traces were made with settings that cannot be compared.
    """
    for name in _SETTINGS:
        if a.settings[name] != b.settings[name]:
            raise PyllmError(f"the traces cannot be compared: {name} is {a.settings[name]} and {b.settings[name]}")
    same = 0
    for left, right in zip_longest(a, b):
        reason = _reason(left, right)
        if reason:
            return Difference(same, reason, left, right), same
        same += 1
    return None, same


def _reason(a: TraceLine | None, b: TraceLine | None) -> str:
    if a is None or b is None:
        return f"the {'first' if a is None else 'second'} trace ends"
    if a.what != b.what:
        return "different rows were given up"
    return "" if a.content == b.content else "the row's content differs"


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 16 and all(letter in "0123456789abcdef" for letter in value)
