"""Shapes of models whose layers are mostly recurrent (Gated DeltaNet): qwen35, qwen35moe, qwen3next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyllm.synth.shapes import DecoderShape, SynthTensor, feed_forward_tensors, norm_tensor

GROUPED = "qwen3next"  # value heads in the order of their key heads, rates and decays in one matrix, no rope sections
CONV_KERNEL = 4
ROPE_SECTIONS = [11, 11, 10, 0]  # of the pairs that are rotated, for time, height, width; all the same for text


@dataclass(frozen=True)
class HybridShape(DecoderShape):
    """A decoder whose layer i is attention where (i + 1) % interval is 0, and recurrent otherwise.

    Attributes:
        num_state_heads, num_value_heads: heads of keys and of values in recurrent layers.
        state_size: elements of each of them.
        rotated: elements of a head of attention that positions rotate.
    """

    num_state_heads: int = 0
    num_value_heads: int = 0
    state_size: int = 0
    interval: int = 4
    rotated: int = 64

    @property
    def inner_size(self) -> int:
        """Elements of all values of a recurrent layer."""
        return self.num_value_heads * self.state_size

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values of a recurrent layer, which a short convolution goes over."""
        return 2 * self.num_state_heads * self.state_size + self.inner_size

    def keys(self) -> dict[str, int | float | list[int]]:
        found = super().keys() | {
            "rope.dimension_count": self.rotated,
            "full_attention_interval": self.interval,
            "ssm.conv_kernel": CONV_KERNEL,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.num_state_heads,
            "ssm.time_step_rank": self.num_value_heads,
            "ssm.inner_size": self.inner_size,
        }
        if self.architecture != GROUPED:
            found["rope.dimension_sections"] = ROPE_SECTIONS
        if self.num_experts:
            found["expert_shared_feed_forward_length"] = self.intermediate_size
        return found

    def block(self, layer: int) -> Iterator[SynthTensor]:
        yield norm_tensor("attn_norm.weight", self.hidden_size)
        if (layer + 1) % self.interval == 0:
            yield from self.attention_outputs(
                2 * self.num_heads * self.head_dim
            )  # queries come with gates of their size
            yield from self.head_norms()
        else:
            yield from self._recurrent()
        yield norm_tensor("post_attention_norm.weight", self.hidden_size)
        yield from self.feed_forward()
        if self.num_experts:
            yield SynthTensor("ffn_gate_inp_shexp.weight", (self.hidden_size,), keeps_f32=True)
            yield from feed_forward_tensors("_shexp", self.hidden_size, self.intermediate_size)

    def _recurrent(self) -> Iterator[SynthTensor]:
        """The state fades by exp(a * softplus(alpha + bias)) per token: by about a twentieth here."""
        heads, hidden = self.num_value_heads, self.hidden_size
        yield SynthTensor("attn_qkv.weight", (self.conv_channels, hidden))
        yield SynthTensor("attn_gate.weight", (self.inner_size, hidden))
        yield SynthTensor("ssm_conv1d.weight", (self.conv_channels, CONV_KERNEL), keeps_f32=True)
        yield SynthTensor("ssm_dt.bias", (heads,), keeps_f32=True, mean=-3.0, std=0.5)
        yield SynthTensor("ssm_a", (heads,), keeps_f32=True, mean=-1.0, std=0.1)
        if self.architecture == GROUPED:
            yield SynthTensor("ssm_ba.weight", (2 * heads, hidden))
        else:
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
    "qwen3.6-35b-a3b": HybridShape(
        architecture="qwen35moe",
        title="Synthetic Qwen3.6 35B A3B",
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
    "qwen3-coder-next": HybridShape(
        architecture=GROUPED,
        title="Synthetic Qwen3 Coder Next",
        num_layers=48,
        hidden_size=2048,
        intermediate_size=512,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_state_heads=16,
        num_value_heads=32,
        state_size=128,
        vocab_size=151_936,
        tied=False,
        context_length=262_144,
        rope_freq_base=5e6,
        rms_norm_eps=1e-6,
        pre_tokenizer="qwen2",
        num_experts=512,
        num_experts_used=10,
    ),
}
