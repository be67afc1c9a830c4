"""`pyllm synth`: write a model with random weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyllm.commands.console import note, progress_bar, size_text

if TYPE_CHECKING:
    from pyllm.quants import QuantType
    from pyllm.synth.writer import Layout

_LIKE = (
    *("qwen3-8b", "qwen3-0.6b", "qwen3-30b-a3b", "smollm2", "gemma3-270m"),
    *("qwen3.5-0.8b", "qwen3.6-35b-a3b", "qwen3-coder-next"),
)


@click.command("synth")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--like", type=click.Choice(_LIKE), required=True, help="The model whose shapes to take.")
@click.option(
    "--quant", metavar="TYPE", default="Q4_K", show_default=True, help="Type of the matrices: F16, Q8_0, Q4_K, ..."
)
@click.option("--layers", type=click.IntRange(1), help="Fewer layers, or more, than the model has.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Draws the weights.")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def command(out: Path, like: str, quant: str, layers: int | None, seed: int, force: bool) -> None:
    """Write a GGUF model with random weights in the shapes of a real model to the file OUT.

    Such a model answers nonsense, but takes the time and the memory of the real one: it is for measuring speed, here or
    with any other program that reads GGUF. All matrices get one type; norms stay F32. Rows that are no whole number of
    the type's blocks get the type that quantisers use instead. Prints the path.

    \b
    pyllm synth --like qwen3-8b --quant Q4_K qwen3-8b.gguf
    pyllm bench qwen3-8b.gguf
    pyllm synth --like qwen3.6-35b-a3b --quant Q6_K --layers 8 part.gguf
    """
    from pyllm.errors import UsageError
    from pyllm.synth.blocks import drawable_type
    from pyllm.synth.real_shapes import SHAPES
    from pyllm.synth.writer import write_model

    qtype = drawable_type(quant)
    if out.exists() and not force:
        raise UsageError(f"{out} is there already; --force replaces it")
    shape = SHAPES[like] if layers is None else SHAPES[like].with_layers(layers)
    with progress_bar("writing") as progress:
        plan = write_model(out, shape, qtype, seed, progress)
    _tell(plan, qtype)
    click.echo(out)


def _tell(plan: list[Layout], wanted: QuantType) -> None:
    matrices = [layout for layout in plan if not layout.tensor.keeps_f32]
    others = Counter((layout.qtype.name, layout.tensor.shape[-1]) for layout in matrices if layout.qtype != wanted)
    for (name, row_elements), count in others.items():
        note(
            f"{count} of {len(matrices)} matrices are {name}: "
            f"their rows of {row_elements} are no whole number of {wanted.name} blocks"
        )
    parameters = sum(layout.tensor.num_elements for layout in plan)
    note(f"{parameters / 1e6:,.1f} million random weights, {size_text(sum(layout.num_bytes for layout in plan))}")
