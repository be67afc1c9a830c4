"""`pyllm inspect`: show what is in a model file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from pyllm import hub
from pyllm.commands.console import one_line, size_text
from pyllm.commands.models import model_argument

if TYPE_CHECKING:
    from pyllm.commands.facts import Facts
    from pyllm.gguf_file import GGUFModel

_MAX_TEXT = 100  # characters of a metadata value


@click.command("inspect")
@model_argument
@click.option("--tensors", is_flag=True, help="List all tensors.")
@click.option("--metadata", is_flag=True, help="List all keys; of arrays and long texts the beginning.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, tensors: bool, metadata: bool, as_json: bool) -> None:
    """Show what is in MODEL, a path or a known name, and whether pyllm can run it.

    Only the file's header is read. Works with models that pyllm cannot run, too.

    \b
    pyllm inspect model.gguf
    pyllm inspect model.gguf --metadata --tensors
    """
    from pyllm.commands.facts import read_facts
    from pyllm.gguf_split import open_model

    with open_model(hub.resolve(model)) as gguf:
        facts = read_facts(gguf)
        if as_json:
            click.echo(json.dumps(_json_object(gguf, facts, tensors, metadata)))
            return
        lines = _fact_lines(facts)
        if metadata:
            lines += ["", *_metadata_lines(gguf)]
        if tensors:
            lines += ["", *_tensor_lines(gguf)]
    for line in lines:
        click.echo(one_line(line))


def _json_object(gguf: GGUFModel, facts: Facts, tensors: bool, metadata: bool) -> dict[str, Any]:
    from pyllm.commands.facts import plain

    shown = asdict(facts)
    if metadata:
        shown["metadata"] = {key: plain(value) for key, value in gguf.metadata.items()}
    if tensors:
        shown["tensors"] = [
            {"name": info.name, "type": info.qtype.name, "shape": info.shape, "bytes": info.nbytes}
            for info in gguf.tensors.values()
        ]
    return shown


def _fact_lines(facts: Facts) -> list[str]:
    heads = f"{_value_text(facts.heads)} ({_value_text(facts.kv_heads)} for keys and values)"
    of_parts = f", the first of {facts.parts} parts" if facts.parts > 1 else ""
    rows = [
        ("file", facts.path),
        ("size", size_text(facts.bytes) + of_parts),
        ("format", "GGUF" if facts.gguf_version is None else f"GGUF version {facts.gguf_version}"),
        ("name", _value_text(facts.name)),
        ("architecture", _value_text(facts.architecture)),
        ("parameters", f"{facts.parameters / 1e6:,.1f} million"),
        ("context", f"{_value_text(facts.context_length)} tokens"),
        ("layers", _value_text(facts.layers)),
        ("hidden size", _value_text(facts.hidden_size)),
        ("heads", heads if facts.kv_heads is not None else _value_text(facts.heads)),
        ("vocabulary", f"{_value_text(facts.vocabulary)} tokens"),
        ("tokenizer", " ".join(str(part) for part in (facts.tokenizer, facts.pre_tokenizer) if part) or "-"),
        ("chat template", "yes" if facts.chat_template else "no"),
        ("pyllm runs it", "yes" if facts.runs else f"no: {facts.reason}"),
    ]
    weights = [f"  {name:<8} {use.tensors:>5} tensors  {size_text(use.bytes):>9}" for name, use in facts.types.items()]
    return [f"{label:<14} {value}" for label, value in rows] + ["weights", *weights]


def _metadata_lines(gguf: GGUFModel) -> Iterator[str]:
    from pyllm.commands.facts import plain

    for key, value in gguf.metadata.items():
        yield f"{key} = {_value_text(plain(value), quoted=True)}"


def _tensor_lines(gguf: GGUFModel) -> Iterator[str]:
    width = max((len(name) for name in gguf.tensors), default=0)
    for info in gguf.tensors.values():
        shape = " x ".join(map(str, info.shape))
        yield f"{info.name:<{width}}  {info.qtype.name:<7}  {size_text(info.nbytes):>9}  {shape}"


def _value_text(value: Any, quoted: bool = False) -> str:
    """A value that `plain` returned, for people."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        items = [_value_text(item, quoted=True) for item in value["first"]]
        more = ["..."] if value["length"] > len(items) else []
        return f"[{', '.join(items + more)}] ({value['length']} items)"
    text = json.dumps(value, ensure_ascii=False) if quoted else str(value)
    return one_line(text, _MAX_TEXT)
