"""In which form K and V rows are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyllm.errors import UsageError


@dataclass(frozen=True)
class KVType:
    """A row type of the KV cache.

    Attributes:
        name: as in `kv_type=` and `--kv-type`.
        code: KV_TYPE in kernel sources.
        storage: NumPy dtype of the stored elements; bfloat16 is kept as uint16, since NumPy has no such type.
        encode: float32 array to storage; rounds to nearest, ties to even.
        decode: storage to float32, exact.
    """

    name: str
    code: int
    storage: type
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]


def _to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def _to_f16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # beyond 65504 a value becomes infinite, as it does on a GPU
        return x.astype(np.float16)


KV_TYPES = {
    kv_type.name: kv_type
    for kv_type in (
        KVType("f32", 0, np.float32, lambda x: x, lambda x: x),
        KVType("f16", 1, np.float16, _to_f16, lambda x: x.astype(np.float32)),
        KVType("bf16", 2, np.uint16, _to_bf16, _from_bf16),
    )
}


def kv_type_by_name(name: str) -> KVType:
    """Look a type up.

    Raises:
        UsageError: unknown name.
    """
    if name not in KV_TYPES:
        raise UsageError(f"kv_type {name!r} is unknown; choose one of {', '.join(KV_TYPES)}")
    return KV_TYPES[name]
