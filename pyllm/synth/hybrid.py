"""Shapes of models whose layers are mostly recurrent (Gated DeltaNet), every n-th attention: qwen35, qwen35moe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyllm.synth.shapes import SynthTensor, expert_tensors, feed_forward_tensors, norm_tensor

CONV_KERNEL = 4
ROPE_SECTIONS = [11, 11, 10, 0]  # of the pairs that are rotated, for time, height, width; all the same for text


@dataclass(frozen=True)
class HybridShape:
    """A decoder whose layer i is attention where (i + 1) % interval is 0, and recurrent otherwise.

    Attributes:
        head_dim: of attention; 64 of its elements are rotated.
        num_state_heads, num_value_heads: heads of keys and of values in recurrent layers.
        state_size: elements of each of them.
        intermediate_size: of the feed-forward block, or of one expert and the shared one.
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
    num_state_heads: int
    num_value_heads: int
    state_size: int
    vocab_size: int
    tied: bool
    context_length: int
    rope_freq_base: float
    rms_norm_eps: float
    pre_tokenizer: str
    interval: int = 4
    rotated: int = 64
    num_experts: int = 0
    num_experts_used: int = 0

    @property
    def inner_size(self) -> int:
        """Elements of all values of a recurrent layer."""
        return self.num_value_heads * self.state_size

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values of a recurrent layer, which a short convolution goes over."""
        return 2 * self.num_state_heads * self.state_size + self.inner_size

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
            "rope.dimension_count": self.rotated,
            "rope.dimension_sections": ROPE_SECTIONS,
            "rope.freq_base": self.rope_freq_base,
            "full_attention_interval": self.interval,
            "ssm.conv_kernel": CONV_KERNEL,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.num_state_heads,
            "ssm.time_step_rank": self.num_value_heads,
            "ssm.inner_size": self.inner_size,
            "vocab_size": self.vocab_size,
        }
        if self.num_experts:
            found["expert_count"] = self.num_experts
            found["expert_used_count"] = self.num_experts_used
            found["expert_feed_forward_length"] = self.intermediate_size
            found["expert_shared_feed_forward_length"] = self.intermediate_size
        return found

    def tensors(self) -> Iterator[SynthTensor]:
        yield SynthTensor("token_embd.weight", (self.vocab_size, self.hidden_size))
        for layer in range(self.num_layers):
            for tensor in self._block(attention=(layer + 1) % self.interval == 0):
                yield replace(tensor, name=f"blk.{layer}.{tensor.name}")
        yield norm_tensor("output_norm.weight", self.hidden_size)
        if not self.tied:
            yield SynthTensor("output.weight", (self.vocab_size, self.hidden_size))

    def _block(self, attention: bool) -> Iterator[SynthTensor]:
        yield norm_tensor("attn_norm.weight", self.hidden_size)
        yield from self._attention() if attention else self._recurrent()
        yield norm_tensor("post_attention_norm.weight", self.hidden_size)
        if not self.num_experts:
            yield from feed_forward_tensors("", self.hidden_size, self.intermediate_size)
            return
        yield from expert_tensors(self.num_experts, self.hidden_size, self.intermediate_size)
        yield SynthTensor("ffn_gate_inp_shexp.weight", (self.hidden_size,), keeps_f32=True)
        yield from feed_forward_tensors("_shexp", self.hidden_size, self.intermediate_size)

    def _attention(self) -> Iterator[SynthTensor]:
        """Queries come with gates of their size."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield SynthTensor("attn_q.weight", (2 * q_size, self.hidden_size))
        yield SynthTensor("attn_k.weight", (kv_size, self.hidden_size))
        yield SynthTensor("attn_v.weight", (kv_size, self.hidden_size))
        yield SynthTensor("attn_output.weight", (self.hidden_size, q_size))
        yield norm_tensor("attn_q_norm.weight", self.head_dim)
        yield norm_tensor("attn_k_norm.weight", self.head_dim)

    def _recurrent(self) -> Iterator[SynthTensor]:
        """The state fades by exp(a * softplus(alpha + bias)) per token: by about a twentieth here."""
        heads, hidden = self.num_value_heads, self.hidden_size
        yield SynthTensor("attn_qkv.weight", (self.conv_channels, hidden))
        yield SynthTensor("attn_gate.weight", (self.inner_size, hidden))
        yield SynthTensor("ssm_conv1d.weight", (self.conv_channels, CONV_KERNEL), keeps_f32=True)
        yield SynthTensor("ssm_dt.bias", (heads,), keeps_f32=True, mean=-3.0, std=0.5)
        yield SynthTensor("ssm_a", (heads,), keeps_f32=True, mean=-1.0, std=0.1)
        yield SynthTensor("ssm_beta.weight", (heads, hidden))
        yield SynthTensor("ssm_alpha.weight", (heads, hidden))
        yield norm_tensor("ssm_norm.weight", self.state_size)
        yield SynthTensor("ssm_out.weight", (hidden, self.inner_size))


HYBRID_SHAPES = {
    "qwen3.5-0.8b": HybridShape(
        architecture="qwen35",
        title="Synthetic Qwen3.5 0.8B",
        num_layers=24,
        hidden_size=1024,
        intermediate_size=3584,
        num_heads=8,
        num_kv_heads=2,
        head_dim=256,
        num_state_heads=16,
        num_value_heads=16,
        state_size=128,
        vocab_size=248_320,
        tied=True,
        context_length=262_144,
        rope_freq_base=1e7,
        rms_norm_eps=1e-6,
        pre_tokenizer="qwen35",
    ),
    "qwen3.5-35b-a3b": HybridShape(
        architecture="qwen35moe",
        title="Synthetic Qwen3.5 35B A3B",
        num_layers=40,
        hidden_size=2048,
        intermediate_size=512,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_state_heads=16,
        num_value_heads=32,
        state_size=128,
        vocab_size=248_320,
        tied=False,
        context_length=262_144,
        rope_freq_base=1e7,
        rms_norm_eps=1e-6,
        pre_tokenizer="qwen35",
        num_experts=256,
        num_experts_used=8,
    ),
}
