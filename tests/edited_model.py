"""Copies of a tiny model with some of its metadata or tensors changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.gguf_file import GGUFFile
from pyllm.quants import QuantType
from tests import gguf_maker as maker

ALIGNMENT = 32
ARRAY_TYPES = {"i": maker.INT32, "u": maker.UINT32, "f": maker.FLOAT32, "b": maker.BOOL}


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
    with GGUFFile(source) as gguf:
        values = dict(gguf.metadata) | dict(metadata or {})
        pairs = [_pair(key, value) for key, value in values.items() if value is not None]
        stored: dict[str, tuple[QuantType, tuple[int, ...], bytes] | None] = {
            name: (info.qtype, info.shape, gguf.tensor_data(name).tobytes()) for name, info in gguf.tensors.items()
        }
    for name, change in (tensors or {}).items():
        stored[name] = None if change is None else (change[0], change[1].shape, change[1].tobytes())
    rows, data = [], b""
    for name, tensor in stored.items():
        if tensor is not None:
            qtype, shape, content = tensor
            rows.append(maker.tensor_row(name, list(reversed(shape)), int(qtype), len(data)))
            data += content + b"\0" * (-len(content) % ALIGNMENT)
    target.write_bytes(maker.gguf(pairs, rows, data))
    return target


def _pair(key: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return maker.pair(key, maker.BOOL, value)
    if isinstance(value, int):
        return maker.pair(key, maker.UINT32 if value >= 0 else maker.INT32, value)
    if isinstance(value, float):
        return maker.pair(key, maker.FLOAT32, value)
    if isinstance(value, str):
        return maker.pair(key, maker.STRING, value)
    if isinstance(value, np.ndarray):
        return maker.array_pair(key, ARRAY_TYPES[value.dtype.kind], value.tolist())
    return maker.array_pair(key, maker.STRING, value)
