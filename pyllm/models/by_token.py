"""Attention for devices that are batch-invariant: each token of a ubatch is attended to by itself.

The kernel for few queries splits a sequence's rows by their number and by how many queries there are. With one query it
does the same for a token whether it is the only one, one of a prompt or one of many sequences. That costs reading rows
once for each token of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pyllm.device import Device
from pyllm.executor import Batch
from pyllm.input_block import InputViews
from pyllm.ops.flash_attention import NUM_COUNTERS, AttentionShape
from pyllm.ops.token_tables import TABLES, token_tables

MOST_TOKENS = 1 << 15  # of a launch: the third extent of a grid ends at 65,535


def tables_by_token(device: Device, batch: Batch) -> InputViews:
    """Queue the op that makes them; of the workspace."""
    array, num_tokens = batch.workspace.array, batch.num_tokens
    starts = array("token_cu_seqlens", (num_tokens + 1,), "int32")
    max_pages = batch.inputs.page_table.shape[1]
    tables = {
        name: array(f"token_{name}", (num_tokens, max_pages) if name.startswith("page") else (num_tokens,), dtype)
        for name, dtype in TABLES.items()
    }
    views = replace(batch.inputs, cu_seqlens=starts, **tables)
    token_tables(device, batch.inputs, batch.num_seqs, views)
    return views


def attention_parts(batch: Batch, num_heads: int, num_kv_heads: int) -> Iterator[tuple[InputViews, AttentionShape]]:
    """Inputs and extents of the launches of `flash_attention` for all tokens of a ubatch: one, or with tables by token
    as many as the counters of split rows take."""
    if batch.by_token is None:
        extents = batch.num_seqs, batch.longest, batch.most_rows, num_kv_heads, batch.all_rows
        yield batch.inputs, AttentionShape.of(*extents)
        return
    splits = AttentionShape.by_token(1, batch.most_rows).splits
    step = MOST_TOKENS if splits == 1 else max(1, NUM_COUNTERS // num_heads)
    for first in range(0, batch.num_tokens, step):
        stop = min(first + step, batch.num_tokens)
        starts = batch.by_token.cu_seqlens[first : stop + 1]
        tables = {name: getattr(batch.by_token, name)[first:stop] for name in TABLES}
        views = replace(batch.by_token, cu_seqlens=starts, **tables)
        yield views, AttentionShape.by_token(stop - first, batch.most_rows)
