"""The cases with which `pyllm kernels test` and the tests check kernels: a few for each op that has one.

A case is stated as the arguments of its op's reference, drawn from a seed; `kernel_check` runs and judges it. The sizes
are small and awkward, so that all cases take seconds on the emulated device too. To add an op, write a function that
yields its cases, here or in the module of its kind (`kernel_*_cases`), and add it to `_GROUPS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from pyllm import faults
from pyllm.input_block import InputLayout
from pyllm.kernel_attention_cases import (
    attention_case,
    clear_tags_cases,
    flash_attention_cases,
    gather_rows_cases,
    page_cases,
    rope_cases,
    rope_set_rows_cases,
    set_rows_cases,
    token_tables_cases,
)
from pyllm.kernel_check import Arguments, Case
from pyllm.kernel_expert_cases import expert_cases, gated_mul_mat_id_case, mul_mat_id_case
from pyllm.kernel_product_cases import LIBRARY_PRODUCT, linear_case, linear_cases, mul_mat_case, mul_mat_cases
from pyllm.kernel_recurrent_cases import recurrent_cases
from pyllm.kernel_samples import (
    HALF,
    HOPPER,
    Rng,
    normal,
    random_weight,
    unwritten,
)
from pyllm.ops.add import ADD
from pyllm.ops.check_inputs import CHECK_INPUTS
from pyllm.ops.copy_inputs import COPY_INPUTS
from pyllm.ops.gelu_mul import GELU_MUL
from pyllm.ops.get_rows import GET_ROWS
from pyllm.ops.keep_tokens import KEEP_TOKENS
from pyllm.ops.mul_mat import MUL_MAT, plan_mul_mat, scratch_size
from pyllm.ops.op import KernelLaunch, Op, Target
from pyllm.ops.rms_norm import RMS_NORM
from pyllm.ops.silu_mul import SILU_MUL
from pyllm.ops.softcap import SOFTCAP
from pyllm.ops.take_rows import TAKE_ROWS
from pyllm.ops.top_k import TOP_K, scratch_columns
from pyllm.quants import GPU_TYPES, QuantType
from pyllm.weight import Weight

_EMULATED_TARGET = Target("host", "host", 32, "mma")


@cache
def all_cases() -> tuple[Case, ...]:
    """All cases, op by op."""
    return tuple(case for group in _GROUPS for case in group())


def planned_kernels(case: Case) -> list[tuple[str, str]]:
    """Source and entry point of the kernels that a small case launches."""
    assert case.op.plan is not None
    return _kernels(case.op.plan(_EMULATED_TARGET, *case.draw(0)))


def ops_of_kernels() -> dict[str, set[str]]:
    """For each kernel source the names of the ops that launch it."""
    users: dict[str, set[str]] = {}
    for some in (_ops_of_all_gpus(), _ops_of_hopper()):
        for source, ops in some.items():
            users.setdefault(source, set()).update(ops)
    return users


def hopper_kernels() -> set[str]:
    """Sources that only plans for Hopper launch."""
    return set(_ops_of_hopper()) - set(_ops_of_all_gpus())


@cache
def _ops_of_all_gpus() -> dict[str, set[str]]:
    users: dict[str, set[str]] = {}
    for case in all_cases():
        if not case.large:
            for source, _ in planned_kernels(case):
                users.setdefault(source, set()).add(case.op.name)
    return users


@cache
def _ops_of_hopper() -> dict[str, set[str]]:
    users: dict[str, set[str]] = {}
    tokens, rows, row_elements = LIBRARY_PRODUCT
    weight = Weight("any", (rows, row_elements), QuantType.F16, np.empty((rows, 2 * row_elements), np.uint8))
    scratch = np.empty(scratch_size(HOPPER, tokens, weight), np.float16)
    x, out = np.empty((tokens, row_elements), np.float32), np.empty((tokens, rows), np.float32)
    for source, _ in _kernels(plan_mul_mat(HOPPER, x, weight, scratch, out)):
        users.setdefault(source, set()).add(MUL_MAT.name)
    q8 = QuantType.Q8_0
    for case in (
        attention_case("f16", (33,), (33,), 4, 2, 64),
        *(mul_mat_case(q8, 33, 8, row) for row in (32, 256)),
        *(linear_case((q8,), (8,), 33, row) for row in (32, 256)),
        mul_mat_id_case(q8, 33, 7, 3, 8, 32, 32, dtype=np.float16),
        gated_mul_mat_id_case(q8, q8, 33, 64, np.float16),
    ):
        assert case.op.plan is not None
        for source, _ in _kernels(case.op.plan(HOPPER, *case.draw(0))):
            users.setdefault(source, set()).add(case.op.name)
    return users


def _kernels(launches: Sequence[Any]) -> list[tuple[str, str]]:
    return [(launch.source, launch.entry) for launch in launches if isinstance(launch, KernelLaunch)]


def _add_cases() -> Iterator[Case]:
    for rows, size in ((1, 1), (5, 33)):
        yield Case(ADD, f"{rows}x{size}", partial(_elementwise, rows, size), (2,), floor=None)
    yield Case(
        ADD, "3x97, a bias", lambda rng: (normal(rng, 3, 97), normal(rng, 97), unwritten(3, 97)), (2,), floor=None
    )


def _elementwise(rows: int, size: int, rng: Rng) -> Arguments:
    return normal(rng, rows, size) * 4, normal(rng, rows, size), unwritten(rows, size)


def _gate_cases(op: Op) -> Iterator[Case]:
    for rows, size in ((1, 1), (3, 33), (2, 257)):
        yield Case(op, f"{rows}x{size}", partial(_elementwise, rows, size), (2,))

    def in_place(rng: Rng) -> Arguments:
        gate = normal(rng, 3, 97) * 30
        return gate, normal(rng, 3, 97), gate

    yield Case(op, "3x97 in place, large", in_place, (2,))


def _softcap_cases() -> Iterator[Case]:
    for rows, size in ((1, 1), (3, 97)):
        yield Case(SOFTCAP, f"{rows}x{size}", partial(_softcap, rows, size), (2,))


def _softcap(rows: int, size: int, rng: Rng) -> Arguments:
    return normal(rng, rows, size) * 50, 30.0, unwritten(rows, size)


def _rms_norm_cases() -> Iterator[Case]:
    for rows, size in ((1, 1), (3, 97), (2, 1032)):
        yield Case(RMS_NORM, f"{rows}x{size}", partial(_rms_norm, rows, size), (3,))

    def narrow(rng: Rng) -> Arguments:
        x, weight, eps, _, accumulate = _rms_norm(3, 100, rng)
        return x, weight, eps, unwritten(3, 100, dtype=np.float16), accumulate

    def added(rng: Rng) -> Arguments:
        x, weight, eps, _, _ = _rms_norm(5, 65, rng)
        return x, weight, eps, normal(rng, 5, 65), True

    def in_place(rng: Rng) -> Arguments:
        heads = normal(rng, 5, 3, 32)
        return heads, normal(rng, 32), 1e-6, heads, False

    yield Case(RMS_NORM, "3x100 to f16", narrow, (3,), floor=HALF)
    yield Case(RMS_NORM, "5x65 added", added, (3,))
    yield Case(RMS_NORM, "15x32 in place", in_place, (3,))


def _rms_norm(rows: int, size: int, rng: Rng) -> Arguments:
    return normal(rng, rows, size), normal(rng, size), 1e-5, unwritten(rows, size), False


def _get_rows_cases() -> Iterator[Case]:
    for qtype in sorted(GPU_TYPES):
        yield Case(GET_ROWS, f"{qtype.name}, 5 of 33", partial(_get_rows, qtype, 1.0), (3,), floor=None)
    yield Case(GET_ROWS, "Q8_0, 5 of 33, scaled", partial(_get_rows, QuantType.Q8_0, 25.3), (3,), floor=None)


def _get_rows(qtype: QuantType, scale: float, rng: Rng) -> Arguments:
    return random_weight(rng, qtype, 33, 256), np.array([0, 32, 5, 5, 31], np.int32), scale, unwritten(5, 256)


def _take_rows_cases() -> Iterator[Case]:
    for rows, size in ((1, 1), (33, 97)):
        yield Case(TAKE_ROWS, f"{rows}x{size}", partial(_take_rows, rows, size), (2,), floor=None)


def _take_rows(rows: int, size: int, rng: Rng) -> Arguments:
    return normal(rng, rows, size), rng.integers(0, rows, 4, np.int32), unwritten(4, size)


def _copy_inputs_cases() -> Iterator[Case]:
    for name, serial in (("the right serial", 5), ("a wrong serial", 6)):
        for place, in_place in (("", False), (", tables left in the slot", True)):
            yield Case(COPY_INPUTS, name + place, partial(_copy_inputs, serial, in_place), (3, 4, 6), floor=None)


def _copy_inputs(serial: int, in_place: bool, rng: Rng) -> Arguments:
    layout = InputLayout(max_tokens=300, max_seqs=4, max_pages=40)
    slot = rng.integers(0, 256, layout.num_bytes, np.uint8)
    views = layout.views(slot)
    views.head_serial[0] = views.tail_serial[0] = serial
    block = np.full(layout.num_bytes, 0xFF, np.uint8)
    views.token_ids[:] = np.where(rng.random(300) < 0.1, -1 - rng.integers(0, 4, 300), rng.integers(0, 99, 300))
    kept = rng.integers(100, 200, 4, np.int32)
    record = np.full(faults.record_shape(), 99, np.int32)
    return slot, layout, True, block, np.array([4], np.int64), kept, record, in_place


def _check_inputs_cases() -> Iterator[Case]:
    for name, copied, serial in (("untouched", 5, 5), ("overwritten", 5, 6), ("reported already", 6, 6)):
        yield Case(CHECK_INPUTS, name, partial(_check_inputs, copied, serial), (4,), floor=None)


def _check_inputs(copied: int, serial: int, rng: Rng) -> Arguments:
    layout = InputLayout(max_tokens=300, max_seqs=4, max_pages=40)
    slot, block = (rng.integers(0, 256, layout.num_bytes, np.uint8) for _ in range(2))
    for array, number in ((slot, serial), (block, copied)):
        views = layout.views(array)
        views.head_serial[0] = views.tail_serial[0] = number
    return slot, layout, block, np.array([5], np.int64), np.zeros(faults.record_shape(), np.int32)


def _keep_tokens_cases() -> Iterator[Case]:
    def arguments(rows: int, rng: Rng) -> Arguments:
        places = np.where(rng.random(rows) < 0.5, -1, rng.permutation(rows)).astype(np.int32)
        return rng.integers(0, 999, (rows, 3), np.int32), places, np.full(rows, -7, np.int32)

    for rows in (1, 200):
        yield Case(KEEP_TOKENS, f"{rows} rows", partial(arguments, rows), (2,), floor=None)


def _top_k_cases() -> Iterator[Case]:
    for columns, k in ((97, 3), (8192, 1), (24_653, 64), (151_936, 64)):
        yield top_k_case(2, columns, k)

    def ties(rng: Rng) -> Arguments:
        values, *others = _top_k(2, 8289, 9, rng)
        values[0] = np.round(values[0])
        values[1, ::3] = np.nan
        return values, *others

    yield Case(TOP_K, "9 of 8289, equal values and NaN", ties, (3, 4), floor=None)


def top_k_case(rows: int, columns: int, k: int) -> Case:
    """The largest of random values."""
    arguments = partial(_top_k, rows, columns, k)
    return Case(TOP_K, f"{k} of {columns}", arguments, (3, 4), floor=None, large=columns > 1 << 14)


def _top_k(rows: int, columns: int, k: int, rng: Rng) -> Arguments:
    scratch = rows, scratch_columns(rows, columns, k)
    outputs: tuple[Any, ...] = unwritten(rows, k), unwritten(rows, k, dtype=np.int32)
    return normal(rng, rows, columns), unwritten(*scratch), unwritten(*scratch, dtype=np.int32), *outputs


_GROUPS = (
    _add_cases,
    _check_inputs_cases,
    clear_tags_cases,
    _copy_inputs_cases,
    _keep_tokens_cases,
    page_cases,
    recurrent_cases,
    expert_cases,
    flash_attention_cases,
    gather_rows_cases,
    partial(_gate_cases, GELU_MUL),
    _get_rows_cases,
    linear_cases,
    mul_mat_cases,
    _rms_norm_cases,
    rope_cases,
    rope_set_rows_cases,
    set_rows_cases,
    partial(_gate_cases, SILU_MUL),
    _softcap_cases,
    _take_rows_cases,
    token_tables_cases,
    _top_k_cases,
)
