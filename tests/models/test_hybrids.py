"""Hybrid models against their references, however a prompt is cut up and mixed with others; and what their files and
their states may not be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pyllm.commands import main as command_line
from pyllm.commands.console import size_text
from pyllm.device.host import HostDevice
from pyllm.errors import ModelFileError, PyllmError, StaleKVError, UnsupportedError
from pyllm.executor import Segment
from pyllm.kv_cache import SequenceKV
from pyllm.llm import LLM
from pyllm.ops.op import Op
from pyllm.quants import QuantType
from tests import edited_model
from tests.engine import greedy, in_fresh_process, interleaved, open_engine, tokens
from tests.models.test_references import check_float32, check_greedy
from tests.ops.lives import LIVES
from tests.refdata import PROMPTS, model_path, quant_path, quant_reference, reference

MODELS = {
    "qwen35-a": "qwen35-a-f16",
    "qwen35-b-real": "qwen35-b-real-bf16",
    "qwen35moe-a": "qwen35moe-a-f16",
    "qwen35moe-b-mtp": "qwen35moe-b-mtp-bf16",
    "qwen3next-a": "qwen3next-a-f16",
    "qwen3next-b-eqheads": "qwen3next-b-eqheads-bf16",
}
QUANT = "qwen35moe-q-Q4_K_M-mix"
NEXT, MOE = "qwen3next-a-f16", "qwen35moe-b-mtp-bf16"
SMALL = "qwen3next-b-eqheads"  # the fastest


def path_and_reference(name: str) -> tuple[Path, dict[str, np.ndarray]]:
    if name == QUANT:
        return quant_path(name), quant_reference(name)
    return model_path(MODELS[name]), reference(name)


@pytest.mark.parametrize("ubatch_size", [1, 3, 64, 512])
@pytest.mark.parametrize("name", [*MODELS, QUANT])
def test_float32(name: str, ubatch_size: int) -> None:
    path, ref = path_and_reference(name)
    with open_engine(path, ubatch_size=ubatch_size) as llm:
        for prompt in PROMPTS if ubatch_size > 3 else PROMPTS[:2]:  # many small steps are slow
            ids = ref[f"{prompt}_tokens"].tolist()
            check_float32(llm.logits(ids), ref, prompt)
            check_greedy(tokens(llm.generate(ids, greedy(32))), ref, prompt)


@pytest.mark.parametrize("ubatch_size", [3, 64, 512])
@pytest.mark.parametrize("name", [*MODELS, QUANT])
def test_three_interleaved_sequences(name: str, ubatch_size: int) -> None:
    path, ref = path_and_reference(name)
    names = PROMPTS if ubatch_size > 3 else ("n5", "n70", "n5")
    prompts = [ref[f"{prompt}_tokens"].tolist() for prompt in names]
    with open_engine(path, n_seqs=3, ubatch_size=ubatch_size) as llm:
        for prompt, logits in zip(names, llm.logits_batch(prompts), strict=True):
            check_float32(logits, ref, prompt)
        found = interleaved([llm.generate(ids, greedy(32)) for ids in prompts])
    for prompt, answer in zip(names, found, strict=True):
        check_greedy(answer, ref, prompt)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_read_while_others_are_answered(name: str) -> None:
    path, ref = path_and_reference(name)
    prompts = {prompt: ref[f"{prompt}_tokens"].tolist() for prompt in PROMPTS}
    with open_engine(path, n_seqs=3, ubatch_size=16) as llm:
        answers = {prompt: llm.generate(prompts[prompt], greedy(32)) for prompt in ("n5", "n70")}
        begun = {prompt: [next(answer).token for _ in range(3)] for prompt, answer in answers.items()}
        late = llm.generate(prompts["n300"], greedy(32))  # 19 steps of prompt, each with two tokens of the others
        found = interleaved([late, *answers.values()])
    check_greedy(found[0], ref, "n300")
    for prompt, rest in zip(answers, found[1:], strict=True):
        check_greedy(begun[prompt] + rest, ref, prompt)


def submit(llm: LLM, kv: SequenceKV, ids: list[int], num_outputs: int = 0) -> Any:
    """Queue the next tokens of a sequence."""
    assert llm._cache.extend(kv, len(ids))
    return llm._executor.submit([Segment(kv, kv.length - len(ids), ids, num_outputs)])


def last_logits(llm: LLM, kv: SequenceKV, ids: list[int]) -> np.ndarray:
    logits, found = submit(llm, kv, ids, 1).result()
    assert not found
    llm._cache.publish(kv, kv.length)
    return logits[0]


@pytest.fixture
def small() -> Iterator[LLM]:
    with open_engine(model_path(MODELS[SMALL]), n_seqs=4, page_size=8, ctx_size=128) as llm:
        yield llm


IDS = reference(SMALL)["n70_tokens"].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_split_at_every_point(name: str) -> None:
    ids = reference(name)["n70_tokens"][:12].tolist()
    with open_engine(model_path(MODELS[name]), n_seqs=1, page_size=8, ctx_size=128) as llm:
        expected = llm.logits(ids)[-1]
        for cut in range(1, len(ids)):
            kv = llm._cache.new_sequence()
            submit(llm, kv, ids[:cut])
            assert np.abs(last_logits(llm, kv, ids[cut:]) - expected).max() <= 1e-4
            llm._cache.release(kv)


def test_used_and_poisoned_slots_give_the_same_bits() -> None:
    with open_engine(model_path(MODELS["qwen35-a"]), ctx_size=128, ubatch_size=16) as llm:
        first = llm.logits(IDS)
        for other in (IDS[:5], IDS[20:50], IDS[::-1]):
            llm.logits(other)
            assert (llm.logits(IDS) == first).all()


def test_a_step_that_breaks_off_loses_nothing(small: LLM) -> None:
    expected = small.logits(IDS[:40])[-1]
    kv = small._cache.new_sequence()
    submit(small, kv, IDS[:20])
    launch, count = small._device.launch, iter(range(1000))

    def fail_late(op: Op, *args: Any) -> None:
        launch(op, *args)
        if op.name == "gated_delta_rule" and next(count) == 1:
            raise RuntimeError("on purpose")

    small._device.launch = fail_late  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        submit(small, kv, IDS[20:40])
    small._device.launch = launch  # type: ignore[method-assign]
    small._cache.truncate(kv, 20)
    assert kv.state is not None and kv.state.position == 20
    assert np.abs(last_logits(small, kv, IDS[20:40]) - expected).max() <= 1e-4


def test_a_foreign_state_ends_its_sequence_and_no_other(small: LLM) -> None:
    streams = [small.generate(IDS[:start], greedy(40)) for start in (10, 20)]
    begun = [[next(stream).token for _ in range(3)] for stream in streams]
    requests = small._scheduler._running
    assert requests[0].kv is not None and requests[0].kv.state is not None
    slot = requests[0].kv.state.slot
    small._device.synchronize()
    small._cache.recurrent.rows.marks[2 * slot : 2 * slot + 2, 1] = 12345, 3  # as if the rows were another's
    with pytest.raises(StaleKVError, match=r"recurrent state .* layer 2"):
        tokens(streams[0])
    rest = tokens(streams[1])
    with open_engine(model_path(MODELS[SMALL]), ctx_size=128) as alone:
        assert tokens(alone.generate(IDS[:20], greedy(40))) == begun[1] + rest
    assert small._cache.recurrent.num_free_slots == 4


def test_a_sequence_goes_back_to_a_checkpoint_and_to_nothing_else(small: LLM) -> None:
    cache = small._cache
    kv = cache.new_sequence()
    last_logits(small, kv, IDS[:20])
    assert cache.checkpoint(kv)
    last_logits(small, kv, IDS[20:50])
    for length in (19, 21, 49):
        with pytest.raises(ValueError, match=rf"cannot go back to {length}; there are checkpoints at \[20\]"):
            cache.truncate(kv, length)
    assert kv.length == 50  # a refusal changes nothing
    branch = IDS[60:70]
    expected = small.logits(IDS[:20] + branch)[-1]
    for _ in range(3):  # a checkpoint may be used again
        cache.truncate(kv, 20)
        assert np.abs(last_logits(small, kv, branch) - expected).max() <= 1e-4
    cache.truncate(kv, 0)
    assert np.abs(last_logits(small, kv, IDS[:20] + branch) - expected).max() <= 1e-4
    with pytest.raises(ValueError, match="no position"):  # from the beginning it is another sequence
        cache.truncate(kv, 20)


def test_a_fork_goes_on_from_a_copy(small: LLM) -> None:
    cache = small._cache
    kv = cache.new_sequence()
    last_logits(small, kv, IDS[:20])
    cache.checkpoint(kv)
    last_logits(small, kv, IDS[20:40])
    with pytest.raises(ValueError, match="30"):
        cache.fork(kv, 30)
    children = {20: cache.fork(kv, 20), 40: cache.fork(kv, 40)}
    branch = IDS[60:70]
    for length, child in children.items():
        expected = small.logits(IDS[:length] + branch)[-1]
        assert np.abs(last_logits(small, child, branch) - expected).max() <= 1e-4
    expected = small.logits(IDS[:50])[-1]
    assert np.abs(last_logits(small, kv, IDS[40:50]) - expected).max() <= 1e-4  # the parent is as it was


def test_devices_with_kernels_refuse_what_they_have_none_for() -> None:
    device = LIVES["emulated-32"]()
    device.runs = lambda op: op.name != "causal_conv1d"  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"qwen35 needs causal_conv1d, for which emulated has no kernel yet"):
        open_engine(model_path(MODELS["qwen35-a"]), device)


def test_devices_with_kernels_refuse_heads_that_they_cannot_keep(tmp_path: Path) -> None:
    metadata = {"qwen3next.ssm.state_size": 16, "qwen3next.ssm.inner_size": 64}
    path = edited_model.write(model_path(NEXT), tmp_path / "model.gguf", metadata)
    with pytest.raises(UnsupportedError, match=r"ssm.state_size is 16; kernels on emulated need multiples of 32"):
        open_engine(path, LIVES["emulated-32"]())


# Other layouts of the same weights.


def stored(parts: edited_model.Parts, name: str) -> np.ndarray:
    """A tensor of two-byte floats as rows of bits."""
    return np.frombuffer(parts.tensors[name].content, np.uint8).reshape(*parts.tensors[name].shape[:-1], -1)


def same_logits(first: Path, second: Path) -> None:
    with open_engine(first) as one, open_engine(second) as other:
        assert (one.logits(IDS) == other.logits(IDS)).all()


def test_older_files_have_one_input_tensor(tmp_path: Path) -> None:
    parts, changes = edited_model.Parts.read(model_path(NEXT)), {}
    num_k, members, dim = 2, 2, 32
    for layer in (0, 1, 2, 4, 5, 6):
        prefix = f"blk.{layer}."
        qkv, gate = (stored(parts, f"{prefix}{name}.weight") for name in ("attn_qkv", "attn_gate"))
        q, k, v = np.split(qkv, [num_k * dim, 2 * num_k * dim])
        heads = [
            [q[g * dim :][:dim], k[g * dim :][:dim]]
            + [part[g * members * dim :][: members * dim] for part in (v, gate)]
            for g in range(num_k)
        ]
        rows = np.concatenate([part for head in heads for part in head])
        changes[prefix + "ssm_in.weight"] = (QuantType.F16, rows.view(np.float16))
        changes |= {prefix + "attn_qkv.weight": None, prefix + "attn_gate.weight": None}
    same_logits(model_path(NEXT), edited_model.write(model_path(NEXT), tmp_path / "old.gguf", tensors=changes))


def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    parts, changes = edited_model.Parts.read(model_path(NEXT)), {}
    for layer in range(8):
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up")]
        fused = np.concatenate([stored(parts, name) for name in names], axis=1).view(np.float16)
        changes |= {name: None for name in names} | {f"blk.{layer}.ffn_gate_up_exps.weight": (QuantType.F16, fused)}
    same_logits(model_path(NEXT), edited_model.write(model_path(NEXT), tmp_path / "fused.gguf", tensors=changes))


def test_layers_may_be_named_by_an_interval(tmp_path: Path) -> None:
    metadata = {"qwen35moe.attention.recurrent_layers": None}
    same_logits(model_path(MOE), edited_model.write(model_path(MOE), tmp_path / "model.gguf", metadata))


def test_what_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    parts = edited_model.Parts.read(model_path(MOE))
    extra = {name: None for name in parts.tensors if name.startswith("blk.4.")}
    assert any("nextn" in name for name in extra)
    flags = np.array([1, 1, 1, 0], bool)
    metadata = {
        "qwen35moe.block_count": 4,
        "qwen35moe.nextn_predict_layers": None,
        "qwen35moe.attention.recurrent_layers": flags,
    }
    same_logits(model_path(MOE), edited_model.write(model_path(MOE), tmp_path / "model.gguf", metadata, extra))


@pytest.mark.parametrize(
    ("name", "metadata", "words"),
    [
        (NEXT, {"qwen3next.ssm.inner_size": 96}, ["ssm.inner_size is 96", "do not fit together"]),
        (NEXT, {"qwen3next.ssm.group_count": 3}, ["3 key heads"]),
        (NEXT, {"qwen3next.ssm.conv_kernel": 5}, ["ssm_conv1d.weight has shape 256 x 4", "256 x 5"]),
        (NEXT, {"qwen3next.ssm.state_size": None}, ["ssm.state_size is missing"]),
        (NEXT, {"qwen3next.full_attention_interval": 1}, ["0 of 8 layers are recurrent"]),
        (NEXT, {"qwen3next.full_attention_interval": 2}, ["blk.1.attn_q.weight is missing"]),
        (NEXT, {"qwen3next.expert_shared_feed_forward_length": 40}, ["shexp", "48 x 64", "40 x 64"]),
        (MOE, {"qwen35moe.nextn_predict_layers": 5}, ["nextn_predict_layers is 5"]),
        (MOE, {"qwen35moe.rope.dimension_sections": None}, ["rope.dimension_sections is missing"]),
        (MOE, {"qwen35moe.rope.dimension_sections": np.array([9, 9, 9, 9], np.int32)}, ["[9, 9, 9, 9]"]),
        (MOE, {"qwen35moe.attention.recurrent_layers": np.ones(5, bool)}, ["4 of 4 layers"]),
        (MOE, {"qwen35moe.attention.value_length": 32}, ["keys of 64 and values of 32"]),
    ],
    ids=str,
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, metadata: dict[str, Any], words: list[str]) -> None:
    path = edited_model.write(model_path(name), tmp_path / "model.gguf", metadata)
    with pytest.raises(PyllmError) as raised:
        open_engine(path, HostDevice(poison=True))
    assert isinstance(raised.value, ModelFileError)
    for word in words:
        assert word in str(raised.value)


def test_memory_per_sequence_is_told_and_is_what_is_taken() -> None:
    path = model_path(MODELS[SMALL])
    shown = CliRunner().invoke(command_line, ["run", str(path), "-n", "1", "--raw", "-c", "128", "hello"]).stderr
    with open_engine(path, ctx_size=128, n_seqs=2, kv_type="f16") as llm:
        cache, sizes = llm._cache, llm.sequence_bytes
        assert cache.recurrent is not None
        assert sizes["kv_rows"] * 2 == cache.num_bytes
        assert sizes["recurrent_state"] * 2 == cache.recurrent.num_bytes
        layers, channels, matrices = 2, 3 * 384, 2 * 64 * 64
        assert sizes["recurrent_state"] == 2 * layers * 4 * (channels + matrices + 2)
    rows, state = size_text(sizes["kv_rows"]), size_text(sizes["recurrent_state"])
    assert f"Memory per sequence: {rows} of K/V rows for 128 tokens and {state} of recurrent state\n" in shown


def test_memory_of_checkpoints_is_told_and_holds() -> None:
    path = model_path(MODELS[SMALL])
    options = ["chat", str(path), "-n", "1", "-c", "128", "--cache-ram", "1M"]
    shown = CliRunner().invoke(command_line, options, input="hello\n").stderr
    with open_engine(path, ctx_size=128, prefix_cache=True, cache_ram=2**20) as llm:
        sizes, recurrent = llm.sequence_bytes, llm._cache.recurrent
        assert recurrent is not None
        for first in range(3, 23):  # more than there is room for
            tokens(llm.generate([first, *IDS[:20]], greedy(2)))
        kept = llm.stats["memory"]["checkpoints"]
    assert kept["high_water_bytes"] <= sizes["all_checkpoints"] == recurrent.pool.num_allocated * sizes["checkpoint"]
    saved, most = size_text(sizes["checkpoint"]), size_text(sizes["all_checkpoints"])
    assert f"Each checkpoint of a state takes {saved} of the host's memory, all together at most {most}\n" in shown


CHUNKED = {"ctx_size": 128, "ubatch_size": 16, "n_seqs": 2}


def logits_and_answer(ids: list[int]) -> tuple[np.ndarray, list[int]]:
    with open_engine(model_path(MODELS[SMALL]), **CHUNKED) as llm:
        return llm.logits(ids), tokens(llm.generate(ids, greedy(8)))


def test_nothing_of_a_conversation_reaches_the_next() -> None:
    """Rounds of a prompt with a word of its own and an unrelated one in several ubatches: as in a fresh process."""
    rng = np.random.default_rng(3)
    unrelated = IDS[:50]
    expected, answer = in_fresh_process(logits_and_answer, unrelated)
    with open_engine(model_path(MODELS[SMALL]), **CHUNKED) as llm:
        for _ in range(30):
            stream = llm.generate(rng.integers(0, 512, rng.integers(5, 60)).tolist(), greedy(20))
            for _ in range(int(rng.integers(1, 20))):  # some are given up half-way
                next(stream)
            stream.close()
            assert (llm.logits(unrelated) == expected).all()
            assert tokens(llm.generate(unrelated, greedy(8))) == answer
