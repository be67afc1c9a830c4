"""A benchmark from beginning to end: opens engines that are large enough, checks the answers, runs the points."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pyllm.bench.accuracy import LAYERS_WITH_EXPERTS, Figure, compare
from pyllm.bench.ceilings import Ceilings, measure_ceilings
from pyllm.bench.engine import EngineUnderTest, Prefix
from pyllm.bench.plan import Plan, Point, Row
from pyllm.bench.traffic import Traffic, traffic_of
from pyllm.device import open_device
from pyllm.engine_options import PAGE_SIZE
from pyllm.errors import UsageError
from pyllm.gguf_split import open_model
from pyllm.llm import LLM, EngineOptions

CHECKED_TOKENS = 16
CHECKED_DEPTH = PAGE_SIZE - CHECKED_TOKENS // 2  # the checked tokens begin in one page and end in the next
_CHECKED_CONTEXT = 3 * PAGE_SIZE  # two pages, and one into which the first is copied
SMALL_FILE = 10**9  # bytes: below that a comparison with the CPU takes seconds
_MEMORY_SHARE = 0.9  # of the device's that weights and K/V rows may take; the rest is for buffers

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ModelFacts:
    """The file under test, known before any weight is read.

    Attributes:
        num_bytes: of all tensors.
        types: number of tensors of each block type, the one with most bytes first.
        context_length: tokens that it was trained for.
        num_layers: of the main pass.
        recurrent: some layers keep a state instead of rows.
    """

    path: Path
    num_bytes: int
    types: dict[str, int]
    context_length: int
    num_layers: int
    traffic: Traffic
    recurrent: bool = False


def read_model(path: Path) -> ModelFacts:
    """Read a file's header.

    Raises:
        ModelFileError: it is damaged, or not a model that pyllm runs.
    """
    from pyllm.models import check_model

    with open_model(path) as gguf:
        device = open_device("cpu")
        try:
            config = check_model(gguf, device)
        finally:
            device.close()
        sizes: dict[str, list[int]] = {}
        for info in gguf.tensors.values():
            sizes.setdefault(info.qtype.name, []).append(info.nbytes)
        ordered = sorted(sizes.items(), key=lambda item: -sum(item[1]))
        return ModelFacts(
            Path(gguf.path),
            sum(map(sum, sizes.values())),
            {name: len(of_type) for name, of_type in ordered},
            config.context_length,
            config.num_layers,
            traffic_of(gguf),
            gguf.arch_key("ssm.state_size") in gguf.metadata,
        )


@dataclass
class Results:
    """What is known so far; complete when the session has ended.

    Attributes:
        device: name and description of the device under test; empty before it was opened.
        left_out: points that do not fit into the device's memory.
    """

    device: tuple[str, str] = ("", "")
    figures: list[Figure] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: list[Point] = field(default_factory=list)
    ceilings: Ceilings | None = None

    @property
    def passed(self) -> bool:
        """Whether the answers were right."""
        return all(figure.passed for figure in self.figures)


@dataclass(frozen=True)
class Session:
    """One benchmark.

    Attributes:
        reference: "cpu", "paths" or "auto"; see `pyllm bench --help`.
        device, graphs: of the engine; see `LLM`.
        options: further settings of the engine; context and sequences are the session's business.
        ctx_size: the least context; None: what the plan needs.
        opened: called with the device's description when the model is loaded for the first time.
        progress: called with (runs done, runs in all, what comes next).
    """

    model: ModelFacts
    plan: Plan
    device: str = "auto"
    graphs: bool = True
    options: EngineOptions = field(default_factory=EngineOptions)
    ctx_size: int | None = None
    reference: str = "auto"
    seed: int = 0
    opened: Callable[[str], None] = lambda description: None
    progress: Progress = lambda done, total, words: None

    def check(self) -> None:
        """Refuse what cannot be run, before any weight is read.

        Raises:
            UsageError: the model's context or the one asked for is too short.
        """
        longest = max(self.plan.all_points(), key=_rows)
        room = min(self.ctx_size or self.model.context_length, self.model.context_length)
        if _rows(longest) > room:
            limit = "-c is" if room < self.model.context_length else f"{self.model.path} was trained for"
            raise UsageError(f"{longest} needs a context of {_rows(longest)} tokens; {limit} {room}")

    def run(self, results: Results) -> None:
        """Run everything, adding to `results` as it comes, so that it holds what is known whenever this breaks off."""
        counter = itertools.count()
        points = [point for depth in self.plan.depths for point in self.plan.alone(depth)]
        with self._engine(points) as engine:
            llm = engine.llm
            results.device = llm.device_name, llm.device_description
            self.opened(llm.device_description)
            if results.device[0] == "gpu":
                results.ceilings = measure_ceilings(with_gemm=False)
            self._check_answers(engine, results)
            kv_bytes = engine.kv_bytes_per_row
            memory = llm._device.memory_bytes
            self._measure(engine, points, results, counter)
        for depth in self.plan.depths:
            together = self.plan.together(depth)
            fitting = [point for point in together if self._needs(point, kv_bytes) <= _MEMORY_SHARE * memory]
            results.left_out += [point for point in together if point not in fitting]
            if fitting:
                with self._engine(fitting) as engine:
                    self._measure(engine, fitting, results, counter)

    def _needs(self, point: Point, kv_bytes_per_row: float) -> float:
        return self.model.num_bytes + point.sequences * self._context([point]) * kv_bytes_per_row

    def _context(self, points: list[Point]) -> int:
        """Tokens per sequence."""
        return min(max(*map(_rows, points), self.ctx_size or 0, _CHECKED_CONTEXT), self.model.context_length)

    @contextmanager
    def _engine(self, points: list[Point]) -> Iterator[EngineUnderTest]:
        """An engine that holds the largest of some points."""
        sequences = max(point.sequences for point in points)
        if self.model.recurrent:  # prefixes have states, too, and for a moment the one that one of them is made of
            sequences = 2 * sequences + 1
        options = replace(self.options, ctx_size=self._context(points), n_seqs=sequences)
        self.progress(0, self._num_steps, "loading")
        device = open_device(self.device, self.graphs)
        with LLM.with_options(self.model.path, device, options) as llm:
            yield EngineUnderTest(llm, self.seed)

    # speed

    def _measure(self, engine: EngineUnderTest, points: list[Point], results: Results, counter: Iterator[int]) -> None:
        """Points in ascending order of depth: what one depth left in the cache is lengthened for the next."""
        warm_ups = self._warm_ups(engine.llm.device_name)
        prefixes = [Prefix([], None)] * max(point.sequences for point in points)
        for depth, of_depth in itertools.groupby(points, key=lambda point: point.depth):
            if depth:
                self.progress(next(counter), self._num_steps, f"filling the cache with {depth} tokens")
                longer = []
                for prefix in prefixes:
                    longer.append(engine.lengthen(prefix, depth))
                    engine.drop(prefix)
                prefixes = longer
            for point in of_depth:
                row = Row(point)
                for run in range(warm_ups + self.plan.repeats):
                    self.progress(next(counter), self._num_steps, str(point))
                    seconds = engine.seconds(point, prefixes[: point.sequences])
                    if run >= warm_ups:
                        row.rates.append(point.tokens * point.sequences / seconds)
                        if results.ceilings is not None:
                            self._count_bytes(engine, row)
                        if run == warm_ups:
                            results.rows.append(row)

    def _warm_ups(self, device_name: str) -> int:
        """Runs that are not counted: on a GPU the first compiles kernels, and the second records the steps."""
        return 2 if self.graphs and device_name == "gpu" else 1

    @property
    def _num_steps(self) -> int:
        """Runs, and times that the cache is filled; for the progress bar, which is told the device by its option."""
        warm_ups = self._warm_ups("cpu" if self.device == "cpu" else "gpu")
        runs = len(self.plan.all_points()) * (warm_ups + self.plan.repeats)
        fillings = sum(1 for depth in self.plan.depths if depth) * (2 if self.plan.together(0) else 1)
        return runs + fillings

    def _count_bytes(self, engine: EngineUnderTest, row: Row) -> None:
        """What decoding reads of a GPU's memory. The CPU holds weights in another form than the file."""
        if row.point.kind != "decode":
            return
        point = row.point
        mean_rows = point.depth + (point.tokens + 1) / 2
        step = self.model.traffic.step_bytes(point.sequences, mean_rows, engine.kv_bytes_per_row)
        row.bytes_per_second = step * statistics.median(row.rates) / point.sequences

    # answers

    def _check_answers(self, engine: EngineUnderTest, results: Results) -> None:
        self.progress(0, self._num_steps, "checking the answers")
        has_experts = self.model.traffic.expert_bytes > 0
        layers = min(self.model.num_layers, LAYERS_WITH_EXPERTS if has_experts else self.model.num_layers)
        where = "" if layers == self.model.num_layers else f", behind {layers} of {self.model.num_layers} layers"
        with engine.first_layers(layers):
            tokens, decode, prefill = self._decode_and_prefill(engine, 0 if has_experts else CHECKED_DEPTH)
        results.figures.append(compare(f"decode against prefill{where}", decode, prefill, has_experts))
        if self._compares_with_cpu(engine.llm.device_name):
            options = EngineOptions(ctx_size=len(tokens) + 1, kv_type=self.options.kv_type)
            cpu = LLM.with_options(self.model.path, open_device("cpu"), options)
            with cpu, EngineUnderTest(cpu).first_layers(layers):
                expected = cpu.logits(tokens)[-len(decode) :, : decode.shape[1]]
            results.figures.append(compare(f"prefill against the CPU{where}", prefill, expected, has_experts))
            results.figures.append(compare(f"decode against the CPU{where}", decode, expected, has_experts))

    def _decode_and_prefill(self, engine: EngineUnderTest, depth: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Tokens, and the logits of the last ones as they are decoded and as a prompt; behind `depth` others where
        there is room."""
        depth = depth if engine.llm.ctx_size >= _CHECKED_CONTEXT else 0
        prefix = engine.lengthen(Prefix([], None), depth)
        tokens = [*prefix.token_ids, *engine.random_tokens(min(CHECKED_TOKENS, engine.llm.ctx_size - 1))]
        decode = engine.decoded_rows(prefix, tokens[depth:])
        engine.drop(prefix)
        columns = slice(decode.shape[1])  # those that have a text
        return tokens, decode, engine.llm.logits(tokens)[depth:, columns]

    def _compares_with_cpu(self, device_name: str) -> bool:
        if self.reference == "auto":
            return device_name != "cpu" and self.model.num_bytes < SMALL_FILE
        return self.reference == "cpu"


def _rows(point: Point) -> int:
    """Rows of one sequence. At a depth inside of a page it takes one page more: that page is copied before a run."""
    return point.rows + (PAGE_SIZE if point.depth % PAGE_SIZE else 0)
