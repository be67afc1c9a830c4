"""How many bytes one decode step has to read: weights, and K/V rows of the sequences."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from pyllm.gguf_file import GGUFModel
from pyllm.models import ARCHITECTURES
from pyllm.models.config import TransformerConfig


@dataclass(frozen=True)
class Traffic:
    """What a model reads.

    Attributes:
        dense_bytes: weights that every step reads, as stored.
        expert_bytes: weights of all experts together.
        expert_share: of them that one token needs.
        windows: rows that each attention layer looks back; 0: all.
    """

    dense_bytes: int
    expert_bytes: int
    expert_share: float
    windows: tuple[int, ...]

    def step_bytes(self, sequences: int, rows: float, kv_bytes_per_row: float) -> float:
        """Bytes of a step of one token per sequence, each behind `rows` rows.

        Experts are counted as if every token chose its own at random.
        """
        used = 1 - (1 - self.expert_share) ** sequences
        layers = [min(rows, window) if window else rows for window in self.windows]
        kv = sum(layers) / len(layers) * kv_bytes_per_row
        return self.dense_bytes + used * self.expert_bytes + sequences * kv


def traffic_of(gguf: GGUFModel) -> Traffic:
    """What the model in a file reads. The token embedding counts where it is the output matrix too."""
    dense = experts = 0
    for name, info in gguf.tensors.items():
        if name == "token_embd.weight" and "output.weight" in gguf.tensors:
            continue
        if "_exps." in name:
            experts += info.nbytes
        else:
            dense += info.nbytes
    total = gguf.get_int(gguf.arch_key("expert_count"), 0)
    share = gguf.get_int(gguf.arch_key("expert_used_count"), 0) / total if total else 0.0
    return Traffic(dense, experts, min(1.0, share), _windows(gguf))


def _windows(gguf: GGUFModel) -> tuple[int, ...]:
    module, name = ARCHITECTURES[gguf.architecture]
    model_class = getattr(import_module(module), name)
    params = model_class.attention_params(gguf, TransformerConfig.from_gguf(gguf))
    return tuple(param.window for param in params)
