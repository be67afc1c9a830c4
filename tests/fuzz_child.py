"""Opens damaged models, one after the other, in one process with limits; run by tests/unit/test_fuzz_models.py.

    python -m tests.fuzz_child SEED FIRST COUNT FOLDER

Opens the models FIRST to FIRST + COUNT - 1 of a seed. Each must open and run, or be refused with an error of one line.
On stdout: one JSON object for each that does neither, and one at the end that sums up. What is worked on stands on
stderr, so that a crash or a hang, which end the process, can be told from their last line there.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from pyllm.commands import main as command_line
from pyllm.errors import ContextError, ModelFileError, PyllmError, SamplingError, TemplateError
from pyllm.llm import LLM
from pyllm.sampling import SamplingParams
from tests.model_mutations import Base, Case, mutate
from tests.refdata import model_path, quant_path

MODELS = (
    model_path("gemma3-a-f16"),
    model_path("qwen3moe-a-f16"),
    model_path("llama-b-rope3-f16"),
    quant_path("llama-q-Q4_K_M-mix"),
)
SECONDS = 30  # for one model: thrice what a template may take
ADDRESS_SPACE = (
    4 << 30
)  # beyond what the process has at the start: threads and their heaps reserve far more than they use
MAX_LINE = 2000
EXPECTED = (ModelFileError, TemplateError, SamplingError, ContextError)  # others would be our own faults

TEXT = "Hello, wörld! <|im_end|>\n 12 你好"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]


def use(path: Path) -> None:
    """What people do with a model: open it, continue a text, answer a message."""
    with LLM(path, device="cpu", ctx_size=128, ubatch_size=64) as llm:
        ids = llm.tokenize(TEXT, parse_special=True)
        llm.detokenize(ids)
        attempt(llm, TEXT, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        attempt(llm, MESSAGES, SamplingParams(max_tokens=2, seed=1, logprobs=2))


def attempt(llm: LLM, prompt: Any, params: SamplingParams) -> None:
    """A refused generation must leave the engine fit for the next one."""
    try:
        for _ in llm.generate(prompt, params) if isinstance(prompt, str) else llm.chat(prompt, params):
            pass
    except PyllmError as error:
        check(error)
        refused[type(error).__name__] += 1


def check(error: PyllmError) -> None:
    """Raise it on, unless it is what a user should see."""
    line = str(error)
    if not isinstance(error, EXPECTED) or not line.isprintable() or not 0 < len(line) <= MAX_LINE:
        raise AssertionError(f"not a fit message: {line[:MAX_LINE]!r}") from error


def inspect(path: Path) -> None:
    """`pyllm inspect` prints lines, also of a file that pyllm cannot run, or is refused with one line."""
    result = CliRunner().invoke(command_line, ["inspect", "--metadata", "--tensors", str(path)])
    lines = result.output.splitlines()
    sound = result.exit_code == 0 or (result.exit_code == 1 and len(lines) == 1 and lines[0].startswith("Error: "))
    if not sound or "Error: unexpected" in result.output or not all(line.isprintable() for line in lines):
        raise AssertionError(f"pyllm inspect: status {result.exit_code}, {result.output[-MAX_LINE:]!r}")


refused: Counter[str] = Counter()
"""Generations that ended with an error, by its type."""


def run_one(case: Case, path: Path) -> str:
    """How it ended: "ran", or the type of the error."""
    path.write_bytes(case.content)
    inspect(path)
    try:
        use(path)
    except PyllmError as error:
        check(error)
        return type(error).__name__
    return "ran"


def peak_bytes() -> int:
    """The most memory that this process has had. Not ru_maxrss, which counts what the parent had before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return peak << 10


def limit_address_space() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main(seed: str, first: int, count: int, folder: Path) -> None:
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    path = folder / "model.gguf"
    bases = [Base(source) for source in MODELS]
    for base in bases:
        assert run_one(Case("sound", base.content), path) == "ran" and not refused
    limit_address_space()
    # A warning would be a line that says nothing to a user.
    warnings.simplefilter("error", RuntimeWarning)
    baseline, outcomes, kinds = peak_bytes(), Counter[str](), Counter[str]()
    slowest, growth = (0.0, ""), baseline
    for index in range(first, first + count):
        base = bases[index % len(bases)]
        kind, case = mutate(base, random.Random(f"{seed}/{index}"))
        label = f"{index} {base.name} {kind}: {case.what}"
        print(label[:300].encode("unicode_escape").decode(), file=sys.stderr)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        started = time.perf_counter()
        try:
            outcome = run_one(case, path)
        except Exception:
            outcome = "failed"
            report(label, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        slowest = max(slowest, (time.perf_counter() - started, label[:300]))
        outcomes[outcome] += 1
        kinds[f"{kind} {'ran' if outcome == 'ran' else 'refused'}"] += 1
        if (peak := peak_bytes()) > growth + (16 << 20):
            print(f"peak grew by {(peak - growth) >> 20} MiB", file=sys.stderr)
            growth = peak
    gc.collect()
    summary = {"outcomes": outcomes, "kinds": kinds, "generations_refused": refused, "slowest": slowest}
    print(json.dumps(summary | {"baseline_bytes": baseline, "growth_bytes": peak_bytes() - baseline}), flush=True)


def report(label: str, trace: str) -> None:
    print(json.dumps({"failed": label, "traceback": trace}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
