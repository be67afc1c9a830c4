"""The shapes of real models: sizes, metadata keys and tensors.

A shape says which tensors a file has and which keys describe them; it draws nothing. Here are models of equal blocks;
`hybrid` has those whose layers differ, and `real_shapes` lists all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self


@dataclass(frozen=True)
class SynthTensor:
    """One tensor of a file.

    Attributes:
        name: as in the file.
        shape: rows first, row elements last; a vector has one axis.
        keeps_f32: stored as F32 whatever type was asked for, as quantisers leave it (norms, routers).
        mean: of the values.
        std: of the values; None: 1 / sqrt(row elements), which keeps the size of what is multiplied with the tensor.
    """

    name: str
    shape: tuple[int, ...]
    keeps_f32: bool = False
    mean: float = 0.0
    std: float | None = None

    @property
    def num_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class Shape(Protocol):
    """What the writer needs of a model."""

    @property
    def architecture(self) -> str: ...

    @property
    def title(self) -> str:
        """general.name."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def pre_tokenizer(self) -> str:
        """tokenizer.ggml.pre."""

    def keys(self) -> Mapping[str, int | float | list[int]]:
        """Metadata keys without the architecture's prefix; whole numbers are uint32, others float32, lists int32."""

    def tensors(self) -> Iterator[SynthTensor]:
        """All tensors, in the order of the file."""

    def with_layers(self, num_layers: int) -> Shape:
        """The same with so many layers."""


@dataclass(frozen=True)
class DecoderShape(ABC):
    """What all decoder-only transformers have.

    Attributes:
        title: general.name.
        intermediate_size: of the feed-forward block, or of one expert.
        head_dim: elements per head of attention.
        tied: the output matrix is the token embedding.
        pre_tokenizer: tokenizer.ggml.pre.
        num_experts, num_experts_used: 0 for a dense feed-forward block.
    """

    architecture: str
    title: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    context_length: int
    rope_freq_base: float
    rms_norm_eps: float
    pre_tokenizer: str
    num_experts: int = 0
    num_experts_used: int = 0

    def keys(self) -> dict[str, int | float | list[int]]:
        found: dict[str, int | float | list[int]] = {
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "block_count": self.num_layers,
            "feed_forward_length": self.intermediate_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.rms_norm_eps,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self.rope_freq_base,
            "vocab_size": self.vocab_size,
        }
        if self.num_experts:
            found["expert_count"] = self.num_experts
            found["expert_used_count"] = self.num_experts_used
            found["expert_feed_forward_length"] = self.intermediate_size
        return found

    def tensors(self) -> Iterator[SynthTensor]:
        yield SynthTensor("token_embd.weight", (self.vocab_size, self.hidden_size))
        for layer in range(self.num_layers):
            for tensor in self.block(layer):
                yield replace(tensor, name=f"blk.{layer}.{tensor.name}")
        yield norm_tensor("output_norm.weight", self.hidden_size)
        if not self.tied:
            yield SynthTensor("output.weight", (self.vocab_size, self.hidden_size))

    def with_layers(self, num_layers: int) -> Self:
        return replace(self, num_layers=num_layers)

    @abstractmethod
    def block(self, layer: int) -> Iterator[SynthTensor]:
        """The tensors of one layer, without its prefix."""

    def attention_outputs(self, q_rows: int) -> Iterator[SynthTensor]:
        """The four projections of attention; q has so many rows."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield SynthTensor("attn_q.weight", (q_rows, self.hidden_size))
        yield SynthTensor("attn_k.weight", (kv_size, self.hidden_size))
        yield SynthTensor("attn_v.weight", (kv_size, self.hidden_size))
        yield SynthTensor("attn_output.weight", (self.hidden_size, q_size))

    def head_norms(self) -> Iterator[SynthTensor]:
        """Norms of queries and keys, one for all heads."""
        yield norm_tensor("attn_q_norm.weight", self.head_dim)
        yield norm_tensor("attn_k_norm.weight", self.head_dim)

    def feed_forward(self) -> Iterator[SynthTensor]:
        """The feed-forward block, or the routed experts."""
        if self.num_experts:
            yield from expert_tensors(self.num_experts, self.hidden_size, self.intermediate_size)
        else:
            yield from feed_forward_tensors("", self.hidden_size, self.intermediate_size)


@dataclass(frozen=True)
class DenseShape(DecoderShape):
    """A transformer of equal blocks: llama, qwen3, and qwen3moe where `num_experts` is not 0.

    Attributes:
        qk_norm: queries and keys are normalised per head.
    """

    qk_norm: bool = False

    def block(self, layer: int) -> Iterator[SynthTensor]:
        yield norm_tensor("attn_norm.weight", self.hidden_size)
        yield from self.attention_outputs(self.num_heads * self.head_dim)
        if self.qk_norm:
            yield from self.head_norms()
        yield norm_tensor("ffn_norm.weight", self.hidden_size)
        yield from self.feed_forward()


def feed_forward_tensors(suffix: str, outer: int, inner: int) -> Iterator[SynthTensor]:
    """A dense feed-forward block."""
    yield SynthTensor(f"ffn_gate{suffix}.weight", (inner, outer))
    yield SynthTensor(f"ffn_up{suffix}.weight", (inner, outer))
    yield SynthTensor(f"ffn_down{suffix}.weight", (outer, inner))


def expert_tensors(count: int, outer: int, inner: int) -> Iterator[SynthTensor]:
    """A router and the experts that it chooses from."""
    yield SynthTensor("ffn_gate_inp.weight", (count, outer), keeps_f32=True)
    yield SynthTensor("ffn_gate_exps.weight", (count, inner, outer))
    yield SynthTensor("ffn_up_exps.weight", (count, inner, outer))
    yield SynthTensor("ffn_down_exps.weight", (count, outer, inner))


def norm_tensor(name: str, size: int) -> SynthTensor:
    """The weight of a norm: values near 1."""
    return SynthTensor(name, (size,), keeps_f32=True, mean=1.0, std=0.1)


DENSE_SHAPES = {
    "qwen3-8b": DenseShape(
        architecture="qwen3",
        title="Synthetic Qwen3 8B",
        num_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tied=False,
        qk_norm=True,
        context_length=40_960,
        rope_freq_base=1e6,
        rms_norm_eps=1e-6,
        pre_tokenizer="qwen2",
    ),
    "qwen3-0.6b": DenseShape(
        architecture="qwen3",
        title="Synthetic Qwen3 0.6B",
        num_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tied=True,
        qk_norm=True,
        context_length=40_960,
        rope_freq_base=1e6,
        rms_norm_eps=1e-6,
        pre_tokenizer="qwen2",
    ),
    "qwen3-30b-a3b": DenseShape(
        architecture="qwen3moe",
        title="Synthetic Qwen3 30B A3B",
        num_layers=48,
        hidden_size=2048,
        intermediate_size=768,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151_936,
        tied=False,
        qk_norm=True,
        context_length=40_960,
        rope_freq_base=1e6,
        rms_norm_eps=1e-6,
        pre_tokenizer="qwen2",
        num_experts=128,
        num_experts_used=8,
    ),
    "smollm2": DenseShape(
        architecture="llama",
        title="Synthetic SmolLM2 135M",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49_152,
        tied=True,
        qk_norm=False,
        context_length=8192,
        rope_freq_base=1e5,
        rms_norm_eps=1e-5,
        pre_tokenizer="smollm",
    ),
}
