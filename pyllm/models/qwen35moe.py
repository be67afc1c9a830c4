"""qwen35moe: Qwen3.5 and 3.6 with a mixture of experts and a shared one in every block, such as Qwen3.6-35B-A3B."""

from __future__ import annotations

from pyllm.models.feed_forward import SharedExpertFeedForward
from pyllm.models.qwen35 import Qwen35


class Qwen35Moe(Qwen35):
    feed_forward = SharedExpertFeedForward
