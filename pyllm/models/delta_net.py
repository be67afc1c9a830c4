"""Gated DeltaNet: the layer that hybrid models have instead of attention in most of their blocks.

    q, k, v = silu(conv(W_qkv h));  q, k scaled to length 1 per head
    out     = rms_norm(gated_delta_rule(q, k, v, W_beta h, W_alpha h)) * silu(W_gate h)

and the block goes on with W_out out, as it does behind attention. Source: Yang et al. 2024, arXiv:2412.06464.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyllm.device import Device
from pyllm.errors import ModelFileError
from pyllm.executor import Batch
from pyllm.gguf_file import GGUFModel
from pyllm.models.config import MAX_WIDTH
from pyllm.models.project import project
from pyllm.models.weights import TensorSpec, Weights
from pyllm.ops.causal_conv1d import CAUSAL_CONV1D, HeadNorm, causal_conv1d
from pyllm.ops.columns import Columns
from pyllm.ops.gated_delta_rule import GATED_DELTA_RULE, DeltaHeads, gated_delta_rule, scratch_shape
from pyllm.ops.gated_rms_norm import GATED_RMS_NORM, gated_rms_norm
from pyllm.ops.product_plan import Norm
from pyllm.recurrent_state import LayerState

MAX_TAPS = 64
OPS = (CAUSAL_CONV1D, GATED_DELTA_RULE, GATED_RMS_NORM)


@dataclass(frozen=True)
class DeltaSizes:
    """Attributes:
    kernel_size: taps of the convolution.
    num_k_heads, num_v_heads, head_dim: heads of q and k, of v, and the elements of each.
    """

    kernel_size: int
    num_k_heads: int
    num_v_heads: int
    head_dim: int

    @classmethod
    def from_gguf(cls, gguf: GGUFModel) -> DeltaSizes:
        """Read and check the ssm keys.

        Raises:
            ModelFileError: a key is missing or they do not fit together.
        """

        def size(name: str, maximum: int = MAX_WIDTH) -> int:
            return gguf.get_int(gguf.arch_key(f"ssm.{name}"), minimum=1, maximum=maximum)

        sizes = cls(size("conv_kernel", MAX_TAPS), size("group_count"), size("time_step_rank"), size("state_size"))
        inner, key = size("inner_size"), gguf.arch_key("ssm.inner_size")
        if inner != sizes.num_v_heads * sizes.head_dim or sizes.num_v_heads % sizes.num_k_heads:
            raise ModelFileError(
                f"{gguf.path}: {key} is {inner}, with {sizes.num_v_heads} value heads of {sizes.head_dim} elements and "
                f"{sizes.num_k_heads} key heads: these do not fit together; the file is damaged"
            )
        return sizes

    def heads(self, tiled: bool) -> DeltaHeads:
        return DeltaHeads(self.num_k_heads, self.num_v_heads, self.head_dim, tiled)


class DeltaNet:
    """One such layer.

    Args:
        heads: how its heads lie in the file.
    """

    def __init__(self, weights: Weights, prefix: str, heads: DeltaHeads, eps: float) -> None:
        names = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
        self._projections = tuple(weights.matrix(f"{prefix}{name}.weight") for name in names)
        self._conv = weights.vector(prefix + "ssm_conv1d.weight")
        self._decay = weights.vector(prefix + "ssm_a")
        self._dt_bias = weights.vector(prefix + "ssm_dt.bias")
        self._norm = weights.vector(prefix + "ssm_norm.weight")
        self._heads = heads
        self._eps = eps

    @staticmethod
    def specs(sizes: DeltaSizes, prefix: str, hidden_size: int) -> Iterator[TensorSpec]:
        """Tensors of the layer, apart from its two norms over the hidden size."""
        heads, num_v = sizes.heads(False), sizes.num_v_heads
        yield TensorSpec(prefix + "attn_qkv.weight", (heads.num_channels, hidden_size))
        yield TensorSpec(prefix + "attn_gate.weight", (heads.v_size, hidden_size))
        yield TensorSpec(prefix + "ssm_beta.weight", (num_v, hidden_size))
        yield TensorSpec(prefix + "ssm_alpha.weight", (num_v, hidden_size))
        yield TensorSpec(prefix + "ssm_conv1d.weight", (heads.num_channels, sizes.kernel_size), exact=True)
        yield TensorSpec(prefix + "ssm_a", (num_v,))
        yield TensorSpec(prefix + "ssm_dt.bias", (num_v,))
        yield TensorSpec(prefix + "ssm_norm.weight", (sizes.head_dim,))
        yield TensorSpec(prefix + "ssm_out.weight", (hidden_size, heads.v_size))

    def forward(self, device: Device, batch: Batch, x: Any, norm: Norm, state: LayerState) -> Any:
        """Queue the ops for the residual stream x; returns [num_tokens, num_v_heads * head_dim]."""
        heads, array, num_tokens = self._heads, batch.workspace.array, batch.num_tokens
        widths = [weight.shape[0] for weight in self._projections]
        projected = project(
            device, batch, x, self._projections, array("delta_inputs", (num_tokens, sum(widths))), norm=norm
        )
        mixed, gate, beta, alpha = Columns.side_by_side(projected, widths)
        qkv = array("delta_qkv", (num_tokens, heads.num_channels))
        scaled = HeadNorm(2 * heads.num_k_heads, heads.head_dim, self._eps)
        causal_conv1d(device, mixed, self._conv, batch.inputs, batch.num_seqs, state, scaled, qkv)
        rule = array("delta_out", (num_tokens, heads.v_size))
        needed = scratch_shape(device.target, heads, num_tokens, batch.num_seqs, batch.longest)
        scratch = None if needed is None else array("delta_scratch", needed)
        gated_delta_rule(
            *(device, qkv, beta, alpha, self._decay, self._dt_bias, heads),
            *(batch.inputs, batch.num_seqs, batch.longest, state, batch.record, scratch, rule),
        )
        out = array("delta_gated", (num_tokens, heads.v_size), device.activation_dtype)
        gated_rms_norm(device, rule, self._norm, self._eps, gate, out)
        return out
