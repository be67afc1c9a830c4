"""A Jinja environment for chat templates, which come from strangers: no way out, no changes to what is handed in, and
bounds on time, output and memory.

Jinja's immutable sandbox closes the ways out. It does not stop a template from running for ever or from filling the
memory, so this one also counts:

* every loop round and every call is a step; steps and seconds are limited (`Limits`);
* text printed anywhere, also into macros and `set` blocks, counts against one total;
* operations whose result can be much larger than their operands are measured before they run (`*`, `**`, `replace`,
  `join`, ...) or are not offered (`ljust`, `lipsum`, ...); values are measured before they become text.

Counting is put into the syntax tree, so that nothing in the template can get around it. This module knows nothing of
messages.
"""

from __future__ import annotations

import functools
import json
import re
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_NODE_SIZE = 16  # one list item or mapping entry, in characters
_MAX_INT_BITS = 4096
_MAX_COUNT = 10_000  # of widths, indents and the like, in characters or items
_LONG_WIDTH = re.compile(r"\d{5}")
_WIDTH_REFUSED = "it formats with a width that is computed or has more than 4 digits"

# Names that no template can write, so it can neither call nor replace them.
_STEP, _CONCAT, _MEASURED = "pyllm step", "pyllm concat", "pyllm measured"

_NO_STR_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "translate", "encode", "format_map"})
_NO_FILTERS = ("urlize", "xmlattr", "striptags", "filesizeformat", "random", "forceescape")
_COUNTED_FILTERS = ("center", "indent", "batch", "slice", "round", "wordwrap", "tojson")


class LimitError(Exception):
    """The template asked for more than it may have."""


@dataclass
class Limits:
    """What one rendering may still use.

    Attributes:
        steps: loop rounds and calls.
        size: characters of the output, and of any one value (list items and mapping entries count as 16).
        deadline: on the clock of time.monotonic, in seconds.
    """

    steps: int
    size: int
    deadline: float

    def __post_init__(self) -> None:
        self.printed = 0

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise LimitError("it runs too many steps; it probably loops for ever")
        if time.monotonic() > self.deadline:
            raise LimitError("it takes too long")

    def print(self, num_chars: int) -> None:
        self.printed += num_chars
        if self.printed > self.size:
            raise LimitError(f"its output is longer than {self.size} characters")

    def fit(self, size: int) -> None:
        """Refuse a value of this size."""
        if size > self.size:
            raise LimitError(f"it builds a value larger than {self.size} characters")

    def measure(self, value: Any) -> None:
        """Refuse a value that is too large written out. A list may hold another one many times: all of them count."""
        size, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str | bytes):
                size += len(item)
            elif isinstance(item, Mapping):
                size += _NODE_SIZE * len(item)
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, list | tuple):
                size += _NODE_SIZE * len(item)
                self.fit(size)
                waiting += item
            self.fit(size)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment; `limits` is set anew for each rendering, one rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Not optimised: constant expressions would be computed while compiling, outside all limits.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _GenerationTag]
        )
        self.limits = Limits(0, 0, 0.0)
        self.finalize = self._print()
        self._set_filters()
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]

    def compile_counted(self, source: str, filename: str) -> Any:
        """Code of a template with the counting put in.

        Raises:
            jinja2.TemplateSyntaxError: malformed. Whatever else Python's compiler finds wrong with it.
        """
        tree = self.parse(source, filename=filename)
        _count_steps(tree)
        _measure_literals(tree)
        return self.compile(tree, filename=filename)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes through here."""
        self.limits.step()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            args = self._checked_str_method(owner, name, args)
        elif isinstance(owner, int | float | bytes):
            raise LimitError(f"it calls .{name}() on a {type(owner).__name__}, which pyllm does not offer")
        return super().call(context, obj, *args, **kwargs)

    def _checked_str_method(self, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, fit to call the method with."""
        if name in _NO_STR_METHODS:
            raise LimitError(f"it calls .{name}() on a text, which pyllm does not offer")
        if name == "replace":
            self._check_replace(text, *args)
        elif name == "join" and args:
            items = list(args[0])
            self._check_join(text, items)
            return (items,)
        return args

    def _check_replace(self, text: str, old: Any = "", new: Any = "", *_: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.limits.fit(len(text) + len(new) * (text.count(old) if old else len(text) + 1))

    def _check_join(self, separator: str, items: list[Any]) -> None:
        self.limits.measure(items)
        self.limits.fit(len(separator) * len(items))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format, as Jinja's sandbox hands it to templates: here widths must be short and written out."""
        format_safely = super().wrap_str_format(value)
        if format_safely is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            for _, _, spec, _ in string.Formatter().parse(value.__self__):
                if spec and ("{" in spec or _LONG_WIDTH.search(spec)):
                    raise LimitError(_WIDTH_REFUSED)
            self.limits.measure([value.__self__, *args, *kwargs.values()])
            return format_safely(*args, **kwargs)

        return limited

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make large values of small ones."""
        self.limits.step()
        check = {"+": self._check_add, "*": self._check_multiply, "**": self._check_power, "%": self._check_modulo}
        check[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def _check_add(self, left: Any, right: Any) -> None:
        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            # Few items are not worth a walk: they were measured when they were made.
            if len(left) + len(right) > 1000:
                self.limits.measure([left, right])
        elif isinstance(left, str) and isinstance(right, str):
            self.limits.fit(len(left) + len(right))
        else:
            self.limits.measure([left, right])

    def _check_multiply(self, left: Any, right: Any) -> None:
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
                self.limits.fit(len(value) * times)
                if isinstance(value, list | tuple) and times > 1:
                    self.limits.measure([value] * min(times, 2))
                    self.limits.fit(_NODE_SIZE * len(value) * times)
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise LimitError("it computes with numbers of more than 1000 digits")

    def _check_power(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_INT_BITS:
            raise LimitError("it computes with numbers of more than 1000 digits")

    def _check_modulo(self, left: Any, right: Any) -> None:
        if isinstance(left, str | bytes):
            text = left if isinstance(left, str) else left.decode("latin-1")
            if "*" in text or _LONG_WIDTH.search(text):
                raise LimitError(_WIDTH_REFUSED)
            self.limits.measure([left, right])

    def _print(self) -> Callable[..., Any]:
        # Taking the context keeps Jinja from calling it while compiling.
        @pass_context
        def printed(_: Any, value: Any) -> str:
            self.limits.measure(value)
            text = str(value)
            self.limits.print(len(text))
            return text

        return printed

    def _set_filters(self) -> None:
        filters: dict[str, Callable[..., Any]] = {
            name: self._measured_filter(name, function)
            for name, function in self.filters.items()
            if name not in _NO_FILTERS
        }
        filters["tojson"] = self._measured_filter("tojson", to_json)
        filters["replace"] = self._replace
        filters["join"] = self._measured_filter("join", self._join_filter(self.filters["join"]))
        filters["format"] = self._format
        filters[_CONCAT] = self._concat
        filters[_MEASURED] = self._measured
        filters[_STEP] = self._step
        self.filters.clear()
        self.filters.update(filters)

    def _measured_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, one step each, with its operands measured and its counts limited."""
        counted = name in _COUNTED_FILTERS

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.limits.step()
            operands = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str | list | tuple | dict)]
            self.limits.measure(operands)
            if counted and any(isinstance(arg, int) and abs(arg) > _MAX_COUNT for arg in (*args[1:], *kwargs.values())):
                raise LimitError(f"it uses |{name} with a number over {_MAX_COUNT}")
            return function(*args, **kwargs)

        return limited

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        self.limits.step()
        self.limits.measure([value, old, new])
        text, old, new = str(value), str(old), str(new)
        self._check_replace(text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    def _join_filter(self, join: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(join)
        def checked(eval_ctx: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
            items = list(value)
            self._check_join(str(d), items)
            return join(eval_ctx, items, d, attribute)

        return checked

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        self.limits.step()
        text = str(value)
        self._check_modulo(text, [*args, *kwargs.values()])
        return text % (kwargs or args)

    def _concat(self, parts: list[Any]) -> str:
        """a ~ b."""
        self.limits.step()
        self.limits.measure(parts)
        return "".join(map(str, parts))

    def _measured(self, value: Any) -> Any:
        self.limits.measure(value)
        return value

    def _step(self, value: Any, text_size: int) -> Any:
        """One round of a loop that prints so many characters of the template's own text."""
        self.limits.step()
        self.limits.print(text_size)
        return value


def to_json(
    value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, ensure_ascii: bool = False
) -> str:
    """`tojson` as chat templates mean it: plain Unicode and no HTML escapes."""
    if separators is not None:
        separators = tuple(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant says, for training. Here it only prints it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _count_steps(tree: nodes.Template) -> None:
    """Make each loop round and each entry of a macro count, and each test of a loop's `if`."""
    node: Any
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
        size = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        nothing = nodes.Const(True, lineno=node.lineno)
        count = _filtered(nothing, _STEP, nodes.Const(size, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            counted = _filtered(nodes.Const(True, lineno=node.lineno), _STEP, nodes.Const(0, lineno=node.lineno))
            node.test = nodes.And(counted, node.test, lineno=node.lineno)


def _measure_literals(node: nodes.Node) -> None:
    """Measure lists and mappings as they are made, and the operands of ~, which no operator hook sees."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _measured_literal(value))
        elif isinstance(value, list):
            value[:] = [_measured_literal(item) if isinstance(item, nodes.Node) else item for item in value]


def _measured_literal(node: nodes.Node) -> nodes.Node:
    _measure_literals(node)
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)
    if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filtered(node, _MEASURED)
    return node
