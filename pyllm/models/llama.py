"""llama: Llama 1 to 3, Mistral, SmolLM and others that share their layout."""

from __future__ import annotations

from pyllm.errors import UnsupportedError
from pyllm.gguf_file import GGUFModel
from pyllm.models.config import TransformerConfig, refuse_keys
from pyllm.models.decoder import Decoder
from pyllm.ops.rope import RopePairing


class Llama(Decoder):
    """Rotary pairs are neighbours, since the converter permutes the rows of q and k; biases are optional."""

    pairing = RopePairing.NORM

    @classmethod
    def check(cls, gguf: GGUFModel, config: TransformerConfig) -> None:
        refuse_keys(gguf, {"expert_count": "llama models with experts (Mixtral)"})
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            if f"blk.0.{name}.bias" in gguf.tensors:
                raise UnsupportedError(f"{gguf.path}: blk.0.{name}.bias: pyllm does not run feed-forward biases yet")
