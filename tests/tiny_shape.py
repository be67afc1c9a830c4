"""A synthetic model small enough for tests, with rows (96) that are no whole number of K-quant blocks."""

from __future__ import annotations

from dataclasses import replace

from pyllm.synth.gemma import GEMMA_SHAPES
from pyllm.synth.hybrid import HybridShape
from pyllm.synth.shapes import DenseShape

TINY = DenseShape(
    architecture="qwen3",
    title="Tiny",
    num_layers=2,
    hidden_size=96,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=320,
    tied=False,
    qk_norm=True,
    context_length=512,
    rope_freq_base=1e6,
    rms_norm_eps=1e-6,
    pre_tokenizer="qwen2",
)
TINY_TIED = replace(TINY, architecture="llama", tied=True, qk_norm=False, pre_tokenizer="smollm", head_dim=24)
TINY_EXPERTS = replace(TINY, architecture="qwen3moe", num_experts=8, num_experts_used=2, intermediate_size=64)
TINY_HYBRID = HybridShape(
    architecture="qwen35",
    title="Tiny",
    num_layers=4,
    hidden_size=96,
    intermediate_size=256,
    num_heads=2,
    num_kv_heads=1,
    head_dim=128,
    num_state_heads=2,
    num_value_heads=4,
    state_size=32,
    vocab_size=320,
    tied=True,
    context_length=512,
    rope_freq_base=1e7,
    rms_norm_eps=1e-6,
    pre_tokenizer="qwen35",
)
TINY_HYBRID_EXPERTS = replace(
    TINY_HYBRID, architecture="qwen35moe", tied=False, num_experts=8, num_experts_used=2, intermediate_size=64
)
TINY_GROUPED = replace(TINY_HYBRID_EXPERTS, architecture="qwen3next", pre_tokenizer="qwen2")
TINY_GEMMA = replace(
    GEMMA_SHAPES["gemma3-270m"], num_layers=6, hidden_size=96, intermediate_size=256, head_dim=32, vocab_size=320
)
