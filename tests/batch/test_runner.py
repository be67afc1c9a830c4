"""The runner with an engine that repeats prompts."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllm.batch.collecting import collected_seldom
from pyllm.batch.input import Entry, open_source
from pyllm.batch.lines import LineReader
from pyllm.batch.output import Output
from pyllm.batch.runner import Feed, Runner, Tally
from pyllm.errors import DeviceError, PyllmError, TemplateError
from pyllm.sampling import SamplingParams
from tests.batch.stub import StubLLM

PARAMS = SamplingParams(max_tokens=None, seed=0)


class Batch:
    """Runs of one input into one output."""

    def __init__(self, folder: Path, lines: list[Any]) -> None:
        self.input, self.out = folder / "in.jsonl", folder / "out.jsonl"
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        self.input.write_text(text, encoding="utf-8", errors="surrogateescape")

    def run(self, parallel: int = 4, engine: StubLLM | None = None) -> Runner:
        engine = engine or StubLLM(n_seqs=parallel)
        with Output(self.out) as output:
            output.prepare()
            runner = Runner(engine, LineReader(PARAMS), output, parallel, "stub")
            runner.run(Feed(open_source(str(self.input)).entries()))
        assert not engine.open
        return runner

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def by_line(self) -> dict[int, Any]:
        assert len({record["line"] for record in self.records}) == len(self.records)
        return {record["line"]: record.get("text") or record["error"]["code"] for record in self.records}


def test_records(tmp_path: Path) -> None:
    batch = Batch(
        tmp_path, [{"id": "a", "prompt": "one two three", "max_tokens": 2, "logprobs": 1}, {"prompt": "x" * 9}]
    )
    tally = batch.run().tally
    usage = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 2}
    top = [{"token": 1, "text": "x", "logprob": -1.0}]
    assert batch.records[1] == {
        "id": "a",
        "line": 1,
        "text": "one two",
        "finish_reason": "length",
        "usage": usage,
        "logprobs": [{"token": 3, "text": "xxx", "logprob": -1.0, "top": top}] * 2,
        "error": None,
    }
    assert batch.records[0]["id"] == "line-2" and batch.records[0]["finish_reason"] == "stop"
    assert (tally.finished, tally.failed, tally.completion_tokens, tally.prompt_tokens) == (2, 0, 3, 4)


def test_openai_records(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "<think>a b</think> c d"}]
    batch = Batch(
        tmp_path,
        [
            {"custom_id": "a", "body": {"messages": messages, "logprobs": True, "top_logprobs": 1}},
            {"custom_id": "b", "body": {"prompt": "e f", "logprobs": 1}},
            {"custom_id": "a", "body": {"prompt": "e f"}},
            "damaged",
        ],
    )
    assert batch.run(1).tally.failed == 2
    chat, completion, duplicate, damaged = sorted(batch.records, key=lambda record: record["line"])
    assert chat["custom_id"] == "a" and chat["error"] is None and chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "stub"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "c d", "reasoning_content": "a b"}
    assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["content"]) == 4
    assert choice["logprobs"]["content"][3] == {
        "token": "x",
        "logprob": -1.0,
        "bytes": [120],
        "top_logprobs": [{"token": "x", "logprob": -1.0, "bytes": [120]}],
    }
    assert body["usage"]["total_tokens"] == 8 and body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    choice = completion["response"]["body"]["choices"][0]
    assert choice["text"] == "e f" and choice["logprobs"]["tokens"] == ["x", "x"]
    assert choice["logprobs"]["top_logprobs"] == [{"x": -1.0}] * 2
    for record, code in ((duplicate, "duplicate_id"), (damaged, "invalid_json")):
        assert record["custom_id"] is None and record["response"] is None and record["error"]["code"] == code


def test_what_is_wrong_with_a_line_stops_no_other(tmp_path: Path) -> None:
    batch = Batch(
        tmp_path,
        [
            {"id": 1, "prompt": "good"},
            "",
            "nonsense",
            {"id": "1", "prompt": "again"},
            {"id": 2, "prompt": "x " * 101},
            {"id": 3, "prompt": "half BOOM"},
            {"id": 4, "prompt": "x", "max_tokens": 0},
            {"id": 4, "prompt": "x"},
            {"id": 5, "prompt": "fine"},
        ],
    )
    tally = batch.run().tally
    assert batch.by_line() == {
        1: "good",
        3: "invalid_json",
        4: "duplicate_id",
        5: "context_length_exceeded",
        6: "engine_error",
        7: "invalid_value",
        8: "duplicate_id",
        9: "fine",
    }
    assert (tally.finished, tally.failed) == (8, 6)
    identifiers = [record["id"] for record in batch.records if record["id"] is not None]
    assert len(identifiers) == len(set(identifiers))


def test_places_are_kept_filled(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [{"prompt": "word " * (1 + number % 7)} for number in range(50)])
    engine = StubLLM(n_seqs=3)
    batch.run(3, engine)
    assert engine.most_open == 6 and len(batch.records) == 50
    assert [params.seed for _, params in engine.begun] == list(range(50))


def test_resuming_after_every_place_where_the_output_may_end(tmp_path: Path) -> None:
    lines: list[Any] = [{"id": number, "prompt": f"p{number} " * (number % 3 + 1)} for number in range(6)]
    batch = Batch(tmp_path, [*lines[:3], "damaged", {"id": 0, "prompt": "again"}, *lines[3:]])
    batch.run(2)
    whole, expected = batch.out.read_bytes(), batch.by_line()
    for size in range(0, len(whole), 7):
        batch.out.write_bytes(whole[:size])
        before = whole[:size].count(b"\n")
        tally = batch.run(2).tally
        assert batch.by_line() == expected
        assert (tally.resumed, tally.finished, tally.failed) == (before, 8 - before, 2)


def test_answers_that_the_context_cuts_off(tmp_path: Path) -> None:
    class Short(StubLLM):
        def begin(self, prompt: Any, params: SamplingParams, keep_answer: bool = True) -> Any:
            generation = super().begin(prompt, params)
            generation.limit = min(3, generation.limit)
            return generation

    long, chat = "one two three four five", {"messages": [{"role": "user", "content": "one two three four five"}]}
    batch = Batch(
        tmp_path,
        [{"prompt": long}, {"prompt": long, "max_tokens": 3}, {"prompt": "one"}, {"custom_id": "a", "body": chat}],
    )
    tally = batch.run(engine=Short(n_seqs=4)).tally
    cut = {record["line"] for record in batch.records if record.get("context_full")}
    assert cut == {1, 4} and tally.cut_off == 2 and tally.failed == 0
    assert not any("context_full" in record for record in batch.records if record["line"] not in cut)


def test_another_input_is_found_out(tmp_path: Path) -> None:
    Batch(tmp_path, [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}]).run()
    with pytest.raises(PyllmError, match="record of line 1 with the id 'a', the input has 'b'"):
        Batch(tmp_path, [{"id": "b", "prompt": "y"}]).run()


def test_ten_thousand_lines_of_which_some_are_bad(tmp_path: Path) -> None:
    lines: list[Any] = [{"id": f"id-{number}", "prompt": f"p{number} and more"} for number in range(10_000)]
    no_utf8 = '{"id": "\udcff"}'  # written as a single byte
    damages = ("{", "[]", {"id": "id-0", "prompt": "x"}, {"id": "m", "prompt": "x", "max_tokens": 0}, no_utf8)
    for number in range(10, 10_000, 20):
        lines[number] = damages[number // 20 % len(damages)]
    batch = Batch(tmp_path, lines)
    tally = batch.run(32).tally
    records = batch.records
    assert len(records) == tally.finished == 10_000 and tally.failed == 500
    assert {record["line"] for record in records} == set(range(1, 10_001))
    good = {record["id"]: record for record in records if record["error"] is None}
    assert len(good) == 9500
    assert all(record["text"] == f"p{record['line'] - 1} and more" for record in good.values())


def test_what_concerns_all_lines_stops_the_batch_and_keeps_records(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [{"prompt": "short"}, {"prompt": "a much longer one"}])

    class Failing(StubLLM):
        def advance(self, meanwhile: Any = None) -> bool:
            if self.begun and len(self.open) == 1:
                raise DeviceError("the device failed")
            return super().advance(meanwhile)

    with pytest.raises(DeviceError):
        batch.run(2, Failing(n_seqs=2))
    assert batch.by_line() == {1: "short"}
    batch.run()
    assert batch.by_line() == {1: "short", 2: "a much longer one"}

    class WithoutTemplate(StubLLM):
        @property
        def template(self) -> None:  # type: ignore[override]
            raise TemplateError("malformed")

    batch.out.unlink()
    with pytest.raises(TemplateError):
        batch.run(2, WithoutTemplate(n_seqs=2))
    assert batch.records == []


def test_stopping_keeps_what_is_complete(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [{"prompt": "word " * (number + 1)} for number in range(20)])
    engine = StubLLM(n_seqs=2)

    def stop_after_some(tally: Tally) -> None:
        if tally.finished > 4:
            runner.stop()

    with Output(batch.out) as output:
        output.prepare()
        runner = Runner(engine, LineReader(PARAMS), output, 2, "stub", stop_after_some)
        assert runner.run(Feed(open_source(str(batch.input)).entries())) is False
    assert not engine.open and 4 < len(batch.records) < 20
    batch.run()
    assert len(batch.by_line()) == 20


def test_a_pipe_that_is_slow_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The first line is answered before the second has come."""
    answered = threading.Event()

    def entries() -> Iterator[Entry]:
        yield Entry(1, {"prompt": "first line"})
        assert answered.wait(30)
        yield Entry(2, {"prompt": "second"})

    def tell(tally: Tally) -> None:
        if tally.finished:
            answered.set()

    with Output(tmp_path / "out.jsonl") as output:
        output.prepare()
        runner = Runner(StubLLM(n_seqs=2), LineReader(PARAMS), output, 2, "stub", tell)
        assert runner.run(Feed(entries(), from_pipe=True))
    assert runner.tally.finished == 2


def test_a_pipe_that_breaks_stops_the_batch(tmp_path: Path) -> None:
    def entries() -> Iterator[Entry]:
        yield Entry(1, {"prompt": "first line"})
        raise PyllmError("it cannot be read")

    with Output(tmp_path / "out.jsonl") as output:
        output.prepare()
        runner = Runner(StubLLM(n_seqs=2), LineReader(PARAMS), output, 2, "stub")
        with pytest.raises(PyllmError, match="cannot be read"):
            runner.run(Feed(entries(), from_pipe=True))


def test_a_shared_beginning_is_computed_once_ahead(tmp_path: Path) -> None:
    begin = " ".join(f"w{number}" for number in range(300))
    batch = Batch(tmp_path, [{"prompt": f"{begin} {number} end"} for number in range(9)])
    engine = StubLLM(n_seqs=4, ctx_size=1000)
    engine.keeps = True
    tally = batch.run(4, engine).tally
    assert [len(words) for words, _ in engine.begun] == [300, *[302] * 9]
    assert engine.begun[0][1].max_tokens == 1 and tally.prefix_tokens == 300
    assert tally.finished == 9 and tally.completion_tokens == 9 * 302
    batch.out.unlink()
    forgetful = StubLLM(n_seqs=4, ctx_size=1000)
    other = [{"prompt": f"{begin} {number} end"} for number in range(20)]
    other += [{"prompt": f"other {begin} {number} end"} for number in range(9)]
    batch = Batch(tmp_path, other)
    assert batch.run(4, forgetful).tally.finished == 29
    assert sum(len(words) < 302 for words, _ in forgetful.begun) == 1  # then it was seen to be of no use


def test_a_beginning_that_fails_or_does_not_fit(tmp_path: Path) -> None:
    begin = " ".join(f"w{number}" for number in range(150))
    batch = Batch(tmp_path, [{"prompt": f"{begin} {number}"} for number in range(3)])
    assert batch.run(2, StubLLM(n_seqs=2, ctx_size=100)).tally.failed == 3
    batch.out.unlink()
    batch = Batch(tmp_path, [{"prompt": f"BOOM {begin} {number}"} for number in range(3)])
    assert batch.run(2, StubLLM(n_seqs=2, ctx_size=1000)).tally.failed == 3
    assert set(batch.by_line().values()) == {"engine_error"}


def test_prompts_are_started_while_others_are_encoded(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [{"prompt": f"{number} b c"} for number in range(120)])
    engine = StubLLM(n_seqs=100)
    batch.run(100, engine)
    assert engine.started == [15, 31, 47, 63, 79, 95]  # one of each part waits for what follows it
    assert batch.by_line() == {number + 1: f"{number} b c" for number in range(120)}
    assert engine.most_open > 100


def test_lines_that_end_together_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, append = [], Output.append
    monkeypatch.setattr(Output, "append", lambda self, *records: (counts.append(len(records)), append(self, *records)))
    batch = Batch(tmp_path, [{"prompt": "a b c"}] * 4 + [{"prompt": "a b c d"}, "damaged"])
    batch.run(8)
    assert counts == [1, 4, 1]
    assert [record["line"] for record in batch.records] == [6, 1, 2, 3, 4, 5]


def test_what_ended_before_the_device_failed_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(tmp_path, [{"prompt": "a b"}, {"prompt": "a fails"}, {"prompt": "a b"}])
    take = Runner._take

    def failing(self: Runner, running: Any) -> str | None:
        if "fails" in running.job.messages[0]["content"] and running.generation.has_ended:
            raise DeviceError("gone")
        return take(self, running)

    monkeypatch.setattr(Runner, "_take", failing)
    with pytest.raises(DeviceError, match="gone"):
        batch.run(4)
    assert batch.by_line() == {1: "a b"}


@pytest.mark.parametrize(
    ("end", "thinks"), [("<think>", True), ("<think> \n", True), ("a <think", False), ("> a", False), ("é", False)]
)
def test_whether_a_prompt_opens_a_think_block(tmp_path: Path, end: str, thinks: bool) -> None:
    class Ends(StubLLM):
        def chat_tokens(self, messages: Any, **template_args: Any) -> list[Any]:
            return ["x", *end.split(" ")]

    batch = Batch(tmp_path, [{"prompt": "a"}])
    batch.run(1, Ends(n_seqs=1))
    assert ("reasoning" in batch.records[0]) is thinks


@pytest.mark.parametrize("part", [1, 3, 16, 100])
def test_parts_of_any_size_ask_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    class Refusing(StubLLM):
        def chats_tokens(self, conversations: Any) -> list[Any]:
            found = super().chats_tokens(conversations)
            return [TemplateError("no") if ids[:1] == ["refuse"] else ids for ids in found]

        def tokenize(self, text: str) -> list[Any]:
            if text == "refuse":
                raise PyllmError("no")
            return super().tokenize(text)

    def body(number: int) -> dict[str, Any]:
        return {"custom_id": f"c{number}", "body": {"prompt": "refuse" if number == 30 else f"{number} raw"}}

    monkeypatch.setattr("pyllm.batch.runner._PART", part)
    lines: list[Any] = [{"prompt": f"{number} b c"} if number % 3 else body(number) for number in range(40)]
    lines[7], lines[8], lines[19] = {"prompt": "refuse this"}, "damaged", {"id": "line-3", "prompt": "again"}
    batch, engine = Batch(tmp_path, lines), Refusing(n_seqs=3)
    batch.run(3, engine)
    good = [number for number in range(40) if number not in (7, 8, 19, 30)]
    assert [words[0] for words, _ in engine.begun] == [f"{number}" for number in good]
    bad = {8: "template_error", 9: "invalid_json", 20: "duplicate_id", 31: "engine_error"}
    found = {record["line"]: record for record in batch.records}
    assert found.keys() == set(range(1, 41))
    assert {line: record["error"]["code"] for line, record in found.items() if record["error"]} == bad


def test_lines_before_one_that_stops_the_batch_get_their_errors(tmp_path: Path) -> None:
    class Refusing(StubLLM):
        def chats_tokens(self, conversations: Any) -> list[Any]:
            return [TemplateError("no") for _ in conversations]

    batch = Batch(tmp_path, [{"prompt": "a"}])

    def entries() -> Iterator[Entry]:
        yield Entry(1, {"prompt": "a"})
        raise PyllmError("the input cannot be read on")

    with Output(batch.out) as output:
        output.prepare()
        runner = Runner(Refusing(n_seqs=2), LineReader(PARAMS), output, 2, "stub")
        with pytest.raises(PyllmError, match="read on"):
            runner.run(Feed(entries()))
    assert batch.by_line() == {1: "template_error"}


def test_tokens_are_taken_while_the_device_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(StubLLM):
        num_calls = 0

        def advance(self, meanwhile: Any = None) -> bool:
            while meanwhile():
                self.num_calls += 1
            for generation in self.open[:20]:
                if not generation.has_ended and "BOOM" not in generation.words and not generation.params.stop:
                    ready.append(generation.num_ready)
            return super().advance(meanwhile)

    ready: list[int] = []
    monkeypatch.setattr("pyllm.batch.runner._TOGETHER", 1e9)  # nothing else takes them before they end
    words = " ".join(map(str, range(60)))
    lines: list[dict[str, Any]] = [{"prompt": f"{number} {words}"} for number in range(18)]
    lines += [{"prompt": f"{words} BOOM x"}, {"prompt": f"stops {words}", "stop": ["7"]}, {"prompt": "short"}]
    batch, engine = Batch(tmp_path, lines), Waiting(n_seqs=21)
    batch.run(21, engine)
    assert max(ready) < 8 and ready.count(7) > 50 and engine.num_calls > 60
    expected: dict[int, str] = {number + 1: f"{number} {words}" for number in range(18)}
    assert batch.by_line() == {**expected, 19: "engine_error", 20: f"stops {words}", 21: "short"}


def test_objects_are_looked_through_seldom_while_a_batch_runs() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), collected_seldom():
        assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count() > 0
        raise ZeroDivisionError
    assert gc.get_threshold() == before
    gc.unfreeze()
