"""Cases of `pyllm kernels test` and of `pyllm kernels bench`'s arguments: ops of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from pyllm import faults
from pyllm.input_block import InputLayout, InputViews
from pyllm.kernel_check import Arguments, Case
from pyllm.ops.causal_conv1d import CAUSAL_CONV1D, HeadNorm
from pyllm.ops.columns import Columns
from pyllm.ops.copy_state import COPY_STATE
from pyllm.ops.fill_state import FILL_STATE
from pyllm.ops.gated_add import GATED_ADD
from pyllm.ops.gated_delta_rule import GATED_DELTA_RULE, DeltaHeads, scratch_shape
from pyllm.ops.gated_rms_norm import GATED_RMS_NORM
from pyllm.ops.l2_norm import L2_NORM
from pyllm.ops.load_state import LOAD_STATE
from pyllm.ops.op import Target
from pyllm.ops.reset_state import RESET_STATE
from pyllm.ops.sigmoid_mul import SIGMOID_MUL
from pyllm.recurrent_cache import StateRows
from pyllm.recurrent_state import COPIES, MARK_WIDTH, LayerState, RecurrentShape

HALF = 2.0**-11  # relative error of a rounding to f16
TAPS = 4
EPS = 1e-6
ANY_TARGET = Target("host", "host", 32, "mma")  # sizes of scratch are the same for all
_POSITION = 7  # at which sequences stand

Rng = np.random.Generator


def delta_shape(heads: DeltaHeads, num_layers: int = 1) -> RecurrentShape:
    """Recurrent layers with these heads."""
    return RecurrentShape(tuple(range(num_layers)), TAPS, heads.num_channels, heads.num_v_heads, heads.head_dim)


def state_rows(rng: Rng, shape: RecurrentShape, num_slots: int, epochs: Sequence[int] = ()) -> StateRows:
    """Random states; the first row of slot s is marked with epochs[s] and the position at which sequences stand."""
    values = rng.standard_normal((COPIES * num_slots, shape.row_size), np.float32)
    marks = np.zeros((COPIES * num_slots, len(shape.layers), MARK_WIDTH), np.uint32)
    for slot, epoch in enumerate(epochs):
        marks[COPIES * slot] = epoch, _POSITION
    return StateRows(values, marks)


def sequences(counts: Sequence[int], epochs: Sequence[int]) -> InputViews:
    """Inputs of a ubatch: sequence s goes on from the first row of slot s."""
    layout = InputLayout(sum(counts), len(counts), 1)
    inputs = layout.views(np.zeros(layout.num_bytes, np.uint8))
    inputs.cu_seqlens[1:] = np.cumsum(counts)
    inputs.token_seq[:] = np.repeat(np.arange(len(counts)), counts)
    inputs.positions[:] = np.concatenate([_POSITION + np.arange(count) for count in counts])
    inputs.seq_ids[:] = 100 + np.arange(len(counts))
    inputs.state_rows[:] = COPIES * np.arange(len(counts))
    inputs.state_epochs[:] = epochs
    return inputs


def recurrent_cases() -> Iterator[Case]:
    """Cases of all of these ops."""
    for counts in ((1,), (2, 1, 33)):
        yield Case(CAUSAL_CONV1D, _tokens(counts), partial(_conv, counts, 5, None), (4, 6))
        for dim in (32, 20):
            name = f"{_tokens(counts)}, heads of {dim} scaled"
            yield Case(CAUSAL_CONV1D, name, partial(_conv, counts, 8, HeadNorm(2, dim, EPS)), (4, 6))
    few, tiled = DeltaHeads(2, 6, 32, False), DeltaHeads(1, 2, 64, True)
    ubatches: tuple[tuple[DeltaHeads, tuple[int, ...]], ...]
    ubatches = ((few, (1, 1)), (few, (5, 70)), (tiled, (3,)), (tiled, (40, 1, 17)))
    large = DeltaHeads(2, 4, 128, True)
    for heads, ubatch in (*ubatches, (large, (300, 1, 9)), (large, (2048,))):
        name = f"{_tokens(ubatch)}, {heads.num_v_heads} heads of {heads.head_dim}"
        arguments = partial(_rule, heads, ubatch, False)
        yield Case(GATED_DELTA_RULE, name, arguments, (9, 12), floor=2e-6, large=heads is large)
    for ubatch in ((2, 3), (40, 33)):
        name = f"{_tokens(ubatch)}, a foreign state"
        yield Case(GATED_DELTA_RULE, name, partial(_rule, few, ubatch, True), (10, 12), floor=2e-6)
    for heads_of_row, dim in ((1, 32), (3, 97)):
        yield Case(L2_NORM, f"5 x {heads_of_row} x {dim}", partial(_l2_norm, heads_of_row, dim), (0,))
        for dtype, floor in ((np.float32, 1e-6), (np.float16, HALF)):
            name = f"5 x {heads_of_row} x {dim}, {np.dtype(dtype).name}"
            yield Case(GATED_RMS_NORM, name, partial(_gated_norm, heads_of_row, dim, dtype), (4,), floor=floor)
    for dtype, floor in ((np.float32, 1e-6), (np.float16, HALF)):
        yield Case(SIGMOID_MUL, f"3 x 97, {np.dtype(dtype).name}", partial(_sigmoid_mul, dtype), (2,), floor=floor)
        yield Case(GATED_ADD, f"3 x 97, {np.dtype(dtype).name}", partial(_gated_add, dtype), (3,))
    for op in (RESET_STATE, FILL_STATE, COPY_STATE, LOAD_STATE):
        position = 4 if op is LOAD_STATE else 0
        for layers in (1, 2):
            yield Case(op, f"{layers} layers", partial(_whole_rows, op.name, layers), (position,), floor=None)


def _tokens(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts)) + " tokens"


def _layer(rng: Rng, shape: RecurrentShape, epochs: Sequence[int]) -> LayerState:
    rows = state_rows(rng, shape, len(epochs), epochs)
    return LayerState(rows.values, rows.marks, shape, len(shape.layers) - 1)


def _conv(counts: Sequence[int], before: int, norm: HeadNorm | None, rng: Rng) -> Arguments:
    heads, epochs = DeltaHeads(1, 2, 32, True), range(1, 1 + len(counts))
    x = rng.standard_normal((sum(counts), heads.num_channels + before + 4), np.float32)
    weight = rng.standard_normal((heads.num_channels, TAPS), np.float32)
    out = np.full((sum(counts), heads.num_channels), np.nan, np.float32)
    state = _layer(rng, delta_shape(heads, 2), epochs)
    columns = Columns(x, before, heads.num_channels)
    return columns, weight, sequences(counts, epochs), len(counts), state, norm, out


def _rule(heads: DeltaHeads, counts: Sequence[int], foreign: bool, rng: Rng) -> Arguments:
    count, epochs, num_v = sum(counts), range(1, 1 + len(counts)), heads.num_v_heads
    rates = rng.standard_normal((count, 2 * num_v + 3), np.float32)
    gates = -np.exp(rng.standard_normal(num_v, np.float32)), rng.standard_normal(num_v, np.float32)
    inputs, state = sequences(counts, epochs), _layer(rng, delta_shape(heads, 2), epochs)
    if foreign:
        state.marks[2] = 99, _POSITION
    return (
        *(delta_qkv(rng, heads, count), Columns(rates, 1, num_v), Columns(rates, 2 + num_v, num_v), *gates),
        *(heads, inputs, len(counts), max(counts), state, np.zeros(faults.record_shape(), np.int32)),
        *(rule_scratch(heads, counts), np.full((count, heads.v_size), np.nan, np.float32)),
    )


def rule_scratch(heads: DeltaHeads, counts: Sequence[int]) -> np.ndarray | None:
    """What kernels need for sequences of so many tokens."""
    shape = scratch_shape(ANY_TARGET, heads, sum(counts), len(counts), max(counts))
    return None if shape is None else np.full(shape, np.nan, np.float32)


def delta_qkv(rng: Rng, heads: DeltaHeads, count: int) -> np.ndarray:
    """Queries and keys of length 1, and values: [count, num_channels]."""
    qkv = rng.standard_normal((count, heads.num_channels), np.float32)
    keys = qkv[:, : 2 * heads.k_size].reshape(count, -1, heads.head_dim)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return qkv


def _l2_norm(num_heads: int, dim: int, rng: Rng) -> Arguments:
    return rng.standard_normal((5, num_heads * dim + 3), np.float32), num_heads, dim, EPS


def _gated_norm(num_heads: int, dim: int, dtype: type, rng: Rng) -> Arguments:
    x, wider = (rng.standard_normal((5, num_heads * dim + extra), np.float32) for extra in (0, 7))
    out: np.ndarray = np.full(x.shape, np.nan, dtype)
    return x, rng.standard_normal(dim, np.float32), EPS, Columns(wider, 3, num_heads * dim), out


def _sigmoid_mul(dtype: type, rng: Rng) -> Arguments:
    gate, x = (rng.standard_normal((3, 97), np.float32) for _ in range(2))
    return 3 * gate, x.astype(dtype), np.full((3, 97), np.nan, dtype)


def _gated_add(dtype: type, rng: Rng) -> Arguments:
    h, x, out = (rng.standard_normal((3, size), np.float32) for size in (300, 97, 97))
    return h.astype(dtype), rng.standard_normal(300, np.float32) / 8, x.astype(dtype), out


def _whole_rows(name: str, num_layers: int, rng: Rng) -> Arguments:
    shape = delta_shape(DeltaHeads(1, 1, 32, True), num_layers)
    rows = state_rows(rng, shape, 2, (11, 12))
    saved = state_rows(rng, shape, 1, (11,))
    saved.marks[0, 1:] = rows.marks[0, 1:] = 13, _POSITION  # a layer of somebody else
    return {
        "reset_state": (rows, 3, 21),
        "fill_state": (rows, 2, 0x5A),
        "copy_state": (rows, 0, 3, 11, _POSITION, 21),
        "load_state": (saved.values[0], saved.marks[0], 11, _POSITION, rows, 1, 21),
    }[name]
