"""qwen3: the dense Qwen3 models. Queries and keys are normalised per head before they are rotated."""

from __future__ import annotations

from collections.abc import Container, Iterator

from pyllm.models.config import TransformerConfig
from pyllm.models.decoder import Decoder
from pyllm.models.weights import TensorSpec
from pyllm.ops.rope import RopePairing


class Qwen3(Decoder):
    pairing = RopePairing.NEOX

    @classmethod
    def attention_specs(cls, config: TransformerConfig, prefix: str, present: Container[str]) -> Iterator[TensorSpec]:
        yield from super().attention_specs(config, prefix, present)
        yield TensorSpec(prefix + "attn_q_norm.weight", (config.key_length,))
        yield TensorSpec(prefix + "attn_k_norm.weight", (config.key_length,))
