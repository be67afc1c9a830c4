"""Replaying an answer by hand: the same tokens in the same steps on another engine, and shifts done with NumPy."""

from __future__ import annotations

import numpy as np

from pyllm.executor import Segment
from pyllm.llm import LLM
from pyllm.ops.rope import RopePairing


class Replay:
    """A sequence of an engine on the CPU, or emulated, that nobody else uses.

    Attributes:
        token_ids: those whose rows are there.
        logits: of each step's last token.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._kv = llm._cache.new_sequence()
        self.token_ids: list[int] = []
        self.logits: list[np.ndarray] = []

    def feed(self, token_ids: list[int]) -> None:
        """One step."""
        cache, start = self._llm._cache, self._kv.length
        assert cache.extend(self._kv, len(token_ids))
        step = self._llm._executor.submit([Segment(self._kv, start, token_ids, 1, True)])
        logits, found = step.result()
        assert not found
        cache.publish(self._kv, self._kv.length)
        self.token_ids += token_ids
        self.logits.append(logits[0])

    def answer(self, prompt: list[int], count: int, ctx_size: int, keep: int, step: int) -> list[int]:
        """What is likeliest, token by token; when ctx_size tokens are there, `step` ones behind `keep` go."""
        token_ids, answer = list(prompt), list[int]()
        self.feed(prompt)
        while True:
            answer.append(int(np.argmax(self.logits[-1])))
            token_ids.append(answer[-1])
            if len(answer) == count:
                return answer
            if len(token_ids) == ctx_size:
                self.shift(keep, step)
                del token_ids[keep : keep + step]
            self.feed(token_ids[-1:])

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V of all positions, as they are stored."""
        cache = self._llm._cache
        ids = cache.row_ids(self._kv, np.arange(self._kv.length))
        return tuple(cache.device.download(array)[ids] for array in (cache.layers[layer].k, cache.layers[layer].v))  # type: ignore[return-value]

    def shift(self, keep: int, step: int) -> None:
        """A new sequence with the rows behind keep + step at their new positions."""
        cache, old = self._llm._cache, self._kv
        left = np.delete(np.arange(old.length), np.arange(keep, keep + step))
        rows = [self.rows(layer) for layer in range(len(cache.layers))]
        self._kv = cache.new_sequence()
        assert cache.extend(self._kv, len(left))
        cache.device.synchronize()
        ids = cache.row_ids(self._kv, np.arange(len(left)))
        epochs = np.repeat(np.array(self._kv.epochs, np.uint32), cache.page_size)[: len(left)]
        for index, (k, v) in enumerate(rows):
            layer, k = cache.layers[index], k[left]
            k[keep:] = self._turned(index, k[keep:], -step)
            layer.k[ids], layer.v[ids], layer.tags[ids] = k, v[left], epochs
        cache.publish(self._kv, len(left))
        cache.release(old)
        del self.token_ids[keep : keep + step]

    def _turned(self, layer: int, stored: np.ndarray, by: int) -> np.ndarray:
        """Keys `by` positions on."""
        model, kv_type = self._llm._model, self._llm._cache.kv_type
        plan, head_dim = model._rope_plan, model.config.key_length
        inv_freq = plan.frequencies[plan.of_layer[layer]].inv_freq.astype(np.float64)
        cos, sin = (function(by * inv_freq).astype(np.float32) for function in (np.cos, np.sin))
        x = kv_type.decode(stored).reshape(len(stored), -1, head_dim).copy()
        first = np.arange(len(inv_freq))
        first, second = (2 * first, 2 * first + 1) if model.pairing == RopePairing.NORM else (first, first + len(first))
        a, b = x[..., first], x[..., second]
        x[..., first], x[..., second] = a * cos - b * sin, a * sin + b * cos
        return kv_type.encode(x.reshape(len(stored), -1))
