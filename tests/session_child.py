"""Processes that tests of session files start.

    python -m tests.session_child killed FOLDER POINTS
    python -m tests.session_child shared FOLDER BUDGET
    python -m tests.session_child resumed FILE MODEL TOKEN...

Each prints one JSON object. The first two start engines in children of their own, so that what is imported is so once.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pyllm.llm import LLM
from pyllm.prompt_cache import disk_tier
from pyllm.prompt_cache.folder import left_behind, session_files
from pyllm.prompt_cache.session_file import SessionReader
from tests.engine import greedy, open_engine, tokens
from tests.refdata import model_path

MODELS = ("llama-a-f32", "qwen3next-b-eqheads-bf16")
LENGTHS = (9, 17, 30)  # tokens of conversations that are saved
STARTING, SAVING, LOADING = range(3)


def engine(name: str, **options: Any) -> LLM:
    return open_engine(model_path(name), **{"ctx_size": 96, "page_size": 8, "prefix_cache": True, **options})


def conversation(number: int, length: int) -> list[int]:
    """Unlike all others from the first token on."""
    return [3 + number, *range(5, 4 + length)]


def forked(work: Callable[[], None]) -> int:
    """Run it in a child, which ends with it."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def check_whole(path: Path) -> None:
    """Read every section and compare its checksum.

    Raises:
        SessionError: the file is damaged.
    """
    with SessionReader(path) as reader:
        memory = np.empty(max(section.num_bytes for section in reader.sections.values()), np.uint8)
        for name in reader.sections:
            if name != "checksums":
                reader.check(name, reader.read(name, memory))


def save_and_load(name: str, folder: Path, doing: mmap.mmap) -> None:
    """Until it is killed. Begins by loading what others left when they were."""
    with engine(name) as llm:
        for number, length in enumerate(LENGTHS):
            path = folder / f"{number}.session"
            if path.exists():
                llm.load_session(path)
            else:
                tokens(llm.generate(conversation(number, length), greedy(1)))
        while True:
            for number, length in enumerate(LENGTHS):
                doing[0] = SAVING
                llm.save_session(folder / f"{number}.session", conversation(number, length))
                doing[0] = LOADING
                llm.load_session(folder / f"{number}.session")


def killed(folder: Path, points: int) -> dict[str, int]:
    """Kill an engine again and again; see how many times it was at what, and how many files were being written."""
    counts, left = [0, 0, 0], 0
    for point in range(points):
        place = folder / MODELS[point % 2]
        place.mkdir(exist_ok=True)
        before = set(left_behind(place))
        doing = mmap.mmap(-1, 1)
        child = forked(lambda place=place, doing=doing: save_and_load(place.name, place, doing))  # type: ignore[misc]
        while doing[0] == STARTING and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.001)
        time.sleep(random.Random(point).uniform(0, 0.04))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"the engine failed at point {point}")
        counts[doing[0]] += 1
        left += bool(set(left_behind(place)) - before)
        for path in session_files(place):
            check_whole(path)
    return {"saving": counts[SAVING], "loading": counts[LOADING], "left": left}


def talk_beside_another(folder: Path, budget: int, seed: int) -> None:
    """Conversations that another process has as well, in another order; each is asked for twice."""
    disk_tier.IDLE = 0.0
    order = random.Random(seed).choices(range(6), k=18)
    answers: dict[int, list[int]] = {}
    with engine(MODELS[0], ctx_size=200, cache_dir=folder, cache_disk=budget) as llm:  # room for two
        for number in order:
            answer = tokens(llm.generate(conversation(number, 70), greedy(3)))
            if answers.setdefault(number, answer) != answer:
                raise AssertionError(f"conversation {number} went on with {answer}, before with {answers[number]}")


def shared(folder: Path, budget: int) -> dict[str, int]:
    """Two processes that write, read and remove files of one folder."""
    children = [forked(lambda seed=seed: talk_beside_another(folder, budget, seed)) for seed in (1, 2)]  # type: ignore[misc]
    largest = removed = 0
    seen: set[tuple[str, int]] = set()
    while children:
        files = []
        for path in session_files(folder):
            with contextlib.suppress(FileNotFoundError):
                files.append((path.name, path.stat()))
        largest = max(largest, sum(status.st_size for _, status in files))
        now = {(name, status.st_ino) for name, status in files}
        removed += len(seen - now)
        seen = now
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.remove(child)
            if status:
                raise SystemExit("one of the two failed")
        time.sleep(0.002)
    return {"removed": removed, "largest": largest}


def resumed(path: Path, name: str, *following: str) -> dict[str, Any]:
    """Go on with a session and more tokens."""
    with engine(name) as llm:
        known = llm.load_session(path).token_ids
        answer = tokens(llm.generate([*known, *map(int, following)], greedy(8)))
        return {"known": known, "answer": answer, **llm.stats}


def main() -> None:
    command, path, *others = sys.argv[1:]
    if command == "resumed":
        found: dict[str, Any] = resumed(Path(path), *others)
    else:
        found = {"killed": killed, "shared": shared}[command](Path(path), int(others[0]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
