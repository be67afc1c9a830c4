"""How much faster a GPU answers short lines side by side than one sequence alone, and how long it has nothing to do.

    python benchmarks/batch_gpu.py MODEL [--parallel 256] [--tokens 128] [--rounds 3] [--batch-invariant] [--ragged]

One sequence decodes as many tokens by itself; then `parallel` lines run through the batch layer, as `pyllm batch` runs
them, in one process: the first rounds compile and record and are not counted, and texts whose tokens an earlier round
has found are forgotten. The device counts as busy from an event before a step's first launch to one behind its last;
steps whose launches are not recorded leave gaps in between, which count as busy. A round has three parts: until all
lines that run together are begun, until the last step ends, and what is behind it. Some lines are then run alone: with
--batch-invariant all tokens have to be equal; otherwise the first that differs must have been nearly as likely as the
other. The status is 1 where not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pyllm.batch.collecting import collected_seldom
from pyllm.batch.input import open_source
from pyllm.batch.lines import LineReader
from pyllm.batch.output import Output
from pyllm.batch.runner import Feed, Runner, Tally
from pyllm.device import open_device
from pyllm.hub import resolve
from pyllm.llm import LLM, EngineOptions
from pyllm.request import Request
from pyllm.sampling import SamplingParams

UNCOUNTED = 3  # rounds: compiled, and buffers sized, in the first; then run once as it is; then recorded
ALONE = 8  # lines that are compared
MARGIN = 0.1  # of log-probabilities, as in the tests


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--parallel", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ubatch", type=int, default=None)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--ragged", action="store_true", help="twice as many lines, of half as many tokens up to all")
    parser.add_argument("--device", default="gpu")
    return parser.parse_args()


class BusyTime:
    """Events around each step of a GPU; without a GPU it knows nothing."""

    def __init__(self, llm: LLM) -> None:
        self._device: Any = llm._device
        self._events: list[tuple[Any, Any]] = []
        self._first: Any = None
        self._first_at = 0.0
        if llm.device_name == "gpu":
            self._device.step = self._step

    @contextmanager
    def _step(self) -> Iterator[None]:
        first = self._event()
        yield
        self._events.append((first, self._event()))

    def _event(self) -> Any:
        event = self._device._cupy.cuda.Event()
        event.record(self._device.stream)
        return event

    def start(self) -> None:
        """From here on. Nothing is queued."""
        self._device.synchronize()
        self._events.clear()
        if self._device.name == "gpu":
            self._first, self._first_at = self._event(), time.perf_counter()

    def take(self) -> list[tuple[float, float]]:
        """Start and end of each step since `start`, in seconds of time.perf_counter(); none without a GPU."""
        self._device.synchronize()
        elapsed = self._device._cupy.cuda.get_elapsed_time if self._events else None
        return [
            (self._first_at + elapsed(self._first, start) / 1e3, self._first_at + elapsed(self._first, end) / 1e3)  # type: ignore[misc]
            for start, end in self._events
        ]


@dataclass
class Round:
    """One pass over all lines.

    Attributes:
        steps: start and end of each on the device, as far as that is known.
        started, begun, ended: when it started, when all lines that run together had been begun, when it ended.
    """

    tally: Tally
    steps: Sequence[tuple[float, float]]
    started: float
    begun: float
    ended: float

    @property
    def parts(self) -> list[tuple[float, float]]:
        """Seconds of each part, and of them those in which the device had nothing to do."""
        marks = [self.started, self.begun, max([self.begun, *(end for _, end in self.steps)]), self.ended]
        return [(end - start, end - start - self._busy(start, end)) for start, end in pairwise(marks)]

    def _busy(self, start: float, end: float) -> float:
        return sum(max(0.0, min(end, until) - max(start, since)) for since, until in self.steps)


def params(options: argparse.Namespace, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True, seed=0, **more)


def alone(llm: LLM, options: argparse.Namespace, ids: list[int]) -> tuple[list[int], list[Any], float]:
    """Tokens, what was likeliest at each, and tokens/s of decoding; of one sequence, nothing else running."""
    llm.forget()
    likeliest = [chunk.top_logprobs for chunk in llm.generate(ids, params(options, logprobs=40))]
    for _ in range(UNCOUNTED + 1):
        llm.forget()
        tokens = [chunk.token for chunk in llm.generate(ids, params(options))]
    rate = (len(tokens) - 1) / llm.stats["decode_seconds"]
    return [token for token in tokens if token is not None], likeliest, rate


def lines_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The input."""
    for number in range(options.parallel * (2 if options.ragged else 1)):
        limit = options.tokens - number * 37 % (options.tokens // 2) if options.ragged else options.tokens
        yield {"prompt": f"Write a sentence about the number {number}.", "max_tokens": limit}


def run_lines(llm: LLM, options: argparse.Namespace, folder: Path, busy: BusyTime) -> tuple[Round, list[Request]]:
    """All lines side by side; their requests have the tokens."""
    source = open_source(str(folder / "in.jsonl"), None, ())
    reader = LineReader(params(options), source.has_columns, None, None, False)
    requests: list[Request] = []
    begun_at: list[float] = []
    begin = llm.begin

    def begun(*given: Any) -> Any:
        generation = begin(*given)
        requests.append(generation._request)
        begun_at.append(time.perf_counter())
        return generation

    llm.forget()
    llm.tokenizer._encoded.clear()
    with Output(folder / "out.jsonl", overwrite=True) as output:
        output.prepare()
        llm.begin = begun  # type: ignore[method-assign]
        runner = Runner(llm, reader, output, options.parallel, "model", lambda tally: None)
        busy.start()
        started = time.perf_counter()
        runner.run(Feed(source.entries()))
        ended = time.perf_counter()
        llm.begin = begin  # type: ignore[method-assign]
    return Round(runner.tally, busy.take(), started, begun_at[options.parallel - 1], ended), requests


def differs(found: list[int], expected: list[int], likeliest: list[Any]) -> str:
    """In what a line differs from itself alone: "", "unclear" where both tokens were as likely, or "wrong"."""
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    if at is None:
        return ""
    known = dict(likeliest[at])
    return "unclear" if known.get(found[at], -9e9) > known[expected[at]] - MARGIN else "wrong"


def main() -> int:
    options = arguments()
    settings = EngineOptions(
        ctx_size=options.tokens + 128,
        n_seqs=options.parallel,
        kv_type=options.kv_type,
        ubatch_size=options.ubatch,
        prefix_cache=True,
        cache_pages=False,
        batch_invariant=options.batch_invariant,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (json.dumps(line) + "\n" for line in lines_of(options))
        (folder / "in.jsonl").write_text("".join(lines), encoding="utf-8")
        with LLM.with_options(resolve(options.model), open_device(options.device), settings) as llm:
            busy = BusyTime(llm)
            with collected_seldom():  # as the command does
                rounds = [run_lines(llm, options, folder, busy) for _ in range(UNCOUNTED + options.rounds)][UNCOUNTED:]
            requests = rounds[-1][1]
            by_prompt = {tuple(r.token_ids[: r.num_prompt]): r.token_ids[r.num_prompt :] for r in requests}
            chosen = list(by_prompt)[:: max(1, len(by_prompt) // ALONE)][:ALONE]
            found = [alone(llm, options, list(prompt)) for prompt in chosen]
            say(llm, options, [one for one, _ in rounds], statistics.median(rate for *_, rate in found))
    verdicts = [differs(by_prompt[prompt], *one[:2]) for prompt, one in zip(chosen, found, strict=True)]
    wrong = verdicts.count("wrong") + (verdicts.count("unclear") if options.batch_invariant else 0)
    same, unclear = verdicts.count(""), verdicts.count("unclear")
    print(f"{len(verdicts)} lines alone: {same} the same, {unclear} part where two tokens are as likely, {wrong} wrong")
    return int(wrong > 0)


def say(llm: LLM, options: argparse.Namespace, rounds: list[Round], single: float) -> None:
    def median(value: Any) -> float:
        return statistics.median(map(value, rounds))

    rate = median(lambda one: one.tally.completion_tokens / one.tally.seconds)
    words = "batch-invariant, " if options.batch_invariant else ""
    words += f"{options.parallel} lines at a time, of {'up to ' * options.ragged}{options.tokens} tokens"
    print(f"{llm.device_description}: {words}, {len(rounds)} rounds")
    print(f"one sequence: {single:.1f} tokens/s; lines: {rate:.1f}, {rate / single:.1f} times as fast")
    print(f"seconds: {median(lambda one: one.tally.seconds):.3f}, steps: {median(lambda one: len(one.steps)):.0f}")
    print(
        f"share of the batch layer: {100 * median(lambda one: 1 - one.tally.engine_seconds / one.tally.seconds):.2f} %"
    )
    if not rounds[0].steps:
        return
    idle = median(lambda one: sum(unused for _, unused in one.parts) / (one.ended - one.started))
    print(f"device idle: {100 * idle:.1f} %")
    for index, name in enumerate(("until all are begun", "until the last step ends", "behind it")):
        seconds, unused = (median(lambda one, i=i, index=index: one.parts[index][i]) for i in (0, 1))
        print(f"  {name}: {1e3 * seconds:.1f} ms, idle {1e3 * unused:.1f} ms")


if __name__ == "__main__":
    sys.exit(main())
