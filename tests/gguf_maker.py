"""Writes GGUF files byte by byte, sound or deliberately wrong. Shares no code with the reader under test."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)

FORMS = {
    UINT8: "<B",
    INT8: "<b",
    UINT16: "<H",
    INT16: "<h",
    UINT32: "<I",
    INT32: "<i",
    FLOAT32: "<f",
    BOOL: "<B",
    UINT64: "<Q",
    INT64: "<q",
    FLOAT64: "<d",
}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(value_type: int, value: object) -> bytes:
    return string(value) if value_type == STRING else struct.pack(FORMS[value_type], value)


def pair(key: str | bytes, value_type: int, value: object) -> bytes:
    """A key with one value."""
    return string(key) + struct.pack("<I", value_type) + scalar(value_type, value)


def array_pair(key: str, value_type: int, values: list, count: int | None = None) -> bytes:
    """A key with an array; `count` may lie about its length."""
    body = b"".join(scalar(value_type, value) for value in values)
    length = len(values) if count is None else count
    return string(key) + struct.pack("<IIQ", ARRAY, value_type, length) + body


def tensor_row(name: str | bytes, dims: list[int], type_id: int, offset: int) -> bytes:
    """A row of the tensor table; `dims` in file order, fastest axis first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def gguf(
    pairs: list[bytes],
    rows: list[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    num_pairs: int | None = None,
    num_rows: int | None = None,
) -> bytes:
    """A whole file; the counts may lie."""
    header = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(rows) if num_rows is None else num_rows,
        len(pairs) if num_pairs is None else num_pairs,
    )
    header += b"".join(pairs) + b"".join(rows)
    return header + b"\0" * (-len(header) % alignment) + data


def small_model(extra: list[bytes] = (), tensors: dict[str, np.ndarray] | None = None) -> bytes:
    """A sound file with a value of every type, and F32 tensors, the last of which ends with the file."""
    pairs = [
        pair("general.architecture", STRING, "llama"),
        pair("llama.block_count", UINT32, 2),
        pair("llama.rope.freq_base", FLOAT32, 10000.0),
        pair("test.uint8", UINT8, 255),
        pair("test.int8", INT8, -128),
        pair("test.uint16", UINT16, 65535),
        pair("test.int16", INT16, -32768),
        pair("test.int32", INT32, -(2**31)),
        pair("test.bool", BOOL, 1),
        pair("test.uint64", UINT64, 2**64 - 1),
        pair("test.int64", INT64, -(2**63)),
        pair("test.float64", FLOAT64, 0.1),
        array_pair("test.ints", INT32, [1, -2, 3]),
        array_pair("test.bools", BOOL, [1, 0]),
        array_pair("test.floats", FLOAT32, [0.5, -0.5]),
        array_pair("tokenizer.ggml.tokens", STRING, ["a", "b\n", "", b"\xe2\x96", "\u2581the"]),
        *extra,
    ]
    if tensors is None:
        tensors = {
            "token_embd.weight": np.arange(24, dtype=np.float32).reshape(3, 8),
            "output_norm.weight": np.ones(8, np.float32),
        }
    rows, data = [], b""
    for name, values in tensors.items():
        data += b"\0" * (-len(data) % 32)
        rows.append(tensor_row(name, list(reversed(values.shape)), 0, len(data)))
        data += values.astype("<f4").tobytes()
    return gguf(pairs, rows, data)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
