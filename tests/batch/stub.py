"""An engine that repeats prompts, a word at each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pyllm.errors import ContextError, PyllmError
from pyllm.generation import Chunk
from pyllm.sampling import SamplingParams


class StubGeneration:
    """Says the words of its prompt, one each time that the engine advances."""

    def __init__(self, engine: StubLLM, words: list[str], params: SamplingParams) -> None:
        self.engine, self.words, self.params = engine, words, params
        self.steps = self.said = 0
        self.limit = params.max_tokens or len(words)
        self.closed = False

    @property
    def has_ended(self) -> bool:
        return "BOOM" in self.words[: self.steps] or self.steps >= min(self.limit, len(self.words))

    @property
    def num_ready(self) -> int:
        return min(self.steps, len(self.words)) - self.said

    def take(self) -> Chunk | None:
        if self.closed or self.said >= self.steps:
            return None
        word = self.words[self.said]
        if word == "BOOM":
            self.close()
            raise PyllmError("it went boom")
        self.said += 1
        reason = "stop" if self.said == len(self.words) else "length" if self.said == self.limit else None
        if reason:
            self.close()
        text = word if self.said == 1 else f" {word}"
        tops = tuple((token, -float(token)) for token in range(1, self.params.logprobs + 1))
        return Chunk(text, len(word), reason, -1.0 if tops else None, tops)

    def drain(self, marks: Mapping[int, str]) -> tuple[str, int, str | None] | None:
        chunks = []
        while (chunk := self.take()) is not None:
            chunks.append(chunk)
            if chunk.finish_reason:
                break
        return ("".join(c.text for c in chunks), len(chunks), chunks[-1].finish_reason) if chunks else None

    def close(self) -> None:
        self.closed = True
        if self in self.engine.open:
            self.engine.open.remove(self)

    def usage(self) -> tuple[int, int]:
        return len(self.words), 1 if self.engine.keeps else 0


class StubLLM:
    """Stands for `pyllm.llm.LLM`, also as a class; `StubLLM.last` is the engine that was opened last.

    Attributes:
        begun: what it was asked, with how.
        started: how many had been begun each time that prompts were to be started.
        most_open: so many generations were open at the same time.
        keeps: say that something of each prompt was there already.
    """

    last: ClassVar[StubLLM]
    during: ClassVar[Callable[[], None]] = staticmethod(lambda: None)  # called at each step
    device_description = "stub"
    template = None

    def __init__(self, path: object = None, progress: object = None, **options: Any) -> None:
        StubLLM.last = self
        self.options = options
        self.ctx_size = options.get("ctx_size", 100)
        self.tokenizer = self
        self.open: list[StubGeneration] = []
        self.begun: list[tuple[list[str], SamplingParams]] = []
        self.started: list[int] = []
        self.most_open = 0
        self.keeps = False

    def control_texts(self) -> dict[str, int]:
        return {}

    def token_bytes(self, token: int) -> bytes:
        return b"x" * token

    def tokenize(self, text: str) -> list[Any]:
        return text.split()

    def detokenize(self, ids: Sequence[Any]) -> str:
        return " ".join(ids)

    def chats_tokens(self, conversations: Sequence[tuple[Any, Any]]) -> list[Any]:
        self.template  # noqa: B018 (may be malformed)
        return [self.chat_tokens(messages, **template_args) for messages, template_args in conversations]

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], **template_args: Any) -> list[Any]:
        return [word for message in messages for word in message["content"].split()]

    def begin(self, prompt: Sequence[Any], params: SamplingParams, keep_answer: bool = True) -> StubGeneration:
        if len(prompt) > self.ctx_size:
            raise ContextError("the prompt is too long")
        generation = StubGeneration(self, list(prompt), params)
        self.begun.append((generation.words, params))
        self.open.append(generation)
        self.most_open = max(self.most_open, len(self.open))
        return generation

    def start_prompts(self) -> None:
        self.started.append(len(self.begun))

    def advance(self, meanwhile: Callable[[], bool] | None = None) -> bool:
        type(self).during()
        for generation in self.open[: self.options.get("n_seqs", 1)]:
            generation.steps += 1
        return bool(self.open)

    def __enter__(self) -> StubLLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass
