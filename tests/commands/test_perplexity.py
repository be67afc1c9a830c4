"""`pyllm perplexity`: what is printed, refused and kept; and the values of another engine."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from pyllm.commands import main
from pyllm.llm import LLM
from pyllm.perplexity import cut_windows, log_softmax
from tests.refdata import ROOT, model_path, quant_path

CHECKOUT = Path(__file__).parents[2]
MODEL = quant_path("llama-q-Q4_K_M-mix")
OTHER = quant_path("llama-q-Q4_0")
TEXT = ROOT / "real" / "ppl_text.txt"
REFERENCE = json.loads((ROOT / "real" / "perplexity.json").read_text())
SHORT = ["-c", "64", "--windows", "3", "--kv-type", "f32"]


def invoke(*arguments: object, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(main, ["perplexity", *map(str, arguments)], input=stdin)


def measure(*arguments: object) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_text_for_people_and_programs() -> None:
    found = measure(MODEL, "-f", TEXT, *SHORT)
    with LLM(MODEL, device="cpu", ctx_size=64, kv_type="f32") as llm:
        windows = cut_windows(llm.tokenizer, TEXT.read_text().removesuffix("\n"), 64, 3)
        nll = [
            -log_softmax(llm.logits(window.tolist())[32:63])[np.arange(31), window[33:]].mean() for window in windows
        ]
    assert found["window_nll"] == pytest.approx(nll, rel=1e-6)
    assert found["nll"] == pytest.approx(np.mean(nll), rel=1e-6)
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-5)
    assert (found["window"], found["windows"], found["scored"], found["complete"]) == (64, 3, 93, True)
    assert "kl_base" not in found
    shown = invoke(MODEL, "-f", TEXT, *SHORT)
    value, error = found["perplexity"], found["error"]
    assert shown.stdout == f"Perplexity: {value:.4f} +/- {error:.4f} (3 windows of 64 tokens, 93 tokens scored)\n"
    assert shown.stderr == "Device: cpu\n"


def test_ubatches_make_no_difference() -> None:
    whole, small = (measure(MODEL, "-f", TEXT, *SHORT, *more)["perplexity"] for more in ([], ["-ub", "7", "-b", "50"]))
    assert small == pytest.approx(whole, rel=1e-4)


def test_text_on_stdin() -> None:
    by_file = invoke(MODEL, "-f", TEXT, *SHORT)
    assert invoke(MODEL, "-f", "-", *SHORT, stdin=TEXT.read_bytes()).stdout == by_file.stdout


def test_comparison_with_itself_and_with_another(tmp_path: Path) -> None:
    base = tmp_path / "base.npz"
    saved = invoke(MODEL, "-f", TEXT, *SHORT, "--kl-base", base)
    assert saved.exit_code == 0 and saved.stderr == f"Device: cpu\nSaved {base}\n"
    same = measure(MODEL, "-f", TEXT, *SHORT, "--kl-base", base)["kl_base"]
    assert same["file"] == str(base)
    assert same["kl"]["value"] < 1e-7 and same["kl_max"] < 1e-6 and same["same_top"]["value"] == 1
    shown = invoke(OTHER, "-f", TEXT, *SHORT, "--kl-base", base)
    assert "Comparing with llama-q-Q4_K_M-mix.gguf\n" in shown.stderr
    assert [line.split(":")[0] for line in shown.stdout.splitlines()] == [
        "Perplexity",
        "Base perplexity",
        "Difference",
        "KL divergence",
        "Same top token",
    ]
    other = measure(OTHER, "-f", TEXT, *SHORT, "--kl-base", base)
    found = other["kl_base"]
    assert found["kl"]["value"] > 1e-3 and found["kl_max"] > found["kl_99"] > found["kl_median"] > 0
    assert found["same_top"]["value"] < 1
    assert found["delta"]["value"] == pytest.approx(other["perplexity"] - found["base"]["value"])


def test_save_replaces(tmp_path: Path) -> None:
    base = tmp_path / "base.npz"
    base.write_text("something else")
    assert "is not a file of log-probabilities" in invoke(MODEL, "-f", TEXT, *SHORT, "--kl-base", base).stderr
    assert base.read_text() == "something else"
    assert invoke(MODEL, "-f", TEXT, *SHORT, "--kl-base", base, "--save").exit_code == 0
    assert "kl_base" in measure(MODEL, "-f", TEXT, *SHORT, "--kl-base", base)


def test_bases_of_something_else(tmp_path: Path) -> None:
    base, other_text = tmp_path / "base.npz", tmp_path / "text.txt"
    other_text.write_text("Something else. " * 200)
    invoke(MODEL, "-f", TEXT, *SHORT, "--kl-base", base)
    content = base.read_bytes()
    for arguments, words in (
        ([MODEL, "-f", other_text, *SHORT], "was made with another text"),
        ([MODEL, "-f", TEXT, "-c", "32", "--windows", "3"], "has windows of 64 tokens, not 32; use -c 64"),
        ([MODEL, "-f", TEXT, "-c", "64", "--windows", "4"], "has 3 windows, 4 are to be scored; use --windows 3"),
        ([model_path("llama-c-spm-bf16"), "-f", TEXT, *SHORT], "was made with another vocabulary"),
    ):
        refused(invoke(*arguments, "--kl-base", base), words)
    base.write_bytes(content[: len(content) // 2])
    refused(invoke(MODEL, "-f", TEXT, *SHORT, "--kl-base", base), "is not a file of log-probabilities")
    base.write_bytes(content.replace(content[5000:5008], b"damaged!", 1))
    refused(invoke(MODEL, "-f", TEXT, *SHORT, "--kl-base", base), "is damaged")


def refused(result: Result, words: str, status: int = 1) -> None:
    assert result.exit_code == status and result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and words in errors[0] and "Traceback" not in result.stderr


def test_texts_that_cannot_be_scored(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("Hello")
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    refused(invoke(MODEL, "-f", tmp_path / "empty"), "the text has 1 tokens, a window takes 512")
    refused(invoke(MODEL, "-f", tmp_path / "short"), "give a longer text, or smaller windows (-c)")
    refused(invoke(MODEL, "-f", tmp_path / "bytes"), "is not UTF-8 text")
    refused(invoke(MODEL, "-f", tmp_path / "nosuch"), "cannot be read")
    refused(invoke(MODEL, "-f", "-"), "standard input is empty", 2)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([MODEL], 2, "Missing option '-f'"),
        ([MODEL, "-f", TEXT, "--save"], 2, "--save needs --kl-base FILE"),
        ([MODEL, "-f", TEXT, "-c", "3"], 2, "it must have at least 4"),
        ([MODEL, "-f", TEXT, "-c", "4096"], 2, "was trained for 2048 tokens"),
        ([MODEL, "-f", TEXT, "--windows", "0"], 2, "--windows"),
        (["nosuch", "-f", TEXT], 1, "known: demo"),
        ([MODEL, "-f", TEXT, *SHORT, "--kl-base", "/nosuch/base.npz"], 1, "No such file or directory"),
        ([MODEL, "-f", TEXT, *SHORT, "--kl-base", ROOT], 1, "cannot be read"),
    ],
)
def test_refusals(arguments: list[object], status: int, words: str) -> None:
    refused(invoke(*arguments), words, status)


def test_ctrl_c_tells_what_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[None] = []
    stream_logits = LLM.stream_logits

    def interrupted(self: LLM, ids: Any) -> Iterator[np.ndarray]:
        for piece in stream_logits(self, ids):
            calls.append(None)
            if len(calls) == 3:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(LLM, "stream_logits", interrupted)
    result = invoke(MODEL, "-f", TEXT, *SHORT, "--kl-base", tmp_path / "base.npz")
    assert result.exit_code == 130
    assert result.stdout.startswith("Perplexity: ")
    assert result.stdout.endswith("(2 of 3 windows of 64 tokens, 62 tokens scored)\n")
    assert "Interrupted\n" in result.stderr and list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_process() -> None:
    process = subprocess.Popen(
        [sys.executable, CHECKOUT / "cli.py", "perplexity", MODEL, "-f", TEXT, "-c", "16", "-ub", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    assert process.stderr.readline() == b"Device: cpu\n"
    process.send_signal(signal.SIGINT)
    shown, notes = process.communicate(timeout=60)
    assert process.returncode == 130 and notes == b"Interrupted\n"
    assert shown == b"" or shown.startswith(b"Perplexity: ")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_reference_is_of_this_text(name: str) -> None:
    assert hashlib.sha256(TEXT.read_bytes()).hexdigest() == REFERENCE["sha256"]
    exact = REFERENCE["models"][name]["exact"]
    assert np.exp(np.mean(exact["chunk_nll"])) == pytest.approx(exact["ppl"], rel=1e-5)


@pytest.mark.demo_model
def test_demo_model_has_the_perplexity_of_another_engine(demo_model: Path) -> None:
    exact = REFERENCE["models"]["smollm2"]["exact"]
    windows = 2  # of 9, window by window: the rest shows nothing new, and takes up to a minute
    found = measure(demo_model, "-f", TEXT, "-c", REFERENCE["context"], "--windows", windows)
    assert found["window_nll"] == pytest.approx(exact["chunk_nll"][:windows], abs=0.002)
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(exact["chunk_nll"][:windows])), rel=0.002)
