"""`pyllm kv-diff`: where two traces of K/V rows part."""

from __future__ import annotations

import click

from pyllm.commands.completing import FILE


@click.command("kv-diff")
@click.argument("a", type=FILE, metavar="A")
@click.argument("b", type=FILE, metavar="B")
def command(a: str, b: str) -> None:
    """Compare two files of --kv-trace; show the first row at which they part.

    Such files hold hashes of K/V rows, written whenever a sequence gives rows up. Two runs of the same requests must
    leave the same rows, on whatever pages and with however many steps in flight. The status is 1 when they part.

    \b
    pyllm run model.gguf --temp 0 --kv-trace a.jsonl --inflight 1 "Why is the sky blue?"
    pyllm run model.gguf --temp 0 --kv-trace b.jsonl --inflight 8 "Why is the sky blue?"
    pyllm kv-diff a.jsonl b.jsonl
    """
    from pyllm.kv_diff import TraceReader, first_difference

    found, same = first_difference(TraceReader(a), TraceReader(b))
    if found is None:
        click.echo(f"The traces are the same: {same} rows")
        return
    click.echo(f"The traces part behind {same} rows: {found.reason}")
    for name, line in ((a, found.a), (b, found.b)):
        click.echo(f"  {name}" + (f", line {line.line}: {line}" if line else ": no more rows"))
    click.get_current_context().exit(1)
