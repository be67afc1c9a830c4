"""Answers of a conversation in two parts, reasoning and answer, with a limit on the reasoning.

Reasoning is what a model writes between <think> and </think>. A limit of 0 asks the template for a prompt without it
(`enable_thinking`, which the templates of such models know); where a block is opened all the same, it is closed at
once. At any other limit the block is closed after so many tokens: the generation is ended, and another begun behind it
and the closing mark. The engine has the rows of all that already, where it keeps those of ended sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyllm.generation import Chunk
from pyllm.reasoning import CLOSE, OPEN, ReasoningStream, opens_reasoning
from pyllm.sampling import SamplingParams

if TYPE_CHECKING:
    from pyllm.llm import LLM, PrefillProgress

_CLOSING = f"\n{CLOSE}\n\n"
_SUMS = ("generated_tokens", "decode_seconds", "dropped_tokens", "shifted_tokens")


@dataclass(frozen=True)
class Part:
    """What one token brought.

    Attributes:
        chunk: it.
        reasoning, answer: its text, parted; a part of a mark is held back.
    """

    chunk: Chunk
    reasoning: str = ""
    answer: str = ""


class ThoughtfulAnswer:
    """One answer to a conversation.

    Args:
        limit: tokens of reasoning at most; None: as many as the model wants.
        answers, progress: as for `LLM.chat`.

    Attributes:
        tokens: all tokens behind the prompt, those of a closing mark that was put in among them.
        was_reasoning: there was a block.
        was_closed: the limit closed it.
    """

    def __init__(
        self,
        llm: LLM,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        limit: int | None = None,
        answers: Sequence[Sequence[int]] = (),
        progress: PrefillProgress | None = None,
    ) -> None:
        self._llm = llm
        self._messages = messages
        self._params = params
        self._limit = limit
        self._answers = answers
        self._progress = progress
        self._template_args: dict[str, Any] = {"enable_thinking": False} if limit == 0 else {}
        self._stats: list[Mapping[str, Any]] = []
        controls = llm.tokenizer.control_texts()
        self._marks = {controls[text]: text for text in (OPEN, CLOSE) if text in controls}
        self.tokens: list[int] = []
        self.was_reasoning = self.was_closed = False

    def parts(self) -> Iterator[Part]:
        """The answer as it comes. Closing the iterator ends the generation.

        Raises:
            PyllmError: as `LLM.chat`.
        """
        llm = self._llm
        is_open = opens_reasoning(llm.apply_chat_template(self._messages, **self._template_args))
        stream = ReasoningStream(is_open)
        if is_open and self._limit == 0:
            yield from self._closed(stream, self._params)
            return
        arguments = {"answers": self._answers, "progress": self._progress, **self._template_args}
        chunks = llm.chat(self._messages, self._params, **arguments)
        yield from self._taken(chunks, stream, self._limit)
        if self.was_closed:
            used = len(self.tokens)
            left = None if self._params.max_tokens is None else self._params.max_tokens - used
            yield from self._closed(stream, replace(self._params, max_tokens=left))

    def _closed(self, stream: ReasoningStream, params: SamplingParams) -> Iterator[Part]:
        """Close the block and go on behind it."""
        llm = self._llm
        closing_ids = llm.tokenize(_CLOSING, add_special=False, parse_special=True)
        asked = llm.chat_tokens(self._messages, answers=self._answers, **self._template_args)
        prompt = [*asked, *self.tokens, *closing_ids]
        self.tokens += closing_ids
        stream.push(_CLOSING)
        yield from self._taken(llm.generate(prompt, params), stream, None)

    def _taken(self, chunks: Iterator[Chunk], stream: ReasoningStream, limit: int | None) -> Iterator[Part]:
        """Parts of chunks, until the generation ends or the limit is reached."""
        thoughts = 0
        with closing(chunks) as source:  # type: ignore[type-var]  # (iterators of the engine are generators)
            for chunk in source:
                was_inside = stream.is_inside
                mark = self._marks.get(chunk.token, "") if chunk.token is not None else ""
                reasoning, answer = stream.push(mark + chunk.text)
                if chunk.token is not None:
                    self.tokens.append(chunk.token)
                    thoughts += was_inside
                over = limit is not None and stream.is_inside and thoughts >= limit and chunk.finish_reason is None
                if chunk.finish_reason is not None:
                    rest = stream.flush()
                    reasoning, answer = reasoning + rest[0], answer + rest[1]
                self.was_reasoning = stream.was_inside
                self.was_closed = self.was_closed or over
                yield Part(chunk, reasoning, answer)
                if over:
                    break
        self._stats.append(self._llm.stats)

    @property
    def stats(self) -> dict[str, Any]:
        """As `LLM.stats`, of all that was generated for the answer."""
        first, *later = self._stats or [self._llm.stats]
        stats = dict(first)
        for more in later:
            for name in _SUMS:
                stats[name] = stats.get(name, 0) + more.get(name, 0)
            stats["recomputed"] = stats.get("recomputed") or more.get("recomputed")
            stats["decode_seconds"] += more["prefill_seconds"]
        stats["generated_tokens"] = max(stats["generated_tokens"], len(self.tokens))
        return stats
