"""Reading GGUF files: the header is parsed and checked once, tensors stay in the file as they are stored.

A file comes from strangers. Every count, size, offset and type id is checked against the file before it is used, and
everything wrong is a ModelFileError of one line: file, field, what was found, what to do. Opening reads the header
only: metadata values are decoded when first asked for, tensors never. This module knows how GGUF is laid out; it does
not know what any key or tensor means, beyond `general.architecture` and `general.alignment`.

Layout (little endian): magic, version, counts, key-value pairs, tensor table, padding, tensor data. Source: the GGUF
specification in ggml's docs/gguf.md.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import stat
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np

from pyllm.errors import ModelFileError, UnsupportedError
from pyllm.gguf_metadata import FETCH_AGAIN, TypedMetadata, printable
from pyllm.quants import FORMATS, QuantType, decodable_types, row_bytes

# Far above any real model (a few dozen keys, a few thousand tensors, 262k tokens and 515k merges); they bound the time
# spent on a file made to waste it.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_ARRAY_ITEMS = 1 << 28
_MAX_STRINGS = 1 << 22  # together with inner arrays, over the whole header
_MAX_STRING_BYTES = 1 << 24
_MAX_VALUE_BYTES = 1 << 28  # of all strings and arrays; a sparse file can promise any number for nothing
_MAX_KEY_BYTES = 65535
_MAX_NAME_BYTES = 63  # ggml keeps 64 with the terminator
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_ALIGNMENTS = (8, 1 << 24)

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_UINT8, _BOOL, _STRING, _ARRAY = 0, 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    _UINT8: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MIN_VALUE_BYTES = {value_type: dtype.itemsize for value_type, dtype in _NUMBERS.items()} | {_STRING: 8, _ARRAY: 12}

# What people hand over by mistake: the first bytes, and what the file then is.
_OTHER_FILES = (
    (b"version https://git-lfs", "a Git LFS pointer: fetch the file itself (git lfs pull)"),
    (b"PK\x03\x04", "a PyTorch or zip archive: convert it to GGUF first"),
    (b"<", "a web page or XML: fetch the file itself, not its page"),
    (b"lmgg", "the older GGML format: convert the model to GGUF anew"),
    (b"tjgg", "the older GGJT format: convert the model to GGUF anew"),
)


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table, checked: the bytes lie inside the file and belong to no other tensor.

    Attributes:
        shape: NumPy order, slowest axis first; the last axis is the one cut into blocks.
        offset: of the first byte, from the start of its file.
        nbytes: stored size in bytes.
    """

    name: str
    qtype: QuantType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Cursor:
    """A position in a file's bytes that never leaves them."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0
        self.strings = 0
        self.value_bytes = 0

    def fail(self, problem: str, remedy: str = FETCH_AGAIN) -> NoReturn:
        raise ModelFileError(f"{printable(self.path, 4096)}: {problem}; {remedy}")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.position:
            self.fail(f"{what} needs {num_bytes} bytes at byte {self.position}, the file ends at byte {self.size}")

    def number(self, form: struct.Struct, what: str) -> int:
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return value

    def count(self, what: str, limit: int, min_bytes: int) -> int:
        """A u64 count of things of at least `min_bytes` each, refused at once when they cannot fit."""
        count = self.number(_U64, what)
        self.need(count * min_bytes, f"{what}, {count},")
        if count > limit:
            self.fail(
                f"{what} is {count}, pyllm accepts at most {limit}", "the file is damaged or not a language model"
            )
        return count

    def text(self, what: str, limit: int) -> str:
        """A string that names something: non-empty, valid UTF-8, no NUL, at most `limit` bytes."""
        length = self.number(_U64, f"the length of {what}")
        if length > limit:
            self.fail(f"{what} is {length} bytes long, expected at most {limit}")
        self.need(length, what)
        raw = self.data[self.position : self.position + length]
        self.position += length
        if not raw or b"\0" in raw:
            self.fail(f"{what} is {printable(raw)}, expected text without NUL bytes")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is {printable(raw)}, which is not UTF-8")

    def skip_value(self, value_type: int, key: str, depth: int = 0) -> None:
        """Check one metadata value and move past it."""
        if value_type == _STRING:
            self.skip_strings(1, key)
        elif value_type == _ARRAY:
            self.skip_array(key, depth + 1)
        elif value_type in _NUMBERS:
            self.skip_numbers(value_type, 1, key)
        else:
            self.fail(f"{printable(key)} has value type {value_type}, expected 0 to 12")

    def skip_array(self, key: str, depth: int) -> None:
        if depth > _MAX_ARRAY_DEPTH:
            self.fail(f"{printable(key)} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        value_type = self.number(_U32, f"the element type of {printable(key)}")
        if value_type not in _MIN_VALUE_BYTES:
            self.fail(f"{printable(key)} is an array of value type {value_type}, expected 0 to 12")
        count = self.count(f"the length of {printable(key)}", _MAX_ARRAY_ITEMS, _MIN_VALUE_BYTES[value_type])
        if value_type in _NUMBERS:
            self.skip_numbers(value_type, count, key)
            return
        self.strings += count
        if self.strings > _MAX_STRINGS:
            self.fail(f"{printable(key)} brings the strings to {self.strings}, pyllm accepts at most {_MAX_STRINGS}")
        if value_type == _STRING:
            self.skip_strings(count, key)
            return
        for _ in range(count):
            self.skip_array(key, depth + 1)

    def skip_numbers(self, value_type: int, count: int, key: str) -> None:
        num_bytes = count * _NUMBERS[value_type].itemsize
        self.need(num_bytes, printable(key))
        self.add_bytes(num_bytes, key)
        if value_type == _BOOL and count:
            largest = np.frombuffer(self.data, np.uint8, count, self.position).max()
            if largest > 1:
                self.fail(f"{printable(key)} holds the byte {largest} for a truth value, expected 0 or 1")
        self.position += num_bytes

    def skip_strings(self, count: int, key: str) -> None:
        # The one hot loop of opening a file (262k tokens). NumPy cannot help: each length tells where the next one is.
        data, position, last, length_at = self.data, self.position, self.size - 8, _U64.unpack_from
        longest = 0
        for _ in range(count):
            if position > last:
                self.fail(f"{printable(key)} reaches past the end of the file at byte {self.size}")
            length = length_at(data, position)[0]
            if length > longest:
                longest = length
            position += 8 + length
        if position > self.size:
            self.fail(f"a string of {printable(key)} reaches past the end of the file at byte {self.size}")
        if longest > _MAX_STRING_BYTES:
            self.refuse_size(f"a string of {printable(key)} is {longest} bytes long", _MAX_STRING_BYTES)
        self.add_bytes(position - self.position, key)
        self.position = position

    def add_bytes(self, num_bytes: int, key: str) -> None:
        self.value_bytes += num_bytes
        if self.value_bytes > _MAX_VALUE_BYTES:
            self.refuse_size(f"{printable(key)} brings the values to {self.value_bytes} bytes", _MAX_VALUE_BYTES)

    def refuse_size(self, found: str, limit: int) -> NoReturn:
        self.fail(f"{found}, pyllm accepts at most {limit}", "the file is damaged or not a language model")


def _decode_value(data: mmap.mmap, value_type: int, position: int) -> tuple[Any, int]:
    """Decode a value that `_Cursor.skip_value` accepted. Returns it and the position after it."""
    if value_type == _STRING:
        values, position = _decode_strings(data, 1, position)
        return values[0], position
    if value_type != _ARRAY:
        dtype = _NUMBERS[value_type]
        return np.frombuffer(data, dtype, 1, position)[0].item(), position + dtype.itemsize
    (element_type,), (count,) = _U32.unpack_from(data, position), _U64.unpack_from(data, position + 4)
    position += 12
    if element_type == _STRING:
        return _decode_strings(data, count, position)
    if element_type == _ARRAY:
        inner = []
        for _ in range(count):
            value, position = _decode_value(data, _ARRAY, position)
            inner.append(value)
        return inner, position
    dtype = _NUMBERS[element_type]
    # A copy: aligned, in native byte order, and independent of the mapping.
    numbers = np.frombuffer(data, dtype, count, position).astype(dtype.newbyteorder("="))
    numbers.flags.writeable = False
    return numbers, position + numbers.nbytes


def _decode_strings(data: mmap.mmap, count: int, position: int) -> tuple[list[str], int]:
    strings = []
    length_at = _U64.unpack_from
    for _ in range(count):
        start = position + 8
        position = start + length_at(data, position)[0]
        # Tokens may be pieces of UTF-8 characters; they must not stop a model from loading.
        strings.append(str(data[start:position], "utf-8", "replace"))
    return strings, position


class Metadata(Mapping[str, Any]):
    """The key-value pairs of a file. Values are decoded when first asked for and then kept.

    Values are Python int, float, bool or str; arrays of numbers are read-only NumPy arrays of the stored dtype, arrays
    of strings are list[str], arrays of arrays are lists of these. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, path: Path, data: mmap.mmap, entries: dict[str, tuple[int, int]]) -> None:
        self._path = path
        self._data: mmap.mmap | None = data
        self._entries = entries
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            value_type, position = self._entries[key]
            if self._data is None:
                raise ModelFileError(
                    f"{printable(self._path, 4096)}: {printable(key)} was not read before the file was closed"
                )
            self._values[key] = _decode_value(self._data, value_type, position)[0]
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """Let go of the file. Values already decoded stay readable."""
        self._data = None


class GGUFModel(TypedMetadata, ABC):
    """What one file and a set of split files have in common. A context manager that closes itself.

    Attributes:
        path: of the file, or of the first one of a set.
        metadata: key-value pairs, decoded on demand.
        tensors: TensorInfo by name, in file order.
    """

    metadata: Metadata
    tensors: dict[str, TensorInfo]

    @abstractmethod
    def tensor_data(self, name: str) -> np.ndarray:
        """A tensor's bytes as stored: read-only uint8 [*shape[:-1], row_bytes], a view of the mapped file.

        Raises:
            ModelFileError: there is no such tensor, or the file is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; may be called twice. Arrays handed out stay valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class GGUFFile(GGUFModel):
    """One GGUF file, memory-mapped read-only.

    Who owns what: the file object (with its metadata) owns the mapping's first reference; each array from `tensor_data`
    holds another, and the mapping goes away with the last of them. `close()` only drops the object's own reference, so
    it is safe while arrays are in use.

    Attributes:
        version: 2 or 3.
        alignment: of tensor offsets, in bytes.

    Raises:
        ModelFileError: the file is missing, damaged, or not GGUF.
        UnsupportedError: big-endian, version 1 or unknown, or a tensor type without a known layout.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        data = _map_file(self.path)
        cursor = _Cursor(self.path, data)
        self.version = _read_version(cursor)
        num_tensors = cursor.count("the number of tensors", _MAX_TENSORS, 8 + 1 + 4 + 8 + 4 + 8)
        num_keys = cursor.count("the number of keys", _MAX_KEYS, 8 + 1 + 4 + 1)
        self.metadata = Metadata(self.path, data, _read_entries(cursor, num_keys))
        self.alignment = self.get_int("general.alignment", 32, minimum=_ALIGNMENTS[0], maximum=_ALIGNMENTS[1])
        if self.alignment & (self.alignment - 1):
            self._refuse("general.alignment", self.alignment, "a power of two")
        self.tensors = _read_tensors(cursor, num_tensors, self.alignment)
        self._data: mmap.mmap | None = data

    def tensor_data(self, name: str) -> np.ndarray:
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{printable(self.path, 4096)}: tensor {printable(name)} is missing; {FETCH_AGAIN}")
        if self._data is None:
            raise ModelFileError(f"{printable(self.path, 4096)}: closed before {printable(name)} was read")
        rows = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        return rows.reshape(*info.shape[:-1], row_bytes(info.qtype, info.shape[-1]))

    def close(self) -> None:
        self._data = None
        self.metadata.close()


def _map_file(path: Path) -> mmap.mmap:
    shown = printable(path, 4096)
    try:
        # Looked at before it is opened: opening a FIFO would wait for a writer.
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{shown} is a folder, expected a GGUF file; name the .gguf file in it")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{shown} is a device or pipe, expected a GGUF file; save it to disk first")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{shown} is empty; {FETCH_AGAIN}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{shown} does not exist; check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(
            f"{shown} cannot be read: {printable(reason)}; check the path and its permissions"
        ) from None


def _read_version(cursor: _Cursor) -> int:
    first = cursor.data[:24]
    if not first.startswith(b"GGUF"):
        for magic, description in _OTHER_FILES:
            if first.startswith(magic):
                cursor.fail("not a GGUF file", f"it looks like {description}")
        cursor.fail(f"not a GGUF file: it begins with {first[:8]!r} instead of b'GGUF'", "check the path")
    cursor.position = 4
    version = cursor.number(_U32, "the version")
    if version in (2, 3):
        return version
    shown = printable(cursor.path, 4096)
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        raise UnsupportedError(f"{shown}: a big-endian GGUF file; pyllm reads little-endian ones: convert it again")
    raise UnsupportedError(f"{shown}: GGUF version {version}; pyllm reads versions 2 and 3: convert the model again")


def _read_entries(cursor: _Cursor, count: int) -> dict[str, tuple[int, int]]:
    """Check all key-value pairs; returns value type and position of each."""
    entries: dict[str, tuple[int, int]] = {}
    for index in range(count):
        key = cursor.text(f"key {index}", _MAX_KEY_BYTES)
        if key in entries:
            cursor.fail(f"key {printable(key)} appears twice")
        value_type = cursor.number(_U32, f"the type of {printable(key)}")
        entries[key] = (value_type, cursor.position)
        cursor.skip_value(value_type, key)
    return entries


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """Check the tensor table; returns it with absolute offsets."""
    table: dict[str, tuple[QuantType, tuple[int, ...], int]] = {}
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}", _MAX_NAME_BYTES)
        if name in table:
            cursor.fail(f"tensor {printable(name)} appears twice")
        table[name] = _read_tensor(cursor, printable(name))
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, (qtype, shape, offset) in table.items():
        nbytes = math.prod(shape[:-1]) * row_bytes(qtype, shape[-1])
        if offset % alignment:
            cursor.fail(
                f"tensor {printable(name)} starts at {offset}, expected a multiple of the alignment {alignment}"
            )
        if start + offset + nbytes > cursor.size:
            cursor.fail(
                f"tensor {printable(name)} ends at byte {start + offset + nbytes}, the file at byte {cursor.size}"
            )
        tensors[name] = TensorInfo(name, qtype, shape, start + offset, nbytes)
    _check_overlap(cursor, tensors)
    return tensors


def _read_tensor(cursor: _Cursor, shown: str) -> tuple[QuantType, tuple[int, ...], int]:
    num_dims = cursor.number(_U32, f"the number of dimensions of {shown}")
    if not 1 <= num_dims <= _MAX_DIMS:
        cursor.fail(f"tensor {shown} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
    dims = [cursor.number(_U64, f"the shape of {shown}") for _ in range(num_dims)]
    if min(dims) == 0 or math.prod(dims) >= 1 << 63:
        cursor.fail(f"tensor {shown} has the dimensions {dims}, expected 1 to 2^63 - 1 elements")
    type_id = cursor.number(_U32, f"the type of {shown}")
    offset = cursor.number(_U64, f"the offset of {shown}")
    try:
        qtype = QuantType(type_id)
    except ValueError:
        raise UnsupportedError(
            f"{printable(cursor.path, 4096)}: tensor {shown} has type id {type_id}, which pyllm does not know; "
            f"it reads {', '.join(decodable_types())}"
        ) from None
    block_size = FORMATS[qtype].block_size
    if dims[0] % block_size:
        cursor.fail(f"tensor {shown} has rows of {dims[0]}, expected a multiple of {block_size} for {qtype.name}")
    return qtype, tuple(reversed(dims)), offset


def _check_overlap(cursor: _Cursor, tensors: dict[str, TensorInfo]) -> None:
    in_order = sorted(tensors.values(), key=lambda info: info.offset)
    for info, following in itertools.pairwise(in_order):
        if info.offset + info.nbytes > following.offset:
            cursor.fail(f"tensors {printable(info.name)} and {printable(following.name)} overlap")
