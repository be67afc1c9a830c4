"""Models of the Hugging Face hub: which files are chosen, and fetching from a server that behaves like the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
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
        requests: methods, paths and ranges so far.
    """

    def __init__(self) -> None:
        self.contents = {"tiny-Q8_0.gguf": bytes(range(256)) * 400, "tiny-F16.gguf": b"other", "README.md": b"text"}
        self.named: dict[str, str] = {}
        self.cut = 0
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
                if path.startswith("/api/models/owner/tiny-GGUF"):
                    self.send(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"}, with_body)
                elif path.startswith("/owner/tiny-GGUF/resolve/"):
                    self.send_file(path.rsplit("/", 1)[-1], with_body)
                else:
                    headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
                    self.send(404, b"{}", headers, with_body)

            def send_file(self, name: str, with_body: bool) -> None:
                content = hub.contents[name]
                first = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") :].split("-")[0])
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hub.sha256(name)}"', "Accept-Ranges": "bytes"}
                headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
                if first:
                    headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                self.send(206 if first else 200, content[first:], headers, with_body)

            def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
                self.send_response(status)
                for key, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(key, value)
                self.end_headers()
                if with_body and hub.cut and len(body) > hub.cut:
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
    fake.server.shutdown()
    fake.server.server_close()


def pull(hub: FakeHub, home: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pyllm pull` in a process of its own: huggingface_hub reads its environment when it is imported."""
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_address[1]}", "HF_HOME": str(home)}
    settings |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-m", "pyllm", "pull", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | settings)


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
    hub.contents["tiny-Q8_0.gguf"] = os.urandom(22 << 20)  # the package keeps pieces of 10 MiB
    hub.cut = 15 << 20
    done = pull(hub, tmp_path, "hf:owner/tiny-GGUF")
    if done.returncode:  # the package gave up; the next run goes on
        assert "hf:owner/tiny-GGUF" in done.stderr
        done = pull(hub, tmp_path, "hf:owner/tiny-GGUF")
    assert Path(done.stdout.strip()).read_bytes() == hub.contents["tiny-Q8_0.gguf"]
    assert any(wanted.startswith(f"bytes={10 << 20}-") for _, _, wanted in hub.requests)


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
