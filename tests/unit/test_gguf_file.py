"""The GGUF reader on sound files: values, views, typed getters, laziness, life time."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pyllm.errors import ModelFileError
from pyllm.gguf_file import GGUFFile
from pyllm.quants import QuantType

sys.path.append(str(Path(__file__).parents[1]))  # for helper modules in tests/
from gguf_maker import (
    ARRAY,
    FLOAT32,
    INT8,
    INT32,
    STRING,
    UINT16,
    UINT32,
    array_pair,
    gguf,
    pair,
    scalar,
    small_model,
    string,
    tensor_row,
    write,
)

REFDATA = Path(__file__).parents[1] / "data" / "refdata"
REAL_FILES = sorted(REFDATA.glob("*/*.gguf"))


@pytest.fixture
def small(tmp_path):
    with GGUFFile(write(tmp_path / "small.gguf", small_model())) as file:
        yield file


@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.stem)
def test_agrees_with_the_gguf_package(path):
    reader = pytest.importorskip("gguf").GGUFReader(path)
    with GGUFFile(path) as file:
        fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for key, field in fields.items():
            value = file.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.qtype == int(tensor.tensor_type)
            assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
            stored = np.ascontiguousarray(tensor.data).view(np.uint8)
            np.testing.assert_array_equal(file.tensor_data(tensor.name), stored)


def test_every_value_type(small):
    expected = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "test.uint8": 255,
        "test.int8": -128,
        "test.uint16": 65535,
        "test.int16": -32768,
        "test.int32": -(2**31),
        "test.bool": True,
        "test.uint64": 2**64 - 1,
        "test.int64": -(2**63),
        "test.float64": 0.1,
        "tokenizer.ggml.tokens": ["a", "b\n", "", "\ufffd", "\u2581the"],
    }
    for key, value in expected.items():
        assert small.metadata[key] == value
        assert type(small.metadata[key]) is type(value)
    for key, values in {
        "test.ints": np.array([1, -2, 3], np.int32),
        "test.bools": np.array([True, False]),
        "test.floats": np.array([0.5, -0.5], np.float32),
    }.items():
        assert small.metadata[key].dtype == values.dtype
        np.testing.assert_array_equal(small.metadata[key], values)
        assert not small.metadata[key].flags.writeable
    assert len(small.metadata) == len(expected) + 3
    assert "missing" not in small.metadata
    with pytest.raises(KeyError):
        small.metadata["missing"]


def test_tensors(small):
    assert small.version == 3 and small.alignment == 32 and small.architecture == "llama"
    info = small.tensors["token_embd.weight"]
    assert (info.qtype, info.shape, info.nbytes) == (QuantType.F32, (3, 8), 96)
    data = small.tensor_data("token_embd.weight")
    assert data.dtype == np.uint8 and data.shape == (3, 32) and not data.flags.writeable
    np.testing.assert_array_equal(data.view(np.float32), np.arange(24, dtype=np.float32).reshape(3, 8))
    assert small.tensor_data("output_norm.weight").shape == (32,)


def test_blocks_and_experts(tmp_path):
    """A stack of 2 experts of 3 rows of 64 elements in Q4_0: 36 bytes a row."""
    data = np.arange(2 * 3 * 36, dtype=np.uint8)
    rows = [tensor_row("blk.0.ffn_up_exps.weight", [64, 3, 2], QuantType.Q4_0, 0)]
    with GGUFFile(write(tmp_path / "m.gguf", gguf([], rows, data.tobytes()))) as file:
        assert file.tensors["blk.0.ffn_up_exps.weight"].shape == (2, 3, 64)
        np.testing.assert_array_equal(file.tensor_data("blk.0.ffn_up_exps.weight"), data.reshape(2, 3, 36))


def test_version_2_and_other_alignment(tmp_path):
    pairs = [pair("general.alignment", UINT32, 64)]
    rows = [tensor_row("a", [4], 0, 64), tensor_row("b", [4], 0, 0)]
    content = gguf(pairs, rows, b"\1" * 16 + b"\0" * 48 + b"\2" * 16, version=2, alignment=64)
    with GGUFFile(write(tmp_path / "m.gguf", content)) as file:
        assert (file.version, file.alignment) == (2, 64)
        assert set(file.tensor_data("a")) == {2} and set(file.tensor_data("b")) == {1}


def test_vocabulary_only_file(tmp_path):
    """No tensors, and not even padding after the header."""
    content = gguf([pair("general.architecture", STRING, "llama")], alignment=1)
    with GGUFFile(write(tmp_path / "m.gguf", content)) as file:
        assert file.tensors == {} and file.architecture == "llama"


def test_nested_arrays(tmp_path):
    inner = struct.pack("<IQ", INT8, 2) + b"\1\2"
    words = struct.pack("<IQ", STRING, 1) + string("x")
    nested = string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 3) + inner + words + struct.pack("<IQ", UINT32, 0)
    with GGUFFile(write(tmp_path / "m.gguf", gguf([nested]))) as file:
        numbers, strings, empty = file.metadata["k"]
        assert numbers.tolist() == [1, 2] and strings == ["x"] and len(empty) == 0


def test_text_values_keep_line_breaks_and_broken_utf8(tmp_path):
    content = gguf([pair("tokenizer.chat_template", STRING, b"a\nb\xff\0c"), pair("empty", STRING, "")])
    with GGUFFile(write(tmp_path / "m.gguf", content)) as file:
        assert file.metadata["tokenizer.chat_template"] == "a\nb\ufffd\0c"
        assert file.get_str("empty") == ""


def test_getters(small):
    assert small.arch_key("block_count") == "llama.block_count"
    assert small.get_int(small.arch_key("block_count"), minimum=2, maximum=2) == 2
    assert small.get_int("test.uint64") == 2**64 - 1
    assert small.get_float("llama.rope.freq_base", minimum=1) == 10000.0
    assert isinstance(small.get_float("test.uint8"), float)
    assert small.get_bool("test.bool") is True
    assert small.get_str("general.architecture") == "llama"
    assert small.get_strs("tokenizer.ggml.tokens", length=5)[4] == "\u2581the"
    assert small.get_ints("test.ints", 3) == (1, -2, 3)
    assert small.get_ints("llama.block_count", 3, minimum=1) == (2, 2, 2)
    assert small.get_ints("test.bools", 2) == (1, 0)
    for dtype in (np.int8, np.int32, np.int64, np.float32):
        values = small.get_array("test.ints", dtype, length=3)
        assert values.dtype == dtype and values.tolist() == [1, -2, 3]
    assert small.get_array("test.floats", np.float32).tolist() == [0.5, -0.5]
    assert small.get_array("test.bools", np.int32).tolist() == [1, 0]


def test_bool_as_integer_and_empty_arrays(tmp_path):
    pairs = [
        pair("yes", UINT32, 1),
        pair("two", UINT32, 2),
        array_pair("none", INT32, []),
        array_pair("no", STRING, []),
    ]
    with GGUFFile(write(tmp_path / "m.gguf", gguf(pairs))) as file:
        assert file.get_bool("yes") is True
        assert file.get_strs("none") == file.get_strs("no") == []
        assert file.get_array("no", np.float32).dtype == np.float32
        with pytest.raises(ModelFileError, match="two is 2, expected a truth value"):
            file.get_bool("two")


@pytest.mark.parametrize("getter", ["get_int", "get_float", "get_bool", "get_str", "get_strs"])
def test_defaults(small, getter):
    sentinel = object()
    assert getattr(small, getter)("missing.key", sentinel) is sentinel
    assert getattr(small, getter)("missing.key", None) is None
    with pytest.raises(ModelFileError, match=r"small\.gguf: missing\.key is missing, expected a"):
        getattr(small, getter)("missing.key")


def test_array_defaults(small):
    assert small.get_ints("missing.key", 3, None) is None
    assert small.get_array("missing.key", np.float32, None) is None
    for call in (lambda: small.get_ints("missing.key", 3), lambda: small.get_array("missing.key", np.float32)):
        with pytest.raises(ModelFileError, match=r"missing\.key is missing, expected an"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.get_int("general.architecture"), "general.architecture is 'llama', expected an integer"),
        (lambda f: f.get_int("test.bool"), "test.bool is True, expected an integer"),
        (lambda f: f.get_int("test.float64"), "test.float64 is 0.1, expected an integer"),
        (lambda f: f.get_int("test.ints"), "test.ints is an array of 3 int32 values, expected an integer"),
        (lambda f: f.get_int("llama.block_count", minimum=3), "llama.block_count is 2, expected at least 3"),
        (lambda f: f.get_int("llama.block_count", maximum=1), "llama.block_count is 2, expected at most 1"),
        (lambda f: f.get_float("test.bool"), "test.bool is True, expected a finite number"),
        (lambda f: f.get_float("llama.rope.freq_base", maximum=1.0), "is 10000.0, expected at most 1.0"),
        (lambda f: f.get_bool("test.float64"), "test.float64 is 0.1, expected a truth value"),
        (lambda f: f.get_str("test.uint8"), "test.uint8 is 255, expected a string"),
        (lambda f: f.get_strs("test.ints"), "test.ints is an array of 3 int32 values, expected an array of strings"),
        (lambda f: f.get_strs("tokenizer.ggml.tokens", length=4), "is an array of 5 strings, expected 4 values"),
        (lambda f: f.get_array("tokenizer.ggml.tokens", np.float32), "is an array of 5 strings, expected an array of"),
        (lambda f: f.get_array("test.uint8", np.float32), "test.uint8 is 255, expected an array of numbers"),
        (lambda f: f.get_array("test.floats", np.int32), "expected an array of numbers that fit into int32"),
        (lambda f: f.get_array("test.ints", np.uint8), "expected an array of numbers that fit into uint8"),
        (lambda f: f.get_ints("test.ints", 4), "test.ints is an array of 3 int32 values, expected 4 values"),
        (lambda f: f.get_ints("test.ints", 3, minimum=0), "test.ints is -2, expected at least 0"),
        (lambda f: f.get_ints("test.floats", 2), "expected an integer or an array of integers"),
        (lambda f: f.get_ints("test.float64", 2), "expected an integer or an array of integers"),
    ],
)
def test_wrong_values_are_named(small, call, message):
    with pytest.raises(ModelFileError) as caught:
        call(small)
    line = str(caught.value)
    assert message in line and "small.gguf" in line and "\n" not in line


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_floats_are_finite(tmp_path, value):
    file = GGUFFile(write(tmp_path / "m.gguf", gguf([pair("k", FLOAT32, value)])))
    with pytest.raises(ModelFileError, match="expected a finite number"):
        file.get_float("k")


def test_missing_tensor_is_named(small):
    with pytest.raises(ModelFileError, match=r"tensor blk\.7 is missing"):
        small.tensor_data("blk.7")


def test_views_outlive_the_file(tmp_path):
    file = GGUFFile(write(tmp_path / "small.gguf", small_model()))
    view = file.tensor_data("token_embd.weight")
    ints = file.metadata["test.ints"]
    file.close()
    file.close()
    assert view.view(np.float32)[2, 7] == 23
    assert ints.tolist() == [1, -2, 3]
    assert file.metadata["test.ints"] is ints
    assert "test.floats" in file.metadata and file.tensors["token_embd.weight"].nbytes == 96
    for late in (lambda: file.tensor_data("token_embd.weight"), lambda: file.metadata["test.floats"]):
        with pytest.raises(ModelFileError, match="closed"):
            late()


def test_opening_decodes_no_vocabulary(tmp_path):
    """100k tokens are 10 MB of str objects; the header alone must not make them."""
    tokens = array_pair("tokenizer.ggml.tokens", STRING, [f"token{i}" for i in range(100_000)])
    path = write(tmp_path / "vocab.gguf", gguf([tokens, pair("last", UINT16, 7)]))
    tracemalloc.start()
    try:
        file = GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 300_000
    assert file.get_int("last") == 7
    tokens_read = file.get_strs("tokenizer.ggml.tokens", length=100_000)
    assert tokens_read[99_999] == "token99999"
    assert file.metadata["tokenizer.ggml.tokens"] is tokens_read
    file.close()


def test_maker_agrees_with_the_gguf_package(tmp_path):
    """The files of these tests are what the format's own package takes them for."""
    reader = pytest.importorskip("gguf").GGUFReader(write(tmp_path / "small.gguf", small_model()))
    assert reader.fields["test.uint64"].contents() == 2**64 - 1
    assert [tensor.name for tensor in reader.tensors] == ["token_embd.weight", "output_norm.weight"]
    assert scalar(INT8, -1) == b"\xff"
