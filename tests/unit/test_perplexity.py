"""Perplexity against its formula, and files of log-probabilities: exact, checked, never trusted."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyllm import kl_base, perplexity
from pyllm.errors import PyllmError, UsageError
from pyllm.kl_base import BaseReader, BaseWriter
from pyllm.llm import LLM
from pyllm.perplexity import Mean, WindowScores, cut_windows, score_window
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path, quant_path

TEXT = "The quick brown fox jumps over the lazy dog. " * 30
RNG = np.random.default_rng(5)


class Letters:
    """A tokeniser: each letter is a token."""

    vocab_size = 128
    bos_id: int | None = 1
    add_bos = True

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [*([1] if add_special else []), *text.encode()]

    def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes:
        return bytes([token_id])


class NoBos(Letters):
    add_bos = False


class Rows:
    """An engine whose logits are given, in pieces of some rows."""

    def __init__(self, logits: np.ndarray, piece: int = 3) -> None:
        self._logits, self._piece = logits, piece

    def stream_logits(self, ids: Any) -> Iterator[np.ndarray]:
        for start in range(0, len(ids), self._piece):
            yield self._logits[start : min(start + self._piece, len(ids))]


def by_the_formula(logits: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Negative log-probabilities of the second half, position by position."""
    found = []
    for position in range(len(window) // 2, len(window) - 1):
        row = [float(logit) for logit in logits[position]]
        total = math.fsum(math.exp(logit) for logit in row)
        found.append(math.log(total) - row[window[position + 1]])
    return np.array(found)


# windows


def test_windows_start_with_bos() -> None:
    windows = cut_windows(Letters(), "abcdefghij", 4)
    assert windows.tolist() == [[1, *b"abc"], [1, *b"efg"]]  # "d" gave way, "hij" is too short
    assert windows.dtype == np.int32
    assert cut_windows(NoBos(), "abcdefghij", 5).tolist() == [[*b"abcde"], [*b"fghij"]]
    assert cut_windows(NoBos(), "abcdefghij", 5, limit=1).tolist() == [[*b"abcde"]]


@pytest.mark.parametrize(("text", "size"), [("", 4), ("ab", 4), ("abcdefghi", 11)])
def test_text_that_is_too_short(text: str, size: int) -> None:
    with pytest.raises(PyllmError, match=rf"^the text has {len(text) + 1} tokens, a window takes {size}; "):
        cut_windows(Letters(), text, size)


def test_windows_that_are_too_small() -> None:
    with pytest.raises(UsageError, match="must have at least 4"):
        cut_windows(Letters(), TEXT, 3)


# scores


@pytest.mark.parametrize("size", [4, 5, 6, 17, 64])
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_scores_are_those_of_the_formula(size: int, piece: int) -> None:
    logits = RNG.normal(0, 5, (size, 40)).astype(np.float32)
    window = RNG.integers(0, 32, size).astype(np.int32)
    found = score_window(Rows(logits, piece), window, 32)
    assert len(found.nll) == perplexity.num_scored(size) > 0
    np.testing.assert_allclose(found.nll, by_the_formula(logits[:, :32], window), rtol=1e-12)


def test_small_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = RNG.normal(0, 5, (64, 32)).astype(np.float32)
    window = RNG.integers(0, 32, 64).astype(np.int32)
    whole = score_window(Rows(logits, 16), window, 32).nll
    monkeypatch.setattr(perplexity, "_BLOCK_ELEMENTS", 100)
    np.testing.assert_array_equal(score_window(Rows(logits, 16), window, 32).nll, whole)


def test_tiny_model_in_float64() -> None:
    with open_engine(model_path("llama-a-f32"), ubatch_size=32) as llm:
        windows = cut_windows(llm.tokenizer, TEXT, 128, limit=2)
        scored = [score_window(llm, window, llm.tokenizer.vocab_size) for window in windows]
        expected = [by_the_formula(llm.logits(window.tolist()), window) for window in windows]
    for window, nll in zip(scored, expected, strict=True):
        np.testing.assert_allclose(window.nll, nll, rtol=1e-9)
    everything = np.concatenate(expected)
    found = perplexity.perplexity(perplexity.all_nll(scored))
    assert found.value == pytest.approx(math.exp(everything.mean()), rel=1e-9)
    error = everything.std(ddof=1) / math.sqrt(len(everything))
    assert found.error == pytest.approx(found.value * error, rel=1e-9)


def test_logits_in_pieces_are_those_in_one() -> None:
    with open_engine(model_path("llama-a-f32"), ubatch_size=16, batch_size=64) as llm:
        ids = list(range(3, 100))
        pieces = list(llm.stream_logits(ids))
        assert [len(piece) for piece in pieces] == [16] * 6 + [1]
        np.testing.assert_array_equal(np.concatenate(pieces), llm.logits(ids))
        stream = llm.stream_logits(ids)
        next(stream)
        stream.close()
        stream = llm.stream_logits(ids)
        next(stream)
        llm.interrupt()
        assert len(list(stream)) < 6
        assert len(list(llm.stream_logits(ids))) == 7


def test_an_interrupt_can_be_forgotten() -> None:
    with open_engine(model_path("llama-a-f32")) as llm:
        chunks = llm.generate([5, 6], greedy(8))
        next(chunks)
        llm.interrupt()
        chunks.close()  # before a step met it
        llm.forget_interrupt()
        assert len(tokens(llm.generate([5, 6], greedy(8)))) == 8


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_numbers_are_refused(bad: float) -> None:
    logits = np.zeros((8, 32), np.float32)
    logits[5, 7] = bad
    with pytest.raises(PyllmError, match="not a finite number"):
        score_window(Rows(logits), np.arange(8, dtype=np.int32), 32)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, -3e38, 3e38, 0]], np.float32)
    np.testing.assert_allclose(perplexity.log_softmax(logits)[0, [0, 2]], -math.log(2))


def test_a_single_sample_has_no_error() -> None:
    assert Mean.of(np.array([2.0])) == Mean(2.0, 0.0)
    assert Mean.of(np.array([1.0, 3.0])) == Mean(2.0, 1.0)


# comparisons


class Given:
    """A base whose rows are given."""

    def __init__(self, logprobs: np.ndarray) -> None:
        self._rows = list(logprobs)

    def take(self, count: int) -> np.ndarray:
        return np.array([self._rows.pop(0) for _ in range(count)])


def test_divergence_is_that_of_the_formula() -> None:
    mine, theirs = RNG.normal(0, 3, (2, 16, 32)).astype(np.float32)
    window = RNG.integers(0, 32, 16).astype(np.int32)
    p, q = perplexity.log_softmax(theirs)[8:15], perplexity.log_softmax(mine)[8:15]
    found = score_window(Rows(mine), window, 32, base=Given(p))
    assert found.kl is not None and found.base_nll is not None and found.same_top is not None
    expected = [
        math.fsum(math.exp(a) * (a - b) for a, b in zip(row_p, row_q, strict=True))
        for row_p, row_q in zip(p, q, strict=True)
    ]
    np.testing.assert_allclose(found.kl, expected, rtol=1e-12)
    np.testing.assert_allclose(found.base_nll, by_the_formula(theirs, window), rtol=1e-12)
    np.testing.assert_array_equal(found.same_top, p.argmax(axis=1) == q.argmax(axis=1))


def test_comparison() -> None:
    values = [RNG.uniform(0, 4, (4, 50)) for _ in range(2)]
    summed = perplexity.compare([WindowScores(nll, base, kl, same > 2) for nll, base, kl, same in values])
    nll, base, kl, same = np.concatenate(values, axis=1)
    assert summed.delta.value == pytest.approx(math.exp(nll.mean()) - math.exp(base.mean()))
    assert summed.base.value == pytest.approx(math.exp(base.mean()))
    assert (summed.kl.value, summed.kl_max) == (pytest.approx(kl.mean()), kl.max())
    assert summed.kl_median == np.median(kl) and summed.kl_99 < summed.kl_max
    assert summed.same_top.value == (same > 2).mean()


def test_error_of_a_difference_knows_what_is_common() -> None:
    nll = RNG.uniform(0, 4, 200)
    summed = perplexity.compare([WindowScores(nll, nll, np.zeros(200), np.ones(200))])
    assert summed.delta == Mean(0.0, 0.0) and summed.base.error > 0


# files


WINDOWS = np.arange(3 * 16, dtype=np.int32).reshape(3, 16)
SCORED = perplexity.num_scored(16)
LOGPROBS = perplexity.log_softmax(RNG.normal(0, 5, (3 * SCORED, 128)))
VOCABULARY = kl_base.vocabulary_hash(Letters())
MODEL = {"name": "some.gguf"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "base.npz"
    with BaseWriter(path, MODEL, VOCABULARY, WINDOWS, 128) as writer:
        for window in np.split(LOGPROBS, 3):
            writer.add(window[:4])
            writer.add(window[4:])
    return path


def read_all(path: Path, windows: np.ndarray = WINDOWS, vocabulary: str = VOCABULARY, size: int = 128) -> np.ndarray:
    with BaseReader(path, vocabulary, windows, size) as reader:
        assert reader.model == MODEL
        scored = perplexity.num_scored(windows.shape[1])
        return np.concatenate([reader.take(count) for _ in windows for count in (1, scored - 1)])


def test_round_trip_stays_within_a_step(saved: Path) -> None:
    found = read_all(saved)
    steps = (LOGPROBS.max(axis=1) - LOGPROBS.min(axis=1)) / 65535
    assert (np.abs(found - LOGPROBS).max(axis=1) <= 1.01 * steps).all()
    assert perplexity.divergence(found, LOGPROBS).max() < 1e-7
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1)


def test_fewer_windows_than_saved(saved: Path) -> None:
    np.testing.assert_array_equal(read_all(saved, WINDOWS[:2]), read_all(saved)[: 2 * SCORED])


def test_files_are_plain_numpy(saved: Path) -> None:
    with np.load(saved, allow_pickle=False) as archive:
        header = json.loads(str(archive["header"]))
        codes, steps = archive["codes_00001"], archive["steps"][1]
        np.testing.assert_array_equal(archive["tokens"], WINDOWS)
    assert (header["format"], header["version"], header["window"]) == ("pyllm log-probabilities", 1, 16)
    np.testing.assert_array_equal(kl_base.decode(codes, steps), read_all(saved)[SCORED : 2 * SCORED])


@pytest.mark.parametrize("row", [[0.0] * 128, [0.0] + [-700.0] * 127, np.linspace(-1, -1.000001, 128)])
def test_unusual_rows_survive(row: Any) -> None:
    logprobs = perplexity.log_softmax(np.array([row]))
    found = kl_base.decode(*kl_base.encode(logprobs))
    np.testing.assert_allclose(found, logprobs, atol=0.006)
    assert perplexity.divergence(found, logprobs).max() < 1e-9


def test_half_written_files_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "base.npz"
    path.write_text("what was there before")
    with pytest.raises(KeyboardInterrupt), BaseWriter(path, MODEL, VOCABULARY, WINDOWS, 128) as writer:
        writer.add(LOGPROBS[:3])
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == ["base.npz"]
    assert path.read_text() == "what was there before"


def test_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(PyllmError, match=r"would take 0\.0 GB, the disk has 0\.0 GB free"):
        BaseWriter(tmp_path / "base.npz", MODEL, VOCABULARY, WINDOWS, 128)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"windows": WINDOWS + 1}, "was made with another text"),
        ({"windows": WINDOWS.reshape(6, 8)}, "has windows of 16 tokens, not 8; use -c 16"),
        ({"windows": np.tile(WINDOWS, (2, 1))}, "has 3 windows, 6 are to be scored; use --windows 3"),
        ({"vocabulary": "other"}, r"made with another vocabulary \(by some.gguf\)"),
        ({"size": 127}, "made with another vocabulary"),
    ],
)
def test_files_of_something_else(saved: Path, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(PyllmError, match=words) as raised:
        read_all(saved, **asked)
    assert str(saved) in str(raised.value) and "\n" not in str(raised.value)


def rewritten(path: Path, change: Callable[[dict[str, bytes]], object], compression: int = zipfile.ZIP_STORED) -> None:
    """Change the members of a file, keeping all checksums right."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    from io import BytesIO

    file = BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def header(**values: Any) -> Callable[[dict[str, bytes]], object]:
    """Changes values of the header."""

    def change(members: dict[str, bytes]) -> None:
        from io import BytesIO

        found = json.loads(str(np.load(BytesIO(members["header.npy"]))))
        members["header.npy"] = npy(np.array(json.dumps({**found, **values})))

    return change


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


FOREIGN = "is not a file of log-probabilities that pyllm saved"
DAMAGED = "is damaged"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("header.npy"), FOREIGN),
        (lambda m: m.update({"header.npy": b"text"}), FOREIGN),
        (lambda m: m.update({"header.npy": npy(np.array("text"))}), FOREIGN),
        (lambda m: m.update({"header.npy": npy(np.array("[]"))}), FOREIGN),
        (lambda m: m.update({"header.npy": npy(np.zeros(100_000))}), FOREIGN),
        (lambda m: m.update({"header.npy": npy(np.array([Bomb()]), True)}), FOREIGN),
        (header(format="other"), FOREIGN),
        (header(windows="3"), FOREIGN),
        (header(model=None), FOREIGN),
        (header(version=2), "has version 2 of the format, this pyllm reads 1"),
        (header(windows=2**60), DAMAGED),
        (lambda m: m.pop("tokens.npy"), DAMAGED),
        (lambda m: m.update({"tokens.npy": npy(WINDOWS.astype(np.float32))}), DAMAGED),
        (lambda m: m.update({"tokens.npy": npy(WINDOWS.ravel())}), DAMAGED),
        (lambda m: m.update({"steps.npy": npy(np.full((3, SCORED), np.nan, np.float32))}), DAMAGED),
        (lambda m: m.update({"steps.npy": npy(np.zeros((3, SCORED), np.float32))}), DAMAGED),
        (lambda m: m.pop("codes_00002.npy"), DAMAGED),
        (lambda m: m.update({"codes_00001.npy": m["codes_00001.npy"][:-2]}), DAMAGED),
        (lambda m: m.update({"codes_00001.npy": m["codes_00001.npy"] + b"  "}), DAMAGED),
        (lambda m: m.update({"codes_00001.npy": npy(np.zeros((SCORED, 64), np.uint32))}), DAMAGED),
    ],
)
def test_files_that_lie(saved: Path, change: Callable[[dict[str, bytes]], object], words: str) -> None:
    rewritten(saved, change)
    with pytest.raises(PyllmError, match=words) as raised:
        read_all(saved)
    assert str(saved) in str(raised.value) and len(str(raised.value)) < 1000


def test_compressed_files_are_refused(saved: Path) -> None:
    """A megabyte of them could expand to a thousand."""
    rewritten(saved, lambda members: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(PyllmError, match=FOREIGN):
        read_all(saved)


def test_flipped_bits_are_found(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    middle = content.index(b"codes_00001.npy") + 1000
    content[middle] ^= 1
    saved.write_bytes(content)
    with pytest.raises(PyllmError, match=DAMAGED):
        read_all(saved)


def test_any_damage_is_one_message(saved: Path) -> None:
    content = saved.read_bytes()
    for trial in range(300):
        damaged = bytearray(content)
        for place in RNG.integers(0, len(content), 1 + trial % 8):
            damaged[place] ^= int(RNG.integers(1, 256))
        saved.write_bytes(damaged[: int(RNG.integers(0, len(content)))] if trial % 3 == 0 else damaged)
        try:
            read_all(saved)
        except PyllmError as error:
            assert str(saved) in str(error)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x05\x06" + bytes(18), b"GGUF" + bytes(100)])
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(PyllmError, match=FOREIGN):
        read_all(tmp_path / "x")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nosuch"):
        with pytest.raises(PyllmError, match="cannot be read"):
            read_all(path)


def test_vocabularies_have_a_hash_each() -> None:
    class Merged(Letters):
        def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes:
            return b"ab" if token_id == 97 else b"" if token_id == 98 else bytes([token_id])

    assert kl_base.vocabulary_hash(Merged()) != VOCABULARY


def test_fingerprints() -> None:
    first, second = (kl_base.model_fingerprint(quant_path(f"llama-q-{name}")) for name in ("Q4_0", "Q4_K_M-mix"))
    assert first["name"] == "llama-q-Q4_0.gguf" and first["sha256_of_ends"] != second["sha256_of_ends"]
    assert "/" not in json.dumps(first)


def test_same_model_and_another_quantisation(tmp_path: Path) -> None:
    def scores(llm: LLM, windows: np.ndarray, **how: Any) -> perplexity.Comparison | None:
        scored = [score_window(llm, window, llm.tokenizer.vocab_size, **how) for window in windows]
        return perplexity.compare(scored) if "base" in how else None

    path = tmp_path / "base.npz"
    results = []
    for step, name in enumerate(("llama-q-Q4_K_M-mix", "llama-q-Q4_K_M-mix", "llama-q-Q4_0")):
        with open_engine(quant_path(name), ctx_size=64) as llm:
            vocabulary, size = kl_base.vocabulary_hash(llm.tokenizer), llm.tokenizer.vocab_size
            windows = cut_windows(llm.tokenizer, TEXT, 64, limit=3)
            if step == 0:
                with BaseWriter(path, MODEL, vocabulary, windows, size) as writer:
                    scores(llm, windows, save=writer.add)
            else:
                with BaseReader(path, vocabulary, windows, size) as reader:
                    results.append(scores(llm, windows, base=reader))
    same, other = results
    assert same is not None and other is not None
    assert same.kl_max < 1e-6 and same.same_top.value == 1
    assert abs(same.delta.value) < 1e-4 * same.base.value
    assert other.kl.value > 1e-3 and other.kl_max > other.kl.value and other.same_top.value < 1
