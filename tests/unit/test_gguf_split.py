"""Models cut into several files, and the ways to name a model: file, any part, folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pyllm.errors import ModelFileError
from pyllm.gguf_file import GGUFFile
from pyllm.gguf_split import SplitGGUF, open_model

sys.path.append(str(Path(__file__).parents[1]))  # for helper modules in tests/
from gguf_maker import INT32, STRING, UINT16, UINT32, gguf, pair, small_model, tensor_row, write


def part(number: int, count: int, names: list[str], total: int = 6, value: float = 0.0) -> bytes:
    """Part `number` of `count`, numbered from 1, with tensors of 8 equal floats; the first holds all metadata."""
    pairs = [
        pair("split.no", UINT16, number - 1),
        pair("split.count", UINT16, count),
        pair("split.tensors.count", INT32, total),
    ]
    if number == 1:
        pairs += [pair("general.architecture", STRING, "llama"), pair("llama.block_count", UINT32, 2)]
    rows = [tensor_row(name, [8], 0, 32 * index) for index, name in enumerate(names)]
    return gguf(pairs, rows, np.full(8 * len(names), value or number, np.float32).tobytes())


def write_parts(folder: Path, prefix: str = "tiny") -> list[Path]:
    """A sound model of three parts with three, two and one tensors."""
    folder.mkdir(exist_ok=True)
    return [
        write(folder / f"{prefix}-{number:05}-of-00003.gguf", part(number, 3, list(names)))
        for number, names in [(1, "abc"), (2, "de"), (3, "f")]
    ]


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("named", [0, 1, 2, "folder"])
def test_every_way_to_name_a_split_model(tmp_path, named):
    paths = write_parts(tmp_path)
    with open_model(tmp_path if named == "folder" else paths[named]) as model:
        assert isinstance(model, SplitGGUF)
        assert model.path == paths[0]
        assert model.get_int(model.arch_key("block_count")) == 2
        assert list(model.tensors) == list("abcdef")
        for name, number in zip("abcdef", (1, 1, 1, 2, 2, 3), strict=True):
            data = model.tensor_data(name)
            assert data.shape == (32,) and not data.flags.writeable
            assert set(data.view(np.float32)) == {number}
        with pytest.raises(ModelFileError, match="tensor g is missing"):
            model.tensor_data("g")
    assert data.view(np.float32)[0] == 3
    with pytest.raises(ModelFileError, match="closed"):
        model.tensor_data("a")


def test_single_files(tmp_path):
    path = write(tmp_path / "small.gguf", small_model())
    for named in (path, str(path), tmp_path):
        with open_model(named) as model:
            assert isinstance(model, GGUFFile) and model.path == path
    one = write(tmp_path / "sub.gguf", part(1, 1, ["a"], total=1))
    with open_model(one) as model:
        assert isinstance(model, GGUFFile)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_part_is_named(tmp_path, missing):
    paths = write_parts(tmp_path)
    paths[missing].unlink()
    for path in {*paths, tmp_path} - {paths[missing]}:
        assert f"{paths[missing].name} is missing, part {missing + 1} of 3" in refusal(path)


def test_renamed_parts(tmp_path):
    paths = write_parts(tmp_path)
    assert "tiny-00001-of-00003.gguf is part 3 of 3, but not named so" in refusal(paths[2].rename(paths[0]))
    paths = write_parts(tmp_path)
    write(paths[1], part(3, 3, ["f"]))
    assert "tiny-00002-of-00003.gguf is part 3 of 3, its name says 2 of 3" in refusal(paths[0])
    paths = write_parts(tmp_path)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    assert "model.gguf is part 1 of 3, but not named so; give all parts their original names" in refusal(renamed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (part(2, 4, ["d", "e"]), "is part 2 of 4, its name says 2 of 3"),
        (part(2, 3, ["d", "a"]), "holds tensor a, as tiny-00001-of-00003.gguf does"),
        (part(2, 3, ["d", "e"], total=7), "00002-of-00003.gguf is from a model of 7 tensors, tiny-00001-of-00003.gguf"),
        (part(2, 3, ["w", "x", "y", "z"], total=9), "00002-of-00003.gguf is from a model of 9 tensors"),
        (part(2, 3, ["d"]), "its model has 6 tensors, the 3 parts hold 5"),
        (gguf([pair("split.no", UINT16, 1)]), "split.count is missing"),
        (gguf([]), "split.no is missing"),
        (part(2, 3, ["d", "e"])[:-8], "tensor e ends at byte"),
        (b"not a model at all", "not a GGUF file"),
    ],
)
def test_foreign_or_damaged_part(tmp_path, content, message):
    paths = write_parts(tmp_path)
    write(paths[1], content)
    assert message in refusal(paths[0])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([pair("split.count", UINT32, 1 << 31)], "split.count is 2147483648, expected at most 65535"),
        ([pair("split.count", INT32, -3)], "split.count is -3, expected at least 0"),
        ([pair("split.count", STRING, "3")], "split.count is '3', expected an integer"),
        ([pair("split.count", UINT16, 3)], "split.no is missing"),
        ([pair("split.count", UINT16, 3), pair("split.no", UINT16, 3)], "split.no is 3, expected at most 2"),
    ],
)
def test_wrong_split_keys(tmp_path, pairs, message):
    assert message in refusal(write(tmp_path / "tiny-00001-of-00003.gguf", gguf(pairs)))


def test_65535_parts_stop_at_the_first_missing_one(tmp_path):
    pairs = [pair("split.count", UINT16, 65535), pair("split.no", UINT16, 0)]
    path = write(tmp_path / "m-00001-of-65535.gguf", gguf(pairs))
    assert "m-00002-of-65535.gguf is missing, part 2 of 65535" in refusal(path)


def test_folders(tmp_path):
    assert "is a folder without .gguf files" in refusal(tmp_path)
    write_parts(tmp_path)
    write(tmp_path / "notes.txt", b"hello")
    with open_model(tmp_path) as model:
        assert len(model.tensors) == 6
    write_parts(tmp_path, "other")
    line = refusal(tmp_path)
    assert "is a folder with 2 models; name one of other-00001-of-00003.gguf, tiny-00001-of-00003.gguf" in line
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "cannot be read: File name too long" in refusal(tmp_path / ("x" * 300))
