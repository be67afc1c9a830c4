"""Hybrid models: Gated DeltaNet in most blocks, gated attention in the others.

What these architectures share and `Decoder` does not do: which layer is of which kind; attention whose output is gated
(half of the rows of attn_q make the gate); a second norm that files call post_attention_norm. Blocks behind the last
layer that predict further tokens (`nextn_predict_layers`) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pyllm.device import Device
from pyllm.errors import ModelFileError, UnsupportedError
from pyllm.executor import Batch
from pyllm.gguf_file import GGUFModel
from pyllm.models.config import MAX_LAYERS, TransformerConfig
from pyllm.models.decoder import Decoder, DecoderLayer
from pyllm.models.delta_net import OPS, DeltaNet, DeltaSizes
from pyllm.models.project import project
from pyllm.models.rope_scaling import RopePlan
from pyllm.models.weights import StoredRows, TensorSpec, Weights
from pyllm.ops.product_plan import Norm
from pyllm.ops.rope import RopePairing
from pyllm.ops.sigmoid_mul import SIGMOID_MUL, sigmoid_mul
from pyllm.recurrent_state import RecurrentShape

DEFAULT_INTERVAL = 4  # every fourth layer is attention
MAX_KERNEL_HEAD = 256  # elements that eight threads can keep of a row of the state


@dataclass(frozen=True)
class HybridConfig(TransformerConfig):
    """Attributes:
    recurrent_layers: numbers of the layers without attention.
    delta: their sizes.
    """

    recurrent_layers: tuple[int, ...]
    delta: DeltaSizes

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(index for index in range(self.num_layers) if index not in self.recurrent_layers)

    @property
    def recurrent(self) -> RecurrentShape | None:
        sizes = self.delta
        channels = sizes.heads(False).num_channels
        return RecurrentShape(self.recurrent_layers, sizes.kernel_size, channels, sizes.num_v_heads, sizes.head_dim)

    @classmethod
    def from_gguf(cls, gguf: GGUFModel) -> HybridConfig:
        base = TransformerConfig.from_gguf(gguf)
        return cls(**vars(base), recurrent_layers=_recurrent_layers(gguf, base), delta=DeltaSizes.from_gguf(gguf))


def _recurrent_layers(gguf: GGUFModel, config: TransformerConfig) -> tuple[int, ...]:
    """Named one by one, or all but every n-th."""
    key, count = gguf.arch_key("attention.recurrent_layers"), gguf.get_int(gguf.arch_key("block_count"))
    if key in gguf.metadata:
        flags = gguf.get_ints(key, count, minimum=0, maximum=1)
    else:
        interval = gguf.get_int(
            gguf.arch_key("full_attention_interval"), DEFAULT_INTERVAL, minimum=1, maximum=MAX_LAYERS
        )
        flags = tuple(int((index + 1) % interval != 0) for index in range(count))
    layers = tuple(index for index in range(config.num_layers) if flags[index])
    if not 0 < len(layers) < config.num_layers:
        raise ModelFileError(
            f"{gguf.path}: {len(layers)} of {config.num_layers} layers are recurrent; {gguf.architecture} has some of "
            "each kind: the file is damaged or of another architecture"
        )
    return layers


class HybridDecoder(Decoder):
    """Subclasses set `tiled` and say how they store what the layers project."""

    pairing = RopePairing.NEOX
    config_class = HybridConfig
    ops = (*OPS, SIGMOID_MUL)
    fixed_positions = "the states of recurrent layers are sums over all tokens, which nothing can be taken out of"

    tiled: ClassVar[bool]
    """Which key head a value head uses; see `DeltaHeads`."""

    def __init__(self, gguf: GGUFModel, config: HybridConfig, rope: RopePlan, weights: Weights, device: Device) -> None:
        super().__init__(gguf, config, rope, weights, device)
        heads = config.delta.heads(self.tiled)
        self._states = {layer: index for index, layer in enumerate(config.recurrent_layers)}
        self._deltas = {
            layer: DeltaNet(weights, f"blk.{layer}.", heads, config.rms_norm_eps) for layer in config.recurrent_layers
        }
        self._gates = {layer: weights.matrix(f"blk.{layer}.attn_q_gate.weight") for layer in config.attention_layers}

    @classmethod
    def layer_specs(cls, gguf: GGUFModel, config: TransformerConfig, index: int) -> Iterator[TensorSpec]:
        assert isinstance(config, HybridConfig)
        prefix = f"blk.{index}."
        yield TensorSpec(prefix + "attn_norm.weight", (config.hidden_size,))
        norm = StoredRows(prefix + "post_attention_norm.weight")
        yield TensorSpec(prefix + "ffn_norm.weight", (config.hidden_size,), stored=norm)
        if index in config.recurrent_layers:
            yield from cls.delta_specs(gguf, config, prefix)
        else:
            yield from cls.gated_attention_specs(config, prefix)
        yield from cls.feed_forward.specs(gguf, config, prefix)

    @classmethod
    def delta_specs(cls, gguf: GGUFModel, config: HybridConfig, prefix: str) -> Iterator[TensorSpec]:
        """Tensors of a recurrent layer apart from norms and feed-forward part."""
        yield from DeltaNet.specs(config.delta, prefix, config.hidden_size)

    @classmethod
    def gated_attention_specs(cls, config: TransformerConfig, prefix: str) -> Iterator[TensorSpec]:
        """Tensors of an attention layer. The rows of attn_q are a head's query, its gate, the next head's query, ..."""
        c = config
        rows = np.arange(2 * c.q_size).reshape(c.num_heads, 2, c.key_length)
        for name, half in (("attn_q", rows[:, 0]), ("attn_q_gate", rows[:, 1])):
            stored = StoredRows(prefix + "attn_q.weight", 2 * c.q_size, half.reshape(-1))
            yield TensorSpec(f"{prefix}{name}.weight", (c.q_size, c.hidden_size), stored=stored)
        yield TensorSpec(prefix + "attn_k.weight", (c.k_size, c.hidden_size))
        yield TensorSpec(prefix + "attn_v.weight", (c.v_size, c.hidden_size))
        yield TensorSpec(prefix + "attn_q_norm.weight", (c.key_length,))
        yield TensorSpec(prefix + "attn_k_norm.weight", (c.key_length,))
        yield TensorSpec(prefix + "attn_output.weight", (c.hidden_size, c.num_heads * c.value_length))

    @classmethod
    def check_kernels(cls, gguf: GGUFModel, config: TransformerConfig, device: Device) -> None:
        super().check_kernels(gguf, config, device)
        assert isinstance(config, HybridConfig)
        size = config.delta.head_dim
        if device.target is not None and (size % 32 or size > MAX_KERNEL_HEAD):
            raise UnsupportedError(
                f"{gguf.path}: {gguf.arch_key('ssm.state_size')} is {size}; kernels on {device.name} need multiples "
                f"of 32 up to {MAX_KERNEL_HEAD}"
            )

    @classmethod
    def check(cls, gguf: GGUFModel, config: TransformerConfig) -> None:
        if config.key_length != config.value_length:
            raise ModelFileError(
                f"{gguf.path}: keys of {config.key_length} and values of {config.value_length} elements; the gate of "
                "attention needs them of one length: the file is damaged"
            )

    def _layer(self, index: int, device: Device) -> DecoderLayer:
        config, prefix, weights = self.config, f"blk.{index}.", self.weights
        assert isinstance(config, HybridConfig)
        if index not in config.recurrent_layers:
            return super()._layer(index, device)
        return DecoderLayer(
            attn_norm=Norm(weights.vector(prefix + "attn_norm.weight"), config.rms_norm_eps),
            attn_qkv=(),
            attn_qkv_bias=None,
            head_norms=None,
            attn_output=(weights.matrix(prefix + "ssm_out.weight"),),
            attn_output_bias=None,
            post_attention_norm=None,
            ffn_norm=Norm(weights.vector(prefix + "ffn_norm.weight"), config.rms_norm_eps),
            post_ffw_norm=None,
        )

    def _mix(self, device: Device, batch: Batch, index: int, x: Any, table: tuple[Any, Any]) -> Any | None:
        norm = self._layers[index].attn_norm
        if index not in self._deltas:
            mixed = super()._mix(device, batch, index, x, table)
            if mixed is not None:
                gate = batch.workspace.array("attn_gate", mixed.shape)
                project(device, batch, x, (self._gates[index],), gate, norm=norm)
                sigmoid_mul(device, gate, mixed, mixed)
            return mixed
        assert batch.cache.recurrent is not None
        state = batch.cache.recurrent.layers[self._states[index]]
        mixed = self._deltas[index].forward(device, batch, x, norm, state)
        return None if index == self.num_run - 1 and not batch.num_outputs else mixed
