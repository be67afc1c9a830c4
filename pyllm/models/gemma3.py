"""gemma3: most layers look back over a sliding window only and have a rope base of their own.

The outputs of attention and feed-forward are normalised before they are added, embeddings are scaled, and the gate is a
GELU. Norm weights are stored with 1 added, so a plain RMS norm is right.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from functools import partial

import numpy as np

from pyllm.gguf_file import GGUFModel
from pyllm.models.config import MAX_CONTEXT, TransformerConfig
from pyllm.models.feed_forward import GeluFeedForward
from pyllm.models.qwen3 import Qwen3
from pyllm.models.rope_scaling import RopePlan, RopeScaling, read_base, read_n_rot, read_rope, rope_frequencies
from pyllm.models.weights import TensorSpec
from pyllm.ops.flash_attention import AttentionParams

DEFAULT_PERIOD = 6  # of six layers the last is global
LAYERS_OF_27B = 62  # this size alone scales its scores by the width per head that the hidden size gives


class Gemma3(Qwen3):
    feed_forward = GeluFeedForward

    @classmethod
    def attention_specs(cls, config: TransformerConfig, prefix: str, present: Container[str]) -> Iterator[TensorSpec]:
        yield from super().attention_specs(config, prefix, present)
        yield TensorSpec(prefix + "post_attention_norm.weight", (config.hidden_size,))
        yield TensorSpec(prefix + "post_ffw_norm.weight", (config.hidden_size,))

    @classmethod
    def read_rope(cls, gguf: GGUFModel, config: TransformerConfig) -> RopePlan:
        n_rot, plain = read_n_rot(gguf, config), RopeScaling("none", 1.0, config.context_length, 1.0)
        local = rope_frequencies(n_rot, read_base(gguf, "rope.freq_base_swa"), plain, None)
        return RopePlan((read_rope(gguf, config), local), tuple(map(int, slides(gguf, config))))

    @classmethod
    def attention_params(cls, gguf: GGUFModel, config: TransformerConfig) -> list[AttentionParams]:
        window = gguf.get_int(gguf.arch_key("attention.sliding_window"), 0, minimum=0, maximum=MAX_CONTEXT)
        width = config.hidden_size / config.num_heads if config.num_layers == LAYERS_OF_27B else config.key_length
        params = partial(AttentionParams, scale=width**-0.5)
        return [params(window=window if sliding else 0) for sliding in slides(gguf, config)]

    @classmethod
    def embedding_scale(cls, config: TransformerConfig) -> float:
        return math.sqrt(config.hidden_size)


def slides(gguf: GGUFModel, config: TransformerConfig) -> list[bool]:
    """Which layers have the sliding window: named one by one, or all but every n-th."""
    key = gguf.arch_key("attention.sliding_window_pattern")
    if isinstance(gguf.metadata.get(key), (list, np.ndarray)):
        return [bool(value) for value in gguf.get_ints(key, config.num_layers, minimum=0, maximum=1)]
    period = gguf.get_int(key, DEFAULT_PERIOD, minimum=0, maximum=MAX_CONTEXT)
    return [period == 0 or index % period < period - 1 for index in range(config.num_layers)]
