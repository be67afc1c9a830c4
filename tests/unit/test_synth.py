"""Synthetic models: sizes of the weights, the types they are stored in, what other readers make of the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from pyllm.errors import PyllmError, UsageError
from pyllm.gguf_split import open_model
from pyllm.llm import LLM
from pyllm.quants import FORMATS, QuantType, dequantize
from pyllm.sampling import SamplingParams
from pyllm.synth import writer
from pyllm.synth.blocks import drawable_type, drawable_types, random_rows, stored_type
from pyllm.synth.real_shapes import SHAPES
from pyllm.synth.vocabulary import make_vocabulary
from pyllm.synth.writer import layouts, write_model
from tests.tiny_shape import TINY, TINY_EXPERTS, TINY_GEMMA, TINY_GROUPED, TINY_HYBRID, TINY_HYBRID_EXPERTS, TINY_TIED


@pytest.mark.parametrize("name", drawable_types())
def test_weights_have_the_size_asked_for_and_no_mean(name: str) -> None:
    qtype, std = QuantType[name], 1 / 64
    rows = list(random_rows(np.random.default_rng(1), qtype, 512, 1024, std))
    values = np.concatenate([dequantize(packed, qtype) for packed in rows])
    assert values.shape == (512, 1024)
    assert np.std(values) == pytest.approx(std, rel=0.03)
    assert abs(np.mean(values)) < 0.01 * std


def test_scales_that_a_float16_can_hold() -> None:
    """The widest rows of any model need the smallest scales: they must not become 0, or lose their digits."""
    for name in drawable_types():
        (packed,) = random_rows(np.random.default_rng(2), QuantType[name], 4, 12288, 12288**-0.5)
        assert np.std(dequantize(packed, QuantType[name])) == pytest.approx(12288**-0.5, rel=0.05)


def test_types_of_rows_that_are_no_whole_number_of_blocks() -> None:
    assert stored_type(QuantType.Q4_K, 576) == QuantType.Q5_0
    assert stored_type(QuantType.Q5_K, 576) == QuantType.Q5_1
    assert stored_type(QuantType.Q6_K, 576) == QuantType.Q8_0
    assert stored_type(QuantType.Q4_K, 512) == QuantType.Q4_K
    assert stored_type(QuantType.Q8_0, 24) == QuantType.F16
    assert all(stored_type(drawable_type(name), 96) in FORMATS for name in drawable_types())


def test_a_type_that_cannot_be_drawn() -> None:
    assert drawable_type("q4_k") == QuantType.Q4_K
    with pytest.raises(UsageError, match="cannot be drawn as 'I32'; choose one of F32, F16"):
        drawable_type("I32")


def test_sizes_of_the_real_models() -> None:
    def parameters(name: str) -> int:
        return sum(tensor.num_elements for tensor in SHAPES[name].tensors())

    assert parameters("qwen3-8b") == 8_190_735_360
    assert parameters("qwen3-0.6b") == 596_049_920
    assert parameters("qwen3-30b-a3b") == 30_532_122_624
    assert parameters("smollm2") == 134_515_008
    assert parameters("gemma3-270m") == 268_098_176
    assert 0.75e9 < parameters("qwen3.5-0.8b") < 0.9e9
    assert 34e9 < parameters("qwen3.6-35b-a3b") < 36e9
    assert 79e9 < parameters("qwen3-coder-next") < 81e9


def test_vocabulary_is_whole_and_has_no_token_twice() -> None:
    for size in (259, 320, 49_152, 151_936):
        vocabulary = make_vocabulary(size)
        assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == len(vocabulary.types) == size
        known = set(vocabulary.tokens)
        assert all(set(merge.split(" ")) <= known for merge in vocabulary.merges)
    for size in (258, 1_000_000):
        with pytest.raises(UsageError, match="cannot be made up"):
            make_vocabulary(size)


@pytest.mark.parametrize(
    "shape",
    [TINY, TINY_TIED, TINY_EXPERTS, TINY_HYBRID, TINY_HYBRID_EXPERTS, TINY_GROUPED, TINY_GEMMA, TINY.with_layers(1)],
    ids=lambda shape: f"{shape.architecture}-{shape.num_layers}",
)
def test_pyllm_runs_it_and_its_text_comes_back(shape, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, shape, QuantType.Q4_K)
    with LLM(path, device="cpu") as llm:
        text = "Grüße, world! 你好 12"
        assert llm.detokenize(llm.tokenize(text)) == text
        logits = llm.logits(range(40))
        assert np.isfinite(logits).all()
        assert 0.3 < logits.std() < 3
        assert len(list(llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3)))) <= 3


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = tmp_path / "tiny.gguf"
    plan = write_model(path, TINY, QuantType.Q8_0)
    reader = GGUFReader(path)
    assert [(t.name, t.tensor_type.name, tuple(reversed(t.shape.tolist()))) for t in reader.tensors] == [
        (layout.tensor.name, layout.qtype.name, layout.tensor.shape) for layout in plan
    ]
    with open_model(path) as gguf:
        for tensor in reader.tensors:
            assert gguf.tensor_data(tensor.name).tobytes() == tensor.data.tobytes()
    assert reader.fields["qwen3.attention.head_count_kv"].contents() == 2
    assert reader.fields["tokenizer.ggml.pre"].contents() == "qwen2"
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 320


def test_norms_are_near_one_and_stay_f32(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, TINY_EXPERTS, QuantType.Q4_0)
    with open_model(path) as gguf:
        norm = gguf.tensors["blk.1.ffn_norm.weight"]
        assert norm.qtype == QuantType.F32
        assert np.mean(dequantize(gguf.tensor_data(norm.name), norm.qtype)) == pytest.approx(1, abs=0.05)
        assert gguf.tensors["blk.0.ffn_gate_inp.weight"].qtype == QuantType.F32
        assert gguf.tensors["blk.0.ffn_up_exps.weight"].shape == (8, 64, 96)


def test_the_seed_says_all(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(files, (1, 1, 2), strict=True):
        write_model(path, TINY, QuantType.Q6_K, seed)
    first, again, other = (path.read_bytes() for path in files)
    assert first == again != other and len(first) == len(other)


def test_progress_ends_at_the_size_of_the_weights(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_model(tmp_path / "tiny", TINY, QuantType.Q4_1, progress=lambda done, total: calls.append((done, total)))
    total = sum(layout.num_bytes for layout in layouts(TINY, QuantType.Q4_1))
    assert calls[-1] == (total, total)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_what_was_begun_is_removed(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    path.write_text("was there before")

    def stop(done: int, total: int) -> None:
        raise error

    with pytest.raises(type(error)):
        write_model(path, TINY, QuantType.F16, progress=stop)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny"] and path.read_text() == "was there before"


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: _Usage())
    with pytest.raises(PyllmError, match=r"takes 4\.6 GB, its disk has 1\.2 GB free"):
        write_model(tmp_path / "big", SHAPES["qwen3-8b"], QuantType.Q4_K)
    assert not list(tmp_path.iterdir())


class _Usage:
    free = 1_200_000_000
