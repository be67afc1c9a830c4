"""token_tables: the tables of a ubatch's sequences, written out for each of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllm.input_block import InputViews
from pyllm.ops.check import check_array, require
from pyllm.ops.op import KernelLaunch, Op, Target

if TYPE_CHECKING:
    from pyllm.device import Device

TABLES = {"kv_lens": "int32", "seq_ids": "int32", "page_table": "int32", "page_epochs": "uint32"}


def token_tables_ref(inputs: InputViews, num_seqs: int, out: InputViews) -> None:
    tokens = np.arange(len(out.kv_lens))
    number = inputs.cu_seqlens[num_seqs]
    out.cu_seqlens[:-1] = np.minimum(tokens, number)
    out.cu_seqlens[-1] = min(len(tokens), int(number))
    owner = inputs.token_seq[tokens]
    out.kv_lens[...] = inputs.positions[tokens] + 1
    for name in ("seq_ids", "page_table", "page_epochs"):
        getattr(out, name)[...] = getattr(inputs, name)[owner]


def plan_token_tables(target: Target, inputs: InputViews, num_seqs: int, out: InputViews) -> list[KernelLaunch]:
    num_tokens, max_pages = out.page_table.shape
    tables = (inputs.positions, inputs.token_seq, inputs.cu_seqlens, inputs.seq_ids)
    pages = (inputs.page_table, inputs.page_epochs, out.page_table, out.page_epochs)
    args = (*tables, *pages, out.cu_seqlens, out.kv_lens, out.seq_ids, *map(np.int32, (num_seqs, max_pages)))
    return [KernelLaunch("token_tables", "token_tables", (num_tokens,), (128,), args)]


TOKEN_TABLES = Op("token_tables", token_tables_ref, plan_token_tables)


def token_tables(device: Device, inputs: InputViews, num_seqs: int, out: InputViews) -> None:
    """Tables in which each token t of a ubatch is a sequence of one token, which sees the rows up to its own:

        cu_seqlens[t] = t;  kv_lens[t] = positions[t] + 1;  seq_ids, page_table, page_epochs: those of its sequence

    Args:
        inputs: the device's input block.
        num_seqs: sequences of the ubatch. Where the block was emptied, so that they have no tokens, cu_seqlens is 0.
        out: arrays of that many tokens: cu_seqlens [num_tokens + 1], kv_lens, seq_ids [num_tokens], page_table,
            page_epochs [num_tokens, P] are written, the others are left alone.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    op, (num_tokens, max_pages) = "token_tables", out.page_table.shape
    require(num_tokens <= inputs.token_seq.shape[0], op, f"{num_tokens} tokens; the block has fewer")
    require(max_pages == inputs.page_table.shape[1], op, "page tables of different widths")
    check_array(op, "cu_seqlens", out.cu_seqlens, (num_tokens + 1,), ("int32",))
    for name, dtype in TABLES.items():
        shape = (num_tokens, max_pages) if name.startswith("page") else (num_tokens,)
        check_array(op, name, getattr(out, name), shape, (dtype,))
    device.launch(TOKEN_TABLES, inputs, num_seqs, out)
