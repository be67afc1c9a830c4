"""`pyllm inspect` on models that pyllm runs, on one that it does not, and on hostile metadata."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pyllm.commands import main
from pyllm.commands.facts import plain
from tests import gguf_maker as maker

MODELS = Path(__file__).parents[1] / "data" / "refdata"
LLAMA = MODELS / "models" / "llama-a-f32.gguf"
MIXED = MODELS / "quant" / "llama-q-Q4_K_M-mix.gguf"


def inspect(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0 and result.stderr == ""
    return result.stdout


def rows(shown: str) -> dict[str, str]:
    return {line[:14].strip(): line[15:] for line in shown.split("\nweights")[0].splitlines()}


def test_facts_for_people() -> None:
    shown = inspect(MIXED)
    facts = rows(shown)
    assert facts["file"] == str(MIXED)
    assert facts["size"] == "667.7 kB"
    assert facts["format"] == "GGUF version 3"
    assert facts["architecture"] == "llama"
    assert facts["context"] == "2048 tokens"
    assert facts["layers"] == "2"
    assert facts["heads"] == "4 (2 for keys and values)"
    assert facts["tokenizer"] == "gpt2 llama-bpe"
    assert facts["pyllm runs it"] == "yes"
    assert "Q4_K        13 tensors" in shown and "Q6_K         3 tensors" in shown


def test_facts_for_programs() -> None:
    facts = json.loads(inspect(MIXED, "--json", "--metadata", "--tensors"))
    assert facts["runs"] is True and facts["reason"] is None
    assert facts["parameters"] == sum(np.prod(tensor["shape"]) for tensor in facts["tensors"])
    assert facts["types"]["Q6_K"]["tensors"] == 3
    assert sum(use["bytes"] for use in facts["types"].values()) < facts["bytes"] == MIXED.stat().st_size
    assert facts["metadata"]["tokenizer.ggml.tokens"]["length"] == facts["vocabulary"] == 512
    assert "metadata" not in json.loads(inspect(MIXED, "--json"))


def test_lists() -> None:
    shown = inspect(LLAMA, "--metadata", "--tensors")
    assert '\ngeneral.architecture = "llama"\n' in shown
    assert "] (512 items)\n" in shown
    assert "\nblk.0.attn_q.weight " in shown


def test_architecture_that_pyllm_does_not_run(tmp_path: Path) -> None:
    content = maker.gguf(
        [
            maker.pair("general.architecture", maker.STRING, "somenet"),
            maker.array_pair("somenet.attention.head_count", maker.UINT32, [8, 8, 16, 16, 16]),
        ],
        [],
    )
    facts = rows(inspect(maker.write(tmp_path / "model.gguf", content)))
    assert facts["architecture"] == "somenet"
    assert facts["heads"] == "[8, 8, 16, 16, ...] (5 items)"
    assert facts["name"] == "-"
    assert facts["pyllm runs it"].startswith("no: ")


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    content = maker.gguf(
        [
            maker.pair("general.architecture", maker.STRING, "a\x1b[2J\nb"),
            maker.pair("general.name", maker.STRING, "\x07\u202e"),
            maker.pair("key\x1b", maker.STRING, "\x9b\x00"),
        ],
        [],
    )
    path = maker.write(tmp_path / "model.gguf", content)
    shown = inspect(path, "--metadata")
    assert all(char == "\n" or char.isprintable() for char in shown)
    assert rows(shown)["architecture"] == r"a\x1b[2J\nb"
    json.loads(inspect(path, "--metadata", "--json"))


def test_metadata_values() -> None:
    assert plain(np.arange(9)) == {"length": 9, "first": [0, 1, 2, 3]}
    assert plain([["a"] * 5]) == {"length": 1, "first": [{"length": 5, "first": ["a"] * 4}]}
    assert [plain(value) for value in (float("nan"), float("inf"), 1.5, True)] == ["nan", "inf", 1.5, True]
    assert plain(np.array([np.nan], np.float32)) == {"length": 1, "first": ["nan"]}


@pytest.mark.parametrize("name", ["demo", "nosuch"])
def test_models_that_are_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(main, ["inspect", name])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
