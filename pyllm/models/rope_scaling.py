"""Frequencies of the rotary embedding: base, scaling and factors of a file turned into one array.

Source: Su et al. 2021, arXiv:2104.09864; YaRN: Peng et al. 2023, arXiv:2309.00071; the key names and defaults are
GGUF's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pyllm.errors import ModelFileError, UnsupportedError
from pyllm.gguf_file import GGUFModel
from pyllm.gguf_metadata import described
from pyllm.models.config import TransformerConfig
from pyllm.quants import dequantize

# Rotations within the original context between which YaRN goes over from plain to interpolated frequencies.
YARN_BETA_FAST = 32.0
YARN_BETA_SLOW = 1.0
FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class RopeFrequencies:
    """Attributes:
    inv_freq: [n_rot / 2] float32, radians per position.
    magnitude: factor on cosine and sine.
    """

    inv_freq: np.ndarray
    magnitude: float

    def turn(self, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine, [1, n_rot / 2] float32, by which what was rotated once turns to so many positions on.
        Without the magnitude, which it has already."""
        angle = num_positions * self.inv_freq.astype(np.float64)[None]
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@dataclass(frozen=True)
class RopeScaling:
    """What a file says about scaling.

    Attributes:
        kind: "none", "linear" or "yarn".
        factor: the context is stretched by this.
        original_context: positions that the model was trained for before it was stretched.
        attention_factor: extra factor of YaRN's magnitude.
    """

    kind: str
    factor: float
    original_context: int
    attention_factor: float

    @classmethod
    def from_gguf(cls, gguf: GGUFModel, context_length: int) -> RopeScaling:
        """Read and check the rope.scaling keys.

        Raises:
            ModelFileError: a value is impossible.
            UnsupportedError: a kind of scaling that pyllm does not know.
        """
        kind = gguf.get_str(gguf.arch_key("rope.scaling.type"), "linear")
        if kind not in ("none", "linear", "yarn"):
            raise UnsupportedError(
                f"{gguf.path}: {gguf.arch_key('rope.scaling.type')} is {described(kind)}; "
                "pyllm knows none, linear and yarn"
            )
        factor = gguf.get_float(gguf.arch_key("rope.scaling.factor"), 0.0, minimum=0.0, maximum=1e6)
        if not factor:  # an older name of the same key
            factor = gguf.get_float(gguf.arch_key("rope.scale_linear"), 0.0, minimum=0.0, maximum=1e6)
        return cls(
            kind=kind,
            factor=factor or 1.0,
            original_context=gguf.get_int(
                gguf.arch_key("rope.scaling.original_context_length"), context_length, minimum=1
            ),
            attention_factor=gguf.get_float(gguf.arch_key("rope.scaling.attn_factor"), 1.0, minimum=0.0, maximum=1e6),
        )


def rope_frequencies(n_rot: int, base: float, scaling: RopeScaling, factors: np.ndarray | None) -> RopeFrequencies:
    """inv_freq[i] = base^(-2i / n_rot) / factors[i], scaled.

    Args:
        n_rot: rotated elements per head, even.
        base: the rope's theta.
        factors: [n_rot / 2] or None, the file's own divisors (Llama 3).
    """
    inv_freq = base ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)
    if factors is not None:
        inv_freq /= factors
    magnitude = 1.0
    if scaling.kind == "linear":
        inv_freq /= scaling.factor
    elif scaling.kind == "yarn":
        plain = _yarn_plain_share(n_rot, base, scaling.original_context)
        inv_freq = inv_freq / scaling.factor * (1 - plain) + inv_freq * plain
        magnitude = scaling.attention_factor * (1 + 0.1 * math.log(scaling.factor))
    with np.errstate(over="ignore"):  # `read_rope` refuses what does not fit
        return RopeFrequencies(inv_freq.astype(np.float32), magnitude)


def _yarn_plain_share(n_rot: int, base: float, original_context: int) -> np.ndarray:
    """[n_rot / 2], 1 where a pair turns so fast that it keeps its frequency, 0 where it is interpolated."""

    def pair_with_turns(turns: float) -> float:
        return n_rot * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0, math.floor(pair_with_turns(YARN_BETA_FAST)))
    high = min(n_rot - 1, math.ceil(pair_with_turns(YARN_BETA_SLOW)))
    pair = np.arange(n_rot // 2, dtype=np.float64)
    return 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)


@dataclass(frozen=True)
class RopePlan:
    """Attributes:
    frequencies: the different sets that a model uses.
    of_layer: for each layer, which of them.
    """

    frequencies: tuple[RopeFrequencies, ...]
    of_layer: tuple[int, ...]

    @classmethod
    def same(cls, frequencies: RopeFrequencies, num_layers: int) -> RopePlan:
        """One set for all layers."""
        return cls((frequencies,), (0,) * num_layers)


def read_n_rot(gguf: GGUFModel, config: TransformerConfig) -> int:
    """Rotated elements per head.

    Raises:
        ModelFileError: odd, or more than a head has.
    """
    key = gguf.arch_key("rope.dimension_count")
    n_rot = gguf.get_int(key, config.key_length, minimum=2, maximum=config.key_length)
    if n_rot % 2:
        raise ModelFileError(f"{gguf.path}: {key} is {n_rot}, expected an even number; the file is damaged")
    return n_rot


def read_base(gguf: GGUFModel, suffix: str) -> float:
    """The theta of a rope key."""
    return gguf.get_float(gguf.arch_key(suffix), 10000.0, minimum=1.5, maximum=1e12)


def read_rope(gguf: GGUFModel, config: TransformerConfig) -> RopeFrequencies:
    """What a file's rope keys and its rope_freqs tensor amount to.

    Raises:
        ModelFileError: a value is impossible.
        UnsupportedError: a kind of scaling that pyllm does not know.
    """
    n_rot = read_n_rot(gguf, config)
    scaling = RopeScaling.from_gguf(gguf, config.context_length)
    frequencies = rope_frequencies(n_rot, read_base(gguf, "rope.freq_base"), scaling, read_factors(gguf, n_rot))
    if not np.isfinite(frequencies.inv_freq).all():
        raise ModelFileError(
            f"{gguf.path}: {gguf.arch_key('rope.scaling.factor')} and {FACTORS} give rope frequencies that float32 "
            "cannot hold; the file is damaged"
        )
    return frequencies


def read_factors(gguf: GGUFModel, n_rot: int) -> np.ndarray | None:
    """The rope_freqs tensor ([n_rot / 2] float32), or None when the file has none.

    Raises:
        ModelFileError: wrong shape, or a factor that is not a positive number.
    """
    info = gguf.tensors.get(FACTORS)
    if info is None:
        return None
    if info.shape != (n_rot // 2,):
        raise ModelFileError(f"{gguf.path}: {FACTORS} has shape {info.shape}, expected ({n_rot // 2},)")
    factors = dequantize(gguf.tensor_data(FACTORS), info.qtype)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(f"{gguf.path}: {FACTORS} holds values that are not positive numbers; the file is damaged")
    return factors
