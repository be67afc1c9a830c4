"""`pyllm completion`: what makes a shell complete pyllm's commands, options, models and files."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print what SHELL needs to complete commands, options, models and files with the Tab key.

    Put it where the shell reads it when it starts:

    \b
    echo 'eval "$(pyllm completion bash)"' >> ~/.bashrc
    echo 'eval "$(pyllm completion zsh)"' >> ~/.zshrc      # behind compinit
    pyllm completion fish > ~/.config/fish/completions/pyllm.fish

    bash needs to be 4.4 or newer.
    """
    found = get_completion_class(shell)
    assert found is not None
    completion = found(ctx.find_root().command, {}, "pyllm", "_PYLLM_COMPLETE")
    click.echo(ShellComplete.source(completion), nl=False)  # not bash's own: it asks a bash for its version
