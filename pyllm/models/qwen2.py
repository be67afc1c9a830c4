"""qwen2: Qwen2 and Qwen2.5. Queries, keys and values have biases."""

from __future__ import annotations

from pyllm.models.decoder import Decoder
from pyllm.ops.rope import RopePairing


class Qwen2(Decoder):
    """A sliding window that a file may name is not used by these models."""

    pairing = RopePairing.NEOX
