"""qwen35: Qwen3.5 and 3.6 with dense feed-forward blocks.

The rotary embedding has sections for time, height, width and a fourth position. Text has the same position in the first
three and 0 in the fourth, so pairs of the fourth section do not turn, and all others turn as usual.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pyllm.errors import ModelFileError
from pyllm.gguf_file import GGUFModel
from pyllm.models.config import TransformerConfig
from pyllm.models.hybrid import HybridDecoder
from pyllm.models.rope_scaling import RopePlan, read_rope

NUM_SECTIONS = 4
NUM_DEALT = 3  # sections that take turns


class Qwen35(HybridDecoder):
    tiled = True

    @classmethod
    def read_rope(cls, gguf: GGUFModel, config: TransformerConfig) -> RopePlan:
        frequencies = read_rope(gguf, config)
        turns = _turns(gguf, len(frequencies.inv_freq))
        inv_freq = np.where(turns, frequencies.inv_freq, np.float32(0))
        return RopePlan.same(replace(frequencies, inv_freq=inv_freq), config.num_layers)


def _turns(gguf: GGUFModel, num_pairs: int) -> np.ndarray:
    """[num_pairs], whether a pair belongs to one of the first three sections.

    Pairs are dealt out one by one to time, height and width, while a section has any left.
    """
    key = gguf.arch_key("rope.dimension_sections")
    sections = gguf.get_array(key, np.int64, length=NUM_SECTIONS)
    if (sections < 0).any() or not 0 < sections.sum() <= num_pairs:
        raise ModelFileError(
            f"{gguf.path}: {key} is {sections.tolist()}, expected parts of {num_pairs} pairs; the file is damaged"
        )
    place = np.arange(num_pairs) % sections.sum()
    return place < NUM_DEALT * sections[place % NUM_DEALT]
