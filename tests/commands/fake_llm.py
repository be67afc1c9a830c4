"""An engine that answers at once and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from pyllm.llm import Chunk
from pyllm.sampling import SamplingParams


class FakeLLM:
    """Stands for `pyllm.llm.LLM`. Class attributes are set by tests.

    Attributes:
        opened: the engine that a command made last.
        call: ("chat", messages) or ("generate", ids).
    """

    opened: ClassVar[FakeLLM]
    chunks: ClassVar[Sequence[Chunk]] = (Chunk("Hel", 1), Chunk("", 2), Chunk("lo", 3, "stop"))
    trained_for: ClassVar[int] = 8192
    during: ClassVar[Callable[[], None]] = staticmethod(lambda: None)  # called before each chunk
    device_name = "cpu"
    device_description = "cpu"
    sequence_bytes: ClassVar[dict[str, int]] = {"kv_rows": 0, "recurrent_state": 0}  # no checkpoints without a state
    template = None
    keeps_prefixes = False

    def __init__(self, path: object, progress: Callable[[int, int], None] | None = None, **options: Any) -> None:
        FakeLLM.opened = self
        self.model_path = path
        self.options = options
        self.ctx_size = min(options.get("ctx_size", 4096), self.trained_for)
        self.interrupted = False
        self.closed = False
        self.call: tuple[str, Any] | None = None
        self.tokenizer = self
        self.params: SamplingParams | None = None

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[Any]:
        return [text, add_special, parse_special]

    def is_eog(self, token: int) -> bool:
        return token == 3

    def decode(self, ids: Sequence[int], continues: bool = False) -> str:
        return "".join(f"<{token}>" for token in ids)

    def control_texts(self) -> dict[str, int]:
        return {}

    def apply_chat_template(self, messages: Any, **template_args: Any) -> str:
        return "assistant\n"

    def chat_tokens(self, messages: Any, answers: Any = (), **template_args: Any) -> list[int]:
        """One for each message, and one for each of its words."""
        return [0] * sum(1 + len(message["content"].split()) for message in messages)

    def chat(self, messages: Any, params: SamplingParams, answers: Any = (), progress: Any = None) -> Iterator[Chunk]:
        self.answers = answers
        return self._answer(("chat", messages), params)

    def generate(self, ids: Any, params: SamplingParams) -> Iterator[Chunk]:
        return self._answer(("generate", ids), params)

    def _answer(self, call: tuple[str, Any], params: SamplingParams) -> Iterator[Chunk]:
        self.call, self.params = call, params
        for chunk in self.chunks:
            type(self).during()
            if self.interrupted:
                yield Chunk("", None, "interrupted")
                return
            yield chunk

    def interrupt(self) -> None:
        self.interrupted = True

    def forget_interrupt(self) -> None:
        self.interrupted = False

    @property
    def stats(self) -> dict[str, Any]:
        return {
            "prompt_tokens": 10,
            "generated_tokens": 3,
            "prefill_seconds": 0.5,
            "decode_seconds": 0.25,
            "seed": 42 if self.params is None or self.params.seed is None else self.params.seed,
        }

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.closed = True
