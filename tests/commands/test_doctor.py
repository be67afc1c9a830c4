"""`pyllm doctor`: a report whatever is broken."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pyllm.commands import main
from pyllm.doctor import gpu, host
from pyllm.doctor.finding import Check, Finding


def test_a_report_for_people() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "| device cpu" in result.stdout and "computes" in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0].startswith("| check") and lines[-1].endswith(" 0 fail")


def test_one_object_for_programs() -> None:
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert found["ok"] is True
    names = [finding["check"] for finding in found["findings"]]
    assert {"python", "packages", "cpu", "memory", "device cpu"} <= set(names)
    assert all(set(finding) == {"check", "status", "found", "advice"} for finding in found["findings"])
    assert all(finding["advice"] for finding in found["findings"] if finding["status"] != "ok")


def test_what_failed_is_told_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> list[Finding]:
        raise OSError("libcuda.so.1: cannot open\nshared object file")

    monkeypatch.setattr(host, "CHECKS", (Check("gone", raises),))
    monkeypatch.setattr(gpu, "CHECKS", (Check("x", lambda: [Finding("x", "warn", "old | odd", "renew it")]),))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert "OSError: libcuda.so.1: cannot open" in result.stdout and "old \\| odd" in result.stdout
    assert result.stdout.splitlines()[-3:] == ["- x: renew it", "", "0 ok, 1 warn, 1 fail"]


@pytest.mark.parametrize("missing", ["numpy", "gguf", "tokenizers", "jinja2"])
def test_without_a_package_it_still_reports(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from pyllm.commands import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "| python" in done.stdout
    if missing == "numpy":
        assert done.returncode == 1 and "| device cpu" in done.stdout
