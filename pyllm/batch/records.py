"""What is written about a line: simple records, and those of OpenAI's batch output with `line` added."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyllm.batch.errors import LineError
from pyllm.batch.lines import Form, Job, Ticket
from pyllm.generation import Chunk

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True)
class Usage:
    """Tokens: of the prompt, those of them that were not computed again, and of the answer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Result:
    """A finished answer.

    Attributes:
        reasoning: None when there is none.
        tokens: with their log-probabilities, where they were asked for.
        cut_off: it ended because the context was full; its record has "context_full", which others have not.
    """

    text: str
    reasoning: str | None
    finish_reason: str
    usage: Usage
    tokens: list[Chunk] = field(default_factory=list)
    cut_off: bool = False


def record(job: Job, result: Result, model: str, token_bytes: TokenBytes) -> dict[str, Any]:
    """The record of an answer, ready for JSON.

    Args:
        model: its name, for the records that show one.
        token_bytes: of a token, which need not be whole characters.
    """
    ticket = job.ticket
    if ticket.form is not Form.SIMPLE:
        shown = _openai(ticket, _response(job, result, model, token_bytes), None)
        return shown | ({"context_full": True} if result.cut_off else {})
    shown = {"id": ticket.id, "line": ticket.line, "text": result.text}
    if result.reasoning is not None:
        shown["reasoning"] = result.reasoning
    shown |= {"finish_reason": result.finish_reason, "usage": vars(result.usage)}
    if result.cut_off:
        shown["context_full"] = True
    if job.num_logprobs is not None:
        shown["logprobs"] = [_simple_token(chunk, job.num_logprobs, token_bytes) for chunk in result.tokens]
    return {**shown, "error": None}


def error_record(ticket: Ticket, error: LineError, usage: Usage | None = None) -> dict[str, Any]:
    """The record of a line that has no answer.

    Args:
        usage: tokens that were computed before it failed.
    """
    what = {"code": error.code, "message": str(error)}
    if ticket.form is not Form.SIMPLE:
        return _openai(ticket, None, what)
    return {
        "id": ticket.id,
        "line": ticket.line,
        "text": None,
        "finish_reason": None,
        "usage": vars(usage or Usage()),
        "error": what,
    }


def _openai(ticket: Ticket, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": f"batch_req_{ticket.line}",
        "custom_id": ticket.id,
        "line": ticket.line,
        "response": response,
        "error": error,
    }


def _response(job: Job, result: Result, model: str, token_bytes: TokenBytes) -> dict[str, Any]:
    form, line, usage = job.ticket.form, job.ticket.line, result.usage
    choice: dict[str, Any] = {"index": 0}
    if form is Form.CHAT:
        choice["message"] = {"role": "assistant", "content": result.text}
        if result.reasoning is not None:
            choice["message"]["reasoning_content"] = result.reasoning
    else:
        choice["text"] = result.text
    choice["logprobs"] = _openai_logprobs(form, job.num_logprobs, result.tokens, token_bytes)
    choice["finish_reason"] = result.finish_reason
    body = {
        "id": f"cmpl-{line}",
        "object": form.value,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }
    return {"status_code": 200, "request_id": f"req_{line}", "body": body}


def _simple_token(chunk: Chunk, number: int, token_bytes: TokenBytes) -> dict[str, Any]:
    assert chunk.token is not None
    likeliest = [
        {"token": token, "text": _text(token_bytes, token), "logprob": _finite(logprob)}
        for token, logprob in chunk.top_logprobs[:number]
    ]
    own = {"token": chunk.token, "text": _text(token_bytes, chunk.token), "logprob": _finite(chunk.logprob)}
    return {**own, "top": likeliest}


def _openai_logprobs(form: Form, number: int | None, chunks: list[Chunk], token_bytes: TokenBytes) -> Any:
    if number is None:
        return None
    tokens = [(chunk.token, chunk.logprob, chunk.top_logprobs[:number]) for chunk in chunks if chunk.token is not None]
    if form is Form.COMPLETION:
        return {
            "tokens": [_text(token_bytes, token) for token, _, _ in tokens],
            "token_logprobs": [_finite(logprob) for _, logprob, _ in tokens],
            "top_logprobs": [{_text(token_bytes, one): _finite(its) for one, its in top} for _, _, top in tokens],
        }
    return {
        "content": [
            {
                **_chat_token(token, logprob, token_bytes),
                "top_logprobs": [_chat_token(*one, token_bytes) for one in top],
            }
            for token, logprob, top in tokens
        ]
    }


def _chat_token(token: int, logprob: float | None, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _text(token_bytes: TokenBytes, token: int) -> str:
    return token_bytes(token).decode(errors="replace")


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinities: null stands for a probability of 0."""
    return logprob if logprob is not None and math.isfinite(logprob) else None
