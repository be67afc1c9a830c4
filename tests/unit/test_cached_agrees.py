"""Cached and uncached runs agree, wherever the rows were meanwhile: on the device, in the host's memory, in a file.

In every bit of the logits, on the CPU with f32 rows, where both compute the same pieces: token by token always, in
ubatches of a page where whole pages are known. The matrix library sums in another order for another number of rows, so
where a known beginning makes pieces begin elsewhere, the last bits differ; places of the rows make no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllm.executor import Logits
from pyllm.llm import LLM
from pyllm.request import Request
from pyllm.sampling import SamplingParams
from tests.engine import open_engine, tokens
from tests.refdata import model_path, reference

PLAIN, HYBRID = "llama-a-f32", "qwen3next-b-eqheads-bf16"
IDS = {PLAIN: list(range(3, 250)), HYBRID: reference("qwen3next-b-eqheads")["n300_tokens"].tolist()}
LIKELIEST = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)  # chosen by whole rows of logits
PAGE = 8  # tokens
ROUNDING = 2e-5  # of logits, where pieces differ
BASE = 44  # tokens of the prompt that was there before: five pages and a half
CASES = {  # what comes after it, and the most of it that may be known
    "exact repeat": (lambda ids: ids[:BASE], BASE - 1),
    "longer": (lambda ids: ids[: BASE + 9], BASE),
    "shorter": (lambda ids: ids[: BASE - 11], BASE - 12),
    "a page shorter": (lambda ids: ids[: BASE - 4], BASE - 5),
    "diverging inside a page": (lambda ids: [*ids[:21], *ids[100:115]], 21),
    "diverging at a page": (lambda ids: [*ids[:24], *ids[100:115]], 24),
    "first token different": (lambda ids: [ids[99], *ids[1:BASE]], 0),
    "one token different": (lambda ids: [*ids[:30], ids[99], *ids[31:BASE]], 30),
    "last token different": (lambda ids: [*ids[: BASE - 1], ids[99]], BASE - 1),
    "one token": (lambda ids: ids[:1], 0),
    "unrelated": (lambda ids: ids[150:190], 0),
}
PLACES = ("device", "host", "file", "cancelled")
PIECES: list[tuple[str, str, int | None]] = [(name, case, None) for name in IDS for case in CASES]
PIECES += [(PLAIN, "diverging at a page", PAGE)]
# Token by token, which takes time, where else the pieces differ: something is known, up to a checkpoint in the hybrid.
PIECES += [(PLAIN, case, 1) for case, (_, most) in CASES.items() if most]
PIECES += [(HYBRID, case, 1) for case in ("exact repeat", "longer", "last token different")]


def engine(name: str, **options: Any) -> LLM:
    return open_engine(model_path(name), **{"ctx_size": 72, "page_size": PAGE, "prefix_cache": True, **options})


def answer(llm: LLM, prompt: list[int], params: SamplingParams = LIKELIEST) -> tuple[list[int], np.ndarray]:
    """Tokens, and all logits of each."""
    rows: list[np.ndarray] = []
    drawn = llm._scheduler._drawn

    def note(request: Request, logits: Logits, row: int) -> Any:
        rows.append(logits.rows(row, row + 1)[0].copy())
        return drawn(request, logits, row)

    llm._scheduler._drawn = note  # type: ignore[method-assign]
    try:
        found = tokens(llm.generate(prompt, params))
    finally:
        llm._scheduler._drawn = drawn  # type: ignore[method-assign]
    return found, np.array(rows)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int | None], Path]:
    """The base prompt's session, computed once in ubatches of each size."""
    folder = tmp_path_factory.mktemp("sessions")

    def path(name: str, ubatch_size: int | None) -> Path:
        path = folder / f"{name}-{ubatch_size}"
        if not path.exists():
            with engine(name, ubatch_size=ubatch_size) as llm:
                answer(llm, IDS[name][:BASE])
                llm.save_session(path, IDS[name][:BASE])
        return path

    return path


def put(llm: LLM, ids: list[int], place: str, session: Path) -> None:
    """Have the base prompt's rows in some place."""
    if place == "file":
        llm.load_session(session)
        return
    if place == "cancelled":
        stream = llm.generate(ids[:BASE], LIKELIEST)
        next(stream)
        stream.close()
        return
    answer(llm, ids[:BASE])
    if place == "host":
        for start in (60, 130):
            answer(llm, ids[start : start + 65])
        assert llm._kept is not None and llm._kept.index.num_copied_out > 0


@pytest.mark.parametrize(("name", "case", "ubatch_size"), PIECES)
def test_agree(name: str, case: str, ubatch_size: int | None, saved: Callable[[str, int | None], Path]) -> None:
    make, most = CASES[case]
    prompt = make(IDS[name])
    cuts = name == HYBRID and ubatch_size != 1  # where states are kept, and nowhere in an engine that keeps nothing
    with engine(name, ubatch_size=ubatch_size, prefix_cache=cuts) as fresh:
        expected, logits = answer(fresh, prompt)
        assert fresh.stats["cached_tokens"] == 0
    by_count = {0: logits}  # tokens that were known: the logits that come of it
    for place in PLACES if ubatch_size != 1 else ("file",):  # its steps take time
        with engine(name, ubatch_size=ubatch_size, cache_ram=1 << 22) as llm:
            put(llm, IDS[name], place, saved(name, ubatch_size))
            found, values = answer(llm, prompt)
            cached = llm.stats["cached_tokens"]
        assert found == expected, place
        assert cached <= most, place
        if name == PLAIN and place != "cancelled":
            assert cached == most, place
        assert cached or ubatch_size != 1, "nothing is compared"
        same_pieces = ubatch_size is not None and cached % ubatch_size == 0
        same = logits if same_pieces else by_count.setdefault(cached, values)
        assert values.tobytes() == same.tobytes(), place
        assert np.abs(values - logits).max() <= ROUNDING, place


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("place", PLACES)
def test_empty_prompts_are_refused_as_ever(name: str, place: str, saved: Callable[[str, int | None], Path]) -> None:
    from pyllm.errors import ContextError

    with engine(name, cache_ram=1 << 22) as llm:
        put(llm, IDS[name], place, saved(name, None))
        with pytest.raises(ContextError, match="the prompt is empty"):
            answer(llm, [])
