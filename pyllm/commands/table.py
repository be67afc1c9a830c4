"""Tables for people, as Markdown that lines up in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pyllm.commands.console import one_line


def markdown_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Lines of a table.

    Args:
        rows: cells, the header first.
        right: columns that are aligned to the right.
    """
    cells = [[one_line(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(cells[0]))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    yield line(cells[0])
    yield line(["-" * (width - 1) + (":" if column in right else "-") for column, width in enumerate(widths)])
    yield from map(line, cells[1:])
