"""What must agree between two engines for one to use rows that the other computed.

A fingerprint is a few texts by name: the model, its weights, its tokeniser, how rows are stored. The first that differs
is what a person is told. Where rows were computed is not among them: rows of one type are the same on all devices, up
to the rounding of sums.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from pyllm.gguf_file import GGUFModel
from pyllm.kv_types import KVType
from pyllm.models.config import TransformerConfig

LAYOUT = 1  # of rows in a page, and of recurrent states; raised when they change
_SAMPLE = 4096  # bytes at the start, middle and end of each tensor
_WORDS = {
    "architecture": "architecture",
    "name": "model",
    "types": "quantisation",
    "metadata": "settings (rope, sizes or others) of the model",
    "weights": "weights",
    "tokenizer": "tokeniser",
    "kv_type": "type of K/V rows",
    "page_size": "page size",
    "shapes": "shapes of rows and states",
    "layout": "layout of pages",
}
_SHOWN = ("architecture", "name", "types", "kv_type", "page_size", "layout")


def fingerprint(gguf: GGUFModel, config: TransformerConfig, kv_type: KVType, page_size: int) -> dict[str, str]:
    """The fingerprint of an engine. Reads a little of each tensor."""
    metadata = {key: gguf.metadata[key] for key in gguf.metadata}
    texts = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    about = ("general.name", "general.url", "general.description", "tokenizer.", "split.")
    settings = {key: value for key, value in metadata.items() if not key.startswith(about)}
    types = Counter(info.qtype.name for info in gguf.tensors.values())
    shapes = (config.num_kv_heads, config.key_length, config.value_length, config.attention_layers, config.recurrent)
    return {
        "architecture": gguf.architecture,
        "name": str(metadata.get("general.name", ""))[:200],
        "types": " ".join(f"{name}:{count}" for name, count in sorted(types.items())),
        "metadata": _digest(_parts(settings)),
        "weights": _digest(_samples(gguf)),
        "tokenizer": _digest(_parts(texts)),
        "kv_type": kv_type.name,
        "page_size": str(page_size),
        "shapes": repr(shapes),
        "layout": str(LAYOUT),
    }


def difference(found: Mapping[str, object], own: Mapping[str, str]) -> str | None:
    """What a person is told about rows of another engine; None when they can be used."""
    for key, word in _WORDS.items():
        if found.get(key) == own[key]:
            continue
        if key in _SHOWN:
            return f"it is of another {word}: {str(found.get(key))[:80]!r}, not {own[key][:80]!r}"
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


def _samples(gguf: GGUFModel) -> Iterable[bytes]:
    for name in sorted(gguf.tensors):
        info = gguf.tensors[name]
        data = gguf.tensor_data(name).reshape(-1).view(np.uint8)
        yield f"{name} {info.qtype.name} {info.shape}".encode()
        middle = len(data) // 2
        for start in (0, middle, max(0, len(data) - _SAMPLE)):
            yield data[start : start + _SAMPLE].tobytes()
