#!/usr/bin/env python3
"""Six conversations that take turns on room for four, saved and restored all the time, compared with uncached runs.

Each round the conversations go on in a new order, four at a time, and everything that was used least recently has to
leave the device: its rows go to the host's memory and come back when their conversation does. One conversation of each
round is also saved to a file, forgotten, and loaded again. An engine that keeps nothing answers the same prompts.

    python examples/prompt_cache_soak.py [MODEL] [--device cpu] [--restores 1000] [--filler 250] [--ram 128]

Columns: rounds; requests; those that went on from what was restored, the sum of the next two: pages or states brought
back from the host's memory, a file that was loaded; those that went on from rows that had never left the device; bytes
moved between device and host for requests and loads; faults that the checks on the device recorded; answers that differ
from the uncached engine's beyond what rounding can do; pinned memory that rows are kept in, and the most of it so far;
memory of this process. Status 1 with a fault, a mismatch, more pinned memory than --ram allows, or memory that grows in
the last 500 restores: before that what is kept reaches --ram, and a GPU's steps of all shapes are recorded.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyllm import LLM, SamplingParams
from pyllm.errors import StaleKVError
from pyllm.hub import resolve

CONVERSATIONS = 6
SEQUENCES = 4
ANSWER = 8  # tokens
NEW = 6  # tokens of a question
TURNS = 4  # that a context has room for: few, so that what the device holds are fewer conversations than there are
MARGIN = 0.05  # of log-probabilities: below it, rounding may choose the other token
GROWTH = 1.02  # of memory, over the last restores
LAST = 500  # restores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--filler", type=int, default=250, help="tokens that each conversation begins with")
    parser.add_argument("--restores", type=int, default=0, help="go on until so many; --rounds does not count then")
    parser.add_argument("--ram", type=int, default=128, help="MB for rows that left the device")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    ctx_size = options.filler + TURNS * (ANSWER + NEW)
    path = resolve(options.model)
    common = {"device": options.device, "ctx_size": ctx_size, "n_seqs": SEQUENCES}
    with LLM(path, prefix_cache=True, cache_ram=options.ram << 20, **common) as cached, LLM(path, **common) as plain:
        return Soak(cached, plain, options.filler, options.seed).run(options.rounds, options.restores)


class Soak:
    """The run. Conversations begin anew when their context is full."""

    def __init__(self, cached: LLM, plain: LLM, filler: int, seed: int) -> None:
        self.cached, self.plain, self.filler = cached, plain, filler
        self.random = random.Random(seed)
        self.talks = [self.beginning() for _ in range(CONVERSATIONS)]
        self.requests = self.from_host = self.from_files = self.on_device = 0
        self.moved = self.faults = self.mismatches = 0
        self.memory: list[int] = []
        self.restores_by_round: list[int] = []

    @property
    def restores(self) -> int:
        return self.from_host + self.from_files

    def beginning(self) -> list[int]:
        return self.words(self.filler)

    def words(self, count: int) -> list[int]:
        return [self.random.randrange(self.cached.tokenizer.vocab_size) for _ in range(count)]

    def run(self, rounds: int, restores: int) -> int:
        heads = f"{'rounds':>7}{'requests':>10}{'restores':>10}{'host':>7}{'files':>7}{'device':>8}{'MB moved':>10}"
        print(f"{heads}{'faults':>8}{'mismatches':>12}{'MB kept':>9}{'high':>6}{'MB':>8}")
        done = 0
        while done < rounds if not restores else self.restores < restores:
            order = self.random.sample(range(CONVERSATIONS), CONVERSATIONS)
            for start in range(0, CONVERSATIONS, SEQUENCES):
                self.go_on(order[start : start + SEQUENCES])
            self.through_a_file(order[0])
            done += 1
            self.memory.append(memory_of_process())
            self.restores_by_round.append(self.restores)
            if done & (done - 1) == 0 or done % 50 == 0:
                self.report(done)
        self.report(done)
        last = [
            memory for memory, count in zip(self.memory, self.restores_by_round, strict=True) if self.is_late(count)
        ]
        grows = self.restores > LAST and last[-1] > GROWTH * last[0]
        if grows:
            print(f"memory grew from {last[0] >> 20} to {last[-1] >> 20} MB in the last {LAST} restores")
        over = self.kept("high_water_bytes") > self.kept("budget_bytes")
        if over:
            print(f"more pinned memory than the {self.kept('budget_bytes') >> 20} MB that are allowed")
        return int(bool(self.faults or self.mismatches or grows or over))

    def go_on(self, chosen: list[int], was_loaded: bool = False) -> None:
        """A turn of each of these, side by side."""
        params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, logprobs=2)
        prompts = [self.talks[index] for index in chosen]
        try:
            found, stats = answers(self.cached, prompts, params)
        except StaleKVError as error:
            print(error)
            self.faults += 1
            return
        self.count(stats, was_loaded)
        expected, _ = answers(self.plain, prompts, params)
        for index, one, other in zip(chosen, found, expected, strict=True):
            self.mismatches += not agree(one, other)
            self.talks[index] = self.talks[index] + [token for token, _ in one] + self.words(NEW)
            if len(self.talks[index]) + ANSWER + NEW > self.cached.ctx_size:
                self.talks[index] = self.beginning()

    def count(self, stats: list[Mapping[str, Any]], was_loaded: bool) -> None:
        self.moved += max(one["bytes_moved"] for one in stats)  # they ran together, and each counts all copies
        for one in stats:
            self.requests += 1
            if one["cached_tokens"]:
                self.from_files += was_loaded
                self.from_host += one["restored_bytes"] > 0 and not was_loaded
                self.on_device += not one["restored_bytes"] and not was_loaded

    def through_a_file(self, index: int) -> None:
        """Saved, forgotten, and loaded."""
        talk = self.talks[index]
        if len(talk) <= self.filler:
            return  # it has just begun: nothing of it is known
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "talk.session"
            self.cached.save_session(file, talk)
            self.cached.forget(talk)
            self.moved += self.cached.load_session(file).num_bytes
        self.go_on([index], was_loaded=True)
        assert self.cached.stats["cached_tokens"], "a conversation that was loaded was computed again"

    def report(self, done: int) -> None:
        print(
            f"{done:>7}{self.requests:>10}{self.restores:>10}{self.from_host:>7}{self.from_files:>7}{self.on_device:>8}"
            f"{self.moved >> 20:>10}{self.faults:>8}{self.mismatches:>12}{self.kept('bytes') >> 20:>9}"
            f"{self.kept('high_water_bytes') >> 20:>6}{self.memory[-1] >> 20:>8}",
            flush=True,
        )

    def is_late(self, restores: int) -> bool:
        return restores >= self.restores - LAST

    def kept(self, figure: str) -> int:
        """Of all pinned memory for rows and states."""
        return sum(pool[figure] for pool in self.cached.stats["memory"].values())


Answer = list[tuple[int, float]]  # tokens, with how much likelier each was than the next


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list[Answer], list[Mapping[str, Any]]]:
    """The answers to these prompts, computed side by side, and the stats of each."""
    running = [llm.begin(prompt, params) for prompt in prompts]
    found: list[Answer] = [[] for _ in prompts]
    while any(generation.stats()["finish_reason"] is None for generation in running):
        llm.advance()
    for generation, answer in zip(running, found, strict=True):
        while (chunk := generation.take()) is not None:
            if chunk.token is not None:
                (_, best), (_, second) = chunk.top_logprobs
                answer.append((chunk.token, best - second))
    return found, [generation.stats() for generation in running]


def agree(found: Answer, expected: Answer) -> bool:
    """The same tokens, up to the first that rounding may decide."""
    for (token, margin), (other, _) in zip(found, expected, strict=True):
        if margin < MARGIN:
            return True
        if token != other:
            return False
    return True


def memory_of_process() -> int:
    """Resident bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
