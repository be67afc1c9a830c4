"""Ops of recurrent layers against their formulas in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyllm import faults
from pyllm.device import Device
from pyllm.device.emulated import EmulatedDevice
from pyllm.errors import ShapeError
from pyllm.faults import FaultKind
from pyllm.input_block import InputLayout, InputViews
from pyllm.kernel_check import check_case
from pyllm.kernel_recurrent_cases import recurrent_cases
from pyllm.ops.causal_conv1d import HeadNorm, causal_conv1d
from pyllm.ops.columns import Columns
from pyllm.ops.gated_add import gated_add
from pyllm.ops.gated_delta_rule import (
    GATED_DELTA_RULE,
    DeltaHeads,
    by_chunks,
    by_token,
    gated_delta_rule,
    scratch_shape,
)
from pyllm.ops.gated_rms_norm import gated_rms_norm
from pyllm.ops.l2_norm import l2_norm
from pyllm.ops.sigmoid_mul import sigmoid_mul
from pyllm.recurrent_cache import RecurrentCache
from pyllm.recurrent_state import RecurrentShape
from tests.ops.lives import SIZES, check_against_float64, input_views, on_device, overwrite

MAX_TOKENS = 600
# How a prompt of one repeated token is computed, and how many tokens of it without a GPU, with heads of 32 and of 128.
REPEATED = {
    "chunks": {32: 4096, 128: 1040},
    "one call, token by token": {32: 4096, 128: 1040},
    "a call for each token": {32: 260, 128: 130},
}


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def wider(device: Device, array: np.ndarray) -> Columns:
    """An array as columns of a wider one."""
    padded = np.full((array.shape[0], array.shape[1] + 12), np.nan, array.dtype)
    padded[:, 4 : 4 + array.shape[1]] = array
    return Columns(on_device(device, padded), 4, array.shape[1])


class Sequences:
    """Several sequences with states, and the input block of one ubatch of them."""

    def __init__(self, device: Device, shape: RecurrentShape, counts: list[int]) -> None:
        self.device, self.counts = device, counts
        self.cache = RecurrentCache(device, shape, len(counts))
        self.states = [self.cache.new_state() for _ in counts]
        self.record = on_device(device, np.zeros(faults.record_shape(), np.int32))

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def inputs(self, **changed: Any) -> InputViews:
        starts = [state.position for state in self.states]
        fields = {
            "positions": np.concatenate([np.arange(s, s + n) for s, n in zip(starts, self.counts, strict=True)]),
            "cu_seqlens": np.cumsum([0, *self.counts]),
            "token_seq": np.repeat(np.arange(len(self.counts)), self.counts),
            "seq_ids": 10 + np.arange(len(self.counts)),
            "state_rows": [state.row for state in self.states],
            "state_epochs": [state.epoch for state in self.states],
        }
        return input_views(
            self.device, InputLayout(max(MAX_TOKENS, self.num_tokens), len(self.counts), 1), **{**fields, **changed}
        )

    def advance(self) -> None:
        for state, count in zip(self.states, self.counts, strict=True):
            state.advance(count)

    def faults(self) -> list[faults.Fault]:
        return faults.entries(self.device.download(self.record))


def exact_conv(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The whole sequence from its start, in the type of x."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1]), x.dtype), x])
    total = sum(padded[j : j + len(x)] * weight[:, j].astype(x.dtype) for j in range(taps))
    return total * sigmoid(total)


@pytest.mark.parametrize("num_taps", [1, 2, 4])
@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1), (2, 1, 63), (5, 70), (257,)], ids=str)
def test_causal_conv1d(device: Device, pieces: tuple[int, ...], num_taps: int) -> None:
    """Two sequences cut into the same pieces give what each gives as a whole."""
    channels = 97
    shape = RecurrentShape((0, 3), num_taps, channels, 1, 8)
    weight = random((channels, num_taps), 1)
    whole = [random((sum(pieces), channels), 2 + index) for index in range(2)]
    sequences = Sequences(device, shape, [0, 0])
    found: list[list[np.ndarray]] = [[], []]
    start = 0
    for count in pieces:
        sequences.counts = [count, count]
        x = np.concatenate([part[start : start + count] for part in whole])
        out = device.empty((2 * count, channels), np.float32)
        inputs = sequences.inputs()
        for state in sequences.cache.layers:
            causal_conv1d(device, wider(device, x), on_device(device, weight), inputs, 2, state, None, out)
        mark_written(sequences)
        sequences.advance()
        for index in range(2):
            found[index].append(device.download(out)[index * count : (index + 1) * count])
        start += count
    for index in range(2):
        exact = exact_conv(whole[index].astype(np.float64), weight)
        plain = exact_conv(whole[index], weight)
        check_against_float64(np.concatenate(found[index]), exact, plain)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 32), (3, 64), (2, 128), (5, 20)])
@pytest.mark.parametrize("counts", [(1, 1), (3, 29), (20,)], ids=str)
def test_causal_conv1d_scales_heads(device: Device, counts: tuple[int, ...], num_heads: int, head_dim: int) -> None:
    channels = num_heads * head_dim + 36
    shape = RecurrentShape((3,), 4, channels, 1, 8)
    sequences = Sequences(device, shape, list(counts))
    x, weight = random((sum(counts), channels), 1), random((channels, 4), 2)
    out = device.empty(x.shape, np.float32)
    (state,), norm = sequences.cache.layers, HeadNorm(num_heads, head_dim, 1e-6)
    arguments = (sequences.inputs(), len(counts), state, norm, out)
    causal_conv1d(device, wider(device, x), on_device(device, weight), *arguments)

    def formula(dtype: Any) -> np.ndarray:
        found = np.concatenate([exact_conv(part, weight) for part in np.split(x.astype(dtype), np.cumsum(counts)[:-1])])
        heads = found[:, : num_heads * head_dim].reshape(len(x), num_heads, head_dim)
        heads /= np.sqrt((heads**2).sum(-1, keepdims=True) + dtype(1e-6))
        return found

    check_against_float64(device.download(out), formula(np.float64), formula(np.float32))


def mark_written(sequences: Sequences) -> None:
    """The marks that gated_delta_rule leaves behind a step."""
    marks = sequences.cache.rows.marks
    values = sequences.device.download(marks)
    for state, count in zip(sequences.states, sequences.counts, strict=True):
        values[state.row ^ 1] = state.epoch, state.position + count
    overwrite(sequences.device, marks, values)


HEADS = [
    DeltaHeads(1, 1, 32, True),
    DeltaHeads(2, 4, 32, True),
    DeltaHeads(2, 6, 32, False),
    DeltaHeads(1, 2, 128, True),
]


def exact_rule(parts: dict[str, np.ndarray], heads: DeltaHeads, dtype: Any) -> np.ndarray:
    """The recurrence for one sequence from its start, written out; [num_tokens, num_v_heads * head_dim]."""
    dim, num_v = heads.head_dim, heads.num_v_heads
    qkv, beta, alpha, decay, dt_bias = (parts[name].astype(dtype) for name in ("qkv", "beta", "alpha", "decay", "dt"))
    out = np.zeros((len(qkv), num_v, dim), dtype)
    for h in range(num_v):
        key_head = h % heads.num_k_heads if heads.tiled else h * heads.num_k_heads // num_v
        memory = np.zeros((dim, dim), dtype)
        for t in range(len(qkv)):
            q = qkv[t, key_head * dim : (key_head + 1) * dim]
            k = qkv[t, heads.k_size + key_head * dim : heads.k_size + (key_head + 1) * dim]
            v = qkv[t, 2 * heads.k_size + h * dim : 2 * heads.k_size + (h + 1) * dim]
            memory = memory * np.exp(decay[h] * np.log1p(np.exp(alpha[t, h] + dt_bias[h])))
            memory = memory + sigmoid(beta[t, h]) * np.outer(v - memory @ k, k)
            out[t, h] = memory @ q / np.sqrt(dtype(dim))
    return out.reshape(len(qkv), -1)


def rule_inputs(count: int, heads: DeltaHeads, seed: int) -> dict[str, np.ndarray]:
    qkv = random((count, heads.num_channels), seed)
    keys = qkv[:, : 2 * heads.k_size].reshape(count, -1, heads.head_dim)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return {
        "qkv": qkv,
        "beta": random((count, heads.num_v_heads), seed + 1),
        "alpha": random((count, heads.num_v_heads), seed + 2),
        "decay": -np.exp(random((heads.num_v_heads,), 7)),
        "dt": random((heads.num_v_heads,), 8),
    }


def rule_scratch(sequences: Sequences, heads: DeltaHeads) -> Any:
    counts = sequences.counts
    shape = scratch_shape(sequences.device.target, heads, sum(counts), len(counts), max(counts))
    return None if shape is None else sequences.device.empty(shape, np.float32)


def run_rule(device: Device, sequences: Sequences, parts: dict[str, np.ndarray], heads: DeltaHeads, **inputs: Any):
    out = device.empty((sequences.num_tokens, heads.v_size), np.float32)
    (state,) = sequences.cache.layers
    for own in sequences.states:
        sequences.cache.before_write(own.row ^ 1)  # as the executor does: a checkpoint may still be read
    gated_delta_rule(
        device,
        on_device(device, parts["qkv"]),
        wider(device, parts["beta"]),
        wider(device, parts["alpha"]),
        on_device(device, parts["decay"]),
        on_device(device, parts["dt"]),
        heads,
        sequences.inputs(**inputs),
        *(len(sequences.counts), max(sequences.counts)),
        state,
        sequences.record,
        rule_scratch(sequences, heads),
        out,
    )
    return device.download(out)


def run_rule_by_token(
    device: Device, sequences: Sequences, parts: dict[str, np.ndarray], heads: DeltaHeads, count: int
) -> np.ndarray:
    """`count` calls with the same token."""
    out = device.empty((count, heads.v_size), np.float32)
    (state,) = sequences.cache.layers
    qkv, decay, dt = (on_device(device, parts[name]) for name in ("qkv", "decay", "dt"))
    gates = wider(device, parts["beta"]), wider(device, parts["alpha"])
    for token in range(count):
        inputs, row = sequences.inputs(), out[token : token + 1]
        gated_delta_rule(device, qkv, *gates, decay, dt, heads, inputs, 1, 1, state, sequences.record, None, row)
        sequences.advance()
    return device.download(out)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("pieces", [(1, 1, 2), (9, 1, 63), (64, 65), (33, 97)], ids=str)
def test_gated_delta_rule(device: Device, pieces: tuple[int, ...], heads: DeltaHeads) -> None:
    """Two sequences of different lengths side by side, in pieces, give what the recurrence gives for each."""
    shape = RecurrentShape((5,), 4, heads.num_channels, heads.num_v_heads, heads.head_dim)
    sequences = Sequences(device, shape, [0, 0])
    whole = [rule_inputs(sum(pieces), heads, 10), rule_inputs(len(pieces), heads, 20)]
    found: list[list[np.ndarray]] = [[], []]
    start = 0
    for index, count in enumerate(pieces):
        sequences.counts = [count, 1]
        parts = {
            name: np.concatenate([whole[0][name][start : start + count], whole[1][name][index : index + 1]])
            if name in ("qkv", "beta", "alpha")
            else whole[0][name]
            for name in whole[0]
        }
        out = run_rule(device, sequences, parts, heads)
        sequences.advance()
        found[0].append(out[:count])
        found[1].append(out[count:])
        start += count
    assert not sequences.faults()
    for values, expected in zip(found, whole, strict=True):
        exact = exact_rule(expected, heads, np.float64)
        check_against_float64(np.concatenate(values), exact, exact_rule(expected, heads, np.float32), floor=1e-6)


def test_a_prompt_may_be_cut_anywhere(device: Device) -> None:
    """Each of the sequences has the same prompt, cut into two calls at another place."""
    heads, count = DeltaHeads(1, 1, 32, True), 36
    shape = RecurrentShape((5,), 4, heads.num_channels, heads.num_v_heads, heads.head_dim)
    parts, cuts = rule_inputs(count, heads, 30), range(1, count)
    sequences = Sequences(device, shape, [0] * len(cuts))
    found: list[list[np.ndarray]] = [[] for _ in cuts]
    for call in range(2):
        places = [slice(0, cut) if call == 0 else slice(cut, count) for cut in cuts]
        sequences.counts = [place.stop - place.start for place in places]
        tokens = {
            name: np.concatenate([part[place] for place in places]) if name in ("qkv", "beta", "alpha") else part
            for name, part in parts.items()
        }
        out = run_rule(device, sequences, tokens, heads)
        sequences.advance()
        for values, piece in zip(found, np.split(out, np.cumsum(sequences.counts)[:-1]), strict=True):
            values.append(piece)
    assert not sequences.faults()
    exact, plain = exact_rule(parts, heads, np.float64), exact_rule(parts, heads, np.float32)
    for values in found:
        check_against_float64(np.concatenate(values), exact, plain, floor=1e-6)


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("rate", [7.0, 30.0])
@pytest.mark.parametrize("log_decay", [-1e-4, -1e-30, -5.0])
@pytest.mark.parametrize("form", REPEATED)
def test_identical_tokens_stay_close_to_float64(
    device: Device, form: str, log_decay: float, rate: float, head_dim: int
) -> None:
    """What a prompt of one repeated token leaves: sums of terms that cancel. Rates near 1."""
    heads = DeltaHeads(1, 1, head_dim, True)
    count = 4096 if device.name == "gpu" else REPEATED[form][head_dim]
    parts = rule_inputs(1, heads, 40)
    parts["qkv"][:, : heads.k_size] = parts["qkv"][:, heads.k_size : 2 * heads.k_size]  # asked for what is known
    parts["beta"][...] = rate
    parts["alpha"][...] = -parts["dt"]
    parts["decay"] = np.full(1, log_decay / np.log(2), np.float32)
    if form == "one call, token by token":
        if device.target is None:
            pytest.skip("the reference takes chunks; there is a test of its other form")
        device.make_batch_invariant()
    shape = RecurrentShape((5,), 4, heads.num_channels, heads.num_v_heads, heads.head_dim)
    sequences = Sequences(device, shape, [1 if form == "a call for each token" else count])
    repeated = {name: np.repeat(parts[name], count, axis=0) for name in ("qkv", "beta", "alpha")}
    if form == "a call for each token":
        found = run_rule_by_token(device, sequences, parts, heads, count)
    else:
        found = run_rule(device, sequences, parts | repeated, heads)
    assert not sequences.faults()
    assert np.abs(found - exact_rule(parts | repeated, heads, np.float64)).max() <= 1e-4
    assert np.abs(found[-1]).max() > 0.1


def test_two_chunks_on_their_way() -> None:
    """The plan of NVIDIA's GPUs, where blocks have more shared memory, emulated."""
    device = EmulatedDevice(32, "mma")
    device.target = replace(device.target, arch="sm_90")
    for case in (case for case in recurrent_cases() if case.op is GATED_DELTA_RULE and not case.large):
        verdict = check_case(device, case)
        assert verdict.passed, f"{case}: {verdict}"
    device.close()


@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("form", [by_token, by_chunks])
@pytest.mark.parametrize(("rate", "log_decay"), [(0.999, -1e-4), (0.99, -1e-6), (1.0, 0.0), (0.5, -5.0)])
def test_4096_identical_tokens_stay_close_to_float64(form: Any, rate: float, log_decay: float, dim: int) -> None:
    count, heads = 4096, 2
    q, k, v = (np.repeat(random((heads, 1, dim), seed), count, axis=1) for seed in (1, 2, 3))
    for array in (q, k):
        array /= np.linalg.norm(array, axis=-1, keepdims=True)
    rates, decays = (np.full((heads, count), value, np.float32) for value in (rate, log_decay))
    arguments = (q, k, v, rates, decays)
    exact = by_token(*(array.astype(np.float64) for array in arguments), np.zeros((heads, dim, dim)))
    matrices = np.zeros((heads, dim, dim), np.float32)
    assert np.abs(form(*arguments, matrices) - exact).max() <= 1e-4


@pytest.mark.parametrize("cosine", [0.5, 0.99])
def test_chunks_of_tokens_that_resemble_each_other(cosine: float) -> None:
    count, dim = 512, 32
    common, own = random((1, 1, dim), 1), random((1, count, dim), 2)
    k = np.sqrt(cosine) * common / np.linalg.norm(common) + np.sqrt(1 - cosine) * own / np.linalg.norm(
        own, axis=-1, keepdims=True
    )
    k = (k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(np.float32)
    v, rates = random((1, count, dim), 3), np.full((1, count), 0.99, np.float32)
    arguments = (k, k, v, rates, np.full((1, count), -1e-5, np.float32))
    exact = by_token(*(array.astype(np.float64) for array in arguments), np.zeros((1, dim, dim)))
    found = by_chunks(*arguments, np.zeros((1, dim, dim), np.float32))
    assert np.abs(found - exact).max() <= 1e-4 * max(1.0, np.abs(exact).max())


@pytest.mark.parametrize(
    ("changed", "expected", "found"),
    [({"state_epochs": [1, 7]}, 7, 2), ({"positions": [0, 1, 5]}, 5, 0), ({"state_rows": [0, 3]}, 2, 0)],
    ids=str,
)
def test_a_state_that_is_not_the_sequences_own_is_reported(
    device: Device, changed: dict[str, Any], expected: int, found: int
) -> None:
    heads = HEADS[0]
    shape = RecurrentShape((5,), 4, heads.num_channels, heads.num_v_heads, heads.head_dim)
    sequences = Sequences(device, shape, [2, 1])
    parts = rule_inputs(3, heads, 1)
    out = run_rule(device, sequences, parts, heads, **changed)
    (fault,) = sequences.faults()
    row = changed.get("state_rows", [0, 2])[1]
    position = changed.get("positions", [0, 1, 0])[2]
    assert fault == faults.Fault(FaultKind.STATE, 11, 5, -1, row, position, expected, found)
    assert "recurrent state" in str(fault) and "layer 5" in str(fault)
    assert not out[2].any()
    first = {name: part[:2] if name in ("qkv", "beta", "alpha") else part for name, part in parts.items()}
    assert np.abs(out[:2] - exact_rule(first, heads, np.float64)).max() <= 1e-6
    marks = device.download(sequences.cache.rows.marks)[:, 0].tolist()
    assert marks[1] == [1, 2]  # the other sequence went on
    assert marks[row ^ 1] == [0, 0]


@pytest.mark.parametrize("count", [1, 40])
def test_an_emptied_ubatch_leaves_states_alone(device: Device, count: int) -> None:
    """What `copy_inputs` makes of a ubatch whose inputs were overwritten: zeros everywhere."""
    heads = HEADS[0]
    shape = RecurrentShape((5,), 4, heads.num_channels, heads.num_v_heads, heads.head_dim)
    sequences = Sequences(device, shape, [count, count])
    rows = sequences.cache.rows
    before = [device.download(array).copy() for array in (rows.values, rows.marks)]
    fields = ("positions", "cu_seqlens", "token_seq", "seq_ids", "state_rows", "state_epochs")
    empty = {name: np.zeros(2 * count + 2 if name in fields[:3] else 2, np.int32) for name in fields}
    empty["cu_seqlens"] = empty["cu_seqlens"][:3]
    run_rule(device, sequences, rule_inputs(2 * count, heads, 1), heads, **empty)
    assert not sequences.faults()
    for array, expected in zip((rows.values, rows.marks), before, strict=True):
        assert device.download(array).tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_l2_norm(device: Device, size: int) -> None:
    x = random((3, 2 * size + 5), size)
    x[1, :size] = 0
    on = on_device(device, x)
    l2_norm(device, on, 2, size, 1e-6)
    found = device.download(on)

    def formula(values: np.ndarray) -> np.ndarray:
        heads = values[:, : 2 * size].reshape(3, 2, size)
        return (heads / np.sqrt((heads**2).sum(-1, keepdims=True) + values.dtype.type(1e-6))).reshape(3, -1)

    check_against_float64(found[:, : 2 * size], formula(x.astype(np.float64)), formula(x))
    assert (found[:, 2 * size :] == x[:, 2 * size :]).all()


@pytest.mark.parametrize("head_dim", SIZES)
def test_gated_rms_norm(device: Device, head_dim: int) -> None:
    x, gate, weight = random((5, 3 * head_dim), 1), 4 * random((5, 3 * head_dim), 2), random((head_dim,), 3)
    gate[0, 0], gate[1, 0] = -200, 200
    out = device.empty(x.shape, np.float32)
    gated_rms_norm(device, on_device(device, x), on_device(device, weight), 1e-6, wider(device, gate), out)

    def formula(dtype: Any) -> np.ndarray:
        heads = x.astype(dtype).reshape(5, 3, head_dim)
        normed = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + dtype(1e-6)) * weight.astype(dtype)
        with np.errstate(over="ignore"):
            return normed.reshape(x.shape) * gate * sigmoid(gate.astype(dtype))

    check_against_float64(device.download(out), formula(np.float64), formula(np.float32))


@pytest.mark.parametrize("size", SIZES)
def test_sigmoid_mul(device: Device, size: int) -> None:
    gate, x = 4 * random((3, size), 1), random((3, size), 2)
    gate[0, 0] = -200
    on = on_device(device, x)
    sigmoid_mul(device, on_device(device, gate), on, on)
    with np.errstate(over="ignore"):
        exact, plain = x * sigmoid(gate.astype(np.float64)), x * sigmoid(gate)
    check_against_float64(device.download(on), exact, plain)


@pytest.mark.parametrize("size", SIZES)
def test_gated_add(device: Device, size: int) -> None:
    h, weight, x, out = (random(shape, seed) for seed, shape in enumerate([(3, 64), (64,), (3, size), (3, size)]))
    on = on_device(device, out)
    gated_add(device, on_device(device, h), on_device(device, weight), on_device(device, x), on)
    exact = out + x * sigmoid((h.astype(np.float64) * weight).sum(-1, keepdims=True))
    plain = out + x * sigmoid((h * weight).sum(-1, keepdims=True))
    check_against_float64(device.download(on), exact, plain)


def test_arguments_that_do_not_fit_are_refused(device: Device) -> None:
    x = on_device(device, random((2, 8)))
    with pytest.raises(ShapeError, match="l2_norm: 3 heads of 4, 8 columns"):
        l2_norm(device, x, 3, 4, 1e-6)
    with pytest.raises(ShapeError, match="gate has shape"):
        sigmoid_mul(device, on_device(device, random((2, 4))), x, x)
    whole = Columns(x, 0, 8)
    with pytest.raises(ShapeError, match="no heads of 3"):
        gated_rms_norm(device, x, on_device(device, random((3,))), 1e-6, whole, x)
    with pytest.raises(ShapeError, match="gate has 7 columns, expected 8"):
        gated_rms_norm(device, x, on_device(device, random((4,))), 1e-6, Columns(x, 0, 7), x)
    with pytest.raises(ShapeError, match="gate lies outside its array of 8 columns"):
        gated_rms_norm(device, x, on_device(device, random((4,))), 1e-6, Columns(x, 1, 8), x)
    sequences = Sequences(device, RecurrentShape((0,), 4, 8, 1, 8), [2])
    with pytest.raises(ShapeError, match="the windows are"):
        weight = on_device(device, random((8, 3)))
        causal_conv1d(
            *(device, whole, weight, sequences.inputs(), 1, sequences.cache.layers[0], None),
            on_device(device, random((2, 8))),
        )


def test_states_go_on_from_checkpoints_and_forks(device: Device) -> None:
    heads = HEADS[1]
    shape = RecurrentShape((5,), 4, heads.num_channels, heads.num_v_heads, heads.head_dim)
    sequences = Sequences(device, shape, [3])
    cache = sequences.cache = RecurrentCache(device, shape, 2)
    sequences.states = [cache.new_state()]
    first, second = rule_inputs(3, heads, 1), rule_inputs(3, heads, 2)
    run_rule(device, sequences, first, heads)
    sequences.advance()
    assert cache.save(sequences.states[0])
    expected = run_rule(device, sequences, second, heads)
    sequences.advance()
    run_rule(device, sequences, first, heads)
    sequences.advance()
    child = cache.fork(sequences.states[0], 3)
    cache.rewind(sequences.states[0], 3)
    assert (run_rule(device, sequences, second, heads) == expected).all()
    sequences.advance()
    sequences.states = [child]
    assert (run_rule(device, sequences, second, heads) == expected).all()
    assert not sequences.faults()
    cache.release(child)
    values = device.download(cache.rows.values)
    assert np.isnan(values[2 * child.slot : 2 * child.slot + 2]).all()
