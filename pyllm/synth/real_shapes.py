"""All shapes, by the name that `pyllm synth --like` gives them."""

from __future__ import annotations

from pyllm.synth.gemma import GEMMA_SHAPES
from pyllm.synth.hybrid import HYBRID_SHAPES
from pyllm.synth.shapes import DENSE_SHAPES, Shape

SHAPES: dict[str, Shape] = {**DENSE_SHAPES, **GEMMA_SHAPES, **HYBRID_SHAPES}
