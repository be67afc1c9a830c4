"""docs/cli.md and --help: every command has examples, which the command line understands; the page is up to date."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from pyllm.commands import COMMANDS, main
from tools.cli_reference import PAGE, reference, sections

HELP = dict(sections())
EXAMPLE = re.compile(rf"^  (?:\S.*(?:\| |\())?(pyllm (?:{'|'.join(COMMANDS)})\b[^|>)<#\n]*)", re.MULTILINE)


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run make docs"


@pytest.mark.parametrize("path", [path for path in HELP if path != "pyllm"])
def test_every_command_has_examples_of_itself(path: str) -> None:
    assert any(f"{path} " in f"{example} " for example in EXAMPLE.findall(HELP[path]))


@pytest.mark.parametrize("path", list(HELP))
def test_examples_are_understood(path: str) -> None:
    for example in EXAMPLE.findall(HELP[path]):
        parse(shlex.split(example)[1:])


def parse(arguments: list[str]) -> None:
    """Raises click.UsageError where --help's own example would be refused."""
    command: click.Command = main
    ctx = click.Context(main, info_name="pyllm")
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.get_command(ctx, name)
        assert found is not None, name
        command = found
    command.make_context("pyllm", list(arguments))
