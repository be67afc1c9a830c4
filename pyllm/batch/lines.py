"""From an entry to a job: which prompt, with which settings, answered in which form; or what is wrong with it.

Two forms of lines are understood. Simple ones have id, prompt or messages, and any field of `SamplingParams`. OpenAI
batch lines have custom_id and body. A field that is neither known nor the template's is an error: a misspelt setting
is not to be overlooked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from pyllm.batch.errors import LineError
from pyllm.batch.input import Entry
from pyllm.batch.template import PromptTemplate
from pyllm.errors import UsageError
from pyllm.sampling import SamplingParams

SETTINGS = frozenset(field.name for field in fields(SamplingParams))

_MAX_ID = 512  # characters
_SIMPLE = {"id", "prompt", "messages", "metadata"}
_KNOWN = _SIMPLE | SETTINGS
_LINE = {"custom_id", "method", "url", "body"}
# What a body may have that changes nothing here: the model is the command line's, answers are whole and never kept.
_BODY = {"model", "messages", "prompt", "max_completion_tokens", "top_logprobs", "n", "stream", "user", "metadata"}
_BODY |= {"store", "chat_template_kwargs", "tools"}
_ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_INTEGERS = frozenset(
    ("max_tokens", "top_k", "seed", "penalty_last_n", "dry_allowed_length", "dry_penalty_last_n", "logprobs")
)
_TEXTS = frozenset({"stop", "dry_sequence_breakers"})
_PLAIN = frozenset({int, float, str, bool})  # of settings that are compared with earlier ones
_MOST_KEPT = 256  # combinations of settings
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class Form(Enum):
    """How a line is answered."""

    SIMPLE = "simple"
    CHAT = "chat.completion"
    COMPLETION = "text_completion"


@dataclass(frozen=True)
class Ticket:
    """Which line it is.

    Attributes:
        id: as the input has it; None where it has none that can be read.
    """

    line: int
    id: str | int | None = None
    form: Form = Form.SIMPLE

    @property
    def key(self) -> str:
        """What no two lines may share."""
        return str(self.id)


@dataclass(frozen=True)
class Job:
    """A line that can be answered.

    Attributes:
        messages: a conversation; None: continue `prompt` as it is, without the chat template.
        template_args: further variables of the chat template.
        num_logprobs: alternatives to show beside each token; None: show no log-probabilities.
    """

    ticket: Ticket
    params: SamplingParams
    prompt: str = ""
    messages: list[Any] | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    num_logprobs: int | None = None


@dataclass(frozen=True)
class LineReader:
    """Reads entries by what the command line says about all of them.

    Attributes:
        defaults: settings of lines that say nothing else. Its seed is that of line 1; others count up from there.
        has_columns: fields are data, see `Source.has_columns`.
        template: makes the prompt of a simple line out of its fields.
        system: a system message before each prompt.
        raw: prompts are continued as they are, without the chat template.
    """

    defaults: SamplingParams
    has_columns: bool = False
    template: PromptTemplate | None = None
    system: str | None = None
    raw: bool = False
    _known: dict[tuple[Any, ...], SamplingParams] = field(default_factory=dict, init=False, repr=False, compare=False)

    def ticket(self, entry: Entry, usual: Form) -> Ticket:
        """Which line it is, also when something is wrong with the rest of it.

        Args:
            usual: how lines are answered that do not show their form.

        Raises:
            LineError: its id is none.
        """
        if entry.fields is None:
            return Ticket(entry.line, None, usual)
        if self.has_columns or not entry.fields.keys() & {"body", "custom_id"}:
            identifier = entry.fields.get("id")
            if identifier is None or identifier == "":
                identifier = f"line-{entry.line}"
            return Ticket(entry.line, _checked_id(identifier, "id"), Form.SIMPLE)
        body = entry.fields.get("body")
        form = Form.COMPLETION if isinstance(body, dict) and body.get("prompt") is not None else Form.CHAT
        return Ticket(entry.line, _checked_id(entry.fields.get("custom_id"), "custom_id"), form)

    def job(self, entry: Entry, ticket: Ticket) -> Job:
        """What is to be done.

        Raises:
            LineError: it cannot be.
        """
        if entry.error is not None:
            raise entry.error
        assert entry.fields is not None
        try:
            if ticket.form is Form.SIMPLE:
                return self._simple(entry.fields, ticket)
            return self._openai(entry.fields, ticket)
        except UsageError as error:  # a setting out of range
            raise LineError("invalid_value", str(error)) from None

    def _simple(self, values: Mapping[str, Any], ticket: Ticket) -> Job:
        settings = {name: value for name, value in values.items() if name in SETTINGS and value is not None}
        if self.has_columns:
            settings = {name: _from_text(name, value) for name, value in settings.items() if value}
        elif self.template is None and not _KNOWN.issuperset(values):
            raise _unknown(sorted(values.keys() - _KNOWN), "put data of your own under metadata, or use --template")
        params = self._params(settings, ticket)
        shown = params.logprobs or None
        messages = values.get("messages") if not self.has_columns else None
        if self.template is not None:
            prompt: Any = self.template.fill(values)
        elif messages is not None:
            if values.get("prompt") is not None:
                raise LineError("two_prompts", "both prompt and messages; expected one of them")
            return Job(ticket, params, messages=_checked_messages(messages), num_logprobs=shown)
        else:
            prompt = values.get("prompt")
            if prompt is None and self.has_columns:
                prompt = values.get("text")
                if prompt is None:
                    raise LineError("no_prompt", "there is no column prompt or text; use --template to name others")
        prompt = _checked_prompt(prompt)
        if self.raw:
            return Job(ticket, params, prompt, num_logprobs=shown)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Job(ticket, params, messages=[*system, {"role": "user", "content": prompt}], num_logprobs=shown)

    def _openai(self, values: Mapping[str, Any], ticket: Ticket) -> Job:
        if unknown := sorted(values.keys() - _LINE):
            raise _unknown(unknown, "settings belong into body")
        body = values.get("body")
        if not isinstance(body, dict):
            raise LineError("invalid_value", "body is missing or no object")
        body = {name: value for name, value in body.items() if value is not None}
        if unknown := sorted(body.keys() - _BODY - SETTINGS):
            raise _unknown(unknown, "take it out of body")
        _check_endpoint(values, body)
        if body.get("n", 1) != 1 or body.get("stream", False) is not False:
            raise LineError("unsupported", "n other than 1 and stream are not supported; write a line for each answer")
        settings = {name: value for name, value in body.items() if name in SETTINGS}
        if "max_completion_tokens" in body:
            if "max_tokens" in body:
                raise LineError("invalid_value", "both max_tokens and max_completion_tokens; expected one of them")
            settings["max_tokens"] = body["max_completion_tokens"]
        if ticket.form is Form.COMPLETION:
            params = self._params(settings, ticket)
            return Job(ticket, params, _checked_prompt(body["prompt"]), num_logprobs=params.logprobs or None)
        shown = _chat_logprobs(settings, body)
        arguments = body.get("chat_template_kwargs", {})
        if not isinstance(arguments, dict) or arguments.keys() & {"messages", "add_generation_prompt"}:
            raise LineError("invalid_value", "chat_template_kwargs is no object of variables for the chat template")
        if "tools" in body:
            arguments = {**arguments, "tools": body["tools"]}
        return Job(
            ticket,
            self._params(settings, ticket),
            messages=_checked_messages(body.get("messages")),
            template_args=arguments,
            num_logprobs=shown,
        )

    def _params(self, settings: Mapping[str, Any], ticket: Ticket) -> SamplingParams:
        seed = self.defaults.seed
        if seed is not None:
            seed = (seed + ticket.line - 1) % 2**64
        others = {name: value for name, value in settings.items() if name != "seed"}
        return self._checked(others).with_seed(settings.get("seed", seed))

    def _checked(self, settings: Mapping[str, Any]) -> SamplingParams:
        """The defaults with other settings. Many lines have the same ones: they are checked once."""
        if not _PLAIN.issuperset(map(type, settings.values())):
            return replace(self.defaults, **settings)
        key = tuple((name, type(value), value) for name, value in settings.items())  # 1, 1.0 and True are different
        found = self._known.get(key)
        if found is None:
            found = replace(self.defaults, **settings)
            found.takes_best  # noqa: B018 (looked up here, all copies with other seeds have it)
            if len(self._known) < _MOST_KEPT:
                self._known[key] = found
        return found


def _unknown(names: list[str], advice: str) -> LineError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    shown = ", ".join(repr(name[:80]) for name in names[:3])
    return LineError("unknown_field", f"unknown field {shown}{more}; {advice}")


def _checked_id(value: Any, name: str) -> str | int:
    if value is None:
        raise LineError("invalid_id", f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise LineError("invalid_id", f"{name} is of type {type(value).__name__}, expected a text or a whole number")
    if value == "" or len(str(value)) > _MAX_ID:
        raise LineError("invalid_id", f"{name} has {len(str(value))} characters, expected 1 to {_MAX_ID}")
    return value


def _checked_prompt(value: Any) -> str:
    if value is None:
        raise LineError("no_prompt", "there is neither prompt nor messages")
    if not isinstance(value, str):
        raise LineError("invalid_value", f"prompt is of type {type(value).__name__}, expected a text")
    if not value:
        raise LineError("no_prompt", "the prompt is empty")
    _check_characters(value)
    return value


def _checked_messages(value: Any) -> list[Any]:
    """Messages, of which contents in parts of text are joined; what templates need of roles they check themselves."""
    if value is None:
        raise LineError("no_prompt", "there is neither prompt nor messages")
    if not isinstance(value, list) or not value:
        raise LineError("invalid_value", "messages is no list, or empty; expected objects with role and content")
    _check_characters(value)
    return [
        {**message, "content": _joined(message["content"])}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in value
    ]


def _joined(parts: list[Any]) -> str:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise LineError("unsupported", "a message has a part that is no text; only text is supported")
    return "".join(part["text"] for part in parts)


def _check_characters(value: Any) -> None:
    """JSON can spell halves of characters, which are no text."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise LineError(
                "invalid_unicode", f"the text has half a character ({value[error.start]!a}) at position {error.start}"
            ) from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_characters(name)
            _check_characters(item)
    elif isinstance(value, list):
        for item in value:
            _check_characters(item)


def _check_endpoint(values: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    if "messages" in body and "prompt" in body:
        raise LineError("two_prompts", "both prompt and messages; expected one of them")
    if (method := values.get("method")) not in (None, "POST"):
        raise LineError("unsupported", f"method is {str(method)[:80]!r}, expected POST")
    url = values.get("url")
    if url is None:
        return
    if not isinstance(url, str) or url not in _ENDPOINTS:
        raise LineError("unsupported", f"url is {str(url)[:80]!r}, expected {' or '.join(_ENDPOINTS)}")
    if _ENDPOINTS[url] not in body:
        raise LineError("no_prompt", f"url is {url}, but body has no {_ENDPOINTS[url]}")


def _chat_logprobs(settings: dict[str, Any], body: Mapping[str, Any]) -> int | None:
    """In a chat, logprobs is true or false and top_logprobs says how many; the sampler wants one number."""
    wanted = settings.pop("logprobs", False)
    number = body.get("top_logprobs", 0)
    if not isinstance(wanted, bool) or isinstance(number, bool) or not isinstance(number, int):
        raise LineError("invalid_value", "logprobs is no truth value, or top_logprobs no whole number")
    if number and not wanted:
        raise LineError("invalid_value", "top_logprobs needs logprobs to be true")
    settings["logprobs"] = max(number, 1) if wanted else 0
    return number if wanted else None


def _from_text(name: str, text: Any) -> Any:
    """A setting from a column; what is none stays a text, which the settings refuse by name."""
    if name in _TEXTS:
        return text
    if name == "ignore_eos":
        return _TRUTHS.get(str(text).strip().lower(), text)
    try:
        return int(text) if name in _INTEGERS else float(text)
    except ValueError:
        return text
