"""Chat templates: reference renderings, what templates expect to find, and what they may not do."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from typing import Any

import pytest

from pyllm import chat_template
from pyllm.chat_template import FALLBACK, ChatTemplate
from pyllm.errors import ModelFileError, TemplateError, UsageError
from pyllm.gguf_file import GGUFFile
from pyllm.tokenizer import Tokenizer
from tests.refdata import ROOT, model_path

REFERENCES = json.loads((ROOT / "real" / "chat_templates.json").read_text())["templates"]
HELLO = [{"role": "user", "content": "hi"}]


def rendered(source: str, messages: Any = HELLO, **template_args: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **template_args)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference["name"])
def test_reference_renderings(reference: dict[str, Any]) -> None:
    template = ChatTemplate(reference["template"], reference["bos_token"], reference["eos_token"])
    for case in reference["conversations"]:
        found = template.render(case["messages"], add_generation_prompt=case["add_generation_prompt"])
        assert found == case["rendered"], case["name"]


@pytest.mark.parametrize("model", ["llama-a-f32", "llama-c-spm-bf16", "gemma3-a-f16", "qwen3-a-bf16"])
def test_a_rendered_prompt_has_one_bos(model: str) -> None:
    with GGUFFile(model_path(model)) as gguf:
        tokenizer = Tokenizer.from_metadata(gguf.metadata, model)
        template = ChatTemplate.from_metadata(gguf.metadata, model, tokenizer.bos_token, tokenizer.eos_token)
    ids = tokenizer.encode_prompt(template.render(HELLO))
    assert ids.count(tokenizer.bos_id) == tokenizer.add_bos
    assert not tokenizer.add_bos or ids[0] == tokenizer.bos_id


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", "<s></s>True"),
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ {'a': 'é<b>&\"'} | tojson }}", '{"a": "é<b>&\\""}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "02"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{% for a in 'xyz' if a != 'y' %}{{ loop.index }}/{{ loop.length }}{{ a }}{{ loop.last }} {% endfor %}",
         "1/2xFalse 2/2zTrue "),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}", "123"),
        ("{% set ns = namespace(l=[]) %}{% for i in range(3) %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.l[::-1] }}",
         "[2, 1, 0]"),
        ("{% macro m(x) %}<{{ x }}>{{ caller() }}{% endmacro %}{% call m(1) %}c{% endcall %}", "<1>c"),
        ("{{ 'a</think>b'.split('</think>')[-1].replace('b', 'cc') ~ none ~ 1 }}", "ccNone1"),
        ("{{ messages | map(attribute='role') | join(', ') }} {{ '%s-%d' % ('a', 3) }} {{ 'a{}'.format(4) }}",
         "user a-3 a4"),
        ("{{ 'none' if tools is none }} {{ undefined_name }} {{ undefined_name is defined }}", "none  False"),
        ("{% set a, b = 1, 2 %}{{ a + b }} {{ 'ab' * 2 }} {{ 2 ** 10 }} {{ [1] * 2 + [2] }}", "3 abab 1024 [1, 1, 2]"),
    ],
)  # fmt: skip
def test_what_templates_find(source: str, expected: str) -> None:
    assert rendered(source) == expected


def test_template_arguments() -> None:
    assert (
        rendered("{{ enable_thinking }} {{ tools[0].name }}", enable_thinking=False, tools=[{"name": "f"}]) == "False f"
    )
    for name in ("bos_token", "raise_exception"):
        with pytest.raises(UsageError, match=f"{name} cannot be given"):
            rendered("", **{name: 1})


@pytest.mark.parametrize("arguments", [{"city": "Köln", "n": 1}, '{"city": "Köln", "n": 1}'])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ f.arguments | tojson }}", '{"city": "Köln", "n": 1}'),
        ("{{ f.arguments }}", '{"city": "Köln", "n": 1}'),
        ("{{ '<' + f.arguments + '>' }}", '<{"city": "Köln", "n": 1}>'),
        ("{{ '<' ~ f.arguments ~ '>' }}", '<{"city": "Köln", "n": 1}>'),
        ("{{ f.arguments if f.arguments is string else f.arguments | tojson }}", '{"city": "Köln", "n": 1}'),
        ("{% for key, value in f.arguments | items %}{{ key }}={{ value }};{% endfor %}", "city=Köln;n=1;"),
    ],
)
def test_tool_arguments_as_mapping_or_json(source: str, expected: str, arguments: Any) -> None:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert rendered("{% set f = messages[0].tool_calls[0].function %}" + source, messages) == expected


def test_tool_arguments_that_are_no_object_stay_as_they_are() -> None:
    for arguments in ("not json", "[1]", 5):
        messages = [{"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]
        assert rendered("{{ messages[0].tool_calls[0].function.arguments }}", messages) == str(arguments)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "chat template, line 2: Expected an expression"),
        ("a\n\n{{ 1 / 0 }}", "chat template, line 3: division by zero"),
        ("a\n{{ foo.bar }}", "chat template, line 2: 'foo' is undefined"),
        ("a\n{% for m in messages %}\n{{ m.content + 1 }}{% endfor %}", "chat template, line 3: can only concatenate"),
        (
            "{{ raise_exception('Roles must\nalternate') }}",
            "the chat template refuses these messages: Roles must alternate",
        ),
        ("{{ raise_exception('\x1b[31mred') }}", "the chat template refuses these messages: \\x1b[31mred"),
        ("{% include 'x' %}", "chat template, line 1: no loader"),
        ("{{ " + "(" * 2000 + ")" * 2000 + " }}", "the chat template cannot be compiled"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "the chat template cannot be compiled: too many statically"),
        ("x" * 2_000_000, "the chat template is 2000000 characters long, expected at most 1048576"),
    ],
    ids=lambda value: value[:40],
)
def test_errors_name_the_line(source: str, message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        rendered(source)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages is of type str, expected a list of messages"),
        (HELLO[0], "messages is of type dict"),
        (None, "messages is of type NoneType"),
        (["hi"], "messages[0] is of type str, expected a mapping"),
        ([*HELLO, {"content": "x"}], "messages[1].role is None, expected a text"),
        ([{"role": 1}], "messages[0].role is 1"),
        ([{"role": "user", "content": 5}], "messages[0].content is of type int"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content is of type list"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls is of type int, expected a list"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0].tool_calls is of type dict, expected a list"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages[0].extra is of type object"),
        ([{"role": "user", "content": "x", 5: "y"}], "messages[0] has a key that is not a text"),
    ],
)
def test_messages_are_checked(messages: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        rendered("", messages)
    assert str(caught.value).startswith(message)


def test_nesting_without_end_is_refused() -> None:
    extra: list[Any] = []
    extra.append(extra)
    with pytest.raises(UsageError, match="nested more than 64 deep"):
        rendered("", [{"role": "user", "content": "x", "extra": extra}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('{0.__class__.__mro__}'|attr('format'))('') }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{% import 'os' as os %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{% set messages[0].role = 'x' %}",
        "{% set x = messages[0] %}{% set x.role = 'system' %}",
    ],
)
def test_there_is_no_way_out(source: str) -> None:
    messages = copy.deepcopy(HELLO)
    try:
        found = rendered(source, messages)
    except TemplateError:
        pass
    else:
        assert "class" not in found and "object" not in found
    assert messages == HELLO


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) recursive %}{{ loop(range(9999)) if loop.depth < 9 }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block b %}{{ self.b() }}{% endblock %}",
        "{{ range(10 ** 9) }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ (1).to_bytes(10 ** 9, 'big') }}",
        "{{ [1] | batch(10 ** 9, 'x') | list }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ ('x' * 4000000).join(range(99999) | map('string')) }}",
        "{{ range(99999) | join('x' * 4000000) }}",
        "{{ ('x' * 100000) | replace('x', 'x' * 100000) }}",
        "{{ ('x' * 100000).replace('', 'x' * 100000) }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x] * 2 %}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}{% endset %}",
        "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
        "{{ strftime_now('%999999999Y') }}",
    ],
)
def test_too_much_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_STEPS", 100_000)  # a tenth: the test is to be quick
    template = ChatTemplate(source)
    start = time.monotonic()
    with pytest.raises(TemplateError):
        template.render(HELLO)
    assert time.monotonic() - start < 10


CHAIN = (
    "{%% set ns = namespace(x=0, t='a' * 3900000) %%}{%% for i in range(99999) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)
CHAINED = "namespace(a=ns.x, b=%s)"
FILL_MEMORY = [
    *(
        CHAIN % (CHAINED % value)
        for value in (
            "'y' * 3900000",
            "'y' ~ ns.t",
            "ns.t[i:]",
            "ns.t|upper",
            "ns.t.replace('a', 'b')",
            "[0] * 100000",
            "([1] * 9999)[:9000]",
            "dict.fromkeys(range(99999))",
            "dict(a=dict(b=dict(c={})))",
            "('a ' * 100000).split(' ')",
            "('字' * 200000)|list",
            "range(99999)|map('string')|list",
            "range(20000)|groupby('real')",
            "(['\x01' * 90000])|string",
            "[" + "unknown, " * 9999 + "]",
            "[" + "i / 3, " * 9999 + "]",
            "['a'.upper, " + "ns.t.upper, " * 9999 + "]",
        )
    ),
    CHAIN % "ns.x ~ ns.t",
    CHAIN % "[ns.x] + ['a' * 3000000]",
    "{% set ns = namespace(x=[]) %}{% for i in range(500) %}{% set ns.x = ns.x + ['a' * 3900000] %}{% endfor %}",
    CHAIN.replace("{%% set ns.x", "{%% macro m(a) %%}{%% endmacro %%}{%% set ns.x") % (CHAINED % "m"),
    "{% macro m(d) %}{% set s = 'x' * (3900000 - d) %}{{ m(d + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(d) %}{% for a in range(99999)|map('string') %}{% if loop.length %}{{ m(d + 1) }}{% endif %}{% endfor %}"
    "{% endmacro %}{{ m(0) }}",
    "{{ ('字' * 3000000)|list|length }}",
    "{{ ('字' * 3000000)|join(',')|length }}",
    "{{ ('a ' * 1900000)|title|length }}",
    "{{ ('{0}' * 100000).format('x' * 4000000) }}",
    "{{ ('{0:9999}' * 400000).format(1) }}",
    "{{ ('%(a)s' * 100000) % {'a': 'x' * 4000000} }}",
    "{{ ('%(a)9999d' * 100000) % {'a': 1} }}",
    "{{ ('%9999d' * 200000)|format(1) }}",
    "{{ range(99999)|list|tojson(indent=10000) }}",
    "{{ range(99999)|list|tojson(separators=('x' * 3000000, ':')) }}",
    "{{ ('\n' * 2000000)|indent(10000, true, true) }}",
    "{{ ('\n' * 2000000)|indent('x' * 1000000) }}",
]
TAKE_TIME = [
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "{% set a, b = namespace(x=1), namespace(x=1) %}{% for i in range(60) %}{% set a.x = dict(a=a.x, b=a.x) %}"
    "{% set b.x = dict(a=b.x, b=b.x) %}{% endfor %}{{ a.x == b.x }}",
    "{% set a, b = namespace(x=1), namespace(x=1) %}{% for i in range(60) %}{% set a.x = [a.x]|batch(99, a.x)|list %}"
    "{% set b.x = [b.x]|batch(99, b.x)|list %}{% endfor %}{{ a.x == b.x }}",
    "{{ ([[1]] * 100000)|sum(start=[])|length }}",
    "{% set x = ('f' * 3900000)|int(base=16) %}{{ x // (x - 1) }}",
    "{% set ns = namespace(g=['a']) %}{% for i in range(99999) %}{% set ns.g = ns.g|map('string') %}{% endfor %}"
    "{{ ns.g|list / 0 }}",
]  # fmt: skip
MEASURE = """
import json, sys, time
from pyllm import chat_template
from pyllm.errors import TemplateError
def peak():  # MB; not ru_maxrss, which a process inherits from the one that started it
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) // 1024
hello = [{"role": "user", "content": "hi"}]
chat_template.ChatTemplate("{{ messages }}").render(hello)
chat_template._MAX_SECONDS = 1
before = peak()
for source in json.load(sys.stdin):
    start = time.process_time()  # not the clock on the wall: other processes may hold the cores
    try:
        chat_template.ChatTemplate(source).render(hello)
        print("rendered:", source[:200])
    except TemplateError:
        pass
    if time.process_time() - start > 4:
        print("late:", source[:200])
    if peak() - before > 200:
        print(peak() - before, "MB:", source[:200])
        break
"""


@pytest.mark.serial
@pytest.mark.parametrize("sources", [FILL_MEMORY, TAKE_TIME], ids=["memory", "time"])
def test_memory_and_time_of_a_hostile_template_are_bounded(sources: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE], input=json.dumps(sources), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_slow_steps_are_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.1)
    template = ChatTemplate("{% for a in range(99999) %}\n{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(TemplateError, match=r"chat template, line \d was stopped: it takes too long"):
        template.render(HELLO)


def test_a_template_works_again_after_it_was_stopped() -> None:
    template = ChatTemplate("{% if messages[0].content == 'loop' %}{{ 'a' * 10 ** 9 }}{% endif %}ok")
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render(HELLO) == "ok"


def test_long_conversations_fit() -> None:
    messages = [{"role": "user", "content": "x" * 20_000}] * 1000
    assert len(ChatTemplate(FALLBACK).render(messages)) > 20_000_000


def test_a_file_without_a_template_gets_the_general_form(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate.from_metadata({}, "x.gguf")
    assert template.render(HELLO) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert "x.gguf has no chat template" in caplog.text
    gemma = ChatTemplate.from_metadata({}, "x.gguf", "<bos>", special_tokens=["<start_of_turn>"])
    assert gemma.render([*HELLO, {"role": "assistant", "content": "a"}], add_generation_prompt=False) == (
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n"
    )


def test_templates_by_name() -> None:
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    assert ChatTemplate.from_metadata(metadata, "x.gguf").render(HELLO) == "a"
    assert ChatTemplate.from_metadata(metadata, "x.gguf", name="tool_use").render(HELLO) == "b"
    with pytest.raises(TemplateError, match=r"tokenizer\.chat_template\.rag is missing"):
        ChatTemplate.from_metadata(metadata, "x.gguf", name="rag")
    with pytest.raises(ModelFileError, match="of type int"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 5}, "x.gguf")
