"""How many sequences run side by side when nobody says so: what fits into memory beside the weights, within reason."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

from pyllm.device import Device
from pyllm.gguf_file import GGUFModel
from pyllm.gguf_split import open_model
from pyllm.kv_types import kv_type_by_name
from pyllm.llm import TAG_BYTES
from pyllm.models import check_model

MOST = {"gpu": 256}
MOST_ELSEWHERE = 8  # a CPU gains little from more
_SHARE = 0.5  # of what the weights leave: activations, outputs and other programs need some too
_WEIGHT_SHARE = 0.6  # of a machine's memory, at most, for weights as float32


def default_parallel(path: Path, device: Device, ctx_size: int, kv_type: str) -> tuple[int, int]:
    """Sequences, and bytes that each takes.

    Args:
        ctx_size: tokens that each may hold; no more than what the model was trained for are counted.

    Raises:
        ModelFileError: the model cannot be run.
    """
    with open_model(path) as gguf:
        config = check_model(gguf, device)
        stored = kv_type_by_name(kv_type)
        widths = (config.num_kv_heads * config.key_length, config.num_kv_heads * config.value_length)
        row = len(config.attention_layers) * (sum(map(stored.row_bytes, widths)) + TAG_BYTES)
        needed = row * min(ctx_size, config.context_length)
        if config.recurrent:
            needed += config.recurrent.sequence_bytes
        left = _available(device) - _weight_bytes(gguf, device)
    fitting = int(_SHARE * left) // max(1, needed)
    return max(1, min(fitting, MOST.get(device.name, MOST_ELSEWHERE))), needed


def _weight_bytes(gguf: GGUFModel, device: Device) -> int:
    tensors = gguf.tensors.values()
    stored = sum(tensor.nbytes for tensor in tensors)
    if device.name != "cpu":
        return stored
    expanded = 4 * sum(prod(tensor.shape) for tensor in tensors)
    return max(stored, min(expanded, int(_WEIGHT_SHARE * device.memory_bytes)))


def _available(device: Device) -> int:
    if device.name == "gpu":
        return int(0.9 * device.memory_bytes)
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) << 10 if match else device.memory_bytes // 2
