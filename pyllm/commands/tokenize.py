"""`pyllm tokenize`: show the tokens of a text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands.completing import FILE
from pyllm.commands.models import local_model, model_and_text, model_argument
from pyllm.commands.prompt import read_prompt

if TYPE_CHECKING:
    from pyllm.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizeOptions:
    """The command line."""

    model: str
    text: str | None
    file: str | None
    pieces: bool
    count: bool
    json: bool
    add_special: bool
    parse_special: bool

    def check(self) -> None:
        """Refuse combinations that make no sense.

        Raises:
            click.UsageError: more than one way to print is chosen.
        """
        if self.pieces + self.count + self.json > 1:
            raise click.UsageError("choose one of --pieces, --count and --json (which has both)")


@click.command("tokenize")
@model_argument
@click.argument("text", required=False)
@click.option("-f", "--file", type=FILE, metavar="FILE", help="Read the text from FILE; - is standard input.")
@click.option("--pieces", is_flag=True, help="Print a line for each token: its id and what it stands for.")
@click.option("--count", is_flag=True, help="Print only how many tokens there are.")
@click.option("--json", is_flag=True, help="Print one JSON object with ids, pieces and count.")
@click.option(
    "--add-special/--no-bos",
    default=True,
    help="Put BOS and EOS around the text where the model file says so, or leave them out. [default: put them]",
)
@click.option("--parse-special", is_flag=True, help="Texts such as <|im_end|> become special tokens.")
def command(**values: Any) -> None:
    """Print the token ids of TEXT, as MODEL (a path or a known name) sees it.

    Without TEXT and -f, the text is what comes in on standard input; a newline at its very end is dropped. Only the
    file's header is read. With --pieces, bytes that are no whole character are shown as \\xNN.

    \b
    pyllm tokenize demo "Hello, world"
    pyllm tokenize model.gguf --pieces -f question.txt
    """
    if values["file"] is None:
        values["model"], values["text"] = model_and_text(values["model"], values["text"])
    run(TokenizeOptions(**values))


def run(options: TokenizeOptions) -> None:
    """Tokenise, print."""
    options.check()
    text = read_prompt(options.text, options.file, "text")
    tokenizer = open_tokenizer(options.model)
    ids = tokenizer.encode(text, add_special=options.add_special, parse_special=options.parse_special)
    if options.json:
        pieces = [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
        click.echo(json.dumps({"model": options.model, "ids": ids, "pieces": pieces, "count": len(ids)}))
    elif options.count:
        click.echo(len(ids))
    elif options.pieces:
        click.echo("".join(f"{token:>7}  {shown(tokenizer.token_bytes(token))}\n" for token in ids), nl=False)
    else:
        click.echo(" ".join(map(str, ids)))


def open_tokenizer(model: str) -> Tokenizer:
    """The tokeniser of a model, without its weights."""
    from pyllm.gguf_split import open_model
    from pyllm.tokenizer import Tokenizer

    with open_model(local_model(model)) as gguf:
        return Tokenizer.from_metadata(gguf.metadata, str(gguf.path))


def shown(piece: bytes) -> str:
    r"""A token's bytes in double quotes, with \xNN and the like for what is not a printable character."""
    return '"' + "".join(map(_shown_char, piece.decode(errors="surrogateescape"))) + '"'


def _shown_char(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if "\udc80" <= char <= "\udcff":
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char if char.isprintable() else char.encode("unicode_escape").decode()
