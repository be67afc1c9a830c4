"""Showing a generation while it runs, and summing it up."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyllm.commands.console import note, size_text, warn, without_controls

if TYPE_CHECKING:
    from pyllm.llm import LLM, Chunk
    from pyllm.terminal.answer_view import AnswerView
    from pyllm.thinking import Part


@dataclass
class Answer:
    """What came out so far.

    Attributes:
        reasoning: what was parted from the text, see `collect_parts`.
        logprobs: of each token, as `Chunk` has them: its own, and those of the likeliest.
        finish_reason: "stop", "length" or "interrupted"; None while it runs.
    """

    text: str = ""
    reasoning: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float | None, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    finish_reason: str | None = None

    def collect(self, chunks: Iterable[Chunk], show: bool) -> None:
        """Take all chunks; with `show`, write their text to stdout as it comes."""
        is_terminal = sys.stdout.isatty()
        try:
            for chunk in chunks:
                self.text += chunk.text
                self._add(chunk)
                if show and chunk.text:
                    sys.stdout.write(without_controls(chunk.text) if is_terminal else chunk.text)
                    sys.stdout.flush()
        finally:
            if show and self.text and not self.text.endswith("\n"):
                sys.stdout.write("\n")

    def collect_parts(self, parts: Iterable[Part], view: AnswerView | None) -> None:
        """Take all parts, showing them as they come where there is a view."""
        try:
            for part in parts:
                self.text += part.answer
                self.reasoning += part.reasoning
                self._add(part.chunk)
                if view is None:
                    continue
                if part.reasoning:
                    view.reasoning(part.reasoning)
                if part.answer:
                    view.answer(part.answer)
        finally:
            if view is not None:
                view.end()

    def _add(self, chunk: Chunk) -> None:
        self.finish_reason = chunk.finish_reason
        if chunk.token is not None:
            self.tokens.append(chunk.token)
            self.logprobs.append((chunk.logprob, chunk.top_logprobs))


def said(llm: LLM, answer: Answer) -> tuple[int, ...]:
    """The tokens that say what was shown: without an end token. Nothing, where reasoning was among them, of which the
    conversation keeps nothing."""
    ids = answer.tokens if not answer.reasoning else []
    return tuple(ids[:-1] if ids and llm.tokenizer.is_eog(ids[-1]) else ids)


def introduce(llm: LLM, ctx_size: int | None) -> None:
    """Tell which device was taken, and whether the wanted context was."""
    note(f"Device: {llm.device_description}")
    sizes = llm.sequence_bytes
    if sizes["recurrent_state"]:
        names = ("kv_rows", "recurrent_state", "checkpoint", "all_checkpoints")
        rows, state, saved, most = (size_text(sizes[name]) for name in names)
        note(f"Memory per sequence: {rows} of K/V rows for {llm.ctx_size} tokens and {state} of recurrent state")
        if llm.keeps_prefixes:
            note(f"Each checkpoint of a state takes {saved} of the host's memory, all together at most {most}")
    if ctx_size is not None and llm.ctx_size < ctx_size:
        warn(f"the model was trained for {llm.ctx_size} tokens; -c {ctx_size} is cut down to that")


def why_cut_off(llm: LLM, answer: Answer, max_tokens: int | None) -> str | None:
    """Why an answer ended before the model ended it; None when it did not."""
    if answer.finish_reason == "interrupted":
        return "Interrupted"
    if answer.finish_reason != "length":
        return None
    if len(answer.tokens) == max_tokens:
        return f"Cut off after -n {max_tokens} tokens"
    return f"Cut off: the context of {llm.ctx_size} tokens (-c) is full"


def note_dropped(stats: Mapping[str, Any]) -> None:
    """Tell that tokens had to give way."""
    dropped, shifted, reason = (stats.get(name) for name in ("dropped_tokens", "shifted_tokens", "recomputed"))
    if not dropped:
        return
    how = []
    if reason or dropped != shifted:
        how.append("the rest was computed anew" + (f" ({reason})" if reason else ""))
    if shifted:
        how.append("and the rows behind them shifted")
    note(f"The context was full: {dropped} tokens in its middle were left out, {', '.join(how)}")


ENDING = (signal.SIGTERM, signal.SIGHUP)  # a terminal that is closed sends the second


@contextmanager
def ctrl_c_ends_generation(llm: LLM, ended_by: list[int]) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
    """The first Ctrl-C ends the generation and keeps what is there; the second raises KeyboardInterrupt. SIGTERM and
    SIGHUP end it too; who ends the program then finds them in `ended_by`. A second one does what it did before.

    Yields:
        A function through which the chunks, or parts, are to be taken: a signal that came before the engine had the
        request ends it with its first token.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    came: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        came.append(number)
        if number in ENDING:
            ended_by.append(number)
        signal.signal(number, previous[signal.Signals(number)])
        llm.interrupt()

    def until_it_comes(chunks: Iterable[Any]) -> Iterator[Any]:
        for chunk in chunks:
            yield chunk
            if came:
                llm.interrupt()

    # Ignored: started in the background, by nohup and the like.
    ours = [number for number, handler in previous.items() if handler is not signal.SIG_IGN]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield until_it_comes
    finally:
        for number in ours:
            signal.signal(number, previous[number])
    if came:
        llm.forget_interrupt()  # it may have come behind the last token


@dataclass(frozen=True)
class Timings:
    """Seconds, and tokens per second; 0 where nothing was measured. The prefill ends with the first answer token."""

    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float

    @classmethod
    def of(cls, load_seconds: float, stats: Mapping[str, Any]) -> Timings:
        """From `LLM.stats`."""
        prefill, decode, generated = stats["prefill_seconds"], stats["decode_seconds"], stats["generated_tokens"]
        return cls(
            load_seconds,
            prefill,
            decode,
            _rate(_computed(stats) if generated else 0, prefill),
            _rate(generated - 1, decode),
        )


def _computed(stats: Mapping[str, Any]) -> int:
    """Tokens of the prompt that were: neither there before, nor dropped because the context was full."""
    return int(stats.get("evaluated_tokens", stats["prompt_tokens"] - stats.get("cached_tokens", 0)))


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 and tokens > 0 else 0.0


def summary(stats: Mapping[str, Any], timings: Timings) -> str:
    """One line about speed."""
    prompt = _speed(stats["prompt_tokens"], "prompt", timings.prefill_tokens_per_second)
    if cached := stats.get("cached_tokens", 0):
        prompt = prompt.replace(", ", f" ({cached} of them from before), ", 1)
    return f"{prompt}; {_speed(stats['generated_tokens'], 'answer', timings.decode_tokens_per_second)}"


def _speed(tokens: int, kind: str, rate: float) -> str:
    count = f"{tokens} {kind} token{'' if tokens == 1 else 's'}"
    return f"{count}, {rate:.1f} tokens/s" if rate else count


def as_json(llm: LLM, model: str, answer: Answer, stats: Mapping[str, Any], timings: Timings) -> str:
    """One JSON object, ASCII only: every terminal and pipe can take it."""
    shown = {
        "model": model,
        "device": llm.device_name,
        "text": answer.text,
        **({"reasoning": answer.reasoning} if answer.reasoning else {}),
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": stats["prompt_tokens"],
            "cached_tokens": stats.get("cached_tokens", 0),
            "completion_tokens": len(answer.tokens),
        },
        "timings": {name: round(value, 6) for name, value in vars(timings).items()},
        "seed": stats["seed"],
    }
    if any(logprob is not None for logprob, _ in answer.logprobs):
        pairs = zip(answer.tokens, answer.logprobs, strict=True)
        shown["logprobs"] = [
            {**_token(llm, token, logprob), "top": [_token(llm, *likely) for likely in top]}
            for token, (logprob, top) in pairs
        ]
    return json.dumps(shown)


def _token(llm: LLM, token: int, logprob: float | None) -> dict[str, Any]:
    """JSON has no infinities: null stands for a probability of 0."""
    finite = logprob is not None and math.isfinite(logprob)
    text = llm.tokenizer.decode([token], continues=True)
    return {"token": token, "text": text, "logprob": logprob if finite else None}
