"""A generation on its way: what its request has brought, as text that can be shown.

`LLM.generate` wraps one in an iterator. Programs that run many side by side begin them with `LLM.begin`, move all of
them on with `LLM.advance`, and take what has come. This module knows requests and text; it does not step the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pyllm.request import Request
from pyllm.text_stream import PieceSource, TextStream


class Chunk(NamedTuple):
    """One generated token.

    Attributes:
        text: what can be shown now; may be empty (a part of a character, or of a possible stop string).
        token: its id; None only for text that was held back when the generation was interrupted.
        finish_reason: None, or on the last chunk why it is the last: "stop" (end token or stop string), "length"
            (max_tokens or a full context), "interrupted".
        logprob: natural logarithm of the token's probability before any filter; with SamplingParams(logprobs=...).
        top_logprobs: (token, logprob) of the likeliest tokens, best first; likewise.
    """

    text: str
    token: int | None
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Generation:
    """One prompt on its way to an answer.

    Args:
        request: what the scheduler runs.
        tokenizer: of the model.
        end: tells the engine that a request is over; called once, with it and the reason.
    """

    def __init__(self, request: Request, tokenizer: PieceSource, end: Callable[[Request, str], None]) -> None:
        assert request.params is not None
        self._request = request
        self._text = TextStream(tokenizer, request.params.stop)
        self._has_stop = bool(request.params.stop)
        self._end = end
        self._is_over = False

    @property
    def has_news(self) -> bool:
        """Whether `take` can return something, or raise what went wrong."""
        return bool(self._request.emitted) or self._request.finish_reason is not None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come; what has come may not be taken yet."""
        return self._request.finish_reason is not None

    @property
    def num_ready(self) -> int:
        """Tokens that have come and were not taken yet."""
        return len(self._request.emitted)

    def take(self) -> Chunk | None:
        """The next chunk; None when there is none yet, or none any more.

        Raises:
            PyllmError: the generation broke off; what was taken before is right.
        """
        request = self._request
        if self._is_over or not (request.emitted or request.finish_reason is not None):
            return None
        if not request.emitted:
            if request.error is not None:
                self.close()
                raise request.error
            reason = request.finish_reason  # interrupted while it waited for a token
            self.close()
            return Chunk(self._text.flush(), None, reason)
        sampled = request.emitted.popleft()
        shown = self._text.push(sampled.token)
        reason = "stop" if self._text.stopped else self._last_reason()
        if reason and not self._text.stopped:
            shown += self._text.flush()
        if reason:
            self.close(reason)
        return Chunk(shown, sampled.token, reason, sampled.logprob, sampled.top_logprobs)

    def drain(self, marks: Mapping[int, str]) -> tuple[str, int, str | None] | None:
        """All that has come since the last call: its text, how many tokens it is, and the finish reason when the last
        one is among them. None when nothing has. The text is that of `take`, at less cost.

        Args:
            marks: text of tokens that have none of their own, which is wanted all the same.

        Raises:
            PyllmError: as `take`.
        """
        request = self._request
        emitted = request.emitted
        if self._is_over or not (emitted or request.finish_reason is not None):
            return None
        tokens = [emitted.popleft().token for _ in range(len(emitted))]
        if tokens and not self._has_stop and marks.keys().isdisjoint(tokens):
            text, reason = self._text.push_all(tokens), self._last_reason()
            if reason:
                text += self._text.flush()
                self.close(reason)
            return text, len(tokens), reason
        texts, count = list[str](), 0
        for token in tokens:
            texts.append(self._text.push(token))
            count += 1
            is_last = count == len(tokens)
            reason = "stop" if self._text.stopped else self._last_reason() if is_last else None
            if reason and not self._text.stopped:
                texts.append(self._text.flush())
            if token in marks:
                texts.append(marks[token])
            if reason:
                self.close(reason)
                return "".join(texts), count, reason
        if not count:
            chunk = self.take()  # without a token: it raises, or was interrupted
            assert chunk is not None
            return chunk.text, 0, chunk.finish_reason
        return "".join(texts), count, None

    def _last_reason(self) -> str | None:
        """The finish reason when the token just taken was the last one."""
        reason = self._request.finish_reason
        return reason if reason in ("stop", "length") and not self._request.emitted else None

    def close(self, reason: str = "cancelled") -> None:
        """End the generation, wherever it is. Calling it twice is harmless."""
        if not self._is_over:
            self._is_over = True
            self._end(self._request, reason)

    def usage(self) -> tuple[int, int]:
        """Tokens of the prompt, and those of them that were there already: of `stats`, at less cost."""
        request = self._request
        return request.num_prompt + request.num_dropped, request.num_cached

    def stats(self) -> Mapping[str, Any]:
        """Counts and times, see `Request.stats`."""
        return self._request.stats()
