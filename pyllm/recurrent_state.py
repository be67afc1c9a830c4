"""Recurrent state as ops see it: sizes, and one layer's part of the memory with the marks that say whose it is.

A *row* is one copy of one sequence's state. Rows 2s and 2s + 1 are the two copies of slot s: a step reads one and
writes the other, so that a step which breaks off leaves what it read as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputViews

COPIES = 2  # of a sequence's state
MARK_WIDTH = 2  # epoch, position
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of the recurrent layers of a model.

    Attributes:
        layers: their numbers among the layers of the model.
        kernel_size: taps of the convolution; the window holds one less.
        num_channels: of the convolution.
        num_heads: value heads, each with a matrix of its own.
        head_dim: rows and columns of that matrix.
    """

    layers: tuple[int, ...]
    kernel_size: int
    num_channels: int
    num_heads: int
    head_dim: int

    @property
    def window_shape(self) -> tuple[int, int]:
        return self.kernel_size - 1, self.num_channels

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.head_dim

    @property
    def layer_size(self) -> int:
        """float32 elements of one layer."""
        return math.prod(self.window_shape) + math.prod(self.matrix_shape)

    @property
    def row_size(self) -> int:
        """float32 elements of all layers."""
        return len(self.layers) * self.layer_size

    @property
    def sequence_bytes(self) -> int:
        """Device memory of one sequence: both copies and their marks."""
        return COPIES * (self.row_size + len(self.layers) * MARK_WIDTH) * ELEMENT_BYTES


@dataclass(frozen=True)
class LayerState:
    """One layer's part of the recurrent memory.

    Attributes:
        values: [num_rows, row_size] float32, of all layers.
        marks: [num_rows, num_layers, MARK_WIDTH] uint32, of all layers: the epoch of the sequence that a layer's row
            belongs to (0: nobody's), and its position: how many tokens it has seen.
        shape: sizes.
        index: which of the recurrent layers.
    """

    values: Any
    marks: Any
    shape: RecurrentShape
    index: int

    @property
    def layer(self) -> int:
        """Number in the model, for fault records."""
        return self.shape.layers[self.index]

    @property
    def window_start(self) -> int:
        """Where in a row of values the window begins."""
        return self.index * self.shape.layer_size

    @property
    def matrix_start(self) -> int:
        """Where in a row of values the matrices begin."""
        return self.window_start + math.prod(self.shape.window_shape)

    @property
    def windows(self) -> Any:
        """[num_rows, kernel_size - 1, num_channels], a view: the last inputs of the convolution, oldest first."""
        part = self.values[:, self.window_start : self.matrix_start]
        return part.reshape(len(part), *self.shape.window_shape)

    @property
    def matrices(self) -> Any:
        """[num_rows, num_heads, head_dim of values, head_dim of keys], a view."""
        part = self.values[:, self.matrix_start : self.window_start + self.shape.layer_size]
        return part.reshape(len(part), *self.shape.matrix_shape)

    @property
    def layer_marks(self) -> Any:
        """[num_rows, MARK_WIDTH], a view."""
        return self.marks[:, self.index]


def is_own_state(inputs: InputViews, seq: int, state: LayerState) -> bool:
    """Whether the row that a sequence is to go on from is its own and stands where its next token does. For references;
    of a sequence that has tokens."""
    position = int(inputs.positions[inputs.cu_seqlens[seq]])
    epoch, reached = state.layer_marks[inputs.state_rows[seq]].tolist()
    return epoch != 0 and epoch == int(inputs.state_epochs[seq]) and reached == position


def report_state(inputs: InputViews, seq: int, state: LayerState, record: np.ndarray) -> None:
    """Append a STATE fault about a row for which `is_own_state` is false."""
    row, position = int(inputs.state_rows[seq]), int(inputs.positions[inputs.cu_seqlens[seq]])
    epoch, reached = state.layer_marks[row].tolist()
    wanted = int(inputs.state_epochs[seq])
    differing = (wanted, epoch) if epoch != wanted else (position, reached)
    expected, found = (value & 0x7FFFFFFF for value in differing)
    entry = [faults.FaultKind.STATE, int(inputs.seq_ids[seq]), state.layer, -1, row, position, expected, found]
    faults.report(record, np.array([entry], np.int32))
