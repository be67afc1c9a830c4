"""The inputs of one ubatch as one block of bytes: laid out here once, for host slots and the device block alike.

A slot is pinned memory that the host fills; the block is device memory with a fixed address that the kernels read. The
first op of every ubatch copies a slot into the block. Both have this layout, so the copy is one flat copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

# What `--inputs zero-copy` leaves in the slot: all that says where K/V rows lie. Neighbours in memory. Extents are not
# among them: an op whose extents changed while it runs could leave its arrays.
IN_PLACE = ("positions", "token_seq", "row_ids", "page_table", "page_epochs")

FIELD_ALIGNMENT = 64  # bytes, so that every field can be read with vector loads


@dataclass(frozen=True)
class InputViews:
    """Views of one slot or block. T = tokens, S = sequences, P = pages per sequence, all at their capacity.

    Attributes:
        head_serial, tail_serial: [1] int64. Number of the ubatch, counted from 1; first and last word of the block.
        status: [1] int32. On the device: 0 when the last copy was sound. Slots hold 0.
        token_ids: [T] int32; in slots -1 - i stands for the token that is kept at place i.
        positions: [T] int32, position of each token in its sequence.
        token_seq: [T] int32, which of the ubatch's sequences (0..S-1) each token belongs to.
        row_ids: [T] int64, physical K/V row of each token; -1 writes nothing.
        out_tokens: [T] int32, for each output row the token of the ubatch that it belongs to.
        out_places: [T] int32, for each output row where its likeliest token is kept for a later step; -1: nowhere.
        cu_seqlens: [S+1] int32. Tokens of sequence s are cu_seqlens[s] .. cu_seqlens[s+1]-1.
        kv_lens: [S] int32, rows that sequence s holds once this ubatch is written.
        seq_ids: [S] int32, what fault records call the sequence.
        page_table: [S, P] int32, physical pages of each sequence.
        page_epochs: [S, P] uint32, the tag that rows of these pages must carry.
        state_rows: [S] int32, recurrent state that sequence s goes on from; its slot's other row is written.
        state_epochs: [S] uint32, whose that row must be.
    """

    head_serial: Any
    status: Any
    token_ids: Any
    positions: Any
    token_seq: Any
    row_ids: Any
    out_tokens: Any
    out_places: Any
    cu_seqlens: Any
    kv_lens: Any
    seq_ids: Any
    page_table: Any
    page_epochs: Any
    state_rows: Any
    state_epochs: Any
    tail_serial: Any


@dataclass(frozen=True)
class InputLayout:
    """Sizes and offsets.

    Args:
        max_tokens: of one ubatch.
        max_seqs: sequences in one ubatch.
        max_pages: of one sequence.
    """

    max_tokens: int
    max_seqs: int
    max_pages: int

    def fields(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """Name to shape and dtype, in the order in which they lie in memory."""
        tokens, seqs, pages = self.max_tokens, self.max_seqs, self.max_pages
        return {
            "head_serial": ((1,), np.int64),
            "status": ((1,), np.int32),
            "token_ids": ((tokens,), np.int32),
            "out_tokens": ((tokens,), np.int32),
            "out_places": ((tokens,), np.int32),
            "cu_seqlens": ((seqs + 1,), np.int32),
            "kv_lens": ((seqs,), np.int32),
            "seq_ids": ((seqs,), np.int32),
            "state_rows": ((seqs,), np.int32),
            "state_epochs": ((seqs,), np.uint32),
            # IN_PLACE, as one piece:
            "positions": ((tokens,), np.int32),
            "token_seq": ((tokens,), np.int32),
            "row_ids": ((tokens,), np.int64),
            "page_table": ((seqs, pages), np.int32),
            "page_epochs": ((seqs, pages), np.uint32),
            "tail_serial": ((1,), np.int64),
        }

    def spans(self) -> dict[str, tuple[int, int]]:
        """Name to first byte and the byte behind the last; all multiples of 8 at the start."""
        return _spans(self)

    def in_place_span(self) -> tuple[int, int]:
        """First byte of the fields of IN_PLACE, and the byte behind the last; nothing else lies between."""
        names = list(self.fields())
        first = names.index(IN_PLACE[0])
        assert tuple(names[first : first + len(IN_PLACE)]) == IN_PLACE
        spans = self.spans()
        return spans[IN_PLACE[0]][0], spans[names[first + len(IN_PLACE)]][0]

    @property
    def num_bytes(self) -> int:
        """Size of a slot or block; the tail serial is its last field."""
        return self.spans()["tail_serial"][1]

    def views(self, buffer: Any) -> InputViews:
        """Views of `buffer` ([num_bytes] uint8, host or device), new objects at every call."""
        return InputViews(
            **{
                name: buffer[start:stop].view(dtype).reshape(shape)
                for name, start, stop, dtype, shape in _view_recipes(self)
            }
        )


@cache
def _spans(layout: InputLayout) -> dict[str, tuple[int, int]]:
    spans, offset = {}, 0
    for name, (shape, dtype) in layout.fields().items():
        size = math.prod(shape) * np.dtype(dtype).itemsize
        spans[name] = (offset, offset + size)
        offset = -(-(offset + size) // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
    return spans


@cache
def _view_recipes(layout: InputLayout) -> list[tuple[str, int, int, type, tuple[int, ...]]]:
    """What `views` needs, worked out once: every step makes views of its slot."""
    fields, spans = layout.fields(), _spans(layout)
    return [(name, *spans[name], dtype, shape) for name, (shape, dtype) in fields.items()]
