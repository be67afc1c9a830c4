"""linear: a layer of products with what stands before and behind them, so that few tokens take one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.ops.add import plan_add
from pyllm.ops.check import check_array, part_of, require
from pyllm.ops.gelu_mul import GELU_MUL
from pyllm.ops.mul_mat import mul_mat_ref
from pyllm.ops.op import GemmLaunch, KernelLaunch, Op, Target
from pyllm.ops.product_plan import (
    Gate,
    Norm,
    Products,
    fuses_bias,
    fuses_gate,
    fuses_norm,
    is_thin,
    plan_products,
    products_scratch,
    takes_direct,
)
from pyllm.ops.rms_norm import plan_rms_norm, rms_norm_ref
from pyllm.ops.silu_mul import SILU_MUL
from pyllm.weight import Weight

if TYPE_CHECKING:
    from pyllm.device import Device

GATES = {Gate.SILU: SILU_MUL, Gate.GELU: GELU_MUL}


def linear_ref(
    x: np.ndarray,
    weights: Sequence[Weight],
    norm: Norm | None,
    bias: np.ndarray | None,
    gate: Gate,
    accumulate: bool,
    scratch: np.ndarray | None,
    out: np.ndarray,
) -> None:
    if x.dtype == np.float16:
        x = x.astype(np.float32)
    if norm is not None:
        normed = np.empty_like(x)
        rms_norm_ref(x, norm.weight, norm.eps, normed, False)
        x = normed
    plain = not accumulate and not gate and out.dtype == x.dtype
    target = out if plain else np.empty((x.shape[0], sum(weight.shape[0] for weight in weights)), x.dtype)
    column = 0
    for weight in weights:
        rows = weight.shape[0]
        mul_mat_ref(x, weight, None, target[:, column : column + rows])
        column += rows
    if bias is not None:
        target += bias
    if gate:
        width = weights[0].shape[0]
        GATES[gate].reference(target[:, :width], target[:, width:], target[:, :width])
        target = target[:, :width]
    if accumulate:
        out += target
    elif not plain:
        out[...] = target


def plan_linear(
    target: Target,
    x: Any,
    weights: Sequence[Weight],
    norm: Norm | None,
    bias: Any,
    gate: Gate,
    accumulate: bool,
    scratch: Any,
    out: Any,
) -> list[KernelLaunch | GemmLaunch]:
    num_tokens, k = x.shape
    require(k % 8 == 0, "linear", f"rows of {weights[0].name} are not a multiple of 8 long")
    launches: list[KernelLaunch | GemmLaunch] = []
    if norm is not None and not (fuses_norm(target, num_tokens, weights) and x.dtype == np.float32):
        normed, scratch = _part(scratch, (num_tokens, k))
        launches += plan_rms_norm(target, x, norm.weight, norm.eps, normed, False)
        x, norm = normed, None
    if gate and not fuses_gate(target, num_tokens, weights):
        halves = []
        for weight in weights:
            half, scratch = _part(scratch, (num_tokens, weight.shape[0]))
            halves.append(half)
        if _one_by_one(target, num_tokens, weights):
            for weight, half in zip(weights, halves, strict=True):
                launches += plan_products(target, Products(x, [weight], half, norm=norm), scratch)
        else:
            launches += plan_products(target, Products(x, weights, halves[0], norm=norm, apart=halves), scratch)
        plan = GATES[gate].plan
        assert plan is not None
        return [*launches, *plan(target, *halves, out)]
    fused = fuses_bias(target, num_tokens, weights)
    launches += plan_products(
        target, Products(x, weights, out, accumulate, bias if fused else None, norm, gate), scratch
    )
    if bias is not None and not fused:
        launches += plan_add(target, out, bias, out)
    return launches


def _one_by_one(target: Target, num_tokens: int, weights: Sequence[Weight]) -> bool:
    """Whether each of the products that a gate of its own launch takes is planned for itself."""
    return is_thin(target, num_tokens) and not takes_direct(target, num_tokens, weights)


def _part(scratch: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The first elements of the scratch as an array, and what is left; parts begin at multiples of 16 bytes."""
    size = math.prod(shape)
    return part_of(scratch, size).reshape(shape), scratch[-(-size // 8) * 8 :]


def linear_scratch(
    target: Target | None,
    num_tokens: int,
    weights: Sequence[Weight],
    x_dtype: Any,
    norm: bool = False,
    gate: bool = False,
) -> int:
    """float16 elements of scratch that `linear` needs."""
    if target is None:
        return 0
    k, size = weights[0].shape[1], 0
    if norm and not (fuses_norm(target, num_tokens, weights) and x_dtype == np.float32):
        size += -(-num_tokens * k // 8) * 8
        x_dtype = np.float16
    if gate and not fuses_gate(target, num_tokens, weights):
        size += sum(-(-num_tokens * weight.shape[0] // 8) * 8 for weight in weights)
        if _one_by_one(target, num_tokens, weights):
            return size + max(products_scratch(target, num_tokens, [weight], x_dtype) for weight in weights)
    return size + products_scratch(target, num_tokens, weights, x_dtype)


LINEAR = Op("linear", linear_ref, plan_linear)


def linear(
    device: Device,
    x: Any,
    weights: Sequence[Weight],
    out: Any,
    *,
    norm: Norm | None = None,
    bias: Any = None,
    gate: Gate = Gate.NONE,
    accumulate: bool = False,
    scratch: Any = None,
) -> None:
    """out = x @ weights.T, the products of several matrices side by side.

    With h = rms_norm(x) where `norm` is given, else x, and p = h @ [w0; w1; ...].T + bias:

        out = p                               gate NONE
        out = activation(p0) * p1             gate SILU, GELU: of two matrices, out as wide as one of them
        out += p                              accumulate, gate NONE

    Args:
        x: [num_tokens, in_features] float32, or float16 without a norm.
        weights: matrices [out_features, in_features], any block types.
        out: [num_tokens, sum of out_features] float32, or float16 unless accumulate or with a bias; must not
            overlap x.
        norm: weight and epsilon of an RMS norm, or None.
        bias: [sum of out_features] float32, or None.
        gate: see above.
        scratch: [linear_scratch(...)] float16 or None when that is 0; overwritten.

    Numerics: sums in float32. Kernels round h and the decoded weights to float16 (saturating), or h to 16-bit whole
    numbers with a scale for 256 of them (`product_whole`); for many tokens p to float16, too, where a gate follows.

    Raises:
        ShapeError: shapes or dtypes do not fit.
    """
    either = ("float32", "float16")
    check_array("linear", "x", x, (None, weights[0].shape[1]), either if norm is None else ("float32",))
    num_tokens, k = x.shape
    for weight in weights:
        require(
            len(weight.shape) == 2 and weight.shape[1] == k, "linear", f"{weight.name} is no matrix with rows of {k}"
        )
    rows = sum(weight.shape[0] for weight in weights)
    if gate:
        require(
            len(weights) == 2 and weights[0].shape == weights[1].shape and not accumulate and bias is None,
            "linear",
            "a gate takes two matrices of one shape, no bias, and does not accumulate",
        )
        rows //= 2
    dtypes = ("float32",) if accumulate or bias is not None else either
    check_array("linear", f"out (for {weights[0].name})", out, (num_tokens, rows), dtypes)
    if bias is not None:
        check_array("linear", "bias", bias, (rows,), ("float32",))
    if norm is not None:
        check_array("linear", "norm", norm.weight, (k,), ("float32",))
    if size := linear_scratch(device.target, num_tokens, weights, x.dtype, norm is not None, bool(gate)):
        require(scratch is not None, "linear", f"{weights[0].name} needs scratch")
        check_array("linear", "scratch", scratch, (size,), ("float16",))
    device.launch(LINEAR, x, weights, norm, bias, gate, accumulate, scratch, out)
