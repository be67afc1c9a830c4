"""A Jinja environment for chat templates, which come from strangers: no way out, no changes to what is handed in, and
bounds on time, output and memory.

Jinja's immutable sandbox closes the ways out. It does not stop a template from running for ever or from filling the
memory, so this one also counts (see `template_limits`):

* every loop round and every call is a step; steps and seconds are limited;
* text printed anywhere, also into macros and `set` blocks, counts against one total;
* every value that an operation makes counts by its bytes, and none may be too large;
* operations whose result can be much larger than their operands are measured before they run (`*`, `**`, `replace`,
  `join`, ...) or are not offered (`ljust`, `lipsum`, ...); values are measured before they become text. Filters that
  would work later, item by item, work at once, so that their results can be counted.

It also keeps track of the template's own texts (see `template_marks`): literals are `Own`, and are marked where they
are put together with others or printed.

All this is put into the syntax tree, so that nothing in the template can get around it. This module knows nothing of
messages.
"""

from __future__ import annotations

import functools
import json
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pyllm.template_limits import NODE_SIZE, LimitError, Limits
from pyllm.template_marks import Marks, Own

_MAX_INT_BITS = 1024
_MAX_COUNT = 10_000  # of widths, indents and the like, in characters or items
_NAMESPACE_BYTES = 512
_MACRO_BYTES = 640
_LONG_WIDTH = re.compile(r"\d{5}")
_WIDTH_REFUSED = "it formats with a width that is computed or has more than 4 digits"
_CHARACTER = re.compile(r"%(\([^)]*\))?[-+ #0-9.]*c")
_CHARACTER_REFUSED = "it formats a number as a character, which pyllm does not offer"

# Names that no template can write, so it can neither call nor replace them.
_STEP, _CONCAT, _MEASURED, _SLICED, _OWN, _PLAIN = (
    f"pyllm {name}" for name in ("step", "concat", "measured", "sliced", "own", "plain")
)

_NO_STR_METHODS = frozenset(
    [
        "ljust",
        "rjust",
        "center",
        "zfill",
        "expandtabs",
        "translate",
        "encode",
        "format_map",
        "maketrans",
        "unescape",
        "striptags",
    ]
)
_NO_FILTERS = frozenset(
    ["urlize", "xmlattr", "striptags", "filesizeformat", "random", "forceescape", "pprint", "wordwrap"]
)
_COUNTED_FILTERS = frozenset({"center", "indent", "batch", "slice", "round", "tojson"})
_LOOKING_FILTERS = frozenset({"length", "count", "first", "last", "default", "d"})
"""They make no text and walk through nothing, so their operands need not be measured."""
_TAKING_APART = frozenset(
    {
        "list",
        "batch",
        "slice",
        "map",
        "select",
        "reject",
        "selectattr",
        "rejectattr",
        "sort",
        "unique",
        "join",
        "groupby",
    }
    | {"min", "max", "title", "wordcount"}
)
"""They make a value of each character or word of a text."""

# What passes the characters of a text on, so that their marks are worth keeping; the others change or judge them.
_PASSING_METHODS = frozenset(["format", "join", "replace", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"])
_PASSING_FILTERS = frozenset({"trim", "string", "indent", "safe"})


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment; `limits` and `marks` are set anew for each rendering, one rendering at a time.

    Attributes:
        marks: None: own texts are not marked.
        literals: all texts that the compiled template can print.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Not optimised: constant expressions would be computed while compiling, outside all limits.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _GenerationTag]
        )
        self.limits = Limits(0, 0, 0, 0.0)
        self.marks: Marks | None = None
        self.literals: list[str] = []
        self._own_texts: dict[str, Own] = {}
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
        self.literals = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self.literals += [node.data for node in tree.find_all(nodes.TemplateData)]
        _count_steps(tree)
        _rewrite_parts(tree)
        return self.compile(tree, filename=filename)

    def _text(self, value: Any) -> Any:
        """The value; if it is an own text, marked."""
        return self.marks.mark(value) if self.marks is not None and type(value) is Own else value

    def _plain(self, value: Any) -> Any:
        """The value without marks, to look something up or compare."""
        return self.marks.plain(value) if self.marks is not None and type(value) is str else value

    def _made(self, value: Any, with_items: bool = False) -> Any:
        """The new value, counted."""
        self.limits.made(value, with_items)
        if isinstance(value, str | list | tuple | dict):
            self.limits.measure(value)
        elif isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            raise LimitError("it computes with numbers of more than 300 digits")
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self._plain(argument))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes through here."""
        self.limits.step()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name in _PASSING_METHODS:
                obj = getattr(self._text(owner), name)
            args = self._checked_str_method(owner, name, args)
        elif isinstance(owner, int | float | bytes):
            raise LimitError(f"it calls .{name}() on a {type(owner).__name__}, which pyllm does not offer")
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(owner, dict) and name == "get":
            return result
        if isinstance(result, Namespace):
            self.limits.take(_NAMESPACE_BYTES)
        elif isinstance(owner, str) and not isinstance(result, str):
            self.limits.take(sys.getsizeof(owner))  # what its pieces hold
        return self._made(result, with_items=True)

    def _checked_str_method(self, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, fit to call the method with."""
        if name in _NO_STR_METHODS:
            raise LimitError(f"it calls .{name}() on a text, which pyllm does not offer")
        if name == "replace" and len(args) > 1:
            args = (args[0], self._text(args[1]), *args[2:])
            self._check_replace(text, *args)
        elif name == "join" and args:
            self.limits.fit(NODE_SIZE * len(args[0]) if isinstance(args[0], str) else 0)
            items = list(map(self._text, args[0]))
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
        owner = getattr(value, "__self__", None)
        if type(owner) is Own:
            value = getattr(self._text(owner), value.__name__)
        format_safely = super().wrap_str_format(value)
        if format_safely is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            args, kwargs = tuple(map(self._text, args)), {key: self._text(item) for key, item in kwargs.items()}
            fields = width = 0
            for _, field, spec, _ in string.Formatter().parse(value.__self__):
                if spec and ("{" in spec or _LONG_WIDTH.search(spec)):
                    raise LimitError(_WIDTH_REFUSED)
                if spec and spec.endswith("c"):
                    raise LimitError(_CHARACTER_REFUSED)
                fields += field is not None
                width = max(width, _widest(spec or ""))
            self._check_format(value.__self__, fields, width, [*args, *kwargs.values()])
            return format_safely(*args, **kwargs)

        return limited

    def _check_format(self, text: str, fields: int, width: int, operands: Any) -> None:
        self.limits.fit(len(text) + fields * (width + self.limits.measure(operands)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make large values of small ones."""
        self.limits.step()
        left, right = self._text(left), self._text(right)
        if operator == "+" and type(left) is str and type(right) is str:  # what templates do most
            return self.limits.joined(left, right)
        if operator == "%" and isinstance(right, tuple):
            right = tuple(map(self._text, right))
        check = {"+": self._check_add, "*": self._check_multiply, "**": self._check_power, "%": self._check_modulo}
        check[operator](left, right)
        return self._made(super().call_binop(context, operator, left, right))

    def _check_add(self, left: Any, right: Any) -> None:
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.limits.fit(len(left) + len(right))
        else:
            self.limits.measure([left, right])

    def _check_multiply(self, left: Any, right: Any) -> None:
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
                self.limits.fit(len(value) * times)
                if isinstance(value, list | tuple) and times > 1:
                    self.limits.measure([value] * min(times, 2))
                    self.limits.fit(NODE_SIZE * len(value) * times)
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise LimitError("it computes with numbers of more than 300 digits")

    def _check_power(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_INT_BITS:
            raise LimitError("it computes with numbers of more than 300 digits")

    def _check_modulo(self, left: Any, right: Any) -> None:
        if isinstance(left, str | bytes):
            text = left if isinstance(left, str) else left.decode("latin-1")
            if "*" in text or _LONG_WIDTH.search(text):
                raise LimitError(_WIDTH_REFUSED)
            if _CHARACTER.search(text):
                raise LimitError(_CHARACTER_REFUSED)
            self._check_format(text, text.count("%"), _widest(text), right)

    def _print(self) -> Callable[..., Any]:
        # Taking the context keeps Jinja from calling it while compiling.
        @pass_context
        def printed(_: Any, value: Any) -> str:
            value = self._text(value)
            if not isinstance(value, str):
                self.limits.measure(value)
                self.limits.made(value := str(value))
            self.limits.print(len(value))
            return value

        return printed

    def _set_filters(self) -> None:
        filters: dict[str, Callable[..., Any]] = {
            name: self._measured_filter(name, function)
            for name, function in self.filters.items()
            if name not in _NO_FILTERS
        }
        special: dict[str, Callable[..., Any]] = {
            "tojson": self._to_json,
            "join": self._join,
            "sum": _checked_sum(self.filters["sum"]),
            "indent": self._indent_filter(self.filters["indent"]),
            "replace": self._replace,
            "format": self._format,
        }
        for name, function in special.items():
            filters[name] = self._measured_filter(name, function)
        filters[_CONCAT] = self._concat
        filters[_MEASURED] = functools.partial(self._made, with_items=True)
        filters[_SLICED] = self._made
        filters[_OWN] = self._own
        filters[_PLAIN] = self._compared
        filters[_STEP] = self._step
        self.filters.clear()
        self.filters.update(filters)

    def _measured_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, one step each, with its operands measured, its counts limited and its result counted."""

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.limits.step()
            if name not in _LOOKING_FILTERS:
                operands = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str | list | tuple | dict)]
                self.limits.measure(operands)
            if name in _TAKING_APART:
                self.limits.fit(NODE_SIZE * max((len(arg) for arg in args if isinstance(arg, str)), default=0))
            counts = (*args[1:], *kwargs.values()) if name in _COUNTED_FILTERS else ()
            if any(isinstance(count, int) and abs(count) > _MAX_COUNT for count in counts):
                raise LimitError(f"it uses |{name} with a number over {_MAX_COUNT}")
            if name in _PASSING_FILTERS and args:
                args = (self._text(args[0]), *args[1:])
            result = function(*args, **kwargs)
            if isinstance(result, Iterator):
                result = list(result)
            if name in _LOOKING_FILTERS or any(result is arg for arg in args):
                return result
            return self._made(result, with_items=True)

        return limited

    def _to_json(
        self,
        value: Any,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
        ensure_ascii: bool = False,
    ) -> str:
        """`tojson` as chat templates mean it: plain Unicode and no HTML escapes."""
        if separators is not None:
            separators = tuple(separators)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=bool(sort_keys)
        )
        if indent is None and separators is None:
            return encoder.encode(value)
        parts, size = [], 0
        for part in encoder.iterencode(value):
            self.limits.fit(size := size + len(part))
            parts.append(part)
        return "".join(parts)

    def _indent_filter(self, indent: Callable[..., str]) -> Callable[..., str]:
        def checked(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
            text = s if isinstance(s, str) else str(s)
            self.limits.fit(
                len(text) + (len(text.splitlines()) + 1) * (len(width) if isinstance(width, str) else width)
            )
            return indent(text, width, first, blank)

        return checked

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(self._text(value)), str(old), str(self._text(new))
        self._check_replace(text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    def _join(self, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
        items = list(value) if attribute is None else list(map(make_attrgetter(self, attribute), value))
        items, separator = list(map(self._text, items)), str(self._text(d))
        self._check_join(separator, items)
        return separator.join(map(str, items))

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        text = str(self._text(value))
        args, kwargs = tuple(map(self._text, args)), {key: self._text(item) for key, item in kwargs.items()}
        self._check_modulo(text, [*args, *kwargs.values()])
        return text % (kwargs or args)

    def _concat(self, parts: list[Any]) -> str:
        """a ~ b."""
        self.limits.step()
        parts = list(map(self._text, parts))
        self.limits.measure(parts)
        return self._made("".join(map(str, parts)))

    def _own(self, text: str) -> Own:
        """A literal."""
        own = self._own_texts.get(text)
        if own is None:
            self.limits.check_time()  # the first look for control tokens in it may take a few ms
            own = self._own_texts[text] = Own(text)
        return own

    def _compared(self, value: Any) -> Any:
        """One side of a comparison."""
        if isinstance(value, list | tuple) and any(type(item) is str for item in value):
            return type(value)(map(self._plain, value)) if type(value) in (list, tuple) else value
        return self._plain(value)

    def _step(self, num_macros: int) -> bool:
        """One round of a loop in which so many macros are made."""
        self.limits.step()
        self.limits.take(_MACRO_BYTES * num_macros)
        return True


def _widest(text: str) -> int:
    """The largest number in the text of a format, which `_LONG_WIDTH` let pass: no field is wider."""
    return max(map(int, re.findall(r"[0-9]+", text)), default=0)


def _checked_sum(add_up: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_up)
    def checked(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise LimitError("it uses |sum on something else than numbers")  # lists take quadratic time
        return add_up(environment, iterable, attribute, start)

    return checked


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
        num_macros = sum(1 for _ in node.find_all((nodes.Macro, nodes.CallBlock)))
        count = _filtered(nodes.Const(num_macros, lineno=node.lineno), _STEP)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            counted = _filtered(nodes.Const(0, lineno=node.lineno), _STEP)
            node.test = nodes.And(counted, node.test, lineno=node.lineno)


def _rewrite_parts(node: nodes.Node) -> None:
    """Replace what no hook of the environment sees by calls of our filters: literals, ~, slices, comparisons."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _rewritten(value))
        elif isinstance(value, list):
            value[:] = [_rewritten(item) if isinstance(item, nodes.Node) else item for item in value]


def _rewritten(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.TemplateData):
        return _filtered(nodes.Const(node.data, lineno=node.lineno), _OWN)
    if isinstance(node, nodes.Const):
        return _filtered(node, _OWN) if isinstance(node.value, str) else node
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        node.node = _rewritten(node.node)  # type: ignore[assignment]
        return node
    _rewrite_parts(node)
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)
    if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filtered(node, _MEASURED)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _filtered(node, _SLICED)
    if isinstance(node, nodes.Compare):
        node.expr = _filtered(node.expr, _PLAIN)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _PLAIN)
    return node
