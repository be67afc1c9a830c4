"""Types of arguments that shells complete: models and files. Their values stay the texts that were given."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from pyllm import hub


class _Text(click.ParamType):
    """A text; `name` is for click."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value


class _File(_Text):
    """The path of a file, which may be there or not."""

    name = "file"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class _Folder(_Text):
    """The path of a folder."""

    name = "folder"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


class _Model(_Text):
    """A known name that was begun, or a path."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        known = [name for name in hub.KNOWN_MODELS if incomplete and name.startswith(incomplete)]
        return [CompletionItem(name) for name in known] or [CompletionItem(incomplete, type="file")]


FILE, FOLDER, MODEL = _File(), _Folder(), _Model()
