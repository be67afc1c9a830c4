"""pyllm: run GGUF language models with kernels of its own. `from pyllm import LLM, SamplingParams`.

Importing this package is cheap and never needs a GPU: the two names are loaded when first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes long to import: Ctrl-C meanwhile would show where

__version__ = "0.1.0.dev0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from typing import Any

    from pyllm.llm import LLM
    from pyllm.sampling import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pyllm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pyllm.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pyllm' has no attribute {name!r}")
