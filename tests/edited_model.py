"""Copies of a tiny model with some of its metadata or tensors changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.gguf_file import GGUFFile
from pyllm.quants import QuantType
from tests import gguf_maker as maker

ALIGNMENT = 32
ARRAY_TYPES = {"i": maker.INT32, "u": maker.UINT32, "f": maker.FLOAT32, "b": maker.BOOL}
WIDE_ARRAY_TYPES = {"i": maker.INT64, "u": maker.UINT64, "f": maker.FLOAT64}


@dataclass
class StoredTensor:
    """A tensor as it stands in a file.

    Attributes:
        type_id: of its block format; need not be a member of QuantType.
        shape: slowest axis first.
    """

    type_id: int
    shape: tuple[int, ...]
    content: bytes


@dataclass
class Parts:
    """A model file, taken apart."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, source: Path) -> Parts:
        with GGUFFile(source) as gguf:
            tensors = {
                name: StoredTensor(int(info.qtype), info.shape, gguf.tensor_data(name).tobytes())
                for name, info in gguf.tensors.items()
            }
            return cls(dict(gguf.metadata), tensors)

    def content(self) -> bytes:
        """The file that these parts make."""
        rows, data = [], bytearray()
        for name, tensor in self.tensors.items():
            rows.append(maker.tensor_row(name, list(reversed(tensor.shape)), tensor.type_id, len(data)))
            data += tensor.content + b"\0" * (-len(tensor.content) % ALIGNMENT)
        return maker.gguf([_pair(key, value) for key, value in self.metadata.items()], rows, bytes(data))


def write(
    source: Path,
    target: Path,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[QuantType, np.ndarray] | None] | None = None,
) -> Path:
    """Copy a model file.

    Args:
        metadata: keys to set; None as value leaves a key out.
        tensors: tensors to set, as type and stored rows (uint8 [..., row_bytes] or float32); None leaves one out.
    """
    parts = Parts.read(source)
    values = parts.metadata | dict(metadata or {})
    parts.metadata = {key: value for key, value in values.items() if value is not None}
    for name, change in (tensors or {}).items():
        if change is None:
            parts.tensors.pop(name, None)
        else:
            parts.tensors[name] = StoredTensor(int(change[0]), change[1].shape, change[1].tobytes())
    target.write_bytes(parts.content())
    return target


def _pair(key: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return maker.pair(key, maker.BOOL, value)
    if isinstance(value, int):
        return maker.pair(key, _int_type(value), value)
    if isinstance(value, float):
        return maker.pair(key, maker.FLOAT32, value)
    if isinstance(value, str | bytes):
        return maker.pair(key, maker.STRING, value)
    if isinstance(value, np.ndarray):
        types = WIDE_ARRAY_TYPES if value.dtype.itemsize == 8 else ARRAY_TYPES
        return maker.array_pair(key, types[value.dtype.kind], value.tolist())
    return maker.array_pair(key, maker.STRING, value)


def _int_type(value: int) -> int:
    if value >= 0:
        return maker.UINT32 if value < 1 << 32 else maker.UINT64
    return maker.INT32 if value >= -(1 << 31) else maker.INT64
