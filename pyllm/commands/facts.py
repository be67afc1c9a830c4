"""What a model file says about its model, and whether pyllm can run it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyllm.device.host import HostDevice
from pyllm.errors import PyllmError
from pyllm.gguf_file import GGUFModel
from pyllm.models import check_model
from pyllm.tokenizer import Tokenizer


@dataclass
class TypeUse:
    """How much of a file one block type takes."""

    tensors: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """The facts; None where the file says nothing. Values from the metadata are what `plain` makes of them.

    Attributes:
        bytes: size of the file; of a split model, that of its first part.
        types: by name, the one with most bytes first.
        reason: why pyllm cannot run the model; None when it can.
    """

    path: str
    bytes: int
    parts: int
    gguf_version: int | None
    architecture: Any
    name: Any
    parameters: int
    types: dict[str, TypeUse]
    context_length: Any
    layers: Any
    hidden_size: Any
    heads: Any
    kv_heads: Any
    vocabulary: int | None
    tokenizer: Any
    pre_tokenizer: Any
    chat_template: bool
    runs: bool
    reason: str | None


def read_facts(gguf: GGUFModel) -> Facts:
    """Collect the facts. No key needs to be there."""
    values = gguf.metadata
    prefix = values.get("general.architecture")
    tokens, parts = values.get("tokenizer.ggml.tokens"), values.get("split.count")
    reason = why_not(gguf)
    return Facts(
        path=str(gguf.path),
        bytes=os.path.getsize(gguf.path),
        parts=parts if isinstance(parts, int) and parts > 1 else 1,
        gguf_version=getattr(gguf, "version", None),
        architecture=plain(prefix),
        name=plain(values.get("general.name")),
        parameters=sum(math.prod(info.shape) for info in gguf.tensors.values()),
        types=_types(gguf),
        context_length=plain(values.get(f"{prefix}.context_length")),
        layers=plain(values.get(f"{prefix}.block_count")),
        hidden_size=plain(values.get(f"{prefix}.embedding_length")),
        heads=plain(values.get(f"{prefix}.attention.head_count")),
        kv_heads=plain(values.get(f"{prefix}.attention.head_count_kv")),
        vocabulary=len(tokens) if isinstance(tokens, list) else None,
        tokenizer=plain(values.get("tokenizer.ggml.model")),
        pre_tokenizer=plain(values.get("tokenizer.ggml.pre")),
        chat_template="tokenizer.chat_template" in values,
        runs=reason is None,
        reason=reason,
    )


def _types(gguf: GGUFModel) -> dict[str, TypeUse]:
    uses: dict[str, TypeUse] = {}
    for info in gguf.tensors.values():
        use = uses.setdefault(info.qtype.name, TypeUse())
        use.tensors += 1
        use.bytes += info.nbytes
    return dict(sorted(uses.items(), key=lambda item: -item[1].bytes))


def plain(value: Any, shown: int = 4) -> Any:
    """A metadata value as JSON has it: an array becomes its length and first items, NaN and infinities become texts."""
    if isinstance(value, (list, np.ndarray)):
        first = value[:shown].tolist() if isinstance(value, np.ndarray) else value[:shown]
        return {"length": len(value), "first": [plain(item, shown) for item in first]}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def why_not(gguf: GGUFModel) -> str | None:
    """Why pyllm cannot run the model; None when it can. Makes the checks that loading makes, and reads no weights."""
    device = HostDevice()
    try:
        Tokenizer.from_metadata(gguf.metadata, str(gguf.path))
        check_model(gguf, device)
    except PyllmError as error:
        return str(error).removeprefix(f"{gguf.path}: ")
    finally:
        device.close()
    return None
