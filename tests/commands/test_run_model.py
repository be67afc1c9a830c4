"""`pyllm run` as users start it: a process of its own with a small model."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests import edited_model

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "refdata" / "models" / "llama-a-f32.gguf"
SECONDS = 60
ENDLESS = ["--raw", "--ignore-eos", "--temp", "0", "Hello"]  # until the context is full: some seconds


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "cli.py"), "run", *map(str, arguments)]


def pyllm(*arguments: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    settings.setdefault("input", "")
    return subprocess.run(
        command(*arguments), capture_output=True, encoding="utf-8", timeout=SECONDS, check=False, **settings
    )


def one_error_line(result: subprocess.CompletedProcess[str], status: int = 1) -> str:
    assert result.returncode == status and result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_answer_from_argument_file_and_stdin(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Hello\n")
    options = (MODEL, "--temp", "0", "-n", "20")
    by_argument = pyllm(*options, "Hello")
    assert by_argument.returncode == 0 and by_argument.stdout.endswith("\n") and len(by_argument.stdout) > 2
    assert "Device: cpu" in by_argument.stderr and "tokens/s" in by_argument.stderr
    assert pyllm(*options, "-f", tmp_path / "prompt.txt").stdout == by_argument.stdout
    assert pyllm(*options, input="Hello").stdout == by_argument.stdout


def test_json_gives_the_same_answer() -> None:
    options = (MODEL, "--seed", "5", "-n", "20", "-ub", "3", "Hello")
    shown = json.loads(pyllm(*options, "--json").stdout)
    assert shown["text"].rstrip("\n") == pyllm(*options).stdout.rstrip("\n")
    assert shown["usage"]["completion_tokens"] == len(shown["tokens"]) <= 20
    assert shown["seed"] == 5


def test_json_with_logprobs() -> None:
    shown = json.loads(pyllm(MODEL, "--temp", "0", "-n", "6", "--ignore-eos", "--json", "--logprobs", "3", "Hi").stdout)
    assert [entry["token"] for entry in shown["logprobs"]] == shown["tokens"] and len(shown["tokens"]) == 6
    for entry in shown["logprobs"]:
        assert len(entry["top"]) == 3 and entry["top"][0]["token"] == entry["token"]
        assert 0 > entry["logprob"] == entry["top"][0]["logprob"] >= entry["top"][1]["logprob"]


def test_logit_bias_forbids_a_token() -> None:
    options = (MODEL, "--temp", "0", "-n", "1", "--ignore-eos", "--json", "Hi")
    first = json.loads(pyllm(*options).stdout)["tokens"][0]
    assert json.loads(pyllm(*options, f"--logit-bias={first}=-inf").stdout)["tokens"][0] != first
    assert "expected 0 to 511" in pyllm(*options, "--logit-bias", "512=1").stderr


def test_ascii_terminal_gets_question_marks() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    options = (MODEL, "--raw", "--temp", "0", "-n", "60", "--ignore-eos", "é")
    plain, ascii_only = pyllm(*options), pyllm(*options, env=environment)
    assert ascii_only.returncode == 0 and ascii_only.stdout.isascii()
    assert "".join(c if c.isascii() else "?" for c in plain.stdout) == ascii_only.stdout


def test_model_without_template_gets_a_common_one_with_a_warning(tmp_path: Path) -> None:
    bare = edited_model.write(MODEL, tmp_path / "bare.gguf", {"tokenizer.chat_template": None})
    result = pyllm(bare, "--temp", "0", "-n", "3", "Hello")
    assert result.returncode == 0
    assert "Warning: " in result.stderr and "has no chat template" in result.stderr
    assert "Warning" not in pyllm(bare, "--raw", "--temp", "0", "-n", "3", "Hello").stderr


def test_malformed_template_stops_a_chat_but_not_raw_prompts(tmp_path: Path) -> None:
    broken = edited_model.write(MODEL, tmp_path / "broken.gguf", {"tokenizer.chat_template": "{% for m in %}"})
    refused = pyllm(broken, "--temp", "0", "-n", "3", "Hello")
    assert refused.returncode == 1 and refused.stdout == ""
    assert "Error: " in refused.stderr and "line 1" in refused.stderr and "Traceback" not in refused.stderr
    assert pyllm(broken, "--raw", "--temp", "0", "-n", "3", "Hello").returncode == 0


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello\n" * 100)
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "empty folder").mkdir()
    content = MODEL.read_bytes()
    for size in (3, 20, 2000, len(content) // 2, len(content) - 1):
        (tmp_path / f"cut at {size}.gguf").write_bytes(content[:size])
    for path in tmp_path.iterdir():
        assert path.name in one_error_line(pyllm(path, "Hello"))


def test_what_cannot_run() -> None:
    assert "known: demo" in one_error_line(pyllm("nosuch", "Hello"))
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert "--device cpu" in one_error_line(pyllm(MODEL, "Hello", "--device", "gpu", env=hidden))
    assert "temperature" in one_error_line(pyllm(MODEL, "Hello", "--temp", "-1"), status=2)
    too_long = pyllm(MODEL, "--raw", "-c", "8", "a long prompt for so few places")
    assert too_long.returncode == 1 and "the context of 8 has room for 7" in too_long.stderr


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A test run in the background may have been started with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_reader_that_has_seen_enough() -> None:
    process = start(MODEL, *ENDLESS)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(5)
    process.stdout.close()
    process.wait(SECONDS)
    assert process.stderr.read() == b"Device: cpu\n"


def test_interrupt_keeps_the_partial_answer() -> None:
    process = start(MODEL, *ENDLESS)
    assert process.stdout is not None
    begun = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, notes = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert (begun + rest).endswith(b"\n")
    assert b"Interrupted\n" in notes and b"tokens/s" in notes and b"Traceback" not in notes


def test_interrupt_in_json_mode_gives_what_is_there() -> None:
    process = start(MODEL, "--json", *ENDLESS)
    assert process.stderr is not None
    assert process.stderr.readline() == b"Device: cpu\n"
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert json.loads(shown)["finish_reason"] == "interrupted"


def test_ctrl_c_on_a_terminal() -> None:
    """On a terminal there is a bar while loading, and Ctrl-C comes as a key."""
    terminal, side = pty.openpty()
    termios.tcsetwinsize(side, (25, 80))

    def take_terminal() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command(MODEL, *ENDLESS), stdin=side, stdout=side, stderr=side, start_new_session=True, preexec_fn=take_terminal
    )
    os.close(side)
    shown = b""
    while b"Device: cpu\r\n" not in shown or shown.endswith(b"Device: cpu\r\n"):
        shown += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    try:
        while data := os.read(terminal, 1000):
            shown += data
    except OSError:  # the other side is closed: Linux says EIO
        pass
    os.close(terminal)
    assert process.wait(SECONDS) == 130
    assert b"\rloading: " in shown and b"Interrupted\r\n" in shown


@pytest.mark.demo_model
def test_demo_model_knows_paris(demo_model: Path) -> None:
    result = pyllm("demo", "--temp", "0", "What is the capital of France?")
    assert result.stdout == "The capital of France is Paris.\n"
