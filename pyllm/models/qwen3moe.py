"""qwen3moe: Qwen3 with a mixture of experts in every block, such as Qwen3-30B-A3B."""

from __future__ import annotations

from pyllm.models.feed_forward import ExpertFeedForward
from pyllm.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    feed_forward = ExpertFeedForward
