"""Model architectures: one file each. `load_model` picks the one that a file asks for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from pyllm.device import Device
from pyllm.errors import UnsupportedError
from pyllm.gguf_file import GGUFModel
from pyllm.gguf_metadata import described
from pyllm.models.config import TransformerConfig
from pyllm.models.decoder import Decoder

# Architecture as in general.architecture -> module and class. Modules are imported when a file needs them.
ARCHITECTURES = {
    "gemma3": ("pyllm.models.gemma3", "Gemma3"),
    "llama": ("pyllm.models.llama", "Llama"),
    "qwen2": ("pyllm.models.qwen2", "Qwen2"),
    "qwen3": ("pyllm.models.qwen3", "Qwen3"),
    "qwen35": ("pyllm.models.qwen35", "Qwen35"),
    "qwen35moe": ("pyllm.models.qwen35moe", "Qwen35Moe"),
    "qwen3moe": ("pyllm.models.qwen3moe", "Qwen3Moe"),
    "qwen3next": ("pyllm.models.qwen3next", "Qwen3Next"),
}


def load_model(gguf: GGUFModel, device: Device, progress: Callable[[int, int], None] | None = None) -> Decoder:
    """Check that pyllm and the device can run a file, then bring its weights to the device.

    Args:
        progress: called with (bytes read so far, bytes in all) after each tensor.

    Raises:
        UnsupportedError: the architecture, a setting or a block type is not supported. Raised before weights are read.
        ModelFileError: keys or tensors are missing or do not fit together; likewise.
    """
    return _model_class(gguf).load(gguf, device, progress)


def check_model(gguf: GGUFModel, device: Device) -> TransformerConfig:
    """Make the checks of `load_model`, with its errors, and read no weights; returns the model's sizes."""
    return _model_class(gguf).prepare(gguf, device)[0]


def _model_class(gguf: GGUFModel) -> type[Decoder]:
    name = gguf.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{gguf.path}: general.architecture is {described(name)}; pyllm runs {', '.join(sorted(ARCHITECTURES))}"
        )
    module, class_name = ARCHITECTURES[name]
    return getattr(import_module(module), class_name)
