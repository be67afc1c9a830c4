"""causal_conv1d: a short convolution over the tokens of each sequence, channel by channel, with carried state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.input_block import InputViews
from pyllm.ops.check import check_array, require
from pyllm.ops.columns import Columns, check_columns
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.recurrent_state import LayerState, is_own_state

if TYPE_CHECKING:
    from pyllm.device import Device


def causal_conv1d_ref(
    x: Columns, weight: np.ndarray, inputs: InputViews, num_seqs: int, state: LayerState, out: np.ndarray
) -> None:
    num_taps = weight.shape[1]
    for seq in range(num_seqs):
        start, stop = int(inputs.cu_seqlens[seq]), int(inputs.cu_seqlens[seq + 1])
        if start == stop:
            continue
        if not is_own_state(inputs, seq, state):
            out[start:stop] = 0
            continue
        row, count = int(inputs.state_rows[seq]), stop - start
        history = np.concatenate([state.windows[row], x.view[start:stop]])
        state.windows[row ^ 1] = history[count:]
        total = history[:count] * weight[:, 0]
        for tap in range(1, num_taps):
            total += history[tap : tap + count] * weight[:, tap]
        with np.errstate(over="ignore"):  # exp(-total) = inf gives the right limit, 0
            np.divide(total, 1 + np.exp(-total), out=out[start:stop])


def plan_causal_conv1d(
    target: Target, x: Columns, weight: Any, inputs: InputViews, num_seqs: int, state: LayerState, out: Any
) -> list[KernelLaunch]:
    num_tokens, channels = out.shape
    tables = (inputs.positions, inputs.token_seq, inputs.cu_seqlens, inputs.state_rows, inputs.state_epochs)
    sizes = (x.start, x.row_size, channels, state.shape.row_size, state.window_start, len(state.shape.layers))
    args = (x.array, weight, state.values, state.marks, *tables, out, *map(np.int32, (*sizes, state.index)))
    grid = (-(-channels // 256), num_tokens)
    return [KernelLaunch("causal_conv1d", "causal_conv1d", grid, (256,), args, {"TAPS": weight.shape[1]})]


CAUSAL_CONV1D = Op("causal_conv1d", causal_conv1d_ref, plan_causal_conv1d)


def causal_conv1d(
    device: Device, x: Columns, weight: Any, inputs: InputViews, num_seqs: int, state: LayerState, out: Any
) -> None:
    """out[t, c] = silu(sum over j of weight[c, j] * x[t - kernel_size + 1 + j, c]), within each sequence.

    What stands before the ubatch's first token of a sequence comes from its window, row `state_rows` of the input
    block; the last kernel_size - 1 rows of x go to the window of the other copy (that row with its lowest bit flipped).

    A row whose mark is not the sequence's epoch and position is not used: out is 0 there and no window is written.
    `gated_delta_rule`, which comes after, makes the same check and reports it.

    Args:
        x: [num_tokens, num_channels] float32.
        weight: [num_channels, kernel_size] float32, the oldest tap first.
        inputs: the device's input block.
        num_seqs: sequences of the ubatch.
        state: one layer's windows and marks; windows are written.
        out: [num_tokens, num_channels] float32; must not overlap x.

    Numerics: float32.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Yang et al. 2024, arXiv:2412.06464 (Gated DeltaNet), and the short convolutions of Mamba, arXiv:2312.00752.
    """
    check_array("causal_conv1d", "weight", weight, (None, None), ("float32",))
    channels, num_taps = weight.shape
    check_columns("causal_conv1d", "x", x, None, channels)
    check_array("causal_conv1d", "out", out, (x.array.shape[0], channels), ("float32",))
    window = state.shape.window_shape
    require(window == (num_taps - 1, channels), "causal_conv1d", f"the windows are {window}, weight is {weight.shape}")
    device.launch(CAUSAL_CONV1D, x, weight, inputs, num_seqs, state, out)
