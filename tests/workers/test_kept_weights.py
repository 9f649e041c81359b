"""The option `weights`: linears rounded to integers at load, in whole models on one rank and on two, beside a draft."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from manta.cluster.cli.__main__ import main
from manta.cluster.cli.check import check_machine, check_model
from manta.cluster.cli.serve import model_message
from manta.cluster.config import EngineConfig, load_config
from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.memory import weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.decoders.decoder import Decoder
from manta.workers.kept_weights import GROUPS, KEPT_BITS, describe_kept, group_of
from manta.workers.kernels import build, cpu_quantized_linear
from manta.workers.kernels.cpu_linear import PackedLinear
from manta.workers.kernels.cpu_quantized_linear import PackedQuantizedLinear
from manta.workers.kernels.linears import TorchLinear
from manta.workers.kernels.quantized_reference import TorchQuantizedLinear
from manta.workers.kernels.rounding import round_weight
from manta.workers.kernels.weights import LinearWeight, WeightContent
from manta.workers.models.model_config import ModelError
from manta.workers.platforms import choose_platform, cpu_linears
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.torch_worker import TorchWorker
from tests.checkpoints import checkpoint
from tests.workers.cpu_forms import TORCH, in_form
from tests.workers.test_models import random_tokens
from tests.workers.test_quantised_linear import logits_of
from tests.workers.test_shared_weights import files, needs_shared_weights
from tests.workers.thread_group import ThreadGroup

ROUNDED = ("int8", "int4")
needs_kernels = pytest.mark.skipif(build.load_library() is None, reason="no C++ compiler")


def load(folder: pathlib.Path, weights: str, dtype: str = "float32") -> Decoder:
    model = load_model(folder, load_model_config(folder), dtype, choose_platform("cpu", None), weights=weights)
    assert isinstance(model, Decoder)
    return model


def linears(model: Decoder) -> list[object]:
    found: list[object] = [model.weights.head]
    for layer in model.weights.layers:
        found += [layer.mixer.qkv, layer.mixer.output, layer.mlp.gated, layer.mlp.down]
    return found


def greedy(folder: pathlib.Path, **options: object) -> list[list[int]]:
    llm = LLM(str(folder), kv_cache_bytes=1 << 22, **options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [random_tokens(length, seed=length) for length in (3, 20, 41)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.007), (4, 0.085)])
def test_rounding_errs_as_the_manual_says(bits: int, bound: float) -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    rounded = round_weight(weight.bfloat16(), bits)
    assert rounded.scales.shape == (256, 1024 // GROUPS[bits])
    assert torch.equal(rounded.scales, rounded.scales.half().float())
    limit = 1 << (bits - 1)
    assert -limit <= rounded.values.min() < rounded.values.max() <= limit - 1
    error = (rounded.dequantized(torch.float32) - weight).norm() / weight.norm()
    assert bound / 2 < error < bound


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_are_zero_tiny_or_not_finite(bits: int) -> None:
    weight = torch.randn(4, 256)
    weight[0], weight[1] = 0, weight[1] * 1e-12
    weight[3, 7] = float("nan")
    rounded = round_weight(weight, bits).dequantized(torch.float32)
    assert torch.equal(rounded[:2], torch.zeros(2, 256))
    assert torch.isfinite(rounded[2]).all()
    assert rounded[3].isnan().any()


def test_groups_divide_the_inputs_or_hold_all() -> None:
    assert [group_of(inputs, 8) for inputs in (896, 4864, 96, 40, 8, 7, 1)] == [128, 128, 32, 8, 8, 7, 1]
    assert [group_of(inputs, 4) for inputs in (896, 4864, 96, 40, 8, 7, 1)] == [32, 32, 32, 8, 8, 7, 1]


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ROUNDED)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_whole_models_give_torchs_bits(family: str, weights: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(family, attention_bias=True) if family == "llama" else checkpoint(family)
    model = load(folder, weights, dtype)
    assert all(isinstance(linear, PackedQuantizedLinear) for linear in linears(model))
    assert len(model.compiled.called_back) == 0  # type: ignore[union-attr]
    by_kernels = logits_of(folder, model, dtype)
    monkeypatch.setattr(cpu_quantized_linear, "pack", lambda *arguments, **options: None)
    monkeypatch.setattr(CpuPlatform, "shared_linears", _share_nothing)
    fallback = load(folder, weights, dtype)
    assert all(isinstance(linear, TorchQuantizedLinear) for linear in linears(fallback))
    assert torch.equal(logits_of(folder, fallback, dtype), by_kernels)


def _share_nothing(platform: CpuPlatform, content: WeightContent) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@pytest.mark.parametrize("weights", ROUNDED)
def test_without_a_compiler_torch_draws_the_same_tokens(weights: str) -> None:
    folder = checkpoint("llama")
    with in_form(TORCH):
        by_torch = greedy(folder, weights=weights, dtype="float32")
    assert greedy(folder, weights=weights, dtype="float32") == by_torch


@pytest.mark.parametrize(("weights", "bound"), [("int8", 0.06), ("int4", 0.5)])
def test_logits_stay_near_those_of_floating_point(weights: str, bound: float) -> None:
    folder = checkpoint("qwen3")
    exact, rounded = logits_of(folder, load(folder, "auto")), logits_of(folder, load(folder, weights))
    error = float((rounded - exact).norm() / exact.norm())
    assert bound / 20 < error < bound


@needs_kernels
def test_weights_take_half_and_quarter_of_bfloat16() -> None:
    """By the packed bytes, and by the plan: 1.02 bytes a weight, or 0.57 with a scale in each group of 32."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
    folder = checkpoint("llama", dtype="bfloat16", **sizes)
    packed = {}
    for weights in ("auto", *ROUNDED):
        found = linears(load(folder, weights, "bfloat16"))
        assert all(isinstance(linear, PackedLinear | PackedQuantizedLinear) for linear in found)
        head, *layers = (linear.packed.nbytes for linear in found)  # type: ignore[attr-defined]
        packed[weights] = head, sum(layers)
    for bits, (weights, bound) in {8: ("int8", 0.508), 4: ("int4", 0.282)}.items():
        assert packed[weights][1] <= bound * packed["auto"][1]
        assert packed[weights][0] <= 0.508 * packed["auto"][0], "the head keeps 8 bits"
        assert KEPT_BITS[weights].layers == bits
    config = load_model_config(folder)
    whole = weight_bytes(folder, "bfloat16", config)
    for weights in ROUNDED:
        saved = sum(packed["auto"]) - sum(packed[weights])
        assert weight_bytes(folder, "bfloat16", config, weights) == whole - saved


@pytest.mark.parametrize("weights", ROUNDED)
def test_a_tied_head_is_rounded_alone(weights: str) -> None:
    folder = checkpoint("qwen2")
    tokens = torch.arange(5, 25)
    embedded = [load(folder, kept).weights.embedding(tokens) for kept in ("auto", weights)]
    assert torch.equal(*embedded)


@needs_shared_weights
@pytest.mark.parametrize("weights", ROUNDED)
def test_processes_share_rounded_weights(weights: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    before = files()
    first = load(folder, weights)
    assert len(files() - before) == 1
    monkeypatch.setattr(PackedQuantizedLinear, "_pack", lambda *_: pytest.fail("it is packed again"))
    monkeypatch.setattr(cpu_linears, "round_weight", lambda *_: pytest.fail("it is rounded again"))
    second = load(folder, weights)
    assert torch.equal(logits_of(folder, first), logits_of(folder, second))
    assert len(files() - before) == 1
    monkeypatch.undo()
    others = load(folder, "auto")
    assert len(files() - before) == 2
    del first, second, others


@pytest.mark.parametrize("weights", ROUNDED)
def test_two_ranks_compute_the_model_of_one(weights: str) -> None:
    """The groups of a rank's share are the model's, because the width of a share is a multiple of theirs."""
    folder = checkpoint("llama", intermediate_size=256, hidden_size=256)
    config = load_model_config(folder)
    expected = logits_of(folder, load(folder, weights))

    def run(group: ThreadGroup) -> torch.Tensor:
        platform = choose_platform("cpu", 1)
        model = load_model(folder, config, "float32", platform, group=group, weights=weights)
        assert isinstance(model, Decoder)
        return logits_of(folder, model)

    with ThreadPoolExecutor(2) as pool:
        found, _ = pool.map(run, ThreadGroup.of(2))
    assert (found - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("weights", ROUNDED)
def test_a_rounded_draft_keeps_the_targets_tokens(weights: str) -> None:
    speculative = {"proposers": ["draft"], "draft_model": str(checkpoint("qwen3")), "adaptive": False}
    folder = checkpoint("llama")
    assert greedy(folder, weights=weights, speculative=speculative, dtype="float32") == greedy(
        folder, weights=weights, dtype="float32"
    )


def test_a_model_that_transformers_runs_is_rounded_too() -> None:
    folder = checkpoint("gpt_neox")
    exact, rounded = greedy(folder, dtype="float32"), greedy(folder, weights="int8", dtype="float32")
    assert [len(each) for each in rounded] == [24] * 3
    config = load_model_config(folder)
    assert weight_bytes(folder, "float32", config, "int8") < 0.7 * weight_bytes(folder, "float32", config)
    assert exact[0][:1] == rounded[0][:1]


@pytest.mark.usefixtures("trials_here")
def test_what_is_kept_how_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint("llama")
    words = "int4 in groups of 32, the head int8 in groups of 128; embedding and norms unchanged"
    assert describe_kept("int4") == words
    assert describe_kept("auto") is None
    assert main(["check", str(folder), "--set", "engine.weights=int4"]) == 0
    assert words in capsys.readouterr().out
    worker = TorchWorker(EngineConfig(model=str(folder), weights="int4", kv_cache_bytes=1 << 20))
    assert f"as float32, weights {words}, on cpu" in model_message(worker.info)


@pytest.mark.usefixtures("trials_here")
def test_a_plan_counts_what_is_kept() -> None:
    folder = checkpoint("llama", hidden_size=256, intermediate_size=512)
    report = check_model(EngineConfig(model=str(folder), dtype="bfloat16", weights="int4"))
    assert report.weight_bytes < 0.5 * weight_bytes(folder, "bfloat16")


def test_a_wrong_value_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"engine\.weights.*int2"):
        load_config(None, {"engine.weights": "int2"})


def test_a_device_without_such_kernels_refuses() -> None:
    engine = EngineConfig(model=str(checkpoint("llama")), device="tpu", weights="int8")
    with pytest.raises(ModelError, match="weights int8 is for CPUs and CUDA GPUs, and a TPU has no kernels"):
        check_machine(engine)


def test_an_odd_gate_is_a_separate_linear() -> None:
    weight = LinearWeight("gate", torch.randn(80, 64), None, torch.float32, gated=True)
    x = torch.randn(7, 64)
    exact = CpuPlatform(None).make_linear(weight).forward(x)
    rounded = CpuPlatform(None).make_linear(
        LinearWeight("gate", weight.weight, None, torch.float32, gated=True, rounded_to=8)
    )
    assert not isinstance(rounded, TorchLinear)
    assert (rounded.forward(x) - exact).norm() < 0.03 * exact.norm()
