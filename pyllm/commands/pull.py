"""`pyllm pull`: fetch a known model."""

from __future__ import annotations

import click

from pyllm import hub
from pyllm.commands.completing import MODEL
from pyllm.commands.console import note
from pyllm.commands.models import fetch, fetch_repo


@click.command("pull", epilog="Known models: " + ", ".join(f"{n} ({m.title})" for n, m in hub.KNOWN_MODELS.items()))
@click.argument("name", type=MODEL)
@click.option("--force", is_flag=True, help="Fetch it even if it is there.")
def command(name: str, force: bool) -> None:
    """Fetch a known model into the cache folder, or a model of the Hugging Face hub into that of huggingface_hub.

    Prints the path of the model file. The file's SHA-256 is checked before it is kept.

    \b
    pyllm pull demo
    pyllm pull hf:OWNER/REPO:Q4_K_M
    """
    if name.startswith(hub.REPO_PREFIX):
        click.echo(fetch_repo(name))
        return
    path = None if force else hub.find_model(name)
    if path is not None:
        note(f"{name} is already there; --force fetches it again")
    else:
        path = fetch(name, force)
    click.echo(path)
