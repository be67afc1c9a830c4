"""What a line may say, and what is told about lines that say something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyllm.batch.errors import LineError
from pyllm.batch.input import Entry
from pyllm.batch.lines import Form, Job, LineReader
from pyllm.batch.template import PromptTemplate
from pyllm.errors import UsageError
from pyllm.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=None, temperature=0.5, seed=7)


def job(fields: dict[str, Any], line: int = 1, **reader: Any) -> Job:
    reading = LineReader(reader.pop("defaults", PARAMS), **reader)
    entry = Entry(line, fields)
    return reading.job(entry, reading.ticket(entry, Form.SIMPLE))


def code(fields: Any, **reader: Any) -> str:
    with pytest.raises(LineError) as caught:
        job(fields, **reader)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return caught.value.code


def test_simple_lines() -> None:
    found = job(
        {"id": 5, "prompt": "Hi", "max_tokens": 3, "top_k": None, "stop": ["a"], "logit_bias": {"3": -1}}, line=4
    )
    assert (found.ticket.line, found.ticket.id, found.ticket.form) == (4, 5, Form.SIMPLE)
    assert found.messages == [{"role": "user", "content": "Hi"}] and found.num_logprobs is None
    assert found.params == SamplingParams(
        max_tokens=3, temperature=0.5, seed=10, stop=("a",), logit_bias={3: -1.0}
    )  # the fourth line's seed
    assert job({"prompt": "Hi"}, line=9).ticket.id == "line-9"
    assert job({"prompt": "Hi", "seed": 1}, line=9).params.seed == 1
    assert job({"prompt": "Hi", "metadata": {"x": 1}, "logprobs": 2}).num_logprobs == 2
    assert job({"prompt": "Hi"}, system="Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    raw = job({"prompt": "Hi"}, raw=True)
    assert raw.messages is None and raw.prompt == "Hi"


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert job({"messages": [{"role": "user", "content": parts}]}).messages == [{"role": "user", "content": "ab"}]
    assert code({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}) == "unsupported"
    assert code({"messages": []}) == code({"messages": "x"}) == "invalid_value"
    assert code({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}) == "two_prompts"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "no_prompt"),
        ({"prompt": ""}, "no_prompt"),
        ({"prompt": 5}, "invalid_value"),
        ({"prompt": "\ud800"}, "invalid_unicode"),
        ({"prompt": "x", "max_tokens": 0}, "invalid_value"),
        ({"prompt": "x", "max_tokens": "5"}, "invalid_value"),
        ({"prompt": "x", "temperature": -1}, "invalid_value"),
        ({"prompt": "x", "stop": ""}, "invalid_value"),
        ({"prompt": "x", "temprature": 1}, "unknown_field"),
        ({"prompt": "x", "id": True}, "invalid_id"),
        ({"prompt": "x", "id": [1]}, "invalid_id"),
        ({"prompt": "x", "id": "a" * 1000}, "invalid_id"),
        ({"prompt": "x" * 10, "a" * 1000: 1}, "unknown_field"),
    ],
)
def test_simple_lines_that_cannot_be_answered(fields: dict[str, Any], expected: str) -> None:
    assert code(fields) == expected


def openai(body: Any, **line: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "body": body, **line}


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_openai_lines() -> None:
    body = {**CHAT, "max_completion_tokens": 9, "temperature": None, "n": 1, "stream": False, "user": "u", "tools": []}
    found = job(openai(body, url="/v1/chat/completions"))
    assert found.ticket.form is Form.CHAT and found.ticket.id == "c"
    assert found.params == SamplingParams(max_tokens=9, temperature=0.5, seed=7)
    assert found.template_args == {"tools": []} and found.num_logprobs is None
    with_logprobs = job(openai({**CHAT, "logprobs": True, "top_logprobs": 3}))
    assert with_logprobs.num_logprobs == with_logprobs.params.logprobs == 3
    without_top = job(openai({**CHAT, "logprobs": True}))
    assert without_top.num_logprobs == 0 and without_top.params.logprobs == 1
    assert job(openai({**CHAT, "chat_template_kwargs": {"enable_thinking": False}})).template_args == {
        "enable_thinking": False
    }
    completion = job(openai({"prompt": "Once", "logprobs": 2}, url="/v1/completions"))
    assert completion.ticket.form is Form.COMPLETION and completion.messages is None
    assert completion.prompt == "Once" and completion.num_logprobs == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (openai(None), "invalid_value"),
        (openai({}), "no_prompt"),
        ({"body": CHAT}, "invalid_id"),
        ({"custom_id": "c"}, "invalid_value"),
        (openai(CHAT, max_tokens=3), "unknown_field"),
        (openai(CHAT, method="GET"), "unsupported"),
        (openai(CHAT, url="/v1/embeddings"), "unsupported"),
        (openai(CHAT, url="/v1/completions"), "no_prompt"),
        (openai(CHAT, url=[1]), "unsupported"),
        (openai({**CHAT, "prompt": "x"}), "two_prompts"),
        (openai({**CHAT, "n": 2}), "unsupported"),
        (openai({**CHAT, "stream": True}), "unsupported"),
        (openai({**CHAT, "response_format": {}}), "unknown_field"),
        (openai({**CHAT, "logprobs": 2}), "invalid_value"),
        (openai({**CHAT, "top_logprobs": 2}), "invalid_value"),
        (openai({**CHAT, "max_tokens": 1, "max_completion_tokens": 1}), "invalid_value"),
        (openai({**CHAT, "max_completion_tokens": 0}), "invalid_value"),
        (openai({**CHAT, "chat_template_kwargs": {"messages": []}}), "invalid_value"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_openai_lines_that_cannot_be_answered(line: dict[str, Any], expected: str) -> None:
    assert code(line) == expected


def test_columns() -> None:
    row = {
        "id": "",
        "text": "Hi",
        "max_tokens": "3",
        "temperature": "0",
        "ignore_eos": "true",
        "seed": "",
        "label": "x",
    }
    found = job(row, has_columns=True)
    assert found.ticket.id == "line-1" and found.messages == [{"role": "user", "content": "Hi"}]
    assert found.params == SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, seed=7)
    assert code({**row, "max_tokens": "many"}, has_columns=True) == "invalid_value"
    assert code({"review": "x"}, has_columns=True) == "no_prompt"
    assert job({"custom_id": "1", "body": "x", "prompt": "Hi"}, has_columns=True).ticket.form is Form.SIMPLE


def test_templates() -> None:
    template = PromptTemplate("{{{a}}} of {b c}: {a}")
    assert template.fields == {"a", "b c"}
    assert template.fill({"a": "{b}", "b c": 5}) == "{{b}} of 5: {b}"
    with pytest.raises(LineError, match="asks for b c"):
        template.fill({"a": "x"})
    assert job({"a": "x", "b c": "y", "other": 1}, template=template).messages == [
        {"role": "user", "content": "{x} of y: x"}
    ]
    for text in ("{", "}", "{}", "{ }", "a {b", "{a}}"):
        with pytest.raises(UsageError, match="--template"):
            PromptTemplate(text)
    assert PromptTemplate("none").fill({}) == "none"


def test_settings_that_come_again_are_those_of_the_line() -> None:
    reading = LineReader(PARAMS)

    def params(line: int, **settings: Any) -> SamplingParams:
        entry = Entry(line, {"prompt": "Hi", **settings})
        return reading.job(entry, reading.ticket(entry, Form.SIMPLE)).params

    for line in range(1, 4):
        for settings in ({}, {"max_tokens": 1}, {"top_k": 1}, {"stop": ["a"], "top_k": 1}, {"stop": "b"}, {"seed": 3}):
            given: dict[str, Any] = {"seed": 6 + line, **settings}
            assert params(line, **settings) == SamplingParams(**{"max_tokens": None, "temperature": 0.5, **given})
        # Equal to a good value, but not of its type.
        for wrong in ({"max_tokens": True}, {"max_tokens": 1.0}, {"seed": -1}, {"seed": True}, {"seed": 1.5}):
            with pytest.raises(LineError) as caught:
                params(line, **wrong)
            assert caught.value.code == "invalid_value"
    for number in range(1, 1000):
        assert params(1, max_tokens=number).max_tokens == number
    assert len(reading._known) <= 256
