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
from pyllm.models.weights import StoredRows, TensorSpec, Weights
from pyllm.ops.gated_add import GATED_ADD, gated_add
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
        fused = prefix + "ffn_gate_up_exps.weight"
        halves = {"ffn_gate_exps": slice(0, wide), "ffn_up_exps": slice(wide, 2 * wide)}
        for name, rows in halves.items():
            stored = StoredRows(fused, 2 * wide, rows) if fused in gguf.tensors else None
            yield TensorSpec(f"{prefix}{name}.weight", (count, wide, narrow), stored=stored)
        yield TensorSpec(prefix + "ffn_down_exps.weight", (count, narrow, wide))

    def forward(self, device: Device, batch: Batch, x: Any, norm: Norm, out: Any, accumulate: bool) -> None:
        """Queue the ops for the residual stream x [n, hidden_size]; the result goes to out, or is added to it."""
        h = batch.workspace.array("h", x.shape, device.activation_dtype)
        rms_norm(device, x, norm.weight, norm.eps, h)
        self._add_experts(device, batch, h, out, accumulate)

    def _add_experts(self, device: Device, batch: Batch, h: Any, out: Any, accumulate: bool) -> None:
        array, dtype, sizes = batch.workspace.array, device.activation_dtype, self._sizes
        num_tokens, num_used = h.shape[0], sizes.num_used
        logits = project(device, batch, h, (self._router,), array("router", (num_tokens, sizes.num_experts)))
        experts, weights = array("experts", (num_tokens, num_used), "int32"), array("weights", (num_tokens, num_used))
        route(device, logits, experts, weights)
        lists = self._group(device, batch, experts)
        wide = (num_tokens, num_used, sizes.intermediate_size)
        hidden, scratch = array("gate", wide, dtype), None
        if gate_needs_scratch(device.target, experts.size, self._gate, self._up, h.dtype):
            scratch = array("up", wide, dtype)
        gated_mul_mat_id(device, h[:, None, :], experts, self._gate, self._up, hidden, lists, scratch)
        down = array("expert_out", (num_tokens, num_used, h.shape[1]), dtype)
        mul_mat_id(device, hidden, experts, self._down, down, lists)
        weighted_sum(device, down, weights, out, accumulate)

    def _group(self, device: Device, batch: Batch, experts: Any) -> ExpertLists | None:
        """What products of many tokens need to know about the choice of experts."""
        num_experts = self._sizes.num_experts
        bm = expert_tile_rows(device.target, experts.size, self._gate, self._up, self._down)
        if not bm:
            return None
        size = ExpertLists.size(experts.size, num_experts, bm)
        lists = ExpertLists(batch.workspace.array("expert_lists", (size,), "int32"), bm)
        group_experts(device, experts, num_experts, lists)
        return lists


class SharedExpertFeedForward(ExpertFeedForward):
    """A mixture of experts and one expert that every token uses, as far as a gate lets it."""

    ops: ClassVar[tuple[Op, ...]] = (*ExpertFeedForward.ops, GATED_ADD)

    def __init__(self, gguf: GGUFModel, config: TransformerConfig, weights: Weights, prefix: str) -> None:
        super().__init__(gguf, config, weights, prefix)
        self._shared_gate, self._shared_up, self._shared_down = (
            weights.matrix(f"{prefix}{name}.weight") for name in ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
        )
        self._share = weights.vector(prefix + "ffn_gate_inp_shexp.weight")

    @classmethod
    def check(cls, gguf: GGUFModel, config: TransformerConfig) -> None:
        super().check(gguf, config)
        _shared_size(gguf, config)

    @classmethod
    def specs(cls, gguf: GGUFModel, config: TransformerConfig, prefix: str) -> Iterator[TensorSpec]:
        yield from super().specs(gguf, config, prefix)
        wide, narrow = _shared_size(gguf, config), config.hidden_size
        yield TensorSpec(prefix + "ffn_gate_inp_shexp.weight", (narrow,))
        yield TensorSpec(prefix + "ffn_gate_shexp.weight", (wide, narrow))
        yield TensorSpec(prefix + "ffn_up_shexp.weight", (wide, narrow))
        yield TensorSpec(prefix + "ffn_down_shexp.weight", (narrow, wide))

    def _add_experts(self, device: Device, batch: Batch, h: Any, out: Any, accumulate: bool) -> None:
        super()._add_experts(device, batch, h, out, accumulate)
        array, dtype = batch.workspace.array, device.activation_dtype
        hidden = array("shared_hidden", (h.shape[0], self._shared_gate.shape[0]), dtype)
        project(device, batch, h, (self._shared_gate, self._shared_up), hidden, gate=Gate.SILU)
        shared = project(device, batch, hidden, (self._shared_down,), array("shared_out", h.shape, dtype))
        gated_add(device, h, self._share, shared, out)


def _shared_size(gguf: GGUFModel, config: TransformerConfig) -> int:
    """Width of the shared expert."""
    default = config.intermediate_size or None
    key = gguf.arch_key("expert_shared_feed_forward_length")
    if default is None:
        return gguf.get_int(key, minimum=1, maximum=MAX_WIDTH)
    return gguf.get_int(key, default, minimum=1, maximum=MAX_WIDTH)
