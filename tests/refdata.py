"""Reference models and results: tests/data/refdata, laid out as README.md there describes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent / "data" / "refdata"
PROMPTS = ("n5", "n70", "n300")


def model_path(file_name: str) -> Path:
    """A tiny model, "llama-a-f32" say."""
    return ROOT / "models" / f"{file_name}.gguf"


@cache
def reference(name: str) -> dict[str, np.ndarray]:
    """Reference results of a model, "llama-a" say."""
    with np.load(ROOT / "refs" / f"{name}.ref.npz") as archive:
        return dict(archive)


def quant_path(name: str) -> Path:
    """A quantised model, "llama-q-Q4_0" say."""
    return ROOT / "quant" / f"{name}.gguf"


@cache
def quant_reference(name: str) -> dict[str, np.ndarray]:
    """Reference results of a quantised model."""
    with np.load(ROOT / "quant" / f"{name}.ref.npz") as archive:
        return dict(archive)


def same_until_unclear(found: list[int], expected: np.ndarray, margins: np.ndarray, least_margin: float) -> bool:
    """Greedy tokens agree up to the first step whose two best logits lie closer together than least_margin."""
    unclear = np.flatnonzero(margins < least_margin)
    stop = int(unclear[0]) if unclear.size else len(expected)
    return found[:stop] == expected[:stop].tolist()
