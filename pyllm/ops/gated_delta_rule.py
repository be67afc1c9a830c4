"""gated_delta_rule: linear attention with a decaying matrix memory that is corrected instead of added to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputViews
from pyllm.ops.check import check_array, require
from pyllm.ops.columns import Columns, check_columns
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.product_tile import SHARED_KIB
from pyllm.recurrent_state import LayerState, is_own_state, report_state

if TYPE_CHECKING:
    from pyllm.device import Device

CHUNK = 64  # tokens that the reference takes at once
FEW = 8  # tokens of a sequence up to which the reference takes one after the other
TOKEN_BY_TOKEN = 20  # tokens of a sequence up to which kernels do so
DEVICE_CHUNK = 32  # tokens that kernels take at once
SLICE, CHUNK_WARPS = 32, 4  # rows of a matrix, and warps, of a block of gated_delta_rule_chunks
COUPLE_THREADS = 256
ROWS_OF_ONE, ROWS = 8, 16  # rows of a matrix that a block of gated_delta_rule has
THREADS_OF_ONE, THREADS = 16, 8  # of a row, at most
LINEAR_FROM = 20.0  # softplus(x) is x from here on in float32


@dataclass(frozen=True)
class DeltaHeads:
    """How the heads lie in a row of q, k and v.

    Attributes:
        num_k_heads: heads of queries and of keys.
        num_v_heads: heads of values, a multiple of that.
        head_dim: elements of each head.
        tiled: value head h uses key head h % num_k_heads; otherwise h // (num_v_heads / num_k_heads).
    """

    num_k_heads: int
    num_v_heads: int
    head_dim: int
    tiled: bool

    @property
    def k_size(self) -> int:
        """Elements of all keys of a token."""
        return self.num_k_heads * self.head_dim

    @property
    def v_size(self) -> int:
        """Elements of all values of a token."""
        return self.num_v_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Elements of q, k and v of a token side by side."""
        return 2 * self.k_size + self.v_size

    @property
    def k_head(self) -> np.ndarray:
        """[num_v_heads], the key head of each value head."""
        heads = np.arange(self.num_v_heads)
        return heads % self.num_k_heads if self.tiled else heads // (self.num_v_heads // self.num_k_heads)


def gated_delta_rule_ref(
    qkv: np.ndarray,
    beta: Columns,
    alpha: Columns,
    decay: np.ndarray,
    dt_bias: np.ndarray,
    heads: DeltaHeads,
    inputs: InputViews,
    num_seqs: int,
    longest: int,
    state: LayerState,
    record: np.ndarray,
    scratch: np.ndarray | None,
    out: np.ndarray,
) -> None:
    for seq in range(num_seqs):
        start, stop = int(inputs.cu_seqlens[seq]), int(inputs.cu_seqlens[seq + 1])
        if start == stop:
            continue
        row = int(inputs.state_rows[seq])
        if not is_own_state(inputs, seq, state):
            report_state(inputs, seq, state, record)
            state.layer_marks[row ^ 1] = 0
            out[start:stop] = 0
            continue
        q, k, v = _split_heads(qkv[start:stop], heads)
        rate, log_decay = _gates(beta.view[start:stop], alpha.view[start:stop], decay, dt_bias)
        matrices = state.matrices[row ^ 1]
        matrices[...] = state.matrices[row]
        form = by_token if stop - start <= FEW else by_chunks
        found = form(q, k, v, rate, log_decay, matrices)
        out[start:stop] = found.transpose(1, 0, 2).reshape(stop - start, -1)
        state.layer_marks[row ^ 1] = inputs.state_epochs[seq], inputs.positions[stop - 1] + 1


def _split_heads(qkv: np.ndarray, heads: DeltaHeads) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each [num_v_heads, num_tokens, head_dim]; queries scaled."""
    parts = qkv.reshape(len(qkv), -1, heads.head_dim).transpose(1, 0, 2)
    q, k, v = np.split(parts, [heads.num_k_heads, 2 * heads.num_k_heads])
    return q[heads.k_head] * np.float32(heads.head_dim**-0.5), k[heads.k_head], np.ascontiguousarray(v)


def _gates(
    beta: np.ndarray, alpha: np.ndarray, decay: np.ndarray, dt_bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Write rate and logarithm of the decay, both [num_v_heads, num_tokens] float32."""
    step = alpha + dt_bias
    softplus = np.where(step > LINEAR_FROM, step, np.log1p(np.exp(np.minimum(step, LINEAR_FROM))))
    with np.errstate(over="ignore"):  # exp(-beta) = inf gives the right limit, 0
        rate = 1 / (1 + np.exp(-beta))
    return np.ascontiguousarray(rate.T), np.ascontiguousarray((decay * softplus).T.astype(np.float32))


def by_token(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rate: np.ndarray, log_decay: np.ndarray, matrices: np.ndarray
) -> np.ndarray:
    """The definition, in the type of its arguments.

    Args:
        q, k, v: [heads, num_tokens, head_dim], q scaled.
        rate, log_decay: [heads, num_tokens].
        matrices: [heads, head_dim of v, head_dim of k], changed.

    Returns:
        [heads, num_tokens, head_dim]
    """
    out = np.empty_like(v)
    factor = np.exp(log_decay)
    for t in range(q.shape[1]):
        matrices *= factor[:, t, None, None]
        kept = np.matmul(matrices, k[:, t, :, None])[..., 0]
        correction = rate[:, t, None] * (v[:, t] - kept)
        matrices += correction[:, :, None] * k[:, t, None, :]
        out[:, t] = np.matmul(matrices, q[:, t, :, None])[..., 0]
    return out


def by_chunks(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rate: np.ndarray, log_decay: np.ndarray, matrices: np.ndarray
) -> np.ndarray:
    """The same in chunks of CHUNK tokens, as products of matrices. Arguments as `by_token`."""
    out = np.empty_like(v)
    for start in range(0, q.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        out[:, part] = _chunk(q[:, part], k[:, part], v[:, part], rate[:, part], log_decay[:, part], matrices)
    return out


def _chunk(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rate: np.ndarray, log_decay: np.ndarray, matrices: np.ndarray
) -> np.ndarray:
    """One chunk.

    What token i adds to the memory depends on what the tokens before it in the chunk added: a triangular system, whose
    inverse turns values and keys into those of independent tokens (the WY form of a product of reflections).
    """
    total = np.cumsum(log_decay, axis=1, dtype=np.float64)  # differences of large sums: in float64
    between = np.tril(np.ones((q.shape[1],) * 2, bool))
    decays = np.exp(np.where(between, total[:, :, None] - total[:, None, :], -np.inf)).astype(q.dtype)
    since_start = np.exp(total).astype(q.dtype)[:, :, None]
    until_end = np.exp(total[:, -1:] - total).astype(q.dtype)[:, :, None]
    keys_t = k.transpose(0, 2, 1)
    coupling = np.tril(rate[:, :, None] * np.matmul(k, keys_t) * decays, -1)
    inverse = _unit_lower_inverse(coupling)
    # Right-hand sides first: one product instead of two, and values and what is kept of them cancel early.
    kept = since_start * np.matmul(k, matrices.transpose(0, 2, 1))
    values = np.matmul(inverse, rate[:, :, None] * (v - kept))
    out = since_start * np.matmul(q, matrices.transpose(0, 2, 1))
    out += np.matmul(np.matmul(q, keys_t) * decays, values)
    matrices *= since_start[:, -1:]
    matrices += np.matmul(values.transpose(0, 2, 1), until_end * k)
    return out


def _unit_lower_inverse(strict: np.ndarray) -> np.ndarray:
    """(I + strict)⁻¹ for strictly lower triangular matrices [heads, n, n], by substitution: products of powers, which
    are the same on paper, lose all digits in float32 when keys resemble each other."""
    size = strict.shape[1]
    inverse = np.zeros_like(strict)
    for row in range(size):
        if row:
            inverse[:, row, :row] = -np.matmul(strict[:, row, None, :row], inverse[:, :row, :row])[:, 0]
        inverse[:, row, row] = 1
    return inverse


def plan_gated_delta_rule(
    target: Target,
    qkv: Any,
    beta: Columns,
    alpha: Columns,
    decay: Any,
    dt_bias: Any,
    heads: DeltaHeads,
    inputs: InputViews,
    num_seqs: int,
    longest: int,
    state: LayerState,
    record: Any,
    scratch: Any,
    out: Any,
) -> list[KernelLaunch]:
    dim, num_tokens = heads.head_dim, qkv.shape[0]
    require(dim % 32 == 0, "gated_delta_rule", f"heads of {dim}; the kernel needs a multiple of 32")
    tables = (inputs.positions, inputs.cu_seqlens, inputs.seq_ids, inputs.state_rows, inputs.state_epochs)
    gates = (beta.array, alpha.array, decay, dt_bias)
    columns = (beta.start, beta.row_size, alpha.start, alpha.row_size)
    counts = (heads.num_k_heads, heads.num_v_heads)
    sizes = (state.shape.row_size, state.matrix_start, len(state.shape.layers), state.index, state.layer)
    defines = {"HEAD_DIM": dim, "TILED": int(heads.tiled)}
    launches, few = [], longest
    if scratch is not None:
        few = TOKEN_BY_TOKEN
        numbers = map(np.int32, (*columns, *counts, num_seqs, few, _slot_size(heads)))
        args = (qkv, *gates, inputs.cu_seqlens, scratch, *numbers)
        launches.append(_couple_launch(heads, _num_slots(num_tokens, num_seqs), args, defines))
        numbers = map(np.int32, (*counts, *sizes, few, _slot_size(heads)))
        args = (qkv, state.values, state.marks, *tables, record, scratch, out, *numbers)
        launches.append(_chunks_launch(target, heads, num_seqs, args, defines))
    if scratch is None or num_seqs > 1:
        numbers = map(np.int32, (*columns, *counts, *sizes, few))
        args = (qkv, *gates, state.values, state.marks, *tables, record, out, *numbers)
        one = longest == 1 and num_seqs == num_tokens and not target.batch_invariant
        launches.append(_token_launch(heads, num_seqs, one, args, defines))
    return launches


def _token_launch(
    heads: DeltaHeads, num_seqs: int, one: bool, args: tuple[Any, ...], defines: dict[str, int]
) -> KernelLaunch:
    """Sequences of few tokens, one token after the other."""
    rows = ROWS_OF_ONE if one else ROWS
    threads = min(THREADS_OF_ONE if one else THREADS, heads.head_dim // 4)
    grid, block = (heads.head_dim // rows, heads.num_v_heads, num_seqs), (threads * rows,)
    defines = {**defines, "THREADS_OF_ROW": threads, "ROWS_OF_BLOCK": rows, "ONE": int(one)}
    return KernelLaunch("gated_delta_rule", "gated_delta_rule", grid, block, args, defines)


def _couple_launch(heads: DeltaHeads, slots: int, args: tuple[Any, ...], defines: dict[str, int]) -> KernelLaunch:
    """What chunks of the other sequences have to do with themselves."""
    grid, name = (slots, heads.num_k_heads), "gated_delta_rule_couple"
    return KernelLaunch(name, name, grid, (COUPLE_THREADS,), args, defines, _couple_shared_bytes(heads.head_dim))


def _chunks_launch(
    target: Target, heads: DeltaHeads, num_seqs: int, args: tuple[Any, ...], defines: dict[str, int]
) -> KernelLaunch:
    """From chunk to chunk of them."""
    dim, name, stages = heads.head_dim, "gated_delta_rule_chunks", _stages(target, heads.head_dim)
    grid, block = (dim // SLICE, heads.num_v_heads, num_seqs), (CHUNK_WARPS * target.warp_size,)
    defines, shared = {**defines, "STAGES": stages}, _chunks_shared_bytes(dim, stages)
    return KernelLaunch(name, name, grid, block, args, defines, shared)


def scratch_shape(
    target: Target | None, heads: DeltaHeads, num_tokens: int, num_seqs: int, longest: int
) -> tuple[int, int] | None:
    """Shape of the float32 scratch that `gated_delta_rule` needs on a target; None: none.

    Args:
        num_tokens, num_seqs: of the ubatch.
        longest: tokens of the longest sequence.
    """
    if target is None or target.batch_invariant or longest <= TOKEN_BY_TOKEN or not _stages(target, heads.head_dim):
        return None
    return _num_slots(num_tokens, num_seqs), _slot_size(heads)


def _num_slots(num_tokens: int, num_seqs: int) -> int:
    """At least as many as all sequences have chunks, each sequence's last one being incomplete."""
    return num_tokens // DEVICE_CHUNK + num_seqs


def _slot_size(heads: DeltaHeads) -> int:
    """float32 elements that a chunk has in the scratch."""
    keys, pairs, gates = 2 * DEVICE_CHUNK * heads.head_dim, 2 * DEVICE_CHUNK**2, 2 * DEVICE_CHUNK
    return heads.num_k_heads * keys + heads.num_v_heads * (pairs + gates)


def _couple_shared_bytes(head_dim: int) -> int:
    tiles = 2 * 4 * DEVICE_CHUNK * (head_dim + 8)
    triangles = 4 * COUPLE_THREADS * DEVICE_CHUNK
    return max(tiles, triangles) + 2 * 4 * DEVICE_CHUNK * (DEVICE_CHUNK + 1)


def _chunks_shared_bytes(head_dim: int, stages: int) -> int:
    factors = 2 * 4 * DEVICE_CHUNK * (head_dim + 8 + DEVICE_CHUNK + 8)
    stage = factors + 4 * DEVICE_CHUNK * (SLICE + 4) + 4 * 2 * DEVICE_CHUNK
    exchanged = 4 * CHUNK_WARPS * (DEVICE_CHUNK + DEVICE_CHUNK // 2) * 16
    return stages * stage + exchanged


def _stages(target: Target, head_dim: int) -> int:
    """Chunks that a block has in shared memory; 0: not even one fits."""
    limit = 1024 * SHARED_KIB.get(target.arch, 64)
    return next((n for n in (2, 1) if _chunks_shared_bytes(head_dim, n) <= limit), 0)


GATED_DELTA_RULE = Op("gated_delta_rule", gated_delta_rule_ref, plan_gated_delta_rule)


def gated_delta_rule(
    device: Device,
    qkv: Any,
    beta: Columns,
    alpha: Columns,
    decay: Any,
    dt_bias: Any,
    heads: DeltaHeads,
    inputs: InputViews,
    num_seqs: int,
    longest: int,
    state: LayerState,
    record: Any,
    scratch: Any,
    out: Any,
) -> None:
    """The gated delta rule over the tokens of each sequence. For each value head with its matrix S and its key head:

        S  = exp(decay * softplus(alpha + dt_bias)) * S
        S += sigmoid(beta) * (v - S k) kᵀ
        out = S q / sqrt(head_dim)

    S comes from row `state_rows` of the input block and goes to the other copy (that row with its lowest bit flipped),
    whose mark becomes the sequence's epoch and next position. A row whose mark is not the sequence's epoch and the
    position of its first token is not used: a STATE fault is recorded, out is 0 there, and the other copy becomes
    nobody's.

    Args:
        qkv: [num_tokens, heads.num_channels] float32: queries, keys (both of length 1), values.
        beta, alpha: [num_tokens, num_v_heads] float32.
        decay: [num_v_heads] float32, negative.
        dt_bias: [num_v_heads] float32.
        heads: how heads lie in a row.
        inputs: the device's input block.
        num_seqs: sequences of the ubatch.
        longest: tokens of the longest of them.
        state: one layer's matrices and marks; written.
        record: fault record; appended to.
        scratch: float32 of the shape that `scratch_shape` says, or None where it says None; overwritten.
        out: [num_tokens, num_v_heads * head_dim] float32.

    Numerics: float32. Where a sequence has more than a few tokens, the reference takes CHUNK of them at once, kernels
        DEVICE_CHUNK, as products whose factors are two float16 numbers each (22 bits).

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Yang et al. 2024, arXiv:2412.06464 (the rule) and arXiv:2406.06484 (its form in chunks).
    """
    op, num_tokens = "gated_delta_rule", qkv.shape[0]
    require(heads.num_v_heads % heads.num_k_heads == 0, op, f"{heads.num_v_heads} value, {heads.num_k_heads} key heads")
    check_array(op, "qkv", qkv, (None, heads.num_channels), ("float32",))
    for name, columns in (("beta", beta), ("alpha", alpha)):
        check_columns(op, name, columns, num_tokens, heads.num_v_heads)
    for name, array in (("decay", decay), ("dt_bias", dt_bias)):
        check_array(op, name, array, (heads.num_v_heads,), ("float32",))
    check_array(op, "out", out, (num_tokens, heads.v_size), ("float32",))
    check_array(op, "record", record, faults.record_shape(), ("int32",))
    wanted, found = (heads.num_v_heads, heads.head_dim, heads.head_dim), state.shape.matrix_shape
    require(found == wanted, op, f"the matrices are {found}, not {wanted}")
    needed = scratch_shape(device.target, heads, num_tokens, num_seqs, longest)
    require((scratch is None) == (needed is None), op, f"scratch of shape {needed} is needed")
    if needed is not None:
        check_array(op, "scratch", scratch, needed, ("float32",))
    given = (qkv, beta, alpha, decay, dt_bias, heads, inputs, num_seqs, longest)
    device.launch(GATED_DELTA_RULE, *given, state, record, scratch, out)
