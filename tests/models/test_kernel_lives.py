"""Models on devices that run kernels: emulated with each vendor's tiles, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyllm.device import Device
from pyllm.device.emulated import EmulatedDevice
from pyllm.sampling import SamplingParams
from tests.engine import greedy, interleaved, open_engine, tokens
from tests.models.test_hybrids import MODELS as HYBRIDS
from tests.models.test_hybrids import QUANT, path_and_reference
from tests.models.test_hybrids_on_gpu import check_logits
from tests.models.test_references import check_float16
from tests.ops.lives import LIVES
from tests.refdata import PROMPTS, model_path, quant_path, quant_reference, reference, same_until_unclear

MODELS = {"llama-a": "llama-a-f32", "qwen3-a": "qwen3-a-bf16"}
OTHERS = {
    "llama-b-rope3": "llama-b-rope3-f16",
    "llama-c-spm": "llama-c-spm-bf16",
    "qwen2-a": "qwen2-a-f32",
    "gemma3-a": "gemma3-a-f16",
    "gemma3-b-ropelinear": "gemma3-b-ropelinear-f32",
    "qwen3moe-a": "qwen3moe-a-f16",
}
QUANTS = tuple(sorted(path.stem.removeprefix("llama-q-") for path in quant_path("").parent.glob("llama-q-*.gguf")))
QUANTS_EVERYWHERE = ("Q2_K", "Q3_K", "Q4_K_M-mix")  # emulation is slow: the others with one kind of tiles
MARGIN = 0.1  # of float16 matrix products


@pytest.fixture(params=[life for life in LIVES if life != "cpu"])
def device(request: pytest.FixtureRequest):
    return LIVES[request.param]()


def prompts_for(device: Device) -> tuple[str, ...]:
    """Emulation is slow: one short and one longer prompt."""
    return PROMPTS[:2] if device.name == "emulated" else PROMPTS


@pytest.mark.parametrize("ubatch_size", [1, 7, 64, 512])
@pytest.mark.parametrize("name", MODELS)
def test_models(device: Device, name: str, ubatch_size: int) -> None:
    if device.name == "emulated" and ubatch_size in (1, 512):
        pytest.skip("emulated with two ubatch sizes only")
    ref = reference(name)
    with open_engine(model_path(MODELS[name]), device, kv_type="f16", ubatch_size=ubatch_size) as llm:
        for prompt in prompts_for(device):
            ids = ref[f"{prompt}_tokens"].tolist()
            check_float16(llm.logits(ids)[-8:], ref[f"{prompt}_logits_last8"])
            length = 4 if device.name == "emulated" else 32
            found = tokens(llm.generate(ids, greedy(length)))
            expected, margins = (ref[f"{prompt}_greedy{what}"][:length] for what in ("", "_margin"))
            assert same_until_unclear(found, expected, margins, MARGIN)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(device: Device, name: str) -> None:
    ref = reference(name)
    with open_engine(model_path(OTHERS[name]), device, kv_type="f16", ubatch_size=64) as llm:
        for prompt in prompts_for(device)[: 1 if device.name == "emulated" else 3]:
            check_float16(llm.logits(ref[f"{prompt}_tokens"].tolist())[-8:], ref[f"{prompt}_logits_last8"])


@pytest.mark.parametrize("name", [*HYBRIDS, QUANT])
def test_hybrids(device: Device, name: str) -> None:
    """The longer prompt takes the chunked form of the recurrence, then for its last tokens the other one."""
    path, ref = path_and_reference(name)
    with open_engine(path, device, kv_type="f16", ubatch_size=64) as llm:
        for prompt in prompts_for(device):
            logits, expected = llm.logits(ref[f"{prompt}_tokens"].tolist())[-8:], ref[f"{prompt}_logits_last8"]
            if device.name == "emulated":
                check_float16(logits, expected)
            else:  # whose roundings depend on what plans choose there: one more may send a token to another expert
                check_logits(name, logits, expected)
    kernels = device._functions if device.name == "gpu" else device._kernels
    assert {"gated_delta_rule", "gated_delta_rule_chunks"} <= {entry for _, entry, *_ in kernels}


@pytest.mark.parametrize("quant", QUANTS)
def test_block_types(device: Device, quant: str) -> None:
    if device.name == "emulated" and quant not in QUANTS_EVERYWHERE and device.target.tiles != "mma":
        pytest.skip("emulated with one kind of tiles only")
    ref = quant_reference(f"llama-q-{quant}")
    with open_engine(quant_path(f"llama-q-{quant}"), device, kv_type="f16") as llm:
        for prompt in prompts_for(device)[: 1 if device.name == "emulated" else 3]:
            check_float16(llm.logits(ref[f"{prompt}_tokens"].tolist())[-8:], ref[f"{prompt}_logits_last8"])


def test_block_types_as_on_hopper() -> None:
    """Kernels that plans take on sm_90 alone, in a whole model."""
    name, device = "llama-q-Q4_K_M-mix", EmulatedDevice(32, "mma")
    device.target = replace(device.target, arch="sm_90")
    ref = quant_reference(name)
    with open_engine(quant_path(name), device, kv_type="f16", ubatch_size=64) as llm:
        check_float16(llm.logits(ref["n70_tokens"].tolist())[-8:], ref["n70_logits_last8"])
    assert {"arrange_x", "mul_mat_wgmma_direct", "flash_attention_wgmma"} <= {entry for _, entry, *_ in device._kernels}


def test_interleaved_sequences_decode_as_alone(device: Device) -> None:
    ref, length = reference("llama-a"), 3 if device.name == "emulated" else 32
    with open_engine(model_path("llama-a-f32"), device, n_seqs=3, ubatch_size=64, page_size=16) as llm:
        found = interleaved([llm.generate(ref[f"{p}_tokens"].tolist(), greedy(length)) for p in PROMPTS])
    for prompt, answer in zip(PROMPTS, found, strict=True):
        expected, margins = (ref[f"{prompt}_greedy{what}"][:length] for what in ("", "_margin"))
        assert same_until_unclear(answer, expected, margins, MARGIN)


def test_placement_depth_and_graphs_do_not_change_a_bit(device: Device) -> None:
    ids = reference("llama-a")["n70_tokens"].tolist()
    settings = [
        {"ring_depth": 1, "inflight": 1},
        {"ring_depth": 4, "inflight": 4, "page_order": list(reversed(range(6)))},
        {"page_size": 8},
    ]
    results = []
    for index, setting in enumerate(settings):
        used = device if index == 0 else type(device)(**_same(device))
        used.graphs = index != 1
        options = {"page_size": 16, "ctx_size": 96, "ubatch_size": 32, "kv_type": "f16", **setting}
        with open_engine(model_path("llama-a-f32"), used, **options) as llm:
            length = 3 if device.name == "emulated" else 20
            results.append((llm.logits(ids), tokens(llm.generate(ids, greedy(length)))))
    for logits, found in results[1:]:
        assert (logits == results[0][0]).all()
        assert found == results[0][1]


def _same(device: Device) -> dict[str, object]:
    if device.name == "emulated":
        return {"warp_size": device.target.warp_size, "tiles": device.target.tiles}
    return {}


def test_a_row_without_finite_logits_is_an_error(device: Device) -> None:
    with open_engine(model_path("llama-a-f32"), device, kv_type="f16") as llm:
        forward = llm._executor.model.forward

        def broken(device: Device, batch: object) -> object:
            logits = forward(device, batch)
            return device.upload(np.full(logits.shape, np.nan, np.float32))

        llm._executor.model.forward = broken
        with pytest.raises(Exception, match="finite"):
            tokens(llm.generate([1, 2, 3], greedy(1)))


@pytest.mark.parametrize("life", [life for life in LIVES if life != "cpu"])
def test_a_shift_is_the_same_on_pages_of_any_size(life: str) -> None:
    """16 tokens stay, 8 go, and the rows behind them are shifted: pages of 8 or of 4 give the same in every bit."""
    ids, found = reference("llama-a")["n70_tokens"].tolist(), []
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
    options = {"kv_type": "f16", "ctx_size": 40, "overflow": "shift", "keep": 16}
    for page_size in (8, 4):
        with open_engine(model_path(MODELS["llama-a"]), LIVES[life](), page_size=page_size, **options) as llm:
            found.append([(chunk.token, chunk.logprob) for chunk in llm.generate(ids[:37], params)])
            assert llm.stats["shifted_tokens"] == 8
    assert found[0] == found[1] and len(found[0]) == 6
