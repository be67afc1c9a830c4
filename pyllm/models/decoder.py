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
from dataclasses import dataclass
from typing import Any, ClassVar

from pyllm.device import Device
from pyllm.errors import UnsupportedError
from pyllm.executor import Batch
from pyllm.gguf_file import GGUFModel
from pyllm.models.config import TransformerConfig
from pyllm.models.feed_forward import DenseFeedForward
from pyllm.models.project import project
from pyllm.models.rope_scaling import RopePlan, read_rope
from pyllm.models.weights import Tensors, TensorSpec, Weights, check_tensors, upload_weights
from pyllm.ops.flash_attention import AttentionParams, AttentionShape, flash_attention
from pyllm.ops.get_rows import get_rows
from pyllm.ops.rms_norm import rms_norm
from pyllm.ops.rope import RopePairing, rope, rope_table
from pyllm.ops.set_rows import set_rows
from pyllm.ops.softcap import softcap
from pyllm.ops.take_rows import take_rows
from pyllm.weight import Weight


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one block outside its feed-forward part; None where a file has none."""

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
    post_attention_norm: Any | None
    ffn_norm: Any
    post_ffw_norm: Any | None


class Decoder:
    """One model on one device. Subclasses set the class attributes and override what differs.

    Attributes:
        config: sizes.
        vocab_size: columns of the logits.
    """

    pairing: ClassVar[RopePairing]
    """Which elements of a head the rotary embedding pairs."""

    feed_forward: ClassVar[Any] = DenseFeedForward
    """The class of the blocks' second half; see `pyllm.models.feed_forward`."""

    def __init__(self, gguf: GGUFModel, config: TransformerConfig, rope: RopePlan, weights: Weights, device: Device):
        self.config = config
        self.vocab_size = config.vocab_size
        self.weights = weights
        self._embedding = weights.matrix("token_embd.weight")
        self._output = weights.matrix("output.weight") if "output.weight" in weights else self._embedding
        self._output_bias = weights.optional_vector("output.bias")
        self._output_norm = weights.vector("output_norm.weight")
        self._layers = [self._layer(index) for index in range(config.num_layers)]
        self._feed_forwards = [
            self.feed_forward(gguf, config, weights, f"blk.{index}.") for index in range(config.num_layers)
        ]
        self._rope_plan = rope
        self._inv_freqs = [device.upload(frequencies.inv_freq) for frequencies in rope.frequencies]
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
        config = TransformerConfig.from_gguf(gguf)
        cls.check(gguf, config)
        cls.feed_forward.check(gguf, config)
        cls.check_kernels(gguf, config, device)
        cls.attention_params(gguf, config)
        specs = cls.specs(gguf, config)
        return config, cls.read_rope(gguf, config), check_tensors(gguf, device, specs)

    @classmethod
    def check_kernels(cls, gguf: GGUFModel, config: TransformerConfig, device: Device) -> None:
        """Refuse what the device has no kernels for."""
        for op in cls.feed_forward.ops:
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
            prefix = f"blk.{index}."
            yield from cls.attention_specs(c, prefix, gguf.tensors)
            yield from cls.feed_forward.specs(gguf, c, prefix)

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

    def _layer(self, index: int) -> DecoderLayer:
        c, prefix, weights = self.config, f"blk.{index}.", self.weights

        def vector(name: str) -> Any | None:
            return weights.optional_vector(prefix + name)

        def part(name: str, start: int, size: int) -> tuple[Weight, Any | None]:
            """A projection and its bias, on their own or as rows of the fused tensor."""
            if prefix + "attn_qkv.weight" not in weights:
                return weights.matrix(f"{prefix}{name}.weight"), vector(f"{name}.bias")
            bias = vector("attn_qkv.bias")
            rows = weights.matrix(prefix + "attn_qkv.weight").rows(start, start + size)
            return rows, None if bias is None else bias[start : start + size]

        attn_q, attn_q_bias = part("attn_q", 0, c.q_size)
        attn_k, attn_k_bias = part("attn_k", c.q_size, c.k_size)
        attn_v, attn_v_bias = part("attn_v", c.q_size + c.k_size, c.v_size)
        return DecoderLayer(
            attn_norm=vector("attn_norm.weight"),
            attn_q=attn_q,
            attn_k=attn_k,
            attn_v=attn_v,
            attn_q_bias=attn_q_bias,
            attn_k_bias=attn_k_bias,
            attn_v_bias=attn_v_bias,
            attn_q_norm=vector("attn_q_norm.weight"),
            attn_k_norm=vector("attn_k_norm.weight"),
            attn_output=weights.matrix(prefix + "attn_output.weight"),
            attn_output_bias=vector("attn_output.bias"),
            post_attention_norm=vector("post_attention_norm.weight"),
            ffn_norm=vector("ffn_norm.weight"),
            post_ffw_norm=vector("post_ffw_norm.weight"),
        )

    # what a ubatch computes

    def forward(self, device: Device, batch: Batch) -> Any | None:
        """Queue one ubatch; returns logits [num_outputs, vocab_size] float32 on the device, None without outputs."""
        c = self.config
        x = batch.workspace.array("x", (batch.num_tokens, c.hidden_size))
        get_rows(device, self._embedding, batch.inputs.token_ids[: batch.num_tokens], x, self._embedding_scale)
        tables = self._rope_tables(device, batch)
        delta = None
        for index, layer in enumerate(self._layers):
            h = batch.workspace.array("h", x.shape)
            rms_norm(device, x, layer.attn_norm, c.rms_norm_eps, h, delta)
            last = index == c.num_layers - 1
            q = self._attention_inputs(device, batch, index, layer, h, tables[self._rope_plan.of_layer[index]])
            if last and not batch.num_outputs:
                return None  # the K/V rows are what this ubatch was for
            mixed = self._attend(device, batch, index, q)
            if last:
                x, mixed = self._take_outputs(device, batch, x, mixed)
            delta = project(device, batch, layer.attn_output, layer.attn_output_bias, mixed, "attn_out")
            self._norm_in_place(device, delta, layer.post_attention_norm)
            h = batch.workspace.array("h", x.shape)
            rms_norm(device, x, layer.ffn_norm, c.rms_norm_eps, h, delta)
            delta = self._feed_forwards[index].forward(device, batch, h)
            self._norm_in_place(device, delta, layer.post_ffw_norm)
        return self._logits(device, batch, x, delta)

    def _norm_in_place(self, device: Device, x: Any, weight: Any | None) -> None:
        if weight is not None:
            rms_norm(device, x, weight, self.config.rms_norm_eps, x)

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
        self, device: Device, batch: Batch, index: int, layer: DecoderLayer, h: Any, table: tuple[Any, Any]
    ) -> Any:
        """Queries [num_tokens, num_heads, key_length]; keys and values go into the cache."""
        c, num_tokens = self.config, batch.num_tokens
        q = project(device, batch, layer.attn_q, layer.attn_q_bias, h, "q")
        k = project(device, batch, layer.attn_k, layer.attn_k_bias, h, "k")
        v = project(device, batch, layer.attn_v, layer.attn_v_bias, h, "v")
        q_heads = q.reshape(num_tokens, c.num_heads, c.key_length)
        k_heads = k.reshape(num_tokens, c.num_kv_heads, c.key_length)
        for heads, norm in ((q_heads, layer.attn_q_norm), (k_heads, layer.attn_k_norm)):
            self._norm_in_place(device, heads, norm)
            rope(device, heads, *table, self.pairing)
        set_rows(device, k, v, batch.inputs, batch.cache.layers[index], batch.cache.kv_type, batch.record)
        return q_heads

    def _attend(self, device: Device, batch: Batch, index: int, q: Any) -> Any:
        """[num_tokens, num_heads * value_length]"""
        c = self.config
        mixed = batch.workspace.array("mixed", (batch.num_tokens, c.num_heads, c.value_length))
        shape = AttentionShape.of(batch.num_seqs, batch.longest, batch.most_rows, c.num_kv_heads)
        scratch = batch.workspace.array("attention_parts", (shape.scratch_size(c.num_heads, c.value_length),))
        flash_attention(
            device,
            q,
            batch.inputs,
            shape,
            batch.cache.layers[index],
            batch.cache.kv_type,
            self._attention[index],
            batch.record,
            scratch,
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

    def _logits(self, device: Device, batch: Batch, x: Any, delta: Any) -> Any:
        h = batch.workspace.array("h", x.shape)
        rms_norm(device, x, self._output_norm, self.config.rms_norm_eps, h, delta)
        logits = project(device, batch, self._output, self._output_bias, h, "logits")
        if self._logit_softcap:
            softcap(device, logits, self._logit_softcap, logits)
        return logits
