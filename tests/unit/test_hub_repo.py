"""Models of the Hugging Face hub: which files are chosen, and fetching from a server that behaves like the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pyllm.errors import UsageError
from pyllm.hub_repo import RepoFile, RepoReference, choose_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def files(*names: str) -> list[RepoFile]:
    return [RepoFile(name, 1, None) for name in names]


def chosen(name: str, *names: str) -> list[str]:
    return [file.name for file in choose_files(RepoReference.parse(name), files(*names))]


@pytest.mark.parametrize(
    ("name", "repo", "revision", "quant"),
    [
        ("hf:a/b", "a/b", None, None),
        ("hf:a/b-GGUF:Q4_K_M", "a/b-GGUF", None, "Q4_K_M"),
        ("hf:a.b/c_d@v1.2:q8_0", "a.b/c_d", "v1.2", "q8_0"),
    ],
)
def test_names(name: str, repo: str, revision: str | None, quant: str | None) -> None:
    assert RepoReference.parse(name) == RepoReference(repo, revision, quant)


@pytest.mark.parametrize("name", ["hf:", "hf:a", "hf:a/b/c", "hf:a/b:", "hf:a/ b", "hf:/b", "hf:a/b:c:d"])
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not of the form hf:OWNER/REPO"):
        RepoReference.parse(name)


def test_a_block_type_is_a_word_of_its_own() -> None:
    assert chosen("hf:a/b:q4_k", "m-Q4_K_M.gguf", "m-Q4_K.gguf", "README.md") == ["m-Q4_K.gguf"]
    assert chosen("hf:a/b:Q4_K_M", "Q4_K_M/m.gguf", "Q8_0/m.gguf") == ["Q4_K_M/m.gguf"]


def test_what_is_usual_is_taken_when_nothing_is_named() -> None:
    assert chosen("hf:a/b", "m-Q2_K.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf") == ["m-Q4_K_M.gguf"]
    assert chosen("hf:a/b", "only.gguf", "mmproj-only.gguf") == ["only.gguf"]


def test_parts_stay_together_in_order() -> None:
    names = [f"big-Q6_K-0000{n}-of-00003.gguf" for n in (2, 3, 1)]
    assert chosen("hf:a/b:Q6_K", *names, "big-Q8_0.gguf") == sorted(names)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(UsageError, match="holds no GGUF model"):
        chosen("hf:a/b", "model.safetensors")
    with pytest.raises(UsageError, match=r"no model of Q3_K; name one behind a colon: IQ2_M, Q8_0"):
        chosen("hf:a/b:Q3_K", "m-IQ2_M.gguf", "m-Q8_0.gguf")
    with pytest.raises(UsageError, match="several models; name one"):
        chosen("hf:a/b", "m-IQ2_M.gguf", "m-IQ3_M.gguf")
    with pytest.raises(UsageError, match="several models of Q8_0: big-Q8_0, small-Q8_0"):
        chosen("hf:a/b:Q8_0", "big-Q8_0.gguf", "small-Q8_0.gguf")


class FakeHub:
    """A server with one repository, owner/tiny-GGUF.

    Attributes:
        contents: file name to content.
        named: file name to the SHA-256 that the hub claims, where it differs.
        cut: stop a download after so many bytes, once.
        stall: send no more after so many bytes, and leave the connection open.
        token: who does not show it is refused; "": nobody is.
        always_cut: close each download before its first byte.
        redirects: files are elsewhere, as the hub's large ones are.
        requests: methods, paths and ranges so far.
    """

    def __init__(self) -> None:
        self.contents = {"tiny-Q8_0.gguf": bytes(range(256)) * 400, "tiny-F16.gguf": b"other", "README.md": b"text"}
        self.named: dict[str, str] = {}
        self.cut = self.stall = 0
        self.token = ""
        self.redirects = self.always_cut = False
        self.stalled, self.over = threading.Event(), threading.Event()
        self.requests: list[tuple[str, str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(False)

            def do_GET(self) -> None:
                self.answer(True)

            def answer(self, with_body: bool) -> None:
                path = self.path.split("?")[0]
                hub.requests.append((self.command, path, self.headers.get("Range", "")))
                if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                    self.send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Gated"}, with_body)
                elif path.startswith("/api/models/owner/tiny-GGUF"):
                    self.send(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"}, with_body)
                elif path.startswith("/owner/tiny-GGUF/resolve/"):
                    self.send_file(path.rsplit("/", 1)[-1], with_body, hub.redirects)
                elif path.startswith("/elsewhere/"):
                    self.send_file(path.rsplit("/", 1)[-1], with_body, False)
                else:
                    headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
                    self.send(404, b"{}", headers, with_body)

            def send_file(self, name: str, with_body: bool, redirects: bool) -> None:
                content = hub.contents[name]
                first = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") :].split("-")[0])
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hub.sha256(name)}"', "Accept-Ranges": "bytes"}
                headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
                if redirects:
                    place = f"http://localhost:{hub.server.server_address[1]}/elsewhere/{name}"
                    self.send(302, b"", headers | {"Location": place}, with_body)
                    return
                if first:
                    headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                self.send(206 if first else 200, content[first:], headers, with_body)

            def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
                self.send_response(status)
                for key, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(key, value)
                self.end_headers()
                if with_body and hub.always_cut and len(body) > 10_000:
                    self.close_connection = True
                elif with_body and hub.stall and len(body) > hub.stall:
                    self.wfile.write(body[: hub.stall])
                    hub.stalled.set()
                    hub.over.wait(60)
                    self.close_connection = True
                elif with_body and hub.cut and len(body) > hub.cut:
                    self.wfile.write(body[: hub.cut])
                    hub.cut = 0
                    self.close_connection = True
                elif with_body:
                    self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def sha256(self, name: str) -> str:
        return self.named.get(name) or hashlib.sha256(self.contents[name]).hexdigest()

    def info(self) -> dict[str, Any]:
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "lfs": {"sha256": self.sha256(name), "size": len(content), "pointerSize": 1},
            }
            for name, content in self.contents.items()
        ]
        return {"id": "owner/tiny-GGUF", "modelId": "owner/tiny-GGUF", "sha": COMMIT, "siblings": siblings}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    fake = FakeHub()
    yield fake
    fake.over.set()
    fake.server.shutdown()
    fake.server.server_close()


def pull(hub: FakeHub, home: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pyllm pull` in a process of its own: huggingface_hub reads its environment when it is imported."""
    command, settings = pulling(hub, home, name, **environment)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=settings)


def pulling(hub: FakeHub, home: Path, name: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """Its command line and environment."""
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_address[1]}", "HF_HOME": str(home)}
    settings |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", **environment}
    return [sys.executable, "-m", "pyllm", "pull", name], os.environ | settings


def test_a_model_is_fetched_once(hub: FakeHub, tmp_path: Path) -> None:
    done = pull(hub, tmp_path, "hf:owner/tiny-GGUF:Q8_0")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == hub.contents["tiny-Q8_0.gguf"]
    assert "hf:owner/tiny-GGUF: tiny-Q8_0.gguf" in done.stderr
    hub.requests.clear()
    again = pull(hub, tmp_path, "hf:owner/tiny-GGUF:Q8_0")
    assert again.stdout == done.stdout
    assert not [request for request in hub.requests if request[0] == "GET" and "resolve" in request[1]]


def test_a_cut_download_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.contents["tiny-Q8_0.gguf"] = os.urandom(22 << 20)
    hub.cut = 15 << 20
    done = pull(hub, tmp_path, "hf:owner/tiny-GGUF")
    assert Path(done.stdout.strip()).read_bytes() == hub.contents["tiny-Q8_0.gguf"]
    assert any(wanted == f"bytes={15 << 20}-" for _, _, wanted in hub.requests)


def test_another_file_than_the_hub_names_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.named["tiny-Q8_0.gguf"] = "0" * 64
    done = pull(hub, tmp_path, "hf:owner/tiny-GGUF:Q8_0")
    assert done.returncode
    assert "tiny-Q8_0.gguf is not the file that the hub names (SHA-256); try again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("blobs/*0000000000*"))


def test_errors_are_one_line(hub: FakeHub, tmp_path: Path) -> None:
    missing = pull(hub, tmp_path, "hf:nobody/nothing")
    assert missing.returncode
    assert "Error: hf:nobody/nothing was not found; check the name" in missing.stderr
    assert "Traceback" not in missing.stderr
    offline = pull(hub, tmp_path / "empty", "hf:owner/tiny-GGUF", HF_HUB_OFFLINE="1")
    assert offline.returncode
    assert "Error: hf:owner/tiny-GGUF" in offline.stderr
    assert "Traceback" not in offline.stderr


def test_a_killed_download_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.contents["tiny-Q8_0.gguf"] = os.urandom(24 << 20)
    hub.stall = 23 << 20
    command, settings = pulling(hub, tmp_path, "hf:owner/tiny-GGUF")
    with subprocess.Popen(command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        assert hub.stalled.wait(60)
        while not any(path.stat().st_size >= 20 << 20 for path in tmp_path.rglob("*.pyllm-part")):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    hub.stall = 0
    hub.requests.clear()
    done = pull(hub, tmp_path, "hf:owner/tiny-GGUF")
    assert Path(done.stdout.strip()).read_bytes() == hub.contents["tiny-Q8_0.gguf"]
    (wanted,) = [wanted for method, path, wanted in hub.requests if method == "GET" and "resolve" in path]
    assert int(wanted.removeprefix("bytes=").removesuffix("-")) >= 20 << 20
    assert not list(tmp_path.rglob("*part*"))


def test_files_that_are_elsewhere(hub: FakeHub, tmp_path: Path) -> None:
    hub.redirects = True
    done = pull(hub, tmp_path, "hf:owner/tiny-GGUF:F16")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == b"other"
    assert any(path.startswith("/elsewhere/") for _, path, _ in hub.requests)


def test_parts_are_fetched_together(hub: FakeHub, tmp_path: Path) -> None:
    parts = {f"big-Q6_K-0000{n}-of-00003.gguf": bytes([n]) * 1000 for n in (1, 2, 3)}
    hub.contents |= parts
    first = Path(pull(hub, tmp_path, "hf:owner/tiny-GGUF:Q6_K").stdout.strip())
    assert first.name == min(parts)
    assert {path.name: path.read_bytes() for path in first.parent.iterdir()} == parts
    (first.parent / max(parts)).unlink()
    missing = pull(hub, tmp_path, "hf:owner/tiny-GGUF:Q6_K", HF_HUB_OFFLINE="1")
    assert missing.returncode == 1 and missing.stdout == ""


def test_models_that_ask_for_terms(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    refused = pull(hub, tmp_path, "hf:owner/tiny-GGUF:F16")
    assert refused.returncode == 1 and "asks for its terms to be accepted" in refused.stderr
    allowed = pull(hub, tmp_path, "hf:owner/tiny-GGUF:F16", HF_TOKEN=hub.token)
    assert allowed.returncode == 0, allowed.stderr
    assert hub.token not in allowed.stderr + refused.stderr


def test_without_the_hub_what_was_fetched_is_taken(hub: FakeHub, tmp_path: Path) -> None:
    done = pull(hub, tmp_path, "hf:owner/tiny-GGUF:Q8_0")
    offline = pull(hub, tmp_path, "hf:owner/tiny-GGUF:Q8_0", HF_HUB_OFFLINE="1")
    assert offline.stdout == done.stdout and "taking what was fetched before" in offline.stderr
    gone = pull(hub, tmp_path, "hf:owner/tiny-GGUF:Q8_0", HF_ENDPOINT="http://127.0.0.1:9")
    assert gone.stdout == done.stdout and "taking what was fetched before" in gone.stderr
    other = pull(hub, tmp_path, "hf:owner/tiny-GGUF:F16", HF_HUB_OFFLINE="1")
    assert other.returncode == 1 and other.stdout == "" and "Traceback" not in other.stderr


def test_the_package_is_named_where_it_is_missing(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    missing = pull(hub, tmp_path, "hf:owner/tiny-GGUF", PYTHONPATH=path)
    assert missing.returncode == 1
    assert missing.stderr == "Error: hf: names need huggingface_hub; pip install 'pyllm[hub]'\n"


def test_two_at_a_time_fetch_it_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.contents["tiny-Q8_0.gguf"] = os.urandom(24 << 20)
    command, settings = pulling(hub, tmp_path, "hf:owner/tiny-GGUF")
    both = [subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=120)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(paths) == 1
    assert Path(paths.pop()).read_bytes() == hub.contents["tiny-Q8_0.gguf"]
    assert len([path for method, path, _ in hub.requests if method == "GET" and "resolve" in path]) == 1


def test_a_server_that_sends_nothing_is_given_up(hub: FakeHub, tmp_path: Path) -> None:
    hub.always_cut = True
    done = pull(hub, tmp_path, "hf:owner/tiny-GGUF:Q8_0")
    assert done.returncode == 1 and "the connection broke" in done.stderr and "the next run goes on" in done.stderr
