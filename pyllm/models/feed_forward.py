"""The second half of a block: gated feed-forward layers, dense or as a mixture of experts.

A class of this module says which tensors it needs (`specs`), refuses what it cannot do (`check`), and queues its ops
(`forward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pyllm.device import Device
from pyllm.errors import ModelFileError
from pyllm.executor import Batch
from pyllm.gguf_file import GGUFModel
from pyllm.models.config import MAX_WIDTH, TransformerConfig
from pyllm.models.project import project
from pyllm.models.weights import TensorSpec, Weights
from pyllm.ops.gated_mul_mat_id import GATED_MUL_MAT_ID, gate_needs_scratch, gated_mul_mat_id
from pyllm.ops.group_experts import GROUP_EXPERTS, ExpertLists, group_experts
from pyllm.ops.mul_mat_id import MUL_MAT_ID, expert_tile_rows, mul_mat_id
from pyllm.ops.op import Op
from pyllm.ops.product_plan import Gate, Norm
from pyllm.ops.rms_norm import rms_norm
from pyllm.ops.route import MAX_EXPERTS, ROUTE, route
from pyllm.ops.weighted_sum import WEIGHTED_SUM, weighted_sum


class DenseFeedForward:
    """W_down(silu(W_gate h) * (W_up h)): SwiGLU."""

    ops: ClassVar[tuple[Op, ...]] = ()
    """Ops beyond linear layers that a device must be able to run."""

    gate: ClassVar[Gate] = Gate.SILU
    """The activation between the products."""

    def __init__(self, gguf: GGUFModel, config: TransformerConfig, weights: Weights, prefix: str) -> None:
        self._gate, self._up, self._down = (
            weights.matrix(f"{prefix}{name}.weight") for name in ("ffn_gate", "ffn_up", "ffn_down")
        )

    @classmethod
    def check(cls, gguf: GGUFModel, config: TransformerConfig) -> None:
        """Refuse files that this class cannot run."""
        if not config.intermediate_size:
            raise ModelFileError(f"{gguf.path}: {gguf.arch_key('feed_forward_length')} is missing")

    @classmethod
    def specs(cls, gguf: GGUFModel, config: TransformerConfig, prefix: str) -> Iterator[TensorSpec]:
        """Tensors of one block."""
        wide, narrow = config.intermediate_size, config.hidden_size
        yield TensorSpec(prefix + "ffn_gate.weight", (wide, narrow))
        yield TensorSpec(prefix + "ffn_up.weight", (wide, narrow))
        yield TensorSpec(prefix + "ffn_down.weight", (narrow, wide))

    def forward(self, device: Device, batch: Batch, x: Any, norm: Norm, out: Any, accumulate: bool) -> None:
        """Queue the ops for the residual stream x [n, hidden_size]; the result goes to out, or is added to it."""
        shape = x.shape[0], self._gate.shape[0]
        hidden = batch.workspace.array("ffn_hidden", shape, device.activation_dtype)
        project(device, batch, x, (self._gate, self._up), hidden, norm=norm, gate=self.gate)
        project(device, batch, hidden, (self._down,), out, accumulate=accumulate)


class GeluFeedForward(DenseFeedForward):
    """The same with the tanh form of GELU: GEGLU."""

    gate = Gate.GELU


@dataclass(frozen=True)
class ExpertSizes:
    """Attributes:
    num_experts, num_used: in all, and per token.
    intermediate_size: width of one expert.
    """

    num_experts: int
    num_used: int
    intermediate_size: int

    @classmethod
    def from_gguf(cls, gguf: GGUFModel, config: TransformerConfig) -> ExpertSizes:
        """Read and check the expert keys."""
        num_experts = gguf.get_int(gguf.arch_key("expert_count"), minimum=1, maximum=MAX_EXPERTS)
        num_used = gguf.get_int(gguf.arch_key("expert_used_count"), minimum=1, maximum=num_experts)
        default = max(1, config.intermediate_size // num_used)
        width = gguf.get_int(gguf.arch_key("expert_feed_forward_length"), default, minimum=1, maximum=MAX_WIDTH)
        return cls(num_experts, num_used, width)


class ExpertFeedForward:
    """A mixture of experts: the router picks some for each token, their outputs are added up by its weights."""

    ops: ClassVar[tuple[Op, ...]] = (ROUTE, GROUP_EXPERTS, GATED_MUL_MAT_ID, MUL_MAT_ID, WEIGHTED_SUM)

    def __init__(self, gguf: GGUFModel, config: TransformerConfig, weights: Weights, prefix: str) -> None:
        self._sizes = ExpertSizes.from_gguf(gguf, config)
        self._router = weights.matrix(prefix + "ffn_gate_inp.weight")
        self._gate, self._up, self._down = (
            weights.matrix(f"{prefix}{name}.weight") for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        )

    @classmethod
    def check(cls, gguf: GGUFModel, config: TransformerConfig) -> None:
        """Refuse files that this class cannot run."""
        ExpertSizes.from_gguf(gguf, config)

    @classmethod
    def specs(cls, gguf: GGUFModel, config: TransformerConfig, prefix: str) -> Iterator[TensorSpec]:
        """Tensors of one block."""
        sizes, narrow = ExpertSizes.from_gguf(gguf, config), config.hidden_size
        count, wide = sizes.num_experts, sizes.intermediate_size
        yield TensorSpec(prefix + "ffn_gate_inp.weight", (count, narrow))
        yield TensorSpec(prefix + "ffn_gate_exps.weight", (count, wide, narrow))
        yield TensorSpec(prefix + "ffn_up_exps.weight", (count, wide, narrow))
        yield TensorSpec(prefix + "ffn_down_exps.weight", (count, narrow, wide))

    def forward(self, device: Device, batch: Batch, x: Any, norm: Norm, out: Any, accumulate: bool) -> None:
        """Queue the ops for the residual stream x [n, hidden_size]; the result goes to out, or is added to it."""
        array, dtype, sizes = batch.workspace.array, device.activation_dtype, self._sizes
        num_tokens, num_used = x.shape[0], sizes.num_used
        h = array("h", x.shape, dtype)
        rms_norm(device, x, norm.weight, norm.eps, h)
        logits = project(device, batch, h, (self._router,), array("router", (num_tokens, sizes.num_experts)))
        experts, weights = array("experts", (num_tokens, num_used), "int32"), array("weights", (num_tokens, num_used))
        route(device, logits, experts, weights)
        lists = self._group(device, batch, experts)
        wide = (num_tokens, num_used, sizes.intermediate_size)
        hidden, scratch = array("gate", wide, dtype), None
        if gate_needs_scratch(device.target, self._gate, self._up, lists):
            scratch = array("up", wide, dtype)
        gated_mul_mat_id(device, h[:, None, :], experts, self._gate, self._up, hidden, lists, scratch)
        down = array("expert_out", (num_tokens, num_used, h.shape[1]), dtype)
        mul_mat_id(device, hidden, experts, self._down, down, lists)
        weighted_sum(device, down, weights, out, accumulate)

    def _group(self, device: Device, batch: Batch, experts: Any) -> ExpertLists | None:
        """What products of many tokens need to know about the choice of experts."""
        num_experts = self._sizes.num_experts
        bm = expert_tile_rows(device.target, experts.size, num_experts)
        if not bm:
            return None
        size = ExpertLists.size(experts.size, num_experts, bm)
        lists = ExpertLists(batch.workspace.array("expert_lists", (size,), "int32"), bm)
        group_experts(device, experts, num_experts, lists)
        return lists
