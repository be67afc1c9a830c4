"""Session files: what is saved by one engine is not computed by the next; what is damaged or foreign is not used."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllm.device.host import HostDevice
from pyllm.errors import ContextError, PyllmError, SessionError, UsageError
from pyllm.gguf_file import GGUFFile
from pyllm.kv_cache import KVCache
from pyllm.llm import LLM
from pyllm.prompt_cache.folder import session_files
from pyllm.prompt_cache.index import Held, PrefixIndex
from pyllm.prompt_cache.page_copies import PageCopies
from pyllm.prompt_cache.pinned_pool import PinnedPool
from pyllm.prompt_cache.session_file import Section, SessionReader, SessionWriter
from pyllm.prompt_cache.sessions import IN_FLIGHT, Sessions
from pyllm.prompt_cache.tree import Tree
from tests import edited_model
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path, quant_path, reference

ROOT = Path(__file__).parents[2]
PLAIN, HYBRID = "llama-a-f32", "qwen3next-b-eqheads-bf16"
IDS = {PLAIN: list(range(3, 80)), HYBRID: reference("qwen3next-b-eqheads")["n70_tokens"].tolist()}


def engine(name: str, device: HostDevice | None = None, **options: Any) -> LLM:
    return open_engine(
        model_path(name), device, **{"ctx_size": 96, "page_size": 8, "prefix_cache": True, "ubatch_size": 32, **options}
    )


@pytest.fixture(params=[PLAIN, HYBRID])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved(name: str, tmp_path: Path) -> tuple[Path, list[int]]:
    """A file, and the conversation that is in it."""
    with engine(name) as llm:
        prompt = IDS[name][:21]
        answer = tokens(llm.generate(prompt, greedy(6)))
        llm.save_session(tmp_path / "a.session", chat={"turns": ["héllo"]})
    return tmp_path / "a.session", prompt + answer


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A session of a model's file."""
    folder = tmp_path_factory.mktemp("saved")

    def path(model: Path) -> Path:
        path = folder / model.stem
        if not path.exists():
            with open_engine(model, prefix_cache=True, page_size=8) as llm:
                tokens(llm.generate(IDS[PLAIN][:20], greedy(2)))
                llm.save_session(path)
        return path

    return path


def same_as_fresh(llm: LLM, name: str, prompt: list[int]) -> None:
    with engine(name, prefix_cache=False) as fresh:
        assert tokens(llm.generate(prompt, greedy(8))) == tokens(fresh.generate(prompt, greedy(8)))


def test_another_process_computes_new_tokens_only(saved: tuple[Path, list[int]], name: str) -> None:
    path, ids = saved
    with engine(name) as llm:
        session = llm.load_session(path)
        assert session.chat == {"turns": ["héllo"]} and session.token_ids == ids[: len(session.token_ids)]
        prompt = [*ids, 9, 8, 7]
        same_as_fresh(llm, name, prompt)
        assert llm.stats["cached_tokens"] == len(session.token_ids) == len(ids) - 1
        assert llm.stats["evaluated_tokens"] == 4


def test_rows_that_are_restored_are_those_that_were_saved(name: str, tmp_path: Path) -> None:
    """Every byte of rows and states, on the device and in a file that is saved again, whatever pages they have now."""
    ids = IDS[name]
    with engine(name) as llm:
        tokens(llm.generate(ids[:21], greedy(6)))
        known = llm.save_session(tmp_path / "a").token_ids
        before = rows_and_states(llm, known)
    with engine(name) as llm:
        tokens(llm.generate(ids[40:60], greedy(3)))
        assert llm.load_session(tmp_path / "a").token_ids == known
        after = rows_and_states(llm, known)
        llm.save_session(tmp_path / "b", known)
    assert before[0] != after[0] and before[1:] == after[1:]
    assert len(before[1]) > 1000 and bool(before[2]) == (name == HYBRID)
    assert sections(tmp_path / "a") == sections(tmp_path / "b")


def rows_and_states(llm: LLM, ids: list[int]) -> tuple[tuple[int, ...], bytes, list[tuple[int, bytes]]]:
    """Pages of these tokens, the bytes of their K and V rows, and of their checkpoints by position."""
    assert llm._kept is not None
    held = llm._kept.index.hold(ids)
    assert held.length == len(ids)
    size = llm._cache.page_size
    rows = [held.pages[place // size] * size + place % size for place in range(len(ids))]
    content = b"".join(llm._device.download(array)[:, rows].tobytes() for array in (llm._cache.k, llm._cache.v))
    llm._kept.index.let_go(held)
    return held.pages, content, [(saved.position, saved.values.tobytes()) for saved in held.states]


def sections(path: Path) -> dict[str, bytes]:
    """Of a file, apart from what is said about it."""
    with SessionReader(path) as reader:
        contents = {name: np.empty(section.num_bytes, np.uint8) for name, section in reader.sections.items()}
        for name, content in contents.items():
            reader.read(name, content)
        return {name: content.tobytes() for name, content in contents.items() if name != "checksums"}


def test_pinned_memory_of_copies_is_in_the_stats(saved: tuple[Path, list[int]], name: str) -> None:
    with engine(name, ctx_size=160) as llm:
        tokens(llm.generate(IDS[name][:9], greedy(1)))
        assert llm.stats["memory"]["sessions"]["high_water_bytes"] == 0
        llm.load_session(saved[0])
        memory = llm.stats["memory"]["sessions"]
        page = llm._kept.sessions.pool.block_bytes  # type: ignore[union-attr]
        assert 0 == memory["bytes"] < memory["high_water_bytes"] <= memory["budget_bytes"] == IN_FLIGHT * page


def test_files_are_private_and_leave_nothing_else(saved: tuple[Path, list[int]]) -> None:
    path, _ = saved
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def flips(path: Path) -> list[int]:
    """Offsets in each section and in the header."""
    with SessionReader(path) as reader:
        start = reader._start
        inside = [start + section.start + section.num_bytes // 2 for section in reader.sections.values()]
        ends = [start + section.start for section in reader.sections.values()]
    rng = np.random.default_rng(0)
    return [0, 3, 8, 9, *rng.integers(8, start, 25).tolist(), *inside, *ends, path.stat().st_size - 1]


def test_one_byte_that_differs_is_found(saved: tuple[Path, list[int]], name: str) -> None:
    path, ids = saved
    content = path.read_bytes()
    with engine(name) as llm:
        expected = tokens(llm.generate(ids[:9], greedy(5)))
        free = llm._cache.num_free_pages
        for offset in flips(path):
            damaged = bytearray(content)
            damaged[offset] ^= 1 << (offset % 8)
            path.write_bytes(damaged)
            with pytest.raises(SessionError) as raised:
                llm.load_session(path)
            assert str(path) in str(raised.value) and "\n" not in str(raised.value)
            assert llm._cache.num_free_pages == free
        assert tokens(llm.generate(ids[:9], greedy(5))) == expected
        path.write_bytes(content)
        llm.load_session(path)


def test_cut_files_are_refused(saved: tuple[Path, list[int]], name: str) -> None:
    path, _ = saved
    content = path.read_bytes()
    with engine(name) as llm:
        for size in [0, 1, 7, 8, 9, *np.linspace(10, len(content) - 1, 20).astype(int).tolist()]:
            path.write_bytes(content[:size])
            with pytest.raises(SessionError, match=r"cut off|ends in|damaged"):
                llm.load_session(path)
        path.write_bytes(content + b"x")
        with pytest.raises(SessionError, match="its header says"):
            llm.load_session(path)


def test_foreign_files_are_refused(name: str, tmp_path: Path) -> None:
    with engine(name) as llm:
        for content in (b"", b"GGUF" + bytes(100), b"{}" * 50, struct.pack("<Q", 2) + b"{}", os.urandom(1000)):
            (tmp_path / "x").write_bytes(content)
            with pytest.raises(SessionError, match=r"x: "):
                llm.load_session(tmp_path / "x")
        with pytest.raises(SessionError, match="No such file"):
            llm.load_session(tmp_path / "none")
        with pytest.raises(SessionError, match="directory"):
            llm.load_session(tmp_path)


def rewritten(path: Path, **metadata: str) -> None:
    """The same sections with other metadata, and right checksums."""
    with SessionReader(path) as reader:
        sections = [Section(s.name, s.dtype, s.shape) for s in reader.sections.values() if s.name != "checksums"]
        contents = [np.empty(section.num_bytes, np.uint8) for section in sections]
        for section, content in zip(sections, contents, strict=True):
            reader.read(section.name, content)
        known = {**reader.metadata, **metadata}
    with SessionWriter(path, sections, known) as writer:
        for content in contents:
            writer.write(content)


def test_newer_files_are_refused_by_their_version(saved: tuple[Path, list[int]], name: str) -> None:
    path, _ = saved
    rewritten(path, version="2")
    with engine(name) as llm, pytest.raises(SessionError, match=r"version 2.*reads version 1; it needs a newer pyllm"):
        llm.load_session(path)


@pytest.mark.parametrize("rows", ['{"num_rows": 5}', "[]", '{"num_rows": 26, "first_position": 4, "shifted": true}'])
def test_rows_of_other_positions_are_refused(saved: tuple[Path, list[int]], name: str, rows: str) -> None:
    rewritten(saved[0], rows=rows)
    with engine(name) as llm, pytest.raises(SessionError, match=r"does not hold|no 'rows'"):
        llm.load_session(saved[0])


def test_token_ids_that_the_model_does_not_have_are_refused(saved: tuple[Path, list[int]], name: str) -> None:
    path, ids = saved
    with engine(name) as llm:
        assert llm._kept is not None
        llm._kept.sessions._vocab_size = max(ids[: len(ids) - 1])
        with pytest.raises(SessionError, match="token ids outside of the model's"):
            llm.load_session(path)
        assert llm._cache.num_free_pages == llm._cache.num_pages


def other_tokens(path: Path) -> list[str]:
    with GGUFFile(path) as gguf:
        texts = list(gguf.metadata["tokenizer.ggml.tokens"])
    return [*texts[:-1], texts[-1] + "x"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("kv type", "it is of another type of K/V rows: 'f32', not 'f16'"),
        ("page size", "it is of another page size: '8', not '16'"),
        ("architecture", "it is of another architecture: 'llama', not 'qwen3'"),
        ("quantisation", "it is of another quantisation: 'F32:.* Q4_0:.*', not 'F32:.* Q2_K:.*'"),
        ("model", "it is of another model: 'llama-a', not 'llama-z'"),
        ("rope", "it is of another model: the rope settings differ"),
        ("scaling", "it is of another model: the rope settings differ"),
        ("sizes", r"it is of another model: the settings \(sizes or others\) differ"),
        ("tokeniser", "it is of another model: the tokeniser's settings differ"),
    ],
)
def test_what_differs_is_named(what: str, words: str, saved_by: Callable[[Path], Path], tmp_path: Path) -> None:
    """And the engine that refuses goes on with what it has."""
    source, changed = model_path(PLAIN), tmp_path / "changed.gguf"
    options: dict[str, Any] = {"kv type": {"kv_type": "f16"}, "page size": {"page_size": 16}}.get(what, {})
    path = model_path("qwen3-a-bf16") if what == "architecture" else source
    metadata: dict[str, Any] = {
        "model": {"general.name": "llama-z"},
        "rope": {"llama.rope.freq_base": 20_000.0},
        "scaling": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        "sizes": {"llama.attention.layer_norm_rms_epsilon": 2e-5},
        "tokeniser": {"tokenizer.ggml.tokens": other_tokens(source)},
    }.get(what, {})
    if metadata:
        path = edited_model.write(source, changed, metadata)
    if what == "quantisation":
        source, path = quant_path("llama-q-Q4_0"), quant_path("llama-q-Q2_K")
    session = saved_by(source)
    with open_engine(path, prefix_cache=True, **{"page_size": 8, **options}) as other:
        assert other._kept is not None
        prompt = IDS[PLAIN][30:55]
        answer = tokens(other.generate(prompt, greedy(3)))
        before = other._cache.num_free_pages, other._kept.index.num_pages
        with pytest.raises(SessionError, match=words) as raised:
            other.load_session(session)
        assert str(raised.value).startswith(f"{session}: ") and "\n" not in str(raised.value)
        assert (other._cache.num_free_pages, other._kept.index.num_pages) == before
        assert tokens(other.generate(prompt, greedy(3))) == answer
        assert other.stats["cached_tokens"] == len(prompt) - 1


def test_a_model_with_one_other_weight_is_another(tmp_path: Path) -> None:
    with engine(PLAIN) as llm:
        tokens(llm.generate(IDS[PLAIN][:20], greedy(2)))
        llm.save_session(tmp_path / "s")
    changed = bytearray(model_path(PLAIN).read_bytes())
    changed[-1] ^= 1
    (tmp_path / "m.gguf").write_bytes(changed)
    with (
        open_engine(tmp_path / "m.gguf", prefix_cache=True, page_size=8) as other,
        pytest.raises(SessionError, match="another model: the weights differ"),
    ):
        other.load_session(tmp_path / "s")
    shutil.copy(model_path(PLAIN), tmp_path / "copy.gguf")
    with open_engine(tmp_path / "copy.gguf", prefix_cache=True, page_size=8) as same:
        same.load_session(tmp_path / "s")


def test_a_session_that_does_not_fit_is_refused(saved: tuple[Path, list[int]], name: str) -> None:
    with engine(name, ctx_size=16) as llm:
        with pytest.raises(ContextError, match="make the context larger"):
            llm.load_session(saved[0])
        assert llm._cache.num_free_pages == llm._cache.num_pages
        assert tokens(llm.generate(saved[1][:9], greedy(3)))


def test_a_full_disk_leaves_the_old_file(saved: tuple[Path, list[int]], name: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: at the header, in a page, and at the last checksums."""
    path, ids = saved
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with engine(name) as llm:
        tokens(llm.generate(ids, greedy(3)))
        whole = llm.save_session(tmp_path / "whole").num_bytes
        (tmp_path / "whole").unlink()
        for limit in (100, whole // 2, whole - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                with pytest.raises(SessionError, match="cannot be written: File too large"):
                    llm.save_session(path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert path.read_bytes() == before
            assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        llm.save_session(path)
        assert len(llm.load_session(path).token_ids) == len(ids) + 2


def child(*arguments: object) -> dict[str, Any]:
    """What `tests.session_child` prints."""
    command = [sys.executable, "-m", "tests.session_child", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    return json.loads(ended.stdout)


def test_a_killed_engine_leaves_whole_files(tmp_path: Path) -> None:
    """kill -9 at 50 points while engines of two kinds save and load; each begins by loading what the last one left."""
    found = child("killed", tmp_path, 50)
    assert found["saving"] > 5 and found["loading"] > 5
    assert found["left"] > 0, "none was killed in the middle of a file"
    for name in (PLAIN, HYBRID):
        with engine(name) as llm:
            for path in session_files(tmp_path / name):
                llm.load_session(path)
            llm.save_session(path, llm.load_session(path).token_ids)
        assert {path.suffix for path in (tmp_path / name).iterdir()} == {".session"}  # nor is anything left behind


def test_a_new_process_evaluates_new_tokens_only(saved: tuple[Path, list[int]], name: str) -> None:
    path, ids = saved
    found = child("resumed", path, name, 9, 8, 7)
    known = found["known"]
    assert known == ids[:-1]
    assert (found["cached_tokens"], found["evaluated_tokens"]) == (len(known), 3)
    with engine(name, prefix_cache=False) as fresh:
        assert found["answer"] == tokens(fresh.generate([*known, 9, 8, 7], greedy(8)))


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Both write, read and remove the same conversations' files at the same time."""
    budget = 300_000  # three of six
    found = child("shared", tmp_path, budget)
    assert found["removed"] > 3 and found["largest"] <= budget
    files = session_files(tmp_path)
    assert files and {path.name for path in tmp_path.iterdir()} == {".lock", *(path.name for path in files)}
    with engine(PLAIN, ctx_size=400) as llm:
        for path in files:
            llm.load_session(path)


def test_nothing_of_others_is_in_a_file(name: str, tmp_path: Path) -> None:
    """Rows behind the last token of its last page may be anybody's: they are zero."""
    with engine(name, n_seqs=1) as llm:
        tokens(llm.generate(IDS[name][:40], greedy(1)))  # fills pages
        assert llm._kept is not None
        llm._kept.index.clear()
        llm._device.poison = False
        tokens(llm.generate(IDS[name][50:61], greedy(1)))
        length = len(llm.save_session(tmp_path / "s").token_ids)
        copies = llm._kept.sessions._copies
    with SessionReader(tmp_path / "s") as reader:
        last = f"page.{(length - 1) // 8}"
        memory = np.zeros(copies.num_bytes, np.uint8)
        reader.read(last, memory)
    for part in copies._views(memory)[:2]:
        assert (part[:, (length - 1) % 8 + 1 :] == 0).all() and part.any()


def test_rows_under_a_wrong_tag_are_not_saved(name: str, tmp_path: Path) -> None:
    with engine(name) as llm:
        tokens(llm.generate(IDS[name][:20], greedy(2)))
        assert llm._kept is not None
        held = llm._kept.index.hold(IDS[name][:20])
        llm._cache.tags[0, held.pages[1] * 8] += 1
        llm._kept.index.let_go(held)
        with pytest.raises(UsageError, match=r"page 1 .*not its own"):
            llm.save_session(tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_others_run_while_a_session_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    with engine(name, n_seqs=2, ctx_size=160) as llm:
        tokens(llm.generate(IDS[name][:40], greedy(2)))
        other = llm.generate(IDS[name][50:60], greedy(60))
        expected = [next(other).token for _ in range(5)]
        llm.save_session(tmp_path / "s", IDS[name][:40])
        expected += [next(other).token for _ in range(5)]
        llm.load_session(tmp_path / "s")
        expected += tokens(other)
    with engine(name, ctx_size=160) as fresh:
        assert tokens(fresh.generate(IDS[name][50:60], greedy(60))) == expected


@pytest.mark.parametrize("what", ["saved", "loaded"])
def test_prompts_wait_for_pages_that_a_session_has(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one conversation, and another is being saved or loaded: it does not fail, it comes when that is done."""
    with engine(name, ctx_size=48) as llm, engine(name, prefix_cache=False) as fresh:
        tokens(llm.generate(IDS[name][:40], greedy(2)))
        llm.save_session(tmp_path / "s", IDS[name][:40])
        begun, go_on = threading.Event(), threading.Event()
        owner, method = (SessionWriter, "__enter__") if what == "saved" else (Sessions, "_read_states")
        real = getattr(owner, method)

        def late(*given: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return real(*given)

        monkeypatch.setattr(owner, method, late)
        if what == "saved":
            guest = threading.Thread(target=llm.save_session, args=(tmp_path / "t", IDS[name][:40]))
        else:
            llm.forget()
            guest = threading.Thread(target=llm.load_session, args=(tmp_path / "s",))
        guest.start()
        assert begun.wait(60)
        found: list[int] = []
        prompt = IDS[name][25:65]
        asker = threading.Thread(target=lambda: found.extend(tokens(llm.generate(prompt, greedy(3)))))
        asker.start()
        asker.join(0.05)
        assert asker.is_alive() and not found
        go_on.set()
        asker.join(60)
        guest.join(60)
        assert found == tokens(fresh.generate(prompt, greedy(3)))


def test_without_a_cache_there_are_no_sessions(tmp_path: Path) -> None:
    with engine(PLAIN, prefix_cache=False) as llm, pytest.raises(UsageError, match="prefix_cache=True"):
        llm.save_session(tmp_path / "s")
    with engine(PLAIN) as llm, pytest.raises(UsageError, match="nothing to save"):
        llm.save_session(tmp_path / "s")


def test_what_was_said_is_saved_where_no_row_is_kept(name: str, tmp_path: Path) -> None:
    with engine(name) as llm:
        assert llm.save_session(tmp_path / "s", IDS[name][:20], {"turns": [1]}).token_ids == []
        session = llm.load_session(tmp_path / "s")
        assert session.token_ids == [] and session.chat == {"turns": [1]}
        same_as_fresh(llm, name, IDS[name][:20])
    with engine(HYBRID if name == PLAIN else PLAIN) as llm, pytest.raises(SessionError, match="another architecture"):
        llm.load_session(tmp_path / "s")


def test_other_tools_can_read_the_container(saved: tuple[Path, list[int]]) -> None:
    content = saved[0].read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    start, stop = header["tokens"]["data_offsets"]
    ids = np.frombuffer(content[8 + length :][start:stop], "<i4")
    assert ids.tolist() == saved[1][: len(ids)]
    assert max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__") == len(content) - (
        8 + length
    )


def test_errors_are_of_one_kind() -> None:
    assert issubclass(SessionError, PyllmError)


def test_one_byte_of_the_weights_makes_another_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(model_path(PLAIN), path)
    with open_engine(path, prefix_cache=True, page_size=8) as llm:
        tokens(llm.generate(IDS[PLAIN][:20], greedy(3)))
        llm.save_session(tmp_path / "a.session")
    with GGUFFile(path) as gguf:
        data = gguf.tensor_data("blk.0.ffn_down.weight").reshape(-1).view(np.uint8)
        start = path.read_bytes().index(data.tobytes())
        place = start + len(data) // 3
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with (
        open_engine(path, prefix_cache=True, page_size=8) as llm,
        pytest.raises(SessionError, match="the weights differ"),
    ):
        llm.load_session(tmp_path / "a.session")


def test_a_model_file_that_was_replaced_has_no_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(model_path(PLAIN), path)
    with open_engine(path, prefix_cache=True, page_size=8) as llm:
        tokens(llm.generate(IDS[PLAIN][:20], greedy(3)))
        path.unlink()
        shutil.copy(model_path(PLAIN), path)
        with pytest.raises(SessionError, match="has changed since it was loaded"):
            llm.save_session(tmp_path / "a.session")


def test_a_save_that_fails_leaves_the_next_one_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(PLAIN) as llm:
        tokens(llm.generate(IDS[PLAIN], greedy(3)))
        write = SessionWriter.write

        def full(self: SessionWriter, content: np.ndarray) -> None:
            if content.dtype == np.uint8:
                raise SessionError("no space left")
            write(self, content)

        save = PageCopies.save

        def late(self: PageCopies, *args: Any) -> None:
            save(self, *args)
            llm._device.copies.stream.enqueue(lambda: time.sleep(0.02))  # type: ignore[attr-defined]

        monkeypatch.setattr(PageCopies, "save", late)
        monkeypatch.setattr(SessionWriter, "write", full)
        for _ in range(10):  # more often than there are blocks for copies, which are late
            with pytest.raises(SessionError, match="no space left"):
                llm.save_session(tmp_path / "a.session")
        monkeypatch.undo()
        llm.save_session(tmp_path / "a.session")
        llm.load_session(tmp_path / "a.session")


def test_pages_are_held_until_the_copies_of_a_save_that_failed_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(PLAIN) as llm:
        tokens(llm.generate(IDS[PLAIN], greedy(3)))
        save, let_go, copies, running = PageCopies.save, PrefixIndex.let_go, [], []

        def late(self: PageCopies, *args: Any) -> Any:
            llm._device.copies.stream.enqueue(lambda: time.sleep(0.02))  # type: ignore[attr-defined]
            copies.append(save(self, *args))
            return copies[-1]

        def full(self: SessionWriter, content: np.ndarray) -> None:
            if content.dtype == np.uint8:
                raise SessionError("no space left")

        def noted(self: PrefixIndex, held: Held) -> None:
            running.extend(not copy.query() for copy in copies)
            let_go(self, held)

        monkeypatch.setattr(PageCopies, "save", late)
        monkeypatch.setattr(SessionWriter, "write", full)
        monkeypatch.setattr(PrefixIndex, "let_go", noted)
        with pytest.raises(SessionError, match="no space left"):
            llm.save_session(tmp_path / "a.session")
        assert len(running) == IN_FLIGHT and not any(running)


@pytest.mark.parametrize("path", ["/", ".", "..", "/dev/null"])
def test_what_is_no_file_is_not_replaced(path: str) -> None:
    with engine(PLAIN) as llm:
        tokens(llm.generate(IDS[PLAIN][:20], greedy(3)))
        with pytest.raises(SessionError, match="no place for a file"):
            llm.save_session(path)
    assert not Path("/dev/null").is_file()


def test_a_pipe_is_no_session_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.session")
    with pytest.raises(SessionError, match="no ordinary file"):
        SessionReader(tmp_path / "pipe.session")


def test_blocks_of_interrupted_copies_are_used_again(
    saved: tuple[Path, list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between taking a block and noting it, more often than there are blocks."""
    path, ids = saved
    with engine(name) as llm:
        llm.load_session(path)
        sessions = llm._kept.sessions
        take = sessions._take_block

        def interrupted(*given: Any) -> Any:
            take(*given)
            raise KeyboardInterrupt

        monkeypatch.setattr(sessions, "_take_block", interrupted)
        for _ in range(IN_FLIGHT + 1):
            for again in (lambda: llm.save_session(path, ids[:-1]), lambda: llm.load_session(path)):
                with pytest.raises(KeyboardInterrupt):
                    again()
        monkeypatch.undo()
        llm.forget()
        assert llm.load_session(path).token_ids == ids[:-1]
        llm.save_session(path, ids[:-1])


@pytest.mark.parametrize("what", ["save", "load"])
def test_ctrl_c_when_a_session_begins_holds_nothing(
    saved: tuple[Path, list[int]], name: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The moment between counting it as one that has pages and noting that it does."""
    path, ids = saved
    with engine(name) as llm:
        llm.load_session(path)
        cache, sessions = llm._cache, llm._kept.sessions
        lock, left = sessions._lock, itertools.count()

        class Lock:
            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *exc_info: object) -> None:
                lock.release()
                if next(left) == 0:
                    os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(sessions, "_lock", Lock())
        with pytest.raises(KeyboardInterrupt):
            llm.save_session(path, ids[:-1]) if what == "save" else llm.load_session(path)
        monkeypatch.undo()
        assert llm._kept.index.num_guests == 0
        llm.forget()
        assert cache.num_free_pages == cache.num_pages


MOMENTS = {
    "save": [(KVCache, "hold"), (KVCache, "let_go"), (PinnedPool, "take"), (PinnedPool, "give_back")],
    "load": [(Tree, "append"), (KVCache, "hold"), (KVCache, "let_go"), (PinnedPool, "take"), (PinnedPool, "give_back")],
    "forget": [(Tree, "remove"), (KVCache, "let_go")],
    "end": [(Tree, "append"), (KVCache, "hold"), (KVCache, "release")],
}


@pytest.mark.parametrize(
    ("what", "owner", "method"),
    [(what, *moment) for what, moments in MOMENTS.items() for moment in moments],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_ctrl_c_leaves_no_change_half_done(
    saved: tuple[Path, list[int]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    owner: type,
    method: str,
) -> None:
    """In the middle of what belongs together: behind each call of a method, one after the other."""
    path, ids = saved
    with engine(name) as llm:
        cache, kept = llm._cache, llm._kept
        assert kept is not None
        called, moment, num_interrupted, original = 0, 0, 0, getattr(owner, method)

        def interrupted(self: Any, *args: Any) -> Any:
            nonlocal called
            found = original(self, *args)
            called += 1
            if called == moment:
                signal.raise_signal(signal.SIGINT)
            return found

        for moment in range(1, 5):
            llm.load_session(path)
            running = llm.generate([7, *ids], greedy(5))
            for _ in range(3):
                next(running)
            called = 0
            actions: dict[str, Callable[[], object]] = {
                "save": lambda: llm.save_session(path, ids[:-1]),
                "load": lambda: (llm.forget(), llm.load_session(path)),
                "forget": llm.forget,
                "end": running.close,  # type: ignore[attr-defined]  # (a generator)
            }
            with monkeypatch.context() as patch:
                patch.setattr(owner, method, interrupted)
                try:
                    actions[what]()
                    assert called < moment
                except KeyboardInterrupt:
                    num_interrupted += 1
            running.close()  # type: ignore[attr-defined]
            assert kept.index.num_guests == 0
            llm.forget()
            assert cache.num_free_pages == cache.num_pages == len(set(cache._free)) and not any(cache._references)
            assert llm._lock.acquire(blocking=False)
            llm._lock.release()
        assert num_interrupted
        llm.load_session(path)
        same_as_fresh(llm, name, [*ids, 9, 8, 7])
