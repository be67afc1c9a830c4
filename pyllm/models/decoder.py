"""A decoder-only transformer: the layer sequence that most architectures are variations of.

An architecture's own file says which tensors it has and where it differs; what is the same for all of them is here.

    x  = token_embd[ids]
    per block:
        h = rms_norm(x);  q, k, v = Wq h, Wk h, Wv h;  (q, k normalised per head);  q, k rotated
        x += Wo attention(q, K, V)                              (normalised before it is added)
        x += feed_forward(h) with h = rms_norm(x)               (likewise)
    logits = W_out rms_norm(x)

What stands in parentheses happens where a file has the tensors for it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from pyllm.device import Device
from pyllm.errors import UnsupportedError
from pyllm.executor import Batch
from pyllm.gguf_file import GGUFModel
from pyllm.kv_cache import LayerCache
from pyllm.models.by_token import attention_parts, tables_by_token
from pyllm.models.config import TransformerConfig
from pyllm.models.feed_forward import DenseFeedForward
from pyllm.models.project import project
from pyllm.models.rope_scaling import RopePlan, read_rope
from pyllm.models.weights import Tensors, TensorSpec, Weights, check_tensors, upload_weights
from pyllm.ops.flash_attention import AttentionParams, flash_attention
from pyllm.ops.get_rows import get_rows
from pyllm.ops.op import Op
from pyllm.ops.product_plan import Norm
from pyllm.ops.rms_norm import rms_norm
from pyllm.ops.rope import RopePairing, rope_table
from pyllm.ops.rope_set_rows import HeadNorms, rope_set_rows
from pyllm.ops.shift_rows import KeyTurn
from pyllm.ops.softcap import softcap
from pyllm.ops.take_rows import take_rows
from pyllm.weight import Weight


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one block outside its feed-forward part; None where a file has none."""

    attn_norm: Norm
    attn_qkv: tuple[Weight, ...]
    attn_qkv_bias: Any | None
    head_norms: HeadNorms | None
    attn_output: tuple[Weight, ...]
    attn_output_bias: Any | None
    post_attention_norm: Any | None
    ffn_norm: Norm
    post_ffw_norm: Any | None


class Decoder:
    """One model on one device. Subclasses set the class attributes and override what differs.

    Attributes:
        config: sizes.
        vocab_size: columns of the logits.
        num_run: blocks that are run: all, or the first ones only, to see how errors grow (`pyllm bench`).
    """

    pairing: ClassVar[RopePairing]
    """Which elements of a head the rotary embedding pairs."""

    feed_forward: ClassVar[Any] = DenseFeedForward
    """The class of the blocks' second half; see `pyllm.models.feed_forward`."""

    config_class: ClassVar[type[TransformerConfig]] = TransformerConfig
    """What reads the sizes."""

    fixed_positions: ClassVar[str] = ""
    """Why rows cannot move to other positions; empty where turned keys are all that it takes."""

    ops: ClassVar[tuple[Op, ...]] = ()
    """Ops of the blocks' first half, beyond those of plain attention, that a device must be able to run."""

    def __init__(self, gguf: GGUFModel, config: TransformerConfig, rope: RopePlan, weights: Weights, device: Device):
        self.config = config
        self.num_run = config.num_layers
        self.vocab_size = config.vocab_size
        self.weights = weights
        self._embedding = weights.matrix("token_embd.weight")
        self._output = weights.matrix("output.weight") if "output.weight" in weights else self._embedding
        self._output_bias = weights.optional_vector("output.bias")
        self._output_norm = Norm(weights.vector("output_norm.weight"), config.rms_norm_eps)
        self._cache_index = {layer: index for index, layer in enumerate(config.attention_layers)}
        self._layers = [self._layer(index, device) for index in range(config.num_layers)]
        self._feed_forwards = [
            self.feed_forward(gguf, config, weights, f"blk.{index}.") for index in range(config.num_layers)
        ]
        self._rope_plan = rope
        self._inv_freqs = [device.upload(frequencies.inv_freq) for frequencies in rope.frequencies]
        self._key_turns: dict[int, list[KeyTurn]] = {}
        self._attention = self.attention_params(gguf, config)
        self._embedding_scale = self.embedding_scale(config)
        self._logit_softcap = gguf.get_float(gguf.arch_key("final_logit_softcapping"), 0.0, minimum=0.0)

    @classmethod
    def load(cls, gguf: GGUFModel, device: Device, progress: Callable[[int, int], None] | None = None) -> Decoder:
        """Read a file of this architecture. Errors as `pyllm.models.load_model`."""
        config, rope, tensors = cls.prepare(gguf, device)
        return cls(gguf, config, rope, upload_weights(gguf, device, tensors, progress), device)

    @classmethod
    def prepare(cls, gguf: GGUFModel, device: Device) -> tuple[TransformerConfig, RopePlan, Tensors]:
        """Make all checks of a file; read no weights."""
        config = cls.config_class.from_gguf(gguf)
        cls.check(gguf, config)
        cls.feed_forward.check(gguf, config)
        cls.check_kernels(gguf, config, device)
        cls.attention_params(gguf, config)
        specs = cls.specs(gguf, config)
        return config, cls.read_rope(gguf, config), check_tensors(gguf, device, specs)

    @classmethod
    def check_kernels(cls, gguf: GGUFModel, config: TransformerConfig, device: Device) -> None:
        """Refuse what the device has no kernels for."""
        for op in (*cls.ops, *cls.feed_forward.ops):
            if not device.runs(op):
                raise UnsupportedError(
                    f"{gguf.path}: {gguf.architecture} needs {op.name}, for which {device.name} has no kernel yet; "
                    "run it with --device cpu"
                )
        if device.target is None:
            return
        if config.key_length != config.value_length or config.key_length % 16 or config.key_length > 256:
            raise UnsupportedError(
                f"{gguf.path}: heads of {config.key_length} and {config.value_length} elements; kernels on "
                f"{device.name} need equal multiples of 16 up to 256"
            )
        for key, size in (("embedding_length", config.hidden_size), ("feed_forward_length", config.intermediate_size)):
            if size % 8:
                raise UnsupportedError(
                    f"{gguf.path}: {gguf.arch_key(key)} is {size}; kernels on {device.name} need a multiple of 8"
                )

    # what an architecture may say differently

    @classmethod
    def check(cls, gguf: GGUFModel, config: TransformerConfig) -> None:
        """Refuse files that need more than this architecture's code does."""

    @classmethod
    def read_rope(cls, gguf: GGUFModel, config: TransformerConfig) -> RopePlan:
        """Frequencies of the rotary embedding, and which layer uses which."""
        return RopePlan.same(read_rope(gguf, config), config.num_layers)

    @classmethod
    def attention_params(cls, gguf: GGUFModel, config: TransformerConfig) -> list[AttentionParams]:
        """Scale and window of each layer."""
        return [AttentionParams(scale=config.key_length**-0.5)] * config.num_layers

    @classmethod
    def embedding_scale(cls, config: TransformerConfig) -> float:
        """Factor on the token embeddings."""
        return 1.0

    @classmethod
    def specs(cls, gguf: GGUFModel, config: TransformerConfig) -> Iterator[TensorSpec]:
        """All tensors of the model."""
        c = config
        yield TensorSpec("token_embd.weight", (c.vocab_size, c.hidden_size))
        yield TensorSpec("output_norm.weight", (c.hidden_size,))
        yield TensorSpec("output.weight", (c.vocab_size, c.hidden_size), optional=True)  # else tied to token_embd
        yield TensorSpec("output.bias", (c.vocab_size,), optional=True)
        for index in range(c.num_layers):
            yield from cls.layer_specs(gguf, c, index)

    @classmethod
    def layer_specs(cls, gguf: GGUFModel, config: TransformerConfig, index: int) -> Iterator[TensorSpec]:
        """Tensors of one block."""
        prefix = f"blk.{index}."
        yield from cls.attention_specs(config, prefix, gguf.tensors)
        yield from cls.feed_forward.specs(gguf, config, prefix)

    @classmethod
    def attention_specs(cls, config: TransformerConfig, prefix: str, present: Container[str]) -> Iterator[TensorSpec]:
        """Tensors of one block outside its feed-forward part."""
        c = config
        yield TensorSpec(prefix + "attn_norm.weight", (c.hidden_size,))
        sizes = {"attn_q": c.q_size, "attn_k": c.k_size, "attn_v": c.v_size}
        if prefix + "attn_qkv.weight" in present:
            sizes = {"attn_qkv": sum(sizes.values())}
        for name, size in sizes.items():
            yield TensorSpec(f"{prefix}{name}.weight", (size, c.hidden_size))
            yield TensorSpec(f"{prefix}{name}.bias", (size,), optional=True)
        yield TensorSpec(prefix + "attn_output.weight", (c.hidden_size, c.num_heads * c.value_length))
        yield TensorSpec(prefix + "attn_output.bias", (c.hidden_size,), optional=True)
        yield TensorSpec(prefix + "ffn_norm.weight", (c.hidden_size,))

    def _layer(self, index: int, device: Device) -> DecoderLayer:
        c, prefix, weights = self.config, f"blk.{index}.", self.weights

        def vector(name: str) -> Any | None:
            return weights.optional_vector(prefix + name)

        if prefix + "attn_qkv.weight" in weights:
            attn_qkv: tuple[Weight, ...] = (weights.matrix(prefix + "attn_qkv.weight"),)
            bias = vector("attn_qkv.bias")
        else:
            names = ("attn_q", "attn_k", "attn_v")
            attn_qkv = tuple(weights.matrix(f"{prefix}{name}.weight") for name in names)
            bias = _joined(device, [vector(f"{name}.bias") for name in names], [c.q_size, c.k_size, c.v_size])
        q_norm, k_norm = vector("attn_q_norm.weight"), vector("attn_k_norm.weight")
        return DecoderLayer(
            attn_norm=Norm(vector("attn_norm.weight"), c.rms_norm_eps),
            attn_qkv=attn_qkv,
            attn_qkv_bias=bias,
            head_norms=None if q_norm is None or k_norm is None else HeadNorms(q_norm, k_norm, c.rms_norm_eps),
            attn_output=(weights.matrix(prefix + "attn_output.weight"),),
            attn_output_bias=vector("attn_output.bias"),
            post_attention_norm=vector("post_attention_norm.weight"),
            ffn_norm=Norm(vector("ffn_norm.weight"), c.rms_norm_eps),
            post_ffw_norm=vector("post_ffw_norm.weight"),
        )

    def key_turns(self, device: Device, num_positions: int) -> list[KeyTurn]:
        """For each layer of the K/V cache, what turns its keys to so many positions on, or back where that is negative.

        Raises:
            ValueError: rows of this model have `fixed_positions`.
        """
        if self.fixed_positions:
            raise ValueError(self.fixed_positions)
        if num_positions not in self._key_turns:  # an engine asks for one number only
            tables = [tuple(map(device.upload, one.turn(num_positions))) for one in self._rope_plan.frequencies]
            turns = [KeyTurn(cos, sin, self.pairing, self.config.key_length) for cos, sin in tables]
            self._key_turns[num_positions] = [
                turns[self._rope_plan.of_layer[layer]] for layer in self.config.attention_layers
            ]
        return self._key_turns[num_positions]

    # what a ubatch computes

    def forward(self, device: Device, batch: Batch) -> Any | None:
        """Queue one ubatch; returns logits [num_outputs, vocab_size] float32 on the device, None without outputs."""
        c = self.config
        if device.is_batch_invariant:
            batch = replace(batch, by_token=tables_by_token(device, batch))
        x = batch.workspace.array("x", (batch.num_tokens, c.hidden_size))
        get_rows(device, self._embedding, batch.inputs.token_ids[: batch.num_tokens], x, self._embedding_scale)
        tables = self._rope_tables(device, batch)
        for index, layer in enumerate(self._layers[: self.num_run]):
            last = index == self.num_run - 1
            mixed = self._mix(device, batch, index, x, tables[self._rope_plan.of_layer[index]])
            if mixed is None:
                return None
            if last:
                x, mixed = self._take_outputs(device, batch, x, mixed)
            with self._residual(device, batch, x, layer.post_attention_norm) as (out, accumulate):
                bias = layer.attn_output_bias
                project(device, batch, mixed, layer.attn_output, out, bias=bias, accumulate=accumulate)
            with self._residual(device, batch, x, layer.post_ffw_norm) as (out, accumulate):
                self._feed_forwards[index].forward(device, batch, x, layer.ffn_norm, out, accumulate)
        return self._logits(device, batch, x)

    def _mix(self, device: Device, batch: Batch, index: int, x: Any, table: tuple[Any, Any]) -> Any | None:
        """The first half of a block before its output projection: [num_tokens, num_heads * value_length]; None in the
        last block of a ubatch without outputs, of which the K/V rows are all that counts."""
        q = self._attention_inputs(device, batch, index, self._layers[index], x, table)
        if index == self.num_run - 1 and not batch.num_outputs:
            return None
        return self._attend(device, batch, index, q)

    def _layer_cache(self, batch: Batch, index: int) -> LayerCache:
        return batch.cache.layers[self._cache_index[index]]

    @contextmanager
    def _residual(self, device: Device, batch: Batch, x: Any, post_norm: Any | None) -> Iterator[tuple[Any, bool]]:
        """Where half a block leaves its result, and whether it adds it: the residual stream, or an array that is
        normalised and then added to the stream."""
        if post_norm is None:
            yield x, True
            return
        delta = batch.workspace.array("delta", x.shape)
        yield delta, False
        rms_norm(device, delta, post_norm, self.config.rms_norm_eps, x, accumulate=True)

    def _rope_tables(self, device: Device, batch: Batch) -> list[tuple[Any, Any]]:
        tables = []
        positions = batch.inputs.positions[: batch.num_tokens]
        for index, inv_freq in enumerate(self._inv_freqs):
            shape = (batch.num_tokens, inv_freq.shape[0])
            cos, sin = (batch.workspace.array(f"rope_{name}_{index}", shape) for name in ("cos", "sin"))
            rope_table(device, positions, inv_freq, self._rope_plan.frequencies[index].magnitude, cos, sin)
            tables.append((cos, sin))
        return tables

    def _attention_inputs(
        self, device: Device, batch: Batch, index: int, layer: DecoderLayer, x: Any, table: tuple[Any, Any]
    ) -> Any:
        """Queries [num_tokens, num_heads, key_length]; keys and values go into the cache."""
        c, num_tokens, array = self.config, batch.num_tokens, batch.workspace.array
        qkv = array("qkv", (num_tokens, c.q_size + c.k_size + c.v_size))
        project(device, batch, x, layer.attn_qkv, qkv, norm=layer.attn_norm, bias=layer.attn_qkv_bias)
        q = array("q", (num_tokens, c.num_heads, c.key_length), device.activation_dtype)
        cache, record = self._layer_cache(batch, index), batch.record
        rope_set_rows(
            *(device, qkv, layer.head_norms, *table, self.pairing),
            *(batch.inputs, cache, batch.cache.kv_type, record, q),
        )
        return q

    def _attend(self, device: Device, batch: Batch, index: int, q: Any) -> Any:
        """[num_tokens, num_heads * value_length]"""
        c = self.config
        out_shape = batch.num_tokens, c.num_heads, c.value_length
        mixed = batch.workspace.array("mixed", out_shape, device.activation_dtype)
        cache, kv_type, params = self._layer_cache(batch, index), batch.cache.kv_type, self._attention[index]
        for inputs, shape in attention_parts(batch, c.num_heads, c.num_kv_heads):
            heads = c.num_heads, c.num_kv_heads, c.value_length
            scratch = batch.workspace.array("attention_scratch", (shape.scratch_size(device.target, kv_type, *heads),))
            flash_attention(device, q, inputs, shape, cache, kv_type, params, batch.record, scratch, mixed)
        return mixed.reshape(batch.num_tokens, c.num_heads * c.value_length)

    def _take_outputs(self, device: Device, batch: Batch, x: Any, mixed: Any) -> tuple[Any, Any]:
        """Behind the last attention only the tokens whose logits are wanted matter."""
        ids = batch.inputs.out_tokens[: batch.num_outputs]
        taken = []
        for name, array in (("x_out", x), ("mixed_out", mixed)):
            out = batch.workspace.array(name, (batch.num_outputs, array.shape[1]), array.dtype)
            take_rows(device, array, ids, out)
            taken.append(out)
        return taken[0], taken[1]

    def _logits(self, device: Device, batch: Batch, x: Any) -> Any:
        logits = batch.workspace.array("logits", (x.shape[0], self.vocab_size))
        project(device, batch, x, (self._output,), logits, norm=self._output_norm, bias=self._output_bias)
        if self._logit_softcap:
            softcap(device, logits, self._logit_softcap, logits)
        return logits


def _joined(device: Device, vectors: list[Any | None], sizes: list[int]) -> Any | None:
    """Biases side by side, zeros where there is none; None without any."""
    if all(vector is None for vector in vectors):
        return None
    parts = [
        np.zeros(size, np.float32) if vector is None else device.download(vector)
        for vector, size in zip(vectors, sizes, strict=True)
    ]
    return device.upload(np.concatenate(parts))
