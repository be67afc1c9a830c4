"""Random damage to a model file: to its bytes, and to its metadata and tensors with the rest left sound.

    case = mutate(base, random.Random("seed/17"))

Every change comes from the generator that is passed in, so a seed names a file.
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.quants import FORMATS, QuantType
from tests import gguf_maker as maker
from tests.edited_model import ALIGNMENT, Parts, StoredTensor
from tests.vocab_maker import random_text

BIG = [1 << n for n in (7, 8, 15, 16, 20, 24, 28, 30, 31, 32, 40, 60, 62, 63)]
UNSIGNED = [0, 1, 2, 3, *BIG, *(n - 1 for n in BIG), (1 << 64) - 1]
INTEGERS = [*UNSIGNED, -1, -2, -(1 << 31), -(1 << 63)]
FLOATS = [0.0, -0.0, 1e-45, 1e-38, 1e-6, 0.5, 1.0, 1.5, 1e6, 1e12, 3e38, -1.0, -3e38, np.nan, np.inf, -np.inf]
STRINGS = [
    "",
    "x",
    "\0",
    "\n",
    "a\nb",
    "é" * 1000,
    "x" * 70_000,
    "\x1b[2J",
    "llama",
    "none",
    "yarn",
    "linear",
    b"\xff\xfe",
]

OPTIONAL_KEYS = (
    "general.alignment", "split.no", "split.count", "split.tensors.count", "general.architecture",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scale_linear", "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "attention.sliding_window",
    "attention.sliding_window_pattern", "final_logit_softcapping", "attn_logit_softcapping", "attention.scale",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.causal", "expert_count",
    "expert_used_count", "expert_shared_count", "expert_weights_scale", "expert_weights_norm", "expert_gating_func",
    "leading_dense_block_count", "context_length", "vocab_size", "logit_scale", "pooling_type",
    "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces",
    "tokenizer.ggml.fim_pad_token_id", "tokenizer.ggml.pre", "tokenizer.ggml.model", "tokenizer.ggml.scores",
    "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.precompiled_charsmap",
)  # fmt: skip
"""Keys that a file may have; those without a known first part belong to the architecture."""

TEMPLATES = (
    "", "{", "{{", "{% ", "{% if %}", "{% endfor %}", "{{ 1 / 0 }}", "{{ nothing.at.all }}", "{% include 'x' %}",
    "{% for i in range(1000000000) %}x{% endfor %}", "{{ 'x' * 1000000000 }}", "{{ 10 ** 10 ** 10 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ ().__class__.__mro__[1].__subclasses__() }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "{{ messages[0].content | center(1000000000) }}", "{{ '%999999999d' % 1 }}", "{{ '{:>999999999}'.format(1) }}",
    "{{ range(10 ** 12) | list }}", "{{ messages.append(1) }}", "{{ raise_exception('a\nb\x1b') }}",
    "{{ 'x' | indent(1000000000) }}", "{{ messages | tojson(indent=100000000) }}", "{{ lipsum(n=1000000) }}",
    "{{ strftime_now('%Y' * 100000) }}", "{{ " + "(" * 10_000, "{% if 1 %}" * 400, "{{ " + "-" * 5000 + "1 }}",
    "{{ 'a' * 1000 | replace('', 'b' * 100000) }}", "{{ ('a,' * 100000).split(',') | map('upper') | list | join }}",
    "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ messages }}" * 1000, "{{ bos_token * 1000 }}", "{% set messages = 3 %}{{ messages[0] }}", "{{ self }}",
    "{{ messages | groupby('role') | list }}", "{% call x() %}{% endcall %}", b"{{ '\xed\xa0\x80' }}",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A damaged file.

    Attributes:
        what: the kind of damage, and where.
    """

    what: str
    content: bytes


class Base:
    """A sound model, cut down to two layers so that a run takes a few ms.

    Attributes:
        parts: its metadata and tensors; not to be changed.
    """

    def __init__(self, source: Path) -> None:
        self.name = source.stem
        self.parts = Parts.read(source)
        self.arch = self.parts.metadata["general.architecture"]
        self.parts.metadata[f"{self.arch}.block_count"] = 2
        if self.arch == "gemma3":
            self.parts.metadata["gemma3.attention.sliding_window_pattern"] = 2  # one layer of either kind
        for name in list(self.parts.tensors):
            if name.startswith("blk.") and int(name.split(".")[1]) >= 2:
                del self.parts.tensors[name]

    @cached_property
    def content(self) -> bytes:
        return self.parts.content()

    @cached_property
    def header_size(self) -> int:
        """Bytes before the first tensor's."""
        data = sum(len(t.content) + -len(t.content) % ALIGNMENT for t in self.parts.tensors.values())
        return len(self.content) - data

    @cached_property
    def fields(self) -> list[tuple[int, str]]:
        """Where the header's counts, lengths, types, sizes and numbers stand, with their form for `struct`."""
        return _Walk(self.content).fields

    def copy(self) -> Parts:
        return Parts(dict(self.parts.metadata), {k: copy.copy(t) for k, t in self.parts.tensors.items()})


class _Walk:
    """Goes through a sound header and notes where its numbers stand."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at, self.fields = content, 4, list[tuple[int, str]]()
        self.number("<I")
        num_tensors, num_keys = self.number("<Q"), self.number("<Q")
        for _ in range(num_keys):
            self.string()
            self.value(self.number("<I"))
        for _ in range(num_tensors):
            self.string()
            for _ in range(self.number("<I")):
                self.number("<Q")
            self.number("<I")
            self.number("<Q")

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self.content, self.at)
        self.fields.append((self.at, form))
        self.at += struct.calcsize(form)
        return value

    def string(self) -> None:
        length = self.number("<Q")
        self.at += length

    def value(self, value_type: int) -> None:
        if value_type == maker.ARRAY:
            item_type, count = self.number("<I"), self.number("<Q")
            for _ in range(count):
                self.value(item_type)
        elif value_type == maker.STRING:
            self.string()
        else:
            self.number(maker.FORMS[value_type])


# bytes


def flip_bytes(base: Base, rng: random.Random) -> Case:
    changed = bytearray(base.content)
    places = [rng.randrange(base.header_size) for _ in range(rng.choice((1, 1, 2, 8)))]
    for at in places:
        changed[at] = rng.choice((0, 255, changed[at] ^ (1 << rng.randrange(8)), rng.randrange(256)))
    return Case(f"bytes {places} changed", bytes(changed))


def set_field(base: Base, rng: random.Random) -> Case:
    """Mostly one of the first fields and of those near the end: arrays of tokens have most of them."""
    changed = bytearray(base.content)
    fields = rng.choice((base.fields, base.fields[:60], base.fields[-200:]))
    at, form = rng.choice(fields)
    raw = bytes(changed[at : at + struct.calcsize(form)])
    if form in "<f<d":
        new = struct.pack(form, rng.choice(FLOATS))
    else:
        value = rng.choice([*UNSIGNED, int.from_bytes(raw, "little") + rng.choice((-1, 1, 32))])
        new = (value % (1 << 8 * len(raw))).to_bytes(len(raw), "little")
    changed[at : at + len(raw)] = new
    return Case(f"field at {at} ({form}) {raw.hex()} -> {new.hex()}", bytes(changed))


def move_bytes(base: Base, rng: random.Random) -> Case:
    """A piece of the file taken out, put in twice, overwritten, or the end cut off."""
    content = base.content
    at = rng.choice((rng.randrange(base.header_size), rng.randrange(len(content))))
    size = rng.choice((1, 4, 8, 32, rng.randrange(4096)))
    kind = rng.choice(("taken out", "repeated", "zero", "noise", "cut off from"))
    piece = content[at : at + size]
    middle = {
        "taken out": b"",
        "repeated": piece * rng.choice((2, 3, 50)),
        "zero": bytes(len(piece)),
        "noise": rng.randbytes(size),
    }
    if kind == "cut off from":
        return Case(f"cut off from {at}", content[:at])
    return Case(f"{size} bytes at {at} {kind}", content[:at] + middle[kind] + content[at + size :])


def damage_data(base: Base, rng: random.Random) -> Case:
    """Noise, and values that are no numbers, in the tensors' own bytes."""
    changed = bytearray(base.content)
    at = rng.randrange(base.header_size, len(changed) - 4096)
    size = rng.choice((2, 64, 4096))
    fill = rng.choice((b"\xff", b"\x00\x7c", b"\x00\xfc", b"\x00\x7e", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b""))
    changed[at : at + size] = (fill * size)[:size] if fill else rng.randbytes(size)
    return Case(f"{size} bytes of tensor data at {at}: {fill.hex() or 'noise'}", bytes(changed))


# metadata


def set_value(base: Base, rng: random.Random) -> Case:
    parts = base.copy()
    key = rng.choice(list(parts.metadata))
    if rng.random() < 0.4:
        key = rng.choice(OPTIONAL_KEYS)
        if not key.startswith(("general.", "tokenizer.", "split.")):
            key = f"{base.arch}.{key}"
    value = _value(parts.metadata.get(key), rng)
    parts.metadata[key] = value
    return Case(f"{key} = {str(value)[:80]!r}", parts.content())


def _value(old: Any, rng: random.Random) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "int": lambda: rng.choice([*INTEGERS, *((old + 1, old * 2, old // 2, -old) if type(old) is int else ())]),
        "float": lambda: rng.choice(FLOATS),
        "str": lambda: rng.choice(STRINGS),
        "bool": lambda: rng.random() < 0.5,
        "ints": lambda: np.array(
            [rng.choice((-1, 0, 1, 2, 1 << 20, 1 << 62)) for _ in range(rng.choice((0, 1, 2, 3)))], np.int64
        ),
        "floats": lambda: np.array([rng.choice(FLOATS) for _ in range(rng.choice((0, 1, 2)))], np.float32),
        "strs": lambda: [rng.choice(STRINGS) for _ in range(rng.choice((0, 1, 2)))],
    }
    same = type(old).__name__
    return kinds[same if same in kinds and rng.random() < 0.6 else rng.choice(list(kinds))]()


def swap_values(base: Base, rng: random.Random) -> Case:
    parts = base.copy()
    a, b = rng.sample(list(parts.metadata), 2)
    parts.metadata[a], parts.metadata[b] = parts.metadata[b], parts.metadata[a]
    return Case(f"values of {a} and {b} swapped", parts.content())


def drop_key(base: Base, rng: random.Random) -> Case:
    parts = base.copy()
    key = rng.choice(list(parts.metadata))
    del parts.metadata[key]
    return Case(f"without {key}", parts.content())


def change_list(base: Base, rng: random.Random) -> Case:
    """Tokens or merges: other texts, another order, another length."""
    parts = base.copy()
    key = f"tokenizer.ggml.{rng.choice(('tokens', 'merges'))}"
    texts: list[Any] = list(parts.metadata.get(key, ["a b", "b c"]))
    kind = rng.choice(("text", "texts", "mixed", "shorter", "longer", "same", "empty", "joined", "long"))
    if kind in ("text", "texts"):
        for _ in range(1 if kind == "text" else 50):
            texts[rng.randrange(len(texts))] = rng.choice(
                (rng.choice(STRINGS), random_text(rng, 3), "a b", " ", "  ", "<0x41>", "<0xZZ>", rng.choice(texts))
            )
    elif kind == "mixed":
        rng.shuffle(texts)
    elif kind == "shorter":
        del texts[rng.randrange(len(texts)) :]
    elif kind == "longer":
        texts += texts[: rng.randrange(1, len(texts))]
    elif kind == "same":
        texts = [rng.choice(texts)] * len(texts)
    elif kind == "empty":
        texts = []
    elif kind == "joined":
        texts = [text + texts[0] for text in texts]
    else:
        texts[rng.randrange(len(texts))] = "ab" * rng.choice((1000, 1_000_000))
    parts.metadata[key] = texts
    return Case(f"{key}: {kind}", parts.content())


def change_numbers(base: Base, rng: random.Random) -> Case:
    """Scores or types of the tokens."""
    parts = base.copy()
    name = rng.choice(("scores", "token_type"))
    key, count = f"tokenizer.ggml.{name}", len(parts.metadata["tokenizer.ggml.tokens"])
    values = np.array(parts.metadata.get(key, np.zeros(count, np.float32)), dtype=None)
    extremes = FLOATS if values.dtype.kind == "f" else [-(1 << 31), -1, *range(8), 255, (1 << 31) - 1]
    kind = rng.choice(("one", "all", "sound", "random", "shorter", "longer", "wide"))
    if kind == "one":
        values[rng.randrange(count)] = rng.choice(extremes)
    elif kind == "all":
        values[:] = rng.choice(extremes)
    elif kind == "sound":
        values[:] = [rng.randrange(7) for _ in range(count)]
    elif kind == "random":
        values[:] = [rng.choice(extremes) for _ in range(count)]
    elif kind == "shorter":
        values = values[: rng.randrange(count)]
    elif kind == "longer":
        values = np.concatenate([values, values])
    else:
        values = values.astype(rng.choice((np.float64, np.int64, np.bool_)))
    parts.metadata[key] = values
    return Case(f"{key}: {kind}", parts.content())


def change_template(base: Base, rng: random.Random) -> Case:
    parts = base.copy()
    key = "tokenizer.chat_template"
    template: Any = parts.metadata[key]
    if rng.random() < 0.25:
        template = rng.choice(TEMPLATES)
    else:
        for _ in range(rng.choice((1, 1, 2, 5))):
            at, size = rng.randrange(len(template)), rng.choice((1, 1, 5, 20))
            piece = rng.choice(
                ("", "{{", "}}", "{%", "%}", "-", "|", "'", ".", "[0]", "**9", template[at : at + size] * 2, "\n", "é")
            )
            template = template[:at] + piece + template[at + size :]
    parts.metadata[key] = template
    return Case(f"{key} = {template!r:.300}", parts.content())


# tensors


def change_tensor(base: Base, rng: random.Random) -> Case:
    """Another shape, type, name or content of one tensor, or none of it."""
    parts = base.copy()
    name = rng.choice(list(parts.tensors))
    tensor = parts.tensors[name]
    kind = rng.choice(
        ("missing", "renamed", "turned", "one row less", "flat", "another type", "type id", "more", "noise")
    )
    if kind == "missing":
        del parts.tensors[name]
    elif kind == "renamed":
        del parts.tensors[name]
        parts.tensors[rng.choice((name + "x", "x" * 63, "x" * 64, "\n", name.replace("0", "1")))] = tensor
    elif kind == "turned":
        tensor.shape = tensor.shape[::-1]
    elif kind == "one row less":
        tensor.shape = (max(1, tensor.shape[0] - 1), *tensor.shape[1:])
    elif kind == "flat":
        tensor.shape = (int(np.prod(tensor.shape)),)
    elif kind == "another type":
        _retype(tensor, rng)
    elif kind == "type id":
        tensor.type_id = rng.choice([*range(45), (1 << 32) - 1])
    elif kind == "more":
        tensor.shape = (*tensor.shape, rng.choice((1, 2, 1 << 40)))
    else:
        tensor.content = rng.randbytes(len(tensor.content))
    return Case(f"{name}: {kind}", parts.content())


def _retype(tensor: StoredTensor, rng: random.Random) -> None:
    """The same shape in another block format, of random bytes; rows that no block divides stay as they are."""
    qtype = rng.choice([qtype for qtype in QuantType if tensor.shape[-1] % FORMATS[qtype].block_size == 0])
    num_blocks = int(np.prod(tensor.shape)) // FORMATS[qtype].block_size
    tensor.type_id, tensor.content = int(qtype), rng.randbytes(num_blocks * FORMATS[qtype].block_bytes)


def spoil_weights(base: Base, rng: random.Random) -> Case:
    """Values that are no numbers, or far too large, in sound tensors of float32."""
    parts = base.copy()
    names = rng.sample(list(parts.tensors), rng.choice((1, 1, 3)))
    fill = rng.choice(("nan", "inf", "-inf", "3e38", "-3e38", "1e-45", "0", "1e30"))
    for name in names:
        shape = parts.tensors[name].shape
        values = np.zeros(shape, np.float32) if rng.random() < 0.5 else np.ones(shape, np.float32)
        where = slice(None) if rng.random() < 0.5 else rng.randrange(values.size)
        values.reshape(-1)[where] = np.float32(fill)
        parts.tensors[name] = StoredTensor(int(QuantType.F32), shape, values.tobytes())
    return Case(f"{names}: {fill}", parts.content())


def several(base: Base, rng: random.Random) -> Case:
    """Two or three values changed at once."""
    parts, what = base.copy(), []
    for key in rng.sample(list(parts.metadata), rng.choice((2, 3))):
        parts.metadata[key] = _value(parts.metadata[key], rng)
        what.append(f"{key} = {str(parts.metadata[key])[:80]!r}")
    return Case(", ".join(what), parts.content())


MUTATIONS: dict[Callable[[Base, random.Random], Case], int] = {
    flip_bytes: 12,
    set_field: 14,
    move_bytes: 10,
    damage_data: 6,
    set_value: 18,
    swap_values: 5,
    drop_key: 2,
    several: 4,
    change_list: 8,
    change_numbers: 6,
    change_template: 6,
    change_tensor: 5,
    spoil_weights: 4,
}
"""Kinds of damage and how often they are taken."""


def mutate(base: Base, rng: random.Random) -> tuple[str, Case]:
    """A damaged copy and the name of the kind of damage."""
    (kind,) = rng.choices(list(MUTATIONS), list(MUTATIONS.values()))
    return kind.__name__, kind(base, rng)
