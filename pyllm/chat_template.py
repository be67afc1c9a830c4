"""Chat templates: messages to the text that a model was trained to continue.

A template is a Jinja program stored in the model file. It runs in the sandbox of `template_sandbox`, on a copy of the
messages. This module knows what templates expect to find; it does not know tokens.
"""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import jinja2

from pyllm.errors import ModelFileError, TemplateError, UsageError
from pyllm.gguf_metadata import printable
from pyllm.template_limits import NODE_SIZE, LimitError, Limits
from pyllm.template_marks import Marks, Own, private_chars
from pyllm.template_sandbox import ChatEnvironment
from pyllm.tokenizer_special import ControlTexts

_log = logging.getLogger(__name__)

_FILENAME = "<chat template>"
_MAX_SOURCE = 1 << 20  # characters
_MAX_STEPS = 1_000_000
_MAX_SECONDS = 10.0
_SIZE, _SIZE_PER_INPUT = 4_000_000, 8  # characters of output and of any one value
_MEMORY, _MEMORY_PER_INPUT = 64_000_000, 32  # bytes of all values together
_MAX_DEPTH = 64  # of messages and template arguments
_PLAIN = frozenset({type(None), bool, int, float, str})
_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"})

# For files without a template, by a token of the vocabulary that shows which form the model knows.
_FALLBACKS = {
    "<start_of_turn>": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' ~ message.content "
        "~ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "<|start_header_id|>": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ message.content ~ '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "<|im_start|>": (
        "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
FALLBACK = _FALLBACKS["<|im_start|>"]
"""The ChatML form, the most widespread one: used when a file has no template and its vocabulary suggests no other."""


class ChatTemplate:
    """A compiled template. Threads may share it."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """
        Args:
            source: Jinja, with what transformers offers to chat templates.
            bos_token, eos_token: their texts, "" when the model has none.

        Raises:
            TemplateError: malformed; the message names the line.
        """
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"the chat template is {len(source)} characters long, expected at most {_MAX_SOURCE}")
        self.source = source
        self._tokens = {"bos_token": Own(bos_token), "eos_token": Own(eos_token)}
        self._lock = threading.RLock()  # the environment keeps the count of one rendering, and marks are of one
        self._environment = ChatEnvironment()
        try:
            code = self._environment.compile_counted(source, _FILENAME)
            # A plain dict: each rendering copies it.
            self._template = jinja2.Template.from_code(self._environment, code, dict(self._environment.globals))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {_one_line(error.message)}") from None
        except Exception as error:  # Python's compiler has limits of its own, on nesting for one
            raise TemplateError(f"the chat template cannot be compiled: {_one_line(error)}") from None
        self._private = private_chars([*self._environment.literals, bos_token, eos_token])
        self._usual: tuple[ControlTexts, Marks] | None = None  # marks for messages without private characters

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, Any],
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        name: str | None = None,
        special_tokens: Collection[str] = (),
    ) -> ChatTemplate:
        """The template of a GGUF file, or with a warning a fallback.

        Args:
            metadata: the file's key-value pairs.
            source: file name, for messages.
            name: of one of several templates (tokenizer.chat_template.NAME), such as "tool_use"; None: the main one.
            special_tokens: texts of the vocabulary's special tokens; they tell which fallback suits the model.

        Raises:
            TemplateError: malformed, or no template of that name.
            ModelFileError: the value is not a text.
        """
        key = "tokenizer.chat_template" + (f".{name}" if name else "")
        if key not in metadata:
            if name:
                raise TemplateError(f"{source}: {key} is missing; leave the name out to use the main template")
            form = next((token for token in _FALLBACKS if token in special_tokens), "<|im_start|>")
            _log.warning("%s has no chat template; messages are written in the general form with %s", source, form)
            return cls(_FALLBACKS[form], bos_token, eos_token)
        template = metadata[key]
        if not isinstance(template, str):
            raise ModelFileError(f"{source}: {key} is of type {type(template).__name__}, expected a text")
        return cls(template, bos_token, eos_token)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_args: Any
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with a `role` (str) and mostly a `content` (str; None beside tool calls; or a list of parts).
                Arguments of tool calls may be mappings or JSON texts.
            add_generation_prompt: end with the opening of the assistant's turn.
            template_args: what else the template reads: tools, documents, enable_thinking, ...

        Raises:
            UsageError: messages or arguments of a wrong form.
            TemplateError: the template refused the messages, failed, or asked for too much; with its line.
        """
        return self._render(self._context(messages, template_args), add_generation_prompt, None)

    def pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        controls: ControlTexts,
        /,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> list[str | int]:
        """Like `render`, cut at the control tokens that the template itself wrote: their ids, and the texts between
        them, in which nothing is a control token.
        """
        context = self._context(messages, template_args)
        foreign = private_chars(odd) if (odd := _odd_texts(context, [])) else set()
        with self._lock:
            marks = Marks(controls, self._private | foreign) if foreign else self._usual_marks(controls)
            return marks.cut(self._render(context, add_generation_prompt, marks))

    def _usual_marks(self, controls: ControlTexts) -> Marks:
        """Stand-ins of earlier renderings: messages in which no private character occurs hold none of them."""
        if self._usual is None or self._usual[0] is not controls:
            self._usual = controls, Marks(controls, self._private)
        return self._usual[1]

    def _render(self, context: dict[str, Any], add_generation_prompt: bool, marks: Marks | None) -> str:
        input_size = sum(map(_input_size, context.values()))
        size, memory = _SIZE + _SIZE_PER_INPUT * input_size, _MEMORY + _MEMORY_PER_INPUT * input_size
        context |= {"add_generation_prompt": bool(add_generation_prompt), **self._tokens}
        context |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        with self._lock:
            self._environment.limits = Limits(_MAX_STEPS, size, memory, time.monotonic() + _MAX_SECONDS)
            self._environment.marks = marks
            try:
                return self._template.render(context)
            except Exception as error:  # a stranger's program: any error is its error
                reason = str(error) if marks is None else marks.plain(str(error))
                raise TemplateError(_what_went_wrong(error, _one_line(reason))) from None

    def _context(self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]) -> dict[str, Any]:
        reserved = sorted(_RESERVED & template_args.keys())
        if reserved:
            raise UsageError(f"{reserved[0]} cannot be given as a template argument")
        # Templates ask `tools is not none`, which an undefined name would pass.
        context: dict[str, Any] = {"tools": None, "documents": None}
        context |= {name: _copied(value, name) for name, value in template_args.items()}
        return context | {"messages": _checked_messages(messages)}


class ToolArguments(dict[str, Any]):
    """Arguments of a tool call: a mapping to templates that go through it, JSON to those that print or join it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: object) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"messages is of type {type(messages).__name__}, expected a list of messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is of type {type(message).__name__}, expected a mapping with role and content")
    if not isinstance(message.get("role"), str):
        raise UsageError(f"{where}.role is {message.get('role')!r}, expected a text such as 'user'")
    content = message.get("content")
    parts_ok = isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)
    if not (content is None or isinstance(content, str) or parts_ok):
        raise UsageError(f"{where}.content is of type {type(content).__name__}, expected a text or a list of parts")
    copied = _copied(message, where)
    copied["role"] = Own(copied["role"])  # the program's choice, not a user's
    calls = copied.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise UsageError(f"{where}.tool_calls is of type {type(calls).__name__}, expected a list")
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = _tool_arguments(function["arguments"])
    return copied


def _tool_arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return ToolArguments(parsed) if isinstance(parsed, dict) else arguments
    return ToolArguments(arguments) if isinstance(arguments, dict) else arguments


def _copied(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of plain JSON types: the caller's objects, and their methods, stay out of the template's reach."""
    if type(value) in _PLAIN:
        return value
    if depth == _MAX_DEPTH:
        raise UsageError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UsageError(f"{where} has a key that is not a text")
        return {
            str(key): item if type(item) in _PLAIN else _copied(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_copied(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, str):
        return str(value)
    raise UsageError(f"{where} is of type {type(value).__name__}, expected text, number, list or mapping")


def _odd_texts(value: Any, found: list[str]) -> list[str]:
    """All texts in a value, keys too, that are not ASCII; added to those that were found."""
    if isinstance(value, str):
        if not value.isascii():
            found.append(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not key.isascii():
                found.append(key)
            if item is not None:
                _odd_texts(item, found)
    elif isinstance(value, list):
        for item in value:
            _odd_texts(item, found)
    return found


def _input_size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(NODE_SIZE + len(key) + _input_size(item) for key, item in value.items())
    return NODE_SIZE + (sum(map(_input_size, value)) if isinstance(value, list) else 0)


class _Refusal(Exception):
    """raise_exception() in a template."""


def _what_went_wrong(error: Exception, reason: str) -> str:
    if isinstance(error, _Refusal):
        return f"the chat template refuses these messages: {reason}"
    if isinstance(error, RecursionError):
        return f"chat template{_line(error)} was stopped: it calls itself without end"
    return f"chat template{_line(error)}{' was stopped' if isinstance(error, LimitError) else ''}: {reason}"


def _raise_exception(message: object = "no reason given") -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    """The local date and time; see datetime.strftime for the form."""
    if len(form) > 200 or any(char.isdigit() for char in form):
        raise LimitError("it asks for a date in a form longer than 200 characters or with digits")
    return datetime.datetime.now().strftime(form)


def _line(error: BaseException) -> str:
    """ ", line 3" for an error raised while the template's third line ran."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILENAME]
    return f", line {lines[-1]}" if lines else ""


def _one_line(message: object) -> str:
    """A stranger's message, fit for a terminal."""
    return printable(" ".join(str(message).split()), 300)
