"""`pyllm batch` with a real engine: its bar at a terminal, answers that the context ends, and signs of it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

from tests.refdata import model_path

ROOT = Path(__file__).parents[2]
SECONDS = 90


def run_at_terminal(folder: Path, *options: str) -> tuple[str, int]:
    """What `pyllm batch` shows on a terminal, and its status."""
    terminal, side = pty.openpty()
    termios.tcsetwinsize(side, (25, 120))
    command = [sys.executable, str(ROOT / "cli.py"), "batch", str(model_path("llama-a-f32")), "in.jsonl"]
    process = subprocess.Popen(
        [*command, "-o", "out.jsonl", *options], cwd=folder, stdin=side, stdout=side, stderr=side
    )
    os.close(side)
    shown, deadline = b"", time.monotonic() + SECONDS
    while time.monotonic() < deadline and select.select([terminal], [], [], SECONDS)[0]:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the program has closed its side
            break
    os.close(terminal)
    return shown.decode(errors="replace"), process.wait(SECONDS)


def test_the_bar_and_what_the_context_cut_off(tmp_path: Path) -> None:
    lines = [{"id": number, "prompt": f"Tell {number}", "ignore_eos": True} for number in range(12)]
    lines[3]["max_tokens"] = 4
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown, status = run_at_terminal(tmp_path, "--parallel", "2", "-c", "96", "--temp", "0", "--raw")
    assert status == 0, shown
    bars = re.findall(r"(\d+)%\|[^|]*\| *(\d+)/12 \[[^\]]*?, *(\d+) tokens/s\]", shown)
    assert bars and int(bars[-1][1]) > int(bars[0][1]) and any(int(rate) > 0 for *_, rate in bars), shown
    assert '11 cut off, since the context is full (-c): see "context_full" in out.jsonl' in shown
    records = {record["id"]: record for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert all(record["finish_reason"] == "length" and record["error"] is None for record in records.values())
    assert [number for number, record in records.items() if "context_full" not in record] == [3]
    assert records[0]["usage"]["prompt_tokens"] + records[0]["usage"]["completion_tokens"] == 96
