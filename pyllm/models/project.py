"""A linear layer with its scratch in the workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyllm.device import Device
from pyllm.executor import Batch
from pyllm.ops.linear import linear, linear_scratch
from pyllm.ops.product_plan import Gate, Norm
from pyllm.weight import Weight


def project(
    device: Device,
    batch: Batch,
    x: Any,
    weights: Sequence[Weight],
    out: Any,
    *,
    norm: Norm | None = None,
    bias: Any = None,
    gate: Gate = Gate.NONE,
    accumulate: bool = False,
) -> Any:
    """`linear` into out, which is returned; arguments are its."""
    size = linear_scratch(device.target, x.shape[0], weights, x.dtype, norm is not None, bool(gate))
    scratch = batch.workspace.array("linear_scratch", (size,), np.float16) if size else None
    linear(device, x, weights, out, norm=norm, bias=bias, gate=gate, accumulate=accumulate, scratch=scratch)
    return out
