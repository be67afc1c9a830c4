"""Few combinations of settings that between them hold every pair of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations of one value per setting; each pair of values of two settings is in at least one of them."""
    names = list(settings)
    every = [dict(zip(names, (range(len(settings[name])) for name in names), strict=True))]
    rows = [dict(zip(names, row, strict=True)) for row in product(*every[0].values())]

    def pairs(row: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, row[a], b, row[b]) for a, b in combinations(names, 2)}

    pairs_of = [pairs(row) for row in rows]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs_of[index] & missing))  # the first of equals
        missing -= pairs_of[best]
        chosen.append({name: settings[name][rows[best][name]] for name in names})
    return chosen
