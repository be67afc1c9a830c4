"""`pyllm doctor`: what works on this machine, and what to do about what does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pyllm.commands.console import one_line, progress_bar
from pyllm.commands.table import markdown_table

if TYPE_CHECKING:
    from pyllm.doctor.finding import Finding


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Look at this machine: Python, packages, memory, disks, drivers, CuPy; and try each device.

    On each GPU a kernel is compiled and run, pinned memory is read in place, a copy has to wait for the work before it,
    and a graph is replayed; results are checked. "warn" means that pyllm works, but not all of it or not well: without
    CuPy or a GPU it runs on the CPU. The status is 1 when a check failed, else 0.

    \b
    pyllm doctor
    pyllm doctor --json
    """
    findings = list(_findings())
    if as_json:
        click.echo(json.dumps({"ok": not _failed(findings), "findings": [asdict(finding) for finding in findings]}))
    else:
        for line in _lines(findings):
            click.echo(line)
    ctx.exit(1 if _failed(findings) else 0)


def _findings() -> Iterator[Finding]:
    from pyllm.doctor import gpu, host
    from pyllm.doctor.finding import guarded

    checks = (*host.CHECKS, *gpu.CHECKS)
    with progress_bar("looking", "check") as progress:
        for done, check in enumerate(checks):
            progress(done, len(checks), check.name)
            yield from guarded(check)


def _failed(findings: list[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def _lines(findings: list[Finding]) -> Iterator[str]:
    rows = [(finding.check, finding.status, finding.found) for finding in findings]
    yield from markdown_table([("check", "status", "found"), *rows])
    advice = [finding for finding in findings if finding.advice]
    if advice:
        yield ""
    for finding in advice:
        yield one_line(f"- {finding.check}: {finding.advice}")
    yield ""
    counts = {status: sum(finding.status == status for finding in findings) for status in ("ok", "warn", "fail")}
    yield ", ".join(f"{count} {status}" for status, count in counts.items())
