"""Writes docs/cli.md: what `pyllm COMMAND --help` says, for all commands.

python -m tools.cli_reference          write it
python -m tools.cli_reference --check  say whether it is up to date, by the status
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from pyllm.commands import main

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
WIDTH = 100
HEAD = """\
# Commands

What `pyllm COMMAND --help` says. Written by `make docs`; change the commands, not this page.
"""


def reference() -> str:
    """The page."""
    return HEAD + "".join(f"\n## {path}\n\n```\n{text}\n```\n" for path, text in sections())


def sections() -> Iterator[tuple[str, str]]:
    """Each command with its help, in the order of `pyllm --help`."""
    yield from _sections("pyllm", main, None)


def _sections(path: str, command: click.Command, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    settings = {"max_content_width": WIDTH, "terminal_width": WIDTH, **command.context_settings}
    ctx = click.Context(command, parent, info_name=path.rpartition(" ")[2], **settings)
    yield path, command.get_help(ctx)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            yield from _sections(f"{path} {name}", below, ctx)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text(encoding="utf-8") != reference())
    PAGE.write_text(reference(), encoding="utf-8")
