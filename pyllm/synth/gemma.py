"""Shapes of Gemma 3: norms on both sides of attention and feed-forward block, most layers with a sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyllm.synth.shapes import DecoderShape, SynthTensor, norm_tensor

SLIDING_WINDOW = 512  # tokens


@dataclass(frozen=True)
class GemmaShape(DecoderShape):
    """gemma3; which layers see the whole context is known by the layer."""

    def keys(self) -> dict[str, int | float | list[int]]:
        return super().keys() | {"attention.sliding_window": SLIDING_WINDOW}

    def block(self, layer: int) -> Iterator[SynthTensor]:
        yield norm_tensor("attn_norm.weight", self.hidden_size)
        yield from self.attention_outputs(self.num_heads * self.head_dim)
        yield from self.head_norms()
        yield norm_tensor("post_attention_norm.weight", self.hidden_size)
        yield norm_tensor("ffn_norm.weight", self.hidden_size)
        yield from self.feed_forward()
        yield norm_tensor("post_ffw_norm.weight", self.hidden_size)


GEMMA_SHAPES = {
    "gemma3-270m": GemmaShape(
        architecture="gemma3",
        title="Synthetic Gemma 3 270M",
        num_layers=18,
        hidden_size=640,
        intermediate_size=2048,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        vocab_size=262_144,
        tied=True,
        context_length=32_768,
        rope_freq_base=1e6,
        rms_norm_eps=1e-6,
        pre_tokenizer="gpt-2",
    ),
}
