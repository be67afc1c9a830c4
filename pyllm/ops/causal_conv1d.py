"""causal_conv1d: a short convolution over the tokens of each sequence, channel by channel, with carried state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.input_block import InputViews
from pyllm.ops.check import check_array, require
from pyllm.ops.columns import Columns, check_columns
from pyllm.ops.l2_norm import l2_norm_ref, plan_l2_norm
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.recurrent_state import LayerState, is_own_state

if TYPE_CHECKING:
    from pyllm.device import Device


MAX_SHARED_TAPS = 8  # up to which a thread keeps several channels of all of them
FEW_TOKENS = 16  # up to which a thread has one token


@dataclass(frozen=True)
class HeadNorm:
    """Heads at the beginning of a row that are scaled to length 1.

    Attributes:
        num_heads, head_dim: columns h * head_dim to (h + 1) * head_dim - 1 are head h.
        eps: inside the square root.
    """

    num_heads: int
    head_dim: int
    eps: float


def causal_conv1d_ref(
    x: Columns,
    weight: np.ndarray,
    inputs: InputViews,
    num_seqs: int,
    state: LayerState,
    norm: HeadNorm | None,
    out: np.ndarray,
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
        if norm is not None:
            l2_norm_ref(out[start:stop], norm.num_heads, norm.head_dim, norm.eps)


def plan_causal_conv1d(
    target: Target,
    x: Columns,
    weight: Any,
    inputs: InputViews,
    num_seqs: int,
    state: LayerState,
    norm: HeadNorm | None,
    out: Any,
) -> list[KernelLaunch]:
    num_tokens, channels = out.shape
    num_taps = weight.shape[1]
    tables = (inputs.positions, inputs.token_seq, inputs.cu_seqlens, inputs.state_rows, inputs.state_epochs)
    vector = 4 if not any(n % 4 for n in _extents(x, channels, state)) and num_taps <= MAX_SHARED_TAPS else 1
    fused = norm is not None and vector > 1 and norm.head_dim in (32, 64, 128)
    few, one_seq = num_tokens <= FEW_TOKENS, num_seqs == 1
    if target.batch_invariant:
        few, one_seq = True, False
    tokens = 1 if few or num_taps > MAX_SHARED_TAPS else 8
    threads = 64 if few else 128
    eps, normed = (norm.eps, norm.num_heads * norm.head_dim) if norm is not None and fused else (0.0, 0)
    sizes = (x.start, x.row_size, channels, normed, num_tokens)
    places = (state.shape.row_size, state.window_start, len(state.shape.layers), state.index)
    args = (x.array, weight, state.values, state.marks, *tables, out, np.float32(eps), *map(np.int32, sizes + places))
    defines = {"TAPS": num_taps, "VEC": vector, "TOKENS": tokens, "THREADS": threads, "ONE_SEQ": int(one_seq)}
    defines["HEAD"] = norm.head_dim if norm is not None and fused else 0
    grid = (-(-channels // (threads * vector)), -(-num_tokens // tokens))
    launches = [KernelLaunch("causal_conv1d", "causal_conv1d", grid, (threads,), args, defines)]
    if norm is not None and not fused:
        launches += plan_l2_norm(target, out, norm.num_heads, norm.head_dim, norm.eps)
    return launches


def _extents(x: Columns, channels: int, state: LayerState) -> tuple[int, ...]:
    """What has to be a multiple of the channels that a thread has."""
    return x.start, x.row_size, channels, state.shape.row_size, state.window_start


CAUSAL_CONV1D = Op("causal_conv1d", causal_conv1d_ref, plan_causal_conv1d)


def causal_conv1d(
    device: Device,
    x: Columns,
    weight: Any,
    inputs: InputViews,
    num_seqs: int,
    state: LayerState,
    norm: HeadNorm | None,
    out: Any,
) -> None:
    """out[t, c] = silu(sum over j of weight[c, j] * x[t - kernel_size + 1 + j, c]), within each sequence;
    then `l2_norm` of the heads that `norm` names.

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
        norm: heads at the beginning of each row of out that are scaled to length 1; None: none.
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
    if norm is not None:
        fits = 0 < norm.num_heads * norm.head_dim <= channels
        require(fits, "causal_conv1d", f"{norm.num_heads} heads of {norm.head_dim}, {channels} channels")
    device.launch(CAUSAL_CONV1D, x, weight, inputs, num_seqs, state, norm, out)
