"""Traces of K/V rows, and what they are compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pyllm import commands
from pyllm.errors import UsageError
from pyllm.fnv import fnv1a
from pyllm.llm import LLM
from tests.engine import greedy, open_engine, tokens
from tests.refdata import PROMPTS, model_path, reference

PROMPT = {name: reference("llama-a")[f"{name}_tokens"].tolist() for name in PROMPTS}


def engine(path: Path, **options: Any) -> LLM:
    options = {"ubatch_size": 32, "page_size": 8, "kv_trace_every": 5, "kv_type": "f16", **options}
    return open_engine(model_path("llama-a-f32"), kv_trace=path, **options)


def traced(path: Path, **options: Any) -> list[dict[str, Any]]:
    with engine(path, **options) as llm:
        for name in ("n70", "n5"):
            tokens(llm.generate(PROMPT[name], greedy(4)))
    return [json.loads(line) for line in path.read_text().splitlines()]


def kv_diff(a: Path, b: Path) -> tuple[int, str]:
    result = CliRunner().invoke(commands.main, ["kv-diff", str(a), str(b)])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("text", "expected"),  # from the authors' test vectors
    [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C), ("foobar", 0x85944171F73967E8)],
)
def test_fnv1a(text: str, expected: int) -> None:
    row = np.frombuffer(text.encode(), np.uint8)
    assert fnv1a(np.stack([row, row])).tolist() == [expected, expected]


def test_what_is_in_a_trace(tmp_path: Path) -> None:
    first, *rows = traced(tmp_path / "a")
    assert first == {"kv_trace": 1, "every": 5, "layers": 3, "kv_type": "f16", "page_size": 8} | {
        "layers": len({row["layer"] for row in rows})
    }
    positions = [row["position"] for row in rows if row["sequence"] == 1 and row["layer"] == 0]
    assert positions == [*range(0, 73, 5), 72]  # of the last token no row was computed
    assert [row["position"] for row in rows if row["sequence"] == 2 and row["layer"] == 0] == [0, 5, 7]
    assert all(row["own"] and row["position"] % 8 == row["row"] for row in rows)


def test_hashes_are_those_of_the_stored_bytes(tmp_path: Path) -> None:
    with engine(tmp_path / "a") as llm:
        stream = llm.generate(PROMPT["n70"], greedy(4))
        next(stream)
        llm.trace_kv()
        kv = llm._scheduler.running_sequences()[0]
        llm._device.synchronize()
        for row in map(json.loads, (tmp_path / "a").read_text().splitlines()[1:]):
            layer, place = llm._cache.layers[row["layer"]], kv.pages[row["position"] // 8] * 8 + row["row"]
            for name, array in (("k", layer.k), ("v", layer.v)):
                plain = 0xCBF29CE484222325
                for byte in array[place].tobytes():
                    plain = (plain ^ byte) * 0x100000001B3 % 2**64
                assert row[name] == f"{plain:016x}"


def test_a_trace_on_request_needs_a_trace() -> None:
    with open_engine(model_path("llama-a-f32")) as llm, pytest.raises(UsageError, match="kv_trace"):
        llm.trace_kv()


def test_runs_that_differ_in_pages_and_depth_leave_the_same_trace(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    traced(a, inflight=1)
    traced(b, inflight=8, page_size=16, n_seqs=2, ctx_size=128, page_order=list(reversed(range(16))))
    status, shown = kv_diff(a, b)
    assert (status, shown) == (0, f"The traces are the same: {len(a.read_text().splitlines()) - 1} rows\n")


def test_the_first_row_that_differs_is_shown(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    traced(a)
    lines = a.read_text().splitlines()
    changed = json.loads(lines[7])
    changed["k"], changed["page"] = "0" * 16, 9
    b.write_text("\n".join([*lines[:7], json.dumps(changed), *lines[8:]]) + "\n")
    status, shown = kv_diff(a, b)
    assert status == 1 and shown.splitlines()[0] == "The traces part behind 6 rows: the row's content differs"
    assert f"{b}, line 8: sequence 1, position {changed['position']}, layer {changed['layer']}: page 9" in shown
    b.write_text("\n".join(lines[:-2]) + "\n")
    assert "the second trace ends" in kv_diff(a, b)[1]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("", "line 1: the first line is not"),
        ("{}\n", "line 1: the first line is not"),
        ("[" * 5000, "line 1: cut off"),
        ("HEAD\nnull\n", "line 2: not a JSON object"),
        ('HEAD\n{"step": 1', "line 2: cut off"),
        ('HEAD\n{"step": 1.5}\n', "line 2: step is missing"),
        ("HEAD\n\x00\u00ff\n", "line 2: not a JSON object"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, text: str, finding: str) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    head = json.dumps({"kv_trace": 1, "every": 16, "layers": 2, "kv_type": "f16"})
    good.write_text(head + "\n")
    bad.write_text(text.replace("HEAD", head))
    status, shown = kv_diff(good, bad)
    assert status == 1 and finding in shown and shown.count("\n") == 1


def test_files_that_are_not_there(tmp_path: Path) -> None:
    status, shown = kv_diff(tmp_path / "a", tmp_path / "b")
    assert status == 2 and shown == f"Error: {tmp_path / 'a'}: No such file or directory\n"
    with pytest.raises(UsageError, match="cannot be written"):
        engine(tmp_path / "no" / "folder")


def test_traces_of_other_settings_cannot_be_compared(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    traced(a)
    traced(b, kv_type="f32")
    assert "kv_type is f16 and f32" in kv_diff(a, b)[1]


def test_a_full_disk_ends_the_trace_and_not_the_answers(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with engine(Path("/dev/full")) as llm:
        assert len(tokens(llm.generate(PROMPT["n5"], greedy(3)))) == 3
    assert "ends here: No space left on device" in caplog.text
