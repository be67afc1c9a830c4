"""What is wrong with one line; the others go on."""

from __future__ import annotations

from pyllm.errors import (
    ContextError,
    PyllmError,
    SamplingError,
    StaleKVError,
    TemplateError,
    UsageError,
)

_CODES: tuple[tuple[type[PyllmError], str], ...] = (
    (ContextError, "context_length_exceeded"),
    (TemplateError, "template_error"),
    (SamplingError, "sampling_error"),
    (StaleKVError, "stale_kv"),
    (UsageError, "invalid_request"),
)


class LineError(PyllmError):
    """One line cannot be answered.

    Attributes:
        code: a word for programs; the message is for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def as_line_error(error: PyllmError) -> LineError:
    """The engine's error about one generation, with a code."""
    if isinstance(error, LineError):
        return error
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "engine_error")
    return LineError(code, str(error))
