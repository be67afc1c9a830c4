"""`pyllm tokenize`: ids as the tokeniser gives them, in each way to print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyllm.commands import main
from pyllm.commands.tokenize import shown
from tests import edited_model
from tests.refdata import ROOT, model_path

SPM = model_path("llama-c-spm-bf16")
STRINGS = json.loads((ROOT / "refs" / "tokenize_llama2_640.json").read_text())["strings"]
HELLO = "1 587 75 588 596 318\n"


def invoke(*arguments: object, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(main, ["tokenize", *map(str, arguments)], input=stdin)


def tokenize(*arguments: object, stdin: str | bytes = "") -> str:
    result = invoke(*arguments, stdin=stdin)
    assert result.exit_code == 0 and result.stderr == "", result.stderr
    return result.stdout


def test_ids_on_one_line() -> None:
    assert tokenize(SPM, "Hello") == tokenize(SPM, "Hello", "--add-special") == HELLO
    assert tokenize(SPM, "Hello", "--no-bos") == HELLO.removeprefix("1 ")
    assert tokenize(SPM, "", "--no-bos") == "\n"


@pytest.mark.parametrize("case", STRINGS[::4], ids=lambda case: ascii(case["text"][:20]))
def test_references_of_another_engine(case: dict[str, Any]) -> None:
    for key, options in (
        ("ids", ["--no-bos"]),
        ("ids_parse_special", ["--no-bos", "--parse-special"]),
        ("ids_add_special_parse_special", ["--parse-special"]),
    ):
        assert json.loads(tokenize(SPM, "--json", *options, "--", case["text"]))["ids"] == case[key]


def test_pieces() -> None:
    assert tokenize(SPM, "Hello\t☃", "--pieces").splitlines() == [
        '      1  "<s>"',
        '    587  " "',
        '     75  "H"',
        '    588  "e"',
        '    596  "l"',
        '    318  "lo"',
        '     12  "\\t"',
        '    229  "\\xe2"',
        '    155  "\\x98"',
        '    134  "\\x83"',
    ]


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (b" w", '" w"'),
        (b'a"\\', r'"a\"\\"'),
        (b"\xf0\x9f", r'"\xf0\x9f"'),
        ("\x1b[2J\n\u202e".encode(), r'"\x1b[2J\n\u202e"'),
        (b"", '""'),
    ],
)
def test_pieces_are_printable(piece: bytes, text: str) -> None:
    assert shown(piece) == text


def test_count_and_json() -> None:
    ids = tokenize(SPM, "Hello, world").split()
    assert tokenize(SPM, "Hello, world", "--count") == f"{len(ids)}\n"
    found = json.loads(tokenize(SPM, "Hello, world", "--json"))
    assert found["model"] == str(SPM) and found["count"] == len(ids) == len(found["pieces"])
    assert [str(token) for token in found["ids"]] == ids
    assert "".join(found["pieces"]) == "<s> Hello, world"


def test_special_tokens_are_text_unless_wanted() -> None:
    assert tokenize(SPM, "</s>", "--no-bos", "--parse-special") == "2\n"
    assert len(tokenize(SPM, "</s>", "--no-bos").split()) > 1


def test_text_from_file_and_stdin(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Hello\n")
    expected = tokenize(SPM, "Hello")
    assert tokenize(SPM, "-f", tmp_path / "text.txt") == expected
    assert tokenize(SPM, "-f", "-", stdin="Hello\n") == expected
    assert tokenize(SPM, stdin="Hello") == expected
    (tmp_path / "empty.txt").touch()
    assert tokenize(SPM, "-f", tmp_path / "empty.txt") == "1\n"


def test_weights_are_not_read(tmp_path: Path) -> None:
    """A model that pyllm cannot run for its architecture still has a tokeniser."""
    edited_model.write(SPM, tmp_path / "other.gguf", {"general.architecture": "somenet"})
    assert tokenize(tmp_path / "other.gguf", "Hello") == tokenize(SPM, "Hello")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([SPM], 2, "there is no text"),
        ([SPM, "a", "-f", "b"], 2, "there are two texts"),
        ([SPM, "a", "--pieces", "--count"], 2, "choose one of"),
        ([SPM, "a", "--json", "--count"], 2, "choose one of"),
        (["nosuch", "a"], 1, "known: demo"),
        ([SPM, "-f", "nosuch"], 1, "nosuch cannot be read"),
        ([SPM, "-f", SPM], 1, "is not UTF-8 text"),
    ],
)
def test_refusals(arguments: list[object], status: int, words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == status and result.stdout == ""
    assert words in result.stderr.splitlines()[-1]
