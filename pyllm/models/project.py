"""A linear layer in the workspace."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyllm.device import Device
from pyllm.executor import Batch
from pyllm.ops.add import add
from pyllm.ops.mul_mat import mul_mat, scratch_size
from pyllm.weight import Weight


def project(device: Device, batch: Batch, weight: Weight, bias: Any | None, x: Any, name: str) -> Any:
    """x @ weight.T (+ bias) in the workspace buffer `name`: [rows of x, rows of weight] float32."""
    out = batch.workspace.array(name, (x.shape[0], weight.shape[0]))
    size = scratch_size(device.target, x.shape[0], weight)
    scratch = batch.workspace.array("mul_mat_scratch", (size,), np.float16) if size else None
    mul_mat(device, x, weight, out, scratch)
    if bias is not None:
        add(device, out, bias, out)
    return out
