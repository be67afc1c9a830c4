"""Whatever breaks off in the middle, the engine's next answers are right, and no caller pays for another's failure."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from pyllm.errors import DeviceError, PyllmError, StaleKVError, UsageError
from pyllm.llm import LLM
from tests.engine import greedy, open_engine, tokens
from tests.refdata import PROMPTS, model_path, reference

REF = reference("llama-a")
PROMPT = {name: REF[f"{name}_tokens"].tolist() for name in PROMPTS}
ANSWER = {name: REF[f"{name}_greedy"].tolist() for name in PROMPTS}


def engine(**options: Any) -> LLM:
    return open_engine(model_path("llama-a-f32"), **{"n_seqs": 2, "ubatch_size": 32, "page_size": 8, **options})


def check_sound(llm: LLM) -> None:
    """Nothing is lost, and answers are those of a fresh engine."""
    assert tokens(llm.generate(PROMPT["n70"], greedy(8))) == ANSWER["n70"][:8]
    assert np.abs(llm.logits(PROMPT["n5"]) - REF["n5_logits_last8"]).max() < 1e-3
    assert llm._cache.num_free_pages == llm._cache.num_pages
    assert not llm._scheduler._running
    assert not llm._scheduler._waiting


class Injector:
    """Raises at the k-th call of a function that an engine uses."""

    def __init__(self, owner: object, name: str, error: BaseException) -> None:
        self.calls, self.at, self.error = 0, -1, error
        self._original: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self._original(*args, **kwargs)


@pytest.mark.parametrize("what", ["launch", "empty", "pinned", "record", "copy_to_pinned"])
@pytest.mark.parametrize("error", [MemoryError(), ValueError("injected"), KeyboardInterrupt()], ids=repr)
def test_a_failure_at_every_call_of_the_device(what: str, error: BaseException) -> None:
    """A neighbour is decoding; another request fails somewhere in its first steps."""
    step = {"launch": 23, "copy_to_pinned": 1, "record": 1, "pinned": 1, "empty": 1}[what]
    at = 1
    while True:
        with engine() as llm:
            neighbour = llm.generate(PROMPT["n5"], greedy(12))
            found = [next(neighbour).token for _ in range(3)]
            injector = Injector(llm._device, what, error)
            injector.at = at
            with suppress(PyllmError, MemoryError, KeyboardInterrupt, ValueError):
                tokens(llm.generate(PROMPT["n70"], greedy(3)))
            reached = injector.calls >= at
            injector.at = -1
            try:
                found += tokens(neighbour)
                assert found == ANSWER["n5"][:12]
            except PyllmError:
                assert found == ANSWER["n5"][: len(found)]  # it was part of the ubatch that could not be queued
            check_sound(llm)
        if not reached:
            return
        at += step


def test_a_workspace_that_cannot_grow_keeps_what_it_has() -> None:
    with engine(n_seqs=1) as llm:
        tokens(llm.generate(PROMPT["n5"], greedy(2)))
        before = llm.logits(PROMPT["n5"])
        injector = Injector(llm._device, "empty", MemoryError())
        failures = 0
        while True:  # each attempt gets one buffer further than the last, and must leave the others as they are
            injector.calls, injector.at = 0, 2
            with suppress(PyllmError):
                llm.logits(PROMPT["n70"])
                break
            failures += 1
            injector.at = -1
            assert (llm.logits(PROMPT["n5"]) == before).all()
            buffers = [(b.ctypes.data, b.ctypes.data + b.nbytes) for b in llm._executor.workspace._buffers.values()]
            buffers.sort()
            assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(buffers))
        assert failures > 5


def test_a_page_with_two_owners_is_caught_by_its_tags() -> None:
    with engine() as llm:
        victim, intruder = llm.generate(PROMPT["n70"], greedy(32)), llm.generate(PROMPT["n5"], greedy(32))
        next(victim)
        kv = llm._scheduler._running[0].kv
        llm._cache._references[kv.pages[2]] = 0
        llm._cache._free.appendleft(kv.pages[2])  # as if a page had been given up and kept
        for stream in (intruder, victim):  # nobody can say whose the page is: both end
            with pytest.raises(StaleKVError):
                tokens(stream)


def test_ctrl_c_at_random_moments() -> None:
    rng = np.random.default_rng(0)
    with engine() as llm:
        for _ in range(30):
            neighbour = llm.generate(PROMPT["n5"], greedy(20))
            found = [next(neighbour).token]
            timer = threading.Timer(rng.uniform(0, 0.03), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                tokens(llm.generate(PROMPT["n300"], greedy(32)))
                while timer.is_alive():
                    time.sleep(0.001)
                time.sleep(0.01)
            except KeyboardInterrupt:
                pass
            timer.join()
            found += tokens(neighbour)
            assert found == ANSWER["n5"][:20]
            check_sound(llm)


def test_one_callers_mistake_is_not_anothers() -> None:
    with engine() as llm:
        good = llm.generate(PROMPT["n5"], greedy(20))
        found = [next(good).token]
        for bad in ([99999], [-1], [2**70]):
            with pytest.raises(UsageError, match="token id"):
                next(llm.generate(bad, greedy(2)))
        broken = llm.generate(PROMPT["n70"], greedy(20))
        next(broken)
        request = next(r for r in llm._scheduler._running if r.num_prompt == 70)
        request.sampler.sample = lambda row, history: 1 / 0
        found += tokens(good)
        assert found == ANSWER["n5"][:20]
        with pytest.raises(PyllmError, match="ZeroDivisionError"):
            tokens(broken)
        check_sound(llm)


@pytest.mark.parametrize("moment", range(1, 160, 7))
def test_the_garbage_collector_may_close_an_iterator_in_the_middle_of_a_step(moment: int) -> None:
    with engine(n_seqs=3) as llm:
        kept, dropped = llm.generate(PROMPT["n5"], greedy(12)), llm.generate(PROMPT["n70"], greedy(12))
        found = [next(kept).token]
        next(dropped)
        cycle: list[Any] = [dropped]
        cycle.append(cycle)
        del dropped, cycle
        calls = 0
        launch = llm._device.launch

        def collecting(op: Any, *args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                gc.collect()
            launch(op, *args)

        llm._device.launch = collecting
        found += tokens(kept)
        assert found == ANSWER["n5"][:12]
        llm._device.launch = launch
        gc.collect()
        check_sound(llm)


def test_closing_while_other_threads_generate() -> None:
    for delay in (0.0, 0.005, 0.02):
        llm, failures = engine(), []

        def run(llm: LLM = llm, failures: list[BaseException] = failures) -> None:
            try:
                while True:
                    tokens(llm.generate(PROMPT["n70"], greedy(32)))
            except DeviceError:
                pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(delay)
        llm.close()
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive()
        assert failures == []


def test_a_fork_is_told_that_it_cannot_use_the_engine() -> None:
    with engine() as llm:
        child = os.fork()
        if child == 0:
            try:
                llm.logits(PROMPT["n5"])
                os._exit(1)
            except DeviceError as error:
                os._exit(0 if "fork" in str(error) else 2)
            except BaseException:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check_sound(llm)


def test_an_interrupt_ends_only_what_was_there_before() -> None:
    with engine() as llm:
        first = llm.generate(PROMPT["n5"], greedy(20))
        next(first)
        llm.interrupt()
        second = llm.generate(PROMPT["n70"], greedy(8))
        assert tokens(second) == ANSWER["n70"][:8]
        assert list(first)[-1].finish_reason == "interrupted"
        check_sound(llm)


@pytest.mark.parametrize("inputs", ["copy", "zero-copy"])
@pytest.mark.parametrize("kind", ["interrupt", "Ctrl-C"])
def test_an_interrupt_at_any_point(inputs: str, kind: str) -> None:
    """At launches all over the prompt and the first tokens; the next answer is that of a fresh engine, to the bit."""
    options = {"inputs": inputs, "ubatch_size": 16, "inflight": 4, "n_seqs": 1}
    with engine(**options) as fresh:
        expected = fresh.logits(PROMPT["n5"])
    with engine(**options) as llm:
        llm._device.graphs = False  # else steps are replayed soon, without launches of their own
        launch, calls, interrupted = llm._device.launch, 0, 0

        def counting(op: Any, *args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == moment and kind == "interrupt":
                llm.interrupt()
            elif calls == moment:
                os.kill(os.getpid(), signal.SIGINT)
            launch(op, *args)

        moment = 1
        while True:
            calls, llm._device.launch = 0, counting
            try:
                chunks = list(llm.generate(PROMPT["n70"], greedy(6)))
                interrupted += chunks[-1].finish_reason == "interrupted"
            except KeyboardInterrupt:
                interrupted += 1
            llm._device.launch = launch
            if calls < moment:
                break
            moment += 17
            assert (llm.logits(PROMPT["n5"]) == expected).all()
            assert tokens(llm.generate(PROMPT["n5"], greedy(4))) == ANSWER["n5"][:4]
        assert interrupted > 5
        check_sound(llm)
