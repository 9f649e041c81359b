"""E4M3 checkpoints on a platform that multiplies by them: the logits are those of transformers with the weights that
the numbers stand for and activations rounded by torch; ranks get shares of the same weights.
"""

from __future__ import annotations

import dataclasses
import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from manta.cluster.cli.check import check_model
from manta.cluster.config import EngineConfig
from manta.workers.checkpoints.linear_reader import stack
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels.layer_caches import layer_caches
from manta.workers.kernels.linears import SummedLinear
from manta.workers.kernels.quantized_reference import round_to_float8
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kv_groups import one_group
from manta.workers.models.model_config import WeightFormat
from manta.workers.models.quantization import read_quantization
from manta.workers.models.raw_config import RawConfig
from manta.workers.platforms.cuda import CudaPlatform
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import checkpoint, on_one_thread, reference_model
from tests.quantised_checkpoints import fp8, fp8_config, of_layers, quantised_pair
from tests.workers.kernels.test_triton_launches import Launches
from tests.workers.test_quantised_formats import FORMATS, Recorder
from tests.workers.thread_group import ThreadGroup
from tests.workers.triton_device import DEVICE

TOKENS = [5, 77, 130, 9, 8]


class KeepsFloat8(Recorder):
    keeps_float8 = True


def reference_logits(dense: pathlib.Path, group: int | None) -> torch.Tensor:
    """transformers' logits, with the inputs of each layer's linears rounded by groups, or by rows."""

    def rounded(module: torch.nn.Linear, arguments: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = arguments
        rows = round_to_float8(x.flatten(0, -2), group or module.in_features)
        return rows.dequantized(module.in_features).float().view_as(x)

    model = reference_model(dense)
    linears = [each for name, each in model.named_modules() if name.endswith("_proj")]
    hooks = [each.register_forward_pre_hook(rounded) for each in linears]
    try:
        with on_one_thread(), torch.inference_mode():
            return model(torch.tensor([TOKENS])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()


def load(folder: pathlib.Path, weights: str = "auto") -> Decoder:
    model = load_model(folder, load_model_config(folder), "float32", CudaPlatform(DEVICE), weights=weights)
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder) -> torch.Tensor:
    platform, num_blocks = CudaPlatform(DEVICE), 2
    blocks = np.arange(num_blocks, dtype=np.int32)[None]
    metadata = platform.build_metadata(QueryTokens(np.array([0]), np.array([len(TOKENS)]), blocks, 16))
    kv = platform.allocate_kv(model.config, num_blocks, 16, torch.float32)
    hidden = model.forward(
        torch.tensor(TOKENS, device=DEVICE), metadata, layer_caches(kv, one_group(model.config.attends))
    )
    return model.compute_logits(hidden).cpu()


@pytest.mark.parametrize("block", [None, (32, 32)])
def test_logits_are_those_of_rounded_activations(block: tuple[int, int] | None, tmp_path: pathlib.Path) -> None:
    folder = checkpoint("llama", num_hidden_layers=2, attention_bias=True)
    quantised, dense = quantised_pair(folder, tmp_path, of_layers(fp8(block)), fp8_config(block))
    expected = reference_logits(dense, None if block is None else block[1])
    with torch.inference_mode():
        unrounded = reference_model(dense)(torch.tensor([TOKENS])).logits[0]
    assert (logits_of(load(quantised)) - expected).norm() < 0.01 * (unrounded - expected).norm()


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_norms_round_rows_with_the_decoders_bits(
    weights: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And two kernels fewer in a layer. The sums over ranks come where the decoder has them."""
    num_layers, launches = 1, Launches(monkeypatch)
    folder = checkpoint("llama", num_hidden_layers=num_layers)
    quantised, _ = quantised_pair(folder, tmp_path, of_layers(fp8((32, 32))), fp8_config((32, 32)))
    whole = load(quantised, weights)
    layers = [
        dataclasses.replace(
            layer,
            mixer=dataclasses.replace(layer.mixer, output=SummedLinear(layer.mixer.output, torch.neg)),
            mlp=dataclasses.replace(layer.mlp, down=SummedLinear(layer.mlp.down, lambda x: 2 * x)),
        )
        for layer in whole.weights.layers
    ]
    model = Decoder(whole.config, dataclasses.replace(whole.weights, layers=layers), CudaPlatform(DEVICE))
    launches.counts.clear()
    rounded = logits_of(model)
    num_rounded = launches.counts.total()
    model.compiled = None
    launches.counts.clear()
    assert torch.equal(logits_of(model), rounded)
    assert launches.counts.total() - num_rounded == 2 * num_layers
    assert not torch.equal(logits_of(whole), rounded)


def test_ranks_get_shares_of_float8(tmp_path: pathlib.Path) -> None:
    """Four ranks have 16 inputs of the attention's output each, so that blocks of 32 are cut."""
    folder = checkpoint("llama", num_hidden_layers=1)
    quantised, _ = quantised_pair(folder, tmp_path, of_layers(fp8((32, 32))), fp8_config((32, 32)))
    config, whole = load_model_config(quantised), KeepsFloat8()
    load_model(quantised, config, "float32", whole)
    shares = [KeepsFloat8() for _ in range(4)]
    for group, share in zip(ThreadGroup.of(4), shares, strict=True):
        load_model(quantised, config, "float32", share, group=group)
    for index, linear in enumerate(whole.linears):
        if linear.name == "lm_head":
            continue
        parts = [share.linears[index] for share in shares]
        assert all(each.quantized is not None and each.quantized.is_float8 for each in (linear, *parts))
        dense = [each.dense() for each in parts]
        if linear.gated:
            gates, ups = zip(*(each.chunk(2) for each in dense), strict=True)
            assert torch.equal(torch.cat([*gates, *ups]), linear.dense())
        elif linear.name.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat(dense, dim=1), linear.dense())


def test_a_platform_that_takes_float8_gets_it(tmp_path: pathlib.Path) -> None:
    """Where every block has all its inputs: 128 are not divided by 48, and 192 are."""
    name = "fp8, blocks that end inside"
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}
    quantised, dense = quantised_pair(
        checkpoint("llama", **sizes), tmp_path, FORMATS[name].quantise, FORMATS[name].config
    )
    config, platform, expected = load_model_config(quantised), KeepsFloat8(), Recorder()
    load_model(quantised, config, "float32", platform)
    load_model(dense, load_model_config(dense), "float32", expected)
    kept = []
    for linear, plain in zip(platform.linears, expected.linears, strict=True):
        torch.testing.assert_close(linear.dense(), plain.weight, atol=1e-6, rtol=1e-5)
        if linear.quantized is not None:
            assert linear.quantized.is_float8
            kept.append(linear.name)
    assert kept == ["model.layers.0.mlp.down_proj"]
    tally = check_tensors(quantised, config)
    assert (tally.num_float8, tally.float8_bytes) == (128 * 192, 128 * 192 + 4 * 128 * 4)
    saved = 4 * 128 * 192 - tally.float8_bytes
    assert tally.num_bytes("float32", True) - tally.num_bytes("float32", True, keeps_float8=True) == saved


def test_int8_weights_are_rounded_from_dense_ones(tmp_path: pathlib.Path) -> None:
    quantised, _ = quantised_pair(checkpoint("llama"), tmp_path, of_layers(fp8(None)), fp8_config(None))
    for weights in ("int8", "dense"):
        platform = KeepsFloat8()
        load_model(quantised, load_model_config(quantised), "float32", platform, weights=weights)
        assert all(linear.quantized is None for linear in platform.linears)


def test_check_says_that_float8_is_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, _ = quantised_pair(checkpoint("llama"), tmp_path, of_layers(fp8(None)), fp8_config(None))
    config = load_model_config(quantised)
    monkeypatch.setattr("manta.workers.platforms.choose_platform", lambda *options: CudaPlatform(DEVICE))
    trial = SimpleNamespace(seconds=0.1, kernels="", advice=None, unused_tensors=(), runs_in_one_call=True)
    monkeypatch.setattr("manta.cluster.cli.check._try_step", lambda *options: trial)
    report = check_model(EngineConfig(model=str(quantised), dtype="float32"))
    assert report.quantized is not None
    assert "21 matrices of 8-bit floats with one scale; kept in 8-bit floats, " in report.quantized
    assert report.weight_bytes == check_tensors(quantised, config).num_bytes("float32", True, keeps_float8=True)


def float8_format(activations: dict[str, Any] | None) -> WeightFormat:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    group = {"weights": weights, "targets": ["Linear"], "input_activations": activations}
    raw = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    format_ = read_quantization(RawConfig(raw, "config.json")).format_of("any")
    assert format_ is not None
    return format_


def test_only_checkpoints_made_for_it_round_activations() -> None:
    assert float8_format({"num_bits": 8, "type": "float", "dynamic": True}).has_float8_activations
    assert not float8_format({"num_bits": 8, "type": "int", "dynamic": True}).has_float8_activations
    assert not float8_format(None).has_float8_activations
    format_ = read_quantization(RawConfig(fp8_config(None), "config.json")).format_of("any")
    assert format_ is not None
    assert format_.has_float8_activations


def test_floats_and_integers_of_one_linear_become_dense() -> None:
    values = torch.randint(-8, 8, (4, 64), dtype=torch.int8)
    parts = [
        QuantizedWeight(values, torch.rand(4, 1)),
        QuantizedWeight(values.to(torch.float8_e4m3fn), torch.rand(4, 1)),
    ]
    stacked = stack(parts, torch.float32)
    assert torch.equal(stacked, torch.cat([part.dequantized(torch.float32) for part in parts]))
