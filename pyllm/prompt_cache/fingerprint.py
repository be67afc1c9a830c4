"""What must agree between two engines for one to use rows that the other computed.

A fingerprint is a few texts by name: the model, its weights, its tokeniser, how rows are stored. The first that differs
is what a person is told. Where rows were computed is not among them: rows of one type are the same on all devices, up
to the rounding of sums. Engines that are batch-invariant want every bit: they take rows of their own kind only.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np

from pyllm.errors import SessionError
from pyllm.gguf_file import GGUFModel
from pyllm.gguf_split import open_model
from pyllm.kv_types import KVType
from pyllm.models.config import TransformerConfig

LAYOUT = 1  # of rows in a page, and of recurrent states; raised when they change
_PIECE = 16 << 20  # bytes of a tensor that are read at a time
_WORDS = {
    "architecture": "architecture",
    "name": "model",
    "types": "quantisation",
    "rope": "rope settings",
    "metadata": "settings (sizes or others)",
    "weights": "weights",
    "tokenizer": "tokeniser's settings",
    "kv_type": "type of K/V rows",
    "page_size": "page size",
    "shapes": "shapes of rows and states",
    "layout": "layout of pages",
    "arithmetic": "order of sums",  # of batch-invariant engines
}
_SHOWN = ("architecture", "name", "types", "kv_type", "page_size", "layout", "arithmetic")


class Identity(Mapping[str, str]):
    """A fingerprint whose `weights` are read when they are first asked for, some gigabytes a second.

    Raises:
        SessionError: on that occasion, when the model file is not the one that was loaded any more.
    """

    def __init__(self, texts: Mapping[str, str], path: str | Path) -> None:
        self._texts = dict(texts)
        self._path = Path(path)
        self._state = _state(self._path)
        self._lock = Lock()

    def __getitem__(self, key: str) -> str:
        if key == "weights":
            with self._lock:
                if not self._texts[key]:
                    self._texts[key] = self._weights()
        return self._texts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def _weights(self) -> str:
        with open_model(self._path) as gguf:
            found = _digest(_checksums(gguf))
        if _state(self._path) != self._state:
            raise SessionError(f"{self._path}: the model file has changed since it was loaded; start again")
        return found


def _state(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise SessionError(f"{path}: the model file cannot be looked at: {error.strerror}") from error
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def fingerprint(
    gguf: GGUFModel, config: TransformerConfig, kv_type: KVType, page_size: int, arithmetic: str = ""
) -> Identity:
    """The fingerprint of an engine.

    Args:
        arithmetic: what every bit of its rows depends on, where that counts.
    """
    metadata = {key: gguf.metadata[key] for key in gguf.metadata}
    texts = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    about = ("general.name", "general.url", "general.description", "tokenizer.", "split.")
    settings = {key: value for key, value in metadata.items() if not key.startswith(about)}
    rope = {key: settings.pop(key) for key in list(settings) if ".rope." in key}
    types = Counter(info.qtype.name for info in gguf.tensors.values())
    shapes = (config.num_kv_heads, config.key_length, config.value_length, config.attention_layers, config.recurrent)
    texts_by_name = {
        "architecture": gguf.architecture,
        "name": str(metadata.get("general.name", ""))[:200],
        "types": " ".join(f"{name}:{count}" for name, count in sorted(types.items())),
        "rope": _digest(_parts(rope)),
        "metadata": _digest(_parts(settings)),
        "weights": "",
        "tokenizer": _digest(_parts(texts)),
        "kv_type": kv_type.name,
        "page_size": str(page_size),
        "shapes": repr(shapes),
        "layout": str(LAYOUT),
        "arithmetic": arithmetic,
    }
    return Identity(texts_by_name, gguf.path)


def difference(found: Mapping[str, object], own: Mapping[str, str]) -> str | None:
    """What a person is told about rows of another engine; None when they can be used."""
    for key, word in _WORDS.items():
        if found.get(key, "") == own[key] or (key == "arithmetic" and not own[key]):
            continue
        if key in _SHOWN:
            return f"it is of another {word}: {str(found.get(key, ''))[:80]!r}, not {own[key][:80]!r}"
        return f"it is of another model: the {word} differ"
    return None


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()


def _parts(values: Mapping[str, object]) -> Iterable[bytes]:
    for key in sorted(values):
        value = values[key]
        content = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
        yield key.encode()
        yield content


def _checksums(gguf: GGUFModel) -> Iterable[bytes]:
    """Of each tensor its name, form, and the CRC-32 of all its bytes: weights that differ anywhere give other rows."""

    def checksum(name: str) -> int:
        data = gguf.tensor_data(name).reshape(-1).view(np.uint8)
        total = 0
        for start in range(0, len(data), _PIECE):
            total = zlib.crc32(data[start : start + _PIECE].data, total)
        return total

    names = sorted(gguf.tensors)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, total in zip(names, pool.map(checksum, names), strict=True):
            info = gguf.tensors[name]
            yield f"{name} {info.qtype.name} {info.shape} {total}".encode()
