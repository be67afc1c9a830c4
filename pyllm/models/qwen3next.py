"""qwen3next: Qwen3-Next and Qwen3-Coder-Next, with a mixture of experts and a shared one in every block.

Files keep what the recurrent layers project per key head: ssm_ba has for each of them the write rates of its value
heads and then their decays, and older files have one tensor ssm_in with query, key, values and gates of each key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pyllm.gguf_file import GGUFModel
from pyllm.models.delta_net import DeltaSizes
from pyllm.models.feed_forward import SharedExpertFeedForward
from pyllm.models.hybrid import HybridConfig, HybridDecoder
from pyllm.models.weights import StoredRows, TensorSpec


class Qwen3Next(HybridDecoder):
    tiled = False
    feed_forward = SharedExpertFeedForward

    @classmethod
    def delta_specs(cls, gguf: GGUFModel, config: HybridConfig, prefix: str) -> Iterator[TensorSpec]:
        tables = {"ssm_ba.weight": _rate_rows(config.delta)}
        if prefix + "ssm_in.weight" in gguf.tensors:
            tables["ssm_in.weight"] = _input_rows(config.delta)
        stored = {
            prefix + weight: StoredRows(prefix + tensor, sum(map(len, parts.values())), rows)
            for tensor, parts in tables.items()
            for weight, rows in parts.items()
        }
        for spec in super().delta_specs(gguf, config, prefix):
            yield replace(spec, stored=stored.get(spec.name))


def _rate_rows(sizes: DeltaSizes) -> dict[str, np.ndarray]:
    """Rows of ssm_ba that make each weight."""
    members = sizes.num_v_heads // sizes.num_k_heads
    rows = np.arange(2 * sizes.num_v_heads).reshape(sizes.num_k_heads, 2, members)
    return {"ssm_beta.weight": rows[:, 0].reshape(-1), "ssm_alpha.weight": rows[:, 1].reshape(-1)}


def _input_rows(sizes: DeltaSizes) -> dict[str, np.ndarray]:
    """Rows of ssm_in that make each weight."""
    dim, values = sizes.head_dim, sizes.num_v_heads // sizes.num_k_heads * sizes.head_dim
    rows = np.arange(sizes.num_k_heads * 2 * (dim + values)).reshape(sizes.num_k_heads, -1)
    parts = np.split(rows, [dim, 2 * dim, 2 * dim + values], axis=1)
    q, k, v, gate = (part.reshape(-1) for part in parts)
    return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": gate}
