"""Hyperparameters that all transformer architectures share, read from a file's metadata and checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyllm.errors import ModelFileError, UnsupportedError
from pyllm.gguf_file import GGUFModel
from pyllm.gguf_metadata import described
from pyllm.recurrent_state import RecurrentShape

# Far above any model; they keep a damaged file from asking for absurd amounts of memory or time.
MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
MAX_CONTEXT = 1 << 30


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder-only transformer; letters as in docs/architecture.md.

    Attributes:
        num_layers: blocks of the main pass; those behind them that predict further tokens are not among them.
        hidden_size: width of the residual stream.
        intermediate_size: width of the dense feed-forward block; 0 when the file does not say.
        num_heads, num_kv_heads: query heads, and key/value heads that they share.
        key_length, value_length: elements per head.
        rms_norm_eps: dimensionless.
        context_length: positions that the model was trained for.
        vocab_size: rows of the token embedding.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    key_length: int
    value_length: int
    rms_norm_eps: float
    context_length: int
    vocab_size: int

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have K/V rows."""
        return tuple(range(self.num_layers))

    @property
    def recurrent(self) -> RecurrentShape | None:
        """Sizes of the recurrent layers; None without any."""
        return None

    @property
    def q_size(self) -> int:
        """Elements of all queries of a token."""
        return self.num_heads * self.key_length

    @property
    def k_size(self) -> int:
        """Elements of a K row."""
        return self.num_kv_heads * self.key_length

    @property
    def v_size(self) -> int:
        """Elements of a V row."""
        return self.num_kv_heads * self.value_length

    @classmethod
    def from_gguf(cls, gguf: GGUFModel) -> TransformerConfig:
        """Read and check the shared keys.

        Raises:
            ModelFileError: a key is missing, has a wrong type or an impossible value.
            UnsupportedError: the layers differ in size.
        """

        def size(suffix: str, default: int | None = None) -> int:
            return _per_layer_size(gguf, gguf.arch_key(suffix), num_blocks, num_layers, default)

        num_blocks = gguf.get_int(gguf.arch_key("block_count"), minimum=1, maximum=MAX_LAYERS)
        num_layers = num_blocks - gguf.get_int(
            gguf.arch_key("nextn_predict_layers"), 0, minimum=0, maximum=num_blocks - 1
        )
        hidden_size = gguf.get_int(gguf.arch_key("embedding_length"), minimum=1, maximum=MAX_WIDTH)
        num_heads = size("attention.head_count")
        num_kv_heads = size("attention.head_count_kv", num_heads)
        if num_heads % num_kv_heads:
            raise ModelFileError(
                f"{gguf.path}: {gguf.arch_key('attention.head_count')} is {num_heads}, "
                f"not a multiple of the {num_kv_heads} key/value heads; the file is damaged"
            )
        head_dim = max(1, hidden_size // num_heads)
        return cls(
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=size("feed_forward_length", 0),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_length=size("attention.key_length", head_dim),
            value_length=size("attention.value_length", head_dim),
            rms_norm_eps=gguf.get_float(gguf.arch_key("attention.layer_norm_rms_epsilon"), minimum=0.0, maximum=1.0),
            context_length=gguf.get_int(gguf.arch_key("context_length"), minimum=1, maximum=MAX_CONTEXT),
            vocab_size=_vocab_size(gguf),
        )


def _per_layer_size(gguf: GGUFModel, key: str, num_blocks: int, num_layers: int, default: int | None) -> int:
    """A size that may be stored once or per block; those of the main pass must agree."""
    if default is not None and key not in gguf.metadata:
        return default
    values = gguf.get_ints(key, num_blocks, minimum=1, maximum=MAX_WIDTH)[:num_layers]
    if len(set(values)) > 1:
        raise UnsupportedError(f"{gguf.path}: {key} differs between layers; pyllm needs one value for all of them")
    return values[0]


def _vocab_size(gguf: GGUFModel) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        found = "missing" if embedding is None else f"of shape {embedding.shape}"
        raise ModelFileError(f"{gguf.path}: token_embd.weight is {found}; expected [vocabulary, hidden size]")
    return embedding.shape[0]


def refuse_keys(gguf: GGUFModel, keys: dict[str, str]) -> None:
    """Refuse a file whose integer key has a value other than 0 that pyllm would have to ignore.

    Args:
        keys: key without the architecture's prefix -> what it stands for.

    Raises:
        UnsupportedError: naming file, key and value.
        ModelFileError: the value is not an integer or an array of integers.
    """
    for suffix, meaning in keys.items():
        key = gguf.arch_key(suffix)
        if _is_set(gguf, key):
            raise UnsupportedError(
                f"{gguf.path}: {key} is {described(gguf.metadata[key])}; pyllm does not run {meaning} yet"
            )


def _is_set(gguf: GGUFModel, key: str) -> bool:
    """Whether an integer, stored once or per layer, is other than 0."""
    if isinstance(gguf.metadata.get(key), np.ndarray):
        return bool(gguf.get_array(key, np.int64).any())
    return bool(gguf.get_int(key, 0))
