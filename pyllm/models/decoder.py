"""A decoder-only transformer: the layer sequence that most architectures are variations of.

An architecture's own file says which tensors it has and where it differs; what is the same for all of them is here.

    x  = token_embd[ids]
    per block:
        h = rms_norm(x);  q, k, v = Wq h, Wk h, Wv h;  (q, k normalised per head);  q, k rotated
        x += Wo attention(q, K, V)
        x += W_down(silu(W_gate h) * (W_up h))  with h = rms_norm(x)
    logits = W_out rms_norm(x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pyllm.device import Device
from pyllm.errors import ModelFileError
from pyllm.executor import Batch
from pyllm.gguf_file import GGUFModel
from pyllm.models.config import TransformerConfig
from pyllm.models.rope_scaling import RopeFrequencies, RopeScaling, read_factors, rope_frequencies
from pyllm.models.weights import Tensors, TensorSpec, Weights, check_tensors, upload_weights
from pyllm.ops.add import add
from pyllm.ops.flash_attention import AttentionParams, flash_attention
from pyllm.ops.get_rows import get_rows
from pyllm.ops.mul_mat import mul_mat
from pyllm.ops.rms_norm import rms_norm
from pyllm.ops.rope import RopePairing, rope, rope_table
from pyllm.ops.set_rows import set_rows
from pyllm.ops.silu_mul import silu_mul
from pyllm.ops.take_rows import take_rows
from pyllm.weight import Weight


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one block; None where an architecture has none."""

    attn_norm: Any
    attn_q: Weight
    attn_k: Weight
    attn_v: Weight
    attn_q_bias: Any | None
    attn_k_bias: Any | None
    attn_v_bias: Any | None
    attn_q_norm: Any | None
    attn_k_norm: Any | None
    attn_output: Weight
    attn_output_bias: Any | None
    ffn_norm: Any
    ffn_gate: Weight
    ffn_up: Weight
    ffn_down: Weight


class Decoder:
    """One model on one device. Subclasses set the class attributes and extend `layer_specs`.

    Attributes:
        config: sizes.
        vocab_size: columns of the logits.
    """

    pairing: ClassVar[RopePairing]
    """Which elements of a head the rotary embedding pairs."""

    def __init__(self, config: TransformerConfig, rope: RopeFrequencies, weights: Weights, device: Device) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.weights = weights
        self._embedding = weights.matrix("token_embd.weight")
        self._output = weights.matrix("output.weight") if "output.weight" in weights else self._embedding
        self._output_norm = weights.vector("output_norm.weight")
        self._layers = [self._layer(index) for index in range(config.num_layers)]
        self._inv_freq = device.upload(rope.inv_freq)
        self._magnitude = rope.magnitude
        self._attention = AttentionParams(scale=config.key_length**-0.5)

    @classmethod
    def load(cls, gguf: GGUFModel, device: Device, progress: Callable[[int, int], None] | None = None) -> Decoder:
        """Read a file of this architecture. Errors as `pyllm.models.load_model`."""
        config, rope, tensors = cls.prepare(gguf, device)
        return cls(config, rope, upload_weights(gguf, device, tensors, progress), device)

    @classmethod
    def prepare(cls, gguf: GGUFModel, device: Device) -> tuple[TransformerConfig, RopeFrequencies, Tensors]:
        """Make all checks of a file; read no weights."""
        config = TransformerConfig.from_gguf(gguf)
        cls.check(gguf, config)
        return config, cls.read_rope(gguf, config), check_tensors(gguf, device, cls.specs(config))

    # what a file must hold

    @classmethod
    def check(cls, gguf: GGUFModel, config: TransformerConfig) -> None:
        """Refuse files that need more than this architecture's code does."""

    @classmethod
    def read_rope(cls, gguf: GGUFModel, config: TransformerConfig) -> RopeFrequencies:
        """Frequencies of the rotary embedding."""
        key = gguf.arch_key("rope.dimension_count")
        n_rot = gguf.get_int(key, config.key_length, minimum=2, maximum=config.key_length)
        if n_rot % 2:
            raise ModelFileError(f"{gguf.path}: {key} is {n_rot}, expected an even number; the file is damaged")
        base = gguf.get_float(gguf.arch_key("rope.freq_base"), 10000.0, minimum=1.5, maximum=1e12)
        scaling = RopeScaling.from_gguf(gguf, config.context_length)
        return rope_frequencies(n_rot, base, scaling, read_factors(gguf, n_rot))

    @classmethod
    def specs(cls, config: TransformerConfig) -> Iterator[TensorSpec]:
        """All tensors of the model."""
        c = config
        yield TensorSpec("token_embd.weight", (c.vocab_size, c.hidden_size))
        yield TensorSpec("output_norm.weight", (c.hidden_size,))
        yield TensorSpec("output.weight", (c.vocab_size, c.hidden_size), optional=True)  # else tied to token_embd
        for index in range(c.num_layers):
            yield from cls.layer_specs(c, f"blk.{index}.")

    @classmethod
    def layer_specs(cls, config: TransformerConfig, prefix: str) -> Iterator[TensorSpec]:
        """Tensors of one block."""
        c = config
        q_size, k_size = c.num_heads * c.key_length, c.num_kv_heads * c.key_length
        v_size, mixed_size = c.num_kv_heads * c.value_length, c.num_heads * c.value_length
        yield TensorSpec(prefix + "attn_norm.weight", (c.hidden_size,))
        for name, size in (("attn_q", q_size), ("attn_k", k_size), ("attn_v", v_size)):
            yield TensorSpec(f"{prefix}{name}.weight", (size, c.hidden_size))
            yield TensorSpec(f"{prefix}{name}.bias", (size,), optional=True)
        yield TensorSpec(prefix + "attn_output.weight", (c.hidden_size, mixed_size))
        yield TensorSpec(prefix + "attn_output.bias", (c.hidden_size,), optional=True)
        yield TensorSpec(prefix + "ffn_norm.weight", (c.hidden_size,))
        yield TensorSpec(prefix + "ffn_gate.weight", (c.intermediate_size, c.hidden_size))
        yield TensorSpec(prefix + "ffn_up.weight", (c.intermediate_size, c.hidden_size))
        yield TensorSpec(prefix + "ffn_down.weight", (c.hidden_size, c.intermediate_size))

    def _layer(self, index: int) -> DecoderLayer:
        prefix = f"blk.{index}."

        def matrix(name: str) -> Weight:
            return self.weights.matrix(f"{prefix}{name}.weight")

        def vector(name: str) -> Any | None:
            return self.weights.optional_vector(prefix + name)

        return DecoderLayer(
            attn_norm=vector("attn_norm.weight"),
            attn_q=matrix("attn_q"),
            attn_k=matrix("attn_k"),
            attn_v=matrix("attn_v"),
            attn_q_bias=vector("attn_q.bias"),
            attn_k_bias=vector("attn_k.bias"),
            attn_v_bias=vector("attn_v.bias"),
            attn_q_norm=vector("attn_q_norm.weight"),
            attn_k_norm=vector("attn_k_norm.weight"),
            attn_output=matrix("attn_output"),
            attn_output_bias=vector("attn_output.bias"),
            ffn_norm=vector("ffn_norm.weight"),
            ffn_gate=matrix("ffn_gate"),
            ffn_up=matrix("ffn_up"),
            ffn_down=matrix("ffn_down"),
        )

    # what a ubatch computes

    def forward(self, device: Device, batch: Batch) -> Any | None:
        """Queue one ubatch; returns logits [num_outputs, vocab_size] float32 on the device, None without outputs."""
        c = self.config
        x = batch.workspace.array("x", (batch.num_tokens, c.hidden_size))
        get_rows(device, self._embedding, batch.inputs.token_ids[: batch.num_tokens], x)
        cos, sin = self._rope_table(device, batch)
        delta = None
        for index, layer in enumerate(self._layers):
            h = batch.workspace.array("h", x.shape)
            rms_norm(device, x, layer.attn_norm, c.rms_norm_eps, h, delta)
            last = index == c.num_layers - 1
            q = self._attention_inputs(device, batch, index, layer, h, cos, sin)
            if last and not batch.num_outputs:
                return None  # the K/V rows are what this ubatch was for
            mixed = self._attend(device, batch, index, q)
            if last:
                x, mixed = self._take_outputs(device, batch, x, mixed)
            delta = self._project(device, batch, layer.attn_output, layer.attn_output_bias, mixed, "attn_out")
            delta = self._feed_forward(device, batch, layer, x, delta)
        return self._logits(device, batch, x, delta)

    def _rope_table(self, device: Device, batch: Batch) -> tuple[Any, Any]:
        shape = (batch.num_tokens, self._inv_freq.shape[0])
        cos, sin = batch.workspace.array("rope_cos", shape), batch.workspace.array("rope_sin", shape)
        positions = batch.inputs.positions[: batch.num_tokens]
        rope_table(device, positions, self._inv_freq, self._magnitude, cos, sin)
        return cos, sin

    def _attention_inputs(
        self, device: Device, batch: Batch, index: int, layer: DecoderLayer, h: Any, cos: Any, sin: Any
    ) -> Any:
        """Queries [num_tokens, num_heads, key_length]; keys and values go into the cache."""
        c, num_tokens = self.config, batch.num_tokens
        q = self._project(device, batch, layer.attn_q, layer.attn_q_bias, h, "q")
        k = self._project(device, batch, layer.attn_k, layer.attn_k_bias, h, "k")
        v = self._project(device, batch, layer.attn_v, layer.attn_v_bias, h, "v")
        q_heads = q.reshape(num_tokens, c.num_heads, c.key_length)
        k_heads = k.reshape(num_tokens, c.num_kv_heads, c.key_length)
        for heads, norm in ((q_heads, layer.attn_q_norm), (k_heads, layer.attn_k_norm)):
            if norm is not None:
                rms_norm(device, heads, norm, c.rms_norm_eps, heads)
            rope(device, heads, cos, sin, self.pairing)
        set_rows(device, k, v, batch.inputs, batch.cache.layers[index], batch.cache.kv_type, batch.record)
        return q_heads

    def _attend(self, device: Device, batch: Batch, index: int, q: Any) -> Any:
        """[num_tokens, num_heads * value_length]"""
        c = self.config
        mixed = batch.workspace.array("mixed", (batch.num_tokens, c.num_heads, c.value_length))
        flash_attention(
            device,
            q,
            batch.inputs,
            batch.num_seqs,
            batch.cache.layers[index],
            batch.cache.kv_type,
            self._attention,
            batch.record,
            mixed,
        )
        return mixed.reshape(batch.num_tokens, c.num_heads * c.value_length)

    def _take_outputs(self, device: Device, batch: Batch, x: Any, mixed: Any) -> tuple[Any, Any]:
        """Behind the last attention only the tokens whose logits are wanted matter."""
        ids = batch.inputs.out_tokens[: batch.num_outputs]
        taken = []
        for name, array in (("x_out", x), ("mixed_out", mixed)):
            out = batch.workspace.array(name, (batch.num_outputs, array.shape[1]))
            take_rows(device, array, ids, out)
            taken.append(out)
        return taken[0], taken[1]

    def _feed_forward(self, device: Device, batch: Batch, layer: DecoderLayer, x: Any, delta: Any) -> Any:
        h = batch.workspace.array("h", x.shape)
        rms_norm(device, x, layer.ffn_norm, self.config.rms_norm_eps, h, delta)
        gate = self._project(device, batch, layer.ffn_gate, None, h, "gate")
        up = self._project(device, batch, layer.ffn_up, None, h, "up")
        silu_mul(device, gate, up, gate)
        return self._project(device, batch, layer.ffn_down, None, gate, "ffn_out")

    def _logits(self, device: Device, batch: Batch, x: Any, delta: Any) -> Any:
        h = batch.workspace.array("h", x.shape)
        rms_norm(device, x, self._output_norm, self.config.rms_norm_eps, h, delta)
        return self._project(device, batch, self._output, None, h, "logits")

    @staticmethod
    def _project(device: Device, batch: Batch, weight: Weight, bias: Any | None, x: Any, name: str) -> Any:
        """x @ weight.T (+ bias) in the workspace buffer `name`."""
        out = batch.workspace.array(name, (x.shape[0], weight.shape[0]))
        mul_mat(device, x, weight, out)
        if bias is not None:
            add(device, out, bias, out)
        return out
