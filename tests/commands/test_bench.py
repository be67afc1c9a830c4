"""`pyllm bench`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from pyllm.bench import accuracy, session
from pyllm.bench.engine import EngineUnderTest
from pyllm.commands import main, options
from pyllm.device import Device
from pyllm.errors import DeviceError
from pyllm.llm import LLM, EngineOptions
from pyllm.quants import QuantType
from pyllm.synth.writer import write_model
from tests.tiny_shape import TINY


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    write_model(path, TINY, QuantType.Q8_0)
    return path


def bench(*arguments: object):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_a_table_for_people(tiny: Path) -> None:
    result = bench(tiny, "-p", "20,40", "-n", 4, "-d", "0,64", "--concurrency", "1,2", "-r", 1, "--device", "cpu")
    assert result.exit_code == 0 and result.stderr == "Device: cpu\n"
    lines = result.stdout.splitlines()
    assert lines[0].startswith("- machine: ") and "NumPy" in lines[0]
    assert lines[2].startswith("- model: tiny.gguf") and "Q8_0" in lines[2]
    assert "16 of 16 top tokens equal" in result.stdout
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0] == ["test", "depth", "sequences", "tokens/s", "min - max", "read", "bandwidth"]
    assert [tuple(row[:3]) for row in table[2:]] == [
        ("prefill 20", "0", "1"),
        ("prefill 40", "0", "1"),
        ("decode 4", "0", "1"),
        ("prefill 20", "64", "1"),
        ("prefill 40", "64", "1"),
        ("decode 4", "64", "1"),
        ("decode 4", "0", "2"),
        ("decode 4", "64", "2"),
    ]


def test_one_object_for_programs(tiny: Path) -> None:
    result = bench(tiny, "-p", 0, "-n", 3, "-r", 2, "--device", "cpu", "--json")
    found = json.loads(result.stdout)
    assert found["passed"] is True and found["device"] == "cpu" and found["left_out"] == []
    assert found["model"]["tensors"] == {"Q8_0": 16, "F32": 9}
    (row,) = found["rows"]
    assert (row["kind"], row["tokens"], row["depth"], row["sequences"]) == ("decode", 3, 0, 1)
    assert len(row["rates"]) == 2 and row["bytes_read_per_second"] is None
    assert [figure["what"] for figure in found["figures"]] == ["decode against prefill"]


def test_other_devices_are_compared_with_the_cpu(tiny: Path) -> None:
    result = bench(tiny, "-p", 9, "-n", 2, "-r", 1, "--device", "emulated", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [figure["what"] for figure in found["figures"]] == [
        "decode against prefill",
        "prefill against the CPU",
        "decode against the CPU",
    ]


def test_wrong_answers_are_an_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "MAX_DIFFERENCE", -1.0)
    result = bench(tiny, "-p", 8, "-n", 0, "-r", 1, "--device", "cpu")
    assert result.exit_code == 1 and "WRONG" in result.stdout
    _, line = result.stderr.splitlines()
    assert line.startswith("Error: the answers are wrong: decode against prefill: logits differ by at most")


def test_what_does_not_fit_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MEMORY_SHARE", 0.0)
    result = bench(tiny, "-p", 0, "-n", 2, "-r", 1, "--concurrency", 4, "--device", "cpu")
    assert result.exit_code == 0
    assert result.stderr.splitlines()[1:] == [
        "Left out: decode 2, 4 sequences: weights and K/V rows do not fit into the device's memory"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "a"), "'a' is no list of whole numbers such as 512,2048"),
        (("--concurrency", "0"), "0 is out of range; the least is 1"),
        (("-p", "0", "-n", "0"), "-p 0 and -n 0 leave nothing to measure"),
        (("--kv-trace", "rows"), "--kv-trace would be measured, too"),
        (("-p", "513"), "prefill 513 needs a context of 513 tokens"),
        (("-p", "65", "-n", "0", "-c", "64"), "prefill 65 needs a context of 65 tokens; -c is 64"),
    ],
)
def test_command_lines_that_make_no_sense(tiny: Path, arguments: tuple[str, ...], message: str) -> None:
    result = bench(tiny, *arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""


def test_options_reach_the_engine(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[EngineOptions] = []
    open_llm = LLM.with_options

    def spy(path: Path, device: Device, options: EngineOptions) -> LLM:
        opened.append(options)
        return open_llm(path, device, options)

    monkeypatch.setattr(LLM, "with_options", spy)
    arguments = ("-p", 8, "-n", 2, "-r", 1, "-ub", 16, "-b", 32, "--kv-type", "q8_0", "--inflight", 3, "-c", 300)
    assert bench(tiny, *arguments, "--device", "cpu").exit_code == 0
    (found,) = opened
    assert (found.ubatch_size, found.batch_size, found.kv_type, found.inflight) == (16, 32, "q8_0", 3)
    assert found.ctx_size == 300


def test_every_option_of_the_engine_is_known_to_the_session() -> None:
    names = {field.name for field in fields(options.EngineOptions)}
    assert names - {"device", "no_graphs"} <= {field.name for field in fields(EngineOptions)}


def test_a_missing_model() -> None:
    result = bench("nowhere.gguf")
    assert result.exit_code == 1 and result.stderr.startswith("Error: nowhere.gguf is neither a file nor a known model")


def test_ctrl_c_prints_what_is_known(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((1.0, 2.0))

    def run(*arguments: object) -> float:
        for value in seconds:
            return value
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineUnderTest, "seconds", run)
    result = bench(tiny, "-p", "8,9", "-n", 2, "-r", 3, "--device", "cpu")
    assert result.exit_code == 130 and result.stderr.splitlines()[-1] == "Interrupted"
    assert "prefill 8 |     0 |         1 |      4.0 | 4.0 - 4.0 |" in result.stdout
    assert "prefill 9" not in result.stdout and "top tokens equal" in result.stdout


def test_an_error_comes_behind_what_was_measured_before_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((1.0, 2.0))

    def run(*arguments: object) -> float:
        for value in seconds:
            return value
        raise DeviceError("the GPU stopped: an illegal address")

    monkeypatch.setattr(EngineUnderTest, "seconds", run)
    result = bench(tiny, "-p", "8,9", "-n", 2, "-r", 1, "--device", "cpu")
    assert result.exit_code == 1 and result.stderr.splitlines()[-1] == "Error: the GPU stopped: an illegal address"
    assert "| prefill 8 |" in result.stdout and "prefill 9" not in result.stdout


def test_ctrl_c_ends_a_running_benchmark(tiny: Path) -> None:
    command = [sys.executable, "-m", "pyllm", "bench", str(tiny), "-p", "64", "-n", "64", "-r", "100000"]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "Device: cpu\n"  # it is loaded, and works
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not output or json.loads(output)["device"] == "cpu"
