"""`pyllm kernels`: what GPU kernels there are, and whether they compute on this machine what they should."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pyllm.commands import kernels_bench, kernels_build
from pyllm.commands.console import note, one_line, progress_bar

if TYPE_CHECKING:
    from pyllm.device import Device
    from pyllm.kernel_check import Case, Verdict


@click.group("kernels")
def command() -> None:
    """List, test, measure and build the GPU kernels.

    \b
    pyllm kernels list
    pyllm kernels test mul_mat
    pyllm kernels bench mul_mat
    """


command.add_command(kernels_bench.command)
command.add_command(kernels_build.command)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_kernels(as_json: bool) -> None:
    """List the kernels: their entry points, the ops that launch them, the block types that they read.

    \b
    pyllm kernels list
    pyllm kernels list --json
    """
    from pyllm.kernel_facts import kernel_facts, targets

    kernels, supported = kernel_facts(), targets()
    if as_json:
        click.echo(json.dumps({"targets": supported, "kernels": [vars(kernel) for kernel in kernels]}))
        return
    rows = [(k.name, *(" ".join(names) or "-" for names in (k.entries, k.ops, k.block_types))) for k in kernels]
    for line in _table([("kernel", "entry points", "ops", "block types"), *rows]):
        click.echo(line)
    click.echo(f"\nfor {', '.join(supported)}")


@command.command("test")
@click.argument("name", required=False)
@click.option(
    "--device",
    type=click.Choice(["all", "gpu", "emulated"]),
    default="all",
    show_default=True,
    help="Where; all: on every kind that is here.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the inputs.")
@click.option("--small", is_flag=True, help="Leave out sizes of real models, as for a memory checker.")
@click.pass_context
def test_kernels(ctx: click.Context, name: str | None, device: str, seed: int, small: bool) -> None:
    """Test the kernel or op NAME, or all of them.

    Each case is compared with the op's definition, computed on the CPU in float64: the error may be twice that of a
    plain implementation with the same roundings. Emulated means: on the CPU, as GPUs with each vendor's matrix
    instructions would do it, kernels that only Hopper has as that; it needs g++ or clang++. The status is 1 when a
    case fails.

    \b
    pyllm kernels test
    pyllm kernels test mul_mat --device gpu
    """
    from pyllm.kernel_cases import hopper_kernels
    from pyllm.kernel_check import kernel_devices
    from pyllm.kernel_facts import cases_named

    if seed < 0:
        raise click.BadParameter("it must not be negative", param_hint="--seed")
    cases = cases_named(name)
    devices, missing = kernel_devices(device, hopper=name is not None and name in hopper_kernels())
    for reason in missing:
        note(f"Left out: {reason}")
    rows: list[tuple[str, ...]] = [("device", "op", "case", "error", "limit", "ok")]
    failures = []
    jobs = [(where, [case for case in cases if not case.large or (where == "gpu" and not small)]) for where in devices]
    total, done = sum(len(of_device) for _, of_device in jobs), 0
    ran_on = []
    with progress_bar("testing", "case") as progress:
        for where, of_device in jobs:
            tested = _Tested(devices[where])
            for case in of_device:
                verdict = tested.check(case, seed)
                rows.append(_row(where, case, verdict))
                if not verdict.passed:
                    failures.append(f"{where}: {case}: {verdict.problem or 'the error is too large'}")
                done += 1
                progress(done, total, case.op.name)
            ran_on.append(tested.close())
    for line in _table(rows):
        click.echo(line)
    for failure in failures:
        note(failure)
    note(f"{total - len(failures)} passed, {len(failures)} failed; ran on {', '.join(ran_on)}")
    ctx.exit(1 if failures else 0)


class _Tested:
    """A device under test. It is opened anew after an error, which it may not outlive."""

    def __init__(self, open_device: Any) -> None:
        self._open = open_device
        self._device: Device = open_device()

    def check(self, case: Case, seed: int) -> Verdict:
        from pyllm.kernel_check import check_case

        verdict = check_case(self._device, case, seed)
        if verdict.problem:
            self.close()
            self._device = self._open()
        return verdict

    def close(self) -> str:
        """Returns what was closed."""
        from contextlib import suppress

        from pyllm.errors import DeviceError

        with suppress(DeviceError):  # it has been reported
            self._device.close()
        return self._device.description


def _row(where: str, case: Case, verdict: Verdict) -> tuple[str, ...]:
    numbers = (f"{value:.2g}" for value in (verdict.error, verdict.limit))
    return (where, case.op.name, case.name, *numbers, "yes" if verdict.passed else "NO")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [one_line(line.rstrip()) for line in lines]
