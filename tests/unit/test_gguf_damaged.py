"""The GGUF reader on damaged and hostile files: always one line that names the file, never another exception."""

from __future__ import annotations

import errno
import os
import random
import struct
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pyllm.errors import ModelFileError, UnsupportedError
from pyllm.gguf_file import GGUFFile
from pyllm.gguf_metadata import described, printable
from pyllm.quants import QuantType

sys.path.append(str(Path(__file__).parents[1]))  # for helper modules in tests/
from gguf_maker import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    array_pair,
    gguf,
    pair,
    small_model,
    string,
    tensor_row,
    write,
)

REAL_FILE = Path(__file__).parents[1] / "data" / "refdata" / "quant" / "llama-q-Q4_0.gguf"
HUGE = 1 << 60


def refusal(path: Path, error: type[ModelFileError] = ModelFileError) -> str:
    """The one line with which a file is refused; checks that this is cheap."""
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(error) as caught:
            GGUFFile(path)
        seconds = time.perf_counter() - started
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    line = str(caught.value)
    assert "\n" not in line and line.isprintable() and len(line) < 600
    assert path.name in line
    assert peak < 2 << 20 and seconds < 5
    return line


def nested(depth: int, key: str = "k") -> bytes:
    """Arrays of one array each, `depth` deep, the innermost an empty array of bytes."""
    return (
        string(key) + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * (depth - 1) + struct.pack("<IQ", 0, 0)
    )


def one_tensor(*, name: str | bytes = "t", dims=(32,), type_id: int = 0, offset: int = 0, data: bytes = b"") -> bytes:
    return gguf([], [tensor_row(name, list(dims), type_id, offset)], data or b"\0" * 128)


DAMAGED = {
    # the file itself
    "text": (b"hello, world, this is not a model", "not a GGUF file: it begins with b'hello, w'"),
    "short": (b"GG", "not a GGUF file"),
    "magic only": (b"GGUF", "the version needs 4 bytes at byte 4"),
    "empty": (b"", "is empty; the download may be cut short"),
    "web page": (b"<!DOCTYPE html><html>", "web page"),
    "zip": (b"PK\x03\x04" + b"\0" * 60, "PyTorch or zip archive"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
    # counts
    "2^60 keys": (gguf([], num_pairs=HUGE), f"the number of keys, {HUGE}, needs"),
    "2^64-1 keys": (gguf([], num_pairs=2**64 - 1), "the number of keys"),
    "2^60 tensors": (gguf([], num_rows=HUGE), f"the number of tensors, {HUGE}, needs"),
    "more keys than there are": (
        gguf([pair("a", UINT32, 1)], num_pairs=2, alignment=1),
        "needs 28 bytes at byte 24, the file ends",
    ),
    "many keys": (gguf([], num_pairs=70000) + b"\0" * 1_000_000, "pyllm accepts at most 65536"),
    "many tensors": (gguf([], num_rows=70000) + b"\0" * 3_000_000, "pyllm accepts at most 65536"),
    "2^60 strings": (gguf([array_pair("k", STRING, [], HUGE)]), "the length of k"),
    "2^60 bytes": (gguf([array_pair("k", UINT8, [], HUGE)]), "the length of k"),
    "2^61 numbers, whose size overflows": (gguf([array_pair("k", UINT64, [], 1 << 61)]), "the length of k"),
    "2^60 arrays": (gguf([array_pair("k", ARRAY, [], HUGE)]), "the length of k"),
    "strings past the end": (
        gguf([array_pair("k", STRING, [b"a" * 9] * 3, 5)], alignment=1),
        ": k reaches past the end",
    ),
    # keys and values
    "huge string": (gguf([string("k") + struct.pack("<IQ", STRING, HUGE)]), "a string of k reaches past the end"),
    "string of 2^64-1": (gguf([string("k") + struct.pack("<IQ", STRING, 2**64 - 1)]), "a string of k reaches past"),
    "huge key": (gguf([struct.pack("<Q", HUGE) + b"k" * 40]), "key 0 is 1152921504606846976 bytes long"),
    "long key": (gguf([pair("k" * 70000, UINT8, 1)]), "key 0 is 70000 bytes long, expected at most 65535"),
    "empty key": (gguf([pair("", UINT8, 1)]), "key 0 is b''"),
    "key with NUL": (gguf([pair("a\0b", UINT8, 1)]), "without NUL bytes"),
    "key not UTF-8": (gguf([pair(b"\xff\xfe", UINT8, 1)]), "key 0 is b'\\xff\\xfe', which is not UTF-8"),
    "same key twice": (gguf([pair("k", UINT8, 1), pair("k", UINT32, 2)]), "key k appears twice"),
    "key with line break": (gguf([pair("a\nb", UINT8, 1)] * 2), "key a\\nb appears twice"),
    "value type 13": (gguf([string("k") + struct.pack("<IQ", 13, 0)]), "k has value type 13, expected 0 to 12"),
    "array of type 99": (gguf([string("k") + struct.pack("<IIQ", ARRAY, 99, 0)]), "k is an array of value type 99"),
    "bool 2": (gguf([pair("k", BOOL, 2)]), "k holds the byte 2 for a truth value"),
    "bool 255 in an array": (gguf([array_pair("k", BOOL, [1, 0, 255])]), "k holds the byte 255"),
    "nested 5 deep": (gguf([nested(5)]), "k nests arrays more than 4 deep"),
    "nested 100,000 deep": (gguf([nested(100_000)]), "k nests arrays more than 4 deep"),
    # alignment
    "alignment 0": (gguf([pair("general.alignment", UINT32, 0)]), "general.alignment is 0, expected at least 8"),
    "alignment 48": (gguf([pair("general.alignment", UINT32, 48)]), "general.alignment is 48, expected a power of two"),
    "alignment 2^31": (gguf([pair("general.alignment", UINT32, 1 << 31)]), "expected at most 16777216"),
    "alignment -32": (gguf([pair("general.alignment", INT32, -32)]), "general.alignment is -32"),
    "alignment 32.0": (
        gguf([pair("general.alignment", FLOAT32, 32)]),
        "general.alignment is 32.0, expected an integer",
    ),
    "alignment text": (gguf([pair("general.alignment", STRING, "32")]), "general.alignment is '32'"),
    # tensors
    "0 dimensions": (one_tensor(dims=()), "tensor t has 0 dimensions, expected 1 to 4"),
    "5 dimensions": (one_tensor(dims=(1, 1, 1, 1, 1)), "tensor t has 5 dimensions"),
    "2^31 dimensions": (gguf([], [string("t") + struct.pack("<I", 1 << 31) + b"\0" * 99]), "has 2147483648 dimensions"),
    "zero rows": (one_tensor(dims=(32, 0)), "tensor t has the dimensions [32, 0]"),
    "2^63 elements": (one_tensor(dims=(1 << 32, 1 << 31)), "expected 1 to 2^63 - 1 elements"),
    "product wraps to 32": (one_tensor(dims=(1 << 32, 1 << 32, 1, 32)), "expected 1 to 2^63 - 1 elements"),
    "2^62 elements": (one_tensor(dims=(1 << 62,)), "tensor t ends at byte"),
    "partial block": (one_tensor(dims=(33,), type_id=QuantType.Q4_0), "rows of 33, expected a multiple of 32 for Q4_0"),
    "past the end": (one_tensor(dims=(33,)), "tensor t ends at byte 196, the file at byte 192"),
    "offset past the end": (one_tensor(offset=1 << 50), "tensor t ends at byte"),
    "offset 2^64-32": (one_tensor(offset=2**64 - 32), "tensor t ends at byte"),
    "offset not aligned": (one_tensor(offset=4), "tensor t starts at 4, expected a multiple of the alignment 32"),
    "no data at all": (gguf([], [tensor_row("t", [1], 0, 0)], alignment=1), "tensor t ends at byte"),
    "long name": (one_tensor(name="n" * 64), "the name of tensor 0 is 64 bytes long, expected at most 63"),
    "empty name": (one_tensor(name=""), "the name of tensor 0 is b''"),
    "name with NUL": (one_tensor(name="a\0"), "without NUL bytes"),
    "name not UTF-8": (one_tensor(name=b"\xc3("), "which is not UTF-8"),
    "same name twice": (gguf([], [tensor_row("t", [8], 0, 0)] * 2, b"\0" * 32), "tensor t appears twice"),
    "same bytes twice": (
        gguf([], [tensor_row("a", [8], 0, 0), tensor_row("b", [8], 0, 0)], b"\0" * 32),
        "tensors a and b overlap",
    ),
    "overlap": (
        gguf([], [tensor_row("a", [8], 0, 32), tensor_row("b", [9], 0, 0)], b"\0" * 64),
        "tensors b and a overlap",
    ),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=list(DAMAGED))
def test_damaged_file(tmp_path, content, message):
    assert message in refusal(write(tmp_path / "model.gguf", content))


UNSUPPORTED = {
    "version 1": (gguf([], version=1), "GGUF version 1; pyllm reads versions 2 and 3"),
    "version 4": (gguf([], version=4), "GGUF version 4"),
    "version 0": (gguf([], version=0), "GGUF version 0"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian GGUF file"),
    "unknown type": (one_tensor(type_id=77), "tensor t has type id 77, which pyllm does not know; it reads F32, F16"),
    "retired type": (one_tensor(type_id=4), "tensor t has type id 4"),
    "type 2^32-1": (one_tensor(type_id=2**32 - 1), "tensor t has type id 4294967295"),
}


@pytest.mark.parametrize(("content", "message"), UNSUPPORTED.values(), ids=list(UNSUPPORTED))
def test_unsupported_file(tmp_path, content, message):
    assert message in refusal(write(tmp_path / "model.gguf", content), UnsupportedError)


def test_not_a_regular_file(tmp_path):
    assert "is a folder, expected a GGUF file" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "no.gguf")
    assert "cannot be read" in refusal(write(tmp_path / "file", b"x") / "inside.gguf")
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_fifo_and_device_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is a device or pipe" in refusal(tmp_path / "pipe.gguf")
    assert "is a device or pipe" in refusal(Path("/dev/null"))


def test_unreadable_file(tmp_path, monkeypatch):
    path = write(tmp_path / "secret.gguf", small_model())

    def refuse(*_args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # chmod would not stop a test run by root
    assert "cannot be read: Permission denied; check the path and its permissions" in refusal(path)


def test_line_break_in_the_path(tmp_path):
    path = tmp_path / "two\nlines.gguf"
    with pytest.raises(ModelFileError) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)


def test_too_many_strings(tmp_path):
    """More strings than any model has, all empty: refused before the second half of them is walked over."""
    path = tmp_path / "strings.gguf"
    half = (1 << 21) + 1
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 2))
        for key in ("a", "b"):
            file.write(string(key) + struct.pack("<IIQ", ARRAY, STRING, half))
            file.seek(8 * half, os.SEEK_CUR)
        file.truncate()
    with pytest.raises(ModelFileError, match="b brings the strings to 4194306, pyllm accepts at most 4194304"):
        GGUFFile(path)


def test_too_long_array(tmp_path):
    path = write(tmp_path / "long.gguf", gguf([array_pair("k", UINT8, [], (1 << 28) + 1)]))
    os.truncate(path, 1 << 29)  # sparse
    assert "the length of k is 268435457, pyllm accepts at most 268435456" in refusal(path)


def sparse(path: Path, value_type: int, length: bytes, num_bytes: int) -> Path:
    """A file with a value of so many zero bytes, which take no room on the disk."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("test.long") + struct.pack("<I", value_type) + length
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + num_bytes)
    return path


def test_values_that_only_a_sparse_file_can_hold(tmp_path):
    line = refusal(sparse(tmp_path / "string.gguf", STRING, struct.pack("<Q", 1 << 30), 1 << 30))
    assert f"a string of test.long is {1 << 30} bytes long, pyllm accepts at most 16777216" in line
    line = refusal(sparse(tmp_path / "array.gguf", ARRAY, struct.pack("<IQ", UINT64, 1 << 26), 1 << 29))
    assert f"test.long brings the values to {1 << 29} bytes, pyllm accepts at most 268435456" in line
    longest = sparse(tmp_path / "longest.gguf", STRING, struct.pack("<Q", 1 << 24), 1 << 24)
    assert len(GGUFFile(longest).get_str("test.long")) == 1 << 24


def test_long_texts_are_cut_before_they_are_shown():
    text = "\n" * (1 << 24)
    tracemalloc.start()
    try:
        assert printable(text) == "\\n" * 38 + "\\..."
        assert len(described(text)) == 80
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_cut_at_every_byte_of_the_header(tmp_path):
    whole = small_model(extra=[nested(3, "test.nested")])
    path = tmp_path / "model.gguf"
    for size in range(min(len(whole), 2048)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError) as caught:
            GGUFFile(path)
        assert "\n" not in str(caught.value)
    GGUFFile(write(path, whole)).close()


def test_real_file_cut_anywhere(tmp_path):
    whole = REAL_FILE.read_bytes()
    path = tmp_path / "model.gguf"
    cuts = [*range(2048), *random.Random(1).choices(range(2048, len(whole)), k=60)]
    for size in cuts:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError) as caught:
            GGUFFile(path)
        assert "\n" not in str(caught.value)


INTERESTING = [0, 1, 2, 0x7F, 0x80, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 60, 1 << 63, (1 << 64) - 1]


def mutate(content: bytes, header_size: int, rng: random.Random) -> bytes:
    """One to three random changes within the header: a byte, a u32, a u64, bytes taken out, repeated or put in."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(4, header_size)
        kind = rng.randrange(6)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at : at + 4] = struct.pack("<I", rng.choice(INTERESTING) & 0xFFFFFFFF)
        elif kind == 2:
            changed[at : at + 8] = struct.pack("<Q", rng.choice(INTERESTING))
        elif kind == 3:
            del changed[at : at + rng.randint(1, 16)]
        elif kind == 4:
            changed[at:at] = changed[at : at + rng.randint(1, 64)]
        else:
            changed[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(changed)


def read_everything(path: Path) -> None:
    with GGUFFile(path) as file:
        assert len(dict(file.metadata)) == len(file.metadata)
        for name, info in file.tensors.items():
            data = file.tensor_data(name)
            assert data.nbytes == info.nbytes
            assert int(data.sum(dtype=np.uint64)) >= 0
        file.get_int("llama.block_count", 0, minimum=0)
        file.get_ints("test.ints", 3, None)
        file.get_strs("tokenizer.ggml.tokens", None)
        file.arch_key("block_count")


def test_random_mutations(tmp_path):
    whole = small_model(extra=[nested(2, "test.nested"), pair("general.alignment", UINT32, 32)])
    header_size = len(whole) - 128
    path = tmp_path / "model.gguf"
    rng = random.Random(20)
    loaded = 0
    for _ in range(1500):
        path.write_bytes(mutate(whole, header_size, rng))
        try:
            read_everything(path)
            loaded += 1
        except ModelFileError as error:
            assert str(error).isprintable() and "model.gguf" in str(error)
    assert 50 < loaded < 1400  # both outcomes were met
